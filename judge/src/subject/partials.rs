//! Partial results: what each rank of a group stores of its own share, and what is made of the shares of all.

use seamproof_oracle::envelope::{MergeBy, Partition};
use seamproof_oracle::{Element, Format, Problem};
use serde::{Deserialize, Serialize};

/// Formats and merges of partial results of a subject that runs on several ranks. Nothing is said of how many there
/// are: the bounds take the most that a ring, an all-gather or an all-to-all of the group's size can have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Partials {
    /// Of a rank's outs for a part of the keys, and of the running out that they are merged into.
    pub merge: Stored,
    /// Formula by which outs are merged. Its operations are in f32, whatever is stored.
    pub merge_by: MergeBy,
    /// Of partial dq, dk and dv that are sent, or added up.
    pub wire: Stored,
}

/// A format of partial results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stored {
    /// f32.
    #[default]
    F32,
    /// That of the result, and bf16 where the result is in FP8: codes are decoded to be added.
    Io,
}

impl Partials {
    /// Returns how a problem's sums are cut: one tile on one rank, and on several the joints of the group besides.
    pub fn partition(self, problem: &Problem) -> Partition {
        let single = Partition::single(problem.rows.q, problem.rows.kv);
        let of = |stored: Stored, element: Element| match stored {
            Stored::F32 => Format::F32,
            Stored::Io if element.format.saturates() => Format::Bf16,
            Stored::Io => element.format,
        };
        let precision = &problem.precision;
        match problem.parallel.all_ranks() {
            0 | 1 => single,
            _ => {
                let (merge, wire) = (of(self.merge, precision.out), of(self.wire, precision.gradients));
                single.of_group(&problem.parallel, merge, self.merge_by, wire)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::ProblemFields;

    use super::*;
    use crate::generate::{self, Draw, Limits};

    #[test]
    fn joints_are_those_of_several_ranks_alone() {
        let drawn = (0..200).filter_map(|index| match generate::draw(4, index, &Limits::quick()) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        });
        let stored = Partials { merge: Stored::Io, merge_by: MergeBy::Difference, wire: Stored::F32 };
        let (alone, several): (Vec<_>, Vec<_>) = drawn.partition(|problem| problem.parallel.all_ranks() <= 1);
        assert!(!alone.is_empty() && !several.is_empty());
        for problem in alone {
            assert_eq!(stored.partition(&problem), Partition::single(problem.rows.q, problem.rows.kv));
        }
        for problem in several {
            let Partition { merges, sums, .. } = stored.partition(&problem);
            assert!(merges.count > problem.parallel.all_ranks() && sums.count > problem.parallel.all_ranks());
            assert_eq!(merges.by, MergeBy::Difference);
            assert_eq!((merges.running, sums.format), (problem.precision.out.format, Format::F32));
            let mut fields = ProblemFields::from(problem);
            fields.precision.out = Format::E4m3.into();
            let merges = stored.partition(&Problem::new(fields).expect("a problem")).merges;
            assert_eq!((merges.running, merges.through), (Format::Bf16, Some(Format::Bf16)));
        }
    }
}
