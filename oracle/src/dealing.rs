//! Ids, positions and lengths as each rank of a group is given them, and the way back to the problem.
//!
//! Under context parallelism a caller cuts the arrays that describe sequences as it cuts the tokens. *Dealt* ids and
//! positions are those of a rank's own rows, in the order of these rows: of each row what the arrays of the whole
//! problem say of it ([`segments`](crate::segments)). Which rows a rank has says [`sharding`](crate::sharding) alone. A
//! position keeps its value, and does not begin again on each rank. A row that no token lies in has the id 0 and the
//! position 0. Lengths of a padded batch are not dealt: each rank has the lengths of the whole batch.
//!
//! Ids name tokens only. So a sequence owns the fewest rows that a group can share: its length, rounded up to a multiple
//! of [`span_multiple`]. Its first row, and the number of all rows, are multiples of the number of ranks, so that each
//! rank has an equal part of the rows before it.
//!
//! Ids of a batch of which each sequence is one batch row, dealt in two chunks, and of a pack, dealt in stripes where
//! each sequence begins at a multiple of a round of stripes, are those of TransformerEngine's
//! `reorder_causal_load_balancing`
//! (<https://github.com/NVIDIA/TransformerEngine>, `transformer_engine/jax/cpp_extensions/attention.py`), cut into equal
//! parts.

use std::collections::{BTreeMap, BTreeSet};

use crate::limits::ROWS_MAX;
use crate::segments::numbered;
use crate::sharding::{RankLayout, ShardingError, SideLayout, deal, members, run_of, span_multiple};
use crate::{Balance, Problem, Run, Sequence, Side, TensorRows};

/// Ids and positions of one side's rows on one rank: one of each for every row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// Segment ids; 0 for a row that holds no token.
    pub ids: Vec<i32>,
    /// Positions in the sequences; without meaning where the id is 0.
    pub positions: Vec<i32>,
}

/// Lengths of a padded batch, and the rows that one rank has of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPart {
    /// The whole lengths of the batch rows, of q and of kv.
    pub lengths: [Vec<usize>; 2],
    /// The numbers of rows of the rank's own tensors.
    pub rows: TensorRows,
}

/// What each rank of a group is given in place of the sequences, in group order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dealt {
    /// Ids and positions of the rank's rows of q and of kv.
    Segments(Vec<[Labels; 2]>),
    /// Lengths of a padded batch.
    Lengths(Vec<BatchPart>),
}

/// The reason why what all ranks are given together is no problem. Ranks are places in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DealingError {
    /// Ids and positions of different numbers of rows.
    #[error("rank {rank} has {ids} ids and {positions} positions of {side}; give one of each for every row")]
    Arrays {
        /// The rank.
        rank: usize,
        /// The side.
        side: Side,
        /// The number of ids.
        ids: usize,
        /// The number of positions.
        positions: usize,
    },
    /// Stripes of no rows, or of more than a tensor may have.
    #[error("stripes have {stripe} rows; use 1 to {most}")]
    Stripe {
        /// The rows of a stripe.
        stripe: usize,
        /// The largest number.
        most: usize,
    },
    /// Another number of rows than the first rank has.
    #[error("rank {rank} has {rows} rows of {side} and rank 0 {expected}; deal all ranks equally many")]
    Rows {
        /// The rank.
        rank: usize,
        /// The side.
        side: Side,
        /// The rank's number of rows.
        rows: usize,
        /// The first rank's number of rows.
        expected: usize,
    },
    /// A segment id below 0.
    #[error("rank {rank}: row {row} of {side} has the id {id}; use 0 for padding and more for segments")]
    Negative {
        /// The rank.
        rank: usize,
        /// The side.
        side: Side,
        /// The row of the rank's tensor.
        row: usize,
        /// The id.
        id: i32,
    },
    /// An id none of whose rows, on any rank, has the position 0.
    #[error("no rank has the position 0 of id {id} of {side}; positions count from 0 in the whole sequence")]
    NoFirst {
        /// The side.
        side: Side,
        /// The id.
        id: i32,
    },
    /// A row that is not where the balance puts its position, or a position past the last one.
    #[error(
        "rank {rank}: row {row} of {side} has position {position} of id {id}, of which there are {len} rows; \
         deal ids and positions like the tokens, and keep the positions of the whole sequence"
    )]
    Place {
        /// The rank.
        rank: usize,
        /// The side.
        side: Side,
        /// The row of the rank's tensor.
        row: usize,
        /// The id.
        id: i32,
        /// The position.
        position: i32,
        /// The number of rows with the id on all ranks.
        len: usize,
    },
    /// A rank whose lengths are not those of the first one.
    #[error("rank {rank} has other lengths of {side} than rank 0; give all of them those of the whole batch")]
    Lengths {
        /// The first such rank.
        rank: usize,
        /// The side.
        side: Side,
    },
    /// Lists of lengths that do not go together.
    #[error("q has {q} lengths and kv {kv}; give both for each batch row")]
    Count {
        /// The number of lengths of q.
        q: usize,
        /// The number of lengths of k and v.
        kv: usize,
    },
    /// Rows of a rank that the batch rows do not share evenly.
    #[error("each rank has {rows} rows of {side}, which {batch_rows} batch rows cannot share evenly")]
    BatchRows {
        /// The side.
        side: Side,
        /// The number of rows of a rank.
        rows: usize,
        /// The number of batch rows.
        batch_rows: usize,
    },
}

