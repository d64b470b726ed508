//! What a run of a case gave, as text: how far its results lie from the exact ones, what follows from that, and what its
//! queries saw.

use std::collections::{BTreeMap, BTreeSet};

use seamproof_judge::case::InputSource;
use seamproof_judge::ladder::ErrorMap;
use seamproof_judge::prose::counted;
use seamproof_oracle::TensorName;

use super::svg::ratio;
use super::{Look, errors, hints, mask};
use crate::explain::descales_there;
use seamproof_judge::ladder::SeenRow;

/// Results of a forward.
const FORWARD: [TensorName; 3] = [TensorName::Lse, TensorName::Out, TensorName::MaxLogit];
/// Largest number of sequences whose wrong places are named.
const SEQUENCES_MAX: usize = 8;
/// Largest number of runs of rows, or of heads, that are named of a sequence.
const RUNS_MAX: usize = 4;

impl Look<'_> {
    /// Returns what the run gave; nothing of a case that was not run.
    pub fn ran(&self) -> String {
        let (problem, run) = (&self.case.problem, &self.run);
        let is_past = |tensor| ErrorMap::is_past(&run.errors, tensor);
        let is_forward_wrong = FORWARD.into_iter().any(is_past);
        if run.errors.is_empty() && run.seen.is_empty() {
            return String::new();
        }
        let mut lines: Vec<String> =
            run.errors.iter().filter(|map| !map.rows.is_empty()).flat_map(of_tensor).collect();
        lines.extend(self.descales());
        lines.extend(hints::hints(problem, &run.errors, &run.seen));
        lines.extend(hints::misread(problem, &run.read));
        lines.extend(mask::differences(problem, self.followed().as_ref(), &run.seen));
        lines.extend(of_no_keys(&run.seen));
        lines.extend(run.untold.iter().filter(|_| is_forward_wrong).map(|why| format!("{why}.")));
        let lines: Vec<String> = lines.into_iter().map(|line| format!("  {line}\n")).collect();
        format!(
            "\nrun       one more, its results beside the exact ones; a place is a row and a head\n{}",
            lines.concat()
        )
    }
}

impl Look<'_> {
    /// Returns the descales at the worst place of the first tensor that is wrong.
    fn descales(&self) -> Option<String> {
        let is_drawn = self.case.inputs == InputSource::Generated;
        let wrong = self.run.errors.iter().find(|map| map.past().next().is_some()).filter(|_| is_drawn)?;
        descales_there(&self.case.problem, Some(wrong.tensor), &wrong.worst()?.place)
            .map(|told| format!("{}: {told}", wrong.tensor))
    }
}

/// Returns how many rows hold what no set of keys gives, and the first of them; `None` where there are none.
fn of_no_keys(seen: &[SeenRow]) -> Option<String> {
    let mut unknown = seen.iter().filter(|row| row.keys.is_none());
    let first = unknown.next()?;
    let (count, all) = (1 + unknown.count(), counted(seen.len(), "row"));
    let SeenRow { sequence, head, query, .. } = first;
    Some(format!(
        "As the subject saw it: {count} of {all} hold what no set of keys of their sequence gives, so that their keys \
         cannot be told; the first is query {query} of sequence {sequence}, head {head}."
    ))
}

/// Returns how far the results of a tensor lie from the exact ones, and below that where they are wrong.
fn of_tensor(map: &ErrorMap) -> Vec<String> {
    let (all, past) = (counted(map.rows.len(), "place"), map.past().count());
    let Some(worst) = map.worst() else { return Vec::new() };
    if past == 0 {
        return vec![format!("{}: right; the largest error ÷ bound is {}", map.tensor, ratio(worst.ratio))];
    }
    let told = errors::told(worst);
    let head = format!("{}: WRONG in {past} of {all}; the worst is {}, {told}", map.tensor, worst.place);
    std::iter::once(head).chain(wrong_places(map)).collect()
}

/// Rows and heads of a sequence, and those of them that are wrong.
#[derive(Default)]
struct Places {
    rows: BTreeSet<usize>,
    heads: BTreeSet<usize>,
    wrong_rows: BTreeSet<usize>,
    wrong_heads: BTreeSet<usize>,
}

/// Returns a line for each sequence in which a tensor is wrong: the rows and the heads. Statistics of whole heads have
/// none.
fn wrong_places(map: &ErrorMap) -> Vec<String> {
    let mut sequences: BTreeMap<usize, Places> = BTreeMap::new();
    for worst in &map.rows {
        let Some(sequence) = worst.place.sequence else { continue };
        let places = sequences.entry(sequence).or_default();
        places.rows.extend(worst.place.row);
        places.heads.extend(worst.place.head);
        if worst.ratio > 1.0 {
            places.wrong_rows.extend(worst.place.row);
            places.wrong_heads.extend(worst.place.head);
        }
    }
    let of_sequence = |(sequence, places): (usize, &Places)| {
        let rows = some("row", &places.wrong_rows, &places.rows);
        format!("  sequence {sequence}: {rows}, {}", some("head", &places.wrong_heads, &places.heads))
    };
    let all = sequences.len();
    sequences.retain(|_, places| !places.wrong_rows.is_empty());
    let mut lines: Vec<String> =
        sequences.iter().take(SEQUENCES_MAX).map(|(at, places)| of_sequence((*at, places))).collect();
    let left = sequences.len().saturating_sub(SEQUENCES_MAX);
    lines.extend((left > 0).then(|| format!("  … and {} like these", counted(left, "more sequence"))));
    let right = all - sequences.len();
    lines.extend((right > 0).then(|| format!("  right in {}", counted(right, "sequence"))));
    lines
}

