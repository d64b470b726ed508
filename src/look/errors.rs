//! Picture 4: how far the results of a case lie from the exact answer, row by row and head by head, in parts of what an
//! honest subject of the case's precision may be off by.

use std::collections::BTreeSet;
use std::ops::Range;

use maud::{Markup, html};
use seamproof_judge::case::Case;
use seamproof_judge::finding::number as number_of;
use seamproof_judge::ladder::{ErrorMap, WorstLane};
use seamproof_judge::prose::counted;
use seamproof_oracle::sharding::RankLayout;

use super::mask;
use super::svg::{Drawing, WIDTH, block, legend, number, ratio, words};
use super::table::Table;

/// Largest numbers of cells side by side and one below the other, finest first. The coarsest is taken where the others
/// make too many cells.
const CELLS_MAX: [[usize; 2]; 4] = [[96, 16], [48, 16], [32, 8], [16, 4]];
/// Number of all cells that is too many.
const CELLS_ALL_MAX: usize = 3000;
/// Where cells begin, and their largest width and height.
const LEFT: f64 = 150.0;
const CELL: [f64; 2] = [26.0, 13.0];
/// How to read the picture.
pub(super) const LEAD: &str = "Error ÷ bound of each row and head, as the case runs: 1 is the largest error of an honest \
                               result of this precision.";
/// Largest number of strips of cells.
const STRIPS_MAX: usize = 24;

/// Rows of one sequence of a tensor, or statistics of whole heads.
struct Strip<'a> {
    map: &'a ErrorMap,
    sequence: Option<usize>,
    /// Positions that share a cell, and heads that do.
    side: [usize; 2],
    /// Cells in a row of them, and rows.
    size: [usize; 2],
    rows: Vec<&'a WorstLane>,
}

/// A cell: the worst of its rows, and how many are past their bounds.
struct Cell<'a> {
    at: [usize; 2],
    worst: &'a WorstLane,
    past: usize,
    positions: Range<usize>,
    heads: Range<usize>,
}

/// Returns the picture, and whether it leaves anything out.
pub(super) fn errors(case: &Case, layouts: &[RankLayout], maps: &[ErrorMap]) -> (Drawing, Vec<String>) {
    let entries = [
        ("hidden", "exact"),
        ("even", "up to half of the bound"),
        ("partly", "up to the bound"),
        ("missing", "past the bound"),
        ("twice", "past it without a measure: NaN, or none allowed"),
        ("line-seam", "border of ranks or chunks"),
        ("line-found", "the worst of a tensor"),
    ];
    let (key, mut y) = legend(&entries);
    let strips = strips(case, maps);
    let mut drawn = vec![key];
    for strip in strips.iter().take(STRIPS_MAX) {
        drawn.push(draw(strip, layouts, y));
        y += strip.height() + 12.0;
    }
    let mut notes: Vec<String> = maps.iter().filter_map(worst_of).collect();
    let left = strips.len().saturating_sub(STRIPS_MAX) + sequences_left(case, maps);
    if left > 0 {
        notes.push(format!(
            "{} are not drawn; the table counts all rows.",
            counted(left as u64, "more strip")
        ));
    }
    let drawing = Drawing {
        id: "errors",
        title: "Where the results are wrong".to_owned(),
        desc: format!(
            "Strips of cells for each tensor and sequence: positions from left to right, heads from top to bottom. {}",
            notes.join(" ")
        ),
        height: y,
        body: html! { @for one in drawn { (one) } },
    };
    (drawing, notes)
}

/// Returns the strips, as fine as their number allows.
fn strips<'a>(case: &Case, maps: &'a [ErrorMap]) -> Vec<Strip<'a>> {
    let mut strips = Vec::new();
    for most in CELLS_MAX {
        strips = strips_of(case, maps, most);
        let cells = |strip: &Strip<'_>| strip.size[0] * strip.size[1];
        if strips.iter().take(STRIPS_MAX).map(cells).sum::<usize>() <= CELLS_ALL_MAX {
            break;
        }
    }
    strips
}

