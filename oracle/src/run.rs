//! A [`Run`] names the rows of one sequence inside a packed tensor.
//!
//! Two things are kept apart here, because mistaking one for the other is the oldest bug of packed attention. `len`,
//! the number of *real* rows, decides what is visible. `offset`, `step` and `span` decide where rows *lie*.

use serde::{Deserialize, Serialize};

/// Rows `offset, offset + step, …`: `len` real ones, then padding up to `span` owned ones.
///
/// A packed (THD) sequence has step 1; a sequence of an SBHD tensor has the batch size as its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The first row.
    pub offset: usize,
    /// The number of rows from one position to the next; at least 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub step: usize,
    /// The number of real rows.
    pub len: usize,
    /// The number of owned rows, real and padding; at least `len`.
    pub span: usize,
}

fn one() -> usize {
    1
}

fn is_one(step: &usize) -> bool {
    *step == 1
}

/// The reason why a [`Run`] does not fit its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunLayoutError {
    /// A step of zero, which would put every position on one row.
    #[error("step is 0; use at least 1")]
    StepZero,
    /// More real rows than owned ones.
    #[error("len {len} is more than span {span}; the span owns the real rows and their padding")]
    LenOverSpan {
        /// The number of real rows.
        len: usize,
        /// The number of owned rows.
        span: usize,
    },
    /// A last owned row that lies outside the tensor, or whose number overflows.
    #[error("offset {offset} + step {step} × span {span} reaches past the tensor's {rows} rows")]
    OutOfRows {
        /// The first row.
        offset: usize,
        /// The step.
        step: usize,
        /// The number of owned rows.
        span: usize,
        /// The number of rows of the tensor.
        rows: usize,
    },
}

impl Run {
    /// Returns a run of consecutive rows (step 1).
    pub fn packed(offset: usize, len: usize, span: usize) -> Run {
        Run { offset, step: 1, len, span }
    }

    /// Returns the row that holds position `position` (below `span`).
    #[inline]
    pub fn row(&self, position: usize) -> usize {
        debug_assert!(position < self.span, "position {position} of a run that owns {} rows", self.span);
        self.offset + self.step * position
    }

    /// Returns the real rows, in order of position.
    #[inline]
    pub fn real_rows(&self) -> impl ExactSizeIterator<Item = usize> + Clone + use<> {
        let run = *self;
        (0..run.len).map(move |position| run.offset + run.step * position)
    }

    /// Returns the owned rows past the real ones.
    #[inline]
    pub fn padding_rows(&self) -> impl ExactSizeIterator<Item = usize> + Clone + use<> {
        let run = *self;
        (run.len..run.span).map(move |position| run.offset + run.step * position)
    }

    /// Returns one past the last owned row, or `offset` where the run owns no row. Returns `None` where the number
    /// overflows.
    pub fn end(&self) -> Option<usize> {
        match self.span {
            0 => Some(self.offset),
            span => self.step.checked_mul(span - 1)?.checked_add(self.offset)?.checked_add(1),
        }
    }

    /// Checks the run against a tensor of `rows` rows.
    pub fn check(&self, rows: usize) -> Result<(), RunLayoutError> {
        if self.step == 0 {
            return Err(RunLayoutError::StepZero);
        }
        if self.len > self.span {
            return Err(RunLayoutError::LenOverSpan { len: self.len, span: self.span });
        }
        match self.end() {
            Some(end) if end <= rows => Ok(()),
            _ => {
                Err(RunLayoutError::OutOfRows { offset: self.offset, step: self.step, span: self.span, rows })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_the_step() {
        let run = Run { offset: 2, step: 3, len: 2, span: 4 };
        assert_eq!(run.real_rows().collect::<Vec<_>>(), [2, 5]);
        assert_eq!(run.padding_rows().collect::<Vec<_>>(), [8, 11]);
        assert_eq!(run.end(), Some(12));
        assert_eq!(run.check(12), Ok(()));
        assert!(matches!(run.check(11), Err(RunLayoutError::OutOfRows { .. })));
    }

    #[test]
    fn an_empty_run_may_lie_at_the_very_end() {
        assert_eq!(Run::packed(7, 0, 0).check(7), Ok(()));
        assert!(Run::packed(8, 0, 0).check(7).is_err());
    }

    #[test]
    fn overflow_is_an_error() {
        let huge = Run { offset: usize::MAX, step: usize::MAX, len: 2, span: 2 };
        assert!(matches!(huge.check(usize::MAX), Err(RunLayoutError::OutOfRows { .. })));
        assert_eq!(Run { step: 0, ..Run::packed(0, 1, 1) }.check(4), Err(RunLayoutError::StepZero));
        assert!(matches!(Run::packed(0, 2, 1).check(4), Err(RunLayoutError::LenOverSpan { .. })));
    }
}
