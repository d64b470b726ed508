//! Faults of a reader of segment ids and positions: edits of what it reads, or of what it makes of that.
//!
//! The reader gets the ids and positions that say the problem ([`described`]), with batch rows wherever sequences allow
//! them. The subject then runs what was read. Where the reader itself sees that something is wrong, the run ends with
//! its words. The reader is not used on a problem that ids and positions do not say, or where rows belong to a side of
//! a sequence that has no token: ids cannot tell these from other free rows.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::iter::{self, repeat_n};

use ndarray::{Array3, Axis};
use seamproof_oracle::segments::{Array, Described, Segments, batched, described};
use seamproof_oracle::{Inputs, Problem, Run, Sequence, Side};
use seamproof_simulator::helpers::{SegmentRun, segment_runs};

use super::miscall::{Miscall, ROWS, VALUES, told};
use crate::subject::{Backend, Outputs, RunError};
use seamproof_oracle::sharding::run_of;

/// Source of the faults of batches: one array has a dimension that the other lacks.
const VMAP: &str = "https://github.com/NVIDIA/TransformerEngine/pull/2692";
/// Source of the reader: lengths and offsets from ids and positions, a largest number of segments, reordered rows.
const READER: &str =
    "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/attention.py";

/// What a reader makes of ids and positions, or its own words for what is wrong with them.
type Reading = Result<Vec<Sequence>, String>;

/// Every fault of the reader.
pub(super) const MISREADS: [Miscall; 11] = [
    Miscall {
        id: "call-unequal-shapes-refused",
        imitates: "ids that vmap has batched meet an assertion: positions have another shape",
        source: VMAP,
        entries: &[15],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misread(backend, problem, inputs, with_equal_shapes),
    },
    Miscall {
        id: "call-batch-rows-as-one",
        imitates: "extra dimensions are flattened into one row: equal ids of two batch rows are one segment",
        source: VMAP,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misread(backend, problem, inputs, batch_rows_as_one),
    },
    Miscall {
        id: "call-dimensions-in-another-order",
        imitates: "several extra dimensions are flattened with the first one fastest: batch rows take each other's ids",
        source: VMAP,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misread(backend, problem, inputs, first_dimension_fastest),
    },
    Miscall {
        id: "call-positions-of-another-row",
        imitates: "ids are batched and positions taken for plain: those of the first batch row count for all",
        source: VMAP,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misread(backend, problem, inputs, positions_of_the_first_row),
    },
    Miscall {
        id: "call-broadcast-along-the-wrong-side",
        imitates: "arrays without the extra dimension are repeated element by element, not row by row",
        source: VMAP,
        entries: &[16],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misread(backend, problem, inputs, broadcast_by_element),
    },
    Miscall {
        id: "call-one-side-not-broadcast",
        imitates: "the side without extra dimensions has one batch row: the others see nothing of it",
        source: VMAP,
        entries: &[16],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misread(backend, problem, inputs, without_broadcast),
    },
    Miscall {
        id: "call-positions-not-restarted",
        imitates: "positions that are left out are counted through the batch row, not from 0 in each segment",
        source: READER,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misread(backend, problem, inputs, positions_not_restarted),
    },
    Miscall {
        id: "call-positions-before-reordering",
        imitates: "positions are made before rows are reordered to balance ranks, so rows count where they lie now",
        source: READER,
        entries: &[],
        caught_by: VALUES,
        edit: before_reordering,
    },
    Miscall {
        id: "call-last-segment-dropped",
        imitates: "the largest number of segments is one too small, and the last segment is dropped",
        source: READER,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misread(backend, problem, inputs, without_the_last),
    },
    Miscall {
        id: "call-segments-zipped-short",
        imitates: "segments of queries and of keys are paired by number, and the longer list is cut",
        source: READER,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| misread(backend, problem, inputs, zipped_short),
    },
    Miscall {
        id: "call-lengths-of-the-batch",
        imitates: "lengths of a padded batch are counted from positions, which padding rows have too",
        source: READER,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| {
            told(backend, problem, inputs, |fields| {
                let first = fields.sequences.first().map(|sequence| [sequence.q.span, sequence.kv.span]);
                if fields.sequences.iter().all(|sequence| Some([sequence.q.span, sequence.kv.span]) == first)
                {
                    for sequence in &mut fields.sequences {
                        (sequence.q.len, sequence.kv.len) = (sequence.q.span, sequence.kv.span);
                    }
                }
            })
        },
    },
];

