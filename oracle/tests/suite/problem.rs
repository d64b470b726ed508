//! A [`Problem`]: the fields that make one, those that are refused, and its JSON.

use seamproof_oracle::limits::{
    HEAD_DIM_MAX, HEADS_MAX, ROWS_MAX, SCALE_MAX, SCALE_MIN, SEQUENCES_MAX, SOFTCAP_MAX, SOFTCAP_MIN,
    WORLD_MAX,
};
use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Dims, Element, Format, Heads, InputMode, Mask, Pass,
    Precision, Problem, ProblemError, ProblemFields, Run, RunLayoutError, Scaling, Sequence, Side, Sink,
    Softmax, TensorRows,
};
use serde_json::{Value, json};

/// Returns two sequences with gaps, padding and slack: the first packed, the second in steps between its rows.
fn fields() -> ProblemFields {
    let sequences = vec![
        Sequence { id: 7, q: Run::packed(1, 3, 4), kv: Run::packed(0, 5, 5) },
        Sequence { id: 2, q: Run { offset: 6, step: 2, len: 2, span: 2 }, kv: Run::packed(8, 0, 1) },
    ];
    ProblemFields {
        rows: TensorRows { q: 10, kv: 9 },
        heads: Heads { q: 6, kv: 2 },
        dims: Dims { qk: 16, v: 8 },
        mask: Mask::CAUSAL,
        data_seed: 1,
        ..ProblemFields::of(sequences, 16)
    }
}

/// Returns [`fields`] with everything that has a default set to something else.
fn rich_fields() -> ProblemFields {
    let scaled = |format, scaling| Element { format, scaling };
    ProblemFields {
        mask: Mask { left: Some(4), right: Some(1), align: Alignment::BottomRight, ..Mask::FULL },
        softmax: Softmax { scale: 0.125, softcap: Some(30.0), sink: Sink::Learnable },
        precision: Precision {
            q: scaled(Format::E4m3, Scaling::PerTensor),
            k: scaled(Format::E4m3, Scaling::PerBlock { rows: 1, columns: 32 }),
            p: Element::from(Format::F32),
            ..Precision::uniform(Format::Fp16)
        },
        parallel: ContextParallel {
            algorithm: Algorithm::Hierarchical { all_to_all: 2 },
            balance: Balance::Striped { stripe: 3 },
            world: 8,
            ranks: vec![5, 1, 0, 7],
            region: 3,
        },
        mode: InputMode::HeavyTailed,
        data_seed: u64::MAX,
        pass: Pass::Forward,
        ..fields()
    }
}

/// Returns the error that one edit of the valid fields leads to.
fn error(edit: impl FnOnce(&mut ProblemFields)) -> ProblemError {
    let mut edited = fields();
    edit(&mut edited);
    Problem::new(edited).expect_err("an illegal problem was accepted")
}

#[test]
fn the_fields_that_the_tests_edit_are_legal() {
    assert!(Problem::new(fields()).is_ok());
    assert!(Problem::new(rich_fields()).is_ok());
}

#[test]
fn counts_have_ranges() {
    type Edit = fn(&mut ProblemFields, usize);
    let ranges: [(&str, usize, usize, Edit); 6] = [
        ("rows.q", 0, ROWS_MAX, |fields, n| fields.rows.q = n),
        ("rows.kv", 0, ROWS_MAX, |fields, n| fields.rows.kv = n),
        ("heads.q", 1, HEADS_MAX, |fields, n| fields.heads = Heads { q: n, kv: 1 }),
        ("heads.kv", 1, HEADS_MAX, |fields, n| fields.heads.kv = n),
        ("dims.qk", 1, HEAD_DIM_MAX, |fields, n| fields.dims.qk = n),
        ("dims.v", 1, HEAD_DIM_MAX, |fields, n| fields.dims.v = n),
    ];
    for (field, min, max, edit) in ranges {
        for got in [min.checked_sub(1), Some(max + 1), Some(usize::MAX)].into_iter().flatten() {
            let expected = ProblemError::OutOfRange { field, got, min, max };
            assert_eq!(error(|fields| edit(fields, got)), expected);
        }
        // The ends of the range are legal where nothing else depends on the count.
        for n in [min, max] {
            let mut edited = ProblemFields { sequences: vec![], ..fields() };
            edit(&mut edited, n);
            let refused_as_count = matches!(Problem::new(edited), Err(ProblemError::OutOfRange { .. }));
            assert!(!refused_as_count, "{field} {n}");
        }
    }
}

