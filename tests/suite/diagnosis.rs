//! The key that a finding's text names: the one that a query lost, where that is the fault, and none where the fault
//! is another.

use std::collections::BTreeMap;
use std::path::Path;

use rayon::prelude::*;
use seamproof::backends::by_name;
use seamproof_judge::case::Case;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::generate::{Draw, Profile, draw};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{Balance, Pass, Problem, TensorName};

const CASES: u64 = 160;
/// Number of cases for faults that few of them show.
const MANY_CASES: u64 = 600;
/// Beginnings of the words for one pair of a query and a key, and for the rows of a rank.
const PAIRS: [&str; 3] = ["looks as if query", "looks as if in the backward", "looks as if rank"];

/// Returns drawn problems with a backward, and the findings of a subject of this name on them.
fn findings(subject: &str) -> Vec<(Problem, Finding)> {
    findings_of(subject, CASES, |_| true)
}

/// Returns the same of so many drawn problems, without those on which the fault cannot show.
fn findings_of(subject: &str, cases: u64, may_show: fn(&Problem) -> bool) -> Vec<(Problem, Finding)> {
    let drawn =
        (0..cases).into_par_iter().filter_map(|index| match draw(11, index, &Profile::Quick.limits()) {
            Draw::Problem(problem) if problem.pass == Pass::Backward && may_show(&problem) => Some(problem),
            _ => None,
        });
    let found = drawn.filter_map(|problem| {
        let subject = by_name(subject, &BTreeMap::new()).unwrap();
        match evaluate(subject.as_ref(), &problem) {
            Verdict::Finding(finding) => Some((problem, *finding)),
            _ => None,
        }
    });
    found.collect()
}

/// Mistakes in the whole call, with the words that tell them.
const MISTAKES: [(&str, &str); 2] = [
    ("emulated~call-scale-of-head-dim", "1/√ of the head dimension"),
    ("emulated~call-softcap-dropped", "the soft cap was left out"),
];

/// Test that no fault that is more than one pair is told as one, and that a mistake in the whole call is told as what
/// it is, wherever one is told.
#[test]
fn a_fault_that_is_no_single_pair_names_none() {
    for subject in [
        "emulated+ds-without-scale",
        "emulated~call-scale-off",
        MISTAKES[0].0,
        MISTAKES[1].0,
        "emulated~call-lse-in-bf16",
        "emulated~call-dk-off",
        "emulated~call-dq-and-dk-halved",
        "emulated~call-dk-of-a-head-halved",
        "emulated~call-dk-doubled",
    ] {
        let found = findings(subject);
        if let Some((_, words)) = MISTAKES.iter().find(|(mistake, _)| *mistake == subject) {
            is_told(subject, &found, words);
        }
        assert!(found.len() > 20, "{subject}: {} findings are too few to say anything", found.len());
        for (problem, finding) in found {
            let problem = seamproof_judge::prose::describe(&problem);
            assert!(
                !PAIRS.iter().any(|pair| finding.what.contains(pair)),
                "{subject}: {problem}: {}",
                finding.what
            );
        }
    }
}

/// Checks that the findings on the forward of a mistaken call tell the mistake in these words.
fn is_told(subject: &str, found: &[(Problem, Finding)], words: &str) {
    let forward = found.iter().filter(|(_, finding)| {
        matches!(finding.tensor, Some(TensorName::Out | TensorName::Lse)) && finding.check == Check::Envelope
    });
    let all: Vec<&str> = forward.map(|(_, finding)| finding.what.as_str()).collect();
    let told = all.iter().filter(|what| what.contains("looks as if"));
    assert!(told.clone().all(|what| what.contains(words)), "{subject}: {all:#?}");
    assert!(told.count() * 10 > all.len() * 9, "{subject}: {all:#?}");
}

/// Test on a faulty kernel that loses the first key that a query should see.
#[test]
fn a_lost_key_is_named_and_is_the_one_that_was_lost() {
    let found = findings("window-off-by-one");
    let (mut named, all) = (0, found.len());
    for (problem, finding) in found {
        // A launch on the edges of wide stripes loses the first key of an edge.
        if matches!(problem.parallel.balance, Balance::Striped { stripe: 2.. }) {
            continue;
        }
        let Some((_, key)) = finding.what.split_once(" missed key ") else { continue };
        let key: usize = key.split(' ').next().unwrap().parse().unwrap();
        let (sequence, query) = (finding.place.sequence.unwrap(), finding.place.row.unwrap());
        let (both, mask) = (&problem.sequences[sequence], &problem.mask);
        // In front of a window, a document or a chunk may be keys that are always seen.
        let first = mask.visible(query, both.q.len, both.kv.len).parts().last().map(|seen| seen.start);
        assert_eq!(Some(key), first, "{}", finding.what);
        named += 1;
    }
    assert!(named > 5 && named * 3 > all, "{named} of {all}");
}

