//! The envelope holds on a FlashAttention-3-style forward with every approximate instruction of a Hopper GPU.
//!
//! The subject is the emulated kernel on [`Units::Hopper`]: truncating `wgmma`, `ex2.approx` wrong by up to 2 ulp,
//! the scale folded into its argument, row sums of unrounded weights kept by four threads. Here it takes its tiles of
//! 128 keys from the last to the first, divides by `rcp.approx` (1 ulp) and takes the logarithm by `lg2.approx`
//! (2^-22, absolute in (0.5, 2) and relative elsewhere): <https://docs.nvidia.com/cuda/parallel-thread-execution/>. A
//! subject of that kind declares only [`Accumulation::WgmmaTruncating`] and a partition of its tiles.

use std::f32::consts::LN_2;
use std::ops::Range;

use seamproof_judge::values;
use seamproof_oracle::blocked::{self, Answer};
use seamproof_oracle::envelope::{Accumulation, Arithmetic, Model, Partition};
use seamproof_oracle::{
    Alignment, Format, ForwardResults, InputMode, Mask, Pass, Precision, Problem, ProblemFields, Softmax,
    TensorName,
};
use seamproof_simulator::Segment;
use seamproof_simulator::device::{Cpu, Device};
use seamproof_simulator::emulated::{Finished, Right, Roundings, Stages, Tiles, UnitArithmetic, Units};
use seamproof_simulator::executor::{ExecutedPasses, execute, load, output};
use seamproof_simulator::schedule::build;

/// Tiles of a real kernel.
const TILES: Tiles = Tiles { q: 128, kv: 128 };

/// Stages from the last tile to the first, with approximate instructions at the end.
#[derive(Clone, Copy, Debug)]
struct Descending;

/// Stages from the first tile to the last, with approximate instructions at the end.
#[derive(Clone, Copy, Debug)]
struct Ascending;

/// Whether a bit that looks random is set.
fn is_odd(x: f32) -> bool {
    x.to_bits().wrapping_mul(0x9e37_79b9) >> 31 == 1
}

/// Returns `1 / x` as `rcp.approx.ftz.f32` may: off by one ulp in either direction.
fn reciprocal(x: f32) -> f32 {
    let nearest = 1.0 / x;
    let ulp = if is_odd(x) { 1 } else { -1 };
    f32::from_bits(nearest.to_bits().wrapping_add_signed(ulp))
}

/// Returns the logarithm as `lg2.approx.ftz.f32` may: as wrong as it may be, in either direction.
fn log2(x: f32) -> f32 {
    let exact = libm::log2(f64::from(x));
    let size = if (0.5..2.0).contains(&x) { 1.0 } else { exact.abs() };
    let error = size / f64::from(1u32 << 22);
    (if is_odd(x) { exact + error } else { exact - error }) as f32
}

fn out(tile: &[Finished<f32>], local: usize, format: Format, to: &mut [f32]) {
    let Finished { sum, acc, .. } = &tile[local];
    let inverse = if *sum == 0.0 { 0.0 } else { reciprocal(*sum) };
    to.iter_mut().zip(acc).for_each(|(to, acc)| *to = format.round_f32(acc * inverse));
}

fn lse(tile: &[Finished<f32>], local: usize) -> f32 {
    let Finished { max, sum, .. } = &tile[local];
    if *sum == 0.0 { f32::NEG_INFINITY } else { max + log2(*sum) * LN_2 }
}

impl<A: UnitArithmetic<f32>> Stages<f32, A> for Descending {
    fn tiles(
        &self,
        pass: Pass,
        segment: &Segment,
        rows: &Range<usize>,
        keys: usize,
        size: usize,
    ) -> Vec<Range<usize>> {
        let mut tiles = Stages::<f32, A>::tiles(&Right, pass, segment, rows, keys, size);
        tiles.reverse();
        tiles
    }

    fn out(&self, tile: &[Finished<f32>], local: usize, format: Format, to: &mut [f32]) {
        out(tile, local, format, to);
    }

    fn lse(&self, tile: &[Finished<f32>], local: usize) -> f32 {
        lse(tile, local)
    }
}

impl<A: UnitArithmetic<f32>> Stages<f32, A> for Ascending {
    fn out(&self, tile: &[Finished<f32>], local: usize, format: Format, to: &mut [f32]) {
        out(tile, local, format, to);
    }

