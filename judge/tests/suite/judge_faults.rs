//! Faults planted in the judge itself.

use seamproof_judge::ladder::faults::{FAULTS, score};
#[test]
fn the_right_judge_condemns_every_probe_and_each_faulty_one_misses_some() {
    let scores = score(&FAULTS).expect("the right judge condemns every probe");
    let unseen: Vec<&str> =
        scores.iter().filter(|score| !score.caught()).map(|score| score.fault.id).collect();
    assert!(unseen.is_empty(), "{unseen:?}");
    assert!(FAULTS.iter().all(|fault| fault.source.starts_with("https://")));
}
