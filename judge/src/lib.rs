//! The judge: is an attention kernel right?

pub mod calibrate;
pub mod case;
pub mod census;
pub mod evaluate;
pub mod exact;
pub mod files;
pub mod finding;
pub mod generate;
pub mod hash;
pub mod identity;
pub mod ladder;
pub mod layout;
pub mod profile;
pub mod prose;
pub mod shrink;
pub mod strategy;
pub mod subject;
pub mod subjects;
pub mod values;
pub mod verdict;
