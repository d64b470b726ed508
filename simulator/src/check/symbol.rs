//! [`Symbol`]s: what a row is known to hold, without numbers.
//!
//! A symbol stands for a row's value: whose row it is (*tokens*: sequence, position, head) and what is known of it. Rows
//! in sequence are one *piece* as long as positions advance by one step: row i of a piece holds position
//! `start + step·i`; a piece of one row has any step. A value that grew out of launches carries a [`Cover`], the tree of
//! the patches that were summed into it. Covers are shared and never copied; nothing here says whether one is right.

use std::collections::BTreeSet;
use std::fmt;
use std::rc::Rc;

use seamproof_oracle::{Positions, TensorName};

use super::cover::Patch;
use super::error::OperationId;
use crate::schedule::{Schedule, hidden, rotates};

/// Patches of one cover; more are no proof but a runaway sum.
pub(super) const PATCHES_MAX: usize = 1 << 17;

/// The patches of a sum, each as often as it was added.
#[derive(Debug)]
enum Parts {
    /// Most leaves: no list of their own.
    One(Patch),
    Leaf(Box<[Patch]>),
    /// Absent only while it is dropped.
    Sum(Option<[Cover; 2]>),
}

#[derive(Debug)]
struct Node {
    parts: Parts,
    /// Patches, each as often as it was added; a sum counts too.
    count: usize,
    /// Of the tree and its patches, their places apart. Equal trees have equal hashes.
    hash: u64,
}

/// A sum of launches' contributions, by identity: two covers are equal when they are the same sum.
#[derive(Clone, Debug)]
pub(super) struct Cover {
    node: Rc<Node>,
    /// How often the sink was added.
    pub(super) sinks: usize,
}

impl PartialEq for Cover {
    fn eq(&self, other: &Cover) -> bool {
        self.same(other) && self.sinks == other.sinks
    }
}

impl Cover {
    pub(super) fn new(mut patches: Vec<Patch>, sinks: usize) -> Cover {
        let hash = patches.iter().flat_map(Patch::numbers).fold(0, mix);
        let count = patches.len();
        let parts = match patches.pop_if(|_| count == 1) {
            Some(patch) => Parts::One(patch),
            None => Parts::Leaf(patches.into_boxed_slice()),
        };
        Cover { node: Rc::new(Node { parts, count, hash }), sinks }
    }

    /// Both; `None` when that is more than [`PATCHES_MAX`].
    pub(super) fn plus(&self, other: &Cover) -> Option<Cover> {
        let count = (self.node.count + other.node.count).max(1);
        if count > PATCHES_MAX {
            return None;
        }
        let hash = mix(mix(1, self.node.hash), other.node.hash);
        let parts = Parts::Sum(Some([self.clone(), other.clone()]));
        // A sum of empty ones counts too, so that a tree is never deeper than its count.
        let node = Rc::new(Node { parts, count: count + 1, hash });
        Some(Cover { node, sinks: self.sinks + other.sinks })
    }

    pub(super) fn with_sink(&self) -> Cover {
        Cover { sinks: self.sinks.saturating_add(1), ..self.clone() }
    }

    /// Equal for covers of the same patches in the same tree, whatever their places.
    pub(super) fn hash(&self) -> u64 {
        self.node.hash
    }

    /// Whether both are the same sum, sinks apart.
    pub(super) fn same(&self, other: &Cover) -> bool {
        Rc::ptr_eq(&self.node, &other.node)
    }

    /// Whether both have the same patches, whatever their places: a proof of one is a proof of the other, since no proof
    /// looks at a place except to name it in an error.
    pub(super) fn alike(&self, other: &Cover) -> bool {
        let alike = || {
            let (mut mine, mut theirs) = (self.each(), other.each());
            mine.by_ref().all(|a| theirs.next().is_some_and(|b| a.alike(b))) && theirs.next().is_none()
        };
        self.same(other) || self.node.hash == other.node.hash && alike()
    }

    /// Every patch.
    pub(super) fn patches(&self) -> Vec<Patch> {
        let mut found = Vec::with_capacity(self.node.count);
        found.extend(self.each().cloned());
        found
    }

    fn each(&self) -> EachPatch<'_> {
        EachPatch { todo: vec![self], leaf: [].iter() }
    }
}

/// The patches of a cover in order, without recursion: a chain of sums may be long.
struct EachPatch<'a> {
    todo: Vec<&'a Cover>,
    leaf: std::slice::Iter<'a, Patch>,
}

impl<'a> Iterator for EachPatch<'a> {
    type Item = &'a Patch;

