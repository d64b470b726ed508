//! The ring without arithmetic: a row holds the terms that it stands for, and each visible pair can be counted at its
//! destination. Programs run in host order. Other orders are tested by the executor and the checker.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;

use seamproof_oracle::sharding::{ShardingError, span_multiple};
use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Dims, Heads, Mask, Pass, Problem, ProblemFields, Run,
    Sequence, Side, Sink, Softmax, TensorName, TensorRows,
};
use seamproof_simulator::schedule::{
    Attend, AttendBackward, BufferId, Merge, MergeOrder, Region, Role, RowPair, Schedule, Work, ring,
};
use seamproof_simulator::{AttentionCall, RowPolicy, Segment};

/// The stream on which a ring begins and ends.
const MAIN: usize = 0;

/// Sequence, query and key of a term, or `SINK`.
type Term = (usize, usize, usize);

const SINK: Term = (usize::MAX, 0, 0);

/// Value for which a row stands.
#[derive(Clone, Debug, PartialEq)]
enum Row {
    Unwritten,
    Poison,
    Token(TensorName, usize, usize),
    /// A partial result over these terms; zero or −∞ when there are none.
    Sum(Vec<Term>),
}

struct World<'a> {
    schedule: &'a Schedule,
    rows: Vec<Vec<Row>>,
    messages: HashMap<(usize, usize), VecDeque<Vec<Vec<Row>>>>,
    /// Queries whose sink gradients have been added.
    sinks: Vec<(usize, usize)>,
}

