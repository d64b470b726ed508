//! Faults in the judge. For each thing that the judge checks there is a result that is wrong in nothing else. A judge
//! that does not look there passes it, and the test fails.

use ndarray::{Array1, Array3, Axis, Slice};
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::{judge, judge_malformed};
use seamproof_judge::subject::{
    Backend, ChangedInput, Declaration, Outputs, PaddingOutputs, RankGradients, RankOutputs, Refusal,
    RunError, Table,
};
use seamproof_judge::subjects::Emulated;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Heads, Inputs, Mask, Pass, Problem, ProblemFields, Run, Sequence,
    Sink, Softmax, TensorName, TensorRows,
};
use seamproof_simulator::{Damage, Guard, UNWRITTEN_BITS};

/// Number of real rows of the one sequence; the next constants are its owned rows and all rows of a tensor.
const REAL: usize = 3;
const OWNED: usize = 4;
const ROWS: usize = 6;

/// Returns one sequence in the middle of a packed tensor with two rows that nobody owns. Every output is asked for.
fn fields() -> ProblemFields {
    let run = Run::packed(1, REAL, OWNED);
    ProblemFields {
        rows: TensorRows { q: ROWS, kv: ROWS },
        heads: Heads { q: 2, kv: 1 },
        mask: Mask::CAUSAL,
        softmax: Softmax { sink: Sink::Learnable, ..Softmax::scaled(0.5) },
        data_seed: 1,
        ..ProblemFields::of(vec![Sequence { id: 0, q: run, kv: run }], 4)
    }
}

fn problem(edit: impl FnOnce(&mut ProblemFields)) -> Problem {
    let mut fields = fields();
    edit(&mut fields);
    Problem::new(fields).expect("the fields are legal")
}

/// Returns the problem over two ranks, each with two of the rows. The last row of the second rank is padding.
fn over_two_ranks() -> Problem {
    problem(|fields| {
        let (algorithm, balance) = (Algorithm::Ring, Balance::Contiguous);
        fields.parallel = ContextParallel::over(2, algorithm, balance);
    })
}

type Spoil = Box<dyn Fn(&Inputs, &mut Outputs) + Sync>;

/// The emulated backend, with spoilt results.
struct Spoilt {
    inner: Emulated,
    spoil: Spoil,
    table: Table,
    outputs: PaddingOutputs,
}

impl Spoilt {
    fn new(spoil: impl Fn(&Inputs, &mut Outputs) + Sync + 'static) -> Spoilt {
        let inner = Emulated::default();
        let table = inner.declaration().table;
        Spoilt { inner, spoil: Box::new(spoil), table, outputs: PaddingOutputs::Zero }
    }
}

