//! The campaign: generate → run → judge → shrink → record.

pub mod accuracy;
pub mod backends;
pub mod bench;
pub mod campaign;
pub mod cli;
pub mod explain;
pub mod faults;
pub mod fuzz;
pub mod geometry;
pub mod large;
pub mod look;
pub(crate) mod nearest;
pub(crate) mod nightly;
pub mod paste;
pub mod power;
pub mod prove;
pub mod record;
pub mod recording;
pub mod replay;
pub(crate) mod report;
pub mod script;
pub mod worker;
