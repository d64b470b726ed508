//! The nearest problem that a subject takes.

use seamproof_judge::exact::eligible;
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::prelude::*;
use seamproof_judge::subject::{BalanceKind, SideLayout, Unpadded, broken_rule};

use crate::tables::random;

/// Returns well-formed problems, legal ones and others.
fn drawn(seed: u64, count: u64, limits: &Limits) -> impl Iterator<Item = Problem> + use<> {
    let limits = limits.clone();
    (0..count).filter_map(move |index| match generate::draw(seed, index, &limits) {
        Draw::Problem(problem) => Some(problem),
        Draw::Malformed(_) => None,
    })
}

/// Test that fitted problems are inside the table, also where the drawn algorithm cannot cut the drawn problem.
#[test]
fn every_fitted_problem_is_taken() {
    let narrow = Declaration::single_rank(Format::Bf16, Format::F32).forward_only().table;
    let tables = [narrow, Table::widest()];
    let mut uncut = 0;
    for problem in drawn(3, 2_000, &Limits::fuzz()) {
        uncut += u32::from(broken_rule(&problem).is_some());
        for table in &tables {
            let fitted = table.fitted(problem.clone());
            assert_eq!(table.refusal(&fitted), None, "{problem:?}");
            assert_eq!(table.fitted(fitted.clone()), fitted);
        }
    }
    assert!(uncut > 10, "{uncut}");
}

#[test]
fn fitting_is_total_and_idempotent_for_random_tables() {
    for seed in 0..3_000 {
        let table = random(seed);
        let limits = if seed % 4 == 0 { Limits::quick() } else { Limits::fuzz() };
        for problem in drawn(seed, 12, &limits) {
            let fitted = table.fitted(problem.clone());
            let refusals: Vec<_> = table.refusals(&fitted).collect();
            assert!(refusals.is_empty(), "{refusals:?}\n{table:?}\n{problem:?}\n{fitted:?}");
            assert_eq!(table.fitted(fitted.clone()), fitted);
            assert_eq!(fitted.data_seed, problem.data_seed);
            let lost = fitted.mode.is_exact() && eligible(fitted.mode, &fitted).is_err();
            assert!(!lost || fitted == problem, "{fitted:?}");
        }
    }
}

#[test]
fn a_problem_inside_is_its_own_fitted_problem() {
    let wide = Table::widest();
    let mut inside = 0;
    for problem in drawn(5, 2_000, &Limits::quick()) {
        if wide.refusal(&problem).is_none() {
            inside += 1;
            assert_eq!(wide.fitted(problem.clone()), problem);
        }
    }
    assert!(inside > 1_800, "{inside}");
}

/// Returns the fields of a problem with every seam: padding, a gap, a first offset, slack, and lengths that differ.
fn seams() -> ProblemFields {
    let run = |offset, len, span| Run::packed(offset, len, span);
    let sequences = vec![
        Sequence { id: 4, q: run(1, 5, 6), kv: run(2, 3, 4) },
        Sequence { id: 7, q: run(9, 0, 0), kv: run(6, 2, 2) },
        Sequence { id: 8, q: run(9, 2, 2), kv: run(8, 6, 7) },
    ];
    let rows = seamproof_oracle::TensorRows { q: 13, kv: 16 };
    ProblemFields { rows, heads: Heads { q: 6, kv: 2 }, ..ProblemFields::of(sequences, 24) }
}

fn fitted(fields: ProblemFields, narrow: impl FnOnce(&mut Table)) -> Problem {
    let mut table = Table::widest();
    narrow(&mut table);
    table.validated().expect("some problem passes").fitted(Problem::new(fields).expect("it is legal"))
}

fn runs(problem: &Problem) -> Vec<[usize; 4]> {
    let both = |s: &Sequence| [s.q, s.kv].map(|run| [run.offset, run.step, run.len, run.span]);
    problem.sequences.iter().flat_map(both).collect()
}

