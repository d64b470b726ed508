//! Attention on tensor cores in few blocks, compared with the same launch in as many as the GPU has.
//!
//! Blocks stay for a whole launch. In few of them each takes many tiles, one after the other, and planners have several
//! segments each. No bit may depend on that, but those of dq that is summed as it comes, and those of gradients where
//! tiles of keys may go around (`backward.cu`): tiles do so where there are as many blocks at least, and then begin their
//! sums with other rows.

use std::num::NonZeroUsize;

use seamproof_kernels::backward::{BackwardMode, DqOrder};
use seamproof_kernels::forward_fp8::Fp8Shape;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{Format, Heads, Mask};
use seamproof_simulator::AttentionCall;

use super::mismatch::Mismatch;
use super::passes::{
    DIMS, FORMATS, FP8_DIMS, FP8_DOUT, Kernels, NamedBytes, ReadyCodes, ReadyPasses, SPLIT, few_rows, padded,
    shapes,
};
use crate::ready::NormalNumbers;

/// The numbers of blocks that are compared with all.
const FEW: [usize; 4] = [1, 2, 3, 7];
/// The lengths, repeated until there are more segments than 32 threads plan at once: tiles cut short, whole ones, and
/// several in every shape.
const LENGTHS: [usize; 5] = [300, 1, 64, 450, 130];
const TIMES: usize = 8;
/// The query and KV heads: four query heads to a KV head, which share tiles, and one.
const HEADS: [Heads; 2] = [Heads { q: 4, kv: 1 }, Heads { q: 3, kv: 3 }];
/// The masks, each with whether tiles of keys may go around in it.
const MASKS: [(Mask, bool); 3] =
    [(Mask::CAUSAL, false), (Mask { left: Some(100), ..Mask::CAUSAL }, false), (Mask::FULL, true)];

/// Returns the results that differ in few blocks: of every shape, in both orders of dq, and of passes in
/// FP8. It stops after `enough` of them.
pub fn check_few_blocks(gpu: &Gpu, enough: usize) -> Result<Vec<Mismatch>, KernelError> {
    let mut found = Vec::new();
    for format in FORMATS {
        let numbers = NormalNumbers::of(gpu, format)?;
        for (dim, heads) in DIMS.into_iter().flat_map(|dim| HEADS.map(|heads| (dim, heads))) {
            let few = few_rows((format, dim, heads))?;
            let passes = ReadyPasses::new(gpu, (&few, &AttentionCall::whole(&few)), SPLIT, &numbers)?;
            let launch = |blocks| passes.results(|| gpu.in_blocks(blocks, || passes.launch()));
            found.extend(differing(launch, &[], &format!("{format}, head dim {dim}, {heads:?}, few rows"))?);
            for (mask, may_go_around) in MASKS {
                let problem = padded(&LENGTHS.repeat(TIMES), (format, dim, heads), mask)?;
                for &shape in shapes(dim) {
                    for order in DqOrder::ALL {
                        let what =
                            format!("{format}, head dim {dim}, {heads:?}, {mask:?}, {shape:?}, {order:?}");
                        let kernels = Kernels::Tuned(shape, BackwardMode::overwrite(order));
                        let call = AttentionCall::whole(&problem);
                        let passes = ReadyPasses::new(gpu, (&problem, &call), kernels, &numbers)?;
                        let launch = |blocks| passes.results(|| gpu.in_blocks(blocks, || passes.launch()));
                        found.extend(differing(launch, may_differ(may_go_around, order), &what)?);
                        if found.len() >= enough {
                            return Ok(found);
                        }
                    }
                }
            }
        }
    }
    found.extend(few_blocks_on_codes(gpu)?);
    Ok(found)
}

/// Returns the results of passes in FP8 that differ in few blocks.
fn few_blocks_on_codes(gpu: &Gpu) -> Result<Vec<Mismatch>, KernelError> {
    let mut found = Vec::new();
    let numbers = NormalNumbers::of(gpu, Format::E4m3)?;
    for dout in FP8_DOUT {
        let of_dout = NormalNumbers::of(gpu, dout)?;
        for (dim, heads) in FP8_DIMS.into_iter().flat_map(|dim| HEADS.map(|heads| (dim, heads))) {
            for (mask, may_go_around) in MASKS {
                let problem = padded(&LENGTHS.repeat(TIMES), (Format::Bf16, dim, heads), mask)?;
                let passes = ReadyCodes::new(gpu, &problem, [&numbers, &of_dout])?;
                for (shape, order) in Fp8Shape::ALL.into_iter().zip(DqOrder::ALL) {
                    let what = format!(
                        "e4m3, dout in {dout}, head dim {dim}, {heads:?}, {mask:?}, {shape:?}, {order:?}"
                    );
                    let how = BackwardMode::overwrite(order);
                    let launch = |blocks| gpu.in_blocks(blocks, || passes.results(shape, how));
                    found.extend(differing(launch, may_differ(may_go_around, order), &what)?);
                }
            }
        }
    }
    Ok(found)
}

/// Returns the results that may differ in few blocks.
fn may_differ(may_go_around: bool, order: DqOrder) -> &'static [&'static str] {
    match order {
        _ if may_go_around => &["dq", "dk", "dv"],
        DqOrder::AsTheyCome => &["dq"],
        DqOrder::Fixed => &[],
    }
}

/// Returns the results of passes that differ in few blocks, apart from those that may. `launch` runs them in so many
/// blocks at most.
fn differing(
    launch: impl Fn(Option<NonZeroUsize>) -> Result<Vec<NamedBytes>, KernelError>,
    may_differ: &[&str],
    what: &str,
) -> Result<Vec<Mismatch>, KernelError> {
    let all = launch(None)?;
    let mut found = Vec::new();
    for blocks in FEW {
        let few = launch(NonZeroUsize::new(blocks))?;
        let compared = all.iter().zip(&few).filter(|((name, _), _)| !may_differ.contains(name));
        for ((name, all), (_, few)) in compared {
            let bytes = all.iter().zip(few).filter(|(all, few)| all != few).count();
            found.extend((bytes > 0).then(|| Mismatch {
                operation: "attention, few blocks",
                case: blocks as u64,
                place: format!("{name} in {blocks} blocks"),
                what: what.to_owned(),
                bytes,
            }));
        }
    }
    Ok(found)
}
