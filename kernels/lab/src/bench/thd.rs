//! Speed of the helper kernels, against a device copy of as many bytes in the same run.
//!
//! A figure is the median of repetitions of a recorded graph. Each launch of the graph works on buffers of its own,
//! more of them than the L2 cache holds. *Bytes* are those that an operation must move: what it reads and what it
//! writes, once each. The peer is the driver's own copy, which moves as many bytes in the same way.

use std::io::Write;

use seamproof_kernels::metadata::{RunTables, SEGMENT_BYTES, SegmentIds, SlotTables};
use seamproof_kernels::region::{HeadPart, RotationTable};
use seamproof_kernels::tables::Cut;
use seamproof_kernels::{Gpu, KernelError, MergeKernels, RegionKernels, RowKernels, TableKernels};
use seamproof_oracle::{Alignment, Balance, Format, Mask, Run};
use seamproof_simulator::helpers::{BatchLayout, Direction, Half, Rest, SlotPart, Style, Update, half_rows};
use seamproof_simulator::schedule::{Layer, Rotated};
use seamproof_simulator::shard::ShardedSide;

use super::error::BenchError;
use super::pools::{BenchPack, DIM, HEADS, LAUNCHES_MAX, Pools, REPETITIONS, ROW_BYTES, SlotBuffers, pack};

/// Prints every figure.
pub fn thd(gpu: &Gpu, to: &mut dyn Write) -> Result<(), BenchError> {
    let pools = Pools::new(gpu)?;
    writeln!(
        to,
        "{}: {HEADS} heads of {DIM} in bf16; medians of {REPETITIONS} graphs of launches",
        gpu.name()?
    )?;
    let published = pack("16 × 4096", 16, 4096, false);
    let ragged = pack("ragged, 16 × about 4096", 16, 4096, true);
    let short = pack("1024 × 64", 1024, 64, false);
    for cp in [2, 4, 8] {
        reorder(&pools, &published, cp, to)?;
    }
    for pack in [&ragged, &short] {
        reorder(&pools, pack, 4, to)?;
    }
    for pack in [&published, &ragged, &short] {
        moves(&pools, pack, to)?;
        conversions(&pools, pack, to)?;
        regions(&pools, pack, to)?;
        merges(&pools, pack, to)?;
        gradients(&pools, pack, to)?;
        statistics(&pools, pack, to)?;
    }
    metadata(&pools, &published, to)?;
    metadata(&pools, &short, to)?;
    small(&pools, to)
}

fn reorder(pools: &Pools, pack: &BenchPack, cp: usize, to: &mut dyn Write) -> Result<(), BenchError> {
    let cut = Cut { cp, balance: Balance::DualChunk };
    let shard = ShardedSide::of_runs(&pack.runs, pack.rows, cp, cut.balance);
    let runs: Vec<Run> = shard.slots.iter().map(|slot| Run::packed(slot.offset, 0, slot.span)).collect();
    let slots = SlotBuffers::new(pools.gpu, &runs, shard.rows)?;
    let rows = shard.rows * cp;
    for (order, name) in
        [(Direction::ToRanks, "to rank order"), (Direction::ToSequences, "to sequence order")]
    {
        let bytes = rows * ROW_BYTES;
        let line = pools.line((&format!("{}, cp {cp}", pack.name), name), (2 * bytes, bytes), |launch| {
            let (from, to) = (pools.rows(launch, rows)?, pools.rows_to(launch, rows)?);
            pools.gpu.reorder(slots.slots(), cut, order, from, to)
        })?;
        writeln!(to, "{line}")?;
    }
    Ok(())
}

fn real(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.len).sum()
}

