//! Sample: the envelope of a case that is too large for the oracle, on some of its rows.
//!
//! A row of a result needs few other rows. The out, lse and dq of a query need the keys that it sees. Once out and
//! lse are saved, the dk and dv of a key need the queries that see it, and dsink needs no key at all. The rows that
//! one row needs form a problem in the same tensors, its *part*. The oracle answers and bounds a part as it does any
//! problem, at the cost of one row. On each side, [`ROWS_MAX`] rows are drawn, or fewer where [`PRODUCTS_MAX`] pays
//! for fewer. Half of them are the first or the last row of their sequence that sees something or is seen, since that
//! is where kernels go wrong. As many rows again are drawn that see nothing, or that nobody sees; these cost nothing.
//! dsink is judged whole.
//!
//! The identities compare the subject with itself, so a factor on all of a gradient escapes nearly every one of them.
//! The sample compares values. Where a subject hides its LSE, dk, dv and dsink are not examined, because the exact
//! LSE of every query would be needed. Where its D may be `Σ P·dP`, dk and dsink are not examined, because all keys of
//! every query would be needed.

use std::collections::BTreeSet;
use std::ops::Range;

use ndarray::s;
use seamproof_oracle::blocked::{self, Answer};
use seamproof_oracle::envelope::Model;
use seamproof_oracle::{
    Alignment, ForwardResults, Mask, Problem, ProblemError, ProblemFields, Run, Saved, Sequence, Side,
};

use super::bounds::{self, Comparison};
use super::diagnosis;
use crate::finding::{Finding, Place};
use crate::hash::mix;
use crate::ladder::evidence::{Evidence, Look};
use crate::subject::TensorName;
use crate::verdict::Margin;
use seamproof_oracle::sharding::{self as layout, RankLayout};

/// Largest number of visible pairs × query heads × head dimension for the drawn rows of a side. It takes some twenty
/// seconds on two cores, since all keys are converted to f64 for one query.
const PRODUCTS_MAX: u64 = 1 << 29;
/// Largest number of rows drawn on a side.
const ROWS_MAX: u64 = 32;
/// Constant that sets this draw of rows apart from other uses of the data seed.
const DRAW: u64 = 0x5a3b_1e5e;

/// Examines the drawn rows where the oracle is too expensive for the whole case: the forward of the queries first,
/// then the gradients.
pub(super) fn look(evidence: &Evidence<'_>, margin: &mut Margin) -> Look {
    match Sample::new(evidence).look(margin) {
        Ok(finding) => finding.into(),
        Err(error) => Look::Failed(format!("what a row needs is no problem: {error}")),
    }
}

/// Function that returns the part of a row of a sequence.
type OfRow = fn(&Problem, usize, usize) -> Result<Part, ProblemError>;
/// Function that examines the results that a part decides, and returns what is wrong with them.
type LookAt<'a> = fn(&mut Sample<'a>, &Part, &mut Margin) -> Option<Finding>;

struct Sample<'a> {
    evidence: &'a Evidence<'a>,
    model: Model,
    /// The subject's own lse, and the rows of its out that were widened ([`Sample::widen`]).
    saved: Saved,
}

