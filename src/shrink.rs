//! STUB of the command line's branch: the real shrinker is a colleague's. Drop this file when merging.
#![allow(missing_docs)]

use seamproof_oracle::{Problem, ProblemFields};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(usize);

pub fn size(problem: &Problem) -> Size {
    Size(problem.sequences.len())
}

pub struct Shrunk {
    pub problem: Problem,
    pub evaluations: usize,
    pub accepted: Vec<(&'static str, usize)>,
    pub complete: bool,
}

pub fn shrink(start: &Problem, budget: usize, mut fails: impl FnMut(&Problem) -> bool) -> Shrunk {
    let mut shrunk =
        Shrunk { problem: start.clone(), evaluations: 0, accepted: vec![("all", 0)], complete: false };
    loop {
        let before = shrunk.accepted[0].1;
        for index in (0..shrunk.problem.sequences.len()).rev() {
            if shrunk.evaluations == budget {
                return shrunk;
            }
            let mut fields: ProblemFields = shrunk.problem.clone().into();
            fields.sequences.remove(index);
            let candidate = Problem::new(fields).expect("dropping a sequence keeps a problem valid");
            shrunk.evaluations += 1;
            if fails(&candidate) {
                shrunk.problem = candidate;
                shrunk.accepted[0].1 += 1;
            }
        }
        if shrunk.accepted[0].1 == before {
            shrunk.complete = true;
            return shrunk;
        }
    }
}
