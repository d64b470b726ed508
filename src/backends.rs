//! STUB of the command line's branch: the real registry is the lead's. Drop this file when merging.
#![allow(missing_docs)]

use std::collections::BTreeMap;

use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::{Format, Inputs, Problem, Sink};

use crate::backend::*;

pub const NAMES: &[&str] = &["emulated"];

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    #[error("'{0}' is no backend; use emulated")]
    Unknown(String),
    #[error("subject.options.{0} is no option of this backend")]
    Option(String),
}

struct Stub {
    fault: bool,
}

pub fn by_name(name: &str, options: &BTreeMap<String, String>) -> Result<Box<dyn Backend>, BackendError> {
    if name == "canary" {
        return Ok(canary());
    }
    if name != "emulated" {
        return Err(BackendError::Unknown(name.to_owned()));
    }
    if let Some(option) = options.keys().find(|option| *option != "tile_q") {
        return Err(BackendError::Option(option.clone()));
    }
    Ok(Box::new(Stub { fault: false }))
}

pub fn draw_options(_name: &str, seed: u64) -> BTreeMap<String, String> {
    BTreeMap::from([("tile_q".to_owned(), (1 + seed % 16).to_string())])
}

pub fn canary() -> Box<dyn Backend> {
    Box::new(Stub { fault: true })
}

impl Backend for Stub {
    fn name(&self) -> &str {
        if self.fault { "canary" } else { "emulated" }
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            formats: vec![Format::Bf16],
            weight_formats: vec![Format::Bf16],
            head_dims: 1..=256,
            algorithms: vec!["single"],
            sub_groups: false,
            softcap: true,
            sinks: vec![Sink::None],
        }
    }
    fn padding(&self) -> PaddingContract {
        PaddingContract { inputs: PaddingInputs::Anything, outputs: PaddingOutputs::Zero }
    }
    fn accumulation(&self) -> Accumulation {
        Accumulation::F32Serial
    }
    fn partition(&self, _: &Problem) -> Partition {
        Partition {}
    }
    fn run(&self, problem: &Problem, _: &Inputs) -> Result<Outputs, RunError> {
        if self.fault && problem.tokens() > 3 {
            return Err(RunError::Crash("planted".to_owned()));
        }
        if problem.dims.qk == 13 {
            return Err(Refusal::World.into());
        }
        Ok(Outputs { ranks: Vec::new(), damage: Vec::new() })
    }
}