/// Runs what a reader makes of the ids and positions that say the problem.
fn misread(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs,
    reads: impl Fn([Described; 2], &Problem) -> Reading,
) -> Result<Outputs, RunError> {
    let owned = |run: Run| run.len > 0 || run.span == 0;
    let told_apart = |sequence: &Sequence| owned(sequence.q) && owned(sequence.kv);
    let sayable = problem.parallel.is_whole() && problem.sequences.iter().all(told_apart);
    let given = sayable.then(|| described(&problem.sequences, problem.rows));
    let right = given.as_ref().and_then(|given| read(given, problem).ok());
    let (Some(given), Some(right)) = (given, right) else { return backend.run(problem, inputs) };
    let wrong = reads(given, problem).map_err(RunError::Crash)?;
    if wrong == right {
        return backend.run(problem, inputs);
    }
    told(backend, problem, inputs, |fields| fields.sequences = owning(&wrong, problem))
}

/// Returns sequences that own their padding: free rows behind a run, up to the next one, that belong to the sequence of
/// the problem in which it begins. Ids say which rows hold tokens, and the caller knows who owns the others.
fn owning(read: &[Sequence], problem: &Problem) -> Vec<Sequence> {
    let [q, kv] = [Side::Q, Side::Kv].map(|side| {
        let own = problem.sequences.iter().map(|sequence| run_of(sequence, side));
        let ends: BTreeMap<usize, usize> = own.map(|run| (run.offset, run.offset + run.span)).collect();
        let runs = read.iter().map(|sequence| run_of(sequence, side)).filter(|run| run.len > 0);
        let begins: BTreeSet<usize> = runs.map(|run| run.offset).collect();
        move |run: Run| {
            let next = begins.range(run.offset + 1..).next().copied().unwrap_or(usize::MAX);
            let end = ends.range(..=run.offset).next_back().map_or(0, |(_, &end)| end.min(next));
            let span = if run.len > 0 { end.saturating_sub(run.offset) } else { 0 };
            Run { span: run.len.max(span), ..run }
        }
    });
    read.iter().map(|read| Sequence { q: q(read.q), kv: kv(read.kv), ..*read }).collect()
}

/// Returns what ids and positions mean, by their definition.
fn read([q, kv]: &[Described; 2], problem: &Problem) -> Reading {
    let segments = Segments::new(q, kv).map_err(|error| error.to_string())?;
    segments.sequences(problem.sequences.len()).map_err(|error| error.to_string())
}

fn with_equal_shapes(given: [Described; 2], problem: &Problem) -> Reading {
    for side in &given {
        if let Some(positions) = side.positions.as_ref().filter(|positions| positions.shape != side.ids.shape)
        {
            return Err(format!("segment ids {:?}, positions {:?}", side.ids.shape, positions.shape));
        }
    }
    read(&given, problem)
}

fn batch_rows_as_one(given: [Described; 2], problem: &Problem) -> Reading {
    let [q, kv] = given;
    let flat = |side: Described, rows: usize| {
        let values = side.ids.values.iter().copied().cycle().take(rows).collect();
        Described { ids: Array { shape: vec![rows], values }, positions: None }
    };
    read(&[flat(q, problem.rows.q), flat(kv, problem.rows.kv)], problem)
}

fn first_dimension_fastest(_: [Described; 2], problem: &Problem) -> Reading {
    let given = batched(&problem.sequences, problem.rows, 0);
    let turned = |side: Described| Described {
        ids: turned(&side.ids),
        positions: side.positions.as_ref().map(turned),
    };
    read(&given.map(turned), problem)
}

