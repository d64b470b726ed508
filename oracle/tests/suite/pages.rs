//! Pages of a KV cache: where positions lie, what is refused, and what is left of them in another problem.

use ndarray::Array3;
use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Form, InputMode, Inputs, Mask, Pages, PagesError, Pass,
    Problem, ProblemError, ProblemFields, Run, SharedPrefix, SingleForwardError, Steps,
};

/// Returns a forward of sequences of so many keys, each with the query of a last token, and with these pages.
fn fields(keys: &[usize], pages: Pages) -> ProblemFields {
    let lengths: Vec<(usize, usize)> = keys.iter().map(|&keys| (1, keys)).collect();
    let mask = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
    ProblemFields { mask, pass: Pass::Forward, pages: Some(pages), ..ProblemFields::packed(&lengths, 8) }
}

fn pages(size: usize, count: usize, table: &[&[usize]]) -> Pages {
    Pages { size, count, table: table.iter().map(|row| row.to_vec()).collect(), shared: Vec::new() }
}

fn shared(mut pages: Pages, prefixes: &[[usize; 3]]) -> Pages {
    pages.shared =
        prefixes.iter().map(|&[sequence, with, pages]| SharedPrefix { sequence, with, pages }).collect();
    pages
}

#[test]
fn positions_lie_where_the_table_says() {
    let pages = pages(4, 5, &[&[3, 0, 4], &[1]]);
    let rows: Vec<usize> = (0..10).map(|position| pages.row(0, position)).collect();
    assert_eq!(rows, [12, 13, 14, 15, 0, 1, 2, 3, 16, 17]);
    assert_eq!(pages.row(1, 2), 6);
    // Page 3 is followed by page 4 in the pool, but not in the table.
    let runs = [Run::packed(12, 4, 4), Run::packed(0, 4, 4), Run::packed(16, 2, 2)];
    assert_eq!(pages.runs(0, 0..10), runs);
    assert_eq!(pages.runs(0, 3..5), [Run::packed(15, 1, 1), Run::packed(0, 1, 1)]);
    assert_eq!(Pages::in_order(4, [10, 0, 3]).runs(0, 0..10), [Run::packed(0, 10, 10)]);
    assert_eq!(Pages::in_order(4, [10, 0, 3]).table, [vec![0, 1, 2], vec![], vec![3]]);
    assert_eq!(pages.rows(), 20);
}