fn moves(pools: &Pools, pack: &BenchPack, to: &mut dyn Write) -> Result<(), BenchError> {
    let (gpu, rows, real) = (pools.gpu, pack.rows, real(&pack.runs));
    let buffers = SlotBuffers::new(gpu, &pack.runs, rows)?;
    let slots = buffers.slots();
    let tensor = rows * ROW_BYTES;
    let padding = (rows - real) * ROW_BYTES;
    let copied = 2 * real * ROW_BYTES;
    let line = pools.line((&pack.name, "copy valid rows"), (copied, tensor), |launch| {
        gpu.copy_valid(slots, pools.rows(launch, rows)?, pools.rows_to(launch, rows)?, Rest::Leave)
    })?;
    writeln!(to, "{line}")?;
    if padding > 0 {
        let line =
            pools.line((&pack.name, "copy valid rows, zero rest"), (copied + padding, tensor), |launch| {
                gpu.copy_valid(slots, pools.rows(launch, rows)?, pools.rows_to(launch, rows)?, Rest::Fill(0))
            })?;
        writeln!(to, "{line}")?;
        let line = pools.line((&pack.name, "fill padding"), (padding, tensor), |launch| {
            gpu.fill_padding(slots, pools.rows_to(launch, rows)?, 0xff)
        })?;
        writeln!(to, "{line}")?;
    }
    let halves = half_rows(rows);
    let owned: usize = pack.runs.iter().map(|run| run.span).sum();
    let line = pools.line((&pack.name, "read second half"), (owned * ROW_BYTES, tensor), |launch| {
        let (whole, half) = (pools.rows(launch, rows)?, pools.rows_to(launch, halves)?);
        gpu.read_half(slots, Half::Second, whole, half, Rest::Leave)
    })?;
    writeln!(to, "{line}")?;
    let line = pools.line((&pack.name, "write second half"), (owned * ROW_BYTES, tensor), |launch| {
        gpu.write_half(slots, Half::Second, pools.rows(launch, halves)?, pools.rows_to(launch, rows)?)
    })?;
    writeln!(to, "{line}")?;
    Ok(())
}

/// Measures conversions between layouts. They write zeros to rows of the target that are not real.
fn conversions(pools: &Pools, pack: &BenchPack, to: &mut dyn Write) -> Result<(), BenchError> {
    const WAYS: [[BatchLayout; 2]; 6] = [
        [BatchLayout::Thd, BatchLayout::Bshd],
        [BatchLayout::Bshd, BatchLayout::Thd],
        [BatchLayout::Thd, BatchLayout::Sbhd],
        [BatchLayout::Sbhd, BatchLayout::Thd],
        [BatchLayout::Bshd, BatchLayout::Sbhd],
        [BatchLayout::Sbhd, BatchLayout::Bshd],
    ];
    let buffers = SlotBuffers::new(pools.gpu, &pack.runs, pack.rows)?;
    let positions = pack.runs.iter().map(|run| run.len).max().unwrap_or(0);
    let rows = |layout| if layout == BatchLayout::Thd { pack.rows } else { pack.runs.len() * positions };
    for ways in WAYS {
        let [from_rows, to_rows] = ways.map(rows);
        let bytes = (real(&pack.runs) + to_rows) * ROW_BYTES;
        let name = format!("{} to {}", ways[0].name(), ways[1].name());
        let tensor = from_rows.max(to_rows) * ROW_BYTES;
        let line = pools.line((&pack.name, &name), (bytes, tensor), |launch| {
            let tensors = [pools.rows(launch, from_rows)?, pools.rows_to(launch, to_rows)?];
            pools.gpu.convert(buffers.slots(), positions, ways, tensors, Rest::Fill(0))
        })?;
        writeln!(to, "{line}")?;
    }
    Ok(())
}

/// Measures the layers of a sequence-parallel region of four ranks, and rotations. Both go over all owned rows.
fn regions(pools: &Pools, pack: &BenchPack, to: &mut dyn Write) -> Result<(), BenchError> {
    let (gpu, count) = (pools.gpu, 4);
    let (rows, of) = (pack.rows / count, HeadPart { index: 1, count });
    let (own, hidden) = (rows * ROW_BYTES, rows * count * ROW_BYTES);
    let line = pools.line((&pack.name, "column layer, 1 of 4"), (2 * own, hidden), |launch| {
        gpu.layer(Layer::Column, of, pools.rows(launch, rows * count)?, pools.rows_to(launch, rows)?)
    })?;
    writeln!(to, "{line}")?;
    let line = pools.line((&pack.name, "row layer, 1 of 4"), (own + hidden, hidden), |launch| {
        gpu.layer(Layer::Row, of, pools.rows(launch, rows)?, pools.rows_to(launch, rows * count)?)
    })?;
    writeln!(to, "{line}")?;
    let turn = |run: &Run| Rotated { rows: Run { len: run.span, ..*run }, position: 0, step: 1 };
    let turns = RotationTable::new(&pack.runs.iter().map(turn).collect::<Vec<_>>());
    let table = gpu.upload(turns.bytes())?;
    let owned: usize = pack.runs.iter().map(|run| run.span).sum();
    let bytes = (2 * owned * ROW_BYTES, pack.rows * ROW_BYTES);
    let line = pools.line((&pack.name, "rotate in place, bf16"), bytes, |launch| {
        let tensor = pools.tensor(true, launch, pack.rows, Format::Bf16)?;
        gpu.rotate(&turns, table.area(), false, tensor)
    })?;
    writeln!(to, "{line}")?;
    Ok(())
}

