//! A fault of any kind, with the subject that has it and the problems on which it shows.

use std::iter;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::Arc;

use seamproof_kernels::forward::{AttentionKernels, Instance, TileShape};
use seamproof_kernels::forward_fp8::Fp8Shape;
use seamproof_lab::faults::{Launched, SourceFault, source_faults};
use seamproof_oracle::{Pass, Problem, Sequence};
use seamproof_simulator::faults::{self, Fault, FaultRecord, Plant};

use super::table::{TABLE_FAULTS, TableFault, Tabled};
use super::{CASES_MAX, DRAWN_MAX, stream};
use crate::backends::{self, BackendError, Cuda, CudaFp8};
use crate::campaign::{Options, Registered, Subjects};
use seamproof_judge::asked::Asked;
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::subject::{Backend, Refusal};
use seamproof_judge::subjects::{
    Emulated, Fp8, MISCALLS, Miscall, Miscalled, Planted, PlantedFp8, needs_steps,
};
use seamproof_judge::values;

/// A fault that the judge must find in a subject.
#[derive(Clone, Debug)]
pub enum Suspect {
    /// Fault in the schedule or in the kernel.
    Planted(&'static Fault),
    /// Fault at the call.
    Call(Call),
    /// Fault in the table.
    Table(&'static TableFault),
    /// Fault in the source of a kernel for a GPU.
    Source(&'static SourceFault),
    /// Fault in the emulated kernel in FP8.
    Fp8(PlantedFp8),
}

/// A fault at the call, and the subject that is called.
#[derive(Clone, Debug)]
pub struct Call {
    /// Fault at the call.
    pub miscall: &'static Miscall,
    /// Subject that is called; `None` for the emulated kernel.
    of: Option<Arc<Registered>>,
}

impl Call {
    /// Returns the subject without the fault at its call.
    fn right(&self, seed: u64) -> Result<Box<dyn Backend>, BackendError> {
        match &self.of {
            None => Ok(Box::new(emulated(seed))),
            Some(of) => backends::by_name(of.name(), &self.options(of, seed)),
        }
    }

    /// Returns the options of the subject. Options that nobody fixed are drawn for each fault and seed, so that few
    /// faults meet many of them.
    fn options(&self, of: &Registered, seed: u64) -> Options {
        of.options(
            self.miscall
                .id
                .bytes()
                .fold(seed, |seed, byte| seamproof_judge::hash::mix(seed ^ u64::from(byte))),
        )
    }

    fn wrong(&self, seed: u64) -> Result<Miscalled<'static>, BackendError> {
        Ok(Miscalled::new(self.right(seed)?, self.miscall))
    }

    /// Returns the sizes of the subject's problems: a campaign's for a named subject, and those of all other faults
    /// for the emulated kernel.
    fn limits(&self) -> Limits {
        if self.of.is_some() { Limits::quick() } else { Limits::seams() }
    }
}

impl From<&'static Fault> for Suspect {
    fn from(fault: &'static Fault) -> Suspect {
        Suspect::Planted(fault)
    }
}

impl From<&'static Miscall> for Suspect {
    fn from(miscall: &'static Miscall) -> Suspect {
        Suspect::Call(Call { miscall, of: None })
    }
}

impl From<&'static TableFault> for Suspect {
    fn from(fault: &'static TableFault) -> Suspect {
        Suspect::Table(fault)
    }
}

impl Suspect {
    /// Returns every fault in a subject: in schedules, in the kernel, in tables, at the call, in the kernel in FP8.
    pub fn all() -> impl Iterator<Item = Suspect> {
        let planted = faults::catalogue().map(Suspect::from);
        let planted = planted.chain(TABLE_FAULTS.iter().map(Suspect::from));
        planted.chain(MISCALLS.iter().map(Suspect::from)).chain(PlantedFp8::all().map(Suspect::Fp8))
    }

    /// Returns every fault at the call of a subject. Faults of steps show only on a subject that takes them.
    pub fn at_calls_of(subject: Registered) -> impl Iterator<Item = Suspect> {
        let steps = subject.declaration(&subject.options(0)).is_ok_and(|declared| declared.table.cache);
        let of = Arc::new(subject);
        let shown = MISCALLS.iter().filter(move |miscall| steps || !needs_steps(miscall));
        shown.map(move |miscall| Suspect::Call(Call { miscall, of: Some(Arc::clone(&of)) }))
    }