impl<'a> Sample<'a> {
    fn new(evidence: &'a Evidence<'a>) -> Sample<'a> {
        let Evidence { backend, problem, first, .. } = *evidence;
        let model = Model::new(problem, backend.declaration().arithmetic, evidence.partition());
        let hidden = || ndarray::Array2::zeros(problem.lse_shape());
        let lse = first.lse.as_ref().map_or_else(hidden, |lse| lse.mapv(f64::from));
        Sample { evidence, model, saved: Saved { out: ndarray::Array3::zeros(problem.out_shape()), lse } }
    }

    fn look(mut self, margin: &mut Margin) -> Result<Option<Finding>, ProblemError> {
        let Evidence { problem, first, .. } = *self.evidence;
        let [queries, keys] = [Side::Q, Side::Kv].map(|side| match &self.evidence.judge.sampled {
            Some(sampled) => sampled.rows(problem, side),
            None => drawn(problem, side),
        });
        let has_gradients = first.gradients.is_some();
        let has_saved = has_gradients && first.lse.is_some();
        let looks: [(bool, &[_], OfRow, LookAt<'a>); 3] = [
            (true, &queries, Part::of_query, |sample, part, margin| sample.forward(part, margin)),
            (has_gradients, &queries, Part::of_query, |sample, part, margin| {
                sample.gradients(part, Some(Side::Q), margin)
            }),
            (has_saved, &keys, Part::of_key, |sample, part, margin| {
                sample.gradients(part, Some(Side::Kv), margin)
            }),
        ];
        for (_, rows, of_row, look_at) in looks.into_iter().filter(|(is_there, ..)| *is_there) {
            for &[sequence, row] in rows {
                let part = of_row(problem, sequence, row)?;
                if let Some(finding) = look_at(&mut self, &part, margin) {
                    return Ok(Some(finding));
                }
            }
        }
        if !has_saved || problem.learnable_sinks() == 0 || self.model.weighs_dots() {
            return Ok(None);
        }
        Ok(self.gradients(&Part::of_sinks(problem)?, None, margin))
    }

    /// Widens the rows of out that a part reads. All rows at once may be more than memory holds beside a query's keys.
    fn widen(&mut self, part: &Problem) {
        let out = &self.evidence.first.out;
        for row in part.sequences.iter().flat_map(|both| both.q.real_rows()) {
            self.saved.out.slice_mut(s![row, .., ..]).zip_mut_with(
                &out.slice(s![row, .., ..]),
                |to, from| {
                    *to = f64::from(*from);
                },
            );
        }
    }

    /// Returns the exact forward of a part.
    fn answer(&self, part: &Part) -> Answer<ForwardResults> {
        let ask = || blocked::forward(&part.problem, self.evidence.inputs, Some(&self.model));
        self.evidence.oracle(ask)
    }

    fn forward(&self, part: &Part, margin: &mut Margin) -> Option<Finding> {
        let Evidence { problem, inputs, first, .. } = *self.evidence;
        let (answer, layout) = (self.answer(part), layout::whole(&part.problem));
        let tensors = [TensorName::Lse, TensorName::Out];
        let mut finding = bounds::forward(&self.comparison(part, &layout), first, &answer, &tensors, margin)?;
        finding.place = part.whole(finding.place);
        diagnosis::explain(problem, inputs, first, &answer.exact, &mut finding);
        Some(finding)
    }

    /// Examines the gradients of a part that lie on a side; without a side, dsink.
    fn gradients(&mut self, part: &Part, side: Option<Side>, margin: &mut Margin) -> Option<Finding> {
        let Evidence { problem, inputs, first, .. } = *self.evidence;
        let tensors: &[TensorName] = match side {
            Some(Side::Q) => &[TensorName::Dq],
            Some(Side::Kv) if self.model.weighs_dots() => &[TensorName::Dv],
            Some(Side::Kv) => &[TensorName::Dv, TensorName::Dk],
            None => &[TensorName::Dsink],
        };
        let mut lse_error = None;
        if first.lse.is_none() {
            let forward = self.answer(part);
            self.saved.lse = forward.exact.lse;
            lse_error = forward.bound.map(|bound| bound.worst.lse);
        }
        self.widen(&part.problem);
        let saved = (&self.saved, lse_error.as_ref());
        let ask = || blocked::backward_of(&part.problem, inputs, saved, side, &self.model);
        let answer = self.evidence.oracle(ask);
        let layout = layout::whole(&part.problem);
        let compare = self.comparison(part, &layout);
        let mut runs = self.evidence.gradient_runs().into_iter();
        let (gradients, mut finding) = runs.find_map(|gradients| {
            Some((gradients, bounds::backward(&compare, gradients, &answer, tensors, margin)?))
        })?;
        finding.place = part.whole(finding.place);
        self.widen(problem);
        let exact = (&self.saved, &answer.exact);
        diagnosis::explain_gradient(problem, inputs, gradients, exact, &mut finding);
        Some(finding)
    }

    fn comparison<'b>(&self, part: &'b Part, layout: &'b RankLayout) -> Comparison<'b> {
        Comparison { problem: &part.problem, layout, ratio: self.evidence.judge.ratio }
    }
}

