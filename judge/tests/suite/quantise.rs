//! Quantisers: the emulated one is right, every planted fault in it is found and shrunk, and stored cases hold.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ndarray::Axis;
use rayon::prelude::*;
use seamproof_judge::case::CASE_VERSION;
use seamproof_judge::files;
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::generate::Limits;
use seamproof_judge::quantise::{Judged, QuantisationCase, Quantiser, draw, judge, shrink};
use seamproof_judge::values;
use seamproof_oracle::quantise::{Quantisation, QuantisationFields};
use seamproof_oracle::sharding::{self, run_of};
use seamproof_oracle::{Form, InputViews, Problem, ProblemFields};
use seamproof_simulator::faults::find;
use seamproof_simulator::faults::{QUANTISER_FAULTS, QuantiserFault};
use seamproof_simulator::quantiser::{EmulatedQuantiser, RankQuantised, RankValues, Stages};

/// Number of cases in which the right quantiser must be right.
const CASES: u64 = 4_000;
/// Number of cases in which each fault must show.
const FAULT_CASES: u64 = 1_000;

fn drawn(index: u64) -> Option<Quantisation> {
    draw(7, index, &Limits::seams())
}

fn planted(fault: &QuantiserFault) -> EmulatedQuantiser {
    let mut stages = Stages::RIGHT;
    (fault.edit)(&mut stages);
    EmulatedQuantiser { stages }
}

#[test]
fn the_right_quantiser_is_right() {
    let subject = EmulatedQuantiser::default();
    let answers: Vec<(Quantisation, Judged)> = (0..CASES)
        .into_par_iter()
        .filter_map(drawn)
        .map(|asked| {
            let judged = judge(&subject, &asked);
            (asked, judged)
        })
        .collect();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (asked, judged) in &answers {
        match judged {
            Judged::Right => {}
            Judged::Uncut(_) => continue,
            wrong => panic!("{wrong:?} on {}", serde_json::to_string(asked).expect("plain data")),
        }
        let problem = &asked.problem;
        let classes = [
            ("judged", true),
            ("several ranks", problem.parallel.size() > 1),
            ("a region", problem.parallel.region > 1),
            ("padding", problem.sequences.iter().any(|s| s.q.len < s.q.span)),
            ("several sequences", problem.sequences.len() > 1),
            ("grouped heads", problem.group() > 1),
            ("delayed", asked.delayed.is_some()),
            ("several tensors", asked.tensors.len() > 1),
            ("a margin", asked.margin != 0),
        ];
        classes
            .into_iter()
            .filter(|(_, is)| *is)
            .for_each(|(class, _)| *counts.entry(class).or_default() += 1);
    }
    assert!(counts.len() == 9 && counts.values().all(|count| *count >= 100), "{counts:?}");
}

#[test]
#[ignore = "takes minutes: two hundred thousand quantisations"]
fn the_right_quantiser_is_right_in_a_long_campaign() {
    let subject = EmulatedQuantiser::default();
    let judged = (0..200_000).into_par_iter().filter_map(drawn).filter(|asked| {
        let judged = judge(&subject, asked);
        let known = matches!(judged, Judged::Right | Judged::Uncut(_));
        assert!(known, "{judged:?} on {}", serde_json::to_string(asked).expect("plain data"));
        judged == Judged::Right
    });
    assert!(judged.count() > 180_000);
}

/// Returns the first quantisation of a fault's stream with a finding.
fn first(fault: &QuantiserFault) -> Option<(Quantisation, Finding)> {
    let subject = planted(fault);
    (0..FAULT_CASES).find_map(|index| {
        let asked = drawn(index)?;
        match judge(&subject, &asked) {
            Judged::Wrong(finding) => Some((asked, *finding)),
            _ => None,
        }
    })
}

#[test]
fn every_planted_fault_is_found_by_a_check_that_it_names_and_shrinks() {
    let found: Vec<_> = QUANTISER_FAULTS.par_iter().map(|fault| (fault, first(fault))).collect();
    for (fault, first) in found {
        let Some((asked, finding)) = first else { panic!("{} is not found", fault.id) };
        let check = finding.check;
        assert!(fault.is_caught_by(check.catcher()), "{} by {finding}", fault.id);
        let (small, found) = shrink(&planted(fault), &asked, finding);
        let rows = small.problem.rows.q + small.problem.rows.kv;
        assert_eq!(found.check, check, "{}", fault.id);
        assert!(rows <= 24, "{} in {rows} rows", fault.id);
    }
}

/// Returns a quantisation with the later half of each sequence's tokens as padding, whose values stay in memory.
fn first_half(asked: &Quantisation) -> Quantisation {
    let mut problem = ProblemFields { form: Form::CuSeqlens, ..asked.problem.clone().into() };
    for sequence in &mut problem.sequences {
        (sequence.q.len, sequence.kv.len) = (sequence.q.len / 2, sequence.kv.len / 2);
    }
    let problem = Problem::new(problem).expect("fewer real rows");
    Quantisation::new(QuantisationFields { problem, ..asked.clone().into() }).expect("the same recipe")
}

