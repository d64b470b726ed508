//! One line a night and campaign, in `trend.jsonl`: how fast it was, and how near to the bounds.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use seamproof_oracle::TensorName;
use serde::{Deserialize, Serialize};

use super::home::JSON_BYTES_MAX;
use crate::campaign::{Quantiles, Summary, tells};
use crate::record::{RecordError, write_whole};
use seamproof_judge::files;
use seamproof_judge::prose::counted;
use seamproof_judge::verdict::Tier;

/// A campaign of a night in short.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The night's number.
    pub night: u32,
    /// The subject.
    pub subject: String,
    /// Sizes.
    pub profile: String,
    /// Cases that were run.
    pub cases: u64,
    /// Those of them that the subject refused as its capability table says.
    #[serde(default)]
    pub refused: u64,
    /// Those that no subject may take, and that were refused.
    #[serde(default)]
    pub malformed: u64,
    /// Those that failed.
    #[serde(default)]
    pub failed: u64,
    /// Failing cases that are like none of the different failures, past what was shrunk.
    #[serde(default)]
    pub unexplained: u64,
    /// Cases a second.
    pub cases_per_second: f64,
    /// Different failures.
    pub distinct: usize,
    /// Error ÷ bound below which 99 of 100 cases were, by tensor, in tier W.
    pub p99: BTreeMap<TensorName, f64>,
    /// Of how many cases that is.
    #[serde(default)]
    pub counted: BTreeMap<TensorName, u64>,
}

impl Point {
    /// The point of a campaign.
    pub fn of(night: u32, subject: &str, profile: &str, summary: &Summary) -> Point {
        let margins = summary.margins.get(&Tier::W).into_iter().flatten();
        let margins: Vec<(TensorName, Quantiles)> =
            margins.filter_map(|(&tensor, margin)| Some((tensor, margin.quantiles()?))).collect();
        Point {
            night,
            subject: subject.to_owned(),
            profile: profile.to_owned(),
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

    /// What of this differs from an earlier night, in words.
    pub fn against(&self, before: Option<&Point>) -> String {
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

    /// Which margins moved, where both nights counted enough cases to say so.
    fn margins_against(&self, before: &Point) -> String {
        let both = self.p99.iter().filter_map(|(tensor, now)| Some((tensor, now / before.p99.get(tensor)?)));
        let counted = |point: &Point, tensor| point.counted.get(tensor).copied().unwrap_or(0);
        let (told, few): (Vec<_>, Vec<_>) =
            both.partition(|(tensor, _)| tells(counted(self, tensor).min(counted(before, tensor)), 0.99));
        let moved = told.iter().filter(|(_, ratio)| (ratio - 1.0).abs() > MARGIN_SHIFT);
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

/// Fewest cases of which a rate is told: of fewer, a few long ones move it by more than a night does.
const RATE_CASES_MIN: u64 = 100;
/// Shifts of a margin that are told: a bin of the histogram is 4.5 % wide, and few cases scatter.
const MARGIN_SHIFT: f64 = 0.1;

/// The trend of all nights, and lines of its file that are no points, which stay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trend {
    points: Vec<Point>,
    others: Vec<String>,
}

impl Trend {
    /// Reads the file; empty where there is none. A line that is no point is another program's and stays.
    pub fn read(path: &Path) -> Result<Trend, RecordError> {
        if files::is_absent(path) {
            return Ok(Trend::default());
        }
        let text = files::read(path, JSON_BYTES_MAX).and_then(|bytes| {
            String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "is no text"))
        });
        let text = text.map_err(|source| RecordError::Io { path: path.to_owned(), what: "read", source })?;
        let mut trend = Trend::default();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            match serde_json::from_str(line) {
                Ok(point) => trend.points.push(point),
                Err(_) => trend.others.push(line.to_owned()),
            }
        }
        Ok(trend)
    }

    /// What of the file is no point, in words.
    pub fn passed_over(&self) -> Option<String> {
        let lines = self.others.len();
        (lines > 0).then(|| format!("{} of no night, kept and passed over", counted(lines, "line")))
    }

    /// The last night before `night` that ran the same.
    pub fn before(&self, point: &Point) -> Option<&Point> {
        let same = |other: &&Point| other.subject == point.subject && other.profile == point.profile;
        self.points
            .iter()
            .filter(same)
            .filter(|other| other.night < point.night)
            .max_by_key(|other| other.night)
    }

    /// Adds a night's points, in the place of any of that night, and writes the file whole.
    pub fn write(&mut self, night: u32, points: &[Point], path: &Path) -> Result<(), RecordError> {
        self.points.retain(|point| point.night != night);
        self.points.extend_from_slice(points);
        let line = |point: &Point| serde_json::to_string(point).map(|line| line + "\n").unwrap_or_default();
        let others = self.others.iter().map(|line| format!("{line}\n"));
        write_whole(path, &others.chain(self.points.iter().map(line)).collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(night: u32, rate: f64, p99: f64) -> Point {
        let p99 = BTreeMap::from([(TensorName::Out, p99)]);
        let counted = BTreeMap::from([(TensorName::Out, 1000)]);
        let (subject, profile) = ("emulated".to_owned(), "quick".to_owned());
        Point {
            night,
            subject,
            profile,
            cases: RATE_CASES_MIN,
            refused: 0,
            malformed: 0,
            failed: 0,
            unexplained: 0,
            cases_per_second: rate,
            distinct: 0,
            p99,
            counted,
        }
    }

    #[test]
    fn lines_that_tell_of_no_night_are_told_of_and_stay() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let path = place.path().join("trend.jsonl");
        Trend::default().write(1, &[point(1, 100.0, 0.5)], &path).expect("written");
        let whole = std::fs::read_to_string(&path).expect("a file");
        assert_eq!(Trend::read(&path).expect("a trend").passed_over(), None);
        std::fs::write(&path, &whole[..whole.len() - 9]).expect("torn");
        let mut torn = Trend::read(&path).expect("a trend");
        assert!(torn.passed_over().is_some_and(|what| what.starts_with("1 line of no night")), "{torn:?}");
        torn.write(2, &[point(2, 1.0, 1.0)], &path).expect("written");
        assert!(Trend::read(&path).expect("a trend").passed_over().is_some());
    }

    #[test]
    fn a_night_is_compared_with_the_one_before_and_written_once() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let path = place.path().join("trend.jsonl");
        let mut trend = Trend::read(&path).expect("no file is no trend");
        assert_eq!(trend.before(&point(1, 1.0, 1.0)), None);
        trend.write(1, &[point(1, 100.0, 0.5)], &path).expect("written");
        trend.write(2, &[point(2, 50.0, 0.7)], &path).expect("written");
        trend.write(2, &[point(2, 80.0, 0.5)], &path).expect("written once more");
        let trend = Trend::read(&path).expect("a trend");
        let third = point(3, 60.0, 0.8);
        let before = trend.before(&third);
        assert_eq!(before, Some(&point(2, 80.0, 0.5)));
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
        std::fs::write(&path, "no point\n").expect("a file");
        let mut other = Trend::read(&path).expect("a trend");
        assert_eq!(other.before(&third), None);
        other.write(3, std::slice::from_ref(&third), &path).expect("written");
        let text = std::fs::read_to_string(&path).expect("the file");
        assert!(text.starts_with("no point\n{") && text.lines().count() == 2, "another's lines stay: {text}");
        assert!(Trend::read(place.path()).is_err(), "a directory is no file");
    }
}
