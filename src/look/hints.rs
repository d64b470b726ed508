//! What the errors of a run and the decoded keys tell together: which results are right, and so where the mistake is
//! not.
//!
//! Nothing is guessed. The LSE holds the logits of exactly the keys that a query sees, out the values that it adds up
//! with their weights, and the backward is judged on what the forward returned.

use seamproof_judge::ladder::{ErrorMap, ReadRow, SeenRow};
use seamproof_judge::prose::counted;
use seamproof_oracle::{Problem, TensorName};

use super::svg::ratio;

/// Least number of wrong rows that have to agree on a factor.
const ROWS_LEAST: usize = 3;
/// Largest relative distance of two factors that agree: a few roundings of a 16-bit format.
const FACTOR_SPREAD: f64 = 0.01;
/// Smallest error of a factor that is told.
const FACTOR_LEAST: f64 = 0.001;
/// Multiple of its bound that an exact value has at least, for a factor to mean anything.
const WEIGHT: f64 = 16.0;

/// Returns in words whose values queries read in the place of their own; `None` where none reads another's.
pub(super) fn misread(problem: &Problem, read: &[ReadRow]) -> Option<String> {
    let first = read.first()?;
    let own = |row: &ReadRow| row.head / problem.group();
    let by = |row: &ReadRow| row.read.2 as i64 - row.key as i64;
    let is_of_sequence = read.iter().all(|row| row.read.0 == row.sequence);
    let is_of_head = read.iter().all(|row| row.read.1 == own(row));
    let shift = by(first);
    let is_even = is_of_sequence && read.iter().all(|row| by(row) == shift);
    let rows = counted(read.len() as u64, "row");
    let ReadRow { sequence, head, query, key, read } = first;
    let example = format!(
        "query {query} of sequence {sequence}, head {head}, read that of key {} of sequence {}, KV head {}, in the place of \
         key {key} of its own, KV head {}",
        read.2,
        read.0,
        read.1,
        own(first)
    );
    let what = match (is_even, shift) {
        (true, 0) => "another KV head’s value".to_owned(),
        (true, _) if is_of_head => {
            let side = if shift < 0 { "earlier" } else { "later" };
            format!("the value {} {side} than they should", counted(shift.unsigned_abs(), "row"))
        }
        _ => "another key’s value".to_owned(),
    };
    Some(format!("Asked to read one key each, {rows} of out read {what}: {example}."))
}

/// Returns the hints, in sentences.
pub(super) fn hints(problem: &Problem, maps: &[ErrorMap], seen: &[SeenRow]) -> Vec<String> {
    let past = |name: TensorName| ErrorMap::is_past(maps, name);
    let (lse, out) = (past(TensorName::Lse), past(TensorName::Out));
    let has_lse = maps.iter().any(|map| map.tensor == TensorName::Lse && !map.rows.is_empty());
    let wrong: Vec<String> =
        maps.iter().filter(|map| past(map.tensor)).map(|map| map.tensor.to_string()).collect();
    let mut hints = Vec::new();
    match (lse, out) {
        _ if wrong.is_empty() => {}
        (false, true) if has_lse => hints.push(
            "lse is right and out is not: the number of keys and the logits fit, and the values that are added up do not.".to_owned(),
        ),
        (true, _) if is_seen_rightly(problem, seen) => hints.push(
            "On numbers that tell keys apart, each query saw exactly the keys that the mask shows: the logits are wrong (the \
             scale, the cap, the sink, or rows of q or k that are another place’s or head’s), and not the mask."
                .to_owned(),
        ),
        // Gradients are not compared where a result of the forward is wrong.
        (false, false) if past(TensorName::MaxLogit) => {
            hints.push("Of the forward's results max_logit alone is past its bound.".to_owned());
        }
        (false, false) => {
            hints.push(format!("The forward is right, and the backward is not: wrong are {}.", wrong.join(", ")));
        }
        _ => {}
    }
    hints.extend(maps.iter().filter_map(|map| factor(problem, map)));
    hints
}

/// Whether every query was decoded, and saw what the mask shows.
fn is_seen_rightly(problem: &Problem, seen: &[SeenRow]) -> bool {
    let is_right = |row: &SeenRow| {
        let both = &problem.sequences[row.sequence];
        let visible = problem.mask.visible(row.query, both.q.len, both.kv.len);
        row.keys.as_ref().is_some_and(|keys| visible.parts().eq(keys.iter().cloned()))
    };
    !seen.is_empty() && seen.iter().all(is_right)
}

