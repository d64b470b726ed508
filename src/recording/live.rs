//! The nearest live case of a recording: the same problem, on a subject that is here.
//!
//! A recorded run cannot be made again, and no part of it either. Its problem can: geometry, mask, precision, and the
//! schedule that dealt its rows. The values are drawn, so what fails by the values alone does not fail again.

use seamproof_judge::case::{Case, Subject};
use seamproof_judge::ladder::products;
use seamproof_oracle::sharding::layouts;

use super::Recording;
use super::placement::differing;
use crate::backends;

/// Subject that runs every schedule of context parallelism that a recording can name.
const SUBJECT: &str = "emulated";
/// Largest number of products of pairs, heads and lanes that is run within minutes.
const PRODUCTS_MAX: u64 = 1 << 32;

/// Reason why a recording has no live case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotLive {
    /// Rows that no schedule deals so.
    #[error(
        "its tables deal the rows otherwise than {algorithm} does with this balance, so no schedule here is its own"
    )]
    Tables {
        /// The algorithm that the recording names.
        algorithm: &'static str,
    },
    /// A problem that the subject does not take.
    #[error("{SUBJECT} does not take its problem: {0}")]
    Refused(String),
    /// A problem that is too large.
    #[error(
        "it has {0} products of pairs, heads and lanes, and {SUBJECT} takes up to {PRODUCTS_MAX}: record fewer tokens"
    )]
    TooLarge(u64),
}

/// Returns the case that is nearest to a recording and can be run: its problem on the emulated kernel, which has the
/// schedules that a recording names. Any other subject can take its place.
pub fn live_case(recording: &Recording) -> Result<Case, NotLive> {
    let Recording { problem, ranks, rule, .. } = recording;
    let tables = || ranks.iter().filter_map(|rank| rank.tables.as_ref());
    let refused = |what: &dyn std::fmt::Display| NotLive::Refused(what.to_string());
    if rule.is_none() {
        let by_rule = layouts(problem).map_err(|error| refused(&error))?;
        if differing(problem, &by_rule, tables()).is_some() {
            return Err(NotLive::Tables { algorithm: problem.parallel.algorithm.name() });
        }
    }
    let backend = backends::by_name(SUBJECT, &Default::default()).map_err(|error| refused(&error))?;
    if let Some(refusal) = backend.declaration().table.refusal(problem) {
        return Err(refused(&refusal));
    }
    match products(problem) {
        count if count > PRODUCTS_MAX => Err(NotLive::TooLarge(count)),
        _ => Ok(Case::new(Subject { name: SUBJECT.into(), options: Default::default() }, 0, problem.clone())),
    }
}
