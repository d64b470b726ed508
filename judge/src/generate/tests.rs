use std::collections::BTreeSet;

use seamproof_oracle::{Algorithm, Format, Pass, ProblemFields};

use super::drawing::{ILLEGAL_ONE_IN, LATENT_ONE_IN};
use super::limits::{LATENT, ORDINARY_DIM_MAX};
use super::*;
use crate::census::is_legal;

/// Number of cases in a statistical test.
const CASES: u64 = 20_000;

/// Returns the next number of a hash that fills raw problems: small numbers, edges and extremes.
fn integer(state: &mut u64) -> u32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let value = (*state >> 32) as u32;
    match value % 8 {
        0 => 0,
        1 => 1,
        2 => u32::MAX,
        3 => 1 << (value >> 8 & 31),
        4..=6 => value >> 8 & 63,
        _ => value,
    }
}

fn random_raw(seed: u64) -> RawProblem {
    let state = &mut seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let count = integer(state) % 70;
    let mut number = || integer(state);
    let sequences = (0..count)
        .map(|_| RawSequence {
            q_len: number(),
            q_padding: number(),
            q_gap: number(),
            kv_len: number(),
            kv_padding: number(),
            kv_gap: number(),
        })
        .collect();
    RawProblem {
        sequences,
        layout: number(),
        q_slack: number(),
        kv_slack: number(),
        kv_heads: number(),
        group: number(),
        qk_dim: number(),
        v_dim: number(),
        left: number(),
        right: number(),
        bottom_right: number(),
        scale: number(),
        softcap: number(),
        sink: number(),
        fp16: number(),
        weights_f32: number(),
        mode: number(),
        backward: number(),
        data_seed: u64::from(number()),
        budget: number(),
        unsupported: number(),
        malformed: number(),
        detail: number(),
        algorithm: number(),
        balance: number(),
        stripe: number(),
        ranks: number(),
        all_to_all: number(),
        others: number(),
        order: number(),
        exact: number(),
        form: number(),
        borders: (0..count).map(|_| number()).collect(),
        chunk: number(),
        prefix: number(),
        sink_tokens: number(),
        kv_layout: number(),
        steps: number(),
        pages: number(),
        page_order: number(),
        free_pages: number(),
        shared_pages: number(),
        region: number(),
        shared_keys: number(),
    }
}

/// Largest values seen of everything that has a bound.
#[derive(Debug, Default)]
struct Extremes {
    sequences: usize,
    length: usize,
    padding: usize,
    gap: usize,
    slack: usize,
    q_heads: usize,
    dim: usize,
    products: u64,
    elements: u64,
}

impl Extremes {
    fn add(&mut self, problem: &Problem) {
        let raise = |most: &mut usize, value: usize| *most = (*most).max(value);
        raise(&mut self.sequences, problem.sequences.len());
        for run in problem.sequences.iter().flat_map(|sequence| [sequence.q, sequence.kv]) {
            raise(&mut self.length, run.len);
            // Spans that are cut over ranks are rounded up past the bound.
            let whole = problem.parallel.algorithm == Algorithm::Single;
            if whole && run.step == 1 && problem.sequences.len() == 1 {
                raise(&mut self.padding, run.span - run.len);
                raise(&mut self.gap, run.offset);
            }
        }
        let end = problem.sequences.iter().filter_map(|sequence| sequence.q.end()).max().unwrap_or(0);
        raise(&mut self.slack, problem.rows.q - end);
        raise(&mut self.q_heads, problem.heads.q);
        raise(&mut self.dim, problem.dims.qk.max(problem.dims.v));
        let width = (problem.heads.q * problem.dims.qk.max(problem.dims.v)) as u64;
        self.products = self.products.max(problem.pairs() * width);
        self.elements = self.elements.max(problem.elements());
    }

    /// Checks the bounds. Costs are sums and products, so they come near their bounds without reaching them.
    fn check(&self, limits: &Limits, reached: bool) {
        let exact = [
            (self.sequences, limits.sequences_max),
            (self.length, limits.length_max),
            (self.padding, limits.padding_max),
            (self.gap, limits.gap_max),
            (self.slack, limits.slack_max),
            (self.q_heads, limits.q_heads_max),
            (self.dim, limits.head_dim_max),
        ];
        for (most, bound) in exact {
            assert!(most <= bound as usize, "{self:?} {limits:?}");
            assert!(!reached || most == bound as usize, "{self:?} {limits:?}");
        }
        for (most, bound) in [(self.products, limits.products_max()), (self.elements, limits.elements_max)] {
            assert!(most <= bound, "{self:?} {limits:?}");
            assert!(!reached || 2 * most > bound, "{self:?} {limits:?}");
        }
    }
}

