//! The one shrinker: from a failing problem to a small one that still fails.
//!
//! A *pass* maps the best problem so far and a *cursor* to a *candidate*, one step towards something simpler. A
//! candidate is proposed only when it is legal, strictly smaller in the total order of [`Size`], and never proposed
//! before. The caller says whether it fails. If it does, it becomes the best and the cursor stays; otherwise the
//! cursor moves on. The end is a *fixed point*: no step of any pass makes the best smaller and still fails.
//!
//! A machine that starts inside a subject's table stays inside: each candidate is the nearest problem that the table
//! takes ([`Table::fitted`]), and counts if that is still smaller and new.
//!
//! The machine holds no closure, so the same code serves as a loop ([`shrink`]), as a loop over batches
//! ([`Shrinker::propose_batch`]) and as a proptest `ValueTree` ([`crate::strategy`]). All three walk the same path.
//! The caller decides what counts as a failure: the same check on the same tensor, m of r runs, a stricter threshold.

mod passes;
pub(crate) mod shape;
mod size;

use std::collections::HashSet;

use seamproof_oracle::{Problem, ProblemFields};

use passes::{PASSES, Proposal};
pub(crate) use passes::{fewer_ranks, renumber};
pub use size::{Size, size};

use crate::subject::Table;

/// A shrink in progress.
#[derive(Clone, Debug)]
pub struct Shrinker {
    /// Table that takes every candidate; none where any problem may be one.
    table: Option<Table>,
    best: Problem,
    best_size: Size,
    at: Position,
    /// Candidates that wait for an answer.
    pending: Vec<Problem>,
    proposed_at: Vec<Position>,
    /// Digests of all problems that were ever proposed.
    tried: HashSet<blake3::Hash>,
    /// Number of accepted steps of each pass.
    accepted: Vec<usize>,
}

/// Position of the machine in its passes.
#[derive(Clone, Copy, Debug, Default)]
struct Position {
    pass: usize,
    cursor: usize,
    /// Number of passes that ended since the last accepted step, including the pass of that step.
    idle: usize,
}

impl Position {
    fn next_pass(self) -> Position {
        Position { pass: (self.pass + 1) % PASSES.len(), cursor: 0, idle: self.idle + 1 }
    }
}

impl Shrinker {
    /// Starts from a problem that fails.
    pub fn new(start: Problem) -> Shrinker {
        Shrinker {
            table: None,
            best_size: size(&start),
            tried: HashSet::from([digest(&start)]),
            best: start,
            at: Position::default(),
            pending: Vec::new(),
            proposed_at: Vec::new(),
            accepted: vec![0; PASSES.len()],
        }
    }

    /// Starts from a problem that fails on a subject with a table. The table takes every candidate, unless it refuses
    /// the start: then the failure is about a refusal.
    pub fn within(table: Table, start: Problem) -> Shrinker {
        let inside = table.refusal(&start).is_none();
        Shrinker { table: Some(table).filter(|_| inside), ..Shrinker::new(start) }
    }

    /// Returns the smallest problem known to fail.
    pub fn best(&self) -> &Problem {
        &self.best
    }

    /// Returns the first candidate that waits for an answer.
    pub fn candidate(&self) -> Option<&Problem> {
        self.pending.first()
    }

    /// Returns the next candidate; `None` when the best is a fixed point. An unanswered candidate counts as rejected.
    pub fn propose(&mut self) -> Option<&Problem> {
        self.propose_batch(1).first()
    }

    /// Returns up to `most` candidates, those that would be proposed one after the other if each were rejected. The
    /// answer is [`Shrinker::accept`] for the first that fails, or [`Shrinker::reject`] when none does.
    pub fn propose_batch(&mut self, most: usize) -> &[Problem] {
        self.reject();
        while self.pending.len() < most {
            let Some((position, problem)) = self.next() else { break };
            self.pending.push(problem);
            self.proposed_at.push(position);
        }
        &self.pending
    }

