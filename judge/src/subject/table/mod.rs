//! The table: what a subject takes, as data.
//!
//! A subject refuses a problem with a reason, or is right. There is no third answer: a table that promises too much
//! is a fault, and so is one that promises too little. `refusal` says which row of the table refuses a problem, and
//! `fitted` returns the nearest problem that no row refuses.
//!
//! In JSON a table is the one of `docs/protocol.md`, row by row.

mod check;
mod fitted;
mod refusal;
mod seams;
mod shown;
mod sizes;

use seamproof_oracle::limits::{HEAD_DIM_MAX, HEADS_MAX, ROWS_MAX, SEQUENCES_MAX, WORLD_MAX};
use seamproof_oracle::{
    Algorithm, Alignment, Balance, Blocks, Form, Format, LseLayout, Mask, PAGE_SIZE_MAX, Precision, Run,
    Sink, TensorName,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use check::TableError;
pub use refusal::Refusal;
pub(crate) use seams::Seams;
pub use sizes::{Sizes, SizesError};

use super::Word;

/// Table of a subject, as data: it can be printed, checked, and compared with the subject's behaviour. It begins as
/// [`Table::default`], and its rows are edited.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Table {
    /// Formats that the subject takes together.
    pub precisions: Vec<Precision>,
    /// Head dimensions.
    pub dims: HeadDims,
    /// Numbers of heads.
    pub heads: HeadCounts,
    /// Masks.
    pub masks: Masks,
    /// Lengths and number of the sequences.
    pub lengths: Lengths,
    /// Places of the rows in memory.
    pub layout: Layouts,
    /// Forms in which problems are given.
    pub forms: Vec<Form>,
    /// Whether problems with steps are taken, call by call on a cache.
    pub cache: bool,
    /// Page sizes of keys and values in pages; none where they are not taken.
    pub pages: Option<Sizes>,
    /// Whether sequences may share keys outside of pages.
    pub sharing: bool,
    /// Whether a soft cap is taken.
    pub softcap: bool,
    /// Kinds of sink.
    pub sinks: Vec<Sink>,
    /// Whether the backward pass is taken; the forward always is.
    pub backward: bool,
    /// Statistics (lse, max_logit) that the subject returns on every run. A subject cannot show a statistic when it
    /// is right and hide it when it is wrong.
    pub statistics: Vec<TensorName>,
    /// Layout in which the LSE is returned. No problem is refused by it.
    pub lse: LseLayout,
    /// Context parallelism.
    pub parallel: Parallelism,
}

/// Head dimensions of a [`Table`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeadDims {
    /// Dimensions of queries and keys.
    pub qk: Sizes,
    /// Dimensions of values.
    pub v: Sizes,
    /// Whether both must be the same.
    pub equal: bool,
}

/// Numbers of heads of a [`Table`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeadCounts {
    /// Numbers of query heads for each KV head.
    pub groups: Sizes,
    /// Largest number of query heads.
    pub most: usize,
}

/// Masks of a [`Table`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Masks {
    /// Forms of masks.
    pub forms: Vec<MaskForm>,
    /// What masks have besides a band; none where left out. A mask may have several of these at once.
    pub kinds: Vec<MaskKind>,
    /// Alignments of the diagonal. Any other is refused, also where both mean the same.
    pub alignments: Vec<Alignment>,
    /// Largest bound of a window.
    pub window_most: u32,
}

/// Form of a mask, which follows from its bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MaskForm {
    /// No bound.
    Full,
    /// A right bound of 0 alone.
    Causal,
    /// A left bound alone.
    LeftWindow,
    /// A right bound above 0 alone.
    RightWindow,
    /// A left bound, and a right one of 0.
    CausalWindow,
    /// A left bound, and a right one above 0.
    TwoSided,
}

impl MaskForm {
    /// Every form.
    pub const ALL: [MaskForm; 6] = [
        MaskForm::Full,
        MaskForm::Causal,
        MaskForm::LeftWindow,
        MaskForm::RightWindow,
        MaskForm::CausalWindow,
        MaskForm::TwoSided,
    ];

