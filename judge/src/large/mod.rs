//! Packs of tens of thousands of tokens ([`pack`]).
//!
//! Some are too large to pass through pipes. Their inputs are drawn where the subject runs, and rows of the results are
//! compared with exact ones there. This module chooses the rows ([`Question`]), and judges what comes back ([`Answer`]):
//! exact values, results, and the sums that the bounds are made of. The bounds are the oracle's own
//! ([`seamproof_oracle::envelope::RowEnvelope`], [`Majorant`](seamproof_oracle::envelope::Majorant)), in tier W.
//!
//! The others are judged by the ladder, like any case. Both ways have a canary, results that are moved by one row: here
//! it is [`judge_of_moved_results`].

mod answer;
mod exactly;
mod known;
mod laws;
mod moved;
mod pack;
mod rows;
mod run;
mod verdict;

pub use answer::{Answer, AnswerError, Compared, Head, Seconds};
pub use known::Known;
pub use moved::judge_of_moved_results;
pub use pack::{Sizes, TOKENS_MOST, is_drawn, pack};
pub use rows::{Block, Question, Reach, Rows};
pub use verdict::{Judged, judge, silence};
