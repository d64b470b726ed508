//! Sample: the envelope of a case that is too large for the oracle, on some of its rows.
//!
//! A row of a result needs few other rows. The out, lse and dq of a query need the keys that it sees. Once out and
//! lse are saved, the dk and dv of a key need the queries that see it, and dsink needs no key at all. The rows that
//! one row needs form a problem of their own, its *part*. The oracle answers and bounds a part as it does any
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

use ndarray::{Array2, Array3, ArrayView2, ArrayView3, ArrayViewMut3, Slice, s};
use seamproof_oracle::blocked::{self, Answer};
use seamproof_oracle::envelope::Model;
use seamproof_oracle::{
    Alignment, Balance, ForwardResults, Gradients, InputViews, Inputs, Mask, Pass, Problem, ProblemError,
    ProblemFields, Run, Saved, SavedOut, SavedViews, Sequence, Side, TensorRows,
};

use super::bounds::{self, Comparison};
use super::diagnosis;
use crate::finding::{Finding, Place};
use crate::hash::mix;
use crate::ladder::evidence::{Evidence, Look};
use crate::subject::{RankGradients, RankOutputs, TensorName};
use crate::verdict::Margin;
use seamproof_oracle::sharding::{self as layout, PlacedRun, RankLayout};

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
type LookAt<'a> = fn(&Sample<'a>, &Part, &mut Margin) -> Option<Finding>;

struct Sample<'a> {
    evidence: &'a Evidence<'a>,
    model: Model,
}

impl<'a> Sample<'a> {
    fn new(evidence: &'a Evidence<'a>) -> Sample<'a> {
        let Evidence { backend, problem, .. } = *evidence;
        let model = Model::new(problem, backend.declaration().arithmetic, evidence.partition());
        Sample { evidence, model }
    }

    fn look(self, margin: &mut Margin) -> Result<Option<Finding>, ProblemError> {
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
                if let Some(finding) = look_at(&self, &part, margin) {
                    return Ok(Some(finding));
                }
            }
        }
        if !has_saved || problem.learnable_sinks() == 0 || self.model.weighs_dots() {
            return Ok(None);
        }
        Ok(self.gradients(&Part::of_sinks(problem)?, None, margin))
    }

    /// Returns the exact forward of a part.
    fn answer(&self, part: &Part) -> Answer<ForwardResults> {
        let ask = || blocked::forward(&part.problem, part.inputs(self.evidence), Some(&self.model));
        self.evidence.oracle(ask)
    }

    fn forward(&self, part: &Part, margin: &mut Margin) -> Option<Finding> {
        let Evidence { problem, inputs, first, .. } = *self.evidence;
        let (answer, layout) = (self.answer(part), layout::whole(&part.problem));
        let got = RankOutputs {
            out: rows(&first.out, &part.q).to_owned(),
            lse: first.lse.as_ref().map(|lse| part.columns(lse).to_owned()),
            max_logit: None,
            gradients: None,
        };
        let tensors = [TensorName::Lse, TensorName::Out];
        let mut finding = bounds::forward(&self.comparison(part, &layout), &got, &answer, &tensors, margin)?;
        finding.place = part.whole(finding.place);
        let mut exact = ForwardResults {
            out: Array3::zeros(problem.out_shape()),
            lse: Array2::zeros(problem.lse_shape()),
            max_logit: answer.exact.max_logit,
        };
        rows_mut(&mut exact.out, &part.q).assign(&answer.exact.out);
        exact.lse.slice_mut(s![.., slice(&part.q)]).assign(&answer.exact.lse);
        diagnosis::explain(problem, inputs, first, &exact, &mut finding);
        Some(finding)
    }

    /// Returns the subject's own lse for a part. The exact one stands in where the subject hides its own, and comes
    /// with the error that the subject's may have.
    fn saved_lse(&self, part: &Part) -> (Array2<f64>, Option<Array2<f64>>) {
        match &self.evidence.first.lse {
            Some(lse) => (part.columns(lse).mapv(f64::from), None),
            None => {
                let Answer { exact, bound } = self.answer(part);
                (exact.lse, bound.map(|bound| bound.worst.lse))
            }
        }
    }

    /// Examines the gradients of a part that lie on a side; without a side, dsink.
    fn gradients(&self, part: &Part, side: Option<Side>, margin: &mut Margin) -> Option<Finding> {
        let tensors: &[TensorName] = match side {
            Some(Side::Q) => &[TensorName::Dq],
            Some(Side::Kv) if self.model.weighs_dots() => &[TensorName::Dv],
            Some(Side::Kv) => &[TensorName::Dv, TensorName::Dk],
            None => &[TensorName::Dsink],
        };
        let answer = {
            let (lse, lse_error) = self.saved_lse(part);
            let out = SavedOut::Stored(rows(&self.evidence.first.out, &part.q));
            let saved = (SavedViews { out, lse: &lse }, lse_error.as_ref());
            let inputs = part.inputs(self.evidence);
            let ask = || blocked::backward_of(&part.problem, inputs, saved, side, &self.model);
            self.evidence.oracle(ask)
        };
        let layout = layout::whole(&part.problem);
        let compare = self.comparison(part, &layout);
        let mut runs = self.evidence.gradient_runs().into_iter();
        let (gradients, finding) = runs.find_map(|gradients| {
            let got = part.gradients(gradients, side);
            Some((gradients, bounds::backward(&compare, &got, &answer, tensors, margin)?))
        })?;
        Some(self.explained(part, gradients, &answer.exact, finding))
    }

    /// Adds to a finding about a part's gradients what explains it. That takes all rows that the subject saved.
    fn explained(
        &self,
        part: &Part,
        gradients: &RankGradients,
        exact: &Gradients,
        finding: Finding,
    ) -> Finding {
        let Evidence { problem, inputs, first, .. } = *self.evidence;
        let lse = match &first.lse {
            Some(lse) => lse.mapv(f64::from),
            None => Array2::zeros(problem.lse_shape()),
        };
        let saved = Saved { out: first.out.mapv(f64::from), lse };
        let mut whole = Gradients {
            dq: Array3::zeros(problem.q_shape()),
            dk: Array3::zeros(problem.k_shape()),
            dv: Array3::zeros(problem.v_shape()),
            dsink: exact.dsink.clone(),
        };
        let sides = [
            (&mut whole.dq, &exact.dq, &part.q),
            (&mut whole.dk, &exact.dk, &part.kv),
            (&mut whole.dv, &exact.dv, &part.kv),
        ];
        for (whole, exact, run) in sides.into_iter().filter(|(_, exact, _)| !exact.is_empty()) {
            rows_mut(whole, run).assign(exact);
        }
        let mut finding = Finding { place: part.whole(finding.place), ..finding };
        diagnosis::explain_gradient(problem, inputs, gradients, (&saved, &whole), &mut finding);
        finding
    }

    fn comparison<'b>(&self, part: &'b Part, layout: &'b RankLayout) -> Comparison<'b> {
        Comparison { problem: &part.problem, layout, ratio: self.evidence.judge.ratio }
    }
}

