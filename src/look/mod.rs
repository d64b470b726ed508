//! A case to look at, as one HTML page or one picture as SVG; and a page of what a folder tells.
//!
//! Plain data goes in, markup comes out. The pictures need no script and no network, tell fills apart by pattern as
//! well as by colour, and carry a title and a description. Each names what it leaves out, and the numbers of each stand
//! below it. Texts from files are escaped, since a file may hold anything. The same case gives the same bytes.
//!
//! One file for each picture. Of a case: [`layout`](mod@layout), [`mask`](mod@mask), [`schedule`](mod@schedule), and
//! what they show is computed by [`explain`](crate::explain) and by the checker; nothing of the subject is run. Of a
//! folder's
//! [`report`](mod@crate::report): [`errors`](mod@errors), [`margins`](mod@margins), [`way`](mod@way),
//! [`trend`](mod@trend).

mod against;
mod errors;
mod grid;
mod hints;
mod layout;
mod map;
mod margins;
mod mask;
mod page;
mod power;
mod ran;
mod report;
mod schedule;
mod strip;
mod svg;
mod table;
mod timeline;
mod trend;
mod way;

use seamproof_judge::case::Case;
use seamproof_judge::ladder::{ErrorMap, ReadRow, SeenRow};
use seamproof_judge::prose::counted;
use seamproof_oracle::sharding::{self, RankLayout, SideLayout};
use seamproof_oracle::{Problem, TensorName};
use seamproof_simulator::check::{CheckError, actions, check};
use seamproof_simulator::schedule::Schedule;

use crate::backends::unscheduled;
use crate::explain::{Followed, OUTSIDE, Selection, checked};
use page::{Head, Section};
pub(crate) use power::page as power_page;
pub(crate) use report::page as report_page;
use schedule::{Lanes, Parts};
use svg::Drawing;

/// A picture of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Picture {
    /// Rows of q and kv as strips.
    Layout,
    /// Pairs of query and key.
    Mask,
    /// Operations of all ranks in time.
    Schedule,
}

/// What is known of how a case's ranks work together.
pub enum Source<'a> {
    /// The schedule of the subject.
    Schedule(&'a Schedule),
    /// The layouts of a recorded run, whose launches are in no file.
    Recorded(Vec<RankLayout>),
    /// The problem's own rule of who holds what: the subject is from outside, and its launches are not known.
    Outside,
    /// Nothing, for this reason. The layout is that of the problem's own rule.
    Unknown(String),
}

/// A case to look at.
pub struct Look<'a> {
    /// The case.
    pub case: &'a Case,
    /// Name of its file.
    pub file: &'a str,
    /// Command that judges it again.
    pub replay: &'a str,
    /// How its ranks work together.
    pub source: Source<'a>,
    /// What a run of it gave.
    pub run: Ran,
}

/// What a run of a case gave; nothing of a case that was not run.
#[derive(Debug, Default)]
pub struct Ran {
    /// Errors of the results, tensor by tensor.
    pub errors: Vec<ErrorMap>,
    /// Keys that the queries saw, decoded.
    pub seen: Vec<SeenRow>,
    /// Queries that read other values than their own.
    pub read: Vec<ReadRow>,
    /// Reasons, in words, why keys or values are not told.
    pub untold: Vec<String>,
}

