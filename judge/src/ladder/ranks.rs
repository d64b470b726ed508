//! Ranks: what a wrong row of a run on several ranks made of the rows that one of them holds. It is a part of a
//! finding's text, and never a verdict.
//!
//! A row of out is the weighed mean of values, and a row of a gradient a sum over rows of the other side. These rows lie
//! on ranks, and on their way to the row a whole rank's may be lost, added twice, or be those of another rank. Each such
//! mistake predicts a row. It is told if the prediction leaves no more of the row's error than roundings would, and
//! less than any single pair of query and key does.
//!
//! *Late*: in a ring, rank r works on its own keys first, then on those of rank r − 1, and so on. Keys that come one
//! step late are those of the rank after the right one, read in the same rows. The mask is that of the right ones.
//!
//! Words name ranks of the world, as `explain` does; all else counts them in the group.

use std::collections::BTreeSet;

use seamproof_oracle::sharding::RankLayout;
use seamproof_oracle::{Algorithm, Side, TensorName};

use super::dealt::{Dealt, Part, Place};
use super::pairs::Pairs;
use super::rows::{Finished, Row};
use super::stories::REST_MAX;
use crate::prose::counted;

/// Largest number of pairs, times lanes, of a row that is explained: some seconds for the finding.
const WORK_MAX: usize = 1 << 30;
/// Largest number of rows of a part that are asked whether the same befell them.
const ROWS_MAX: usize = 8;
/// Relative size of what roundings of a 16-bit format leave.
const ROUNDING: f64 = 1.0 / (1 << 7) as f64;

/// A mistake that explains a row.
pub(super) struct Told {
    /// The row, or the part of its rank's rows, and what befell it.
    pub(super) words: String,
    /// Share of the row's error that the mistake does not explain.
    pub(super) rest: f64,
}

/// What the ranks of a group are called: their numbers in the world.
#[derive(Clone, Copy)]
struct Names<'l>(&'l [RankLayout]);

impl Names<'_> {
    /// Returns the name of a rank of the group, counted around it.
    fn of(self, rank: usize) -> String {
        format!("rank {}", self.0[rank % self.0.len()].rank)
    }

    fn of_part(self, part: Part) -> String {
        let rank = self.of(part.rank);
        match part.chunk {
            Some(chunk) => format!("{rank}'s {} chunk", ["first", "second"][chunk]),
            None => rank,
        }
    }

    /// Returns a part in words, as the subject of a sentence.
    fn as_subject(self, part: Part) -> String {
        let words = self.of_part(part);
        if part.chunk.is_some() { words } else { format!("{words}'s part") }
    }
}

/// Returns all ranks, and all chunks of ranks that have two.
fn scopes(dealt: &Dealt) -> Vec<Part> {
    let ranks = (0..dealt.ranks).map(|rank| Part { rank, chunk: None });
    ranks.chain(dealt.parts.iter().copied().filter(|part| part.chunk.is_some())).collect()
}

/// Returns the position that the rank `by` places further holds in the same row as a position's own rank.
fn neighbour(dealt: &Dealt, position: usize, by: usize) -> Option<usize> {
    let Place { part, row, .. } = dealt.place(position)?;
    dealt.position((part.rank + by) % dealt.ranks, row)
}

/// Rows of the other side that a mistake is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    All,
    /// Those of all ranks but the row's own.
    Others,
    Of(Part),
}

impl Scope {
    fn holds(self, part: Part, own: Part) -> bool {
        match self {
            Scope::All => true,
            Scope::Others => part.rank != own.rank,
            Scope::Of(scope) => scope.holds(part),
        }
    }
}

/// What befell rows of the other side on their way to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Lost,
    Twice,
    /// All others were lost.
    Alone,
    /// They were seen where the mask hides them, too.
    Shown,
    Zeros,
    /// They were those of the rank so many places further.
    Late(usize),
}

/// Fates that rows of any program may have.
const FATES: [Fate; 5] = [Fate::Lost, Fate::Twice, Fate::Alone, Fate::Shown, Fate::Zeros];

