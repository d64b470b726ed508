//! A subject that is called wrongly, by a fault of [`MISCALLS`](super::MISCALLS).
//!
//! A subject behind worker processes is called wrongly by the supervisor. Its workers serve the right subject, since
//! the call and not the subject has the fault, and they keep it open from one fault to the next. The runs of a worker
//! before it dies are therefore the wrong calls themselves, on the subject that is [called](SubjectName::called).

use std::sync::atomic::{AtomicBool, Ordering};

use ndarray::{Array1, Array3, Axis};
use seamproof_oracle::replay::Replay;
use seamproof_oracle::{Inputs, Problem, Run, TensorName};
use seamproof_simulator::is_unwritten;

use super::ideal::Ideal;
use super::miscall::Miscall;
use super::name::SubjectName;
use super::{difference, same_bits};
use crate::ladder::compare;
use crate::subject::{Backend, Declaration, Outputs, PaddingOutputs, RankGradients, RankOutputs, RunError};

/// A subject with a fault at its call. It declares what the subject declares.
pub struct Miscalled<'a> {
    inner: Box<dyn Backend + 'a>,
    miscall: &'static Miscall,
    name: String,
}

impl<'a> Miscalled<'a> {
    /// Returns the subject `inner~ID`.
    pub fn new(inner: Box<dyn Backend + 'a>, miscall: &'static Miscall) -> Miscalled<'a> {
        let name = SubjectName::from(inner.name()).called_wrongly(miscall).name();
        Miscalled { inner, miscall, name }
    }

    /// Whether the fault changes the exact answer, as the problem's formats hold it, or may leave a row unwritten.
    /// Otherwise it is equivalent to the right call. The subject itself is not run, because two runs of one that sums
    /// in any order differ by themselves.
    pub fn shows(&self, problem: &Problem, inputs: &Inputs) -> bool {
        if !self.does_anything(problem, inputs) {
            return false;
        }
        let ideal = Ideal(self.inner.as_ref());
        match (Backend::run(&ideal, problem, inputs), (self.miscall.edit)(&ideal, problem, inputs)) {
            (Ok(right), Ok(wrong)) => {
                difference(&wrong, &right).is_some() || self.leaves_rows(problem, inputs)
            }
            (Ok(_), Err(_)) => true,
            (Err(_), _) => false,
        }
    }

    /// Whether a subject that keeps its contract may leave a row unwritten that the contract makes it write, since the
    /// wrong question does not have that row. The exact answer there may be 0, as that of rows outside a question is.
    /// Where padding may hold anything, the row is taken for unwritten.
    fn leaves_rows(&self, problem: &Problem, inputs: &Inputs) -> bool {
        let rows = WrittenRows(self.inner.as_ref());
        let (right, wrong) = (rows.run(problem, inputs), (self.miscall.edit)(&rows, problem, inputs));
        let left = |(right, wrong): (&f32, &f32)| *right == WRITTEN && is_unwritten(*wrong);
        right.ok().zip(wrong.ok()).is_some_and(|(right, wrong)| {
            let [right, wrong] = [&right, &wrong].map(|outputs| outputs.ranks.iter().flat_map(with_rows));
            right.zip(wrong).any(|(right, wrong)| right.iter().zip(wrong).any(left))
        })
    }

    /// Whether the fault asks another question, or changes results that are no special numbers. This needs no answer,
    /// and a fault of sinks does nothing on most problems.
    fn does_anything(&self, problem: &Problem, inputs: &Inputs) -> bool {
        let probe =
            Probe { of: self.inner.as_ref(), right: (problem, inputs), asked_otherwise: false.into() };
        let changed = (self.miscall.edit)(&probe, problem, inputs);
        let results = probe.results(problem);
        probe.asked_otherwise.into_inner() || !changed.is_ok_and(|changed| same_bits(&changed, &results))
    }
}

/// Number in the rows that a subject writes.
const WRITTEN: f32 = 1.0;

