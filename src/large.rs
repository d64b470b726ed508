//! Large packs: `seamproof large`.
//!
//! A subject in a Python file is judged where it runs: a question goes to its process, and sums come back;
//! [`seamproof_judge::large`] has both. The inputs and results of any other subject pass through this process, and the
//! ordinary judge takes them: with the exact answer to every row, or to some rows where that is too dear. What is found is
//! made smaller in the same way, until an ordinary case is left.

use std::time::{Duration, Instant};

use seamproof_judge::case::{Case, Found, Subject};
use seamproof_judge::evaluate::{caught, evaluate};
use seamproof_judge::failure::same_failure;
use seamproof_judge::finding::Finding;
use seamproof_judge::ladder::{Depth, Judge, Sampled, products};
use seamproof_judge::large::{
    self, Answer, Head, Judged, Known, Question, Rows, Seconds, judge_of_moved_results,
};
use seamproof_judge::shrink::Shrinker;
use seamproof_judge::subject::{Backend, Declaration, RunError};
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::verdict::{Cost, Margin, Verdict};
use seamproof_oracle::Problem;
use seamproof_oracle::envelope::Model;

use crate::backends::{self, BackendError};
use crate::campaign::{SHRINK_EVALUATIONS_MAX, minimise};
use crate::worker::Questions;
use crate::worker::message::{MessageError, decode_answer};

/// Visible products and elements up to which the ordinary judge takes a case over.
const ORDINARY_PRODUCTS: u64 = 1 << 24;
const ORDINARY_ELEMENTS: u64 = 1 << 20;
/// Most large runs that make a finding smaller.
const REDUCE_MAX: usize = 100;
/// Visible products up to which every row of a pack has an exact answer in this process: some ten seconds on two cores.
/// It is 16,384 tokens, causal, in four heads of 128.
const WHOLE_PRODUCTS: u64 = 1 << 36;
/// Most elements of q where the subject draws its own inputs, and where inputs and results pass through this process.
const ELEMENTS_THERE: u64 = 1 << 28;
const ELEMENTS_HERE: u64 = 1 << 24;
/// Most visible products where the subject draws its own inputs, where only results pass through this process, and where
/// this process runs the subject, too.
const PRODUCTS_THERE: u64 = 1 << 44;
const PRODUCTS_HERE: u64 = WHOLE_PRODUCTS;
const PRODUCTS_ON_CPU: u64 = 1 << 30;

/// Times of a case.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Time of drawing the inputs.
    pub inputs: Duration,
    /// Time of the call that was judged, whose kernels were compiled before.
    pub kernel: Duration,
    /// Time of everything else: exact rows, sums, their way here, bounds and comparison.
    pub judging: Duration,
    /// Part of it in which exact rows and sums were made.
    pub there: Duration,
}

impl Times {
    /// Returns how often the kernel could have run while its results were judged.
    pub fn ratio(&self) -> f64 {
        self.judging.as_secs_f64() / self.kernel.as_secs_f64().max(1e-9)
    }
}

/// Result of a look at a pack.
#[derive(Debug)]
pub enum Look {
    /// A run that was judged where the subject runs.
    Judged(Box<Judged>, Times),
    /// A run that the ordinary judge decided: what held, or the finding.
    Decided(Result<Box<Margin>, Box<Finding>>, Times),
    /// A run without results.
    Silent(Verdict),
}

impl Look {
    /// Returns the finding, if there is one.
    pub fn finding(&self) -> Option<&Finding> {
        match self {
            Look::Judged(judged, _) => judged.finding.as_ref(),
            Look::Decided(Err(finding), _) | Look::Silent(Verdict::Finding(finding)) => Some(finding),
            Look::Silent(_) | Look::Decided(Ok(_), _) => None,
        }
    }
}

/// A subject, and where its packs are judged.
pub struct Bench {
    subject: Subject,
    backend: Box<dyn Backend>,
    /// The process that answers questions about its large runs; `None` for the ordinary judge.
    questions: Option<Questions>,
    rows: usize,
    products: u64,
}

