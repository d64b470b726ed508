//! What a subject is asked in place of a draw. Campaigns and fuzz targets all ask this one function.

use seamproof_oracle::Problem;

use crate::generate::{self, Draw, Limits, Malformed, RawProblem};
use crate::subject::Declaration;

/// Question to a subject, or to validation alone.
#[derive(Clone, Debug, PartialEq)]
pub enum Asked {
    /// A problem that the subject's table takes: the drawn one, or the nearest to it.
    Problem(Problem),
    /// A problem that the subject's table refuses. It is asked on purpose, to see the refusal.
    Probe(Problem),
    /// Fields that no problem can have. No subject sees them.
    Malformed(Malformed),
}

impl Asked {
    /// Returns the question that integers stand for. A planted unsupported problem is a probe, where the subject
    /// refuses by itself and its table does not take the problem. Every other problem is fitted.
    pub fn of(raw: &RawProblem, limits: &Limits, declaration: &Declaration) -> Asked {
        let problem = match generate::fixup(raw, limits) {
            Draw::Problem(problem) => problem,
            Draw::Malformed(malformed) => return Asked::Malformed(malformed),
        };
        let table = &declaration.table;
        if declaration.refuses && raw.is_unsupported() && table.refusal(&problem).is_some() {
            return Asked::Probe(problem);
        }
        Asked::Problem(table.asked(problem))
    }

    /// Returns the question of case `index` of campaign `seed`.
    pub fn drawn(seed: u64, index: u64, limits: &Limits, declaration: &Declaration) -> Asked {
        Asked::of(&generate::draw_raw(seed, index, limits), limits, declaration)
    }

    /// Returns the problem inside the table, if there is one.
    pub fn inside(self) -> Option<Problem> {
        match self {
            Asked::Problem(problem) => Some(problem),
            Asked::Probe(_) | Asked::Malformed(_) => None,
        }
    }
}
