//! Picture 3: the schedule. Ranks are lanes, operations are bars, messages are arrows. Below the lanes, each launch has
//! its part of picture 2.

use std::collections::BTreeMap;
use std::ops::Range;

use maud::{Markup, html};
use seamproof_judge::prose::counted;
use seamproof_oracle::{Pass, Problem};
use seamproof_simulator::check::{Action, CheckError, OperationId};
use seamproof_simulator::schedule::Schedule;

use super::grid::Grid;
use super::svg::{Drawing, WIDTH, block, label, legend, number, told, words};
use super::table::Table;
use super::timeline::{Bar, Kind, Timeline, timeline};
use crate::explain::{Followed, operation_words};

/// Largest number of ranks that have a lane.
pub(super) const RANKS_DRAWN: usize = 16;
/// Largest number of bars.
const BARS_MAX: usize = 2400;
/// Largest number of ranks whose launches have parts, and of launches of a rank.
const PARTS_MAX: [usize; 2] = [8, 10];
/// Largest number of tiles on each side of a part.
const PART_TILES: usize = 24;

/// Where lanes begin.
const LEFT: f64 = 84.0;
/// Height of a stream's lane, and of the bar in it.
const STREAM: [f64; 2] = [18.0, 14.0];
/// Width of a step of time at least and at most.
const STEP: [f64; 2] = [2.0, 16.0];
/// Side of a part, and the distance from one to the next.
const PART: [f64; 2] = [54.0, 66.0];

/// A schedule in time, as it is drawn.
pub(super) struct Lanes<'a> {
    schedule: &'a Schedule,
    timeline: Timeline,
    /// Height of each rank's and stream's lane, from the top of the lanes.
    places: BTreeMap<(usize, usize), f64>,
    height: f64,
    /// Width of a step of time, and the number of steps that are drawn.
    step: f64,
    steps: usize,
    /// Operations, by rank and index, that the checker complains of, each with its words.
    marked: BTreeMap<(usize, usize), String>,
}

/// Returns the operations that errors of the checker are about, each with the first of them in words.
fn marked(errors: &[CheckError]) -> BTreeMap<(usize, usize), String> {
    let mut marked = BTreeMap::new();
    for error in errors {
        let own = error.about().and_then(|(rank, operation)| Some((rank, operation?)));
        let others = match error {
            CheckError::Race { first: at, .. } | CheckError::Disagree { peer: at, .. } => {
                Some((at.rank, at.operation))
            }
            CheckError::Cover { launch: Some(at), .. } => Some((at.rank, at.operation)),
            _ => None,
        };
        for at in own.into_iter().chain(others) {
            marked.entry(at).or_insert_with(|| error.to_string());
        }
    }
    marked
}

/// Returns the lanes of a schedule, whose operations happen in this order, but for those that are stuck, with what the
/// checker says against it.
pub(super) fn lanes<'a>(
    schedule: &'a Schedule,
    (actions, stuck): (&[Action], &[OperationId]),
    errors: &[CheckError],
) -> Lanes<'a> {
    let timeline = timeline(schedule, actions, stuck);
    let drawn = schedule.members.iter().take(RANKS_DRAWN);
    let (mut places, mut height) = (BTreeMap::new(), 0.0);
    for &rank in drawn {
        let operations = schedule.ranks.get(rank).map_or(&[][..], |program| &program.operations);
        let mut streams: Vec<usize> = operations.iter().map(|operation| operation.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        for stream in streams {
            places.insert((rank, stream), height);
            height += STREAM[0];
        }
        height += 8.0;
    }
    let room = WIDTH - LEFT - 2.0;
    let step = (room / timeline.end.max(1) as f64).clamp(STEP[0], STEP[1]);
    let mut steps = ((room / step) as usize).min(timeline.end);
    let inside = |bar: &&Bar| places.contains_key(&(bar.at.rank, bar.at.stream));
    if let Some(first_left) = timeline.bars.iter().filter(inside).nth(BARS_MAX) {
        steps = steps.min(first_left.start);
    }
    let step = (room / steps.max(1) as f64).clamp(STEP[0], STEP[1]);
    Lanes { schedule, timeline, places, height, step, steps, marked: marked(errors) }
}

