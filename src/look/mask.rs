//! Picture 2: who sees whom. For a sequence, the pairs of query and key that the mask shows, those that the launches
//! are asked to show, those that the subject was seen to show, and where they differ.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

use maud::{Markup, html};
use seamproof_judge::case::Case;
use seamproof_judge::ladder::SeenRow;
use seamproof_judge::prose::counted;
use seamproof_oracle::sharding::RankLayout;
use seamproof_oracle::{Pass, Problem, Side};

use super::grid::{Grid, Tile};
use super::svg::{Drawing, WIDTH, block, label, legend, number, words};
use super::table::Table;
use crate::explain::{BandSums, Followed, Sum, seen_differences};

/// How to read the picture, where the subject has run.
pub(super) const LEAD: &str = "The pairs of query and key that the mask shows, beside those that the launches are asked to \
                               show, and those that the subject saw where these are others.";
/// Largest number of sequences that are drawn.
const SEQUENCES_DRAWN: usize = 4;
/// Largest number of tiles on each side of a matrix.
const TILES_MAX: usize = 48;
/// Largest number of borders that are drawn across a matrix.
const SEAMS_MAX: usize = 64;
/// Longer side of a matrix, and the shorter side at least.
const SIZE: [f64; 2] = [300.0, 14.0];
/// Largest side of a pair.
const PAIR_MAX: f64 = 32.0;
/// Room around a matrix: on its left and above it.
const ROOM: [f64; 2] = [64.0, 48.0];
/// Largest number of differences that are told in words, of each source.
const DIFFERENCES_TOLD: usize = 4;
/// Largest number of different rows of others that are named.
const FOREIGN_NAMED: usize = 8;

/// The pairs of a sequence.
pub(super) struct Matrix {
    pub(super) sequence: usize,
    lengths: [usize; 2],
    grid: Grid,
    /// What was compared with the mask; `None` where it is not known what the launches show.
    compared: Option<Compared>,
}

/// Source of pairs beside the mask.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    /// What is asked of the launches of a pass.
    Launches(Pass),
    /// What the subject saw, decoded from its results.
    Subject,
}

impl Of {
    fn name(self) -> &'static str {
        match self {
            Of::Launches(Pass::Forward) => "forward",
            Of::Launches(Pass::Backward) => "backward",
            Of::Subject => "as the subject saw it",
        }
    }
}

/// What was compared with the mask.
struct Compared {
    of: Of,
    /// Heads in words, where they are not all.
    heads: String,
    /// Rows that are not of the sequence's keys, in words, and the number of queries that see any.
    foreign: BTreeSet<String>,
    strangers: usize,
}

/// Returns in words where the launches show, and where the subject saw, something else than the mask shows. What both
/// do is said of the launches alone.
pub(super) fn differences(problem: &Problem, followed: Option<&Followed>, seen: &[SeenRow]) -> Vec<String> {
    let passes = match problem.pass {
        Pass::Forward => &[Pass::Forward][..],
        Pass::Backward => &[Pass::Forward, Pass::Backward],
    };
    let asked = passes.iter().flat_map(|&pass| {
        let all = followed.map(|followed| followed.differences(pass)).unwrap_or_default();
        listed(all, &format!("The {} is asked wrongly", Of::Launches(pass).name()))
    });
    let mut notes: Vec<String> = asked.collect();
    if notes.is_empty() {
        notes.extend(listed(seen_differences(problem, seen), "As the subject saw it"));
    }
    notes
}

/// Returns the first of some differences, with what they are of.
fn listed(all: Vec<String>, of: &str) -> Vec<String> {
    let left = all.len().saturating_sub(DIFFERENCES_TOLD);
    let mut told: Vec<String> =
        all.into_iter().take(DIFFERENCES_TOLD).map(|one| format!("{of}: {one}.")).collect();
    if left > 0 {
        told.push(format!("… and {left} more like these."));
    }
    told
}

/// Returns the sequences in the order of what they tell: that of the finding, and then those with most pairs.
fn by_weight(case: &Case) -> Vec<usize> {
    let problem = &case.problem;
    let found = case.found.as_ref().and_then(|found| found.finding.place.sequence);
    let size = |index: usize| {
        let both = &problem.sequences[index];
        both.q.len as u64 * both.kv.len as u64
    };
    let mut sequences: Vec<usize> = (0..problem.sequences.len()).collect();
    sequences.sort_by_key(|&index| (found != Some(index), Reverse(size(index)), index));
    sequences
}

