//! STUB of the command line's branch: the real census is a colleague's. Drop this file when merging.
#![allow(missing_docs)]

use seamproof_oracle::Problem;

#[derive(Clone, Debug, Default)]
pub struct Census {
    cases: u64,
    malformed: u64,
}

#[derive(Clone, Debug)]
pub struct MissedFloor(String);

impl std::fmt::Display for MissedFloor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Census {
    pub fn new() -> Census {
        Census::default()
    }
    pub fn add(&mut self, _: &Problem) {
        self.cases += 1;
    }
    pub fn add_malformed(&mut self, _: &str) {
        self.malformed += 1;
    }
    pub fn merge(&mut self, other: &Census) {
        self.cases += other.cases;
        self.malformed += other.malformed;
    }
    pub fn missed(&self, _: crate::generate::Profile) -> Vec<MissedFloor> {
        if self.cases < 100 { vec![MissedFloor(format!("cases {} of 100", self.cases))] } else { Vec::new() }
    }
}

impl std::fmt::Display for Census {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "census   cases {}  malformed {}", self.cases, self.malformed)
    }
}
