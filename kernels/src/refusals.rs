//! Tests of what the launchers of helper kernels refuse, without a GPU: a wrong call says which value is wrong, and
//! launches nothing.

use std::cell::RefCell;

use seamproof_oracle::quantise::{ScaleRule, Takes};
use seamproof_oracle::{Alignment, Balance, Format, Mask, Run, Sink, Softmax};
use seamproof_simulator::helpers::{BatchLayout, Direction, Half, Rest, SlotPart, Style, Update};
use seamproof_simulator::schedule::{Layer, Rotated};
use seamproof_simulator::{AttentionCall, RowPolicy, Segment};

use crate::attend::CallTables;
use crate::error::KernelError;
use crate::gpu::Launch;
use crate::memory::{Area, Argument};
use crate::merge::{DeviceStatistic, DeviceTensor, MergeKernels};
use crate::metadata::{RunTables, SEGMENT_BYTES, SegmentIds, SequenceTables, SlotTables, TableKernels};
use crate::quantise::{DeviceHistory, DeviceRecipe, GroupTable, QuantiseKernels};
use crate::region::{HeadPart, RegionKernels, RotationTable};
use crate::rows::{ByteRows, RowKernels};
use crate::tables::{Cut, Slots, WideSlots};
use crate::turned::TurnedShape;
use crate::view::View;

/// The kernels that would have been launched.
#[derive(Default)]
struct Noted(RefCell<Vec<String>>);

impl Launch for Noted {
    fn launch(&self, kernel: &str, _: (usize, usize, usize), _: &[&dyn Argument]) -> Result<(), KernelError> {
        self.0.borrow_mut().push(kernel.to_owned());
        Ok(())
    }
}

/// Returns the kernels that a right call launches.
fn launched(call: impl Fn(&Noted) -> Result<(), KernelError>) -> Vec<String> {
    let noted = Noted::default();
    call(&noted).expect("a right call");
    noted.0.into_inner()
}

/// Asserts that a call is refused in words that hold these, before anything is launched.
fn refused(words: &str, call: impl Fn(&Noted) -> Result<(), KernelError>) {
    let noted = Noted::default();
    match call(&noted) {
        Ok(()) => panic!("not refused: {words}"),
        Err(error) => assert!(error.to_string().contains(words), "{error}, not {words}"),
    }
    assert_eq!(noted.0.into_inner(), Vec::<String>::new(), "{words}");
}

const SLOTS: usize = 2;
const ROWS: usize = 8;
const ROW_BYTES: usize = 32;

/// Returns memory of so many bytes, apart from that of all other places.
fn at<'a>(place: u64, bytes: usize) -> Area<'a> {
    Area::nowhere(place * 0x10000, bytes)
}

fn off<'a>(place: u64, by: u64, bytes: usize) -> Area<'a> {
    Area::nowhere(place * 0x10000 + by, bytes)
}

fn slots<'a>() -> Slots<'a> {
    let [offset, span, len] = [1, 2, 3].map(|place| at(place, 4 * SLOTS));
    Slots { offset, span, len, count: SLOTS, rows: ROWS }
}

fn rows<'a>(place: u64, rows: usize) -> ByteRows<'a> {
    ByteRows { area: at(place, rows * ROW_BYTES), rows, row_bytes: ROW_BYTES }
}

/// Returns rows of so many bytes, at an address that is off an alignment.
fn rows_off<'a>(place: u64, by: u64, row_bytes: usize) -> ByteRows<'a> {
    ByteRows { area: off(place, by, ROWS * row_bytes), rows: ROWS, row_bytes }
}