/// A mistake that may explain a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    Befell(Scope, Fate),
    /// The row is that of the rank so many places further.
    Moved(usize),
}

/// Contributions of one part to a row.
struct Share {
    part: Part,
    /// Numbers of rows that the row sees, and that it does not.
    seen: usize,
    hidden: usize,
    /// Sum of what it sees.
    sum: Vec<f64>,
    /// Sum of all.
    all: Vec<f64>,
    /// Sum of what it sees if that were zeros.
    zeros: Vec<f64>,
    /// Sum of what it sees if that were the rows of each neighbour; `None` where these are not known.
    late: [Option<Vec<f64>>; 2],
}

impl Share {
    fn of(row: &Row<'_>, others: &Dealt, part: Part) -> Share {
        let [sum, all, zeros, first, second] = [(); 5].map(|()| vec![0.0; row.width()]);
        let mut share =
            Share { part, seen: 0, hidden: 0, sum, all, zeros, late: [Some(first), Some(second)] };
        others.positions(part).for_each(|position| share.add(row, others, position));
        share
    }

    fn add(&mut self, row: &Row<'_>, others: &Dealt, position: usize) {
        row.add(position, &mut self.all);
        if !row.sees(position) {
            self.hidden += 1;
            return;
        }
        self.seen += 1;
        row.add(position, &mut self.sum);
        row.add_zeros(&mut self.zeros);
        for (late, by) in self.late.iter_mut().zip(neighbours(others.ranks)) {
            match (neighbour(others, position, by), late.as_mut()) {
                (Some(other), Some(late)) if row.reads_travelling_rows() => row.add(other, late),
                _ => *late = None,
            }
        }
    }
}

/// A row as a sum of what each part contributes.
struct Sums {
    shares: Vec<Share>,
    /// Part that holds the row.
    own: Part,
    /// Whether the row is a mean, and no plain sum.
    is_mean: bool,
    /// Number of lanes of a sum.
    width: usize,
}

impl Sums {
    fn of(row: &Row<'_>, own: Part, others: &Dealt) -> Sums {
        let shares = others.parts.iter().map(|part| Share::of(row, others, *part)).collect();
        Sums { shares, own, is_mean: row.tensor() == TensorName::Out, width: row.width() }
    }

    /// Returns the sum of what is taken of each share; `None` where one is not known.
    fn sum<'a>(&'a self, take: impl Fn(&'a Share) -> Option<(f64, &'a Vec<f64>)>) -> Option<Vec<f64>> {
        let mut sum = vec![0.0; self.width];
        for share in &self.shares {
            let (times, values) = take(share)?;
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += times * value);
        }
        Some(sum)
    }

    fn right(&self) -> Vec<f64> {
        self.sum(|share| Some((1.0, &share.sum))).unwrap_or_default()
    }

    /// Returns the sum with a mistake; `None` where it changes no row, or takes rows that are not known.
    fn with(&self, scope: Scope, fate: Fate) -> Option<Vec<f64>> {
        if self.count(scope, fate) == 0 {
            return None;
        }
        self.sum(|share| match (scope.holds(share.part, self.own), fate) {
            (false, Fate::Alone) | (true, Fate::Lost) => Some((0.0, &share.sum)),
            (false, _) | (true, Fate::Alone) => Some((1.0, &share.sum)),
            (true, Fate::Twice) => Some((2.0, &share.sum)),
            (true, Fate::Shown) => Some((1.0, &share.all)),
            (true, Fate::Zeros) => Some((1.0, &share.zeros)),
            (true, Fate::Late(by)) => Some((1.0, share.late[usize::from(by != 1)].as_ref()?)),
        })
    }

    /// Returns the number of rows of the other side that a fate befell.
    fn count(&self, scope: Scope, fate: Fate) -> usize {
        let of = self.shares.iter().filter(|share| scope.holds(share.part, self.own));
        of.map(|share| if fate == Fate::Shown { share.hidden } else { share.seen }).sum()
    }

    /// Whether a mistake is asked for where it has to explain a row for itself.
    fn is_asked(&self, mistake: Mistake) -> bool {
        match mistake {
            // A single pair that was lost or shown is told as that.
            Mistake::Befell(scope, fate @ (Fate::Lost | Fate::Shown)) => self.count(scope, fate) > 1,
            // In a plain sum zeros are nothing else than lost.
            Mistake::Befell(_, Fate::Zeros) => self.is_mean,
            _ => true,
        }
    }
}

