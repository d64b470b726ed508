//! The canary of packs that the ordinary judge takes: results that are moved by one row before they are judged.

use ndarray::{Array, Axis, RemoveAxis, Zip};
use seamproof_oracle::sharding::{RankLayout, run_of};
use seamproof_oracle::{Problem, Side};

use crate::finding::Finding;
use crate::ladder::Judge;
use crate::subject::RankOutputs;

/// Returns a judge that sees the results of each sequence moved by one row: the first row's become the last row's. What
/// holds under this judge holds whatever the subject returns.
pub fn judge_of_moved_results(judge: Judge) -> Judge {
    Judge { assemble, ..judge }
}

fn assemble(
    problem: &Problem,
    layouts: &[RankLayout],
    ranks: Vec<RankOutputs>,
) -> Result<RankOutputs, Box<Finding>> {
    let mut whole = (Judge::default().assemble)(problem, layouts, ranks)?;
    move_rows(problem, Side::Q, Axis(0), &mut whole.out);
    if let Some(lse) = &mut whole.lse {
        move_rows(problem, Side::Q, Axis(1), lse);
    }
    if let Some(gradients) = &mut whole.gradients {
        move_rows(problem, Side::Q, Axis(0), &mut gradients.dq);
        move_rows(problem, Side::Kv, Axis(0), &mut gradients.dk);
        move_rows(problem, Side::Kv, Axis(0), &mut gradients.dv);
    }
    Ok(whole)
}

/// Moves the rows of each sequence, which lie along an axis.
fn move_rows<D: RemoveAxis>(problem: &Problem, side: Side, axis: Axis, tensor: &mut Array<f32, D>) {
    for sequence in &problem.sequences {
        let rows: Vec<usize> = run_of(sequence, side).real_rows().collect();
        // Passed from one place to the next, the first row comes to the last.
        for pair in rows.windows(2) {
            let (mut before, mut from) = tensor.view_mut().split_at(axis, pair[1]);
            let (mut row, mut next) = (before.index_axis_mut(axis, pair[0]), from.index_axis_mut(axis, 0));
            Zip::from(&mut row).and(&mut next).for_each(std::mem::swap);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ladder::Depth;
    use crate::subjects::Emulated;
    use crate::verdict::Verdict;
    use seamproof_oracle::{InputMode, Mask, Pass, ProblemFields};

    /// Test that both ways of judging see it: that of inputs with one right result, and that of bounds.
    #[test]
    fn moved_results_are_a_finding_and_those_in_place_are_none() {
        for mode in [InputMode::Pairs, InputMode::Peaked] {
            let fields = ProblemFields {
                mask: Mask::CAUSAL,
                pass: Pass::Backward,
                mode,
                ..ProblemFields::padded(&[(40, 48), (7, 8)], 16)
            };
            let problem = Problem::new(fields).expect("a problem");
            let judged = |judge: Judge| judge.examine(&Emulated::default(), &problem, Depth::First).verdict;
            assert!(matches!(judged(Judge::default()), Verdict::Pass(_)));
            let moved = judged(judge_of_moved_results(Judge::default()));
            assert!(matches!(moved, Verdict::Finding(_)), "{mode:?}: {moved}");
        }
    }
}
