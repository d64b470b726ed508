//! A dense symbolic run of a schedule, for small problems: each row is the set of its terms.
//!
//! A *cell* is a row and head of a buffer. It holds a place of an input, or a sum of *pairs* (query, query head, key).
//! Operations run in a legal host order, in which messages and collectives are complete. [`prove`] checks three things.
//! Each visible pair is attended exactly once over all ranks, and no other pair is, forward and backward. Every result
//! ends at its owner with each pair counted once. Operations that touch one cell are ordered by streams and events. The
//! module enumerates pairs, and is therefore an independent twin of any checker that works on intervals.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use seamproof_oracle::{Pass, Problem, Run, Sink, TensorName};
use seamproof_simulator::Segment;
use seamproof_simulator::helpers::SegmentRow;
use seamproof_simulator::schedule::{
    Attend, AttendBackward, Axes, BufferId, Merge, MergeStyle, Placement, RankProgram, Reduction, Region,
    Role, RowPair, Schedule, Work,
};

/// Sequence, query, query head and key of a pair.
type Pair = (usize, usize, usize, usize);
/// Sequence, position and head of a query.
type Query = [usize; 3];
type Sum = BTreeMap<Pair, usize>;

/// Stand-in for a key: the sink.
const SINK: usize = usize::MAX;
/// Pair of a row that has its sink, for any row.
const HAS_SINK: Pair = (SINK, SINK, SINK, SINK);

#[derive(Clone, Debug, PartialEq)]
enum Cell {
    Unwritten,
    Poison,
    /// Tensor, sequence, position and head.
    Input(TensorName, usize, usize, usize),
    Sum(Sum),
    /// A row of a table of segments.
    Segment(SegmentRow),
}

/// Manner in which a cell is touched. Kernels *raise* a largest logit atomically, and raises need no order among
/// themselves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Access {
    Read,
    Write,
    Raise,
}

/// Buffer, row and head of a cell.
type Place = (usize, usize, usize);

/// Proves that a schedule is right, or returns a description of its fault.
pub(crate) fn prove(problem: &Problem, schedule: &Schedule) -> Result<(), String> {
    let mut machine = Machine::new(problem, schedule);
    machine.run()?;
    machine.pairs_are_attended_once()?;
    machine.results_are_home()?;
    (0..schedule.ranks.len()).try_for_each(|rank| machine.accesses_are_ordered(rank))
}

struct Machine<'a> {
    problem: &'a Problem,
    schedule: &'a Schedule,
    cells: HashMap<Place, Cell>,
    /// Pairs to which kernels attended, forward and backward.
    attended: [Sum; 2],
    /// Operations that touched each cell.
    accesses: HashMap<Place, Vec<(usize, Access)>>,
    /// Index of the running operation.
    operation: usize,
}

fn add(into: &mut Sum, from: &Sum) {
    from.iter().for_each(|(&pair, count)| *into.entry(pair).or_default() += count);
}

