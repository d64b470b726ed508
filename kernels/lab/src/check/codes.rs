//! Kernels on codes of e4m3, against what is known of their results.
//!
//! A turned copy has each code at the position that its definition names. Weights at *far* levels are those of keys with
//! the largest score alone: scores are sums of 14 bits, so that any other score is further away than weights reach.
//! Whatever rounding does to such a level, the largest weight is to be the code 256.

use seamproof_kernels::device::Workspace;
use seamproof_kernels::forward_fp8::Fp8Shape;
use seamproof_kernels::turned::TurnedShape;
use seamproof_kernels::view::View;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{Format, Run, Sink, Softmax};
use seamproof_simulator::emulated::ForwardLaunch;
use seamproof_simulator::schedule::Descales;
use seamproof_simulator::{AttentionCall, GuardedTensor, RowPolicy, Segment};

use super::mismatch::Mismatch;

/// The shapes of tensors that are turned: rows, heads and lanes.
const SHAPES: [[usize; 3]; 8] = [
    [1, 1, 16],
    [15, 2, 48],
    [16, 3, 64],
    [127, 2, 128],
    [128, 1, 128],
    [300, 5, 112],
    [300, 2, 256],
    [4099, 2, 32],
];
/// The lanes of heads, and the keys of two blocks.
const DIMS: [usize; 3] = [64, 128, 256];
const KEYS: usize = 256;
/// The keys with the largest score: in blocks of their own, or beside each other.
const TIES: [[usize; 2]; 2] = [[3, 200], [254, 255]];
/// The product of two codes, and the powers of two of levels.
const SCORE: f32 = 64.0 * 448.0;
const EXPONENTS: std::ops::Range<i32> = 10..40;
/// The share that the LSE and the largest logit may be off by: they are made in f32, in a few operations.
const STATISTIC: f32 = 1.0 / 4_194_304.0;
/// The share that out may be off by: that of a row sum whose largest weight is not exactly the code.
const OUT: f32 = 1.0 / 2048.0;

fn mismatch(operation: &'static str, place: String, what: String) -> Mismatch {
    Mismatch { operation, case: 0, place, what, bytes: 1 }
}

/// Turns tensors of all shapes. Returns the first wrong code of each.
pub fn check_turned(gpu: &Gpu) -> Result<Vec<Mismatch>, KernelError> {
    let mut found = Vec::new();
    for shape in SHAPES {
        found.extend(wrong_turned(gpu, shape)?);
    }
    Ok(found)
}

fn wrong_turned(gpu: &Gpu, [rows, heads, dim]: [usize; 3]) -> Result<Option<Mismatch>, KernelError> {
    let shape = TurnedShape::of([rows, heads, dim]);
    // No two of the 251 codes that follow each other are alike, in rows, heads or lanes.
    let codes: Vec<u8> = (0..rows * heads * dim).map(|place| (place % 251) as u8 + 1).collect();
    let (from, to) = (gpu.upload(&codes)?, gpu.upload(&vec![0xff; shape.bytes()])?);
    gpu.turn(&View::rows(from.area(), [rows, heads, dim], Format::E4m3), to.area())?;
    let got = gpu.read(to.area())?;
    let mut wanted = vec![0; shape.bytes()];
    for (place, code) in codes.into_iter().enumerate() {
        let (row, head, lane) = (place / (heads * dim), place / dim % heads, place % dim);
        wanted[(head * dim + lane) * shape.positions + TurnedShape::position_of(row)] = code;
    }
    let first = got.iter().zip(&wanted).position(|(got, wanted)| got != wanted);
    Ok(first.map(|at| {
        let place = format!("byte {at}: {}, must be {}", got[at], wanted[at]);
        mismatch("turned copy", place, format!("{rows} rows, {heads} heads of {dim}"))
    }))
}

/// Checks weights at far levels in every shape. Returns the first that is wrong of each.
pub(super) fn check_far_codes(gpu: &Gpu) -> Result<Vec<Mismatch>, KernelError> {
    let (workspace, mut found) = (Workspace::new(gpu.beside()?), Vec::new());
    for shape in Fp8Shape::ALL {
        for dim in DIMS {
            for ties in TIES {
                for sign in [1.0, -1.0] {
                    let of_exponent = |exponent| wrong_far(&workspace, shape, dim, ties, (sign, exponent));
                    let first = EXPONENTS.map(of_exponent).find(|wrong| !matches!(wrong, Ok(None)));
                    found.extend(first.transpose()?.flatten());
                }
            }
        }
    }
    Ok(found)
}

/// Returns what is wrong with a query of which two keys have the largest score, whose level is about 2 to a power.
fn wrong_far(
    workspace: &Workspace,
    shape: Fp8Shape,
    dim: usize,
    ties: [usize; 2],
    (sign, exponent): (f32, i32),
) -> Result<Option<Mismatch>, KernelError> {
    let mut q = GuardedTensor::unwritten("q", [1, 1, dim], Format::E4m3);
    q.values_mut().fill(0.0);
    q.values_mut()[0] = 64.0;
    let [mut k, mut v] = ["k", "v"].map(|name| GuardedTensor::unwritten(name, [KEYS, 1, dim], Format::E4m3));
    let (top, other) = if sign > 0.0 { (448.0, 1.0) } else { (-416.0, -448.0) };
    for key in 0..KEYS {
        let (is_top, place) = (ties.contains(&key), key * dim);
        k.values_mut()[place..place + dim].fill(0.0);
        k.values_mut()[place] = if is_top { top } else { other };
        v.values_mut()[place..place + dim].fill(if is_top { 1.0 } else { 96.0 });
    }
    v.values_mut()[ties[0] * dim] = 3.0;
    let scale = 1.1 * 2.0_f32.powi(exponent) / SCORE;
    let rows = |len| Run::packed(0, len, len);
    let segment = Segment { q: rows(1), kv: vec![rows(KEYS)], lo: None, hi: None, prefix: 0, sink_tokens: 0 };
    let softmax = Softmax { scale, softcap: None, sink: Sink::None };
    let call = AttentionCall { segments: vec![segment], softmax, policy: RowPolicy::Overwrite };
    let [mut lse, mut max_logit] =
        ["lse", "max_logit"].map(|name| GuardedTensor::unwritten(name, [1, 1, 1], Format::F32));
    max_logit.values_mut().fill(f32::NEG_INFINITY);
    let descales = [vec![Descales { q: 1.0, k: 1.0, v: 1.0, dout: 1.0 }]];
    let mut out = GuardedTensor::unwritten("out", [1, 1, dim], Format::F32);
    let launch = ForwardLaunch {
        q: &q,
        k: &k,
        v: &v,
        sink: &[],
        descales: &descales,
        out: &mut out,
        lse: &mut lse,
        max_logit: &mut max_logit,
    };
    workspace.attend_fp8(&call, Some(shape), launch)?;
    let logit = 64.0 * top * scale;
    let near = |got: f32, wanted: f32, share: f32| (got - wanted).abs() <= share * wanted.abs();
    let right = near(out.values()[0], 2.0, OUT)
        && out.values()[1..].iter().all(|value| near(*value, 1.0, OUT))
        && near(lse.values()[0], logit + std::f32::consts::LN_2, STATISTIC)
        && near(max_logit.values()[0], logit, STATISTIC);
    let what = format!("{shape:?}, head dim {dim}, keys {ties:?}, logit {logit:e}");
    let got = [out.values()[0], out.values()[1], lse.values()[0], max_logit.values()[0]];
    Ok((!right).then(|| mismatch("weights at far levels", format!("{got:?}"), what)))
}