/// Returns how many places further the two neighbours in a ring are: the one that comes a step earlier, and the one
/// that comes a step later. Of two ranks they are the same one.
fn neighbours(ranks: usize) -> impl Iterator<Item = usize> {
    [1, ranks - 1].into_iter().take(if ranks > 2 { 2 } else { 1 })
}

/// Returns what befell a wrong row, if one mistake with the rows of ranks explains it. `row` returns any row of the
/// wrong one's sequence and head.
pub(super) fn told<'a>(
    pairs: &Pairs<'a>,
    layouts: &[RankLayout],
    wrong: &Row<'a>,
    row: impl Fn(usize) -> Option<Row<'a>>,
) -> Option<Told> {
    let side = wrong.side();
    let other = if side == Side::Q { Side::Kv } else { Side::Q };
    let work = pairs.len(other).saturating_mul(wrong.work());
    let parallel = &pairs.problem.parallel;
    let is_plain = layouts.len() == parallel.size() && pairs.problem.sharing.is_empty();
    if layouts.len() < 2 || !is_plain || work > WORK_MAX {
        return None;
    }
    let is_ring = matches!(parallel.algorithm, Algorithm::Ring | Algorithm::Hierarchical { .. });
    let [own, others] = [side, other].map(|side| Dealt::new(layouts, pairs, side));
    let part = own.place(wrong.position())?.part;
    let asked = Asked { is_ring, own: &own, others: &others, row: &row };
    let (mistake, rest) = asked.best(part, wrong)?;
    let rows = (WORK_MAX / work.max(1)).min(ROWS_MAX);
    let names = Names(layouts);
    let back = if wrong.tensor() == TensorName::Out { "" } else { "in the backward " };
    if mistake == alone(part.rank) && asked.befell_each_rank(rows) {
        return Some(Told { words: format!("{back}{}", alone_everywhere(wrong, pairs.sequence)), rest });
    }
    let what = match asked.befell_all(mistake, part, wrong.position(), rows) {
        true => format!("{} of sequence {}", names.as_subject(part), pairs.sequence),
        false => format!("{}, on {},", wrong.words(), names.of(part.rank)),
    };
    Some(Told { words: format!("{back}{what} {}", wording(mistake, part, wrong, names)), rest })
}

/// Returns the mistake of a rank whose rows meet none of the other ranks' rows.
fn alone(rank: usize) -> Mistake {
    Mistake::Befell(Scope::Of(Part { rank, chunk: None }), Fate::Alone)
}

/// Returns in words that all ranks of a sequence make that mistake: nothing was exchanged, or summed.
fn alone_everywhere(wrong: &Row<'_>, sequence: usize) -> String {
    let what = match wrong.side() {
        Side::Q => "saw its own keys alone".to_owned(),
        Side::Kv => {
            format!("received from its own queries alone: {} was not summed over ranks", wrong.tensor())
        }
    };
    format!("each rank's part of sequence {sequence} {what}")
}

/// Rows of one sequence that are asked what befell them.
struct Asked<'r, F> {
    /// Whether keys travel from rank to rank.
    is_ring: bool,
    own: &'r Dealt,
    others: &'r Dealt,
    row: &'r F,
}

