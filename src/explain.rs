//! A schedule in words, for someone who has a wrong gradient and no idea why. It says who holds what, which queries
//! of each launch see which keys, and where that differs from what the mask shows.
//!
//! *Positions* count the real rows of a sequence, and *rows* those of a rank's buffer; `a..b` is without b. A
//! *launch* is one call of an attention kernel, named by the step of its algorithm. Its *segments* pair query rows
//! with key rows. A *rank* is one of the world. The checker's symbolic execution follows the contents of rows through
//! messages, collectives and copies. A key is therefore named by its position and the rank that owns it, wherever it
//! has travelled.
//!
//! Beside a query that sees something wrong stands what it *should see*. In a launch, that is what the mask shows of
//! the keys that the launch reads; in the sum over all launches, it is what the mask shows. The text is bounded by
//! the limits below, and says what it leaves out. It shows pairs. The checker proves that they are also merged,
//! summed and returned rightly, and its verdict is the last part.
//!
//! Nothing of the subject is run. A query *sees* what a launch asks a kernel to show it. A kernel that does something
//! else looks right here, and so does a subject that is called with other problems. The head of the text says so
//! where the subject's name shows it. An identity compares the case's run with others; where an identity is the
//! finding, each of those runs is shown as well.

mod descales;
mod followed;
mod further;
mod line;
mod operation;
mod recorded;
mod seen;
mod sight;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Display, Write};
use std::ops::Range;

use seamproof_oracle::dealing::Dealt;
use seamproof_oracle::segments::Described;
use seamproof_oracle::sharding::{PlacedRun, layouts, whole};
use seamproof_oracle::{Append, Call, Given, Pages, Pass, Problem, Run, Sequence, SharedKeys, TensorName};
use seamproof_simulator::Segment;
use seamproof_simulator::check::{CheckError, Held, HeldRows, Reading, TracedLaunch, check, trace};
use seamproof_simulator::schedule::{BufferId, Operation, Schedule, Step, Work};

use crate::backends::unscheduled;
pub use descales::descales;
pub(crate) use descales::descales_there;
pub(crate) use followed::{BandSums, Followed, Sum, seen_differences, words as operation_words};
use further::further_runs;
use line::{Line, tidy};
use operation::{name, rows};
pub use recorded::explain_recorded;
use recorded::laid_out;
use seamproof_judge::case::{Case, InputSource};
use seamproof_judge::identity::identity;
use seamproof_judge::prose::{self, counted};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::SubjectName;
use seen::{Queries, Sighting, differences, queries};
use sight::{Sight, groups};

/// Largest number of sequences shown of the layout, and of a rank's part of it.
pub const SEQUENCES_SHOWN: usize = 16;
/// Largest number of runs shown of one sequence on one rank.
pub const RUNS_SHOWN: usize = 8;
/// Largest number of ranks shown.
pub const RANKS_SHOWN: usize = 16;
/// Largest number of operations shown of a rank.
pub const OPERATIONS_SHOWN: usize = 200;
/// Largest number of segments shown of a launch.
pub const SEGMENTS_SHOWN: usize = 32;
/// Largest number of queries of a segment that are examined.
pub const QUERIES_SHOWN: usize = 1 << 14;
/// Largest number of queries of a segment that are described one by one.
pub const SINGLE_MAX: usize = 8;
/// Largest number of groups of queries shown of a segment.
pub const GROUPS_SHOWN: usize = 12;
/// Largest number of groups shown of queries that see something wrong.
pub const DIFFERENCES_SHOWN: usize = 32;
/// Largest number of errors shown of the checker.
pub const ERRORS_SHOWN: usize = 8;

/// Selection of what to show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Rank of the world whose launches alone are shown.
    pub rank: Option<usize>,
    /// Pass that alone is shown.
    pub pass: Option<Pass>,
    /// Whether every operation is shown, and not launches alone.
    pub operations: bool,
}

impl Selection {
    fn shows(&self, pass: Pass) -> bool {
        self.pass.is_none_or(|only| only == pass)
    }