    /// Returns the form of a mask.
    pub fn of(mask: &Mask) -> MaskForm {
        match (mask.left, mask.right) {
            (None, None) => MaskForm::Full,
            (None, Some(0)) => MaskForm::Causal,
            (Some(_), None) => MaskForm::LeftWindow,
            (None, Some(_)) => MaskForm::RightWindow,
            (Some(_), Some(0)) => MaskForm::CausalWindow,
            (Some(_), Some(_)) => MaskForm::TwoSided,
        }
    }

    /// Returns the name in texts and files.
    pub fn name(self) -> Word {
        match self {
            MaskForm::Full => "full",
            MaskForm::Causal => "causal",
            MaskForm::LeftWindow => "left-window",
            MaskForm::RightWindow => "right-window",
            MaskForm::CausalWindow => "causal-window",
            MaskForm::TwoSided => "two-sided",
        }
    }

    fn has_left(self) -> bool {
        matches!(self, MaskForm::LeftWindow | MaskForm::CausalWindow | MaskForm::TwoSided)
    }

    fn has_right(self) -> bool {
        !matches!(self, MaskForm::Full | MaskForm::LeftWindow)
    }

    /// Whether a mask of this form has a right bound above 0.
    fn looks_ahead(self) -> bool {
        matches!(self, MaskForm::RightWindow | MaskForm::TwoSided)
    }
}

/// What a mask has besides a band.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MaskKind {
    /// Documents that do not see each other.
    Documents,
    /// Chunks that do not see each other.
    Chunks,
    /// First keys that the right bound does not hide.
    Prefix,
    /// First keys that the left bound does not hide.
    SinkTokens,
}

impl MaskKind {
    /// Every kind.
    pub const ALL: [MaskKind; 4] =
        [MaskKind::Documents, MaskKind::Chunks, MaskKind::Prefix, MaskKind::SinkTokens];

    /// Returns what a mask has.
    pub fn of(mask: &Mask) -> impl Iterator<Item = MaskKind> + use<> {
        let blocks = mask.blocks.map(|blocks| match blocks {
            Blocks::Documents(_) => MaskKind::Documents,
            Blocks::Chunks(_) => MaskKind::Chunks,
        });
        let prefix = (mask.prefix > 0).then_some(MaskKind::Prefix);
        let sink_tokens = (mask.sink_tokens > 0).then_some(MaskKind::SinkTokens);
        blocks.into_iter().chain(prefix).chain(sink_tokens)
    }

    /// Returns the name in texts and files.
    pub fn name(self) -> Word {
        match self {
            MaskKind::Documents => "documents",
            MaskKind::Chunks => "chunks",
            MaskKind::Prefix => "prefix",
            MaskKind::SinkTokens => "sink-tokens",
        }
    }
}

impl Masks {
    /// Whether some mask hides every key of its sequence from a query. Seen from the top left that takes a left bound,
    /// and more queries than keys; seen from the bottom right a right one. A block past the last key has no keys.
    pub(super) fn may_blind(&self) -> bool {
        if self.kinds.iter().any(|kind| matches!(kind, MaskKind::Documents | MaskKind::Chunks)) {
            return true;
        }
        let bounded = |form: &MaskForm, align: &Alignment| match align {
            Alignment::TopLeft => form.has_left(),
            Alignment::BottomRight => form.has_right(),
        };
        self.forms.iter().any(|form| self.alignments.iter().any(|align| bounded(form, align)))
    }
}

/// Lengths of a [`Table`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Lengths {
    /// Whether a sequence must have as many keys as queries.
    pub equal: bool,
    /// Whether a sequence may have no queries.
    pub empty_q: bool,
    /// Whether a sequence may have no keys.
    pub empty_kv: bool,
    /// Whether a query may see no key.
    pub blind_queries: bool,
    /// Whether there may be no sequence.
    pub no_sequences: bool,
    /// Number of which the queries of each sequence are a multiple.
    pub multiple_q: usize,
    /// Number of which the keys of each sequence are a multiple.
    pub multiple_kv: usize,
    /// Smallest number of keys of a sequence that has any.
    pub least_kv: usize,
    /// Largest length of a sequence, on either side.
    pub most: usize,
    /// Largest number of sequences.
    pub sequences_most: usize,
    /// Largest number of rows of a tensor.
    pub rows_most: usize,
}

