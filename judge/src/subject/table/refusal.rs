//! The rows of a table that refuse a problem.

use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{Algorithm, Element, Form, Mask, Pass, Precision, Problem, Run, Sequence, Side};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{BalanceKind, Layouts, MaskForm, MaskKind, Seams, SideLayout, Table, Unpadded};
use crate::subject::Word;
use crate::subject::parallel::{ParallelRule, broken_rule};

/// Reason for a refusal: the row of the table that says no. Two refusals are equal where their rows are, because the
/// values are the problem's own. A refusal is stored and sent as the name of its row.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Formats that the subject does not take together.
    #[error("{quantity} in {element} is not supported")]
    Precision {
        /// Name of the first quantity in [`Precision`] that is unlike the nearest precision of the table.
        quantity: Word,
        /// Format and scaling of that quantity.
        element: Element,
    },
    /// A head dimension that is not in the set.
    #[error("head dimension {dim} of {which} is not supported")]
    HeadDim {
        /// Name of the dimension, `qk` or `v`.
        which: Word,
        /// Size of the dimension.
        dim: usize,
    },
    /// Different head dimensions.
    #[error("head dimensions of keys and values that differ are not supported")]
    UnequalDims,
    /// A number of query heads for each KV head.
    #[error("{0} query heads for each KV head are not supported")]
    Group(usize),
    /// Too many query heads.
    #[error("{0} query heads are too many")]
    Heads(usize),
    /// A form of mask.
    #[error("a mask of the form {} is not supported", .0.name())]
    MaskForm(MaskForm),
    /// What a mask has besides a band.
    #[error("a mask with {} is not supported", .0.name())]
    MaskKind(MaskKind),
    /// The place of the diagonal.
    #[error("this alignment of the diagonal is not supported")]
    Alignment,
    /// A bound of a window that is too large.
    #[error("a window bound of {0} keys is too large")]
    Window(u32),
    /// A sequence whose numbers of queries and keys differ.
    #[error("a sequence with other numbers of keys than of queries is not supported")]
    UnequalLengths,
    /// A sequence without queries.
    #[error("a sequence without queries is not supported")]
    EmptyQueries,
    /// A sequence without keys.
    #[error("a sequence without keys is not supported")]
    EmptyKeys,
    /// A query that sees no key.
    #[error("a query that sees no key is not supported")]
    BlindQueries,
    /// No sequence at all.
    #[error("no sequence at all is not supported")]
    NoSequences,
    /// A number of queries or keys that is no multiple.
    #[error("a sequence of {len} {} is not supported: it is no multiple", if *of_queries { "queries" } else { "keys" })]
    Multiple {
        /// Whether it is a number of queries, and not of keys.
        of_queries: bool,
        /// The number.
        len: usize,
    },
    /// A sequence with too few keys.
    #[error("a sequence of {0} keys is too short")]
    FewKeys(usize),
    /// A sequence that is too long.
    #[error("a sequence of {0} tokens is too long")]
    Length(usize),
    /// Too many sequences.
    #[error("{0} sequences are too many")]
    Sequences(usize),
    /// A tensor with too many rows.
    #[error("a tensor of {0} rows is too large")]
    Rows(usize),
    /// Rows of a sequence past its real ones.
    #[error("padding rows are not supported")]
    Padding,
    /// Rows of a sequence past its real ones, under this algorithm or in this layout alone.
    #[error("padding rows are not supported{}{}", of_algorithm(.0), of_layout(.0))]
    PaddingExcept(Unpadded),
    /// Rows between sequences that belong to none.
    #[error("rows between sequences that belong to none are not supported")]
    Gaps,
    /// Rows before the first sequence.
    #[error("a first offset above 0 is not supported")]
    FirstOffset,
    /// Rows after the last sequence.
    #[error("rows after the last sequence are not supported")]
    Slack,
    /// Rows of a sequence that lie apart.
    #[error("rows with a step (SBHD) are not supported")]
    Steps,
    /// Another order in memory than the listed one.
    #[error("sequences that lie in another order than they are listed in are not supported")]
    Order,
    /// Queries and keys that lie in other rows.
    #[error("queries and keys that lie in other rows are not supported")]
    UnequalLayout,
    /// A form in which the problem is given.
    #[error("a problem given as {} is not supported", .0.name())]
    Form(Form),
    /// Steps.
    #[error("steps on a cache are not supported")]
    Cache,
    /// Keys and values in pages of this size.
    #[error("keys and values in pages of {0} rows are not supported")]
    Pages(usize),
    /// Keys that sequences share outside of pages.
    #[error("keys that sequences share outside of pages are not supported")]
    Sharing,
    /// A soft cap.
    #[error("softcap is not supported")]
    Softcap,
    /// A sink.
    #[error("this kind of sink is not supported")]
    Sink,
    /// A backward pass.
    #[error("the backward pass is not supported")]
    Backward,
    /// A context-parallel algorithm that the subject does not run.
    #[error("context-parallel algorithm {0} is not supported")]
    Algorithm(Word),
    /// A way to deal rows to ranks.
    #[error("the balance {} is not supported", .0.name())]
    Balance(BalanceKind),
    /// Stripes of several rows in a ring, alone or in a hierarchy.
    #[error("stripes of more than one row are not supported in a ring")]
    RingStripes,
    /// A group of too few ranks.
    #[error("a group of {0} ranks is too small")]
    FewRanks(usize),
    /// A group of too many ranks.
    #[error("a group of {0} ranks is too large")]
    Ranks(usize),
    /// A group smaller than its world.
    #[error("a group inside a larger world is not supported")]
    World,
    /// Too many ranks in the world.
    #[error("a world of {0} ranks is too large")]
    LargeWorld(usize),
    /// A group whose ranks have another order than those of the world.
    #[error("a group with its ranks in another order than the world is not supported")]
    RankOrder,
    /// A sequence-parallel region.
    #[error("sequence-parallel regions are not supported")]
    Region,
    /// A problem that the context-parallel algorithm, or the region, cannot cut or deal.
    #[error("{0}")]
    Parallel(ParallelRule),
    /// A row that another process named.
    #[error("the row {0} says no")]
    Row(Word),
}