#[test]
fn sequences_are_counted() {
    let empty = |id: usize| Sequence { id: id as u32, q: Run::packed(0, 0, 0), kv: Run::packed(0, 0, 0) };
    let many = |n: usize| ProblemFields { sequences: (0..n).map(empty).collect(), ..fields() };
    assert!(Problem::new(many(SEQUENCES_MAX)).is_ok());
    let got = SEQUENCES_MAX + 1;
    let expected = ProblemError::OutOfRange { field: "sequences", got, min: 0, max: SEQUENCES_MAX };
    assert_eq!(Problem::new(many(got)), Err(expected));
}

#[test]
fn query_heads_come_in_equal_groups() {
    let expected = ProblemError::HeadsNotDivisible { q: 6, kv: 4 };
    assert_eq!(error(|fields| fields.heads.kv = 4), expected);
    assert_eq!(
        error(|fields| fields.heads = Heads { q: 1, kv: 2 }),
        ProblemError::HeadsNotDivisible { q: 1, kv: 2 }
    );
}

#[test]
fn softmax_factors_are_numbers_within_their_bounds() {
    let factor = |field, got| {
        let (min, max) = if field == "scale" { (SCALE_MIN, SCALE_MAX) } else { (SOFTCAP_MIN, SOFTCAP_MAX) };
        ProblemError::Factor { field, got, min, max }
    };
    let far = [0.0, -0.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, 1e30];
    for bad in far.into_iter().chain([SCALE_MIN.next_down(), SCALE_MAX.next_up()]) {
        assert_eq!(error(|fields| fields.softmax.scale = bad), factor("scale", bad));
    }
    for bad in far.into_iter().chain([SOFTCAP_MIN.next_down(), SOFTCAP_MAX.next_up()]) {
        assert_eq!(error(|fields| fields.softmax.softcap = Some(bad)), factor("softcap", bad));
    }
    let nan = error(|fields| fields.softmax.scale = f32::NAN);
    assert!(matches!(nan, ProblemError::Factor { field: "scale", got, .. } if got.is_nan()));
}

#[test]
fn runs_lie_inside_their_tensor() {
    let run = |index, side, error| ProblemError::Run { index, side, error };
    assert_eq!(error(|fields| fields.sequences[1].q.step = 0), run(1, Side::Q, RunLayoutError::StepZero));
    assert_eq!(
        error(|fields| fields.sequences[0].kv.len = 6),
        run(0, Side::Kv, RunLayoutError::LenOverSpan { len: 6, span: 5 })
    );
    assert_eq!(
        error(|fields| fields.sequences[1].q.span = 3),
        run(1, Side::Q, RunLayoutError::OutOfRows { offset: 6, step: 2, span: 3, rows: 10 })
    );
    let huge = usize::MAX;
    assert_eq!(
        error(|fields| fields.sequences[0].q = Run { offset: huge, step: huge, len: huge, span: huge }),
        run(0, Side::Q, RunLayoutError::OutOfRows { offset: huge, step: huge, span: huge, rows: 10 })
    );
    // An empty run owns no row, yet it may not start outside.
    assert_eq!(
        error(|fields| fields.sequences[1].kv = Run::packed(10, 0, 0)),
        run(1, Side::Kv, RunLayoutError::OutOfRows { offset: 10, step: 1, span: 0, rows: 9 })
    );
}