#[test]
fn rows_move_by_the_widest_vector_that_they_are_aligned_to() {
    let copied = |from: ByteRows, to: ByteRows| launched(|l| l.copy_valid(slots(), from, to, Rest::Leave));
    for (by, row_bytes, kernel) in [
        (0, 512, "copy_valid_bulk"),
        (0, 32, "copy_valid_16"),
        (8, 32, "copy_valid_8"),
        (0, 24, "copy_valid_8"),
        (4, 32, "copy_valid_4"),
        (2, 32, "copy_valid_2"),
        (0, 33, "copy_valid_1"),
        (8, 512, "copy_valid_8"),
    ] {
        let (from, to) = (rows_off(4, by, row_bytes), rows_off(5, 0, row_bytes));
        assert_eq!(copied(from, to), [kernel]);
        assert_eq!(copied(to, from), [kernel], "either tensor decides");
    }
    let filled = |to: ByteRows| launched(|l| l.fill_padding(slots(), to, 0));
    assert_eq!(filled(rows_off(4, 0, 32)), ["fill_padding_16"]);
    assert_eq!(filled(rows_off(4, 8, 32)), ["fill_padding_8"]);
    // Whoever cannot be slow is told what keeps rows from full speed.
    let said =
        |rows: ByteRows| rows.in_vectors("from").err().map(|error| error.to_string()).unwrap_or_default();
    assert_eq!(said(rows_off(4, 0, 32)), "");
    assert!(said(rows_off(4, 8, 32)).contains("from: at 0x40008, which is not aligned to 16 bytes"));
    assert!(said(rows_off(4, 0, 24)).contains("from: rows of 24 bytes, which are not aligned to 16 bytes"));
}

#[test]
fn moves_of_rows_are_refused() {
    let cut = Cut { cp: 2, balance: Balance::DualChunk };
    let reorder = |slots, cut, from, to| move |l: &Noted| l.reorder(slots, cut, Direction::ToRanks, from, to);
    assert_eq!(launched(reorder(slots(), cut, rows(4, 2 * ROWS), rows(5, 2 * ROWS))), ["reorder_16"]);
    refused("from: 8 rows, not 16", reorder(slots(), cut, rows(4, ROWS), rows(5, 2 * ROWS)));
    refused("to: 8 rows, not 16", reorder(slots(), cut, rows(4, 2 * ROWS), rows(5, ROWS)));
    let nobody = Cut { cp: 0, ..cut };
    refused("a cut over 0 ranks", reorder(slots(), nobody, rows(4, 2 * ROWS), rows(5, 2 * ROWS)));
    let copy = |slots, from, to| move |l: &Noted| l.copy_valid(slots, from, to, Rest::Leave);
    refused("lie apart", copy(slots(), rows(4, ROWS), rows(4, ROWS)));
    refused("the target is written where span lies", copy(slots(), rows(4, ROWS), rows_off(2, 0, 32)));
    refused("rows of 32 bytes cannot move to rows of 16", copy(slots(), rows(4, ROWS), rows_off(5, 0, 16)));
    let short = ByteRows { area: at(4, 7 * ROW_BYTES), ..rows(4, ROWS) };
    refused("from: 224 bytes are not 8 rows of 32", copy(slots(), short, rows(5, ROWS)));
    refused("from: 0 bytes are not 8 rows of 0", copy(slots(), rows_off(4, 0, 0), rows(5, ROWS)));
    let narrow = Slots { len: at(3, 4), ..slots() };
    refused("len: 4 bytes, not a table of 2 i32", copy(narrow, rows(4, ROWS), rows(5, ROWS)));
    let skewed = Slots { offset: off(1, 2, 8), ..slots() };
    refused(
        "offset: at 0x10002, which is not aligned to 4 bytes",
        copy(skewed, rows(4, ROWS), rows(5, ROWS)),
    );
    let fill = |to| move |l: &Noted| l.fill_padding(slots(), to, 0);
    refused("to: 4 rows, not 8", fill(rows(4, 4)));
    refused("the target is written where offset lies", fill(rows_off(1, 0, 32)));
    let read = |whole, halves| move |l: &Noted| l.read_half(slots(), Half::First, whole, halves, Rest::Leave);
    assert_eq!(launched(read(rows(4, ROWS), rows(5, ROWS / 2))), ["half_16"]);
    refused("whole: 4 rows, not 8", read(rows(4, 4), rows(5, ROWS / 2)));
    let write = |halves, whole| move |l: &Noted| l.write_half(slots(), Half::First, halves, whole);
    refused("whole: 4 rows, not 8", write(rows(5, 4), rows(4, 4)));
    let layouts = [BatchLayout::Thd, BatchLayout::Bshd];
    let convert = |positions, from, to| {
        move |l: &Noted| l.convert(slots(), positions, layouts, [from, to], Rest::Leave)
    };
    assert_eq!(launched(convert(3, rows(4, ROWS), rows(5, 6))), ["convert_16"]);
    refused("to: 8 rows, not 6", convert(3, rows(4, ROWS), rows(5, ROWS)));
    refused("at most", convert(usize::MAX, rows(4, ROWS), rows(5, 6)));
    refused("mask: 7 rows, not 8", |l| l.valid_mask(slots(), at(4, 7)));
    let indices = |rank, area| move |l: &Noted| l.partition_indices(slots(), cut, rank, area);
    assert_eq!(launched(indices(1, at(4, 64))), ["partition_indices"]);
    refused("indices: 32 bytes, not 8 i64", indices(1, at(4, 32)));
    refused("indices: at 0x40004, which is not aligned to 8 bytes", indices(1, off(4, 4, 64)));
    refused("rank 2 of 2", indices(2, at(4, 64)));
}

