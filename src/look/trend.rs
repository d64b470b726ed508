//! The trend: what each campaign did in every night, as lines over the nights.

use maud::{Markup, html};

use super::svg::{Drawing, number, ratio, words};
use super::table::Table;
use crate::nightly::{Point, has_moved};

/// Largest number of nights of a line, the newest ones.
const NIGHTS_MAX: usize = 60;
/// Largest number of campaigns that have lines.
const CAMPAIGNS_MAX: usize = 8;
/// Largest number of lines in the table, the newest ones.
const LISTED_MAX: usize = 200;
/// Where lines begin and end.
const SIDES: [f64; 2] = [170.0, 560.0];
/// Height of a line, and from one to the next.
const HEIGHT: f64 = 22.0;
const PITCH: f64 = 34.0;

/// A number over the nights.
struct Series {
    name: String,
    /// Nights, with what each had.
    points: Vec<(u32, f64)>,
    /// Whether a step away from the night before is marked.
    drifts: bool,
}

/// Returns the picture: of each campaign its rate, its failures, and the p99 of each tensor.
pub(super) fn trend(points: &[Point]) -> Drawing {
    let series = series(points);
    let nights = points.iter().map(|point| point.night);
    let [first, last] = [nights.clone().min(), nights.max()].map(Option::unwrap_or_default);
    let first = first.max(last.saturating_sub(NIGHTS_MAX as u32 - 1));
    let mut y = 8.0;
    let mut drawn = Vec::new();
    for (campaign, lines) in &series {
        drawn.push(words("strong", [0.0, y + 8.0], campaign));
        y += 18.0;
        for line in lines {
            drawn.push(draw(line, [first, last], y));
            y += PITCH;
        }
        y += 6.0;
    }
    Drawing {
        id: "trend",
        title: "Trend over nights".to_owned(),
        desc: format!(
            "Lines over the nights {first} to {last}: cases a second, failures, and the p99 of error ÷ bound of each \
             tensor, for each campaign. Rings mark a p99 that moved against the night before."
        ),
        height: y,
        body: html! { @for one in drawn { (one) } },
    }
}

/// Returns the lines of each campaign.
fn series(points: &[Point]) -> Vec<(String, Vec<Series>)> {
    let mut names: Vec<(&str, &str)> = Vec::new();
    for point in points {
        let name = (point.subject.as_str(), point.profile.as_str());
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let of_name = |&(subject, profile): &(&str, &str)| {
        let own: Vec<&Point> =
            points.iter().filter(|point| point.subject == subject && point.profile == profile).collect();
        let own = &own[own.len().saturating_sub(NIGHTS_MAX)..];
        let line = |name: &str, value: &dyn Fn(&Point) -> Option<f64>, drifts| Series {
            name: name.to_owned(),
            points: own.iter().filter_map(|point| Some((point.night, value(point)?))).collect(),
            drifts,
        };
        let mut lines = vec![
            line("cases a second", &|point| Some(point.cases_per_second), false),
            line("cases", &|point| Some(point.cases as f64), false),
            line("different failures", &|point| Some(point.distinct as f64), false),
        ];
        let tensors = own.last().into_iter().flat_map(|point| point.p99.keys());
        lines.extend(tensors.map(|tensor| {
            let told = |point: &Point| {
                let counted = point.counted.get(tensor).copied().unwrap_or(0);
                point.p99.get(tensor).copied().filter(|_| crate::campaign::tells(counted, 0.99))
            };
            line(&format!("p99 of {tensor}"), &told, true)
        }));
        (format!("{subject} {profile}"), lines.into_iter().filter(|line| !line.points.is_empty()).collect())
    };
    names.iter().take(CAMPAIGNS_MAX).map(of_name).collect()
}

fn draw(line: &Series, [first, last]: [u32; 2], y: f64) -> Markup {
    let most = line.points.iter().map(|(_, value)| *value).fold(0.0, f64::max);
    let x_of = |night: u32| {
        let share = f64::from(night.saturating_sub(first)) / f64::from((last - first).max(1));
        SIDES[0] + share * (SIDES[1] - SIDES[0])
    };
    let y_of = |value: f64| y + HEIGHT - if most > 0.0 { value / most * HEIGHT } else { 0.0 };
    let drawn: Vec<(u32, f64)> = line.points.iter().copied().filter(|(night, _)| *night >= first).collect();
    let place = |(night, value): &(u32, f64)| format!("{} {}", number(x_of(*night)), number(y_of(*value)));
    let path: Vec<String> = drawn.iter().map(place).collect();
    let before = |at: usize| at.checked_sub(1).map(|at| drawn[at].1);
    let moved = |at: usize| line.drifts && before(at).is_some_and(|before| has_moved(drawn[at].1 / before));
    let latest = drawn.last().map_or(String::new(), |(_, value)| ratio(*value));
    html! {
        (words("end", [SIDES[0] - 10.0, y + HEIGHT / 2.0 + 4.0], &line.name))
        path class="lane" d=(format!("M{} {}H{}", number(SIDES[0]), number(y + HEIGHT), number(SIDES[1]))) {}
        path class="line-arrow" d=(format!("M{}", path.join("L"))) {}
        @for (at, (night, value)) in drawn.iter().enumerate() {
            circle class=(if moved(at) { "dot-moved" } else { "dot" }) cx=(number(x_of(*night))) cy=(number(y_of(*value)))
                r=(if moved(at) { "4" } else { "2.4" }) {
                title { "night " (night) ": " (ratio(*value)) @if moved(at) { ", moved" } }
            }
        }
        (words("", [SIDES[1] + 12.0, y + HEIGHT / 2.0 + 4.0], &latest))
    }
}

/// Returns the numbers of the picture, the newest night first.
pub(super) fn numbers(points: &[Point]) -> Table {
    let head = [
        "night",
        "subject",
        "sizes",
        "cases",
        "refused",
        "malformed",
        "failed",
        "different",
        "cases a second",
    ];
    let row = |point: &Point| {
        vec![
            point.night.to_string(),
            point.subject.clone(),
            point.profile.clone(),
            point.cases.to_string(),
            point.refused.to_string(),
            point.malformed.to_string(),
            point.failed.to_string(),
            point.distinct.to_string(),
            format!("{:.1}", point.cases_per_second),
        ]
    };
    Table {
        name: "Campaigns of all nights",
        head: head.map(String::from).to_vec(),
        rows: points.iter().rev().take(LISTED_MAX).map(row).collect(),
        left: points.len().saturating_sub(LISTED_MAX),
    }
}