fn of_algorithm(unpadded: &Unpadded) -> String {
    unpadded.algorithm.map(|algorithm| format!(" under {algorithm}")).unwrap_or_default()
}

fn of_layout(unpadded: &Unpadded) -> String {
    unpadded.layout.map(|layout| format!(" in {}", layout.name())).unwrap_or_default()
}

impl PartialEq for Refusal {
    fn eq(&self, other: &Refusal) -> bool {
        self.row() == other.row()
    }
}

impl Eq for Refusal {}

/// Every row of a table that can refuse, in the order of the table. The rules of [`ParallelRule`] are rows as well.
const ROWS: [Word; 45] = [
    "precisions",
    "dims.qk",
    "dims.v",
    "dims.equal",
    "heads.groups",
    "heads.most",
    "masks.forms",
    "masks.kinds",
    "masks.alignments",
    "masks.window_most",
    "lengths.equal",
    "lengths.empty_q",
    "lengths.empty_kv",
    "lengths.blind_queries",
    "lengths.no_sequences",
    "lengths.multiple_q",
    "lengths.multiple_kv",
    "lengths.least_kv",
    "lengths.most",
    "lengths.sequences_most",
    "lengths.rows_most",
    "layout.padding",
    "layout.padding_except",
    "layout.gaps",
    "layout.first_offset",
    "layout.slack",
    "layout.steps",
    "layout.order",
    "layout.equal",
    "forms",
    "cache",
    "pages",
    "sharing",
    "softcap",
    "sinks",
    "backward",
    "parallel.algorithms",
    "parallel.balances",
    "parallel.ring_stripes",
    "parallel.ranks_least",
    "parallel.ranks_most",
    "parallel.sub_groups",
    "parallel.world_most",
    "parallel.order",
    "parallel.regions",
];