/// Returns an array whose batch rows are those of another order of the leading dimensions, the first one fastest.
fn turned(array: &Array) -> Array {
    let (length, leading) = (length(array), &array.shape[..array.shape.len() - 1]);
    let mut values = Vec::new();
    for place in 0..leading.iter().product() {
        let mut rest = place;
        let mut digits: Vec<(usize, usize)> = Vec::new();
        for &dim in leading.iter().rev() {
            digits.push((rest % dim, dim));
            rest /= dim;
        }
        let add = |(from, stride), (digit, dim): (usize, usize)| (from + digit * stride, stride * dim);
        let (from, _) = digits.into_iter().rev().fold((0, 1), add);
        values.extend_from_slice(&array.values[from * length..(from + 1) * length]);
    }
    Array { shape: array.shape.clone(), values }
}

fn positions_of_the_first_row(mut given: [Described; 2], problem: &Problem) -> Reading {
    for positions in given.iter_mut().filter_map(|side| side.positions.as_mut()) {
        let length = length(positions);
        *positions = Array { shape: vec![length], values: positions.values[..length].to_vec() };
    }
    Ok(paired_by_id(&runs(&given, problem)))
}

fn broadcast_by_element(mut given: [Described; 2], problem: &Problem) -> Reading {
    let count = batch_rows(&given);
    for array in given.iter_mut().flat_map(|side| iter::once(&mut side.ids).chain(&mut side.positions)) {
        if array.shape.len() == 1 {
            array.values = array.values.iter().flat_map(|&value| repeat_n(value, count)).collect();
            array.shape.insert(0, count);
        }
    }
    Ok(paired_by_id(&runs(&given, problem)))
}

fn without_broadcast(mut given: [Described; 2], problem: &Problem) -> Reading {
    let count = batch_rows(&given);
    for Described { ids, positions } in given.iter_mut().filter(|side| side.ids.shape.len() == 1) {
        ids.values.resize(ids.values.len() * count, 0);
        ids.shape.insert(0, count);
        *positions = None;
    }
    read(&given, problem)
}

fn positions_not_restarted(mut given: [Described; 2], problem: &Problem) -> Reading {
    for side in &mut given {
        let length = length(&side.ids);
        side.positions = Some(Array { shape: vec![length], values: (0..length as i32).collect() });
    }
    read(&given, problem)
}

fn without_the_last(given: [Described; 2], problem: &Problem) -> Reading {
    let mut sequences = read(&given, problem)?;
    sequences.pop();
    Ok(sequences)
}

fn zipped_short(given: [Described; 2], problem: &Problem) -> Reading {
    let [q, kv] = runs(&given, problem);
    let pairs = q.iter().zip(&kv).map(|(q, kv)| (packed(q), packed(kv)));
    Ok(numbered(pairs))
}

/// Returns the number of batch rows, which some array says.
fn batch_rows(given: &[Described; 2]) -> usize {
    let ids = given.iter().find(|side| side.ids.shape.len() > 1);
    ids.map_or(1, |side| side.ids.shape[0])
}

fn length(array: &Array) -> usize {
    array.shape.last().copied().unwrap_or(0)
}

/// Returns the runs of both sides as a reader finds them that ends a run wherever ids change or positions break.
fn runs(given: &[Described; 2], problem: &Problem) -> [Vec<SegmentRun>; 2] {
    let of = |side: &Described, rows: usize| {
        let whole = |array: &Array| array.values.clone().into_iter().cycle().take(rows);
        let positions = side.positions.as_ref().unwrap_or(&side.ids);
        let rows: Vec<(i32, i32)> = whole(&side.ids).zip(whole(positions)).collect();
        segment_runs(&rows, length(&side.ids).max(1))
    };
    [of(&given[0], problem.rows.q), of(&given[1], problem.rows.kv)]
}