    fn lse(&self, tile: &[Finished<f32>], local: usize) -> f32 {
        lse(tile, local)
    }
}

/// Returns one sequence of 24 queries at the end of 300 keys.
fn problem(mode: InputMode, format: Format, mask: Mask, dim: usize, scale: f32) -> Problem {
    Problem::new(ProblemFields {
        mask,
        softmax: Softmax::scaled(scale),
        precision: Precision::uniform(format),
        mode,
        data_seed: dim as u64,
        pass: Pass::Forward,
        ..ProblemFields::packed(&[(24, 300)], dim)
    })
    .expect("the fields are legal")
}

/// Returns out and lse of the kernel.
fn run(problem: &Problem, device: &Cpu<f32>) -> [Vec<f32>; 2] {
    let schedule = build(problem).expect("one rank");
    let inputs = values::inputs(problem);
    let mut memory = device.upload(load(&schedule, problem, &inputs, f32::NAN)).expect("it fits");
    execute(&schedule, ExecutedPasses::Forward, device, &mut memory, &mut |_| 0).expect("it runs");
    [TensorName::Out, TensorName::Lse].map(|tensor| {
        let id = output(&schedule, 0, tensor).expect("a result");
        memory.tensor(id).values().to_vec()
    })
}

/// Returns the largest error ÷ bound; 0 where a bound says nothing.
fn largest<'a>(
    got: &[f32],
    exact: impl IntoIterator<Item = &'a f64>,
    bound: impl IntoIterator<Item = &'a f64>,
) -> f64 {
    let both = exact.into_iter().zip(bound);
    let ratio = |(got, (exact, bound)): (&f32, (&f64, &f64))| match f64::from(*got) == *exact {
        true => 0.0,
        false => (f64::from(*got) - exact).abs() / bound,
    };
    got.iter()
        .zip(both)
        .map(ratio)
        .fold(0.0, |most, ratio| if ratio > most || ratio.is_nan() { ratio } else { most })
}

/// Returns error ÷ bound of out and lse, in tiers W and T.
fn ratios(problem: &Problem, device: &Cpu<f32>) -> [f64; 4] {
    let arithmetic = Arithmetic::flash_attention(Accumulation::WgmmaTruncating);
    let model = Model::new(problem, arithmetic, Partition::single(TILES.q, TILES.kv));
    let [out, lse] = run(problem, device);
    let Answer { exact, bound } = blocked::forward(problem, &values::inputs(problem), Some(&model));
    let bound = bound.expect("a model gives bounds");
    let of =
        |tier: &ForwardResults| [largest(&out, &exact.out, &tier.out), largest(&lse, &exact.lse, &tier.lse)];
    let ([out, lse], [out_t, lse_t]) = (of(&bound.worst), of(&bound.dithered));
    [out, lse, out_t, lse_t]
}

#[test]
fn approximate_instructions_stay_within_the_bounds_in_either_order() {
    let masks = [
        Mask::FULL,
        Mask { right: Some(0), align: Alignment::BottomRight, ..Mask::FULL },
        Mask { left: Some(140), right: Some(0), align: Alignment::BottomRight, ..Mask::FULL },
    ];
    let mut worst = [0.0f64; 4];
    for format in [Format::Bf16, Format::Fp16] {
        let roundings = Roundings::new(format, format);
        let devices = [
            Cpu::with(Units::Hopper(0).variant(TILES, roundings, &Descending)),
            Cpu::with(Units::Hopper(0).variant(TILES, roundings, &Ascending)),
        ];
        for mode in InputMode::ALL {
            for (index, mask) in masks.into_iter().enumerate() {
                // The scales give logits up to some thousands, whose exponents are rounded where numbers are far
                // apart.
                for (dim, scale) in [(64, 0.125), (40, 0.3), (128, 8.0), (256, 64.0)] {
                    let problem = problem(mode, format, mask, dim, scale);
                    let got = ratios(&problem, &devices[(index + dim / 8) % 2]);
                    for (worst, ratio) in worst.iter_mut().zip(got) {
                        assert!(ratio <= 1.0, "{mode:?} {format} {mask:?} {dim} {scale}: {got:?}");
                        *worst = worst.max(ratio);
                    }
                }
            }
        }
    }
    // The bounds are not so wide that they say nothing.
    assert!(worst[0] > 0.5 && worst[1] > 0.05 && worst[2] > 0.3 && worst[3] > 0.05, "{worst:?}");
}