impl Refusal {
    /// Returns the name of the row, without the problem's values. Refusals are compared and counted by it.
    pub fn row(&self) -> Word {
        match self {
            Refusal::Precision { .. } => "precisions",
            Refusal::HeadDim { which: "qk", .. } => "dims.qk",
            Refusal::HeadDim { .. } => "dims.v",
            Refusal::UnequalDims => "dims.equal",
            Refusal::Group(_) => "heads.groups",
            Refusal::Heads(_) => "heads.most",
            Refusal::MaskForm(_) => "masks.forms",
            Refusal::MaskKind(_) => "masks.kinds",
            Refusal::Alignment => "masks.alignments",
            Refusal::Window(_) => "masks.window_most",
            Refusal::UnequalLengths => "lengths.equal",
            Refusal::EmptyQueries => "lengths.empty_q",
            Refusal::EmptyKeys => "lengths.empty_kv",
            Refusal::BlindQueries => "lengths.blind_queries",
            Refusal::NoSequences => "lengths.no_sequences",
            Refusal::Multiple { of_queries: true, .. } => "lengths.multiple_q",
            Refusal::Multiple { .. } => "lengths.multiple_kv",
            Refusal::FewKeys(_) => "lengths.least_kv",
            Refusal::Length(_) => "lengths.most",
            Refusal::Sequences(_) => "lengths.sequences_most",
            Refusal::Rows(_) => "lengths.rows_most",
            Refusal::Padding => "layout.padding",
            Refusal::PaddingExcept(_) => "layout.padding_except",
            Refusal::Gaps => "layout.gaps",
            Refusal::FirstOffset => "layout.first_offset",
            Refusal::Slack => "layout.slack",
            Refusal::Steps => "layout.steps",
            Refusal::Order => "layout.order",
            Refusal::UnequalLayout => "layout.equal",
            Refusal::Form(_) => "forms",
            Refusal::Cache => "cache",
            Refusal::Pages(_) => "pages",
            Refusal::Sharing => "sharing",
            Refusal::Softcap => "softcap",
            Refusal::Sink => "sinks",
            Refusal::Backward => "backward",
            Refusal::Algorithm(_) => "parallel.algorithms",
            Refusal::Balance(_) => "parallel.balances",
            Refusal::RingStripes => "parallel.ring_stripes",
            Refusal::FewRanks(_) => "parallel.ranks_least",
            Refusal::Ranks(_) => "parallel.ranks_most",
            Refusal::World => "parallel.sub_groups",
            Refusal::LargeWorld(_) => "parallel.world_most",
            Refusal::RankOrder => "parallel.order",
            Refusal::Region => "parallel.regions",
            Refusal::Parallel(rule) => rule.name(),
            Refusal::Row(row) => row,
        }
    }

    /// Returns every row of a table that can refuse, in order, without the rules of context parallelism.
    pub fn table_rows() -> impl Iterator<Item = Word> {
        ROWS.into_iter()
    }

    /// Returns the refusal of a row with this name; `None` where no row has it.
    pub fn of_row(name: &str) -> Option<Refusal> {
        let rules = ParallelRule::ALL.map(ParallelRule::name);
        ROWS.into_iter().chain(rules).find(|row| *row == name).map(Refusal::Row)
    }
}

impl Serialize for Refusal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.row())
    }
}

impl<'de> Deserialize<'de> for Refusal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Refusal, D::Error> {
        let name = String::deserialize(deserializer)?;
        let unknown = || format!("'{}' is no row of the table", super::shortened(&name));
        Refusal::of_row(&name).ok_or_else(|| D::Error::custom(unknown()))
    }
}

impl Table {
    /// Returns the first row of the table that refuses a problem, if any.
    pub fn refusal(&self, problem: &Problem) -> Option<Refusal> {
        self.refusals(problem).next()
    }

    /// Returns every row of the table that refuses a problem, in the order of the table.
    pub fn refusals(&self, problem: &Problem) -> impl Iterator<Item = Refusal> + use<> {
        let numbers = self.of_numbers(problem).into_iter().chain(self.of_mask(problem));
        let rows = self.of_lengths(problem).into_iter().chain(self.of_layout(problem));
        let form = (!self.forms.contains(&problem.form)).then_some(Refusal::Form(problem.form));
        let softmax = self.of_softmax(problem).into_iter();
        numbers
            .chain(rows)
            .chain(form)
            .chain(self.of_steps(problem))
            .chain(self.of_pages(problem))
            .chain((!self.sharing && !problem.sharing.is_empty()).then_some(Refusal::Sharing))
            .chain(softmax)
            .chain(self.of_parallel(problem))
    }

