//! The problems that each builder takes, found by asking it. `src/schedule/CAPABILITIES.md` is made here and must be up
//! to date.
//!
//! `UPDATE_CAPABILITIES=1 cargo test -p seamproof-simulator --test suite capabilities` writes it anew.

use crate::common::{Draws, problem};

use std::fmt::Write;
use std::path::Path;

use seamproof_oracle::{
    Algorithm, Alignment, Balance, Heads, Mask, Problem, ProblemFields, Run, Sequence, Sink, TensorRows,
};
use seamproof_simulator::schedule::build;

/// Number of ranks of a group.
const CP: usize = 4;
/// A span that every balance can cut.
const SPAN: usize = 24 * CP;
/// Heads (query, KV) for which a builder is asked.
const HEADS: [(usize, usize); 8] = [(4, 4), (4, 2), (4, 1), (8, 8), (6, 6), (6, 2), (12, 3), (3, 3)];

/// The parameter of an algorithm that has one.
const PARAMETER: usize = 2;
const BALANCES: [(&str, Balance); 4] = [
    ("contiguous", Balance::Contiguous),
    ("dual-chunk", Balance::DualChunk),
    ("stripes of 1", Balance::Striped { stripe: 1 }),
    ("stripes of 3", Balance::Striped { stripe: 3 }),
];

/// An algorithm and a balance for which a builder is asked.
struct Asked(Algorithm, Balance);

impl Asked {
    fn ranks(&self) -> usize {
        if self.0 == Algorithm::Single { 1 } else { CP }
    }

    /// Returns the builder's answer for a plain problem after an edit.
    fn answer(&self, edit: impl FnOnce(&mut ProblemFields)) -> Result<(), String> {
        let plain = problem(&mut Draws(1), Algorithm::AllGather, Balance::Contiguous, self.ranks());
        let mut fields = ProblemFields::from(plain);
        let run = Run::packed(0, SPAN - 5, SPAN);
        fields.sequences = vec![Sequence { id: 0, q: run, kv: run }];
        fields.rows = TensorRows { q: 4 * SPAN, kv: 4 * SPAN };
        fields.heads = Heads { q: 4, kv: 4 };
        (fields.mask, fields.softmax.sink) = (Mask::CAUSAL, Sink::None);
        (fields.parallel.algorithm, fields.parallel.balance) = (self.0, self.1);
        edit(&mut fields);
        let problem = Problem::new(fields).expect("a legal problem is asked for");
        build(&problem).map(|_| ()).map_err(|error| error.to_string())
    }

    fn takes(&self, edit: impl FnOnce(&mut ProblemFields)) -> bool {
        self.answer(edit).is_ok()
    }

    /// Returns `all`, `none` or the values that the builder takes.
    fn which<T: Copy>(&self, asked: &[(&str, T)], edit: impl Fn(&mut ProblemFields, T)) -> String {
        let taken: Vec<&str> = asked
            .iter()
            .filter(|(_, value)| self.takes(|f| edit(f, *value)))
            .map(|(name, _)| *name)
            .collect();
        match taken.len() {
            0 => "none".to_owned(),
            all if all == asked.len() => "all".to_owned(),
            _ => taken.join(", "),
        }
    }

    /// Returns the number of which spans are multiples.
    fn span(&self) -> String {
        let set = |span: usize| {
            self.takes(|f| {
                let run = Run::packed(0, span - 1, span);
                f.sequences = vec![Sequence { id: 0, q: run, kv: run }];
            })
        };
        let unit = (1..=SPAN).find(|&span| set(span)).expect("some span is taken");
        assert!((1..=SPAN).all(|span| set(span) == span.is_multiple_of(unit)), "spans are multiples");
        match unit {
            1 => "any".to_owned(),
            CP => "cp".to_owned(),
            _ if self.1 == Balance::DualChunk => format!("{}·cp", unit / CP),
            _ => format!("{}·cp (stripe·cp)", unit / CP),
        }
    }

    fn masks(&self) -> String {
        let window = |left, right, align| Mask::window(left, right, align);
        let mut asked = Vec::new();
        for (corner, align) in [("top-left", Alignment::TopLeft), ("bottom-right", Alignment::BottomRight)] {
            for (name, left, right) in [
                ("full", None, None),
                ("causal", None, Some(0)),
                ("window (3, 0)", Some(3), Some(0)),
                ("window (3, 5)", Some(3), Some(5)),
                ("window (3, ∞)", Some(3), None),
                ("window (∞, 5)", None, Some(5)),
            ] {
                asked.push((format!("{name} {corner}"), window(left, right, align)));
            }
            let kept = Mask { sink_tokens: 2, ..window(Some(3), Some(0), align) };
            asked.push((format!("window (3, 0) with sink tokens {corner}"), kept));
        }
        let asked: Vec<(&str, Mask)> = asked.iter().map(|(name, mask)| (name.as_str(), *mask)).collect();
        self.which(&asked, |f, mask| f.mask = mask)
    }

