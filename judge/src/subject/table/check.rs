//! Whether a table is one that some problem can pass.

use seamproof_oracle::limits::{HEAD_DIM_MAX, HEADS_MAX, ROWS_MAX, SEQUENCES_MAX, WORLD_MAX};
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{Algorithm, Element, Form, PAGE_SIZE_MAX, Precision, Scaling, TensorName};

use super::{BalanceKind, HeadDims, Lengths, SideLayout, Sizes, Table};
use crate::subject::Word;

/// A row that no problem could pass, or whose value is out of its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("table.{row}: {what}")]
pub struct TableError {
    /// Name of the row.
    pub row: Word,
    /// What is wrong with its value, and what to do.
    pub what: String,
}

impl Table {
    /// Returns the table if some problem passes all of its rows. [`Table::fitted`] is total for such a table.
    pub fn validated(self) -> Result<Table, TableError> {
        self.lists()?;
        self.bounds()?;
        self.combinations()?;
        Ok(self)
    }

    fn lists(&self) -> Result<(), TableError> {
        let lists = [
            ("precisions", self.precisions.is_empty()),
            ("masks.forms", self.masks.forms.is_empty()),
            ("masks.alignments", self.masks.alignments.is_empty()),
            ("forms", self.forms.is_empty()),
            ("sinks", self.sinks.is_empty()),
            ("parallel.algorithms", self.parallel.algorithms.is_empty()),
        ];
        match lists.into_iter().find(|(_, empty)| *empty) {
            Some((row, _)) => Err(wrong(row, "the list is empty; name at least one")),
            None => Ok(()),
        }
    }

    fn bounds(&self) -> Result<(), TableError> {
        let bounds = [
            ("dims.qk", self.dims.qk.most(), HEAD_DIM_MAX),
            ("dims.v", self.dims.v.most(), HEAD_DIM_MAX),
            ("pages", self.pages.as_ref().map_or(1, Sizes::most), PAGE_SIZE_MAX),
            ("heads.most", self.heads.most, HEADS_MAX),
            ("lengths.most", self.lengths.most, ROWS_MAX),
            ("lengths.sequences_most", self.lengths.sequences_most, SEQUENCES_MAX),
            ("lengths.rows_most", self.lengths.rows_most, ROWS_MAX),
            ("lse.multiple", self.lse.multiple, ROWS_MAX),
            ("parallel.world_most", self.parallel.world_most, WORLD_MAX),
            ("parallel.ranks_most", self.parallel.ranks_most, self.parallel.world_most),
            ("lengths.multiple_q", self.lengths.multiple_q, ROWS_MAX),
            ("lengths.multiple_kv", self.lengths.multiple_kv, ROWS_MAX),
            ("parallel.ranks_least", self.parallel.ranks_least, self.parallel.ranks_most),
            ("lengths.least_kv", self.lengths.least_kv, self.lengths.most.min(self.lengths.rows_most)),
        ];
        match bounds.into_iter().find(|(_, got, most)| !(1..=*most).contains(got)) {
            Some((row, got, most)) => Err(wrong(row, &format!("{got} is out of range; use 1 to {most}"))),
            None => Ok(()),
        }
    }

