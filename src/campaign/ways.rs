//! Which kernels the cases of a campaign ran on.
//!
//! A subject whose kernels do not take every problem says of each which *ways* it goes ([`Backend::ways`]): a campaign
//! that seldom went a way says little of it, however many cases it had. So the cases are counted by way and by ranks,
//! and there are floors as the census has them: shares that were measured of the generator.
//!
//! [`Backend::ways`]: seamproof_judge::subject::Backend::ways

use std::collections::BTreeMap;
use std::fmt;

use seamproof_oracle::Problem;
use serde::{Deserialize, Serialize};

use seamproof_judge::census::{MissedFloor, floor};
use seamproof_judge::generate::Profile;
use seamproof_judge::subject::{
    BACKWARD_ON_TENSOR_CORES, FORWARD_ON_TENSOR_CORES, SEVERAL_FOR_A_PLANNER, SEVERAL_FOR_A_PLANNER_FP8,
    SEVERAL_IN_A_BLOCK, SEVERAL_IN_A_BLOCK_FP8, SEVERAL_LATE_TURNS, SEVERAL_TURNS, Way,
};

/// Of ways the share of the judged cases that go them among those that could, in each profile, in the order of
/// [`Profile::ALL`], in tenths of a percent; measured.
const RATES: [(&str, [u16; 3]); 8] = [
    (FORWARD_ON_TENSOR_CORES, [966, 966, 966]),
    (BACKWARD_ON_TENSOR_CORES, [959, 960, 954]),
    (SEVERAL_TURNS, [377, 346, 712]),
    (SEVERAL_LATE_TURNS, [8, 8, 36]),
    (SEVERAL_IN_A_BLOCK, [664, 619, 851]),
    (SEVERAL_FOR_A_PLANNER, [56, 38, 114]),
    (SEVERAL_IN_A_BLOCK_FP8, [632, 597, 849]),
    (SEVERAL_FOR_A_PLANNER_FP8, [59, 40, 116]),
];

/// Cases that went a way, of those that their subject could have sent there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Share {
    pub taken: u64,
    pub of: u64,
}

/// Judged cases by way, and by [`ranks`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ways(BTreeMap<String, BTreeMap<String, Share>>);

/// How many ranks a problem has, in classes.
fn ranks(problem: &Problem) -> &'static str {
    match problem.parallel.size() {
        0 | 1 => "cp 1",
        2 => "cp 2",
        3 => "cp 3",
        4 => "cp 4",
        5..=7 => "cp 5 to 7",
        _ => "cp 8",
    }
}

impl Share {
    fn add(&mut self, other: Share) {
        self.taken += other.taken;
        self.of += other.of;
    }
}

impl Ways {
    /// Counts a judged case.
    pub(super) fn add(&mut self, problem: &Problem, ways: &[Way]) {
        for way in ways {
            let ranks = self.0.entry(way.name.to_owned()).or_default();
            let share = Share { taken: way.taken.into(), of: 1 };
            ranks.entry(self::ranks(problem).to_owned()).or_default().add(share);
        }
    }

    /// Adds a part's.
    pub(super) fn merge(&mut self, other: &Ways) {
        for (way, ranks) in &other.0 {
            let all = self.0.entry(way.clone()).or_default();
            ranks.iter().for_each(|(ranks, share)| all.entry(ranks.clone()).or_default().add(*share));
        }
    }

    /// Whether no subject said anything.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Cases of all numbers of ranks.
    fn share(&self, way: &str) -> Share {
        let mut all = Share::default();
        self.0.get(way).into_iter().flat_map(BTreeMap::values).for_each(|share| all.add(*share));
        all
    }

    /// Ways that too few cases went, of those that a subject said anything about.
    pub(super) fn missed(&self, profile: Profile) -> Vec<MissedFloor> {
        let asked = RATES.iter().map(|(way, rates)| (*way, self.share(way), rates[profile as usize]));
        let asked = asked.filter(|(_, share, _)| share.of > 0);
        let floors = asked.map(|(way, share, rate)| (way.to_owned(), share.taken, floor(rate, share.of)));
        floors
            .filter(|(_, count, floor)| count < floor)
            .map(|(class, count, floor)| MissedFloor { class, count, floor })
            .collect()
    }
}

