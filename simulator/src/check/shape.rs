//! Form: every operation names buffers of its own rank, rows and heads inside them, and shapes that fit each other, and
//! writes no row twice. A schedule that passes can be simulated without bounds checks.

use std::collections::BTreeSet;
use std::ops::Range;

use seamproof_oracle::limits::{HEADS_MAX, ROWS_MAX, WORLD_MAX};
use seamproof_oracle::sharding::PlacedRun;
use seamproof_oracle::{Format, Problem, Run, Side, TensorName};

use super::error::{CheckError, Errors, FormError, OperationId};
use super::touch::{Access, Touch, owned, rows_of, touches};
use crate::AttentionCall;
use crate::schedule::{
    Attend, AttendBackward, Axes, Buffer, BufferId, KeySource, Layer, Merge, Placement, Region, Role,
    Rotated, RowPair, Schedule, SegmentSource, Work,
};

type Checked = Result<(), FormError>;

/// Collects all errors of form.
pub(super) fn check(problem: &Problem, schedule: &Schedule, errors: &mut Errors) {
    let ranks = schedule.members.len();
    let table = |what, index, checked: Checked, errors: &mut Errors| {
        if let Err(fault) = checked {
            errors.push(CheckError::Table { what, index, fault });
        }
    };
    let region = schedule.region();
    table("rank", ranks, count("ranks of a region", region, problem.parallel.region), errors);
    table("rank", ranks, check_group(problem, schedule), errors);
    if !errors.0.is_empty() {
        return;
    }
    let programs = schedule.ranks.iter().enumerate();
    for (rank, _) in programs.filter(|(_, program)| !program.operations.is_empty()) {
        table("rank", rank, in_group(schedule, rank), errors);
    }
    for (index, buffer) in schedule.buffers.iter().enumerate() {
        table("buffer", index, check_buffer(schedule, buffer), errors);
    }
    for (index, members) in schedule.communicators.iter().enumerate() {
        table("communicator", index, check_members(schedule, members), errors);
    }
    for (index, placement) in schedule.placements.iter().enumerate() {
        table("placement", index, check_placement(problem, schedule, placement), errors);
    }
    if !errors.0.is_empty() {
        return;
    }
    let tables = tables(schedule);
    for (rank, program) in schedule.ranks.iter().enumerate() {
        let begins = program.backward.unwrap_or(0);
        table("rank", rank, at_most("begin of the backward", begins, program.operations.len()), errors);
        let shape = Shape { problem, schedule, rank, tables: &tables };
        for (operation, step) in program.operations.iter().enumerate() {
            if let Err(fault) = shape.work(&step.work).and_then(|()| shape.leaves_tables(&step.work)) {
                errors.push(CheckError::Malformed {
                    at: OperationId { rank, operation, stream: step.stream },
                    fault,
                });
            }
            if errors.full() {
                return;
            }
        }
    }
}

fn count(what: &'static str, got: usize, expected: usize) -> Checked {
    if got == expected { Ok(()) } else { Err(FormError::Count { what, got, expected }) }
}

fn at_most(what: &'static str, got: usize, max: usize) -> Checked {
    if got <= max { Ok(()) } else { Err(FormError::TooMany { what, got, max }) }
}

/// Checks that the schedule has the ranks of the world, and that its members are the problem's group.
fn check_group(problem: &Problem, schedule: &Schedule) -> Checked {
    count("ranks", schedule.members.len(), problem.parallel.all_ranks())?;
    count("ranks of the world", schedule.ranks.len(), problem.parallel.all_of_world())?;
    at_most("ranks of the world", schedule.ranks.len(), WORLD_MAX)?;
    match schedule.members.iter().copied().eq(problem.parallel.world_ranks()) {
        true => Ok(()),
        false => Err(FormError::Plain("the members are not the problem's group, in its order")),
    }
}

