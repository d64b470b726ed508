//! Sample: the envelope of a case that is too large for the oracle, on some of its rows.
//!
//! A row of a result needs few other rows. The out, lse and dq of a query need the keys that it sees. Once out and
//! lse are saved, the dk and dv of a key need the queries that see it, and dsink needs no key at all. The oracle
//! answers and bounds the drawn rows of a sequence together, at the cost of these rows ([`blocked::forward_of`],
//! [`blocked::backward_of`]). Which rows those are, [`super::draw`] says. dsink is judged whole.
//!
//! The identities compare the subject with itself, so a factor on all of a gradient escapes nearly every one of them.
//! The sample compares values. Where a subject hides its LSE, dk, dv and dsink are not examined, because the exact
//! LSE of every query would be needed. Where its D may be `Σ P·dP`, all keys of every query would tell it. For dk and
//! dsink it is then known to be near `Σ dout·out` of the out that was returned, as far as norms of the inputs bound the
//! errors of out, of the LSE and of that sum ([`deltas_apart`]). Where dS has a factor for each tile, the largest dS of a
//! tile is bounded by such norms too ([`largest_gradients`]). max_logit is not examined, because it is that of all
//! queries, nor are dk and dv of keys that sequences share, because they are sums over these.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use ndarray::{Array1, Array2, Array3, Axis};
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::blocked::{self, Answer, SomeRows, Wanted};
use seamproof_oracle::envelope::Model;
use seamproof_oracle::{
    ContextParallel, Form, ForwardResults, Mask, Problem, ProblemError, ProblemFields, Run, SavedErrors,
    SavedOut, SavedViews, Sequence, Sharing, Side, Steps, TensorRows,
};

use super::bounds::{self, Comparison};
use super::diagnosis::{self, RightRow, right_lanes};
use super::draw::drawn;
use crate::finding::{Finding, Place};
use crate::identity::{deltas_apart, largest_gradients};
use crate::ladder::evidence::{Evidence, Look};
use crate::subject::{RankGradients, RankOutputs, TensorName};
use crate::verdict::Margin;
use seamproof_oracle::sharding::{self as layout, RankLayout, run_of};

/// Examines the drawn rows where the oracle is too expensive for the whole case: the forward of the queries first,
/// then the gradients.
pub(super) fn look(evidence: &Evidence<'_>, margin: &mut Margin) -> Look {
    match Sample::new(evidence).look(margin) {
        Ok(finding) => finding.into(),
        Err(error) => Look::Failed(format!("some rows are no problem: {error}")),
    }
}

struct Sample<'a> {
    evidence: &'a Evidence<'a>,
    model: Model,
    /// Drawn queries of each sequence.
    queries: Vec<Part>,
    /// Drawn keys of each sequence.
    keys: Vec<Part>,
    /// LSE that the backward begins with, and the errors that it may have.
    lse: OnceCell<(Array2<f64>, Option<Array2<f64>>)>,
    /// Largest dS of each query's head, as [`largest_gradients`] returns it.
    ds_most: OnceCell<Array2<f64>>,
}

