//! Rows of a tensor as a strip: what each stretch of rows holds.

use std::ops::Range;

use seamproof_oracle::sharding::PlacedRun;

/// Largest number of rows of a run with steps that are told apart. The rows of a longer one count as one stretch.
const APART_MAX: usize = 1 << 10;

/// Content of a stretch of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Real rows: positions of a sequence, at equal steps.
    Real { sequence: usize, start: usize, step: usize },
    /// Padding of a sequence.
    Padding { sequence: usize },
    /// Rows that no sequence owns.
    Free(Free),
    /// Rows of a sequence that lie apart, with rows of others between them.
    Apart { sequence: usize, step: usize, real: usize },
    /// Rows of several stretches, which are too many to draw.
    Several { stretches: usize, real: usize },
}

/// Place of rows that no sequence owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Free {
    /// Before the first sequence.
    Before,
    /// Between sequences.
    Gap,
    /// Behind the last sequence.
    Slack,
}

impl Free {
    /// Returns the name in texts.
    pub(super) fn name(self) -> &'static str {
        match self {
            Free::Before => "rows before the first sequence",
            Free::Gap => "gap",
            Free::Slack => "slack",
        }
    }
}

/// Consecutive rows with one content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) rows: Range<usize>,
    pub(super) holds: Content,
}

impl Stretch {
    /// Returns the number of real rows.
    pub(super) fn real(&self) -> usize {
        match self.holds {
            Content::Real { .. } => self.rows.len(),
            Content::Apart { real, .. } | Content::Several { real, .. } => real,
            Content::Padding { .. } | Content::Free(_) => 0,
        }
    }
}

/// Returns the stretches of a tensor of `rows` rows, at most `most` of them.
pub(super) fn stretches(rows: usize, runs: &[PlacedRun], most: usize) -> Vec<Stretch> {
    let mut owned: Vec<Stretch> = runs.iter().flat_map(of_run).collect();
    owned.sort_by_key(|stretch| (stretch.rows.start, stretch.rows.end));
    binned(with_free(rows, owned), most)
}

fn of_run(run: &PlacedRun) -> Vec<Stretch> {
    let PlacedRun { sequence, piece, local } = *run;
    let row = |index: usize| local.offset + local.step * index;
    let stretch = |rows: Range<usize>, at: usize, real: bool| {
        let holds = match real {
            true => Content::Real { sequence, start: piece.start + piece.step * at, step: piece.step },
            false => Content::Padding { sequence },
        };
        Stretch { rows, holds }
    };
    let whole = match local.span {
        0 => return Vec::new(),
        _ if local.step == 1 => {
            let [real, padding] = [0..local.len, local.len..local.span];
            vec![
                stretch(row(real.start)..row(real.end), 0, true),
                stretch(row(padding.start)..row(padding.end), local.len, false),
            ]
        }
        span if span <= APART_MAX => {
            (0..span).map(|at| stretch(row(at)..row(at) + 1, at, at < local.len)).collect()
        }
        span => {
            let holds = Content::Apart { sequence, step: local.step, real: local.len };
            vec![Stretch { rows: row(0)..row(span - 1) + 1, holds }]
        }
    };
    whole.into_iter().filter(|stretch| !stretch.rows.is_empty()).collect()
}

/// Returns the stretches with those between them that no sequence owns.
fn with_free(rows: usize, owned: Vec<Stretch>) -> Vec<Stretch> {
    let mut all = Vec::with_capacity(owned.len());
    let mut end = 0;
    for stretch in owned {
        if stretch.rows.start > end {
            let free = if end == 0 { Free::Before } else { Free::Gap };
            all.push(Stretch { rows: end..stretch.rows.start, holds: Content::Free(free) });
        }
        end = end.max(stretch.rows.end);
        all.push(stretch);
    }
    if rows > end {
        all.push(Stretch { rows: end..rows, holds: Content::Free(Free::Slack) });
    }
    all
}

/// Returns at most `most` stretches: where there are more, neighbours are taken together.
fn binned(stretches: Vec<Stretch>, most: usize) -> Vec<Stretch> {
    if stretches.len() <= most {
        return stretches;
    }
    let size = stretches.len().div_ceil(most.max(1));
    let of_bin = |bin: &[Stretch]| {
        let start = bin.iter().map(|stretch| stretch.rows.start).min().unwrap_or_default();
        let end = bin.iter().map(|stretch| stretch.rows.end).max().unwrap_or_default();
        let real = bin.iter().map(Stretch::real).sum();
        Stretch { rows: start..end, holds: Content::Several { stretches: bin.len(), real } }
    };
    stretches.chunks(size).map(of_bin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_oracle::Run;
    use seamproof_oracle::sharding::Piece;

    fn run(sequence: usize, local: Run) -> PlacedRun {
        PlacedRun { sequence, piece: Piece { start: 0, step: 1, span: local.span, at: 0 }, local }
    }

    #[test]
    fn every_row_is_in_one_stretch() {
        let runs = [run(0, Run::packed(2, 3, 4)), run(1, Run::packed(8, 0, 0)), run(2, Run::packed(9, 2, 2))];
        let got = stretches(12, &runs, 100);
        let of = |rows, holds| Stretch { rows, holds };
        assert_eq!(
            got,
            [
                of(0..2, Content::Free(Free::Before)),
                of(2..5, Content::Real { sequence: 0, start: 0, step: 1 }),
                of(5..6, Content::Padding { sequence: 0 }),
                of(6..9, Content::Free(Free::Gap)),
                of(9..11, Content::Real { sequence: 2, start: 0, step: 1 }),
                of(11..12, Content::Free(Free::Slack)),
            ]
        );
        assert_eq!(
            stretches(12, &runs, 2),
            [
                of(0..6, Content::Several { stretches: 3, real: 3 }),
                of(6..12, Content::Several { stretches: 3, real: 2 }),
            ]
        );
    }

    #[test]
    fn rows_that_lie_apart_interleave() {
        let apart = |offset| Run { offset, step: 2, len: 2, span: 2 };
        let rows = stretches(4, &[run(0, apart(0)), run(1, apart(1))], 10);
        let owners: Vec<_> = rows.iter().map(|stretch| stretch.holds).collect();
        let real = |sequence, start| Content::Real { sequence, start, step: 1 };
        assert_eq!(owners, [real(0, 0), real(1, 0), real(0, 1), real(1, 1)]);
    }
}
