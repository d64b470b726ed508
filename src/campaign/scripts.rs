//! Scripts of a campaign's findings, written once its cases have ended.
//!
//! A script imports the library under test twice, which takes seconds, so that no case waits for one: the scripts come
//! after the last case, one after the other, for the first findings alone, and within a time of their own.

use std::time::{Duration, Instant};

use super::Sinks;
use super::event::Event;
use super::summary::{Distinct, Summary};
use crate::script::{self, SCRIPT_LIMIT, Script};
use seamproof_judge::case::Case;
use seamproof_judge::finding::Check;

/// Most scripts of a campaign, unless somebody asks for another number.
pub const SCRIPTS_MAX: usize = 8;
/// Least and most time of all scripts of a campaign. In between they may take as long as its cases.
const SCRIPTS_TIME: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(180)];
/// Longest time of the script of a hang, which shows the failure by not ending: libraries are imported within it.
const HANG_LIMIT: Duration = Duration::from_secs(30);

/// Writes the scripts of the first `most` findings, where the subject is in a Python file, and runs each. What becomes
/// of each finding's script is told in the finding, in its description and in one more event. `begun` hears which of
/// how many scripts is begun. With `most` 0 nothing is told of scripts. Nothing is told of findings that `is_wanted`
/// does not want either.
pub fn write_scripts(
    summary: &mut Summary,
    sinks: &Sinks,
    most: usize,
    is_wanted: &dyn Fn(&Distinct) -> bool,
    begun: &dyn Fn(usize, usize),
) {
    let mut found = if most > 0 { with_cases(summary, sinks) } else { Vec::new() };
    found.retain(|&(index, ..)| is_wanted(&summary.distinct[index]));
    let [least, longest] = SCRIPTS_TIME;
    let time = Duration::try_from_secs_f64(summary.seconds).unwrap_or_default().clamp(least, longest);
    let (start, of) = (Instant::now(), found.len().min(most));
    for (number, (index, name, case)) in found.into_iter().enumerate() {
        let path = sinks.findings.path(&name);
        let limit = if is_hang(&case) { HANG_LIMIT } else { SCRIPT_LIMIT };
        let left = time.saturating_sub(start.elapsed()).min(limit);
        let none = |why: &str| Script::none(format_args!("{why}; {} writes it", script::by_hand(&path)));
        let script = if sinks.control.stopped() {
            none("the campaign was interrupted")
        } else if number >= most {
            none("enough were written")
        } else if left.is_zero() {
            none("no time was left")
        } else {
            begun(number + 1, of);
            script::write(&path, left, &|| sinks.control.stopped())
        };
        if let Err(error) = sinks.findings.tell_script(&name, &case, &script) {
            summary.trouble(error.to_string());
        }
        let distinct = &mut summary.distinct[index];
        distinct.script = Some(script);
        sinks.observer.event(&Event::Finding(distinct));
    }
}

/// Whether a case's finding is that the subject does not end.
fn is_hang(case: &Case) -> bool {
    case.found.as_ref().is_some_and(|found| found.finding.check == Check::Timeout)
}

/// Returns the findings of a subject in a Python file that are on disk: their index, name and case. An identity
/// compares runs of two problems, and a script makes those of one, so identities come last; apart from that the first
/// come first.
fn with_cases(summary: &Summary, sinks: &Sinks) -> Vec<(usize, String, Case)> {
    let mut order: Vec<usize> = (0..summary.distinct.len()).collect();
    order.sort_by_key(|&index| {
        let Distinct { found, first_case, .. } = &summary.distinct[index];
        (found.finding.check == Check::Identity, *first_case)
    });
    let on_disk = |index: usize| {
        let name = summary.distinct[index].name.clone()?;
        let case = Case::load(&sinks.findings.path(&name)).ok()?;
        script::is_python(&case).then_some((index, name, case))
    };
    order.into_iter().filter_map(on_disk).collect()
}
