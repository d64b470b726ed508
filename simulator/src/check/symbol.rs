//! [`Symbol`]s: knowledge about the values of rows, without numbers.
//!
//! A symbol stands for a row's value. It holds the row's *tokens* (sequence, position, head) and what is known of the
//! value. Consecutive rows are one *piece* as long as their positions advance by one step: row i of a piece holds
//! position `start + step·i`. A piece of one row has any step. A value that comes from launches carries a [`Cover`]:
//! the tree of the patches that were summed into it. Covers are shared and never copied. This module does not say
//! whether a cover is right.

use std::collections::BTreeSet;
use std::fmt;
use std::rc::Rc;

use seamproof_oracle::{Positions, TensorName};

use super::cover::Patch;
use super::error::OperationId;
use crate::schedule::{Schedule, hidden, rotates};

/// Largest number of patches of one cover. A larger sum is a runaway sum and is not proved.
pub(super) const PATCHES_MAX: usize = 1 << 17;

/// The patches of a sum, each as often as it was added.
#[derive(Debug)]
enum Parts {
    /// The single patch of a leaf, without a list. Most leaves are of this kind.
    One(Patch),
    Leaf(Box<[Patch]>),
    /// The two covers of a sum; absent only while the sum is dropped.
    Sum(Option<[Cover; 2]>),
}

#[derive(Debug)]
struct Node {
    parts: Parts,
    /// Number of patches, each counted every time that it was added, plus one for each sum.
    count: usize,
    /// Hash of the tree and of its patches without their places. Equal trees have equal hashes.
    hash: u64,
}

/// A sum of launches' contributions. It has an identity: two covers are equal if they are the same sum.
#[derive(Clone, Debug)]
pub(super) struct Cover {
    node: Rc<Node>,
    /// Number of times that the sink was added.
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

    /// Returns the sum of both covers; `None` if it has more than [`PATCHES_MAX`] patches.
    pub(super) fn plus(&self, other: &Cover) -> Option<Cover> {
        let count = (self.node.count + other.node.count).max(1);
        if count > PATCHES_MAX {
            return None;
        }
        let hash = mix(mix(1, self.node.hash), other.node.hash);
        let parts = Parts::Sum(Some([self.clone(), other.clone()]));
        // A sum counts too, even one of empty covers: a tree is never deeper than its count.
        let node = Rc::new(Node { parts, count: count + 1, hash });
        Some(Cover { node, sinks: self.sinks + other.sinks })
    }

    pub(super) fn with_sink(&self) -> Cover {
        Cover { sinks: self.sinks.saturating_add(1), ..self.clone() }
    }

    /// Returns a hash that is equal for covers of the same patches in the same tree, whatever their places.
    pub(super) fn hash(&self) -> u64 {
        self.node.hash
    }

    /// Whether both are the same sum, apart from sinks.
    pub(super) fn same(&self, other: &Cover) -> bool {
        Rc::ptr_eq(&self.node, &other.node)
    }

    /// Whether both have the same patches, whatever their places. A proof of one cover is then a proof of the other,
    /// because a proof reads a place only to name it in an error.
    pub(super) fn alike(&self, other: &Cover) -> bool {
        let alike = || {
            let (mut mine, mut theirs) = (self.each(), other.each());
            mine.by_ref().all(|a| theirs.next().is_some_and(|b| a.alike(b))) && theirs.next().is_none()
        };
        self.same(other) || self.node.hash == other.node.hash && alike()
    }

    /// Returns every patch.
    pub(super) fn patches(&self) -> Vec<Patch> {
        let mut found = Vec::with_capacity(self.node.count);
        found.extend(self.each().cloned());
        found
    }

    fn each(&self) -> EachPatch<'_> {
        EachPatch { todo: vec![self], leaf: [].iter() }
    }
}

/// Iterator over the patches of a cover in order. It does not recurse, because a chain of sums may be long.
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

/// Returns a hash with one more number mixed in. The multiplier is from Steele and Vigna, arXiv:2001.05304.
fn mix(hash: u64, number: u64) -> u64 {
    (hash.rotate_left(23) ^ number).wrapping_mul(0xd134_2543_de82_ef95)
}

/// Drops the covers of a chain of sums without recursion, because the chain may be long.
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

/// Knowledge about the values of real rows.
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

/// Form of rows: the effect of linear layers and rotations.
///
/// Rotations add up: together they turn a row by `turns · position + offset`. A row that is rotated by its own position
/// has one turn and no offset. A row that is not rotated, or rotated back again, has neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Form {
    /// Whether the row is outside a sequence-parallel region.
    pub(super) hidden: bool,
    pub(super) turns: i64,
    pub(super) offset: i64,
}

