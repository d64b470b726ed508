//! Cases of metadata.

use seamproof_kernels::attend::CallTables;
use seamproof_kernels::metadata::{RunTables, SegmentIds, SequenceTables, SlotTables};
use seamproof_kernels::tables::Cut;
use seamproof_kernels::{Gpu, KernelError, RowKernels, TableKernels};
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{Alignment, Balance, Mask, Pass, Run, Sink, Softmax};
use seamproof_simulator::helpers::{self, PairedRows, SegmentRow, SegmentRun};
use seamproof_simulator::shard::{ShardedSide, cu_seqlens_on_cp_rank};
use seamproof_simulator::{AttentionCall, RowPolicy, Segment};

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
        let mask = Mask::window(left, right, align);
        self.note(&format!("{mask:?}"));
        mask
    }

    /// Returns batches of q and kv with equally many sequences, cut alike.
    fn two_shards(&mut self, cut: Cut) -> [ShardedSide; 2] {
        self.two_shards_for(cut, 1)
    }

    /// Returns such batches in which each rank of a cut of stripes of one holds the rows of `members` ranks, as in the
    /// ring of a hierarchy.
    fn two_shards_for(&mut self, cut: Cut, members: usize) -> [ShardedSide; 2] {
        let unit = span_multiple(cut.balance, cut.cp) * members;
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
        let side = |runs: &[Run], rows| ShardedSide {
            members,
            ..ShardedSide::of_runs(runs, rows, cut.cp, cut.balance)
        };
        [side(&q, q_rows), side(&kv, end)]
    }

    /// Returns for how many ranks each rank of a cut holds rows: for several in stripes of one alone.
    fn members(&mut self, cut: Cut) -> usize {
        let members = if cut.balance == (Balance::Striped { stripe: 1 }) { 1 + self.below(2) } else { 1 };
        self.note(&format!("{members} members"));
        members
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
    let cut = draw.cut();
    let shard = draw.shard(cut);
    let rank = draw.rank(cut.cp);
    let slots = with_sequence_lengths(image, &shard);
    let after: Vec<u8> =
        shard.partition_indices(rank).into_iter().flat_map(|index| (index as i64).to_le_bytes()).collect();
    let before = image.poisoned(after.len());
    let indices = image.output("indices", 0, &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        gpu.partition_indices(place.slots(gpu, slots)?, cut, rank, place.of(indices)?)
    })
}

/// Numbers near the ends of 32 bits, and far beyond.
const WIDE: [i64; 8] =
    [-1, i32::MIN as i64, i32::MIN as i64 - 1, i32::MAX as i64, 1 << 31, (1 << 32) + 5, i64::MIN, i64::MAX];

pub(super) fn narrow(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let count = draw.pick(&[0, 1, 5, 255, 256, 3000]);
    let mut number = || if draw.one_in(3) { draw.pick(&WIDE) } else { i64::from(draw.bits() >> 1) };
    let numbers: [Vec<i64>; 3] = std::array::from_fn(|_| (0..count).map(|_| number()).collect());
    draw.note(&format!("{count} slots"));
    let (tables, room) = image.wide_tables(numbers.each_ref().map(Vec::as_slice));
    let slots = SlotFields { tables, room: Some(room), count, rows: 1 };
    Box::new(move |gpu: &Gpu, place: &PlacedImage| place.slots(gpu, slots).map(drop))
}

pub(super) fn rank_slots(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let cut = draw.cut();
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
        gpu.rank_slots(place.slots(gpu, batch)?, cut, rank, to)
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
        gpu.cu_seqlens_on_rank(place.slots(gpu, slots)?, cut.cp, rank, halves, place.of(cu)?)
    })
}

fn segment_bytes(segment: &SegmentRow) -> Vec<u8> {
    let SegmentRow { q, kv, lo, hi, .. } = segment;
    let mut bytes = i32_bytes([q.0, q.1, kv.0, kv.1]);
    bytes.extend(lo.unwrap_or(i64::MIN).to_le_bytes());
    bytes.extend(hi.unwrap_or(i64::MAX).to_le_bytes());
    bytes
}

pub(super) fn ring_segments(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let cut = draw.cut();
    let members = draw.members(cut);
    let [q, kv] = draw.two_shards_for(cut, members);
    let pieces = if cut.balance == (Balance::Striped { stripe: 1 }) { members } else { q.stripes_most() };
    let (rank, owner, mask) = (draw.rank(cut.cp), draw.rank(cut.cp), draw.mask());
    let slots = [&q, &kv].map(|shard| with_sequence_lengths(image, shard));
    let rows = helpers::ring_segments(&mask, [&q, &kv], rank, owner).unwrap_or_default();
    let after: Vec<u8> = rows.iter().flat_map(segment_bytes).collect();
    let before = image.poisoned(after.len());
    let segments = image.output("segments", 0, &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let both = [place.slots(gpu, slots[0])?, place.slots(gpu, slots[1])?];
        gpu.ring_segments(both, &mask, (cut, pieces), [rank, owner], place.of(segments)?)
    })
}

