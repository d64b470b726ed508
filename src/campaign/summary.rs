//! The result of a campaign: counts, distributions, and the different failures.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::groups::Groups;
use super::histogram::{Histogram, Quantiles};
use super::plan::{Plan, Shard};
use super::ways::Ways;
use crate::script::Script;
use seamproof_judge::case::Found;
use seamproof_judge::census::{Census, Floors, MissedFloor};
use seamproof_judge::exercise::Exercise;
use seamproof_judge::failure::FailureKey;
use seamproof_judge::finding::{Check, Finding, Relation};
use seamproof_judge::generate::Profile;
use seamproof_judge::prose::counted;
use seamproof_judge::shrink::Size;
use seamproof_judge::subject::{Declaration, DeviceRuns, TensorName};
use seamproof_judge::verdict::{Cost, Margin, Tier};
use seamproof_oracle::Problem;

/// Least share of the legal cases that a subject must be judged on. One that refuses more is not verified.
pub const JUDGED_SHARE_MIN: f64 = 0.5;
/// The least floor that a class has, however few cases there are. A shard may miss it by chance, so only the whole
/// campaign is asked for it; higher floors grow with a shard's own cases and lie out of reach of chance.
const CHANCE_FLOOR: u64 = 1;
/// Most messages about this program's own faults that are kept; further ones are counted.
pub const INFRASTRUCTURE_MESSAGES_MAX: usize = 4;

/// One failure, with the smallest case that shows it.
#[derive(Clone, Debug, Serialize)]
pub struct Distinct {
    /// Key that tells it from other failures.
    pub key: FailureKey,
    /// Number of shrunk cases that came to it.
    pub seen: u64,
    /// Number of failing cases that were only counted, as each has its check, its tensor and all features that it
    /// needs. One that could be of several failures counts for the one that needs most. It is known at the end, so only
    /// the summary tells it.
    #[serde(skip)]
    pub counted: u64,
    /// Index of the first shrunk case.
    pub first_case: u64,
    /// Finding in the smallest case.
    #[serde(flatten)]
    pub found: Found,
    /// Largest error ÷ bound among all its failing cases, as drawn and as shrunk; infinite where one has no ratio.
    #[serde(skip)]
    pub worst: f64,
    /// The smallest case; absent where the failure is no problem.
    #[serde(skip)]
    pub smallest: Option<Box<Problem>>,
    /// The smallest case in words.
    pub problem: String,
    /// Size of the smallest case; absent where the failure is no problem.
    #[serde(skip)]
    pub size: Option<Size>,
    /// Name of its files; absent where the failure is no problem that could be stored.
    pub name: Option<String>,
    /// Command that shows it again. Where only the crate of the subject can, words say which test to paste there.
    pub replay: String,
    /// Command that judges the problem from options alone; absent where there is none (see
    /// [`try_command`](crate::paste::try_command)).
    #[serde(rename = "try")]
    pub try_command: Option<String>,
    /// Script that shows it without this project; absent where the subject is in no Python file, and before the last
    /// case has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script: Option<Script>,
}

impl Distinct {
    /// Returns its place among others for a reader, to whom one mistake may be many findings: minimal ones first, small
    /// cases before large ones.
    pub(super) fn reading_order(&self) -> (bool, bool, Option<Size>) {
        (!self.found.minimal, self.size.is_none(), self.size)
    }

    /// Returns the number of all its failing cases.
    pub fn cases(&self) -> u64 {
        self.seen + self.counted
    }

    fn count(&self) -> FailureCount<'_> {
        FailureCount { key: &self.key, cases: self.cases(), seen: self.seen }
    }
}

/// Counts of one failure.
#[derive(Clone, Copy, Debug, Serialize)]
struct FailureCount<'a> {
    key: &'a FailureKey,
    /// Failing cases of it.
    cases: u64,
    /// Those of them that were shrunk.
    seen: u64,
}