impl Dealt {
    /// Returns the ids and positions of a problem's sequences, dealt to its ranks.
    pub fn segments(problem: &Problem) -> Result<Dealt, ShardingError> {
        let [q, kv] = numbered(&problem.sequences, problem.rows, &[]);
        let part = |whole: &[i32], side, layout: &SideLayout| part(whole, &problem.sequences, side, layout);
        let labels = |(ids, positions): (&[i32], &[i32]), side, layout: &SideLayout| Labels {
            ids: part(ids, side, layout),
            positions: part(positions, side, layout),
        };
        let ranks = members(problem)?;
        let of_rank = |rank: &RankLayout| {
            [labels(q.arrays(), Side::Q, &rank.q), labels(kv.arrays(), Side::Kv, &rank.kv)]
        };
        Ok(Dealt::Segments(ranks.iter().map(of_rank).collect()))
    }

    /// Returns the lengths of a padded batch, as each of its ranks is given them.
    pub fn lengths(problem: &Problem) -> Result<Dealt, ShardingError> {
        let lengths = [Side::Q, Side::Kv]
            .map(|side| problem.sequences.iter().map(|sequence| run_of(sequence, side).len).collect());
        let part = |rows| BatchPart { lengths: lengths.clone(), rows };
        let ranks = members(problem)?;
        let rows = ranks.iter().map(|rank| TensorRows { q: rank.q.rows, kv: rank.kv.rows });
        Ok(Dealt::Lengths(rows.map(part).collect()))
    }

    /// Returns the sequences that all ranks are given together, in tensors of all their rows. Sequences without a token
    /// are not said by ids; those that are, follow each other in the order of their ids.
    pub fn sequences(&self, balance: Balance) -> Result<Vec<Sequence>, DealingError> {
        match self {
            Dealt::Segments(ranks) => {
                check_stripe(balance)?;
                let [q, kv] = [Side::Q, Side::Kv].map(|side| {
                    let of_side: Vec<&Labels> = ranks.iter().map(|rank| &rank[side as usize]).collect();
                    runs(&of_side, side, balance)
                });
                Ok(paired(&q?, &kv?))
            }
            Dealt::Lengths(ranks) => batch(ranks),
        }
    }
}

fn check_stripe(balance: Balance) -> Result<(), DealingError> {
    match balance {
        Balance::Striped { stripe } if !(1..=ROWS_MAX).contains(&stripe) => {
            Err(DealingError::Stripe { stripe, most: ROWS_MAX })
        }
        _ => Ok(()),
    }
}

/// Returns what a rank is given of an array with an element for each row of a side: those of its own rows, and 0 for
/// rows that no sequence owns.
fn part(whole: &[i32], sequences: &[Sequence], side: Side, layout: &SideLayout) -> Vec<i32> {
    let mut own = vec![0; layout.rows];
    for placed in &layout.runs {
        let (run, piece) = (run_of(&sequences[placed.sequence], side), placed.piece);
        for i in 0..placed.local.span {
            own[placed.local.row(i)] = whole[run.row(piece.start + i * piece.step)];
        }
    }
    own
}

/// Row of one rank that holds a token.
struct Token {
    rank: usize,
    row: usize,
    position: i32,
}

