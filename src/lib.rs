//! The campaign: generate → run → judge → shrink → record.

pub mod backend;
pub mod backends;
pub mod bench;
pub mod calibrate;
pub mod campaign;
pub mod case;
pub mod census;
pub mod cli;
pub mod evaluate;
pub mod exact;
pub mod explain;
pub mod faults;
pub mod fuzz;
pub mod generate;
pub mod judge;
pub mod layout;
pub mod power;
pub mod profile;
pub mod prose;
pub mod prove;
pub mod record;
pub mod shrink;
pub mod strategy;
pub mod values;
pub mod verdict;
pub mod worker;
