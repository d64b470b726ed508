//! The trend: a line for each night and campaign in `trend.jsonl`, with its speed and its margins.

use std::collections::BTreeMap;
use std::path::Path;

use seamproof_oracle::TensorName;
use serde::{Deserialize, Serialize};

use super::home::FILE_BYTES_MAX;
use super::{NightCampaign, NightError};
use crate::campaign::{Quantiles, tells};
use crate::record::{EventLog, RecordError};
use seamproof_judge::files;
use seamproof_judge::prose::counted;
use seamproof_judge::verdict::Tier;

/// Name of the file in a home.
const FILE: &str = "trend.jsonl";
/// Number of cases below which no rate is told: a few long ones would move it by more than a night does.
const RATE_CASES_MIN: u64 = 100;
/// Least shift of a margin that is told. A bin of the histogram is 4.5 % wide, and few cases scatter.
const MARGIN_SHIFT: f64 = 0.1;

/// Whether a margin that is this multiple of an earlier one has moved.
pub(crate) fn has_moved(ratio: f64) -> bool {
    (ratio - 1.0).abs() > MARGIN_SHIFT
}

/// Returns the campaigns of all nights of a home, in order.
pub(crate) fn trend_of(home: &Path) -> Result<Vec<Point>, NightError> {
    Ok(Trend::read(home)?.points)
}

/// A campaign of a night in short.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    pub(crate) night: u32,
    pub(crate) subject: String,
    pub(crate) profile: String,
    pub(crate) cases: u64,
    /// Number of cases that the subject refused as its table says.
    #[serde(default)]
    pub(crate) refused: u64,
    /// Number of cases that no subject may take and that were refused.
    #[serde(default)]
    pub(crate) malformed: u64,
    #[serde(default)]
    pub(crate) failed: u64,
    /// Number of failing cases, beyond those that were shrunk, that are like none of the different failures.
    #[serde(default)]
    pub(crate) unexplained: u64,
    pub(crate) cases_per_second: f64,
    /// Number of different failures.
    pub(crate) distinct: usize,
    /// Error ÷ bound that 99 of 100 cases stay below, by tensor, in tier W.
    pub(crate) p99: BTreeMap<TensorName, f64>,
    /// Number of cases behind each p99.
    #[serde(default)]
    pub(crate) counted: BTreeMap<TensorName, u64>,
}

impl Point {
    /// Returns the point of a campaign.
    pub(super) fn of(night: u32, NightCampaign { subject, profile, summary }: &NightCampaign) -> Point {
        let margins = summary.margins.get(&Tier::W).into_iter().flatten();
        let margins: Vec<(TensorName, Quantiles)> =
            margins.filter_map(|(&tensor, margin)| Some((tensor, margin.quantiles()?))).collect();
        Point {
            night,
            subject: subject.clone(),
            profile: profile.name().to_owned(),
            cases: summary.cases,
            refused: summary.refused.values().sum(),
            malformed: summary.malformed.values().sum(),
            failed: summary.failed_count(),
            unexplained: summary.kept + summary.dropped,
            cases_per_second: summary.per_second(summary.cases),
            distinct: summary.distinct.len(),
            p99: margins.iter().map(|(tensor, margin)| (*tensor, margin.p99)).collect(),
            counted: margins.iter().map(|(tensor, margin)| (*tensor, margin.count)).collect(),
        }
    }

    /// Returns how this point differs from an earlier night's, in words.
    pub(super) fn against(&self, before: Option<&Point>) -> String {
        let Some(before) = before else { return "first night".to_owned() };
        format!("{}, {} (night {})", self.speed_against(before), self.margins_against(before), before.night)
    }

    fn speed_against(&self, before: &Point) -> String {
        if self.cases.min(before.cases) < RATE_CASES_MIN {
            return "too few cases for a rate".to_owned();
        }
        let speed = 100.0 * (self.cases_per_second / before.cases_per_second - 1.0);
        format!("{speed:+.0} % cases/s")
    }

    /// Returns which margins moved, of tensors of which both nights counted enough cases to say so.
    fn margins_against(&self, before: &Point) -> String {
        let both = self.p99.iter().filter_map(|(tensor, now)| Some((tensor, now / before.p99.get(tensor)?)));
        let counted = |point: &Point, tensor| point.counted.get(tensor).copied().unwrap_or(0);
        let (told, few): (Vec<_>, Vec<_>) =
            both.partition(|(tensor, _)| tells(counted(self, tensor).min(counted(before, tensor)), 0.99));
        let moved = told.iter().filter(|(_, ratio)| has_moved(*ratio));
        let mut said: Vec<String> =
            moved.map(|(tensor, ratio)| format!("p99 of {tensor} × {ratio:.2}")).collect();
        if said.is_empty() && !told.is_empty() {
            said.push("margins as before".to_owned());
        }
        if !few.is_empty() {
            let names: Vec<String> = few.iter().map(|(tensor, _)| tensor.to_string()).collect();
            said.push(format!("too few cases for p99 of {}", names.join(", ")));
        }
        if said.is_empty() { "no margins".to_owned() } else { said.join(", ") }
    }
}

