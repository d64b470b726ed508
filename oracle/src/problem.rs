//! A [`Problem`]: one attention problem as mathematics plus its memory layout, valid by construction.

use std::ops::Deref;

use ndarray::Array1;
use serde::{Deserialize, Serialize};

use crate::limits::{
    HEAD_DIM_MAX, HEADS_MAX, ROWS_MAX, SCALE_MAX, SCALE_MIN, SEQUENCES_MAX, SOFTCAP_MAX, SOFTCAP_MIN,
    WORLD_MAX,
};
use crate::{
    Balance, ContextParallel, Form, FormError, Format, InputMode, Mask, Pages, PagesError, Precision, Run,
    RunLayoutError, ScaleValues, Sharing, SharingError, Sink, Softmax, Steps, StepsError, TensorName,
};

/// One sequence: its queries and its keys, of independent lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sequence {
    /// The name of the sequence's values, unique in a problem. Dropping a neighbour changes no value of this sequence.
    pub id: u32,
    /// Rows of q, out, dout and dq.
    pub q: Run,
    /// Rows of k, v, dk and dv.
    pub kv: Run,
}

/// The numbers of rows of the packed tensors, padding and slack included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRows {
    /// The rows of q, out, dout and dq.
    pub q: usize,
    /// The rows of k, v, dk and dv.
    pub kv: usize,
}

/// Head counts; query head `h` reads KV head `h / (q / kv)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Heads {
    /// Query heads, a multiple of `kv`.
    pub q: usize,
    /// Key and value heads.
    pub kv: usize,
}

impl Heads {
    /// Returns the heads of each of `ranks` ranks that query heads are dealt to evenly. KV heads are dealt evenly too,
    /// or each is on equally many ranks. `None` where they cannot be.
    pub fn dealt(self, ranks: usize) -> Option<Heads> {
        let evenly = self.kv.is_multiple_of(ranks) || ranks.is_multiple_of(self.kv);
        let heads = Heads { q: self.q / ranks.max(1), kv: (self.kv / ranks.max(1)).max(1) };
        (ranks > 0 && self.q.is_multiple_of(ranks) && evenly).then_some(heads)
    }
}

/// Head dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dims {
    /// The head dimension of queries and keys.
    pub qk: usize,
    /// The head dimension of values and the output.
    pub v: usize,
}

/// The results that are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pass {
    /// out, lse and max_logit.
    Forward,
    /// The forward's results and the gradients.
    Backward,
}

/// The query side or the key/value side of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    /// q, out, dout, dq.
    Q,
    /// k, v, dk, dv.
    Kv,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Side::Q { "q" } else { "kv" })
    }
}

/// The fields of a [`Problem`], free to edit. [`Problem::new`] checks them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProblemFields {
    /// The sequences. A problem without sequences is legal.
    pub sequences: Vec<Sequence>,
    /// The numbers of rows of the tensors.
    pub rows: TensorRows,
    /// Head counts.
    pub heads: Heads,
    /// Head dimensions.
    pub dims: Dims,
    /// The mask, the same rule for every sequence.
    pub mask: Mask,
    /// Scale, soft cap and sink.
    pub softmax: Softmax,
    /// Number formats.
    pub precision: Precision,
    /// Context parallelism.
    pub parallel: ContextParallel,
    /// The way in which values are drawn.
    pub mode: InputMode,
    /// The seed of the values, on which the geometry does not depend.
    pub data_seed: u64,
    /// The pass: forward, or forward and backward.
    pub pass: Pass,
    /// The way in which the scales of scaled inputs are drawn.
    #[serde(default, skip_serializing_if = "ScaleValues::is_default")]
    pub scales: ScaleValues,
    /// The form in which the problem is given to a subject.
    #[serde(default, skip_serializing_if = "Form::is_plain")]
    pub form: Form,
    /// The tokens that each of several calls appends to a cache; empty for one call without a cache.
    #[serde(default, skip_serializing_if = "Steps::is_empty")]
    pub steps: Steps,
    /// The pages in which keys and values lie; absent where they lie as the sequences say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages: Option<Pages>,
    /// The sequences whose first keys are another's.
    #[serde(default, skip_serializing_if = "Sharing::is_empty")]
    pub sharing: Sharing,
}

