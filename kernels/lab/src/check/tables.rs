//! Cases of metadata.

use seamproof_kernels::Gpu;
use seamproof_kernels::metadata::{RunTables, SegmentIds, SlotTables};
use seamproof_kernels::tables::Cut;
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{Alignment, Balance, Mask, Pass, Run};
use seamproof_simulator::helpers::{self, SegmentRow, SegmentRun};
use seamproof_simulator::shard::{ShardedSide, cu_seqlens_on_cp_rank};

use super::draw::CaseDraw;
use super::image::{Image, ImageLaunch, PlacedImage, SlotFields};

impl CaseDraw {
    fn rank(&mut self, cp: usize) -> usize {
        let rank = self.below(cp);
        self.note(&format!("rank {rank}"));
        rank
    }

    fn mask(&mut self) -> Mask {
        let mut side = || {
            let bound = self.below(40) as u32;
            self.pick(&[None, Some(0), Some(bound), Some(u32::MAX)])
        };
        let (left, right) = (side(), side());
        let align = self.pick(&[Alignment::TopLeft, Alignment::BottomRight]);
        let mask = Mask { left, right, align };
        self.note(&format!("{mask:?}"));
        mask
    }

    /// Returns batches of q and kv with equally many sequences, cut alike.
    fn two_shards(&mut self, cut: Cut) -> [ShardedSide; 2] {
        let unit = span_multiple(cut.balance, cut.cp);
        let (q, q_rows) = self.runs(unit, 4096);
        let mut end = 0;
        let kv: Vec<Run> = q
            .iter()
            .map(|_| {
                let span = unit * self.below(6);
                let run = Run::packed(end, self.below(span + 1), span);
                end += span;
                run
            })
            .collect();
        [
            ShardedSide::of_runs(&q, q_rows, cut.cp, cut.balance),
            ShardedSide::of_runs(&kv, end, cut.cp, cut.balance),
        ]
    }
}

/// Adds a rank's slots with the lengths of whole sequences.
fn with_sequence_lengths(image: &mut Image, shard: &ShardedSide) -> SlotFields {
    let runs: Vec<Run> = shard
        .slots
        .iter()
        .map(|slot| Run { offset: slot.offset, step: 1, len: slot.len, span: slot.span })
        .collect();
    image.slots(&runs, shard.rows)
}

fn i32_bytes(numbers: impl IntoIterator<Item = usize>) -> Vec<u8> {
    numbers.into_iter().flat_map(|number| (number as i32).to_le_bytes()).collect()
}

pub(super) fn partition_indices(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let cut = draw.cut(true);
    let shard = draw.shard(cut);
    let rank = draw.rank(cut.cp);
    let slots = with_sequence_lengths(image, &shard);
    let after: Vec<u8> =
        shard.partition_indices(rank).into_iter().flat_map(|index| (index as i64).to_le_bytes()).collect();
    let before = image.poisoned(after.len());
    let indices = image.output("indices", 0, &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.partition_indices(place.slots(slots)?, cut, rank, place.of(indices)?)
    })
}

pub(super) fn rank_slots(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let cut = draw.cut(true);
    let (runs, rows) = draw.runs(span_multiple(cut.balance, cut.cp), 1 << 16);
    let shard = ShardedSide::of_runs(&runs, rows, cut.cp, cut.balance);
    let rank = draw.rank(cut.cp);
    let batch = image.slots(&runs, rows);
    let local = helpers::rank_slots(&shard, rank);
    let before = image.poisoned(runs.len() * 4);
    let mut table =
        |name, of: fn(&Run) -> usize| image.output(name, 0, &before, &i32_bytes(local.iter().map(of)));
    let offset = table("rank's offset", |run| run.offset);
    let span = table("rank's span", |run| run.span);
    let len = table("rank's len", |run| run.len);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let to = SlotTables { offset: place.of(offset)?, span: place.of(span)?, len: place.of(len)? };
        gpu.rank_slots(place.slots(batch)?, cut, rank, to)
    })
}

pub(super) fn cu_seqlens(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let cut = Cut { cp: draw.pick(&[1, 2, 3, 4, 8]), balance: Balance::DualChunk };
    let shard = draw.shard(cut);
    let rank = draw.rank(cut.cp);
    let halves = [draw.one_in(2), draw.one_in(2)];
    let slots = with_sequence_lengths(image, &shard);
    let (lens, spans): (Vec<usize>, Vec<usize>) =
        shard.slots.iter().map(|slot| (slot.len, slot.span)).unzip();
    let after = i32_bytes(cu_seqlens_on_cp_rank(&lens, &spans, cut.cp, rank, halves[0], halves[1]));
    let before = image.poisoned(after.len());
    let cu = image.output("cu_seqlens", 0, &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.cu_seqlens_on_rank(place.slots(slots)?, cut.cp, rank, halves, place.of(cu)?)
    })
}

fn segment_bytes(segment: &SegmentRow) -> Vec<u8> {
    let SegmentRow { q, kv, lo, hi } = segment;
    let mut bytes = i32_bytes([q.0, q.1, kv.0, kv.1]);
    bytes.extend(lo.unwrap_or(i64::MIN).to_le_bytes());
    bytes.extend(hi.unwrap_or(i64::MAX).to_le_bytes());
    bytes
}