/// Result of the search for the planted fault.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Canary {
    /// Number of cases that were run.
    pub cases: u64,
    /// The planted fault, if it was found.
    pub finding: Option<Distinct>,
    /// Failures that are the subject's own, as they were drawn.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub own: Vec<Distinct>,
    /// Reason, in words, why the search ended without showing whether the judge sees the fault; `None` where the fault
    /// was found, or missed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_told: Option<String>,
    /// Faults of this program during the search.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub infrastructure: Vec<String>,
}

impl Canary {
    /// Whether the campaign is worth running: the canary was found, or the search could not tell.
    pub fn permits(&self) -> bool {
        self.finding.is_some() || self.not_told.is_some()
    }

    /// Returns, in words, why a campaign that finds nothing is no pass; `None` where it is one.
    fn doubt(&self) -> Option<String> {
        let own = counted(self.own.len(), "case");
        match (&self.not_told, self.own.is_empty()) {
            (Some(why), _) => Some(format!("the canary was inconclusive: {why}")),
            (None, false) => {
                Some(format!("the subject failed by itself in {own} of the search for the canary"))
            }
            (None, true) => None,
        }
    }
}

/// Sums of a campaign that do not depend on the order of its cases. Parts of a campaign are merged by their sums, and
/// by the events of the cases that did not hold.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sums {
    /// Number of cases run.
    pub cases: u64,
    /// Number of cases in which every check held.
    pub held: u64,
    /// Number of held cases whose envelope judged a sample of rows, as the oracle is too slow for all.
    pub without_envelope: u64,
    /// Number of cases refused as the table says, by its row.
    pub refused: BTreeMap<String, u64>,
    /// Number of malformed problems refused, by the rule that they break.
    pub malformed: BTreeMap<String, u64>,
    /// Error ÷ bound of each tensor in each tier, over the cases that held with an error above zero.
    pub margins: BTreeMap<Tier, BTreeMap<TensorName, Histogram>>,
    /// Number of cases that a subject computed.
    pub computed: u64,
    /// Number of query tokens of the cases that a subject computed.
    pub token_count: u64,
    /// Visible pairs · query heads · head dimension of these cases.
    pub product_count: u64,
    /// Number of elements of the results of these cases (out, lse, dq, dk and dv). Each counts once, however often the
    /// judge has the subject run.
    pub element_count: u64,
    /// Time of these cases over all threads, by what took it.
    pub cost: Cost,
    /// Kernels on which the judged cases ran, where the subject says so.
    #[serde(default)]
    pub ways: Ways,
    /// Judged and failing cases of several ranks, by algorithm and ranks.
    #[serde(default)]
    pub groups: Groups,
    /// What the judged cases showed of the subject's table.
    #[serde(default)]
    pub exercise: Exercise,
    /// Number of held cases of which an identity was not asked, because its second problem lies outside the table.
    #[serde(default)]
    pub not_asked: BTreeMap<Relation, u64>,
    /// Census of the drawn problems.
    pub census: Census,
    /// Faults of this program itself that are no case's, in words.
    pub beside: Vec<String>,
    /// Reason, in words, why the search for the canary keeps the campaign from being a pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub void: Option<String>,
    /// Whether somebody ended it early.
    pub interrupted: bool,
    /// Length of the campaign in seconds.
    pub seconds: f64,
}

/// Returns the total of counts, which may be those of a file that somebody wrote.
pub(crate) fn total<'a>(counts: impl IntoIterator<Item = &'a u64>) -> u64 {
    counts.into_iter().fold(0, |total, count| total.saturating_add(*count))
}

impl Sums {
    /// Returns the number of cases that held or were refused as they have to be.
    pub(super) fn passed(&self) -> u64 {
        self.held.saturating_add(total(self.refused.values().chain(self.malformed.values())))
    }

