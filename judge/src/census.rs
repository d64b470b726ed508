//! The census: which classes of problems a campaign has seen, and whether it has seen enough of each.
//!
//! A *class* is a predicate over problems: a seam that a campaign must reach. For each profile it has a measured
//! *rate*, its share of all cases that the generator draws. Its *floor* follows from the rate: a campaign with fewer
//! members counts as too little run. The floor is half of the expected count. Where that count is small, the floor
//! lies lower, out of reach of chance (see [`Class::floor`]). It therefore holds for every seed, and an empty
//! generator cannot pass.
//!
//! A subject's table narrows what a campaign can reach, and its floors follow ([`Floors::of`]).
//!
//! Classes consist of *legal* problems, unless they say that they are of refused ones. A legal problem is in one
//! unscaled 16-bit format, and its algorithm can cut and deal it. Problems outside that, and malformed fields, are
//! counted separately as well.

mod classes;

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt;

use seamproof_oracle::Problem;
use serde::{Deserialize, Serialize};

use crate::asked::Asked;
use crate::generate::{self, Draw, Malformed, Profile};
use crate::prose::counted;
use crate::subject::{Declaration, Table};

use classes::class;
pub use classes::{CLASSES, Class, floor, is_legal};

/// A class below its floor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissedFloor {
    /// Name of the class.
    pub class: String,
    /// Number of members seen.
    pub count: u64,
    /// Number of members wanted.
    pub floor: u64,
}

impl fmt::Display for MissedFloor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, at least {} wanted", self.class, counted(self.count, "case"), self.floor)
    }
}

/// Counts of the problems that a campaign has seen. Censuses merge in any order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Census {
    legal: u64,
    outside: u64,
    malformed: BTreeMap<String, u64>,
    /// Members by class; a class without members is absent.
    classes: BTreeMap<String, u64>,
    /// Number of legal cases by their tokens (real query rows).
    tokens: BTreeMap<u64, u64>,
    /// Sum of visible pairs · query heads · dqk over legal cases.
    products: u64,
    /// Sum of the elements of all tensors over legal cases.
    elements: u64,
}

/// One line of the census.
#[derive(Clone, Debug, PartialEq)]
pub struct CensusRow {
    /// Name of the class.
    pub name: String,
    /// Number of its members.
    pub count: u64,
    /// Share of all cases that are members; 0 without cases.
    pub share: f64,
}

/// Line for well-formed problems that are not legal.
const OUTSIDE: &str = "outside the table";
/// Beginning of the lines for malformed fields.
const MALFORMED: &str = "malformed: ";

fn increment(counts: &mut BTreeMap<String, u64>, name: &str, by: u64) {
    match counts.get_mut(name) {
        Some(count) => *count += by,
        None => {
            counts.insert(name.to_owned(), by);
        }
    }
}

impl Census {
    /// Counts a case.
    pub fn add_draw(&mut self, draw: &Draw) {
        match draw {
            Draw::Problem(problem) => self.add(problem),
            Draw::Malformed(malformed) => self.add_malformed(malformed.rule),
        }
    }

    /// Counts a well-formed problem. It is legal if the emulated kernel takes it.
    pub fn add(&mut self, problem: &Problem) {
        self.add_as(problem, is_legal(problem));
    }

    /// Counts what a subject was asked.
    pub fn add_asked(&mut self, asked: &Asked) {
        match asked {
            Asked::Problem(problem) => self.add_as(problem, true),
            Asked::Probe(problem) => self.add_as(problem, false),
            Asked::Malformed(malformed) => self.add_malformed(malformed.rule),
        }
    }

    /// Counts a problem that a subject takes, or, if it is not legal, one that the subject must refuse.
    fn add_as(&mut self, problem: &Problem, legal: bool) {
        for class in CLASSES.iter().filter(|class| class.has(problem, legal)) {
            increment(&mut self.classes, class.name, 1);
        }
        if !legal {
            self.outside += 1;
            return;
        }
        self.legal += 1;
        *self.tokens.entry(problem.tokens() as u64).or_default() += 1;
        self.products += problem.pairs() * (problem.heads.q * problem.dims.qk) as u64;
        self.elements += problem.elements();
    }

    /// Counts malformed fields by the rule that they break.
    pub fn add_malformed(&mut self, rule: &str) {
        increment(&mut self.malformed, rule, 1);
    }

