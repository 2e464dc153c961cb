//! From generated cases to a test binary: a [`Suite`] of [`Case`]s, multiplied by devices, becomes libtest-mimic
//! trials; what a case measured is compared with its insta baseline within bands.
//!
//! Rules of this room:
//! - It knows names, numbers and files of numbers: no model, device or tensor. What is there and what is not is told
//!   by the caller ([`Availability`]), before any case runs.
//! - A case never names a device. The device comes last in the trial's name and is asked for with [`Cx::device`].
//! - A case that cannot run here is ignored when listed, and its reason is printed on stderr; `PHASEGATE_REQUIRE`
//!   turns it into a failure. A run that compared nothing fails.
//! - Gates first: a baseline is looked at only after its case has returned `Ok`.
//! - Nothing but the list goes to stdout under `--list`, and building the list opens nothing.

mod band;
mod baseline;
mod case;
mod device_label;
mod ignored;
mod meta;
mod numbers;
pub mod phases;
mod results;
mod selection;
mod suite;
mod trial;

pub use band::{Band, METRICS, band_of};
pub use case::{Case, Cx};
pub use device_label::DeviceLabel;
pub use libtest_mimic::{Arguments, Failed};
pub use numbers::Numbers;
pub use results::IdentityOf;
pub use suite::{Availability, Suite};
