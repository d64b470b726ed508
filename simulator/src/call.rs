//! [`AttentionCall`]: the data that one kernel launch receives.
//!
//! A *segment* pairs a run of query rows with runs of key rows. Local query `i` sees local key `j` iff
//! `i + lo ≤ j ≤ i + hi`, where keys before the *prefix* need not meet the upper bound, nor *sink tokens* the lower
//! one. These four numbers and the runs express every mask, alignment, chunk and gathered buffer: a kernel needs no
//! other rule. Each document or chunk of a mask is a segment of its own. A call *owns* the `span` rows of its segments.
//!
//! A kernel that knows no prefix takes one as two bands: of queries ([`AttentionCall::bands`]) where it writes rows of
//! queries, and of keys ([`Segment::bands_of_keys`]) where it writes rows of keys. No row that is written is in both.
//! Sink tokens stay beside the bands.

use std::borrow::Cow;

use seamproof_oracle::sharding::{Piece, PlacedRun};
use seamproof_oracle::{Band, Intervals, Problem, Run, Sequence, Softmax, runs_of};

use crate::schedule::{Unseeing, pad, part, segments};

/// Query rows and the key rows that they may see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Query rows; padding rows are `q.padding_rows()`.
    pub q: Run,
    /// Key rows. The real rows of each run, one run after the other, are local keys 0, 1, ….
    pub kv: Vec<Run>,
    /// Smallest visible `j − i`; absent means unbounded.
    pub lo: Option<i64>,
    /// Largest visible `j − i`; absent means unbounded.
    pub hi: Option<i64>,
    /// First local key that `hi` may hide.
    pub prefix: usize,
    /// First local key that `lo` may hide.
    pub sink_tokens: usize,
}

impl Segment {
    /// Returns the number of local keys, over all runs.
    pub fn keys(&self) -> usize {
        self.kv.iter().map(|run| run.len).sum()
    }

    /// Whether any query sees a key.
    pub(crate) fn sees(&self) -> bool {
        let (Segment { lo, hi, prefix, sink_tokens, .. }, keys) = (self, self.keys());
        let seeing = |lo, hi, keys| !Band { lo, hi }.seeing(self.q.len, keys).is_empty();
        let [prefix, sink_tokens] = [prefix, sink_tokens].map(|end| keys.min(*end));
        seeing(*lo, *hi, keys)
            || seeing(*lo, None, prefix)
            || seeing(None, *hi, sink_tokens)
            || seeing(None, None, prefix.min(sink_tokens))
    }

    /// Returns the local keys that local query `i` sees.
    pub fn visible(&self, i: usize) -> Intervals {
        let keys = self.keys() as i64;
        let among = |key: i64| key.clamp(0, keys) as usize;
        let first = self.lo.map_or(0, |lo| (i as i64).saturating_add(lo));
        let reach = |hi| (i as i64).saturating_add(hi).saturating_add(1).max(self.prefix as i64);
        let end = among(self.hi.map_or(keys, reach));
        Intervals::new(0..self.sink_tokens.min(end), among(first)..end)
    }

    /// Returns the number of queries to which the prefix shows a key that their upper bound hides. They come first.
    fn widened(&self) -> usize {
        match (self.hi, self.prefix.min(self.keys())) {
            (None, _) | (_, 0) => 0,
            // A query whose upper bound is the last key of the prefix gains nothing.
            (Some(hi), prefix) => (prefix as i64 - 1).saturating_sub(hi).clamp(0, self.q.len as i64) as usize,
        }
    }

    /// Whether the prefix shows a key that the band does not, so that the segment is no band.
    pub fn is_widened(&self) -> bool {
        self.widened() > 0
    }