impl<'a> World<'a> {
    /// Runs every rank as far as its messages allow.
    fn run(schedule: &'a Schedule) -> World<'a> {
        let (rows, messages, sinks) = (Vec::new(), HashMap::new(), Vec::new());
        let mut world = World { schedule, rows, messages, sinks };
        world.rows = schedule.buffers.iter().map(|buffer| vec![Row::Unwritten; buffer.rows]).collect();
        for placement in &schedule.placements {
            let Role::Input(tensor) = schedule.buffers[placement.buffer.0].role else { continue };
            world.rows[placement.buffer.0].fill(Row::Poison);
            for placed in &placement.rows {
                for (i, row) in placed.local.real_rows().enumerate() {
                    let position = placed.piece.start + i * placed.piece.step;
                    world.rows[placement.buffer.0][row] = Row::Token(tensor, placed.sequence, position);
                }
            }
        }
        let mut next = vec![0; schedule.ranks.len()];
        let mut moved = true;
        while moved {
            moved = false;
            for (rank, program) in schedule.ranks.iter().enumerate() {
                while program.operations.get(next[rank]).is_some_and(|op| world.execute(rank, &op.work)) {
                    (next[rank], moved) = (next[rank] + 1, true);
                }
            }
        }
        let ends: Vec<usize> = schedule.ranks.iter().map(|program| program.operations.len()).collect();
        assert_eq!(next, ends, "a rank waits for a message that never comes");
        assert!(world.messages.values().all(VecDeque::is_empty), "a message without a receiver");
        world
    }

    /// Executes an operation of a rank. Returns false if the operation must wait.
    fn execute(&mut self, rank: usize, work: &Work) -> bool {
        match work {
            Work::Attend(attend) => self.attend(attend),
            Work::AttendBackward(attend) => self.attend_backward(attend),
            Work::Merge(Merge { step_out, step_lse, out, lse, rows, .. }) => {
                self.add(*step_out, *out, rows);
                self.add(*step_lse, *lse, rows);
            }
            Work::Accumulate { from, to, rows } => self.add(*from, *to, rows),
            Work::ApplySink { out, lse, rows, .. } => {
                for row in rows.iter().flat_map(Run::real_rows) {
                    self.terms_mut(*out, row).push(SINK);
                    self.terms_mut(*lse, row).push(SINK);
                }
            }
            Work::SinkGradient { dout, out, rows, .. } => {
                for row in rows.iter().flat_map(Run::real_rows) {
                    let query = self.token(*dout, row, TensorName::Dout);
                    assert!(self.terms_mut(*out, row).contains(&SINK));
                    self.sinks.push(query);
                }
            }
            Work::Copy { from, to, rows } => {
                for (from_row, to_row) in paired(rows) {
                    self.rows[to.0][to_row] = self.rows[from.0][from_row].clone();
                }
            }
            Work::Fill { to, rows, .. } => {
                rows.iter().flat_map(Run::real_rows).for_each(|row| self.rows[to.0][row] = Row::Sum(vec![]));
            }
            Work::Send { to, regions, .. } => {
                let message = regions.iter().map(|region| self.read(rank, region)).collect();
                self.messages.entry((rank, *to)).or_default().push_back(message);
            }
            Work::Recv { from, regions, .. } => {
                let Some(message) = self.messages.get_mut(&(*from, rank)).and_then(VecDeque::pop_front)
                else {
                    return false;
                };
                assert_eq!(message.len(), regions.len());
                for (region, values) in regions.iter().zip(message) {
                    assert_eq!(region.rows.len, values.len());
                    for (row, value) in region.rows.real_rows().zip(values) {
                        self.rows[region.buffer.0][row] = value;
                    }
                }
            }
            Work::AllReduce { .. } | Work::RecordEvent(_) | Work::WaitEvent(_) => {}
            other => panic!("a ring has no {other:?}"),
        }
        true
    }

    fn attend(&mut self, attend: &Attend) {
        let Attend { call, q, k, v, out, lse, .. } = attend;
        assert_eq!((call.softmax.sink, call.policy), (Sink::None, RowPolicy::Overwrite));
        for segment in &call.segments {
            for (row, terms) in self.pairs(segment, *q, *k, *v) {
                self.rows[out.0][row] = Row::Sum(terms.clone());
                self.rows[lse.0][row] = Row::Sum(terms);
            }
        }
        self.check(call, *q, *k);
    }

    fn attend_backward(&mut self, attend: &AttendBackward) {
        let AttendBackward { call, q, k, v, dout, out, lse, dq, dk, dv, .. } = attend;
        for segment in &call.segments {
            let mut of_key: HashMap<usize, Vec<Term>> = HashMap::new();
            for (row, terms) in self.pairs(segment, *q, *k, *v) {
                for &term in &terms {
                    of_key.entry(term.2).or_default().push(term);
                    let (sequence, query) = self.token(*dout, row, TensorName::Dout);
                    assert_eq!((sequence, query), (term.0, term.1));
                    assert!(self.terms_mut(*out, row).contains(&term), "the output is not final");
                    assert!(self.terms_mut(*lse, row).contains(&term), "the LSE is not final");
                }
                self.rows[dq.0][row] = Row::Sum(terms);
            }
            for run in &segment.kv {
                for buffer in [dk, dv] {
                    run.padding_rows().for_each(|row| self.rows[buffer.0][row] = Row::Sum(vec![]));
                    for row in run.real_rows() {
                        let (_, key) = self.token(*k, row, TensorName::K);
                        let terms = of_key.get(&key).cloned().unwrap_or_default();
                        self.rows[buffer.0][row] = Row::Sum(terms);
                    }
                }
            }
        }
        let keys = call.segments.iter().flat_map(|segment| segment.kv.iter().flat_map(Run::real_rows));
        let keys: Vec<usize> = keys.collect();
        assert_eq!(
            keys.iter().collect::<BTreeSet<_>>().len(),
            keys.len(),
            "a key's gradient overwritten twice"
        );
        self.check(call, *q, *k);
    }

    fn check(&self, call: &AttentionCall, q: BufferId, k: BufferId) {
        let rows = |buffer: BufferId| self.schedule.buffers[buffer.0].rows;
        assert_eq!(call.check(rows(q), rows(k)), Ok(()));
    }

    /// Returns the rows of a segment, each with the pairs to which its query attends.
    fn pairs(&self, segment: &Segment, q: BufferId, k: BufferId, v: BufferId) -> Vec<(usize, Vec<Term>)> {
        let keys: Vec<usize> = segment.kv.iter().flat_map(Run::real_rows).collect();
        let real = segment.q.real_rows().enumerate().map(|(i, row)| {
            let (sequence, query) = self.token(q, row, TensorName::Q);
            let term = |j: usize| {
                let key = self.token(k, keys[j], TensorName::K);
                assert_eq!((key.0, key), (sequence, self.token(v, keys[j], TensorName::V)));
                (sequence, query, key.1)
            };
            (row, segment.visible(i).map(term).collect())
        });
        real.chain(segment.q.padding_rows().map(|row| (row, vec![]))).collect()
    }

    fn token(&self, buffer: BufferId, row: usize, tensor: TensorName) -> (usize, usize) {
        match self.rows[buffer.0][row] {
            Row::Token(found, sequence, position) if found == tensor => (sequence, position),
            ref other => panic!("{tensor} row {row} holds {other:?}"),
        }
    }

    fn terms_mut(&mut self, buffer: BufferId, row: usize) -> &mut Vec<Term> {
        match &mut self.rows[buffer.0][row] {
            Row::Sum(terms) => terms,
            other => panic!("row {row} holds {other:?}, no partial result"),
        }
    }

    fn add(&mut self, from: BufferId, to: BufferId, rows: &[RowPair]) {
        for (from_row, to_row) in paired(rows) {
            let terms = self.terms_mut(from, from_row).clone();
            self.terms_mut(to, to_row).extend(terms);
        }
    }

    fn read(&self, rank: usize, region: &Region) -> Vec<Row> {
        let buffer = &self.schedule.buffers[region.buffer.0];
        assert_eq!((buffer.rank, region.heads.clone()), (rank, 0..buffer.heads));
        region.rows.real_rows().map(|row| self.rows[region.buffer.0][row].clone()).collect()
    }
}

fn paired(rows: &[RowPair]) -> impl Iterator<Item = (usize, usize)> {
    rows.iter().flat_map(|(from, to)| from.real_rows().zip(to.real_rows()))
}

/// Returns the terms in the row of a result, from the mask alone.
fn right(problem: &Problem, tensor: TensorName, sequence: usize, position: usize) -> Vec<Term> {
    let (lq, lk) = (problem.sequences[sequence].q.len, problem.sequences[sequence].kv.len);
    let visible = |query: usize| problem.mask.visible(query, lq, lk);
    let row = |query: usize| visible(query).map(move |key| (sequence, query, key));
    match tensor {
        TensorName::Out | TensorName::Lse => {
            row(position).chain((problem.softmax.sink != Sink::None).then_some(SINK)).collect()
        }
        TensorName::Dq => row(position).collect(),
        _ => (0..lq).flat_map(row).filter(|term| term.2 == position).collect(),
    }
}

/// Runs the problem's ring and compares every row of every result.
fn hold(problem: &Problem) {
    let schedule = ring(problem, MergeOrder::Running).unwrap();
    let mut world = World::run(&schedule);
    let mut real_rows: HashMap<TensorName, usize> = HashMap::new();
    for placement in &schedule.placements {
        let Role::Output(tensor) = schedule.buffers[placement.buffer.0].role else { continue };
        for placed in &placement.rows {
            for i in 0..placed.local.span {
                let real = i < placed.local.len;
                *real_rows.entry(tensor).or_default() += usize::from(real);
                let position = placed.piece.start + i * placed.piece.step;
                let expected =
                    if real { right(problem, tensor, placed.sequence, position) } else { Vec::new() };
                let found = world.terms_mut(placement.buffer, placed.local.row(i));
                found.sort_unstable();
                assert_eq!(*found, expected, "{tensor} sequence {} {position}", placed.sequence);
            }
        }
    }
    assert_eq!(real_rows.get(&TensorName::Out).copied().unwrap_or(0), problem.tokens());
    if problem.learnable_sinks() > 0 && problem.pass == Pass::Backward {
        let queries: BTreeSet<_> = world.sinks.iter().collect();
        assert_eq!((queries.len(), world.sinks.len()), (problem.tokens(), problem.tokens()));
    }
}

/// A pack with a first offset and slack. Each length is padded to a multiple that the balance needs, and by `extra`
/// such multiples more.
fn problem(
    lengths: &[(usize, usize)],
    extra: usize,
    (cp, balance): (usize, Balance),
    mask: Mask,
    sink: Sink,
) -> Problem {
    let unit = span_multiple(balance, cp);
    let mut rows = TensorRows { q: cp, kv: 0 };
    let sequences = (0..).zip(lengths).map(|(id, &(lq, lk))| {
        let span = |len: usize| len.next_multiple_of(unit) + extra * unit * usize::from(len % 2 == 1);
        let (q, kv) = (Run::packed(rows.q, lq, span(lq)), Run::packed(rows.kv, lk, span(lk)));
        rows = TensorRows { q: rows.q + q.span, kv: rows.kv + kv.span + cp };
        Sequence { id, q, kv }
    });
    let fields = ProblemFields::of(sequences.collect(), 1);
    let world = cp + 1;
    Problem::new(ProblemFields {
        rows,
        heads: Heads { q: 2, kv: 1 },
        dims: Dims { qk: 2, v: 3 },
        mask,
        softmax: Softmax { sink, ..fields.softmax },
        parallel: ContextParallel {
            algorithm: Algorithm::Ring,
            balance,
            world,
            ranks: (1..world).rev().collect(),
            region: 1,
        },
        ..fields
    })
    .unwrap()
}

const BALANCES: [Balance; 4] =
    [Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe: 1 }, Balance::Striped { stripe: 3 }];