impl<'a> Sample<'a> {
    fn new(evidence: &'a Evidence<'a>) -> Sample<'a> {
        let Evidence { backend, problem, .. } = *evidence;
        let model = Model::new(problem, backend.declaration().arithmetic, evidence.partition());
        let parts = |side: Side| {
            let mut rows = match &evidence.judge.sampled {
                Some(sampled) => sampled.rows(problem, side, &evidence.ranks()),
                None => drawn(problem, side),
            };
            rows.retain(|[sequence, key]| side == Side::Q || *key >= problem.sharing.common(*sequence));
            Part::all(rows)
        };
        let (queries, keys) = (parts(Side::Q), parts(Side::Kv));
        Sample { evidence, model, queries, keys, lse: OnceCell::new(), ds_most: OnceCell::new() }
    }

    fn ds_most(&self) -> &Array2<f64> {
        self.ds_most.get_or_init(|| largest_gradients(self.evidence))
    }

    fn look(&self, margin: &mut Margin) -> Result<Option<Finding>, ProblemError> {
        let Evidence { problem, first, .. } = *self.evidence;
        for part in &self.queries {
            if let Some(finding) = self.forward(part, margin)? {
                return Ok(Some(finding));
            }
        }
        if first.gradients.is_none() {
            return Ok(None);
        }
        for part in &self.queries {
            let wanted = (Wanted::Queries(part.rows()), &[TensorName::Dq][..]);
            if let Some(finding) = self.gradients(Some((part, Side::Q)), wanted, None, margin)? {
                return Ok(Some(finding));
            }
        }
        if first.lse.is_none() {
            return Ok(None);
        }
        let apart = self.model.weighs_dots().then(|| deltas_apart(self.evidence));
        for part in &self.keys {
            let wanted = (Wanted::Keys(part.rows()), &[TensorName::Dv, TensorName::Dk][..]);
            if let Some(finding) = self.gradients(Some((part, Side::Kv)), wanted, apart.as_ref(), margin)? {
                return Ok(Some(finding));
            }
        }
        match problem.learnable_sinks() {
            0 => Ok(None),
            _ => self.gradients(None, (Wanted::Sinks, &[TensorName::Dsink]), apart.as_ref(), margin),
        }
    }

    /// Returns the exact forward of some queries.
    fn answer(&self, part: &Part) -> Answer<ForwardResults> {
        let Evidence { problem, inputs, .. } = *self.evidence;
        self.evidence.oracle(|| blocked::forward_of(problem, inputs, part.rows(), &self.model))
    }

    fn forward(&self, part: &Part, margin: &mut Margin) -> Result<Option<Finding>, ProblemError> {
        let Evidence { problem, first, .. } = *self.evidence;
        let (answer, frame) = (self.answer(part), Frame::new(problem, Some((part, Side::Q)))?);
        let rows = part.tensor_rows(problem, Side::Q);
        let got = RankOutputs {
            out: first.out.select(Axis(0), &rows),
            lse: first.lse.as_ref().map(|lse| lse.select(Axis(1), &rows)),
            max_logit: None,
            gradients: None,
            amax: Amaxes::default(),
        };
        let tensors = [TensorName::Lse, TensorName::Out];
        let compare = frame.comparison(self.evidence);
        let Some(finding) = bounds::forward(&compare, &got, &answer, &tensors, margin) else {
            return Ok(None);
        };
        let place = finding.place.row.unwrap_or_default();
        let right = |_, head: usize| RightRow::of(&answer.exact, place, head);
        let mut finding = part.whole(finding);
        diagnosis::explain(self.evidence, right, &mut finding);
        Ok(Some(finding))
    }

    /// Returns the LSE that the backward begins with: the subject's own. Where the subject hides its own, the exact one
    /// of the drawn queries stands in, with the error that the subject's may have.
    fn saved_lse(&self) -> &(Array2<f64>, Option<Array2<f64>>) {
        let Evidence { problem, first, .. } = *self.evidence;
        let exact = || {
            let mut all = [(); 2].map(|()| Array2::zeros(problem.lse_shape()));
            for part in &self.queries {
                let Answer { exact, bound } = self.answer(part);
                let errors = bound.map_or_else(|| Array2::zeros(exact.lse.dim()), |bound| bound.worst.lse);
                for (to, from) in all.iter_mut().zip([&exact.lse, &errors]) {
                    for (place, row) in part.tensor_rows(problem, Side::Q).into_iter().enumerate() {
                        to.column_mut(row).assign(&from.column(place));
                    }
                }
            }
            let [lse, errors] = all;
            (lse, Some(errors))
        };
        self.lse.get_or_init(|| match &first.lse {
            Some(lse) => (lse.mapv(f64::from), None),
            None => exact(),
        })
    }

    /// Examines the gradients of a part's rows, or those of the sinks.
    fn gradients(
        &self,
        part: Option<(&Part, Side)>,
        (wanted, tensors): (Wanted<'_>, &[TensorName]),
        apart: Option<&Array2<f64>>,
        margin: &mut Margin,
    ) -> Result<Option<Finding>, ProblemError> {
        let Evidence { problem, inputs, first, .. } = *self.evidence;
        let (lse, lse_error) = self.saved_lse();
        let saved = SavedViews { out: SavedOut::Stored(first.out.view()), lse };
        let ds_most = self.model.scales_tiles().then(|| self.ds_most());
        let errors = SavedErrors { lse: lse_error.as_ref(), delta: apart, ds_most };
        let ask = || blocked::backward_of(problem, inputs, (saved, errors), wanted, &self.model);
        let (answer, frame) = (self.evidence.oracle(ask), Frame::new(problem, part)?);
        let compare = frame.comparison(self.evidence);
        let broken = self.evidence.gradient_runs().into_iter().find_map(|gradients| {
            let got = some_gradients(problem, gradients, part);
            let finding = bounds::backward(&compare, &got, &answer, tensors, margin)?;
            let (place, tensor) = (finding.place.row.unwrap_or_default(), finding.tensor);
            let right = |_, head: usize| right_lanes(&answer.exact, tensor, place, head);
            let mut finding = match part {
                Some((part, _)) => part.whole(finding),
                None => finding,
            };
            diagnosis::explain_gradient(self.evidence, gradients, (saved, right), &mut finding);
            Some(finding)
        });
        Ok(broken)
    }
}

