//! The emulated kernel in FP8: codes in e4m3 with descales, and sums of Hopper's tensor core in FP8.
//!
//! q·k is a sum of codes, and the scale of the softmax takes both descales of the sequence and head as factors. Weights
//! are multiplied by a power of two and rounded to e4m3; the row's sum is that of unrounded weights. The product with
//! the codes of v takes v's descale at the end, before it is rounded to bf16. This is FlashAttention-3's forward, with
//! or without the promotion of partial sums to f32. It may have a [backward](super::fp8_backward). Both run in
//! [the schedules](super::fp8_schedule) of the kernel in bf16. The kernel may have
//! [cuDNN's sequence](super::fp8_given) in place of this one.
//!
//! A [`Fp8Fault`] is an edit of the kernel's [`Recipe`]. What the kernel declares stays as it is.
//!
//! Sources: `mainloop_fwd_sm90_tma_gmma_ws.hpp` and `softmax.h` of <https://github.com/Dao-AILab/flash-attention>, and
//! <https://github.com/vllm-project/flash-attention/pull/104> for the promotion.

use std::num::NonZeroUsize;

use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::envelope::{self, Accumulation, DsFold, DsScale, Partition};
use seamproof_oracle::replay::{ReplayedLaunch, ReplayedTiles};
use seamproof_oracle::{
    Element, Form, Format, Inputs, OwnScales, Pass, Precision, Problem, Scales, Scaling, TensorName,
};
use seamproof_simulator::emulated::{Factors, Right, TensorCore, Tiles, Variant};
use seamproof_simulator::faults::{Catcher, Fault, FaultRecord, codes};
pub use seamproof_simulator::schedule::Descales;
use seamproof_simulator::schedule::{BuildError, MergeOrder, Schedule};

use super::fp8_backward::{BackwardRecipe, FP8_BACKWARD_FAULTS};
use super::fp8_given::{self, FP8_GIVEN_BACKWARD_FAULTS, FP8_GIVEN_FAULTS, Fp8Sequence, Kept};
use super::fp8_schedule::{of_own_rows, of_the_all_to_all, of_the_group};
use super::options::{OptionError, Options};
use super::{built, same_bits};
use crate::hash::mix;
use crate::profile::{self, Lock};
use crate::subject::{
    Backend, Declaration, HeadDims, Outputs, PaddingContract, PaddingInputs, PaddingOutputs, Parallelism,
    Partials, Promises, RunError, START_SECONDS, Sizes, Table,
};
use crate::values::{self, Poison};

/// The largest head dimension. Kernels in FP8 have no larger one.
const DIM_MAX: usize = 256;

/// The emulated kernel in FP8 with its options.
#[derive(Clone, Copy, Debug)]
pub struct Fp8 {
    /// Tile sizes of the kernel.
    pub tiles: Tiles,
    /// Power of two with which weights are multiplied, as exponent.
    pub weight_exponent: u8,
    /// Number of steps of the tensor core after which its sum is promoted to f32; `None` for never.
    pub promoted_after: Option<NonZeroUsize>,
    /// Order of the schedule, one of [`MergeOrder::WEIGHTED`]. The bounds of a merge by a difference
    /// take partial outs to be in the hull of the values, which a rounding that doubles a weight may leave.
    pub merge: MergeOrder,
    /// Seed of the order in which ranks and streams proceed. No order may change a bit.
    pub order: u64,
    /// Whether the backward is taken.
    pub backward: bool,
    /// The sequence of operations.
    pub sequence: Fp8Sequence,
    /// A planted fault.
    pub fault: Option<PlantedFp8>,
}

/// What the kernel does with the numbers around its sums.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// Tile sizes.
    pub tiles: Tiles,
    /// The scales that a rank of the world knows.
    pub known: fn(&Problem, &Inputs, usize) -> Scales,
    /// The descales of a sequence and query head.
    pub descales: fn(&Scales, Place) -> Descales,
    /// Power of two with which weights are multiplied, as exponent.
    pub weight_exponent: u8,
    /// Number of steps after which a sum is promoted.
    pub promoted_after: Option<NonZeroUsize>,
    /// The matrix unit.
    pub core: TensorCore,
    /// What is added to the LSE.
    pub lse_shift: f32,
    /// The factors of what the kernel quantises, from the descales that are given.
    pub factors: fn(&OwnScales) -> Factors,
    /// The amaxes that a rank returns.
    pub amax: fn(Kept<'_>) -> Amaxes,
    /// What is done to the schedule.
    pub schedule: fn(&mut Schedule),
    /// The kernel's stages, in both passes.
    pub stages: &'static dyn Variant,
    /// What differs in the backward.
    pub backward: BackwardRecipe,
}

