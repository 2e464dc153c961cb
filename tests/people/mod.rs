//! What people do to the program, and what they are told to do.

mod interrupt;
mod planted;
mod stale;
mod walkthrough;
