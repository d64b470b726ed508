//! Sets of sizes: head dimensions, and query heads of a KV head.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Largest size that a set may hold. No dimension and no number of heads is larger.
const SIZE_MAX: usize = seamproof_oracle::limits::HEADS_MAX;
/// Largest number of sizes that are a list where a range would do.
const LISTED_MAX: usize = 2;

/// A set of sizes, never empty.
///
/// In JSON it is a list, or the multiples of a number within a range: `{"from": 8, "to": 256, "multiple": 8}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(Set);

/// The form of a set, which follows from its sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Set {
    /// The multiples of a number from one size to another, both of them multiples.
    Multiples { first: usize, last: usize, multiple: usize },
    /// Sizes in ascending order.
    List(Vec<usize>),
}

/// Reason why numbers are no set of sizes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizesError {
    /// No size at all.
    #[error("there is no size in it; name at least one")]
    Empty,
    /// A number that is no size.
    #[error("{0} is no size; use 1 to {SIZE_MAX}")]
    OutOfRange(usize),
}

impl Sizes {
    /// Returns the set of these sizes.
    pub fn new(sizes: impl IntoIterator<Item = usize>) -> Result<Sizes, SizesError> {
        let mut sizes: Vec<usize> = sizes.into_iter().collect();
        sizes.sort_unstable();
        sizes.dedup();
        if sizes.is_empty() {
            return Err(SizesError::Empty);
        }
        match sizes.iter().find(|size| !(1..=SIZE_MAX).contains(*size)) {
            Some(&size) => Err(SizesError::OutOfRange(size)),
            None => Ok(Sizes(Set::of(sizes))),
        }
    }

    /// Returns every size from 1 to `most`. A number that is no size becomes the nearest one.
    pub fn up_to(most: usize) -> Sizes {
        let last = most.clamp(1, SIZE_MAX);
        match last {
            ..=LISTED_MAX => Sizes(Set::List((1..=last).collect())),
            _ => Sizes(Set::Multiples { first: 1, last, multiple: 1 }),
        }
    }

    /// Returns the set of one size. A number that is no size becomes the nearest one.
    pub fn only(size: usize) -> Sizes {
        Sizes(Set::List(vec![size.clamp(1, SIZE_MAX)]))
    }

    /// Returns the multiples of a number from `from` to `to`, both inclusive.
    pub fn multiples(from: usize, to: usize, multiple: usize) -> Result<Sizes, SizesError> {
        if !(1..=SIZE_MAX).contains(&to) {
            return Err(SizesError::OutOfRange(to));
        }
        if multiple == 0 {
            return Err(SizesError::OutOfRange(multiple));
        }
        Sizes::new((from..=to).filter(|size| *size > 0 && size.is_multiple_of(multiple)))
    }

    /// Whether a size is in the set.
    pub fn contains(&self, size: usize) -> bool {
        match &self.0 {
            Set::Multiples { first, last, multiple } => {
                (*first..=*last).contains(&size) && size.is_multiple_of(*multiple)
            }
            Set::List(sizes) => sizes.contains(&size),
        }
    }

    /// Returns the sizes in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (self.least()..=self.most()).filter(|size| self.contains(*size))
    }

    /// Returns the smallest size.
    pub fn least(&self) -> usize {
        match &self.0 {
            Set::Multiples { first, .. } => *first,
            Set::List(sizes) => sizes.first().copied().unwrap_or(1),
        }
    }

    /// Returns the largest size.
    pub fn most(&self) -> usize {
        match &self.0 {
            Set::Multiples { last, .. } => *last,
            Set::List(sizes) => sizes.last().copied().unwrap_or(1),
        }
    }

    /// Returns the size that is nearest to a number; of two, the smaller.
    pub fn nearest(&self, number: usize) -> usize {
        match self.contains(number) {
            true => number,
            false => self.iter().min_by_key(|size| size.abs_diff(number)).unwrap_or(number),
        }
    }

    /// Returns any size of the set, as drawn numbers say: in one case of four the largest, and in half of them one that is
    /// nearest to a multiple of 8.
    pub fn any(&self, drawn: u64) -> usize {
        let any = self.iter().nth((drawn >> 2) as usize % self.iter().count()).unwrap_or(self.least());
        match drawn % 4 {
            0 => self.most(),
            1 | 2 => self.nearest(any.next_multiple_of(8)),
            _ => any,
        }
    }
}

