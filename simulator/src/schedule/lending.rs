//! Keys that sequences [share](seamproof_oracle::Sharing), around a schedule in which each rank has a part of every
//! sequence.
//!
//! A lent row and the hole that a borrower has for it lie on the ranks that have their positions, by the lender's cut
//! and by the borrower's. Before the forward, an all-to-all *lends* K and V: lent rows go to the holes. The schedule
//! inside then takes each sequence with keys of its own. After its backward, an all-to-all *returns* dK and dV of the
//! holes, and they are added to those of the lent rows in f32, borrower after borrower, in the order of sequences. The
//! schedule inside leaves its gradients in f32, so that each is rounded once.
//!
//! Where a rank has every sequence whole, no row has to travel: see [`super::shared`].

use seamproof_oracle::sharding::{Piece, PlacedRun, held};
use seamproof_oracle::{Format, Pass, Problem, ProblemFields, Run, SharedKeys, Side, TensorName};

use super::build::{self, BuildError, Builder};
use super::collect::{COMMUNICATION, COMPUTE};
use super::embed;
use super::program::{Buffer, BufferId, Placement, Region, Role, RowPair, Schedule, Work};
use crate::shard::ShardedSide;

/// Returns the problem's schedule around the one that `inside` builds of the problem without shared keys.
pub(super) fn lending(
    problem: &Problem,
    inside: impl Fn(&Problem) -> Result<Schedule, BuildError>,
) -> Result<Schedule, BuildError> {
    let inner = inside(&alone(problem))?;
    let kv = ShardedSide::new(problem, Side::Kv)?;
    let mut desks = desks(problem, &kv).into_iter();
    let mut builder = Builder::new(inner.ranks.len());
    let mut tensors = enclose(&mut builder, problem, &inner);
    // Collectives inside are on other streams, and those of one communicator must be in one order.
    let communicator = builder.communicator((0..inner.ranks.len()).collect());
    let ranks = (0..inner.ranks.len()).filter_map(|rank| {
        let of_rank = tensors.extract_if(.., |tensor| inner.buffers[tensor.inside.0].rank == rank);
        let is_input = |tensor: &Tensor| matches!(tensor.name, TensorName::K | TensorName::V);
        let (inputs, results) = of_rank.partition(is_input);
        Some(Rank { rank, communicator, inputs, results, desk: desks.next()? })
    });
    let ranks: Vec<Rank> = ranks.collect();
    for rank in &ranks {
        rank.lend(&mut builder);
        embed::run(&mut builder, rank.rank, inner.ranks[rank.rank].passes()[0].iter().cloned());
    }
    if problem.pass == Pass::Backward {
        builder.begin_backward();
        for rank in &ranks {
            embed::run(&mut builder, rank.rank, inner.ranks[rank.rank].passes()[1].iter().cloned());
            rank.end(&mut builder);
        }
    }
    Ok(builder.finish())
}

/// Returns the problem in which every sequence has keys of its own, with gradients in f32.
pub(super) fn alone(problem: &Problem) -> Problem {
    let unshared = problem.unshared();
    let mut fields = ProblemFields::from(unshared.clone());
    fields.precision.gradients = Format::F32.into();
    Problem::new(fields).unwrap_or(unshared)
}

/// A tensor of the schedule inside that is no input or result of the schedule around it, and the one that is.
struct Tensor {
    name: TensorName,
    inside: BufferId,
    outside: BufferId,
    /// The rows that sequences hold, padding included.
    held: Vec<RowPair>,
}

/// Adds the buffers, communicators and placements of the schedule inside. Keys, values and gradients have another buffer
/// around it.
fn enclose(builder: &mut Builder, problem: &Problem, inner: &Schedule) -> Vec<Tensor> {
    for members in inner.communicators.iter().skip(builder.communicators()) {
        builder.communicator(members.clone());
    }
    for buffer in &inner.buffers {
        let is_outside = matches!(buffer.role, Role::Input(name) | Role::Output(name) if is_outside(name));
        let role = if is_outside { Role::Scratch } else { buffer.role };
        let name = if is_outside { format!("{} inside", buffer.name).into() } else { buffer.name.clone() };
        builder.buffer(Buffer { name, role, ..buffer.clone() });
    }
    builder.reserve_events(embed::events(inner));
    let mut tensors = Vec::new();
    for placement in &inner.placements {
        let (name, inside) = (placement.tensor, placement.buffer);
        if !is_outside(name) {
            builder.place(placement.clone());
            continue;
        }
        let format = problem.precision.of(name).format;
        let outside = builder.buffer(Buffer { format, ..inner.buffers[inside.0].clone() });
        let rows = held(problem, name.side(), placement.rows.iter().copied());
        let held = rows.iter().map(|PlacedRun { local, .. }| Run { len: local.span, ..*local });
        let held = build::same_rows(&held.collect::<Vec<_>>());
        builder.place(Placement { buffer: outside, rows, ..placement.clone() });
        tensors.push(Tensor { name, inside, outside, held });
    }
    tensors
}