/// Returns the sequence that tells most.
pub(super) fn weightiest(case: &Case) -> Option<usize> {
    by_weight(case).first().copied()
}

/// Returns the sequences to draw, in the problem's order.
pub(super) fn chosen(case: &Case) -> Vec<usize> {
    let mut sequences = by_weight(case);
    sequences.truncate(SEQUENCES_DRAWN);
    sequences.sort_unstable();
    sequences
}

/// Returns the matrices of the sequences that are drawn: what the mask shows, compared with what is asked of the
/// launches of each pass, and with what the subject saw. A source that shows the same pairs as an earlier one has no
/// matrices of its own.
pub(super) fn matrices(case: &Case, followed: Option<&Followed>, seen: &[SeenRow]) -> Vec<Matrix> {
    matrices_in(case, followed, seen, TILES_MAX)
}

/// Returns the same, of at most `most` tiles on each side.
pub(super) fn matrices_in(
    case: &Case,
    followed: Option<&Followed>,
    seen: &[SeenRow],
    most: usize,
) -> Vec<Matrix> {
    let (problem, sequences) = (&case.problem, chosen(case));
    let passes = match problem.pass {
        Pass::Forward => &[Pass::Forward][..],
        Pass::Backward => &[Pass::Forward, Pass::Backward],
    };
    let mut all: Vec<Matrix> = Vec::new();
    for &pass in passes {
        let sums = followed.and_then(|followed| followed.sums(pass, &sequences));
        let Some(sums) = sums else { continue };
        for (&sequence, bands) in sequences.iter().zip(&sums) {
            put(&mut all, compared((problem, most), sequence, Of::Launches(pass), bands));
        }
    }
    for &sequence in sequences.iter().filter(|_| !seen.is_empty()) {
        let matrix = compared((problem, most), sequence, Of::Subject, &bands_of(problem, sequence, seen));
        // That a subject saw what the mask shows says nothing more beside launches that are asked for something else.
        if matrix.is_wrong() || !matrix.is_clear() || !all.iter().any(|other| other.sequence == sequence) {
            put(&mut all, matrix);
        }
    }
    for &sequence in &sequences {
        if !all.iter().any(|matrix| matrix.sequence == sequence) {
            all.push(defined(problem, sequence, most));
        }
    }
    all
}

/// Adds a matrix that shows other pairs than those of its sequence before.
fn put(all: &mut Vec<Matrix>, matrix: Matrix) {
    if !all.iter().any(|other| other.sequence == matrix.sequence && other.same_pairs(&matrix)) {
        all.push(matrix);
    }
}

/// Returns what each head of a sequence saw.
fn bands_of(problem: &Problem, sequence: usize, seen: &[SeenRow]) -> Vec<BandSums> {
    let both = &problem.sequences[sequence];
    let of_head = |head: usize| {
        let mut right = true;
        let of_row = |row: &SeenRow| {
            let visible = problem.mask.visible(row.query, both.q.len, both.kv.len);
            let should: Vec<Range<usize>> = visible.parts().collect();
            right &= row.keys.as_ref() == Some(&should);
            let is_clear = row.keys.is_some();
            let seen = row.keys.clone().unwrap_or(should);
            Sum { query: row.query, seen, twice: Vec::new(), foreign: Vec::new(), is_clear }
        };
        let own = seen.iter().filter(|row| (row.sequence, row.head) == (sequence, head));
        let queries = own.map(of_row).collect();
        BandSums { heads: head..head + 1, right, queries }
    };
    (0..problem.heads.q).map(of_head).collect()
}

fn defined(problem: &Problem, sequence: usize, most: usize) -> Matrix {
    let both = &problem.sequences[sequence];
    let lengths = [both.q.len, both.kv.len];
    let mut grid = Grid::new(lengths[0], lengths[1], most);
    grid.show(&problem.mask.sight(lengths[0], lengths[1]));
    Matrix { sequence, lengths, grid, compared: None }
}