#[test]
fn no_row_is_owned_twice_padding_included() {
    assert_eq!(
        error(|fields| fields.sequences[1].q.offset = 4),
        ProblemError::Overlap { index: 1, side: Side::Q, row: 4 }
    );
    assert_eq!(
        error(|fields| fields.sequences[1].kv.offset = 4),
        ProblemError::Overlap { index: 1, side: Side::Kv, row: 4 }
    );
    // Interleaved rows are no overlap: this is what SBHD looks like.
    let mut interleaved = fields();
    interleaved.sequences[0].q = Run { offset: 0, step: 2, len: 5, span: 5 };
    interleaved.sequences[1].q = Run { offset: 1, step: 2, len: 4, span: 5 };
    assert!(Problem::new(interleaved).is_ok());
}

#[test]
fn ids_are_unique() {
    let expected = ProblemError::RepeatedId { index: 1, id: 7 };
    assert_eq!(error(|fields| fields.sequences[1].id = 7), expected);
}

#[test]
fn ranks_are_distinct_members_of_the_world() {
    let ranks = |world: usize, ranks: &[usize]| {
        let ranks = ranks.to_vec();
        error(|fields| {
            fields.parallel = ContextParallel {
                world,
                ranks,
                ..ContextParallel::over(1, Algorithm::Ring, Balance::DualChunk)
            };
        })
    };
    let range = |field, got, max| ProblemError::OutOfRange { field, got, min: 1, max };
    assert_eq!(ranks(0, &[]), range("parallel.world", 0, WORLD_MAX));
    assert_eq!(ranks(WORLD_MAX + 1, &[0]), range("parallel.world", WORLD_MAX + 1, WORLD_MAX));
    assert_eq!(ranks(2, &[]), range("the size of parallel.ranks", 0, 2));
    assert_eq!(ranks(2, &[0, 1, 0]), range("the size of parallel.ranks", 3, 2));
    assert_eq!(ranks(2, &[1, 2]), ProblemError::RankOutsideWorld { index: 1, rank: 2, world: 2 });
    assert_eq!(ranks(4, &[3, 1, 3]), ProblemError::RepeatedRank { rank: 3 });
}

#[test]
fn the_algorithm_limits_the_group() {
    let group = |algorithm, balance, size: usize| {
        error(|fields| fields.parallel = ContextParallel::over(size, algorithm, balance))
    };
    assert!(matches!(
        group(Algorithm::Single, Balance::Contiguous, 2),
        ProblemError::GroupSize { size: 2, .. }
    ));
    for all_to_all in [0, 3, 8] {
        let hierarchical = Algorithm::Hierarchical { all_to_all };
        assert!(matches!(
            group(hierarchical, Balance::DualChunk, 4),
            ProblemError::GroupSize { size: 4, .. }
        ));
    }
    for stripe in [0, ROWS_MAX + 1] {
        let field = "parallel.balance.striped.stripe";
        let expected = ProblemError::OutOfRange { field, got: stripe, min: 1, max: ROWS_MAX };
        assert_eq!(group(Algorithm::AllGather, Balance::Striped { stripe }, 2), expected);
    }
}

#[test]
fn degenerate_problems_are_legal() {
    let empty = Run::packed(0, 0, 0);
    let none = ProblemFields { sequences: vec![], rows: TensorRows { q: 0, kv: 0 }, ..fields() };
    assert!(Problem::new(none.clone()).is_ok());
    let sequences = (0..3).map(|id| Sequence { id, q: empty, kv: empty }).collect();
    assert!(Problem::new(ProblemFields { sequences, ..none }).is_ok());
    let mut queries_without_keys = fields();
    queries_without_keys.sequences[0].kv = empty;
    assert!(Problem::new(queries_without_keys).is_ok());
}

#[test]
fn a_problem_is_written_and_read_back() {
    for fields in [fields(), rich_fields()] {
        let problem = Problem::new(fields).unwrap();
        for text in [serde_json::to_string(&problem), serde_json::to_string_pretty(&problem)] {
            let back: Problem = serde_json::from_str(&text.unwrap()).unwrap();
            assert_eq!(back, problem);
        }
    }
}