    fn combinations(&self) -> Result<(), TableError> {
        let elements = self.precisions.iter().flat_map(Precision::elements);
        let of_inputs = |name: &str| ["q", "k", "v", "dout"].contains(&name);
        let mut scaled = elements.filter(|(_, element)| element.is_scaled());
        let is_known =
            |(name, element): &(&str, Element)| of_inputs(name) || element.scaling == Scaling::PerTensor;
        if let Some((name, element)) = scaled.find(|scaled| !is_known(scaled)) {
            let what = format!(
                "{name} is {element}; what a kernel quantises has one scale a tensor, so name {}/tensor, or the \
                 format alone",
                element.format
            );
            return Err(wrong("precisions", &what));
        }
        let HeadDims { qk, v, equal } = &self.dims;
        if *equal && !qk.iter().any(|size| v.contains(size)) {
            return Err(wrong("dims.equal", "no size is in both dims.qk and dims.v"));
        }
        if self.heads.groups.least() > self.heads.most {
            return Err(wrong("heads.groups", "every group has more query heads than heads.most"));
        }
        if self.masks.window_most == 0 && self.masks.forms.iter().any(|form| form.looks_ahead()) {
            let what =
                "0 leaves no bound above 0; drop right-window and two-sided from masks.forms, or raise it";
            return Err(wrong("masks.window_most", what));
        }
        if self.layout.padding && !self.pads_somewhere() {
            let what = "padding is refused everywhere; say layout.padding false instead";
            return Err(wrong("layout.padding_except", what));
        }
        if self.layout.equal && !self.lengths.equal {
            let what = "q and kv lie alike where their lengths are the same; say lengths.equal true as well";
            return Err(wrong("layout.equal", what));
        }
        if let Some(form) = self.forms.iter().find(|form| form.is_contradiction()) {
            let what = format!("{} says no problem; every subject refuses it, so drop it", form.name());
            return Err(wrong("forms", &what));
        }
        let statistic = |name: &TensorName| matches!(name, TensorName::Lse | TensorName::MaxLogit);
        if let Some(other) = self.statistics.iter().find(|name| !statistic(name)) {
            return Err(wrong("statistics", &format!("{other} is no statistic; use lse and max_logit")));
        }
        let pads_a_batch = self.takes_padding(Algorithm::Single, SideLayout::Bshd);
        let holds = |form: &Form| match form {
            Form::Lengths => pads_a_batch,
            Form::BatchedSegments => self.frees_rows(),
            _ => true,
        };
        if !self.forms.iter().any(holds) {
            let what = "lengths alone is a padded batch, and batched_segments free the rows of its padding; take \
                        layout.padding there, layout.gaps and layout.slack here, or another form";
            return Err(wrong("forms", what));
        }
        let shortest = self.lengths.least_kv.next_multiple_of(self.lengths.unit());
        if shortest > self.lengths.most.min(self.lengths.rows_most) {
            let what = format!(
                "sequences of {shortest} tokens are too long by another row; raise lengths.most or rows_most"
            );
            return Err(wrong("lengths.multiple_kv", &what));
        }
        let one_rank = self.parallel.takes(Algorithm::Single);
        if !one_rank && !self.forms.contains(&Form::CuSeqlens) {
            return Err(wrong("forms", "without single among the algorithms, cu_seqlens is needed"));
        }
        let is_several = self.parallel.ranks_least > 1;
        if !one_rank && !is_several && !self.parallel.balances.contains(&BalanceKind::Contiguous) {
            let what = "without single among the algorithms, contiguous is needed for a group of one rank; or raise \
                        parallel.ranks_least";
            return Err(wrong("parallel.balances", what));
        }
        if is_several { self.of_several_ranks() } else { Ok(()) }
    }

    /// Checks that some group of the least number of ranks takes any heads and any lengths.
    fn of_several_ranks(&self) -> Result<(), TableError> {
        let taken = &self.parallel;
        let least = |what: &str| Err(wrong("parallel.ranks_least", what));
        if taken.takes(Algorithm::Single) {
            return least("single is one rank; drop it from parallel.algorithms");
        }
        let any_heads =
            || [Algorithm::Ring, Algorithm::AllGather].into_iter().filter(|other| taken.takes(*other));
        if any_heads().next().is_none() {
            return least("several ranks need ring or all-gather, which take any heads");
        }
        if !any_heads().any(|algorithm| self.shares_anything(algorithm)) {
            return least(
                "several ranks need layout.padding of packed rows, so that they can share any length",
            );
        }
        let shared = Lengths {
            multiple_q: span_multiple(taken.smallest_balance(), taken.ranks_least),
            multiple_kv: self.lengths.unit(),
            ..self.lengths.clone()
        };
        if shared.least_kv.next_multiple_of(shared.unit()) > self.lengths.rows_most {
            return least("the ranks cannot share lengths.least_kv in lengths.rows_most; raise that");
        }
        Ok(())
    }
}

fn wrong(row: Word, what: &str) -> TableError {
    TableError { row, what: what.to_owned() }
}