    /// Returns every fault in the kernels for a GPU that a campaign's judge must find.
    pub fn on_gpu() -> impl Iterator<Item = Suspect> {
        source_faults().filter(|fault| !fault.caught_by.is_empty()).map(Suspect::Source)
    }

    /// Returns the fault with this id.
    pub fn by_id(id: &str) -> Option<Suspect> {
        Suspect::all().chain(Suspect::on_gpu()).find(|suspect| suspect.id() == id)
    }

    /// Returns what the fault says of itself.
    pub fn record(&self) -> FaultRecord {
        match self {
            Suspect::Planted(fault) => fault.record(),
            Suspect::Call(call) => call.miscall.record(),
            Suspect::Table(fault) => fault.record(),
            Suspect::Source(fault) => fault.record(),
            Suspect::Fp8(fault) => fault.record(),
        }
    }

    /// Returns the name in reports.
    pub fn id(&self) -> &'static str {
        self.record().id
    }

    /// Returns the fault if there is a schedule with it, which the checker can examine.
    pub(super) fn edited(&self) -> Option<&'static Fault> {
        match self {
            Suspect::Planted(fault) if matches!(fault.edit, Plant::Schedule(_)) => Some(*fault),
            _ => None,
        }
    }

    /// Whether a run can show the fault. A fault that only a look at the schedule can see is not tried elsewhere.
    pub(super) fn runs(&self) -> bool {
        self.record().shows_in_runs()
    }

    /// Returns the subject with the fault: the emulated kernel, its streams in an order drawn from the seed, unless
    /// another subject is called or has the fault in its sources.
    pub fn subject(&self, seed: u64) -> Result<Box<dyn Backend>, BackendError> {
        Ok(match self {
            Suspect::Planted(fault) => Box::new(Planted::new(emulated(seed), **fault)),
            Suspect::Call(call) => Box::new(call.wrong(seed)?),
            Suspect::Table(fault) => Box::new(Tabled::new(fault)),
            Suspect::Source(fault) => match fault.edit.launched {
                Launched::Attention(attention) => backends::on_gpu(fault, cuda(seed, attention)),
                Launched::InOneBlock(attention) => {
                    let blocks = Some(NonZeroUsize::MIN);
                    backends::on_gpu(fault, Cuda { blocks, ..cuda(seed, attention) })
                }
                Launched::Widest | Launched::Latent => backends::on_gpu(fault, cuda(seed, LONG)),
                Launched::Walking(walks) => {
                    backends::on_gpu(fault, Cuda { walks: Some(walks), ..cuda(seed, LONG) })
                }
                Launched::Fp8(shape) => backends::fp8_on_gpu(fault, fp8_forward(shape)),
                Launched::Fp8InOneBlock(shape) => {
                    let scheduled = Cuda { blocks: Some(NonZeroUsize::MIN), ..Cuda::default() };
                    backends::fp8_on_gpu(fault, CudaFp8 { scheduled, ..fp8_forward(shape) })
                }
                Launched::Fp8LongRows => backends::fp8_on_gpu(fault, fp8_forward(Fp8Shape::Long)),
                Launched::Fp8Backward => backends::fp8_on_gpu(fault, fp8_backward()),
            },
            Suspect::Fp8(fault) => Box::new(in_fp8(*fault)),
        })
    }

    /// Returns the same subject without the fault, where the subject may have faults of its own. A failure without
    /// the planted fault is not that fault's.
    pub(super) fn right(&self, seed: u64) -> Result<Option<Box<dyn Backend>>, BackendError> {
        match self {
            Suspect::Call(call) if call.of.is_some() => call.right(seed).map(Some),
            _ => Ok(None),
        }
    }

    /// Returns the options of a named subject, as drawn for a seed.
    pub fn options(&self, seed: u64) -> Option<Options> {
        match self {
            Suspect::Call(call) => call.of.as_ref().map(|of| call.options(of, seed)),
            _ => None,
        }
    }

    /// Returns why a called subject refuses a problem that shows the fault, where it takes none on which the fault
    /// shows.
    pub(super) fn excluded(&self, seed: u64) -> Result<Option<Refusal>, BackendError> {
        let Suspect::Call(call) = self else { return Ok(None) };
        let table = call.right(seed)?.declaration().table;
        let refused = drawn(seed, call.limits()).filter(|problem| table.refusal(problem).is_some());
        // The problem alone decides whether the fault shows, and the emulated kernel takes what the other subject
        // refuses.
        let anything = Rc::new(Miscalled::new(Box::new(emulated(seed)), call.miscall));
        let shown = shown(&anything, refused.take(CASES_MAX)).next();
        Ok(shown.and_then(|problem| table.refusal(&problem)))
    }

    /// Returns the problems of a seed's stream on which the fault shows. On the others it is equivalent.
    pub fn stream(&self, seed: u64) -> Result<Box<dyn Iterator<Item = Problem>>, BackendError> {
        Ok(match *self {
            Suspect::Planted(fault) => Box::new(stream(fault, seed).map(|(problem, _)| problem)),
            Suspect::Call(ref call) => call_stream(&Rc::new(call.wrong(seed)?), seed, &call.limits()),
            Suspect::Table(fault) => {
                let subject = Tabled::new(fault);
                Box::new(problems(seed).filter(move |problem| subject.shows(problem)).take(CASES_MAX))
            }
            Suspect::Fp8(fault) => {
                let subject = in_fp8(fault);
                let table = subject.declaration().table;
                let drawn = problems(seed).map(move |problem| table.asked(problem));
                Box::new(drawn.take(FP8_MAX).filter(move |problem| subject.shows(problem)).take(CASES_MAX))
            }
            // Only a GPU could say whether the fault shows.
            Suspect::Source(fault) => {
                let taken = Cuda::default().declaration().table;
                let taken = move |problem: &Problem| taken.refusal(problem).is_none();
                match fault.edit.launched {
                    Launched::Attention(AttentionKernels::Simple) => {
                        Box::new(problems(seed).filter(taken).take(CASES_MAX))
                    }
                    // These are sequences of more than a block of keys, on problems that go to tensor cores.
                    launched @ (Launched::Attention(_)
                    | Launched::InOneBlock(_)
                    | Launched::Widest
                    | Launched::Walking(_)) => {
                        // Small cases hardly have a walk of several turns.
                        let walks = matches!(launched, Launched::Walking(_));
                        let limits = if walks { Limits::large() } else { Limits::quick() };
                        let drawn = drawn(seed, limits).filter(on_tensor_cores);
                        let drawn = drawn.filter(move |problem| comes_to(fault, problem));
                        Box::new(drawn.filter(taken).take(CASES_MAX))
                    }
                    Launched::Latent => {
                        let instance = Some(Instance::Latent);
                        let asked = asked_of(&Cuda { instance, ..cuda(seed, LONG) }, seed, Limits::quick());
                        // The last panel of keys, and lanes of the second group.
                        Box::new(asked.filter(|problem| problem.dims.qk > 512 && problem.dims.v > 256))
                    }
                    Launched::Fp8(_) | Launched::Fp8InOneBlock(_) => {
                        asked_of(&CudaFp8::default(), seed, Limits::quick())
                    }
                    // Small cases hardly have a row of three blocks.
                    Launched::Fp8LongRows => {
                        let asked = asked_of(&CudaFp8::default(), seed, Limits::large());
                        Box::new(asked.filter(has_long_rows_in_fp8))
                    }
                    Launched::Fp8Backward => asked_of(&fp8_backward(), seed, Limits::quick()),
                }
            }
        })
    }
}

