//! Sharding: which rank holds which position of a sequence, and in which row of its tensors.
//!
//! Context parallelism deals each side of each sequence, queries as well as keys and values, to the `cp` ranks of a
//! group. The ranks are dealt the *span*, real positions and padding alike; real lengths move no row. A rank's rows of
//! one sequence are its *slot*, and all ranks' slots are equally long. The [`Balance`] says which rank holds which
//! position:
//!
//! | balance | the span is cut into | rank r holds, one after the other | the span must be a multiple of |
//! |---|---|---|---|
//! | contiguous | `cp` parts | part r | `cp` |
//! | dual-chunk (zigzag) | `2·cp` chunks | chunk r, chunk `2·cp − 1 − r` | `2·cp` |
//! | striped | stripes of a given length | stripes r, r + cp, r + 2·cp, … | `cp` · that length |
//!
//! Rows that a sequence [borrows](crate::Sharing) are dealt with the rest of its span, and no rank holds anything
//! there.
//!
//! The dual-chunk cut is
//! [TransformerEngine's](https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/fused_attn/context_parallel.cu).
//!
//! A rank's tensor holds the slots in the order of the sequences in memory, and also rows that no sequence owns. Where
//! n such rows lie before a sequence (first offset, gap) or behind all sequences (slack), each rank has n / cp of them,
//! rounded down.
//!
//! Rows of a side may lie side by side (SBHD): those of one position of every sequence, then those of the next one
//! ([`Lanes`]). They are dealt like the same side with one sequence after the other, and lie side by side on every rank
//! too.
//!
//! A single rank ([`Algorithm::Single`]) holds the problem's own layout, whatever its balance.
//!
//! Where each of these ranks is a [region](crate::region), its rows are cut into as many equal parts as the region has
//! ranks, one after the other. Padding and rows that no sequence owns count as any other, and so a border may lie
//! inside a sequence. If the rows cannot be cut evenly, each part is as long as the first, and the rows that are too
//! many belong to no sequence. The statistics of queries are not cut: a rank has those of its own heads, on all rows of
//! its region.

use std::ops::Range;

use crate::{Algorithm, Balance, Problem, Run, Sequence, Side};

/// One rank's rows of both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLayout {
    /// The rank of the world.
    pub rank: usize,
    /// Queries.
    pub q: SideLayout,
    /// Keys and values.
    pub kv: SideLayout,
    /// The statistics of a rank of a region; `None` for those of all heads on the rows of [`RankLayout::q`].
    pub statistics: Option<StatisticsLayout>,
}

/// The statistics of one rank of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatisticsLayout {
    /// The query heads of the rank.
    pub heads: Range<usize>,
    /// The rows.
    pub rows: SideLayout,
}

/// One rank's rows of one side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SideLayout {
    /// The number of rows of the rank's tensors.
    pub rows: usize,
    /// The runs that sequences own, in order of sequences and then of rows.
    pub runs: Vec<PlacedRun>,
}

/// Rows of a sequence in a rank's tensor: row i of `local` holds position `piece.start + i · piece.step`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedRun {
    /// The index of the sequence.
    pub sequence: usize,
    /// The positions.
    pub piece: Piece,
    /// The rows: `len` real ones, `span` owned ones.
    pub local: Run,
}

/// A run of positions, and its place in a rank's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The first position in the sequence.
    pub start: usize,
    /// The number of positions from one row to the next.
    pub step: usize,
    /// The number of rows, padding included.
    pub span: usize,
    /// The first row in the slot.
    pub at: usize,
}

/// The reason why a side cannot be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum ShardingError {
    /// A span that the balance does not divide.
    #[error("sequence {sequence} spans {span} {side} rows; this sharding needs a multiple of {multiple}")]
    Span {
        /// The index of the sequence.
        sequence: usize,
        /// The side.
        side: Side,
        /// The span of the sequence.
        span: usize,
        /// The number of which the span must be a multiple.
        multiple: usize,
    },
    /// Rows of a sequence that lie apart, but not side by side with those of the others.
    #[error(
        "sequence {sequence} has {side} rows with step {step}; give all sequences of the side this step, and first \
         rows within one step"
    )]
    Strided {
        /// The index of the sequence.
        sequence: usize,
        /// The side.
        side: Side,
        /// The step of the sequence.
        step: usize,
    },
}

/// Rows side by side, as in SBHD: one of each *lane* for each position. A sequence has a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// The first row.
    pub first: usize,
    /// The number of lanes: rows from one position to the next.
    pub step: usize,
    /// The number of positions.
    pub height: usize,
}

