//! The campaign: generate → run → judge → shrink → record.

pub mod backend;
pub mod case;
pub mod shrink;
pub mod strategy;
pub mod verdict;