/// Number of drawn problems on which a fault in FP8 is looked for, before those of long rows.
const FP8_MAX: usize = 2_000;

/// Number of rows, of queries and of keys, above which a sequence has several tiles of each.
const WALKED: usize = 128;

/// Attention in the forward's long shape.
const LONG: AttentionKernels = AttentionKernels::Of(TileShape::Long);

fn cuda(order: u64, attention: AttentionKernels) -> Cuda {
    Cuda { order, helpers: false, attention, ..Cuda::default() }
}

fn fp8_forward(shape: Fp8Shape) -> CudaFp8 {
    CudaFp8 { shape: Some(shape), ..CudaFp8::default() }
}

fn fp8_backward() -> CudaFp8 {
    CudaFp8 { backward: true, ..CudaFp8::default() }
}

/// Returns problems drawn within limits, as a subject is asked them.
fn asked_of(subject: &dyn Backend, seed: u64, limits: Limits) -> Box<dyn Iterator<Item = Problem>> {
    let table = subject.declaration().table;
    let drawn = drawn(seed, limits).map(move |problem| table.asked(problem));
    Box::new(drawn.take(CASES_MAX))
}

fn in_fp8(fault: PlantedFp8) -> Fp8 {
    Fp8::default().planted(fault)
}

fn emulated(seed: u64) -> Emulated {
    Emulated { order: seed, ..Emulated::default() }
}