/// Returns which of all rows, or heads, are meant: `all 5 rows`, `row 3 of 8`, `rows 0..3, 6..8 of 8`.
fn some(what: &str, some: &BTreeSet<usize>, all: &BTreeSet<usize>) -> String {
    if some.len() == all.len() {
        return if all.len() == 1 {
            format!("the only {what}")
        } else {
            format!("all {}", counted(all.len(), what))
        };
    }
    let values: Vec<usize> = some.iter().copied().collect();
    let runs: Vec<&[usize]> = values.chunk_by(|a, b| a + 1 == *b).collect();
    let run = |run: &&[usize]| match run {
        [one] => one.to_string(),
        run => format!("{}..{}", run[0], run[run.len() - 1] + 1),
    };
    let mut told: Vec<String> = runs.iter().take(RUNS_MAX).map(run).collect();
    told.extend((runs.len() > RUNS_MAX).then(|| "…".to_owned()));
    let plural = if some.len() == 1 { "" } else { "s" };
    format!("{what}{plural} {} of {}", told.join(", "), all.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::look::hints::tests::problem;
    use crate::look::{Ran, Source};
    use crate::report;
    use seamproof_judge::case::{Case, Subject};
    use seamproof_judge::ladder::Judge;
    use seamproof_judge::subjects::{Emulated, Planted};
    use seamproof_simulator::faults::by_id;

    /// Returns what a run of the emulated kernel with this fault gave.
    fn told(fault: &str) -> String {
        let case = Case::new(Subject { name: "emulated".into(), options: Default::default() }, 0, problem());
        let subject = Planted::new(Emulated::default(), *by_id(fault).expect("a fault"));
        let report::Again { errors, seen, read, untold, .. } = report::run(&case, &subject);
        let source = Source::Unknown(String::new());
        Look { case: &case, file: "", replay: "", source, run: Ran { errors, seen, read, untold } }.ran()
    }

    #[test]
    fn a_run_says_what_is_wrong_and_where() {
        let halved = told("dk-halved");
        assert!(halved.contains("\n  dk: WRONG in 30 of 30 places; the worst is sequence "), "{halved}");
        assert!(halved.contains("\n    sequence 0: all 9 rows, all 2 heads\n"), "{halved}");
        assert!(halved.contains("\n  dq: right; the largest error ÷ bound is "), "{halved}");
        assert!(halved.contains("The forward is right, and the backward is not: wrong are dk."), "{halved}");
        let shifted = told("value-rows-shifted");
        assert!(shifted.contains("Asked to read one key each"), "{shifted}");
        assert!(
            shifted.contains(" of 60 rows hold what no set of keys of their sequence gives"),
            "{shifted}"
        );
    }

    /// Test that the reason why keys are not told stands below a wrong forward, and below a right one nothing.
    #[test]
    fn a_run_says_why_keys_are_not_told() {
        let told = |errors: Vec<ErrorMap>| {
            let case = Case::new(Subject { name: "mine".into(), options: Default::default() }, 0, problem());
            let run =
                Ran { errors, untold: vec!["Which keys cannot be told: q is f32".into()], ..Ran::default() };
            Look { case: &case, file: "", replay: "", source: Source::Outside, run }.ran()
        };
        let errors = |fault: &str| {
            let subject = Planted::new(Emulated::default(), *by_id(fault).expect("a fault"));
            Judge::default().error_maps(&subject, &problem()).expect("it runs")
        };
        let wrong = told(errors("value-rows-shifted"));
        assert!(wrong.ends_with("\n  Which keys cannot be told: q is f32.\n"), "{wrong}");
        let right = told(errors("dk-halved"));
        assert!(!right.contains("cannot be told") && right.contains("dk: WRONG"), "{right}");
    }

    #[test]
    fn places_are_named_as_runs() {
        let all: BTreeSet<usize> = (0..12).collect();
        let of = |places: &[usize]| some("row", &places.iter().copied().collect(), &all);
        assert_eq!(of(&[3]), "row 3 of 12");
        assert_eq!(of(&[0, 1, 2, 7, 8]), "rows 0..3, 7..9 of 12");
        assert_eq!(of(&[0, 2, 4, 6, 8]), "rows 0, 2, 4, 6, … of 12");
        assert_eq!(some("row", &all, &all), "all 12 rows");
        let one = BTreeSet::from([4]);
        assert_eq!(some("head", &one, &one), "the only head");
    }
}
