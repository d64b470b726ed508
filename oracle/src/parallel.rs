//! Context parallelism (CP) as part of a problem: which algorithm, how sequences are cut, who takes part.

use serde::{Deserialize, Serialize};

/// How keys and queries meet when the sequence is cut over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Algorithm {
    /// One rank, no communication.
    Single,
    /// Ring (P2P): key/value pieces travel round the ranks.
    Ring,
    /// All-gather of keys and values, each rank computing its queries.
    AllGather,
    /// All-to-all between sequence and heads (Ulysses).
    AllToAll,
    /// All-to-all inside groups of this size, a ring between the groups (`a2a+p2p`).
    Hierarchical {
        /// Ranks of one all-to-all group; divides the CP size.
        all_to_all: usize,
    },
}

/// How one sequence's rows are dealt to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Balance {
    /// Rank r holds the r-th piece.
    Contiguous,
    /// `2·cp` chunks, rank r holding chunks r and `2·cp − 1 − r` (zigzag).
    DualChunk,
    /// Stripes of this many rows dealt round the ranks.
    Striped {
        /// Rows of one stripe; at least 1.
        stripe: usize,
    },
}

/// The CP part of a problem. The CP size is `ranks.len()`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextParallel {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The sharding.
    pub balance: Balance,
    /// Ranks of the whole world.
    pub world: usize,
    /// The group's members, world ranks in group order.
    pub ranks: Vec<usize>,
}

impl ContextParallel {
    /// One rank in a world of one.
    pub fn single() -> ContextParallel {
        ContextParallel::over(1, Algorithm::Single, Balance::Contiguous)
    }

    /// All ranks of a world of `cp`, in order.
    pub fn over(cp: usize, algorithm: Algorithm, balance: Balance) -> ContextParallel {
        ContextParallel { algorithm, balance, world: cp, ranks: (0..cp).collect() }
    }

    /// The CP size.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }
}