#[test]
fn each_row_changes_only_what_it_refuses() {
    let own = Problem::new(seams()).expect("it is legal");
    let table = Table::widest();
    assert_eq!(table.fitted(own.clone()), own);
    let padding = fitted(seams(), |table| table.layout.padding = false);
    assert_eq!(
        runs(&padding),
        [[1, 1, 5, 5], [2, 1, 3, 3], [8, 1, 0, 0], [5, 1, 2, 2], [8, 1, 2, 2], [7, 1, 6, 6]]
    );
    let gaps = fitted(seams(), |table| table.layout.gaps = false);
    assert_eq!(
        runs(&gaps),
        [[1, 1, 5, 6], [2, 1, 3, 4], [7, 1, 0, 0], [6, 1, 2, 2], [7, 1, 2, 2], [8, 1, 6, 7]]
    );
    assert_eq!((gaps.rows.q, gaps.rows.kv), (11, 16));
    let first = fitted(seams(), |table| table.layout.first_offset = false);
    assert_eq!((first.sequences[0].q.offset, first.sequences[0].kv.offset, first.rows.q), (0, 0, 12));
    let slack = fitted(seams(), |table| table.layout.slack = false);
    assert_eq!((slack.rows.q, slack.rows.kv), (11, 15));
    let equal = fitted(seams(), |table| table.lengths.equal = true);
    assert_eq!(
        equal.sequences.iter().map(|s| (s.q.len, s.kv.len)).collect::<Vec<_>>(),
        [(5, 5), (0, 0), (2, 2)]
    );
    let alike = fitted(seams(), |table| (table.lengths.equal, table.layout.equal) = (true, true));
    let of_q = [[1, 1, 5, 6], [9, 1, 0, 0], [9, 1, 2, 2]];
    assert_eq!(runs(&alike), of_q.iter().flat_map(|run| [*run, *run]).collect::<Vec<_>>());
    assert_eq!((alike.rows.q, alike.rows.kv), (13, 13));
    let filled = fitted(seams(), |table| table.lengths.empty_q = false);
    assert_eq!(filled.sequences.iter().map(|s| s.q.len).collect::<Vec<_>>(), [5, 1, 2]);
    let short = fitted(seams(), |table| table.lengths.most = 4);
    assert_eq!(
        short.sequences.iter().map(|s| (s.q.len, s.kv.len)).collect::<Vec<_>>(),
        [(4, 3), (0, 2), (2, 4)]
    );
    let few = fitted(seams(), |table| table.lengths.sequences_most = 2);
    assert_eq!(few.sequences.iter().map(|s| s.id).collect::<Vec<_>>(), [4, 7]);
    let small = fitted(seams(), |table| table.lengths.rows_most = 6);
    assert_eq!((small.sequences.len(), small.rows.q, small.rows.kv), (2, 5, 5));
    for problem in [&padding, &gaps, &first, &slack, &equal, &alike, &filled, &short, &few, &small] {
        let same =
            ProblemFields { sequences: own.sequences.clone(), rows: own.rows, ..(*problem).clone().into() };
        assert_eq!(same, own.clone().into(), "only rows change");
    }
}

/// Test that a table of one `cu_seqlens` for both sides has problems that lie so alone, in all forms and on several
/// ranks, with padding, gaps and rows apart; and that it says that lengths are the same.
#[test]
fn both_sides_lie_alike_where_a_table_says_so() {
    let mut table = Table::widest();
    table.layout.equal = true;
    let told = table.clone().validated().expect_err("lengths may differ").to_string();
    assert!(told.starts_with("table.layout.equal: ") && told.contains("lengths.equal"), "{told}");
    table.lengths.equal = true;
    let table = table.validated().expect("some problem passes");
    let (mut padded, mut apart, mut ranks) = (0, 0, 0);
    for problem in drawn(7, 2_000, &Limits::quick()) {
        let fitted = table.fitted(problem);
        assert!(
            fitted.sequences.iter().all(|s| s.q == s.kv) && fitted.rows.q == fitted.rows.kv,
            "{fitted:?}"
        );
        padded += u32::from(fitted.sequences.iter().any(|s| s.q.span > s.q.len));
        apart += u32::from(fitted.sequences.iter().any(|s| s.q.step > 1));
        ranks += u32::from(fitted.parallel.size() > 1);
    }
    assert!(padded > 500 && apart > 50 && ranks > 500, "{padded} {apart} {ranks}");
}

/// Test that several ranks need no parts of one rank: a ring with dual chunks alone is a table.
#[test]
fn several_ranks_are_dealt_by_any_balance_alone() {
    use seamproof_oracle::{Algorithm, Balance};
    for (balance, expected) in
        [(BalanceKind::DualChunk, Balance::DualChunk), (BalanceKind::Striped, Balance::Striped { stripe: 1 })]
    {
        let narrow = |table: &mut Table, least| {
            table.parallel.algorithms = vec!["ring"];
            table.parallel.balances = vec![balance];
            table.parallel.ranks_least = least;
        };
        let dealt = fitted(ProblemFields::packed(&[(3, 3), (5, 5)], 8), |table| narrow(table, 2));
        assert_eq!(dealt.parallel, ContextParallel::over(2, Algorithm::Ring, expected));
        let mut of_one = Table::widest();
        narrow(&mut of_one, 1);
        let told = of_one.validated().expect_err("one rank has one part").to_string();
        assert!(told.contains("or raise parallel.ranks_least"), "{told}");
    }
}