pub(super) fn ring_segments(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let cut = draw.cut(false);
    let [q, kv] = draw.two_shards(cut);
    let (rank, owner, mask) = (draw.rank(cut.cp), draw.rank(cut.cp), draw.mask());
    let slots = [&q, &kv].map(|shard| with_sequence_lengths(image, shard));
    let rows = helpers::ring_segments(&mask, [&q, &kv], rank, owner).unwrap_or_default();
    let after: Vec<u8> = rows.iter().flat_map(segment_bytes).collect();
    let before = image.poisoned(after.len());
    let segments = image.output("segments", 0, &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let both = [place.slots(slots[0])?, place.slots(slots[1])?];
        gpu.ring_segments(both, &mask, cut, [rank, owner], place.of(segments)?)
    })
}

pub(super) fn all_gather_segments(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    all_gather(draw, image, Pass::Forward)
}

pub(super) fn all_gather_backward_segments(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    all_gather(draw, image, Pass::Backward)
}

fn all_gather(draw: &mut CaseDraw, image: &mut Image, pass: Pass) -> ImageLaunch {
    let cut = draw.cut(true);
    let [q, kv] = draw.two_shards(cut);
    let (rank, mask) = (draw.rank(cut.cp), draw.mask());
    let slots = [&q, &kv].map(|shard| with_sequence_lengths(image, shard));
    let rows = match pass {
        Pass::Forward => helpers::all_gather_segments(&mask, [&q, &kv], rank),
        Pass::Backward => helpers::all_gather_backward_segments(&mask, [&q, &kv], rank),
    };
    let after: Vec<u8> = rows.iter().flat_map(segment_bytes).collect();
    let before = image.poisoned(after.len());
    let segments = image.output("segments", 0, &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let both = [place.slots(slots[0])?, place.slots(slots[1])?];
        let to = place.of(segments)?;
        match pass {
            Pass::Forward => gpu.all_gather_segments(both, &mask, cut, rank, to),
            Pass::Backward => gpu.all_gather_backward_segments(both, &mask, cut, rank, to),
        }
    })
}

impl CaseDraw {
    /// Returns batch rows of ids and positions with breaks of every kind: another id, a jump of the position,
    /// padding, and ids whose positions happen to follow on.
    fn ids(&mut self) -> (Vec<i32>, Vec<i32>, usize) {
        let row_length = self.pick(&[1, 7, 64, 1000, 9000]);
        let rows = row_length * self.below(if row_length > 1000 { 3 } else { 9 });
        let stay = self.pick(&[2, 8, 100]);
        let (mut id, mut position) = (1, 0);
        let (mut ids, mut positions) = (Vec::new(), Vec::new());
        for _ in 0..rows {
            if self.one_in(stay) {
                match self.below(4) {
                    0 => id += 1,
                    1 => position = self.below(5) as i32,
                    2 => id = 0,
                    _ => (id, position) = (id + 1, 0),
                }
            }
            ids.push(id);
            positions.push(position);
            position += 1;
        }
        self.note(&format!("{rows} rows in batch rows of {row_length}"));
        (ids, positions, row_length)
    }
}

pub(super) fn runs(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let (ids, positions, row_length) = draw.ids();
    let pairs: Vec<(i32, i32)> = ids.iter().copied().zip(positions.iter().copied()).collect();
    let (rows, runs) = (pairs.len(), helpers::segment_runs(&pairs, row_length));
    let room = if draw.one_in(4) { draw.below(runs.len() + 1) } else { runs.len() + draw.below(5) };
    draw.note(&format!("{} runs, room for {room}", runs.len()));
    let bytes = |numbers: &[i32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let id = image.input("ids", 0, &bytes(&ids));
    let position = image.input("positions", 0, &bytes(&positions));
    let mut table = |name, behind: i32, of: fn(&SegmentRun) -> i32| {
        let written = runs.iter().map(of).chain(std::iter::repeat(behind)).take(room).collect::<Vec<_>>();
        let before = image.poisoned(room * 4);
        image.output(name, 0, &before, &bytes(&written))
    };
    let offset = table("run's offset", rows as i32, |run| run.offset as i32);
    let len = table("run's len", 0, |run| run.len as i32);
    let run_id = table("run's id", 0, |run| run.id);
    let run_position = table("run's position", 0, |run| run.position);
    let before = image.poisoned(4);
    let count = image.output("count", 0, &before, &(runs.len() as i32).to_le_bytes());
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let ids = SegmentIds { id: place.of(id)?, position: place.of(position)?, rows, row_length };
        let to = RunTables {
            offset: place.of(offset)?,
            len: place.of(len)?,
            id: place.of(run_id)?,
            position: place.of(run_position)?,
            room,
            count: place.of(count)?,
        };
        let scratch = gpu.allocate(ids.scratch_bytes())?;
        gpu.runs(ids, scratch.area(), to)?;
        gpu.finish()
    })
}