/// Returns a matrix with the differences of the first band of heads that has any.
fn compared((problem, most): (&Problem, usize), sequence: usize, of: Of, bands: &[BandSums]) -> Matrix {
    let mut matrix = defined(problem, sequence, most);
    let wrong = bands.iter().filter(|band| !band.right).count();
    let Some(band) = bands.iter().find(|band| !band.right).or(bands.first()) else { return matrix };
    let all = band.heads == (0..problem.heads.q);
    let mut heads =
        if all { String::new() } else { format!("heads {}..{}", band.heads.start, band.heads.end) };
    if wrong > 1 {
        let others = wrong - 1;
        heads += &format!(
            "; {others} other {} too",
            if others == 1 { "band of heads differs" } else { "bands of heads differ" }
        );
    }
    let mut compared = Compared { of, heads, foreign: BTreeSet::new(), strangers: 0 };
    let [queries, keys] = matrix.lengths;
    for sum in &band.queries {
        let visible: Vec<Range<usize>> = problem.mask.visible(sum.query, queries, keys).parts().collect();
        for missing in visible.iter().flat_map(|keys| without(keys, &sum.seen)) {
            matrix.grid.count(sum.query, &missing, |tile| &mut tile.missing);
        }
        for extra in sum.seen.iter().flat_map(|keys| without(keys, &visible)) {
            matrix.grid.count(sum.query, &extra, |tile| &mut tile.extra);
        }
        for twice in &sum.twice {
            matrix.grid.count(sum.query, twice, |tile| &mut tile.twice);
        }
        if !sum.is_clear {
            matrix.grid.count(sum.query, &(0..keys), |tile| &mut tile.unclear);
        }
        compared.strangers += usize::from(!sum.foreign.is_empty());
        let room = FOREIGN_NAMED.saturating_sub(compared.foreign.len());
        compared.foreign.extend(sum.foreign.iter().take(room).cloned());
    }
    matrix.compared = Some(compared);
    matrix
}

/// Returns the parts of a range that lie in none of some others, which are in order.
fn without(range: &Range<usize>, others: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut at = range.start;
    let before = others.iter().map(|other| {
        let part = at..other.start.min(range.end);
        at = at.max(other.end);
        part
    });
    let mut parts: Vec<Range<usize>> = before.collect();
    parts.push(at..range.end);
    parts.retain(|part| !part.is_empty());
    parts
}

impl Matrix {
    fn same_pairs(&self, other: &Matrix) -> bool {
        let strangers = |matrix: &Matrix| matrix.compared.as_ref().map(|of| of.foreign.clone());
        self.grid == other.grid && strangers(self) == strangers(other)
    }

    fn total(&self) -> Tile {
        self.grid.total()
    }

    /// Whether the launches are asked for something else than the mask shows, or the subject saw something else.
    pub(super) fn is_wrong(&self) -> bool {
        let Tile { missing, extra, twice, .. } = self.total();
        missing + extra + twice > 0 || self.compared.as_ref().is_some_and(|of| of.strangers > 0)
    }

    /// Whether it is known of each query what it saw.
    fn is_clear(&self) -> bool {
        self.total().unclear == 0
    }

    /// Returns what it shows, in words.
    pub(super) fn title(&self) -> String {
        let whose = self.compared.as_ref().map_or("by definition", |compared| compared.of.name());
        format!("sequence {}, {whose}: {} × {}", self.sequence, self.lengths[0], self.lengths[1])
    }

    /// Returns the number of tiles.
    pub(super) fn tiles(&self) -> usize {
        self.grid.rows() * self.grid.columns()
    }

    /// Returns the numbers of rows and of columns of tiles.
    pub(super) fn shape(&self) -> [usize; 2] {
        [self.grid.rows(), self.grid.columns()]
    }

    /// Returns the first query of a row of tiles.
    pub(super) fn first_query(&self, row: usize) -> usize {
        self.grid.queries_of(row).start
    }

    /// Returns the first key of a column of tiles.
    pub(super) fn first_key(&self, column: usize) -> usize {
        self.grid.keys_of(column).start
    }

    /// Returns what a tile shows, as the class of its fill; `None` of a hidden one.
    pub(super) fn class(&self, row: usize, column: usize) -> Option<&'static str> {
        class(self.grid.tile(row, column), self.grid.area(row, column))
    }

    /// Returns the width and the height.
    fn size(&self) -> [f64; 2] {
        let [queries, keys] = self.lengths.map(|length| length.max(1) as f64);
        let unit = (SIZE[0] / queries.max(keys)).min(PAIR_MAX);
        [keys, queries].map(|length| (length * unit).max(SIZE[1]))
    }
}

