//! Faults of ids, positions and lengths that several ranks are given ([`seamproof_oracle::dealing`]): a rank is told of
//! other rows than it has.

use seamproof_oracle::{Algorithm, Alignment, Balance, Form, Mask, Problem, ProblemFields, Run, Side};

use super::edit::{Passes, rebuild, segments};
use super::fault::Catcher::{Checker, Crash, Envelope, Poison, Structure};
use super::fault::{Edit, Fault};
use crate::Segment;
use crate::schedule::Schedule;
use crate::shard::{ShardedSide, Slot};

/// The code that cuts ids and positions, and that divides lengths by the ranks.
const JAX: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/cpp_extensions/attention.py";
/// The reader that makes positions of ids.
const READER: &str =
    "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/attention.py";

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "positions-restart-on-every-rank",
        imitates: "each rank makes positions of its own part of the ids: they begin at 0 on every rank",
        source: READER,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: restart,
    },
    Fault {
        id: "ids-dealt-contiguously",
        imitates: "tokens are dealt in stripes, and ids and positions in contiguous parts",
        source: JAX,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope, Crash],
        edit: |problem, schedule| {
            let striped = matches!(problem.parallel.balance, Balance::Striped { .. });
            if problem.form == Form::Segments && striped {
                rebuild(problem, schedule, Passes::Both, |fields| {
                    fields.form = Form::CuSeqlens;
                    fields.parallel.balance = Balance::Contiguous;
                });
            }
        },
    },
    Fault {
        id: "lengths-divided-by-ranks",
        imitates: "the lengths of a batch are divided by the ranks: each has as many tokens, wherever they are dealt",
        source: JAX,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: divided,
    },
];

/// Returns the problem in the first form that is dealt and says it: ids where the data seed is even, or else lengths.
pub(super) fn given(drawn: Problem) -> Problem {
    let forms = [Form::Segments, Form::Lengths];
    let first = drawn.data_seed as usize % 2;
    let asked = [forms[first], forms[1 - first]].into_iter();
    let mut said = asked.filter(|_| drawn.parallel.algorithm != Algorithm::Single).filter_map(|form| {
        let plain = drawn.form.gives_offsets().then(|| ProblemFields { form, ..drawn.clone().into() });
        plain.and_then(|fields| Problem::new(fields).ok())
    });
    said.next().unwrap_or(drawn)
}

/// Returns both sides of a ring that is given a form.
fn ring_in(problem: &Problem, form: Form) -> Option<[ShardedSide; 2]> {
    let is_ring = problem.parallel.algorithm == Algorithm::Ring && problem.parallel.size() > 1;
    let side = |side| ShardedSide::new(problem, side).ok();
    (is_ring && problem.form == form).then(|| Some([side(Side::Q)?, side(Side::Kv)?])).flatten()
}

/// Returns the slot in which a run of rows begins, with the sequence's index; slots lie alike on all ranks.
fn slot_of<'a>(side: &'a ShardedSide, run: &Run) -> Option<(usize, &'a Slot)> {
    let inside = |slot: &Slot| (slot.offset..slot.offset + slot.span).contains(&run.offset);
    side.slots.iter().enumerate().find(|(_, slot)| inside(slot))
}

/// Bounds what queries see by the places of rows in their slots, as if these were positions.
fn restart(problem: &Problem, schedule: &mut Schedule) {
    let Mask { left, right, align, blocks, prefix, sink_tokens } = problem.mask;
    let Some([q, kv]) = ring_in(problem, Form::Segments) else { return };
    if blocks.is_some() || prefix > 0 || sink_tokens > 0 || q.lanes.is_some() || kv.lanes.is_some() {
        return;
    }
    segments(schedule, |segment: &mut Segment| {
        let [keys] = segment.kv[..] else { return };
        let (Some((sequence, of_q)), Some((_, of_k))) = (slot_of(&q, &segment.q), slot_of(&kv, &keys)) else {
            return;
        };
        let both = &problem.sequences[sequence];
        let shift = if align == Alignment::BottomRight { both.kv.len as i64 - both.q.len as i64 } else { 0 };
        let apart = (segment.q.offset - of_q.offset) as i64 - (keys.offset - of_k.offset) as i64;
        segment.lo = left.map(|left| apart + shift - i64::from(left));
        segment.hi = right.map(|right| apart + shift + i64::from(right));
    });
}

/// Gives each slot as many real rows as a rank's share of the length, from its first row on.
fn divided(problem: &Problem, schedule: &mut Schedule) {
    let Some([q, kv]) = ring_in(problem, Form::Lengths) else { return };
    let cut = |side: &ShardedSide, run: &mut Run| {
        if let Some((_, slot)) = slot_of(side, run) {
            let at = (run.offset - slot.offset) / run.step.max(1);
            run.len = (slot.len / side.cp).saturating_sub(at).min(run.span);
        }
    };
    segments(schedule, |segment| {
        cut(&q, &mut segment.q);
        segment.kv.iter_mut().for_each(|run| cut(&kv, run));
    });
}