/// Returns the gradients of a part's rows, and without rows those of the other side.
fn some_gradients(problem: &Problem, whole: &RankGradients, part: Option<(&Part, Side)>) -> RankGradients {
    let of = |tensor: &Array3<f32>, own: Side| {
        let mine = part.filter(|(_, side)| *side == own);
        tensor.select(Axis(0), &mine.map_or(Vec::new(), |(part, side)| part.tensor_rows(problem, side)))
    };
    RankGradients {
        dq: of(&whole.dq, Side::Q),
        dk: of(&whole.dk, Side::Kv),
        dv: of(&whole.dv, Side::Kv),
        dsink: if part.is_none() { whole.dsink.clone() } else { Array1::zeros(0) },
    }
}

/// Drawn rows of one sequence, on one side.
struct Part {
    sequence: usize,
    /// Positions in the sequence, in ascending order.
    positions: Vec<usize>,
}

impl Part {
    /// Returns the parts of rows by sequence and position, one for each sequence.
    fn all(rows: Vec<[usize; 2]>) -> Vec<Part> {
        let mut parts = BTreeMap::<usize, BTreeSet<usize>>::new();
        for [sequence, position] in rows {
            parts.entry(sequence).or_default().insert(position);
        }
        let part = |(sequence, positions): (usize, BTreeSet<usize>)| Part {
            sequence,
            positions: positions.into_iter().collect(),
        };
        parts.into_iter().map(part).collect()
    }

    fn rows(&self) -> SomeRows<'_> {
        SomeRows { sequence: self.sequence, positions: &self.positions }
    }

    /// Returns the rows of the problem's tensors.
    fn tensor_rows(&self, problem: &Problem, side: Side) -> Vec<usize> {
        let run = run_of(&problem.sequences[self.sequence], side);
        self.positions.iter().map(|&position| run.row(position)).collect()
    }

    /// Returns a finding about the part's rows as one about the problem.
    fn whole(&self, finding: Finding) -> Finding {
        let row = finding.place.row.and_then(|row| self.positions.get(row).copied());
        Finding { place: Place { sequence: Some(self.sequence), row, ..finding.place }, ..finding }
    }
}

/// Shapes of the results of some rows, as a problem of one sequence and its layout.
struct Frame {
    problem: Problem,
    layout: RankLayout,
}

impl Frame {
    fn new(problem: &Problem, part: Option<(&Part, Side)>) -> Result<Frame, ProblemError> {
        let count =
            |own: Side| part.filter(|(_, side)| *side == own).map_or(0, |(part, _)| part.positions.len());
        let rows = TensorRows { q: count(Side::Q), kv: count(Side::Kv) };
        let [q, kv] = [rows.q, rows.kv].map(|len| Run::packed(0, len, len));
        // A copy of the problem's own fields would have all of its sequences.
        let &ProblemFields { heads, dims, softmax, precision, mode, data_seed, pass, scales, .. } =
            &**problem;
        let frame = Problem::new(ProblemFields {
            sequences: vec![Sequence { id: 0, q, kv }],
            rows,
            heads,
            dims,
            mask: Mask::FULL,
            softmax,
            precision,
            parallel: ContextParallel::single(),
            scales,
            form: Form::CuSeqlens,
            steps: Steps::default(),
            pages: None,
            sharing: Sharing::default(),
            mode,
            data_seed,
            pass,
        })?;
        Ok(Frame { layout: layout::whole(&frame), problem: frame })
    }

    fn comparison(&self, evidence: &Evidence<'_>) -> Comparison<'_> {
        Comparison { problem: &self.problem, layout: &self.layout, ratio: evidence.judge.ratio }
    }
}