/// A subject that writes one number to the rows that its contract makes it write, and leaves all others.
struct WrittenRows<'a>(&'a dyn Backend);

impl Backend for WrittenRows<'_> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn declaration(&self) -> Declaration {
        self.0.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.0)
    }

    fn run(&self, problem: &Problem, _: &Inputs) -> Result<Outputs, RunError> {
        let mut rank = RankOutputs::unwritten(problem);
        // Where a row's LSE is unwritten, its out is too.
        rank.lse = None;
        let clears_padding = self.declaration().padding.outputs == PaddingOutputs::Zero;
        let rows = |run: Run| {
            let written = if clears_padding { run.span } else { run.len };
            (0..written).map(move |position| run.row(position))
        };
        for sequence in &problem.sequences {
            for row in rows(sequence.q) {
                rank.out.index_axis_mut(Axis(0), row).fill(WRITTEN);
                if let Some(gradients) = &mut rank.gradients {
                    gradients.dq.index_axis_mut(Axis(0), row).fill(WRITTEN);
                }
            }
            let Some(gradients) = &mut rank.gradients else { continue };
            for row in rows(sequence.kv) {
                gradients.dk.index_axis_mut(Axis(0), row).fill(WRITTEN);
                gradients.dv.index_axis_mut(Axis(0), row).fill(WRITTEN);
            }
        }
        Ok(rank.into())
    }
}

/// Returns a rank's results that have rows.
fn with_rows(rank: &RankOutputs) -> impl Iterator<Item = &Array3<f32>> {
    let gradients = rank.gradients.iter().flat_map(|of| [&of.dq, &of.dk, &of.dv]);
    std::iter::once(&rank.out).chain(gradients)
}

/// A subject that notes whether it is asked anything but the right question. Its results are numbers that no narrower
/// format holds, each with another mantissa than its neighbours.
struct Probe<'a> {
    of: &'a dyn Backend,
    right: (&'a Problem, &'a Inputs),
    asked_otherwise: AtomicBool,
}

impl Probe<'_> {
    fn results(&self, problem: &Problem) -> Outputs {
        let mut rank = RankOutputs::unwritten(problem);
        let returned = self.of.declaration().table.statistics;
        rank.lse = rank.lse.filter(|_| returned.contains(&TensorName::Lse));
        rank.max_logit = returned.contains(&TensorName::MaxLogit).then(|| Array1::zeros(problem.heads.q));
        let mut state = 1u32;
        let mut draw = || {
            state = state.wrapping_mul(0x9e37_79b1).wrapping_add(2);
            f32::from_bits(1f32.to_bits() | state >> 9 | 1)
        };
        rank.out.map_inplace(|x| *x = draw());
        rank.lse.iter_mut().for_each(|lse| lse.map_inplace(|x| *x = draw()));
        rank.max_logit.iter_mut().for_each(|max| max.map_inplace(|x| *x = draw()));
        if let Some(RankGradients { dq, dk, dv, dsink }) = &mut rank.gradients {
            [dq, dk, dv].into_iter().for_each(|gradient| gradient.map_inplace(|x| *x = draw()));
            dsink.map_inplace(|x| *x = draw());
        }
        rank.into()
    }
}

impl Backend for Probe<'_> {
    fn name(&self) -> &str {
        self.of.name()
    }

    fn declaration(&self) -> Declaration {
        self.of.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.of)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let (right, given) = self.right;
        if problem != right || !same_inputs(inputs, given) {
            self.asked_otherwise.store(true, Ordering::Relaxed);
        }
        Ok(self.results(problem))
    }
}

