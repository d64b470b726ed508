//! Placement: which rank holds which position in which row, by the rule or by tables.

use std::path::Path;

use seamproof_judge::finding::{Check, Finding, Place};
use seamproof_judge::subject::TensorName;
use seamproof_oracle::sharding::{Piece, PlacedRun, RankLayout, SideLayout, hole, run_of};
use seamproof_oracle::{Problem, Run, Side};

use super::{Fault, RecordingError};

/// Entry of a row that no sequence owns.
const SLACK: i32 = -1;

/// Places of one rank's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankTables {
    /// Rows of q.
    pub q: SideTable,
    /// Rows of k and v.
    pub kv: SideTable,
}

/// Places of one rank's rows on one side. A padding row has a position past the real ones; a row that no sequence owns
/// has −1 twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SideTable {
    /// Index of each row's sequence.
    pub sequence: Vec<i32>,
    /// Position of each row in its sequence.
    pub position: Vec<i32>,
}

impl RankTables {
    /// Returns the tables of a layout.
    pub fn of(layout: &RankLayout) -> RankTables {
        RankTables { q: SideTable::of(&layout.q), kv: SideTable::of(&layout.kv) }
    }

    fn side(&self, side: Side) -> &SideTable {
        match side {
            Side::Q => &self.q,
            Side::Kv => &self.kv,
        }
    }

    /// Checks every entry. The path is for the error alone.
    pub(super) fn check(&self, path: &Path, problem: &Problem) -> Result<(), RecordingError> {
        for (side, names) in
            [(Side::Q, ["q.sequence", "q.position"]), (Side::Kv, ["kv.sequence", "kv.position"])]
        {
            let table = self.side(side);
            for (row, (&sequence, &position)) in table.sequence.iter().zip(&table.position).enumerate() {
                let count = problem.sequences.len();
                let (field, got, expected) = match usize::try_from(sequence) {
                    Ok(index) if index < count && position >= 0 => continue,
                    Ok(index) if index < count => (names[1], position, "positions count from 0".to_owned()),
                    Err(_) if (sequence, position) == (SLACK, SLACK) => continue,
                    _ if sequence == SLACK => {
                        (names[1], position, "a row that no sequence owns has -1 in both tables".to_owned())
                    }
                    _ => (names[0], sequence, format!("the problem has {count} sequences, from 0")),
                };
                return Err(RecordingError::field(path, field, Fault::Entry { row, got, expected }));
            }
        }
        Ok(())
    }

    /// Returns the layout that the tables of a rank of the world say. Rows that follow each other in both are one run.
    fn layout(&self, rank: usize, problem: &Problem) -> RankLayout {
        let (q, kv) = (self.q.layout(problem, Side::Q), self.kv.layout(problem, Side::Kv));
        RankLayout { rank, q, kv, statistics: None }
    }
}

impl SideTable {
    fn of(side: &SideLayout) -> SideTable {
        let mut table = SideTable { sequence: vec![SLACK; side.rows], position: vec![SLACK; side.rows] };
        for placed in &side.runs {
            for i in 0..placed.local.span {
                let row = placed.local.row(i);
                table.sequence[row] = placed.sequence as i32;
                table.position[row] = (placed.piece.start + i * placed.piece.step) as i32;
            }
        }
        table
    }

    /// Returns the sequence and position of a row that a sequence owns.
    fn entry(&self, row: usize) -> Option<(usize, usize)> {
        Some((usize::try_from(self.sequence[row]).ok()?, usize::try_from(self.position[row]).ok()?))
    }

    fn layout(&self, problem: &Problem, side: Side) -> SideLayout {
        let rows = self.sequence.len();
        let mut runs: Vec<PlacedRun> = Vec::new();
        for (row, (sequence, position)) in (0..rows).filter_map(|row| Some((row, self.entry(row)?))) {
            let real = usize::from(position < run_of(&problem.sequences[sequence], side).len);
            let is_next = |last: &&mut PlacedRun| {
                last.sequence == sequence
                    && last.piece.start + last.piece.span == position
                    && last.local.offset + last.local.span == row
            };
            match runs.last_mut().filter(is_next) {
                Some(last) => {
                    last.piece.span += 1;
                    last.local.span += 1;
                    last.local.len += real;
                }
                None => {
                    let piece = Piece { start: position, step: 1, span: 1, at: row };
                    runs.push(PlacedRun { sequence, piece, local: Run::packed(row, real, 1) });
                }
            }
        }
        SideLayout { rows, runs }
    }
}

/// Returns the layouts that the tables of all ranks say, in order of places.
pub(super) fn said<'a>(
    problem: &Problem,
    tables: impl Iterator<Item = &'a RankTables>,
) -> impl Iterator<Item = RankLayout> {
    problem.parallel.world_ranks().zip(tables).map(|(rank, tables)| tables.layout(rank, problem))
}

