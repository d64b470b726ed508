//! Attention calls that no schedule makes: several runs of keys to a segment, bounds and prefixes of any kind, rows of
//! any step, sinks of −∞. In some the keys lie in pages, from anywhere in a first page on; in some, first keys are sink
//! tokens beside a window.
//!
//! A *call* is drawn. Its results on the CPU are those of the serial kernel with the tiles of the simple kernels, which
//! must give the same bits in every row, written or not, through runs of rows and through a block table. The kernels on
//! tensor cores run in each shape, and in both orders and all walks of the backward. They must come near in real rows,
//! and give the same bits in all others.

use seamproof_kernels::attend::{BackwardTensors, ForwardTensors, KEY_TILE, WeightFormats};
use seamproof_kernels::backward::{BackwardMode, DqOrder, Walks};
use seamproof_kernels::forward::TileShape;
use seamproof_kernels::memory::{Area, DeviceBuffer};
use seamproof_kernels::view::View;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{Format, Heads, Pass, Run, Sink, Softmax, runs_of};
use seamproof_simulator::emulated::{self, Kernel, Right, Roundings, Serial, TiledKernel, Tiles};
use seamproof_simulator::{AttentionCall, GuardedTensor, RowPolicy, Segment};

use super::draw::CaseDraw;
use super::mismatch::Mismatch;
use super::passes::{Kernels, Launches};

/// The two sides: rows of queries, and of keys.
const SIDES: usize = 2;
const SEGMENTS_MAX: usize = 4;
/// The lengths of runs: near tiles of 64, 128 and 192 rows and blocks of 80 and 176 keys, and near two of them.
const LENGTHS: [usize; 19] =
    [0, 1, 5, 63, 64, 65, 79, 81, 100, 127, 129, 161, 175, 177, 191, 193, 257, 300, 353];
/// The keys of a segment that all its rows see: of four to eight tiles, which go around in the backward
/// (`goes_around`).
const AROUND: [usize; 5] = [390, 512, 700, 897, 1024];
/// The rows and the keys of a segment whose keys are cached: pieces of several blocks for each warp (`forward_split.cuh`).
const DECODED: [usize; 5] = [1, 2, 5, 16, 20];
const CACHED: [usize; 4] = [1100, 2100, 4300, 5000];
/// The most runs that a segment's keys are dealt to.
const RUNS_MAX: usize = 4;
/// The numbers of sink tokens: of one to five tiles of the simple kernels, and one to three of those on tensor cores.
const SINK_TOKENS: [usize; 6] = [1, 4, 32, 33, 70, 150];
/// The rows of a page.
const PAGES: [usize; 5] = [1, 3, 16, 64, 100];
/// The number in results before a launch, apart from the largest logit.
const BEFORE: f32 = 7.0;
/// The most that results on tensor cores may be off by where no number is above 2. `OUT` is two roundings to the
/// tensors' format. `GRADIENT` is a share of the largest gradient, and `CANCELLED` is for dP and D that cancel.
/// `STATISTIC` is for the LSE, which is made in f32.
const OUT: f32 = 1.0 / 128.0;
const GRADIENT: f32 = 1.0 / 64.0;
const CANCELLED: f32 = 1.0 / 4096.0;
const STATISTIC: f32 = 1.0 / 2048.0;

/// A call and its tensors' sizes.
struct Case {
    call: AttentionCall,
    rows: [usize; SIDES],
    heads: Heads,
    dims: [usize; 2],
    format: Format,
    out: Format,
    /// The rows of a page, where the keys of all segments lie in pages.
    page: Option<usize>,
    /// The elements before each tensor, which lies on 16 bytes where there are none.
    before: usize,
}

/// The room for the next run. Rows of a tensor with a step belong to interleaved *phases*, one for each row of the
/// step.
struct Room {
    step: usize,
    phase: usize,
    next: usize,
}