    /// Whether an error belongs to the rank and the pass that are shown. An error of no rank belongs to all.
    fn takes(&self, error: &CheckError, schedule: &Schedule) -> bool {
        let Some((rank, operation)) = error.about() else { return true };
        let begin = schedule.ranks.get(rank).and_then(|program| program.backward).unwrap_or(usize::MAX);
        let pass = |operation| if operation < begin { Pass::Forward } else { Pass::Backward };
        self.rank.is_none_or(|only| only == rank) && operation.is_none_or(|at| self.shows(pass(at)))
    }
}

/// Returns the lines before those of [`explain`]: the case's subject, its faults that no schedule shows, the finding in
/// the case, and the descales of its place. `other` says that the finding is another subject's.
pub fn subject(case: &Case, other: bool) -> String {
    let mut text = format!("subject   {}\n", case.subject.name);
    for what in unscheduled(&case.subject.name) {
        let _ =
            writeln!(text, "          NOT SHOWN: {what}. Below is what is asked of the subject without it.");
    }
    if let Some(found) = &case.found {
        let whose = if other { "of the file's own subject: " } else { "" };
        let _ = writeln!(text, "found     {whose}{found}");
    }
    if case.inputs == InputSource::Generated {
        let finding = case.found.as_ref().map(|found| &found.finding);
        let place = finding.map(|finding| finding.place).unwrap_or_default();
        text += &descales(&case.problem, finding.and_then(|finding| finding.tensor), &place);
    }
    text
}

/// Reason why nothing is said of the launches of a subject from outside.
pub(crate) const OUTSIDE: &str = "the launches of a subject from outside are not known; --backend emulated shows this \
                                  project's for the same problem";

/// Returns a problem of a subject from outside, explained: who holds what, of all ranks or of one.
pub fn explain_outside(problem: &Problem, rank: Option<usize>) -> String {
    let layouts = layouts(problem).unwrap_or_else(|_| vec![whole(problem)]);
    said(problem) + &laid_out(problem, &layouts, rank) + &format!("\nlaunches  not shown: {OUTSIDE}\n")
}

/// Returns a problem in words, with what its subject is given.
fn said(problem: &Problem) -> String {
    let lines = [
        prose::describe(problem) + "\n",
        world(problem),
        given(problem),
        calls(problem),
        region(problem),
        paged(problem),
        shared(problem),
    ];
    format!("problem   {}", lines.concat())
}

/// Returns a schedule of a problem, explained.
pub fn explain(problem: &Problem, schedule: &Schedule, selection: &Selection) -> String {
    let explainer = Explainer { problem, schedule, selection, owners: owners(schedule) };
    let mut text = said(problem) + "\n" + &explainer.layout();
    match trace(problem, schedule) {
        Ok(launches) => {
            let launches: BTreeMap<(usize, usize), TracedLaunch> =
                launches.into_iter().map(|launch| ((launch.at.rank, launch.at.operation), launch)).collect();
            text += &explainer.programs(&launches);
            text += &explainer.verdicts(&launches);
        }
        Err(_) => text += "\nnothing can be followed: the schedule does not run\n",
    }
    text += &checked(problem, schedule, selection);
    text
}

/// Returns the line that says which ranks of the world the group has; none where it is the whole world, in its order.
fn world(problem: &Problem) -> String {
    let (members, world) = (problem.parallel.world_ranks(), problem.parallel.all_of_world());
    let members: Vec<usize> = members.collect();
    if members.iter().copied().eq(0..world) {
        return String::new();
    }
    format!("world     {}, of which the group is {}\n", counted(world, "rank"), listed(members, RANKS_SHOWN))
}