fn cuts(sizes: Range<usize>) -> impl Iterator<Item = (usize, Balance)> {
    sizes.flat_map(|cp| BALANCES.map(|balance| (cp, balance)))
}

#[test]
fn each_visible_pair_counts_once_forward_and_backward() {
    let packs: [&[(usize, usize)]; 6] = [
        &[(7, 7), (0, 0), (1, 1), (12, 12)],
        &[(5, 9), (9, 5), (0, 4), (4, 0)],
        &[(1, 3), (2, 2), (17, 1)],
        &[(13, 13)],
        &[(3, 0), (0, 0)],
        &[],
    ];
    let sides = [None, Some(0), Some(1), Some(4)];
    for (align, left) in [Alignment::TopLeft, Alignment::BottomRight].map(|a| sides.map(|l| (a, l))).concat()
    {
        for (right, cut) in sides.into_iter().flat_map(|right| cuts(1..6).map(move |cut| (right, cut))) {
            for (index, pack) in packs.into_iter().enumerate() {
                let sink = [Sink::None, Sink::OffByOne, Sink::Learnable][(index + cut.0) % 3];
                hold(&problem(pack, index % 3, cut, Mask::window(left, right, align), sink));
            }
        }
    }
}

#[test]
fn a_ring_of_one_neither_communicates_nor_forks() {
    for balance in BALANCES {
        let schedule =
            ring(&problem(&[(5, 5)], 0, (1, balance), Mask::CAUSAL, Sink::None), MergeOrder::Running)
                .unwrap();
        let operations = &schedule.ranks[0].operations;
        assert!(operations.iter().all(|operation| operation.stream == MAIN), "{operations:?}");
    }
}