fn tensor<'a>(place: u64, rows: usize, format: Format) -> DeviceTensor<'a> {
    let bytes = if format == Format::F32 { 4 } else { 2 };
    DeviceTensor { area: at(place, rows * 2 * 8 * bytes), rows, heads: 2, dim: 8, format }
}

fn statistic<'a>(place: u64, rows: usize) -> DeviceStatistic<'a> {
    DeviceStatistic { area: at(place, 2 * rows * 4), heads: 2, rows }
}

#[test]
fn merges_are_refused() {
    let (whole, add) = (SlotPart::Whole, [Update::Add; 2]);
    let merge = |lse, step| move |l: &Noted| l.merge_statistics(slots(), whole, lse, step);
    assert_eq!(launched(merge(statistic(4, ROWS), statistic(5, ROWS))), ["merge_statistics_4"]);
    let skewed = DeviceStatistic { area: off(5, 4, 64), ..statistic(5, ROWS) };
    assert_eq!(launched(merge(statistic(4, ROWS), skewed)), ["merge_statistics_1"]);
    refused("step: 32 bytes as [2, 4], not f32 [2, 8]", merge(statistic(4, ROWS), statistic(5, 4)));
    let odd = DeviceStatistic { area: off(5, 2, 64), ..statistic(5, ROWS) };
    refused("step: at 0x50002, which is not aligned to 4 bytes", merge(statistic(4, ROWS), odd));
    refused("lse is written where step lies", merge(statistic(4, ROWS), statistic(4, ROWS)));
    let halves =
        |whole, halves| move |l: &Noted| l.read_half_statistic(slots(), Half::Second, whole, halves, None);
    assert_eq!(launched(halves(statistic(4, ROWS), statistic(5, 4))), ["half_statistics_4"]);
    refused("halves: 64 bytes as [2, 8], not f32 [2, 4]", halves(statistic(4, ROWS), statistic(5, ROWS)));
    let out = |out, lse, step_out, step_lse| {
        move |l: &Noted| l.merge_out(slots(), (whole, Style::Running), (out, lse), (step_out, step_lse))
    };
    let (f32s, bf16) = (tensor(4, ROWS, Format::F32), tensor(6, ROWS, Format::Bf16));
    let (lse, step_lse) = (statistic(5, ROWS), statistic(7, ROWS));
    assert_eq!(launched(out(f32s, lse, bf16, step_lse)), ["merge_running_f32_bf16_8"]);
    refused(
        "f32 added to bf16",
        out(tensor(4, ROWS, Format::Bf16), lse, tensor(6, ROWS, Format::F32), step_lse),
    );
    refused("out is written where step lse lies", out(f32s, lse, bf16, statistic(4, ROWS)));
    refused(
        "the heads and dim of the running tensor",
        out(f32s, lse, DeviceTensor { heads: 1, dim: 16, ..bf16 }, step_lse),
    );
    let sum = |sum, step| move |l: &Noted| l.accumulate(slots(), whole, add, sum, step);
    assert_eq!(launched(sum(f32s, bf16)), ["accumulate_f32_bf16_8"]);
    let element = DeviceTensor { area: off(6, 2, ROWS * 32), ..bf16 };
    assert_eq!(launched(sum(f32s, element)), ["accumulate_f32_bf16_1"], "off 16 bytes");
    let odd = DeviceTensor { area: off(6, 1, ROWS * 32), ..bf16 };
    refused("step: at 0x60001, which is not aligned to 2 bytes", sum(f32s, odd));
    refused("sum is written where step lies", sum(f32s, tensor(4, ROWS, Format::Bf16)));
    refused("not 8 rows", sum(tensor(4, 4, Format::F32), bf16));
    let largest = |area| move |l: &Noted| l.max_logit(slots(), statistic(4, ROWS), area, true);
    assert_eq!(launched(largest(at(5, 8))), ["fill_words", "max_logit_4"]);
    refused("largest: 4 bytes as [2, 1], not f32 [2, 1]", largest(at(5, 4)));
    refused("largest is written where row maxima lies", largest(at(4, 8)));
    let short = Slots { span: at(2, 4), ..slots() };
    refused("span: 4 bytes, not a table of 2 i32", |l| {
        l.max_logit(short, statistic(4, ROWS), at(5, 8), true)
    });
}

