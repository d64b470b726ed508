//! Exit codes, all of them.

use crate::campaign::Summary;

/// Ending of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    Held,
    Input,
    Finding,
    Crash,
    TooLittle,
    CanaryMissed,
    Internal,
    /// Code of a worker, for its supervisor alone.
    Worker(u8),
}

/// List of the exit codes for `--help`.
pub(super) const HELP: &str = "\
Without a command: `seamproof run`, then `seamproof run --backend cuda` where there is a GPU for this project's kernels.

Exit codes:
  0   everything held
  1   usage or input error
  2   a finding
  3   the backend crashed or hung, and nothing else was found
  4   too little was run to say anything, or it was interrupted
  5   the canary (a planted fault) was missed, or not told as the subject fails by itself, and nothing was found
  70  a fault of this program, or a device without memory or without a worker";

impl Exit {
    /// Returns the number.
    pub(super) fn code(self) -> u8 {
        match self {
            Exit::Held => 0,
            Exit::Input => 1,
            Exit::Finding => 2,
            Exit::Crash => 3,
            Exit::TooLittle => 4,
            Exit::CanaryMissed => 5,
            Exit::Internal => 70,
            Exit::Worker(code) => code,
        }
    }

    /// Returns the ending of a campaign: findings come before everything, then whatever makes the result doubtful.
    pub(super) fn of(summary: &Summary) -> Exit {
        if summary.failed.keys().any(|check| !check.is_end()) {
            Exit::Finding
        } else if !summary.failed.is_empty() {
            Exit::Crash
        } else if summary.infrastructure_count > 0 {
            Exit::Internal
        } else if summary.void.is_some() && !summary.interrupted {
            Exit::CanaryMissed
        } else if summary.void.is_none() && summary.missed.is_empty() && summary.adapter.is_empty() {
            Exit::Held
        } else {
            Exit::TooLittle
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::finding::Check;

    #[test]
    fn a_finding_outweighs_a_crash_and_both_whatever_makes_the_campaign_doubtful() {
        let mut summary = Summary::default();
        assert_eq!(Exit::of(&summary).code(), 0);
        summary.adapter.push("a row that no case showed".to_owned());
        assert_eq!(Exit::of(&summary).code(), 4);
        summary.adapter.clear();
        summary.missed.push("cases".to_owned());
        assert_eq!(Exit::of(&summary).code(), 4);
        summary.void = Some("the canary was inconclusive".to_owned());
        assert_eq!(Exit::of(&summary).code(), 5);
        summary.interrupted = true;
        assert_eq!(
            Exit::of(&summary).code(),
            4,
            "whoever stops it has not shown that there is nothing to find"
        );
        summary.infrastructure_count = 1;
        assert_eq!(Exit::of(&summary).code(), 70);
        summary.failed.insert(Check::Crash, 1);
        assert_eq!(Exit::of(&summary).code(), 3);
        summary.failed.insert(Check::Timeout, 1);
        assert_eq!(Exit::of(&summary).code(), 3);
        summary.failed.insert(Check::Envelope, 1);
        assert_eq!(Exit::of(&summary).code(), 2);
    }
}