impl Room {
    fn run(&mut self, draw: &mut CaseDraw, len: usize) -> Run {
        let first = self.next + draw.below(4);
        let span = len + if draw.one_in(2) { draw.below(9) } else { 0 };
        self.next = first + span;
        Run { offset: self.step * first + self.phase, step: self.step, len, span }
    }

    fn rows(&self, draw: &mut CaseDraw) -> usize {
        self.step * (self.next + 1 + draw.below(3))
    }
}

fn segment(draw: &mut CaseDraw, [queries, keys]: [&mut Room; SIDES]) -> Segment {
    queries.phase = draw.below(queries.step);
    keys.phase = draw.below(keys.step);
    let len = draw.pick(&LENGTHS);
    let q = queries.run(draw, len);
    let runs = 1 + draw.below(RUNS_MAX);
    let kv: Vec<Run> = (0..runs)
        .map(|_| {
            let len = draw.pick(&LENGTHS);
            keys.run(draw, len / if runs > 2 { 2 } else { 1 })
        })
        .collect();
    let all: usize = kv.iter().map(|run| run.len).sum();
    // Bounds are near where keys begin and end for some row.
    let mut bound = || draw.below(all + len + 3) as i64 - len as i64 - 1;
    let (a, b) = (bound(), bound());
    let (lo, hi) = (Some(a.min(b)), Some(a.max(b)));
    let (lo, hi) =
        draw.pick(&[(None, None), (None, hi), (lo, None), (lo, hi), (Some(-40), Some(7)), (None, Some(0))]);
    let prefix = if draw.one_in(3) { draw.below(all + 3) } else { 0 };
    Segment { q, kv, lo, hi, prefix, sink_tokens: 0 }
}

/// Returns a segment without a mask whose tiles of keys go around.
fn segment_around(draw: &mut CaseDraw, [queries, keys]: [&mut Room; SIDES]) -> Segment {
    let (rows, seen) = (draw.pick(&LENGTHS), draw.pick(&AROUND));
    Segment {
        q: queries.run(draw, rows),
        kv: vec![keys.run(draw, seen)],
        lo: None,
        hi: None,
        prefix: 0,
        sink_tokens: 0,
    }
}

/// Returns a segment of few rows and many keys, in one or in several runs, of which the last row sees the last key.
fn segment_decoded(draw: &mut CaseDraw, [queries, keys]: [&mut Room; SIDES]) -> Segment {
    let (rows, all) = (draw.pick(&DECODED), draw.pick(&CACHED));
    let runs = draw.pick(&[1, 1, 3, 40]);
    let kv: Vec<Run> =
        (0..runs).map(|run| keys.run(draw, all * (run + 1) / runs - all * run / runs)).collect();
    let hi = draw.pick(&[None, Some((all - rows) as i64)]);
    let lo = draw.pick(&[None, None, Some((all - rows) as i64 - 700), Some(-3)]);
    Segment { q: queries.run(draw, rows), kv, lo, hi, prefix: 0, sink_tokens: 0 }
}

/// Puts the keys of a segment into pages of `size` rows, from anywhere in the first one on, and returns how many pages
/// are taken then, `taken` of which were before. Pages follow each other downward.
fn put_in_pages(draw: &mut CaseDraw, segment: &mut Segment, size: usize, taken: usize) -> usize {
    let first = draw.below(size);
    let end = first + segment.keys();
    let last = taken + end.div_ceil(size);
    let row = |position: usize| (last - 1 - position / size) * size + position % size;
    segment.kv = runs_of((first..end).map(row));
    last
}

impl Case {
    fn draw(draw: &mut CaseDraw) -> Case {
        let mut case = Case::in_runs(draw);
        if draw.one_in(4) {
            let size = draw.pick(&PAGES);
            let taken = case
                .call
                .segments
                .iter_mut()
                .fold(0, |taken, segment| put_in_pages(draw, segment, size, taken));
            (case.page, case.rows[1]) = (Some(size), (taken + 1) * size);
        }
        if draw.one_in(4) {
            let windows = case.call.segments.iter_mut().filter(|segment| segment.lo.is_some());
            windows.for_each(|segment| segment.sink_tokens = draw.pick(&SINK_TOKENS));
        }
        case
    }