#[test]
fn operations_of_regions_are_refused() {
    let layer = |kind, of, from, to| move |l: &Noted| l.layer(kind, of, from, to);
    let second = HeadPart { index: 1, count: 2 };
    assert_eq!(launched(layer(Layer::Column, second, rows(4, 2 * ROWS), rows(5, ROWS))), ["layer_16"]);
    assert_eq!(launched(layer(Layer::Row, second, rows(4, ROWS), rows(5, 2 * ROWS))), ["layer_16"]);
    refused("from: 8 rows, not 16", layer(Layer::Column, second, rows(4, ROWS), rows(5, ROWS)));
    refused("to: 8 rows, not 16", layer(Layer::Row, second, rows(4, ROWS), rows(5, ROWS)));
    let third = HeadPart { index: 2, count: 2 };
    refused("part 2 of 2 parts", layer(Layer::Row, third, rows(4, ROWS), rows(5, 2 * ROWS)));
    refused("lie apart", layer(Layer::Row, second, rows(4, ROWS), rows(4, 2 * ROWS)));
    let run = |offset, len| Rotated { rows: Run::packed(offset, len, len), position: 3, step: 1 };
    let rotate = |turns: &[Rotated], bytes, to| {
        let table = RotationTable::new(turns);
        move |l: &Noted| l.rotate(&table, at(7, bytes), false, to)
    };
    let (turn, bf16) = ([run(2, 4)], tensor(4, ROWS, Format::Bf16));
    assert_eq!(launched(rotate(&turn, 40, bf16)), ["rotate_2_16"]);
    assert_eq!(launched(rotate(&turn, 40, tensor(4, ROWS, Format::F32))), ["rotate_4_16"]);
    let skewed = DeviceTensor { area: off(4, 2, ROWS * 32), ..bf16 };
    assert_eq!(launched(rotate(&turn, 40, skewed)), ["rotate_2_2"], "off 16 bytes");
    refused("80 bytes are not the table of 1 turns", rotate(&turn, 80, bf16));
    refused("rows up to 9 are rotated, and the tensor has 8", rotate(&[run(5, 4)], 40, bf16));
    refused("are written by one launch", rotate(&[run(2, 4), run(5, 1)], 80, bf16));
    refused(
        "to is written where the table lies",
        rotate(&turn, 40, DeviceTensor { area: at(7, 256), ..bf16 }),
    );
    let long = DeviceTensor { area: at(4, 40_000), rows: 1, heads: 1, dim: 20_000, format: Format::Bf16 };
    refused("a head of 40000 bytes is rotated; at most 16384", rotate(&[run(0, 1)], 40, long));
}