impl Backend for Spoilt {
    fn declaration(&self) -> Declaration {
        let mut declaration = self.inner.declaration();
        declaration.table = self.table.clone();
        declaration.padding.outputs = self.outputs;
        declaration
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn name(&self) -> &str {
        "spoilt"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = self.inner.run(problem, inputs)?;
        (self.spoil)(inputs, &mut outputs);
        Ok(outputs)
    }
}

fn finding(backend: &dyn Backend, problem: &Problem) -> Finding {
    match judge(backend, problem) {
        Verdict::Finding(finding) => *finding,
        verdict => panic!("not seen: {verdict:?}"),
    }
}

/// Checks the judge's finding about results spoilt in this way.
fn seen(
    problem: &Problem,
    check: Check,
    what: &str,
    spoil: impl Fn(&Inputs, &mut Outputs) + Sync + 'static,
) -> Finding {
    let finding = finding(&Spoilt::new(spoil), problem);
    assert_eq!(finding.check, check, "{finding}");
    assert!(finding.what.contains(what), "{finding}");
    finding
}

fn gradients(rank: &mut RankOutputs) -> &mut RankGradients {
    rank.gradients.as_mut().expect("a backward pass")
}

/// Returns the first rows of a tensor, with zeros in those that it does not have.
fn with_rows(tensor: &Array3<f32>, rows: usize) -> Array3<f32> {
    let (all, heads, dim) = tensor.dim();
    let mut other = Array3::zeros((rows, heads, dim));
    let first = Slice::from(..rows.min(all));
    other.slice_axis_mut(Axis(0), first).assign(&tensor.slice_axis(Axis(0), first));
    other
}

/// Returns an element of a row of a tensor. max_logit and dsink have no rows.
fn element(rank: &mut RankOutputs, tensor: TensorName, row: usize) -> &mut f32 {
    match tensor {
        TensorName::Out => &mut rank.out[[row, 1, 3]],
        TensorName::Lse => &mut rank.lse.as_mut().expect("lse is shown")[[1, row]],
        TensorName::MaxLogit => &mut rank.max_logit.as_mut().expect("max_logit is shown")[1],
        TensorName::Dq => &mut gradients(rank).dq[[row, 1, 3]],
        TensorName::Dk => &mut gradients(rank).dk[[row, 0, 3]],
        TensorName::Dv => &mut gradients(rank).dv[[row, 0, 3]],
        TensorName::Dsink => &mut gradients(rank).dsink[1],
        other => panic!("{other} is no result"),
    }
}

const WITH_ROWS: [TensorName; 5] =
    [TensorName::Out, TensorName::Lse, TensorName::Dq, TensorName::Dk, TensorName::Dv];

/// Last real row of the problem's tensors; the next constants are its padding and a row that nobody owns.
const LAST_ROW: usize = REAL;
const PADDING_ROW: usize = OWNED;
const FREE_ROW: usize = ROWS - 1;

/// Whether this is the first of two runs, whose padding rows hold NaN.
fn is_first(inputs: &Inputs) -> bool {
    inputs.v[[PADDING_ROW, 0, 0]].is_nan()
}

#[test]
fn right_results_hold() {
    for problem in [problem(|_| {}), over_two_ranks()] {
        let verdict = judge(&Spoilt::new(|_, _| {}), &problem);
        assert!(matches!(verdict, Verdict::Pass(_)), "{verdict:?}");
    }
}

#[test]
fn capability_a_refusal_is_as_the_table_says() {
    let mut uncapped = Spoilt::new(|_, _| {});
    uncapped.table.softcap = false;
    let capped = problem(|fields| fields.softmax.softcap = Some(8.0));
    let ran = finding(&uncapped, &capped);
    assert_eq!(
        (ran.check, ran.what.contains("ran what its table refuses")),
        (Check::Capability, true),
        "{ran}"
    );

    struct Refusing(Refusal, Emulated);
    impl Backend for Refusing {
        fn declaration(&self) -> Declaration {
            let mut declaration = self.1.declaration();
            declaration.table.sinks = vec![Sink::None];
            declaration
        }

        fn inner(&self) -> Option<&dyn Backend> {
            Some(&self.1)
        }
        fn name(&self) -> &str {
            "refusing"
        }
        fn run(&self, _: &Problem, _: &Inputs) -> Result<Outputs, RunError> {
            Err(self.0.clone().into())
        }
    }
    assert!(matches!(
        judge(&Refusing(Refusal::Sink, Emulated::default()), &problem(|_| {})),
        Verdict::Refused(Refusal::Sink)
    ));
    let another = finding(&Refusing(Refusal::Softcap, Emulated::default()), &problem(|_| {}));
    assert!(another.check == Check::Capability && another.what.contains("its table says"), "{another}");
    let none = finding(
        &Refusing(Refusal::Softcap, Emulated::default()),
        &problem(|fields| fields.softmax.sink = Sink::None),
    );
    assert!(none.check == Check::Capability && none.what.contains("refused what its table takes"), "{none}");
}

#[test]
fn crash_a_panic_in_either_run_is_the_subject_s() {
    for first in [true, false] {
        let panics = move |inputs: &Inputs, _: &mut Outputs| assert!(is_first(inputs) != first, "boom");
        seen(&problem(|_| {}), Check::Crash, "boom", panics);
    }
}

#[test]
fn validation_a_problem_is_refused_by_the_rule_that_it_breaks() {
    let limits = Limits::quick();
    let drawn = (0..).find_map(|index| match generate::draw(1, index, &limits) {
        Draw::Malformed(malformed) => Some(malformed),
        Draw::Problem(_) => None,
    });
    let malformed = drawn.expect("one case in forty is malformed");
    assert!(matches!(judge_malformed(&malformed), Verdict::RefusedMalformed(_)));
    let accepted = generate::Malformed { fields: fields(), ..malformed };
    let Verdict::Finding(finding) = judge_malformed(&accepted) else { panic!("not seen") };
    assert_eq!(finding.check, Check::Validation);
}

#[test]
fn structure_shapes_and_guard_bands() {
    let sinkless = problem(|fields| fields.softmax.sink = Sink::None);
    seen(&sinkless, Check::Structure, "has shape", |_, outputs| {
        gradients(&mut outputs.ranks[0]).dsink = Array1::zeros(2);
    });
    for rows in [REAL, ROWS + 1] {
        seen(
            &problem(|_| {}),
            Check::Structure,
            &format!("has shape [{rows}, 2, 4], not [6, 2, 4]"),
            move |_, outputs| {
                outputs.ranks[0].out = with_rows(&outputs.ranks[0].out, rows);
            },
        );
    }
    seen(
        &over_two_ranks(),
        Check::Structure,
        "on rank 1: has shape [6, 2, 4], not [2, 2, 4]",
        |_, outputs| {
            outputs.ranks[1].out = with_rows(&outputs.ranks[1].out, ROWS);
        },
    );
    let forward = problem(|fields| fields.pass = Pass::Forward);
    let backward = Emulated::default();
    seen(&forward, Check::Structure, "gradients came back", move |inputs, outputs| {
        let mut inputs = inputs.clone();
        inputs.dout = inputs.q.clone();
        *outputs = backward.run(&problem(|_| {}), &inputs).expect("it runs");
    });
    seen(&problem(|_| {}), Check::Structure, "no gradients", |_, outputs| outputs.ranks[0].gradients = None);
    seen(&over_two_ranks(), Check::Structure, "ranks answered", |_, outputs| {
        outputs.ranks.push(outputs.ranks[1].clone());
    });
    seen(&problem(|_| {}), Check::Structure, "written outside dk", |_, outputs| {
        outputs.damage.push(Damage { tensor: "dk".into(), guard: Guard::After, distance: 0, elements: 1 });
    });
}

#[test]
fn structure_inputs_that_are_changed() {
    for (tensor, first, row, all) in [
        (TensorName::V, vec![2, 0, 3], (Some(0), Some(1)), ROWS * 4),
        (TensorName::Q, vec![FREE_ROW, 1, 0], (None, Some(FREE_ROW)), ROWS * 8),
        (TensorName::Sink, vec![1], (None, None), 2),
    ] {
        let what = format!("the kernel changed its input {tensor}, here first");
        let head = first[first.len().min(2) - 1];
        let told = seen(&problem(|_| {}), Check::Structure, &what, move |_, outputs| {
            outputs.changed.push(ChangedInput { tensor, first: first.clone(), elements: 2 });
        });
        assert_eq!((told.tensor, told.failed, told.compared), (Some(tensor), 2, all), "{told}");
        assert_eq!(((told.place.sequence, told.place.row), told.place.head), (row, Some(head)), "{told}");
    }
}

/// Test of a padding row in either of the two runs, and of a row that nobody owns, in every tensor that has rows.
#[test]
fn structure_rows_that_are_not_real() {
    for tensor in WITH_ROWS {
        for first in [true, false] {
            let told = seen(&problem(|_| {}), Check::Structure, "padding row", move |inputs, outputs| {
                if is_first(inputs) == first {
                    *element(&mut outputs.ranks[0], tensor, PADDING_ROW) = f32::MIN_POSITIVE;
                }
            });
            assert_eq!((told.tensor, told.failed), (Some(tensor), 1), "{told}");
        }
        // These are zeros, as the contract of padding asks. But the row is nobody's, and the contract does not cover
        // it.
        let told =
            seen(&problem(|_| {}), Check::Structure, "no sequence owns this row", move |_, outputs| {
                *element(&mut outputs.ranks[0], tensor, FREE_ROW) = 0.0;
            });
        assert_eq!(
            (told.tensor, told.place.row, told.place.sequence),
            (Some(tensor), Some(FREE_ROW), None),
            "{told}"
        );
        assert!(!told.what.contains("padding") && told.what.contains("left as it was"), "{told}");
        let last_rank = seen(&over_two_ranks(), Check::Structure, "on rank 1", move |_, outputs| {
            // The second row of the second rank's share is the sequence's padding.
            *element(&mut outputs.ranks[1], tensor, 1) = f32::MIN_POSITIVE;
        });
        assert_eq!(last_rank.tensor, Some(tensor), "{last_rank}");
    }
}

/// Test with zeros where the contract says that padding is left alone.
#[test]
fn structure_the_contract_decides_what_padding_holds() {
    let untouched = Spoilt { outputs: PaddingOutputs::Untouched, ..Spoilt::new(|_, _| {}) };
    let told = finding(&untouched, &problem(|_| {}));
    assert_eq!((told.check, told.got.as_deref()), (Check::Structure, Some("0")), "{told}");
    for (tensor, held) in WITH_ROWS.into_iter().flat_map(|tensor| [(tensor, 7.0), (tensor, f32::NAN)]) {
        let unspecified = Spoilt {
            outputs: PaddingOutputs::Unspecified,
            ..Spoilt::new(move |_, outputs| *element(&mut outputs.ranks[0], tensor, PADDING_ROW) = held)
        };
        assert!(matches!(judge(&unspecified, &problem(|_| {})), Verdict::Pass(_)), "{held} in {tensor}");
    }
}

#[test]
fn structure_a_real_row_is_written() {
    for tensor in WITH_ROWS {
        let told = seen(&problem(|_| {}), Check::Structure, "never written", move |_, outputs| {
            *element(&mut outputs.ranks[0], tensor, LAST_ROW) = f32::from_bits(UNWRITTEN_BITS);
        });
        assert_eq!((told.tensor, told.failed), (Some(tensor), 1), "{told}");
    }
}

#[test]
fn structure_ranks_agree_on_the_maximum() {
    let told = seen(&over_two_ranks(), Check::Structure, "rank 1 holds another maximum", |_, outputs| {
        *element(&mut outputs.ranks[1], TensorName::MaxLogit, 0) -= 1.0;
    });
    assert_eq!(told.tensor, Some(TensorName::MaxLogit));
}

/// Test with one element whose last bit differs between the two runs, far inside every bound.
#[test]
fn poison_one_bit_of_one_element() {
    for tensor in TensorName::RESULTS {
        let told =
            seen(&problem(|_| {}), Check::Poison, "padding rows of the inputs", move |inputs, outputs| {
                if !is_first(inputs) {
                    let value = element(&mut outputs.ranks[0], tensor, LAST_ROW);
                    *value = f32::from_bits(value.to_bits() ^ 1);
                }
            });
        assert_eq!((told.tensor, told.failed), (Some(tensor), 1), "{told}");
    }
}

/// Test with one wrong element, the same in both runs. NaN is wrong as well.
#[test]
fn envelope_one_element_of_each_result() {
    for tensor in TensorName::RESULTS {
        for wrong in [f32::NAN, f32::INFINITY, 100.0] {
            let told = seen(&problem(|_| {}), Check::Envelope, "exact value", move |_, outputs| {
                *element(&mut outputs.ranks[0], tensor, LAST_ROW) = wrong;
            });
            assert_eq!((told.tensor, told.failed), (Some(tensor), 1), "{told}");
        }
    }
}

/// Test that the last rank counts as the first does.
#[test]
fn envelope_one_element_of_each_rank() {
    for (tensor, rank) in WITH_ROWS.into_iter().flat_map(|tensor| [(tensor, 0), (tensor, 1)]) {
        let told = seen(&over_two_ranks(), Check::Envelope, "exact value", move |_, outputs| {
            *element(&mut outputs.ranks[rank], tensor, 0) = 100.0;
        });
        assert_eq!((told.tensor, told.place.row), (Some(tensor), Some(2 * rank)), "{told}");
    }
    for rank in [0, 1] {
        let told = seen(&over_two_ranks(), Check::Envelope, "exact value", move |_, outputs| {
            *element(&mut outputs.ranks[rank], TensorName::Dsink, 0) += 100.0;
        });
        assert_eq!(told.tensor, Some(TensorName::Dsink), "{told}");
    }
}

#[test]
fn what_is_too_large_is_not_run() {
    let large = problem(|fields| {
        fields.sequences.clear();
        fields.rows = TensorRows { q: 1 << 24, kv: 1 << 24 };
    });
    let panics = Spoilt::new(|_, _| panic!("it was run"));
    assert!(matches!(judge(&panics, &large), Verdict::TooLarge(_)));
}
