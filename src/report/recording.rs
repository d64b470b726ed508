//! A recording that was judged.

use std::path::Path;

use super::{Entry, Kind, Report, State, sentence};
use crate::campaign::Tone;
use crate::paste::quoted;
use crate::recording::{self, Recording, Sample};
use seamproof_judge::case::{Case, Found, Subject};
use seamproof_judge::failure::FailureKey;
use seamproof_judge::finding::Finding;
use seamproof_judge::prose::{self, counted};
use seamproof_judge::verdict::{Margin, Tier, Verdict};

/// Returns the report of a recording of which every row was judged, or a sample.
pub(crate) fn of_recording(
    dir: &Path,
    recording: &Recording,
    sample: Option<Sample>,
    verdict: &Verdict,
) -> Report {
    let (manifest, problem) = (&recording.manifest, &recording.problem);
    let ranks = counted(manifest.ranks.len() as u64, "rank");
    let title = format!("Recording of {} on {ranks}", manifest.subject.name);
    let mut report = Report::new(Kind::Recording, dir, title, concluded(verdict));
    let margin = if let Verdict::Pass(margin) = verdict { Some(margin.as_ref()) } else { None };
    let fact = |name: &str, value: String| (name.to_owned(), value);
    report.facts = vec![
        fact("subject", manifest.subject.name.clone()),
        fact("run", manifest.run.clone()),
        fact("problem", prose::describe_recorded(problem)),
        fact("left out", recording::left_out(recording, sample, margin)),
    ];
    if let Some(margin) = margin {
        report.facts.push(fact("asked", recording::asked(recording, sample, None, margin)));
        report.facts.extend(margins(margin));
    }
    let errors = if sample.is_none() { recording::error_maps(recording) } else { Vec::new() };
    let found = if let Verdict::Finding(finding) = verdict { Some(finding) } else { None };
    let Some(finding) = found else {
        let subject = Subject { name: manifest.subject.name.clone(), options: Default::default() };
        let case = Box::new(Case::new(subject, 0, problem.clone()));
        report.held = (!errors.is_empty()).then(|| (case, recording.layouts(), errors));
        return report;
    };
    report.with_findings(vec![Entry { errors, ..entry(dir, recording, sample, finding) }])
}

fn concluded(verdict: &Verdict) -> (Tone, String) {
    match verdict {
        Verdict::Pass(margin) => (
            Tone::Good,
            format!("The recorded run holds; its largest error is {:.2} of its bound.", margin.worst()),
        ),
        Verdict::Finding(finding) => (
            Tone::Bad,
            format!("The recorded run does not hold: {}", sentence(&Found::drawn((**finding).clone()))),
        ),
        other => (Tone::Doubt, format!("The recorded run was not judged: {other}.")),
    }
}

/// Returns the largest error ÷ bound of each tensor.
fn margins(margin: &Margin) -> impl Iterator<Item = (String, String)> {
    Tier::ALL.into_iter().flat_map(|tier| {
        let named = margin.tier(tier).named().into_iter().filter(|(_, ratio)| *ratio > 0.0);
        named.map(move |(tensor, ratio)| {
            (format!("{tensor}, tier {tier}"), format!("{ratio:.3} of the bound at most"))
        })
    })
}

fn entry(dir: &Path, recording: &Recording, sample: Option<Sample>, finding: &Finding) -> Entry {
    let name = recording.manifest.subject.name.clone();
    let stored = recording::case_of(recording, sample, finding.clone());
    let case = stored.unwrap_or_else(|_| {
        let found = Some(Found::drawn(finding.clone()));
        let subject = Subject { name: name.clone(), options: Default::default() };
        Case { found, ..Case::new(subject, 0, recording.problem.clone()) }
    });
    let found = Found::drawn(finding.clone().storable());
    let rows = sample.map_or(String::new(), |Sample { rows, seed }| format!(" --rows {rows} --seed {seed}"));
    let key = FailureKey::of(finding, &name, &recording.problem).to_string();
    let replay = format!("seamproof judge-recording {}{rows}", quoted(&dir.display().to_string()));
    let problem = prose::describe_recorded(&recording.problem);
    Entry { case: Some(Box::new(case)), ..Entry::of_found(found, key, State::New, problem, replay) }
}
