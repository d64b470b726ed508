//! Picture 1: the rows of q and kv as strips. The problem's own tensors come first, with the ranks to which their rows
//! are dealt, and then each rank's.

use maud::{Markup, html};
use seamproof_judge::prose::counted;
use seamproof_oracle::sharding::{Piece, PlacedRun, RankLayout, SideLayout, run_of, whole};
use seamproof_oracle::{Problem, Run, Side};

use super::strip::{Content, Stretch, stretches};
use super::svg::{Drawing, WIDTH, block, label, legend, words};
use super::table::Table;

/// Largest number of ranks that have strips.
pub(super) const RANKS_DRAWN: usize = 64;
/// Largest number of sequences in the table.
pub(super) const SEQUENCES_LISTED: usize = 64;
/// Largest number of stretches of all strips together.
const STRETCHES_MAX: usize = 3000;
/// Least number of stretches that a strip may have.
const STRETCHES_LEAST: usize = 16;
/// Largest number of rows, of all strips together, that are drawn one by one.
const SINGLE_ROWS_MAX: usize = 800;

/// Where strips begin.
const LEFT: f64 = 92.0;
/// Height of a strip.
const STRIP: f64 = 18.0;
/// Height from one strip to the next.
const PITCH: f64 = 24.0;

/// A strip: its name and its rows.
struct Strip {
    name: String,
    rows: usize,
    /// Rows that share the whole width.
    scale: usize,
    kind: Kind,
}

/// What a strip shows of rows.
enum Kind {
    /// What they hold, in the problem's tensor or on a rank.
    Held { stretches: Vec<Stretch>, rank: Option<usize> },
    /// The ranks to which they are dealt.
    Dealt(Vec<(usize, Stretch)>),
}

/// Returns the picture of a problem whose rows lie on ranks so.
pub(super) fn layout(problem: &Problem, layouts: &[RankLayout]) -> Drawing {
    let strips = strips(problem, layouts);
    let rows: usize = strips.iter().map(|strip| strip.rows).sum();
    let single = rows <= SINGLE_ROWS_MAX;
    let entries = [
        ("real", "real rows"),
        ("padding", "padding"),
        ("free", "no sequence’s: gap or slack"),
        ("several", "several stretches in one"),
        ("even", "dealt to a rank"),
    ];
    let (key, mut y) = legend(&entries);
    let mut drawn = vec![key];
    for strip in &strips {
        drawn.push(draw(strip, y, single));
        y += PITCH;
    }
    let left = layouts.len().saturating_sub(RANKS_DRAWN);
    if left > 0 {
        let text = format!("… and {} that are not drawn", counted(left, "more rank"));
        drawn.push(words("faint", [0.0, y + 12.0], &text));
        y += PITCH;
    }
    Drawing {
        id: "layout",
        title: "Layout of rows".to_owned(),
        desc: described(problem, layouts),
        height: y,
        body: html! { @for one in drawn { (one) } },
    }
}

fn described(problem: &Problem, layouts: &[RankLayout]) -> String {
    format!(
        "Strips of rows. The problem has {} of q and {} of kv, of {}; {} hold parts of them. Every stretch of rows has \
         a title that names its sequence, positions, rank and rows.",
        counted(problem.rows.q, "row"),
        counted(problem.rows.kv, "row"),
        counted(problem.sequences.len(), "sequence"),
        counted(layouts.len(), "rank"),
    )
}

/// Returns the sides that are drawn, each with its name: one for both where q and kv lie alike everywhere.
fn sides(problem: &Problem, layouts: &[RankLayout]) -> Vec<(Side, &'static str)> {
    let alike = problem.rows.q == problem.rows.kv
        && problem.sequences.iter().all(|both| both.q == both.kv)
        && layouts.iter().all(|layout| layout.q == layout.kv);
    if alike { vec![(Side::Q, "q, kv")] } else { vec![(Side::Q, "q"), (Side::Kv, "kv")] }
}