    /// Returns the segment as bands that share no query: queries which the prefix widens see keys of the prefix alone,
    /// without an upper bound, and all others their band. Padding comes last.
    pub fn bands(&self) -> Vec<Segment> {
        let widened = self.widened();
        if widened == 0 {
            return vec![Segment { prefix: 0, ..self.clone() }];
        }
        let mut rest = part(self.q, &(widened..self.q.len));
        pad(&mut rest, self.q, self.q.len);
        let moved = |bound: i64| bound.saturating_add(widened as i64);
        let [prefix, _] = cut(&self.kv, self.prefix);
        let first = Segment { q: part(self.q, &(0..widened)), kv: prefix, hi: None, prefix: 0, ..*self };
        let (lo, hi) = (self.lo.map(moved), self.hi.map(moved));
        let rest = Segment { q: rest, kv: self.kv.clone(), lo, hi, prefix: 0, ..*self };
        [first, rest].into_iter().filter(|band| band.q.span > 0).collect()
    }

    /// Returns the segment as bands that share no key: all queries see keys of the prefix without an upper bound, and
    /// the others by their band.
    pub fn bands_of_keys(&self) -> Vec<Segment> {
        if !self.is_widened() {
            return vec![Segment { prefix: 0, ..self.clone() }];
        }
        let prefix = self.prefix.min(self.keys());
        let moved = |bound: i64| bound.saturating_sub(prefix as i64);
        let [first, rest] = cut(&self.kv, prefix);
        let first = Segment { kv: first, hi: None, prefix: 0, ..*self };
        let (lo, hi) = (self.lo.map(moved), self.hi.map(moved));
        let sink_tokens = self.sink_tokens.saturating_sub(prefix);
        vec![first, Segment { kv: rest, lo, hi, prefix: 0, sink_tokens, ..*self }]
    }
}

/// Returns runs of keys, cut in front of a local key. Padding stays behind the real rows before it.
fn cut(runs: &[Run], key: usize) -> [Vec<Run>; 2] {
    let (mut before, mut behind, mut left) = (Vec::new(), Vec::new(), key);
    for &run in runs {
        let here = run.len.min(left);
        left -= here;
        if here == run.len {
            before.push(run);
        } else {
            let mut rest = part(run, &(here..run.len));
            pad(&mut rest, run, run.len);
            before.extend((here > 0).then(|| part(run, &(0..here))));
            behind.push(rest);
        }
    }
    [before, behind]
}

/// Treatment of the rows that a call owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowPolicy {
    /// Real rows are overwritten, and padding rows become zero (LSE −∞).
    Overwrite,
    /// Real rows are overwritten, and padding rows keep every bit.
    Leave,
}

/// One kernel launch over all heads.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionCall {
    /// The segments. A query row is in at most one of them.
    pub segments: Vec<Segment>,
    /// Scale, soft cap and sink.
    pub softmax: Softmax,
    /// Treatment of padding rows.
    pub policy: RowPolicy,
}

/// Reason why a call cannot be launched on tensors of the given rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// A run that does not fit its tensor.
    #[error("segment {segment}, {side} rows: {error}")]
    Run {
        /// Index of the segment.
        segment: usize,
        /// `q` or `kv`.
        side: &'static str,
        /// The error in the run.
        error: seamproof_oracle::RunLayoutError,
    },
    /// A query row in two segments.
    #[error("query row {row} is owned by two segments")]
    QueryRowOwnedTwice {
        /// The row.
        row: usize,
    },
    /// A scale or a softcap that cannot be a factor or a divisor.
    #[error("the {what} is {value}, and has to be a finite number above 0")]
    Factor {
        /// `scale` or `softcap`.
        what: &'static str,
        /// The value.
        value: String,
    },
}

impl AttentionCall {
    /// Returns the whole problem as one launch on one rank. Keys in pages are read where the table says, and keys that
    /// a sequence borrows in the rows of their lender.
    pub fn whole(problem: &Problem) -> AttentionCall {
        match &problem.pages {
            None => launch(problem, |kv| kv, |sequence, run| lent(problem, sequence, run)),
            Some(pages) => {
                AttentionCall::through(problem, |sequence, position| pages.row(sequence, position))
            }
        }
    }

    /// Returns the whole problem as one launch on one rank that reads each key in the row of a pool which `row`
    /// returns, given the sequence and the position. A launch does not own rows of the pool past the real ones.
    pub fn through(problem: &Problem, row: impl Fn(usize, usize) -> usize) -> AttentionCall {
        let positions = |kv: Run| Run::packed(0, kv.len, kv.len);
        launch(problem, positions, |sequence, Run { offset, len, .. }| {
            runs_of((offset..offset + len).map(|position| row(sequence, position)))
        })
    }

