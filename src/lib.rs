//! The campaign: generate → run → judge → shrink → record.

pub mod backend;
pub mod case;
pub mod census;
pub mod generate;
pub mod shrink;
pub mod strategy;
pub mod values;
pub mod verdict;
