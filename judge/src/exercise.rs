//! What a campaign exercised of a subject's table, and whether its adapter is in order.
//!
//! A table that says more than any case showed, and a subject that refuses most of what it is asked, come from a fault
//! between the judge and the kernel. Such a campaign would say little, and must not pass.

use std::collections::BTreeMap;

use seamproof_oracle::Problem;
use serde::{Deserialize, Serialize};

use crate::prose::counted;
use crate::subject::Table;
use crate::verdict::Verdict;

/// Number of judged cases after which each row of a table must have been shown. Each is in one case in fifty, at
/// least, so a thousand cases without it are out of reach of chance.
pub const EXERCISED_AFTER: u64 = 1000;

/// Counts of judged cases by what they showed of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Exercise {
    /// Number of cases inside the table that the subject was asked.
    asked: u64,
    /// Number of those that it refused all the same.
    refused: u64,
    /// Number of cases that were judged on results, by the rows that they showed ([`Table::shown`]).
    rows: BTreeMap<String, u64>,
}

impl Exercise {
    /// Counts a case. A refusal that the table asks for, and a case that could not be judged, count for nothing.
    pub fn add(&mut self, table: &Table, problem: &Problem, verdict: &Verdict) {
        let refused = match verdict {
            Verdict::Pass(_) => false,
            Verdict::Finding(finding) => finding.is_refusal_inside(),
            _ => return,
        };
        self.asked += 1;
        self.refused += u64::from(refused);
        if !refused {
            for row in table.shown(problem) {
                *self.rows.entry(row).or_default() += 1;
            }
        }
    }

    /// Adds the counts of another part.
    pub fn merge(&mut self, other: &Exercise) {
        self.asked += other.asked;
        self.refused += other.refused;
        for (row, count) in &other.rows {
            *self.rows.entry(row.clone()).or_default() += count;
        }
    }

    /// Returns the rows of a table that no judged case showed.
    pub fn unshown(&self, table: &Table) -> Vec<String> {
        table.taken().into_iter().filter(|row| !self.rows.contains_key(row)).collect()
    }

    /// Returns what is wrong with the adapter, in words. Rows that no case showed count once
    /// [`EXERCISED_AFTER`] cases were judged.
    pub fn faults(&self, table: &Table) -> Vec<String> {
        let (refused, asked) = (self.refused, self.asked);
        let mut faults = Vec::new();
        if 2 * refused > asked {
            let cases = counted(asked, "case");
            faults.push(format!(
                "the subject refused {refused} of {cases} inside its table: narrow the table, or mend the adapter"
            ));
        }
        if asked - refused >= EXERCISED_AFTER {
            let told =
                |row| format!("{row} is in the table, and no case showed it: take it out, or have it drawn");
            faults.extend(self.unshown(table).into_iter().map(told));
        }
        faults
    }
}