/// Returns the tables of a backward of 8 rows under a causal window, with a prefix and sink tokens.
fn causal(prefix: usize, sink_tokens: usize) -> CallTables {
    let rows = Run::packed(0, ROWS, ROWS);
    let segment = Segment { q: rows, kv: vec![rows], lo: Some(-2), hi: Some(0), prefix, sink_tokens };
    let softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::None };
    let call = AttentionCall { segments: vec![segment], softmax, policy: RowPolicy::Overwrite };
    CallTables::new(&call, [ROWS; 2], true).expect("the run lies in the rows")
}

#[test]
fn tables_are_refused() {
    let cut = Cut { cp: 2, balance: Balance::DualChunk };
    let (q, kv) = (slots(), Slots { rows: 6, ..slots() });
    let written = |offset| SlotTables { offset, span: at(5, 8), len: at(6, 8) };
    let rank_slots = |rank, offset| move |l: &Noted| l.rank_slots(slots(), cut, rank, written(offset));
    assert_eq!(launched(rank_slots(0, at(4, 8))), ["rank_slots"]);
    refused("offset: 4 bytes, not a table of 2 i32", rank_slots(0, at(4, 4)));
    refused("offset is written where len lies", rank_slots(0, at(3, 8)));
    refused("rank 2 of 2", rank_slots(2, at(4, 8)));
    let cu_seqlens = |area| move |l: &Noted| l.cu_seqlens_on_rank(slots(), 2, 1, [true; 2], area);
    assert_eq!(launched(cu_seqlens(at(4, 12))), ["cu_seqlens_on_rank"]);
    refused("cu_seqlens: 8 bytes, not a table of 3 i32", cu_seqlens(at(4, 8)));
    let band = Mask::window(Some(3), Some(0), Alignment::TopLeft);
    let ring =
        |kv, cut, mask: Mask, area| move |l: &Noted| l.ring_segments([q, kv], &mask, (cut, 2), [0, 1], area);
    let room = |segments| at(4, segments * SEGMENT_BYTES);
    assert_eq!(launched(ring(kv, cut, band, room(8))), ["ring_segments"]);
    refused("segments: 32 bytes, not 8 of 32", ring(kv, cut, band, room(1)));
    let skewed = off(4, 8, 8 * SEGMENT_BYTES);
    refused("segments: at 0x40008, which is not aligned to 16 bytes", ring(kv, cut, band, skewed));
    refused("2 sequences of q and 1 of kv", ring(Slots { count: 1, ..kv }, cut, band, room(8)));
    let stripes = |stripe| Cut { balance: Balance::Striped { stripe }, ..cut };
    assert_eq!(launched(ring(kv, stripes(1), band, room(8))), ["ring_segments"], "two members");
    assert_eq!(launched(ring(kv, stripes(2), band, room(10))), ["ring_stripes"]);
    refused("segments: 64 bytes, not 10 of 32", ring(kv, stripes(2), band, room(2)));
    let endless = |l: &Noted| l.ring_segments([q, kv], &band, (stripes(2), usize::MAX / 4), [0, 1], room(10));
    refused("pieces of a slot", endless);
    refused("made of a band", ring(kv, cut, Mask { prefix: 3, ..band }, room(8)));
    let gathered = |kv, area| move |l: &Noted| l.all_gather_segments([q, kv], &band, (cut, 1), 0, area);
    assert_eq!(launched(gathered(kv, room(4))), ["all_gather_segments"]);
    refused("gathered rows", gathered(Slots { rows: i32::MAX as usize, ..kv }, room(4)));
    let fill = |call: CallTables| move |l: &Noted| l.fill_call(room(1), &call, at(5, call.bytes().len()));
    assert_eq!(launched(fill(causal(0, 0))), ["fill_call"]);
    refused("a prefix, which segments of a table do not have", fill(causal(3, 0)));
    refused("sink tokens, which segments of a table do not have", fill(causal(0, 2)));
    let ids = |rows, row_length| SegmentIds { id: at(4, 4 * rows), position: None, rows, row_length };
    let [offset, len, id, position] = [5, 6, 7, 8].map(|place| at(place, 12));
    let runs = RunTables { offset, len, id, position, room: 3, count: at(9, 4) };
    let found = |ids, scratch, to| move |l: &Noted| l.runs(ids, scratch, to);
    let kernels = ["count_runs", "sum_runs", "write_runs", "finish_runs"];
    assert_eq!(launched(found(ids(8, 4), at(10, 4), runs)), kernels);
    refused("8 rows do not divide into batch rows of 3", found(ids(8, 3), at(10, 4), runs));
    refused("scratch: 8 bytes, not a table of 1 i32", found(ids(8, 4), at(10, 8), runs));
    refused("len is written where run id lies", found(ids(8, 4), at(10, 4), RunTables { id: len, ..runs }));
    let sequences = SequenceTables {
        q_offset: at(5, 8),
        q_len: at(6, 8),
        kv_offset: at(7, 8),
        kv_len: at(8, 8),
        most: 1,
        count: at(9, 8),
    };
    let bytes = 2 * ids(8, 4).sequence_scratch_bytes();
    let paired = |kv, scratch| move |l: &Noted| l.sequences([ids(8, 4), kv], at(10, scratch), sequences);
    let other = |rows, row_length| SegmentIds { id: at(11, 4 * rows), ..ids(rows, row_length) };
    assert_eq!(launched(paired(other(8, 4), bytes)).len(), 9);
    refused("2 batch rows of q and 1 of kv", paired(other(8, 8), bytes));
    // Before the first side's runs are looked for.
    refused("scratch: ", paired(other(8, 4), bytes - 4));
}