impl Look<'_> {
    /// Returns the page.
    pub fn page(&self) -> String {
        let problem = &self.case.problem;
        let checked = self.schedule().map(|schedule| checked(problem, schedule, &Selection::default()));
        let unscheduled = unscheduled(&self.case.subject.name);
        let head = Head {
            case: self.case,
            file: self.file,
            replay: self.replay,
            unscheduled: &unscheduled,
            checked,
        };
        let layouts = self.layouts();
        let followed = self.followed();
        let mut sections = vec![self.layout(&layouts), self.mask(&layouts, followed.as_ref())];
        sections.extend(self.errors(&layouts));
        sections.push(self.in_time(followed.as_ref()));
        page::page(&head, &sections)
    }

    /// Returns who sees whom as a small map in letters, for a terminal; nothing of a case without pairs.
    pub fn map(&self) -> String {
        let matrices = mask::matrices_in(self.case, self.followed().as_ref(), &self.run.seen, map::TILES_MAX);
        map::map(&self.layouts(), &matrices)
    }

    /// Returns one picture as a file of its own, or the reason why there is none.
    pub fn picture(&self, picture: Picture) -> Result<String, String> {
        let followed = || self.followed();
        let section = match picture {
            Picture::Layout => self.layout(&self.layouts()),
            Picture::Mask => self.mask(&self.layouts(), followed().as_ref()),
            Picture::Schedule => self.in_time(followed().as_ref()),
        };
        section.drawing.map(|drawing| drawing.alone())
    }

    fn schedule(&self) -> Option<&Schedule> {
        match &self.source {
            Source::Schedule(schedule) => Some(schedule),
            Source::Recorded(_) | Source::Outside | Source::Unknown(_) => None,
        }
    }

    fn followed(&self) -> Option<Followed<'_>> {
        Followed::new(&self.case.problem, self.schedule()?)
    }

    fn layouts(&self) -> Vec<RankLayout> {
        let problem = &self.case.problem;
        match &self.source {
            Source::Schedule(schedule) => placed(schedule),
            Source::Recorded(layouts) => layouts.clone(),
            Source::Outside | Source::Unknown(_) => {
                sharding::layouts(problem).unwrap_or_else(|_| vec![sharding::whole(problem)])
            }
        }
    }

    fn layout(&self, layouts: &[RankLayout]) -> Section {
        Section {
            drawing: Ok(layout::layout(&self.case.problem, layouts)),
            title: "Layout",
            lead: "The rows of the tensors. Each rank’s strips have a scale of their own.",
            tables: layout::numbers(&self.case.problem, layouts),
            notes: Vec::new(),
        }
    }

    fn mask(&self, layouts: &[RankLayout], followed: Option<&Followed>) -> Section {
        let matrices = mask::matrices(self.case, followed, &self.run.seen);
        let (table, numbers) = mask::numbers(&self.case.problem, &matrices);
        let mut notes = mask::differences(&self.case.problem, followed, &self.run.seen);
        notes.extend(numbers);
        Section {
            drawing: Ok(mask::mask(self.case, layouts, &matrices)),
            title: "Who sees whom",
            lead: if self.run.seen.is_empty() {
                "The pairs of query and key that the mask shows, beside those that the launches are asked to show. \
                 What a kernel makes of it is not in this picture."
            } else {
                mask::LEAD
            },
            tables: vec![table],
            notes,
        }
    }

    fn errors(&self, layouts: &[RankLayout]) -> Option<Section> {
        let maps = &self.run.errors;
        let (drawing, worst) = (!maps.is_empty()).then(|| errors::errors(self.case, layouts, maps))?;
        let mut notes = hints::hints(&self.case.problem, maps, &self.run.seen);
        notes.extend(hints::misread(&self.case.problem, &self.run.read));
        notes.extend(worst);
        Some(Section {
            drawing: Ok(drawing),
            title: "Where the results are wrong",
            lead: errors::LEAD,
            tables: vec![errors::numbers(maps)],
            notes,
        })
    }

    fn in_time(&self, followed: Option<&Followed>) -> Section {
        let (drawing, tables, notes) = match self.drawn_in_time(followed) {
            Ok((drawing, table, notes)) => (Ok(drawing), vec![table], notes),
            Err(why) => (Err(why), Vec::new(), Vec::new()),
        };
        let lead = "What each rank does, stream by stream, as early as the schedule allows.";
        Section { drawing, title: "The schedule", lead, tables, notes }
    }

    fn drawn_in_time(&self, followed: Option<&Followed>) -> Result<InTime, String> {
        let schedule = match &self.source {
            Source::Schedule(schedule) => *schedule,
            Source::Recorded(_) => {
                return Err(
                    "A recording holds what each rank got and gave, and not how: there is no schedule."
                        .to_owned(),
                );
            }
            Source::Outside => return Err(format!("There is no schedule: {OUTSIDE}.")),
            Source::Unknown(why) => return Err(format!("There is no schedule: {why}")),
        };
        let problem = &self.case.problem;
        let parts = match (followed, mask::weightiest(self.case)) {
            (Some(followed), Some(sequence)) => Parts::of(problem, followed, sequence),
            _ => Parts::none(),
        };
        let errors = check(problem, schedule).err().unwrap_or_default();
        in_time(problem, schedule, &errors, &parts)
    }
}

/// Picture 3, its numbers, and what it leaves out.
type InTime = (Drawing, table::Table, Vec<String>);

/// Returns the picture of a schedule in time, or the reason why there is none. `errors` are the checker's.
fn in_time(
    problem: &Problem,
    schedule: &Schedule,
    errors: &[CheckError],
    parts: &Parts,
) -> Result<InTime, String> {
    let (actions, stuck) = actions(problem, schedule).map_err(|errors| {
        let first = errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        format!("The schedule does not run{first}")
    })?;
    let lanes: Lanes = schedule::lanes(schedule, (&actions, &stuck), errors);
    let (table, mut notes) = schedule::numbers(&lanes, parts);
    if !stuck.is_empty() {
        let begin = if stuck.len() == 1 { "begins" } else { "begin" };
        let stuck = counted(stuck.len() as u64, "operation");
        notes.insert(
            0,
            format!("The schedule does not come to its end: {stuck} at the right never {begin}, marked ✕."),
        );
    }
    Ok((schedule::schedule(&lanes, parts), table, notes))
}

/// Returns the layouts of a schedule's ranks, as it places q and k.
fn placed(schedule: &Schedule) -> Vec<RankLayout> {
    let side = |rank: usize, tensor: TensorName| {
        let mut side = SideLayout::default();
        for placement in schedule.placements.iter().filter(|placement| placement.tensor == tensor) {
            let buffer = schedule.buffers.get(placement.buffer.0);
            if let Some(buffer) = buffer.filter(|buffer| buffer.rank == rank) {
                side.rows = side.rows.max(buffer.rows);
                side.runs.extend(&placement.rows);
            }
        }
        side
    };
    { schedule.members.iter() }
        .map(|&rank| RankLayout {
            rank,
            q: side(rank, TensorName::Q),
            kv: side(rank, TensorName::K),
            statistics: None,
        })
        .collect()
}