/// Whether the schedule inside has another buffer for a tensor.
fn is_outside(name: TensorName) -> bool {
    name.side() == Side::Kv || name == TensorName::Dq
}

/// One rank's part around the schedule inside.
struct Rank {
    rank: usize,
    /// The communicator of all ranks.
    communicator: usize,
    /// K and V.
    inputs: Vec<Tensor>,
    /// The gradients, in a backward.
    results: Vec<Tensor>,
    desk: Desk,
}

impl Rank {
    /// Brings K and V to the schedule inside, with lent rows in the holes.
    fn lend(&self, builder: &mut Builder) {
        for &Tensor { inside, outside, .. } in &self.inputs {
            let rows = builder.describe(outside).rows;
            let every = Run::packed(0, rows, rows);
            builder.copy(self.rank, COMPUTE, outside, inside, &[(every, every)]);
            let landing = self.exchange(builder, outside, &self.desk.lent, &self.desk.holes);
            let rows: Vec<RowPair> = self.desk.holes.rows().map(|(hole, landed)| (landed, hole)).collect();
            builder.copy(self.rank, COMPUTE, landing, inside, &rows);
        }
    }

    /// Adds what borrowers have of lent rows, and takes the gradients out of the schedule inside.
    fn end(&self, builder: &mut Builder) {
        for &Tensor { name, inside, outside, ref held } in &self.results {
            if name.side() == Side::Kv {
                let from = self.exchange(builder, inside, &self.desk.holes, &self.desk.lent);
                for rows in self.desk.lent.turns() {
                    let rows = rows.into_iter().map(|(lent, landed)| (landed, lent)).collect();
                    builder.push(self.rank, COMPUTE, Work::Accumulate { from, to: inside, rows });
                }
            }
            builder.copy(self.rank, COMPUTE, inside, outside, held);
        }
    }

    /// Sends rows of a buffer to the other side of their loans. Returns the buffer in which such rows arrive.
    fn exchange(
        &self,
        builder: &mut Builder,
        from: BufferId,
        sends: &Counter,
        receives: &Counter,
    ) -> BufferId {
        let Buffer { name, heads, dim, format, .. } = builder.describe(from).clone();
        let [sent, arrived] = [(sends, "sent"), (receives, ARRIVED)].map(|(counter, what)| {
            let shape = [counter.rows, heads, dim];
            builder.scratch(self.rank, &format!("{name} of shared keys, {what}"), shape, format)
        });
        builder.copy(self.rank, COMPUTE, from, sent, &sends.rows().collect::<Vec<_>>());
        let regions = |counter: &Counter, buffer: BufferId| {
            let region = |&rows: &Run| Region { buffer, rows, heads: 0..heads };
            counter.regions.iter().map(region).collect()
        };
        let (send, recv) = (regions(sends, sent), regions(receives, arrived));
        let ready = builder.record(self.rank, COMPUTE);
        builder.wait(self.rank, COMMUNICATION, ready);
        builder.push(
            self.rank,
            COMMUNICATION,
            Work::AllToAll { communicator: self.communicator, send, recv },
        );
        let ended = builder.record(self.rank, COMMUNICATION);
        builder.wait(self.rank, COMPUTE, ended);
        arrived
    }
}

/// End of the name of a buffer in which rows of shared keys arrive.
pub(crate) const ARRIVED: &str = "arrived from other ranks";

/// What one rank lends and borrows.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) lent: Counter,
    pub(crate) holes: Counter,
}

/// Returns the desks of all ranks.
pub(super) fn desks(problem: &Problem, kv: &ShardedSide) -> Vec<Desk> {
    let loans = loans(problem, kv);
    let counters = |here: fn(&Loan) -> Place, there: fn(&Loan) -> Place| {
        let mut of_ranks = vec![Vec::new(); kv.cp];
        loans.iter().for_each(|loan| of_ranks[here(loan).rank].push(loan));
        let counter = move |mut of_rank: Vec<&Loan>| {
            // Loans with one rank keep their order.
            of_rank.sort_by_key(|loan| there(loan).rank);
            let member = |rank: usize| {
                let before = |end: usize| of_rank.partition_point(|loan| there(loan).rank < end);
                let both = of_rank[before(rank)..before(rank + 1)].iter();
                both.map(|loan| (here(loan).rows, loan.turn)).collect()
            };
            Counter::new((0..kv.cp).map(member))
        };
        of_ranks.into_iter().map(counter)
    };
    let lent = counters(|loan| loan.lent, |loan| loan.hole);
    let holes = counters(|loan| loan.hole, |loan| loan.lent);
    lent.zip(holes).map(|(lent, holes)| Desk { lent, holes }).collect()
}

