//! Picture 5: margins. For each tensor, how the error ÷ bound of the cases that held is distributed, beside the night
//! before.

use maud::{Markup, html};
use seamproof_judge::verdict::Tier;

use super::svg::{Drawing, block, number, ratio, words};
use super::table::Table;
use crate::campaign::Bar;
use crate::report::{Measured, TensorMargin};

/// Where bars begin and end.
const SIDES: [f64; 2] = [92.0, 470.0];
/// Height of the bars of a tensor, and from one tensor to the next.
const HEIGHT: f64 = 26.0;
const PITCH: f64 = 38.0;
/// Powers of two at both ends. What is smaller stands at the left end.
const EXPONENTS: [f64; 2] = [-16.0, 0.5];
/// Powers of two that have a number.
const MARKS: [(f64, &str); 5] =
    [(-16.0, "≤ 2⁻¹⁶"), (-12.0, "2⁻¹²"), (-8.0, "2⁻⁸"), (-4.0, "2⁻⁴"), (0.0, "1")];

/// Returns the picture of a campaign's margins.
pub(super) fn margins(measured: &Measured) -> Drawing {
    let mut y = 18.0;
    let mut drawn = vec![axis(measured.margins.len())];
    for margin in &measured.margins {
        drawn.push(draw(margin, y));
        y += PITCH;
    }
    let moved = measured.margins.iter().filter(|margin| moved(margin).is_some()).count();
    Drawing {
        id: "margins",
        title: format!("Margins of {}", measured.campaign),
        desc: format!(
            "A distribution of error ÷ bound for each of {} tensors and tiers, on an axis of powers of two; the bound \
             is at 1. {moved} of them moved against the night before.",
            measured.margins.len()
        ),
        height: y,
        body: html! { @for one in drawn { (one) } },
    }
}

fn x_of(value: f64) -> f64 {
    let [first, last] = EXPONENTS;
    let share = ((value.log2() - first) / (last - first)).clamp(0.0, 1.0);
    SIDES[0] + share * (SIDES[1] - SIDES[0])
}

fn axis(rows: usize) -> Markup {
    let height = rows as f64 * PITCH;
    html! {
        @for (exponent, name) in MARKS {
            @let x = x_of(exponent.exp2());
            path class=(if exponent == 0.0 { "line-pass" } else { "lane" }) d=(format!("M{} 14v{}", number(x), number(height))) {}
            (words("faint middle", [x, 10.0], name))
        }
        (words("faint", [SIDES[1] + 14.0, 10.0], "p50 · p99 · largest"))
    }
}

fn draw(margin: &TensorMargin, y: f64) -> Markup {
    let base = y + HEIGHT;
    let quantiles = margin.quantiles;
    let numbers = [
        Some(quantiles.p50).filter(|_| quantiles.tells(0.5)),
        Some(quantiles.p99).filter(|_| quantiles.tells(0.99)),
        Some(quantiles.max),
    ];
    let told = numbers.map(|value| value.map_or("–".to_owned(), ratio)).join(" · ");
    html! {
        (words("end", [SIDES[0] - 8.0, base - 12.0], margin.tensor.name()))
        (words("end faint", [SIDES[0] - 8.0, base], &tier(margin.tier)))
        path class="lane" d=(format!("M{} {}H{}", number(SIDES[0]), number(base), number(SIDES[1]))) {}
        @for bar in bars(&margin.bars, margin.quantiles.count, base) { (bar) }
        @if let Some(before) = &margin.before {
            path class="line-seam" d=(outline(&before.bars, base)) { title { "night " (before.night) } }
        }
        @if quantiles.tells(0.99) {
            path class=(if moved(margin).is_some() { "line-found" } else { "line-arrow" })
                d=(format!("M{} {}v{}", number(x_of(quantiles.p99)), number(y), number(HEIGHT))) { title { "p99" } }
        }
        (words("", [SIDES[1] + 14.0, base - 12.0], &told))
        (words(if moved(margin).is_some() { "strong" } else { "faint" }, [SIDES[1] + 14.0, base + 2.0], &against(margin)))
    }
}

fn tier(tier: Tier) -> String {
    format!("tier {tier}")
}

fn largest(bars: &[Bar]) -> f64 {
    bars.iter().map(|bar| bar.count).max().unwrap_or(1) as f64
}

fn bars(bars: &[Bar], all: u64, base: f64) -> Vec<Markup> {
    let most = largest(bars);
    let draw = |bar: &Bar| {
        let [left, right] = [bar.above, bar.to].map(x_of);
        let height = (bar.count as f64 / most * HEIGHT).max(0.7);
        let title = format!("above {} to {}: {} of {all} cases", ratio(bar.above), ratio(bar.to), bar.count);
        block("launch", [left, base - height, (right - left).max(1.5), height], &title)
    };
    bars.iter().map(draw).collect()
}

/// Returns the outline of bars.
fn outline(bars: &[Bar], base: f64) -> String {
    let most = largest(bars);
    let path = |bar: &Bar| {
        let [left, right] = [bar.above, bar.to].map(x_of);
        let height = bar.count as f64 / most * HEIGHT;
        format!("M{} {}H{}", number(left), number(base - height), number(right.max(left + 1.5)))
    };
    bars.iter().map(path).collect()
}

fn moved(margin: &TensorMargin) -> Option<f64> {
    margin.before.as_ref().and_then(|before| before.moved)
}

/// Returns how a margin differs from that of the night before, in words.
fn against(margin: &TensorMargin) -> String {
    match (&margin.before, moved(margin)) {
        (Some(before), Some(moved)) => format!("drift: p99 × {moved:.2} since night {}", before.night),
        (Some(before), None) if before.quantiles.tells(0.99) && margin.quantiles.tells(0.99) => {
            format!("as in night {}", before.night)
        }
        (Some(_), None) => "too few cases to compare".to_owned(),
        (None, _) => format!("{} cases", margin.quantiles.count),
    }
}

/// Returns the numbers of the picture.
pub(super) fn numbers(measured: &Measured) -> Table {
    let head = ["tensor", "tier", "cases", "p50", "p95", "p99", "largest", "against the night before"];
    let row = |margin: &TensorMargin| {
        let of = margin.quantiles;
        let against = margin.before.as_ref().map_or("–".to_owned(), |_| against(margin));
        let own = [margin.tensor.name().to_owned(), margin.tier.to_string(), of.count.to_string()];
        own.into_iter().chain([of.p50, of.p95, of.p99, of.max].map(ratio)).chain([against]).collect()
    };
    Table {
        name: "Error ÷ bound of the cases that held",
        head: head.map(String::from).to_vec(),
        rows: measured.margins.iter().map(row).collect(),
        left: 0,
    }
}