/// Returns the bytes of real elements, of `each` bytes an element.
fn elements(rows: usize, each: usize) -> usize {
    rows * HEADS * DIM * each
}

fn merges(pools: &Pools, pack: &BenchPack, to: &mut dyn Write) -> Result<(), BenchError> {
    let (gpu, rows, real) = (pools.gpu, pack.rows, real(&pack.runs));
    let buffers = SlotBuffers::new(gpu, &pack.runs, rows)?;
    let slots = buffers.slots();
    let second: usize = pack.runs.iter().map(|run| run.len.saturating_sub(run.span / 2)).sum();
    let weighted = Style::Weighted { product_rounded: true };
    let (whole, half) = (SlotPart::Whole, SlotPart::Compact(Half::Second));
    let (f32, bf16) = (Format::F32, Format::Bf16);
    let cases = [
        ("merge out, f32 += bf16", Style::Running, whole, f32, real, 10, 12),
        ("merge out, bf16 += bf16", Style::Running, whole, bf16, real, 6, 12),
        ("correct out, bf16 += bf16", weighted, whole, bf16, real, 6, 8),
        ("correct second half, f32", weighted, half, f32, second, 10, 8),
    ];
    for (name, style, part, format, touched, each, statistic) in cases {
        let bytes = elements(touched, each) + touched * HEADS * statistic;
        let line = pools.line((&pack.name, name), (bytes, elements(rows, 4)), |launch| {
            let step_rows = part.step_rows(rows);
            let running =
                (pools.tensor(true, launch, rows, format)?, pools.statistic(0, launch, HEADS, rows)?);
            let step = (
                pools.tensor(false, launch, step_rows, bf16)?,
                pools.statistic(1, launch, HEADS, step_rows)?,
            );
            gpu.merge_out(slots, (part, style), running, step)
        })?;
        writeln!(to, "{line}")?;
    }
    Ok(())
}

fn gradients(pools: &Pools, pack: &BenchPack, to: &mut dyn Write) -> Result<(), BenchError> {
    let (gpu, rows, real) = (pools.gpu, pack.rows, real(&pack.runs));
    let buffers = SlotBuffers::new(gpu, &pack.runs, rows)?;
    let slots = buffers.slots();
    let (f32, bf16) = (Format::F32, Format::Bf16);
    let cases = [
        ("add gradient, f32 += bf16", [Update::Add; 2], f32, elements(real, 10)),
        ("add gradient, bf16 += bf16", [Update::Add; 2], bf16, elements(real, 6)),
        ("copy gradient, bf16", [Update::Copy; 2], bf16, elements(real, 4)),
    ];
    for (name, updates, format, bytes) in cases {
        let line = pools.line((&pack.name, name), (bytes, elements(rows, 4)), |launch| {
            let (sum, step) =
                (pools.tensor(true, launch, rows, format)?, pools.tensor(false, launch, rows, bf16)?);
            gpu.accumulate(slots, SlotPart::Whole, updates, sum, step)
        })?;
        writeln!(to, "{line}")?;
    }
    Ok(())
}

