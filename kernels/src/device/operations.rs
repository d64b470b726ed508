//! Recordings of each operation's launches.

use seamproof_oracle::{Balance, Format, Run, Sink};
use seamproof_simulator::check::buffers_of;
use seamproof_simulator::device::{DeviceError, Transfer};
use seamproof_simulator::helpers::{Rest, SlotPart, Style, Update};
use seamproof_simulator::schedule::{
    Attend, AttendBackward, Axes, BufferId, Descales, FillValue, KeySource, Layer, Merge, MergeStyle,
    Reduction, Region, Rotated, RowPair, SegmentSource, Work,
};

use super::choice::{backward_operands, operands};
use super::cuda::{CudaDevice, failed};
use super::fp8;
use super::image::Placed;
use super::packed::{self, PackedLayer, PackedSlots, Reorder};
use super::run::CudaMemory;
use crate::attend::{BackwardTensors, CallTables, ForwardTensors};
use crate::backward::{BackwardMode, DqOrder};
use crate::error::KernelError;
use crate::forward::TileShape;
use crate::memory::Area;
use crate::merge::MergeKernels;
use crate::metadata::{SEGMENT_BYTES, SlotTables, TableKernels};
use crate::pairs::{DeviceRegion, RowTable, TransferTable, Written};
use crate::region::{RegionKernels, RotationTable};
use crate::rows::RowKernels;
use crate::tables::{Cut, Slots};
use crate::view::{View, is_codes};

type Range = std::ops::Range<usize>;

/// Returns a region of a buffer. Its rows mean nothing where the buffer has none.
pub(super) fn part<'a>(
    place: &Placed,
    rows: Run,
    heads: Range,
    memory: Area<'a>,
) -> Result<DeviceRegion<'a>, KernelError> {
    let rows = if place.axes == Axes::Heads { Run::packed(0, 1, 1) } else { rows };
    Ok(DeviceRegion { view: place.view(memory)?, rows, heads })
}

/// Returns the slots of a tensor of `rows` rows, among the tables.
fn slots_at<'a>(at: &Range, count: usize, rows: usize, tables: Area<'a>) -> Result<Slots<'a>, KernelError> {
    let column = |index: usize| {
        let start = at.start + index * count * 4;
        tables.part(start..start + count * 4)
    };
    Ok(Slots { offset: column(0)?, span: column(1)?, len: column(2)?, count, rows })
}

/// The places of a forward's tensors.
#[derive(Clone, Copy)]
pub(super) struct ForwardPlaces {
    pub(super) q: Placed,
    pub(super) k: Placed,
    pub(super) v: Placed,
    sink: Option<Placed>,
    out: Placed,
    lse: Placed,
    max_logit: Placed,
}

impl ForwardPlaces {
    fn of(attend: &Attend, memory: &CudaMemory) -> Result<ForwardPlaces, KernelError> {
        let [q, k, v, out, lse, max_logit] =
            places(memory, [attend.q, attend.k, attend.v, attend.out, attend.lse, attend.max_logit])?;
        let sink = attend.sink.map(|sink| memory.place(sink)).transpose()?;
        Ok(ForwardPlaces { q, k, v, sink, out, lse, max_logit })
    }

    pub(super) fn tensors<'a>(&self, memory: Area<'a>) -> Result<ForwardTensors<'a>, KernelError> {
        let view = |place: Placed| place.view(memory);
        Ok(ForwardTensors {
            q: view(self.q)?,
            k: view(self.k)?,
            v: view(self.v)?,
            sink: self.sink.map(view).transpose()?,
            out: view(self.out)?,
            lse: view(self.lse)?,
            max_logit: view(self.max_logit)?,
        })
    }
}

/// The places of the tensors of a launch of a backward.
#[derive(Clone, Copy)]
pub(super) struct BackwardPlaces {
    pub(super) q: Placed,
    pub(super) k: Placed,
    pub(super) v: Placed,
    pub(super) dout: Placed,
    out: Placed,
    lse: Placed,
    dq: Placed,
    dk: Placed,
    dv: Placed,
}