/// Everything that a row needs, as a problem of its own. Its tensors are rows of the whole problem's.
struct Part {
    problem: Problem,
    /// Rows of the whole problem's q, out, dout and dq.
    q: Run,
    /// Rows of the whole problem's k, v, dk and dv.
    kv: Run,
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
        Part::new(problem, (Run::packed(both.q.row(query), 1, 1), kv), mask, [sequence, query])
    }

    /// Returns the part of one key: the key and the queries that see it. They are neighbours, since each query sees
    /// the interval of the one before, moved by one.
    fn of_key(problem: &Problem, sequence: usize, key: usize) -> Result<Part, ProblemError> {
        let both = problem.sequences[sequence];
        let sees = |i: &usize| problem.mask.visible(*i, both.q.len, both.kv.len).contains(&key);
        let queries = ends((0..both.q.len).find(sees), (0..both.q.len).rfind(sees));
        let offset = both.q.offset + both.q.step * queries.start;
        let q = Run { offset, len: queries.len(), span: queries.len(), ..both.q };
        Part::new(problem, (q, Run::packed(both.kv.row(key), 1, 1)), Mask::FULL, [sequence, key])
    }

    /// Returns the part of the sinks: every query, and no key.
    fn of_sinks(problem: &Problem) -> Result<Part, ProblemError> {
        let without_keys = |both: &Sequence| Sequence { kv: Run::packed(0, 0, 0), ..*both };
        let sequences = problem.sequences.iter().map(without_keys).collect();
        let rows = TensorRows { q: problem.rows.q, kv: 0 };
        let fields = ProblemFields { sequences, rows, mask: Mask::FULL, ..problem.clone().into() };
        let (q, kv) = (Run::packed(0, rows.q, rows.q), Run::packed(0, 0, 0));
        Ok(Part { problem: Problem::new(fields)?, q, kv, row: None })
    }

    fn new(
        problem: &Problem,
        (q, kv): (Run, Run),
        mask: Mask,
        [sequence, row]: [usize; 2],
    ) -> Result<Part, ProblemError> {
        let packed = |run: &Run| Run::packed(0, run.len, run.len);
        let sequences = vec![Sequence { q: packed(&q), kv: packed(&kv), ..problem.sequences[sequence] }];
        let rows = TensorRows { q: q.len, kv: kv.len };
        let fields = ProblemFields { sequences, rows, mask, ..problem.clone().into() };
        Ok(Part { problem: Problem::new(fields)?, q, kv, row: Some([sequence, row]) })
    }

    /// Returns the part's inputs.
    fn inputs<'a>(&self, evidence: &Evidence<'a>) -> InputViews<'a> {
        let Inputs { q, k, v, dout, sink } = evidence.inputs;
        let dout = match self.problem.pass {
            Pass::Forward => dout.view(),
            Pass::Backward => rows(dout, &self.q),
        };
        InputViews { q: rows(q, &self.q), k: rows(k, &self.kv), v: rows(v, &self.kv), dout, sink }
    }

    /// Returns the part of a statistic `[heads, rows]`.
    fn columns<'a>(&self, statistic: &'a Array2<f32>) -> ArrayView2<'a, f32> {
        statistic.slice(s![.., slice(&self.q)])
    }

    /// Returns the gradients of a side, and without rows those of the other.
    fn gradients(&self, whole: &RankGradients, side: Option<Side>) -> RankGradients {
        let of = |tensor: &Array3<f32>, own: Side, run: &Run| {
            let run = if side == Some(own) { *run } else { Run::packed(0, 0, 0) };
            rows(tensor, &run).to_owned()
        };
        RankGradients {
            dq: of(&whole.dq, Side::Q, &self.q),
            dk: of(&whole.dk, Side::Kv, &self.kv),
            dv: of(&whole.dv, Side::Kv, &self.kv),
            dsink: whole.dsink.clone(),
        }
    }

    /// Returns a place of the part as a place of the problem.
    fn whole(&self, place: Place) -> Place {
        match self.row {
            Some([sequence, row]) => Place { sequence: Some(sequence), row: Some(row), ..place },
            None => place,
        }
    }
}

