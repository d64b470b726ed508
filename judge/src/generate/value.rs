//! The way back from a case to integers: the nearest value of a problem, for corpora that begin with stored cases.

use seamproof_oracle::{Alignment, Balance, Blocks, Format, InputMode, Pass, Problem, Run, Sequence};

use super::fixup::{EXACT_MODES, FORMS, MODES, PAGE_SIZES, SCALES, SINKS, SOFTCAPS, STEPS};
use super::limits::WIDEST_BUDGET;
use super::{RawProblem, RawSequence};

/// Returns integers from which [`super::fixup`] makes this problem, as far as integers can express it. They always
/// give one 16-bit format, a scale and a soft cap from a table, and a group's ranks in order.
pub fn value_of(problem: &Problem) -> RawProblem {
    let mask = problem.mask;
    let bound = |side: Option<u32>| side.map_or(0, |keys| keys.saturating_add(1));
    let mut raw = RawProblem {
        sequences: sequences(problem),
        layout: layout(problem, |s| s.q),
        kv_layout: 1 + layout(problem, |s| s.kv),
        q_slack: slack(problem, |s| s.q, problem.rows.q),
        kv_slack: slack(problem, |s| s.kv, problem.rows.kv),
        kv_heads: problem.heads.kv as u32,
        group: problem.group() as u32,
        qk_dim: problem.dims.qk as u32,
        v_dim: problem.dims.v as u32,
        left: bound(mask.left),
        right: bound(mask.right),
        bottom_right: (mask.align == Alignment::BottomRight).into(),
        scale: scale(problem),
        softcap: problem.softmax.softcap.map_or(0, |cap| nearest(&SOFTCAPS, cap) + 1),
        sink: SINKS.iter().position(|sink| *sink == problem.softmax.sink).unwrap_or(0) as u32,
        fp16: (problem.precision.q.format == Format::Fp16).into(),
        weights_f32: (problem.precision.p.format == Format::F32).into(),
        backward: (problem.pass == Pass::Backward).into(),
        data_seed: problem.data_seed,
        budget: WIDEST_BUDGET,
        ..RawProblem::default()
    };
    match mask.blocks {
        None => {}
        Some(Blocks::Documents(borders)) => raw.borders = borders.into(),
        Some(Blocks::Chunks(keys)) => raw.chunk = keys.get(),
    }
    (raw.prefix, raw.sink_tokens) = (mask.prefix, mask.sink_tokens);
    let entry = |table: &[InputMode]| table.iter().position(|mode| *mode == problem.mode);
    raw.mode = entry(&MODES).unwrap_or(0) as u32;
    raw.exact = entry(&EXACT_MODES).map_or(0, |index| index as u32 + 1);
    let form = FORMS.iter().position(|forms| forms[0] == problem.form);
    raw.form = form.map_or(0, |index| index as u32 + 1);
    raw.steps = steps(problem);
    pages(problem, &mut raw);
    raw.shared_keys = problem.sharing.0.iter().map(|shared| shared.keys).max().unwrap_or(0) as u32;
    parallel(problem, &mut raw);
    raw
}

/// Returns the entry of the table of steps that gives the problem's; the first one where none does.
fn steps(problem: &Problem) -> u32 {
    if problem.steps.is_empty() {
        return 0;
    }
    let longest = problem.sequences.iter().map(|sequence| sequence.q.len).max().unwrap_or(0);
    1 + STEPS.iter().position(|cut| cut(longest) == problem.steps).unwrap_or(0) as u32
}

/// Sets the numbers of pages: the nearest size of the table, in order or in some other, with a shared prefix or
/// without.
fn pages(problem: &Problem, raw: &mut RawProblem) {
    let Some(pages) = &problem.pages else { return };
    let far = |index: &usize| PAGE_SIZES[*index].abs_diff(pages.size);
    raw.pages = 1 + (0..PAGE_SIZES.len()).min_by_key(far).unwrap_or(0) as u32;
    raw.page_order = u32::from(pages.table.iter().flatten().enumerate().any(|(index, page)| index != *page));
    raw.free_pages = pages.count.saturating_sub(pages.clone().without_free().count) as u32;
    raw.shared_pages = u32::from(!pages.shared.is_empty());
}

fn sequences(problem: &Problem) -> Vec<RawSequence> {
    let gaps = |side: fn(&Sequence) -> Run| {
        let mut end = 0;
        let gap = |sequence: &Sequence| {
            let run = side(sequence);
            let gap = run.offset.saturating_sub(end);
            end = run.end().unwrap_or(end).max(end);
            gap as u32
        };
        problem.sequences.iter().map(gap).collect::<Vec<_>>()
    };
    let both = gaps(|s| s.q).into_iter().zip(gaps(|s| s.kv));
    let sequence = |(Sequence { q, kv, .. }, (q_gap, kv_gap)): (&Sequence, (u32, u32))| RawSequence {
        q_len: q.len as u32,
        q_padding: (q.span - q.len) as u32,
        q_gap,
        kv_len: kv.len as u32,
        kv_padding: (kv.span - kv.len) as u32,
        kv_gap,
    };
    problem.sequences.iter().zip(both).map(sequence).collect()
}

/// Returns the layout of a side. Runs say equal spans by themselves, except those of a step.
fn layout(problem: &Problem, side: fn(&Sequence) -> Run) -> u32 {
    if problem.sequences.iter().any(|sequence| side(sequence).step > 1) { 2 } else { 0 }
}

pub(super) fn slack(problem: &Problem, side: fn(&Sequence) -> Run, rows: usize) -> u32 {
    let end = problem.sequences.iter().filter_map(|sequence| side(sequence).end()).max().unwrap_or(0);
    rows.saturating_sub(end) as u32
}

fn scale(problem: &Problem) -> u32 {
    let usual = (1.0 / (problem.dims.qk as f64).sqrt()) as f32;
    let scale = problem.softmax.scale;
    if scale == usual { 0 } else { nearest(&SCALES, scale) + 1 }
}

/// Returns the index of the entry nearest to a number.
fn nearest(table: &[f32], number: f32) -> u32 {
    let far = |entry: f32| (entry - number).abs();
    (0..table.len()).min_by(|&a, &b| far(table[a]).total_cmp(&far(table[b]))).unwrap_or(0) as u32
}

fn parallel(problem: &Problem, raw: &mut RawProblem) {
    let group = &problem.parallel;
    raw.ranks = group.size() as u32;
    raw.others = (group.world - group.size()) as u32;
    (raw.balance, raw.stripe) = match group.balance {
        Balance::Contiguous => (0, 0),
        Balance::DualChunk => (1, 0),
        Balance::Striped { stripe: 1 } => (2, 0),
        Balance::Striped { stripe } => (3, stripe as u32),
    };
    raw.algorithm = group.algorithm.number() as u32;
    raw.all_to_all = group.algorithm.parameter().unwrap_or(0) as u32;
    raw.region = if group.region > 1 { group.region as u32 } else { 0 };
}