impl Form {
    /// Returns the form in which a schedule's inputs and results are placed.
    pub(super) fn outside(schedule: &Schedule, tensor: TensorName) -> Form {
        Form { hidden: schedule.sequence_parallel.is_some() && hidden(tensor).is_some(), ..Form::default() }
    }

    /// Returns the form in which attention takes a tensor, or makes its gradient.
    pub(super) fn inside(schedule: &Schedule, tensor: TensorName) -> Form {
        let turns = i64::from(schedule.sequence_parallel.is_some() && rotates(tensor));
        Form { turns, ..Form::default() }
    }
}

/// Real rows at a sequence's positions `start, start + step, …`. Head h of the buffer is head `h + head` of the tensor.
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

    /// Whether `len` rows of both are at the same positions of one sequence and head.
    pub(super) fn same_rows(&self, other: &Tokens, len: usize) -> bool {
        self.sequence == other.sequence && self.head == other.head && self.line(len) == other.line(len)
    }

    /// Whether `len` rows of both are the same rows in the same form. Only these may be added, merged or weighted.
    pub(super) fn same_form(&self, other: &Tokens, len: usize) -> bool {
        self.form == other.form && self.same_rows(other, len)
    }

    /// Returns these rows in another form.
    pub(super) fn formed(&self, form: Form) -> Tokens {
        Tokens { form, ..self.clone() }
    }

    pub(super) fn with(&self, what: What) -> Symbol {
        let Tokens { form, sequence, head, start, step, .. } = *self;
        Symbol::Tokens(Tokens { what, form, sequence, head, start, step })
    }
}

/// Knowledge about the value of a row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Symbol {
    Uninitialised,
    /// Any value: an input's padding, or a value that was made from padding.
    Padding,
    Zero,
    NegInfinity,
    /// The LSE of an empty row with the sink in it. The head is given if the sink is learnable.
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

    /// Returns the symbol of row `rows` of a piece.
    pub(super) fn advance(&self, rows: usize) -> Symbol {
        let mut symbol = self.clone();
        if let Symbol::Tokens(tokens) = &mut symbol
            && rows > 0
        {
            tokens.start += tokens.step * rows;
        }
        symbol
    }

    /// Returns the symbol of every `stride`-th row.
    pub(super) fn every(mut self, stride: usize) -> Symbol {
        if let Symbol::Tokens(tokens) = &mut self {
            tokens.step = tokens.step.saturating_mul(stride);
        }
        self
    }

    /// Returns the symbol for other numbers of heads: the buffer's head 0 is now its head `by`.
    pub(super) fn shift_heads(mut self, by: isize) -> Symbol {
        match &mut self {
            Symbol::Tokens(tokens) => tokens.head -= by,
            Symbol::SinkAlone(Some(head)) => *head -= by,
            _ => {}
        }
        self
    }

    /// Whether `len` rows of this symbol and then rows of `next` make one piece. If they do, `self` becomes the piece's
    /// symbol.
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

/// Consecutive rows of a run or of a buffer: `len` rows from row `at` on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SymbolRows {
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) symbol: Symbol,
}

impl SymbolRows {
    /// Returns the row after the last one.
    pub(super) fn end(&self) -> usize {
        self.at + self.len
    }

    /// Returns the rows before `row`, which is inside.
    pub(super) fn until(&self, row: usize) -> SymbolRows {
        SymbolRows { at: self.at, len: row - self.at, symbol: self.symbol.clone() }
    }

    /// Returns the rows from `row` on, which is inside.
    pub(super) fn from(&self, row: usize) -> SymbolRows {
        SymbolRows { at: row, len: self.end() - row, symbol: self.symbol.advance(row - self.at) }
    }

    /// Whether the rows of `next`, which follow, belong to this piece. If they do, the piece takes them in.
    pub(super) fn join(&mut self, next: &SymbolRows) -> bool {
        let joins = self.symbol.join(self.len, &next.symbol, next.len);
        self.len += if joins { next.len } else { 0 };
        joins
    }
}

/// Appends a piece, or joins it to the last one.
pub(super) fn append(pieces: &mut Vec<SymbolRows>, piece: SymbolRows) {
    if !pieces.last_mut().is_some_and(|last| last.end() == piece.at && last.join(&piece)) {
        pieces.push(piece);
    }
}

/// Calls `each` with row, length and every list's symbol, for lists of equal length that are cut at each other's ends.
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