/// Returns the layouts that tables say, or the finding that a real position lies nowhere or twice, or that one lies
/// somewhere whose sequence borrows it of another.
pub(super) fn layouts_of<'a>(
    problem: &Problem,
    tables: impl Iterator<Item = &'a RankTables>,
) -> Result<Vec<RankLayout>, Box<Finding>> {
    let layouts: Vec<RankLayout> = said(problem, tables).collect();
    for side in [Side::Q, Side::Kv] {
        check_cover(problem, &layouts, side)?;
    }
    Ok(layouts)
}

/// Checks that every real position lies on exactly one rank, and those that a sequence borrows on none.
fn check_cover(problem: &Problem, layouts: &[RankLayout], side: Side) -> Result<(), Box<Finding>> {
    let mut seen: Vec<Vec<u32>> =
        problem.sequences.iter().map(|both| vec![0; run_of(both, side).len]).collect();
    let runs = layouts.iter().flat_map(|layout| &layout.side(side).runs);
    for placed in runs {
        let start = placed.piece.start;
        (start..start + placed.local.len).for_each(|position| seen[placed.sequence][position] += 1);
    }
    let compared = seen.iter().map(Vec::len).sum();
    let mut wrong = seen.iter().enumerate().flat_map(|(sequence, seen)| {
        let borrowed = hole(problem, side, sequence);
        let own = move |position: usize| u32::from(position >= borrowed);
        let apart = seen.iter().enumerate().filter(move |(position, count)| **count != own(*position));
        apart.map(move |(position, count)| (sequence, position, *count))
    });
    let Some((sequence, row, count)) = wrong.next() else { return Ok(()) };
    let what = match count {
        0 => "the tables give this position to no rank".to_owned(),
        _ if row < hole(problem, side, sequence) => {
            "the tables have a row for a key that is borrowed".to_owned()
        }
        count => format!("the tables give this position to {count} rows"),
    };
    let place = Place { sequence: Some(sequence), row: Some(row), ..Place::default() };
    let failed = 1 + wrong.count();
    Err(Box::new(Finding { place, failed, compared, ..misplaced(side, what) }))
}

/// Returns the finding about the first row whose tables say something other than the rule.
pub(super) fn differing<'a>(
    problem: &Problem,
    layouts: &[RankLayout],
    tables: impl Iterator<Item = &'a RankTables>,
) -> Option<Finding> {
    layouts.iter().zip(tables).enumerate().find_map(|(rank, (layout, tables))| {
        [Side::Q, Side::Kv].into_iter().find_map(|side| {
            let rule = SideTable::of(layout.side(side));
            let table = tables.side(side);
            let differs = |row: &usize| !same_place(problem, side, table.entry(*row), rule.entry(*row));
            let mut wrong = (0..rule.sequence.len()).filter(differs);
            let row = wrong.next()?;
            let words = |table: &SideTable| in_words(problem, side, table.entry(row));
            let what = format!(
                "rank {rank} holds other positions than problem.parallel.balance says, here first: row {row}"
            );
            let of_rule = rule.entry(row);
            let place = Place {
                sequence: of_rule.map(|(sequence, _)| sequence),
                row: of_rule.map(|(_, position)| position),
                ..Place::default()
            };
            let (failed, compared) = (1 + wrong.count(), rule.sequence.len());
            let (got, expected) = (Some(words(table)), Some(words(&rule)));
            Some(Finding { place, got, expected, failed, compared, ..misplaced(side, what) })
        })
    })
}

/// Whether two entries mean the same: which padding row of a sequence it is says nothing.
fn same_place(
    problem: &Problem,
    side: Side,
    table: Option<(usize, usize)>,
    rule: Option<(usize, usize)>,
) -> bool {
    let kind = |entry: Option<(usize, usize)>| {
        entry.map(|(sequence, position)| {
            (sequence, position.min(run_of(&problem.sequences[sequence], side).len))
        })
    };
    kind(table) == kind(rule)
}

fn in_words(problem: &Problem, side: Side, entry: Option<(usize, usize)>) -> String {
    match entry {
        None => "no sequence".into(),
        Some((sequence, position)) if position < run_of(&problem.sequences[sequence], side).len => {
            format!("position {position} of sequence {sequence}")
        }
        Some((sequence, _)) => format!("padding of sequence {sequence}"),
    }
}

fn misplaced(side: Side, what: String) -> Finding {
    let tensor = if side == Side::Q { TensorName::Q } else { TensorName::K };
    Finding::new(Check::Structure, Some(tensor), what)
}