/// Returns the line that says what the subject is given in place of offsets and lengths; none where it is given these.
fn given(problem: &Problem) -> String {
    match Given::of(problem) {
        None => String::new(),
        Some(Given::Dealt { dealt: Dealt::Segments(ranks), .. }) => {
            let rows = |side: usize| listed(ranks.iter().map(|rank| rank[side].ids.len()), RANKS_SHOWN);
            format!("given     ids and positions of each rank's rows: q {}; kv {}\n", rows(0), rows(1))
        }
        Some(Given::Dealt { dealt: Dealt::Lengths(ranks), .. }) => {
            let sides = ranks.first().map(|rank| rank.lengths.clone()).unwrap_or_default();
            let [q, kv] = sides.map(|lengths| listed(lengths, SEQUENCES_SHOWN));
            format!("given     lengths of a padded batch, to each rank: q {q}; kv {kv}\n")
        }
        Some(Given::Lengths(sides)) => {
            let [q, kv] = sides.map(|lengths| listed(lengths, SEQUENCES_SHOWN));
            format!("given     lengths of a padded batch: q {q}; kv {kv}\n")
        }
        Some(Given::Segments { sides, .. }) => {
            let [q, kv] = sides.map(|Described { ids, positions }| {
                let positions =
                    positions.map_or("made from them".into(), |array| format!("{:?}", array.shape));
                format!("ids {:?}, positions {positions}", ids.shape)
            });
            format!("given     segments, by shape: q {q}; kv {kv}\n")
        }
    }
}

/// Returns a line for each call of a problem with steps: what it appends, and where; none for one call.
fn calls(problem: &Problem) -> String {
    let mut text = String::new();
    for (number, Call { appends, .. }) in problem.calls().iter().enumerate() {
        let each = appends.iter().map(|append| {
            let Append { sequence, first, cached, tokens } = *append;
            let row = problem.sequences[sequence].kv.row(cached);
            let queries = format!("queries {first}..{}", first + tokens);
            format!("sequence {sequence} has {cached} keys, appends {tokens} from row {row} on for {queries}")
        });
        let _ = writeln!(text, "call {number}    {}", listed(each, SEQUENCES_SHOWN));
    }
    if !text.is_empty() {
        text += "          what follows is the same in one call, without a cache\n";
    }
    text
}

/// Returns the line that says in which pages the keys of each sequence lie; none where they lie as the problem says.
fn paged(problem: &Problem) -> String {
    let Some(Pages { size, count, table, .. }) = &problem.pages else { return String::new() };
    let each = table
        .iter()
        .enumerate()
        .map(|(sequence, pages)| format!("sequence {sequence} in {}", listed(pages, SEQUENCES_SHOWN)));
    let of_sequences = listed(each, SEQUENCES_SHOWN);
    format!("pages     {count} of {size} rows: {of_sequences}\n")
}

/// Returns the line that says which sequences borrow keys; none where no keys are shared.
fn shared(problem: &Problem) -> String {
    if problem.sharing.is_empty() {
        return String::new();
    }
    let each = problem.sharing.0.iter().map(|SharedKeys { sequence, with, keys }| {
        format!("keys 0..{keys} of sequence {sequence} are those of sequence {with}")
    });
    format!("shared    {}; dk and dv are sums\n", listed(each, SEQUENCES_SHOWN))
}

/// Returns the lines that say what ranks of regions hold; none without a region.
fn region(problem: &Problem) -> String {
    let (ranks, members) = (problem.parallel.region, problem.parallel.size());
    let Some(heads) = problem.heads.dealt(ranks).filter(|_| ranks > 1) else { return String::new() };
    let of = match problem.heads.kv < ranks {
        true => format!("kv heads are each on {} of them", ranks / problem.heads.kv),
        false => format!("kv heads, {} on each, too", heads.kv),
    };
    format!(
        "region    each of {} is {ranks}: rows of q, k, v, out and their gradients are cut among these, padding rows \
         as any others\n          attention is of {} on each, after a gather of rows, a column-parallel layer and a \
         rotation by position; {of}\n",
        counted(members, "rank"),
        counted(heads.q, "query head"),
    )
}

/// Whether a case's subject is from outside of this project, so that its launches are not known.
pub fn is_outside(case: &Case) -> bool {
    SubjectName::from(&case.subject).is_outside()
}