/// Checks that a rank of the world is in the group.
fn in_group(schedule: &Schedule, rank: usize) -> Checked {
    match schedule.place(rank) {
        Some(_) => Ok(()),
        None if rank < schedule.ranks.len() => Err(FormError::Outside(rank)),
        None => Err(FormError::NoRank(rank)),
    }
}

fn check_buffer(schedule: &Schedule, buffer: &Buffer) -> Checked {
    in_group(schedule, buffer.rank)?;
    at_most("heads", buffer.heads, HEADS_MAX)?;
    // A gathered buffer holds every rank's rows and the gaps between them.
    at_most("rows", buffer.rows, ROWS_MAX.saturating_mul(2))
}

fn check_members(schedule: &Schedule, members: &[usize]) -> Checked {
    let mut seen = BTreeSet::new();
    for &member in members {
        in_group(schedule, member)?;
        if !seen.insert(member) {
            return Err(FormError::Plain("a rank is a member twice"));
        }
    }
    Ok(())
}

/// Returns the side whose rows a tensor has; `None` for tensors with one value for each head.
pub(super) fn side(tensor: TensorName) -> Option<Side> {
    match tensor {
        TensorName::K | TensorName::V | TensorName::Dk | TensorName::Dv => Some(Side::Kv),
        TensorName::Sink | TensorName::Dsink | TensorName::MaxLogit => None,
        _ => Some(Side::Q),
    }
}

/// Returns the number of heads of a tensor.
pub(super) fn tensor_heads(problem: &Problem, tensor: TensorName) -> usize {
    if side(tensor) == Some(Side::Kv) { problem.heads.kv } else { problem.heads.q }
}

fn check_placement(problem: &Problem, schedule: &Schedule, placement: &Placement) -> Checked {
    let buffer = schedule.buffers.get(placement.buffer.0).ok_or(FormError::NoBuffer(placement.buffer.0))?;
    let (Role::Input(role) | Role::Output(role)) = buffer.role else {
        return Err(FormError::Plain("a scratch buffer is placed"));
    };
    if role != placement.tensor {
        return Err(FormError::Plain("the buffer's role is another tensor"));
    }
    let heads = tensor_heads(problem, placement.tensor);
    check_heads("the tensor", heads, &placement.heads)?;
    count("heads", buffer.heads, placement.heads.len())?;
    let Some(side) = side(placement.tensor) else {
        let fits = buffer.axes == Axes::Heads && placement.rows.is_empty();
        return if fits {
            Ok(())
        } else {
            Err(FormError::Plain("a tensor without rows is placed as one with rows"))
        };
    };
    let dims = match placement.tensor {
        TensorName::Q | TensorName::K | TensorName::Dq | TensorName::Dk => problem.dims.qk,
        TensorName::Lse => 1,
        _ => problem.dims.v,
    };
    count("elements of a row", buffer.dim, dims)?;
    for placed in &placement.rows {
        check_placed(problem, side, placed)?;
    }
    let runs: Vec<Run> = placement.rows.iter().map(|placed| placed.local).collect();
    check_rows(buffer, &runs)?;
    disjoint(buffer, runs.iter().map(|run| (*run, run.span)), "placed twice")
}

/// Checks that the rows are real exactly as far as the sequence goes.
fn check_placed(problem: &Problem, side: Side, placed: &PlacedRun) -> Checked {
    let sequence =
        problem.sequences.get(placed.sequence).ok_or(FormError::Plain("there is no such sequence"))?;
    let real = if side == Side::Q { sequence.q.len } else { sequence.kv.len };
    let (piece, local) = (placed.piece, placed.local);
    if piece.step == 0 {
        return Err(FormError::Plain("a piece of positions with step 0"));
    }
    let expected = real.saturating_sub(piece.start).div_ceil(piece.step).min(local.span);
    count("real rows of a placed run", local.len, expected)
}

fn check_heads(name: &str, heads: usize, asked: &Range<usize>) -> Checked {
    let inside = asked.start <= asked.end && asked.end <= heads;
    if inside { Ok(()) } else { Err(FormError::Heads { buffer: name.into(), heads, asked: asked.clone() }) }
}