fn strips_of<'a>(case: &Case, maps: &'a [ErrorMap], most: [usize; 2]) -> Vec<Strip<'a>> {
    let chosen: BTreeSet<usize> = mask::chosen(case).into_iter().collect();
    let of_map = |map: &'a ErrorMap| {
        let sequences: BTreeSet<Option<usize>> = map.rows.iter().map(|row| row.place.sequence).collect();
        let drawn = sequences.into_iter().filter(|sequence| sequence.is_none_or(|at| chosen.contains(&at)));
        drawn.map(|sequence| strip(map, sequence, most)).collect::<Vec<_>>()
    };
    maps.iter().flat_map(of_map).collect()
}

/// Returns the number of sequences of all tensors that have no strip.
fn sequences_left(case: &Case, maps: &[ErrorMap]) -> usize {
    let chosen = mask::chosen(case);
    let of_map = |map: &ErrorMap| {
        let all: BTreeSet<usize> = map.rows.iter().filter_map(|row| row.place.sequence).collect();
        all.iter().filter(|sequence| !chosen.contains(sequence)).count()
    };
    maps.iter().map(of_map).sum()
}

fn strip(map: &ErrorMap, sequence: Option<usize>, most: [usize; 2]) -> Strip<'_> {
    let rows: Vec<&WorstLane> = map.rows.iter().filter(|row| row.place.sequence == sequence).collect();
    let count = |of: fn(&WorstLane) -> Option<usize>| {
        rows.iter().filter_map(|row| of(row)).max().map_or(1, |largest| largest + 1)
    };
    let counts = [count(|row| row.place.row), count(|row| row.place.head)];
    let side = [0, 1].map(|axis| counts[axis].div_ceil(most[axis]).max(1));
    let size = [0, 1].map(|axis| counts[axis].div_ceil(side[axis]));
    Strip { map, sequence, side, size, rows }
}

impl Strip<'_> {
    fn width(&self) -> f64 {
        CELL[0].min((WIDTH - LEFT - 2.0) / self.size[0] as f64)
    }

    fn height(&self) -> f64 {
        self.size[1] as f64 * CELL[1]
    }

    fn cells(&self) -> Vec<Cell<'_>> {
        let mut cells: Vec<Option<Cell<'_>>> = (0..self.size[0] * self.size[1]).map(|_| None).collect();
        for row in &self.rows {
            let place = [row.place.row.unwrap_or(0), row.place.head.unwrap_or(0)];
            let at = [place[0] / self.side[0], place[1] / self.side[1]];
            let new =
                || Cell { at, worst: row, past: 0, positions: place[0]..place[0], heads: place[1]..place[1] };
            let cell = cells[at[1] * self.size[0] + at[0]].get_or_insert_with(new);
            cell.past += usize::from(row.ratio > 1.0);
            if row.ratio > cell.worst.ratio {
                cell.worst = row;
            }
            cell.positions = cell.positions.start.min(place[0])..cell.positions.end.max(place[0] + 1);
            cell.heads = cell.heads.start.min(place[1])..cell.heads.end.max(place[1] + 1);
        }
        cells.into_iter().flatten().collect()
    }

    fn name(&self) -> String {
        match self.sequence {
            Some(sequence) => format!("{}, sequence {sequence}", self.map.tensor),
            None => self.map.tensor.to_string(),
        }
    }
}

fn draw(strip: &Strip, layouts: &[RankLayout], y: f64) -> Markup {
    let (width, height) = (strip.width(), strip.height());
    let place = |at: [usize; 2]| [LEFT + at[0] as f64 * width, y + at[1] as f64 * CELL[1], width, CELL[1]];
    let worst = strip.map.worst();
    let cells = strip.cells();
    let is_worst = |cell: &&Cell<'_>| worst.is_some_and(|worst| std::ptr::eq(worst, cell.worst));
    let marked = cells.iter().find(is_worst).filter(|cell| cell.worst.ratio > 1.0);
    html! {
        (words("end", [LEFT - 8.0, y + height.min(CELL[1] * 2.0) / 2.0 + 4.0], &strip.name()))
        @for cell in &cells { (block(class(cell.worst.ratio), place(cell.at), &title(strip, cell))) }
        @for path in seams(strip, layouts, y) { path class="line-seam" d=(path) {} }
        @if let Some(cell) = marked {
            @let [x, top, width, height] = place(cell.at);
            path class="line-found" d=(format!(
                "M{} {}h{}v{}h{}z", number(x), number(top), number(width), number(height), number(-width)
            )) {}
        }
    }
}

