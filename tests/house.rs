//! The architecture, kept by tests.