impl ProblemFields {
    /// Returns the fields of a forward and backward pass over these sequences. The pass runs on one rank, with one head
    /// of `dim` lanes, in bf16, in the smallest tensors that hold all rows. Every key is visible, and logits are scaled
    /// by `1/√dim`. Other problems are edits of these fields:
    ///
    /// ```
    /// use seamproof_oracle::{Heads, Mask, Problem, ProblemFields};
    ///
    /// let fields = ProblemFields {
    ///     heads: Heads { q: 8, kv: 2 },
    ///     mask: Mask::CAUSAL,
    ///     ..ProblemFields::packed(&[(13, 13), (0, 4)], 64)
    /// };
    /// assert_eq!(Problem::new(fields)?.rows.kv, 17);
    /// # Ok::<(), seamproof_oracle::ProblemError>(())
    /// ```
    pub fn of(sequences: Vec<Sequence>, dim: usize) -> ProblemFields {
        // A run that overflows ends past every bound, and is refused.
        let end = |side: fn(&Sequence) -> Run| {
            sequences.iter().map(|sequence| side(sequence).end().unwrap_or(usize::MAX)).max().unwrap_or(0)
        };
        ProblemFields {
            rows: TensorRows { q: end(|sequence| sequence.q), kv: end(|sequence| sequence.kv) },
            sequences,
            heads: Heads { q: 1, kv: 1 },
            dims: Dims { qk: dim, v: dim },
            mask: Mask::FULL,
            softmax: Softmax::scaled(1.0 / (dim as f32).sqrt()),
            precision: Precision::uniform(Format::Bf16),
            parallel: ContextParallel::single(),
            mode: InputMode::Flat,
            data_seed: 0,
            pass: Pass::Backward,
            scales: ScaleValues::default(),
            form: Form::CuSeqlens,
            steps: Steps::default(),
            pages: None,
            sharing: Sharing::default(),
        }
    }

    /// Returns the fields in the plain form where their own form cannot say them, without steps where they cannot be
    /// made in these, without pages in which they cannot lie, and without keys that they cannot share.
    pub fn sayable(self) -> ProblemFields {
        let form = if self.form.check(&self).is_ok() { self.form } else { Form::CuSeqlens };
        let fields = ProblemFields { form, ..self };
        let steps = if fields.steps.check(&fields).is_ok() { fields.steps.clone() } else { Steps::default() };
        let fields = ProblemFields { steps, ..fields };
        let pages = fields.pages.as_ref().filter(|pages| pages.check(&fields).is_ok()).cloned();
        let fields = ProblemFields { pages, ..fields };
        let sharing =
            if fields.sharing.check(&fields).is_ok() { fields.sharing.clone() } else { Sharing::default() };
        ProblemFields { sharing, ..fields }
    }

    /// Returns [`ProblemFields::of`] sequences that follow each other (THD), each given by its numbers of queries and
    /// of keys.
    pub fn packed(lengths: &[(usize, usize)], dim: usize) -> ProblemFields {
        let (mut q, mut kv) = (0, 0);
        let sequences = (0..).zip(lengths).map(|(id, &(queries, keys))| {
            let sequence =
                Sequence { id, q: Run::packed(q, queries, queries), kv: Run::packed(kv, keys, keys) };
            (q, kv) = (q + queries, kv + keys);
            sequence
        });
        ProblemFields::of(sequences.collect(), dim)
    }

    /// Returns [`ProblemFields::of`] self-attention on sequences that follow each other (THD), each given by its
    /// numbers of real and of owned rows.
    pub fn padded(lengths: &[(usize, usize)], dim: usize) -> ProblemFields {
        let mut offset = 0;
        let sequences = (0..).zip(lengths).map(|(id, &(len, span))| {
            let run = Run::packed(offset, len, span);
            offset += span;
            Sequence { id, q: run, kv: run }
        });
        ProblemFields::of(sequences.collect(), dim)
    }
}