    fn in_runs(draw: &mut CaseDraw) -> Case {
        let step = draw.pick(&[1, 1, 2, 3]);
        let room = || Room { step, phase: 0, next: 0 };
        let (mut queries, mut keys) = (room(), room());
        let around = draw.one_in(8);
        let decoded = !around && draw.one_in(8);
        let count = 1 + draw.below(if around || decoded { 2 } else { SEGMENTS_MAX });
        let make = match (around, decoded) {
            (true, _) => segment_around,
            (_, true) => segment_decoded,
            _ => segment,
        };
        let segments = (0..count).map(|_| make(draw, [&mut queries, &mut keys])).collect();
        // The tiles of keys of a group go down in the form that fits.
        let heads = draw.pick(if around {
            &[Heads { q: 2, kv: 2 }, Heads { q: 1, kv: 1 }]
        } else {
            &[Heads { q: 4, kv: 1 }, Heads { q: 2, kv: 2 }, Heads { q: 6, kv: 2 }, Heads { q: 1, kv: 1 }]
        });
        let dims = draw.pick(&[
            [64, 64],
            [128, 128],
            [128, 128],
            [40, 64],
            [72, 128],
            [128, 8],
            [20, 36],
            [13, 100],
            [256, 256],
            [192, 128],
            [36, 130],
            [576, 512],
            [576, 512],
            [290, 300],
            [8, 512],
        ]);
        let format = draw.pick(&[Format::Bf16, Format::Bf16, Format::Fp16]);
        let softmax = Softmax {
            scale: draw.pick(&[1.0 / (dims[0] as f32).sqrt(), 0.25]),
            softcap: draw.pick(&[None, None, None, Some(3.0)]),
            sink: draw.pick(&[Sink::None, Sink::None, Sink::OffByOne, Sink::Learnable]),
        };
        let policy = draw.pick(&[RowPolicy::Overwrite, RowPolicy::Leave]);
        Case {
            call: AttentionCall { segments, softmax, policy },
            rows: [queries.rows(draw), keys.rows(draw)],
            heads,
            dims,
            format,
            out: draw.pick(&[format, Format::F32]),
            page: None,
            before: draw.pick(&[0, 0, 0, 1]),
        }
    }

    /// Returns which rows of a side are real.
    fn real(&self, side: usize) -> Vec<bool> {
        let mut real = vec![false; self.rows[side]];
        for segment in &self.call.segments {
            let runs = if side == 0 { std::slice::from_ref(&segment.q) } else { &segment.kv };
            runs.iter().flat_map(Run::real_rows).for_each(|row| real[row] = true);
        }
        real
    }

    /// Returns q, k, v and dout: numbers between −2 and 2 in real rows, NaN in all others.
    fn inputs(&self, draw: &mut CaseDraw) -> [GuardedTensor; 4] {
        let [q_rows, kv_rows] = self.rows;
        let (Heads { q, kv }, [dim, dim_v]) = (self.heads, self.dims);
        let shapes = [[q_rows, q, dim], [kv_rows, kv, dim], [kv_rows, kv, dim_v], [q_rows, q, dim_v]];
        let names = [("q", 0), ("k", 1), ("v", 1), ("dout", 0)];
        std::array::from_fn(|i| {
            let mut tensor = GuardedTensor::unwritten(names[i].0, shapes[i], self.format);
            let (real, row) = (self.real(names[i].1), shapes[i][1] * shapes[i][2]);
            for (values, real) in tensor.values_mut().chunks_exact_mut(row).zip(real) {
                let number = |bits: u32| f64::from(bits as i32) / 1_073_741_824.0;
                let mut drawn = || self.format.decode(self.format.encode(number(draw.bits()))) as f32;
                values.iter_mut().for_each(|value| *value = if real { drawn() } else { f32::NAN });
            }
            tensor
        })
    }

