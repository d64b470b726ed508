//! The form in which a problem is given to a subject, and the way back from it.
//!
//! A form is no part of the mathematics. All forms of one problem have one answer, in the same rows. What a form cannot
//! say is no problem in that form.
//!
//! Several ranks are given ids, positions and lengths as [`dealing`](crate::dealing) defines.
//!
//! A caller who gives `cu_seqlens` of real tokens and of rows may also say, in one word, whether they differ:
//! `pad_between_seqs`, as TransformerEngine calls it. Without the word a subject compares them. The word `true` allows
//! a difference and demands none. The word `false` where they differ is a lie, and no problem: backends of
//! TransformerEngine then index rows by sums of real lengths, or divide real lengths by the ranks, so that the call has
//! no one meaning. Who wants rows of padding read as real gives them as real rows.

use serde::{Deserialize, Serialize};

use crate::dealing::Dealt;
use crate::segments::{Described, Segments, SegmentsError, batch_rows, batched, described, misshapen};
use crate::sharding::{ShardingError, run_of};
use crate::{Algorithm, Balance, Problem, ProblemFields, Run, Sequence, Side, TensorRows};

/// The way in which a subject is told lengths and places of a problem's sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// First rows and real lengths of the sequences, as `cu_seqlens` beside lengths. It says every problem.
    #[default]
    CuSeqlens,
    /// Segment ids and positions of the rows. They say which rows hold tokens, so that no sequence owns others; where
    /// several ranks share it, it owns the fewest rows that they can share.
    Segments,
    /// A padded batch (BSHD) with the lengths of its batch rows, each of which is a sequence.
    Lengths,
    /// As [`Form::CuSeqlens`], with `pad_between_seqs` true: first rows may be others than sums of real lengths. It
    /// says every problem.
    PadBetweenSeqs,
    /// As [`Form::CuSeqlens`], with `pad_between_seqs` false: first rows are the sums of the real lengths before them.
    NoPadBetweenSeqs,
    /// As [`Form::Segments`], in arrays of any number of leading dimensions, some of which are broadcast.
    BatchedSegments,
    /// A contradiction: segment ids whose extra dimensions differ, in number or in shape alone.
    MisshapenSegments,
    /// A contradiction: a padded batch with one length fewer for keys than for queries.
    UnequalLengths,
}