fn class(ratio: f64) -> &'static str {
    match ratio {
        0.0 => "hidden",
        _ if ratio <= 0.5 => "even",
        _ if ratio <= 1.0 => "partly",
        _ if ratio.is_finite() => "missing",
        _ => "twice",
    }
}

fn title(strip: &Strip, cell: &Cell) -> String {
    let one = |range: &Range<usize>, [single, many]: [&str; 2]| match range.len() {
        1 => format!("{single} {}", range.start),
        _ => format!("{many} {}..{}", range.start, range.end),
    };
    let mut title = format!("{}, ", strip.name());
    if strip.sequence.is_some() {
        title += &format!("{}, ", one(&cell.positions, ["row", "rows"]));
    }
    title += &one(&cell.heads, ["head", "heads"]);
    if cell.positions.len() * cell.heads.len() > 1 {
        title += &format!(": {} past the bound; the worst", cell.past);
    }
    format!("{title}: {}", told(cell.worst))
}

/// Returns a value of a tensor with as many digits as a picture has room for.
fn value(value: f64) -> String {
    if value.abs() < 0.01 && value != 0.0 {
        format!("{value:.4e}")
    } else {
        number_of((value * 1e6).round() / 1e6)
    }
}

/// Returns an element in words.
pub(super) fn told(worst: &WorstLane) -> String {
    let [got, exact] = [worst.got, worst.exact].map(value);
    format!("error ÷ bound {}; got {got}, exact {exact}, bound {:.2e}", ratio(worst.ratio), worst.bound)
}

/// Returns the worst element of a tensor that is past its bound, in words.
fn worst_of(map: &ErrorMap) -> Option<String> {
    let worst = map.worst().filter(|worst| worst.ratio > 1.0)?;
    Some(format!("Worst of {}: {}, {}.", map.tensor, worst.place, told(worst)))
}

/// Returns the borders between what ranks hold, as paths across a strip.
fn seams(strip: &Strip, layouts: &[RankLayout], y: f64) -> Vec<String> {
    let Some(sequence) = strip.sequence.filter(|_| layouts.len() > 1) else { return Vec::new() };
    let side = strip.map.tensor.side();
    let pieces = mask::pieces(layouts, sequence, side).unwrap_or_default();
    let unit = strip.width() / strip.side[0] as f64;
    let path = |start: usize| {
        let x = LEFT + start as f64 * unit;
        format!("M{} {}v{}", number(x), number(y - 2.0), number(strip.height() + 4.0))
    };
    pieces.into_iter().filter(|(start, ..)| *start > 0).map(|(start, ..)| path(start)).collect()
}

/// Returns the numbers of the picture.
pub(super) fn numbers(maps: &[ErrorMap]) -> Table {
    let head = ["tensor", "rows × heads", "past the bound", "worst error ÷ bound", "place", "got", "exact"];
    let row = |map: &ErrorMap| {
        let worst = map.worst();
        let of = |text: &dyn Fn(&WorstLane) -> String| worst.map_or(String::new(), text);
        vec![
            map.tensor.to_string(),
            map.rows.len().to_string(),
            map.past().count().to_string(),
            of(&|worst| ratio(worst.ratio)),
            of(&|worst| worst.place.to_string()),
            of(&|worst| value(worst.got)),
            of(&|worst| value(worst.exact)),
        ]
    };
    Table {
        name: "Errors",
        head: head.map(String::from).to_vec(),
        rows: maps.iter().filter(|map| !map.rows.is_empty()).map(row).collect(),
        left: 0,
    }
}
