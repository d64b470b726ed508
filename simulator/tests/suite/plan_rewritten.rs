//! Plans with several operations rewritten, each of which is right alone. What single edits cannot reach is here.

use seamproof_oracle::{Algorithm, Balance, Problem, ProblemFields, Side, Sink, TensorName};
use seamproof_simulator::check::check;
use seamproof_simulator::check::plan::{PlanFault, Unproved, prove_plan};
use seamproof_simulator::schedule::plan::{Act, Extent, Op, Own, Plan, Programs, Way};
use seamproof_simulator::schedule::{FillValue, MergeOrder, Role, Work};

use crate::plan::packed;

/// Rewrites a section, which is given by its index.
type Rewrite<'a> = &'a (dyn Fn(usize, &mut Vec<Op>) + Sync);

/// Programs of a plan of which all ranks are rewritten.
struct Rewritten<'p> {
    plan: &'p Plan<'p>,
    rewrite: Rewrite<'p>,
}

impl Programs for Rewritten<'_> {
    fn sections(&self) -> usize {
        self.plan.sections()
    }

    fn section(&self, rank: usize, index: usize, to: &mut Vec<Op>) {
        self.plan.section(rank, index, to);
        (self.rewrite)(index, to);
    }
}

/// Asserts that rewritten programs are refused, as their schedule is.
#[track_caller]
fn is_refused(plan: &Plan<'_>, rewrite: Rewrite<'_>) {
    let programs = Rewritten { plan, rewrite };
    assert!(check(plan.problem(), &plan.unroll(&programs)).is_err(), "the schedule is right");
    assert!(prove_plan(plan, &programs).is_err(), "a wrong plan is proved");
}

fn ring(sink: Sink) -> Problem {
    packed(Algorithm::Ring, Balance::DualChunk, (3, sink))
}

/// Returns the operations of a rank.
fn operations(plan: &Plan<'_>) -> Vec<Op> {
    let mut all = Vec::new();
    (0..plan.sections()).for_each(|index| plan.section(0, index, &mut all));
    all
}

/// Returns the out and LSE of the first launch.
fn partial(plan: &Plan<'_>) -> [Own; 2] {
    let of = |Op { act, .. }: &Op| match act {
        Act::Attend { results: [out, lse, _], .. } => Some([*out, *lse]),
        _ => None,
    };
    operations(plan).iter().find_map(of).unwrap()
}

fn buffer(plan: &Plan<'_>, role: Role) -> Own {
    Own(plan.buffers().iter().position(|buffer| buffer.role == role).unwrap() as u16)
}

fn fill(to: Own, value: FillValue) -> Op {
    Op { stream: 0, act: Act::Fill { to, rows: Extent::Slots(Side::Q), value } }
}

#[test]
fn an_exchange_is_no_gather() {
    for balance in [Balance::DualChunk, Balance::Striped { stripe: 1 }] {
        let problem = packed(Algorithm::AllGather, balance, (3, Sink::None));
        let plan = Plan::new(&problem, MergeOrder::Running).unwrap();
        is_refused(&plan, &|_, ops| {
            for op in ops {
                if let Act::AllGather { from, to } = op.act {
                    op.act = Act::AllToAll { side: Side::Kv, way: Way::Collect, from, to, landings: 1 };
                }
            }
        });
    }
}

#[test]
fn a_backward_reads_no_other_out_or_lse() {
    let problem = ring(Sink::None);
    let plan = Plan::new(&problem, MergeOrder::Running).unwrap();
    for (index, value) in [FillValue::Zero, FillValue::NegInfinity].into_iter().enumerate() {
        let other = partial(&plan)[index];
        is_refused(&plan, &|section, ops| {
            if section == plan.of_pass() {
                ops.insert(0, fill(other, value));
            }
            for op in ops {
                match &mut op.act {
                    Act::AttendBackward { inputs, .. } | Act::AttendBackwardEach { inputs, .. } => {
                        inputs[4 + index] = other;
                    }
                    _ => {}
                }
            }
        });
    }
}