    /// Refuses a problem as the table says. Call it in the first line of [`Backend::run`](super::super::Backend::run).
    pub fn check(&self, problem: &Problem) -> Result<(), Refusal> {
        self.refusal(problem).map_or(Ok(()), Err)
    }

    fn of_numbers(&self, problem: &Problem) -> Vec<Refusal> {
        let mut found = Vec::new();
        found.extend(self.refused_element(&problem.precision));
        let (dims, taken) = (problem.dims, &self.dims);
        for (which, dim, sizes) in [("qk", dims.qk, &taken.qk), ("v", dims.v, &taken.v)] {
            found.extend((!sizes.contains(dim)).then_some(Refusal::HeadDim { which, dim }));
        }
        found.extend((taken.equal && dims.qk != dims.v).then_some(Refusal::UnequalDims));
        let (group, heads) = (problem.group(), problem.heads.q);
        found.extend((!self.heads.groups.contains(group)).then_some(Refusal::Group(group)));
        found.extend((heads > self.heads.most).then_some(Refusal::Heads(heads)));
        found
    }

    /// Returns the first quantity that is unlike the nearest precision; `None` where the table has the precision.
    fn refused_element(&self, precision: &Precision) -> Option<Refusal> {
        let nearest = self.nearest_precision(precision);
        let both = precision.elements().into_iter().zip(nearest.elements());
        both.into_iter()
            .find(|((_, got), (_, taken))| got != taken)
            .map(|((quantity, element), _)| Refusal::Precision { quantity, element })
    }

    fn of_mask(&self, problem: &Problem) -> Vec<Refusal> {
        let (mask, taken, mut found) = (problem.mask, &self.masks, Vec::new());
        let form = MaskForm::of(&mask);
        found.extend((!taken.forms.contains(&form)).then_some(Refusal::MaskForm(form)));
        let other = MaskKind::of(&mask).find(|kind| !taken.kinds.contains(kind));
        found.extend(other.map(Refusal::MaskKind));
        found.extend((!taken.alignments.contains(&mask.align)).then_some(Refusal::Alignment));
        let bound = mask.left.max(mask.right).filter(|bound| *bound > taken.window_most);
        found.extend(bound.map(Refusal::Window));
        found
    }

    fn of_lengths(&self, problem: &Problem) -> Vec<Refusal> {
        let (taken, sequences, mut found) = (&self.lengths, &problem.sequences, Vec::new());
        let any = |holds: &dyn Fn(&Sequence) -> bool| sequences.iter().any(holds);
        let unequal = taken.equal && any(&|s| s.q.len != s.kv.len);
        found.extend(unequal.then_some(Refusal::UnequalLengths));
        found.extend((!taken.empty_q && any(&|s| s.q.len == 0)).then_some(Refusal::EmptyQueries));
        found.extend((!taken.empty_kv && any(&|s| s.kv.len == 0)).then_some(Refusal::EmptyKeys));
        let blind = !taken.blind_queries && any(&|s| has_blind_query(problem.mask, s.q.len, s.kv.len));
        found.extend(blind.then_some(Refusal::BlindQueries));
        found.extend((!taken.no_sequences && sequences.is_empty()).then_some(Refusal::NoSequences));
        let odd = |of_queries: bool, multiple: usize, len: fn(&Sequence) -> usize| {
            let len = sequences.iter().map(len).find(|len| !len.is_multiple_of(multiple));
            len.map(|len| Refusal::Multiple { of_queries, len })
        };
        found.extend(odd(true, taken.multiple_q, |s| s.q.len));
        found.extend(odd(false, taken.multiple_kv, |s| s.kv.len));
        let fewest = sequences.iter().map(|s| s.kv.len).filter(|len| *len > 0).min();
        found.extend(fewest.filter(|len| *len < taken.least_kv).map(Refusal::FewKeys));
        let longest = sequences.iter().map(|s| s.q.len.max(s.kv.len)).max();
        found.extend(longest.filter(|len| *len > taken.most).map(Refusal::Length));
        let (count, rows) = (sequences.len(), problem.rows.q.max(problem.rows.kv));
        found.extend((count > taken.sequences_most).then_some(Refusal::Sequences(count)));
        found.extend((rows > taken.rows_most).then_some(Refusal::Rows(rows)));
        found
    }