/// The reason why fields make no [`Problem`]. Each message names the field and what to do.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// A count outside its range.
    #[error("{field} is {got}; use {min} to {max}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// The field's value.
        got: usize,
        /// The least legal value.
        min: usize,
        /// The largest legal value.
        max: usize,
    },
    /// A number of query heads that is no multiple of the KV heads.
    #[error("heads.q is {q}, not a multiple of heads.kv {kv}; every KV head serves equally many query heads")]
    HeadsNotDivisible {
        /// Query heads.
        q: usize,
        /// KV heads.
        kv: usize,
    },
    /// A run whose rows do not fit the tensor.
    #[error("sequences[{index}].{side}: {error}")]
    Run {
        /// The index of the sequence.
        index: usize,
        /// The side.
        side: Side,
        /// The error of the run.
        error: RunLayoutError,
    },
    /// A row that two sequences own.
    #[error("sequences[{index}].{side} owns row {row}, which an earlier sequence owns already")]
    Overlap {
        /// The index of the later sequence.
        index: usize,
        /// The side.
        side: Side,
        /// The row.
        row: usize,
    },
    /// An id that two sequences share; they would hold the same values.
    #[error("sequences[{index}].id {id} is used twice; ids name a sequence's values")]
    RepeatedId {
        /// The index of the later sequence.
        index: usize,
        /// The id.
        id: u32,
    },
    /// A factor outside its range, or not a number.
    #[error("softmax.{field} is {got:e}; use {min:e} to {max:e}")]
    Factor {
        /// The field.
        field: &'static str,
        /// The field's value.
        got: f32,
        /// The least legal value.
        min: f32,
        /// The largest legal value.
        max: f32,
    },
    /// A rank of the group outside the world.
    #[error("parallel.ranks[{index}] is {rank}; the world has {world} ranks")]
    RankOutsideWorld {
        /// The place in the group.
        index: usize,
        /// The rank.
        rank: usize,
        /// The size of the world.
        world: usize,
    },
    /// A rank that is in the group twice.
    #[error("parallel.ranks names rank {rank} twice")]
    RepeatedRank {
        /// The rank.
        rank: usize,
    },
    /// A group whose size the algorithm cannot use.
    #[error("parallel.ranks has {size} ranks; {rule}")]
    GroupSize {
        /// The CP size.
        size: usize,
        /// The rule of the algorithm.
        rule: &'static str,
    },
    /// A form that cannot say the problem.
    #[error("form {}: {error}; use cu_seqlens", form.name())]
    Form {
        /// The form.
        form: Form,
        /// What it cannot say.
        error: FormError,
    },
    /// Steps in which the problem cannot be made.
    #[error("steps: {error}")]
    Steps {
        /// What is in the way.
        error: StepsError,
    },
    /// Pages in which the keys and values cannot lie.
    #[error("pages: {error}")]
    Pages {
        /// What is in the way.
        error: PagesError,
    },
    /// Keys that the sequences cannot share.
    #[error("sharing: {error}")]
    Sharing {
        /// What is in the way.
        error: SharingError,
    },
}

/// A valid attention problem. Its fields are read like those of [`ProblemFields`]. To change a problem, edit a copy of
/// its fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ProblemFields", into = "ProblemFields")]
pub struct Problem(ProblemFields);

impl Deref for Problem {
    type Target = ProblemFields;

    fn deref(&self) -> &ProblemFields {
        &self.0
    }
}

impl From<Problem> for ProblemFields {
    fn from(problem: Problem) -> ProblemFields {
        problem.0
    }
}

impl TryFrom<ProblemFields> for Problem {
    type Error = ProblemError;

    fn try_from(fields: ProblemFields) -> Result<Problem, ProblemError> {
        Problem::new(fields)
    }
}

impl Problem {
    /// Checks the fields. The error is the first fault that is found.
    pub fn new(fields: ProblemFields) -> Result<Problem, ProblemError> {
        check_counts(&fields)?;
        check_softmax(&fields.softmax)?;
        check_parallel(&fields.parallel)?;
        check_ids(&fields.sequences)?;
        check_rows(&fields.sequences, Side::Q, fields.rows.q)?;
        check_rows(&fields.sequences, Side::Kv, fields.rows.kv)?;
        let form = fields.form;
        form.check(&fields).map_err(|error| ProblemError::Form { form, error })?;
        fields.steps.check(&fields).map_err(|error| ProblemError::Steps { error })?;
        let pages = fields.pages.as_ref().map_or(Ok(()), |pages| pages.check(&fields));
        pages.map_err(|error| ProblemError::Pages { error })?;
        fields.sharing.check(&fields).map_err(|error| ProblemError::Sharing { error })?;
        Ok(Problem(fields))
    }