#[test]
fn a_result_is_not_left_in_scratch_or_in_an_input() {
    let problem = ring(Sink::Learnable);
    let plan = Plan::new(&problem, MergeOrder::Running).unwrap();
    let places = [partial(&plan)[0], buffer(&plan, Role::Input(TensorName::Q))];
    for (place, tensor) in
        [(places[0], TensorName::Out), (places[0], TensorName::Dq), (places[1], TensorName::Dq)]
    {
        let result = buffer(&plan, Role::Output(tensor));
        is_refused(&plan, &|_, ops| {
            let is_copy = |op: &Op| matches!(op.act, Act::Copy { to, .. } if to == result);
            let Some(index) = ops.iter().position(is_copy) else { return };
            if let Act::Copy { to, .. } = &mut ops[index].act {
                *to = place;
            }
            ops.insert(index, fill(result, FillValue::Zero));
        });
    }
}

#[test]
fn programs_have_the_sections_of_their_plan() {
    struct Shorter<'p>(&'p Plan<'p>);
    impl Programs for Shorter<'_> {
        fn sections(&self) -> usize {
            self.0.sections() - 1
        }

        fn section(&self, rank: usize, index: usize, to: &mut Vec<Op>) {
            self.0.section(rank, index, to);
        }
    }
    let problem = ring(Sink::None);
    let plan = Plan::new(&problem, MergeOrder::Running).unwrap();
    let sections = plan.sections() - 1;
    assert_eq!(prove_plan(&plan, &Shorter(&plan)), Err(Unproved::Sections(sections)));
}

#[test]
fn a_message_writes_no_row_of_a_result_that_nobody_owns() {
    let problem = ring(Sink::None);
    let mut fields = ProblemFields::from(problem);
    let second = &mut fields.sequences[1];
    (second.q.offset, second.kv.offset) = (second.q.offset + 6, second.kv.offset + 6);
    (fields.rows.q, fields.rows.kv) = (fields.rows.q + 6, fields.rows.kv + 6);
    let problem = Problem::new(fields).unwrap();
    let plan = Plan::new(&problem, MergeOrder::Running).unwrap();
    prove_plan(&plan, &plan).unwrap();
    let results = [TensorName::Dk, TensorName::Dv].map(|tensor| buffer(&plan, Role::Output(tensor)));
    is_refused(&plan, &|section, ops| {
        ops.retain(|op| !matches!(op.act, Act::Copy { to, .. } if results.contains(&to)));
        if section + 2 == plan.sections() {
            for op in ops {
                if let Act::Exchange { received, .. } = &mut op.act {
                    *received = results;
                }
            }
        }
    });
}

#[test]
fn a_launch_of_a_part_that_is_not_there_is_refused_and_attends_nothing() {
    let balances = [Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe: 2 }];
    // Launches of the deferred order read their segments in tables.
    let orders = [MergeOrder::Running, MergeOrder::Deferred];
    for (balance, order) in balances.into_iter().flat_map(|balance| orders.map(|order| (balance, order))) {
        let problem = packed(Algorithm::AllGather, balance, (3, Sink::None));
        let plan = Plan::new(&problem, order).unwrap();
        let behind = plan.parts()[0] as u16;
        let rewrite = |_: usize, ops: &mut Vec<Op>| {
            for op in ops {
                if let Act::AttendGathered { launch, .. } | Act::AttendBackward { launch, .. } = &mut op.act {
                    launch.queries = [behind, behind + 1];
                }
            }
        };
        let programs = Rewritten { plan: &plan, rewrite: &rewrite };
        let proof = prove_plan(&plan, &programs);
        assert!(matches!(proof, Err(Unproved::Operation { fault: PlanFault::Pieces(_), .. })), "{proof:?}");
        let schedule = plan.unroll(&programs);
        let works = schedule.ranks.iter().flat_map(|program| &program.operations);
        let launched = works.filter_map(|operation| match &operation.work {
            Work::AttendBackward(launch) => Some(launch.call.segments.len()),
            _ => None,
        });
        let launched: Vec<usize> = launched.collect();
        assert!(!launched.is_empty() && launched.iter().all(|segments| *segments == 0), "{launched:?}");
    }
}
