//! Why a run is wrong: where it parts from the truth, launch by launch, and which named fault accounts for it.
//!
//! Judges nothing and prints nothing: a gate has failed before anybody comes here. Knows no phase, no prompt file and no
//! fixture; whoever asks brings model, prompt and devices along ([`Lab`]).

pub mod bisect;
pub mod court;
pub mod finite;
pub mod fit;
pub mod forward;
mod lab;
mod swap;
mod trace;

pub use lab::{Lab, Script};
pub use trace::{Segment, Stage, Trace};