/// Returns the one factor by which all wrong rows of a tensor differ from the exact ones. An LSE is a logarithm and has
/// none; the largest logit has that of the scale, where no cap bends it.
pub(super) fn factor(problem: &Problem, map: &ErrorMap) -> Option<String> {
    if map.tensor == TensorName::Lse {
        return None;
    }
    let is_logit = map.tensor == TensorName::MaxLogit;
    let rows_least = if is_logit { 1 } else { ROWS_LEAST };
    let factors: Vec<f64> = map
        .past()
        .filter(|row| row.exact.abs() > WEIGHT * row.bound)
        .map(|row| row.got / row.exact)
        .collect();
    let (least, most) = factors
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), f| (least.min(*f), most.max(*f)));
    let agree = factors.len() >= rows_least && (most - least).abs() <= FACTOR_SPREAD * most.abs();
    let mean = (least + most) / 2.0;
    let says = agree && mean.is_finite() && mean > 0.0 && (mean - 1.0).abs() > FACTOR_LEAST;
    match (says, is_logit) {
        (true, true) if problem.softmax.softcap.is_none() => Some(format!(
            "The largest logit of each wrong head is about {} times the exact one: as with another scale{}.",
            ratio(mean),
            if problem.precision.q.is_scaled() || problem.precision.k.is_scaled() {
                " or descale"
            } else {
                ""
            }
        )),
        (true, false) => Some(format!(
            "Each wrong row of {} is about {} times the exact one at its worst element.",
            map.tensor,
            ratio(mean)
        )),
        _ => None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use seamproof_judge::ladder::Judge;
    use seamproof_judge::subject::Backend;
    use seamproof_judge::subjects::{Emulated, Planted};
    use seamproof_oracle::{Heads, InputMode, Mask, ProblemFields};
    use seamproof_simulator::faults::by_id;

    /// Returns two sequences, one of them padded, with two query heads on each KV head.
    pub(in crate::look) fn problem() -> Problem {
        let fields = ProblemFields {
            heads: Heads { q: 4, kv: 2 },
            mask: Mask::CAUSAL,
            mode: InputMode::Flat,
            ..ProblemFields::padded(&[(9, 12), (6, 6)], 16)
        };
        Problem::new(fields).expect("a problem")
    }

    fn told(backend: &dyn Backend) -> Vec<String> {
        let problem = problem();
        let judge = Judge::default();
        let maps = judge.error_maps(backend, &problem).expect("it runs");
        let seen = judge.seen(backend, &problem).expect("it runs");
        hints(&problem, &maps, &seen)
    }

    /// Test that a largest logit alone is a result of the forward.
    #[test]
    fn a_largest_logit_that_is_wrong_is_no_gradient() {
        let (problem, judge) = (problem(), Judge::default());
        let mut maps = judge.error_maps(&Emulated::default(), &problem).expect("it runs");
        let of_heads = maps.iter_mut().find(|map| map.tensor == TensorName::MaxLogit);
        of_heads.expect("largest logits are shown").rows[0].ratio = 2.0;
        let told = hints(&problem, &maps, &[]).join(" ");
        assert!(told.starts_with("Of the forward's results max_logit alone"), "{told}");
    }

    /// Test that each kind of mistake is placed where it is, and that nothing is said of a right subject.
    #[test]
    fn a_mistake_is_looked_for_where_it_is() {
        assert_eq!(told(&Emulated::default()), Vec::<String>::new());
        let of = |id: &str| told(&Planted::new(Emulated::default(), *by_id(id).expect("a fault"))).join(" ");
        for (id, text) in [
            ("value-rows-shifted", "lse is right and out is not"),
            ("scale-one-percent-off", "the logits are wrong"),
            ("scale-one-percent-off", "is about 1.010 times the exact one: as with another scale"),
            ("dk-halved", "The forward is right, and the backward is not: wrong are dk."),
            ("dk-halved", "row of dk is about 0.500 times"),
        ] {
            assert!(of(id).contains(text), "{id}: {}", of(id));
        }
        assert!(!of("window-one-key-long").contains("not the mask"));
    }
}
