//! A recorded case in words: which rank held what, and which rows the finding's row is joined to. What the ranks
//! launched and sent is in no recording.

use std::fmt::Write;

use seamproof_judge::case::Case;
use seamproof_judge::finding::{Finding, Place};
use seamproof_judge::prose;
use seamproof_oracle::sharding::{RankLayout, run_of};
use seamproof_oracle::{Intervals, Problem, Side};

use super::line::Line;
use super::{RANKS_SHOWN, layout, listed};

/// Returns a recorded case, explained: its finding, its problem, the row of the finding, and the layout of all ranks or
/// of one.
pub fn explain_recorded(case: &Case, layouts: &[RankLayout], rank: Option<usize>) -> String {
    let problem = &case.problem;
    let mut text = format!("subject   {}, recorded\n", case.subject.name);
    if let Some(found) = &case.found {
        let _ = writeln!(text, "found     {found}");
        text += &row(problem, layouts, &found.finding);
    }
    let _ = writeln!(text, "problem   {}", prose::describe_recorded(problem));
    text += &laid_out(problem, layouts, rank);
    text + "\nlaunches  not shown: a recording holds what each rank got and gave, and not how\n"
}

/// Returns the layout of all ranks, or of one, in words.
pub(super) fn laid_out(problem: &Problem, layouts: &[RankLayout], rank: Option<usize>) -> String {
    let shown = layouts.iter().map(|layout| layout.rank);
    let ranks: Vec<usize> = shown.filter(|own| rank.is_none_or(|only| only == *own)).collect();
    let placed = |rank: usize| {
        let own = layouts.iter().filter(|layout| layout.rank == rank);
        let runs = |side: Side| own.clone().flat_map(|layout| layout.side(side).runs.clone()).collect();
        [runs(Side::Q), runs(Side::Kv)]
    };
    let legend = "a..b is without b; positions count real rows of a sequence";
    format!("\nlayout    {legend}\n{}", layout(problem, &ranks, placed))
}

/// Returns the line about a finding's row: the rows on the other side that the mask joins it to, and the ranks that
/// hold them.
fn row(problem: &Problem, layouts: &[RankLayout], finding: &Finding) -> String {
    let (Some(tensor), Place { sequence: Some(sequence), row: Some(row), .. }) =
        (finding.tensor, finding.place)
    else {
        return String::new();
    };
    let Some(both) = problem.sequences.get(sequence) else { return String::new() };
    let side = tensor.side();
    if row >= run_of(both, side).len {
        return String::new();
    }
    let sight = problem.mask.sight(both.q.len, both.kv.len);
    let (joined, words, other) = match side {
        Side::Q => (sight.keys(row), ["query", "sees keys"], Side::Kv),
        Side::Kv => (sight.queries(row).into(), ["key", "is seen by queries"], Side::Q),
    };
    let holder = held(layouts, (sequence, side), &(row..row + 1).into());
    let of = match joined.is_empty() {
        true => "none".to_owned(),
        false => format!("{joined} of {}", held(layouts, (sequence, other), &joined)),
    };
    let [own, sees] = words;
    format!("row       {own} {row} of sequence {sequence}, of {holder}, {sees} {of}\n")
}

/// Returns the ranks that hold any of these positions, in words.
fn held(layouts: &[RankLayout], (sequence, side): (usize, Side), positions: &Intervals) -> String {
    let asked: Vec<Line> = positions.parts().map(Line::range).collect();
    let holds = |layout: &RankLayout| {
        let mut runs = layout.side(side).runs.iter().filter(|run| run.sequence == sequence);
        runs.any(|run| {
            let own = Line::new(run.piece.start, run.piece.step, run.local.len);
            asked.iter().any(|asked| own.meets(asked))
        })
    };
    let holding = layouts.iter().filter(|layout| holds(layout));
    let ranks: Vec<usize> = holding.map(|layout| layout.rank).collect();
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", listed(ranks, RANKS_SHOWN))
}
