//! `seamproof kernels judge`: forwards that are too large for the oracle on a CPU, run on the kernels and judged by
//! their structure, by the reference on the GPU, and by identities between results of theirs: the packs of `bench
//! attention`, or random problems, groups of ranks too.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use seamproof_kernels::Gpu;
use seamproof_kernels::cache::Cache;
use seamproof_kernels::forward::AttentionKernels;
use seamproof_lab::{bench, reference};
use seamproof_oracle::envelope::Model;
use seamproof_oracle::{Inputs, Pass, Problem, ProblemFields};
use seamproof_simulator::schedule::MergeOrder;

use super::CliError;
use super::exit::Exit;
use super::output::{complain, print_line};
use crate::backends::{Cuda, CudaRunner};
use seamproof_judge::finding::Finding;
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::Judge;
use seamproof_judge::subject::{Backend, Declaration, Outputs, Promises, RankOutputs, RunError};
use seamproof_judge::values::{self, Poison};
use seamproof_lab::large::{self, JudgedRows, Related, Rows};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// Tracks of kernels/lab/bench/tracks.json [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…", conflicts_with = "cases")]
    tracks: Vec<String>,
    /// Columns of `seamproof bench attention` [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…", conflicts_with = "cases")]
    columns: Vec<String>,
    /// Kernel of the forward: simple, tuned, long, paired, middle, short, split or mixed
    #[arg(long, default_value = "tuned", value_parser = AttentionKernels::by_name)]
    attention: AttentionKernels,
    /// Judge this many random problems with sequences of up to 16384 tokens instead of the tracks
    #[arg(long)]
    cases: Option<u64>,
    /// Number of drawn rows of each head that are judged, besides those at the ends of sequences and masks
    #[arg(long, default_value_t = 256)]
    sample: usize,
    /// Judge every row, but only in tier W; a sample is judged in tier T too
    #[arg(long)]
    all: bool,
    /// Number of identities that each case is asked too, drawn from those that fit it; each takes about as long as the
    /// case's own run
    #[arg(long, default_value_t = 2)]
    identities: usize,
    /// Seed of problems and rows
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of the GPU
    #[arg(long, default_value_t = 0)]
    gpu: usize,
}

/// Returns the bounds of the random problems, as large as this command is meant for.
fn limits() -> Limits {
    Limits {
        length_max: 16_384,
        reaches: &[1024, 2048, 4096, 8192, 16_384],
        products: &[1 << 28, 1 << 30, 1 << 32, 1 << 34],
        elements_max: 1 << 26,
        ..Limits::large()
    }
}

pub(super) fn judge(args: &Args) -> Result<Exit, CliError> {
    // Names are looked at before a GPU is looked for.
    let problems = match args.cases {
        Some(_) => Vec::new(),
        None => bench::problems(&args.tracks, &args.columns)?,
    };
    let mut bench = Bench {
        runner: CudaRunner::open(args.gpu)?,
        gpu: reference::open(args.gpu, &Cache::of_user())?,
        rows: if args.all { Rows::All } else { Rows::Sample { count: args.sample, seed: args.seed } },
        identities: args.identities,
        judged: 0,
        broken: 0,
    };
    let ended = bench.all(args, &problems);
    let Bench { judged, broken, .. } = bench;
    print_line(&format_args!("{judged} judged, {broken} with a finding, on {}", bench.gpu.name()?));
    // A finding outweighs an error.
    match ended {
        Err(error) if broken > 0 => complain(&error),
        ended => ended?,
    }
    Ok(match judged {
        _ if broken > 0 => Exit::Finding,
        0 => Exit::TooLittle,
        _ => Exit::Held,
    })
}

/// Kernels, and what judges them.
struct Bench {
    runner: CudaRunner,
    gpu: Gpu,
    rows: Rows,
    /// Number of identities for each case.
    identities: usize,
    judged: u64,
    broken: u64,
}

impl Bench {
    /// Judges the random problems that are asked for, or else those of the tracks.
    fn all(&mut self, args: &Args, problems: &[(String, Problem)]) -> Result<(), CliError> {
        if let Some(cases) = args.cases {
            return (0..cases).try_for_each(|case| self.draw(args.attention, args.seed, case));
        }
        let subject = Cuda { attention: args.attention, ..Cuda::default() };
        problems.iter().try_for_each(|(name, problem)| self.judge(name, &subject, problem))
    }

    /// Judges the forward of a random problem.
    fn draw(&mut self, attention: AttentionKernels, seed: u64, case: u64) -> Result<(), CliError> {
        let Draw::Problem(problem) = generate::draw(seed, case, &limits()) else { return Ok(()) };
        let forward = ProblemFields { pass: Pass::Forward, ..problem.into() };
        let Ok(problem) = Problem::new(forward) else { return Ok(()) };
        let merge = MergeOrder::ALL[(case % 2) as usize];
        let subject =
            Cuda { order: case, merge, helpers: !case.is_multiple_of(4), attention, ..Cuda::default() };
        self.judge(&format!("case {case}"), &subject, &problem)
    }

