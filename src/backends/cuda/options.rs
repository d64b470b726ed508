//! The options of the subject `cuda`: their names and values, and which a campaign draws.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use seamproof_judge::subjects::OptionError;
use seamproof_kernels::backward::{DqOrder, Walks};
use seamproof_kernels::forward::{AttentionKernels, Instance};
use seamproof_simulator::schedule::MergeOrder;

use super::{Cuda, NAME, Ranks};

/// Largest number of streams.
const STREAMS_MAX: usize = 64;
/// Largest number of blocks that a campaign draws, apart from a block on each multiprocessor.
pub(super) const FEW_BLOCKS: usize = 3;
/// Number that sets the draw of walks apart from others.
const WALKS: u64 = 0x7761_6c6b;
/// Value of the option of walks that stands for those that fit.
const FITTING: &str = "fitting";
/// Value of the option of instances that stands for all of them.
const ANY_INSTANCE: &str = "any";
/// Value of the option of blocks that stands for a block on each multiprocessor.
const ALL_BLOCKS: &str = "all";

/// Option of the instance that all problems go to. No campaign draws it.
pub(in super::super) const INSTANCE: &str = "instance";

/// Returns the value of the option that stands for these walks.
fn walks_name(walks: Option<Walks>) -> &'static str {
    walks.map_or(FITTING, Walks::name)
}

/// Returns the walks that a value of the option stands for.
fn walks_by_name(value: &str) -> Option<Option<Walks>> {
    if value == FITTING { Some(None) } else { Walks::by_name(value).map(Some) }
}

/// Returns the value of the option that stands for this instance.
fn instance_name(instance: Option<Instance>) -> &'static str {
    instance.map_or(ANY_INSTANCE, Instance::name)
}

/// Returns the instance that a value of the option stands for.
fn instance_by_name(value: &str) -> Option<Option<Instance>> {
    if value == ANY_INSTANCE { Some(None) } else { Instance::by_name(value).map(Some) }
}

/// Returns the value of the option that stands for these most blocks.
fn blocks_name(blocks: Option<NonZeroUsize>) -> String {
    blocks.map_or_else(|| ALL_BLOCKS.to_owned(), |blocks| blocks.to_string())
}

/// Returns the most blocks that the value of an option names; `None` for another value.
fn blocks_by_name(value: &str) -> Option<Option<NonZeroUsize>> {
    if value == ALL_BLOCKS { Some(None) } else { value.parse().ok().map(Some) }
}

/// Returns options for one case of a campaign.
pub(in super::super) fn draw_options(seed: u64) -> BTreeMap<String, String> {
    let draw = seamproof_judge::hash::mix(seed);
    let walks = seamproof_judge::hash::mix(seed ^ WALKS) % (2 * Walks::ALL.len() as u64);
    let few = NonZeroUsize::new(1 + (draw >> 32) as usize % FEW_BLOCKS);
    BTreeMap::from([
        ("order".into(), (draw % 1000).to_string()),
        ("merge".into(), MergeOrder::WEIGHTED[(draw >> 63) as usize].name().into()),
        // One case in four runs without the kernels for packed slots.
        ("helpers".into(), if draw >> 61 & 3 == 0 { "off" } else { "on" }.into()),
        // One case in four runs its streams in parallel.
        ("streams".into(), if draw >> 59 & 3 == 0 { "4" } else { "1" }.into()),
        // One case in four has one to three blocks for each launch of attention on tensor cores.
        ("blocks".into(), blocks_name(few.filter(|_| draw >> 53 & 3 == 0))),
        // One case in four has a thread for each rank.
        ("ranks".into(), if draw >> 57 & 3 == 0 { Ranks::Threads } else { Ranks::InTurn }.name().into()),
        (
            "attention".into(),
            AttentionKernels::ALL[(draw >> 40 & 0x7fff) as usize % AttentionKernels::ALL.len()].name().into(),
        ),
        // One case in four sums dq in any order.
        ("dq".into(), if draw >> 55 & 3 == 0 { DqOrder::AsTheyCome } else { DqOrder::Fixed }.name().into()),
        // Half of the cases have the long form of the backward, which small problems do not have of their own accord.
        ("walks".into(), walks_name(Walks::ALL.get(walks as usize).copied()).into()),
    ])
}