/// Whether two inputs agree in every bit.
fn same_inputs(a: &Inputs, b: &Inputs) -> bool {
    let (sinks, of_b) = (a.sink.as_slice(), b.sink.as_slice());
    let tensors = [(&a.q, &b.q), (&a.k, &b.k), (&a.v, &b.v), (&a.dout, &b.dout)];
    let mut slices = tensors.map(|(a, b)| (a.as_slice(), b.as_slice())).into_iter().chain([(sinks, of_b)]);
    tensors.iter().all(|(a, b)| a.shape() == b.shape())
        && slices.all(|pair| matches!(pair, (Some(a), Some(b)) if compare::same_bits(a, b)))
}

impl Backend for Miscalled<'_> {
    fn declaration(&self) -> Declaration {
        self.inner.as_ref().declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.inner.as_ref())
    }

    fn name(&self) -> &str {
        &self.name
    }

    /// Returns the replay of the called subject: the kernel is the same, whatever it is told.
    fn replay(&self, problem: &Problem) -> Option<Replay> {
        self.inner.replay(problem)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        (self.miscall.edit)(self.inner.as_ref(), problem, inputs)
    }
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::{Alignment, Mask, Pass, ProblemFields};

    use super::super::{Emulated, MISCALLS};
    use super::*;
    use crate::generate::{Draw, Limits, draw};
    use crate::subject::PaddingContract;
    use crate::values;

    /// A subject that declares what the emulated one does, with this rule for padding of outputs, and is never run.
    /// With the emulated one, the whole CPU kernel would be compiled a second time for this test.
    struct Unrun(PaddingOutputs);

    impl Backend for Unrun {
        fn name(&self) -> &str {
            "emulated"
        }

        fn declaration(&self) -> Declaration {
            let declaration = Emulated::default().declaration();
            let padding = PaddingContract { outputs: self.0, ..declaration.padding };
            Declaration { padding, ..declaration }
        }

        fn run(&self, _: &Problem, _: &Inputs) -> Result<Outputs, RunError> {
            panic!("the ideal subject answers in its place")
        }
    }

    /// Test that a fault which does nothing leaves the exact answer as it is, too, and that the question spares most
    /// answers.
    #[test]
    fn a_fault_that_does_nothing_does_not_show() {
        let limits = Limits::seams();
        let problems: Vec<Problem> = (0..60)
            .filter_map(|index| match draw(3, index, &limits) {
                Draw::Problem(problem) => Some(problem),
                Draw::Malformed(_) => None,
            })
            .collect();
        let mut idle = 0;
        for miscall in MISCALLS.iter() {
            let subject = Miscalled::new(Box::new(Unrun(PaddingOutputs::Zero)), miscall);
            for problem in &problems {
                let inputs = values::inputs(problem);
                if subject.does_anything(problem, &inputs) {
                    continue;
                }
                let ideal = Ideal(subject.inner.as_ref());
                let (right, wrong) = (ideal.run(problem, &inputs), (miscall.edit)(&ideal, problem, &inputs));
                let shows = right.is_ok_and(|right| difference(&wrong.unwrap(), &right).is_some());
                assert!(!shows, "{}: {problem:?}", miscall.id);
                idle += 1;
            }
        }
        assert!(idle * 5 > problems.len() * MISCALLS.len(), "{idle}");
    }

    /// Test that a key whose gradients are 0 is missed where the wrong call makes it padding that nobody writes.
    #[test]
    fn a_row_that_is_left_unwritten_shows() {
        let fields = ProblemFields {
            mask: Mask { align: Alignment::TopLeft, ..Mask::CAUSAL },
            pass: Pass::Backward,
            ..ProblemFields::packed(&[(3, 5)], 8)
        };
        let problem = Problem::new(fields).unwrap();
        let lost = MISCALLS.iter().find(|call| call.id == "call-last-key-lost").unwrap();
        let shows = |outputs| {
            Miscalled::new(Box::new(Unrun(outputs)), lost).shows(&problem, &values::inputs(&problem))
        };
        assert!(shows(PaddingOutputs::Untouched) && shows(PaddingOutputs::Unspecified));
        assert!(!shows(PaddingOutputs::Zero));
    }
}