/// Whether a problem reaches the pass with the fault, and tiles of several heads, clusters, over 128 lanes or walks of several
/// turns over several tiles of keys with over 64 lanes, where the fault is in one of these.
fn comes_to(fault: &SourceFault, problem: &Problem) -> bool {
    let instance = Instance::of_bands(&problem.softmax, [problem.dims.qk, problem.dims.v]);
    let is_reached = fault.edit.file != "backward.cu" || problem.pass == Pass::Backward;
    match fault.edit.launched {
        Launched::Attention(AttentionKernels::Of(shape @ TileShape::Middle)) => {
            shape.packed(problem.group(), instance) > 1
        }
        // All other instances have another shape in its place.
        Launched::Attention(AttentionKernels::Of(TileShape::Paired)) => instance == Instance::Wide,
        Launched::Widest => is_reached && instance == Instance::Widest,
        _ if matches!(instance, Instance::Widest | Instance::Latent) => false,
        Launched::Walking(_) => {
            let walks = |sequence: &Sequence| sequence.q.len > WALKED && sequence.kv.len > WALKED;
            is_reached
                && instance == Instance::Wide
                && problem.heads.kv > 1
                && problem.sequences.iter().any(walks)
        }
        _ => is_reached,
    }
}

/// Number of keys above which a row of the forward in FP8 has three blocks.
const LONG_ROW: usize = 256;

/// Whether a problem has head dims from 65 to 128, and rows of three blocks of keys.
fn has_long_rows_in_fp8(problem: &Problem) -> bool {
    let dims = problem.dims.qk.max(problem.dims.v);
    (65..=128).contains(&dims) && problem.sequences.iter().any(|sequence| sequence.kv.len > LONG_ROW)
}

/// Whether attention on tensor cores takes a problem, as far as the problem alone decides.
fn on_tensor_cores(problem: &Problem) -> bool {
    problem.precision.p.format == problem.precision.q.format
}

/// Returns the well-formed problems that a seed draws.
pub(super) fn problems(seed: u64) -> impl Iterator<Item = Problem> {
    drawn(seed, Limits::seams())
}

/// Returns the well-formed problems that a seed draws within limits.
fn drawn(seed: u64, limits: Limits) -> impl Iterator<Item = Problem> {
    let mut indices = 0..DRAWN_MAX;
    iter::from_fn(move || {
        indices.find_map(|index| match generate::draw(seed, index, &limits) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        })
    })
}

/// Returns the problems of a seed's stream on which a fault at the call changes the exact answer. On the others it is
/// equivalent. Where problems can go different ways through the subject, only those that take every way are returned,
/// unless the fault shows on none of them.
pub fn call_stream(
    subject: &Rc<Miscalled<'static>>,
    seed: u64,
    limits: &Limits,
) -> Box<dyn Iterator<Item = Problem>> {
    let goes = Rc::clone(subject);
    let on_way =
        taken(subject, seed, limits).filter(move |problem| goes.ways(problem).iter().all(|way| way.taken));
    let mut on_way = shown(subject, on_way.take(CASES_MAX)).peekable();
    if on_way.peek().is_some() {
        return Box::new(on_way);
    }
    Box::new(shown(subject, taken(subject, seed, limits)).take(CASES_MAX))
}

/// Returns the problems of a seed that a campaign asks a subject inside its table.
fn taken(
    subject: &Rc<Miscalled<'static>>,
    seed: u64,
    limits: &Limits,
) -> impl Iterator<Item = Problem> + use<> {
    let (declaration, limits) = (subject.declaration(), limits.clone());
    (0..DRAWN_MAX).filter_map(move |index| Asked::drawn(seed, index, &limits, &declaration).inside())
}

/// Returns those problems on which a fault at the call shows.
fn shown<P: Iterator<Item = Problem>>(
    subject: &Rc<Miscalled<'static>>,
    problems: P,
) -> impl Iterator<Item = Problem> + use<P> {
    let subject = Rc::clone(subject);
    problems.filter(move |problem| subject.shows(problem, &values::inputs(problem)))
}