impl Cuda {
    /// Returns the subject with the options `order`, `merge` (`running` or `deferred`), `helpers` (`on` or `off`),
    /// `attention` (`simple`, `tuned`, `long`, `paired`, `middle`, `short`, `split` or `mixed`), `dq` (`fixed` or `any`), `walks`
    /// (`fitting`, `up`, `down` or `by-turns`), `streams`, `blocks` (a number or `all`), `ranks` (`in-turn` or
    /// `threads`) and `instance` (`any`, `narrow`, `wide`, `general`, `widest` or `latent`). The defaults are 0, `running`, `on`,
    /// `simple`, `fixed`, `fitting`, 1, `all`, `in-turn` and `any`.
    pub(in super::super) fn from_options(options: &BTreeMap<String, String>) -> Result<Cuda, OptionError> {
        let mut subject = Cuda::default();
        for (option, value) in options {
            let (taken, expected) = match option.as_str() {
                "order" => (value.parse().ok().map(|order| subject.order = order), "a whole number"),
                "merge" => {
                    let of_kernels = |order: &MergeOrder| MergeOrder::WEIGHTED.contains(order);
                    let order = MergeOrder::by_name(value).filter(of_kernels);
                    (order.map(|order| subject.merge = order), "running or deferred")
                }
                "helpers" => {
                    let known = matches!(value.as_str(), "on" | "off");
                    (known.then(|| subject.helpers = value == "on"), "on or off")
                }
                "attention" => {
                    let taken =
                        AttentionKernels::by_name(value).ok().map(|attention| subject.attention = attention);
                    (taken, "simple, tuned, long, paired, middle, short, split or mixed")
                }
                "dq" => (DqOrder::by_name(value).map(|dq| subject.dq = dq), "fixed or any"),
                "walks" => {
                    let walks = walks_by_name(value).map(|walks| subject.walks = walks);
                    (walks, "fitting, up, down or by-turns")
                }
                "streams" => {
                    let known = value.parse().ok().filter(|streams| (1..=STREAMS_MAX).contains(streams));
                    (known.map(|streams| subject.streams = streams), "a number from 1 to 64")
                }
                "blocks" => {
                    let blocks = blocks_by_name(value).map(|blocks| subject.blocks = blocks);
                    (blocks, "a number from 1 on, or all")
                }
                "ranks" => (Ranks::by_name(value).map(|ranks| subject.ranks = ranks), "in-turn or threads"),
                INSTANCE => {
                    let instance = instance_by_name(value).map(|instance| subject.instance = instance);
                    (instance, "any, narrow, wide, general, widest or latent")
                }
                _ => {
                    let known =
                        "order, merge, helpers, attention, dq, walks, streams, blocks, ranks, instance";
                    let option = option.clone();
                    return Err(OptionError::Unknown { backend: NAME, option, known });
                }
            };
            taken.ok_or_else(|| OptionError::Value {
                backend: NAME,
                option: option.clone(),
                value: value.clone(),
                expected,
            })?;
        }
        Ok(subject)
    }

    /// Returns the options from which [`Cuda::from_options`] makes this subject.
    pub(in super::super) fn options(&self) -> BTreeMap<String, String> {
        BTreeMap::from([
            ("order".into(), self.order.to_string()),
            ("merge".into(), self.merge.name().into()),
            ("helpers".into(), if self.helpers { "on" } else { "off" }.into()),
            ("attention".into(), self.attention.name().into()),
            ("dq".into(), self.dq.name().into()),
            ("walks".into(), walks_name(self.walks).into()),
            ("streams".into(), self.streams.to_string()),
            ("blocks".into(), blocks_name(self.blocks)),
            ("ranks".into(), self.ranks.name().into()),
            (INSTANCE.into(), instance_name(self.instance).into()),
        ])
    }
}