/// A problem in the tensors of the whole problem, with everything that a row needs.
struct Part {
    problem: Problem,
    /// Sequence and position of the row; `None` for all rows.
    row: Option<[usize; 2]>,
}

impl Part {
    /// Returns the part of one query: the query, and the keys up to the last that it sees.
    fn of_query(problem: &Problem, sequence: usize, query: usize) -> Result<Part, ProblemError> {
        let both = problem.sequences[sequence];
        let seen = problem.mask.visible(query, both.q.len, both.kv.len);
        // With this alignment the only query sits on the last key, and sees this many keys to the left.
        let left = u32::try_from(seen.len().saturating_sub(1)).ok();
        let mask = Mask { left, right: Some(0), align: Alignment::BottomRight };
        let kv = Run { len: seen.end, span: seen.end, ..both.kv };
        let part = Sequence { q: Run::packed(both.q.row(query), 1, 1), kv, ..both };
        Part::new(problem, vec![part], mask, Some([sequence, query]))
    }

    /// Returns the part of one key: the key and the queries that see it. They are neighbours, since each query sees
    /// the interval of the one before, moved by one.
    fn of_key(problem: &Problem, sequence: usize, key: usize) -> Result<Part, ProblemError> {
        let both = problem.sequences[sequence];
        let sees = |i: &usize| problem.mask.visible(*i, both.q.len, both.kv.len).contains(&key);
        let queries = ends((0..both.q.len).find(sees), (0..both.q.len).rfind(sees));
        let offset = both.q.offset + both.q.step * queries.start;
        let q = Run { offset, len: queries.len(), span: queries.len(), ..both.q };
        let part = Sequence { q, kv: Run::packed(both.kv.row(key), 1, 1), ..both };
        Part::new(problem, vec![part], Mask::FULL, Some([sequence, key]))
    }

    /// Returns the part of the sinks: every query, and no key.
    fn of_sinks(problem: &Problem) -> Result<Part, ProblemError> {
        let without_keys = |both: &Sequence| Sequence { kv: Run { len: 0, span: 0, ..both.kv }, ..*both };
        let sequences = problem.sequences.iter().map(without_keys).collect();
        Part::new(problem, sequences, Mask::FULL, None)
    }

    fn new(
        problem: &Problem,
        sequences: Vec<Sequence>,
        mask: Mask,
        row: Option<[usize; 2]>,
    ) -> Result<Part, ProblemError> {
        let fields = ProblemFields { sequences, mask, ..problem.clone().into() };
        Ok(Part { problem: Problem::new(fields)?, row })
    }

    /// Returns a place of the part as a place of the problem.
    fn whole(&self, place: Place) -> Place {
        match self.row {
            Some([sequence, row]) => Place { sequence: Some(sequence), row: Some(row), ..place },
            None => place,
        }
    }
}

fn ends(first: Option<usize>, last: Option<usize>) -> Range<usize> {
    first.zip(last).map_or(0..0, |(first, last)| first..last + 1)
}