/// Returns the runs of an identity beside the case's own, where the case's finding is an identity: a description, and
/// each run on the subject's schedule of its problem. Returns an empty text for any other finding.
pub fn other_runs(case: &Case, backend: &dyn Backend, selection: &Selection) -> String {
    let Some(relation) = case.found.as_ref().and_then(|found| found.finding.identity) else {
        return String::new();
    };
    let twin = identity(relation).twin;
    if twin.is_empty() {
        return format!("\nidentity  {relation}: between results of the run above; there is no other\n");
    }
    let runs = further_runs(&case.problem, relation);
    let mut text = format!("\nidentity  {relation}: the run above is held against a second one, {twin}\n");
    for (index, problem) in runs.iter().enumerate() {
        let _ = write!(text, "\nrun {}     ", index + 2);
        if *problem == case.problem {
            text += "of the problem above, with the values that the identity asks for: the same layout and launches\n";
            continue;
        }
        match backend.schedule(problem) {
            _ if is_outside(case) => {
                text += "of another problem\n";
                text += &explain_outside(problem, selection.rank);
            }
            Ok(schedule) => {
                text += "of another problem\n";
                text += &explain(problem, &schedule, selection);
            }
            Err(error) => {
                let _ = writeln!(text, "{}: no schedule: {error}", prose::describe(problem));
            }
        }
    }
    text
}

/// Returns items with commas. Past `most` the rest is counted.
fn listed(items: impl IntoIterator<Item = impl Display>, most: usize) -> String {
    let mut items = items.into_iter();
    let mut shown: Vec<String> = items.by_ref().take(most).map(|item| item.to_string()).collect();
    let left = items.count();
    if left > 0 {
        shown.push(format!("… and {left} more"));
    }
    if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
}

/// Returns lines of text, indented. Past `most` the rest is counted.
fn lines(items: impl IntoIterator<Item = String>, most: usize, indent: &str, what: &str) -> String {
    let (mut text, mut left) = (String::new(), 0);
    for (index, item) in items.into_iter().enumerate() {
        if index < most {
            let _ = writeln!(text, "{indent}{item}");
        } else {
            left += 1;
        }
    }
    if left > 0 {
        let _ = writeln!(text, "{indent}… and {left} more {what}");
    }
    text
}

/// Returns the answer of the checker. Only errors of the rank and the pass that are asked for are included.
pub(crate) fn checked(problem: &Problem, schedule: &Schedule, selection: &Selection) -> String {
    match check(problem, schedule) {
        Ok(proof) => format!(
            "checked   proved of what is asked, not of what kernels do: {}, {}\n",
            counted(proof.operations, "operation"),
            counted(proof.pairs, "pair")
        ),
        Err(errors) => {
            let (shown, others): (Vec<_>, Vec<_>) =
                errors.iter().partition(|error| selection.takes(error, schedule));
            let mut text = format!("checked   WRONG: {}\n", counted(errors.len(), "error"));
            text += &lines(shown.iter().map(ToString::to_string), ERRORS_SHOWN, "  ", "errors");
            if !others.is_empty() {
                let _ = writeln!(text, "  {} of other ranks or passes", counted(others.len(), "error"));
            }
            text
        }
    }
}

/// Everything that is explained.
struct Explainer<'a> {
    problem: &'a Problem,
    schedule: &'a Schedule,
    selection: &'a Selection,
    owners: Owners,
}

/// Ranks that own keys of a sequence, with the positions.
type Owners = BTreeMap<usize, Vec<(usize, Line)>>;

fn owners(schedule: &Schedule) -> Owners {
    let mut owners = Owners::new();
    for placement in schedule.placements.iter().filter(|placement| placement.tensor == TensorName::K) {
        let Some(buffer) = schedule.buffers.get(placement.buffer.0) else { continue };
        for run in &placement.rows {
            let line = Line::new(run.piece.start, run.piece.step, run.local.len);
            owners.entry(run.sequence).or_default().push((buffer.rank, line));
        }
    }
    owners
}