    /// Makes a candidate the new best, because it fails and those before it do not. The index is 0 unless a batch was
    /// proposed. Without such a candidate nothing happens.
    pub fn accept(&mut self, index: usize) {
        let Some(&position) = self.proposed_at.get(index) else { return };
        // If the answer had come before the later candidates were proposed, they would not have been.
        for later in self.pending.drain(index + 1..) {
            self.tried.remove(&digest(&later));
        }
        if let Some(problem) = self.pending.pop() {
            self.best_size = size(&problem);
            self.best = problem;
        }
        self.accepted[position.pass] += 1;
        self.at = Position { idle: 0, ..position };
        self.reject();
    }

    /// Rejects all candidates that wait for an answer: none of them fails.
    pub fn reject(&mut self) {
        self.pending.clear();
        self.proposed_at.clear();
    }

    /// Returns each pass with its number of accepted steps, in order. A useless pass shows here.
    pub fn accepted(&self) -> Vec<(&'static str, usize)> {
        PASSES.iter().zip(&self.accepted).map(|(pass, &count)| (pass.name, count)).collect()
    }

    fn next(&mut self) -> Option<(Position, Problem)> {
        // The pass of the last accepted step ends twice, because it was entered in the middle.
        while self.at.idle <= PASSES.len() {
            let here = self.at;
            self.at.cursor += 1;
            match (PASSES[here.pass].step)(&self.best, here.cursor) {
                Proposal::Over => self.at = here.next_pass(),
                Proposal::Skip => {}
                Proposal::Try(fields) => {
                    if let Some(problem) = self.admit(*fields) {
                        return Some((here, problem));
                    }
                }
            }
        }
        None
    }

    /// Returns a legal, smaller, new problem; `None` for anything else.
    fn admit(&mut self, fields: ProblemFields) -> Option<Problem> {
        let problem = Problem::new(fields).ok()?;
        let problem = match &self.table {
            Some(table) => table.fitted(problem),
            None => problem,
        };
        let smaller = size(&problem) < self.best_size;
        (smaller && self.tried.insert(digest(&problem))).then_some(problem)
    }
}

/// Result of a shrink.
#[derive(Clone, Debug, PartialEq)]
pub struct Shrunk {
    /// Smallest problem found that fails.
    pub problem: Problem,
    /// Number of problems that were judged.
    pub evaluations: usize,
    /// Each pass with its number of accepted steps.
    pub accepted: Vec<(&'static str, usize)>,
    /// Whether `problem` is a fixed point; false when the budget ran out first.
    pub complete: bool,
}

/// Shrinks a problem that fails, judging at most `budget` candidates.
pub fn shrink(start: &Problem, budget: usize, fails: impl FnMut(&Problem) -> bool) -> Shrunk {
    run(Shrinker::new(start.clone()), budget, fails)
}

/// Shrinks a problem that fails on a subject with a table ([`Shrinker::within`]), judging at most `budget` candidates.
pub fn shrink_within(
    table: Table,
    start: &Problem,
    budget: usize,
    fails: impl FnMut(&Problem) -> bool,
) -> Shrunk {
    run(Shrinker::within(table, start.clone()), budget, fails)
}

fn run(mut shrinker: Shrinker, budget: usize, mut fails: impl FnMut(&Problem) -> bool) -> Shrunk {
    let mut evaluations = 0;
    let complete = loop {
        let Some(candidate) = shrinker.propose() else { break true };
        if evaluations == budget {
            break false;
        }
        evaluations += 1;
        if fails(candidate) {
            shrinker.accept(0);
        } else {
            shrinker.reject();
        }
    };
    Shrunk { accepted: shrinker.accepted(), problem: shrinker.best, evaluations, complete }
}

/// Returns the digest that stands for a problem in the set of those tried: 32 bytes, however many sequences it has.
fn digest(problem: &Problem) -> blake3::Hash {
    blake3::hash(format!("{problem:?}").as_bytes())
}