fn check_rows(buffer: &Buffer, runs: &[Run]) -> Checked {
    for run in runs {
        run.check(buffer.rows).map_err(|error| FormError::Rows { buffer: buffer.name.to_string(), error })?;
    }
    Ok(())
}

/// Checks that no row is in two of the runs. Each run comes with the number of its first rows that count. Consecutive
/// rows are compared as sorted intervals, others row by row, up to the first that repeats.
fn disjoint(buffer: &Buffer, runs: impl Iterator<Item = (Run, usize)>, what: &'static str) -> Checked {
    let mut runs: Vec<(Run, usize)> = runs.filter(|(_, rows)| *rows > 0).collect();
    runs.sort_unstable_by_key(|(run, _)| run.offset);
    let fault = |row| Err(FormError::Row { buffer: buffer.name.to_string(), row, what });
    let hull = |(run, rows): &(Run, usize)| run.offset + run.step * (rows - 1) + 1;
    let apart = runs.windows(2).all(|pair| hull(&pair[0]) <= pair[1].0.offset);
    if apart {
        return Ok(());
    }
    if let Some(pair) = runs.windows(2).find(|pair| {
        pair.iter().all(|(run, rows)| run.step == 1 || *rows == 1) && hull(&pair[0]) > pair[1].0.offset
    }) {
        return fault(pair[1].0.offset);
    }
    let mut seen = std::collections::HashSet::new();
    for row in runs.iter().flat_map(|(run, rows)| (0..*rows).map(|index| run.offset + run.step * index)) {
        if !seen.insert(row) {
            return fault(row);
        }
    }
    Ok(())
}

/// Returns the buffers that tables of segments are made in.
fn tables(schedule: &Schedule) -> BTreeSet<BufferId> {
    let works = schedule.ranks.iter().flat_map(|program| &program.operations);
    let made = works.filter_map(|operation| match operation.work {
        Work::MakeSegments { to, .. } => Some(to),
        _ => None,
    });
    made.collect()
}

/// Checks lengths of which a table of segments can be made.
fn check_source(source: &SegmentSource) -> Checked {
    let [q, kv] = &*source.sides;
    count("sequences of keys", kv.slots.len(), q.slots.len())?;
    count("ranks of keys", kv.cp, q.cp)?;
    for side in [q, kv] {
        let rows = side.slots.iter().map(|slot| slot.offset.saturating_add(slot.span)).max();
        at_most("rows of a slot", rows.unwrap_or(0), side.rows)?;
        at_most("gathered rows", side.rows.saturating_mul(side.cp), ROWS_MAX.saturating_mul(2))?;
    }
    let owner = if let KeySource::Of(owner) = source.keys { owner } else { 0 };
    match q.balance == kv.balance && source.place.max(owner) < q.cp && source.has_bands() {
        true => Ok(()),
        false => Err(FormError::Plain(
            "a table of segments needs pieces of rows that follow each other, ranks of theirs and a band",
        )),
    }
}

/// Operations of one rank.
struct Shape<'a> {
    problem: &'a Problem,
    schedule: &'a Schedule,
    rank: usize,
    /// The buffers of tables.
    tables: &'a BTreeSet<BufferId>,
}