impl Lanes<'_> {
    fn bars(&self) -> impl Iterator<Item = &Bar> {
        let drawn = |bar: &&Bar| bar.end <= self.steps && self.place(bar.at).is_some();
        self.timeline.bars.iter().filter(drawn)
    }

    fn place(&self, at: OperationId) -> Option<f64> {
        self.places.get(&(at.rank, at.stream)).copied()
    }

    fn x(&self, time: usize) -> f64 {
        LEFT + time as f64 * self.step
    }

    /// Returns the lanes from a height on.
    fn draw(&self, top: f64, parts: &Parts) -> Markup {
        let bars: Vec<Markup> = self.bars().map(|bar| self.bar(bar, top, parts)).collect();
        let end = self.x(self.steps);
        html! {
            @for ((rank, stream), y) in &self.places {
                @let y = top + y;
                @if self.places.range((*rank, 0)..).next().is_some_and(|(first, _)| first == &(*rank, *stream)) {
                    (words("strong", [0.0, y + 11.0], &format!("rank {rank}")))
                }
                (words("faint end", [LEFT - 6.0, y + 11.0], &format!("s{stream}")))
                path class="lane" d=(format!("M{} {}H{}", number(LEFT), number(y + STREAM[1] + 2.0), number(end))) {}
            }
            @for bar in bars { (bar) }
            @for bar in self.bars() { (self.mark(bar, top)) }
            @for (from, to, end) in &self.timeline.arrows {
                @if let Some(arrow) = self.arrow(*from, *to, *end, top) { (arrow) }
            }
            @for rank in &self.schedule.members {
                @if let Some(mark) = self.backward(*rank, top) { (mark) }
            }
        }
    }

    fn bar(&self, bar: &Bar, top: f64, parts: &Parts) -> Markup {
        let Some(y) = self.place(bar.at) else { return html! {} };
        let y = top + y;
        let class = match bar.kind {
            Kind::Launch => "launch",
            Kind::Message => "message",
            Kind::Other => "other",
        };
        let [waits, start, end] = [bar.waits, bar.start, bar.end].map(|time| self.x(time));
        let what = operation_words(self.schedule, bar.at);
        let when = format!("steps {}..{}", bar.start, bar.end);
        let title = format!(
            "rank {}, operation {}, stream {}: {what}; {when}",
            bar.at.rank, bar.at.operation, bar.at.stream
        );
        let drawn = block(class, [start, y, end - start, STREAM[1]], &title);
        let number = parts
            .number(bar.at)
            .and_then(|index| label("on", [start, y + 11.0], end - start, &(index + 1).to_string()));
        html! {
            @if bar.start > bar.waits {
                (block("wait", [waits, y + 3.0, start - waits, STREAM[1] - 6.0], &format!("waits for {} steps", bar.start - bar.waits)))
            }
            @if parts.number(bar.at).is_some() {
                a href=(format!("#{}", part_id(bar.at))) { (drawn) @if let Some(number) = number { (number) } }
            } @else { (drawn) }
        }
    }

    /// Returns the mark of a bar that the checker complains of.
    fn mark(&self, bar: &Bar, top: f64) -> Markup {
        let place = self.place(bar.at).zip(self.marked.get(&(bar.at.rank, bar.at.operation)));
        let Some((y, what)) = place else { return html! {} };
        let (x, width) = (self.x(bar.start), (bar.end - bar.start) as f64 * self.step);
        let y = top + y;
        let frame = format!(
            "M{} {}h{}v{}h{}z",
            number(x - 1.0),
            number(y - 1.5),
            number(width + 2.0),
            number(STREAM[1] + 3.0),
            number(-width - 2.0)
        );
        html! {
            g {
                title { (told(&format!("the checker: {what}"))) }
                path class="line-found" d=(frame) {}
                text class="wrong middle" x=(number(x + width / 2.0)) y=(number(y + 11.0)) { "✕" }
            }
        }
    }

    fn arrow(&self, from: OperationId, to: OperationId, end: usize, top: f64) -> Option<Markup> {
        let (y, other) = (self.place(from)?, self.place(to)?);
        if end > self.steps || from.rank == to.rank {
            return None;
        }
        let half = STREAM[1] / 2.0;
        let [start, x] = [end - Kind::Message.steps(), end].map(|time| self.x(time));
        let [y, other] = [top + y + half, top + other + half];
        let d = format!("M{} {}L{} {}", number(start + 1.0), number(y), number(x - 1.0), number(other));
        Some(html! { path class="line-arrow" marker-end="url(#arrow)" d=(d) {} })
    }

    /// Returns the mark at which a rank's backward begins.
    fn backward(&self, rank: usize, top: f64) -> Option<Markup> {
        let begin = self.schedule.ranks.get(rank)?.backward?;
        let of_backward = |bar: &&Bar| bar.at.rank == rank && bar.at.operation >= begin;
        let first = self.bars().filter(of_backward).map(|bar| bar.start).min()?;
        let places = || self.places.range((rank, 0)..(rank + 1, 0)).map(|(_, y)| *y);
        let (from, to) = (places().next()?, places().next_back()? + STREAM[1]);
        let d = format!("M{} {}V{}", number(self.x(first)), number(top + from - 2.0), number(top + to + 2.0));
        Some(html! { path class="line-pass" d=(d) { title { "rank " (rank) ": the backward begins" } } })
    }
}