/// A sequence and a query head, with the head of its keys.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The index of the sequence.
    pub sequence: usize,
    /// The query head.
    pub head: usize,
    /// The KV head.
    pub kv_head: usize,
    /// The same place as the launch counts it.
    pub local: LocalPlace,
}

/// A segment and a query head of a launch, with the head of its keys, each counted from the launch's first.
#[derive(Clone, Copy, Debug)]
pub struct LocalPlace {
    /// The index of the segment.
    pub segment: usize,
    /// The query head.
    pub head: usize,
    /// The KV head.
    pub kv_head: usize,
}

/// A planted fault of the kernel in FP8: an edit of its recipe.
pub type Fp8Fault = Fault<fn(&mut Recipe)>;

/// Returns a fault that the envelope or an identity catches.
pub(super) const fn fault(
    id: &'static str,
    imitates: &'static str,
    source: &'static str,
    edit: fn(&mut Recipe),
) -> Fp8Fault {
    Fp8Fault { id, imitates, source, entries: &[], caught_by: &[Catcher::Envelope, Catcher::Identity], edit }
}

/// TransformerEngine's context parallelism.
const CONTEXT_PARALLEL: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py";

/// The faults of the kernel in FP8.
pub const FP8_FAULTS: &[Fp8Fault] = &[
    Fp8Fault {
        id: "k-descale-ignored",
        imitates: "the scale of k is not applied",
        source: "https://github.com/flashinfer-ai/flashinfer/issues/4984",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| recipe.descales = |scales, place| Descales { k: 1.0, ..descales(scales, place) },
    },
    Fp8Fault {
        id: "v-descale-ignored",
        imitates: "the scale of v is not applied",
        source: "https://github.com/flashinfer-ai/flashinfer/issues/4979",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| recipe.descales = |scales, place| Descales { v: 1.0, ..descales(scales, place) },
    },
    Fp8Fault {
        id: "q-descale-twice",
        imitates: "the scale of q is applied twice",
        source: "https://github.com/vllm-project/vllm/issues/53754",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| {
            recipe.descales = |scales, place| {
                let own = descales(scales, place);
                Descales { q: own.q * own.q, ..own }
            };
        },
    },
    Fp8Fault {
        id: "kv-descales-exchanged",
        imitates: "k is given the scale of v, and v that of k",
        source: "https://github.com/flashinfer-ai/flashinfer/issues/1023",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| {
            recipe.descales = |scales, place| {
                let own = descales(scales, place);
                Descales { k: own.v, v: own.k, ..own }
            };
        },
    },
    Fp8Fault {
        id: "descale-of-the-first-sequence",
        imitates: "every sequence of the batch is given the scales of the first",
        source: "https://github.com/vllm-project/vllm/issues/34863",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| {
            recipe.descales = |scales, place| descales(scales, Place { sequence: 0, ..place });
        },
    },
    Fp8Fault {
        id: "kv-descale-of-the-first-head",
        imitates: "every KV head is given the scale of the first",
        source: "https://github.com/vllm-project/vllm/issues/47037",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| recipe.descales = |scales, place| descales(scales, Place { kv_head: 0, ..place }),
    },
    Fp8Fault {
        id: "weights-not-multiplied",
        imitates: "weights are rounded to FP8 as they are, and small ones vanish",
        source: "https://github.com/flashinfer-ai/flashinfer/issues/5020",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| recipe.weight_exponent = 0,
    },
    Fp8Fault {
        id: "weight-factor-in-the-lse",
        imitates: "the LSE keeps the logarithm of the factor of the weights",
        source: "https://github.com/flashinfer-ai/flashinfer/issues/3372",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| recipe.lse_shift = f32::from(recipe.weight_exponent) * std::f32::consts::LN_2,
    },
    Fp8Fault {
        id: "sums-not-promoted",
        imitates: "sums stay in the tensor core's 14 bits over all keys",
        source: "https://github.com/vllm-project/vllm/issues/23813",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| recipe.promoted_after = None,
    },
    Fp8Fault {
        id: "weights-cut-off",
        imitates: "weights are cut to e4m3 towards zero",
        source: "https://github.com/NVlabs/cutile-rs/issues/250",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| recipe.stages = codes::WEIGHTS_CUT_OFF,
    },
    Fp8Fault {
        id: "weights-rounded-twice",
        imitates: "weights are rounded to fp16 first, and then to e4m3",
        source: "https://github.com/triton-lang/triton/pull/11753",
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |recipe| recipe.stages = codes::WEIGHTS_ROUNDED_TWICE,
    },
    Fp8Fault {
        id: "stale-maximum",
        imitates: "a stale maximum leaves weights past 1: multiplied, they saturate, and the row's sum does not",
        source: "https://github.com/Dao-AILab/flash-attention/issues/2716",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        // A maximum grows from tile to tile, and rows of few keys have few of these.
        edit: |recipe| (recipe.stages, recipe.tiles.kv) = (codes::STALE_MAXIMUM, 8),
    },
    Fp8Fault {
        id: "finite-least-maximum",
        imitates: "a finite number stands for minus infinity, and rows of lower scores vanish",
        source: "https://github.com/NVIDIA/cudnn-frontend/issues/745",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| recipe.stages = codes::FINITE_LEAST_MAXIMUM,
    },
    fault(
        "scores-overwritten-above-128",
        "with head dims above 128 the first weights are stored over scores of the last quarter, still unread",
        "https://github.com/NVIDIA/cudnn-frontend/pull/985",
        |recipe| recipe.stages = codes::SCORES_OVERWRITTEN,
    ),
    Fp8Fault {
        id: "row-sum-of-rounded-weights",
        imitates: "the row's sum is that of rounded weights",
        source: "https://github.com/NVIDIA/cudnn-frontend/pull/1059",
        entries: &[],
        caught_by: &[Catcher::Envelope],
        edit: |recipe| recipe.stages = codes::ROW_SUM_OF_ROUNDED_WEIGHTS,
    },
    Fp8Fault {
        id: "kv-descale-of-own-rows",
        imitates: "keys and values of other ranks are decoded with scales of the amax of the receiver's own rows",
        source: "https://github.com/pytorch/torchtitan/issues/3109",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| recipe.known = of_own_rows,
    },
    Fp8Fault {
        id: "kv-descale-of-the-all-to-all",
        imitates: "in a hierarchy, keys and values are decoded with scales of the amax of one all-to-all's rows",
        source: CONTEXT_PARALLEL,
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| recipe.known = of_the_all_to_all,
    },
    Fp8Fault {
        id: "descale-of-the-segment",
        imitates: "scales are counted by the launch's segments, which are parts of sequences once rows are dealt",
        source: "https://github.com/sgl-project/sglang/pull/37785",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| {
            recipe.descales = |scales, place| {
                descales(scales, Place { sequence: place.local.segment.min(last_sequence(scales)), ..place })
            };
        },
    },
    Fp8Fault {
        id: "descale-of-the-local-head",
        imitates: "a rank with a block of the heads takes their scales from the first head on",
        source: "https://github.com/sgl-project/sglang/pull/26436",
        entries: &[],
        caught_by: &[Catcher::Envelope, Catcher::Identity],
        edit: |recipe| {
            recipe.descales = |scales, place| {
                let LocalPlace { head, kv_head, .. } = place.local;
                descales(scales, Place { head, kv_head, ..place })
            };
        },
    },
];