/// Test that the ranks of a group are named in the order of the world where a table says so, and nothing else changes.
#[test]
fn ranks_are_put_in_order() {
    use seamproof_oracle::{Algorithm, Balance};
    let group = ContextParallel {
        world: 4,
        ranks: vec![3, 1],
        ..ContextParallel::over(2, Algorithm::Ring, Balance::Contiguous)
    };
    let asked = ProblemFields { parallel: group.clone(), ..ProblemFields::packed(&[(4, 4)], 8) };
    assert_eq!(fitted(asked.clone(), |_| {}).parallel, group);
    let ordered = fitted(asked.clone(), |table| table.parallel.order = false);
    let expected = ContextParallel { ranks: vec![1, 3], ..group };
    assert_eq!(ordered, Problem::new(ProblemFields { parallel: expected, ..asked }).expect("it is legal"));
}

/// Test that a world loses ranks that are not in the group, and that the group stays where it is among the others.
#[test]
fn a_world_loses_idle_ranks() {
    use seamproof_oracle::{Algorithm, Balance};
    let group = |world, ranks: [usize; 2]| ContextParallel {
        world,
        ranks: ranks.to_vec(),
        ..ContextParallel::over(2, Algorithm::Ring, Balance::Contiguous)
    };
    let fields = |parallel| ProblemFields { parallel, ..ProblemFields::packed(&[(4, 4)], 8) };
    let narrow = |table: &mut Table| (table.parallel.ranks_most, table.parallel.world_most) = (2, 4);
    for (asked, expected) in [
        (group(9, [7, 2]), group(4, [3, 2])),
        (group(9, [0, 8]), group(4, [0, 3])),
        (group(4, [3, 1]), group(4, [3, 1])),
    ] {
        assert_eq!(fitted(fields(asked), narrow), Problem::new(fields(expected)).expect("it is legal"));
    }
}

/// Test that padding goes where its layout or its algorithm has none, and stays everywhere else.
#[test]
fn padding_is_refused_under_one_algorithm_or_in_one_layout() {
    use seamproof_oracle::{Algorithm, Balance};
    let except = |algorithm: Option<Algorithm>, layout| {
        vec![Unpadded { algorithm: algorithm.map(Algorithm::name), layout }]
    };
    let over = |algorithm, lengths: &[(usize, usize)]| ProblemFields {
        parallel: ContextParallel::over(2, algorithm, Balance::DualChunk),
        heads: Heads { q: 2, kv: 2 },
        ..ProblemFields::padded(lengths, 8)
    };
    let thd: &[(usize, usize)] = &[(3, 4), (5, 8)];
    let bshd: &[(usize, usize)] = &[(3, 4), (2, 4)];
    let said = |fields: &ProblemFields, unpadded: &[Unpadded]| {
        let mut table = Table::widest();
        table.layout.padding_except = unpadded.to_vec();
        let table = table.validated().expect("some problem passes");
        let problem = Problem::new(fields.clone()).expect("it is legal");
        (table.refusal(&problem).map(|refusal| refusal.to_string()), table.fitted(problem))
    };
    let ring_in_bshd = except(Some(Algorithm::Ring), Some(SideLayout::Bshd));
    let (refusal, fitted) = said(&over(Algorithm::Ring, bshd), &ring_in_bshd);
    assert_eq!(refusal.as_deref(), Some("padding rows are not supported under ring in bshd"));
    assert_eq!(fitted.parallel.algorithm, Algorithm::Single);
    for taken in [
        over(Algorithm::Ring, thd),
        over(Algorithm::AllToAll, bshd),
        over(Algorithm::Ring, &[(4, 4), (4, 4)]),
    ] {
        assert_eq!(said(&taken, &ring_in_bshd).0, None, "{taken:?}");
    }
    let in_thd = except(None, Some(SideLayout::Thd));
    let (refusal, fitted) = said(&ProblemFields::padded(thd, 8), &in_thd);
    assert_eq!(refusal.as_deref(), Some("padding rows are not supported in thd"));
    assert_eq!(
        runs(&fitted),
        runs(&Problem::new(ProblemFields::packed(&[(3, 3), (5, 5)], 8)).expect("legal"))
    );
    assert_eq!(said(&ProblemFields::padded(bshd, 8), &in_thd).0, None);
    // One padded sequence is no batch of several.
    assert!(said(&ProblemFields::padded(&[(3, 4)], 8), &in_thd).0.is_some());
    let nowhere = except(None, None);
    let mut table = Table::widest();
    table.layout.padding_except = nowhere;
    let told = table.validated().expect_err("no padding is left").to_string();
    assert_eq!(
        told,
        "table.layout.padding_except: padding is refused everywhere; say layout.padding false instead"
    );
}