/// Rows of one side of a rank's loans, in the order in which they are sent or arrive: member after member.
#[derive(Debug)]
pub(crate) struct Counter {
    /// Rows of the rank with those in the order of sending, and the turn of each pair.
    pub(crate) loans: Vec<(RowPair, usize)>,
    /// The rows of each member, in the order of sending.
    pub(crate) regions: Vec<Run>,
    /// Number of all rows.
    pub(crate) rows: usize,
}

impl Counter {
    fn new(members: impl Iterator<Item = Vec<(Run, usize)>>) -> Counter {
        let mut counter = Counter { loans: Vec::new(), regions: Vec::new(), rows: 0 };
        for rows_of_member in members {
            let first = counter.rows;
            for (rows, turn) in rows_of_member {
                counter.loans.push(((rows, Run::packed(counter.rows, rows.len, rows.len)), turn));
                counter.rows += rows.len;
            }
            let count = counter.rows - first;
            counter.regions.push(Run::packed(first, count, count));
        }
        counter
    }

    /// Returns rows of the rank with those in the order of sending.
    pub(crate) fn rows(&self) -> impl Iterator<Item = RowPair> {
        self.loans.iter().map(|(rows, _)| *rows)
    }

    /// Returns the rows of all first borrowers, then of all second ones, and so on. No row is twice in one of them.
    pub(crate) fn turns(&self) -> Vec<Vec<RowPair>> {
        let turns = self.loans.iter().map(|(_, turn)| turn + 1).max().unwrap_or(0);
        let of = |turn| self.loans.iter().filter(move |(_, other)| *other == turn).map(|(rows, _)| *rows);
        (0..turns).map(|turn| of(turn).collect()).collect()
    }
}

/// Rows on a rank.
#[derive(Clone, Copy, Debug)]
struct Place {
    rank: usize,
    rows: Run,
}

/// Rows that a lender has in one place and a borrower in another.
#[derive(Clone, Copy, Debug)]
struct Loan {
    lent: Place,
    hole: Place,
    /// The number of earlier borrowers of the lender.
    turn: usize,
}

/// Returns all loans of a problem, in order of borrowers.
fn loans(problem: &Problem, kv: &ShardedSide) -> Vec<Loan> {
    let each = problem.sharing.0.iter().flat_map(|shared| {
        let &SharedKeys { sequence, with, keys } = shared;
        let turn = problem.sharing.turn(shared);
        let [lent, holes] = [with, sequence].map(|sequence| first_keys(kv, sequence, keys));
        common(&lent, &holes).into_iter().map(move |(lent, hole)| Loan { lent, hole, turn })
    });
    each.collect()
}

/// Positions and their place.
struct Line {
    piece: Piece,
    place: Place,
}

impl Line {
    /// Returns the remainder of every position by the step, and the first quotient and the one behind the last.
    fn quotients(&self) -> (usize, [usize; 2]) {
        let Piece { start, step, span, .. } = self.piece;
        (start % step, [start / step, start / step + span])
    }

    /// Returns the place of the positions with these quotients.
    fn part(&self, [from, to]: [usize; 2]) -> Place {
        let first = self.piece.start / self.piece.step;
        Place { rows: build::part(self.place.rows, &(from - first..to - first)), ..self.place }
    }
}

/// Returns the first `keys` positions of a sequence on all ranks, in order of remainders and of quotients.
fn first_keys(kv: &ShardedSide, sequence: usize, keys: usize) -> Vec<Line> {
    let on_rank = |rank: usize| {
        kv.pieces(sequence, rank).filter_map(move |piece| {
            let span = keys.saturating_sub(piece.start).div_ceil(piece.step).min(piece.span);
            let place = Place { rank, rows: build::part(kv.local(sequence, &piece), &(0..span)) };
            (span > 0).then_some(Line { piece: Piece { span, ..piece }, place })
        })
    };
    let mut lines: Vec<Line> = (0..kv.cp).flat_map(on_rank).collect();
    lines.sort_by_key(Line::quotients);
    lines
}

/// Returns the places of positions that two sequences have. All lines have the step of the cut.
fn common(lent: &[Line], holes: &[Line]) -> Vec<(Place, Place)> {
    let (mut at, mut beside) = (0, 0);
    let mut both = Vec::new();
    while let (Some(one), Some(other)) = (lent.get(at), holes.get(beside)) {
        let ((class, [first, end]), (of, [start, stop])) = (one.quotients(), other.quotients());
        let range = [first.max(start), end.min(stop)];
        if class == of && range[0] < range[1] {
            both.push((one.part(range), other.part(range)));
        }
        if (class, end) <= (of, stop) {
            at += 1;
        } else {
            beside += 1;
        }
    }
    both
}