/// A planted fault of either pass.
#[derive(Clone, Copy, Debug)]
pub enum PlantedFp8 {
    /// One of [`FP8_FAULTS`].
    Forward(&'static Fp8Fault),
    /// One of [`FP8_BACKWARD_FAULTS`].
    Backward(&'static Fp8Fault),
    /// One of [`FP8_GIVEN_FAULTS`], in cuDNN's sequence.
    Given(&'static Fp8Fault),
    /// One of [`FP8_GIVEN_BACKWARD_FAULTS`].
    GivenBackward(&'static Fp8Fault),
}

impl PlantedFp8 {
    /// Returns every fault.
    pub fn all() -> impl Iterator<Item = PlantedFp8> {
        let forward = FP8_FAULTS.iter().map(PlantedFp8::Forward);
        let both = forward.chain(FP8_BACKWARD_FAULTS.iter().map(PlantedFp8::Backward));
        let given = FP8_GIVEN_FAULTS.iter().map(PlantedFp8::Given);
        both.chain(given).chain(FP8_GIVEN_BACKWARD_FAULTS.iter().map(PlantedFp8::GivenBackward))
    }

    /// Returns the fault's description.
    pub fn record(&self) -> FaultRecord {
        self.fault().record()
    }

    fn fault(&self) -> &'static Fp8Fault {
        match self {
            PlantedFp8::Forward(fault)
            | PlantedFp8::Backward(fault)
            | PlantedFp8::Given(fault)
            | PlantedFp8::GivenBackward(fault) => fault,
        }
    }
}

/// Returns the fault of an id.
pub fn fp8_fault(id: &str) -> Option<PlantedFp8> {
    PlantedFp8::all().find(|fault| fault.record().id == id)
}

/// Returns the index of the last sequence that has scales of its own; 0 where all sequences share them.
pub(super) fn last_sequence(scales: &Scales) -> usize {
    scales.q.as_ref().map_or(0, |scales| scales.groups().shape()[0] - 1)
}

/// Returns the descales of a sequence and query head. Each scaling of the table has one for all rows.
pub(super) fn descales(scales: &Scales, Place { sequence, head, kv_head, .. }: Place) -> Descales {
    Descales::of(scales, sequence, head, kv_head)
}

/// Scalings that have one descale for all rows of a sequence and head.
const SCALINGS: [Scaling; 4] =
    [Scaling::PerSequenceGroup, Scaling::PerTensor, Scaling::PerHead, Scaling::PerSequenceHead];

/// Largest power of two, as exponent, with which weights fit e4m3.
const EXPONENT_MOST: u8 = 8;
/// Largest number of steps between promotions that an option may ask for.
const STEPS_MOST: usize = 1 << 12;
/// Number of orders of ranks and streams that a campaign draws from.
const ORDERS: u64 = 1_000;
/// Largest tile that an option may ask for.
const TILE_MOST: usize = 1 << 12;
/// Sequences of which a campaign draws one.
const SEQUENCES: [&str; 4] = ["flash-attention-3", "flash-attention-3", "flash-attention-3", "cudnn"];
/// Values of the option `pass`.
const FORWARD: &str = "forward";
const BOTH: &str = "both";

impl Default for Fp8 {
    fn default() -> Fp8 {
        Fp8 {
            tiles: Tiles { q: 4, kv: 64 },
            weight_exponent: EXPONENT_MOST,
            promoted_after: NonZeroUsize::new(4),
            merge: MergeOrder::Running,
            order: 0,
            backward: false,
            sequence: Fp8Sequence::default(),
            fault: None,
        }
    }
}

impl Fp8 {
    /// Name of the subject.
    pub const NAME: &str = "emulated-fp8";

    /// Returns options for one case of a campaign.
    pub fn draw_options(seed: u64) -> Options {
        let pick = |of: &[&str], number: u64| of[(mix(seed ^ number) % of.len() as u64) as usize].to_owned();
        Options::from([
            ("q_tile".into(), pick(&["1", "4", "16", "64"], 0)),
            ("kv_tile".into(), pick(&["5", "16", "64", "128"], 1)),
            ("promoted_after".into(), pick(&["never", "1", "4", "16"], 2)),
            ("weight_exponent".into(), pick(&["8", "8", "8", "4", "0"], 3)),
            ("merge".into(), pick(&MergeOrder::WEIGHTED.map(MergeOrder::name), 4)),
            ("order".into(), (mix(seed ^ 5) % ORDERS).to_string()),
            ("pass".into(), pick(&[FORWARD, BOTH], 6)),
            ("sequence".into(), pick(&SEQUENCES, 7)),
        ])
    }

    /// Returns the kernel with a fault, and with the backward, the sequence and the tiles that the fault needs.
    pub fn planted(self, fault: PlantedFp8) -> Fp8 {
        let backward =
            self.backward || matches!(fault, PlantedFp8::Backward(_) | PlantedFp8::GivenBackward(_));
        let is_given = matches!(fault, PlantedFp8::Given(_) | PlantedFp8::GivenBackward(_));
        let sequence = if is_given { Fp8Sequence::Cudnn } else { self.sequence };
        let planted = Fp8 { backward, sequence, fault: Some(fault), ..self };
        // What the kernel says of its tiles stays true.
        Fp8 { tiles: planted.recipe().tiles, ..planted }
    }

    /// Whether the planted fault changes a result of a problem, whose padding holds large numbers.
    pub fn shows(&self, problem: &Problem) -> bool {
        let mut inputs = values::inputs(problem);
        values::poison(&mut inputs, problem, Poison::Large);
        let runs = [*self, Fp8 { fault: None, ..*self }].map(|kernel| kernel.run(problem, &inputs));
        matches!(&runs, [Ok(wrong), Ok(right)] if !same_bits(wrong, right))
    }

    /// Returns the kernel with the options `q_tile` and `kv_tile` (each 1 to 4096), `weight_exponent` (0 to 8),
    /// `promoted_after` (`never`, or 1 to 4096 steps), `merge` (`running` or `deferred`), `order`, `pass` (`forward` or
    /// `both`), and `sequence` (`flash-attention-3` or `cudnn`, to which `weight_exponent` says nothing). The
    /// defaults are 4, 64, 8, 4, `running`, 0, `forward` and `flash-attention-3`.
    pub fn from_options(options: &Options) -> Result<Fp8, OptionError> {
        let mut kernel = Fp8::default();
        for (option, value) in options {
            let number = |most: usize| value.parse().ok().filter(|number| (1..=most).contains(number));
            let taken = match option.as_str() {
                "q_tile" => number(TILE_MOST).map(|size| kernel.tiles.q = size),
                "kv_tile" => number(TILE_MOST).map(|size| kernel.tiles.kv = size),
                "weight_exponent" => {
                    let exponent = value.parse().ok().filter(|exponent| *exponent <= EXPONENT_MOST);
                    exponent.map(|exponent| kernel.weight_exponent = exponent)
                }
                "merge" => MergeOrder::WEIGHTED
                    .into_iter()
                    .find(|merge| merge.name() == value)
                    .map(|merge| kernel.merge = merge),
                "order" => value.parse().ok().map(|order| kernel.order = order),
                "sequence" => Fp8Sequence::ALL
                    .into_iter()
                    .find(|sequence| sequence.name() == value)
                    .map(|sequence| kernel.sequence = sequence),
                "pass" => [FORWARD, BOTH]
                    .into_iter()
                    .find(|pass| pass == value)
                    .map(|pass| kernel.backward = pass == BOTH),
                "promoted_after" => {
                    let steps = if value == "never" { Some(0) } else { number(STEPS_MOST) };
                    steps.map(|steps| kernel.promoted_after = NonZeroUsize::new(steps))
                }
                _ => {
                    let known =
                        "q_tile, kv_tile, weight_exponent, promoted_after, merge, order, pass, sequence";
                    return Err(OptionError::Unknown { backend: Fp8::NAME, option: option.clone(), known });
                }
            };
            taken.ok_or_else(|| OptionError::Value {
                backend: Fp8::NAME,
                option: option.clone(),
                value: value.clone(),
                expected: expected(option),
            })?;
        }
        Ok(kernel)
    }

    /// Returns the formats that are taken together. A backward has codes of dout, in either format, and of dS.
    fn precisions(&self) -> Vec<Precision> {
        if self.sequence == Fp8Sequence::Cudnn {
            return fp8_given::precisions(self.backward);
        }
        let forward = SCALINGS.map(|scaling| {
            let code = Element { format: Format::E4m3, scaling };
            let p = Format::E4m3.into();
            Precision { q: code, k: code, v: code, p, ..Precision::uniform(Format::Bf16) }
        });
        let backward = |forward: Precision| {
            [Format::E4m3, Format::E5m2].map(|format| {
                let dout = Element { format, scaling: forward.q.scaling };
                Precision { dout, ds: Format::E4m3.into(), ..forward }
            })
        };
        if self.backward { forward.into_iter().flat_map(backward).collect() } else { forward.to_vec() }
    }

    /// Returns the exponent of the power of two with which weights are multiplied: 0 where their scale is given.
    fn weight_exponent(&self) -> u8 {
        if self.is_given() { 0 } else { self.weight_exponent }
    }

    /// Whether what the kernel quantises has given scales.
    pub(super) fn is_given(&self) -> bool {
        self.sequence == Fp8Sequence::Cudnn
    }

    pub(super) fn recipe(&self) -> Recipe {
        let &Fp8 { tiles, promoted_after, .. } = self;
        let (weight_exponent, factors) = (self.weight_exponent(), Factors::of as _);
        let known = of_the_group;
        let backward = BackwardRecipe { known, descales, rounds_ds_weights: false };
        let (stages, lse_shift) = (&Right, 0.0);
        let mut recipe = Recipe {
            amax: |kept| kept.all,
            tiles,
            known,
            descales,
            weight_exponent,
            promoted_after,
            core: TensorCore::FP8,
            lse_shift,
            factors,
            schedule: |_| (),
            stages,
            backward,
        };
        if let Some(fault) = self.fault {
            (fault.fault().edit)(&mut recipe);
        }
        recipe
    }
}

/// Returns the values that an option takes, in words.
fn expected(option: &str) -> &'static str {
    match option {
        "weight_exponent" => "a whole number from 0 to 8",
        "promoted_after" => "never, or a whole number from 1 to 4096",
        "merge" => "running or deferred",
        "order" => "a whole number",
        "pass" => "forward or both",
        "sequence" => "flash-attention-3 or cudnn",
        _ => "a whole number from 1 to 4096",
    }
}

impl Backend for Fp8 {
    fn name(&self) -> &str {
        Fp8::NAME
    }

    fn declaration(&self) -> Declaration {
        let dims = Sizes::up_to(DIM_MAX);
        let table = Table {
            precisions: self.precisions(),
            dims: HeadDims { qk: dims.clone(), v: dims, equal: false },
            statistics: vec![TensorName::Lse, TensorName::MaxLogit],
            backward: self.backward,
            parallel: if self.is_given() { fp8_given::parallel() } else { Parallelism::all() },
            cache: false,
            pages: None,
            sharing: false,
            forms: vec![Form::CuSeqlens],
            ..Table::widest()
        };
        let accumulation = Accumulation::WgmmaFp8 { promoted_after: self.promoted_after };
        let arithmetic = envelope::Arithmetic {
            weight_exponent: self.weight_exponent(),
            ds_scale: if self.backward && !self.is_given() { DsScale::Tile } else { DsScale::None },
            ds_fold: if self.is_given() { DsFold::Before } else { DsFold::After },
            ..envelope::Arithmetic::flash_attention(accumulation)
        };
        Declaration {
            table,
            padding: PaddingContract { inputs: PaddingInputs::Anything, outputs: PaddingOutputs::Zero },
            promises: Promises::ALL,
            arithmetic,
            partials: Partials::default(),
            refuses: true,
            start_seconds: START_SECONDS,
        }
    }

    fn lock(&self) -> Option<Lock> {
        profile::locked(self.sequence.profile())
    }

    fn promises(&self, problem: &Problem) -> Promises {
        // A tile's rows share the factor of its dS.
        let rows_alone = problem.pass == Pass::Forward || self.is_given();
        Promises { rows_alone, ..self.declaration().promises }.of_schedule(problem)
    }

    fn partition(&self, problem: &Problem) -> Partition {
        let single = Partition::single(self.tiles.q, self.tiles.kv);
        let schedule = built(problem, self.merge);
        schedule.map_or(single, |schedule| schedule.partition(self.tiles))
    }

    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        built(problem, self.merge).map(|schedule| (*schedule).clone())
    }

    fn launches(&self, problem: &Problem) -> Option<Vec<ReplayedLaunch>> {
        let forward = problem.forward();
        built(&forward, self.merge).ok()?.launches(&forward, None)
    }

    fn tiles(&self, problem: &Problem) -> Option<ReplayedTiles> {
        built(problem, self.merge).ok()?.replayed_tiles(problem, self.tiles, None)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.declaration().table.check(problem)?;
        self.run_schedule(problem, inputs)
    }
}
