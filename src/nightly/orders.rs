//! What a night is to do, and whether a start goes on with the newest one.
//!
//! A night's *orders* are written when it begins. A night *has ended* once its own report is there, whole. The claim: a start
//! goes on with a night only if that has not ended and was begun by the same build for the same subjects; in any other case the
//! start says why not.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::home::{JSON_BYTES_MAX, ORDERS};
use super::{left, report};
use seamproof_judge::files;

/// What a night is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Orders {
    /// The version of this program.
    pub program: String,
    /// Which build of it: slices of different programs make no campaign.
    pub build: String,
    /// Seed of all cases.
    pub seed: u64,
    /// Time of all campaigns together.
    pub seconds: f64,
    /// The subjects, as `--backend` takes them.
    pub subjects: Vec<String>,
    /// Subjects that are not there, and why.
    pub absent: Vec<(String, String)>,
}

impl Orders {
    /// Why a night that was begun by these orders cannot be gone on with by others, with what differs; empty where it can.
    fn differences(&self, others: &Orders) -> Vec<String> {
        let program = |orders: &Orders| format!("Seamproof {}, build {}", orders.program, orders.build);
        let subjects = |orders: &Orders| orders.subjects.join(";");
        let mut all = Vec::new();
        let mut compare = |what: &str, own: String, other: String| {
            all.extend((own != other).then(|| format!("is {what} '{own}' and not '{other}'")));
        };
        compare("of", program(self), program(others));
        compare("for", subjects(self), subjects(others));
        all
    }
}

/// How the newest night stands to a start.
pub(super) enum Newest {
    /// There is none.
    None,
    /// It has its report.
    Ended,
    /// It is gone on with, as it was begun by these orders.
    Unfinished(Orders),
    /// It is not, as it … .
    GivenUp(String),
}

pub(super) fn newest(dir: &Path, orders: &Orders) -> Newest {
    if files::is_absent(dir) {
        return Newest::None;
    }
    if !dir.is_dir() {
        return Newest::GivenUp("is no directory".to_owned());
    }
    match left::ending(dir) {
        Ok(Some(_)) => return Newest::Ended,
        Err(what) => return Newest::GivenUp(format!("has a {} that does not end it ({what})", report::JSON)),
        Ok(None) => {}
    }
    let text = files::read(&dir.join(ORDERS), JSON_BYTES_MAX).map_err(|error| error.to_string());
    let stored = text.and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string()));
    let why = match stored.map(|stored: Orders| (stored.differences(orders), stored)) {
        Ok((differences, stored)) if differences.is_empty() => return Newest::Unfinished(stored),
        Ok((differences, _)) => differences.join(" and "),
        Err(what) => format!("has a {ORDERS} that cannot be read ({what})"),
    };
    Newest::GivenUp(format!("has no report and {why}"))
}

pub(super) fn going_on(number: u32, before: f64, now: f64) -> String {
    let mut said = format!("goes on with night {number}, which has no report, as it was begun");
    if before != now {
        said += &format!(", but for {now} s and not {before} s in all");
    }
    said
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::nightly::home::dir_of;
    use crate::nightly::{Night, NightError};

    #[test]
    fn a_night_that_is_not_gone_on_with_says_why() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("nights");
        let orders = |build: &str, subjects: &[&str]| Orders {
            program: "1".to_owned(),
            build: build.to_owned(),
            seed: 1,
            seconds: 60.0,
            subjects: subjects.iter().copied().map(str::to_owned).collect(),
            absent: Vec::new(),
        };
        let said = |orders: Orders| Night::begin(&home, orders, 1).unwrap().1;
        assert_eq!(said(orders("a", &["emulated"])), "begins night 1");
        let again = said(Orders { seconds: 5.0, ..orders("a", &["emulated"]) });
        assert_eq!(
            again,
            "goes on with night 1, which has no report, as it was begun, but for 5 s and not 60 s in all"
        );
        let found = "; what it found will be in the report";
        let subjects = "is for 'emulated' and not 'emulated;cuda'";
        let begins = format!("begins night 2, as night 1 has no report and {subjects}{found}");
        assert_eq!(said(orders("a", &["emulated", "cuda"])), begins);
        let build = "is of 'Seamproof 1, build a' and not 'Seamproof 1, build b'";
        let begins = format!("begins night 3, as night 2 has no report and {build}{found}");
        assert_eq!(said(orders("b", &["emulated", "cuda"])), begins);
        assert!(said(orders("c", &["emulated"])).contains(" and is for 'emulated;cuda' and not 'emulated'"));
        fs::write(dir_of(&home, 4).join(ORDERS), "{").unwrap();
        assert!(
            said(orders("c", &["emulated"]))
                .starts_with("begins night 5, as night 4 has no report and has a night.json")
        );
        let ended = "{\"night\": 5, \"program\": \"1\"}";
        fs::write(dir_of(&home, 5).join(report::JSON), ended).unwrap();
        assert_eq!(said(orders("c", &["emulated"])), "begins night 6, as night 5 has ended");
        fs::write(dir_of(&home, 6).join(report::JSON), ended).unwrap();
        let begins =
            "begins night 7, as night 6 has a report.json that does not end it (it is that of night 5)";
        assert_eq!(said(orders("c", &["emulated"])), format!("{begins}{found}"));
        fs::write(home.join("night-0008"), "").unwrap();
        fs::create_dir(home.join("night-9")).unwrap();
        let begins = "begins night 9, as night 8 is no directory";
        let others = "; no nights by their names: night-9";
        assert_eq!(said(orders("c", &["emulated"])), format!("{begins}{found}{others}"));
        fs::create_dir(home.join(format!("night-{}", u32::MAX))).unwrap();
        let again = Night::begin(&home, orders("c", &["emulated"]), 1);
        assert!(matches!(again, Err(NightError::Last { .. })), "no number is left");
    }
}