/// Whether a subject gives the first half of each sequence, on one rank, the codes that it has in the whole.
fn keeps_prefixes(subject: &dyn Quantiser, asked: &Quantisation) -> bool {
    let (inputs, half) = (values::inputs(&asked.problem), first_half(asked));
    let views = InputViews::from(&inputs);
    let tensors: Vec<_> = asked.tensors.iter().map(|tensor| views.of(*tensor).to_owned()).collect();
    let codes = |asked: &Quantisation| {
        let layout = sharding::whole(&asked.problem);
        let answers = subject.run(asked, &[RankValues { layout, tensors: tensors.clone() }]);
        answers.expect("an answer").remove(0).tensors
    };
    let (whole, half_codes) = (codes(asked), codes(&half));
    let pairs = asked.tensors.iter().zip(whole.iter().zip(&half_codes));
    pairs.into_iter().all(|(tensor, (whole, half_codes))| {
        let rows = |sequence| run_of(sequence, tensor.side()).real_rows();
        half.problem
            .sequences
            .iter()
            .flat_map(rows)
            .all(|row| whole.codes.index_axis(Axis(0), row) == half_codes.codes.index_axis(Axis(0), row))
    })
}

/// Test of the law of prefixes: what breaks it is found without it, since both answers are known to the bit.
#[test]
fn codes_of_earlier_tokens_that_later_ones_move_are_found_by_the_exact_answer() {
    let fault = find(QUANTISER_FAULTS, "blocks-along-the-sequence").expect("the fault is in the catalogue");
    let (right, leaking) = (EmulatedQuantiser::default(), planted(fault));
    let on_one_rank = |asked: &Quantisation| asked.problem.parallel.size() == 1;
    let (mut kept, mut broken) = (0, 0);
    for asked in (0..FAULT_CASES).filter_map(drawn).filter(on_one_rank).filter(Quantisation::keeps_prefixes) {
        assert!(keeps_prefixes(&right, &asked), "{}", serde_json::to_string(&asked).expect("plain data"));
        kept += 1;
        if !keeps_prefixes(&leaking, &asked) {
            let judged = judge(&leaking, &asked);
            assert!(matches!(&judged, Judged::Wrong(finding) if finding.check == Check::Exact), "{judged:?}");
            broken += 1;
        }
    }
    assert!(kept > 100 && broken > 20, "{kept} kept, {broken} broken");
}

/// Stored quantisations, with faults that each must show.
const STORED: [(&str, &[&str]); 8] = [
    ("fa3-queries-of-a-group", &["scale-of-the-first-sequence", "scale-of-the-first-head"]),
    ("pytorch-178817-past-the-range", &["codes-do-not-saturate", "history-oldest-taken", "margin-negated"]),
    ("te-2892-block-pack", &["codes-in-padding", "scale-of-the-first-head", "codes-flushed-to-zero"]),
    ("te-2892-delayed-pack", &["amax-over-padding", "history-with-the-present", "codes-do-not-saturate"]),
    ("te-3248-blocks-along-a-sequence", &["blocks-one-row-late", "mx-scale-rounded-the-other-way"]),
    ("te-3248-blocks-of-one-token", &["blocks-along-the-sequence", "blocks-one-row-late"]),
    ("te-335-descale-is-the-reciprocal", &["descale-from-the-amax", "scale-in-bf16"]),
    ("torchtitan-3109-amax-of-the-group", &["amax-of-one-rank", "amax-of-half-the-group"]),
];

#[test]
fn stored_quantisations_hold_and_show_the_faults_that_they_are_kept_for() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/quantisations");
    let names: Vec<String> = files::list(&folder)
        .expect("the corpus is there")
        .iter()
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    assert_eq!(names, STORED.map(|(name, _)| name), "every stored quantisation is listed");
    for (name, faults) in STORED {
        let text = fs::read(folder.join(format!("{name}.json"))).expect("a readable file");
        let case = QuantisationCase::parse(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(QuantisationCase::parse(case.to_json().as_bytes()).as_ref(), Ok(&case), "{name}");
        let story = case.story.expect("a reason to be kept");
        assert!(story.sources.iter().all(|source| source.starts_with("https://")), "{name}");
        assert_eq!(judge(&EmulatedQuantiser::default(), &case.quantisation), Judged::Right, "{name}");
        for id in faults {
            let fault = find(QUANTISER_FAULTS, id).expect("the fault is in the catalogue");
            let judged = judge(&planted(fault), &case.quantisation);
            assert!(matches!(judged, Judged::Wrong(_)), "{name} does not show {id}");
        }
    }
    let other = format!("{{\"version\": {}}}", CASE_VERSION + 1);
    assert!(QuantisationCase::parse(other.as_bytes()).is_err());
}

/// A subject that answers with something edited.
struct Edited(fn(&mut Vec<RankQuantised>));

impl Quantiser for Edited {
    fn name(&self) -> &str {
        "edited"
    }

    fn run(&self, asked: &Quantisation, ranks: &[RankValues]) -> Result<Vec<RankQuantised>, String> {
        let mut answer = EmulatedQuantiser::default().run(asked, ranks);
        (self.0)(&mut answer);
        Ok(answer)
    }
}

#[test]
fn answers_of_the_wrong_shape_are_findings_of_structure() {
    let edits: [fn(&mut Vec<RankQuantised>); 4] = [
        |ranks| drop(ranks.pop()),
        |ranks| drop(ranks[0].tensors.pop()),
        |ranks| ranks[0].tensors[0].codes = Default::default(),
        |ranks| ranks[0].tensors[0].descale = Default::default(),
    ];
    let asked = (0..).find_map(drawn).expect("the generator draws");
    for edit in edits {
        let judged = judge(&Edited(edit), &asked);
        assert!(matches!(&judged, Judged::Wrong(finding) if finding.check == Check::Structure), "{judged:?}");
    }
    let lost = Edited(|ranks| ranks.iter_mut().for_each(|rank| rank.history = Some(vec![1.0; 99])));
    assert!(matches!(judge(&lost, &asked), Judged::Wrong(_)), "a history that nobody asked for");
}
