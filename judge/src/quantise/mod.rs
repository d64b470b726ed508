//! The judge of quantisers: codes, scales and largest magnitudes, bit for bit.
//!
//! A [`Quantiser`] gets the tensors of every rank at once, since their largest magnitudes are reduced over ranks. It is
//! asked three times, with zeros, with NaN or infinities and with large numbers in all rows that are not real. Each
//! answer is compared with [`oracle`](seamproof_oracle::quantise::quantise), which never sees these rows:
//!
//! | what | rule | check |
//! |---|---|---|
//! | shapes, number of ranks and tensors | those of the rank's layout and of the groups | `structure` |
//! | codes of rows that are not real | 0, where the subject says so | `structure` |
//! | amax, descale, history | the same bits, on every rank | `exact` |
//! | codes of real rows | the same bits | `exact` |
//! | any of these under other fills, where zeros give the right answer | the same bits | `poison` |
//!
//! A scale of a whole tensor, head or sequence must be right on every rank, also on one that holds no row of it: codes
//! that come from another rank are decoded with it. A scale of rows is read on the ranks that hold a real one of them.

mod case;
mod draw;

use ndarray::{Array3, s};
use seamproof_oracle::quantise::{Answer, NotFinite, Quantisation, Quantised, quantise};
use seamproof_oracle::sharding::{self, RankLayout, ShardingError, SideLayout};
use seamproof_oracle::{InputViews, Inputs, TensorName};
use seamproof_simulator::quantiser::{EmulatedQuantiser, RankCodes, RankQuantised, RankValues};

use crate::finding::{Check, Finding, Place, number};
use crate::ladder::ELEMENTS_MAX;
use crate::shrink::Shrinker;
use crate::values::{self, Poison};

pub use case::QuantisationCase;
pub use draw::draw;

/// A subject that quantises.
pub trait Quantiser: Sync {
    /// Returns the name in reports.
    fn name(&self) -> &str;

    /// Whether rows that are not real get codes of 0. A subject without this promise may leave any code there.
    fn zeroes_padding(&self) -> bool {
        true
    }

    /// Quantises the tensors of all ranks, in group order. An error is a subject that failed.
    fn run(&self, asked: &Quantisation, ranks: &[RankValues]) -> Result<Vec<RankQuantised>, String>;
}

impl Quantiser for EmulatedQuantiser {
    fn name(&self) -> &str {
        "emulated-quantiser"
    }

    fn run(&self, asked: &Quantisation, ranks: &[RankValues]) -> Result<Vec<RankQuantised>, String> {
        Ok(EmulatedQuantiser::run(self, asked, ranks))
    }
}

/// The judge's answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Judged {
    /// Every bit is right.
    Right,
    /// Something is wrong.
    Wrong(Box<Finding>),
    /// The problem cannot be dealt to its ranks, and is not asked.
    Uncut(ShardingError),
    /// A real value is not finite, and the definition says nothing.
    NotFinite(NotFinite),
    /// The tensors have so many elements, which are more than [`ELEMENTS_MAX`], and nothing is drawn.
    TooLarge(u64),
}

/// Judges a subject on one quantisation, whose values are drawn as its problem's mode says.
pub fn judge(subject: &dyn Quantiser, asked: &Quantisation) -> Judged {
    let elements = asked.problem.elements();
    if elements > ELEMENTS_MAX {
        return Judged::TooLarge(elements);
    }
    let inputs = values::inputs(&asked.problem);
    let answer = match quantise(asked, &inputs) {
        Ok(answer) => answer,
        Err(error) => return Judged::NotFinite(error),
    };
    let layouts = match sharding::layouts(&asked.problem) {
        Ok(layouts) => layouts,
        Err(error) => return Judged::Uncut(error),
    };
    let fills = [Poison::Zero, Poison::strongest(&asked.problem), Poison::Large];
    for (run, fill) in fills.into_iter().enumerate() {
        let comparison = Comparison { asked, answer: &answer, layouts: &layouts };
        let finding = match subject.run(asked, &comparison.given(&inputs, fill)) {
            Ok(got) => comparison.finding(&got, subject.zeroes_padding()),
            Err(text) => Some(Finding::new(Check::Crash, None, text)),
        };
        if let Some(mut finding) = finding {
            if run > 0 && finding.check == Check::Exact {
                finding.check = Check::Poison;
                finding.what = format!("with {fill} in rows that are not real: {}", finding.what);
            }
            return Judged::Wrong(Box::new(finding));
        }
    }
    Judged::Right
}