impl Lanes {
    /// Returns the lanes of runs in a tensor of `rows` rows. `None` stands for runs of which one has another step than
    /// the others, or begins further behind the first one than a step. Runs without rows may lie anywhere.
    pub fn of(runs: &[Run], rows: usize) -> Option<Lanes> {
        let mut owning = runs.iter().filter(|run| run.span > 0);
        let (first, height) =
            (owning.clone().map(|run| run.offset).min()?, owning.clone().map(|run| run.span).max()?);
        let step = owning.clone().next()?.step;
        let beside = owning.all(|run| run.step == step && run.offset - first < step);
        (beside && step <= rows).then_some(Lanes { first, step, height })
    }

    /// Returns one past the last row of any lane.
    pub fn end(&self) -> usize {
        self.first + self.step * self.height
    }

    /// Returns where a sequence's rows would lie if its lane followed the one before. A run without rows has no lane.
    pub fn apart(&self, run: Run) -> Run {
        let lane = if run.span > 0 { run.offset - self.first } else { 0 };
        Run { offset: self.first + lane * self.height, step: 1, ..run }
    }

    /// Returns where rows lie that would follow each other in one lane, or outside all of them, if each lane followed
    /// the one before.
    pub fn beside(&self, run: Run) -> Run {
        match run.offset.checked_sub(self.first) {
            Some(inside) if inside < self.step * self.height => {
                let (lane, position) = (inside / self.height, inside % self.height);
                Run { offset: self.first + lane + self.step * position, step: run.step * self.step, ..run }
            }
            _ => run,
        }
    }

    /// Returns the lanes that each of `parts` equal parts of the positions has.
    pub fn part(&self, parts: usize) -> Lanes {
        Lanes { first: self.first / parts, step: self.step, height: self.height / parts }
    }

    /// Returns the lanes of `parts` such parts together.
    pub fn whole(&self, parts: usize) -> Lanes {
        Lanes { first: self.first * parts, step: self.step, height: self.height * parts }
    }
}

/// Returns one side's runs as if lanes followed each other, the number of the tensor's rows, and the lanes where there
/// are any.
pub fn without_lanes(runs: &[Run], rows: usize) -> (Vec<Run>, usize, Option<Lanes>) {
    let lanes = Lanes::of(runs, rows).filter(|lanes| lanes.step > 1);
    match lanes {
        Some(lanes) => {
            (runs.iter().map(|run| lanes.apart(*run)).collect(), rows.max(lanes.end()), Some(lanes))
        }
        // A run without rows has no step.
        None => {
            let packed = |run: &Run| if run.span > 0 { *run } else { Run { step: 1, ..*run } };
            (runs.iter().map(packed).collect(), rows, None)
        }
    }
}

/// Returns the layouts of a problem's ranks, in group order: of one member of the group after the other, and of one
/// rank after the other in each member's region.
pub fn layouts(problem: &Problem) -> Result<Vec<RankLayout>, ShardingError> {
    let members = members(problem)?;
    let ranks = problem.parallel.region;
    if ranks == 1 {
        return Ok(members);
    }
    let heads = problem.heads.q / ranks;
    let of_region = |RankLayout { rank, q, kv, .. }: RankLayout| {
        (0..ranks).map(move |part| RankLayout {
            rank: rank * ranks + part,
            q: q.part(part, ranks),
            kv: kv.part(part, ranks),
            statistics: Some(StatisticsLayout { heads: heads * part..heads * (part + 1), rows: q.clone() }),
        })
    };
    Ok(members.into_iter().flat_map(of_region).collect())
}

/// Returns the layouts of the members of a problem's group, as if none was a region. Their ranks are those of a world
/// without regions.
pub fn members(problem: &Problem) -> Result<Vec<RankLayout>, ShardingError> {
    if problem.parallel.algorithm == Algorithm::Single {
        return Ok(vec![whole(problem)]);
    }
    check(problem, Side::Q)?;
    check(problem, Side::Kv)?;
    let (q, kv) = (dealt(problem, Side::Q), dealt(problem, Side::Kv));
    let of_member = |(&rank, (q, kv))| RankLayout { rank, q, kv, statistics: None };
    Ok(problem.parallel.ranks.iter().zip(q.into_iter().zip(kv)).map(of_member).collect())
}

/// Returns the problem's own layout, on the group's first rank.
pub fn whole(problem: &Problem) -> RankLayout {
    let placed = |(sequence, local): (usize, Run)| PlacedRun {
        sequence,
        piece: Piece { start: 0, step: 1, span: local.span, at: 0 },
        local,
    };
    let side = |side: Side| SideLayout {
        rows: rows_of(problem, side),
        runs: held(
            problem,
            side,
            problem.sequences.iter().map(|both| run_of(both, side)).enumerate().map(placed),
        ),
    };
    let rank = problem.parallel.ranks.first().copied().unwrap_or(0);
    RankLayout { rank, q: side(Side::Q), kv: side(Side::Kv), statistics: None }
}

