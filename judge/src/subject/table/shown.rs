//! The rows of a table that a problem shows, so that a campaign can say which of them no case had.

use seamproof_oracle::{Algorithm, Alignment, Balance, Form, Pass, Problem, Sequence, Sink};

use super::refusal::has_blind_query;
use super::{BalanceKind, MaskForm, MaskKind, Seams, Table, has_ring_stripes};

impl Table {
    /// Returns what the table takes beyond the plainest problems, each by its row and value. A campaign that is long
    /// enough shows each of them. Rows that no draw can show, because others leave no room for them, are left out.
    pub fn taken(&self) -> Vec<String> {
        let (lengths, layout, parallel) = (&self.lengths, &self.layout, &self.parallel);
        let several = |row: &str, names: Vec<&str>| -> Vec<String> {
            let all = names.into_iter().map(|name| format!("{row} {name}"));
            all.collect()
        };
        let precisions = (0..self.precisions.len()).map(|index| format!("precisions[{index}]"));
        let mut taken: Vec<String> = precisions.collect();
        taken.extend(several("masks.forms", self.masks.forms.iter().map(|form| form.name()).collect()));
        taken.extend(several("masks.kinds", self.masks.kinds.iter().map(|kind| kind.name()).collect()));
        taken.extend(several(
            "masks.alignments",
            self.masks.alignments.iter().map(|&a| alignment(a)).collect(),
        ));
        let single = parallel.takes(Algorithm::Single);
        let forms = self.forms.iter().filter(|form| self.fits(**form));
        taken.extend(several("forms", forms.map(|form| form.name()).collect()));
        taken.extend(several("sinks", self.sinks.iter().map(|&sink| sink_name(sink)).collect()));
        taken.extend(several("parallel.algorithms", parallel.algorithms.clone()));
        let cuts = if self.cuts() { parallel.balances.as_slice() } else { &[] };
        taken.extend(several("parallel.balances", cuts.iter().map(|kind| kind.name()).collect()));
        let ranks =
            parallel.ranks_most > 1 && Algorithm::of_several_ranks().any(|other| parallel.takes(other));
        let may_be_blind = lengths.empty_kv || self.masks.may_blind();
        let unit = lengths.unit();
        let has_room = lengths.empty_kv || lengths.most >= lengths.least_kv.next_multiple_of(unit) + unit;
        let flags = [
            ("dims.equal", !self.dims.equal && self.dims.qk.iter().any(|qk| self.dims.v.least() != qk)),
            ("heads.groups", self.heads.groups.iter().any(|group| (2..=self.heads.most).contains(&group))),
            ("lengths.equal", !lengths.equal && lengths.most > unit),
            ("lengths.empty_q", lengths.empty_q && (lengths.empty_kv || !lengths.equal)),
            (
                "lengths.empty_kv",
                lengths.empty_kv && (lengths.empty_q || !lengths.equal && lengths.blind_queries),
            ),
            ("lengths.blind_queries", lengths.blind_queries && !lengths.equal && may_be_blind && has_room),
            ("lengths.no_sequences", lengths.no_sequences),
            ("layout.padding", self.pads_somewhere() && lengths.rows_most > 1),
            ("layout.gaps", layout.gaps && lengths.sequences_most > 1),
            ("layout.first_offset", layout.first_offset && lengths.rows_most > 1),
            ("layout.slack", layout.slack && lengths.rows_most > 1),
            ("layout.steps", layout.steps && single),
            ("cache", self.fits_steps()),
            ("pages", self.pages.is_some() && single && self.forms.contains(&Form::CuSeqlens)),
            ("sharing", self.fits_sharing()),
            ("softcap", self.softcap),
            ("backward", self.backward),
            ("parallel.ring_stripes", parallel.ring_stripes && self.fits_ring_stripes()),
            ("parallel.ranks_most", ranks),
            ("parallel.sub_groups", parallel.sub_groups && ranks),
            ("parallel.order", parallel.order && ranks),
            ("parallel.regions", self.fits_regions()),
        ];
        taken.extend(flags.into_iter().filter(|(_, taken)| *taken).map(|(row, _)| row.to_owned()));
        taken
    }