/// Shrinks a quantisation on which a subject is wrong: the problem by the steps of every case, and the list of tensors.
/// Returns the smallest one that breaks the same check on the same tensor, with its finding.
pub fn shrink(subject: &dyn Quantiser, asked: &Quantisation, finding: Finding) -> (Quantisation, Finding) {
    let same = |candidate: &Quantisation, finding: &Finding| match judge(subject, candidate) {
        Judged::Wrong(found) if (found.check, found.tensor) == (finding.check, finding.tensor) => {
            Some(*found)
        }
        _ => None,
    };
    let (mut best, mut finding) = (asked.clone(), finding);
    for tensor in asked.tensors.clone() {
        let fewer = best.tensors.iter().copied().filter(|other| *other != tensor).collect();
        let candidate = draw::edited(&best, |fields| fields.tensors = fewer);
        if let Some((candidate, found)) = candidate.and_then(|c| same(&c, &finding).map(|found| (c, found))) {
            (best, finding) = (candidate, found);
        }
    }
    let mut shrinker = Shrinker::new(best.problem.clone());
    while let Some(problem) = shrinker.propose().cloned() {
        let candidate = draw::edited(&best, |fields| fields.problem = problem);
        match candidate.and_then(|candidate| same(&candidate, &finding).map(|found| (candidate, found))) {
            Some((candidate, found)) => {
                shrinker.accept(0);
                (best, finding) = (candidate, found);
            }
            None => shrinker.reject(),
        }
    }
    (best, finding)
}

/// A right answer, and the ranks that it is dealt to.
struct Comparison<'a> {
    asked: &'a Quantisation,
    answer: &'a Answer,
    layouts: &'a [RankLayout],
}