    fn sinks(&self, draw: &mut CaseDraw) -> Vec<f32> {
        match self.call.softmax.sink {
            Sink::Learnable => {
                (0..self.heads.q).map(|_| draw.pick(&[f32::NEG_INFINITY, -1.0, 0.5, 3.0])).collect()
            }
            Sink::None | Sink::OffByOne => Vec::new(),
        }
    }

    fn result(&self, name: &str, shape: [usize; 3], format: Format) -> GuardedTensor {
        let mut tensor = GuardedTensor::unwritten(name, shape, format);
        tensor.values_mut().fill(if name == "max_logit" { f32::NEG_INFINITY } else { BEFORE });
        tensor
    }

    /// Returns out, lse, max_logit, dq, dk and dv as they are before a launch.
    fn results(&self) -> [GuardedTensor; 6] {
        let [q_rows, kv_rows] = self.rows;
        let (Heads { q, kv }, [dim, dim_v]) = (self.heads, self.dims);
        [
            self.result("out", [q_rows, q, dim_v], self.out),
            self.result("lse", [q, q_rows, 1], Format::F32),
            self.result("max_logit", [q, 1, 1], Format::F32),
            self.result("dq", [q_rows, q, dim], self.format),
            self.result("dk", [kv_rows, kv, dim], self.format),
            self.result("dv", [kv_rows, kv, dim_v], self.format),
        ]
    }

    /// Returns the results of the CPU.
    fn twin(&self, [q, k, v, dout]: &[GuardedTensor; 4], sink: &[f32]) -> [GuardedTensor; 6] {
        let [mut out, mut lse, mut max_logit, mut dq, mut dk, mut dv] = self.results();
        let tiles = Tiles { q: 1, kv: KEY_TILE };
        let kernel = TiledKernel::new(tiles, Roundings::new(self.format, self.format), Serial, &Right);
        let forward = emulated::ForwardLaunch {
            q,
            k,
            v,
            sink,
            descales: &[],
            out: &mut out,
            lse: &mut lse,
            max_logit: &mut max_logit,
        };
        Kernel::<f32>::forward(&kernel, &self.call, forward);
        let backward = emulated::BackwardLaunch {
            q,
            k,
            v,
            sink: &[],
            descales: &[],
            dout,
            out: &out,
            lse: &lse,
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
            dsink: &mut GuardedTensor::nothing(),
        };
        kernel.backward(&self.call, backward);
        [out, lse, max_logit, dq, dk, dv]
    }
}

/// A tensor in a buffer, behind some NaN.
struct Lying {
    buffer: DeviceBuffer,
    first: usize,
}

impl Lying {
    fn new(gpu: &Gpu, tensor: &GuardedTensor, before: usize) -> Result<Lying, KernelError> {
        let elements = [&vec![f32::NAN; before], tensor.values()].concat();
        let buffer = gpu.upload_elements(&elements, tensor.format())?;
        let first = before * buffer.area().bytes() / elements.len().max(1);
        Ok(Lying { buffer, first })
    }

    fn area(&self) -> Result<Area<'_>, KernelError> {
        let area = self.buffer.area();
        area.part(self.first..area.bytes())
    }

    fn rows(&self, shape: [usize; 3], format: Format) -> Result<View<'_>, KernelError> {
        Ok(View::rows(self.area()?, shape, format))
    }
}

/// A case on the GPU: the tensors that are read, and those that are written.
struct Placed<'g> {
    gpu: &'g Gpu,
    case: &'g Case,
    inputs: [(Lying, [usize; 3]); 4],
    sink: Option<DeviceBuffer>,
    results: [(Lying, GuardedTensor); 6],
    /// The results that the forward saved, as the CPU has them, with NaN in rows that are not real.
    saved: [Lying; 2],
}