#[test]
fn a_campaign_is_the_same_bytes_on_every_machine() {
    let mut hasher = blake3::Hasher::new();
    for index in 0..200 {
        let raw = draw_raw(7, index, &Limits::quick());
        let fields: ProblemFields = match fixup(&raw, &Limits::quick()) {
            Draw::Problem(problem) => problem.into(),
            Draw::Malformed(malformed) => malformed.fields,
        };
        hasher.update(&serde_json::to_vec(&(raw, fields)).expect("plain data"));
    }
    assert_eq!(hasher.finalize().to_hex()[..16], *"9592424d1a2927d1");
}

#[test]
fn every_bound_is_respected_and_reached() {
    for profile in Profile::ALL {
        let (limits, mut extremes) = (profile.limits(), Extremes::default());
        for index in 0..2 * CASES {
            if let Draw::Problem(problem) = draw(11, index, &limits) {
                extremes.add(&problem);
            }
        }
        extremes.check(&limits, true);
    }
}

#[test]
fn fixup_is_total_and_keeps_the_bounds() {
    for limits in [Limits::quick(), Limits::seams()] {
        let mut extremes = Extremes::default();
        for seed in 0..CASES / 2 {
            match fixup(&random_raw(seed), &limits) {
                Draw::Problem(problem) => extremes.add(&problem),
                Draw::Malformed(malformed) => assert_eq!(malformed.check(), Ok(()), "{malformed:?}"),
            }
        }
        extremes.check(&limits, false);
    }
}

#[test]
fn fixup_is_total_for_any_limits() {
    let none = Limits {
        sequences_max: 0,
        length_max: 0,
        padding_max: 0,
        gap_max: 0,
        slack_max: 0,
        q_heads_max: 0,
        head_dim_max: 0,
        reaches: &[],
        tiles: &[],
        dims: &[],
        products: &[],
        elements_max: 0,
    };
    let wide = Limits {
        q_heads_max: u32::MAX,
        head_dim_max: u32::MAX,
        gap_max: u32::MAX,
        slack_max: u32::MAX,
        ..Limits::quick()
    };
    for seed in 0..500 {
        for limits in [&none, &wide] {
            fixup(&random_raw(seed), limits);
            draw(seed, 0, limits);
        }
    }
}

#[test]
fn bytes_that_run_out_give_the_simplest_case() {
    let raw = raw(&mut Unstructured::new(&[]), &Limits::quick());
    let Draw::Problem(problem) = fixup(&raw, &Limits::quick()) else { panic!("{raw:?}") };
    assert_eq!((problem.sequences.len(), problem.tokens(), problem.heads.q), (1, 1, 1));
    assert!(is_legal(&problem));
}

#[test]
fn any_bytes_make_a_case() {
    for seed in 0..CASES {
        let bytes = blake3::hash(&seed.to_le_bytes());
        let mut long = [0; 96];
        long[..32].copy_from_slice(bytes.as_bytes());
        long[32..64].copy_from_slice(bytes.as_bytes());
        let len = (seed % 97) as usize;
        fixup(&raw(&mut Unstructured::new(&long[..len]), &Limits::quick()), &Limits::quick());
    }
}

#[test]
fn one_case_in_twenty_is_illegal_and_half_of_these_malformed() {
    let (mut outside, mut malformed, mut backward) = (0, 0, 0);
    let mut rules = BTreeSet::new();
    for index in 0..CASES {
        match draw(2, index, &Limits::quick()) {
            Draw::Problem(problem) => {
                outside += u64::from(!is_legal(&problem));
                backward += u64::from(problem.pass == Pass::Backward);
            }
            Draw::Malformed(planted) => {
                malformed += 1;
                rules.insert(planted.rule);
                assert_eq!(planted.check(), Ok(()), "{planted:?}");
            }
        }
    }
    let half = CASES / u64::from(ILLEGAL_ONE_IN) / 2;
    for count in [outside, malformed] {
        assert!(count.abs_diff(half) < half / 5, "{outside} outside, {malformed} malformed");
    }
    assert_eq!(
        rules.into_iter().collect::<Vec<_>>(),
        Malformed::rules().collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    );
    assert!(2 * backward > CASES);
}

/// Whether several query heads share one latent KV head.
fn is_latent(problem: &Problem) -> bool {
    problem.dims == LATENT && problem.heads.kv == 1 && problem.heads.q > 1
}