    /// Returns the number of the other cases. Each of them has an event.
    pub(super) fn not_passed(&self) -> u64 {
        self.cases.saturating_sub(self.passed())
    }

    /// Adds the counts of a part. The caller sees to its census, faults, time and end.
    fn add(&mut self, part: &Sums) {
        self.cases += part.cases;
        self.held += part.held;
        self.without_envelope += part.without_envelope;
        self.computed += part.computed;
        self.token_count += part.token_count;
        self.product_count = self.product_count.saturating_add(part.product_count);
        self.element_count += part.element_count;
        self.void = self.void.take().or_else(|| part.void.clone());
        self.cost += part.cost;
        self.ways.merge(&part.ways);
        self.groups.merge(&part.groups);
        self.exercise.merge(&part.exercise);
        for (&relation, count) in &part.not_asked {
            *self.not_asked.entry(relation).or_default() += count;
        }
        let counts = [(&mut self.refused, &part.refused), (&mut self.malformed, &part.malformed)];
        for (all, part) in counts {
            part.iter().for_each(|(name, count)| *all.entry(name.clone()).or_default() += count);
        }
        for (&tier, histograms) in &part.margins {
            let all = self.margins.entry(tier).or_default();
            histograms
                .iter()
                .for_each(|(&tensor, histogram)| all.entry(tensor).or_default().merge(histogram));
        }
    }
}

/// Reason for the end of a campaign before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Early {
    /// The time left could not hold the next case.
    NoTimeLeft,
    /// Every judged case failed, and the last ones in no new way.
    NothingNew,
}

/// Result of a campaign: its [`Sums`], whose fields can be read directly, and everything that depends on the order of
/// its cases.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    sums: Sums,
    /// Number of cases that failed, by check.
    pub failed: BTreeMap<Check, u64>,
    /// Number of failing cases that were only counted: each has all that a known failure of the same symptom needs.
    pub not_shrunk: u64,
    /// Number of failing cases like no known failure that are on disk as drawn, as enough others were shrunk.
    pub kept: u64,
    /// Number of failing cases like no known failure that were only counted, as enough others are kept.
    pub dropped: u64,
    /// Different failures.
    pub distinct: Vec<Distinct>,
    /// Failures of the search for the canary that are the subject's own, as they were drawn.
    pub own: Vec<Distinct>,
    /// First messages about faults of this program or of a device.
    pub infrastructure: Vec<String>,
    /// Number of such faults.
    pub infrastructure_count: u64,
    /// Devices that ran it.
    pub devices: Vec<DeviceRuns>,
    /// One line for everything of which there was too little.
    pub missed: Vec<String>,
    /// One line for everything that is wrong with the subject's adapter.
    pub adapter: Vec<String>,
    /// Floors of the census, where they are not those of all problems.
    floors: Option<Floors>,
    /// Reason for an end before its time.
    pub ended_early: Option<Early>,
}

impl Deref for Summary {
    type Target = Sums;

    fn deref(&self) -> &Sums {
        &self.sums
    }
}

impl DerefMut for Summary {
    fn deref_mut(&mut self) -> &mut Sums {
        &mut self.sums
    }
}

impl Summary {
    pub(super) fn count(&mut self, tokens: u64, products: u64) {
        self.cases += 1;
        self.token_count += tokens;
        self.product_count = self.product_count.saturating_add(products);
    }

    pub(super) fn spent(&mut self, elements: u64, cost: Cost) {
        self.computed += u64::from(elements > 0);
        self.element_count += elements;
        self.cost += cost;
    }

    pub(super) fn held(&mut self, margin: &Margin) {
        self.held += 1;
        self.without_envelope += u64::from(margin.compared == 0);
        for relation in margin.not_asked.iter() {
            *self.not_asked.entry(relation).or_default() += 1;
        }
        for tier in Tier::ALL {
            let histograms = self.margins.entry(tier).or_default();
            for (tensor, ratio) in margin.tier(tier).named() {
                histograms.entry(tensor).or_default().add(ratio);
            }
        }
    }