#[test]
fn defaults_are_not_written() {
    let problem = serde_json::to_value(Problem::new(fields()).unwrap()).unwrap();
    assert_eq!(problem["sequences"][0]["q"], json!({"offset": 1, "len": 3, "span": 4}));
    assert_eq!(problem["sequences"][1]["q"], json!({"offset": 6, "step": 2, "len": 2, "span": 2}));
    assert_eq!(problem["mask"], json!({"right": 0, "align": "top-left"}));
    assert_eq!(problem["softmax"], json!({"scale": 0.25, "sink": "none"}));
    assert_eq!(problem["precision"]["q"], json!("bf16"));
    let rich = serde_json::to_value(Problem::new(rich_fields()).unwrap()).unwrap();
    assert_eq!(rich["mask"], json!({"left": 4, "right": 1, "align": "bottom-right"}));
    assert_eq!(rich["softmax"], json!({"scale": 0.125, "softcap": 30.0, "sink": "learnable"}));
    assert_eq!(rich["precision"]["k"], json!("e4m3/block1x32"));
    assert_eq!(rich["parallel"]["algorithm"], json!({"hierarchical": {"all_to_all": 2}}));
    assert_eq!(rich["parallel"]["balance"], json!({"striped": {"stripe": 3}}));
    assert_eq!(rich["data_seed"], json!(u64::MAX));
}

/// Returns the valid problem as JSON, with `value` put at a JSON pointer whose parent exists.
fn with(pointer: &str, value: Value) -> Value {
    let mut problem = serde_json::to_value(Problem::new(fields()).unwrap()).unwrap();
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    problem.pointer_mut(parent).unwrap()[name] = value;
    problem
}

fn read(problem: Value) -> Result<Problem, String> {
    serde_json::from_value(problem).map_err(|error| error.to_string())
}

#[test]
fn unknown_fields_are_refused_at_every_level() {
    let parents = [
        "",
        "/sequences/0",
        "/sequences/0/q",
        "/rows",
        "/heads",
        "/dims",
        "/mask",
        "/softmax",
        "/precision",
        "/parallel",
    ];
    for parent in parents {
        let message = read(with(&format!("{parent}/surprise"), json!(1))).expect_err(parent);
        assert!(message.contains("unknown field `surprise`"), "{parent}: {message}");
    }
}

#[test]
fn missing_fields_are_refused() {
    let whole = serde_json::to_value(Problem::new(fields()).unwrap()).unwrap();
    for name in whole.as_object().unwrap().keys() {
        let mut problem = whole.clone();
        problem.as_object_mut().unwrap().remove(name);
        let message = read(problem).expect_err(name);
        assert!(message.contains(&format!("missing field `{name}`")), "{message}");
    }
}

#[test]
fn wrong_types_and_words_are_refused() {
    let wrong = [
        ("/sequences", json!(3)),
        ("/sequences/0/id", json!(-1)),
        ("/sequences/0/id", json!(1u64 << 32)),
        ("/sequences/0/q/len", json!(1.5)),
        ("/sequences/0/q/len", json!("3")),
        ("/sequences/0/q/offset", json!(1e30)),
        ("/heads/q", json!(null)),
        ("/mask/left", json!(-1)),
        ("/mask/align", json!("bottom_right")),
        ("/softmax/scale", json!("0.25")),
        ("/softmax/sink", json!("sink")),
        ("/precision/q", json!("bf17")),
        ("/precision/k", json!("e4m3/block0x32")),
        ("/parallel/algorithm", json!("p2p")),
        ("/parallel/algorithm", json!({"hierarchical": {}})),
        ("/parallel/balance", json!({"striped": {"stripe": 1, "surprise": 1}})),
        ("/parallel/ranks", json!([0.0])),
        ("/mode", json!("normal")),
        ("/data_seed", json!(-1)),
        ("/pass", json!("both")),
    ];
    for (pointer, value) in wrong {
        let shown = value.to_string();
        assert!(read(with(pointer, value)).is_err(), "{pointer} {shown}");
    }
}