impl Set {
    /// Returns the set of ascending sizes.
    fn of(sizes: Vec<usize>) -> Set {
        let (first, last) = match sizes[..] {
            [first, _, .., last] if sizes.len() > LISTED_MAX => (first, last),
            _ => return Set::List(sizes),
        };
        let multiple = sizes[1] - first;
        let even = sizes.windows(2).all(|pair| pair[1] - pair[0] == multiple);
        match even && first.is_multiple_of(multiple) {
            true => Set::Multiples { first, last, multiple },
            false => Set::List(sizes),
        }
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Set::Multiples { first, last, multiple: 1 } => write!(f, "{first} to {last}"),
            Set::Multiples { first, last, multiple } => {
                write!(f, "multiples of {multiple} from {first} to {last}")
            }
            Set::List(sizes) => {
                f.write_str(&sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
            }
        }
    }
}

/// The two forms of a set in JSON.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Stored {
    List(Vec<usize>),
    Range(StoredRange),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredRange {
    from: usize,
    to: usize,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    multiple: usize,
}

fn one() -> usize {
    1
}

fn is_one(number: &usize) -> bool {
    *number == 1
}

impl Serialize for Sizes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let stored = match self.0.clone() {
            Set::Multiples { first: from, last: to, multiple } => {
                Stored::Range(StoredRange { from, to, multiple })
            }
            Set::List(sizes) => Stored::List(sizes),
        };
        stored.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Sizes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Sizes, D::Error> {
        let form = "write a list of sizes, or {\"from\": 8, \"to\": 256, \"multiple\": 8}";
        let stored = Stored::deserialize(deserializer).map_err(|_| D::Error::custom(form))?;
        let sizes = match stored {
            Stored::List(sizes) => Sizes::new(sizes),
            Stored::Range(StoredRange { from, to, multiple }) => Sizes::multiples(from, to, multiple),
        };
        sizes.map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Sizes, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn lists_and_ranges_read_back() {
        for json in
            ["[64]", "[64,128]", "[1,3,8]", r#"{"from":8,"to":256,"multiple":8}"#, r#"{"from":1,"to":4}"#]
        {
            let sizes = read(json).expect("a set of sizes");
            assert_eq!(serde_json::to_string(&sizes).expect("it is JSON"), json);
        }
        assert_eq!(read(r#"{"from":5,"to":20,"multiple":8}"#), Ok(Sizes(Set::List(vec![8, 16]))));
        assert_eq!(read("[8, 2, 8]"), Ok(Sizes(Set::List(vec![2, 8]))));
    }

    #[test]
    fn no_set_is_empty_or_out_of_range() {
        for json in ["[]", "[0]", "[5000]", r#"{"from":9,"to":15,"multiple":8}"#, r#"{"from":1,"to":5000}"#] {
            assert!(read(json).is_err(), "{json}");
        }
        for json in [r#"{"from":1,"to":8,"multiple":0}"#, r#"{"from":1,"to":8,"step":2}"#, "64", "null"] {
            assert!(read(json).is_err(), "{json}");
        }
    }

    #[test]
    fn any_size_may_be_drawn_and_multiples_of_8_and_the_largest_often() {
        let sizes = Sizes::multiples(257, 576, 1).expect("sizes");
        let drawn: Vec<usize> = (0..4000).map(|draw| sizes.any(crate::hash::mix(draw))).collect();
        let share = |what: &dyn Fn(usize) -> bool| drawn.iter().filter(|size| what(**size)).count();
        assert!(drawn.iter().all(|size| sizes.contains(*size)));
        assert!((900..1200).contains(&share(&|size| size == 576)), "the largest");
        assert!((2800..3400).contains(&share(&|size| size % 8 == 0)), "multiples of 8");
        assert!(drawn.iter().collect::<std::collections::BTreeSet<_>>().len() > 250);
        assert_eq!(Sizes::only(5).any(7), 5);
    }

    #[test]
    fn the_nearest_of_two_is_the_smaller() {
        let sizes = Sizes::new([8, 16, 64]).expect("sizes");
        assert_eq!([1, 12, 13, 40, 41, 900].map(|number| sizes.nearest(number)), [8, 8, 16, 16, 64, 64]);
    }
}