impl<'a, F: Fn(usize) -> Option<Row<'a>>> Asked<'_, F> {
    /// Returns the mistake that leaves least of a row's error, and the share that it leaves.
    fn best(&self, part: Part, wrong: &Row<'a>) -> Option<(Mistake, f64)> {
        let sums = Sums::of(wrong, part, self.others);
        let right = wrong.finished(&sums.right())?;
        let asked = self.mistakes().into_iter().filter(|mistake| sums.is_asked(*mistake));
        let explaining = asked.filter_map(|mistake| {
            let predicted = self.predicted(mistake, wrong, &sums)?;
            let rest = rest_of(&predicted, wrong.got(), &right);
            let is_told =
                !is_same(&predicted, &right) && (sums.is_mean || is_close(&predicted, wrong.got(), &right));
            (is_told && rest < REST_MAX).then_some((mistake, rest))
        });
        // Of two that explain about as much, the one that is asked first is the simpler one.
        explaining.reduce(|best, other| if other.1 < best.1 / 2.0 { other } else { best })
    }

    /// Returns the mistakes to ask for, simple ones first.
    fn mistakes(&self) -> Vec<Mistake> {
        let parts = scopes(self.others);
        let each = |fate| parts.iter().map(move |part| Mistake::Befell(Scope::Of(*part), fate));
        let mut mistakes = vec![Mistake::Befell(Scope::All, Fate::Twice)];
        mistakes.extend(FATES.into_iter().flat_map(each));
        mistakes.push(Mistake::Befell(Scope::Others, Fate::Twice));
        for by in neighbours(self.own.ranks).filter(|_| self.is_ring) {
            mistakes.extend(each(Fate::Late(by)));
            mistakes.extend([Mistake::Befell(Scope::Others, Fate::Late(by)), Mistake::Moved(by)]);
        }
        mistakes
    }

    fn predicted(&self, mistake: Mistake, wrong: &Row<'a>, sums: &Sums) -> Option<Finished> {
        match mistake {
            Mistake::Moved(by) => {
                let other = (self.row)(neighbour(self.own, wrong.position(), by)?)?;
                let moved = other.finished(&Sums::of(&other, sums.own, self.others).right())?;
                // Rows of zeros are everywhere alike.
                (moved.norm() > ROUNDING * wrong.finished(&sums.right())?.norm()).then_some(moved)
            }
            Mistake::Befell(scope, fate) => wrong.finished(&sums.with(scope, fate)?),
        }
    }

    /// Whether a mistake explains all rows of a part that are looked at, and more than the one that led to it.
    fn befell_all(&self, mistake: Mistake, part: Part, known: usize, rows: usize) -> bool {
        self.explained(mistake, part, Some(known), rows).is_some_and(|explained| explained > 0)
    }

    /// Whether the rows of several ranks met none of the other ranks' rows, and those of no rank contradict it.
    fn befell_each_rank(&self, rows: usize) -> bool {
        let rows = (rows / self.own.parts.len()).max(1);
        let explained = |part: &Part| Some((part.rank, self.explained(alone(part.rank), *part, None, rows)?));
        let each: Option<Vec<(usize, usize)>> = self.own.parts.iter().map(explained).collect();
        let ranks = each.into_iter().flatten().filter(|(_, explained)| *explained > 0);
        ranks.map(|(rank, _)| rank).collect::<BTreeSet<_>>().len() > 1
    }

    /// Returns how many of a part's wrong rows that are looked at a mistake explains, apart from a known one; `None` where it
    /// does not explain one of them.
    fn explained(&self, mistake: Mistake, part: Part, known: Option<usize>, rows: usize) -> Option<usize> {
        let all: Vec<usize> = self.own.positions(part).filter(|position| Some(*position) != known).collect();
        let step = all.len().div_ceil(rows.max(1)).max(1);
        let mut explained = 0;
        for &position in all.iter().step_by(step) {
            let Some(row) = (self.row)(position) else { continue };
            let sums = Sums::of(&row, part, self.others);
            let Some(right) = row.finished(&sums.right()) else { continue };
            match self.predicted(mistake, &row, &sums) {
                Some(predicted) if !is_same(&predicted, &right) => {
                    if rest_of(&predicted, row.got(), &right) > REST_MAX {
                        return None;
                    }
                    explained += 1;
                }
                _ if is_right(row.got(), &right) => {}
                // None of its own rank's rows are to be met.
                None if mistake == alone(part.rank) && row.got().norm() == 0.0 => {}
                _ => return None,
            }
        }
        Some(explained)
    }
}