    /// Returns the problem of one call with a part of the sequences, in their own pages: their keys end earlier, and
    /// their queries lie elsewhere, in tensors of so many rows.
    pub(crate) fn with_sequences(
        &self,
        sequences: Vec<Sequence>,
        pages: Option<Pages>,
        rows: TensorRows,
    ) -> Problem {
        Problem(ProblemFields { sequences, pages, rows, steps: Steps::default(), ..self.0.clone() })
    }

    /// Returns the problem with an edit that every problem allows.
    pub(crate) fn edited(&self, edit: impl FnOnce(&mut ProblemFields)) -> Problem {
        let mut fields = self.0.clone();
        edit(&mut fields);
        Problem(fields)
    }

    /// Returns the problem as one call, without a cache.
    pub fn at_once(&self) -> Problem {
        Problem(ProblemFields { steps: Steps::default(), ..self.0.clone() })
    }

    /// Returns the problem with its keys and values where the sequences say, and not in pages.
    pub fn without_pages(&self) -> Problem {
        Problem(ProblemFields { pages: None, ..self.0.clone() })
    }

    /// Returns the problem without its backward pass.
    pub fn forward(&self) -> Problem {
        Problem(ProblemFields { pass: Pass::Forward, ..self.0.clone() })
    }

    /// Returns the number of query heads for each KV head.
    pub fn group(&self) -> usize {
        self.heads.q / self.heads.kv
    }

    /// Returns the shape of q and dq.
    pub fn q_shape(&self) -> [usize; 3] {
        [self.rows.q, self.heads.q, self.dims.qk]
    }

    /// Returns the shape of k and dk.
    pub fn k_shape(&self) -> [usize; 3] {
        [self.rows.kv, self.heads.kv, self.dims.qk]
    }

    /// Returns the shape of v and dv.
    pub fn v_shape(&self) -> [usize; 3] {
        [self.rows.kv, self.heads.kv, self.dims.v]
    }

    /// Returns the shape of out and dout.
    pub fn out_shape(&self) -> [usize; 3] {
        [self.rows.q, self.heads.q, self.dims.v]
    }

    /// Returns the shape of an input or a result that has rows, heads and lanes; that of q for a name of any other.
    pub fn shape_of(&self, tensor: TensorName) -> [usize; 3] {
        match tensor {
            TensorName::K | TensorName::Dk => self.k_shape(),
            TensorName::V | TensorName::Dv => self.v_shape(),
            TensorName::Out | TensorName::Dout => self.out_shape(),
            _ => self.q_shape(),
        }
    }

    /// Returns the shape of the LSE.
    pub fn lse_shape(&self) -> [usize; 2] {
        [self.heads.q, self.rows.q]
    }

    /// Returns the length of the sink input and of its gradient: the query heads when the sink is learnable, else 0.
    pub fn learnable_sinks(&self) -> usize {
        if self.softmax.sink == Sink::Learnable { self.heads.q } else { 0 }
    }

    /// Returns the sink of a head as a logit. A learnable sink is read from `learnable`.
    pub fn sink(&self, head: usize, learnable: &Array1<f32>) -> Option<f64> {
        match self.softmax.sink {
            Sink::None => None,
            Sink::OffByOne => Some(0.0),
            Sink::Learnable => Some(f64::from(learnable[head])),
        }
    }

    /// Returns the number of real query rows of all sequences.
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.q.len).sum()
    }

    /// Returns the number of visible (query, key) pairs of all sequences, for one head.
    pub fn pairs(&self) -> u64 {
        self.sequences.iter().map(|sequence| self.mask.pairs(sequence.q.len, sequence.kv.len)).sum()
    }

    /// Returns the number of elements of q, k, v, out and the pool of pages, twice in a backward: a measure of memory
    /// and of copying.
    pub fn elements(&self) -> u64 {
        let size = |shape: [usize; 3]| shape.iter().map(|&n| n as u64).product::<u64>();
        let passes = if self.pass == Pass::Backward { 2 } else { 1 };
        let pool = self
            .pages
            .as_ref()
            .map_or(0, |pages| (pages.rows() * self.heads.kv) as u64 * (self.dims.qk + self.dims.v) as u64);
        let tensors = [self.q_shape(), self.k_shape(), self.v_shape(), self.out_shape()];
        passes * tensors.map(size).iter().sum::<u64>() + pool
    }
}

