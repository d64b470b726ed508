//! Description of a problem in one line of words, for people who read findings.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};

use seamproof_oracle::quantise::{Delayed, Quantisation, QuantisationFields, Takes};
use seamproof_oracle::{Alignment, Balance, Blocks, Call, Mask, Pass, Problem, Sequence, Sink};

use crate::finding::Relation;

/// Largest number of sequences that are named one by one; more are only counted.
pub const SEQUENCES_NAMED_MAX: usize = 8;

/// Returns a count with its noun, such as `1 case` or `2 cases`.
pub fn counted<N: Display + PartialEq + From<u8>>(count: N, what: &str) -> String {
    let plural = if count == N::from(1) { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// Returns which identities could not be asked of how many cases, such as `not asked: one-rank (12 cases)`; `None`
/// where all could be.
pub fn not_asked(counts: &BTreeMap<Relation, u64>) -> Option<String> {
    let each =
        counts.iter().map(|(relation, count)| format!("{} ({})", relation.name(), counted(*count, "case")));
    let all = each.collect::<Vec<_>>().join(", ");
    (!all.is_empty()).then(|| format!("not asked: {all}"))
}

/// Returns the problem in one line.
pub fn describe(problem: &Problem) -> String {
    describe_with(problem, &word(&problem.mode))
}

/// Returns the tensors of a quantisation and its recipe, in one line.
pub fn describe_recipe(asked: &Quantisation) -> String {
    let QuantisationFields { tensors, element, scale, margin, delayed, .. } = &**asked;
    let names: Vec<String> = tensors.iter().map(ToString::to_string).collect();
    let mut line = format!("{} to {element}, scale {scale}", names.join(", "));
    if *margin != 0 {
        let _ = write!(line, ", margin {margin}");
    }
    if let Some(Delayed { history, takes, previous }) = delayed {
        let taken = if *takes == Takes::Max { "largest" } else { "newest" };
        let _ = write!(line, ", of the {taken} of {history:?}, or {previous}");
    }
    line
}

/// Returns the problem of a recorded run in one line. Its values were not drawn.
pub fn describe_recorded(problem: &Problem) -> String {
    describe_with(problem, "recorded")
}

fn describe_with(problem: &Problem, values: &str) -> String {
    let (heads, dims, softmax) = (problem.heads, problem.dims, problem.softmax);
    let mut text = format!(
        "{}; heads {}/{}; dims {}/{}; {}",
        describe_sequences(&problem.sequences),
        heads.q,
        heads.kv,
        dims.qk,
        dims.v,
        describe_mask(&problem.mask)
    );
    if let Some(cap) = softmax.softcap {
        let _ = write!(text, "; softcap {cap}");
    }
    if softmax.sink != Sink::None {
        let _ = write!(text, "; sink {}", word(&softmax.sink));
    }
    if problem.parallel.size() > 1 {
        let algorithm = problem.parallel.algorithm.name();
        let balance = dealing(problem.parallel.balance);
        let _ = write!(text, "; {algorithm} over {} ranks, {balance}", problem.parallel.size());
    }
    if problem.parallel.region > 1 {
        let _ = write!(text, "; in sequence-parallel regions of {} ranks", problem.parallel.region);
    }
    if !problem.form.is_plain() {
        let _ = write!(text, "; given as {}", problem.form.name());
    }
    if !problem.steps.is_empty() {
        let _ = write!(text, "; in steps ({})", tokens_of(problem));
    }
    if let Some(pages) = &problem.pages {
        let shared = if pages.shared.is_empty() { "" } else { ", some shared" };
        let _ = write!(text, "; in pages of {}{shared}", pages.size);
    }
    if !problem.sharing.is_empty() {
        let each = problem.sharing.0.iter().take(SEQUENCES_NAMED_MAX);
        let each: Vec<String> =
            each.map(|of| format!("{} of {} in {}", of.keys, of.with, of.sequence)).collect();
        let more = if problem.sharing.0.len() > each.len() { ", …" } else { "" };
        let _ = write!(text, "; shared keys ({}{more})", each.join(", "));
    }
    let pass = if problem.pass == Pass::Backward { "forward and backward" } else { "forward" };
    let _ = write!(text, "; {} {values}; {pass}", problem.precision.q);
    if !problem.scales.is_default() {
        let _ = write!(text, "; scales {}", word(&problem.scales));
    }
    text
}

/// Returns a balance as the command line takes it, such as `dual-chunk` or `striped:2`.
pub fn dealing(balance: Balance) -> String {
    match balance {
        Balance::Striped { stripe } => format!("striped:{stripe}"),
        balance => word(&balance),
    }
}

/// Returns the numbers of tokens that calls append to the longest sequence.
fn tokens_of(problem: &Problem) -> String {
    let most = |call: Call| call.appends.iter().map(|append| append.tokens).max().unwrap_or(0).to_string();
    problem.calls().into_iter().map(most).collect::<Vec<_>>().join(", ")
}

fn describe_sequences(sequences: &[Sequence]) -> String {
    let lengths = |run: seamproof_oracle::Run| {
        if run.len == run.span { run.len.to_string() } else { format!("{} of {}", run.len, run.span) }
    };
    let named: Vec<String> = sequences
        .iter()
        .take(SEQUENCES_NAMED_MAX)
        .map(|sequence| match (lengths(sequence.q), lengths(sequence.kv)) {
            (q, kv) if q == kv => q,
            (q, kv) => format!("{q} × {kv}"),
        })
        .collect();
    match (sequences.len(), named.join(", ")) {
        (0, _) => "no sequence".to_owned(),
        (1, named) => format!("1 sequence ({named})"),
        (count, named) if count <= SEQUENCES_NAMED_MAX => format!("{count} sequences ({named})"),
        (count, named) => format!("{count} sequences ({named}, …)"),
    }
}

fn describe_mask(mask: &Mask) -> String {
    let corner = match mask.align {
        Alignment::TopLeft => "top-left",
        Alignment::BottomRight => "bottom-right",
    };
    let mut text = match (mask.left, mask.right) {
        // Without bounds and blocks the corner decides nothing.
        (None, None) if mask.blocks.is_none() => "full".to_owned(),
        (None, None) => format!("full {corner}"),
        (None, Some(0)) => format!("causal {corner}"),
        (left, right) => {
            let side = |side: Option<u32>| side.map_or("∞".to_owned(), |keys| keys.to_string());
            format!("window ({}, {}) {corner}", side(left), side(right))
        }
    };
    match mask.blocks {
        None => {}
        Some(Blocks::Documents(borders)) => {
            let borders: Vec<String> = borders.keys().iter().map(u32::to_string).collect();
            let _ = write!(text, ", documents from {}", borders.join(", "));
        }
        Some(Blocks::Chunks(keys)) => {
            let _ = write!(text, ", chunks of {keys}");
        }
    }
    if mask.prefix > 0 {
        let _ = write!(text, ", prefix {}", mask.prefix);
    }
    if mask.sink_tokens > 0 {
        let _ = write!(text, ", sink tokens {}", mask.sink_tokens);
    }
    text
}

/// Returns the name of a unit variant in case files.
pub fn word(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_oracle::{Algorithm, ContextParallel, ProblemFields};

    #[test]
    fn several_ranks_are_named_with_their_balance() {
        let said = |ranks, balance| {
            let parallel = ContextParallel::over(ranks, Algorithm::AllGather, balance);
            let fields = ProblemFields { parallel, ..ProblemFields::padded(&[(8, 8)], 1) };
            describe(&Problem::new(fields).expect("a problem"))
        };
        assert!(said(2, Balance::DualChunk).contains("; all-gather over 2 ranks, dual-chunk; "));
        assert!(said(2, Balance::Contiguous).contains("; all-gather over 2 ranks, contiguous; "));
        assert!(said(2, Balance::Striped { stripe: 2 }).contains("; all-gather over 2 ranks, striped:2; "));
        let one = said(1, Balance::Contiguous);
        assert!(!one.contains("ranks") && !one.contains("contiguous"), "{one}");
    }
}
