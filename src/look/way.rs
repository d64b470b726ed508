//! Picture 7: from the drawn case to the minimal one, as small layouts.

use maud::{Markup, html};
use seamproof_judge::prose::counted;
use seamproof_oracle::Side;
use seamproof_oracle::sharding::whole;

use super::layout;
use super::strip::stretches;
use super::svg::{Drawing, WIDTH, block, legend, words};
use crate::report::Waypoint;

/// Where strips begin.
const LEFT: f64 = 76.0;
/// Height of a strip, and of the words below the strips of a step.
const STRIP: f64 = 11.0;
const WORDS: f64 = 20.0;
/// Largest number of stretches of a strip.
const STRETCHES_MAX: usize = 48;

/// Returns the picture.
pub(super) fn way(way: &[Waypoint]) -> Drawing {
    let scale = way.iter().map(|step| step.of.rows.q.max(step.of.rows.kv)).max().unwrap_or(0).max(1);
    let (key, mut y) = legend(&[
        ("real", "real rows"),
        ("padding", "padding"),
        ("free", "no sequence’s: gap or slack"),
        ("several", "several stretches in one"),
    ]);
    let mut drawn = vec![key];
    for (at, step) in way.iter().enumerate() {
        let name = match at {
            0 => "drawn".to_owned(),
            _ if at + 1 == way.len() => "smallest".to_owned(),
            _ => format!("step {at}"),
        };
        let sides = sides(step);
        drawn.push(words("end strong", [LEFT - 8.0, y + STRIP - 1.0], &name));
        for &(side, title) in &sides {
            drawn.push(draw(step, (side, title), scale, y));
            y += STRIP + 2.0;
        }
        drawn.push(words("faint", [LEFT, y + 10.0], &cut(&step.problem)));
        y += WORDS;
    }
    let told: Vec<&str> = way.iter().map(|step| step.problem.as_str()).collect();
    Drawing {
        id: "way",
        title: "From the drawn case to the smallest".to_owned(),
        desc: format!("{} of the shrinker: {}", counted(way.len(), "case"), told.join("; then ")),
        height: y,
        body: html! { @for one in drawn { (one) } },
    }
}

/// Returns words that fit beside the strips.
fn cut(text: &str) -> String {
    const MOST: usize = 104;
    let mut letters = text.chars();
    let kept: String = letters.by_ref().take(MOST).collect();
    if letters.next().is_some() { kept + "…" } else { kept }
}

/// Returns the sides that are drawn: one for both where they lie alike.
fn sides(step: &Waypoint) -> Vec<(Side, &'static str)> {
    let problem = &step.of;
    let alike = problem.rows.q == problem.rows.kv && problem.sequences.iter().all(|both| both.q == both.kv);
    if alike { vec![(Side::Q, "q, kv")] } else { vec![(Side::Q, "q"), (Side::Kv, "kv")] }
}

fn draw(step: &Waypoint, (side, title): (Side, &str), scale: usize, y: f64) -> Markup {
    let whole = whole(&step.of);
    let rows = whole.side(side);
    let unit = (WIDTH - LEFT - 1.0) / scale as f64;
    let parts = stretches(rows.rows, &rows.runs, STRETCHES_MAX);
    html! {
        @for part in &parts {
            @let place = [LEFT + part.rows.start as f64 * unit, y, part.rows.len() as f64 * unit, STRIP];
            (block(layout::class(part.holds), place, &format!("{title}: {}", layout::title(part, None))))
        }
        @if rows.rows == 0 { (words("faint", [LEFT, y + STRIP - 1.0], "no rows")) }
    }
}