    fn lengths(&self) -> String {
        let asked = [
            ("q = kv", (50, 50)),
            ("q < kv", (7, 50)),
            ("q > kv", (50, 7)),
            ("below 2·cp", (3, 1)),
            ("no keys", (50, 0)),
            ("no queries", (0, 50)),
            ("nothing real", (0, 0)),
        ];
        self.which(&asked, |f, (q, kv)| {
            f.sequences = vec![Sequence { id: 0, q: Run::packed(0, q, SPAN), kv: Run::packed(0, kv, SPAN) }];
        })
    }

    fn layouts(&self) -> String {
        let asked = [("no sequence", 0), ("gaps, first offset and slack", 1), ("interleaved rows (SBHD)", 2)];
        self.which(&asked, |f, layout| {
            let both = |id, q| Sequence { id, q, kv: q };
            f.sequences = match layout {
                0 => Vec::new(),
                1 => vec![both(0, Run::packed(CP, 9, SPAN)), both(1, Run::packed(SPAN + 2 * CP, 9, SPAN))],
                _ => {
                    let run = |offset| Run { offset, step: 2, len: 9, span: SPAN };
                    vec![both(0, run(0)), both(1, run(1))]
                }
            };
        })
    }

    fn heads(&self) -> String {
        let names: Vec<String> = HEADS.iter().map(|(q, kv)| format!("{q}/{kv}")).collect();
        let asked: Vec<(&str, (usize, usize))> = names.iter().map(String::as_str).zip(HEADS).collect();
        self.which(&asked, |f, (q, kv)| f.heads = Heads { q, kv })
    }

    fn options(&self) -> String {
        let asked = [
            ("off-by-one sink", 0),
            ("learnable sink", 1),
            ("soft cap", 2),
            ("group in a larger world", 3),
            ("ranks out of order", 4),
        ];
        self.which(&asked, |f, option| match option {
            0 => f.softmax.sink = Sink::OffByOne,
            1 => f.softmax.sink = Sink::Learnable,
            2 => f.softmax.softcap = Some(30.0),
            3 => {
                f.parallel.world += 3;
                f.parallel.ranks.iter_mut().for_each(|rank| *rank += 2);
            }
            _ => f.parallel.ranks.reverse(),
        })
    }
}

fn table() -> String {
    let mut text = "What each builder takes. Made by `simulator/tests/suite/capabilities.rs`, which asks the builders; of what is refused \
                    each builder's own text says why.\n\n\
                    Asked: groups of 4 ranks (a single one for `single`), forward and backward; heads as query/KV 4/4, 4/2, \
                    4/1, 8/8, 6/6, 6/2, 12/3, 3/3; both alignments of full, causal, windows (3, 0), (3, 5), (3, ∞), (∞, 5), and (3, 0) \
                    with 2 sink tokens; \
                    lengths q = kv, q < kv, q > kv, below 2·cp, no keys, no queries, nothing real; no sequence, gaps with \
                    first offset and slack, interleaved rows (SBHD); sinks, soft cap, a group in a larger world, ranks out \
                    of order. Any group of a world is taken: schedules name ranks of the world, and those of no \
                    group are idle.\n\n\
                    | algorithm | balance | spans: multiples of | masks | lengths | layouts | heads | options |\n\
                    |---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for algorithm in Algorithm::ALL {
        let asked = algorithm.with_parameter(PARAMETER);
        let inner = asked.parameter().map_or(String::new(), |ranks| format!(", all-to-alls of {ranks}"));
        let name = format!("{}{inner}", algorithm.name());
        for (balance, cut) in BALANCES {
            let asked = Asked(asked, cut);
            let _ = match asked.answer(|_| {}) {
                Err(error) => writeln!(text, "| {name} | {balance} | refused: {error} | | | | | |"),
                Ok(()) => writeln!(
                    text,
                    "| {name} | {balance} | {} | {} | {} | {} | {} | {} |",
                    asked.span(),
                    asked.masks(),
                    asked.lengths(),
                    asked.layouts(),
                    asked.heads(),
                    asked.options()
                ),
            };
        }
    }
    text
}

#[test]
fn the_capability_table_is_what_the_builders_say() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/schedule/CAPABILITIES.md");
    let made = table();
    if std::env::var_os("UPDATE_CAPABILITIES").is_some() {
        std::fs::write(&file, &made).expect("the table is written");
    }
    let stored = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        stored == made,
        "{} is out of date; UPDATE_CAPABILITIES=1 with this test writes it anew",
        file.display()
    );
}