fn strips(problem: &Problem, layouts: &[RankLayout]) -> Vec<Strip> {
    let sides = sides(problem, layouts);
    let several = layouts.len() > 1;
    let drawn = if several { layouts.len().min(RANKS_DRAWN) } else { 0 };
    let most = (STRETCHES_MAX / (sides.len() * (drawn + 2))).max(STRETCHES_LEAST);
    let whole = whole(problem);
    let mut strips = Vec::new();
    for &(side, name) in &sides {
        let SideLayout { rows, runs } = whole.side(side);
        let held = Kind::Held { stretches: stretches(*rows, runs, most), rank: None };
        strips.push(Strip { name: name.to_owned(), rows: *rows, scale: *rows, kind: held });
        if several {
            let dealt = Kind::Dealt(dealt(problem, layouts, side, most));
            strips.push(Strip { name: "dealt to".to_owned(), rows: *rows, scale: *rows, kind: dealt });
        }
    }
    for layout in layouts.iter().take(drawn) {
        let rank = layout.rank;
        for &(side, name) in &sides {
            let SideLayout { rows, runs } = layout.side(side);
            let scale = layouts.iter().map(|layout| layout.side(side).rows).max().unwrap_or_default();
            let held = Kind::Held { stretches: stretches(*rows, runs, most), rank: Some(rank) };
            strips.push(Strip { name: format!("rank {rank} {name}"), rows: *rows, scale, kind: held });
        }
    }
    strips
}

/// Returns the rows of the problem's tensor with the ranks to which they are dealt.
fn dealt(problem: &Problem, layouts: &[RankLayout], side: Side, most: usize) -> Vec<(usize, Stretch)> {
    let most = (most / layouts.len()).max(2);
    let of_rank = |layout: &RankLayout| {
        let runs: Vec<PlacedRun> =
            layout.side(side).runs.iter().map(|run| in_problem(problem, side, run)).collect();
        let stretches = stretches(0, &runs, most).into_iter();
        let owned = stretches.filter(|stretch| !matches!(stretch.holds, Content::Free(_)));
        owned.map(|stretch| (layout.rank, stretch)).collect::<Vec<_>>()
    };
    layouts.iter().take(RANKS_DRAWN).flat_map(of_rank).collect()
}

/// Returns a rank's run as rows of the problem's own tensor.
fn in_problem(problem: &Problem, side: Side, run: &PlacedRun) -> PlacedRun {
    let own = problem.sequences.get(run.sequence).map_or(Run::packed(0, 0, 0), |both| run_of(both, side));
    let Piece { start, step, .. } = run.piece;
    let offset = own.offset + own.step * start;
    PlacedRun { local: Run { offset, step: own.step * step, ..run.local }, ..*run }
}

fn draw(strip: &Strip, y: f64, single: bool) -> Markup {
    let unit = (WIDTH - LEFT - 1.0) / strip.scale.max(1) as f64;
    let place =
        |rows: &std::ops::Range<usize>| [LEFT + rows.start as f64 * unit, y, rows.len() as f64 * unit, STRIP];
    let blocks: Vec<Markup> = match &strip.kind {
        Kind::Held { stretches, rank } => {
            let parts = stretches.iter().flat_map(|stretch| parts(stretch, single));
            let titled = parts.map(|part| {
                let title = title(&part, *rank);
                block(class(part.holds), place(&part.rows), &title)
            });
            let named = stretches.iter().filter_map(|stretch| named(stretch, place(&stretch.rows)));
            titled.chain(named).collect()
        }
        Kind::Dealt(dealt) => dealt
            .iter()
            .flat_map(|(rank, stretch)| {
                let (at, kind) = (place(&stretch.rows), if rank % 2 == 0 { "even" } else { "odd" });
                let drawn = block(kind, at, &format!("to rank {rank}: {}", title(stretch, None)));
                let whole = matches!(stretch.holds, Content::Real { .. } | Content::Padding { .. });
                let text = || label("", [at[0], y + 13.0], at[2], &format!("r{rank}"));
                [Some(drawn), whole.then(text).flatten()]
            })
            .flatten()
            .collect(),
    };
    html! {
        (words("end", [LEFT - 8.0, y + 13.0], &strip.name))
        @if strip.rows == 0 { (words("faint", [LEFT, y + 13.0], "no rows")) }
        @for one in blocks { (one) }
    }
}

/// Returns the stretches that are drawn of one: its rows one by one, where there are few of all.
fn parts(stretch: &Stretch, single: bool) -> Vec<Stretch> {
    let row = |at: usize, row: usize| {
        let holds = match stretch.holds {
            Content::Real { sequence, start, step } => {
                Content::Real { sequence, start: start + step * at, step: 1 }
            }
            other => other,
        };
        Stretch { rows: row..row + 1, holds }
    };
    match stretch.holds {
        Content::Real { .. } | Content::Padding { .. } if single => {
            stretch.rows.clone().enumerate().map(|(at, index)| row(at, index)).collect()
        }
        _ => vec![stretch.clone()],
    }
}

