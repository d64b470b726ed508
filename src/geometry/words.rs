//! The values of the options, each as it is read and written.

use std::fmt::{self, Display};
use std::str::FromStr;

use seamproof_oracle::limits::WORLD_MAX;
use seamproof_oracle::{Algorithm, Balance, Element, Format, Pages, Precision, SharedKeys, Side};
use serde::de::DeserializeOwned;

use seamproof_judge::prose;

/// Word for a bound that there is none of.
const UNBOUNDED: &str = "inf";

/// Numbers of both sides, as in `17` or `17x20`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) q: usize,
    pub(super) kv: usize,
}

/// Pairs, one for each sequence.
pub(super) type Sides = List<Pair>;

/// Values with commas between them; the empty text is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct List<T>(pub(super) Vec<T>);

/// Numbers as in `8/2`, or one that stands for two alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ratio(pub(super) usize, pub(super) usize);

/// Both bounds of a mask, as in `3,0` or `inf,5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) left: Option<u32>,
    pub(super) right: Option<u32>,
}

/// Format of a quantity, as in `p=f32`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Quantity {
    pub(super) name: &'static str,
    pub(super) element: Element,
}

/// Algorithm and size of a group, as in `ring:4`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Group {
    pub(super) algorithm: Algorithm,
    pub(super) size: usize,
}

/// Balance, as in `striped:2`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Dealing(pub(super) Balance);

/// Pages, as in `16/5:3.0.4:1`. Sequences that begin with the same pages share these.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Paging(pub(super) Pages);

/// Keys that a sequence shares, as in `1:0:16`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SharedOf(pub(super) SharedKeys);

impl Pair {
    pub(super) fn of(self, side: Side) -> usize {
        if side == Side::Q { self.q } else { self.kv }
    }
}

/// Returns the element of the quantity with this name.
pub(super) fn field<'a>(precision: &'a mut Precision, name: &str) -> Option<&'a mut Element> {
    Some(match name {
        "q" => &mut precision.q,
        "k" => &mut precision.k,
        "v" => &mut precision.v,
        "p" => &mut precision.p,
        "out" => &mut precision.out,
        "dout" => &mut precision.dout,
        "ds" => &mut precision.ds,
        "gradients" => &mut precision.gradients,
        _ => return None,
    })
}

/// Reads a word of case files.
pub(super) fn word<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

fn number<N: FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| format!("'{text}' is not a number that fits"))
}

/// Reads one value, or two with `between` between them.
fn two<T: Copy>(
    text: &str,
    between: char,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<(T, T), String> {
    match text.split_once(between) {
        Some((first, second)) => Ok((read(first)?, read(second)?)),
        None => read(text).map(|both| (both, both)),
    }
}

impl FromStr for Pair {
    type Err = String;

    fn from_str(text: &str) -> Result<Pair, String> {
        let what = |why| format!("{why}; write rows as in 17, or queries and keys as in 17x20");
        two(text, 'x', number).map(|(q, kv)| Pair { q, kv }).map_err(what)
    }
}

impl<T: FromStr<Err: Display>> FromStr for List<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<List<T>, String> {
        let values = text.split(',').filter(|_| !text.is_empty());
        let read = |value: &str| value.parse().map_err(|error| format!("'{value}': {error}"));
        values.map(read).collect::<Result<_, _>>().map(List)
    }
}

impl FromStr for Ratio {
    type Err = String;

    fn from_str(text: &str) -> Result<Ratio, String> {
        two(text, '/', number).map(|(first, second)| Ratio(first, second))
    }
}

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Window, String> {
        let (left, right) = text.split_once(',').ok_or("write the left bound, a comma and the right one")?;
        let bound = |text: &str| if text == UNBOUNDED { Ok(None) } else { number(text).map(Some) };
        Ok(Window { left: bound(left)?, right: bound(right)? })
    }
}

impl FromStr for SharedOf {
    type Err = String;

    fn from_str(text: &str) -> Result<SharedOf, String> {
        let numbers: Vec<&str> = text.split(':').collect();
        let [sequence, with, keys] = numbers[..] else {
            return Err(
                "write a sequence, the one that it shares keys with, and their number, as in 1:0:16".into()
            );
        };
        let (sequence, with, keys) = (number(sequence)?, number(with)?, number(keys)?);
        Ok(SharedOf(SharedKeys { sequence, with, keys }))
    }
}