#[test]
fn an_illegal_problem_is_refused_when_read_and_the_field_is_named() {
    let illegal = [
        ("/heads/kv", json!(0), "heads.kv is 0; use 1 to 4096"),
        ("/rows/q", json!(ROWS_MAX + 1), "rows.q is 67108865; use 0 to 67108864"),
        ("/softmax/scale", json!(0), "softmax.scale is 0e0; use 9.536743e-7 to 6.4e1"),
        ("/softmax/scale", json!(1e39), "softmax.scale is inf; use 9.536743e-7 to 6.4e1"),
        ("/sequences/0/q/len", json!(5), "sequences[0].q: len 5 is more than span 4"),
        ("/sequences/1/id", json!(7), "sequences[1].id 7 is used twice"),
        ("/parallel/world", json!(0), "parallel.world is 0; use 1 to 4096"),
        ("/parallel/ranks", json!([1]), "parallel.ranks[0] is 1; the world has 1 ranks"),
    ];
    for (pointer, value, expected) in illegal {
        let message = read(with(pointer, value)).expect_err(pointer);
        assert!(message.contains(expected), "{pointer}: {message}");
    }
}

#[test]
fn an_algorithm_is_stored_by_its_name_and_has_its_place_in_the_table() {
    for (place, algorithm) in Algorithm::ALL.into_iter().enumerate() {
        let name = format!("\"{}\"", algorithm.name());
        let stored = match algorithm.parameter() {
            None => name,
            Some(_) => format!("{{{name}:"),
        };
        assert!(serde_json::to_string(&algorithm).unwrap().starts_with(&stored), "{algorithm:?}");
        assert_eq!(algorithm.number(), place);
        assert_eq!(algorithm.with_parameter(7).parameter(), algorithm.parameter().map(|_| 7));
    }
}

#[test]
fn small_problems_are_as_small_as_their_sequences() {
    let packed = ProblemFields::packed(&[(3, 5), (0, 2)], 16);
    assert_eq!((packed.rows, packed.softmax), (TensorRows { q: 3, kv: 7 }, Softmax::scaled(0.25)));
    let padded = ProblemFields::padded(&[(3, 4), (1, 8)], 1);
    assert_eq!((padded.rows, padded.sequences[1].kv), (TensorRows { q: 12, kv: 12 }, Run::packed(4, 1, 8)));
    assert!([packed, padded].map(Problem::new).iter().all(Result::is_ok));
    let run = Run::packed(usize::MAX, 1, 1);
    let endless = ProblemFields::of(vec![Sequence { id: 0, q: run, kv: run }], 1);
    assert!(matches!(Problem::new(endless), Err(ProblemError::OutOfRange { field: "rows.q", .. })));
}

#[test]
fn a_group_says_its_ranks_of_the_world_and_its_neighbour() {
    let group = |world: usize, ranks: &[usize], region: usize| ContextParallel {
        world,
        ranks: ranks.to_vec(),
        region,
        ..ContextParallel::over(2, Algorithm::Ring, Balance::DualChunk)
    };
    let ranks = |parallel: ContextParallel| parallel.world_ranks().collect::<Vec<_>>();
    assert_eq!(ranks(group(4, &[3, 1], 1)), [3, 1]);
    assert_eq!(ranks(group(4, &[3, 1], 2)), [6, 7, 2, 3]);
    assert_eq!(group(4, &[3, 1], 2).all_of_world(), 8);
    assert_eq!(group(4, &[3, 1], 2).neighbour().map(ranks), Some(vec![0, 1, 4, 5]));
    assert_eq!(group(6, &[1, 3], 1).neighbour().map(ranks), Some(vec![0, 2]));
    assert_eq!(group(3, &[0, 2], 1).neighbour(), None, "one rank is left");
    assert_eq!(ContextParallel { world: 2, ..ContextParallel::single() }.neighbour(), None);
}