/// Returns the modes of a backward that overwrites: both orders, in the form that fits and in each walk of the long form.
fn modes() -> impl Iterator<Item = BackwardMode> {
    let walks = || [None].into_iter().chain(Walks::ALL.map(Some));
    DqOrder::ALL.into_iter().flat_map(move |order| {
        let mode = BackwardMode::overwrite(order);
        walks().map(move |walks| mode.with_walks(walks))
    })
}

/// A way to run a case.
#[derive(Clone, Copy, Debug)]
enum Way {
    Simple,
    Paged(usize),
    Forward(TileShape),
    Backward(BackwardMode),
}

impl Way {
    fn kernels(self) -> Kernels {
        match self {
            Way::Simple => Kernels::Simple,
            Way::Paged(size) => Kernels::Paged(size),
            Way::Forward(shape) => Kernels::Tuned(shape, BackwardMode::overwrite(DqOrder::Fixed)),
            // The forward's shape is not looked at.
            Way::Backward(how) => Kernels::Tuned(TileShape::Long, how),
        }
    }

    /// The pass of which the tables are.
    fn pass(self) -> Pass {
        if matches!(self, Way::Forward(_)) { Pass::Forward } else { Pass::Backward }
    }
}

impl<'g> Placed<'g> {
    fn new(
        gpu: &'g Gpu,
        case: &'g Case,
        inputs: &[GuardedTensor; 4],
        sink: &[f32],
        twin: &[GuardedTensor; 6],
    ) -> Result<Placed<'g>, KernelError> {
        let upload = |tensor: &GuardedTensor| Lying::new(gpu, tensor, case.before);
        let [q, k, v, dout] = inputs.each_ref().map(|tensor| Ok((upload(tensor)?, tensor.shape())));
        let [a, b, c, d, e, f] =
            case.results().map(|tensor| Ok::<_, KernelError>((upload(&tensor)?, tensor)));
        let real = case.real(0);
        let [mut out, mut lse] = [twin[0].clone(), twin[1].clone()];
        for row in (0..case.rows[0]).filter(|row| !real[*row]) {
            for head in 0..case.heads.q {
                out.lane_mut(row, head).fill(f32::NAN);
                lse.lane_mut(head, row).fill(f32::NAN);
            }
        }
        Ok(Placed {
            gpu,
            case,
            inputs: [q?, k?, v?, dout?],
            sink: (!sink.is_empty()).then(|| gpu.upload_elements(sink, Format::F32)).transpose()?,
            results: [a?, b?, c?, d?, e?, f?],
            saved: [upload(&out)?, upload(&lse)?],
        })
    }

    fn launch(&self, way: Way) -> Result<(), KernelError> {
        let Placed { gpu, case, results: [out, lse, max_logit, dq, dk, dv], .. } = self;
        let inputs = self.inputs.each_ref();
        let [q, k, v, dout] = inputs.map(|(tensor, shape)| tensor.rows(*shape, case.format));
        let (q, k, v, dout) = (q?, k?, v?, dout?);
        let statistic = [case.heads.q, case.rows[0]];
        let forward = ForwardTensors {
            q,
            k,
            v,
            sink: self.sink.as_ref().map(|sink| View::heads(sink.area(), case.heads.q, Format::F32)),
            out: View::rows(out.0.area()?, out.1.shape(), case.out),
            lse: View::statistic(lse.0.area()?, statistic, Format::F32),
            max_logit: View::heads(max_logit.0.area()?, case.heads.q, Format::F32),
        };
        let [saved_out, saved_lse] = &self.saved;
        let backward = BackwardTensors {
            q,
            k,
            v,
            dout,
            out: View::rows(saved_out.area()?, out.1.shape(), case.out),
            lse: View::statistic(saved_lse.area()?, statistic, Format::F32),
            dq: View::rows(dq.0.area()?, dq.1.shape(), case.format),
            dk: View::rows(dk.0.area()?, dk.1.shape(), case.format),
            dv: View::rows(dv.0.area()?, dv.1.shape(), case.format),
        };
        let weights = WeightFormats { p: case.format, ds: case.format };
        let sizes = (case.rows, [case.heads.q, case.heads.kv], case.dims);
        let launches = Launches::new(gpu, &case.call, sizes, (way.kernels(), weights, way.pass()))?;
        match way {
            Way::Simple | Way::Paged(_) => launches.launch(gpu, (&forward, &backward)),
            Way::Forward(_) => launches.forward(gpu, &forward),
            Way::Backward(_) => launches.backward(gpu, &backward),
        }
    }

    /// Returns the first result of a launch that is not as the CPU's.
    fn wrong(&self, way: Way, twin: &[GuardedTensor; 6]) -> Result<Option<String>, KernelError> {
        for (buffer, tensor) in &self.results {
            self.gpu.write_elements(buffer.area()?, tensor.values(), tensor.format())?;
        }
        self.launch(way)?;
        let written = match way {
            Way::Simple | Way::Paged(_) => 0..6,
            Way::Forward(_) => 0..3,
            Way::Backward(_) => 3..6,
        };
        for (index, ((buffer, tensor), want)) in self.results.iter().zip(twin).enumerate() {
            let got = self.gpu.read_elements(buffer.area()?, tensor.format())?;
            let want = if written.contains(&index) { want } else { tensor };
            let near = (!matches!(way, Way::Simple | Way::Paged(_))).then(|| self.allowed(index, want));
            if let Some(what) = self.difference((index, &got), want, near) {
                return Ok(Some(what));
            }
        }
        Ok(None)
    }

    /// Returns how far real rows of a result may be off.
    fn allowed(&self, index: usize, want: &GuardedTensor) -> f32 {
        let real = self.case.real(usize::from(index > 3));
        let row = want.shape()[1] * want.shape()[2];
        let rows = want.values().chunks_exact(row.max(1)).zip(real).filter(|(_, real)| *real);
        let largest = rows.flat_map(|(row, _)| row).fold(0.0_f32, |largest, value| largest.max(value.abs()));
        match index {
            0 => OUT,
            1 | 2 => STATISTIC,
            _ => GRADIENT * largest + CANCELLED,
        }
    }

    /// Returns where a result differs. Real rows may differ by `near`, where there is one.
    fn difference(
        &self,
        (index, got): (usize, &[f32]),
        want: &GuardedTensor,
        near: Option<f32>,
    ) -> Option<String> {
        let real = self.case.real(usize::from(index > 3));
        let ([_, heads, dim], rows) = (want.shape(), self.case.rows[0]);
        let is_real = |at: usize| match index {
            1 => real[at % rows],
            2 => true,
            _ => real[at / (heads * dim)],
        };
        let as_it_must_be = |(at, (got, want)): (usize, (&f32, &f32))| {
            got.to_bits() == want.to_bits()
                || near.is_some_and(|near| is_real(at) && (got - want).abs() <= near)
        };
        let wrong = |item: &(usize, (&f32, &f32))| !as_it_must_be(*item);
        let (at, (got, want_value)) = got.iter().zip(want.values()).enumerate().find(wrong)?;
        Some(format!("{} at {at} of {:?}: {got}, must be {want_value}", want.name(), want.shape()))
    }
}