impl Comparison<'_> {
    /// Returns every rank's tensors, with a fill in all rows that are not real.
    fn given(&self, inputs: &Inputs, fill: Poison) -> Vec<RankValues> {
        let of_rank = |layout: &RankLayout| RankValues {
            layout: layout.clone(),
            tensors: self
                .asked
                .tensors
                .iter()
                .map(|tensor| self.local(inputs, *tensor, layout, fill))
                .collect(),
        };
        self.layouts.iter().map(of_rank).collect()
    }

    fn local(&self, inputs: &Inputs, tensor: TensorName, layout: &RankLayout, fill: Poison) -> Array3<f32> {
        let (side, inputs) = (layout.side(tensor.side()), InputViews::from(inputs));
        let whole = inputs.of(tensor);
        let mut local = Array3::zeros([side.rows, whole.dim().1, whole.dim().2]);
        let mut real = vec![false; side.rows];
        for (row, from) in self.real_rows(side, tensor) {
            real[row] = true;
            local.slice_mut(s![row, .., ..]).assign(&whole.slice(s![from, .., ..]));
        }
        values::poison_rows(local.view_mut(), ndarray::Axis(0), &real, fill);
        local
    }

    /// Returns each real row of a rank, with its row in the whole tensor.
    fn real_rows(&self, side: &SideLayout, tensor: TensorName) -> Vec<(usize, usize)> {
        let rows = side.runs.iter().flat_map(|placed| {
            let run = sharding::run_of(&self.asked.problem.sequences[placed.sequence], tensor.side());
            (0..placed.local.len)
                .map(move |i| (placed.local.row(i), run.row(placed.piece.start + i * placed.piece.step)))
        });
        rows.collect()
    }

    /// Returns what is wrong with the answers of all ranks.
    fn finding(&self, got: &[RankQuantised], zeroes_padding: bool) -> Option<Finding> {
        if got.len() != self.layouts.len() {
            let what = format!("{} ranks answered, the problem has {}", got.len(), self.layouts.len());
            return Some(Finding::new(Check::Structure, None, what));
        }
        let ranks = || got.iter().zip(self.layouts).enumerate();
        ranks()
            .find_map(|(rank, (got, layout))| self.shapes(rank, got, layout))
            .or_else(|| ranks().find_map(|(rank, (got, layout))| self.factors(rank, got, layout)))
            .or_else(|| ranks().find_map(|(rank, (got, _))| self.history(rank, got)))
            .or_else(|| ranks().find_map(|(rank, (got, layout))| self.codes(rank, got, layout)))
            .or_else(|| {
                ranks()
                    .filter(|_| zeroes_padding)
                    .find_map(|(rank, (got, layout))| self.padding(rank, got, layout))
            })
    }

    /// Returns each tensor of a rank with its right answer.
    fn tensors<'g>(
        &'g self,
        got: &'g RankQuantised,
    ) -> impl Iterator<Item = (TensorName, &'g RankCodes, &'g Quantised)> {
        let both = got.tensors.iter().zip(&self.answer.tensors);
        self.asked.tensors.iter().zip(both).map(|(tensor, (got, right))| (*tensor, got, right))
    }

    fn shapes(&self, rank: usize, got: &RankQuantised, layout: &RankLayout) -> Option<Finding> {
        let wrong =
            |tensor, what: String| Finding::new(Check::Structure, tensor, format!("rank {rank}: {what}"));
        if got.tensors.len() != self.asked.tensors.len() {
            let what = format!("{} tensors, {} were asked for", got.tensors.len(), self.asked.tensors.len());
            return Some(wrong(None, what));
        }
        self.tensors(got).find_map(|(tensor, got, right)| {
            let (_, heads, lanes) = right.codes.dim();
            let codes = [layout.side(tensor.side()).rows, heads, lanes];
            let scales = <[usize; 3]>::from(right.descale.dim());
            let each = [
                ("codes", got.codes.shape(), codes),
                ("amax", got.amax.shape(), scales),
                ("descale", got.descale.shape(), scales),
            ];
            let (what, got, right) = each.into_iter().find(|(_, got, right)| *got != right)?;
            Some(wrong(Some(tensor), format!("{what} have shape {got:?}, not {right:?}")))
        })
    }

    fn factors(&self, rank: usize, got: &RankQuantised, layout: &RankLayout) -> Option<Finding> {
        self.tensors(got).find_map(|(tensor, got, right)| {
            let held = self.held(tensor, layout);
            [("amax", &got.amax, &right.amax), ("descale", &got.descale, &right.descale)]
                .into_iter()
                .find_map(|(what, got, right)| {
                    let differs = |at: &[usize; 3]| held[*at] && got[*at].to_bits() != right[*at].to_bits();
                    let all = right.indexed_iter().map(|((group, head, lanes), _)| [group, head, lanes]);
                    let wrong: Vec<[usize; 3]> = all.filter(differs).collect();
                    let &first = wrong.first()?;
                    let text = format!("rank {rank}: {what} of the group at {first:?} of {tensor}");
                    let place = Place { head: Some(first[1]), ..Place::default() };
                    let numbers = [number(got[first]), number(right[first])];
                    Some(finding(tensor, text, place, numbers, [wrong.len(), right.len()]))
                })
        })
    }

    /// Returns which scales of a tensor are read on a rank.
    fn held(&self, tensor: TensorName, layout: &RankLayout) -> Array3<bool> {
        let groups = self.asked.groups(tensor);
        let mut held = Array3::from_elem(groups.shape(), !groups.are_of_rows());
        let [_, heads, lanes] = self.asked.problem.shape_of(tensor);
        for placed in layout.side(tensor.side()).runs.iter().filter(|_| groups.are_of_rows()) {
            for position in (0..placed.local.len).map(|i| placed.piece.start + i * placed.piece.step) {
                for (head, lane) in (0..heads).flat_map(|head| (0..lanes).map(move |lane| (head, lane))) {
                    held[groups.of(placed.sequence, position, head, lane)] = true;
                }
            }
        }
        held
    }

    fn history(&self, rank: usize, got: &RankQuantised) -> Option<Finding> {
        let bits = |history: &Option<Vec<f32>>| {
            history.as_ref().map(|history| history.iter().map(|amax| amax.to_bits()).collect::<Vec<u32>>())
        };
        if bits(&got.history) == bits(&self.answer.history) {
            return None;
        }
        let what = format!("rank {rank}: the history is {:?}, not {:?}", got.history, self.answer.history);
        Some(Finding::new(Check::Exact, None, what))
    }

    fn codes(&self, rank: usize, got: &RankQuantised, layout: &RankLayout) -> Option<Finding> {
        self.tensors(got).find_map(|(tensor, got, right)| {
            let side = layout.side(tensor.side());
            let (mut failed, mut compared, mut first) = (0, 0, None);
            for (row, from) in self.real_rows(side, tensor) {
                let (codes, expected) =
                    (got.codes.slice(s![row, .., ..]), right.codes.slice(s![from, .., ..]));
                for (((head, lane), code), expected) in codes.indexed_iter().zip(expected) {
                    compared += 1;
                    if code != expected {
                        failed += 1;
                        first.get_or_insert((row, head, lane, *code, *expected));
                    }
                }
            }
            let (row, head, lane, code, expected) = first?;
            let text = format!("rank {rank}: a code of {tensor} in its row {row}");
            let numbers = [code, expected].map(|code| self.code_text(code));
            Some(finding(tensor, text, place(side, row, head, lane), numbers, [failed, compared]))
        })
    }

    /// Returns a code with the number that it stands for.
    fn code_text(&self, code: u8) -> String {
        format!("code {code:#04x} ({})", number(self.asked.element.format.decode(u32::from(code))))
    }

    fn padding(&self, rank: usize, got: &RankQuantised, layout: &RankLayout) -> Option<Finding> {
        self.tensors(got).find_map(|(tensor, got, _)| {
            let side = layout.side(tensor.side());
            let mut codes = got.codes.clone();
            for (row, _) in self.real_rows(side, tensor) {
                codes.slice_mut(s![row, .., ..]).fill(0);
            }
            let ((row, head, lane), code) = codes.indexed_iter().find(|(_, code)| **code != 0)?;
            let text = format!("rank {rank}: a code of {tensor} in its row {row}, which is not real");
            let failed = codes.iter().filter(|code| **code != 0).count();
            let numbers = [*code, 0].map(|code| self.code_text(code));
            let wrong = finding(tensor, text, place(side, row, head, lane), numbers, [failed, codes.len()]);
            Some(Finding { check: Check::Structure, ..wrong })
        })
    }
}

/// Returns the place of an element in a row of a rank.
fn place(side: &SideLayout, row: usize, head: usize, lane: usize) -> Place {
    let owner = side.runs.iter().find_map(|placed| {
        let i = (0..placed.local.span).find(|&i| placed.local.row(i) == row)?;
        Some((placed.sequence, placed.piece.start + i * placed.piece.step))
    });
    Place {
        sequence: owner.map(|(sequence, _)| sequence),
        head: Some(head),
        row: Some(owner.map_or(row, |(_, position)| position)),
        lane: Some(lane),
    }
}

fn finding(
    tensor: TensorName,
    what: String,
    place: Place,
    [got, expected]: [String; 2],
    [failed, compared]: [usize; 2],
) -> Finding {
    Finding {
        place,
        got: Some(got),
        expected: Some(expected),
        failed,
        compared,
        ..Finding::new(Check::Exact, Some(tensor), what)
    }
}
