//! A campaign of a night: run in slices ([`super::slices`]), and joined.
//!
//! The claim: a kill costs the slice in flight and nothing else, as each begins at the case at which the one before it ended;
//! joined they say what one run of the same cases would.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use super::home::file_name;
use super::slices::{begin_of, ended, lost, set_aside_from, slice_of};
use super::{Night, NightError, Watch, left};
use crate::campaign::{self, Event, Logs, Observer, Part, Plan, Registered, Sinks, Start, Stored, Summary};
use crate::record::{RunDir, make_dir};
use seamproof_judge::generate::Profile;
use seamproof_judge::prose::counted;

/// Slices that a campaign is cut into, within [`SLICE`].
const SLICES: f64 = 8.0;
/// Shortest and longest slice: what a kill costs.
const SLICE: (f64, f64) = (1.0, 60.0);

/// A campaign of a night.
#[derive(Clone, Debug)]
pub struct NightCampaign {
    /// The subject.
    pub subject: String,
    /// Sizes.
    pub profile: Profile,
    /// Its sum.
    pub summary: Summary,
    /// What was lost by an earlier end of the night.
    pub lost: Vec<String>,
}

impl Night {
    /// Runs what is left of a campaign, and joins its slices; `None` where somebody stopped it.
    pub(super) fn campaign(
        &self,
        subject: &str,
        profile: Profile,
        seconds: f64,
        watch: &Watch,
        note: &dyn Fn(&str),
    ) -> Result<Option<NightCampaign>, NightError> {
        watch.begin(format!("{subject} {profile}"));
        let subjects = Registered::new(subject)?;
        let dir = self.dir.join(format!("{}-{}", file_name(subject), profile.name()));
        make_dir(&dir)?;
        let (mut parts, mut spent) = (Vec::new(), 0.0);
        let slice = (seconds / SLICES).clamp(SLICE.0, SLICE.1);
        loop {
            let path = slice_of(&dir, parts.len());
            let first =
                parts.last().map_or(0, |part: &Part| part.stored.start.first + part.stored.sums.cases);
            let part = match ended(&path, first)? {
                // What was run before counts, whatever the budget is now.
                Some(part) => {
                    spent += part.stored.sums.seconds;
                    part
                }
                None if spent >= seconds => break,
                None => {
                    if watch.stopped() {
                        return Ok(None);
                    }
                    let time = Duration::from_secs_f64(slice.min(seconds - spent));
                    // Up to the slice behind it, where that is there: it goes on counting. It took about as long to run up to
                    // there before; what lies there need not be of a night.
                    let plan = match begin_of(&slice_of(&dir, parts.len() + 1)).filter(|&next| next > first) {
                        Some(next) => {
                            let twice = Duration::from_secs_f64(2.0 * slice);
                            Plan { first, cases: Some(next), time: Some(twice), ..self.plan(profile) }
                        }
                        None => Plan { first, time: Some(time), ..self.plan(profile) },
                    };
                    let part = self.slice(&plan, &subjects, &path, watch)?;
                    spent += part.stored.sums.seconds.max(slice / 2.0);
                    part
                }
            };
            // A slice whose campaign stopped itself has nothing left that runs its cases.
            let over = part.stored.sums.interrupted;
            parts.push(part);
            if over {
                break;
            }
        }
        set_aside_from(&dir, parts.len())?;
        let lost = lost(&dir);
        lost.iter().for_each(|what| note(what));
        watch.begin(format!("{subject} {profile}, joining {}", counted(parts.len(), "slice")));
        let mut summary = self.join(&dir, &subjects, profile, &parts, watch)?;
        if profile == Profile::Large {
            lift_floors(&mut summary);
        }
        if watch.stopped() {
            return Ok(None);
        }
        note(&format!("{subject} {profile}: {}", counts(&summary)));
        Ok(Some(NightCampaign { subject: subject.to_owned(), profile, summary, lost }))
    }

