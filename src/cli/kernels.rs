//! `seamproof kernels`: compiles the GPU kernels, compares them with their twins on the CPU and with themselves, and
//! judges them on large packs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Subcommand;
use seamproof_kernels::cache::{Cache, Origin};
use seamproof_kernels::nvrtc::{self, Resources};
use seamproof_kernels::source::Source;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_lab::check::{self, Mismatch};
use seamproof_lab::faults::{self, SourceFault, source_faults};
use seamproof_lab::{block_of, sources};

use crate::backends::{Cuda, CudaRunner};
use crate::nearest::did_you_mean;
use crate::paste::typed;
use seamproof_judge::finding::Phase;
use seamproof_judge::generate::{self, Draw, Profile};
use seamproof_judge::prose;
use seamproof_judge::subject::{Backend, RunError};
use seamproof_judge::subjects::difference;
use seamproof_judge::values::{self, Poison};

use super::CliError;
use super::exit::Exit;
use super::forwards;
use super::output::{note, print_line};

#[derive(clap::Args, Debug)]
#[command(arg_required_else_help = false, after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(subcommand)]
    what: What,
}

const EXAMPLES: &str = "\
Examples:
  seamproof kernels build                  fills the user's cache; needs NVRTC, no GPU
  seamproof kernels build --out kernels    fills a folder, to be named by SEAMPROOF_KERNEL_CACHE elsewhere
  seamproof kernels build --faults         looks at every planted fault too
  seamproof kernels info
  seamproof kernels check                  random cases, each kernel against its twin; needs a Hopper GPU, as all below
  seamproof kernels check --plant all      shows that it would see faults
  seamproof kernels stress --launches 24   every instance, and some backwards
  seamproof kernels judge --tracks one_16384
  seamproof kernels twins --cases 100";

#[derive(Debug, Subcommand)]
enum What {
    /// Compile every kernel for Hopper (sm_90a) and store the machine code; prints what each kernel takes
    #[command(after_help = EXAMPLES)]
    Build {
        /// Folder for the compiled kernels, instead of the user's cache
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Look whether the C++ of every planted fault compiles too; no code of it is made
        #[arg(long)]
        faults: bool,
    },
    /// Show NVRTC, driver, GPU and cache
    #[command(after_help = EXAMPLES)]
    Info,
    /// Compare every kernel with its twin on the CPU, bit for bit
    #[command(after_help = EXAMPLES)]
    Check {
        /// Number of random cases, the operations in turn
        #[arg(long, default_value_t = 1785)]
        cases: u64,
        /// Seed of the cases
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Number of the GPU
        #[arg(long, default_value_t = 0)]
        gpu: usize,
        /// Compare tensors of more than 2^31 elements instead of random cases; needs 44 GB of the GPU's memory
        #[arg(long)]
        large: bool,
        /// Compare the forward on scores far from 0 instead of random cases
        #[arg(long, conflicts_with = "large")]
        levels: bool,
        /// Compare attention in few blocks with attention in all instead of random cases
        #[arg(long, conflicts_with_all = ["large", "levels"])]
        blocks: bool,
        /// Compare this many attention calls that no schedule makes, on every kernel, instead of random cases
        #[arg(long, value_name = "N", conflicts_with_all = ["large", "levels", "blocks"])]
        calls: Option<u64>,
        /// Plant a fault, or all faults that end no process, and show where each is seen
        #[arg(long, value_name = "ID|all", conflicts_with_all = ["large", "levels", "blocks", "calls"])]
        plant: Option<String>,
    },
    /// Launch every instance of the tensor-core kernels, and the backward's fixed order many times: no bit may differ
    ///
    /// The backwards run beside other work.
    #[command(after_help = EXAMPLES)]
    Stress {
        /// Number of launches of each head dim, the masks and the packs in turn
        #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(12..))]
        launches: u32,
        /// Number of the GPU
        #[arg(long, default_value_t = 0)]
        gpu: usize,
    },
    /// Judge forwards of large packs by the reference kernel on the GPU
    #[command(after_help = EXAMPLES)]
    Judge(forwards::Args),
    /// Compare the CUDA device with the CPU device, bit for bit, on random problems; says which kernels ran
    #[command(after_help = EXAMPLES)]
    Twins {
        /// Number of random problems
        #[arg(long, default_value_t = 1000)]
        cases: u64,
        /// Seed of the problems
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Sizes of the problems
        #[arg(long, default_value = "quick")]
        profile: Profile,
        /// Number of the GPU
        #[arg(long, default_value_t = 0)]
        gpu: usize,
    },
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    match &args.what {
        What::Build { out, faults } => {
            let built = build(&out.as_deref().map_or_else(Cache::of_user, Cache::at))?;
            if *faults && built == Exit::Held { build_faults() } else { Ok(built) }
        }
        What::Info => info(),
        What::Check { gpu, large: true, .. } => {
            compared(*gpu, (1, "tensors of more than 2^31 elements"), check::check_large)
        }
        What::Check { gpu, levels: true, .. } => {
            compared(*gpu, (1, "scores far from 0"), check::check_levels)
        }
        What::Check { gpu, blocks: true, .. } => {
            compared(*gpu, (1, "attention in few blocks"), |gpu| check::check_few_blocks(gpu, usize::MAX))
        }
        What::Check { gpu, calls: Some(calls), seed, .. } => compare_calls(*gpu, *calls, *seed),
        What::Check { cases, seed, gpu, plant: Some(id), .. } => plant(*gpu, &planted(id)?, *cases, *seed),
        What::Check { cases, seed, gpu, .. } => compare(*gpu, *cases, *seed),
        What::Stress { launches, gpu } => stress(*gpu, *launches as usize),
        What::Judge(args) => forwards::judge(args),
        What::Twins { cases, seed, profile, gpu } => twins(*gpu, *cases, *seed, *profile),
    }
}

