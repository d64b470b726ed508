//! Speed of quantising, against a device copy of as many bytes in the same run.
//!
//! Values are in bf16, and become codes of e4m3. *Bytes* are those that must move: magnitudes read every value once, and
//! codes read it a second time, since a value's scale is known only when all have been seen. The figure of both together
//! counts both reads. Groups of single rows need one read, and have many factors: where the figures of such groups hold
//! the making of factors, they count these. Scales that codes read are not counted.

use std::io::Write;

use seamproof_kernels::memory::{Area, DeviceBuffer};
use seamproof_kernels::quantise::{DeviceRecipe, GroupTable};
use seamproof_kernels::turned::TurnedShape;
use seamproof_kernels::view::View;
use seamproof_kernels::{Gpu, KernelError, QuantiseKernels};
use seamproof_oracle::quantise::ScaleRule;
use seamproof_oracle::{Format, Scaling};

use super::error::BenchError;
use super::pools::{BenchPack, DIM, HEADS, Pools, pack};

/// The scalings, each with its name. The first is that of FlashAttention-3's descales.
const SCALINGS: [(&str, Scaling); 4] = [
    ("sequence-head", Scaling::PerSequenceHead),
    ("tensor", Scaling::PerTensor),
    ("token-head", Scaling::PerTokenHead),
    ("block1x32", Scaling::PerBlock { rows: 1, columns: 32 }),
];

/// A pack's groups on the device, and room for their factors.
struct Buffers {
    row_group: DeviceBuffer,
    shape: [usize; 3],
    each: [usize; 2],
    amax: DeviceBuffer,
    scale: DeviceBuffer,
    descale: DeviceBuffer,
}

impl Buffers {
    fn new(gpu: &Gpu, pack: &BenchPack, scaling: Scaling) -> Result<Buffers, KernelError> {
        let (mut row_group, mut blocks) = (vec![-1; pack.rows], 0);
        for (sequence, run) in pack.runs.iter().enumerate() {
            for position in 0..run.len {
                row_group[run.row(position)] = match scaling {
                    Scaling::PerTensor => 0,
                    Scaling::PerSequenceHead => sequence as i32,
                    _ => (blocks + position) as i32,
                };
            }
            blocks += run.span;
        }
        let (shape, each) = match scaling {
            Scaling::PerTensor => ([1, 1, 1], [HEADS, DIM]),
            Scaling::PerSequenceHead => ([pack.runs.len(), HEADS, 1], [1, DIM]),
            Scaling::PerBlock { columns, .. } => ([blocks, HEADS, DIM / columns], [1, columns]),
            _ => ([blocks, HEADS, 1], [1, DIM]),
        };
        let bytes = 4 * shape.iter().product::<usize>();
        let row_group = gpu.upload_i32(&row_group)?;
        let [amax, scale, descale] = [gpu.allocate(bytes)?, gpu.allocate(bytes)?, gpu.allocate(bytes)?];
        Ok(Buffers { row_group, shape, each, amax, scale, descale })
    }

    fn table(&self) -> GroupTable<'_> {
        let [heads_each, lanes_each] = self.each;
        GroupTable { row_group: self.row_group.area(), shape: self.shape, heads_each, lanes_each }
    }

    fn factors(&self) -> [Area<'_>; 3] {
        [self.amax.area(), self.scale.area(), self.descale.area()]
    }
}

/// Prints every figure.
pub fn quantise(gpu: &Gpu, to: &mut dyn Write) -> Result<(), BenchError> {
    let pools = Pools::new(gpu)?;
    writeln!(to, "{}: {HEADS} heads of {DIM} in bf16, to e4m3", gpu.name()?)?;
    let packs = [pack("16 × 4096", 16, 4096, false), pack("ragged, 16 × about 4096", 16, 4096, true)];
    for pack in &packs {
        for (name, scaling) in SCALINGS {
            figures(&pools, pack, (name, scaling), to)?;
        }
    }
    Ok(())
}

/// The recipe: current scaling.
const RECIPE: DeviceRecipe =
    DeviceRecipe { format: Format::E4m3, scale: ScaleRule::F32, margin: 0, delayed: None };

/// Work of a launch, whose number it is told.
type Work<'a> = &'a dyn Fn(usize) -> Result<(), KernelError>;

fn figures(
    pools: &Pools,
    pack: &BenchPack,
    (name, scaling): (&str, Scaling),
    to: &mut dyn Write,
) -> Result<(), BenchError> {
    let (gpu, buffers, shape) = (pools.gpu, Buffers::new(pools.gpu, pack, scaling)?, [pack.rows, HEADS, DIM]);
    let (table, [amax, scale, descale]) = (buffers.table(), buffers.factors());
    let elements = pack.rows * HEADS * DIM;
    let turned_bytes = TurnedShape::of(shape).bytes();
    let values = |launch| {
        Ok::<_, KernelError>(View::rows(pools.part(false, launch, 2 * elements)?, shape, Format::Bf16))
    };
    // A launch has a part of the pool for codes, and behind them one for the turned copy.
    let codes = |launch| {
        let area = pools.part(true, launch, 2 * turned_bytes)?;
        let rows = View::rows(area.part(0..elements)?, shape, Format::E4m3);
        Ok::<_, KernelError>((rows, (Format::E4m3, area.part(turned_bytes..2 * turned_bytes)?)))
    };
    let largest = |launch| {
        gpu.fill(amax, 0)?;
        gpu.largest(&values(launch)?, &table, amax)?;
        gpu.factors(&RECIPE, amax, scale, descale)
    };
    let encode = |launch| gpu.encode(&values(launch)?, &table, scale, &codes(launch)?.0);
    let in_rows = |launch, codes: Option<&View>| {
        gpu.encode_rows(&values(launch)?, &table, &RECIPE, [amax, scale, descale], codes)
    };
    let factors = |launch| in_rows(launch, None);
    let turn = |launch| gpu.encode_turned(&values(launch)?, &table, scale, codes(launch)?.1, None);
    let both = |launch| {
        let (rows, turned) = codes(launch)?;
        gpu.encode_turned(&values(launch)?, &table, scale, turned, Some(&rows))
    };
    let mut line = |what: &str, bytes: usize, work: Work| {
        let line = pools.line((&pack.name, &format!("{name}: {what}")), (bytes, 2 * elements), work)?;
        writeln!(to, "{line}")?;
        Ok::<_, BenchError>(())
    };
    let single = table.threads_of_row(&values(0)?).is_some() && scaling.has_single_rows();
    let (what, more, first): (_, _, Work) =
        if single { ("factors", 12 * table.count(), &factors) } else { ("magnitudes", 0, &largest) };
    line(what, 2 * elements + more, first)?;
    line("codes", 3 * elements, &encode)?;
    line("turned", 3 * elements, &turn)?;
    line("codes and turned", 4 * elements, &both)?;
    match single {
        true => {
            let once = |launch| in_rows(launch, Some(&codes(launch)?.0));
            line("all in rows, one read", 3 * elements + more, &once)?;
        }
        false => line("all in rows", 5 * elements, &|launch| first(launch).and_then(|()| encode(launch)))?,
    }
    line("all turned", 5 * elements + more, &|launch| first(launch).and_then(|()| turn(launch)))?;
    line("all of both", 6 * elements + more, &|launch| first(launch).and_then(|()| both(launch)))
}