    /// Runs a slice; it counts from the moment at which its sums are on disk.
    fn slice(
        &self,
        plan: &Plan,
        subjects: &Registered,
        path: &Path,
        watch: &Watch,
    ) -> Result<Part, NightError> {
        let (dir, control) = (RunDir::claim(path)?, watch.next());
        let logs = Logs::new(vec![dir.events()?], &control);
        let start = Start::of(plan, subjects);
        logs.event(&Event::Start(&start));
        let findings = dir.findings()?;
        let summary =
            campaign::run(plan, subjects, &Sinks { findings: &findings, observer: &logs, control: &control });
        if let Some(error) = logs.trouble() {
            return Err(error.into());
        }
        let mut sums = summary.sums();
        // What was asked to stop is as good as one that ended in time: the next slice goes on behind it.
        sums.interrupted &= !watch.stopped();
        let stored = Stored { start, sums };
        dir.sum(&stored)?;
        Ok(Part { dir: path.to_owned(), stored })
    }

    fn join(
        &self,
        dir: &Path,
        subjects: &Registered,
        profile: Profile,
        parts: &[Part],
        watch: &Watch,
    ) -> Result<Summary, NightError> {
        let (whole, control) = (RunDir::claim(&dir.join(left::WHOLE))?, watch.next());
        let logs = Logs::new(vec![whole.events()?], &control);
        let (plan, findings) = (self.plan(profile), whole.findings()?);
        logs.event(&Event::Start(&Start::of(&plan, subjects)));
        let seconds: f64 = parts.iter().map(|part| part.stored.sums.seconds).sum();
        let elapsed = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let sinks = Sinks { findings: &findings, observer: &logs, control: &control };
        let summary = campaign::merge(&plan, subjects, parts, (elapsed, Vec::new()), &sinks)?;
        logs.event(&Event::Summary(&summary.event()));
        logs.trouble().map_or(Ok(summary), |error| Err(error.into()))
    }
}

/// Forgives what the census missed of large cases: its floors are for hundreds, and a night on a CPU runs some tens. A subject
/// that refuses its way through, or an end before the time, is still too little run.
fn lift_floors(summary: &mut Summary) {
    let floors: BTreeSet<String> =
        summary.census.missed(Profile::Large).iter().map(ToString::to_string).collect();
    summary.missed.retain(|what| !floors.contains(what));
}