pub(super) fn all_gather_segments(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    all_gather(draw, image, Pass::Forward)
}

pub(super) fn all_gather_backward_segments(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    all_gather(draw, image, Pass::Backward)
}

fn all_gather(draw: &mut CaseDraw, image: &mut Image, pass: Pass) -> ImageLaunch {
    let cut = draw.cut();
    let [q, kv] = draw.two_shards(cut);
    let (rank, mask, stripes) = (draw.rank(cut.cp), draw.mask(), q.stripes_most());
    let slots = [&q, &kv].map(|shard| with_sequence_lengths(image, shard));
    let rows = match pass {
        Pass::Forward => helpers::all_gather_segments(&mask, [&q, &kv], rank),
        Pass::Backward => helpers::all_gather_backward_segments(&mask, [&q, &kv], rank),
    };
    let rows = rows.expect("masks of the draw are bands");
    let after: Vec<u8> = rows.iter().flat_map(segment_bytes).collect();
    let before = image.poisoned(after.len());
    let segments = image.output("segments", 0, &before, &after);
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let both = [place.slots(gpu, slots[0])?, place.slots(gpu, slots[1])?];
        let to = place.of(segments)?;
        match pass {
            Pass::Forward => gpu.all_gather_segments(both, &mask, (cut, stripes), rank, to),
            Pass::Backward => gpu.all_gather_backward_segments(both, &mask, (cut, stripes), rank, to),
        }
    })
}

/// The tables of a call, and slots of its queries, from segments.
pub(super) fn told_call(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let cut =
        Cut { cp: draw.pick(&[1, 2, 3, 4]), balance: draw.pick(&[Balance::Contiguous, Balance::DualChunk]) };
    let [q, kv] = draw.two_shards(cut);
    let (rank, mask) = (draw.rank(cut.cp), draw.mask());
    let rows = helpers::all_gather_segments(&mask, [&q, &kv], rank).expect("masks of the draw are bands");
    // One step: the first piece of every slot.
    let rows = &rows[..q.slots.len()];
    let softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None };
    let segments: Vec<Segment> = rows.iter().map(SegmentRow::segment).collect();
    let call = AttentionCall { segments, softmax, policy: RowPolicy::Leave };
    let mut call = CallTables::new(&call, [q.rows, kv.rows * cut.cp], false).expect("a call of the draw");
    let after = call.bytes().to_vec();
    call.leave_to_device();
    let before = call.bytes().to_vec();
    let segments = image.input("segments", 0, &rows.iter().flat_map(segment_bytes).collect::<Vec<_>>());
    let tables = image.output("call's tables", 0, &before, &after);
    let poison = image.poisoned(rows.len() * 4);
    let mut table =
        |name, of: fn(&SegmentRow) -> usize| image.output(name, 0, &poison, &i32_bytes(rows.iter().map(of)));
    let offset = table("offsets of queries", |row| row.q.0);
    let span = table("spans of queries", |row| row.q.1);
    let len = table("lengths of queries", |row| row.q.1);
    let count = rows.len();
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let to = SlotTables { offset: place.of(offset)?, span: place.of(span)?, len: place.of(len)? };
        gpu.query_slots(place.of(segments)?, count, to)?;
        gpu.fill_call(place.of(segments)?, &call, place.of(tables)?)
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
        let ids = SegmentIds { id: place.of(id)?, position: Some(place.of(position)?), rows, row_length };
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

/// Ids and positions of a side, of as many batch rows as its arrays have, and the rows of a batch row.
struct DrawnSide {
    ids: Vec<i32>,
    positions: Option<Vec<i32>>,
    row_length: usize,
}

impl CaseDraw {
    /// Returns a side whose arrays have all batch rows or one of them each. Segments have the first ids in any order,
    /// some are padding, and now and then an id is below 0 or comes again, or a position jumps.
    fn side(&mut self, batch_rows: usize) -> DrawnSide {
        let row_length = self.pick(&[1, 5, 64, 700, 3000]);
        let array = |draw: &mut CaseDraw| if draw.one_in(3) { batch_rows.min(1) } else { batch_rows };
        let (of_ids, of_positions) = (array(self), array(self));
        let wrong = self.one_in(8);
        let mut ids = Vec::new();
        for _ in 0..of_ids {
            let mut order: Vec<i32> = (1..=self.pick(&[3, 40, 600])).collect();
            (1..order.len()).for_each(|at| order.swap(at, self.below(at + 1)));
            let longest = self.pick(&[2, 9, 900]);
            let mut row = Vec::new();
            while row.len() < row_length {
                let id = if self.one_in(4) { 0 } else { order.pop().unwrap_or(0) };
                let id = if wrong && self.one_in(6) { self.pick(&[-1, 1, 2]) } else { id };
                row.extend(std::iter::repeat_n(id, 1 + self.below(longest)));
            }
            ids.extend(&row[..row_length]);
        }
        // Positions of one batch row are right for batch rows with equal ids alone.
        let counted = |row: &[i32]| {
            let mut at = 0;
            let next = |(i, &id): (usize, &i32)| {
                at = if i > 0 && row[i - 1] == id { at + 1 } else { 0 };
                at
            };
            row.iter().enumerate().map(next).collect::<Vec<i32>>()
        };
        let whole = ids.iter().copied().cycle().take(of_positions * row_length).collect::<Vec<i32>>();
        let mut positions: Vec<i32> = whole.chunks(row_length).flat_map(counted).collect();
        if wrong && !positions.is_empty() {
            let at = self.below(positions.len());
            positions[at] = self.pick(&[-1, 0, 3, i32::MAX]);
        }
        let positions = Some(positions).filter(|_| !self.one_in(3));
        let shared = positions.as_ref().map_or(0, |_| of_positions);
        self.note(&format!("ids of {of_ids} batch rows of {row_length}, positions of {shared}"));
        DrawnSide { ids, positions, row_length }
    }
}