    fn of_layout(&self, problem: &Problem) -> Vec<Refusal> {
        if self.layout == Layouts::default() {
            return Vec::new();
        }
        let algorithm = problem.parallel.algorithm;
        let mut found: Vec<Refusal> = Seams::of(problem).refused(&self.layout).collect();
        let excepted = [Side::Q, Side::Kv].into_iter().find_map(|side| {
            let runs: Vec<Run> = problem.sequences.iter().map(|sequence| run_of(sequence, side)).collect();
            let padded = runs.iter().any(|run| run.span > run.len);
            self.layout.exception(algorithm, SideLayout::of(&runs)).filter(|_| padded)
        });
        let behind = usize::from(found.first() == Some(&Refusal::Padding));
        found.splice(behind..behind, excepted.map(Refusal::PaddingExcept));
        let unequal = self.layout.equal && !lies_alike(problem);
        found.extend(unequal.then_some(Refusal::UnequalLayout));
        found
    }

    /// Refuses steps, or a problem whose calls are not all inside the table. Whether their pages are is not asked.
    pub(super) fn of_steps(&self, problem: &Problem) -> Option<Refusal> {
        let calls =
            || if problem.pages.is_some() { problem.without_pages().calls() } else { problem.calls() };
        let inside = || calls().iter().all(|call| self.refusal(&call.problem).is_none());
        let taken = problem.steps.is_empty() || self.cache && inside();
        (!taken).then_some(Refusal::Cache)
    }

    fn of_pages(&self, problem: &Problem) -> Option<Refusal> {
        let size = problem.pages.as_ref()?.size;
        let taken = self.pages.as_ref().is_some_and(|sizes| sizes.contains(size));
        (!taken).then_some(Refusal::Pages(size))
    }

    fn of_softmax(&self, problem: &Problem) -> Vec<Refusal> {
        let mut found = Vec::new();
        found.extend((problem.softmax.softcap.is_some() && !self.softcap).then_some(Refusal::Softcap));
        found.extend((!self.sinks.contains(&problem.softmax.sink)).then_some(Refusal::Sink));
        found.extend((problem.pass == Pass::Backward && !self.backward).then_some(Refusal::Backward));
        found
    }

    fn of_parallel(&self, problem: &Problem) -> Vec<Refusal> {
        let (parallel, taken, mut found) = (&problem.parallel, &self.parallel, Vec::new());
        let (algorithm, size) = (parallel.algorithm, parallel.size());
        found.extend((!taken.takes(algorithm)).then(|| Refusal::Algorithm(algorithm.name())));
        let kind = BalanceKind::of(parallel.balance);
        let cuts = algorithm != Algorithm::Single;
        found.extend((cuts && !taken.balances.contains(&kind)).then_some(Refusal::Balance(kind)));
        let stripes = taken.takes_stripes(algorithm, parallel.balance);
        found.extend((!stripes).then_some(Refusal::RingStripes));
        found.extend((size < taken.ranks_least).then_some(Refusal::FewRanks(size)));
        found.extend((size > taken.ranks_most).then_some(Refusal::Ranks(size)));
        found.extend((!taken.sub_groups && parallel.world != size).then_some(Refusal::World));
        found.extend((parallel.world > taken.world_most).then_some(Refusal::LargeWorld(parallel.world)));
        found.extend((!taken.order && !parallel.ranks.is_sorted()).then_some(Refusal::RankOrder));
        found.extend((!taken.regions && parallel.region > 1).then_some(Refusal::Region));
        found.extend(broken_rule(problem).map(Refusal::Parallel));
        found
    }
}

/// Whether both sides of each sequence lie in the same rows, whatever their real lengths, of as many.
fn lies_alike(problem: &Problem) -> bool {
    let rows = |run: Run| (run.offset, run.step, run.span);
    problem.rows.q == problem.rows.kv && problem.sequences.iter().all(|s| rows(s.q) == rows(s.kv))
}

/// Whether some query of a sequence sees no key. The first and the last query decide, because the queries that see a
/// key are neighbours.
pub(super) fn has_blind_query(mask: Mask, queries: usize, keys: usize) -> bool {
    let blind = |query: usize| mask.visible(query, queries, keys).is_empty();
    queries > 0 && (keys == 0 || blind(0) || blind(queries - 1))
}