/// Returns the picture.
pub(super) fn mask(case: &Case, layouts: &[RankLayout], matrices: &[Matrix]) -> Drawing {
    let entries = [
        ("visible", "visible pairs"),
        ("partly", "some of a tile’s pairs"),
        ("hidden", "not visible"),
        ("missing", "missing: visible, not shown"),
        ("extra", "too many: shown, not visible"),
        ("twice", "shown more than once"),
        ("several", "nobody knows what was seen"),
        ("line-seam", "border of ranks or chunks"),
        ("line-found", "row of the finding"),
    ];
    let (key, top) = legend(&entries);
    let mut y = top;
    let mut drawn = vec![key];
    for pair in matrices.chunks(2) {
        let height = pair.iter().map(|matrix| matrix.size()[1]).fold(0.0, f64::max);
        for (column, matrix) in pair.iter().enumerate() {
            let place = [column as f64 * WIDTH / 2.0, y];
            drawn.push(draw(case, layouts, matrix, place));
        }
        y += ROOM[1] + height + 22.0;
    }
    if matrices.is_empty() {
        drawn.push(words("faint", [0.0, y + 12.0], "The problem has no sequence."));
        y += 20.0;
    }
    let total: Vec<String> = matrices.iter().map(summary).collect();
    Drawing {
        id: "mask",
        title: "Who sees whom".to_owned(),
        desc: format!(
            "Matrices of queries, from top to bottom, and keys, from left to right. {}",
            total.join(". ")
        ),
        height: y,
        body: html! { @for one in drawn { (one) } },
    }
}

/// Returns a matrix in words.
fn summary(matrix: &Matrix) -> String {
    let [queries, keys] = matrix.lengths;
    let Tile { visible, missing, extra, twice, .. } = matrix.total();
    let mut text = format!(
        "Sequence {}: {} × {}, {}",
        matrix.sequence,
        if queries == 1 { "1 query".to_owned() } else { format!("{queries} queries") },
        counted(keys, "key"),
        counted(visible, "visible pair"),
    );
    if let Some(Compared { of, .. }) = matrix.compared {
        let rightly = if of == Of::Subject { "as the subject saw them" } else { "each asked for once" };
        text += &match (missing, extra, twice) {
            (0, 0, 0) => format!(", {rightly}"),
            _ => format!("; {missing} missing, {extra} extra, {twice} more than once"),
        };
    }
    text
}

fn draw(case: &Case, layouts: &[RankLayout], matrix: &Matrix, [left, top]: [f64; 2]) -> Markup {
    let [x, y] = [left + ROOM[0], top + ROOM[1]];
    let [width, height] = matrix.size();
    let cell = |count: usize, size: f64| size / count.max(1) as f64;
    let [of_query, of_key] = [cell(matrix.lengths[0], height), cell(matrix.lengths[1], width)];
    let place = |rows: Range<usize>, columns: Range<usize>| {
        [
            x + columns.start as f64 * of_key,
            y + rows.start as f64 * of_query,
            columns.len() as f64 * of_key,
            rows.len() as f64 * of_query,
        ]
    };
    html! {
        (words("strong", [left, top + 12.0], &matrix.title()))
        (words("faint", [x, top + 26.0], "keys →"))
        (words("faint end", [x - 18.0, y + 10.0], "queries"))
        (words("faint end", [x - 18.0, y + 22.0], "↓"))
        rect class="hidden" x=(number(x)) y=(number(y)) width=(number(width)) height=(number(height)) {
            title { (summary(matrix)) }
        }
        @for one in tiles(matrix) { (block(one.class, place(one.queries, one.keys), &one.title)) }
        (seams(layouts, matrix, [x, y]))
        (found(case, matrix, [x, y]))
    }
}

/// Neighbouring tiles of one kind.
struct Tiles {
    class: &'static str,
    queries: Range<usize>,
    keys: Range<usize>,
    title: String,
}

fn tiles(matrix: &Matrix) -> Vec<Tiles> {
    let grid = &matrix.grid;
    let mut all = Vec::new();
    for row in 0..grid.rows() {
        let class = |column: usize| matrix.class(row, column);
        let mut column = 0;
        while column < grid.columns() {
            let kind = class(column);
            let end = (column..grid.columns()).find(|next| class(*next) != kind).unwrap_or(grid.columns());
            if let Some(class) = kind {
                all.push(run(grid, row, column..end, class));
            }
            column = end;
        }
    }
    all
}