impl Explainer<'_> {
    fn ranks(&self) -> Vec<usize> {
        let shown = |rank: &usize| self.selection.rank.is_none_or(|only| only == *rank);
        self.schedule.members.iter().copied().filter(shown).collect()
    }

    fn layout(&self) -> String {
        let legend = "a..b is without b; positions count real rows of a sequence; “sees”: is asked to see; “all”: every query sees every key";
        let placed = |rank: usize| [TensorName::Q, TensorName::K].map(|tensor| self.placed(rank, tensor));
        format!("layout    {legend}\n{}", layout(self.problem, &self.ranks(), placed))
    }

    fn placed(&self, rank: usize, tensor: TensorName) -> Vec<PlacedRun> {
        let placements = self.schedule.placements.iter();
        let mine = placements.filter(|placement| {
            let buffer = self.schedule.buffers.get(placement.buffer.0);
            placement.tensor == tensor && buffer.is_some_and(|buffer| buffer.rank == rank)
        });
        mine.flat_map(|placement| placement.rows.iter().copied()).collect()
    }

    fn programs(&self, launches: &BTreeMap<(usize, usize), TracedLaunch>) -> String {
        let ranks = self.ranks();
        let mut text = String::new();
        for &rank in ranks.iter().take(RANKS_SHOWN) {
            text += &self.program(rank, launches);
        }
        text
    }

    /// Returns the pass of an operation.
    fn pass(&self, rank: usize, operation: usize) -> Pass {
        pass_of(self.schedule, rank, operation)
    }

    fn program(&self, rank: usize, launches: &BTreeMap<(usize, usize), TracedLaunch>) -> String {
        let operations = self.schedule.ranks.get(rank).map_or(&[][..], |program| &program.operations);
        let shown = operations.iter().enumerate().filter(|(index, _)| {
            let listed = self.selection.operations || launches.contains_key(&(rank, *index));
            listed && self.selection.shows(self.pass(rank, *index))
        });
        let shown: Vec<(usize, &Operation)> = shown.collect();
        let mut text = format!("\nrank {rank}\n");
        if shown.is_empty() {
            text += "  launches nothing\n";
        }
        for (index, operation) in shown.iter().take(OPERATIONS_SHOWN) {
            let pass = if self.pass(rank, *index) == Pass::Forward { "forward" } else { "backward" };
            let work = match self.reads(&operation.work) {
                Some([q, k]) => {
                    let step = step(&operation.work).filter(|step| *step != Step::Only);
                    let step = step.map(|step| format!(", {step}")).unwrap_or_default();
                    format!("{pass} launch on {q} and {k}{step}")
                }
                None => operation::words(self.schedule, &operation.work),
            };
            let _ = writeln!(text, "  operation {index}, stream {}: {work}", operation.stream);
            if let Some(launch) = launches.get(&(rank, *index)) {
                text += &self.launch(launch, &operation.work);
            }
        }
        text + &lines(shown.iter().skip(OPERATIONS_SHOWN).map(|_| String::new()), 0, "  ", "operations")
    }

    /// Returns the names of a launch's q and k.
    fn reads(&self, work: &Work) -> Option<[String; 2]> {
        let [q, k] = buffers(work)?;
        Some([q, k].map(|id| name(self.schedule, id)))
    }

    fn launch(&self, launch: &TracedLaunch, work: &Work) -> String {
        let segments = segments(work);
        let mut text = String::new();
        for reading in launch.readings.iter().take(SEGMENTS_SHOWN) {
            if let Some(segment) = segments.get(reading.segment) {
                text += &self.reading(Sighting { problem: self.problem, segment, reading });
            }
        }
        let left = launch.readings.len().saturating_sub(SEGMENTS_SHOWN);
        if left > 0 {
            let _ = writeln!(text, "    … and {left} more segments");
        }
        text
    }

    /// Returns one segment in words: its queries, its keys, and who sees what. A segment without queries gives no
    /// text.
    fn reading(&self, sighting: Sighting) -> String {
        let Sighting { segment, reading, .. } = sighting;
        let mut text = String::new();
        for piece in queries(reading) {
            let lines = tidy(vec![piece.positions]);
            let query_rows = part(&segment.q, piece.at, piece.positions.len);
            let heads = self.heads(&piece.heads);
            let own = sighting.own_keys(&piece);
            let (positions, keys) = (listed(lines, RUNS_SHOWN), self.keys(&piece, segment, reading, &own));
            let _ = write!(
                text,
                "    sequence {}{heads}: queries {positions} (rows {}), {keys}",
                piece.sequence,
                rows(&[query_rows])
            );
            text += &sees(sighting, &piece, &own);
        }
        for Held { at, len, holds } in &reading.queries {
            if let HeldRows::Other(what) = holds {
                let _ = writeln!(text, "    rows {} of q hold {what}", rows(&[part(&segment.q, *at, *len)]));
            }
        }
        text
    }

    /// Returns the heads in words, where they are not all heads.
    fn heads(&self, heads: &Range<usize>) -> String {
        let all = *heads == (0..self.problem.heads.q);
        if all { String::new() } else { format!(", heads {}..{}", heads.start, heads.end) }
    }

    fn keys(&self, queries: &Queries, segment: &Segment, reading: &Reading, own: &[Line]) -> String {
        if reading.keys.is_empty() {
            return "no keys".to_owned();
        }
        if own.is_empty() {
            return format!("no keys of theirs (rows {})", rows(&segment.kv));
        }
        let owners = self.owners(queries.sequence, own);
        let word = if owners.len() == 1 { "rank" } else { "ranks" };
        format!(
            "keys {} of {word} {} (rows {})",
            listed(own, RUNS_SHOWN),
            listed(owners, RANKS_SHOWN),
            rows(&segment.kv)
        )
    }

    /// Returns the ranks that own any of these keys.
    fn owners(&self, sequence: usize, keys: &[Line]) -> BTreeSet<usize> {
        let of_sequence = self.owners.get(&sequence).map_or(&[][..], Vec::as_slice);
        let mine = of_sequence.iter().filter(|(_, line)| keys.iter().any(|keys| keys.meets(line)));
        mine.map(|(rank, _)| *rank).collect()
    }

    /// Returns for each pass the sum over all launches of all ranks, beside the mask.
    fn verdicts(&self, launches: &BTreeMap<(usize, usize), TracedLaunch>) -> String {
        let mut text = "\nall ranks together\n".to_owned();
        for (pass, word) in [(Pass::Forward, "forward"), (Pass::Backward, "backward")] {
            let asked = pass == Pass::Forward || self.problem.pass == Pass::Backward;
            if !asked || !self.selection.shows(pass) {
                continue;
            }
            let sightings: Vec<Sighting> = launches
                .iter()
                .filter(|((rank, operation), _)| self.pass(*rank, *operation) == pass)
                .flat_map(|((rank, operation), launch)| self.sightings(*rank, *operation, launch))
                .collect();
            match differences(self.problem, &sightings) {
                None => {
                    let _ = writeln!(text, "  {word}: too large to compare query by query");
                }
                Some(found) if found.is_empty() => {
                    let _ =
                        writeln!(text, "  {word}: every query is asked to see exactly what the mask shows");
                }
                Some(found) => {
                    let _ = writeln!(text, "  {word}: not what the mask shows");
                    text += &lines(found, DIFFERENCES_SHOWN, "    ", "differences");
                }
            }
        }
        text + "\n"
    }

    fn sightings<'b>(&'b self, rank: usize, operation: usize, launch: &'b TracedLaunch) -> Vec<Sighting<'b>> {
        let operations = self.schedule.ranks.get(rank).map_or(&[][..], |program| &program.operations);
        let segments = operations.get(operation).map_or(&[][..], |operation| segments(&operation.work));
        let of_reading = launch.readings.iter().filter_map(|reading| {
            let segment = segments.get(reading.segment)?;
            Some(Sighting { problem: self.problem, segment, reading })
        });
        of_reading.collect()
    }
}

