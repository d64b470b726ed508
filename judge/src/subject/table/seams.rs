//! What rows of one tensor show besides the sequences' own rows.

use seamproof_oracle::{Problem, Run, Sequence};

use super::Layouts;

/// Properties of the rows on one side of a problem, each of which a table may refuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seams {
    /// Whether a sequence owns rows past its real ones.
    pub(crate) padding: bool,
    /// Whether a row between two sequences belongs to none, or an empty one lies elsewhere than where its neighbour
    /// ends.
    pub(crate) gaps: bool,
    /// Whether the first sequence in memory begins after row 0.
    pub(crate) first_offset: bool,
    /// Whether rows follow the last sequence.
    pub(crate) slack: bool,
    /// Whether rows of a sequence lie apart.
    pub(crate) steps: bool,
    /// Whether the order in memory is not the listed one.
    pub(crate) order: bool,
}

impl Seams {
    /// Returns what either side of a problem shows.
    pub(crate) fn of(problem: &Problem) -> Seams {
        let side = |run: fn(&Sequence) -> Run| problem.sequences.iter().map(run).collect::<Vec<_>>();
        let q = Seams::of_side(&side(|sequence| sequence.q), problem.rows.q);
        q.or(Seams::of_side(&side(|sequence| sequence.kv), problem.rows.kv))
    }

    /// Returns what the runs of one side show in a tensor of `rows` rows.
    pub(crate) fn of_side(runs: &[Run], rows: usize) -> Seams {
        let mut order: Vec<usize> = (0..runs.len()).collect();
        // An empty run may share its offset with the one behind it.
        order.sort_by_key(|&index| (runs[index].offset, runs[index].span));
        let first = order.first().map_or(0, |&index| runs[index].offset);
        let steps = runs.iter().any(|run| run.step > 1);
        let (mut end, mut apart) = (first, false);
        for run in order.iter().map(|&index| runs[index]) {
            apart |= run.offset != end;
            end = end.max(run.end().unwrap_or(rows));
        }
        let owned: usize = runs.iter().map(|run| run.span).sum();
        Seams {
            padding: runs.iter().any(|run| run.span > run.len),
            gaps: if steps { owned != end - first } else { apart },
            first_offset: first > 0,
            slack: rows > end,
            steps,
            order: !order.is_sorted(),
        }
    }

    fn or(self, other: Seams) -> Seams {
        Seams {
            padding: self.padding || other.padding,
            gaps: self.gaps || other.gaps,
            first_offset: self.first_offset || other.first_offset,
            slack: self.slack || other.slack,
            steps: self.steps || other.steps,
            order: self.order || other.order,
        }
    }

    /// Returns the properties that a table does not take, each by the name of its row.
    pub(super) fn refused(self, taken: &Layouts) -> impl Iterator<Item = super::Refusal> {
        use super::Refusal::{FirstOffset, Gaps, Order, Padding, Slack, Steps};
        let rows = [
            (Padding, self.padding && !taken.padding),
            (Gaps, self.gaps && !taken.gaps),
            (FirstOffset, self.first_offset && !taken.first_offset),
            (Slack, self.slack && !taken.slack),
            (Steps, self.steps && !taken.steps),
            (Order, self.order && !taken.order),
        ];
        rows.into_iter().filter(|(_, refused)| *refused).map(|(refusal, _)| refusal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_seam_is_told_from_the_others() {
        let side = |runs: &[Run], rows| Seams::of_side(runs, rows);
        let packed = [Run::packed(0, 2, 2), Run::packed(2, 0, 0), Run::packed(2, 3, 3)];
        let none = Seams::default();
        assert_eq!(side(&packed, 5), none);
        assert_eq!(side(&packed, 6), Seams { slack: true, ..none });
        assert_eq!(side(&[], 3), Seams { slack: true, ..none });
        assert_eq!(side(&[Run::packed(0, 2, 3), Run::packed(3, 1, 1)], 4), Seams { padding: true, ..none });
        assert_eq!(side(&[Run::packed(0, 2, 2), Run::packed(3, 1, 1)], 4), Seams { gaps: true, ..none });
        assert_eq!(side(&[Run::packed(1, 2, 2)], 3), Seams { first_offset: true, ..none });
        assert_eq!(side(&[Run::packed(1, 2, 2), Run::packed(0, 1, 1)], 3), Seams { order: true, ..none });
        let interleaved = [0, 1].map(|offset| Run { offset, step: 2, len: 2, span: 2 });
        assert_eq!(side(&interleaved, 4), Seams { steps: true, ..none });
        assert_eq!(side(&interleaved[..1], 3), Seams { steps: true, gaps: true, ..none });
        assert_eq!(side(&[Run::packed(0, 4, 4), Run::packed(2, 0, 0)], 4), Seams { gaps: true, ..none });
    }
}
