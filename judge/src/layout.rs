//! Who owns which row: how a problem's rows are dealt to ranks, from the problem alone.
//!
//! The judge reads a subject's results through this map, and never through anything that the subject says of itself. A
//! single rank holds the problem's own layout; with several, each side is cut by the problem's balance.

use seamproof_oracle::{Algorithm, Problem, Run, Side};
use seamproof_simulator::schedule::PlacedRun;
use seamproof_simulator::shard::{Piece, Shard, ShardError};

/// One rank's rows of both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLayout {
    /// Queries.
    pub q: SideLayout,
    /// Keys and values.
    pub kv: SideLayout,
}

/// One rank's rows of one side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideLayout {
    /// Rows of the rank's tensors.
    pub rows: usize,
    /// The runs that sequences own.
    pub runs: Vec<PlacedRun>,
}

impl RankLayout {
    /// One side.
    pub fn side(&self, side: Side) -> &SideLayout {
        match side {
            Side::Q => &self.q,
            Side::Kv => &self.kv,
        }
    }
}

/// The layouts of a problem's ranks, in group order.
pub fn layouts(problem: &Problem) -> Result<Vec<RankLayout>, ShardError> {
    if problem.parallel.algorithm == Algorithm::Single {
        return Ok(vec![whole(problem)]);
    }
    let (q, kv) = (Shard::new(problem, Side::Q)?, Shard::new(problem, Side::Kv)?);
    let on_rank = |shard: &Shard, rank: usize| SideLayout { rows: shard.rows, runs: shard.placed(rank) };
    let ranks = 0..problem.parallel.size();
    Ok(ranks.map(|rank| RankLayout { q: on_rank(&q, rank), kv: on_rank(&kv, rank) }).collect())
}

/// The problem's own layout.
pub fn whole(problem: &Problem) -> RankLayout {
    let side = |side: Side, rows: usize| SideLayout { rows, runs: whole_runs(problem, side) };
    RankLayout { q: side(Side::Q, problem.rows.q), kv: side(Side::Kv, problem.rows.kv) }
}

fn whole_runs(problem: &Problem, side: Side) -> Vec<PlacedRun> {
    let place = |(sequence, local): (usize, Run)| PlacedRun {
        sequence,
        piece: Piece { start: 0, step: 1, span: local.span, at: 0 },
        local,
    };
    problem.sequences.iter().map(|both| run_of(both, side)).enumerate().map(place).collect()
}

/// A sequence's rows in the problem's own tensors.
pub fn run_of(sequence: &seamproof_oracle::Sequence, side: Side) -> Run {
    match side {
        Side::Q => sequence.q,
        Side::Kv => sequence.kv,
    }
}