    pub(super) fn failed(&mut self, finding: &Finding) {
        *self.failed.entry(finding.check).or_default() += 1;
    }

    pub(super) fn infrastructure(&mut self, what: String) {
        self.infrastructure_count += 1;
        if self.infrastructure.len() < INFRASTRUCTURE_MESSAGES_MAX {
            self.infrastructure.push(what);
        }
    }

    /// Adds a fault that is no case's.
    pub(super) fn trouble(&mut self, what: String) {
        if self.beside.len() < INFRASTRUCTURE_MESSAGES_MAX {
            self.beside.push(what.clone());
        }
        self.infrastructure(what);
    }

    /// Adds the sums of a part, without its census and its faults.
    pub(super) fn add(&mut self, sums: &Sums) {
        self.sums.add(sums);
    }

    /// Returns the sums of this campaign.
    pub fn sums(&self) -> Sums {
        self.sums.clone()
    }

    /// Ends the campaign of a subject with this declaration and these floors; without any, its floors are those of all
    /// problems.
    pub(super) fn close(
        &mut self,
        census: Census,
        plan: &Plan,
        (declaration, floors): (Option<&Declaration>, Option<Floors>),
        elapsed: Duration,
    ) {
        self.seconds = elapsed.as_secs_f64();
        self.floors = floors;
        self.census = census;
        let whole = plan.shard == Shard::WHOLE;
        if let Some(declaration) = declaration.filter(|_| whole) {
            self.adapter = self.exercise.faults(&declaration.table);
        }
        if self.interrupted && !plan.fulfilled(self.cases, elapsed) {
            self.missed.push(format!("interrupted after {}, before its end", counted(self.cases, "case")));
        }
        self.check_judged_share();
        let missed = self.missed_floors(plan.profile).into_iter().chain(self.ways.missed(plan.profile));
        let asked = missed.filter(|missed| whole || missed.floor > CHANCE_FLOOR);
        let asked: Vec<String> = asked.map(|missed| missed.to_string()).collect();
        self.missed.extend(asked);
    }

    /// Returns the classes of problems that were asked too seldom.
    pub(crate) fn missed_floors(&self, profile: Profile) -> Vec<MissedFloor> {
        match &self.floors {
            Some(floors) => self.census.below(floors),
            None => self.census.missed(profile),
        }
    }

    fn check_judged_share(&mut self) {
        let malformed = total(self.malformed.values());
        let drawn = self.cases.saturating_sub(malformed) as f64;
        let judged = (self.held + self.failed_count()) as f64;
        if judged < drawn * JUDGED_SHARE_MIN || self.cases == 0 {
            let share = 100.0 * JUDGED_SHARE_MIN;
            self.missed
                .push(format!("judged: {judged} of {drawn} legal cases; at least {share} % is enough"));
        }
    }

    /// Takes what the search for the canary says of this campaign, beside what those of its parts said. A failure of
    /// the campaign says it better.
    pub fn heed(&mut self, canary: &Canary) {
        if self.failed.is_empty() {
            self.own = canary.own.clone();
            self.void = canary.doubt().or_else(|| self.void.take());
        } else {
            self.void = None;
        }
    }

    /// Returns the number of failed cases.
    pub fn failed_count(&self) -> u64 {
        total(self.failed.values())
    }

    /// Returns a rate over the campaign's time.
    pub fn per_second(&self, count: u64) -> f64 {
        if self.seconds > 0.0 { count as f64 / self.seconds } else { 0.0 }
    }

    /// Returns the mean microseconds that a part of the cost took in a case that the subject computed.
    pub fn case_microseconds(&self, part: Duration) -> f64 {
        part.as_secs_f64() * 1e6 / self.computed.max(1) as f64
    }