impl BackwardPlaces {
    fn of(attend: &AttendBackward, memory: &CudaMemory) -> Result<BackwardPlaces, KernelError> {
        let AttendBackward { q, k, v, dout, out, lse, dq, dk, dv, .. } = *attend;
        let [q, k, v, dout, out, lse, dq, dk, dv] = places(memory, [q, k, v, dout, out, lse, dq, dk, dv])?;
        Ok(BackwardPlaces { q, k, v, dout, out, lse, dq, dk, dv })
    }

    pub(super) fn tensors<'a>(&self, memory: Area<'a>) -> Result<BackwardTensors<'a>, KernelError> {
        let view = |place: Placed| place.view(memory);
        Ok(BackwardTensors {
            q: view(self.q)?,
            k: view(self.k)?,
            v: view(self.v)?,
            dout: view(self.dout)?,
            out: view(self.out)?,
            lse: view(self.lse)?,
            dq: view(self.dq)?,
            dk: view(self.dk)?,
            dv: view(self.dv)?,
        })
    }
}

/// Rows of a table of segments.
pub(super) struct TablePart {
    table: Placed,
    bytes: Range,
}

impl TablePart {
    fn new(table: &Region, memory: &CudaMemory) -> Result<TablePart, KernelError> {
        let [at] = places(memory, [table.buffer])?;
        let bytes = |rows: usize| rows * SEGMENT_BYTES;
        let Run { offset, len, .. } = table.rows;
        Ok(TablePart { table: at, bytes: bytes(offset)..bytes(offset + len) })
    }

    pub(super) fn area<'a>(&self, memory: Area<'a>) -> Result<Area<'a>, KernelError> {
        self.table.area(memory)?.part(self.bytes.clone())
    }
}