impl FromStr for Paging {
    type Err = String;

    fn from_str(text: &str) -> Result<Paging, String> {
        let mut parts = text.split(':');
        let size = parts.next().and_then(|first| first.split_once('/'));
        let (size, count) = size.ok_or("write the rows of a page, '/' and the pages, as in 16/5:3.0.4:1")?;
        let row = |row: &str| row.split('.').filter(|_| !row.is_empty()).map(number).collect();
        let table = parts.map(row).collect::<Result<_, _>>()?;
        Ok(Paging(Pages { size: number(size)?, count: number(count)?, table, shared: Vec::new() }.shared()))
    }
}

impl FromStr for Quantity {
    type Err = String;

    fn from_str(text: &str) -> Result<Quantity, String> {
        let (quantity, element) = text.split_once('=').ok_or("write QUANTITY=FORMAT, as in p=f32")?;
        let all = Precision::uniform(Format::F32).elements().map(|(name, _)| name);
        let name = all.into_iter().find(|name| *name == quantity);
        let name =
            name.ok_or_else(|| format!("there is no quantity '{quantity}'; known: {}", all.join(", ")))?;
        let element = element.parse::<Element>().map_err(|error| error.to_string())?;
        Ok(Quantity { name, element })
    }
}

impl FromStr for Group {
    type Err = String;

    fn from_str(text: &str) -> Result<Group, String> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let known = || Algorithm::ALL.map(Algorithm::name).join(", ");
        let algorithm = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name);
        let algorithm =
            algorithm.ok_or_else(|| format!("there is no algorithm '{name}'; known: {}", known()))?;
        let size = parts.next().map_or(Ok(1), number)?;
        if size > WORLD_MAX {
            return Err(format!("{size} ranks are too many; use at most {WORLD_MAX}"));
        }
        let algorithm = match (algorithm.parameter(), parts.next()) {
            (Some(_), Some(parameter)) => algorithm.with_parameter(number(parameter)?),
            (None, Some(_)) => return Err(format!("{name} has no parameter; write {name}:{size}")),
            (_, None) => algorithm,
        };
        match parts.next() {
            Some(_) => Err("write ALGORITHM:RANKS".to_owned()),
            None => Ok(Group { algorithm, size }),
        }
    }
}

impl FromStr for Dealing {
    type Err = String;

    fn from_str(text: &str) -> Result<Dealing, String> {
        match text.split_once(':') {
            Some(("striped", rows)) => Ok(Dealing(Balance::Striped { stripe: number(rows)? })),
            _ if text == "striped" => Ok(Dealing(Balance::Striped { stripe: 1 })),
            _ => word(text).map(Dealing),
        }
    }
}

impl Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.q == self.kv { write!(f, "{}", self.q) } else { write!(f, "{}x{}", self.q, self.kv) }
    }
}

impl<T: Display> Display for List<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<String> = self.0.iter().map(T::to_string).collect();
        if values.is_empty() { write!(f, "''") } else { f.write_str(&values.join(",")) }
    }
}

impl Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == self.1 { write!(f, "{}", self.0) } else { write!(f, "{}/{}", self.0, self.1) }
    }
}

impl Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = |bound: Option<u32>| bound.map_or(UNBOUNDED.to_owned(), |keys| keys.to_string());
        write!(f, "{},{}", bound(self.left), bound(self.right))
    }
}

impl Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.element)
    }
}

impl Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.size)?;
        self.algorithm.parameter().map_or(Ok(()), |parameter| write!(f, ":{parameter}"))
    }
}

impl Display for Dealing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&prose::dealing(self.0))
    }
}

impl Display for Paging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Paging(Pages { size, count, table, .. }) = self;
        write!(f, "{size}/{count}")?;
        table.iter().try_for_each(|row| {
            write!(f, ":{}", row.iter().map(usize::to_string).collect::<Vec<_>>().join("."))
        })
    }
}

impl Display for SharedOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SharedKeys { sequence, with, keys } = self.0;
        write!(f, "{sequence}:{with}:{keys}")
    }
}