    /// Returns the call with each segment as [bands](Segment::bands): the same pairs of rows, by no other rule.
    pub fn bands(&self) -> Cow<'_, AttentionCall> {
        if self.segments.iter().all(|segment| segment.prefix == 0) {
            return Cow::Borrowed(self);
        }
        let segments = self.segments.iter().flat_map(Segment::bands).collect();
        Cow::Owned(AttentionCall { segments, ..self.clone() })
    }

    /// Checks every run against the tensors' rows, the single ownership of every query row, and the scale and softcap.
    pub fn check(&self, q_rows: usize, kv_rows: usize) -> Result<(), CallError> {
        for (what, factor) in [("scale", Some(self.softmax.scale)), ("softcap", self.softmax.softcap)] {
            if let Some(value) = factor.filter(|factor| !(factor.is_finite() && *factor > 0.0)) {
                return Err(CallError::Factor { what, value: value.to_string() });
            }
        }
        let mut owned = vec![false; q_rows];
        for (segment, Segment { q, kv, .. }) in self.segments.iter().enumerate() {
            q.check(q_rows).map_err(|error| CallError::Run { segment, side: "q", error })?;
            for run in kv {
                run.check(kv_rows).map_err(|error| CallError::Run { segment, side: "kv", error })?;
            }
            for row in q.real_rows().chain(q.padding_rows()) {
                if std::mem::replace(&mut owned[row], true) {
                    return Err(CallError::QueryRowOwnedTwice { row });
                }
            }
        }
        Ok(())
    }
}

/// Returns the rows in which a part of a sequence's keys lies: first those that it borrows, in the lender's rows.
fn lent(problem: &Problem, sequence: usize, run: Run) -> Vec<Run> {
    let own = problem.sequences[sequence].kv;
    let Some(shared) = problem.sharing.of(sequence) else { return vec![run] };
    let start = (run.offset - own.offset) / own.step;
    let borrowed = shared.keys.saturating_sub(start).min(run.len);
    if borrowed == 0 {
        return vec![run];
    }
    let mut rest = part(run, &(borrowed..run.len));
    pad(&mut rest, run, run.len);
    let lent = part(problem.sequences[shared.with].kv, &(start..start + borrowed));
    [lent, rest].into_iter().filter(|run| run.span > 0).collect()
}