fn counts(summary: &Summary) -> String {
    format!(
        "{} · held {} · failed {} ({} distinct) · {:.0} cases/s",
        counted(summary.cases, "case"),
        summary.held,
        summary.failed_count(),
        summary.distinct.len(),
        summary.per_second(summary.cases)
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::nightly::tests::night;

    /// A slice whose files are not whole, or that is no slice at all, is run again up to the one behind it.
    #[test]
    fn a_slice_that_cannot_be_read_is_run_again() {
        let place = tempfile::tempdir().unwrap();
        let night = night(&place.path().join("nights"));
        let run = |seconds: f64| {
            let profile = Profile::Seams;
            let campaign =
                night.campaign("emulated", profile, seconds, &Watch::default(), &|_| {}).unwrap().unwrap();
            let events = fs::read_to_string(night.dir.join("emulated-seams/whole/events.jsonl")).unwrap();
            let told = events.lines().filter(|line| line.starts_with("{\"event\":\"case\""));
            assert_eq!(told.count() as u64, campaign.summary.cases);
            (campaign.summary.cases, campaign.lost.len())
        };
        let (cases, lost) = run(2.0);
        assert_eq!(lost, 0);
        let slices = night.dir.join("emulated-seams");
        let cut = |file: &str| {
            let text = fs::read(slices.join(file)).unwrap();
            fs::write(slices.join(file), &text[..text.len() - 9]).unwrap();
        };
        cut("slice-0000/sums.json");
        let begin = begin_of(&slices.join("slice-0001")).unwrap();
        let (again, lost) = run(2.0);
        assert!(again >= cases && lost == 1);
        let [first, second] = [0, 1].map(|number| Part::read(&slice_of(&slices, number)).unwrap().stored);
        assert_eq!((first.sums.cases, second.start.first), (begin, begin), "what is behind it still counts");
        cut("slice-0000/events.jsonl");
        // No time is left for it, and what is behind it begins nowhere: all of them are told of.
        let (none, lost) = run(0.0);
        assert!(none == 0 && lost >= 3, "{none} {lost}");
        let log = night.dir.join("emulated-seams/slice-0000.1/sums.json");
        assert!(log.exists() && !slices.join("slice-0001").exists());
    }

    /// However many before it are not there any more.
    #[test]
    fn a_slice_behind_a_gap_is_told_of() {
        let place = tempfile::tempdir().unwrap();
        let night = night(&place.path().join("nights"));
        let run = |seconds: f64| {
            let watch = Watch::default();
            night.campaign("emulated", Profile::Seams, seconds, &watch, &|_| {}).unwrap().unwrap()
        };
        run(1.0);
        let slices = night.dir.join("emulated-seams");
        fs::rename(slice_of(&slices, 0), slice_of(&slices, 9)).unwrap();
        let campaign = run(0.0);
        assert!(slices.join("slice-0009.1/sums.json").exists());
        assert!(campaign.summary.cases == 0 && !campaign.lost.is_empty(), "{:?}", campaign.lost);
    }

    /// Whatever a kill, or whoever tidies up, left in the place of a slice or of the joined ones: the next start goes on,
    /// nothing is written over, and what was not run again is told.
    #[test]
    fn a_place_that_holds_something_else_is_set_aside() {
        // Each leaves something in the place of a slice or of the joined ones, and says which file of it must last, if any.
        type Leave = fn(&Path) -> Option<&'static str>;
        let leaves: [(&str, Leave); 6] = [
            ("nothing", |_| None),
            ("an empty directory", |place| {
                fs::create_dir(place).unwrap();
                None
            }),
            ("a lock and nothing else", |place| {
                fs::create_dir(place).unwrap();
                fs::write(place.join("seamproof.lock"), "").unwrap();
                Some("seamproof.lock")
            }),
            ("findings without a lock", |place| {
                fs::create_dir_all(place.join("findings")).unwrap();
                fs::write(place.join("findings/case-00000001.json"), "{").unwrap();
                Some("findings/case-00000001.json")
            }),
            ("somebody else's files, and a lock that is a directory", |place| {
                fs::create_dir_all(place.join("seamproof.lock")).unwrap();
                fs::write(place.join("events.jsonl"), "mine").unwrap();
                Some("events.jsonl")
            }),
            ("a file", |place| {
                fs::write(place, "mine").unwrap();
                Some("")
            }),
        ];
        for (what, leave) in leaves {
            let parent = tempfile::tempdir().unwrap();
            let night = night(&parent.path().join("nights"));
            let dir = night.dir.join("emulated-seams");
            fs::create_dir(&dir).unwrap();
            let last = [slice_of(&dir, 0), dir.join(left::WHOLE)].map(|place| (leave(&place), place));
            let campaign =
                night.campaign("emulated", Profile::Seams, 1.0, &Watch::default(), &|_| {}).unwrap().unwrap();
            assert!(campaign.summary.cases > 0, "{what}");
            for (file, place) in &last {
                assert!(place.join("events.jsonl").is_file(), "{what}: it is run");
                let aside = |file: &str| match file {
                    "" => place.with_extension("1"),
                    file => place.with_extension("1").join(file),
                };
                assert!(file.is_none_or(|file| aside(file).exists()), "{what}: it is not there any more");
            }
            assert_eq!(campaign.lost.len(), usize::from(last[0].0.is_some()), "{what}: {:?}", campaign.lost);
        }
    }

    #[test]
    fn of_large_cases_the_floors_are_lifted_and_nothing_else() {
        let others = ["judged: 3 of 40 legal cases; at least 50 % is enough", "interrupted after 40 cases"];
        let mut summary = Summary::default();
        let floors = summary.census.missed(Profile::Large);
        assert!(!floors.is_empty(), "nothing was drawn");
        let all = others.iter().copied().map(str::to_owned).chain(floors.iter().map(ToString::to_string));
        summary.missed = all.collect();
        lift_floors(&mut summary);
        assert_eq!(summary.missed, others);
    }
}