/// Returns the sequences of a problem, and what each of these ranks owns of q and of k.
fn layout(problem: &Problem, ranks: &[usize], placed: impl Fn(usize) -> [Vec<PlacedRun>; 2]) -> String {
    let sequences = problem.sequences.iter().enumerate().map(|(index, both)| described(index, both));
    let mut text = lines(sequences, SEQUENCES_SHOWN, "  ", "sequences");
    for &rank in ranks.iter().take(RANKS_SHOWN) {
        text += &layout_of(rank, placed(rank));
    }
    text + &lines(ranks.iter().skip(RANKS_SHOWN).map(|_| String::new()), 0, "  ", "ranks")
}

fn layout_of(rank: usize, [q, kv]: [Vec<PlacedRun>; 2]) -> String {
    let mut text = format!("  rank {rank} owns\n");
    let sides = if q == kv { vec![("", q)] } else { vec![("q ", q), ("kv ", kv)] };
    for (side, runs) in sides {
        let mut by_sequence: BTreeMap<usize, Vec<PlacedRun>> = BTreeMap::new();
        runs.into_iter().for_each(|run| by_sequence.entry(run.sequence).or_default().push(run));
        let sequences = by_sequence.iter().map(|(index, runs)| {
            format!("{side}sequence {index}: {}", listed(runs.iter().map(owned), RUNS_SHOWN))
        });
        text += &lines(sequences, SEQUENCES_SHOWN, "    ", "sequences");
    }
    text
}