/// Returns the whole problem as one launch. The keys of each sequence are the run that `keys` makes of its own, and a
/// part of them lies in the runs that `place` returns for it.
fn launch(
    problem: &Problem,
    keys: impl Fn(Run) -> Run,
    place: impl Fn(usize, Run) -> Vec<Run>,
) -> AttentionCall {
    let whole = |run: Run| Piece { start: 0, step: 1, span: run.span, at: 0 };
    let of_sequence = |(sequence, &Sequence { q, kv, .. }): (usize, &Sequence)| {
        let (placed, kv) = (PlacedRun { sequence, piece: whole(q), local: q }, keys(kv));
        let mut made = segments(&problem.mask, (q.len, kv.len), &placed, (&whole(kv), kv), Unseeing::Kept);
        for segment in &mut made {
            segment.kv = segment.kv.drain(..).flat_map(|run| place(sequence, run)).collect();
        }
        made
    };
    let segments = problem.sequences.iter().enumerate().flat_map(of_sequence).collect();
    AttentionCall { segments, softmax: problem.softmax, policy: RowPolicy::Overwrite }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns segments with every small bound and prefix, and with sink tokens, whose keys lie in several runs with padding.
    fn all() -> impl Iterator<Item = Segment> {
        let runs = |lens: [usize; 3]| {
            let places = [(20, 1), (3, 2), (40, 1)];
            let run = |((offset, step), len)| Run { offset, step, len, span: len + 2 };
            places.into_iter().zip(lens).map(run).collect::<Vec<Run>>()
        };
        let keys = [[0, 0, 0], [2, 0, 3], [1, 4, 0], [0, 1, 1]].map(runs);
        let bounds = || std::iter::once(None).chain((-4..6).map(Some));
        let shapes = keys.into_iter().flat_map(|kv| (0..6).map(move |len| (kv.clone(), len)));
        shapes.flat_map(move |(kv, len)| {
            let q = Run { offset: 7, step: 3, len, span: len + len % 2 };
            let banded = bounds().flat_map(move |lo| bounds().map(move |hi| (lo, hi)));
            banded.flat_map(move |(lo, hi)| {
                let kv = kv.clone();
                let widened = (0..8).flat_map(|prefix| [0, 3].map(|sink_tokens| (prefix, sink_tokens)));
                widened.map(move |(prefix, sink_tokens)| Segment {
                    q,
                    kv: kv.clone(),
                    lo,
                    hi,
                    prefix,
                    sink_tokens,
                })
            })
        })
    }

    /// Returns the pairs of rows that segments show, in order of queries, and of keys for each.
    fn shown<'a>(segments: impl IntoIterator<Item = &'a Segment>) -> Vec<(usize, usize)> {
        let of = |segment: &Segment| {
            let keys: Vec<usize> = segment.kv.iter().flat_map(Run::real_rows).collect();
            let of_query =
                |(i, row): (usize, usize)| segment.visible(i).map(move |j| (row, j)).collect::<Vec<_>>();
            let pairs = segment.q.real_rows().enumerate().flat_map(of_query);
            pairs.map(|(row, j)| (row, keys[j])).collect::<Vec<_>>()
        };
        segments.into_iter().flat_map(of).collect()
    }

    fn owned(runs: impl IntoIterator<Item = Run>) -> Vec<usize> {
        let mut rows: Vec<usize> =
            runs.into_iter().flat_map(|run| run.real_rows().chain(run.padding_rows())).collect();
        rows.sort_unstable();
        rows
    }

    #[test]
    fn bands_show_what_the_segment_shows_and_share_no_row_that_is_written() {
        let mut widened = 0;
        for segment in all() {
            let pairs = shown([&segment]);
            let [queries, keys] = [segment.bands(), segment.bands_of_keys()];
            assert!(queries.iter().chain(&keys).all(|band| band.prefix == 0), "{segment:?}");
            assert_eq!(shown(&queries), pairs, "{segment:?}");
            assert_eq!(owned(queries.iter().map(|band| band.q)), owned([segment.q]), "{segment:?}");
            let mut by_key = shown(&keys);
            by_key.sort_unstable();
            let mut sorted = pairs.clone();
            sorted.sort_unstable();
            assert_eq!(by_key, sorted, "{segment:?}");
            assert!(keys.iter().all(|band| band.q == segment.q), "{segment:?}");
            let rows = owned(keys.iter().flat_map(|band| band.kv.iter().copied()));
            assert_eq!(rows, owned(segment.kv.iter().copied()), "{segment:?}");
            let band = Segment { prefix: 0, ..segment.clone() };
            assert!(segment.is_widened() || pairs == shown([&band]), "{segment:?}");
            widened += usize::from(segment.is_widened());
        }
        assert!(widened > 1000, "{widened}");
    }

    #[test]
    fn a_call_of_bands_stays_as_it_is() {
        let call = |prefix| AttentionCall {
            segments: vec![Segment {
                q: Run::packed(0, 4, 5),
                kv: vec![Run::packed(0, 4, 4)],
                lo: None,
                hi: Some(0),
                prefix,
                sink_tokens: 0,
            }],
            softmax: Softmax { scale: 1.0, softcap: None, sink: seamproof_oracle::Sink::None },
            policy: RowPolicy::Overwrite,
        };
        assert!(matches!(call(0).bands(), Cow::Borrowed(_)));
        let bands = call(2).bands().into_owned().segments;
        let [first, rest] = &bands[..] else { panic!("{bands:?}") };
        assert_eq!(
            (first.q, &first.kv[..], first.hi),
            (Run::packed(0, 1, 1), &[Run::packed(0, 2, 2)][..], None)
        );
        assert_eq!((rest.q, rest.hi), (Run::packed(1, 3, 4), Some(1)));
    }
}