/// Test that a table is written and read with what refuses padding, and that an algorithm without a name is refused.
#[test]
fn exceptions_of_padding_are_written_and_read() {
    let text =
        r#"{"layout": {"padding_except": [{"algorithm": "ring", "layout": "bshd"}, {"layout": "sbhd"}]}}"#;
    let table: Table = serde_json::from_str(text).expect("a table");
    let [first, second] = table.layout.padding_except[..] else { panic!("{table:?}") };
    assert_eq!((first.algorithm, first.layout), (Some("ring"), Some(SideLayout::Bshd)));
    assert_eq!((second.algorithm, second.layout), (None, Some(SideLayout::Sbhd)));
    let again: Table =
        serde_json::from_value(serde_json::to_value(&table).expect("plain data")).expect("a table");
    assert_eq!(again, table);
    assert!(
        serde_json::to_value(Table::default()).expect("plain data")["layout"].get("padding_except").is_none()
    );
    let unknown = text.replace("ring", "rung");
    let error = serde_json::from_str::<Table>(&unknown).expect_err("no algorithm").to_string();
    assert!(error.contains("'rung' is no algorithm; known: single, ring"), "{error}");
}

#[test]
fn rows_apart_are_packed_and_another_order_is_sorted() {
    let interleaved = |offset, len| Run { offset, step: 2, len, span: 3 };
    let both = |id, offset, len| Sequence { id, q: interleaved(offset, len), kv: interleaved(offset, len) };
    let fields = ProblemFields::of(vec![both(0, 0, 3), both(1, 1, 2)], 8);
    let packed = fitted(fields, |table| table.layout.steps = false);
    assert_eq!(runs(&packed), [[0, 1, 3, 3], [0, 1, 3, 3], [3, 1, 2, 3], [3, 1, 2, 3]]);
    let run = |offset, len| Run::packed(offset, len, len);
    let sequence = |id, offset, len| Sequence { id, q: run(offset, len), kv: run(offset, len) };
    let reversed = ProblemFields::of(vec![sequence(0, 2, 1), sequence(1, 0, 2)], 8);
    let sorted = fitted(reversed, |table| table.layout.order = false);
    assert_eq!(runs(&sorted), [[0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 2, 2], [1, 1, 2, 2]]);
}

#[test]
fn numbers_and_masks_move_to_the_nearest() {
    let dims = |qk, v| Dims { qk, v };
    let multiples = |most| Sizes::multiples(8, most, 8).expect("there are some");
    let near = fitted(seams(), |table| (table.dims.qk, table.dims.v) = (multiples(16), Sizes::only(64)));
    assert_eq!(near.dims, dims(16, 64));
    let mut fields = seams();
    fields.dims = dims(24, 40);
    let equal = fitted(fields.clone(), |table| table.dims.equal = true);
    assert_eq!(equal.dims, dims(24, 24));
    let group = fitted(seams(), |table| table.heads.groups = Sizes::new([1, 2, 8]).expect("sizes"));
    assert_eq!(group.heads, Heads { q: 4, kv: 2 });
    let heads = fitted(seams(), |table| table.heads.most = 4);
    assert_eq!(heads.heads, Heads { q: 3, kv: 1 });

    let mask = |left, right, align| Mask::window(left, right, align);
    let masked =
        |own: Mask, narrow: &dyn Fn(&mut Table)| fitted(ProblemFields { mask: own, ..seams() }, narrow).mask;
    use Alignment::{BottomRight, TopLeft};
    let two_sided = mask(Some(3), Some(2), TopLeft);
    let causal = |table: &mut Table| {
        table.masks.forms = vec![MaskForm::Full, MaskForm::Causal, MaskForm::CausalWindow];
    };
    assert_eq!(masked(two_sided, &causal), mask(Some(3), Some(0), TopLeft));
    assert_eq!(masked(mask(Some(3), None, TopLeft), &causal), Mask::FULL);
    let windows = |table: &mut Table| table.masks.forms = vec![MaskForm::TwoSided];
    assert_eq!(masked(Mask::CAUSAL, &windows), mask(Some(8), Some(8), TopLeft));
    let bounded = |table: &mut Table| table.masks.window_most = 1;
    assert_eq!(masked(two_sided, &bounded), mask(Some(1), Some(1), TopLeft));
    let corner = |table: &mut Table| table.masks.alignments = vec![BottomRight];
    assert_eq!(masked(two_sided, &corner), mask(Some(3), Some(2), BottomRight));
}