    /// Whether an algorithm of several ranks is in the table.
    fn cuts(&self) -> bool {
        Algorithm::of_several_ranks().any(|other| self.parallel.takes(other))
    }

    /// Whether a ring and stripes are both in the table.
    fn fits_ring_stripes(&self) -> bool {
        let (taken, stripes) = (&self.parallel, Balance::Striped { stripe: 2 });
        let is_ring = |other: &Algorithm| has_ring_stripes(*other, stripes) && taken.takes(*other);
        taken.balances.contains(&BalanceKind::Striped)
            && taken.ranks_most > 1
            && Algorithm::of_several_ranks().any(|other| is_ring(&other))
    }

    /// Returns which entries of [`Table::taken`] a problem inside the table shows, and some further ones.
    pub fn shown(&self, problem: &Problem) -> Vec<String> {
        let (seams, parallel) = (Seams::of(problem), &problem.parallel);
        let any = |holds: &dyn Fn(&Sequence) -> bool| problem.sequences.iter().any(holds);
        let several = parallel.algorithm != Algorithm::Single;
        let precision = self.precisions.iter().position(|taken| *taken == problem.precision);
        let mut shown: Vec<String> =
            precision.map(|index| format!("precisions[{index}]")).into_iter().collect();
        shown.push(format!("masks.forms {}", MaskForm::of(&problem.mask).name()));
        shown.extend(MaskKind::of(&problem.mask).map(|kind| format!("masks.kinds {}", kind.name())));
        shown.push(format!("masks.alignments {}", alignment(problem.mask.align)));
        shown.push(format!("forms {}", problem.form.name()));
        shown.push(format!("sinks {}", sink_name(problem.softmax.sink)));
        shown.push(format!("parallel.algorithms {}", parallel.algorithm.name()));
        if several {
            shown.push(format!("parallel.balances {}", BalanceKind::of(parallel.balance).name()));
        }
        let flags = [
            ("dims.equal", problem.dims.qk != problem.dims.v),
            ("heads.groups", problem.group() > 1),
            ("lengths.equal", any(&|s| s.q.len != s.kv.len)),
            ("lengths.empty_q", any(&|s| s.q.len == 0)),
            ("lengths.empty_kv", any(&|s| s.kv.len == 0)),
            ("lengths.blind_queries", any(&|s| has_blind_query(problem.mask, s.q.len, s.kv.len))),
            ("lengths.no_sequences", problem.sequences.is_empty()),
            ("layout.padding", seams.padding),
            ("layout.gaps", seams.gaps),
            ("layout.first_offset", seams.first_offset),
            ("layout.slack", seams.slack),
            ("layout.steps", seams.steps),
            ("cache", !problem.steps.is_empty()),
            ("pages", problem.pages.is_some()),
            ("sharing", !problem.sharing.is_empty()),
            ("softcap", problem.softmax.softcap.is_some()),
            ("backward", problem.pass == Pass::Backward),
            ("parallel.ring_stripes", has_ring_stripes(parallel.algorithm, parallel.balance)),
            ("parallel.ranks_most", parallel.size() > 1),
            ("parallel.sub_groups", parallel.world != parallel.size()),
            ("parallel.order", !parallel.ranks.is_sorted()),
            ("parallel.regions", parallel.region > 1),
        ];
        shown.extend(flags.into_iter().filter(|(_, shown)| *shown).map(|(row, _)| row.to_owned()));
        shown
    }
}

fn alignment(align: Alignment) -> &'static str {
    match align {
        Alignment::TopLeft => "top-left",
        Alignment::BottomRight => "bottom-right",
    }
}

fn sink_name(sink: Sink) -> &'static str {
    match sink {
        Sink::None => "none",
        Sink::OffByOne => "off-by-one",
        Sink::Learnable => "learnable",
    }
}