/// Checks calls from a seed in every way. Returns the first way of each call that is wrong, and stops after `enough`
/// such calls.
pub fn check_calls(gpu: &Gpu, calls: u64, seed: u64, enough: usize) -> Result<Vec<Mismatch>, KernelError> {
    let mut found = Vec::new();
    for case in 0..calls {
        let mut draw = CaseDraw::new(seed, case);
        let drawn = Case::draw(&mut draw);
        let (inputs, sink) = (drawn.inputs(&mut draw), drawn.sinks(&mut draw));
        let twin = drawn.twin(&inputs, &sink);
        let placed = Placed::new(gpu, &drawn, &inputs, &sink, &twin)?;
        let ways = [Way::Simple].into_iter().chain(drawn.page.map(Way::Paged));
        let ways = ways.chain(TileShape::ALL.map(Way::Forward)).chain(modes().map(Way::Backward));
        for way in ways {
            if let Some(place) = placed.wrong(way, &twin)? {
                let Case { call, dims, heads, format, .. } = &drawn;
                let what = format!("{way:?}, {format}, head dims {dims:?}, {heads:?}, {call:?}");
                found.push(Mismatch { operation: "a call", case, place, what, bytes: 1 });
                break;
            }
        }
        if found.len() >= enough {
            break;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_kernels::attend::CallTables;

    impl Case {
        /// Whether no prefix shows a key that a band does not.
        fn is_of_bands(&self) -> bool {
            !self.call.segments.iter().any(Segment::is_widened)
        }

        fn has_sink_tokens(&self) -> bool {
            self.call.segments.iter().any(|segment| segment.sink_tokens > 0)
        }
    }

    /// Drawn calls are of kinds that no schedule makes, and the CPU takes them.
    #[test]
    fn drawn_calls_have_several_runs_steps_and_bounds() {
        let cases: Vec<Case> = (0..400).map(|case| Case::draw(&mut CaseDraw::new(1, case))).collect();
        let count = |what: &dyn Fn(&Case) -> bool| cases.iter().filter(|case| what(case)).count();
        let segment = |what: fn(&Segment) -> bool| count(&|case: &Case| case.call.segments.iter().any(what));
        assert!(segment(|segment| segment.kv.len() > 1 && segment.hi.is_some()) > 100);
        assert!(segment(|segment| segment.q.step > 1) > 100);
        // Calls of the general instance.
        assert!(count(&|case: &Case| case.call.softmax.softcap.is_some()) > 40);
        assert!(count(&|case: &Case| case.dims.iter().any(|dim| dim % 8 > 0)) > 40);
        assert!(count(&|case: &Case| case.before > 0) > 40);
        assert!(segment(|segment| segment.q.len > 256) > 50);
        assert!(segment(|segment| segment.lo.is_some() && segment.hi.is_none()) > 20);
        assert!(segment(|segment| segment.q.len <= 20 && segment.keys() > 1024) > 20);
        assert!(count(&|case: &Case| case.is_of_bands()) > 100);
        assert!(segment(|segment| segment.is_widened() && segment.bands().len() == 2) > 60);
        assert!(count(&|case: &Case| case.page.is_some() && !case.is_of_bands()) > 20);
        let gaps = |segment: &Segment| {
            (0..segment.q.len).map(|i| segment.visible(i).gap().len()).collect::<Vec<usize>>()
        };
        let with_gap = |within: std::ops::Range<usize>| {
            let has_gap = |segment: &Segment| gaps(segment).iter().any(|gap| within.contains(gap));
            count(&|case: &Case| case.call.segments.iter().any(has_gap))
        };
        // Sink tokens and a window in one tile, and with whole tiles between them.
        let [near, far] = [1..KEY_TILE / 2, 2 * KEY_TILE..usize::MAX].map(with_gap);
        assert!(near > 10 && far > 10, "{near} calls with near sink tokens, {far} with far ones");
        assert!(count(&|case: &Case| case.has_sink_tokens() && case.page.is_some()) > 10);
        assert!(count(&|case: &Case| case.has_sink_tokens() && !case.is_of_bands()) > 10);
        let goes_around = |case: &Case| {
            let tables = CallTables::new(&case.call, case.rows, true).expect("no key twice");
            case.heads.q == case.heads.kv && tables.summary().all_seen && tables.summary().keys > 3 * 128
        };
        assert!(cases.iter().filter(|case| goes_around(case)).count() > 20);
        assert!(count(&|case: &Case| case.page.is_some_and(|size| size > 1)) > 40);
        for case in &cases {
            case.call.check(case.rows[0], case.rows[1]).expect("a legal call");
            let tables = CallTables::new(&case.call, case.rows, true).expect("no key twice");
            if let Some(size) = case.page {
                tables.in_pages(&case.call, size).expect("keys in pages");
            }
        }
    }
}