/// Returns a sequence's rows in the problem's own tensors, in words.
fn described(index: usize, both: &Sequence) -> String {
    let side = |run: &Run| format!("{} real of {} rows from row {}", run.len, run.span, run.offset);
    let (q, kv) = (side(&both.q), side(&both.kv));
    let step = if both.q.step > 1 { format!(", every {} rows", both.q.step) } else { String::new() };
    if q == kv {
        format!("sequence {index}: {q}{step}")
    } else {
        format!("sequence {index}: q {q}{step}; kv {kv}")
    }
}

/// Returns a run of a rank in words: its real positions and rows, and its padding.
fn owned(run: &PlacedRun) -> String {
    let Run { len, span, .. } = run.local;
    let real = Line::new(run.piece.start, run.piece.step, len);
    let padding =
        Run { offset: run.local.offset + run.local.step * len, len: span - len.min(span), ..run.local };
    let real = format!("positions {real} in rows {}", rows(&[run.local]));
    match (len, padding.len) {
        (_, 0) => real,
        (0, _) => format!("padding in rows {}", rows(&[padding])),
        _ => format!("{real}, padding in rows {}", rows(&[padding])),
    }
}

/// Returns `len` rows of a run, from row `at` on.
fn part(run: &Run, at: usize, len: usize) -> Run {
    Run { offset: run.offset + run.step * at, len, span: len, step: run.step }
}

/// Returns the pass of an operation.
fn pass_of(schedule: &Schedule, rank: usize, operation: usize) -> Pass {
    let begins = schedule.ranks.get(rank).and_then(|program| program.backward);
    if begins.is_some_and(|begins| begins <= operation) { Pass::Backward } else { Pass::Forward }
}

fn segments(work: &Work) -> &[Segment] {
    match work {
        Work::Attend(attend) => &attend.call.segments,
        Work::AttendBackward(attend) => &attend.call.segments,
        _ => &[],
    }
}

/// Returns the step of the algorithm that a launch is.
fn step(work: &Work) -> Option<Step> {
    match work {
        Work::Attend(attend) => Some(attend.step),
        Work::AttendBackward(attend) => Some(attend.step),
        _ => None,
    }
}

/// Returns the q and k of a launch.
fn buffers(work: &Work) -> Option<[BufferId; 2]> {
    match work {
        Work::Attend(attend) => Some([attend.q, attend.k]),
        Work::AttendBackward(attend) => Some([attend.q, attend.k]),
        _ => None,
    }
}

/// Returns which keys the queries of one piece see: the text after the line that names both.
fn sees(sighting: Sighting, piece: &Queries, own: &[Line]) -> String {
    let count = piece.positions.len;
    let sights = (0..count.min(QUERIES_SHOWN)).map(|index| sighting.sight(piece, index, own));
    let sights: Vec<Sight> = sights.collect();
    let left = count - sights.len();
    if left == 0 && sights.iter().all(|sight| sight.keys == own && sight.should.is_none()) {
        return ": all\n".to_owned();
    }
    let one_line = count <= SINGLE_MAX && sights.iter().all(|sight| sight.should.is_none());
    let found = groups(sights, count > SINGLE_MAX);
    let words = found.iter().map(|group| group.words(""));
    let indent = "      ";
    let mut text = if one_line {
        format!("\n{indent}{}\n", words.collect::<Vec<_>>().join("; "))
    } else {
        format!("\n{}", lines(words, GROUPS_SHOWN, indent, "groups of queries"))
    };
    if left > 0 {
        let _ = writeln!(text, "{indent}… and {left} more queries");
    }
    text
}
