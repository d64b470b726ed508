//! An answer: names of numbers, and arrays of them.

use std::collections::BTreeMap;

use ndarray::{ArrayD, IxDyn};
use serde::Deserialize;
use serde_json::Value;

use seamproof_oracle::TensorName;
use seamproof_simulator::Damage;

/// Error of an answer that does not fit its question.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AnswerError(pub String);

/// Seconds of the parts of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct Seconds {
    /// Seconds of drawing the inputs.
    pub inputs: f64,
    /// Seconds of the first call, in which kernels may be compiled.
    pub warm: f64,
    /// Seconds of the call that is judged.
    pub kernel: f64,
    /// Seconds of the exact rows and sums.
    pub judge: f64,
}

/// Comparison of every row of a result with what inputs of an exact mode allow.
#[derive(Clone, Debug, Deserialize)]
pub struct Compared {
    /// Number of elements that were compared.
    pub compared: usize,
    /// Number of those that are wrong.
    pub failed: usize,
    /// Row, head and lane of one that is far off.
    pub place: Vec<usize>,
    /// Its value and the right one.
    pub values: Vec<Value>,
}

/// Head of an answer.
#[derive(Clone, Debug, Deserialize)]
pub struct Head {
    /// Names of the numbers along the last axis of statistics and laws.
    pub names: BTreeMap<String, Vec<String>>,
    /// For each result with elements that are no number, their count and the place of the first.
    pub no_numbers: BTreeMap<String, Vec<usize>>,
    /// For each result whose every row is known bit for bit, what was compared.
    pub exact: BTreeMap<String, Compared>,
    /// Inputs that the subject wrote to.
    pub changed: Vec<TensorName>,
    /// Guard bands that were overwritten, as the worker protocol writes them.
    pub damage: Vec<Damage>,
    /// Times.
    pub seconds: Seconds,
    /// Shapes of the arrays that follow, in this order.
    pub arrays: Vec<(String, Vec<usize>)>,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The head.
    pub head: Head,
    arrays: BTreeMap<String, ArrayD<f64>>,
}

impl Answer {
    /// Reads an answer from its head and its numbers. Shapes are held against the bytes that are there.
    pub fn read(head: Head, mut bytes: &[u8]) -> Result<Answer, AnswerError> {
        let mut arrays = BTreeMap::new();
        for (name, shape) in &head.arrays {
            let size = shape.iter().try_fold(8_usize, |size, axis| size.checked_mul(*axis));
            let Some((own, rest)) = size.and_then(|size| bytes.split_at_checked(size)) else {
                return Err(AnswerError(format!("{name} of shape {shape:?} in {} bytes", bytes.len())));
            };
            bytes = rest;
            let (numbers, _) = own.as_chunks::<8>();
            let numbers = numbers.iter().map(|number| f64::from_le_bytes(*number)).collect();
            let array = ArrayD::from_shape_vec(IxDyn(shape), numbers);
            arrays.insert(name.clone(), array.map_err(|error| AnswerError(error.to_string()))?);
        }
        match bytes {
            [] => Ok(Answer { head, arrays }),
            _ => Err(AnswerError(format!("{} bytes too many", bytes.len()))),
        }
    }

    /// Returns an array of this shape; `None` where there is none of this name.
    pub(super) fn array(
        &self,
        name: &str,
        shape: &[Option<usize>],
    ) -> Result<Option<&ArrayD<f64>>, AnswerError> {
        let Some(array) = self.arrays.get(name) else { return Ok(None) };
        let fits = array.shape().len() == shape.len()
            && array.shape().iter().zip(shape).all(|(axis, asked)| asked.is_none_or(|asked| asked == *axis));
        match fits {
            true => Ok(Some(array)),
            false => Err(AnswerError(format!("{name} has shape {:?}", array.shape()))),
        }
    }

    /// Returns the numbers that have names, `[rows, heads, names]`; `None` where there are none.
    pub(super) fn named(
        &self,
        name: &str,
        list: &str,
        [rows, heads]: [usize; 2],
    ) -> Result<Option<Named<'_>>, AnswerError> {
        let names = self.head.names.get(list).map_or(&[][..], Vec::as_slice);
        let array = self.array(name, &[Some(rows), Some(heads), Some(names.len())])?;
        Ok(array.map(|array| {
            let places = names.iter().enumerate().map(|(place, name)| (name.as_str(), place)).collect();
            Named { array, places }
        }))
    }
}

/// Numbers with names.
pub(super) struct Named<'a> {
    array: &'a ArrayD<f64>,
    places: BTreeMap<&'a str, usize>,
}

impl Named<'_> {
    /// Whether there are numbers of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// Returns a number of a row and head. One that is missing is no number, so that whatever needs it fails.
    pub(super) fn get(&self, row: usize, head: usize, name: &str) -> f64 {
        self.places.get(name).map_or(f64::NAN, |&place| self.array[[row, head, place]])
    }
}
