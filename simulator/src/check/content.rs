//! What buffers hold: [`Symbol`]s on intervals of rows, for bands of heads.
//!
//! A symbol stands for a row's value without its numbers: whose row it is (*tokens*: sequence, position, head) and what
//! is known of it. Rows in sequence are one *piece* as long as positions advance by one step: row i of a piece holds
//! position `start + step·i`; a piece of one row has any step. A value that grew out of launches carries a [`Cover`],
//! the tree of the patches that were summed into it. Covers are shared and never copied; nothing here says whether one
//! is right.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use seamproof_oracle::{Run, TensorName};

use super::cover::{Line, Patch};
use super::error::Place;

/// Patches of one cover; more are no proof but a runaway sum.
pub(super) const PATCHES_MAX: usize = 1 << 17;

/// The patches of a sum, each as often as it was added.
#[derive(Debug)]
enum Node {
    Leaf(Vec<Patch>),
    Sum(Cover, Cover),
}

/// A sum of launches' contributions, by identity: two covers are equal when they are the same sum.
#[derive(Clone, Debug)]
pub(super) struct Cover {
    node: Rc<Node>,
    /// Patches, each as often as it was added.
    pub(super) count: usize,
    /// How often the sink was added.
    pub(super) sinks: usize,
}

impl PartialEq for Cover {
    fn eq(&self, other: &Cover) -> bool {
        Rc::ptr_eq(&self.node, &other.node) && self.sinks == other.sinks
    }
}

impl Cover {
    pub(super) fn new(patches: Vec<Patch>, sinks: usize) -> Cover {
        Cover { count: patches.len(), node: Rc::new(Node::Leaf(patches)), sinks }
    }

    /// Both; `None` when that is more than [`PATCHES_MAX`].
    pub(super) fn plus(&self, other: &Cover) -> Option<Cover> {
        let count = (self.count + other.count).max(1);
        // A sum of empty ones counts too, so that a tree is never deeper than its count.
        let node = Rc::new(Node::Sum(self.clone(), other.clone()));
        (count <= PATCHES_MAX).then_some(Cover { node, count: count + 1, sinks: self.sinks + other.sinks })
    }

    pub(super) fn with_sink(&self) -> Cover {
        Cover { sinks: self.sinks.saturating_add(1), ..self.clone() }
    }

    /// Names the cover among those that live.
    pub(super) fn address(&self) -> usize {
        Rc::as_ptr(&self.node) as usize
    }

    /// Every patch, without recursion: a chain of sums may be long.
    pub(super) fn patches(&self) -> Vec<Patch> {
        let (mut found, mut todo) = (Vec::new(), vec![self]);
        while let Some(cover) = todo.pop() {
            match &*cover.node {
                Node::Leaf(patches) => found.extend_from_slice(patches),
                Node::Sum(a, b) => todo.extend([b, a]),
            }
        }
        found
    }
}