#[test]
fn tables_of_64_bits_are_narrowed_or_refused() {
    let [offset, span, len] = [4, 5, 6].map(|place| at(place, 8 * SLOTS));
    let wide = WideSlots { offset, span, len, count: SLOTS, rows: ROWS };
    let narrow = |wide: WideSlots<'static>, room| move |l: &Noted| l.narrow(wide, room).map(drop);
    assert_eq!(launched(narrow(wide, at(7, 24))), ["narrow_slots"]);
    let narrowed = Noted::default().narrow(wide, at(7, 24)).expect("slots");
    let places = [narrowed.offset, narrowed.span, narrowed.len].map(|table| table.address() - 0x70000);
    assert_eq!((places, narrowed.count, narrowed.rows), ([0, 8, 16], SLOTS, ROWS));
    refused(
        "wide span: 8 bytes, not a table of 2 i64",
        narrow(WideSlots { span: at(5, 8), ..wide }, at(7, 24)),
    );
    let skewed = WideSlots { len: off(6, 4, 16), ..wide };
    refused("wide len: at 0x60004, which is not aligned to 8 bytes", narrow(skewed, at(7, 24)));
    refused("room: 16 bytes, not a table of 6 i32", narrow(wide, at(7, 16)));
    refused("room is written where wide offset lies", narrow(wide, at(4, 24)));
    let many = WideSlots { rows: i32::MAX as usize + 1, ..wide };
    refused("at most", narrow(many, at(7, 24)));
}

/// Test that a launcher which forgets a check would be seen.
#[test]
#[should_panic(expected = "not refused")]
fn a_launcher_without_its_check_is_seen() {
    refused("rank 2 of 2", |l| l.launch("rank_slots", (1, 1, 1), &[]));
}

/// Test that a launcher which looks too late would be seen.
#[test]
#[should_panic(expected = "rank 2 of 2")]
fn a_launcher_that_checks_late_is_seen() {
    refused("rank 2 of 2", |l| {
        l.launch("rank_slots", (1, 1, 1), &[])?;
        Err(KernelError::shape("rank 2 of 2"))
    });
}

/// Values of 8 rows and 2 heads, at an address that is off 16 bytes.
fn values<'a>(dim: usize, format: Format, off_by: u64) -> View<'a> {
    let bytes = ROWS * 2 * dim * if format == Format::F32 { 4 } else { 2 };
    View::rows(off(1, off_by, bytes), [ROWS, 2, dim], format)
}