#[test]
fn one_case_in_85_has_latent_heads() {
    for profile in Profile::ALL {
        let limits = profile.limits();
        let drawn = (0..CASES).filter_map(|index| match draw(13, index, &limits) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        });
        let wide: Vec<Problem> =
            drawn.filter(|problem| problem.dims.qk.max(problem.dims.v) > ORDINARY_DIM_MAX as usize).collect();
        let latent = wide.iter().filter(|problem| is_latent(problem)).count() as u64;
        let expected = CASES / u64::from(LATENT_ONE_IN);
        assert!(latent.abs_diff(expected) < expected / 4, "{profile}: {latent}");
        // Others are problems that must be refused, whose flaw is in their heads.
        assert!(wide.iter().all(|problem| is_latent(problem) || !is_legal(problem)), "{profile}");
        let count = |holds: fn(&Problem) -> bool| wide.iter().filter(|problem| holds(problem)).count() as u64;
        let counts = [
            count(|problem| problem.pairs() > 0),
            count(|problem| problem.heads.q > 3),
            count(|problem| problem.pass == Pass::Backward),
            count(|problem| problem.parallel.size() > 1),
            count(|problem| problem.pages.is_some()),
            count(|problem| problem.mode.is_exact()),
        ];
        assert!(counts.into_iter().all(|count| count > 3), "{profile}: {counts:?}");
        assert!(3 * counts[0] > 2 * latent, "{profile}: {counts:?} of {latent}");
    }
}

#[test]
fn a_latent_head_outlives_the_budget() {
    for profile in Profile::ALL {
        let sequence = RawSequence { q_len: 4096, kv_len: 4096, ..RawSequence::default() };
        let raw = RawProblem {
            sequences: vec![sequence; 2],
            kv_heads: 1,
            group: 12,
            qk_dim: LATENT.qk as u32,
            v_dim: LATENT.v as u32,
            backward: 1,
            ..RawProblem::default()
        };
        let Draw::Problem(problem) = fixup(&raw, &profile.limits()) else { panic!("{raw:?}") };
        assert!(is_latent(&problem) && problem.pairs() > 0, "{problem:?}");
    }
}

/// Plants every entry of the tables of flaws, with every variant, in many different cases.
#[test]
fn every_flaw_is_refused_as_planted() {
    for malformed in 1..=flaws::MALFORMED.len() as u32 {
        for detail in 0..100 {
            let raw = RawProblem { malformed, detail, ..random_raw(u64::from(detail % 90)) };
            match fixup(&raw, &Limits::quick()) {
                Draw::Malformed(planted) => assert_eq!(planted.check(), Ok(()), "{planted:?}"),
                Draw::Problem(problem) => panic!("{problem:?}"),
            }
        }
    }
    for unsupported in 1..=flaws::UNSUPPORTED.len() as u32 {
        for detail in 0..130 {
            let raw = RawProblem { malformed: 0, unsupported, detail, ..random_raw(u64::from(detail % 90)) };
            match fixup(&raw, &Limits::quick()) {
                Draw::Problem(problem) => assert!(!is_legal(&problem), "{problem:?}"),
                Draw::Malformed(planted) => panic!("{planted:?}"),
            }
        }
    }
}

#[test]
fn a_wrong_refusal_is_seen() {
    let raw = RawProblem { malformed: 1, ..random_raw(1) };
    let Draw::Malformed(planted) = fixup(&raw, &Limits::quick()) else { panic!("{raw:?}") };
    let other = flaws::MALFORMED.map(|(_, plant)| plant(&mut planted.fields.clone(), 0));
    assert!(Malformed { expects: other[8].clone(), ..planted }.check().is_err());
}

#[test]
fn geometry_does_not_depend_on_the_data_seed() {
    let raw = draw_raw(1, 1, &Limits::quick());
    let seeded = RawProblem { data_seed: raw.data_seed + 1, ..raw.clone() };
    let fields = |raw: &RawProblem| match fixup(raw, &Limits::quick()) {
        Draw::Problem(problem) => ProblemFields { data_seed: 0, ..problem.into() },
        Draw::Malformed(planted) => ProblemFields { data_seed: 0, ..planted.fields },
    };
    assert_eq!(fields(&raw), fields(&seeded));
}

#[test]
fn the_small_space_is_whole() {
    let problems: Vec<Problem> = tiny().collect();
    assert_eq!(problems.len(), (1 + 18 + 18 * 18) * 10 * 2 * 2);
    let distinct: BTreeSet<String> = problems
        .iter()
        .map(|problem| format!("{:?}", ProblemFields { data_seed: 0, ..problem.clone().into() }))
        .collect();
    assert_eq!(distinct.len(), problems.len());
    assert!(problems.iter().all(is_legal));
    assert!(problems.iter().all(|problem| problem.precision.q.format == Format::Bf16));
}