/// Places of rows of a [`Table`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Layouts {
    /// Whether a sequence may own rows past its real ones, between it and the next.
    pub padding: bool,
    /// Algorithms, layouts, or algorithms in layouts, in which a sequence may own none all the same.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub padding_except: Vec<Unpadded>,
    /// Whether rows between sequences may belong to none.
    pub gaps: bool,
    /// Whether the first sequence may begin after row 0.
    pub first_offset: bool,
    /// Whether rows may follow the last sequence.
    pub slack: bool,
    /// Whether rows of a sequence may lie apart (SBHD).
    pub steps: bool,
    /// Whether sequences may lie in memory in another order than they are listed in.
    pub order: bool,
    /// Whether q and kv of each sequence must lie in the same rows, of tensors of as many rows: one `cu_seqlens` says
    /// both.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub equal: bool,
}

/// Problems whose sequences may own no padding, although others may: those of an algorithm, of a layout, or of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unpadded {
    /// Algorithm, by [`Algorithm::name`]; any where left out.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "maybe_word",
        deserialize_with = "maybe_algorithm_name"
    )]
    pub algorithm: Option<Word>,
    /// Layout of the side that has padding; any where left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<SideLayout>,
}

impl Unpadded {
    /// Whether padding of a side in a layout is refused under an algorithm.
    fn refuses(&self, algorithm: Algorithm, layout: SideLayout) -> bool {
        self.algorithm.is_none_or(|own| own == algorithm.name())
            && self.layout.is_none_or(|own| own == layout)
    }
}

/// Layout of one side of a problem, as its rows show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SideLayout {
    /// Sequences one after the other, one of them alone, or in spans that differ.
    Thd,
    /// Several sequences in spans that are all as long, one after the other.
    Bshd,
    /// Rows of a sequence that lie apart.
    Sbhd,
}

impl SideLayout {
    /// Every layout.
    pub const ALL: [SideLayout; 3] = [SideLayout::Thd, SideLayout::Bshd, SideLayout::Sbhd];

    /// Returns the layout of a side with these runs.
    pub fn of(runs: &[Run]) -> SideLayout {
        let alike = |pair: &[Run]| pair[0].span == pair[1].span && pair[0].end() == Some(pair[1].offset);
        match runs {
            _ if runs.iter().any(|run| run.step > 1) => SideLayout::Sbhd,
            [_, _, ..] if runs.windows(2).all(alike) => SideLayout::Bshd,
            _ => SideLayout::Thd,
        }
    }

    /// Returns the name in texts and files.
    pub fn name(self) -> Word {
        match self {
            SideLayout::Thd => "thd",
            SideLayout::Bshd => "bshd",
            SideLayout::Sbhd => "sbhd",
        }
    }
}

/// Context parallelism of a [`Table`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parallelism {
    /// Algorithms, by [`Algorithm::name`].
    #[serde(serialize_with = "words", deserialize_with = "algorithm_names")]
    pub algorithms: Vec<Word>,
    /// Ways to deal rows to ranks; a single rank needs none.
    pub balances: Vec<BalanceKind>,
    /// Whether a ring, alone or in a hierarchy, takes stripes of more than one row.
    pub ring_stripes: bool,
    /// Smallest number of ranks in a group.
    pub ranks_least: usize,
    /// Largest number of ranks in a group.
    pub ranks_most: usize,
    /// Whether a group may be a part of a larger world.
    pub sub_groups: bool,
    /// Largest world, with the ranks that are not in the group.
    pub world_most: usize,
    /// Whether the group may have its ranks in another order than the world. A group of torch has them in ascending order.
    pub order: bool,
    /// Whether each rank of the problem's group may be a sequence-parallel region of several.
    pub regions: bool,
}

/// Kind of a [`Balance`]: whatever its stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum BalanceKind {
    Contiguous,
    DualChunk,
    Striped,
}

impl BalanceKind {
    /// Every kind.
    pub const ALL: [BalanceKind; 3] = [BalanceKind::Contiguous, BalanceKind::DualChunk, BalanceKind::Striped];

    /// Returns the kind of a balance.
    pub fn of(balance: Balance) -> BalanceKind {
        match balance {
            Balance::Contiguous => BalanceKind::Contiguous,
            Balance::DualChunk => BalanceKind::DualChunk,
            Balance::Striped { .. } => BalanceKind::Striped,
        }
    }