    /// Returns the nanoseconds of the judge itself for each output element.
    pub fn judge_nanoseconds(&self) -> f64 {
        self.cost.judge.as_secs_f64() * 1e9 / self.element_count.max(1) as f64
    }

    /// Returns the summary as an event.
    pub fn event(&self) -> SummaryEvent<'_> {
        SummaryEvent {
            cases: self.cases,
            held: self.held,
            without_envelope: self.without_envelope,
            refused: &self.refused,
            malformed: &self.malformed,
            failed: &self.failed,
            distinct: self.distinct.len(),
            failures: self.distinct.iter().map(Distinct::count).collect(),
            not_shrunk: self.not_shrunk,
            kept: self.kept,
            dropped: self.dropped,
            infrastructure: &self.infrastructure,
            infrastructure_count: self.infrastructure_count,
            devices: &self.devices,
            margins: self.margins.iter().map(|(&tier, histograms)| (tier, quantiles(histograms))).collect(),
            tokens_p50: self.census.tokens(0.5),
            tokens_p95: self.census.tokens(0.95),
            token_count: self.token_count,
            product_count: self.product_count,
            element_count: self.element_count,
            ways: &self.ways,
            groups: &self.groups,
            not_asked: &self.not_asked,
            void: self.void.as_deref(),
            missed: &self.missed,
            adapter: &self.adapter,
            interrupted: self.interrupted,
            times: Times {
                seconds: self.seconds,
                cases_per_second: self.per_second(self.cases),
                tokens_per_second: self.per_second(self.token_count),
                products_per_second: self.per_second(self.product_count),
                inputs_microseconds: self.case_microseconds(self.cost.inputs),
                subject_microseconds: self.case_microseconds(self.cost.subject),
                oracle_microseconds: self.case_microseconds(self.cost.oracle),
                judge_microseconds: self.case_microseconds(self.cost.judge),
                judge_nanoseconds_per_element: self.judge_nanoseconds(),
            },
        }
    }
}

fn quantiles(histograms: &BTreeMap<TensorName, Histogram>) -> BTreeMap<TensorName, Quantiles> {
    histograms.iter().filter_map(|(&tensor, histogram)| Some((tensor, histogram.quantiles()?))).collect()
}

/// Last event of a campaign.
#[derive(Clone, Debug, Serialize)]
pub struct SummaryEvent<'a> {
    cases: u64,
    held: u64,
    without_envelope: u64,
    refused: &'a BTreeMap<String, u64>,
    malformed: &'a BTreeMap<String, u64>,
    failed: &'a BTreeMap<Check, u64>,
    distinct: usize,
    failures: Vec<FailureCount<'a>>,
    not_shrunk: u64,
    kept: u64,
    dropped: u64,
    infrastructure: &'a [String],
    infrastructure_count: u64,
    #[serde(skip_serializing_if = "<[DeviceRuns]>::is_empty")]
    devices: &'a [DeviceRuns],
    margins: BTreeMap<Tier, BTreeMap<TensorName, Quantiles>>,
    tokens_p50: u64,
    tokens_p95: u64,
    token_count: u64,
    product_count: u64,
    element_count: u64,
    #[serde(skip_serializing_if = "Ways::is_empty")]
    ways: &'a Ways,
    #[serde(skip_serializing_if = "Groups::is_empty")]
    groups: &'a Groups,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    not_asked: &'a BTreeMap<Relation, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    void: Option<&'a str>,
    missed: &'a [String],
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    adapter: &'a [String],
    interrupted: bool,
    times: Times,
}

/// Figures that depend on the clock.
#[derive(Clone, Copy, Debug, Serialize)]
struct Times {
    seconds: f64,
    cases_per_second: f64,
    tokens_per_second: f64,
    products_per_second: f64,
    inputs_microseconds: f64,
    subject_microseconds: f64,
    oracle_microseconds: f64,
    judge_microseconds: f64,
    judge_nanoseconds_per_element: f64,
}