/// Returns the number of positions that a sequence borrows, and holds no rows for.
pub fn hole(problem: &Problem, side: Side, sequence: usize) -> usize {
    if side == Side::Kv { problem.sharing.borrowed(sequence) } else { 0 }
}

/// Returns placed rows without those that sequences borrow of others.
pub fn held(problem: &Problem, side: Side, placed: impl Iterator<Item = PlacedRun>) -> Vec<PlacedRun> {
    let borrows = !problem.sharing.is_empty();
    placed
        .filter_map(|placed| match borrows {
            true => placed.from(hole(problem, side, placed.sequence)),
            false => Some(placed),
        })
        .collect()
}

/// Checks that a side can be cut over the problem's group.
pub fn check(problem: &Problem, side: Side) -> Result<(), ShardingError> {
    let multiple = span_multiple(problem.parallel.balance, problem.parallel.size());
    let runs: Vec<Run> = problem.sequences.iter().map(|both| run_of(both, side)).collect();
    let (runs, ..) = without_lanes(&runs, rows_of(problem, side));
    for (sequence, Run { step, span, .. }) in runs.into_iter().enumerate() {
        if step != 1 {
            return Err(ShardingError::Strided { sequence, side, step });
        }
        if !span.is_multiple_of(multiple) {
            return Err(ShardingError::Span { sequence, side, span, multiple });
        }
    }
    Ok(())
}

/// Returns the number of which a span must be a multiple.
pub fn span_multiple(balance: Balance, cp: usize) -> usize {
    match balance {
        Balance::Contiguous => cp,
        Balance::DualChunk => 2 * cp,
        Balance::Striped { stripe } => cp * stripe,
    }
}

/// Returns the rank that holds a position of a span, and the row in that rank's slot. This is the definition of each
/// balance.
pub(crate) fn deal(balance: Balance, cp: usize, span: usize, position: usize) -> (usize, usize) {
    match balance {
        Balance::Contiguous => {
            let part = span / cp;
            (position / part, position % part)
        }
        Balance::DualChunk => {
            let size = span / (2 * cp);
            let (chunk, inside) = (position / size, position % size);
            if chunk < cp { (chunk, inside) } else { (2 * cp - 1 - chunk, size + inside) }
        }
        Balance::Striped { stripe } => {
            let (number, inside) = (position / stripe, position % stripe);
            (number % cp, number / cp * stripe + inside)
        }
    }
}

/// Returns one side of every rank. Sequences are dealt in the order in which they lie in memory, position after
/// position.
fn dealt(problem: &Problem, side: Side) -> Vec<SideLayout> {
    let (cp, balance) = (problem.parallel.size(), problem.parallel.balance);
    let step = if balance == (Balance::Striped { stripe: 1 }) { cp } else { 1 };
    let runs: Vec<Run> = problem.sequences.iter().map(|both| run_of(both, side)).collect();
    let (runs, total, lanes) = without_lanes(&runs, rows_of(problem, side));
    let on_rank = lanes.map(|lanes| lanes.part(cp));
    let mut sequences: Vec<(usize, Run)> = runs.into_iter().enumerate().collect();
    sequences.sort_by_key(|(_, run)| (run.offset, run.span));

    let mut ranks = vec![SideLayout::default(); cp];
    let (mut slot, mut end) = (0, 0);
    for (sequence, run) in sequences {
        // A sequence without rows may lie anywhere, inside another one too.
        slot += run.offset.saturating_sub(end) / cp;
        for position in hole(problem, side, sequence)..run.span {
            let (rank, at) = deal(balance, cp, run.span, position);
            let piece = Piece { start: position, step, span: 1, at };
            let local = Run::packed(slot + at, usize::from(position < run.len), 1);
            let local = on_rank.map_or(local, |lanes| lanes.beside(local));
            ranks[rank].push(PlacedRun { sequence, piece, local });
        }
        slot += run.span / cp;
        end = end.max(run.offset + run.span);
    }
    for rank in &mut ranks {
        rank.rows = slot + (total - end) / cp;
        rank.runs.sort_by_key(|placed| placed.sequence);
    }
    ranks
}