impl<'a> Machine<'a> {
    fn new(problem: &'a Problem, schedule: &'a Schedule) -> Machine<'a> {
        let (accesses, attended) = (HashMap::new(), [Sum::new(), Sum::new()]);
        let mut machine =
            Machine { problem, schedule, cells: HashMap::new(), attended, accesses, operation: 0 };
        for placement in &schedule.placements {
            machine.load(placement);
        }
        machine
    }

    fn load(&mut self, placement: &Placement) {
        let buffer = &self.schedule.buffers[placement.buffer.0];
        let Role::Input(tensor) = buffer.role else { return };
        for head in 0..buffer.heads {
            if buffer.axes == Axes::Heads {
                let cell = Cell::Input(tensor, 0, 0, placement.heads.start + head);
                self.cells.insert((placement.buffer.0, 0, head), cell);
            }
            for row in 0..buffer.rows {
                self.cells.insert((placement.buffer.0, row, head), Cell::Poison);
            }
            for placed in &placement.rows {
                for i in 0..placed.local.len {
                    let position = placed.piece.start + i * placed.piece.step;
                    let cell = Cell::Input(tensor, placed.sequence, position, placement.heads.start + head);
                    self.cells.insert((placement.buffer.0, placed.local.row(i), head), cell);
                }
            }
        }
    }

    fn heads(&self, id: BufferId) -> usize {
        self.schedule.buffers[id.0].heads
    }

    fn get(&mut self, id: BufferId, row: usize, head: usize) -> Cell {
        let place = (id.0, row, head);
        self.accesses.entry(place).or_default().push((self.operation, Access::Read));
        self.cells.get(&place).cloned().unwrap_or(Cell::Unwritten)
    }

    fn set(&mut self, id: BufferId, row: usize, head: usize, cell: Cell) -> Result<(), String> {
        let buffer = &self.schedule.buffers[id.0];
        let rows = if buffer.axes == Axes::Heads { 1 } else { buffer.rows };
        if row >= rows || head >= buffer.heads || matches!(buffer.role, Role::Input(_)) {
            return Err(format!("{} has no row {row} of head {head} to write", buffer.name));
        }
        let place = (id.0, row, head);
        self.accesses.entry(place).or_default().push((self.operation, Access::Write));
        self.cells.insert(place, cell);
        Ok(())
    }

    fn input(&mut self, id: BufferId, row: usize, head: usize, tensor: TensorName) -> Result<Query, String> {
        match self.get(id, row, head) {
            Cell::Input(held, sequence, position, head) if held == tensor => Ok([sequence, position, head]),
            other => Err(self.unfit(id, row, head, &other)),
        }
    }

    fn sum(&mut self, id: BufferId, row: usize, head: usize) -> Result<Sum, String> {
        match self.get(id, row, head) {
            Cell::Sum(sum) => Ok(sum),
            other => Err(self.unfit(id, row, head, &other)),
        }
    }

    fn unfit(&self, id: BufferId, row: usize, head: usize, cell: &Cell) -> String {
        format!("{} row {row} head {head} holds {cell:?}", self.schedule.buffers[id.0].name)
    }

    /// Returns the pairs that a final row of out must hold.
    fn expected(&self, [sequence, query, head]: Query) -> Sum {
        let of = &self.problem.sequences[sequence];
        let keys = self.problem.mask.visible(query, of.q.len, of.kv.len);
        let sink = (self.problem.softmax.sink != Sink::None).then_some(HAS_SINK);
        keys.map(|key| (sequence, query, head, key)).chain(sink).map(|pair| (pair, 1)).collect()
    }

    /// Runs every rank in host order as far as possible. A collective runs once all its members have arrived.
    fn run(&mut self) -> Result<(), String> {
        let mut next = vec![0; self.schedule.ranks.len()];
        let mut sent: HashMap<(usize, usize), VecDeque<Vec<Cell>>> = HashMap::new();
        loop {
            let mut moved = false;
            for rank in 0..next.len() {
                while self.step(rank, next[rank], &mut sent)? {
                    next[rank] += 1;
                    moved = true;
                }
            }
            for communicator in 0..self.schedule.communicators.len() {
                if self.collective(communicator, &next)? {
                    self.schedule.communicators[communicator].iter().for_each(|&rank| next[rank] += 1);
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        let done = (0..next.len()).all(|rank| next[rank] == self.schedule.ranks[rank].operations.len());
        if done { Ok(()) } else { Err(format!("stuck at operations {next:?}")) }
    }

    /// Runs an operation that needs no other rank at the same time. Returns false if the rank has none that can run
    /// now.
    fn step(
        &mut self,
        rank: usize,
        operation: usize,
        sent: &mut HashMap<(usize, usize), VecDeque<Vec<Cell>>>,
    ) -> Result<bool, String> {
        let schedule = self.schedule;
        let Some(found) = schedule.ranks[rank].operations.get(operation) else { return Ok(false) };
        self.operation = operation;
        match &found.work {
            Work::Attend(attend) => {
                self.told(&attend.table, &attend.call.segments)?;
                self.attend(attend)?;
            }
            Work::AttendBackward(attend) => {
                self.told(&attend.table, &attend.call.segments)?;
                self.attend_backward(attend)?;
            }
            Work::MakeSegments { to, from } => {
                let rows = from.rows().ok_or("a table of a mask that is no band")?;
                (0..rows.len()).try_for_each(|row| self.set(*to, row, 0, Cell::Segment(rows[row])))?;
            }
            Work::CopyValid { from, to, table, rows } => {
                let segments: Vec<Segment> = self.segments(table)?;
                for Segment { q, .. } in &segments {
                    let real: Vec<usize> = q.real_rows().collect();
                    for (i, head) in grid(real.len(), self.heads(*to)) {
                        let cell = self.get(*from, real[i], head);
                        self.set(*to, real[i], head, cell)?;
                    }
                }
                if rows.iter().any(|(read, written)| read != written)
                    || !rows.iter().map(|(read, _)| read).eq(segments.iter().map(|segment| &segment.q))
                {
                    return Err("a copy's table says other rows than are expected".into());
                }
            }
            Work::Merge(merge) => self.merge(merge)?,
            Work::ApplySink { out, lse, rows, .. } => {
                for (&id, row) in [out, lse].into_iter().flat_map(|id| each(rows).map(move |row| (id, row))) {
                    for head in 0..self.heads(id) {
                        let mut sum = self.sum(id, row, head)?;
                        *sum.entry(HAS_SINK).or_default() += 1;
                        self.set(id, row, head, Cell::Sum(sum))?;
                    }
                }
            }
            Work::SinkGradient { sink, dout, out, lse, dsink, rows, .. } => {
                let rows: Vec<usize> = each(rows).collect();
                self.sink_gradient([*sink, *dout, *out, *lse, *dsink], &rows)?;
            }
            Work::Accumulate { from, to, rows } => self.accumulate(*from, *to, rows)?,
            Work::Copy { from, to, rows } => {
                for (from_row, to_row) in each_pair(rows) {
                    for head in 0..self.heads(*to) {
                        let cell = self.get(*from, from_row, head);
                        self.set(*to, to_row, head, cell)?;
                    }
                }
            }
            Work::Fill { to, rows, .. } => {
                let heads_alone = schedule.buffers[to.0].axes == Axes::Heads;
                let rows: Vec<usize> = if heads_alone { vec![0] } else { each(rows).collect() };
                for (i, head) in grid(rows.len(), self.heads(*to)) {
                    self.set(*to, rows[i], head, Cell::Sum(Sum::new()))?;
                }
            }
            Work::Send { to, regions, .. } => {
                let cells = regions.iter().flat_map(|region| self.read(region)).collect::<Vec<_>>();
                sent.entry((rank, *to)).or_default().push_back(cells);
            }
            Work::Recv { from, regions, .. } => {
                let Some(cells) = sent.get_mut(&(*from, rank)).and_then(VecDeque::pop_front) else {
                    return Ok(false);
                };
                let mut cells = cells.into_iter();
                regions.iter().try_for_each(|region| self.write(region, &mut cells))?;
            }
            Work::RecordEvent(_) | Work::WaitEvent(_) | Work::HostRead(_) => {}
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Returns the segments that rows of a table say.
    fn segments(&mut self, table: &Region) -> Result<Vec<Segment>, String> {
        let said = |row: usize| match self.get(table.buffer, row, 0) {
            Cell::Segment(row) => Ok(row.segment()),
            other => Err(format!("a table's row {row} holds {other:?}")),
        };
        table.rows.real_rows().map(said).collect()
    }

    /// Checks that a launch's table says the segments of its call.
    fn told(&mut self, table: &Option<Region>, segments: &[Segment]) -> Result<(), String> {
        let Some(table) = table else { return Ok(()) };
        match self.segments(table)? == segments {
            true => Ok(()),
            false => Err("a table says other segments than its call".into()),
        }
    }

    fn places(&self, region: &Region) -> Vec<(usize, usize)> {
        let heads_alone = self.schedule.buffers[region.buffer.0].axes == Axes::Heads;
        let rows: Vec<usize> = if heads_alone { vec![0] } else { region.rows.real_rows().collect() };
        rows.into_iter().flat_map(|row| region.heads.clone().map(move |head| (row, head))).collect()
    }

    fn read(&mut self, region: &Region) -> Vec<Cell> {
        self.places(region).into_iter().map(|(row, head)| self.get(region.buffer, row, head)).collect()
    }

    fn write(&mut self, region: &Region, cells: &mut impl Iterator<Item = Cell>) -> Result<(), String> {
        for (row, head) in self.places(region) {
            let cell = cells.next().ok_or("a message is shorter than its region")?;
            self.set(region.buffer, row, head, cell)?;
        }
        Ok(())
    }

    /// Executes the collective at which all members of a communicator stand. Returns false if they stand at different
    /// operations or have none left.
    fn collective(&mut self, communicator: usize, next: &[usize]) -> Result<bool, String> {
        let schedule = self.schedule;
        let members = &schedule.communicators[communicator];
        let works = members.iter().map(|&rank| schedule.ranks[rank].operations.get(next[rank]));
        let Some(works) = works.map(|found| found.map(|o| &o.work)).collect::<Option<Vec<&Work>>>() else {
            return Ok(false);
        };
        // Part that goes from member i to member j: its communicator, the region that is read, and the region that is
        // written.
        let parts = |i: usize, j: usize| match (works[i], works[j]) {
            (Work::AllGather { communicator: c, from, .. }, Work::AllGather { to, .. }) => {
                Some((*c, from, &to[i]))
            }
            (Work::AllToAll { communicator: c, send, .. }, Work::AllToAll { recv, .. }) => {
                Some((*c, &send[j], &recv[i]))
            }
            (Work::ReduceScatter { communicator: c, from, .. }, Work::ReduceScatter { to, .. }) => {
                Some((*c, &from[j], to))
            }
            (Work::AllReduce { communicator: c, region, .. }, Work::AllReduce { region: to, .. }) => {
                Some((*c, region, to))
            }
            _ => None,
        };
        let mut moves = Vec::new();
        for (i, j) in grid(works.len(), works.len()) {
            match parts(i, j) {
                Some((c, from, to)) if c == communicator => {
                    self.operation = next[members[i]];
                    moves.push((next[members[j]], to, self.read(from)));
                }
                _ => return Ok(false),
            }
        }
        let combine = match works[0] {
            Work::ReduceScatter { .. } => Some(Reduction::Sum),
            Work::AllReduce { reduction, .. } => Some(*reduction),
            _ => None,
        };
        let mut started: HashSet<BufferId> = HashSet::new();
        for (operation, to, cells) in moves {
            self.operation = operation;
            let before = combine.filter(|_| !started.insert(to.buffer)).map(|how| (how, self.read(to)));
            let cells = match before {
                None => cells,
                Some((how, old)) => old.into_iter().zip(cells).map(|(a, b)| combined(how, a, b)).collect(),
            };
            self.write(to, &mut cells.into_iter())?;
        }
        Ok(true)
    }

    /// Returns the pairs of a segment's query row, checked against the problem's heads.
    fn row_pairs(
        &mut self,
        segment: &Segment,
        i: usize,
        head: usize,
        [q, k, v]: [BufferId; 3],
    ) -> Result<(Query, Vec<(usize, Pair)>), String> {
        let query = self.input(q, segment.q.row(i), head, TensorName::Q)?;
        let kv_head = head / (self.heads(q) / self.heads(k));
        let keys: Vec<usize> = segment.kv.iter().flat_map(Run::real_rows).collect();
        let mut pairs = Vec::new();
        for row in segment.visible(i).map(|j| keys[j]) {
            let key = self.input(k, row, kv_head, TensorName::K)?;
            if key != self.input(v, row, kv_head, TensorName::V)? {
                return Err(format!("row {row}: a key meets another key's value"));
            }
            if key[0] != query[0] || key[2] != query[2] / self.problem.group() {
                return Err(format!("query {query:?} meets key {key:?}"));
            }
            pairs.push((row, (query[0], query[1], query[2], key[1])));
        }
        Ok((query, pairs))
    }

    fn attend(&mut self, work: &Attend) -> Result<(), String> {
        let sink = work.call.softmax.sink;
        for segment in &work.call.segments {
            for (i, head) in grid(segment.q.len, self.heads(work.q)) {
                let (query, pairs) = self.row_pairs(segment, i, head, [work.q, work.k, work.v])?;
                let mut sum: Sum = pairs.iter().map(|&(_, pair)| (pair, 1)).collect();
                add(&mut self.attended[0], &sum);
                self.raise(work.max_logit, head, &sum)?;
                if let Some(buffer) = work.sink.filter(|_| sink == Sink::Learnable)
                    && self.input(buffer, 0, head, TensorName::Sink)?[2] != query[2]
                {
                    return Err(format!("query {query:?} has another head's sink"));
                }
                sum.extend((sink != Sink::None).then_some((HAS_SINK, 1)));
                for id in [work.out, work.lse] {
                    self.set(id, segment.q.row(i), head, Cell::Sum(sum.clone()))?;
                }
            }
            self.clear([work.out, work.lse], &segment.q)?;
        }
        Ok(())
    }

    fn raise(&mut self, max_logit: BufferId, head: usize, by: &Sum) -> Result<(), String> {
        let place = (max_logit.0, 0, head);
        self.accesses.entry(place).or_default().push((self.operation, Access::Raise));
        match self.cells.get_mut(&place) {
            Some(Cell::Sum(sum)) => sum.extend(by),
            _ => return Err("a largest logit is raised that was never filled".into()),
        }
        Ok(())
    }

    /// Clears the padding rows of a launch.
    fn clear<const N: usize>(&mut self, ids: [BufferId; N], run: &Run) -> Result<(), String> {
        for (id, row) in ids.into_iter().flat_map(|id| run.padding_rows().map(move |row| (id, row))) {
            for head in 0..self.heads(id) {
                self.set(id, row, head, Cell::Sum(Sum::new()))?;
            }
        }
        Ok(())
    }

    fn final_row(
        &mut self,
        dout: BufferId,
        out: BufferId,
        lse: BufferId,
        row: usize,
        head: usize,
    ) -> Result<Query, String> {
        let query = self.input(dout, row, head, TensorName::Dout)?;
        let expected = self.expected(query);
        for id in [out, lse] {
            if self.sum(id, row, head)? != expected {
                return Err(format!("backward of {query:?} before its forward is complete"));
            }
        }
        Ok(query)
    }

    fn attend_backward(&mut self, work: &AttendBackward) -> Result<(), String> {
        let mut named = HashSet::new();
        for segment in &work.call.segments {
            let mut keys: HashMap<(usize, usize), Sum> = HashMap::new();
            let group = self.heads(work.q) / self.heads(work.k);
            for (i, head) in grid(segment.q.len, self.heads(work.q)) {
                let row = segment.q.row(i);
                let (query, pairs) = self.row_pairs(segment, i, head, [work.q, work.k, work.v])?;
                if self.final_row(work.dout, work.out, work.lse, row, head)? != query {
                    return Err(format!("query {query:?} meets another row's gradient"));
                }
                let sum: Sum = pairs.iter().map(|&(_, pair)| (pair, 1)).collect();
                add(&mut self.attended[1], &sum);
                pairs.iter().for_each(|&(key, pair)| {
                    *keys.entry((key, head / group)).or_default().entry(pair).or_default() += 1;
                });
                self.set(work.dq, row, head, Cell::Sum(sum))?;
            }
            self.clear([work.dq], &segment.q)?;
            for row in segment.kv.iter().flat_map(Run::real_rows) {
                if !named.insert(row) {
                    return Err(format!("key row {row} is named twice in one backward launch"));
                }
                for head in 0..self.heads(work.k) {
                    let sum = Cell::Sum(keys.remove(&(row, head)).unwrap_or_default());
                    self.set(work.dk, row, head, sum.clone())?;
                    self.set(work.dv, row, head, sum)?;
                }
            }
            segment.kv.iter().try_for_each(|run| self.clear([work.dk, work.dv], run))?;
        }
        let rows: Vec<usize> = work.call.segments.iter().flat_map(|segment| segment.q.real_rows()).collect();
        work.sink.map_or(Ok(()), |(sink, dsink)| {
            self.sink_gradient([sink, work.dout, work.out, work.lse, dsink], &rows)
        })
    }

    fn sink_gradient(
        &mut self,
        [sink, dout, out, lse, dsink]: [BufferId; 5],
        rows: &[usize],
    ) -> Result<(), String> {
        for head in 0..self.heads(dsink) {
            let of_problem = self.input(sink, 0, head, TensorName::Sink)?[2];
            let mut sum = Sum::new();
            for &row in rows {
                let [sequence, query, head] = self.final_row(dout, out, lse, row, head)?;
                if head != of_problem {
                    return Err(format!("the sink of head {of_problem} meets head {head}"));
                }
                *sum.entry((sequence, query, head, SINK)).or_default() += 1;
            }
            self.set(dsink, 0, head, Cell::Sum(sum))?;
        }
        Ok(())
    }

    fn accumulate(&mut self, from: BufferId, to: BufferId, rows: &[RowPair]) -> Result<(), String> {
        for (from_row, to_row) in each_pair(rows) {
            for head in 0..self.heads(to) {
                let more = self.sum(from, from_row, head)?;
                let mut sum = self.sum(to, to_row, head)?;
                add(&mut sum, &more);
                self.set(to, to_row, head, Cell::Sum(sum))?;
            }
        }
        Ok(())
    }

    fn merge(&mut self, merge: &Merge) -> Result<(), String> {
        let outs = !matches!(merge.style, MergeStyle::Statistics);
        let statistics = !matches!(merge.style, MergeStyle::Weighted { .. });
        if outs {
            self.accumulate(merge.step_out, merge.out, &merge.rows)?;
        }
        if statistics {
            self.accumulate(merge.step_lse, merge.lse, &merge.rows)?;
        }
        Ok(())
    }

    fn pairs_are_attended_once(&self) -> Result<(), String> {
        let visible: Sum = (0..self.problem.heads.q)
            .flat_map(|head| self.rows_of_head(head))
            .flat_map(|row| self.expected(row))
            .filter(|(pair, _)| *pair != HAS_SINK)
            .collect();
        let passes = if self.problem.pass == Pass::Backward { 2 } else { 1 };
        match self.attended[..passes].iter().position(|attended| *attended != visible) {
            None => Ok(()),
            Some(pass) => Err(format!("pass {pass} attends to {:?}, not {visible:?}", self.attended[pass])),
        }
    }

    fn rows_of_head(&self, head: usize) -> impl Iterator<Item = Query> {
        let sequences = self.problem.sequences.iter().enumerate();
        sequences.flat_map(move |(sequence, of)| (0..of.q.len).map(move |query| [sequence, query, head]))
    }

    fn results_are_home(&mut self) -> Result<(), String> {
        let mut owners: BTreeMap<(TensorName, usize, usize, usize), usize> = BTreeMap::new();
        let mut dsink: BTreeMap<usize, Sum> = BTreeMap::new();
        for placement in &self.schedule.placements {
            let Role::Output(tensor) = self.schedule.buffers[placement.buffer.0].role else { continue };
            for (head, of_problem) in placement.heads.clone().enumerate() {
                let cell = self.cells.get(&(placement.buffer.0, 0, head)).cloned().unwrap_or(Cell::Unwritten);
                match (tensor, cell) {
                    (TensorName::Dsink, Cell::Sum(sum)) => add(dsink.entry(of_problem).or_default(), &sum),
                    (TensorName::MaxLogit, cell) if cell == self.whole_head(of_problem) => {}
                    (TensorName::Dsink | TensorName::MaxLogit, cell) => {
                        return Err(format!("{tensor} of head {of_problem} is {cell:?}"));
                    }
                    _ => {
                        self.rows_are_home(placement, tensor, head)?;
                        for placed in &placement.rows {
                            for i in 0..placed.local.len {
                                let position = placed.piece.start + i * placed.piece.step;
                                let key = (tensor, placed.sequence, position, of_problem);
                                *owners.entry(key).or_default() += 1;
                            }
                        }
                    }
                }
            }
        }
        if let Some((row, count)) = owners.iter().find(|(_, count)| **count != 1) {
            return Err(format!("{row:?} has {count} owners"));
        }
        let rows = owners.keys().filter(|key| key.0 == TensorName::Out).count();
        if rows != self.problem.tokens() * self.problem.heads.q {
            return Err("a real row has no owner".into());
        }
        for (head, sum) in dsink {
            let expected: Sum = self.rows_of_head(head).map(|[s, q, h]| ((s, q, h, SINK), 1)).collect();
            if sum != expected {
                return Err(format!("dsink of head {head} is {sum:?}"));
            }
        }
        Ok(())
    }

    fn whole_head(&self, head: usize) -> Cell {
        let pairs = self.rows_of_head(head).flat_map(|row| self.expected(row));
        Cell::Sum(pairs.filter(|(pair, _)| *pair != HAS_SINK).collect())
    }

    /// Checks that real rows hold the expected terms, padding rows hold none, and rows in no slot were not written.
    fn rows_are_home(&self, placement: &Placement, tensor: TensorName, head: usize) -> Result<(), String> {
        let buffer = placement.buffer.0;
        let of_problem = placement.heads.start + head;
        let mut expected: HashMap<usize, Cell> = HashMap::new();
        for placed in &placement.rows {
            for i in 0..placed.local.span {
                let position = placed.piece.start + i * placed.piece.step;
                let sum = match tensor {
                    _ if i >= placed.local.len => Sum::new(),
                    TensorName::Dk | TensorName::Dv => self.of_key(placed.sequence, position, of_problem),
                    TensorName::Dq => {
                        let mut sum = self.expected([placed.sequence, position, of_problem]);
                        sum.remove(&HAS_SINK);
                        sum
                    }
                    _ => self.expected([placed.sequence, position, of_problem]),
                };
                expected.insert(placed.local.row(i), Cell::Sum(sum));
            }
        }
        for row in 0..self.schedule.buffers[buffer].rows {
            let got = self.cells.get(&(buffer, row, head)).unwrap_or(&Cell::Unwritten);
            if got != expected.get(&row).unwrap_or(&Cell::Unwritten) {
                return Err(format!(
                    "{tensor} row {row} head {head} is {got:?}, not {:?}",
                    expected.get(&row)
                ));
            }
        }
        Ok(())
    }

    fn of_key(&self, sequence: usize, key: usize, kv_head: usize) -> Sum {
        let (group, of) = (self.problem.group(), &self.problem.sequences[sequence]);
        let sees = |query: &usize| self.problem.mask.visible(*query, of.q.len, of.kv.len).contains(&key);
        let queries = (0..of.q.len).filter(sees);
        let heads = |query| (kv_head * group..(kv_head + 1) * group).map(move |head| (query, head));
        queries.flat_map(heads).map(|(query, head)| ((sequence, query, head, key), 1)).collect()
    }

    /// Checks that any two operations of a rank that touch a cell, one of them writing, are ordered.
    fn accesses_are_ordered(&self, rank: usize) -> Result<(), String> {
        let before = happens_before(&self.schedule.ranks[rank]);
        for (&(buffer, row, head), accesses) in &self.accesses {
            if self.schedule.buffers[buffer].rank != rank {
                continue;
            }
            for (n, &(a, of_a)) in accesses.iter().enumerate() {
                let others = accesses[..n].iter().filter(|&&(b, of_b)| b != a && conflict(of_a, of_b));
                for &(b, of_b) in others {
                    if !before[a.max(b)].contains(&a.min(b)) {
                        let name = &self.schedule.buffers[buffer].name;
                        return Err(format!(
                            "race on {name} row {row} head {head}: operations {b} ({of_b:?}) and {a} ({of_a:?})"
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

fn combined(how: Reduction, a: Cell, b: Cell) -> Cell {
    let (Cell::Sum(mut a), Cell::Sum(b)) = (a, b) else { return Cell::Poison };
    match how {
        Reduction::Sum => add(&mut a, &b),
        Reduction::Max => a.extend(b),
    }
    Cell::Sum(a)
}

/// Whether two accesses to a cell need an order.
fn conflict(a: Access, b: Access) -> bool {
    !matches!((a, b), (Access::Read, Access::Read) | (Access::Raise, Access::Raise))
}

/// Returns every (row, head).
fn grid(rows: usize, heads: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..heads).map(move |head| (row, head)))
}

fn each(rows: &[Run]) -> impl Iterator<Item = usize> {
    rows.iter().flat_map(Run::real_rows)
}

fn each_pair(rows: &[RowPair]) -> impl Iterator<Item = (usize, usize)> {
    rows.iter().flat_map(|(from, to)| from.real_rows().zip(to.real_rows()))
}

/// Returns for each operation those that are done before it begins: earlier ones of its stream, and those ordered by
/// events.
fn happens_before(program: &RankProgram) -> Vec<HashSet<usize>> {
    let mut before: Vec<HashSet<usize>> = Vec::new();
    let (mut last_of_stream, mut records) = (HashMap::new(), HashMap::new());
    for (index, operation) in program.operations.iter().enumerate() {
        let awaited = match operation.work {
            Work::WaitEvent(event) => records.get(&event).copied(),
            _ => None,
        };
        let earlier = [last_of_stream.insert(operation.stream, index), awaited].into_iter().flatten();
        let set = earlier.flat_map(|e| before[e].iter().copied().chain([e]).collect::<Vec<_>>()).collect();
        before.push(set);
        if let Work::RecordEvent(event) = operation.work {
            records.insert(event, index);
        }
    }
    before
}
