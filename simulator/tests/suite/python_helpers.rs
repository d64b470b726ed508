//! The values that the helpers of the Python package are held to: `python/tests/helpers.json`.
//!
//! `UPDATE_HELPERS=1 cargo test -p seamproof-simulator --test suite python_helpers` writes it anew.

use std::fmt::{Debug, Write as _};
use std::path::Path;

use seamproof_oracle::{Balance, Format, Run};
use seamproof_simulator::helpers::*;
use seamproof_simulator::shard::ShardedSide;

const HEADS: usize = 2;
const DIM: usize = 2;

/// A pack on a rank.
struct Pack {
    cp: usize,
    /// The rows and the real rows of each sequence.
    sequences: &'static [(usize, usize)],
    /// The rows of nobody behind the last.
    slack: usize,
}

const PACKS: [Pack; 5] = [
    Pack { cp: 2, sequences: &[(4, 3), (0, 0), (2, 2), (6, 1)], slack: 2 },
    Pack { cp: 4, sequences: &[(2, 2), (2, 0), (0, 0)], slack: 0 },
    Pack { cp: 3, sequences: &[(6, 5)], slack: 4 },
    Pack { cp: 1, sequences: &[(2, 1), (4, 4)], slack: 0 },
    Pack { cp: 2, sequences: &[(0, 0)], slack: 2 },
];

/// Updates of both halves of a gradient, by TransformerEngine's words. With 0 a half is cleared before.
const UPDATES: [([&str; 2], [Update; 2]); 8] = [
    (["add", "none"], [Update::Add, Update::Leave]),
    (["copy", "none"], [Update::Copy, Update::Leave]),
    (["none", "add"], [Update::Leave, Update::Add]),
    (["none", "copy"], [Update::Leave, Update::Copy]),
    (["add", "copy"], [Update::Add, Update::Copy]),
    (["copy", "add"], [Update::Copy, Update::Add]),
    (["copy", "zero"], [Update::Copy, Update::Leave]),
    (["zero", "copy"], [Update::Leave, Update::Copy]),
];

/// Returns numbers that f32 and bf16 have.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 11) % 64) as f32 / 16.0 - 2.0).collect()
}

fn tensor(rows: usize, seed: usize) -> Numbers {
    Numbers { heads: HEADS, dim: DIM, format: Format::F32, values: numbers(rows * HEADS * DIM, seed) }
}

fn statistic(rows: usize, seed: usize) -> Statistic {
    Statistic { rows, values: numbers(HEADS * rows, seed) }
}

/// Adds a name and its value to the text of an object.
fn field(text: &mut String, name: &str, value: &impl Debug) {
    let value = format!("{value:?}").replace("inf", "Infinity").replace('(', "[").replace(')', "]");
    writeln!(text, "  \"{name}\": {value},").unwrap();
}

fn case(Pack { cp, sequences, slack }: Pack) -> String {
    let mut rows = 0;
    let mut run = |len: usize, span: usize| {
        rows += span;
        Run::packed(rows - span, len, span)
    };
    let real: Vec<Run> = sequences.iter().map(|&(span, len)| run(len, span)).collect();
    // TransformerEngine's tables do not tell real rows from padding.
    let owned: Vec<Run> = real.iter().map(|run| Run { len: run.span, ..*run }).collect();
    let whole: Vec<Run> =
        owned.iter().map(|run| Run::packed(run.offset * cp, run.span * cp, run.span * cp)).collect();
    let shard = ShardedSide::of_runs(&whole, rows * cp, cp, Balance::DualChunk);
    let total = rows + slack;
    let second = SlotPart::Compact(Half::Second);

    let mut text = String::new();
    let ends: Vec<usize> = std::iter::once(0).chain(owned.iter().map(|run| run.offset + run.span)).collect();
    let lens = real.iter().scan(0, |sum, run| {
        *sum += run.len;
        Some(*sum)
    });
    field(&mut text, "size", &cp);
    field(&mut text, "cu", &ends);
    field(&mut text, "real", &std::iter::once(0).chain(lens).collect::<Vec<_>>());
    field(&mut text, "rows", &total);
    field(&mut text, "partition", &(0..cp).map(|rank| shard.partition_indices(rank)).collect::<Vec<_>>());
    field(&mut text, "rank_order", &rank_order(&shard));
    let halves = [Half::First, Half::Second].map(|half| half_pairs(&owned, half));
    field(
        &mut text,
        "halves",
        &halves.map(|pairs| pairs.into_iter().map(|(row, _)| row).collect::<Vec<_>>()),
    );
    field(
        &mut text,
        "valid",
        &SlotPart::Whole.pairs(&real).into_iter().map(|(row, _)| row).collect::<Vec<_>>(),
    );
    let positions = owned.iter().map(|run| run.span).max().unwrap_or(0) + 1;
    field(&mut text, "positions", &positions);
    let blocks = converted_pairs(&owned, positions, [BatchLayout::Thd, BatchLayout::Bshd]);
    field(&mut text, "blocks", &blocks);

    let (mut lse, step) = (statistic(total, 1), statistic(half_rows(total), 2));
    field(&mut text, "lse", &lse.values);
    field(&mut text, "lse_step", &step.values);
    merge_statistics(&second.pairs(&owned), &mut lse, &step);
    field(&mut text, "lse_merged", &lse.values);

    for (name, part) in [("whole", SlotPart::Whole), ("second", second)] {
        let (mut out, mut lse) = (tensor(total, 3), statistic(total, 4));
        let (step_out, mut step_lse) =
            (tensor(part.step_rows(total), 5), statistic(part.step_rows(total), 6));
        // A row that saw no key.
        step_lse.values.iter_mut().take(1).for_each(|value| *value = f32::NEG_INFINITY);
        field(&mut text, &format!("{name}_out"), &out.values);
        field(&mut text, &format!("{name}_old_lse"), &lse.values);
        field(&mut text, &format!("{name}_step"), &step_out.values);
        field(&mut text, &format!("{name}_step_lse"), &step_lse.values);
        merge_out(&part.pairs(&owned), Style::Running, (&mut out, &mut lse), (&step_out, &step_lse));
        field(&mut text, &format!("{name}_lse"), &lse.values);
        field(&mut text, &format!("{name}_merged"), &out.values);
    }

    for (words, updates) in UPDATES {
        let part = match words {
            [_, "none" | "zero"] => SlotPart::Compact(Half::First),
            ["none" | "zero", _] => second,
            _ => SlotPart::Whole,
        };
        let (mut sum, step) = (tensor(total, 7), tensor(part.step_rows(total), 8));
        for (_, half) in words.iter().zip([Half::First, Half::Second]).filter(|(word, _)| **word == "zero") {
            for (row, _) in half_pairs(&owned, half) {
                sum.values[row * HEADS * DIM..(row + 1) * HEADS * DIM].fill(0.0);
            }
        }
        accumulate(&owned, part, updates, &mut sum, &step);
        field(&mut text, &words.join(" "), &sum.values);
    }
    format!("{{\n{}\n}}", text.trim_end().trim_end_matches(','))
}

#[test]
fn the_helpers_of_the_python_package_are_held_to_these() {
    let cases: Vec<String> = PACKS.into_iter().map(case).collect();
    let text = format!("[\n{}\n]\n", cases.join(",\n"));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../python/tests/helpers.json");
    if std::env::var_os("UPDATE_HELPERS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == text,
        "{} is out of date; UPDATE_HELPERS=1 with this test writes it anew",
        path.display()
    );
}