fn check_counts(fields: &ProblemFields) -> Result<(), ProblemError> {
    let ranges = [
        ("rows.q", fields.rows.q, 0, ROWS_MAX),
        ("rows.kv", fields.rows.kv, 0, ROWS_MAX),
        ("sequences", fields.sequences.len(), 0, SEQUENCES_MAX),
        ("heads.q", fields.heads.q, 1, HEADS_MAX),
        ("heads.kv", fields.heads.kv, 1, HEADS_MAX),
        ("dims.qk", fields.dims.qk, 1, HEAD_DIM_MAX),
        ("dims.v", fields.dims.v, 1, HEAD_DIM_MAX),
    ];
    for (field, got, min, max) in ranges {
        if !(min..=max).contains(&got) {
            return Err(ProblemError::OutOfRange { field, got, min, max });
        }
    }
    let Heads { q, kv } = fields.heads;
    if !q.is_multiple_of(kv) {
        return Err(ProblemError::HeadsNotDivisible { q, kv });
    }
    Ok(())
}

fn check_softmax(softmax: &Softmax) -> Result<(), ProblemError> {
    let factors = [
        ("scale", Some(softmax.scale), SCALE_MIN, SCALE_MAX),
        ("softcap", softmax.softcap, SOFTCAP_MIN, SOFTCAP_MAX),
    ];
    for (field, got, min, max) in factors {
        if let Some(got) = got.filter(|got| !(min..=max).contains(got)) {
            return Err(ProblemError::Factor { field, got, min, max });
        }
    }
    Ok(())
}

fn check_parallel(parallel: &ContextParallel) -> Result<(), ProblemError> {
    let size = parallel.size();
    let ranges =
        [("parallel.world", parallel.world, WORLD_MAX), ("the size of parallel.ranks", size, parallel.world)];
    for (field, got, max) in ranges {
        if !(1..=max).contains(&got) {
            return Err(ProblemError::OutOfRange { field, got, min: 1, max });
        }
    }
    let (got, max) = (parallel.region, WORLD_MAX / parallel.world);
    if !(1..=max).contains(&got) {
        return Err(ProblemError::OutOfRange { field: "parallel.region", got, min: 1, max });
    }
    let mut taken = vec![false; parallel.world];
    for (index, &rank) in parallel.ranks.iter().enumerate() {
        match taken.get_mut(rank) {
            None => return Err(ProblemError::RankOutsideWorld { index, rank, world: parallel.world }),
            Some(true) => return Err(ProblemError::RepeatedRank { rank }),
            Some(free) => *free = true,
        }
    }
    if let Balance::Striped { stripe } = parallel.balance
        && !(1..=ROWS_MAX).contains(&stripe)
    {
        let field = "parallel.balance.striped.stripe";
        return Err(ProblemError::OutOfRange { field, got: stripe, min: 1, max: ROWS_MAX });
    }
    let broken = parallel.algorithm.broken_by(size);
    broken.map_or(Ok(()), |rule| Err(ProblemError::GroupSize { size, rule }))
}

fn check_ids(sequences: &[Sequence]) -> Result<(), ProblemError> {
    let mut seen = std::collections::HashSet::with_capacity(sequences.len());
    match sequences.iter().position(|sequence| !seen.insert(sequence.id)) {
        Some(index) => Err(ProblemError::RepeatedId { index, id: sequences[index].id }),
        None => Ok(()),
    }
}

/// Checks that every run lies inside the tensor, and that no row is owned twice. The check keeps one bit for each row,
/// and rows are bounded by [`ROWS_MAX`].
fn check_rows(sequences: &[Sequence], side: Side, rows: usize) -> Result<(), ProblemError> {
    let mut owned = vec![0u64; rows.div_ceil(64)];
    for (index, sequence) in sequences.iter().enumerate() {
        let run = if side == Side::Q { sequence.q } else { sequence.kv };
        run.check(rows).map_err(|error| ProblemError::Run { index, side, error })?;
        for row in (0..run.span).map(|position| run.row(position)) {
            let (word, bit) = (row / 64, 1 << (row % 64));
            if owned[word] & bit != 0 {
                return Err(ProblemError::Overlap { index, side, row });
            }
            owned[word] |= bit;
        }
    }
    Ok(())
}
