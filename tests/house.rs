//! The architecture, kept by tests: which room may import which, where a package, an environment variable or `unsafe`
//! may stand, that every file is listed and headed, and whose licences the house stands on.
//!
//! Each rule is a table in the file that checks it; a table's exception carries its reason.

#[path = "house/files.rs"]
mod files;
#[path = "house/licences.rs"]
mod licences;
#[path = "house/manifest.rs"]
mod manifest;
#[path = "house/rooms.rs"]
mod rooms;
#[path = "house/source.rs"]
mod source;
#[path = "house/variables.rs"]
mod variables;