/// Returns the run of each id in a tensor of all ranks' rows.
fn runs(ranks: &[&Labels], side: Side, balance: Balance) -> Result<BTreeMap<i32, Run>, DealingError> {
    let expected = ranks.first().map_or(0, |labels| labels.ids.len());
    let mut of_id: BTreeMap<i32, Vec<Token>> = BTreeMap::new();
    for (rank, Labels { ids, positions }) in ranks.iter().enumerate() {
        if ids.len() != positions.len() {
            let (ids, positions) = (ids.len(), positions.len());
            return Err(DealingError::Arrays { rank, side, ids, positions });
        }
        if ids.len() != expected {
            return Err(DealingError::Rows { rank, side, rows: ids.len(), expected });
        }
        for (row, (&id, &position)) in ids.iter().zip(positions).enumerate() {
            match id {
                0 => {}
                1.. => of_id.entry(id).or_default().push(Token { rank, row, position }),
                _ => return Err(DealingError::Negative { rank, side, row, id }),
            }
        }
    }
    let run = |(id, tokens): (i32, Vec<Token>)| Ok((id, run(&tokens, id, side, balance, ranks.len())?));
    of_id.into_iter().map(run).collect()
}

/// Returns the run of one id, whose rows have to be where the balance puts their positions.
fn run(tokens: &[Token], id: i32, side: Side, balance: Balance, cp: usize) -> Result<Run, DealingError> {
    let len = tokens.len();
    let span = len.next_multiple_of(span_multiple(balance, cp));
    // Position 0 is in the first row of the first rank's slot, and slots lie alike on all ranks.
    let first = tokens.iter().find(|token| token.position == 0).ok_or(DealingError::NoFirst { side, id })?;
    let slot = first.row;
    for &Token { rank, row, position } in tokens {
        let place = usize::try_from(position).ok().filter(|position| *position < len);
        let expected = place.map(|position| deal(balance, cp, span, position));
        if expected.map(|(rank, at)| (rank, slot + at)) != Some((rank, row)) {
            return Err(DealingError::Place { rank, side, row, id, position, len });
        }
    }
    Ok(Run::packed(slot * cp, len, span))
}

/// Returns a sequence for each id of either side. An id of one side alone has no rows on the other.
fn paired(q: &BTreeMap<i32, Run>, kv: &BTreeMap<i32, Run>) -> Vec<Sequence> {
    let ids: BTreeSet<i32> = q.keys().chain(kv.keys()).copied().collect();
    let run = |runs: &BTreeMap<i32, Run>, id| runs.get(&id).copied().unwrap_or(Run::packed(0, 0, 0));
    (0..).zip(ids).map(|(number, id)| Sequence { id: number, q: run(q, id), kv: run(kv, id) }).collect()
}

/// Returns the sequences of a padded batch.
fn batch(ranks: &[BatchPart]) -> Result<Vec<Sequence>, DealingError> {
    let Some(first) = ranks.first() else { return Ok(Vec::new()) };
    let sides = [(Side::Q, first.rows.q), (Side::Kv, first.rows.kv)];
    for (rank, part) in ranks.iter().enumerate() {
        for ((side, expected), rows) in sides.into_iter().zip([part.rows.q, part.rows.kv]) {
            if rows != expected {
                return Err(DealingError::Rows { rank, side, rows, expected });
            }
            if part.lengths[side as usize] != first.lengths[side as usize] {
                return Err(DealingError::Lengths { rank, side });
            }
        }
    }
    let [q, kv] = &first.lengths;
    if q.len() != kv.len() {
        return Err(DealingError::Count { q: q.len(), kv: kv.len() });
    }
    let batch_rows = q.len().max(1);
    if let Some((side, rows)) = sides.into_iter().find(|(_, rows)| !rows.is_multiple_of(batch_rows)) {
        return Err(DealingError::BatchRows { side, rows, batch_rows });
    }
    let spans = sides.map(|(_, rows)| rows / batch_rows * ranks.len());
    let run = |number: u32, len: usize, span: usize| Run::packed(number as usize * span, len, span);
    let sequence = |(id, (&q, &kv)): (u32, (&usize, &usize))| Sequence {
        id,
        q: run(id, q, spans[0]),
        kv: run(id, kv, spans[1]),
    };
    Ok((0..).zip(q.iter().zip(kv)).map(sequence).collect())
}