/// Returns the real rows of a run as a slice.
fn slice(run: &Run) -> Slice {
    let end = if run.len == 0 { run.offset } else { run.row(run.len - 1) + 1 };
    Slice::new(run.offset as isize, Some(end as isize), run.step.max(1) as isize)
}

/// Returns the rows of a tensor that a run names.
fn rows<'a>(tensor: &'a Array3<f32>, run: &Run) -> ArrayView3<'a, f32> {
    tensor.slice(s![slice(run), .., ..])
}

fn rows_mut<'a>(tensor: &'a mut Array3<f64>, run: &Run) -> ArrayViewMut3<'a, f64> {
    tensor.slice_mut(s![slice(run), .., ..])
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
    /// Returns the borders of chunks inside of a piece, as rows of it: the middle chunks of a sequence follow each other
    /// on the last rank.
    fn chunk_borders(
        &self,
        problem: &Problem,
        placed: &PlacedRun,
        side: Side,
    ) -> impl Iterator<Item = usize> + use<> {
        let span = layout::run_of(&problem.sequences[placed.sequence], side).span;
        let chunk = match problem.parallel.balance {
            Balance::DualChunk => span / (2 * problem.parallel.size()),
            Balance::Contiguous | Balance::Striped { .. } => 0,
        };
        let (start, len) = (placed.piece.start, placed.local.len);
        (1..len).filter(move |row| chunk > 0 && (start + row).is_multiple_of(chunk))
    }

    /// Returns the drawn rows of a side by sequence and position, and with them the first and the last row of each
    /// sequence, of what it is connected to, of each piece of it that a rank holds, and of each chunk.
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
            let inner = self.chunk_borders(problem, placed, side);
            rows.extend(inner.flat_map(|border| [position(border - 1), position(border)]));
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
    use seamproof_oracle::{Algorithm, ContextParallel};

    fn problems() -> impl Iterator<Item = Problem> {
        let limits = Profile::Quick.limits();
        (0..300).filter_map(move |case| match generate::draw(11, case, &limits) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        })
    }

    /// Returns the rows of k that a query of a part sees.
    fn rows_seen(part: &Part, query: usize) -> Vec<usize> {
        let both = part.problem.sequences[0];
        let seen = part.problem.mask.visible(query, both.q.len, both.kv.len);
        seen.map(|key| part.kv.row(both.kv.row(key))).collect()
    }

    #[test]
    fn a_part_connects_the_rows_that_the_mask_connects() {
        for problem in problems() {
            for (index, both) in problem.sequences.iter().enumerate() {
                let visible = |i: usize| problem.mask.visible(i, both.q.len, both.kv.len);
                for i in 0..both.q.len {
                    let part = Part::of_query(&problem, index, i).expect("a part");
                    let right: Vec<usize> = visible(i).map(|key| both.kv.row(key)).collect();
                    assert_eq!(rows_seen(&part, 0), right, "query {i} of {problem:?}");
                    assert_eq!(part.q.real_rows().collect::<Vec<_>>(), [both.q.row(i)]);
                }
                for key in 0..both.kv.len {
                    let part = Part::of_key(&problem, index, key).expect("a part");
                    let readers = (0..both.q.len).filter(|&i| visible(i).contains(&key));
                    let right: Vec<usize> = readers.map(|i| both.q.row(i)).collect();
                    let rows: Vec<usize> = part.q.real_rows().collect();
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
        // The middle chunks follow each other on their rank, in one piece with a border inside.
        let borders = [0, 15, 16, 31, 32, 47, 48, 49].map(|row| [0, row]);
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