    fn next(&mut self) -> Option<&'a Patch> {
        loop {
            if let Some(patch) = self.leaf.next() {
                return Some(patch);
            }
            match &self.todo.pop()?.node.parts {
                Parts::One(patch) => return Some(patch),
                Parts::Leaf(patches) => self.leaf = patches.iter(),
                Parts::Sum(both) => self.todo.extend(both.iter().flatten().rev()),
            }
        }
    }
}

/// One more number in a hash (the multiplier is that of Steele and Vigna, arXiv:2001.05304).
fn mix(hash: u64, number: u64) -> u64 {
    (hash.rotate_left(23) ^ number).wrapping_mul(0xd134_2543_de82_ef95)
}

/// Covers of a long chain are dropped without recursion.
impl Drop for Node {
    fn drop(&mut self) {
        let take = |node: &mut Node| if let Parts::Sum(both) = &mut node.parts { both.take() } else { None };
        let mut todo: Vec<Cover> = take(self).into_iter().flatten().collect();
        while let Some(cover) = todo.pop() {
            if let Some(mut node) = Rc::into_inner(cover.node) {
                todo.extend(take(&mut node).into_iter().flatten());
            }
        }
    }
}

/// What is known of real rows.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum What {
    Input(TensorName),
    /// The LSE over the pairs of a cover.
    Lse(Cover),
    /// The sum over the pairs of `parts`, normalised by the LSE over the pairs of `against`.
    Out {
        parts: Cover,
        against: Cover,
    },
    Gradient(TensorName, Cover),
    /// The largest logit over these launches.
    Largest(Rc<BTreeSet<OperationId>>),
    /// dsink summed over the columns of the patches.
    SinkGradient(Cover),
}

/// In which form rows are: what linear layers and rotations made of them.
///
/// Rotations add up, so that all of them together turn a row by `turns · position + offset`; a row that is rotated by
/// its own position has one turn and no offset, one that is not rotated, or back again, neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Form {
    /// A row outside a sequence-parallel region.
    pub(super) hidden: bool,
    pub(super) turns: i64,
    pub(super) offset: i64,
}

impl Form {
    /// The form in which a schedule's inputs and results are placed.
    pub(super) fn outside(schedule: &Schedule, tensor: TensorName) -> Form {
        Form { hidden: schedule.sequence_parallel.is_some() && hidden(tensor).is_some(), ..Form::default() }
    }

    /// The form in which attention takes a tensor, or makes the gradient of it.
    pub(super) fn inside(schedule: &Schedule, tensor: TensorName) -> Form {
        let turns = i64::from(schedule.sequence_parallel.is_some() && rotates(tensor));
        Form { turns, ..Form::default() }
    }
}

/// Real rows: those of a sequence's positions `start, start + step, …`. Head h of the buffer is head `h + head` of the
/// tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tokens {
    pub(super) what: What,
    pub(super) form: Form,
    pub(super) sequence: usize,
    pub(super) head: isize,
    pub(super) start: usize,
    pub(super) step: usize,
}

impl Tokens {
    pub(super) fn line(&self, len: usize) -> Positions {
        Positions { start: self.start, step: if len > 1 { self.step } else { 1 }, len }
    }

    /// Whether `len` rows of both are the same positions of one sequence and head.
    pub(super) fn same_rows(&self, other: &Tokens, len: usize) -> bool {
        self.sequence == other.sequence && self.head == other.head && self.line(len) == other.line(len)
    }

    /// Whether `len` rows of both are the same rows in the same form: what may be added, merged or weighed.
    pub(super) fn same_form(&self, other: &Tokens, len: usize) -> bool {
        self.form == other.form && self.same_rows(other, len)
    }

    /// The same rows in another form.
    pub(super) fn formed(&self, form: Form) -> Tokens {
        Tokens { form, ..self.clone() }
    }

    pub(super) fn with(&self, what: What) -> Symbol {
        let Tokens { form, sequence, head, start, step, .. } = *self;
        Symbol::Tokens(Tokens { what, form, sequence, head, start, step })
    }
}

