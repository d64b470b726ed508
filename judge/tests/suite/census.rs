//! Floors and counts of the census.

use seamproof_judge::census::{CLASSES, Census};
use seamproof_judge::generate::{Profile, draw, tiny};

/// Number of cases in one campaign of these tests; floors must hold from this number on.
const CASES: u64 = 1000;
/// Number of campaigns.
const SEEDS: u64 = 12;

fn census(seed: u64, cases: std::ops::Range<u64>, profile: Profile) -> Census {
    let (limits, mut census) = (profile.limits(), Census::default());
    cases.for_each(|index| census.add_draw(&draw(seed, index, &limits)));
    census
}

#[test]
fn every_floor_holds_for_every_seed() {
    for profile in Profile::ALL {
        for seed in 0..SEEDS {
            let census = census(seed, 0..CASES, profile);
            assert_eq!(census.missed(profile), [], "{profile}, seed {seed}");
            assert_eq!(census.total(), CASES);
        }
    }
}

#[test]
fn floors_hold_with_a_margin_in_a_long_campaign() {
    let census = census(SEEDS, 0..20 * CASES, Profile::Quick);
    assert_eq!(census.missed(Profile::Quick), []);
    for class in CLASSES.iter() {
        let (count, floor) = (census.count(class.name), class.floor(Profile::Quick, census.total()));
        assert!(4 * count > 5 * floor, "{class:?}: {count}, floor {floor}");
    }
}

#[test]
fn every_class_is_reached_in_2000_quick_cases() {
    for seed in 0..SEEDS {
        let census = census(seed, 0..2 * CASES, Profile::Quick);
        for class in CLASSES.iter() {
            assert!(census.count(class.name) > 0, "{class:?}, seed {seed}");
        }
    }
}

#[test]
fn an_empty_or_monotonous_campaign_misses_floors() {
    let asked = CLASSES.iter().filter(|class| class.floor(Profile::Quick, 0) > 0).count();
    assert_eq!(Census::default().missed(Profile::Quick).len(), asked + 2);
    let mut monotonous = Census::default();
    let problem = tiny().last().expect("the small space is not empty");
    (0..CASES).for_each(|_| monotonous.add(&problem));
    assert!(monotonous.missed(Profile::Quick).len() > CLASSES.len() / 2);
}

#[test]
fn shards_merge_to_the_whole() {
    let whole = census(3, 0..CASES, Profile::Seams);
    let mut merged = census(3, CASES / 3..CASES, Profile::Seams);
    merged.merge(&census(3, 0..CASES / 3, Profile::Seams));
    assert_eq!(merged, whole);
    let text = serde_json::to_string(&whole).expect("a census has text keys");
    assert_eq!(serde_json::from_str::<Census>(&text).expect("written above"), whole);
}

#[test]
fn quick_cases_are_as_large_as_promised() {
    let census = census(5, 0..10 * CASES, Profile::Quick);
    assert!(census.tokens(0.5) >= 24, "{census}");
    assert!(census.tokens(0.95) >= 128, "{census}");
    let several = census.legal() - census.count("no sequence") - census.count("1 sequence");
    assert!(2 * several > census.legal(), "{census}");
    let products = census.products() / census.legal();
    assert!((60_000..150_000).contains(&products), "{census}");
}

#[test]
fn the_table_shows_every_class() {
    let text = census(0, 0..10, Profile::Quick).to_string();
    for class in CLASSES.iter() {
        assert!(text.contains(class.name), "{class:?}");
    }
}

#[test]
#[ignore = "prints the rates that the table of classes holds"]
#[allow(clippy::print_stdout)]
fn measure() {
    const MEASURED: u64 = 40_000;
    for profile in Profile::ALL {
        let census = census(1, 0..MEASURED, profile);
        println!("== {profile}\n{census}");
        for class in CLASSES.iter() {
            println!("RATE {profile}\t{}\t{}", class.name, census.count(class.name) * 1000 / MEASURED);
        }
    }
}