fn build(cache: &Cache) -> Result<Exit, CliError> {
    print_line(&format_args!("NVRTC {}, into {}", nvrtc::version()?, folder(cache)));
    print_line(&format_args!(
        "{:<12} {:<36} {:>9} {:>7} {:>8} {:>7} {:>7} {:>10}",
        "source", "kernel", "registers", "threads", "shared", "spills", "stack", "warps"
    ));
    let sources = sources();
    // Each takes a second or two, and NVRTC compiles on as many threads as call it.
    let built: Vec<Result<_, KernelError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = sources.iter().map(|source| scope.spawn(move || cache.fill(source))).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    if built.len() < sources.len() {
        return Ok(Exit::Internal);
    }
    for (source, built) in sources.iter().zip(built) {
        let (compiled, origin) = built?;
        table(source, &nvrtc::resources(&compiled.log));
        let how = if origin == Origin::Cache { "was there" } else { "compiled" };
        note(&format_args!("{}: {how}, {} bytes", source.name(), compiled.cubin.len()));
    }
    Ok(Exit::Held)
}

/// Compiles every edited source. One that does not compile is about code that is gone.
fn build_faults() -> Result<Exit, CliError> {
    let faults: Vec<&SourceFault> = source_faults().collect();
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let work = || {
        let turn = std::iter::repeat_with(|| faults.get(next.fetch_add(1, Ordering::Relaxed)));
        // One instance of a file is enough: the others have the same text.
        let build = |fault: &&SourceFault| (fault.id, fault.edit.instance().map(|s| nvrtc::check_syntax(&s)));
        turn.map_while(|fault| fault.map(build)).collect::<Vec<_>>()
    };
    let built: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).flatten().collect()
    });
    let mut compiled = 0;
    for (id, result) in built {
        match result {
            None => print_line(&format_args!("{id}: its text is not in the source exactly once")),
            Some(Ok(_)) => compiled += 1,
            Some(Err(error)) => print_line(&format_args!("{id}: {error}")),
        }
    }
    print_line(&format_args!("{compiled} of {} planted faults compile", faults.len()));
    Ok(if compiled == faults.len() { Exit::Held } else { Exit::Finding })
}

fn table(source: &Source, kernels: &[Resources]) {
    for resources in kernels {
        let Resources { kernel, registers, spills, stack, .. } = resources;
        let block = block_of(kernel);
        print_line(&format_args!(
            "{:<12} {kernel:<36} {registers:>9} {:>7} {:>8} {spills:>7} {stack:>7} {:>4} of 64",
            source.file,
            block.threads,
            block.shared_with(resources),
            block.resident_warps(resources)
        ));
    }
}

fn folder(cache: &Cache) -> String {
    cache.folder().map_or_else(|| "no folder".to_owned(), |folder| folder.display().to_string())
}

fn info() -> Result<Exit, CliError> {
    let said = |result: Result<String, KernelError>| result.unwrap_or_else(|error| error.to_string());
    print_line(&format_args!("NVRTC   {}", said(nvrtc::version().map(|version| version.to_string()))));
    let driver = seamproof_kernels::gpu::driver_version().map(|version| format!("CUDA {version}"));
    print_line(&format_args!("driver  {}", said(driver)));
    let cache = Cache::of_user();
    print_line(&format_args!("GPU     {}", said(Gpu::open(0, &cache).and_then(|gpu| gpu.name()))));
    print_line(&format_args!("cache   {}", folder(&cache)));
    if let Some(shipped) = cache.shipped() {
        print_line(&format_args!("brought {}", shipped.display()));
    }
    for source in sources() {
        match cache.peek(&source) {
            Some(compiled) => table(&source, &nvrtc::resources(&compiled.log)),
            None => print_line(&format_args!("{}: not compiled yet", source.name())),
        }
    }
    Ok(Exit::Held)
}