fn run(grid: &Grid, row: usize, columns: Range<usize>, class: &'static str) -> Tiles {
    let sum =
        |field: fn(Tile) -> u64| columns.clone().map(|column| field(grid.tile(row, column))).sum::<u64>();
    let area: u64 = columns.clone().map(|column| grid.area(row, column)).sum();
    let (queries, keys) =
        (grid.queries_of(row), grid.keys_of(columns.start).start..grid.keys_of(columns.end - 1).end);
    let one = |range: &Range<usize>, [single, many]: [&str; 2]| match range.len() {
        1 => format!("{single} {}", range.start),
        _ => format!("{many} {}..{}", range.start, range.end),
    };
    let [of_queries, of_keys] = [one(&queries, ["query", "queries"]), one(&keys, ["key", "keys"])];
    let mut title = format!("{of_queries}, {of_keys}: {} of {area} visible", sum(|tile| tile.visible));
    let faults = [
        (sum(|tile| tile.missing), "missing"),
        (sum(|tile| tile.extra), "extra"),
        (sum(|tile| tile.twice), "more than once"),
        (sum(|tile| tile.unclear), "of which nobody knows"),
    ];
    for (count, what) in faults.into_iter().filter(|(count, _)| *count > 0) {
        title += &format!(", {count} {what}");
    }
    Tiles { class, queries, keys, title }
}

fn class(tile: Tile, area: u64) -> Option<&'static str> {
    match tile {
        Tile { missing: 1.., .. } => Some("missing"),
        Tile { extra: 1.., .. } => Some("extra"),
        Tile { twice: 1.., .. } => Some("twice"),
        Tile { unclear: 1.., .. } => Some("several"),
        Tile { visible: 0, .. } => None,
        Tile { visible, .. } if visible == area => Some("visible"),
        Tile { .. } => Some("partly"),
    }
}

/// A sequence's real positions on one rank: where they begin and end, and the rank.
pub(super) type Piece = (usize, usize, usize);

/// Returns the pieces of one side of a sequence in order of positions; `None` where ranks take turns position by
/// position, which has a border at each.
pub(super) fn pieces(layouts: &[RankLayout], sequence: usize, side: Side) -> Option<Vec<Piece>> {
    let mut pieces = Vec::new();
    for layout in layouts {
        for run in layout.side(side).runs.iter().filter(|run| run.sequence == sequence && run.local.len > 0) {
            if run.piece.step > 1 && run.local.len > 1 {
                return None;
            }
            pieces.push((run.piece.start, run.piece.start + run.local.len, layout.rank));
        }
    }
    pieces.sort_unstable();
    (pieces.len() <= SEAMS_MAX).then_some(pieces)
}

/// Returns the borders between what ranks hold, across a matrix, with the ranks beside it.
fn seams(layouts: &[RankLayout], matrix: &Matrix, [x, y]: [f64; 2]) -> Markup {
    let [width, height] = matrix.size();
    let [queries, keys] = matrix.lengths;
    if layouts.len() < 2 {
        return html! {};
    }
    let [of_q, of_kv] = [Side::Q, Side::Kv].map(|side| pieces(layouts, matrix.sequence, side));
    let undrawn = of_q.is_none() || of_kv.is_none();
    let at = |position: usize, count: usize, size: f64| position as f64 * size / count.max(1) as f64;
    let mut lines = Vec::new();
    for (start, end, rank) in of_q.unwrap_or_default() {
        let [from, to] = [start, end].map(|position| y + at(position, queries, height));
        if start > 0 {
            lines.push(html! { path class="line-seam" d=(format!("M{} {}h{}", number(x), number(from), number(width))) {} });
        }
        if to - from >= 11.0 {
            lines.push(words("end", [x - 4.0, (from + to) / 2.0 + 4.0], &rank.to_string()));
        }
    }
    for (start, end, rank) in of_kv.unwrap_or_default() {
        let [from, to] = [start, end].map(|position| x + at(position, keys, width));
        if start > 0 {
            lines.push(html! { path class="line-seam" d=(format!("M{} {}v{}", number(from), number(y), number(height))) {} });
        }
        lines.extend(label("", [from, y - 5.0], to - from + 4.0, &rank.to_string()));
    }
    html! {
        @for line in lines { (line) }
        @if undrawn {
            (words("faint", [x + 50.0, y - 22.0], "borders too many to draw: see the layout"))
        } @else {
            (words("faint", [x + 50.0, y - 22.0], "numbers at the sides: ranks that own them"))
        }
    }
}