    fn judge(&mut self, name: &str, subject: &Cuda, problem: &Problem) -> Result<(), CliError> {
        let start = Instant::now();
        let mut inputs = values::inputs(problem);
        values::poison(&mut inputs, problem, Poison::Nan);
        let outputs = match self.runner.run(subject, problem, &inputs, &mut |_| {}) {
            Ok(outputs) => outputs,
            Err(RunError::Refused(_)) => return Ok(()),
            Err(error) => return Err(CliError::Twins(error)),
        };
        self.judged += 1;
        let got = match assembled(subject, problem, outputs)? {
            Ok(got) => got,
            Err(finding) => {
                self.broken += 1;
                print_line(&format_args!("{name}: {finding}"));
                return Ok(());
            }
        };
        let model = Model::new(problem, subject.declaration().arithmetic, subject.partition(problem));
        let of_run = start.elapsed().as_secs_f64();
        let forward = large::Forward { problem, inputs: &inputs, got: &got, model: &model };
        let judged = large::forward(&self.gpu, &forward, self.rows)?;
        report(name, &judged, start);
        let broken = judged.finding.is_some();
        self.broken += u64::from(broken);
        if self.identities > 0 {
            values::poison(&mut inputs, problem, Poison::Zero);
            let forward = large::Forward { problem, inputs: &inputs, got: &got, model: &model };
            let related = self.relate(name, subject, &forward, of_run)?;
            self.broken += u64::from(related && !broken);
        }
        Ok(())
    }

    /// Asks identities, each of whose runs takes as long as the case's own, inputs included. Returns whether one is
    /// broken.
    fn relate(
        &mut self,
        name: &str,
        subject: &Cuda,
        forward: &large::Forward<'_>,
        of_run: f64,
    ) -> Result<bool, CliError> {
        let lent = Lent::new(subject, forward.problem, &mut self.runner);
        let count = self.identities.min(large::RELATIONS.len());
        print_line(&format_args!(
            "{name:<26} at most {count} identities, {of_run:.1} s a run: about {:.0} s",
            of_run * count as f64
        ));
        let related = large::related(&lent, forward, count)
            .map_err(|what| CliError::Twins(RunError::Infrastructure(what)))?;
        let Related { asked, runs, finding, seconds } = related;
        print_line(&format_args!("{name:<26} {runs} more runs, {seconds:.1} s: {}", asked.join(", ")));
        finding.iter().for_each(|finding: &Finding| print_line(finding));
        Ok(finding.is_some())
    }
}

/// Subject on a GPU that is open, for the further runs of a case.
struct Lent<'a> {
    subject: Cuda,
    promises: Promises,
    runner: Mutex<&'a mut CudaRunner>,
}

impl<'a> Lent<'a> {
    /// Returns the subject in the shape of the case's one launch, in which it promises that a sequence's results do not
    /// depend on the others.
    fn new(subject: &Cuda, problem: &Problem, runner: &'a mut CudaRunner) -> Lent<'a> {
        let promises = subject.declaration().promises;
        let (subject, promises) = match subject.in_shape_of(problem) {
            Some(in_shape) => (in_shape, Promises { sequences_alone: true, ..promises }),
            None => (*subject, promises),
        };
        Lent { subject, promises, runner: Mutex::new(runner) }
    }
}

impl Backend for Lent<'_> {
    fn name(&self) -> &str {
        self.subject.name()
    }

    fn declaration(&self) -> Declaration {
        self.subject.declaration().with_promises(self.promises)
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.subject)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut runner = self.runner.lock().unwrap_or_else(PoisonError::into_inner);
        runner.run(&self.subject, problem, inputs, &mut |_| {})
    }
}

/// Returns the results in the problem's own layout, or what is wrong with their structure.
fn assembled(
    subject: &Cuda,
    problem: &Problem,
    outputs: Outputs,
) -> Result<Result<RankOutputs, Box<Finding>>, CliError> {
    let judge = Judge::default();
    let layouts = (judge.layouts)(problem).map_err(|error| CliError::Usage(error.to_string()))?;
    Ok(match (judge.structure)(subject, problem, &layouts, &outputs) {
        Some(finding) => Err(Box::new(finding)),
        None => (judge.assemble)(problem, &layouts, outputs.ranks),
    })
}

fn report(name: &str, judged: &JudgedRows, start: Instant) {
    let [worst, dithered] = [&judged.margin.worst_case, &judged.margin.dithered];
    print_line(&format_args!(
        "{name:<26} {:>8} rows: lse {:.3}, out {:.3}, max_logit {:.3} of tier W, {:.3}, {:.3} of tier T, {} unbounded; \
         reference {:.2} ms ({:.1} s in all)",
        judged.rows,
        worst.lse,
        worst.out,
        worst.max_logit,
        dithered.lse,
        dithered.out,
        judged.unbounded,
        judged.reference_ms,
        start.elapsed().as_secs_f64()
    ));
    judged.finding.iter().for_each(|finding: &Finding| print_line(finding));
}
