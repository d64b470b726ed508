//! A case to look at, as one HTML page or one picture as SVG; and a page of what a folder tells.
//!
//! Plain data goes in, markup comes out. The pictures need no script and no network, tell fills apart by pattern as well
//! as by colour, and carry a title and a description. Each names what it leaves out, and the numbers of each stand
//! below it. Texts from files are escaped, since a file may hold anything. The same case gives the same bytes.
//!
//! One file for each picture. Of a case: [`layout`](mod@layout), [`mask`](mod@mask), [`schedule`](mod@schedule), and what
//! they show is computed by [`explain`](crate::explain) and by the checker; nothing of the subject is run. Of a folder's
//! [`report`](mod@crate::report): [`errors`](mod@errors), [`margins`](mod@margins), [`way`](mod@way), [`trend`](mod@trend).

mod errors;
mod grid;
mod layout;
mod margins;
mod mask;
mod page;
mod report;
mod schedule;
mod strip;
mod svg;
mod table;
mod timeline;
mod trend;
mod way;

use seamproof_judge::case::Case;
use seamproof_oracle::TensorName;
use seamproof_oracle::sharding::{self, RankLayout, SideLayout};
use seamproof_simulator::check::actions;
use seamproof_simulator::schedule::Schedule;

use crate::backends::unscheduled;
use crate::explain::{Followed, Selection, checked};
use page::{Head, Section};
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
        let sections =
            [self.layout(&layouts), self.mask(&layouts, followed.as_ref()), self.in_time(followed.as_ref())];
        page::page(&head, &sections)
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
            Source::Recorded(_) | Source::Unknown(_) => None,
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
            Source::Unknown(_) => {
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
        let matrices = mask::matrices(self.case, followed);
        let (table, notes) = mask::numbers(&self.case.problem, &matrices);
        Section {
            drawing: Ok(mask::mask(self.case, layouts, &matrices)),
            title: "Who sees whom",
            lead: "The pairs of query and key that the mask shows, beside those that the launches are asked to show. \
                   What a kernel makes of it is not in this picture.",
            tables: vec![table],
            notes,
        }
    }

    fn in_time(&self, followed: Option<&Followed>) -> Section {
        let (drawing, tables, notes) = match self.drawn_in_time(followed) {
            Ok((drawing, table, notes)) => (Ok(drawing), vec![table], notes),
            Err(why) => (Err(why), Vec::new(), Vec::new()),
        };
        let lead = "What each rank does, stream by stream, as early as the schedule allows.";
        Section { drawing, title: "The schedule", lead, tables, notes }
    }

    fn drawn_in_time(
        &self,
        followed: Option<&Followed>,
    ) -> Result<(Drawing, table::Table, Vec<String>), String> {
        let schedule = match &self.source {
            Source::Schedule(schedule) => *schedule,
            Source::Recorded(_) => {
                return Err(
                    "A recording holds what each rank got and gave, and not how: there is no schedule."
                        .to_owned(),
                );
            }
            Source::Unknown(why) => return Err(format!("There is no schedule: {why}")),
        };
        let problem = &self.case.problem;
        let actions = actions(problem, schedule).map_err(|errors| {
            let first = errors.first().map(|error| format!(": {error}")).unwrap_or_default();
            format!("The schedule does not run{first}")
        })?;
        let lanes: Lanes = schedule::lanes(schedule, &actions);
        let parts = match (followed, mask::weightiest(self.case)) {
            (Some(followed), Some(sequence)) => Parts::of(problem, followed, sequence),
            _ => Parts::none(),
        };
        let (table, notes) = schedule::numbers(&lanes, &parts);
        Ok((schedule::schedule(&lanes, &parts), table, notes))
    }
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
    (0..schedule.ranks.len())
        .map(|rank| RankLayout {
            q: side(rank, TensorName::Q),
            kv: side(rank, TensorName::K),
            statistics: None,
        })
        .collect()
}