/// Returns what a side says row by row. Positions that are left out are those of each stretch of an id, as the kernel
/// has it: a run ends where the id changes.
fn pairs(side: &DrawnSide, batch_rows: usize) -> Vec<(i32, i32)> {
    let rows = batch_rows * side.row_length;
    let ids: Vec<i32> = side.ids.iter().copied().cycle().take(rows).collect();
    let mut at = 0;
    let made = (0..rows).map(|row| {
        at = if row % side.row_length > 0 && ids[row - 1] == ids[row] { at + 1 } else { 0 };
        at
    });
    let positions: Vec<i32> = match &side.positions {
        Some(positions) => positions.iter().copied().cycle().take(rows).collect(),
        None => made.collect(),
    };
    ids.into_iter().zip(positions).collect()
}

pub(super) fn sequences(draw: &mut CaseDraw, image: &mut Image) -> ImageLaunch {
    let batch_rows = draw.pick(&[0, 1, 1, 2, 3, 7]);
    let sides = [draw.side(batch_rows), draw.side(batch_rows)];
    let lengths = sides.each_ref().map(|side| side.row_length);
    let runs = sides.each_ref().map(|side| helpers::segment_runs(&pairs(side, batch_rows), side.row_length));
    let meant = helpers::paired_runs([&runs[0], &runs[1]], lengths, batch_rows);
    let largest = meant.iter().flatten().map(Vec::len).max().unwrap_or(0);
    let most = if draw.one_in(3) { draw.below(largest + 1) } else { largest + draw.below(4) };
    draw.note(&format!("{largest} sequences at most, room for {most}"));
    let bytes = |numbers: &[i32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let inputs = sides.each_ref().map(|side| {
        let id = image.input("ids", 0, &bytes(&side.ids));
        (id, side.positions.as_ref().map(|positions| image.input("positions", 0, &bytes(positions))))
    });
    let counts: Vec<i32> = meant.iter().map(|row| row.as_ref().map_or(-1, |row| row.len() as i32)).collect();
    let empty = |batch_row: usize| lengths.map(|length| (batch_row * length, 0));
    let places: Vec<PairedRows> = (0..batch_rows)
        .flat_map(|row| {
            let found = meant[row].iter().flatten().copied();
            found.chain(std::iter::repeat(empty(row))).take(most).collect::<Vec<_>>()
        })
        .collect();
    let mut table = |name, of: fn(&PairedRows) -> usize| {
        let before = image.poisoned(places.len() * 4);
        image.output(name, 0, &before, &i32_bytes(places.iter().map(of)))
    };
    let q_offset = table("q offset", |place| place[0].0);
    let q_len = table("q len", |place| place[0].1);
    let kv_offset = table("kv offset", |place| place[1].0);
    let kv_len = table("kv len", |place| place[1].1);
    let before = image.poisoned(batch_rows * 4);
    let count = image.output("count", 0, &before, &bytes(&counts));
    Box::new(move |gpu: &Gpu, place: &PlacedImage| {
        let side = |index: usize| -> Result<SegmentIds, KernelError> {
            let (id, position) = inputs[index];
            let position = position.map(|position| place.of(position)).transpose()?;
            let row_length = lengths[index];
            Ok(SegmentIds { id: place.of(id)?, position, rows: batch_rows * row_length, row_length })
        };
        let both = [side(0)?, side(1)?];
        let to = SequenceTables {
            q_offset: place.of(q_offset)?,
            q_len: place.of(q_len)?,
            kv_offset: place.of(kv_offset)?,
            kv_len: place.of(kv_len)?,
            most,
            count: place.of(count)?,
        };
        let scratch = gpu.allocate(both.iter().map(SegmentIds::sequence_scratch_bytes).sum())?;
        gpu.sequences(both, scratch.area(), to)?;
        gpu.finish()
    })
}