#[test]
fn scratch_does_not_grow_with_the_ring() {
    let scratch = |cp: usize, balance: Balance| {
        // Every rank holds an equal number of rows, whatever the size.
        let problem = problem(&[(6 * cp, 6 * cp)], 0, (cp, balance), Mask::FULL, Sink::None);
        let schedule = ring(&problem, MergeOrder::Running).unwrap();
        let of_rank = schedule.buffers.iter().filter(|buffer| buffer.rank == 1);
        of_rank
            .filter(|buffer| buffer.role == Role::Scratch)
            .map(|b| b.shape().iter().product::<usize>())
            .sum::<usize>()
    };
    for balance in BALANCES {
        assert_eq!(scratch(3, balance), scratch(11, balance));
    }
}

#[test]
fn every_member_exchanges_alike_and_never_blocks_on_one_side() {
    // Ranks 1 and 2 are idle: the sequence is shorter than the ring.
    let schedule =
        ring(&problem(&[(1, 1)], 0, (3, Balance::DualChunk), Mask::CAUSAL, Sink::None), MergeOrder::Running)
            .unwrap();
    let kinds = |rank: usize| -> Vec<&str> {
        let works = schedule.ranks[rank].operations.iter().map(|operation| &operation.work);
        let kind = |work: &Work| match work {
            Work::Send { .. } => Some("send"),
            Work::Recv { .. } => Some("recv"),
            Work::AllReduce { .. } => Some("all-reduce"),
            _ => None,
        };
        works.filter_map(kind).collect()
    };
    let forward = ["send", "recv"].repeat(2);
    // KV and gradients travel by turns. Only the gradients take the last step home.
    let backward = ["send", "recv"].repeat(2 + 3);
    assert_eq!(kinds(0), [forward, vec!["all-reduce"], backward].concat());
    assert_eq!((kinds(1), kinds(2)), (kinds(0), kinds(0)));
    for program in &schedule.ranks {
        let sends = program.operations.iter().zip(&program.operations[1..]);
        for (first, second) in sends.filter(|(first, _)| matches!(first.work, Work::Send { .. })) {
            let (Work::Send { group: sent, .. }, Work::Recv { group, .. }) = (&first.work, &second.work)
            else {
                panic!("{second:?} follows a send");
            };
            assert!(group.is_some() && sent == group && first.stream == second.stream);
        }
    }
}

#[test]
fn what_has_no_cut_is_refused() {
    let mut fields: ProblemFields =
        problem(&[(4, 4)], 0, (2, Balance::DualChunk), Mask::FULL, Sink::None).into();
    fields.sequences[0].q.span -= 1;
    fields.sequences[0].q.len = 3;
    let error = ShardingError::Span { sequence: 0, side: Side::Q, span: 3, multiple: 4 };
    assert_eq!(ring(&Problem::new(fields).unwrap(), MergeOrder::Running), Err(error.into()));
}
