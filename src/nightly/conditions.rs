//! Conditions that known failures put on a problem: the features of keys, and what the causes of known failures need
//! beyond them.

use seamproof_judge::failure::FEATURES;
use seamproof_oracle::{Balance, Problem, Sequence};

/// Whether a problem meets a condition. Where a finding names a sequence, the list has that one alone.
type Test = fn(&Problem, &[Sequence]) -> bool;

/// Conditions beyond features, by the words of the list.
const CONDITIONS: [(&str, Test); 16] = [
    ("queries without keys", |_, at| at.iter().any(|s| s.q.len > 0 && s.kv.len == 0)),
    // In a ring of pieces dealt in two chunks, the last rank has the chunks in the middle. Both sides are cut alike.
    ("a rank without keys", |p, at| {
        let ring = p.parallel.size() / p.parallel.algorithm.parameter().unwrap_or(1);
        at.iter().any(|s| s.q.len > 0 && 2 * ring * s.kv.len <= (ring - 1) * s.q.span.max(s.kv.span))
    }),
    ("more queries than keys", |_, at| at.iter().any(|s| s.q.len > s.kv.len)),
    ("64 keys past a multiple of 128", |_, at| at.iter().any(|s| s.kv.len % 128 == 64)),
    ("no key at all", |p, _| p.sequences.iter().all(|s| s.kv.len == 0)),
    ("no query at all", |p, _| p.sequences.iter().all(|s| s.q.len == 0)),
    // What is left to the first run of the identity `history`.
    ("no key but in the last sequence", |p, _| but_last(p).all(|s| s.kv.len == 0)),
    ("no query but in the last sequence", |p, _| but_last(p).all(|s| s.q.len == 0)),
    ("one query at most in each sequence", |p, _| p.sequences.iter().all(|s| s.q.len <= 1)),
    ("one row at most in each chunk", |p, _| {
        let chunks = p.parallel.size() * if p.parallel.balance == Balance::DualChunk { 2 } else { 1 };
        p.sequences.iter().all(|s| s.q.span.max(s.kv.span) <= chunks)
    }),
    ("as many rows of q as sequences", |p, _| p.rows.q == p.sequences.len()),
    ("no right bound", |p, _| p.mask.right.is_none()),
    ("right bound of all keys", |p, _| {
        p.mask.right.is_some_and(|right| p.sequences.iter().all(|s| s.kv.len as u64 <= u64::from(right)))
    }),
    ("d_qk above 192 and d_v at most 128", |p, _| p.dims.qk > 192 && p.dims.v <= 128),
    ("d_v neither 64 nor 128", |p, _| ![64, 128].contains(&p.dims.v)),
    ("contiguous balance", |p, _| p.parallel.balance == Balance::Contiguous),
];

fn but_last(problem: &Problem) -> impl Iterator<Item = &Sequence> {
    problem.sequences.iter().rev().skip(1)
}

/// Whether some words are a condition.
pub(super) fn is_condition(words: &str) -> bool {
    FEATURES.iter().any(|(name, _)| *name == words) || CONDITIONS.iter().any(|(name, _)| *name == words)
}

/// Whether a problem meets a condition, in the sequence of this index where one is given.
pub(super) fn meets(problem: &Problem, sequence: Option<usize>, words: &str) -> bool {
    let named = sequence.and_then(|index| problem.sequences.get(index));
    let at = named.map_or(&problem.sequences[..], std::slice::from_ref);
    let is_feature = FEATURES.iter().any(|(name, has)| *name == words && has(problem));
    is_feature || CONDITIONS.iter().any(|(name, test)| *name == words && test(problem, at))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use seamproof_judge::case::Case;

    use super::*;

    fn defect(name: &str) -> Problem {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("corpus/defects/{name}.json"));
        Case::load(&file).unwrap().problem
    }

    #[test]
    fn conditions_hold_where_they_say() {
        for (name, met, not) in [
            ("cudnn-no-keys", "queries without keys", "no query at all"),
            ("cudnn-no-keys", "no key at all", "right bound of all keys"),
            ("cudnn-wide-heads", "d_qk above 192 and d_v at most 128", "queries without keys"),
            ("cudnn-sink-gradient", "d_v neither 64 nor 128", "d_qk above 192 and d_v at most 128"),
            ("torch-cudnn-sdpa-deep-logits", "64 keys past a multiple of 128", "d_v neither 64 nor 128"),
            ("torch-efficient-bottom-right", "more queries than keys", "no key at all"),
            ("torch-flash-no-queries", "no query at all", "more queries than keys"),
            ("fa4-deterministic-no-rows", "no query but in the last sequence", "more queries than keys"),
            ("fa4-deterministic-no-rows", "no key but in the last sequence", "queries without keys"),
            ("torch-flash-one-query-groups", "one query at most in each sequence", "no query at all"),
            ("torch-flash-one-query-groups", "as many rows of q as sequences", "queries without keys"),
            ("torch-flash-open-window", "no right bound", "one query at most in each sequence"),
            ("torch-flash-wide-window", "right bound of all keys", "no right bound"),
            ("te-ring-no-keys", "a rank without keys", "queries without keys"),
            ("torch-flash-open-window", "no right bound", "a rank without keys"),
            ("ring-merge-cancels", "contiguous balance", "as many rows of q as sequences"),
            ("ring-merge-cancels", "one row at most in each chunk", "no query at all"),
            ("ring-merge-cancels", "context parallel", "64 keys past a multiple of 128"),
        ] {
            let problem = defect(name);
            assert!(meets(&problem, None, met), "{name}: {met}");
            assert!(!meets(&problem, None, not), "{name}: {not}");
            assert!(is_condition(met) && is_condition(not));
        }
        assert!(!is_condition("slackness"));
        let several = defect("torch-efficient-no-keys");
        assert!(!meets(&several, None, "no query but in the last sequence"));
    }

    #[test]
    fn a_condition_on_a_sequence_is_asked_of_the_one_that_failed() {
        let problem = defect("torch-efficient-no-keys");
        let met = |sequence| meets(&problem, sequence, "queries without keys");
        assert_eq!([None, Some(0), Some(1)].map(met), [true, true, false]);
    }
}
