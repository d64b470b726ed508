//! Identities of a forward that is too large for a campaign's judge.
//!
//! The identities here need runs of the subject and one comparison of its results, and their time grows with tokens.
//! They are: sequences elsewhere, in another order, alone, with others among them; heads in another order or repeated;
//! signs and powers of two; values of 1; one rank for several; the same run again. They judge every row, where the
//! envelope judges a sample.

use std::time::Instant;

use super::Forward;
use seamproof_judge::finding::{Finding, Relation};
use seamproof_judge::hash::mix;
use seamproof_judge::identity::{Identity, identity};
use seamproof_judge::ladder::evidence::{Depth, Evidence, Judge, Look, Meter, Told};
use seamproof_judge::subject::Backend;
use seamproof_oracle::sharding as layout;

/// The relations that may be asked.
pub const RELATIONS: [Relation; 15] = [
    Relation::PaddingAmount,
    Relation::Placement,
    Relation::SequenceOrder,
    Relation::Alone,
    Relation::EmptySequence,
    Relation::ClosingOffsets,
    Relation::OneRank,
    Relation::UnitValues,
    Relation::LinearInV,
    Relation::ScaleFolding,
    Relation::Negation,
    Relation::RepeatedKvHeads,
    Relation::HeadOrder,
    Relation::Rerun,
    Relation::History,
];
/// The number that sets the draw of identities apart from other uses of the data seed.
const DRAW: u64 = 0x1a46_e1de;

/// The result of asking identities.
#[derive(Clone, Debug)]
pub struct Related {
    /// The identities that were asked and said something of the case.
    pub asked: Vec<&'static str>,
    /// The number of runs of the subject.
    pub runs: u32,
    /// The finding of the first identity that is broken.
    pub finding: Option<Finding>,
    /// The time of all identities in seconds.
    pub seconds: f64,
}

/// Returns the identities that the subject's promises allow, in an order that a seed draws.
fn drawn(backend: &dyn Backend, seed: u64) -> Vec<&'static Identity> {
    let promises = backend.declaration().promises;
    let allowed = RELATIONS.into_iter().map(identity).filter(|identity| (identity.needs)(&promises));
    let mut allowed: Vec<_> = allowed.collect();
    allowed.sort_by_cached_key(|identity| mix(mix(seed ^ DRAW).wrapping_add(identity.relation as u64)));
    allowed
}

/// Asks `count` identities that say something of the case, and stops after the first that is broken. Returns an error
/// where an identity could not be asked. The results are those of the subject, and the inputs' rows that are not real
/// hold zeros.
pub fn related(backend: &dyn Backend, forward: &Forward<'_>, count: usize) -> Result<Related, String> {
    let Forward { problem, inputs, got, .. } = *forward;
    let start = Instant::now();
    let judge = Judge { products_max: 0, elements_max: u64::MAX, ..Judge::default() };
    let (layout, meter, told) = (layout::whole(problem), Meter::default(), Told::default());
    let evidence = Evidence {
        backend,
        problem,
        layout: &layout,
        inputs,
        first: got,
        second: got,
        judge: &judge,
        depth: Depth::First,
        meter: &meter,
        told: &told,
    };
    let mut related = Related { asked: Vec::new(), runs: 0, finding: None, seconds: 0.0 };
    for identity in drawn(backend, problem.data_seed) {
        if related.asked.len() == count || related.finding.is_some() {
            break;
        }
        let Some(answer) = identity.answer(&evidence) else { continue };
        related.asked.push(identity.relation.name());
        related.runs += identity.runs;
        match answer {
            Look::Held => {}
            Look::Broken(finding) => related.finding = Some(*finding),
            Look::Failed(what) => return Err(format!("{}: {what}", identity.relation.name())),
        }
    }
    related.seconds = start.elapsed().as_secs_f64();
    Ok(related)
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::generate::{self, Draw, Profile};
    use seamproof_judge::subject::RankOutputs;
    use seamproof_judge::subjects::Emulated;
    use seamproof_judge::values;
    use seamproof_oracle::envelope::Model;
    use seamproof_oracle::{Inputs, Pass, Problem, ProblemFields};

    /// Returns forwards on one rank without pages, with the emulated kernel's results.
    fn forwards(cases: u64) -> impl Iterator<Item = (Problem, Inputs, RankOutputs)> {
        let limits = Profile::Quick.limits();
        let drawn = (0..cases).filter_map(move |case| match generate::draw(7, case, &limits) {
            Draw::Problem(problem) if problem.parallel.is_whole() && problem.pages.is_none() => {
                Problem::new(ProblemFields { pass: Pass::Forward, ..problem.into() }).ok()
            }
            _ => None,
        });
        drawn.filter_map(|problem| {
            let inputs = values::inputs(&problem);
            let got = Emulated::default().run(&problem, &inputs).ok()?.ranks.pop()?;
            Some((problem, inputs, got))
        })
    }

    fn asked(problem: &Problem, inputs: &Inputs, got: &RankOutputs, count: usize) -> Related {
        let subject = Emulated::default();
        let model = Model::new(problem, subject.declaration().arithmetic, subject.partition(problem));
        let forward = Forward { problem, inputs, got, model: &model };
        related(&subject, &forward, count).expect("it can be asked")
    }

    #[test]
    fn a_right_forward_holds_and_every_identity_is_asked_of_some() {
        let mut seen = std::collections::BTreeSet::new();
        for (problem, inputs, got) in forwards(150) {
            let all = asked(&problem, &inputs, &got, usize::MAX);
            assert!(all.finding.is_none(), "{} on {problem:?}", all.finding.expect("one"));
            let two = asked(&problem, &inputs, &got, 2);
            assert_eq!(two.asked[..], all.asked[..two.asked.len()]);
            assert_eq!(two.asked.len(), all.asked.len().min(2));
            seen.extend(all.asked);
        }
        // These are forwards on one rank, of which [`Relation::OneRank`] says nothing.
        assert_eq!(seen.len(), RELATIONS.len() - 1, "{seen:?}");
    }

    #[test]
    fn a_wrong_row_is_found() {
        let (mut wrong, mut found) = (0, 0);
        for (problem, inputs, mut got) in forwards(60) {
            let Some(sequence) = problem.sequences.iter().find(|sequence| sequence.q.len > 0) else {
                continue;
            };
            got.out[[sequence.q.row(sequence.q.len - 1), 0, 0]] += 0.5;
            wrong += 1;
            found += usize::from(asked(&problem, &inputs, &got, usize::MAX).finding.is_some());
        }
        assert!(wrong > 20 && found == wrong, "{found} of {wrong}");
    }
}