impl CudaDevice<'_> {
    pub(super) fn record_work(&self, work: &Work, memory: &mut CudaMemory) -> Result<(), DeviceError> {
        let before = memory.requests.commands().len();
        self.record(work, memory)?;
        // Transfers that have joined others are noted there.
        if memory.requests.commands().len() > before {
            memory.requests.touch(&buffers_of(work));
        }
        Ok(())
    }

    fn record(&self, work: &Work, memory: &mut CudaMemory) -> Result<(), DeviceError> {
        match work {
            Work::Attend(attend) => self.attend(attend, memory).map_err(failed),
            Work::AttendBackward(attend) => self.attend_backward(attend, memory).map_err(failed),
            Work::Merge(merge) => self.merge(merge, memory),
            Work::ApplySink { sink, out, lse, rows } => self.apply_sink(*sink, [*out, *lse], rows, memory),
            Work::SinkGradient { sink, dout, out, lse, dsink, rows, descales, .. } => {
                for id in [*dout, *out, *lse] {
                    memory.image.check_rows(id, rows)?;
                }
                self.sink_gradient([*sink, *dsink], [*dout, *out, *lse], (rows, descales), memory)
                    .map_err(failed)
            }
            Work::Accumulate { from, to, rows } => self.pairs([*from, *to], rows, true, memory),
            Work::Copy { from, to, rows } => self.pairs([*from, *to], rows, false, memory),
            Work::Fill { to, rows, value } => {
                let value = match value {
                    FillValue::Zero => 0.0,
                    FillValue::NegInfinity => f32::NEG_INFINITY,
                };
                self.record_fill(*to, rows, value, memory)
            }
            Work::MakeSegments { to, from } => self.make_segments(*to, from, memory).map_err(failed),
            Work::CopyValid { from, to, table, rows } => {
                memory.image.check_pairs(*from, *to, rows)?;
                self.copy_valid([*from, *to], table, memory).map_err(failed)
            }
            Work::Linear { layer, heads, from, to, rows } => {
                self.linear(*layer, heads, [*from, *to], rows, memory)
            }
            Work::Rotate { buffer, rows, inverse } => {
                let runs: Vec<Run> = rows.iter().map(|rotated| rotated.rows).collect();
                memory.image.check_rows(*buffer, &runs)?;
                self.rotate(*buffer, rows, *inverse, memory).map_err(failed)
            }
            Work::Send { .. } | Work::Recv { .. } => Err(DeviceError::NotLocal("messages")),
            Work::AllGather { .. }
            | Work::ReduceScatter { .. }
            | Work::AllToAll { .. }
            | Work::AllReduce { .. } => Err(DeviceError::NotLocal("collectives")),
            Work::RecordEvent(_) | Work::WaitEvent(_) | Work::HostRead(_) => {
                Err(DeviceError::NotLocal("events"))
            }
        }
    }

    fn attend(&self, attend: &Attend, memory: &mut CudaMemory) -> Result<(), KernelError> {
        let places = ForwardPlaces::of(attend, memory)?;
        let ForwardPlaces { q, k, v, out, .. } = places;
        if q.format == Format::E4m3 {
            return self.attend_codes(attend, places, memory);
        }
        let mut call = CallTables::new(&attend.call, [q.rows, k.rows], false)?;
        let told = self.told(attend.table.as_ref(), &mut call, memory)?;
        let formats = self.formats;
        let operands = operands([q, k, v, out].map(|place| (place.format, place.dim)), formats);
        let shape = self.options.attention.shape(&call, &operands, [q.heads, k.heads]);
        let call = match self.options.page.filter(|_| shape.is_none()) {
            Some(size) => call.in_pages(&attend.call, size)?,
            None => call,
        };
        let at = memory.table(&call.bytes);
        let plan = memory.scratch(shape.map_or(0, |shape| call.forward_bytes(shape, [q.heads, k.heads])));
        self.workspace.count(match shape {
            None if call.pages.is_some() => "attend: attend_pages",
            None => "attend: attend",
            Some(TileShape::Long) => "attend: forward_long",
            Some(TileShape::Paired) => "attend: forward_paired",
            Some(TileShape::Middle) => "attend: forward_middle",
            Some(TileShape::Short) => "attend: forward_short",
            Some(TileShape::Split) => "attend: forward_split",
            Some(TileShape::Mixed) => "attend: forward_mixed",
        });
        memory.record(move |gpu, frame| {
            let tensors = places.tensors(frame.memory)?;
            let tables = frame.tables.part(at.clone())?;
            if let Some(told) = &told {
                gpu.fill_call(told.area(frame.memory)?, &call, tables)?;
            }
            match shape {
                None => gpu.attend(&call, tables, formats, &tensors),
                Some(shape) => {
                    let plan = frame.scratch.part(plan.clone())?;
                    gpu.forward(&call, [tables, plan], formats, shape, &tensors)
                }
            }
        });
        Ok(())
    }

    fn attend_backward(&self, attend: &AttendBackward, memory: &mut CudaMemory) -> Result<(), KernelError> {
        let places = BackwardPlaces::of(attend, memory)?;
        match places.q.format {
            Format::E4m3 => self.attend_backward_on_codes(attend, places, memory)?,
            _ => self.attend_backward_on_values(attend, places, memory)?,
        }
        match attend.sink {
            Some(sink) if attend.call.softmax.sink == Sink::Learnable => {
                let segments = &attend.call.segments;
                let rows: Vec<Run> = segments.iter().map(|segment| segment.q).collect();
                let saved = [attend.dout, attend.out, attend.lse];
                self.sink_gradient([sink.0, sink.1], saved, (&rows, &attend.descales), memory)
            }
            _ => Ok(()),
        }
    }

    fn attend_backward_on_values(
        &self,
        attend: &AttendBackward,
        places: BackwardPlaces,
        memory: &mut CudaMemory,
    ) -> Result<(), KernelError> {
        let BackwardPlaces { q, k, v, dout, out, dq, dk, dv, .. } = places;
        let mut call = CallTables::new(&attend.call, [q.rows, k.rows], true)?;
        let told = self.told(attend.table.as_ref(), &mut call, memory)?;
        let (at, formats) = (memory.table(&call.bytes), self.formats);
        let forward = operands([q, k, v, out].map(|place| (place.format, place.dim)), formats);
        let gradients = [dout, dq, dk, dv].map(|place| place.format);
        let operands = backward_operands(forward, gradients, formats);
        let tuned = self.options.attention.takes_backward(&call, &operands);
        let scratch = match tuned {
            true => call.workspace_bytes(q.heads, [q.dim, v.dim]),
            false => call.scratch_bytes(q.heads),
        };
        let scratch = memory.scratch(scratch);
        // A schedule adds gradients up itself.
        let how = BackwardMode::overwrite(self.options.dq).with_walks(self.options.walks);
        // Counts go by the order that is asked for. In any order, short packs may be launched in the fixed one.
        self.workspace.count(match (tuned, how.order) {
            (true, DqOrder::Fixed) => "attend backward: backward, fixed order",
            (true, DqOrder::AsTheyCome) => "attend backward: backward, any order",
            (false, _) => "attend backward: attend_queries, attend_keys",
        });
        memory.record(move |gpu, frame| {
            let tensors = places.tensors(frame.memory)?;
            let areas = [frame.tables.part(at.clone())?, frame.scratch.part(scratch.clone())?];
            if let Some(told) = &told {
                gpu.fill_call(told.area(frame.memory)?, &call, areas[0])?;
            }
            match tuned {
                true => gpu.backward(&call, areas, formats, how, &tensors),
                false => gpu.attend_backward(&call, areas, formats, &tensors),
            }
        });
        Ok(())
    }

    /// Returns where a launch's segments lie, if a table says them, and takes them out of the call.
    pub(super) fn told(
        &self,
        table: Option<&Region>,
        call: &mut CallTables,
        memory: &CudaMemory,
    ) -> Result<Option<TablePart>, KernelError> {
        let Some(table) = table else { return Ok(None) };
        call.leave_to_device();
        TablePart::new(table, memory).map(Some)
    }

    fn make_segments(
        &self,
        to: BufferId,
        from: &SegmentSource,
        memory: &mut CudaMemory,
    ) -> Result<(), KernelError> {
        let [to] = places(memory, [to])?;
        let SegmentSource { sides, mask, place, keys } = from;
        let (mask, place, keys) = (*mask, *place, *keys);
        let cut = (Cut { cp: sides[0].cp, balance: sides[0].balance }, from.pieces());
        let sides = [0, 1].map(|side: usize| {
            let side = &sides[side];
            let slots = side.slots.iter().map(|slot| Run::packed(slot.offset, slot.len, slot.span));
            let packed = packed::tables(&slots.collect::<Vec<_>>());
            (memory.table(&packed.table.0), packed.count, side.rows)
        });
        self.workspace.count(match keys {
            KeySource::Gathered => "make segments: all_gather_segments",
            KeySource::Of(_) if matches!(cut.0.balance, Balance::Striped { stripe: 2.. }) => {
                "make segments: ring_stripes"
            }
            KeySource::Of(_) => "make segments: ring_segments",
            KeySource::Residues => "make segments: all_gather_residues",
        });
        memory.record(move |gpu, frame| {
            let slots = |side: usize| {
                let (at, count, rows) = &sides[side];
                slots_at(at, *count, *rows, frame.tables)
            };
            let (slots, segments) = ([slots(0)?, slots(1)?], to.area(frame.memory)?);
            match keys {
                KeySource::Gathered => gpu.all_gather_segments(slots, &mask, cut, place, segments),
                KeySource::Of(owner) => gpu.ring_segments(slots, &mask, cut, [place, owner], segments),
                KeySource::Residues => gpu.all_gather_backward_segments(slots, &mask, cut, place, segments),
            }
        });
        Ok(())
    }

    fn copy_valid(
        &self,
        buffers: [BufferId; 2],
        table: &Region,
        memory: &mut CudaMemory,
    ) -> Result<(), KernelError> {
        let at = places(memory, buffers)?;
        let [from, to] = &at;
        if from.format != to.format || !packed::alike(from, to) {
            return Err(KernelError::shape("valid rows are copied between tensors of one shape and format"));
        }
        let (told, count) = (TablePart::new(table, memory)?, table.rows.len);
        let scratch = memory.scratch(3 * 4 * count);
        self.workspace.count("copy valid: copy_valid");
        memory.record(move |gpu, frame| {
            let [from, to] = at;
            let slots = slots_at(&scratch, count, to.rows, frame.scratch)?;
            let Slots { offset, span, len, .. } = slots;
            gpu.query_slots(told.area(frame.memory)?, count, SlotTables { offset, span, len })?;
            gpu.copy_valid(slots, from.as_rows(frame.memory)?, to.as_rows(frame.memory)?, Rest::Leave)
        });
        Ok(())
    }

    fn merge(&self, merge: &Merge, memory: &mut CudaMemory) -> Result<(), DeviceError> {
        let Merge { style, step_out, step_lse, out, lse, .. } = *merge;
        memory.image.check_pairs(step_out, out, &merge.rows)?;
        memory.image.check_pairs(step_lse, lse, &merge.rows)?;
        let Some(of_slots) = merge_of_slots(style) else {
            return Err(DeviceError::Shape("no kernel merges by a difference; merge by weights".into()));
        };
        let at = places(memory, [out, lse, step_out, step_lse]).map_err(failed)?;
        let fits = packed::adds(&at[0], &at[2]) || style == MergeStyle::Statistics;
        let fits = self.options.helpers && fits && at[1].rows == at[3].rows && at[0].rows == at[1].rows;
        match fits.then(|| packed::slots(&merge.rows)).flatten() {
            Some(slots) => self.merge_slots(of_slots, at, &slots, memory),
            None => self.merge_pairs(style, at, &merge.rows, memory),
        }
        Ok(())
    }

    fn merge_slots(
        &self,
        (way, style): (&'static str, Option<Style>),
        at: [Placed; 4],
        slots: &PackedSlots,
        memory: &mut CudaMemory,
    ) {
        let (table, count) = (memory.table(&slots.table.0), slots.count);
        self.workspace.count(way);
        memory.record(move |gpu, frame| {
            let [out, lse, step_out, step_lse] = at;
            let slots = slots_at(&table, count, lse.rows, frame.tables)?;
            let (lse, step_lse) = (lse.statistic(frame.memory)?, step_lse.statistic(frame.memory)?);
            match style {
                None => gpu.merge_statistics(slots, SlotPart::Whole, lse, step_lse),
                Some(style) => {
                    let (out, step_out) = (out.tensor(frame.memory)?, step_out.tensor(frame.memory)?);
                    gpu.merge_out(slots, (SlotPart::Whole, style), (out, lse), (step_out, step_lse))
                }
            }
        });
    }

    fn merge_pairs(&self, style: MergeStyle, at: [Placed; 4], rows: &[RowPair], memory: &mut CudaMemory) {
        let rows = RowTable::pairs(rows);
        let table = memory.table(&rows.table.0);
        self.workspace.count("merge: merge_pairs");
        memory.record(move |gpu, frame| {
            let [out, lse, step_out, step_lse] = views(&at, frame.memory)?;
            let table = frame.tables.part(table.clone())?;
            gpu.merge_pairs(&rows, table, style, [&out, &lse], [&step_out, &step_lse])
        });
    }

    fn apply_sink(
        &self,
        sink: Option<BufferId>,
        [out, lse]: [BufferId; 2],
        rows: &[Run],
        memory: &mut CudaMemory,
    ) -> Result<(), DeviceError> {
        memory.image.check_rows(out, rows)?;
        memory.image.check_rows(lse, rows)?;
        let at = places(memory, [out, lse]).map_err(failed)?;
        let sink = sink.map(|sink| memory.place(sink)).transpose().map_err(failed)?;
        let rows = RowTable::rows(rows);
        let table = memory.table(&rows.table.0);
        self.workspace.count("apply sink: apply_sink");
        memory.record(move |gpu, frame| {
            let [out, lse] = views(&at, frame.memory)?;
            let sink = sink.map(|sink| sink.view(frame.memory)).transpose()?;
            gpu.apply_sink(&rows, frame.tables.part(table.clone())?, sink.as_ref(), [&out, &lse])
        });
        Ok(())
    }

    fn sink_gradient(
        &self,
        sinks: [BufferId; 2],
        tensors: [BufferId; 3],
        (rows, descales): (&[Run], &[Vec<Descales>]),
        memory: &mut CudaMemory,
    ) -> Result<(), KernelError> {
        let (sinks, tensors) = (places(memory, sinks)?, places(memory, tensors)?);
        let of_codes =
            is_codes(tensors[0].format).then(|| fp8::of_dout(rows, descales, tensors[0].heads, memory));
        let rows = RowTable::rows(rows);
        let table = memory.table(&rows.table.0);
        self.workspace.count("sink gradient: sink_gradient");
        memory.record(move |gpu, frame| {
            let [sink, dsink] = views(&sinks, frame.memory)?;
            let [dout, out, lse] = views(&tensors, frame.memory)?;
            let table = frame.tables.part(table.clone())?;
            let descales = of_codes.clone().map(|bytes| frame.tables.part(bytes)).transpose()?;
            gpu.sink_gradient(&rows, table, descales, [&sink, &dsink], [&dout, &out, &lse])
        });
        Ok(())
    }

    /// Records a copy of rows, or a sum.
    fn pairs(
        &self,
        [from, to]: [BufferId; 2],
        rows: &[RowPair],
        add: bool,
        memory: &mut CudaMemory,
    ) -> Result<(), DeviceError> {
        memory.image.check_pairs(from, to, rows)?;
        let at = places(memory, [from, to]).map_err(failed)?;
        let whole = at[0].format == at[1].format && packed::alike(&at[0], &at[1]);
        let fits = self.options.helpers && if add { packed::adds(&at[1], &at[0]) } else { whole };
        if let Some(slots) = fits.then(|| packed::slots(rows)).flatten() {
            self.slot_rows(at, &slots, add, memory);
            return Ok(());
        }
        if let Some(reorder) = (fits && !add).then(|| packed::reordering(rows, at[1].rows)).flatten() {
            self.reorder(at, &reorder, memory);
            return Ok(());
        }
        self.workspace.count(if add { "accumulate: transfer_elements" } else { "copy: transfer_elements" });
        let (heads, reduction) = (0..at[0].heads, Reduction::Sum);
        self.with_transfers(memory, &[from, to], |table, area| {
            for &(read, written) in rows {
                let from = part(&at[0], read, heads.clone(), area)?;
                let to = part(&at[1], written, heads.clone(), area)?;
                let parts = if add { vec![to.clone(), from] } else { vec![from] };
                table.push(&Written::Parts(reduction, parts), &[to])?;
            }
            Ok(())
        })
    }

    fn slot_rows(&self, at: [Placed; 2], slots: &PackedSlots, add: bool, memory: &mut CudaMemory) {
        let (table, count) = (memory.table(&slots.table.0), slots.count);
        self.workspace.count(if add { "accumulate: accumulate" } else { "copy: copy_valid" });
        memory.record(move |gpu, frame| {
            let [from, to] = at;
            let slots = slots_at(&table, count, to.rows, frame.tables)?;
            if !add {
                let (from, to) = (from.as_rows(frame.memory)?, to.as_rows(frame.memory)?);
                return gpu.copy_valid(slots, from, to, Rest::Leave);
            }
            let (from, to) = (from.tensor(frame.memory)?, to.tensor(frame.memory)?);
            gpu.accumulate(slots, SlotPart::Whole, [Update::Add; 2], to, from)
        });
    }

    fn reorder(&self, at: [Placed; 2], reorder: &Reorder, memory: &mut CudaMemory) {
        let (table, count) = (memory.table(&reorder.slots.table.0), reorder.slots.count);
        let Reorder { rows, cut, order, .. } = *reorder;
        self.workspace.count("copy: reorder");
        memory.record(move |gpu, frame| {
            let [from, to] = at;
            let slots = slots_at(&table, count, rows, frame.tables)?;
            gpu.reorder(slots, cut, order, from.as_rows(frame.memory)?, to.as_rows(frame.memory)?)
        });
    }

    /// Records a linear layer: by the kernel for packed rows where a rank's heads are a part of a hidden row, and as
    /// transfers of heads elsewhere.
    fn linear(
        &self,
        layer: Layer,
        heads: &Range,
        [from, to]: [BufferId; 2],
        rows: &[RowPair],
        memory: &mut CudaMemory,
    ) -> Result<(), DeviceError> {
        let [read, written] = layer.heads(heads);
        let (sources, targets): (Vec<Run>, Vec<Run>) = rows.iter().copied().unzip();
        memory.image.check(from, &sources, &read)?;
        memory.image.check(to, &targets, &written)?;
        let at = places(memory, [from, to]).map_err(failed)?;
        let fits = packed::layer(layer, heads, &at, rows).filter(|_| self.options.helpers);
        if let Some(PackedLayer { of, rows: [source, target], row_bytes }) = fits {
            self.workspace.count("linear: layer");
            memory.record(move |gpu, frame| {
                let from = at[0].stretch(&source, row_bytes, frame.memory)?;
                gpu.layer(layer, of, from, at[1].stretch(&target, row_bytes, frame.memory)?)
            });
            return Ok(());
        }
        self.workspace.count("linear: transfer_elements");
        if layer == Layer::Row {
            self.record_fill(to, &targets, 0.0, memory)?;
        }
        self.with_transfers(memory, &[from, to], |table, area| {
            rows.iter().try_for_each(|&(source, target)| {
                let from = part(&at[0], source, read.clone(), area)?;
                let to = part(&at[1], target, written.clone(), area)?;
                table.push(&Written::Parts(Reduction::Sum, vec![from]), &[to])
            })
        })
    }

    fn rotate(
        &self,
        buffer: BufferId,
        rows: &[Rotated],
        inverse: bool,
        memory: &mut CudaMemory,
    ) -> Result<(), KernelError> {
        let [at] = places(memory, [buffer])?;
        if at.axes != Axes::Rows {
            return Err(KernelError::shape("rows are rotated; statistics have no lanes"));
        }
        let rows = RotationTable::new(rows);
        let table = memory.table(rows.bytes());
        self.workspace.count("rotate: rotate");
        memory.record(move |gpu, frame| {
            gpu.rotate(&rows, frame.tables.part(table.clone())?, inverse, at.tensor(frame.memory)?)
        });
        Ok(())
    }

    pub(super) fn record_fill(
        &self,
        to: BufferId,
        rows: &[Run],
        value: f32,
        memory: &mut CudaMemory,
    ) -> Result<(), DeviceError> {
        memory.image.check_rows(to, rows)?;
        let [at] = places(memory, [to]).map_err(failed)?;
        self.workspace.count("fill: transfer_elements");
        let whole = [Run::packed(0, 1, 1)];
        let rows = if at.axes == Axes::Heads { &whole } else { rows };
        self.with_transfers(memory, &[to], |table, area| {
            rows.iter().try_for_each(|&rows| {
                table.push(&Written::Value(value), &[part(&at, rows, 0..at.heads, area)?])
            })
        })
    }

    pub(super) fn record_transfers(
        &self,
        transfers: &[Transfer<'_>],
        memory: &mut CudaMemory,
    ) -> Result<(), DeviceError> {
        check_apart(transfers)?;
        let regions = transfers.iter().flat_map(|transfer| transfer.from.iter().chain(transfer.to.iter()));
        for region in regions.clone() {
            memory.image.check(region.buffer, &[region.rows], &region.heads)?;
        }
        let (places, buffers): (_, Vec<BufferId>) =
            (memory.places.clone(), regions.map(|region| region.buffer).collect());
        self.workspace.count("messages and collectives: transfer_elements");
        self.with_transfers(memory, &buffers, |table, area| {
            let parts = |regions: &[&Region]| -> Result<Vec<DeviceRegion>, KernelError> {
                let region = |region: &&Region| {
                    part(&places[region.buffer.0], region.rows, region.heads.clone(), area)
                };
                regions.iter().map(region).collect()
            };
            transfers.iter().try_for_each(|transfer| {
                let from = Written::Parts(transfer.reduction, parts(&transfer.from)?);
                table.push(&from, &parts(&transfer.to)?)
            })
        })
    }

    /// Records transfers that are launched as one, which touch these buffers. On one stream they join others.
    pub(super) fn with_transfers(
        &self,
        memory: &mut CudaMemory,
        buffers: &[BufferId],
        fill: impl FnOnce(&mut TransferTable, Area) -> Result<(), KernelError>,
    ) -> Result<(), DeviceError> {
        memory.current = false;
        memory
            .requests
            .transfer(buffers, self.options.streams <= 1, |table| {
                self.workspace.memory.with(|area| fill(table, area))
            })
            .map_err(failed)
    }
}

/// Refuses transfers of which one reads a buffer that another writes, since they run at once. A transfer may write
/// what it reads.
fn check_apart(transfers: &[Transfer<'_>]) -> Result<(), DeviceError> {
    let writes = |transfer: &Transfer<'_>, buffer: BufferId| transfer.to.iter().any(|to| to.buffer == buffer);
    for (index, transfer) in transfers.iter().enumerate() {
        let others = transfers.iter().enumerate().filter(|(other, _)| *other != index);
        for (_, other) in others {
            if let Some(read) = transfer.from.iter().find(|from| writes(other, from.buffer)) {
                let what = format!("buffer {} is read and written by one message", read.buffer.0);
                return Err(DeviceError::Shape(what));
            }
        }
    }
    Ok(())
}

fn places<const N: usize>(memory: &CudaMemory, ids: [BufferId; N]) -> Result<[Placed; N], KernelError> {
    let found = ids.iter().map(|&id| memory.place(id)).collect::<Result<Vec<_>, _>>()?;
    found.try_into().map_err(|_| KernelError::shape("buffers were lost"))
}

fn views<'a, const N: usize>(places: &[Placed; N], memory: Area<'a>) -> Result<[View<'a>; N], KernelError> {
    let found = places.iter().map(|place| place.view(memory)).collect::<Result<Vec<_>, _>>()?;
    found.try_into().map_err(|_| KernelError::shape("buffers were lost"))
}

/// Returns the way of merging slots in a style, with its name in counts; the style is `None` where only statistics are
/// merged. No kernel merges by a difference.
fn merge_of_slots(style: MergeStyle) -> Option<(&'static str, Option<Style>)> {
    match style {
        MergeStyle::Statistics => Some(("merge: merge_statistics", None)),
        MergeStyle::Running => Some(("merge: merge_running", Some(Style::Running))),
        MergeStyle::Weighted { product_rounded } => {
            Some(("merge: merge_weighted", Some(Style::Weighted { product_rounded })))
        }
        MergeStyle::Difference => None,
    }
}