impl<'a> Shape<'a> {
    fn work(&self, work: &Work) -> Checked {
        match work {
            Work::Attend(attend) => self.attend(attend),
            Work::AttendBackward(attend) => self.attend_backward(attend),
            Work::Merge(merge) => self.merge(merge),
            Work::ApplySink { sink, out, lse, rows } => {
                self.like(*out, *lse, false)?;
                self.axes(*out, Axes::Rows)?;
                self.axes(*lse, Axes::Statistic)?;
                self.sink(*sink, *out)?;
                self.written(*out, rows)
            }
            Work::SinkGradient { sink, dout, out, lse, dsink, rows, .. } => {
                self.like(*out, *lse, false)?;
                self.like(*out, *dout, true)?;
                self.sink(Some(*sink), *out)?;
                self.sink(Some(*dsink), *out)?;
                self.written(*out, rows)
            }
            Work::Accumulate { from, to, rows } | Work::Copy { from, to, rows } => {
                self.pairs(*from, *to, rows)
            }
            Work::MakeSegments { to, from } => self.make_segments(*to, from),
            Work::CopyValid { from, to, table, rows } => {
                self.pairs(*from, *to, rows)?;
                self.rising(*from, rows)?;
                self.table(table, rows.len())
            }
            Work::Linear { layer, heads, from, to, rows } => self.linear(*layer, heads, (*from, *to), rows),
            Work::Rotate { buffer, rows, .. } => self.rotate(*buffer, rows),
            Work::Fill { to, rows, .. } => self.fill(*to, rows),
            Work::Send { to, regions, .. } => self.message(*to, regions),
            Work::Recv { from, regions, .. } => {
                self.message(*from, regions)?;
                self.regions_apart(regions)
            }
            Work::AllGather { communicator, from, to } => {
                self.members(*communicator, to.len())?;
                self.region(from)?;
                self.regions_apart(to)
            }
            Work::ReduceScatter { communicator, from, to } => {
                self.members(*communicator, from.len())?;
                from.iter().try_for_each(|region| self.region(region))?;
                self.region(to)
            }
            Work::AllToAll { communicator, send, recv } => {
                self.members(*communicator, send.len())?;
                self.members(*communicator, recv.len())?;
                send.iter().try_for_each(|region| self.region(region))?;
                self.regions_apart(recv)
            }
            Work::AllReduce { communicator, region, .. } => {
                let members = self.schedule.communicators.get(*communicator).map_or(0, Vec::len);
                self.members(*communicator, members)?;
                self.region(region)
            }
            Work::RecordEvent(_) | Work::WaitEvent(_) => Ok(()),
            Work::HostRead(_) => Err(FormError::Plain("the host waits for the device and reads")),
        }
    }