    /// Adds another census to this one.
    pub fn merge(&mut self, other: &Census) {
        self.legal += other.legal;
        self.outside += other.outside;
        self.products = self.products.saturating_add(other.products);
        self.elements += other.elements;
        for (name, count) in &other.malformed {
            increment(&mut self.malformed, name, *count);
        }
        for (name, count) in &other.classes {
            increment(&mut self.classes, name, *count);
        }
        for (tokens, count) in &other.tokens {
            *self.tokens.entry(*tokens).or_default() += count;
        }
    }

    /// Returns the number of all cases, illegal ones included.
    pub fn total(&self) -> u64 {
        self.legal + self.outside + self.malformed()
    }

    /// Returns the number of legal cases.
    pub fn legal(&self) -> u64 {
        self.legal
    }

    /// Returns the number of well-formed problems that are not legal.
    pub fn outside(&self) -> u64 {
        self.outside
    }

    /// Returns the number of malformed cases.
    pub fn malformed(&self) -> u64 {
        self.malformed.values().sum()
    }

    /// Returns the number of members of a class.
    pub fn count(&self, class: &str) -> u64 {
        self.classes.get(class).copied().unwrap_or(0)
    }

    /// Returns the smallest number of tokens that a share `quantile` of the legal cases does not exceed.
    pub fn tokens(&self, quantile: f64) -> u64 {
        let rank = (quantile * self.legal as f64).ceil() as u64;
        let mut seen = 0;
        let reaches = self.tokens.iter().find(|(_, count)| {
            seen += **count;
            seen >= rank
        });
        reaches.map_or(0, |(tokens, _)| *tokens)
    }

    /// Returns the sum of visible pairs · query heads · dqk over legal cases.
    pub fn products(&self) -> u64 {
        self.products
    }

    /// Returns the sum of [`Problem::elements`] over legal cases.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// Returns a row for every class, for the illegal cases, and for each rule that malformed fields break.
    pub fn rows(&self) -> Vec<CensusRow> {
        let total = self.total().max(1) as f64;
        let row = |name: String, count: u64| CensusRow { name, count, share: count as f64 / total };
        let classes = CLASSES.iter().map(|class| row(class.name.to_owned(), self.count(class.name)));
        let outside = [row(OUTSIDE.to_owned(), self.outside)];
        let rules: BTreeMap<_, _> = Malformed::rules().map(|rule| (rule, self.rule(rule))).collect();
        let malformed = rules.into_iter().map(|(rule, count)| row(format!("{MALFORMED}{rule}"), count));
        classes.chain(outside).chain(malformed).collect()
    }

    /// Returns the number of malformed cases that break a rule.
    pub fn rule(&self, rule: &str) -> u64 {
        self.malformed.get(rule).copied().unwrap_or(0)
    }

    /// Returns the classes below their floors in a campaign over all problems, including the two classes of illegal
    /// cases.
    pub fn missed(&self, profile: Profile) -> Vec<MissedFloor> {
        self.below(&Floors::of_profile(profile))
    }

    /// Returns the classes below these floors.
    pub fn below(&self, floors: &Floors) -> Vec<MissedFloor> {
        let total = self.total();
        let classes = CLASSES.iter().zip(&floors.classes);
        let classes = classes.map(|(class, &rate)| (class.name, self.count(class.name), floor(rate, total)));
        let refused = [floors.outside, floors.malformed].map(|rate| floor(rate, total));
        classes
            .chain([
                (OUTSIDE, self.outside, refused[0]),
                (MALFORMED_CLASS.name, self.malformed(), refused[1]),
            ])
            .filter(|(_, count, floor)| count < floor)
            .map(|(class, count, floor)| MissedFloor { class: class.to_owned(), count, floor })
            .collect()
    }
}

/// Least rates that the classes must have among the cases of a campaign, in tenths of a percent.
///
/// A table keeps some classes out, and makes others rarer. How much rarer is measured on the same draws, with and
/// without the table; a class that becomes too rare for a thousand cases is not asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Floors {
    /// Rate of each class, in the order of [`CLASSES`].
    classes: Vec<u16>,
    outside: u16,
    malformed: u16,
}

/// Number of draws on which floors of a table are measured.
const MEASURED: u64 = 1500;
/// Least rate of a class that is asked for. A thousand cases without a member are out of reach of chance.
const RATE_MIN: u16 = 12;