impl fmt::Display for Ways {
    /// A line for each way.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (way, ranks) in &self.0 {
            let Share { taken, of } = self.share(way);
            let parts = ranks.iter().map(|(ranks, share)| format!("{ranks} {}", share.taken));
            let parts = parts.collect::<Vec<_>>().join(" · ");
            writeln!(f, "kernels   {way}: {taken} of {of} cases · {parts}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use seamproof_kernels::backward::Walks;
    use seamproof_kernels::forward::AttentionKernels;
    use seamproof_kernels::forward_fp8::Fp8Shape;

    use super::*;
    use crate::backends::{Cuda, CudaFp8};
    use seamproof_judge::generate::{self, Draw};
    use seamproof_judge::subject::Backend;

    /// The ways of the cases of a profile that the kernels take, with the shapes on tensor cores, few blocks and walks of the
    /// long form in turn.
    fn drawn(profile: Profile, cases: u64) -> Ways {
        let few = |index: u64| Cuda {
            blocks: NonZeroUsize::new(1 + index as usize % 3),
            walks: Some(Walks::ALL[index as usize % 3]),
            ..Cuda::default()
        };
        let of_16_bits = |index: u64| {
            let attention = AttentionKernels::ALL[1 + index as usize / 3 % 7];
            Box::new(Cuda { attention, ..few(index) }) as Box<dyn Backend>
        };
        let of_codes = |index: u64| {
            let shape = [None, Some(Fp8Shape::Long), Some(Fp8Shape::Short)][index as usize / 3 % 3];
            let subject = CudaFp8 { shape, backward: index / 9 % 2 == 1, scheduled: few(index) };
            Box::new(subject) as Box<dyn Backend>
        };
        let mut ways = ways_of(profile, cases, of_16_bits);
        ways.merge(&ways_of(profile, cases, of_codes));
        ways
    }

    /// The ways of the cases of a profile, each on a subject of its own.
    fn ways_of(profile: Profile, cases: u64, subject: impl Fn(u64) -> Box<dyn Backend>) -> Ways {
        let (limits, mut ways) = (profile.limits(), Ways::default());
        for index in 0..cases {
            if let Draw::Problem(problem) = generate::draw(3, index, &limits) {
                let subject = subject(index);
                let problem = subject.declaration().table.asked(problem);
                ways.add(&problem, &subject.ways(&problem));
            }
        }
        ways
    }

    #[test]
    fn the_shares_are_those_that_were_measured() {
        for profile in [Profile::Quick, Profile::Seams] {
            let ways = drawn(profile, 24_000);
            for (way, rates) in RATES {
                let (share, rate) = (ways.share(way), f64::from(rates[profile as usize]) / 1000.0);
                let expected = rate * share.of as f64;
                let apart = (share.taken as f64 - expected).abs();
                assert!(apart < 5.0 * expected.sqrt() && share.taken > 100, "{profile:?} {way}: {share:?}");
            }
            assert_eq!(ways.missed(profile), []);
        }
    }

    #[test]
    fn a_way_that_nothing_goes_is_missed_and_parts_add_up() {
        let whole = drawn(Profile::Quick, 900);
        let never: BTreeMap<_, _> = whole.0[FORWARD_ON_TENSOR_CORES]
            .iter()
            .map(|(ranks, share)| (ranks.clone(), Share { taken: 0, ..*share }))
            .collect();
        let never = Ways(BTreeMap::from([(FORWARD_ON_TENSOR_CORES.to_owned(), never)]));
        let missed = never.missed(Profile::Quick);
        assert!(matches!(&missed[..], [one] if one.class == FORWARD_ON_TENSOR_CORES && one.floor > 50));
        assert_eq!(Ways::default().missed(Profile::Quick), [], "a subject that says nothing");
        let mut twice = whole.clone();
        twice.merge(&whole);
        let [one, two] = [&whole, &twice].map(|ways| ways.share(BACKWARD_ON_TENSOR_CORES));
        assert_eq!((two.taken, two.of), (2 * one.taken, 2 * one.of));
        let text = serde_json::to_string(&twice).unwrap();
        assert_eq!(serde_json::from_str::<Ways>(&text).unwrap(), twice);
    }
}
