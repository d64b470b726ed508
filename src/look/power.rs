//! Picture 8: which rung catches what, as a matrix of faults and rungs.

use std::collections::BTreeSet;

use maud::{Markup, PreEscaped, html};
use seamproof_judge::ladder::faults::JudgeScore;
use seamproof_simulator::faults::Catcher;
use serde::Serialize;

use super::page::{document, wide};
use super::report::{SCRIPT, STYLE, escaped, policy};
use super::svg::{Drawing, WIDTH, block, legend, told, words};
use super::table::Table;
use crate::faults::{NotRun, RungScore, Score, Scored};

/// Where the picture's columns begin.
const LEFT: f64 = 92.0;
/// Height of a rung's lane, and of the marks of a fault that a rung saw alone or first, and of one that it saw.
const LANE: f64 = 22.0;
const TALL: f64 = 18.0;
const LOW: f64 = 7.0;

/// What a rung did with a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Sight {
    /// It alone saw it.
    Alone,
    /// It was the first to catch it.
    First,
    /// It saw it.
    Saw,
    /// It did not.
    Not,
}

impl Sight {
    fn of(score: &Score, rung: Catcher) -> Sight {
        match score.rungs.contains(&rung) {
            true if score.only() == Some(rung) => Sight::Alone,
            _ if score.first() == Some(rung) => Sight::First,
            true => Sight::Saw,
            false => Sight::Not,
        }
    }

    fn sign(self) -> &'static str {
        match self {
            Sight::Alone => "◆ alone",
            Sight::First => "● first",
            Sight::Saw => "○",
            Sight::Not => "",
        }
    }

    fn class(self) -> &'static str {
        match self {
            Sight::Alone => "extra",
            Sight::First => "visible",
            Sight::Saw => "low",
            Sight::Not => "hidden",
        }
    }
}

/// The score as plain data.
#[derive(Serialize)]
struct Data {
    schema: &'static str,
    version: u32,
    program: &'static str,
    faults: Vec<Row>,
    judge: Vec<Blinded>,
}

#[derive(Serialize)]
struct Row {
    id: &'static str,
    imitates: &'static str,
    outcome: &'static str,
    cases: Option<usize>,
    /// What each rung did, in the order of the ladder.
    rungs: Vec<(&'static str, Sight)>,
}

#[derive(Serialize)]
struct Blinded {
    id: &'static str,
    imitates: &'static str,
    caught: bool,
    blinds: Vec<&'static str>,
}

/// Returns the page of a score.
pub(crate) fn page(scored: &Scored) -> String {
    let drawing = matrix(&scored.subjects);
    let missed = scored.missed();
    let not_run = scored.not_run();
    let tone = if missed.is_empty() && not_run.is_empty() { "tone-good" } else { "tone-bad" };
    let body = html! {
        main {
            p class="faint" { "Planted faults, and what catches them" }
            h1 id="sentence" class=(tone) { (sentence(scored)) }
            @if !missed.is_empty() { p { strong { "Missed: " } (told(&missed.join(", "))) } }
            @if !not_run.is_empty() { p { strong { "Could not be run: " } (told(&not_run.join(", "))) } }
            section {
                h2 { "Which rung catches what" }
                p class="faint" {
                    "A column for each fault in a subject, ordered by the rung that was the first to catch it; a lane for each \
                     rung. The taller mark is the rung that was first; a rung that saw the fault alone has a mark with plus signs."
                }
                figure { (wide(&drawing.inline())) }
                (rungs(scored).markup())
            }
            section {
                h2 { "Each fault" }
                p class="faint" { "◆ alone: no other rung saw it. ● first: this rung caught it first. ○: it saw it too. A click on a head sorts." }
                div class="tall" tabindex="0" { (faults(&scored.subjects).sortable()) }
            }
            @if !scored.judge.is_empty() {
                section {
                    h2 { "Faults in the judge" }
                    p class="faint" { "Each blinds a rung. It is caught where the faulty judge lets a probe of that rung pass." }
                    (judges(&scored.judge).markup())
                }
            }
            p class="faint" { "A program finds all of this as JSON in the element " code { "#data" } " of this page." }
        }
        script type="application/json" id="data" { (PreEscaped(escaped(&data(scored)))) }
        script { (PreEscaped(SCRIPT)) }
    };
    document("seamproof: planted faults", &policy(), STYLE, &body)
}

fn sentence(scored: &Scored) -> String {
    let all = scored.subjects.len() + scored.judge.len();
    let left = scored.missed().len() + scored.not_run().len() + scored.excluded().len();
    let median =
        scored.median_cases().map_or(String::new(), |cases| format!(", the median one on case {cases}"));
    format!("{} of {all} planted faults were caught{median}.", all - left)
}

/// Returns the faults in the order of the picture.
fn ordered(scores: &[Score]) -> Vec<&Score> {
    let mut ordered: Vec<&Score> = scores.iter().collect();
    ordered.sort_by_key(|score| {
        let first =
            Catcher::ALL.iter().position(|rung| score.first() == Some(*rung)).unwrap_or(Catcher::ALL.len());
        (first, score.rungs.len())
    });
    ordered
}

fn matrix(scores: &[Score]) -> Drawing {
    let entries =
        [("extra", "seen by this rung alone"), ("visible", "caught by it first"), ("low", "seen by it too")];
    let (key, top) = legend(&entries);
    let width = ((WIDTH - LEFT - 2.0) / scores.len().max(1) as f64).min(24.0);
    let marks: Vec<Markup> = ordered(scores)
        .into_iter()
        .enumerate()
        .flat_map(|(column, score)| {
            let x = LEFT + column as f64 * width;
            Catcher::ALL.into_iter().enumerate().filter_map(move |(lane, rung)| {
                let sight = Sight::of(score, rung);
                let height = if sight == Sight::Saw { LOW } else { TALL };
                let y = top + lane as f64 * LANE + TALL - height;
                let title = format!("{}: {} {}", score.suspect.id(), rung.name(), sight.sign());
                (sight != Sight::Not).then(|| block(sight.class(), [x, y, width, height], &title))
            })
        })
        .collect();
    let counts = RungScore::table(scores);
    let said = counts.iter().map(|count| format!("{} saw {}", count.rung.name(), count.saw));
    let end = LEFT + scores.len() as f64 * width;
    Drawing {
        id: "power",
        title: "Which rung catches what".to_owned(),
        desc: format!(
            "A column for each of {} faults and a lane for each rung: {}.",
            scores.len(),
            said.collect::<Vec<_>>().join(", ")
        ),
        height: top + Catcher::ALL.len() as f64 * LANE + 4.0,
        body: html! {
            (key)
            @for (lane, rung) in Catcher::ALL.into_iter().enumerate() {
                @let y = top + lane as f64 * LANE + TALL;
                (words("end", [LEFT - 8.0, y - 4.0], rung.name()))
                path class="lane" d=(format!("M{LEFT} {y}H{end:.1}")) {}
            }
            @for mark in marks { (mark) }
        },
    }
}

fn rungs(scored: &Scored) -> Table {
    let blinding =
        |rung: Catcher| scored.judge.iter().filter(|score| score.fault.caught_by.contains(&rung)).count();
    let row = |score: RungScore| {
        let alone = score.alone.len();
        vec![
            score.rung.name().to_owned(),
            score.saw.to_string(),
            score.first.to_string(),
            alone.to_string(),
            blinding(score.rung).to_string(),
        ]
    };
    Table {
        name: "Rungs",
        head: ["rung", "saw", "first", "alone", "blinded"].map(String::from).to_vec(),
        rows: RungScore::table(&scored.subjects).into_iter().map(row).collect(),
        left: 0,
    }
}

fn outcome(score: &Score) -> &'static str {
    match score.not_run {
        Some(NotRun::Excluded(_)) => "excluded",
        Some(NotRun::Failed(_)) => "not run",
        None if score.caught() => "caught",
        None => "MISSED",
    }
}