pub(super) fn class(holds: Content) -> &'static str {
    match holds {
        Content::Real { .. } => "real",
        Content::Padding { .. } => "padding",
        Content::Free(_) => "free",
        Content::Apart { .. } | Content::Several { .. } => "several",
    }
}

/// Returns the label of a stretch, where there is room.
fn named(stretch: &Stretch, [x, y, width, _]: [f64; 4]) -> Option<Markup> {
    let at = [x, y + 13.0];
    match stretch.holds {
        Content::Real { sequence, start, step } => {
            let end = start + step * (stretch.rows.len() - 1) + 1;
            let long = label("on", at, width, &format!("s{sequence}: {start}..{end}"));
            long.or_else(|| label("on", at, width, &format!("s{sequence}")))
        }
        _ => None,
    }
}

/// Returns the title of a stretch in a rank's tensor, or in the problem's.
pub(super) fn title(stretch: &Stretch, rank: Option<usize>) -> String {
    let Stretch { rows, holds } = stretch;
    let of = rank.map_or(String::new(), |rank| format!("rank {rank}, "));
    let local = if rank.is_some() { "local " } else { "" };
    let place = match rows.len() {
        1 => format!("{of}{local}row {}", rows.start),
        _ => format!("{of}{local}rows {}..{}", rows.start, rows.end),
    };
    match *holds {
        Content::Real { sequence, start, .. } if rows.len() == 1 => {
            format!("sequence {sequence}, position {start}, {place}")
        }
        Content::Real { sequence, start, step } => {
            let end = start + step * (rows.len() - 1) + 1;
            let step = if step > 1 { format!(" step {step}") } else { String::new() };
            format!("sequence {sequence}, positions {start}..{end}{step}, {place}")
        }
        Content::Padding { sequence } => format!("padding of sequence {sequence}, {place}"),
        Content::Free(free) => format!("{}, {place}", free.name()),
        Content::Apart { sequence, step, real } => {
            format!("sequence {sequence}, {real} real, every {step} rows of {place}")
        }
        Content::Several { stretches, real } => {
            format!("{stretches} stretches with {real} real rows, {place}")
        }
    }
}

/// Returns the numbers of the sequences and of the ranks.
pub(super) fn numbers(problem: &Problem, layouts: &[RankLayout]) -> Vec<Table> {
    let of_side =
        |run: &Run| [run.offset, run.len, run.span - run.len, run.step].map(|count| count.to_string());
    let sequences = problem.sequences.iter().enumerate().take(SEQUENCES_LISTED).map(|(index, both)| {
        let pairs = problem.mask.pairs(both.q.len, both.kv.len);
        let own = [index.to_string(), both.id.to_string()];
        own.into_iter().chain(of_side(&both.q)).chain(of_side(&both.kv)).chain([pairs.to_string()]).collect()
    });
    let ranks = layouts.iter().enumerate().take(RANKS_DRAWN).map(|(place, layout)| {
        let own = [layout.rank.to_string(), place.to_string()];
        let sides = [&layout.q, &layout.kv].into_iter().flat_map(of_rank);
        own.into_iter().chain(sides.map(|count| count.to_string())).collect()
    });
    let side = ["first row", "real", "padding", "step"];
    let [q, kv] = ["q", "kv"].map(|name| side.map(|column| format!("{name} {column}")));
    let [of_q, of_kv] =
        ["q", "kv"].map(|name| ["rows", "real", "padding"].map(|column| format!("{name} {column}")));
    vec![
        Table {
            name: "Sequences",
            head: ["sequence", "id"]
                .map(String::from)
                .into_iter()
                .chain(q)
                .chain(kv)
                .chain(["visible pairs".to_owned()])
                .collect(),
            rows: sequences.collect(),
            left: problem.sequences.len().saturating_sub(SEQUENCES_LISTED),
        },
        Table {
            name: "Ranks",
            head: ["rank", "place in the group"]
                .map(String::from)
                .into_iter()
                .chain(of_q)
                .chain(of_kv)
                .collect(),
            rows: ranks.collect(),
            left: layouts.len().saturating_sub(RANKS_DRAWN),
        },
    ]
}

/// Returns a rank's rows of one side: all, real ones, and padding.
fn of_rank(side: &SideLayout) -> [usize; 3] {
    let sum = |of: fn(&Run) -> usize| side.runs.iter().map(|run| of(&run.local)).sum();
    [side.rows, sum(|run| run.len), sum(|run| run.span - run.len)]
}