/// What a row holds.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Symbol {
    Uninitialised,
    /// Anything: an input's padding, or what came of it.
    Padding,
    Zero,
    NegInfinity,
    /// An empty row's LSE, once the sink is in it; the head where the sink is learnable.
    SinkAlone(Option<isize>),
    Tokens(Tokens),
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Symbol::Tokens(tokens) = self else {
            return f.write_str(match self {
                Symbol::Uninitialised => "nothing yet",
                Symbol::Zero => "zeros",
                Symbol::NegInfinity => "-inf",
                Symbol::SinkAlone(_) => "the sink alone",
                _ => "padding",
            });
        };
        match &tokens.what {
            What::Input(name) => write!(f, "{name}")?,
            What::Lse(_) => f.write_str("lse")?,
            What::Out { .. } => f.write_str("out")?,
            What::Gradient(name, _) => write!(f, "partial {name}")?,
            What::Largest(_) => return f.write_str("max_logit"),
            What::SinkGradient(_) => return f.write_str("partial dsink"),
        }
        write!(f, " of sequence {}, position {}", tokens.sequence, tokens.start)?;
        let Form { hidden, turns, offset } = tokens.form;
        match (turns, offset) {
            (0, 0) => {}
            (1, _) => write!(f, ", rotated by position {}", tokens.start as i64 + offset)?,
            _ => write!(f, ", rotated {turns} times and by {offset}")?,
        }
        f.write_str(if hidden { ", hidden" } else { "" })
    }
}

impl Symbol {
    pub(super) fn tokens(&self) -> Option<&Tokens> {
        if let Symbol::Tokens(tokens) = self { Some(tokens) } else { None }
    }

    /// What row `rows` of a piece holds.
    pub(super) fn advance(&self, rows: usize) -> Symbol {
        let mut symbol = self.clone();
        if let Symbol::Tokens(tokens) = &mut symbol
            && rows > 0
        {
            tokens.start += tokens.step * rows;
        }
        symbol
    }

    /// Every `stride`-th row.
    pub(super) fn every(mut self, stride: usize) -> Symbol {
        if let Symbol::Tokens(tokens) = &mut self {
            tokens.step = tokens.step.saturating_mul(stride);
        }
        self
    }

    /// The same for other numbers of heads: the buffer's head 0 is now its head `by`.
    pub(super) fn shift_heads(mut self, by: isize) -> Symbol {
        match &mut self {
            Symbol::Tokens(tokens) => tokens.head -= by,
            Symbol::SinkAlone(Some(head)) => *head -= by,
            _ => {}
        }
        self
    }

    /// Whether `len` rows of this and then rows of `next` are one piece, and if so makes this the piece's symbol.
    fn join(&mut self, len: usize, next: &Symbol, next_len: usize) -> bool {
        let (Symbol::Tokens(a), Symbol::Tokens(b)) = (&mut *self, next) else { return self == next };
        let step = if len > 1 { Some(a.step) } else { b.start.checked_sub(a.start) };
        let Some(step) = step.filter(|&step| step > 0) else { return false };
        let continues = b.start == a.start + step * len && (next_len == 1 || b.step == step);
        let alike = a.form == b.form && a.sequence == b.sequence && a.head == b.head;
        let same = continues && alike && a.what == b.what;
        if same {
            a.step = step;
        }
        same
    }
}

/// `len` rows from row `at` of a run, or of a buffer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SymbolRows {
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) symbol: Symbol,
}

impl SymbolRows {
    /// One past the last row.
    pub(super) fn end(&self) -> usize {
        self.at + self.len
    }

    /// The rows before `row`, which is inside.
    pub(super) fn until(&self, row: usize) -> SymbolRows {
        SymbolRows { at: self.at, len: row - self.at, symbol: self.symbol.clone() }
    }

    /// The rows from `row` on, which is inside.
    pub(super) fn from(&self, row: usize) -> SymbolRows {
        SymbolRows { at: row, len: self.end() - row, symbol: self.symbol.advance(row - self.at) }
    }

    /// Whether the rows of `next`, which follow, belong to this piece; then they do.
    pub(super) fn join(&mut self, next: &SymbolRows) -> bool {
        let joins = self.symbol.join(self.len, &next.symbol, next.len);
        self.len += if joins { next.len } else { 0 };
        joins
    }
}

/// Adds a piece to those before it.
pub(super) fn append(pieces: &mut Vec<SymbolRows>, piece: SymbolRows) {
    if !pieces.last_mut().is_some_and(|last| last.end() == piece.at && last.join(&piece)) {
        pieces.push(piece);
    }
}

/// Cuts equally long lists of pieces at each other's ends: row, length and every list's symbol.
pub(super) fn zip<const N: usize>(
    lists: [&[SymbolRows]; N],
    mut each: impl FnMut(usize, usize, [Symbol; N]),
) {
    let (mut next, mut at) = ([0; N], 0);
    while (0..N).all(|list| next[list] < lists[list].len()) {
        let piece = |list: usize| &lists[list][next[list]];
        let end = (0..N).map(|list| piece(list).end()).min().unwrap_or(at);
        let symbols = std::array::from_fn(|list| piece(list).symbol.advance(at - piece(list).at));
        each(at, end - at, symbols);
        for list in 0..N {
            next[list] += usize::from(lists[list][next[list]].end() == end);
        }
        at = end;
    }
}
