//! Tables drawn at random, for tests of what follows from any table.

use seamproof_judge::hash::mix;
use seamproof_judge::prelude::*;
use seamproof_judge::subject::{BalanceKind, SideLayout, Unpadded};
use seamproof_oracle::Algorithm;

/// Numbers that follow from a seed.
struct Draws(u64);

impl Draws {
    fn below(&mut self, n: usize) -> usize {
        self.0 = mix(self.0.wrapping_add(0x9e37_79b9_7f4a_7c15));
        (self.0 % n as u64) as usize
    }

    /// Whether a row keeps what the widest table has: one row in three does not.
    fn wide(&mut self) -> bool {
        self.below(3) > 0
    }

    fn of<T: Copy>(&mut self, table: &[T]) -> T {
        table[self.below(table.len())]
    }

    /// Returns some of these, at least one, in any order.
    fn some<T: Copy>(&mut self, all: &[T]) -> Vec<T> {
        let mut left = all.to_vec();
        let count = 1 + self.below(all.len());
        (0..count).map(|_| left.remove(self.below(left.len()))).collect()
    }

    fn sizes(&mut self, most: usize) -> Sizes {
        match self.below(4) {
            0 => Sizes::only(1 + self.below(most)),
            1 => Sizes::up_to(1 + self.below(most)),
            2 => Sizes::multiples(8, most.max(8), 8).expect("there is 8"),
            _ => Sizes::new((0..3).map(|_| 1 + self.below(most))).expect("they are sizes"),
        }
    }
}

/// Returns a table that some problem passes, drawn from a seed.
pub(crate) fn random(seed: u64) -> Table {
    let mut draws = Draws(mix(seed));
    loop {
        if let Ok(table) = drawn(&mut draws).validated() {
            return table;
        }
    }
}

fn drawn(draws: &mut Draws) -> Table {
    let mut table = Table::widest();
    if !draws.wide() {
        table.precisions = draws.some(&table.precisions);
    }
    if !draws.wide() {
        (table.dims.qk, table.dims.v) = (draws.sizes(64), draws.sizes(64));
    }
    table.dims.equal = !draws.wide();
    if !draws.wide() {
        table.heads.groups = draws.sizes(8);
    }
    if !draws.wide() {
        table.heads.most = 1 + draws.below(16);
    }
    masks(draws, &mut table);
    lengths(draws, &mut table);
    let layout = &mut table.layout;
    let rows = [
        &mut layout.padding,
        &mut layout.gaps,
        &mut layout.first_offset,
        &mut layout.slack,
        &mut layout.steps,
        &mut layout.order,
    ];
    rows.into_iter().for_each(|row| *row = draws.wide());
    if !draws.wide() {
        table.layout.padding_except = (0..1 + draws.below(3)).map(|_| unpadded(draws)).collect();
    }
    (table.cache, table.softcap) = (draws.wide(), draws.wide());
    if !draws.wide() {
        table.pages = draws.wide().then(|| draws.sizes(16));
    }
    if !draws.wide() {
        table.sinks = draws.some(&[Sink::None, Sink::OffByOne, Sink::Learnable]);
    }
    table.backward = draws.wide();
    if !draws.wide() {
        table.parallel.algorithms = draws.some(&Algorithm::ALL.map(Algorithm::name));
        table.parallel.balances = draws.some(&BalanceKind::ALL);
        table.parallel.ranks_most = draws.of(&[1, 2, 3, 8]);
        table.parallel.ranks_least = draws.of(&[1, 1, 2, 3]).min(table.parallel.ranks_most);
        let is_several = table.parallel.ranks_least > 1;
        table.parallel.algorithms.retain(|algorithm| !is_several || *algorithm != "single");
        table.parallel.sub_groups = draws.wide();
        table.parallel.order = draws.wide();
        table.parallel.world_most = draws.of(&[1, 3, 8]).max(table.parallel.ranks_most);
        table.parallel.ring_stripes = draws.wide();
    }
    if !draws.wide() {
        table.forms = draws.some(&Form::ALL);
    }
    table.parallel.regions = draws.wide();
    table.layout.equal = table.lengths.equal && !draws.wide();
    table
}

fn unpadded(draws: &mut Draws) -> Unpadded {
    let algorithm = draws.wide().then(|| draws.of(&Algorithm::ALL).name());
    Unpadded { algorithm, layout: draws.wide().then(|| draws.of(&SideLayout::ALL)) }
}

fn masks(draws: &mut Draws, table: &mut Table) {
    if !draws.wide() {
        table.masks.forms = draws.some(&MaskForm::ALL);
    }
    if !draws.wide() {
        table.masks.kinds = draws.some(&MaskKind::ALL);
    }
    if !draws.wide() {
        table.masks.alignments = draws.some(&[Alignment::TopLeft, Alignment::BottomRight]);
    }
    if !draws.wide() {
        table.masks.window_most = draws.of(&[0, 1, 3, 1 << 20]);
    }
}

fn lengths(draws: &mut Draws, table: &mut Table) {
    let lengths = &mut table.lengths;
    lengths.equal = !draws.wide();
    let rows =
        [&mut lengths.empty_q, &mut lengths.empty_kv, &mut lengths.blind_queries, &mut lengths.no_sequences];
    rows.into_iter().for_each(|row| *row = draws.wide());
    if !draws.wide() {
        lengths.most = draws.of(&[1, 2, 7, 16, 100]);
    }
    if !draws.wide() {
        lengths.least_kv = draws.of(&[1, 2, 5, 9]).min(lengths.most);
    }
    if !draws.wide() {
        lengths.multiple_q = draws.of(&[1, 2, 3]);
        lengths.multiple_kv = draws.of(&[1, 2, 4]);
    }
    if !draws.wide() {
        lengths.sequences_most = draws.of(&[1, 2, 5]);
    }
    if !draws.wide() {
        lengths.rows_most = draws.of(&[1, 3, 16, 64, 1000]).max(lengths.least_kv);
    }
}
