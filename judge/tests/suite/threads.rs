//! The emulated kernel with a thread for each rank: right problems hold, no bit differs from ranks in turn, and work
//! that does not wait is found.

use seamproof_judge::census::is_legal;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::{Emulated, Planted, Ranks, same_bits};
use seamproof_judge::values::{self, Poison};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::Problem;
use seamproof_simulator::faults::by_id;
use seamproof_simulator::schedule::MergeOrder;

/// Returns drawn problems on several ranks.
fn drawn(seed: u64) -> impl Iterator<Item = Problem> {
    (0..20_000).filter_map(move |index| match generate::draw(seed, index, &Limits::quick()) {
        Draw::Problem(problem) => Some(problem).filter(|p| p.parallel.all_ranks() > 1 && is_legal(p)),
        _ => None,
    })
}

fn on_threads(order: u64) -> Emulated {
    let merge = MergeOrder::WEIGHTED[(order % 2) as usize];
    Emulated { ranks: Ranks::Threads, order, merge, ..Emulated::default() }
}

#[test]
fn no_bit_differs_from_ranks_in_turn() {
    for (order, problem) in (0..).zip(drawn(3).take(150)) {
        let mut inputs = values::inputs(&problem);
        values::poison(&mut inputs, &problem, Poison::Nan);
        let threads = on_threads(order);
        let in_turn = Emulated { ranks: Ranks::InTurn, ..threads };
        let [one, other] = [threads, in_turn].map(|subject| subject.run(&problem, &inputs));
        match (one, other) {
            (Ok(one), Ok(other)) => assert!(same_bits(&one, &other), "{problem:?}"),
            (one, other) => assert_eq!(one.err(), other.err(), "{problem:?}"),
        }
    }
}

#[test]
fn right_schedules_hold_on_threads() {
    for (order, problem) in (0..).zip(drawn(4).take(100)) {
        let verdict = evaluate(&on_threads(order), &problem);
        assert!(matches!(verdict, Verdict::Pass(_)), "{verdict}\n{problem:?}");
    }
}

#[test]
fn work_that_does_not_wait_is_found() {
    for id in
        ["kv-read-before-it-arrives", "sent-before-it-is-made", "step-before-the-gather", "steps-not-joined"]
    {
        let fault = *by_id(id).expect("a fault");
        let found = (0..).zip(drawn(5).take(600)).find(|(order, problem)| {
            let planted = Planted::new(on_threads(*order), fault);
            let applies = fault.schedule(problem).is_some_and(|mut right| fault.plant(problem, &mut right));
            applies && matches!(evaluate(&planted, problem), Verdict::Finding(_))
        });
        assert!(found.is_some(), "{id}");
    }
}