/// What a form cannot say of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormError {
    /// An algorithm of several ranks, which are not given the form.
    #[error("the algorithm is {algorithm}; only single is given so")]
    Algorithm {
        /// The algorithm.
        algorithm: &'static str,
    },
    /// A sequence-parallel region.
    #[error("the region has {ranks} ranks; only 1 is given so")]
    Region {
        /// The ranks of the region.
        ranks: usize,
    },
    /// A run that lies elsewhere than the form says, or has padding that it does not say.
    #[error(
        "sequences[{index}].{side} has offset {}, step {} and span {}, not {}, {} and {}",
        got.offset, got.step, got.span, expected.offset, expected.step, expected.span
    )]
    Run {
        /// The index of the sequence.
        index: usize,
        /// The side.
        side: Side,
        /// The run.
        got: Run,
        /// The run of as many tokens that the form says.
        expected: Run,
    },
    /// A first row that dealt ids do not say: a rank would have a part of the row of another.
    #[error("sequences[{index}].{side} has offset {offset}, which {ranks} ranks do not divide")]
    Offset {
        /// The index of the sequence.
        index: usize,
        /// The side.
        side: Side,
        /// The offset.
        offset: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A number of rows that dealt ids do not say: some belong to no rank.
    #[error("rows.{side} is {rows}, which {ranks} ranks do not divide")]
    Shares {
        /// The side.
        side: Side,
        /// The number of rows.
        rows: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A number of batch rows that cannot be given in two ways, or of which none can be left out.
    #[error("there are {count} batch rows; only {needed} contradict each other so")]
    BatchRows {
        /// The number of batch rows.
        count: usize,
        /// The numbers that are given so.
        needed: &'static str,
    },
    /// Another number of rows than all batch rows have.
    #[error("rows.{side} is {rows}, and the batch has {expected}")]
    Rows {
        /// The side.
        side: Side,
        /// The number of rows.
        rows: usize,
        /// The number of rows of all batch rows together.
        expected: usize,
    },
}

impl Form {
    /// Every form that says problems, the plain one first.
    pub const ALL: [Form; 6] = [
        Form::CuSeqlens,
        Form::Segments,
        Form::Lengths,
        Form::PadBetweenSeqs,
        Form::NoPadBetweenSeqs,
        Form::BatchedSegments,
    ];
    /// Every contradiction.
    pub const CONTRADICTIONS: [Form; 2] = [Form::MisshapenSegments, Form::UnequalLengths];

    /// Returns the name in texts and files.
    pub fn name(self) -> &'static str {
        match self {
            Form::CuSeqlens => "cu_seqlens",
            Form::Segments => "segments",
            Form::Lengths => "lengths",
            Form::PadBetweenSeqs => "pad_between_seqs",
            Form::NoPadBetweenSeqs => "no_pad_between_seqs",
            Form::BatchedSegments => "batched_segments",
            Form::MisshapenSegments => "misshapen_segments",
            Form::UnequalLengths => "unequal_lengths",
        }
    }

    /// Whether this is the form that says every problem, without a word about padding.
    pub fn is_plain(&self) -> bool {
        *self == Form::CuSeqlens
    }

    /// Whether first rows and real lengths are given, under any algorithm.
    pub fn gives_offsets(&self) -> bool {
        matches!(self, Form::CuSeqlens | Form::PadBetweenSeqs | Form::NoPadBetweenSeqs)
    }

    /// Whether several ranks are given the form too, each what belongs to its own rows.
    pub fn is_dealt(&self) -> bool {
        self.gives_offsets() || matches!(self, Form::Segments | Form::Lengths)
    }

    /// Whether the form says no problem, so that every subject must refuse it.
    pub fn is_contradiction(&self) -> bool {
        Form::CONTRADICTIONS.contains(self)
    }

    /// Returns the caller's word for padding between sequences; `None` where nothing is said.
    pub fn pad_between_seqs(&self) -> Option<bool> {
        match self {
            Form::PadBetweenSeqs => Some(true),
            Form::NoPadBetweenSeqs => Some(false),
            _ => None,
        }
    }

    /// Checks that the form says these fields. The fields' own form is not read.
    pub fn check(self, fields: &ProblemFields) -> Result<(), FormError> {
        if matches!(self, Form::CuSeqlens | Form::PadBetweenSeqs) {
            return Ok(());
        }
        let parallel = &fields.parallel;
        if parallel.algorithm != Algorithm::Single && !self.is_dealt() {
            return Err(FormError::Algorithm { algorithm: parallel.algorithm.name() });
        }
        if parallel.region > 1 {
            return Err(FormError::Region { ranks: parallel.region });
        }
        let (ranks, unit) = parallel.shares();
        let shared = |rows: usize| rows.checked_next_multiple_of(unit).unwrap_or(rows);
        for (side, rows) in [(Side::Q, fields.rows.q), (Side::Kv, fields.rows.kv)] {
            let runs: Vec<Run> = fields.sequences.iter().map(|sequence| run_of(sequence, side)).collect();
            let span = runs.first().map_or(0, |run| shared(run.span));
            let mut real = 0;
            for (index, &got) in runs.iter().enumerate() {
                let expected = match self {
                    Form::Lengths | Form::UnequalLengths => Run::packed(index * span, got.len, span),
                    Form::NoPadBetweenSeqs => Run::packed(real, got.len, got.len),
                    _ => Run::packed(got.offset, got.len, shared(got.len)),
                };
                if got != expected {
                    return Err(FormError::Run { index, side, got, expected });
                }
                if !self.gives_offsets() && !got.offset.is_multiple_of(ranks) {
                    return Err(FormError::Offset { index, side, offset: got.offset, ranks });
                }
                real += got.len;
            }
            let expected = span * runs.len();
            if matches!(self, Form::Lengths | Form::UnequalLengths) && rows != expected {
                return Err(FormError::Rows { side, rows, expected });
            }
            if !self.gives_offsets() && !rows.is_multiple_of(ranks) {
                return Err(FormError::Shares { side, rows, ranks });
            }
        }
        self.check_contradiction(&fields.sequences, fields.rows)
    }

    /// Checks that sequences have the contradiction, where the form is one.
    fn check_contradiction(self, sequences: &[Sequence], rows: TensorRows) -> Result<(), FormError> {
        let (is_there, count, needed) = match self {
            Form::MisshapenSegments => (
                misshapen(sequences, rows).is_some(),
                batch_rows(sequences, rows),
                "two or more, beside keys that divide otherwise,",
            ),
            Form::UnequalLengths => (!sequences.is_empty(), sequences.len(), "one or more"),
            _ => return Ok(()),
        };
        if is_there { Ok(()) } else { Err(FormError::BatchRows { count, needed }) }
    }
}