/// Whether a row's lanes are those of the right one but for roundings.
fn is_right(row: &Finished, right: &Finished) -> bool {
    row.distance(right) <= ROUNDING * right.norm()
}

/// Whether a prediction is the right row but for roundings, its LSE included.
fn is_same(predicted: &Finished, right: &Finished) -> bool {
    let of_lse = predicted.lse.zip(right.lse).map_or(0.0, |(predicted, right)| (predicted - right).abs());
    is_right(predicted, right) && of_lse <= ROUNDING
}

/// Whether a row is a predicted one rather than 0 or twice the right one. Many mistakes make a gradient so.
fn is_close(predicted: &Finished, got: &Finished, right: &Finished) -> bool {
    let twice = Finished { lanes: right.lanes.iter().map(|lane| 2.0 * lane).collect(), lse: None };
    predicted.distance(got) < REST_MAX * predicted.norm().min(predicted.distance(&twice))
}

/// Returns the share of a row's error that a prediction leaves: of its lanes, or of its LSE where its lanes are right. It
/// is infinite where the LSE that was returned is not the predicted one.
fn rest_of(predicted: &Finished, got: &Finished, right: &Finished) -> f64 {
    let of_lanes = || predicted.distance(got) / right.distance(got);
    let (Some(of_predicted), Some(of_got), Some(of_right)) = (predicted.lse, got.lse, right.lse) else {
        return of_lanes();
    };
    let (left, whole) = ((of_got - of_predicted).abs(), (of_got - of_right).abs());
    let rounding = 4.0 * f64::from(f32::EPSILON) * of_right.abs().max(1.0);
    match is_right(got, right) && is_right(predicted, right) {
        // One number is soon explained, so nothing but roundings may be left of it.
        true if left <= rounding => left / whole,
        false if left <= REST_MAX * whole + rounding => of_lanes(),
        _ => f64::INFINITY,
    }
}

/// Returns in words the mistake of a row of `own`'s.
fn wording(mistake: Mistake, own: Part, row: &Row<'_>, names: Names<'_>) -> String {
    let ranks = names.0.len();
    let (rows, is_seeing) = if row.side() == Side::Q { ("keys", true) } else { ("queries", false) };
    let (scope, fate) = match mistake {
        Mistake::Befell(scope, fate) => (scope, fate),
        Mistake::Moved(by) => {
            return format!("holds what belongs into the same rows of {}", names.of(own.rank + by));
        }
    };
    let of = match scope {
        Scope::All => format!("all {rows}"),
        Scope::Others => format!("the {rows} of all other ranks"),
        Scope::Of(part) => format!("the {rows} of {}", names.of_part(part)),
    };
    match (fate, scope) {
        (Fate::Lost, _) if is_seeing => format!("missed {of}"),
        (Fate::Lost, _) => format!("received nothing from {of}"),
        (Fate::Twice, _) => format!("counted {of} twice"),
        (Fate::Alone, _) if is_seeing => format!("saw {of} alone"),
        (Fate::Alone, _) => format!("received from {of} alone"),
        (Fate::Shown, _) => format!("did not hide {of} that the mask hides"),
        (Fate::Zeros, _) => format!("found zeros in the place of {of}"),
        (Fate::Late(by), Scope::Of(part)) => {
            let (read, steps) = ((part.rank + by) % ranks, steps_late(part.rank, by, own.rank, ranks));
            let read = if read == own.rank {
                "its own keys".into()
            } else {
                format!("the keys of {}", names.of(read))
            };
            format!("took {read} in the place of those of {}, {steps}", names.of_part(part))
        }
        (Fate::Late(1), _) => format!("saw {of} one step late"),
        (Fate::Late(_), _) => format!("took for {of} those of the rank before"),
    }
}

/// Returns in words how late a ring's rank has the keys of `rank` if they are those of the rank `by` places further.
fn steps_late(rank: usize, by: usize, own: usize, ranks: usize) -> String {
    let [due, came] = [rank, rank + by].map(|of| (own + 2 * ranks - of) % ranks);
    let steps = counted(due.abs_diff(came) as u64, "step");
    format!("{steps} {}", if came < due { "late" } else { "early" })
}