/// The parts of picture 2 that launches cover, in one sequence.
pub(super) struct Parts {
    sequence: usize,
    lengths: [usize; 2],
    mask: String,
    launches: Vec<Part>,
    left: usize,
}

struct Part {
    at: OperationId,
    /// Number among the rank's launches, from 0.
    index: usize,
    words: String,
    pairs: u64,
    path: String,
}

impl Parts {
    /// Returns the parts of the launches in a sequence.
    pub(super) fn of(problem: &Problem, followed: &Followed, sequence: usize) -> Parts {
        let both = problem.sequences.get(sequence);
        let lengths = both.map_or([0, 0], |both| [both.q.len, both.kv.len]);
        let [queries, keys] = lengths;
        let mut mask = Grid::new(queries, keys, PART_TILES);
        mask.show(&problem.mask.sight(queries, keys));
        let launches = followed.launches();
        let (mut parts, mut left) = (Vec::new(), 0);
        let mut index = BTreeMap::new();
        for (at, words) in launches {
            let number = index.entry(at.rank).or_insert(0_usize);
            let own = *number;
            *number += 1;
            if at.rank >= PARTS_MAX[0] || own >= PARTS_MAX[1] {
                left += 1;
                continue;
            }
            let mut grid = Grid::new(queries, keys, PART_TILES);
            for (query, keys) in followed.shown(at, sequence) {
                grid.count(query, &keys, |tile| &mut tile.visible);
            }
            let pairs = grid.total().visible;
            parts.push(Part { at, index: own, words, pairs, path: path(&grid, lengths) });
        }
        Parts { sequence, lengths, mask: path(&mask, lengths), launches: parts, left }
    }

    /// Returns no parts.
    pub(super) fn none() -> Parts {
        Parts { sequence: 0, lengths: [0, 0], mask: String::new(), launches: Vec::new(), left: 0 }
    }

    fn number(&self, at: OperationId) -> Option<usize> {
        self.launches.iter().find(|part| part.at == at).map(|part| part.index)
    }

    /// Returns the parts from a height on, and their height.
    fn draw(&self, top: f64) -> (Markup, f64) {
        if self.launches.is_empty() {
            return (html! {}, 0.0);
        }
        let mut ranks: Vec<usize> = self.launches.iter().map(|part| part.at.rank).collect();
        ranks.dedup();
        let title = format!(
            "Pairs of each launch in sequence {} (dark), in what the mask shows (pale): its number in the bars, f or b for the pass, pairs",
            self.sequence
        );
        let first = top + 30.0;
        let row = |rank: usize| ranks.iter().position(|own| *own == rank).unwrap_or_default() as f64;
        let pitch = PART[1] + 14.0;
        let [queries, keys] = self.lengths.map(|length| length as f64);
        let longer = queries.max(keys).max(1.0);
        let [width, height] = [keys, queries].map(|length| (length / longer * PART[0]).max(1.0));
        let drawn = html! {
            (words("strong", [0.0, top + 12.0], &title))
            @for rank in &ranks { (words("strong", [0.0, first + row(*rank) * pitch + 22.0], &format!("rank {rank}"))) }
            @for part in &self.launches {
                @let place = [LEFT + part.index as f64 * PART[1], first + row(part.at.rank) * pitch + 12.0];
                g id=(part_id(part.at)) transform=(format!("translate({} {})", number(place[0]), number(place[1]))) {
                    title { (told(&part.title())) }
                    (words("", [0.0, -3.0], &part.caption()))
                    rect class="mini-hidden" width=(number(width)) height=(number(height)) {}
                    path class="mini-band" d=(self.mask) {}
                    path class="mini-part" d=(part.path) {}
                }
            }
        };
        (drawn, 30.0 + ranks.len() as f64 * pitch)
    }
}

impl Part {
    fn title(&self) -> String {
        let OperationId { rank, operation, .. } = self.at;
        format!("rank {rank}, operation {operation}: {}: {}", self.words, counted(self.pairs, "pair"))
    }

    /// Returns the number of the launch, with a letter for its pass.
    fn caption(&self) -> String {
        let letter = if self.words.starts_with("forward") { "f" } else { "b" };
        format!("{} {letter}: {}", self.index + 1, self.pairs)
    }
}

fn part_id(at: OperationId) -> String {
    format!("launch-{}-{}", at.rank, at.operation)
}