/// What a subject is given in place of a problem's sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Given {
    /// Ids and positions of both sides (made from the ids where they are left out), and the largest number of segments
    /// of a batch row.
    Segments {
        /// q and kv.
        sides: [Described; 2],
        /// The largest number of segments.
        most: usize,
    },
    /// Lengths of the batch rows, of q and of kv.
    Lengths([Vec<usize>; 2]),
    /// What each of several ranks is given, and how rows are dealt to them.
    Dealt {
        /// The parts of all ranks.
        dealt: Dealt,
        /// The balance.
        balance: Balance,
    },
}

impl Given {
    /// Returns what is given in place of a problem's sequences; `None` where these themselves are.
    pub fn of(problem: &Problem) -> Option<Given> {
        let lengths = |side| problem.sequences.iter().map(|sequence| run_of(sequence, side).len).collect();
        let segments = |sides| Given::Segments { sides, most: problem.sequences.len() };
        let several = problem.parallel.algorithm != Algorithm::Single;
        let balance = problem.parallel.balance;
        // Rows that these forms say can be cut.
        let dealt = |dealt: Result<Dealt, ShardingError>| Some(Given::Dealt { dealt: dealt.ok()?, balance });
        match problem.form {
            Form::CuSeqlens | Form::PadBetweenSeqs | Form::NoPadBetweenSeqs => None,
            Form::Segments if several => dealt(Dealt::segments(problem)),
            Form::Lengths if several => dealt(Dealt::lengths(problem)),
            Form::Segments => {
                let [q, kv] = described(&problem.sequences, problem.rows);
                Some(segments([q, Described { positions: None, ..kv }]))
            }
            Form::BatchedSegments => {
                Some(segments(batched(&problem.sequences, problem.rows, problem.data_seed)))
            }
            Form::MisshapenSegments => misshapen(&problem.sequences, problem.rows).map(segments),
            Form::Lengths => Some(Given::Lengths([Side::Q, Side::Kv].map(lengths))),
            Form::UnequalLengths => {
                let mut sides: [Vec<usize>; 2] = [Side::Q, Side::Kv].map(lengths);
                sides[1].pop();
                Some(Given::Lengths(sides))
            }
        }
    }

    /// Returns the sequences that it says in tensors of so many rows. Sequences without rows are not said by segments.
    pub fn sequences(&self, rows: TensorRows) -> Result<Vec<Sequence>, SegmentsError> {
        match self {
            Given::Segments { sides: [q, kv], most } => Segments::new(q, kv)?.sequences(*most),
            Given::Dealt { dealt, balance } => Ok(dealt.sequences(*balance)?),
            Given::Lengths([q, kv]) if q.len() != kv.len() => {
                Err(SegmentsError::Lengths { q: q.len(), kv: kv.len() })
            }
            Given::Lengths([q, kv]) => {
                let count = q.len().max(1);
                let spans = [rows.q / count, rows.kv / count];
                let sequence = |(id, (&q, &kv)): (u32, (&usize, &usize))| {
                    let [q, kv] = [(q, spans[0]), (kv, spans[1])]
                        .map(|(len, span)| Run::packed(id as usize * span, len, span));
                    Sequence { id, q, kv }
                };
                Ok((0..).zip(q.iter().zip(kv)).map(sequence).collect())
            }
        }
    }
}
