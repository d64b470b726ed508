//! The exact rung: it never fires on a right kernel, it sees one wrong pair among thousands of keys, and it says what a
//! query saw.

use std::collections::BTreeMap;

use rayon::prelude::*;
use seamproof::backends;
use seamproof::evaluate::evaluate;
use seamproof::exact::eligible;
use seamproof::generate::{Draw, Limits, draw};
use seamproof::verdict::Verdict;
use seamproof_oracle::{InputMode, Problem};

/// The problems of a stream that are in an exact mode, with their index.
fn exact_cases(seed: u64, limits: &Limits, draws: u64) -> Vec<(u64, Problem)> {
    let case = |index| match draw(seed, index, limits) {
        Draw::Problem(problem) if eligible(problem.mode, &problem).is_ok() => Some((index, problem)),
        _ => None,
    };
    (0..draws).filter_map(case).collect()
}

#[test]
fn the_rung_never_fires_on_a_right_kernel() {
    for (seed, limits, draws) in [(1, Limits::seams(), 5000), (2, Limits::quick(), 2500)] {
        let cases = exact_cases(seed, &limits, draws);
        assert!(cases.len() as u64 > draws / 3, "{}", cases.len());
        let alarms: Vec<String> = cases
            .par_iter()
            .filter_map(|(index, problem)| {
                let options = backends::draw_options("emulated", *index);
                let backend = backends::by_name("emulated", &options).expect("the emulated backend");
                match evaluate(backend.as_ref(), problem) {
                    Verdict::Pass(_) => None,
                    Verdict::Finding(finding) => Some(format!("{seed} {index} {:?}: {finding}", problem.mode)),
                    other => Some(format!("{seed} {index} {:?}: {other:?}", problem.mode)),
                }
            })
            .collect();
        let mut modes = BTreeMap::new();
        cases.iter().for_each(|(_, problem)| *modes.entry(format!("{:?}", problem.mode)).or_insert(0) += 1);
        assert_eq!(modes.len(), InputMode::EXACT.len(), "{modes:?}");
        assert!(alarms.is_empty(), "{} alarms: {:#?}", alarms.len(), &alarms[..alarms.len().min(30)]);
    }
}