fn statistics(pools: &Pools, pack: &BenchPack, to: &mut dyn Write) -> Result<(), BenchError> {
    /// The number of heads that makes a launch's bytes cost more than the launch.
    const MANY_HEADS: usize = 128;
    let (gpu, rows, real) = (pools.gpu, pack.rows, real(&pack.runs));
    let buffers = SlotBuffers::new(gpu, &pack.runs, rows)?;
    let (slots, tensor) = (buffers.slots(), rows * MANY_HEADS * 4);
    let number = real * MANY_HEADS * 4;
    let line = pools.line((&pack.name, "merge 128 heads' statistics"), (3 * number, tensor), |launch| {
        let (lse, step) =
            (pools.statistic(0, launch, MANY_HEADS, rows)?, pools.statistic(1, launch, MANY_HEADS, rows)?);
        gpu.merge_statistics(slots, SlotPart::Whole, lse, step)
    })?;
    writeln!(to, "{line}")?;
    let largest = gpu.allocate(MANY_HEADS * 4)?;
    let line = pools.line((&pack.name, "largest logit of 128 heads"), (number, tensor), |launch| {
        gpu.max_logit(slots, pools.statistic(0, launch, MANY_HEADS, rows)?, largest.area(), false)
    })?;
    writeln!(to, "{line}")?;
    let owned: usize = pack.runs.iter().map(|run| run.span).sum();
    let bytes = (owned * MANY_HEADS * 4, tensor);
    let halves_and_whole = |launch| -> Result<_, KernelError> {
        let halves = pools.statistic(1, launch, MANY_HEADS, half_rows(rows))?;
        Ok((halves, pools.statistic(0, launch, MANY_HEADS, rows)?))
    };
    let line = pools.line((&pack.name, "read second half, 128 stat."), bytes, |launch| {
        let (halves, whole) = halves_and_whole(launch)?;
        gpu.read_half_statistic(slots, Half::Second, whole, halves, None)
    })?;
    writeln!(to, "{line}")?;
    let line = pools.line((&pack.name, "write second half, 128 stat."), bytes, |launch| {
        let (halves, whole) = halves_and_whole(launch)?;
        gpu.write_half_statistic(slots, Half::Second, halves, whole)
    })?;
    writeln!(to, "{line}")?;
    Ok(())
}

/// Measures everything that a step's tables need. The launches dominate, so that only the time counts.
fn metadata(pools: &Pools, pack: &BenchPack, to: &mut dyn Write) -> Result<(), BenchError> {
    let gpu = pools.gpu;
    let cut = Cut { cp: 4, balance: Balance::DualChunk };
    let shard = ShardedSide::of_runs(&pack.runs, pack.rows, cut.cp, cut.balance);
    let runs: Vec<Run> = shard
        .slots
        .iter()
        .map(|slot| Run { offset: slot.offset, step: 1, len: slot.len, span: slot.span })
        .collect();
    let (batch, local) =
        (SlotBuffers::new(gpu, &pack.runs, pack.rows)?, SlotBuffers::new(gpu, &runs, shard.rows)?);
    let mask = Mask { left: None, right: Some(0), align: Alignment::TopLeft, ..Mask::FULL };
    let (count, rows) = (runs.len(), pack.rows);
    let out = gpu.allocate((rows * 8).max(count * 4 * SEGMENT_BYTES))?;
    let tables = gpu.allocate(6 * 4 * (count + 64))?;
    let table = |index: usize, length: usize| {
        tables.area().part(index * 4 * (count + 64)..index * 4 * (count + 64) + length * 4)
    };
    let both = [local.slots(), local.slots()];
    let mut print =
        |kernel: &str, time: f64| writeln!(to, "{:<24} {kernel:<30} {:>12} {time:>9.2} µs", pack.name, "");
    print(
        "rank slots",
        pools.measure(LAUNCHES_MAX, |_| {
            let to = SlotTables { offset: table(0, count)?, span: table(1, count)?, len: table(2, count)? };
            gpu.rank_slots(batch.slots(), cut, 1, to)
        })?,
    )?;
    print(
        "cu_seqlens on rank",
        pools.measure(LAUNCHES_MAX, |_| {
            gpu.cu_seqlens_on_rank(local.slots(), cut.cp, 1, [true, true], table(0, count + 1)?)
        })?,
    )?;
    print(
        "ring step",
        pools.measure(LAUNCHES_MAX, |_| {
            gpu.ring_segments(both, &mask, (cut, 1), [1, 0], out.area().part(0..4 * count * SEGMENT_BYTES)?)
        })?,
    )?;
    print(
        "all-gather steps",
        pools.measure(LAUNCHES_MAX, |_| {
            gpu.all_gather_segments(both, &mask, (cut, 1), 1, out.area().part(0..2 * count * SEGMENT_BYTES)?)
        })?,
    )?;
    print(
        "partition indices",
        pools.measure(LAUNCHES_MAX, |_| {
            gpu.partition_indices(local.slots(), cut, 1, out.area().part(0..shard.rows * 8)?)
        })?,
    )?;
    print(
        "mask of valid rows",
        pools.measure(LAUNCHES_MAX, |_| gpu.valid_mask(batch.slots(), out.area().part(0..rows)?))?,
    )?;
    let id_of = |row: usize| pack.runs.iter().position(|run| row >= run.offset && row < run.offset + run.len);
    let ids: Vec<i32> = (0..rows).map(|row| id_of(row).map_or(0, |id| id as i32 + 1)).collect();
    let positions: Vec<i32> =
        (0..rows).map(|row| id_of(row).map_or(0, |id| (row - pack.runs[id].offset) as i32)).collect();
    let (ids, positions) = (gpu.upload_i32(&ids)?, gpu.upload_i32(&positions)?);
    let ids = SegmentIds { id: ids.area(), position: Some(positions.area()), rows, row_length: rows };
    let scratch = gpu.allocate(ids.scratch_bytes())?;
    print(
        "runs from ids (4 launches)",
        pools.measure(LAUNCHES_MAX, |_| {
            let [offset, len, id, position] =
                [table(0, count)?, table(1, count)?, table(2, count)?, table(3, count)?];
            gpu.runs(
                ids,
                scratch.area(),
                RunTables { offset, len, id, position, room: count, count: table(4, 1)? },
            )
        })?,
    )?;
    Ok(())
}

