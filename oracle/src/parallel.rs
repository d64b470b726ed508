//! Context parallelism (CP) as part of a problem: which algorithm, how sequences are cut, who takes part.

use std::mem::discriminant;

use serde::{Deserialize, Serialize};

/// Declares [`Algorithm`] from its table: each algorithm's variant, its parameter with the least value, and its name.
macro_rules! algorithms {
    ($($(#[$doc:meta])* $variant:ident $({ $(#[$of:meta])* $parameter:ident: $least:literal })? = $name:literal,)*) => {
        /// How keys and queries meet when the sequence is cut over ranks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields)]
        pub enum Algorithm {
            $($(#[$doc])* $variant $({ $(#[$of])* $parameter: usize })?,)*
        }

        impl Algorithm {
            /// Every algorithm in the order of the table, its parameter as small as it can be.
            pub const ALL: [Algorithm; [$($name),*].len()] = [$(Algorithm::$variant $({ $parameter: $least })?),*];

            /// The name in texts and tables of capabilities, which says nothing of the parameter.
            pub fn name(self) -> &'static str {
                match self {
                    $(Algorithm::$variant { .. } => $name,)*
                }
            }

            /// The parameter, where the algorithm has one: a number of ranks that divides the CP size.
            pub fn parameter(self) -> Option<usize> {
                match self {
                    $(Algorithm::$variant { $($parameter)? } => None$(.or(Some($parameter)))?,)*
                }
            }

            /// The algorithm with another parameter, where it has one.
            pub fn with_parameter(mut self, value: usize) -> Algorithm {
                match &mut self {
                    $(Algorithm::$variant { $($parameter)? } => { $(*$parameter = value;)? })*
                }
                self
            }
        }
    };
}

algorithms! {
    /// One rank, no communication.
    Single = "single",
    /// Ring (P2P): key/value pieces travel round the ranks.
    Ring = "ring",
    /// All-gather of keys and values, each rank computing its queries.
    AllGather = "all-gather",
    /// All-to-all between sequence and heads (Ulysses).
    AllToAll = "all-to-all",
    /// All-to-all inside groups of this size, a ring between the groups (`a2a+p2p`).
    Hierarchical {
        /// Ranks of one all-to-all group; divides the CP size.
        all_to_all: 1
    } = "hierarchical",
}

impl Algorithm {
    /// Every algorithm that cuts a sequence over ranks.
    pub fn of_several_ranks() -> impl Iterator<Item = Algorithm> {
        Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Single)
    }

    /// The place in [`Algorithm::ALL`].
    pub fn number(self) -> usize {
        let is_other = |other: &&Algorithm| discriminant(*other) != discriminant(&self);
        Algorithm::ALL.iter().take_while(is_other).count()
    }

    /// The rule that a group of `size` ranks breaks, if any.
    pub(crate) fn broken_by(self, size: usize) -> Option<&'static str> {
        match self {
            Algorithm::Single if size != 1 => Some("the single-rank algorithm takes exactly 1"),
            Algorithm::Hierarchical { all_to_all } if all_to_all == 0 || !size.is_multiple_of(all_to_all) => {
                Some("hierarchical.all_to_all must divide the CP size")
            }
            Algorithm::Single
            | Algorithm::Ring
            | Algorithm::AllGather
            | Algorithm::AllToAll
            | Algorithm::Hierarchical { .. } => None,
        }
    }
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