/// Groups of one row each, of so many heads and lanes.
fn of_rows<'a>(dim: usize, heads_each: usize, lanes_each: usize) -> GroupTable<'a> {
    let shape = [ROWS, 2 / heads_each, dim.div_ceil(lanes_each)];
    GroupTable { row_group: at(2, 4 * ROWS), shape, heads_each, lanes_each }
}

const CURRENT: DeviceRecipe =
    DeviceRecipe { format: Format::E4m3, scale: ScaleRule::F32, margin: 0, delayed: None };

fn factors<'a>(groups: &GroupTable) -> [Area<'a>; 3] {
    [3, 4, 5].map(|place| at(place, 4 * groups.count()))
}

#[test]
fn values_of_single_rows_are_read_once_by_4_to_32_threads() {
    for (dim, format, each, threads) in [
        (16, Format::Bf16, [1, 16], None),
        (32, Format::Bf16, [1, 32], Some(4)),
        (16, Format::F32, [1, 16], Some(4)),
        (96, Format::Bf16, [1, 96], None),
        (96, Format::Bf16, [1, 32], Some(4)),
        (256, Format::Fp16, [1, 256], Some(32)),
        (256, Format::F32, [1, 256], None),
        (48, Format::Bf16, [1, 32], None),
        (64, Format::Bf16, [2, 64], None),
        (36, Format::Bf16, [1, 36], None),
    ] {
        let of = |off_by| of_rows(dim, each[0], each[1]).threads_of_row(&values(dim, format, off_by));
        assert_eq!((of(0), of(4)), (threads, None), "{dim} lanes of {format}, groups of {each:?}");
    }
}

#[test]
fn quantising_is_refused() {
    let groups = of_rows(64, 1, 64);
    let codes = |by| View::rows(off(6, by, ROWS * 2 * 64), [ROWS, 2, 64], Format::E4m3);
    let once = |groups: GroupTable<'static>, recipe: DeviceRecipe<'static>, codes: Option<View<'static>>| {
        move |l: &Noted| {
            let values = values(64, Format::Bf16, 0);
            l.encode_rows(&values, &groups, &recipe, factors(&groups), codes.as_ref())
        }
    };
    assert_eq!(launched(once(groups, CURRENT, Some(codes(0)))), ["encode_rows_bf16"]);
    assert_eq!(launched(once(groups, CURRENT, None)), ["encode_rows_bf16"]);
    refused("the codes: at 0x60008, which is not aligned to 16 bytes", once(groups, CURRENT, Some(codes(8))));
    refused("groups of 4 to 32 vectors", once(of_rows(64, 2, 64), CURRENT, None));
    refused(
        "codes in e4m3 beside e5m2",
        once(groups, DeviceRecipe { format: Format::E5m2, ..CURRENT }, Some(codes(0))),
    );
    let past = DeviceHistory { history: at(7, 8), next: at(8, 8), takes: Takes::Max, previous: 1.0 };
    refused("a delayed recipe", once(groups, DeviceRecipe { delayed: Some(past), ..CURRENT }, None));
    let short = |l: &Noted| {
        let [amax, scale, _] = factors(&groups);
        l.encode_rows(&values(64, Format::Bf16, 0), &groups, &CURRENT, [amax, scale, at(5, 4)], None)
    };
    refused("descale: 4 bytes", short);
    let encode = |by| move |l: &Noted| l.encode(&values(64, Format::Bf16, 0), &groups, at(4, 64), &codes(by));
    assert_eq!(launched(encode(0)), ["encode_bf16_vectors"]);
    assert_eq!(launched(encode(8)), ["encode_bf16_elements"], "codes off 16 bytes are written one by one");
    let wide = [1, 1 << 28, 16];
    let turn = |l: &Noted| {
        let values = View::rows(at(1, 32 << 28), wide, Format::Bf16);
        let groups =
            GroupTable { row_group: at(0, 4), shape: [1, 1, 1], heads_each: 1 << 28, lanes_each: 16 };
        let turned = (Format::E4m3, Area::nowhere(1 << 50, TurnedShape::of(wide).bytes()));
        l.encode_turned(&values, &groups, Area::nowhere(1 << 40, 4), turned, None)
    };
    refused("268435456 heads of 16 lanes", turn);
}