impl Bench {
    /// Returns the bench of a subject, where so many rows of each side are drawn.
    pub fn new(name: &SubjectName, rows: usize) -> Result<Bench, BackendError> {
        let backend = backends::by_name(&name.name(), &name.options)?;
        let draws_inputs = name.base.starts_with(SubjectName::PYTHON) && name.miscalls.is_empty();
        let questions = draws_inputs.then(|| backends::questions(name)).transpose()?;
        let products = match draws_inputs {
            true => PRODUCTS_THERE,
            false if backends::is_in_process(name) => PRODUCTS_ON_CPU,
            false => PRODUCTS_HERE,
        };
        let subject = Subject { name: name.name(), options: name.options.clone() };
        Ok(Bench { subject, backend, questions, rows, products })
    }

    /// Returns the most elements of q in a pack, where nobody says how many.
    pub fn elements(&self) -> u64 {
        if self.questions.is_some() { ELEMENTS_THERE } else { ELEMENTS_HERE }
    }

    /// Returns the most visible pairs × query heads × head dimension of a pack, where nobody says how many.
    pub fn products(&self) -> u64 {
        self.products
    }

    /// Returns the subject.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Runs and judges a pack.
    pub fn look(&mut self, problem: &Problem) -> Look {
        self.look_at(problem, false)
    }

    /// Runs a pack, and judges its results moved by one row.
    pub fn canary(&mut self, problem: &Problem) -> Look {
        self.look_at(problem, true)
    }

    fn look_at(&mut self, problem: &Problem, is_moved: bool) -> Look {
        let Bench { backend, questions, rows, .. } = self;
        match questions {
            Some(questions) => look_there(backend.as_ref(), questions, *rows, problem, is_moved),
            None => look_here(backend.as_ref(), *rows, problem, is_moved),
        }
    }

    /// Returns a case with this finding.
    pub fn case(&self, problem: &Problem, finding: &Finding) -> Case {
        let found = Some(Found::drawn(finding.clone().storable()));
        Case { found, ..Case::new(self.subject.clone(), 0, problem.clone()) }
    }

    /// Returns a smaller pack with the same failure, by large runs, down to what the ordinary judge takes.
    fn reduced(
        &mut self,
        problem: &Problem,
        finding: &Finding,
        is_over: &dyn Fn() -> bool,
        step: &mut dyn FnMut(&Problem),
    ) -> (Problem, Finding) {
        let mut last = finding.clone();
        let mut shrinker = Shrinker::within(self.backend.declaration().table, problem.clone());
        for _ in 0..REDUCE_MAX {
            if is_ordinary(shrinker.best()) || is_over() {
                break;
            }
            let Some(candidate) = shrinker.propose().cloned() else { break };
            let look = is_pack(&candidate).then(|| self.look(&candidate));
            let found = look.as_ref().and_then(Look::finding).cloned();
            match found.and_then(|found| same_failure(finding, found.into())) {
                Some(found) => {
                    step(&candidate);
                    last = found;
                    shrinker.accept(0);
                }
                None => shrinker.reject(),
            }
        }
        (shrinker.best().clone(), last)
    }

    /// Returns the smallest case with a finding's failure, and whether the ordinary judge sees that the same result is
    /// wrong. `step` sees each pack on the way.
    pub fn smallest(
        &mut self,
        problem: &Problem,
        finding: &Finding,
        is_over: &dyn Fn() -> bool,
        step: &mut dyn FnMut(&Problem),
    ) -> (Case, bool) {
        let (small, last) = self.reduced(problem, finding, is_over, step);
        let mut case = self.case(&small, &last);
        if let Some(found) = &mut case.found {
            found.remember(&finding.what);
        }
        if !is_ordinary(&small) || is_over() {
            return (case, false);
        }
        match evaluate(self.backend.as_ref(), &small) {
            Verdict::Finding(seen) if seen.tensor == finding.tensor => {
                let (backend, budget) = (self.backend.as_ref(), SHRINK_EVALUATIONS_MAX);
                (minimise(&case, &seen, backend, budget, is_over, step).case, true)
            }
            _ => (case, false),
        }
    }
}

