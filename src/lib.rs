//! The campaign: generate → run → judge → shrink → record.

pub mod backend;
pub mod case;
pub mod census;
pub mod generate;
pub mod values;
pub mod verdict;