/// Covers of a long chain are dropped without recursion.
impl Drop for Node {
    fn drop(&mut self) {
        let mut todo = Vec::new();
        let take = |node: &mut Node, todo: &mut Vec<Rc<Node>>| {
            if let Node::Sum(a, b) = node {
                for cover in [a, b] {
                    let empty = Rc::new(Node::Leaf(Vec::new()));
                    todo.push(std::mem::replace(&mut cover.node, empty));
                }
            }
        };
        take(self, &mut todo);
        while let Some(node) = todo.pop() {
            if let Some(mut node) = Rc::into_inner(node) {
                take(&mut node, &mut todo);
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
    Largest(Rc<BTreeSet<Place>>),
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
    pub(super) fn line(&self, len: usize) -> Line {
        Line { start: self.start, step: if len > 1 { self.step } else { 1 }, len }
    }

    /// Whether `len` rows of both are the same positions of one sequence and head.
    pub(super) fn same_rows(&self, other: &Tokens, len: usize) -> bool {
        self.sequence == other.sequence && self.head == other.head && self.line(len) == other.line(len)
    }

    /// The same rows in another form.
    pub(super) fn formed(&self, form: Form) -> Tokens {
        Tokens { form, ..self.clone() }
    }

    pub(super) fn with(&self, what: What) -> Symbol {
        Symbol::Tokens(Tokens { what, ..self.clone() })
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
        match self {
            Symbol::Tokens(tokens) if rows > 0 => {
                Symbol::Tokens(Tokens { start: tokens.start + tokens.step * rows, ..tokens.clone() })
            }
            other => other.clone(),
        }
    }

    /// Every `stride`-th row.
    fn every(self, stride: usize) -> Symbol {
        match self {
            Symbol::Tokens(tokens) => {
                Symbol::Tokens(Tokens { step: tokens.step.saturating_mul(stride), ..tokens })
            }
            other => other,
        }
    }

    /// The same for other numbers of heads: the buffer's head 0 is now its head `by`.
    fn shift_heads(self, by: isize) -> Symbol {
        match self {
            Symbol::Tokens(tokens) => Symbol::Tokens(Tokens { head: tokens.head - by, ..tokens }),
            Symbol::SinkAlone(head) => Symbol::SinkAlone(head.map(|head| head - by)),
            other => other,
        }
    }

    /// `len` rows of this and then rows of `next` as one piece.
    fn join(&self, len: usize, next: &Symbol, next_len: usize) -> Option<Symbol> {
        let (Symbol::Tokens(a), Symbol::Tokens(b)) = (self, next) else {
            return (self == next).then(|| self.clone());
        };
        let step = if len > 1 { a.step } else { b.start.checked_sub(a.start)? };
        let continues = step > 0 && b.start == a.start + step * len && (next_len == 1 || b.step == step);
        let same = continues && a.form == b.form && a.sequence == b.sequence && a.head == b.head;
        (same && a.what == b.what).then(|| Symbol::Tokens(Tokens { step, ..a.clone() }))
    }
}

/// `len` rows from row `at` of a run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) symbol: Symbol,
}

fn append(pieces: &mut Vec<Piece>, piece: Piece) {
    if let Some(last) = pieces.last_mut()
        && let Some(symbol) = last.symbol.join(last.len, &piece.symbol, piece.len)
    {
        *last = Piece { at: last.at, len: last.len + piece.len, symbol };
    } else {
        pieces.push(piece);
    }
}

/// The rows of one band of heads: every row is in one piece.
#[derive(Clone, Debug)]
struct RowMap(BTreeMap<usize, (usize, Symbol)>);

impl RowMap {
    fn split(&mut self, row: usize) {
        let Some((&start, (len, symbol))) = self.0.range_mut(..row).next_back() else { return };
        let before = row - start;
        if before < *len {
            let tail = (*len - before, symbol.advance(before));
            *len = before;
            self.0.insert(row, tail);
        }
    }

    fn write(&mut self, row: usize, len: usize, symbol: Symbol) {
        self.split(row);
        self.split(row + len);
        while let Some((&start, _)) = self.0.range(row..row + len).next() {
            self.0.remove(&start);
        }
        let (mut start, mut len, mut symbol) = (row, len, symbol);
        if let Some((&before, (rows, earlier))) = self.0.range(..row).next_back()
            && before + rows == row
            && let Some(joined) = earlier.join(*rows, &symbol, len)
        {
            (start, len, symbol) = (before, rows + len, joined);
        }
        if let Some((rows, later)) = self.0.get(&(start + len))
            && let Some(joined) = symbol.join(len, later, *rows)
        {
            let rows = *rows;
            self.0.remove(&(start + len));
            (len, symbol) = (len + rows, joined);
        }
        self.0.insert(start, (len, symbol));
    }

    /// Appends the rows of a run; its row 0 is row `at`.
    fn read(&self, run: &Run, at: usize, to: &mut Vec<Piece>) {
        let mut index = 0;
        while index < run.len {
            let row = run.offset + run.step * index;
            let Some((start, (len, symbol))) = self.0.range(..=row).next_back() else { return };
            let rows = ((start + len - row - 1) / run.step + 1).min(run.len - index);
            let symbol = symbol.advance(row - start).every(run.step);
            append(to, Piece { at: at + index, len: rows, symbol });
            index += rows;
        }
    }
}

/// What one buffer holds.
#[derive(Clone, Debug)]
pub(super) struct Content(Vec<(Range<usize>, RowMap)>);

impl Content {
    pub(super) fn new(rows: usize, heads: usize, symbol: Symbol) -> Content {
        let map = if rows > 0 { BTreeMap::from([(0, (rows, symbol))]) } else { BTreeMap::new() };
        Content(vec![(0..heads, RowMap(map))])
    }

    /// The heads at which bands begin or end.
    pub(super) fn cuts(&self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|(heads, _)| heads.start)
    }

    /// The rows of runs, one after the other, for heads of one band; head 0 of the symbols is `heads.start`.
    pub(super) fn read(&self, runs: &[Run], heads: &Range<usize>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let band = self.0.partition_point(|(band, _)| band.end <= heads.start);
        if let Some((_, map)) = self.0.get(band) {
            let mut at = 0;
            for run in runs {
                map.read(run, at, &mut pieces);
                at += run.len;
            }
        }
        for piece in &mut pieces {
            let symbol = std::mem::replace(&mut piece.symbol, Symbol::Zero);
            piece.symbol = symbol.shift_heads(-(heads.start as isize));
        }
        pieces
    }

    /// Writes rows of a run, as they were read.
    pub(super) fn write(&mut self, run: &Run, heads: &Range<usize>, piece: &Piece) {
        if heads.is_empty() || piece.len == 0 {
            return;
        }
        self.split(heads.start);
        self.split(heads.end);
        let symbol = piece.symbol.clone().shift_heads(heads.start as isize);
        let inside = self.0.iter_mut().filter(|(band, _)| heads.start <= band.start && band.end <= heads.end);
        for (_, map) in inside {
            if run.step == 1 {
                map.write(run.offset + piece.at, piece.len, symbol.clone());
                continue;
            }
            for index in 0..piece.len {
                map.write(run.offset + run.step * (piece.at + index), 1, symbol.advance(index));
            }
        }
    }

    fn split(&mut self, head: usize) {
        let Some(at) = self.0.iter().position(|(band, _)| band.start < head && head < band.end) else {
            return;
        };
        let (band, map) = self.0[at].clone();
        self.0[at].0.end = head;
        self.0.insert(at + 1, (head..band.end, map));
    }
}

/// Cuts equally long lists of pieces at each other's ends: row, length and every list's symbol.
pub(super) fn zip(lists: &[Vec<Piece>], mut each: impl FnMut(usize, usize, Vec<Symbol>)) {
    let mut next = vec![0; lists.len()];
    let mut at = 0;
    loop {
        let current: Option<Vec<&Piece>> =
            lists.iter().zip(&next).map(|(list, &index)| list.get(index)).collect();
        let Some(current) = current.filter(|current| !current.is_empty()) else { return };
        let end = current.iter().map(|piece| piece.at + piece.len).min().unwrap_or(at);
        let symbols = current.iter().map(|piece| piece.symbol.advance(at - piece.at)).collect();
        each(at, end - at, symbols);
        for (index, piece) in next.iter_mut().zip(current) {
            *index += usize::from(piece.at + piece.len == end);
        }
        at = end;
    }
}