/// Returns the mark of the finding's row, if it is of this sequence.
fn found(case: &Case, matrix: &Matrix, [x, y]: [f64; 2]) -> Markup {
    let finding = case.found.as_ref().map(|found| &found.finding);
    let place = finding.filter(|finding| finding.place.sequence == Some(matrix.sequence));
    let Some((tensor, row)) = place.and_then(|finding| finding.tensor.zip(finding.place.row)) else {
        return html! {};
    };
    let [width, height] = matrix.size();
    let [queries, keys] = matrix.lengths;
    let (path, what) = match tensor.side() {
        Side::Q if row < queries => {
            let unit = height / queries as f64;
            let at = y + row as f64 * unit;
            (frame([x - 3.0, at, width + 6.0, unit]), format!("{tensor} of query {row}"))
        }
        Side::Kv if row < keys => {
            let unit = width / keys as f64;
            let at = x + row as f64 * unit;
            (frame([at, y - 3.0, unit, height + 6.0]), format!("{tensor} of key {row}"))
        }
        _ => return html! {},
    };
    html! {
        path class="line-found" d=(path) { title { "the finding: " (what) } }
        (words("", [x, y + height + 14.0], &format!("the finding: {what}")))
    }
}

fn frame([x, y, width, height]: [f64; 4]) -> String {
    format!("M{} {}h{}v{}h{}z", number(x), number(y), number(width), number(height), number(-width))
}

/// Returns the numbers of the matrices, and what the picture leaves out in words.
pub(super) fn numbers(problem: &Problem, matrices: &[Matrix]) -> (Table, Vec<String>) {
    let head =
        ["sequence", "pairs", "queries", "keys", "visible", "missing", "extra", "more than once", "tile"];
    let rows = matrices.iter().map(|matrix| {
        let Tile { visible, missing, extra, twice, .. } = matrix.total();
        let known = matrix.compared.is_some();
        let count = |count: u64| if known { count.to_string() } else { "not known".to_owned() };
        let whose = matrix.compared.as_ref().map_or("by definition", |compared| compared.of.name());
        let [queries, keys] = matrix.lengths;
        vec![
            matrix.sequence.to_string(),
            whose.to_owned(),
            queries.to_string(),
            keys.to_string(),
            visible.to_string(),
            count(missing),
            count(extra),
            count(twice),
            format!("{0} × {0}", matrix.grid.side),
        ]
    });
    let drawn: BTreeSet<usize> = matrices.iter().map(|matrix| matrix.sequence).collect();
    let table = Table {
        name: "Pairs of one head",
        head: head.map(String::from).to_vec(),
        rows: rows.collect(),
        left: problem.sequences.len() - drawn.len(),
    };
    (table, notes(matrices))
}

fn notes(matrices: &[Matrix]) -> Vec<String> {
    let mut notes = Vec::new();
    if matrices.iter().any(|matrix| matrix.compared.is_none()) {
        notes.push("What the launches are asked to show is not known here, or too much to compare: pairs are drawn by definition alone.".to_owned());
    }
    for matrix in matrices {
        let Some(of) = &matrix.compared else { continue };
        if of.of == Of::Subject {
            notes.push(format!(
                "Sequence {}: the subject ran once more, on numbers of an exact mode in the place of the case’s own, which \
                 tell the keys that a query saw.",
                matrix.sequence
            ));
        }
        if !of.heads.is_empty() {
            notes.push(format!("Sequence {}: drawn for {}.", matrix.sequence, of.heads));
        }
        if of.strangers > 0 {
            let named: Vec<&str> = of.foreign.iter().map(String::as_str).collect();
            let queries = of.strangers;
            notes.push(format!(
                "Sequence {}: {queries} of its queries are asked to see rows that are none of its keys, such as {}.",
                matrix.sequence,
                named.join(", ")
            ));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_in_no_other_range_is_left() {
        let ranges = || (0..6usize).flat_map(|start| (start..7).map(move |end| start..end));
        for (range, first) in ranges().flat_map(|range| ranges().map(move |first| (range.clone(), first))) {
            for second in ranges().filter(|second| second.start >= first.end) {
                let others = [first.clone(), second];
                let left = range.clone().filter(|n| !others.iter().any(|other| other.contains(n)));
                let parts = without(&range, &others);
                assert!(parts.iter().all(|part| !part.is_empty()), "{range:?} {others:?}");
                assert!(parts.into_iter().flatten().eq(left), "{range:?} {others:?}");
            }
        }
    }
}