/// Measures cases whose launch costs more than their bytes do.
fn small(pools: &Pools, to: &mut dyn Write) -> Result<(), BenchError> {
    let gpu = pools.gpu;
    let pack = pack("small: 8 × 64", 8, 64, false);
    let cut = Cut { cp: 2, balance: Balance::DualChunk };
    let buffers = SlotBuffers::new(gpu, &pack.runs, pack.rows)?;
    let shard = ShardedSide::of_runs(&pack.runs, pack.rows, 2, cut.balance);
    let runs: Vec<Run> = shard.slots.iter().map(|slot| Run::packed(slot.offset, 0, slot.span)).collect();
    let (rows, local) = (pack.rows, SlotBuffers::new(gpu, &runs, shard.rows)?);
    let mut print =
        |kernel: &str, time: f64| writeln!(to, "{:<24} {kernel:<30} {:>12} {time:>9.2} µs", pack.name, "");
    print(
        "device copy",
        pools.measure(LAUNCHES_MAX, |launch| {
            gpu.copy(pools.rows(launch, rows)?.area, pools.rows_to(launch, rows)?.area)
        })?,
    )?;
    print(
        "to rank order",
        pools.measure(LAUNCHES_MAX, |launch| {
            let (from, to) = (pools.rows(launch, rows)?, pools.rows_to(launch, rows)?);
            gpu.reorder(local.slots(), cut, Direction::ToRanks, from, to)
        })?,
    )?;
    print(
        "copy valid rows",
        pools.measure(LAUNCHES_MAX, |launch| {
            gpu.copy_valid(
                buffers.slots(),
                pools.rows(launch, rows)?,
                pools.rows_to(launch, rows)?,
                Rest::Leave,
            )
        })?,
    )?;
    print(
        "merge out, f32 += bf16",
        pools.measure(LAUNCHES_MAX, |launch| {
            let running =
                (pools.tensor(true, launch, rows, Format::F32)?, pools.statistic(0, launch, HEADS, rows)?);
            let step =
                (pools.tensor(false, launch, rows, Format::Bf16)?, pools.statistic(1, launch, HEADS, rows)?);
            gpu.merge_out(buffers.slots(), (SlotPart::Whole, Style::Running), running, step)
        })?,
    )?;
    Ok(())
}
