//! A schedule that is run in f64 and compared with the exact answer.

use ndarray::{Array1, Array3, Axis, s};
use seamproof_oracle::region::rotated;
use seamproof_oracle::{Inputs, Pass, Problem, Run, Saved, Scales, Sequence, TensorName, exact};
use seamproof_simulator::Real;
use seamproof_simulator::device::{Buffers, Cpu};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::executor::{ExecutedPasses, execute, load};
use seamproof_simulator::schedule::{Axes, Role, Schedule};

use super::Draws;

const TOLERANCE: f64 = 1e-10;

/// Returns inputs that are multiples of 2^-6. Every row that is not real holds NaN.
pub(crate) fn inputs(problem: &Problem, draws: &mut Draws) -> Inputs {
    let mut tensor = |shape: [usize; 3], side: fn(&Sequence) -> Run| {
        let mut array = Array3::from_elem(shape, f32::NAN);
        for row in problem.sequences.iter().flat_map(|sequence| side(sequence).real_rows()) {
            let mut rows = array.index_axis_mut(Axis(0), row);
            rows.mapv_inplace(|_| (draws.below(257) as f32 - 128.0) / 64.0);
        }
        array
    };
    let (q, mut k) = (tensor(problem.q_shape(), |s| s.q), tensor(problem.k_shape(), |s| s.kv));
    let (mut v, dout) = (tensor(problem.v_shape(), |s| s.kv), tensor(problem.out_shape(), |s| s.q));
    problem.repeat_shared(&mut k, &mut v);
    let sink = Array1::from_shape_fn(problem.learnable_sinks(), |head| head as f32 / 2.0 - 0.5);
    Inputs { q, k, v, dout, sink, scales: Scales::default() }
}

fn rotates(tensor: TensorName) -> bool {
    matches!(tensor, TensorName::Q | TensorName::K | TensorName::Dq | TensorName::Dk)
}

/// Runs the schedule in f64, in an order drawn from `draws`, and compares every placed row with the exact answer.
pub(crate) fn hold(problem: &Problem, schedule: &Schedule, draws: &mut Draws) {
    let inputs = inputs(problem, draws);
    let forward = exact::forward(problem, &inputs);
    let gradients = exact::backward(problem, &inputs, &Saved::from(&forward));
    let device =
        Cpu::<f64>::new(Tiles { q: 2, kv: 3 }, problem.precision.p.format, problem.precision.ds.format);
    let mut buffers = load::<f64>(schedule, problem, &inputs, f32::NAN);
    let counts = execute(schedule, ExecutedPasses::Both, &device, &mut buffers, |ready| draws.below(ready))
        .unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
    assert_eq!(counts.host_reads, 0);
    assert_eq!(buffers.damage(), []);

    let mut owned = 0;
    let mut dsink = Array1::<f64>::zeros(problem.learnable_sinks());
    for placement in &schedule.placements {
        let check = |got: f64, right: f64, row: usize, head: usize| {
            let close = got == right || (got - right).abs() <= TOLERANCE * (1.0 + right.abs());
            let tensor = placement.tensor;
            assert!(close, "{tensor} row {row} head {head}: {got} against {right}\n{problem:?}");
        };
        let exact_rows = match placement.tensor {
            TensorName::Out => &forward.out,
            TensorName::Dq => &gradients.dq,
            TensorName::Dk => &gradients.dk,
            TensorName::Dv => &gradients.dv,
            _ => &inputs.q.mapv(f64::from),
        };
        for head in 0..placement.heads.len() {
            let of_problem = placement.heads.start + head;
            match placement.tensor {
                TensorName::MaxLogit => {
                    check(buffers.lane(placement.buffer, 0, head)[0], forward.max_logit[of_problem], 0, head);
                }
                TensorName::Dsink => dsink[of_problem] += buffers.lane(placement.buffer, 0, head)[0],
                _ => {}
            }
            for placed in &placement.rows {
                let sequence = problem.sequences[placed.sequence];
                let key_side = matches!(
                    placement.tensor,
                    TensorName::K | TensorName::V | TensorName::Dk | TensorName::Dv
                );
                let run = if key_side { sequence.kv } else { sequence.q };
                for i in 0..placed.local.span {
                    let position = placed.piece.start + i * placed.piece.step;
                    let (real, row) = (i < placed.local.len, run.row(position));
                    let lanes = buffers.lane(placement.buffer, placed.local.row(i), head);
                    match placement.tensor {
                        TensorName::Lse => {
                            let right = if real { forward.lse[[of_problem, row]] } else { f64::NEG_INFINITY };
                            check(lanes[0], right, row, head);
                        }
                        TensorName::Out | TensorName::Dq | TensorName::Dk | TensorName::Dv => {
                            let right = exact_rows.slice(s![row, of_problem, ..]).to_vec();
                            let is_rotated =
                                schedule.sequence_parallel.is_some() && rotates(placement.tensor);
                            let got = if is_rotated { rotated(lanes, position) } else { lanes.to_vec() };
                            for (got, right) in got.into_iter().zip(right) {
                                check(got, if real { right } else { 0.0 }, row, head);
                            }
                        }
                        _ => {}
                    }
                    owned += usize::from(placement.tensor == TensorName::Out && real);
                }
            }
        }
    }
    assert_eq!(owned, problem.tokens() * problem.heads.q, "each real row has one owner for each head");
    for (head, (got, right)) in dsink.iter().zip(&gradients.dsink).enumerate() {
        let held = problem.pass == Pass::Forward || (got - right).abs() <= TOLERANCE * (1.0 + right.abs());
        assert!(held, "dsink of head {head}: {got} against {right}\n{problem:?}");
    }
    unowned_rows_are_untouched(schedule, &buffers);
}

fn unowned_rows_are_untouched(schedule: &Schedule, buffers: &Buffers<f64>) {
    for placement in &schedule.placements {
        let buffer = &schedule.buffers[placement.buffer.0];
        if !matches!(buffer.role, Role::Output(_)) || buffer.axes == Axes::Heads {
            continue;
        }
        let mut owned = vec![false; buffer.rows];
        for placed in &placement.rows {
            (0..placed.local.span).for_each(|i| owned[placed.local.row(i)] = true);
        }
        for row in (0..buffer.rows).filter(|&row| !owned[row]) {
            for head in 0..buffer.heads {
                let lanes = buffers.lane(placement.buffer, row, head);
                let untouched = lanes.iter().all(|value| value.bits() == f64::UNWRITTEN.bits());
                assert!(untouched, "{} row {row}, which no sequence owns, was written", buffer.name);
            }
        }
    }
}