/// Returns the drawn rows of a side, by sequence and position.
fn drawn(problem: &Problem, side: Side) -> Vec<[usize; 2]> {
    let longest = problem.sequences.iter().map(|both| both.q.len.max(both.kv.len)).max().unwrap_or(0);
    let row = (longest * problem.heads.q * problem.dims.qk.max(problem.dims.v)).max(1) as u64;
    let count = (PRODUCTS_MAX / row).clamp(1, ROWS_MAX);
    let seed = mix(mix(problem.data_seed ^ DRAW) + side as u64);
    let (mut seams, mut connected, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for (index, sequence) in problem.sequences.iter().enumerate() {
        let within = connected_rows(problem, sequence, side);
        seams.extend(
            within.clone().next().into_iter().chain(within.clone().skip(1).last()).map(|row| [index, row]),
        );
        for position in 0..layout::run_of(sequence, side).len {
            let rows = if within.contains(&position) { &mut connected } else { &mut others };
            rows.push([index, position]);
        }
    }
    let half = count.div_ceil(2);
    let rows = [(seams, half), (connected, half), (others, count)];
    let drawn: BTreeSet<_> = rows.iter().flat_map(|(rows, count)| draw(rows, *count, seed)).collect();
    drawn.into_iter().collect()
}

/// A sample that is asked for: so many rows of each side, and those at the borders.
#[derive(Clone, Debug)]
pub struct Sampled {
    /// Number of rows to draw on each side.
    pub rows: u64,
    /// Seed of the draw.
    pub seed: u64,
    /// Layouts of the ranks, at whose borders rows are always examined.
    pub layouts: Vec<RankLayout>,
}

impl Sampled {
    /// Returns the drawn rows of a side by sequence and position, and with them the first and the last row of each
    /// sequence, of what it is connected to, and of each piece of it that a rank holds.
    fn rows(&self, problem: &Problem, side: Side) -> Vec<[usize; 2]> {
        let lengths = problem.sequences.iter().map(|both| layout::run_of(both, side).len).enumerate();
        let all: Vec<_> = lengths.flat_map(|(index, len)| (0..len).map(move |row| [index, row])).collect();
        let mut rows = draw(&all, self.rows, mix(mix(self.seed ^ DRAW) + side as u64));
        for (index, both) in problem.sequences.iter().enumerate() {
            let within = connected_rows(problem, both, side);
            for Range { start, end } in [0..layout::run_of(both, side).len, within] {
                rows.extend((start < end).then(|| [[index, start], [index, end - 1]]).into_iter().flatten());
            }
        }
        for placed in self.layouts.iter().flat_map(|layout| &layout.side(side).runs) {
            let position = |i: usize| [placed.sequence, placed.piece.start + i * placed.piece.step];
            if let Some(last) = placed.local.len.checked_sub(1) {
                rows.extend([position(0), position(last)]);
            }
        }
        rows.into_iter().collect()
    }
}

/// Draws `count` of these rows, or all where there are no more.
fn draw(rows: &[[usize; 2]], count: u64, seed: u64) -> BTreeSet<[usize; 2]> {
    let all = rows.len() as u64;
    let index = |n: u64| if all <= count { n } else { mix(seed.wrapping_add(n)) % all };
    (0..count.min(all)).map(|n| rows[index(n) as usize]).collect()
}

/// Returns the queries of a sequence that see a key, or the keys that a query sees. They are neighbours, since
/// intervals move by one.
fn connected_rows(problem: &Problem, sequence: &Sequence, side: Side) -> Range<usize> {
    let (lq, lk) = (sequence.q.len, sequence.kv.len);
    let seen = |i: usize| problem.mask.visible(i, lq, lk);
    let sees = |i: &usize| !seen(*i).is_empty();
    let queries = ends((0..lq).find(sees), (0..lq).rfind(sees));
    match side {
        Side::Q => queries,
        Side::Kv if queries.is_empty() => 0..0,
        Side::Kv => seen(queries.start).start..seen(queries.end - 1).end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{self, Draw, Profile};
    use seamproof_oracle::{Algorithm, Balance, ContextParallel};

    fn problems() -> impl Iterator<Item = Problem> {
        let limits = Profile::Quick.limits();
        (0..300).filter_map(move |case| match generate::draw(11, case, &limits) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        })
    }

    /// Returns the rows of k that a query of a part sees.
    fn rows_seen(part: &Problem, query: usize) -> Vec<usize> {
        let both = part.sequences[0];
        part.mask.visible(query, both.q.len, both.kv.len).map(|key| both.kv.row(key)).collect()
    }

    #[test]
    fn a_part_connects_the_rows_that_the_mask_connects() {
        for problem in problems() {
            for (index, both) in problem.sequences.iter().enumerate() {
                let visible = |i: usize| problem.mask.visible(i, both.q.len, both.kv.len);
                for i in 0..both.q.len {
                    let part = Part::of_query(&problem, index, i).expect("a part").problem;
                    let right: Vec<usize> = visible(i).map(|key| both.kv.row(key)).collect();
                    assert_eq!(rows_seen(&part, 0), right, "query {i} of {problem:?}");
                    assert_eq!(part.sequences[0].q.real_rows().collect::<Vec<_>>(), [both.q.row(i)]);
                }
                for key in 0..both.kv.len {
                    let part = Part::of_key(&problem, index, key).expect("a part").problem;
                    let readers = (0..both.q.len).filter(|&i| visible(i).contains(&key));
                    let right: Vec<usize> = readers.map(|i| both.q.row(i)).collect();
                    let rows: Vec<usize> = part.sequences[0].q.real_rows().collect();
                    assert_eq!(rows, right, "key {key} of {problem:?}");
                    assert!((0..rows.len()).all(|i| rows_seen(&part, i) == [both.kv.row(key)]));
                }
            }
        }
    }

    #[test]
    fn a_sample_that_is_asked_for_has_the_borders_of_every_rank() {
        let fields = ProblemFields {
            mask: Mask::CAUSAL,
            parallel: ContextParallel::over(2, Algorithm::Ring, Balance::DualChunk),
            ..ProblemFields::padded(&[(50, 64), (3, 4)], 8)
        };
        let problem = Problem::new(fields).expect("a problem");
        let layouts = layout::layouts(&problem).expect("it can be cut");
        let of = |rows, seed| Sampled { rows, seed, layouts: layouts.clone() }.rows(&problem, Side::Q);
        // The middle chunks follow each other on their rank, so they are one piece.
        let borders = [0, 15, 16, 47, 48, 49].map(|row| [0, row]);
        let all = [&borders[..], &[[1, 0], [1, 1], [1, 2]]].concat();
        assert_eq!(of(0, 1), all);
        let more = of(20, 1);
        assert!(all.iter().all(|row| more.contains(row)) && more.len() > all.len() + 5, "{more:?}");
        assert_ne!(more, of(20, 2), "the seed draws the rows");
        assert_eq!(of(60, 1).len(), 53, "all rows");
    }

    #[test]
    fn rows_are_drawn_that_are_connected_and_that_are_not() {
        let (mut connected, mut others, mut most) = (0, 0, 0);
        for problem in problems() {
            for side in [Side::Q, Side::Kv] {
                let rows = drawn(&problem, side);
                most = most.max(rows.len());
                for [index, position] in rows {
                    let both = problem.sequences[index];
                    let sees = |i: usize| problem.mask.visible(i, both.q.len, both.kv.len);
                    let is_connected = match side {
                        Side::Q => !sees(position).is_empty(),
                        Side::Kv => (0..both.q.len).any(|i| sees(i).contains(&position)),
                    };
                    assert_eq!(is_connected, connected_rows(&problem, &both, side).contains(&position));
                    *(if is_connected { &mut connected } else { &mut others }) += 1;
                }
            }
        }
        assert!(connected > 1_000 && others > 300, "{connected} {others}");
        assert!(most > ROWS_MAX as usize && most <= 2 * ROWS_MAX as usize, "{most}");
    }
}