/// Returns sequences of runs: the n-th one of queries with an id goes with the n-th one of keys with that id.
fn paired_by_id([q, kv]: &[Vec<SegmentRun>; 2]) -> Vec<Sequence> {
    let mut of_id: HashMap<i32, VecDeque<&SegmentRun>> = HashMap::new();
    kv.iter().for_each(|run| of_id.entry(run.id).or_default().push_back(run));
    let mut partner = |run: &SegmentRun| of_id.get_mut(&run.id).and_then(VecDeque::pop_front);
    let none = Run::packed(0, 0, 0);
    let with_q: Vec<(Run, Run)> =
        q.iter().map(|run| (packed(run), partner(run).map_or(none, packed))).collect();
    let alone = kv.iter().filter(|run| of_id.get(&run.id).is_some_and(|rest| rest.contains(run)));
    numbered(with_q.into_iter().chain(alone.map(|run| (none, packed(run)))))
}

fn packed(run: &SegmentRun) -> Run {
    Run::packed(run.offset, run.len, run.len)
}

fn numbered(pairs: impl Iterator<Item = (Run, Run)>) -> Vec<Sequence> {
    (0..).zip(pairs).map(|(id, (q, kv))| Sequence { id, q, kv }).collect()
}

/// Runs rows in the order in which two ranks with the first and the last chunks have them, as if that were the order of
/// their positions.
fn before_reordering(backend: &dyn Backend, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    if !problem.parallel.is_whole() {
        return backend.run(problem, inputs);
    }
    let there = |from: &Array3<f32>, side| moved(problem, side, from, |place, position| (position, place));
    let reordered = Inputs {
        q: there(&inputs.q, Side::Q),
        k: there(&inputs.k, Side::Kv),
        v: there(&inputs.v, Side::Kv),
        dout: there(&inputs.dout, Side::Q),
        sink: inputs.sink.clone(),
        scales: inputs.scales.clone(),
    };
    let mut outputs = backend.run(problem, &reordered)?;
    let back = |from: &Array3<f32>, side| moved(problem, side, from, |place, position| (place, position));
    for rank in &mut outputs.ranks {
        rank.out = back(&rank.out, Side::Q);
        // A layout with padded rows has no row of its own for each row of q.
        if let Some(lse) = rank.lse.as_mut().filter(|lse| lse.dim() == problem.lse_shape().into()) {
            let rows = lse.t().to_owned().insert_axis(Axis(2));
            *lse = back(&rows, Side::Q).remove_axis(Axis(2)).reversed_axes();
        }
        if let Some(gradients) = &mut rank.gradients {
            gradients.dq = back(&gradients.dq, Side::Q);
            (gradients.dk, gradients.dv) = (back(&gradients.dk, Side::Kv), back(&gradients.dv, Side::Kv));
        }
    }
    Ok(outputs)
}

/// Returns a tensor whose rows have moved, `from` one position `to` another of their sequence, as `way` says of a place
/// and the position that lies there.
fn moved(
    problem: &Problem,
    side: Side,
    tensor: &Array3<f32>,
    way: impl Fn(usize, usize) -> (usize, usize),
) -> Array3<f32> {
    let mut result = tensor.clone();
    // A forward has no dout.
    for run in problem.sequences.iter().map(|sequence| run_of(sequence, side)).filter(|_| !tensor.is_empty())
    {
        let rows: Vec<usize> = run.real_rows().collect();
        for (place, position) in reordered(rows.len()).enumerate() {
            let (from, to) = way(place, position);
            result.index_axis_mut(Axis(0), rows[to]).assign(&tensor.index_axis(Axis(0), rows[from]));
        }
    }
    result
}

/// Returns the positions of `len` rows in the order of two ranks' chunks.
fn reordered(len: usize) -> impl Iterator<Item = usize> {
    let chunk = len.div_ceil(4);
    [0, 3, 1, 2].into_iter().flat_map(move |index| (index * chunk).min(len)..((index + 1) * chunk).min(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_dimension_becomes_the_fastest() {
        let array = Array { shape: vec![2, 3, 1], values: (0..6).collect() };
        assert_eq!(turned(&array).values, [0, 2, 4, 1, 3, 5]);
    }

    #[test]
    fn two_ranks_have_the_outer_and_the_inner_chunks() {
        assert_eq!(reordered(6).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(reordered(8).collect::<Vec<_>>(), [0, 1, 6, 7, 2, 3, 4, 5]);
        assert_eq!(reordered(0).count(), 0);
    }
}