/// Returns the tiles of a grid that hold any visible pair as one path.
fn path(grid: &Grid, lengths: [usize; 2]) -> String {
    let unit = PART[0] / lengths[0].max(lengths[1]).max(1) as f64;
    let mut path = String::new();
    for row in 0..grid.rows() {
        let is_shown = |column: usize| grid.tile(row, column).visible > 0;
        let mut column = 0;
        while column < grid.columns() {
            let end = (column..grid.columns()).find(|next| is_shown(*next) != is_shown(column));
            let end = end.unwrap_or(grid.columns());
            if is_shown(column) {
                path += &rectangle(
                    &grid.queries_of(row),
                    &(grid.keys_of(column).start..grid.keys_of(end - 1).end),
                    unit,
                );
            }
            column = end;
        }
    }
    path
}

fn rectangle(queries: &Range<usize>, keys: &Range<usize>, unit: f64) -> String {
    let [x, y, width, height] =
        [keys.start, queries.start, keys.len(), queries.len()].map(|count| number(count as f64 * unit));
    format!("M{x} {y}h{width}v{height}h-{width}z")
}

/// Returns the picture.
pub(super) fn schedule(lanes: &Lanes, parts: &Parts) -> Drawing {
    let entries = [
        ("launch", "launch, with its number"),
        ("message", "message or collective"),
        ("other", "merge, copy, fill …"),
        ("wait", "wait"),
        ("line-arrow", "message"),
        ("line-pass", "the backward begins"),
        ("line-found", "✕: the checker complains of it"),
    ];
    let (key, top) = legend(&entries);
    let drawn = lanes.draw(top + 4.0, parts);
    let mut y = top + 4.0 + lanes.height;
    let time = format!("time in steps: {} of {}", lanes.steps, lanes.timeline.end);
    let axis = words("faint", [LEFT, y + 10.0], &format!("0 → {time}"));
    y += 18.0;
    let left = lanes.schedule.members.len().saturating_sub(RANKS_DRAWN);
    let more = (left > 0).then(|| {
        let text = format!("… and {} that are not drawn", counted(left, "more rank"));
        words("faint", [0.0, y + 12.0], &text)
    });
    y += if left > 0 { 20.0 } else { 0.0 };
    let (of_launches, height) = parts.draw(y + 10.0);
    Drawing {
        id: "schedule",
        title: "The schedule".to_owned(),
        desc: format!(
            "A lane for each stream of {}, with {} in {} of time, and {}. Every bar has a title that says what it does.",
            counted(lanes.schedule.members.len(), "rank"),
            counted(lanes.timeline.bars.len(), "operation"),
            counted(lanes.timeline.end, "step"),
            counted(lanes.timeline.arrows.len(), "message"),
        ),
        height: y + height + 14.0,
        body: html! { (key) (drawn) (axis) @if let Some(more) = more { (more) } (of_launches) },
    }
}

/// Returns the numbers of each rank, and what the picture leaves out in words.
pub(super) fn numbers(lanes: &Lanes, parts: &Parts) -> (Table, Vec<String>) {
    let head = [
        "rank",
        "operations",
        "launches",
        "messages and collectives",
        "others",
        "busy steps",
        "waiting steps",
        "end",
    ];
    let of_rank = |&rank: &usize| {
        let bars = || lanes.timeline.bars.iter().filter(move |bar| bar.at.rank == rank);
        let count = |kind: Kind| bars().filter(|bar| bar.kind == kind).count();
        let operations = lanes.schedule.ranks[rank].operations.len();
        let busy: usize = bars().map(|bar| bar.end - bar.start).sum();
        let waiting: usize = bars().map(|bar| bar.start - bar.waits).sum();
        let end = bars().map(|bar| bar.end).max().unwrap_or_default();
        let counts = [count(Kind::Launch), count(Kind::Message), count(Kind::Other), busy, waiting, end];
        [rank, operations].into_iter().chain(counts).map(|count| count.to_string()).collect()
    };
    let members = &lanes.schedule.members;
    let listed = members.len().min(super::layout::RANKS_DRAWN);
    let table = Table {
        name: "Operations",
        head: head.map(String::from).to_vec(),
        rows: members[..listed].iter().map(of_rank).collect(),
        left: members.len() - listed,
    };
    let mut notes = vec![format!(
        "Time is counted and not measured: a launch takes {} steps, a message or a collective {}, anything else {}. \
         Records of events and waits for them take none.",
        Kind::Launch.steps(),
        Kind::Message.steps(),
        Kind::Other.steps()
    )];
    if lanes.steps < lanes.timeline.end {
        notes.push(format!("Drawn are the first {} of {} steps.", lanes.steps, lanes.timeline.end));
    }
    if parts.left > 0 {
        let further = if parts.left == 1 {
            "1 further launch".to_owned()
        } else {
            format!("{} further launches", parts.left)
        };
        notes.push(format!("Without a picture of their own: {further}."));
    }
    (table, notes)
}

/// Returns in words which passes the problem has.
pub(super) fn passes(problem: &Problem) -> &'static str {
    match problem.pass {
        Pass::Forward => "forward",
        Pass::Backward => "forward and backward",
    }
}