/// Test on two faulty kernels. In one, query heads read the KV head after their own; in the other, the first of a
/// group reads the one before.
#[test]
fn another_head_is_named_and_is_the_one_that_was_read() {
    for (subject, step) in [("emulated~call-kv-heads-rotated", 1), ("emulated+kv-head-of-neighbour", -1)] {
        let found = findings(subject);
        let rows = found.iter().filter(|(problem, finding)| {
            let forward = matches!(finding.tensor, Some(TensorName::Out | TensorName::Lse));
            forward && finding.check == Check::Envelope && problem.dims.v >= 8
        });
        let (mut named, mut all) = (0, 0);
        for (problem, finding) in rows {
            all += 1;
            let Some((_, other)) = finding.what.split_once(" of KV head ") else { continue };
            let other: usize = other.split(',').next().unwrap().parse().unwrap();
            let own = finding.place.head.unwrap() / problem.group();
            let heads = problem.heads.kv as isize;
            assert_eq!(other as isize, (own as isize + step).rem_euclid(heads), "{}", finding.what);
            named += 1;
        }
        assert!(named > 5 && named * 10 > all * 9, "{subject}: {named} of {all}");
    }
}

/// Words that a row lacks what it should have of a rank.
const LACKS: &[&str] = &["missed the keys", "received nothing from the queries", "alone"];
/// Faults of exchanges and merges, each with the words that tell it and with the least number of cases in which they do.
const OF_RANKS: [(&str, &[&str], usize); 5] = [
    ("emulated+kv-of-another-step", &["late", "missed the keys", "alone"], 10),
    ("emulated+merge-twice", &["counted all keys twice"], 30),
    ("emulated+ring-step-skipped", LACKS, 6),
    ("emulated+gradient-lost-on-one-step", LACKS, 15),
    ("emulated+gradient-overwritten", LACKS, 17),
];

/// Test on faults between ranks: what is told of ranks is what befell their rows. In few cases two mistakes give the
/// same row, as with keys that are all equal.
#[test]
fn what_befell_the_rows_of_a_rank_is_told() {
    let mut beyond = 0;
    for (subject, words, least) in OF_RANKS {
        let found = findings_of(subject, MANY_CASES, |problem| problem.parallel.size() > 1);
        let told = found.iter().map(|(_, finding)| finding.what.as_str()).filter(|what| {
            let told = what.split_once("looks as if ").map_or("", |(_, told)| told);
            told.contains(", on rank ") || told.trim_start_matches("in the backward ").starts_with("rank ")
        });
        let is_other = |what: &&str| !words.iter().any(|words| what.contains(words));
        let others: Vec<&str> = told.clone().filter(is_other).collect();
        let told = told.count();
        assert!(told >= least, "{subject}: told of {told} of {}", found.len());
        assert!(others.len() * 10 <= told, "{subject}: {others:#?} of {told}");
        for (problem, finding) in &found {
            let group = &problem.parallel.ranks;
            let named = named_ranks(&finding.what);
            assert!(named.iter().all(|rank| group.contains(rank)), "{subject}: {group:?}: {}", finding.what);
            beyond += usize::from(named.iter().any(|rank| *rank >= group.len()));
        }
    }
    assert!(beyond > 10, "{beyond} name a rank whose place in the group has another number");
}

/// Test that a sum over ranks that was never made is told of all of them, and seldom of one.
#[test]
fn a_sum_that_was_not_made_is_told_of_all_ranks() {
    let found = findings_of("emulated+gradients-not-reduced", MANY_CASES, |p| p.parallel.size() > 1);
    let told = |words: &str| found.iter().filter(|(_, finding)| finding.what.contains(words)).count();
    let [all, one] = ["was not summed over ranks", " received from the queries of rank "].map(told);
    assert!(all > 5 && one * 4 < all, "{all} and {one} of {}", found.len());
}

/// Returns the ranks that a text names one by one.
fn named_ranks(text: &str) -> Vec<usize> {
    let number =
        |rest: &str| rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok());
    text.split("rank ").skip(1).filter_map(number).collect()
}

/// Test with large logits. A larger scale takes weight from the second key, as if the key were lost, but the row's
/// LSE grows.
#[test]
fn no_key_is_lost_where_the_lse_grew() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions");
    let case = Case::load(&folder.join("te-716-large-logits.json")).unwrap();
    let subject = by_name("emulated~call-scale-off", &BTreeMap::new()).unwrap();
    let Verdict::Finding(finding) = evaluate(subject.as_ref(), &case.problem) else { panic!("it fails") };
    assert!(!finding.what.contains("looks as if"), "{}", finding.what);
}