/// Judges a pack by the ordinary judge. It draws so many rows of each side where the exact answer to all is too dear.
fn look_here(backend: &dyn Backend, rows: usize, problem: &Problem, is_moved: bool) -> Look {
    let sampled = Some(Sampled { rows: rows as u64, seed: problem.data_seed });
    let judge = Judge { products_max: WHOLE_PRODUCTS, sampled, ..Judge::default() };
    let judge = if is_moved { judge_of_moved_results(judge) } else { judge };
    let examination = match caught(|| judge.examine(backend, problem, Depth::First)) {
        Ok(examination) => examination,
        Err(what) => return Look::Silent(Verdict::Infrastructure(what)),
    };
    let Cost { inputs, subject, oracle, judge } = examination.cost;
    let times = Times { inputs, kernel: subject, judging: oracle + judge, there: Duration::ZERO };
    match examination.verdict {
        Verdict::Pass(margin) => Look::Decided(Ok(margin), times),
        Verdict::Finding(finding) if !finding.check.is_end() => Look::Decided(Err(finding), times),
        verdict => Look::Silent(verdict),
    }
}

/// Judges a pack where its subject runs.
fn look_there(
    backend: &dyn Backend,
    questions: &mut Questions,
    rows: usize,
    problem: &Problem,
    is_moved: bool,
) -> Look {
    let Declaration { arithmetic, table, .. } = backend.declaration();
    if let Some(refusal) = table.refusal(problem) {
        return Look::Silent(Verdict::Refused(refusal));
    }
    let partition = backend.partition(problem);
    let model = Model::new(problem, arithmetic, partition);
    let rows = Rows { count: rows, seed: problem.data_seed };
    if let Err(what) = questions.start() {
        return Look::Silent(Verdict::Infrastructure(what));
    }
    let start = Instant::now();
    let known = Known::of(problem, &arithmetic, partition);
    let question = Question::new(problem, &model, rows, known);
    let question = if is_moved { question.with_moved_results() } else { question };
    let answer = match questions.ask(&question, read) {
        Ok(answer) => answer,
        Err(error) => return Look::Silent(large::silence(error)),
    };
    match large::judge(problem, &model, &question, &answer) {
        Ok(judged) => Look::Judged(Box::new(judged), times(start.elapsed(), answer.head.seconds)),
        Err(error) => Look::Silent(large::silence(RunError::Infrastructure(error.to_string()))),
    }
}

/// Whether the ordinary judge takes a problem in little time.
pub fn is_ordinary(problem: &Problem) -> bool {
    products(problem) <= ORDINARY_PRODUCTS && problem.elements() <= ORDINARY_ELEMENTS
}

/// Whether a problem can be asked about: one rank, sequences whose rows follow each other, and inputs that are drawn
/// there.
pub fn is_pack(problem: &Problem) -> bool {
    let are_rows_together = problem.sequences.iter().all(|both| both.q.step == 1 && both.kv.step == 1);
    let has_rows = problem.rows.q > 0 && problem.rows.kv > 0;
    let is_one_call = problem.steps.is_empty() && problem.pages.is_none() && problem.sharing.is_empty();
    let is_plain = problem.parallel.is_whole() && is_one_call && problem.mask.is_band();
    is_plain && are_rows_together && has_rows && large::is_drawn(problem.mode)
}

fn read(body: &[u8]) -> Result<Answer, MessageError> {
    let (head, numbers) = decode_answer::<Head>(body)?;
    Answer::read(head, numbers).map_err(|error| MessageError(error.to_string()))
}

fn times(all: Duration, seconds: Seconds) -> Times {
    let of = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
    let [inputs, warm, kernel, there] = [seconds.inputs, seconds.warm, seconds.kernel, seconds.judge].map(of);
    Times { inputs, kernel, judging: all.saturating_sub(inputs + warm + kernel), there }
}