impl Floors {
    /// Returns the floors of a campaign over all problems of a profile.
    pub fn of_profile(profile: Profile) -> Floors {
        let rate = |class: &Class| class.rates[profile as usize];
        Floors {
            classes: CLASSES.iter().map(rate).collect(),
            outside: rate(&OUTSIDE_CLASS),
            malformed: rate(&MALFORMED_CLASS),
        }
    }

    /// Returns the floors of a campaign over the problems that a subject is asked.
    pub fn of(declaration: &Declaration, profile: Profile) -> Floors {
        Floors::of_each(profile, |_| declaration)
    }

    /// Returns the floors of a campaign over the problems that subjects are asked, one for each draw. Options that are
    /// drawn may change what a subject takes.
    pub fn of_each<D: Borrow<Declaration>>(profile: Profile, declaration: impl Fn(u64) -> D) -> Floors {
        let whole = Floors::of_profile(profile);
        let declarations: Vec<D> = (0..MEASURED).map(declaration).collect();
        let widest = Table::widest();
        let takes_all = |declaration: &D| {
            let declaration: &Declaration = declaration.borrow();
            let table = Table { statistics: widest.statistics.clone(), ..declaration.table.clone() };
            declaration.refuses && table == widest
        };
        if declarations.iter().all(takes_all) {
            return whole;
        }
        let (mut drawn, mut asked) = (Census::default(), Census::default());
        let limits = profile.limits();
        for (index, declaration) in (0..).zip(&declarations) {
            drawn.add_draw(&generate::draw(0, index, &limits));
            asked.add_asked(&Asked::drawn(0, index, &limits, declaration.borrow()));
        }
        let rarer = |rate: u16, drawn: u64, asked: u64| match asked < drawn {
            true => {
                Some((u64::from(rate) * asked / drawn) as u16).filter(|rate| *rate >= RATE_MIN).unwrap_or(0)
            }
            false => rate,
        };
        let class =
            |(class, &rate): (&Class, &u16)| rarer(rate, drawn.count(class.name), asked.count(class.name));
        Floors {
            classes: CLASSES.iter().zip(&whole.classes).map(class).collect(),
            outside: rarer(whole.outside, drawn.outside, asked.outside),
            malformed: whole.malformed,
        }
    }

    /// Returns the classes that are asked for in a campaign over all problems, but not here.
    pub fn kept_out(&self, profile: Profile) -> Vec<&'static str> {
        let whole = Floors::of_profile(profile);
        let classes = CLASSES.iter().zip(self.classes.iter().zip(&whole.classes));
        classes.filter(|(_, (own, all))| **own == 0 && **all > 0).map(|(class, _)| class.name).collect()
    }
}

/// Class of well-formed problems that are not legal. One case in twenty is illegal, and half of these are
/// well-formed.
const OUTSIDE_CLASS: Class = class(OUTSIDE, [25; 3], |problem| !is_legal(problem));
/// Class of malformed cases, the other half of the illegal ones. No well-formed problem belongs to it.
const MALFORMED_CLASS: Class = class("malformed", [25; 3], |_| false);

/// Number of columns in the table.
const TABLE_COLUMNS: usize = 2;

impl fmt::Display for Census {
    /// Writes a table with two classes on a line, and a line of sums.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        let width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
        let lines = rows.len().div_ceil(TABLE_COLUMNS);
        for line in 0..lines {
            let cells: Vec<String> = (0..TABLE_COLUMNS)
                .filter_map(|column| rows.get(column * lines + line))
                .map(|row| format!("{:width$} {:>8} {:>5.1} %", row.name, row.count, 100.0 * row.share))
                .collect();
            writeln!(f, "{}", cells.join("    "))?;
        }
        let mean = |sum: u64| sum as f64 / self.legal.max(1) as f64;
        write!(
            f,
            "{}, {} legal; tokens p50 {}, p95 {}; a legal case: {:.0} products, {:.0} elements",
            counted(self.total(), "case"),
            self.legal,
            self.tokens(0.5),
            self.tokens(0.95),
            mean(self.products),
            mean(self.elements),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_cases() {
        let mut census = Census { legal: 4, ..Census::default() };
        census.tokens = [(1, 1), (5, 2), (9, 1)].into();
        assert_eq!(
            [0.0, 0.25, 0.5, 0.75, 0.76, 1.0].map(|quantile| census.tokens(quantile)),
            [1, 1, 5, 5, 9, 9]
        );
        assert_eq!(Census::default().tokens(0.5), 0);
    }
}