fn compare(gpu: usize, cases: u64, seed: u64) -> Result<Exit, CliError> {
    let gpu = Gpu::open(gpu, &Cache::of_user())?;
    let start = std::time::Instant::now();
    let outcome = check::check(&gpu, cases, seed)?;
    for tally in &outcome.tallies {
        print_line(&format_args!(
            "{:<24} {:>8} cases, {:>8} of them write",
            tally.operation, tally.cases, tally.wrote
        ));
    }
    for mismatch in &outcome.mismatches {
        print_line(mismatch);
    }
    let seconds = start.elapsed().as_secs_f64();
    print_line(&format_args!(
        "{cases} cases, seed {seed}, on {}: {} wrong ({:.0} cases a second)",
        gpu.name()?,
        outcome.mismatches.len(),
        cases as f64 / seconds
    ));
    Ok(match outcome {
        _ if !outcome.mismatches.is_empty() => Exit::Finding,
        _ if outcome.tallies.iter().any(|tally| tally.wrote == 0) => Exit::TooLittle,
        _ => Exit::Held,
    })
}

/// Launches every instance, so that a sanitizer around this command sees all. Launches in any order must differ
/// somewhere, or a difference would not be seen in the fixed order either.
fn stress(gpu: usize, launches: usize) -> Result<Exit, CliError> {
    let gpu = Gpu::open(gpu, &Cache::of_user())?;
    let (mut fixed, mut any) = (0, 0);
    check::launch_instances(&gpu)?;
    let parts = check::STEADY_MASKS.len() * check::STEADY_PACKS.len();
    for dim in check::STEADY_DIMS {
        for (name, mask) in check::STEADY_MASKS {
            for pack in check::STEADY_PACKS {
                let steady = check::steady(&gpu, pack, (dim, mask), launches.div_ceil(parts))?;
                print_line(&format_args!(
                    "head dim {dim:>3}, {name:<6}, {:<7}: {} of {} launches in the fixed order differ from the first, \
                     in any order {} ({:.0} launches a second of each)",
                    pack.name,
                    steady.fixed,
                    steady.launches,
                    steady.any,
                    steady.launches as f64 / steady.time.as_secs_f64()
                ));
                fixed += steady.fixed;
                any += steady.any;
            }
        }
    }
    let launched: Vec<String> =
        check::instances(&gpu).map(|(name, count)| format!("{name} {count}")).collect();
    print_line(&format_args!("launches of each instance: {}", launched.join(", ")));
    let missing = check::instances(&gpu).filter(|(_, count)| *count == 0).count();
    print_line(&format_args!(
        "on {}: {fixed} launches differ, {missing} instances were not launched",
        gpu.name()?
    ));
    Ok(match fixed {
        0 if any == 0 || missing > 0 => Exit::TooLittle,
        0 => Exit::Held,
        _ => Exit::Finding,
    })
}

/// Most differences that are shown.
const SHOWN_MAX: usize = 20;