#[test]
fn pages_that_no_cache_has_are_refused() {
    let right = || pages(4, 5, &[&[3, 0, 4], &[1]]);
    let refused = |pages: Pages| match Problem::new(fields(&[10, 3], pages)) {
        Err(ProblemError::Pages { error }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(Problem::new(fields(&[10, 3], right())).is_ok());
    // A page more than the keys need is the sequence's own.
    assert!(Problem::new(fields(&[10, 3], pages(4, 5, &[&[3, 0, 4], &[1, 2]]))).is_ok());
    assert_eq!(refused(Pages { size: 0, ..right() }), "size is 0; use 1 to 256");
    assert_eq!(refused(Pages { size: 257, ..right() }), "size is 257; use 1 to 256");
    assert_eq!(
        refused(Pages { count: usize::MAX, ..right() }),
        "18446744073709551615 pages of 4 rows are too many; use at most 67108864 rows together"
    );
    assert_eq!(
        refused(pages(4, 5, &[&[3, 0, 4]])),
        "the table has 1 rows; use one for each of the 2 sequences"
    );
    assert_eq!(
        refused(pages(4, 5, &[&[3, 0], &[1]])),
        "table[0] is too short: it names 2 pages, and 10 keys need 3"
    );
    assert_eq!(refused(pages(4, 5, &[&[3, 0, 5], &[1]])), "table[0][2] is page 5; the pool has 5");
    let twice = "which do not share it";
    assert_eq!(
        refused(pages(4, 5, &[&[3, 0, 4], &[0]])),
        format!("page 0 is owned by sequences[0] and again by sequences[1], {twice}")
    );
    assert_eq!(
        refused(pages(4, 5, &[&[3, 3, 4], &[1]])),
        format!("page 3 is owned by sequences[0] and again by sequences[0], {twice}")
    );
}

#[test]
fn pages_are_for_a_forward_on_one_rank_in_the_plain_form() {
    let right = fields(&[8], Pages::in_order(4, [8]));
    let refused = |fields: ProblemFields| match Problem::new(fields) {
        Err(ProblemError::Pages { error: PagesError::SingleForward(error) }) => error,
        other => panic!("{other:?}"),
    };
    let parallel = ContextParallel::over(2, Algorithm::AllGather, Balance::Contiguous);
    let padded = ProblemFields::padded(&[(8, 8)], 8);
    let ring = ProblemFields { parallel, pass: Pass::Forward, pages: right.pages.clone(), ..padded };
    assert_eq!(refused(ring), SingleForwardError::Algorithm { algorithm: "all-gather" });
    let parallel = ContextParallel { region: 2, ..right.parallel.clone() };
    assert_eq!(refused(ProblemFields { parallel, ..right.clone() }), SingleForwardError::Region { ranks: 2 });
    assert_eq!(
        refused(ProblemFields { pass: Pass::Backward, ..right.clone() }),
        SingleForwardError::Backward
    );
    let form = Form::Segments;
    assert_eq!(refused(ProblemFields { form, ..right.clone() }), SingleForwardError::Form { form });
    let sayable = ProblemFields { pass: Pass::Backward, ..right.clone() }.sayable();
    assert!(sayable.pages.is_none() && right.sayable().pages.is_some());
}

#[test]
fn only_full_pages_that_are_declared_are_shared() {
    let table: &[&[usize]] = &[&[2, 0, 1], &[2, 0, 3], &[2, 4]];
    let right = || shared(pages(4, 5, table), &[[1, 0, 2], [2, 0, 1]]);
    let refused = |pages: Pages| match Problem::new(fields(&[10, 9, 6], pages)) {
        Err(ProblemError::Pages { error }) => error,
        other => panic!("{other:?}"),
    };
    let problem = Problem::new(fields(&[10, 9, 6], right())).unwrap();
    assert_eq!(problem.pages.as_ref().unwrap().borrowed(), [0, 2, 1]);
    assert!(right().share(0, 1, 0..8) && right().share(1, 2, 1..4) && !right().share(0, 1, 7..9));
    assert_eq!(refused(pages(4, 5, table)), PagesError::Owned { page: 2, first: 0, second: 1 });
    let sharing = |prefixes: &[[usize; 3]]| refused(shared(pages(4, 5, table), prefixes));
    assert_eq!(sharing(&[[1, 1, 1]]), PagesError::Sharing { sequence: 1, with: 1 });
    assert_eq!(sharing(&[[3, 0, 1]]), PagesError::Sharing { sequence: 3, with: 0 });
    assert_eq!(sharing(&[[1, 0, 2], [1, 0, 1]]), PagesError::Sharing { sequence: 1, with: 0 });
    assert_eq!(sharing(&[[1, 0, 3]]), PagesError::Unequal { sequence: 1, with: 0, pages: 3 });
    assert_eq!(sharing(&[[2, 0, 9]]), PagesError::Unequal { sequence: 2, with: 0, pages: 9 });
    // The second page of the first sequence has two rows.
    let half = shared(pages(4, 5, &[&[2, 0], &[2, 0, 3], &[4, 1]]), &[[1, 0, 2]]);
    let error = Problem::new(fields(&[6, 9, 6], half)).unwrap_err();
    let expected = "pages: sequence 0 shares 2 pages, more than its 6 first keys fill";
    assert_eq!(error.to_string(), expected.to_owned());
    let mode = InputMode::Routing;
    let exact = Problem::new(ProblemFields { mode, ..fields(&[10, 9, 6], right()) });
    assert_eq!(exact.unwrap_err(), ProblemError::Pages { error: PagesError::ExactMode });
    // With steps the shared rows are cached before the first call.
    let stepped = |queries| {
        let lengths = [(queries, 10), (1, 9), (1, 6)];
        let of = fields(&[10, 9, 6], right());
        let sequences = ProblemFields::packed(&lengths, 8);
        Problem::new(ProblemFields {
            steps: Steps(vec![1]),
            sequences: sequences.sequences,
            rows: sequences.rows,
            ..of
        })
    };
    assert!(stepped(2).is_ok());
    let error = PagesError::NotFull { sequence: 0, pages: 2, keys: 7 };
    assert_eq!(stepped(3).unwrap_err(), ProblemError::Pages { error });
}

#[test]
fn rows_of_a_shared_page_are_one() {
    let pages = shared(pages(2, 3, &[&[1, 0], &[1, 2]]), &[[1, 0, 1]]);
    let problem = Problem::new(fields(&[3, 4], pages)).unwrap();
    assert_eq!(problem.shared_rows().collect::<Vec<_>>(), [(0, 3), (1, 4)]);
    let rows = |first: f32| {
        let mut k = Array3::from_elem(problem.k_shape(), 0.0);
        k[[0, 0, 0]] = first;
        k
    };
    let inputs = |k: f32, v: f32| Inputs {
        q: Array3::zeros(problem.q_shape()),
        k: rows(k),
        v: rows(v),
        dout: Array3::zeros([0, 1, 8]),
        sink: Default::default(),
        scales: Default::default(),
    };
    assert!(problem.shares_equal_rows(&inputs(0.0, 0.0)));
    assert!(!problem.shares_equal_rows(&inputs(1.0, 0.0)) && !problem.shares_equal_rows(&inputs(0.0, 1.0)));
}

/// Test that each call of a problem with steps has the pages of its sequences, and that those left of three that share
/// a page share it.
#[test]
fn a_call_has_the_pages_of_its_sequences() {
    let table: &[&[usize]] = &[&[2, 0], &[2, 3], &[2, 4]];
    let pages = shared(pages(2, 5, table), &[[1, 0, 1], [2, 0, 1]]);
    let lengths = [(1, 3), (2, 4), (2, 4)];
    let mask = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
    let of = ProblemFields { mask, pass: Pass::Forward, ..ProblemFields::packed(&lengths, 8) };
    let problem =
        Problem::new(ProblemFields { steps: Steps(vec![1]), pages: Some(pages.clone()), ..of }).unwrap();
    let calls = problem.calls();
    assert_eq!(calls[0].problem.pages.as_ref(), Some(&pages));
    let second = calls[1].problem.pages.as_ref().unwrap();
    assert_eq!(second.table, [vec![2, 3], vec![2, 4]]);
    assert_eq!(second.shared, [SharedPrefix { sequence: 1, with: 0, pages: 1 }]);
    // Each call is a problem of its own.
    for call in calls {
        assert!(Problem::new(call.problem.into()).is_ok());
    }
}

#[test]
fn pages_follow_the_sequences() {
    let table: &[&[usize]] = &[&[2, 0, 5], &[2, 0, 3], &[1, 4]];
    let pages = shared(pages(2, 6, table), &[[1, 0, 2]]);
    let before = fields(&[5, 6, 4], pages.clone());
    let after = |keys: &[usize], ids: &[u32]| {
        let mut after = fields(keys, pages.clone());
        after.sequences.iter_mut().zip(ids).for_each(|(sequence, &id)| sequence.id = id);
        let fitted = pages.fitted(&before.sequences, &after);
        assert!(Problem::new(ProblemFields { pages: Some(fitted.clone()), ..after }).is_ok(), "{fitted:?}");
        fitted
    };
    assert_eq!(after(&[5, 6, 4], &[0, 1, 2]), pages);
    // A sequence that is dropped takes its row of the table along.
    assert_eq!(after(&[6, 4], &[1, 2]).table, [vec![2, 0, 3], vec![1, 4]]);
    assert!(after(&[6, 4], &[1, 2]).shared.is_empty());
    // The second page is shared no longer, since the first sequence does not fill it.
    let short = after(&[3, 6, 8], &[0, 1, 2]);
    assert_eq!(short.table, [vec![2, 0], vec![2, 6, 3], vec![1, 4, 7, 8]]);
    assert_eq!(short.shared, [SharedPrefix { sequence: 1, with: 0, pages: 1 }]);
    assert_eq!(after(&[1, 1, 0], &[0, 1, 2]).table, [vec![2], vec![6], vec![]]);
}

#[test]
fn a_problem_without_pages_is_written_as_before() {
    let paged = Problem::new(fields(&[5], pages(4, 3, &[&[2, 0]]))).unwrap();
    let json = |problem: &Problem| serde_json::to_value(problem).unwrap();
    assert_eq!(json(&paged.without_pages()).get("pages"), None);
    let expected = serde_json::json!({"size": 4, "count": 3, "table": [[2, 0]]});
    assert_eq!(json(&paged)["pages"], expected);
    assert_eq!(serde_json::from_value::<Problem>(json(&paged)).unwrap(), paged);
}

#[test]
fn pages_are_simplified_step_by_step() {
    let table: &[&[usize]] = &[&[5, 1], &[5, 3]];
    let pages = shared(pages(2, 7, table), &[[1, 0, 1]]);
    assert_eq!(pages.free(), [0, 2, 4, 6]);
    assert_eq!(pages.clone().without(&[2, 6]).table, [vec![4, 1], vec![4, 2]]);
    let tight = pages.clone().without_free();
    assert_eq!((tight.count, &tight.table[..]), (3, &[vec![2, 0], vec![2, 1]][..]));
    let parted = pages.parted();
    assert_eq!(parted.table, [vec![5, 1], vec![7, 3]]);
    assert!(parted.shared.is_empty());
    assert_eq!(Pages::in_order(2, [3, 2]).reversed().table, [vec![2, 1], vec![0]]);
    // The third sequence has most pages, and the first fills only one.
    let three = fields(&[3, 4, 6], Pages::in_order(2, [3, 4, 6]));
    let sharing = Pages::in_order(2, [3, 4, 6]).sharing_a_prefix(&three);
    assert_eq!(sharing.table, [vec![4, 5], vec![4, 7], vec![4, 8, 6]]);
    assert!(Problem::new(ProblemFields { pages: Some(sharing), ..three }).is_ok());
}
