//! Whole results: proves that the rows of a result hold the sum over exactly the pairs that the mask shows them.
//!
//! A cover is proved once for the same rows. Covers repeat: out and LSE share one, dk and dv have sums of one shape,
//! and ranks that attend with different heads have covers that differ only in their launches. A proof reads patches,
//! the sequence, the side and the rows. It never reads heads, the form of rows or the launch of a patch, because heads
//! and form are checked on each symbol before. One proof therefore serves all covers that are [alike](Cover::alike). A
//! cover without a proof is examined by itself, and every error names its launch.

use seamproof_oracle::{Positions, Sequence, Side, Sight, Sink, TensorName};

use super::cover::{Hole, Patch, Region, prove_all, range_of};
use super::error::{CheckError, Needed};
use super::machine::{Machine, Site};
use super::shape::side;
use super::symbol::{Cover, Form, Symbol, Tokens, What};

/// Covers behind a symbol of a result.
enum Covers<'s> {
    /// No cover: no pair was attended for these rows. The number counts the sink.
    Nothing(usize),
    These([&'s Cover; 2]),
}

impl Machine<'_> {
    /// Proves that a symbol is the whole out, lse or gradient of the given rows, with every visible pair once and the
    /// sink as often as it must be. Returns the number of pairs.
    pub(super) fn finished(&mut self, site: &Site, rows: &Tokens, len: usize, symbol: &Symbol) -> u64 {
        let statistic = matches!(site.tensor, TensorName::Out | TensorName::Lse);
        let expected = if statistic { self.sinks() } else { 0 };
        let formed = self.formed(site, symbol);
        let covers = if formed { self.covers(site.tensor, rows, len, symbol) } else { None };
        let Some(covers) = covers else {
            let needed = format!(
                "{} of sequence {}, position {}, head {} is needed",
                site.tensor, rows.sequence, rows.start, rows.head
            );
            self.mismatch(site, symbol, needed);
            return 0;
        };
        let sinks = match covers {
            Covers::Nothing(sinks) => [sinks; 2],
            Covers::These(covers) => covers.map(|cover| cover.sinks),
        };
        if let Some(sinks) = sinks.iter().find(|sinks| **sinks != expected) {
            let needed = format!("{} needs the sink {expected} times, and has it {sinks} times", site.tensor);
            self.mismatch(site, symbol, needed);
            return 0;
        }
        match covers {
            Covers::Nothing(_) => self.proved(site, rows, len, &Cover::new(Vec::new(), expected)),
            Covers::These([parts, against]) => {
                let pairs = self.proved(site, rows, len, parts);
                if parts.same(against) { pairs } else { self.proved(site, rows, len, against) }
            }
        }
    }

    /// Whether a symbol has the form of the site's tensor. An operation reads it in the form inside a region; the end
    /// has the form outside.
    fn formed(&self, site: &Site, symbol: &Symbol) -> bool {
        let outside = || Form::outside(self.schedule, site.tensor);
        let form = site.place.map_or_else(outside, |_| Form::default());
        symbol.tokens().is_none_or(|tokens| tokens.form == form)
    }

    /// Returns the number of sinks in a whole out and LSE: 0 or 1.
    fn sinks(&self) -> usize {
        usize::from(self.problem.softmax.sink != Sink::None)
    }

    /// Returns the covers that must be exact for a symbol to be a tensor's rows; `None` if the symbol cannot be these
    /// rows.
    fn covers<'s>(
        &self,
        tensor: TensorName,
        rows: &Tokens,
        len: usize,
        symbol: &'s Symbol,
    ) -> Option<Covers<'s>> {
        let sinks = self.sinks();
        let alone = (self.problem.softmax.sink == Sink::Learnable).then_some(rows.head);
        match (tensor, symbol) {
            (TensorName::Out, Symbol::Zero) => Some(Covers::Nothing(sinks)),
            (TensorName::Lse, Symbol::NegInfinity) if sinks == 0 => Some(Covers::Nothing(sinks)),
            (TensorName::Lse, Symbol::SinkAlone(head)) if sinks == 1 && *head == alone => {
                Some(Covers::Nothing(sinks))
            }
            (TensorName::Dq | TensorName::Dk | TensorName::Dv, Symbol::Zero) => Some(Covers::Nothing(0)),
            (tensor, Symbol::Tokens(tokens)) if tokens.same_rows(rows, len) => match (tensor, &tokens.what) {
                (TensorName::Out, What::Out { parts, against }) => Some(Covers::These([parts, against])),
                (TensorName::Lse, What::Lse(cover)) => Some(Covers::These([cover; 2])),
                (_, What::Gradient(name, cover)) if *name == tensor => Some(Covers::These([cover; 2])),
                _ => None,
            },
            _ => None,
        }
    }

    /// Proves that a cover is exactly the mask's pairs, and remembers the outcome. Returns the number of pairs, or 0
    /// after an error.
    fn proved(&mut self, site: &Site, rows: &Tokens, len: usize, cover: &Cover) -> u64 {
        let keys = side(site.tensor) == Some(Side::Kv);
        let line = rows.line(len);
        let claim = (cover.hash(), keys, rows.sequence, line.start, line.step, line.len);
        if let Some(pairs) = self.proved.find(&claim, cover) {
            return pairs;
        }
        let proofs = self.proofs(keys, rows.sequence, line, cover);
        let pairs = proofs.iter().map(|proof| *proof.as_ref().unwrap_or(&0)).sum();
        let holes: Vec<Hole> = proofs.into_iter().filter_map(Result::err).collect();
        if holes.is_empty() {
            self.proved.exact.insert(claim, (cover.clone(), pairs));
            return pairs;
        }
        holes.into_iter().for_each(|hole| self.hole(site, rows, hole));
        self.proved.wrong.entry(claim).or_default().push(cover.clone());
        0
    }

    /// Returns one proof for queries. For keys, returns one for each query head of the KV head, or for each set of
    /// query heads that are alike, and as many for each sequence that borrows them.
    fn proofs(&self, keys: bool, sequence: usize, line: Positions, cover: &Cover) -> Vec<Result<u64, Hole>> {
        if !keys {
            let sight = self.sight(sequence);
            return vec![prove_all(line, &Region::of_queries(&sight, range_of(&line)), &cover.patches())];
        }
        let own = self.proofs_of_keys(sequence, line, cover);
        let lent = self.problem.sharing.lent(sequence).flat_map(|shared| {
            let line = line.within(&(0..shared.keys));
            let shares = (line.len > 0).then(|| self.proofs_of_keys(shared.sequence, line, cover));
            shares.into_iter().flatten()
        });
        own.into_iter().chain(lent).collect()
    }

    fn sight(&self, sequence: usize) -> Sight {
        let Sequence { q, kv, .. } = self.problem.sequences[sequence];
        self.problem.mask.sight(q.len, kv.len)
    }

    /// Returns the proofs of what one sequence adds to keys.
    fn proofs_of_keys(&self, sequence: usize, line: Positions, cover: &Cover) -> Vec<Result<u64, Hole>> {
        let sight = self.sight(sequence);
        let patches = cover.patches().into_iter().filter(|patch| patch.sequence == sequence);
        let patches: Vec<Patch> = patches.map(|patch| patch.transposed()).collect();
        let regions = Region::of_keys(&sight, range_of(&line));
        let cuts = patches.iter().flat_map(|patch| [patch.group.start, patch.group.end]);
        let mut firsts: Vec<usize> = cuts.filter(|&head| head < self.problem.group()).chain([0]).collect();
        firsts.sort_unstable();
        firsts.dedup();
        let proof = |head| {
            if patches.iter().all(|patch| patch.group.contains(&head)) {
                return prove_all(line, &regions, &patches);
            }
            let mine = patches.iter().filter(|patch| patch.group.contains(&head));
            prove_all(line, &regions, &mine.cloned().collect::<Vec<_>>())
        };
        firsts.into_iter().map(proof).collect()
    }

    fn hole(&mut self, site: &Site, rows: &Tokens, hole: Hole) {
        let at = match site.place {
            Some(place) => Needed::Operation(place),
            None => Needed::Result(self.schedule.buffers[site.buffer.0].rank),
        };
        let first = rows.head.max(0) as usize;
        self.errors.push(CheckError::Cover {
            at,
            tensor: site.tensor,
            sequence: rows.sequence,
            heads: first..first + site.heads.len(),
            pairs: hole.pairs,
            kind: hole.kind,
            launch: hole.launch,
        });
    }
}