    /// Returns the simplest balance of the kind.
    fn simplest(self) -> Balance {
        match self {
            BalanceKind::Contiguous => Balance::Contiguous,
            BalanceKind::DualChunk => Balance::DualChunk,
            BalanceKind::Striped => Balance::Striped { stripe: 1 },
        }
    }

    /// Returns the name in texts and files.
    pub fn name(self) -> Word {
        match self {
            BalanceKind::Contiguous => "contiguous",
            BalanceKind::DualChunk => "dual-chunk",
            BalanceKind::Striped => "striped",
        }
    }
}

fn words<S: Serializer>(words: &[Word], serializer: S) -> Result<S::Ok, S::Error> {
    words.serialize(serializer)
}

fn algorithm_names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Word>, D::Error> {
    Vec::<String>::deserialize(deserializer)?.into_iter().map(algorithm_name).collect()
}

fn maybe_word<S: Serializer>(word: &Option<Word>, serializer: S) -> Result<S::Ok, S::Error> {
    word.serialize(serializer)
}

fn maybe_algorithm_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Word>, D::Error> {
    Option::<String>::deserialize(deserializer)?.map(algorithm_name).transpose()
}

fn algorithm_name<E: serde::de::Error>(name: String) -> Result<Word, E> {
    let known = Algorithm::ALL.map(Algorithm::name);
    known.into_iter().find(|known| *known == name).ok_or_else(|| {
        E::custom(format!("'{}' is no algorithm; known: {}", shortened(&name), known.join(", ")))
    })
}

/// Returns the beginning of a text from outside.
fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

impl Default for Table {
    /// Returns the table that takes everything on one rank in bf16, with weights in f32, but no soft cap and no sink.
    fn default() -> Table {
        Table {
            precisions: vec![Precision { p: Format::F32.into(), ..Precision::uniform(Format::Bf16) }],
            dims: HeadDims::default(),
            heads: HeadCounts::default(),
            masks: Masks::default(),
            lengths: Lengths::default(),
            layout: Layouts::default(),
            forms: vec![Form::CuSeqlens],
            cache: false,
            pages: None,
            sharing: false,
            softcap: false,
            sinks: vec![Sink::None],
            backward: true,
            statistics: vec![TensorName::Lse],
            lse: LseLayout::default(),
            parallel: Parallelism::default(),
        }
    }
}

impl Default for HeadDims {
    fn default() -> HeadDims {
        HeadDims { qk: Sizes::up_to(HEAD_DIM_MAX), v: Sizes::up_to(HEAD_DIM_MAX), equal: false }
    }
}

impl Default for HeadCounts {
    fn default() -> HeadCounts {
        HeadCounts { groups: Sizes::up_to(HEADS_MAX), most: HEADS_MAX }
    }
}

impl Default for Masks {
    fn default() -> Masks {
        Masks {
            forms: MaskForm::ALL.to_vec(),
            kinds: Vec::new(),
            alignments: vec![Alignment::TopLeft, Alignment::BottomRight],
            window_most: u32::MAX,
        }
    }
}

impl Default for Lengths {
    fn default() -> Lengths {
        Lengths {
            equal: false,
            empty_q: true,
            empty_kv: true,
            blind_queries: true,
            no_sequences: true,
            multiple_q: 1,
            multiple_kv: 1,
            least_kv: 1,
            most: ROWS_MAX,
            sequences_most: SEQUENCES_MAX,
            rows_most: ROWS_MAX,
        }
    }
}

impl Lengths {
    /// Returns the smallest number of which lengths of either side may be multiples.
    fn unit(&self) -> usize {
        let (mut divisor, mut rest) = (self.multiple_q.max(1), self.multiple_kv.max(1));
        let product = divisor.saturating_mul(rest);
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        product / divisor
    }

    /// Returns the numbers of which queries and keys become multiples. Both are the same where a sequence may have to
    /// get as many keys as queries.
    fn units(&self) -> (usize, usize) {
        let (unit, are_apart) = (self.unit(), !self.equal && self.blind_queries);
        if are_apart { (self.multiple_q, self.multiple_kv) } else { (unit, unit) }
    }
}