fn twins(gpu: usize, cases: u64, seed: u64, profile: Profile) -> Result<Exit, CliError> {
    let mut runner = CudaRunner::open(gpu)?;
    let limits = profile.limits();
    let (mut compared, mut cut, mut kept, mut wrong, mut time) =
        (0_u64, 0_u64, 0_u64, 0_usize, BTreeMap::new());
    for case in 0..cases {
        let Draw::Problem(problem) = generate::draw(seed, case, &limits) else { continue };
        let subject = Cuda::of_case(case, &problem);
        if subject.declaration().table.refusal(&problem).is_some() {
            continue;
        }
        let mut inputs = values::inputs(&problem);
        values::poison(&mut inputs, &problem, Poison::Nan);
        let want = match subject.twin().run(&problem, &inputs) {
            Ok(outputs) => outputs,
            Err(RunError::Refused(_)) => continue,
            Err(error) => return Err(CliError::Twins(error)),
        };
        let mut last = Instant::now();
        let mut reached = |phase: Phase| {
            let stretch = match phase {
                Phase::Received => "",
                Phase::Uploaded => "inputs dealt and uploaded",
                Phase::Compiling => "kernels compiled",
                Phase::Launched => "forward launched",
                Phase::Done => "waited for; the backward launched and waited for",
            };
            *time.entry(stretch).or_insert(Duration::ZERO) += last.elapsed();
            last = Instant::now();
        };
        let got = runner.run(&subject, &problem, &inputs, &mut reached).map_err(CliError::Twins)?;
        compared += 1;
        cut += u64::from(!problem.mask.is_band());
        kept += u64::from(problem.mask.sink_tokens > 0);
        if let Some(what) = difference(&got, &want) {
            wrong += 1;
            if wrong <= SHOWN_MAX {
                print_line(&format_args!("case {case}: {what}"));
                print_line(&format_args!("  {}", prose::describe(&problem)));
            }
        }
    }
    for (way, count) in runner.counts() {
        print_line(&format_args!("{count:>9}  {way}"));
    }
    let each = |time: Duration| time.as_secs_f64() * 1e6 / compared.max(1) as f64;
    for (stretch, time) in time.iter().filter(|(stretch, _)| !stretch.is_empty()) {
        print_line(&format_args!("{:>6.0} µs a run: {stretch}", each(*time)));
    }
    let launches = runner.launches() as f64 / compared.max(1) as f64;
    print_line(&format_args!("{launches:>6.1} launches a run"));
    let each = each(time.values().sum());
    print_line(&format_args!(
        "{compared} of {cases} problems, {cut} of them with documents, chunks, a prefix or sink tokens ({kept}), seed \
         {seed}, on {}: {wrong} differ ({each:.0} µs a run)",
        runner.name()?
    ));
    Ok(match compared {
        _ if wrong > 0 => Exit::Finding,
        0 => Exit::TooLittle,
        _ => Exit::Held,
    })
}

/// Prints what a comparison of this many things finds on a GPU.
fn compared(
    gpu: usize,
    (count, what): (u64, &str),
    check: impl FnOnce(&Gpu) -> Result<Vec<Mismatch>, KernelError>,
) -> Result<Exit, CliError> {
    let gpu = Gpu::open(gpu, &Cache::of_user())?;
    let found = check(&gpu)?;
    found.iter().for_each(print_line);
    print_line(&format_args!("{what} on {}: {} wrong", gpu.name()?, found.len()));
    Ok(match count {
        _ if !found.is_empty() => Exit::Finding,
        0 => Exit::TooLittle,
        _ => Exit::Held,
    })
}

fn compare_calls(gpu: usize, calls: u64, seed: u64) -> Result<Exit, CliError> {
    let what = format!("{calls} calls that no schedule makes");
    compared(gpu, (calls, &what), |gpu| check::check_calls(gpu, calls, seed, check::MISMATCHES_MAX))
}

/// Returns the faults that are meant: one by its id, or all that a comparison shows.
fn planted(id: &str) -> Result<Vec<&'static SourceFault>, CliError> {
    let all = || source_faults().filter(|fault| fault.edit.seen.is_compared());
    if id == "all" {
        return Ok(all().collect());
    }
    match faults::by_id(id) {
        Some(fault) if fault.edit.seen.is_compared() => Ok(vec![fault]),
        Some(_) => Err(CliError::Usage(format!(
            "--plant: no comparison shows the fault '{id}'; plant it in a campaign, `{}`",
            typed(&format!("seamproof run --backend cuda+{id}"))
        ))),
        None => {
            let known: Vec<&str> = all().map(|fault| fault.id).collect();
            let like = did_you_mean(id, known.iter().copied());
            let known = format!("known: all, {}", known.join(", "));
            Err(CliError::NoFault { option: "--plant", kind: "fault", id: id.to_owned(), like, known })
        }
    }
}

/// Plants each of these faults, and tells whether it is seen where it should be.
fn plant(gpu: usize, faults: &[&SourceFault], cases: u64, seed: u64) -> Result<Exit, CliError> {
    let (mut seen, cache) = (0, Cache::of_user());
    check::prepare(faults, &cache);
    for fault in faults {
        let Some(sources) = fault.edit.sources() else {
            print_line(&format_args!("{:<32} WRONG: its text is not in the source exactly once", fault.id));
            continue;
        };
        let gpu = Gpu::with_sources(gpu, &cache, &sources)?;
        let (expected, found) = check::seen(&gpu, fault, cases, seed)?.unwrap_or_default();
        seen += usize::from(expected);
        let what = found.map_or_else(|| "not seen".to_owned(), |first| first.to_string());
        print_line(&format_args!(
            "{:<32} {} {what}",
            fault.id,
            if expected { "as it says:" } else { "WRONG:" }
        ));
    }
    print_line(&format_args!("{seen} of {} planted faults are seen where they say", faults.len()));
    Ok(if seen == faults.len() { Exit::Held } else { Exit::Finding })
}