    /// Returns a buffer of this rank, or an error if it belongs to another rank.
    fn buffer(&self, id: BufferId) -> Result<&'a Buffer, FormError> {
        let buffer = self.schedule.buffers.get(id.0).ok_or(FormError::NoBuffer(id.0))?;
        match buffer.rank == self.rank {
            true => Ok(buffer),
            false => Err(FormError::Foreign { buffer: buffer.name.to_string(), owner: buffer.rank }),
        }
    }

    fn axes(&self, id: BufferId, axes: Axes) -> Checked {
        let buffer = self.buffer(id)?;
        match buffer.axes == axes {
            true => Ok(()),
            false => Err(self.unlike(buffer, buffer, "axes as this operation needs")),
        }
    }

    fn unlike(&self, first: &Buffer, second: &Buffer, what: &'static str) -> FormError {
        FormError::Unlike { first: first.name.to_string(), second: second.name.to_string(), what }
    }

    /// Checks that two buffers have the same rows and heads, and on request the same elements.
    fn like(&self, first: BufferId, second: BufferId, elements: bool) -> Checked {
        let (first, second) = (self.buffer(first)?, self.buffer(second)?);
        if (first.rows, first.heads) != (second.rows, second.heads) {
            return Err(self.unlike(first, second, "rows and heads"));
        }
        if elements && (first.dim, first.axes) != (second.dim, second.axes) {
            return Err(self.unlike(first, second, "elements of a row"));
        }
        Ok(())
    }

    /// Checks that a sink has one value for each head of `of`.
    fn sink(&self, sink: Option<BufferId>, of: BufferId) -> Checked {
        let Some(sink) = sink else { return Ok(()) };
        self.axes(sink, Axes::Heads)?;
        let (sink, of) = (self.buffer(sink)?, self.buffer(of)?);
        if sink.heads == of.heads { Ok(()) } else { Err(self.unlike(sink, of, "heads")) }
    }

    /// Checks rows that are written: no row may be named twice.
    fn written(&self, id: BufferId, rows: &[Run]) -> Checked {
        let buffer = self.buffer(id)?;
        check_rows(buffer, rows)?;
        disjoint(buffer, rows.iter().map(|run| (*run, run.len)), "named twice")
    }

    fn fill(&self, id: BufferId, rows: &[Run]) -> Checked {
        match self.buffer(id)?.axes {
            Axes::Heads => Ok(()),
            _ => self.written(id, rows),
        }
    }

    fn linear(
        &self,
        layer: Layer,
        heads: &Range<usize>,
        ends: (BufferId, BufferId),
        rows: &[RowPair],
    ) -> Checked {
        let (from, to) = (self.buffer(ends.0)?, self.buffer(ends.1)?);
        if (from.dim, from.axes, to.axes) != (to.dim, Axes::Rows, Axes::Rows) || ends.0 == ends.1 {
            return Err(self.unlike(from, to, "elements and axes, or they are one buffer"));
        }
        let (hidden, own) = if layer == Layer::Column { (from, to) } else { (to, from) };
        check_heads(&hidden.name, hidden.heads, heads)?;
        count("heads of a linear layer's rank", own.heads, heads.len())?;
        self.row_pairs(from, to, rows)
    }

    fn rotate(&self, id: BufferId, rows: &[Rotated]) -> Checked {
        self.axes(id, Axes::Rows)?;
        for Rotated { rows, position, step } in rows {
            let end = step.saturating_mul(rows.len).saturating_add(*position);
            at_most("positions of a rotation", end, 2 * ROWS_MAX)?;
        }
        let runs: Vec<Run> = rows.iter().map(|rotated| rotated.rows).collect();
        self.written(id, &runs)
    }

    fn make_segments(&self, to: BufferId, source: &SegmentSource) -> Checked {
        check_source(source)?;
        self.axes(to, Axes::Rows)?;
        let table = self.buffer(to)?;
        count("words of a table's row", table.dim * table.heads, SegmentSource::WORDS)?;
        count("segments of a table", source.rows().map_or(0, |rows| rows.len()), table.rows)?;
        match (&table.role, table.format) {
            (Role::Scratch, Format::F32) => Ok(()),
            _ => Err(FormError::Plain("a table is a scratch buffer of 4-byte words")),
        }
    }

    /// Checks rows of a table that say `segments` segments.
    fn table(&self, table: &Region, segments: usize) -> Checked {
        self.region(table)?;
        count("rows of a table", table.rows.len, segments)?;
        match self.tables.contains(&table.buffer) {
            true => Ok(()),
            false => Err(FormError::Plain("a launch or a copy reads segments where no table is made")),
        }
    }

    /// Checks that nothing but what makes tables writes them.
    fn leaves_tables(&self, work: &Work) -> Checked {
        let makes = matches!(work, Work::MakeSegments { .. });
        let writes =
            |(buffer, access, _): &Touch<'_>| *access != Access::Read && self.tables.contains(buffer);
        match makes || self.tables.is_empty() || !touches(work).iter().any(writes) {
            true => Ok(()),
            false => {
                Err(FormError::Plain("a table is written by another operation than the one that makes it"))
            }
        }
    }

    fn pairs(&self, from: BufferId, to: BufferId, rows: &[RowPair]) -> Checked {
        let (source, target) = (self.buffer(from)?, self.buffer(to)?);
        if (source.heads, source.dim, source.axes) != (target.heads, target.dim, target.axes) {
            return Err(self.unlike(source, target, "heads, elements and axes"));
        }
        self.row_pairs(source, target, rows)?;
        if from == to {
            let both = rows.iter().flat_map(|(a, b)| [(*a, a.len), (*b, b.len)]);
            disjoint(target, both, "read and written by one operation")?;
        }
        Ok(())
    }

    /// Refuses runs of which one begins before the end of the one before. A copy of valid rows finds a row's run by a
    /// search among their first rows, runs without rows included.
    fn rising(&self, from: BufferId, rows: &[RowPair]) -> Checked {
        let fallen = rows.windows(2).find(|pair| pair[1].0.offset < pair[0].0.offset + pair[0].0.len);
        let Some(pair) = fallen else { return Ok(()) };
        let buffer = self.buffer(from)?.name.to_string();
        Err(FormError::Row { buffer, row: pair[1].0.offset, what: "behind later rows in a table" })
    }

    fn row_pairs(&self, source: &Buffer, target: &Buffer, rows: &[RowPair]) -> Checked {
        for (from, to) in rows {
            check_rows(source, std::slice::from_ref(from))?;
            check_rows(target, std::slice::from_ref(to))?;
            count("rows of a pair's second run", to.len, from.len)?;
        }
        disjoint(target, rows.iter().map(|(_, to)| (*to, to.len)), "written twice")
    }

    fn merge(&self, merge: &Merge) -> Checked {
        self.like(merge.step_out, merge.step_lse, false)?;
        self.like(merge.out, merge.lse, false)?;
        for (out, lse) in [(merge.step_out, merge.step_lse), (merge.out, merge.lse)] {
            self.axes(out, Axes::Rows)?;
            self.axes(lse, Axes::Statistic)?;
        }
        let (step, running) = (self.buffer(merge.step_out)?, self.buffer(merge.out)?);
        if (step.heads, step.dim) != (running.heads, running.dim) {
            return Err(self.unlike(step, running, "heads and elements"));
        }
        if merge.step_out == merge.out || merge.step_lse == merge.lse {
            return Err(FormError::Plain("a result is merged into itself"));
        }
        self.row_pairs(step, running, &merge.rows)
    }

    fn attend(&self, attend: &Attend) -> Checked {
        self.operands(attend.q, attend.k, attend.v, attend.out)?;
        self.like(attend.q, attend.lse, false)?;
        self.axes(attend.lse, Axes::Statistic)?;
        self.sink(attend.sink, attend.q)?;
        self.sink(Some(attend.max_logit), attend.q)?;
        let reads = [attend.q, attend.k, attend.v].into_iter().chain(attend.sink);
        apart(reads, &[attend.out, attend.lse, attend.max_logit])?;
        attend.table.iter().try_for_each(|table| self.table(table, attend.call.segments.len()))?;
        self.call(&attend.call, attend.q, attend.k)
    }

    fn attend_backward(&self, attend: &AttendBackward) -> Checked {
        self.operands(attend.q, attend.k, attend.v, attend.out)?;
        self.like(attend.q, attend.lse, false)?;
        self.axes(attend.lse, Axes::Statistic)?;
        for (first, second) in
            [(attend.dout, attend.out), (attend.dq, attend.q), (attend.dk, attend.k), (attend.dv, attend.v)]
        {
            self.like(first, second, true)?;
        }
        if let Some((sink, dsink)) = attend.sink {
            self.sink(Some(sink), attend.q)?;
            self.sink(Some(dsink), attend.q)?;
        }
        let reads = [attend.q, attend.k, attend.v, attend.dout, attend.out, attend.lse];
        let (sink, dsink): (Option<BufferId>, Option<BufferId>) = attend.sink.unzip();
        let writes: Vec<BufferId> = [attend.dq, attend.dk, attend.dv].into_iter().chain(dsink).collect();
        apart(reads.into_iter().chain(sink), &writes)?;
        attend.table.iter().try_for_each(|table| self.table(table, attend.call.segments.len()))?;
        self.call(&attend.call, attend.q, attend.k)?;
        let keys = attend.call.segments.iter().flat_map(|segment| segment.kv.iter());
        let owned = keys.map(|run| (*run, owned(&attend.call, run)));
        disjoint(
            self.buffer(attend.dk)?,
            owned,
            "in two segments of one backward launch, which overwrites it",
        )
    }

    /// Checks that q, k, v and out fit each other and the problem.
    fn operands(&self, q: BufferId, k: BufferId, v: BufferId, out: BufferId) -> Checked {
        [q, k, v, out].into_iter().try_for_each(|id| self.axes(id, Axes::Rows))?;
        let [q, k, v, out] = [self.buffer(q)?, self.buffer(k)?, self.buffer(v)?, self.buffer(out)?];
        let dims = self.problem.dims;
        count("elements of a query", q.dim, dims.qk)?;
        count("elements of a key", k.dim, dims.qk)?;
        count("elements of a value", v.dim, dims.v)?;
        count("elements of an output", out.dim, dims.v)?;
        if (k.rows, k.heads) != (v.rows, v.heads) {
            return Err(self.unlike(k, v, "rows and heads"));
        }
        if (q.rows, q.heads) != (out.rows, out.heads) {
            return Err(self.unlike(q, out, "rows and heads"));
        }
        match k.heads > 0 && q.heads.is_multiple_of(k.heads) {
            true => Ok(()),
            false => Err(self.unlike(q, k, "groups of heads")),
        }
    }

    fn call(&self, call: &AttentionCall, q: BufferId, k: BufferId) -> Checked {
        let (q, k) = (self.buffer(q)?, self.buffer(k)?);
        let softmax = &self.problem.softmax;
        if (call.softmax.scale, call.softmax.softcap) != (softmax.scale, softmax.softcap) {
            return Err(FormError::Plain("scale or soft cap is not the problem's"));
        }
        for segment in &call.segments {
            check_rows(q, std::slice::from_ref(&segment.q))?;
            check_rows(k, &segment.kv)?;
        }
        let rows = call.segments.iter().map(|segment| (segment.q, owned(call, &segment.q)));
        disjoint(q, rows, "in two segments of one launch")
    }

    fn region(&self, region: &Region) -> Checked {
        let buffer = self.buffer(region.buffer)?;
        check_heads(&buffer.name, buffer.heads, &region.heads)?;
        match buffer.axes {
            Axes::Heads => Ok(()),
            _ => check_rows(buffer, std::slice::from_ref(&region.rows)),
        }
    }

    /// Checks regions that are written: no row and head may be in two of them.
    fn regions_apart(&self, regions: &[Region]) -> Checked {
        for region in regions {
            self.region(region)?;
        }
        let mut cuts: Vec<(BufferId, usize)> =
            regions.iter().map(|region| (region.buffer, region.heads.start)).collect();
        cuts.sort_unstable();
        cuts.dedup();
        for (id, head) in cuts {
            let buffer = self.buffer(id)?;
            let here = regions.iter().filter(|region| region.buffer == id && region.heads.contains(&head));
            disjoint(
                buffer,
                here.map(|region| rows_of(buffer, region)).map(|run| (run, run.len)),
                "written twice",
            )?;
        }
        Ok(())
    }

    fn message(&self, peer: usize, regions: &[Region]) -> Checked {
        in_group(self.schedule, peer)?;
        if peer == self.rank {
            return Err(FormError::Plain("a rank sends to itself"));
        }
        regions.iter().try_for_each(|region| self.region(region))
    }

    /// Checks that the rank is a member, and that there is one region for each member.
    fn members(&self, communicator: usize, regions: usize) -> Checked {
        let members = self.schedule.communicators.get(communicator);
        let members = members.ok_or(FormError::Plain("there is no such communicator"))?;
        if !members.contains(&self.rank) {
            return Err(FormError::Plain("the rank is no member of the communicator"));
        }
        count("regions, one for each member", regions, members.len())
    }
}

/// Checks that a launch writes each result to a buffer of its own, and reads none of these buffers.
fn apart(reads: impl IntoIterator<Item = BufferId>, writes: &[BufferId]) -> Checked {
    let twice = writes.iter().enumerate().any(|(index, buffer)| writes[..index].contains(buffer));
    if twice || reads.into_iter().any(|buffer| writes.contains(&buffer)) {
        return Err(FormError::Plain(
            "a launch writes to a buffer that it reads, or two results to one buffer",
        ));
    }
    Ok(())
}