#[test]
fn a_blind_query_gets_the_key_at_its_own_place() {
    let fields = ProblemFields { mask: Mask { align: Alignment::BottomRight, ..Mask::CAUSAL }, ..seams() };
    let seeing = fitted(fields, |table| table.lengths.blind_queries = false);
    let lengths: Vec<_> = seeing.sequences.iter().map(|s| (s.q.len, s.kv.len)).collect();
    assert_eq!(lengths, [(5, 5), (0, 2), (2, 6)]);
}

#[test]
fn ranks_stay_as_far_as_the_table_allows() {
    use seamproof_oracle::{Algorithm, Balance};
    let fields = |cp| ProblemFields {
        parallel: ContextParallel::over(cp, Algorithm::AllGather, Balance::DualChunk),
        ..ProblemFields::padded(&[(5, 8), (8, 8)], 8)
    };
    let parallel = |cp, narrow: &dyn Fn(&mut Table)| fitted(fields(cp), narrow).parallel.clone();
    let ring = |table: &mut Table| table.parallel.algorithms = vec!["single", "ring"];
    assert_eq!(parallel(4, &ring), ContextParallel::over(4, Algorithm::Ring, Balance::DualChunk));
    let small = |table: &mut Table| table.parallel.ranks_most = 2;
    assert_eq!(parallel(4, &small), ContextParallel::over(2, Algorithm::AllGather, Balance::DualChunk));
    let single = |table: &mut Table| table.parallel.algorithms = vec!["single"];
    assert_eq!(parallel(2, &single), ContextParallel::single());
    // Without padding a span of 5 cannot be cut.
    let packed = |table: &mut Table| table.layout.padding = false;
    assert_eq!(parallel(2, &packed), ContextParallel::single());
    let striped =
        |table: &mut Table| table.parallel.balances = vec![seamproof_judge::subject::BalanceKind::Striped];
    assert_eq!(parallel(2, &striped).balance, Balance::Striped { stripe: 1 });
    let own = fields(2);
    let kept = fitted(own.clone(), |table| table.lengths.most = 7);
    assert_eq!(kept.parallel, own.parallel);
    assert_eq!(kept.sequences.iter().map(|s| (s.q.len, s.q.span)).collect::<Vec<_>>(), [(5, 8), (7, 8)]);
}

/// Test that an exact mode that lost its preconditions becomes another exact one, and any other mode stays.
#[test]
fn an_exact_mode_keeps_its_preconditions() {
    let fields = |mode| ProblemFields {
        mode,
        softmax: Softmax::scaled(0.25),
        heads: Heads { q: 1, kv: 1 },
        ..ProblemFields::packed(&[(40, 40)], 64)
    };
    let narrow = |table: &mut Table| table.dims.qk = Sizes::only(1);
    let kept = fitted(fields(InputMode::UniformCount), narrow);
    assert_eq!(kept.mode, InputMode::UniformCount);
    let other = fitted(fields(InputMode::Pairs), narrow);
    assert!(other.mode.is_exact() && other.mode != InputMode::Pairs, "{:?}", other.mode);
    assert!(eligible(other.mode, &other).is_ok());
    assert_eq!(fitted(fields(InputMode::Peaked), narrow).mode, InputMode::Peaked);
}

/// Test that every precision of a table is asked for, also those that nothing draws and that are never the nearest.
#[test]
fn every_precision_of_a_table_is_asked_for() {
    let [bf16, f32] = [Format::Bf16, Format::F32].map(Precision::uniform);
    let precisions = vec![bf16, f32, Precision { gradients: Format::F32.into(), ..bf16 }];
    let mut table = Table::widest();
    table.precisions.clone_from(&precisions);
    let asked: Vec<Problem> = drawn(7, 400, &Limits::quick()).map(|problem| table.asked(problem)).collect();
    for precision in precisions {
        let share = asked.iter().filter(|problem| problem.precision == precision).count();
        assert!((80..190).contains(&share), "{precision:?}: {share} of {}", asked.len());
    }
    assert!(asked.iter().all(|problem| table.refusal(problem).is_none()));
    for problem in drawn(7, 400, &Limits::quick()) {
        let wide = Table::widest();
        assert_eq!(
            wide.asked(problem.clone()),
            wide.fitted(problem),
            "drawn precisions are left to the draw"
        );
    }
}