/// The trend of all nights.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Trend {
    points: Vec<Point>,
    /// Number of lines that are no points.
    others: usize,
}

impl Trend {
    /// Reads the trend of a home; it is empty where there is no file.
    pub(super) fn read(home: &Path) -> Result<Trend, NightError> {
        let path = home.join(FILE);
        if files::is_absent(&path) {
            return Ok(Trend::default());
        }
        let bytes = files::read(&path, FILE_BYTES_MAX).map_err(NightError::unread(&path))?;
        let text = String::from_utf8(bytes).map_err(NightError::unread(&path))?;
        let mut trend = Trend::default();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            match serde_json::from_str(line) {
                Ok(point) => trend.points.push(point),
                Err(_) => trend.others += 1,
            }
        }
        Ok(trend)
    }

    /// Returns, in words, how many lines of the file are no night's. They stay.
    pub(super) fn passed_over(&self) -> Option<String> {
        (self.others > 0).then(|| format!("{} of no night, passed over", counted(self.others as u64, "line")))
    }

    /// Returns the last point of the same subject and profile.
    pub(super) fn before(&self, point: &Point) -> Option<&Point> {
        let is_same = |other: &&Point| other.subject == point.subject && other.profile == point.profile;
        self.points.iter().rev().find(is_same)
    }
}

/// Appends a night's points to the trend of a home.
pub(super) fn append(home: &Path, points: &[Point]) -> Result<(), RecordError> {
    let mut log = EventLog::append(&home.join(FILE))?;
    points.iter().try_for_each(|point| log.write(point))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::campaign::Summary;
    use seamproof_judge::generate::Profile;

    fn point(night: u32, rate: f64, p99: f64) -> Point {
        let (subject, summary) = ("emulated".to_owned(), Summary::default());
        Point {
            cases: RATE_CASES_MIN,
            cases_per_second: rate,
            p99: BTreeMap::from([(TensorName::Out, p99)]),
            counted: BTreeMap::from([(TensorName::Out, 1000)]),
            ..Point::of(night, &NightCampaign { subject, profile: Profile::Quick, summary })
        }
    }

    #[test]
    fn a_night_is_compared_with_the_one_before() {
        let home = tempfile::tempdir().unwrap();
        let third = point(3, 60.0, 0.8);
        assert_eq!(Trend::read(home.path()).unwrap().before(&third), None);
        for before in [point(1, 100.0, 0.5), point(2, 80.0, 0.5)] {
            append(home.path(), &[before]).unwrap();
        }
        let trend = Trend::read(home.path()).unwrap();
        let before = trend.before(&third);
        assert_eq!((before, trend.passed_over()), (Some(&point(2, 80.0, 0.5)), None));
        assert_eq!(third.against(before), "-25 % cases/s, p99 of out × 1.60 (night 2)");
        assert_eq!(third.against(None), "first night");
        let few = |mut point: Point| {
            point.counted.insert(TensorName::Out, 999);
            point
        };
        let said = "-25 % cases/s, too few cases for p99 of out (night 2)";
        assert_eq!(third.against(before.cloned().map(few).as_ref()), said);
        assert_eq!(few(third.clone()).against(before), said);
        let slow = Point { cases: RATE_CASES_MIN - 1, ..third.clone() };
        assert_eq!(slow.against(before), "too few cases for a rate, p99 of out × 1.60 (night 2)");
    }

    #[test]
    fn lines_of_no_night_are_told_of_and_stay() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join(FILE);
        std::fs::write(&path, "no point\n{\"night\": 1, \"torn").unwrap();
        append(home.path(), &[point(2, 1.0, 1.0)]).unwrap();
        let trend = Trend::read(home.path()).unwrap();
        assert_eq!(trend.before(&point(3, 1.0, 1.0)), Some(&point(2, 1.0, 1.0)));
        assert!(trend.passed_over().is_some_and(|what| what.starts_with("2 lines of no night")), "{trend:?}");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("no point\n{\"night\": 1, \"torn\n{"), "{text}");
    }
}