impl SideLayout {
    /// Returns one of `parts` equal parts of the rows, of which the first rows of the tensor are the first.
    fn part(&self, part: usize, parts: usize) -> SideLayout {
        let rows = self.rows.div_ceil(parts);
        let mut own = SideLayout { rows, runs: Vec::new() };
        for PlacedRun { sequence, piece, local } in &self.runs {
            for i in (0..local.span).filter(|&i| local.row(i) / rows == part) {
                let piece =
                    Piece { start: piece.start + i * piece.step, span: 1, at: piece.at + i, ..*piece };
                let local =
                    Run { offset: local.row(i) % rows, len: usize::from(i < local.len), span: 1, ..*local };
                own.push(PlacedRun { sequence: *sequence, piece, local });
            }
        }
        own
    }

    /// Appends one row. It extends the last run where it continues that run, and is a run of its own otherwise.
    fn push(&mut self, one: PlacedRun) {
        match self.runs.last_mut().filter(|last| last.goes_on_with(&one)) {
            Some(last) => {
                last.piece.span += 1;
                last.local.span += 1;
                last.local.len += one.local.len;
            }
            None => self.runs.push(one),
        }
    }
}

impl PlacedRun {
    /// Returns the rows whose positions are `first` or later; `None` where there are none and some lie before.
    pub fn from(self, first: usize) -> Option<PlacedRun> {
        let PlacedRun { sequence, piece, local } = self;
        let before = first.saturating_sub(piece.start).div_ceil(piece.step.max(1));
        if before == 0 {
            return Some(self);
        }
        let span = piece.span.checked_sub(before).filter(|span| *span > 0)?;
        let (start, at) = (piece.start + before * piece.step, piece.at + before);
        let (offset, len) = (local.row(before), local.len.saturating_sub(before));
        let piece = Piece { start, span, at, ..piece };
        Some(PlacedRun { sequence, piece, local: Run { offset, len, span, ..local } })
    }

    fn goes_on_with(&self, one: &PlacedRun) -> bool {
        let PlacedRun { sequence, piece, local } = *self;
        sequence == one.sequence
            && piece.start + piece.span * piece.step == one.piece.start
            && local.offset + local.span * local.step == one.local.offset
    }
}

impl RankLayout {
    /// Returns one side.
    pub fn side(&self, side: Side) -> &SideLayout {
        match side {
            Side::Q => &self.q,
            Side::Kv => &self.kv,
        }
    }

    /// Returns the rows of statistics.
    pub fn statistics_rows(&self) -> &SideLayout {
        self.statistics.as_ref().map_or(&self.q, |statistics| &statistics.rows)
    }

    /// Whether the statistics of a query head are here.
    pub fn has_statistics(&self, head: usize) -> bool {
        self.statistics.as_ref().is_none_or(|statistics| statistics.heads.contains(&head))
    }

    /// Returns the heads of statistics, in a problem of so many query heads.
    pub fn statistics_heads(&self, q: usize) -> Range<usize> {
        self.statistics.as_ref().map_or(0..q, |statistics| statistics.heads.clone())
    }
}

/// Returns a sequence's rows in the problem's own tensors.
pub fn run_of(sequence: &Sequence, side: Side) -> Run {
    match side {
        Side::Q => sequence.q,
        Side::Kv => sequence.kv,
    }
}

/// Returns the number of rows of the problem's own tensors.
fn rows_of(problem: &Problem, side: Side) -> usize {
    match side {
        Side::Q => problem.rows.q,
        Side::Kv => problem.rows.kv,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRIPES: [Balance; 2] = [Balance::Striped { stripe: 1 }, Balance::Striped { stripe: 2 }];

    /// Returns a digit for each position of a span in two texts: its rank, and its row in that rank's slot.
    fn picture(balance: Balance, cp: usize, span: usize) -> [String; 2] {
        let dealt = |position| deal(balance, cp, span, position);
        let digits = |pick: fn((usize, usize)) -> usize| {
            (0..span).map(|position| char::from(b'0' + pick(dealt(position)) as u8)).collect()
        };
        [digits(|(rank, _)| rank), digits(|(_, row)| row)]
    }

    #[test]
    fn positions_are_dealt_as_drawn() {
        assert_eq!(picture(Balance::Contiguous, 2, 8), ["00001111", "01230123"]);
        assert_eq!(picture(Balance::DualChunk, 2, 8), ["00111100", "01012323"]);
        assert_eq!(picture(STRIPES[0], 2, 8), ["01010101", "00112233"]);
        assert_eq!(picture(STRIPES[1], 2, 8), ["00110011", "01012323"]);
        assert_eq!(picture(Balance::Contiguous, 3, 12), ["000011112222", "012301230123"]);
        assert_eq!(picture(Balance::DualChunk, 3, 12), ["001122221100", "010101232323"]);
        assert_eq!(picture(STRIPES[0], 3, 12), ["012012012012", "000111222333"]);
        assert_eq!(picture(STRIPES[1], 3, 12), ["001122001122", "010101232323"]);
    }
}