fn faults(scores: &[Score]) -> Table {
    let names = Catcher::ALL.map(|rung| rung.name().to_owned());
    let row = |score: &Score| {
        let sights = Catcher::ALL.map(|rung| Sight::of(score, rung).sign().to_owned());
        let cases = score.cases().map_or("-".to_owned(), |cases| cases.to_string());
        let imitates = score.suspect.record().imitates.to_owned();
        let own = [score.suspect.id().to_owned(), outcome(score).to_owned(), cases];
        own.into_iter().chain(sights).chain([imitates]).collect()
    };
    let head = ["fault", "outcome", "cases"].map(String::from);
    Table {
        name: "Faults in subjects",
        head: head.into_iter().chain(names).chain(["imitates".to_owned()]).collect(),
        rows: scores.iter().map(row).collect(),
        left: 0,
    }
}

fn blinds(score: &JudgeScore) -> Vec<&'static str> {
    let names: BTreeSet<&'static str> = score.fault.caught_by.iter().map(|rung| rung.name()).collect();
    names.into_iter().collect()
}

fn judges(scores: &[JudgeScore]) -> Table {
    let row = |score: &JudgeScore| {
        let outcome = if score.caught() { "caught" } else { "MISSED" };
        let record = score.fault.record();
        vec![record.id.to_owned(), outcome.to_owned(), blinds(score).join(", "), record.imitates.to_owned()]
    };
    Table {
        name: "Faults in the judge",
        head: ["fault", "outcome", "blinds", "imitates"].map(String::from).to_vec(),
        rows: scores.iter().map(row).collect(),
        left: 0,
    }
}

fn data(scored: &Scored) -> Data {
    let row = |score: &Score| Row {
        id: score.suspect.id(),
        imitates: score.suspect.record().imitates,
        outcome: outcome(score),
        cases: score.cases(),
        rungs: Catcher::ALL.into_iter().map(|rung| (rung.name(), Sight::of(score, rung))).collect(),
    };
    let blinded = |score: &JudgeScore| {
        let record = score.fault.record();
        Blinded { id: record.id, imitates: record.imitates, caught: score.caught(), blinds: blinds(score) }
    };
    Data {
        schema: "seamproof-power",
        version: 1,
        program: env!("CARGO_PKG_VERSION"),
        faults: scored.subjects.iter().map(row).collect(),
        judge: scored.judge.iter().map(blinded).collect(),
    }
}