impl Default for Layouts {
    fn default() -> Layouts {
        Layouts {
            padding: true,
            padding_except: Vec::new(),
            gaps: true,
            first_offset: true,
            slack: true,
            steps: true,
            order: true,
            equal: false,
        }
    }
}

impl Layouts {
    /// Returns what refuses padding of a side in a layout under an algorithm, where others may have it.
    fn exception(&self, algorithm: Algorithm, layout: SideLayout) -> Option<Unpadded> {
        self.padding_except.iter().copied().find(|unpadded| unpadded.refuses(algorithm, layout))
    }
}

impl Default for Parallelism {
    fn default() -> Parallelism {
        Parallelism {
            algorithms: vec![Algorithm::Single.name()],
            balances: BalanceKind::ALL.to_vec(),
            ring_stripes: false,
            ranks_least: 1,
            ranks_most: WORLD_MAX,
            sub_groups: false,
            world_most: WORLD_MAX,
            order: false,
            regions: false,
        }
    }
}

impl Parallelism {
    /// Returns every algorithm, balance, group and region.
    pub fn all() -> Parallelism {
        Parallelism {
            algorithms: Algorithm::ALL.map(Algorithm::name).to_vec(),
            ring_stripes: true,
            sub_groups: true,
            order: true,
            regions: true,
            ..Parallelism::default()
        }
    }

    /// Returns the balance of the smallest group: parts, or where those are not taken, the first of the table. One rank
    /// is dealt in one part.
    fn smallest_balance(&self) -> Balance {
        let takes_parts = self.ranks_least == 1 || self.balances.contains(&BalanceKind::Contiguous);
        let first = self.balances.first().filter(|_| !takes_parts);
        first.map_or(Balance::Contiguous, |first| first.simplest())
    }

    /// Whether an algorithm is taken.
    fn takes(&self, algorithm: Algorithm) -> bool {
        self.algorithms.contains(&algorithm.name())
    }

    /// Whether the stripes of a balance are taken under an algorithm.
    fn takes_stripes(&self, algorithm: Algorithm, balance: Balance) -> bool {
        self.ring_stripes || !has_ring_stripes(algorithm, balance)
    }
}

/// Whether a ring has stripes of more than one row.
pub(in crate::subject) fn has_ring_stripes(algorithm: Algorithm, balance: Balance) -> bool {
    let is_ring = matches!(algorithm, Algorithm::Ring | Algorithm::Hierarchical { .. });
    is_ring && matches!(balance, Balance::Striped { stripe: 2.. })
}

impl Table {
    /// Returns the widest table that the generator draws for: one 16-bit format with weights in it or in f32, and
    /// everything else.
    pub fn widest() -> Table {
        let of = |format: Format| {
            let same = Precision::uniform(format);
            [Precision { p: Format::F32.into(), ..same }, same]
        };
        Table {
            precisions: [Format::Bf16, Format::Fp16].into_iter().flat_map(of).collect(),
            softcap: true,
            sinks: vec![Sink::None, Sink::OffByOne, Sink::Learnable],
            forms: Form::ALL.to_vec(),
            masks: Masks { kinds: MaskKind::ALL.to_vec(), ..Masks::default() },
            cache: true,
            pages: Some(Sizes::up_to(PAGE_SIZE_MAX)),
            sharing: true,
            parallel: Parallelism::all(),
            ..Table::default()
        }
    }

    /// Whether rows behind a sequence may belong to none.
    fn frees_rows(&self) -> bool {
        self.layout.gaps && self.layout.slack
    }

    /// Whether padding of a side in a layout is taken under an algorithm.
    fn takes_padding(&self, algorithm: Algorithm, layout: SideLayout) -> bool {
        self.layout.padding && self.layout.exception(algorithm, layout).is_none()
    }

    /// Whether some algorithm takes padding in packed rows.
    pub(super) fn pads_somewhere(&self) -> bool {
        let taken = |algorithm: &Algorithm| self.parallel.takes(*algorithm);
        let packed = [SideLayout::Thd, SideLayout::Bshd];
        let pads =
            |algorithm: Algorithm| packed.into_iter().any(|layout| self.takes_padding(algorithm, layout));
        Algorithm::ALL.into_iter().filter(taken).any(pads)
    }
}
