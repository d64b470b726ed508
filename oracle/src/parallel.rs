//! Context parallelism (CP) as part of a problem: the algorithm, the cut of the sequences, the ranks of the group, and
//! the sequence-parallel region that each of them is.

use std::mem::discriminant;

use serde::{Deserialize, Serialize};

use crate::sharding::span_multiple;

/// Declares [`Algorithm`] from its table: each algorithm's variant, its parameter with the least value, and its name.
macro_rules! algorithms {
    ($($(#[$doc:meta])* $variant:ident $({ $(#[$of:meta])* $parameter:ident: $least:literal })? = $name:literal,)*) => {
        /// The way in which queries and keys meet where sequences are cut over ranks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields)]
        pub enum Algorithm {
            $($(#[$doc])* $variant $({ $(#[$of])* $parameter: usize })?,)*
        }

        impl Algorithm {
            /// Every algorithm in the order of the table, each with its least parameter.
            pub const ALL: [Algorithm; [$($name),*].len()] = [$(Algorithm::$variant $({ $parameter: $least })?),*];

            /// Returns the name in texts and tables, without the parameter.
            pub fn name(self) -> &'static str {
                match self {
                    $(Algorithm::$variant { .. } => $name,)*
                }
            }

            /// Returns the algorithm's parameter, if any: a number of ranks that divides the CP size.
            pub fn parameter(self) -> Option<usize> {
                match self {
                    $(Algorithm::$variant { $($parameter)? } => None$(.or(Some($parameter)))?,)*
                }
            }

            /// Returns the algorithm with another parameter. An algorithm without one is returned unchanged.
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
    /// All-gather of keys and values; each rank computes its own queries.
    AllGather = "all-gather",
    /// All-to-all between sequence and heads (Ulysses).
    AllToAll = "all-to-all",
    /// All-to-all inside groups of ranks, and a ring between the groups (`a2a+p2p`).
    Hierarchical {
        /// The ranks of one all-to-all group, a divisor of the CP size.
        all_to_all: 1
    } = "hierarchical",
}

impl Algorithm {
    /// Returns every algorithm that cuts a sequence over ranks.
    pub fn of_several_ranks() -> impl Iterator<Item = Algorithm> {
        Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Single)
    }

    /// Returns the place in [`Algorithm::ALL`].
    pub fn number(self) -> usize {
        let is_other = |other: &&Algorithm| discriminant(*other) != discriminant(&self);
        Algorithm::ALL.iter().take_while(is_other).count()
    }

    /// Returns the rule that a group of `size` ranks breaks, if any.
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

/// The way in which one sequence's rows are dealt to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Balance {
    /// Contiguous pieces: rank r holds the r-th piece.
    Contiguous,
    /// `2·cp` chunks (zigzag): rank r holds chunks r and `2·cp − 1 − r`.
    DualChunk,
    /// Stripes of equally many rows, dealt round the ranks.
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
    /// The balance.
    pub balance: Balance,
    /// The number of ranks in the world. Those that run no group are *idle*.
    pub world: usize,
    /// The group's members: ranks of the world, in group order.
    pub ranks: Vec<usize>,
    /// The ranks of the [sequence-parallel region](crate::region) that each member of the group is; 1 for none.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub region: usize,
}

fn one() -> usize {
    1
}

fn is_one(region: &usize) -> bool {
    *region == 1
}

impl ContextParallel {
    /// Returns a group of one rank in a world of one.
    pub fn single() -> ContextParallel {
        ContextParallel::over(1, Algorithm::Single, Balance::Contiguous)
    }

    /// Returns a group of all ranks of a world of `cp`, in order.
    pub fn over(cp: usize, algorithm: Algorithm, balance: Balance) -> ContextParallel {
        ContextParallel { algorithm, balance, world: cp, ranks: (0..cp).collect(), region: 1 }
    }

    /// Returns the CP size.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the number of ranks that share each sequence, and the number of which their spans are multiples: 1 and 1
    /// with the single-rank algorithm. Neither is 0, in fields that make no problem either.
    pub fn shares(&self) -> (usize, usize) {
        if self.algorithm == Algorithm::Single {
            return (1, 1);
        }
        let ranks = self.size().max(1);
        (ranks, span_multiple(self.balance, ranks).max(1))
    }

    /// Returns the number of ranks that hold a part of the problem: those of all regions.
    pub fn all_ranks(&self) -> usize {
        self.size() * self.region
    }

    /// Returns the number of ranks of the world, those of regions counted one by one.
    pub fn all_of_world(&self) -> usize {
        self.world * self.region
    }

    /// Returns the ranks of the world that hold a part of the problem, in order of places. In regions of T ranks,
    /// member r of the group is the ranks `T·r` to `T·r + T − 1`.
    pub fn world_ranks(&self) -> impl Iterator<Item = usize> {
        (0..self.all_ranks()).map(|place| self.world_rank(place))
    }

    /// Returns the rank of the world at a place below [`ContextParallel::all_ranks`].
    pub fn world_rank(&self, place: usize) -> usize {
        self.ranks[place / self.region] * self.region + place % self.region
    }

    /// Returns the group's *neighbour*, with its algorithm and balance: a second group of as many ranks, the first ones
    /// of the world that are not in this one, in ascending order. Returns `None` where too few are left, and for the
    /// single-rank algorithm.
    pub fn neighbour(&self) -> Option<ContextParallel> {
        let left = (0..self.world).filter(|rank| !self.ranks.contains(rank));
        let ranks: Vec<usize> = left.take(self.size()).collect();
        let has_room = self.algorithm != Algorithm::Single && ranks.len() == self.size();
        has_room.then(|| ContextParallel { ranks, ..self.clone() })
    }

    /// Whether one rank holds the problem's own tensors.
    pub fn is_whole(&self) -> bool {
        self.algorithm == Algorithm::Single && self.region == 1
    }
}
