//! The words of `explain`, on cases that a person can follow.

use std::collections::BTreeMap;

use seamproof::backends::canary;
use seamproof::explain::{Selection, explain, other_runs, subject};
use seamproof_judge::case::{Case, Found, Subject};
use seamproof_judge::finding::Relation;
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::{Emulated, Planted};
use seamproof_lab::faults::source_faults;
use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Form, Heads, Mask, Pages, Pass, Problem, ProblemFields,
    Run, Steps,
};
use seamproof_simulator::faults::by_id;

/// Returns self-attention on a pack of sequences, given as (real, padded) rows.
fn problem(lengths: &[(usize, usize)], mask: Mask, algorithm: Algorithm, ranks: usize) -> Problem {
    Problem::new(ProblemFields {
        mask,
        parallel: ContextParallel::over(ranks, algorithm, Balance::DualChunk),
        pass: Pass::Forward,
        ..ProblemFields::padded(lengths, 1)
    })
    .unwrap()
}

fn explained(backend: &dyn Backend, problem: &Problem, options: Selection) -> String {
    explain(problem, &backend.schedule(problem).unwrap(), &options)
}

#[track_caller]
fn says(got: &str, expected: &str) {
    assert_eq!(got, expected, "\n{got}");
}

/// Test that the text says in which form a subject is given the problem, and what it reads there.
#[test]
fn the_form_in_which_a_problem_is_given() {
    let given = |form, lengths| {
        let fields = problem(lengths, Mask::FULL, Algorithm::Single, 1).into();
        let problem = Problem::new(ProblemFields { form, ..fields }).unwrap();
        let text = explained(&Emulated::default(), &problem, Selection::default());
        text.lines().take(3).map(str::to_owned).collect::<Vec<_>>()
    };
    let padded = [(3, 4), (2, 4)];
    let head =
        |form| format!("problem   2 sequences (3 of 4, 2 of 4); heads 1/1; dims 1/1; full{form}; forward");
    assert_eq!(given(Form::CuSeqlens, &padded)[..2], [&head("; bf16 flat"), ""]);
    assert_eq!(
        given(Form::Lengths, &padded),
        [&head("; given as lengths; bf16 flat"), "given     lengths of a padded batch: q 3, 2; kv 3, 2", ""]
    );
    assert_eq!(
        given(Form::Segments, &[(3, 3), (3, 3)])[1],
        "given     segments, by shape: q ids [2, 3], positions [3]; kv ids [3], positions made from them"
    );
    let dealt = |form, lengths| {
        let fields = problem(lengths, Mask::FULL, Algorithm::Ring, 2).into();
        let problem = Problem::new(ProblemFields { form, ..fields }).unwrap();
        let text = explained(&Emulated::default(), &problem, Selection::default());
        text.lines().find(|line| line.starts_with("given")).map(str::to_owned)
    };
    let said = |line: &str| Some(line.to_owned());
    assert_eq!(
        dealt(Form::Segments, &[(3, 4), (5, 8)]),
        said("given     ids and positions of each rank's rows: q 6, 6; kv 6, 6")
    );
    assert_eq!(
        dealt(Form::Lengths, &padded),
        said("given     lengths of a padded batch, to each rank: q 3, 2; kv 3, 2")
    );
}

/// Test that ranks are those of the world wherever one is named, where the group is not the whole world.
#[test]
fn the_ranks_of_a_sub_group() {
    let mut fields = ProblemFields::from(problem(&[(3, 4), (7, 8)], Mask::CAUSAL, Algorithm::Ring, 2));
    fields.parallel = ContextParallel { world: 6, ranks: vec![5, 1], ..fields.parallel };
    let problem = Problem::new(fields).unwrap();
    let options = Selection { rank: Some(5), operations: true, ..Selection::default() };
    let text = explained(&Emulated::default(), &problem, options);
    for said in [
        "\nworld     6 ranks, of which the group is 5, 1\n",
        "\n  rank 5 owns\n",
        "\nrank 5\n",
        "keys 2..4 of rank 1",
        " to rank 1\n",
        " from rank 1\n",
    ] {
        assert!(text.contains(said), "{said}\n{text}");
    }
    assert!(!text.contains("rank 0"), "{text}");
    let planted =
        Planted::new(Emulated::default(), *by_id("sent-to-the-place-as-a-world-rank").expect("a fault"));
    let text = explained(&planted, &problem, Selection::default());
    let outside = "rank 0 of the world is not in the group: it is idle, or of another group";
    assert!(text.contains(outside), "{text}");
}

/// Test that the text says what the ranks of a region hold, and what they do around attention.
#[test]
fn the_ranks_of_a_region() {
    let fields = ProblemFields::from(problem(&[(3, 4), (2, 4)], Mask::CAUSAL, Algorithm::Single, 1));
    let parallel = ContextParallel { region: 2, ..fields.parallel.clone() };
    let problem = Problem::new(ProblemFields { heads: Heads { q: 4, kv: 1 }, parallel, ..fields }).unwrap();
    let text =
        explained(&Emulated::default(), &problem, Selection { operations: true, ..Selection::default() });
    let head: Vec<&str> = text.lines().take(4).collect();
    assert_eq!(
        head,
        [
            "problem   2 sequences (3 of 4, 2 of 4); heads 4/1; dims 1/1; causal top-left; in sequence-parallel regions of 2 ranks; bf16 flat; forward",
            "region    each of 1 rank is 2: rows of q, k, v, out and their gradients are cut among these, padding rows as any others",
            "          attention is of 2 query heads on each, after a gather of rows, a column-parallel layer and a rotation by position; kv heads are each on 2 of them",
            "",
        ],
        "{text}"
    );
    for words in [
        "all-gathers q",
        "column-parallel layer of heads 2..4",
        "rotates “q of own heads”",
        "reduce-scatters “out hidden, partial”",
    ] {
        assert!(text.contains(words), "{words}\n{text}");
    }
}

/// Test that the text says what each call of a problem with steps appends, and where.
#[test]
fn the_calls_of_a_problem_in_steps() {
    let mask = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
    let fields = ProblemFields { mask, pass: Pass::Forward, ..ProblemFields::packed(&[(3, 5), (1, 1)], 8) };
    let problem = Problem::new(ProblemFields { steps: Steps(vec![2]), ..fields }).unwrap();
    let text = explained(&Emulated::default(), &problem, Selection::default());
    assert_eq!(
        text.lines().take(4).collect::<Vec<_>>(),
        [
            "problem   2 sequences (3 × 5, 1); heads 1/1; dims 8/8; causal bottom-right; in steps (2, 1); bf16 flat; forward",
            "call 0    sequence 0 has 2 keys, appends 2 from row 2 on for queries 0..2, sequence 1 has 0 keys, appends 1 from row 5 on for queries 0..1",
            "call 1    sequence 0 has 4 keys, appends 1 from row 4 on for queries 2..3",
            "          what follows is the same in one call, without a cache",
        ],
        "{text}"
    );
}

/// Test that the text says in which pages the keys of each sequence lie.
#[test]
fn the_pages_of_a_problem() {
    let pages = Pages { size: 2, count: 5, table: vec![vec![4, 0, 2], vec![1]], shared: Vec::new() };
    let fields = ProblemFields { pass: Pass::Forward, ..ProblemFields::packed(&[(3, 5), (1, 1)], 8) };
    let problem = Problem::new(ProblemFields { pages: Some(pages), ..fields }).unwrap();
    let text = explained(&Emulated::default(), &problem, Selection::default());
    assert_eq!(
        text.lines().take(2).collect::<Vec<_>>(),
        [
            "problem   2 sequences (3 × 5, 1); heads 1/1; dims 8/8; full; in pages of 2; bf16 flat; forward",
            "pages     5 of 2 rows: sequence 0 in 4, 0, 2, sequence 1 in 1",
        ],
        "{text}"
    );
    // Keys in a page that two sequences share are those of both.
    let pages = Pages { size: 2, count: 4, table: vec![vec![3, 0], vec![3, 1]], shared: Vec::new() }.shared();
    let fields = ProblemFields { pass: Pass::Forward, ..ProblemFields::packed(&[(1, 4), (1, 3)], 8) };
    let problem = Problem::new(ProblemFields { pages: Some(pages), ..fields }).unwrap();
    let text = explained(&Emulated::default(), &problem, Selection::default());
    assert!(text.contains("in pages of 2, some shared") && !text.contains("should see"), "{text}");
}

#[test]
fn one_rank_with_padding() {
    let problem = problem(&[(3, 4), (2, 4)], Mask::CAUSAL, Algorithm::Single, 1);
    says(
        &explained(&Emulated::default(), &problem, Selection::default()),
        "\
problem   2 sequences (3 of 4, 2 of 4); heads 1/1; dims 1/1; causal top-left; bf16 flat; forward

layout    a..b is without b; positions count real rows of a sequence; “sees”: is asked to see; “all”: every query sees every key
  sequence 0: 3 real of 4 rows from row 0
  sequence 1: 2 real of 4 rows from row 4
  rank 0 owns
    sequence 0: positions 0..3 in rows 0..3, padding in rows 3..4
    sequence 1: positions 0..2 in rows 4..6, padding in rows 6..8

rank 0
  operation 1, stream 0: forward launch on q and k
    sequence 0: queries 0..3 (rows 0..3), keys 0..3 of rank 0 (rows 0..3)
      query 0 sees 0..1; query 1 sees 0..2; query 2 sees 0..3
    sequence 1: queries 0..2 (rows 4..6), keys 0..2 of rank 0 (rows 4..6)
      query 0 sees 0..1; query 1 sees 0..2

all ranks together
  forward: every query is asked to see exactly what the mask shows

checked   proved of what is asked, not of what kernels do: 2 operations, 9 pairs
",
    );
}

#[test]
fn a_ring_of_two_ranks() {
    let problem = problem(&[(3, 4), (7, 8)], Mask::CAUSAL, Algorithm::Ring, 2);
    says(&explained(&Emulated::default(), &problem, Selection::default()), "\
problem   2 sequences (3 of 4, 7 of 8); heads 1/1; dims 1/1; causal top-left; ring over 2 ranks, dual-chunk; bf16 flat; forward

layout    a..b is without b; positions count real rows of a sequence; “sees”: is asked to see; “all”: every query sees every key
  sequence 0: 3 real of 4 rows from row 0
  sequence 1: 7 real of 8 rows from row 4
  rank 0 owns
    sequence 0: positions 0..1 in rows 0..1, padding in rows 1..2
    sequence 1: positions 0..2 in rows 2..4, positions 6..7 in rows 4..5, padding in rows 5..6
  rank 1 owns
    sequence 0: positions 1..2 in rows 0..1, positions 2..3 in rows 1..2
    sequence 1: positions 2..4 in rows 2..4, positions 4..6 in rows 4..6

rank 0
  operation 8, stream 0: forward launch on q and k, ring step 1 of 2: diagonal section, part 1 of 2 of the keys
    sequence 0: queries 0..1 (rows 0..1), keys 0..1 of rank 0 (rows 0..1): all
    sequence 1: queries 0..2 (rows 2..4), keys 0..2 of rank 0 (rows 2..4)
      query 0 sees 0..1; query 1 sees 0..2
    sequence 1: queries 6..7 (rows 4..5), keys 0..2 of rank 0 (rows 2..4): all
  operation 10, stream 0: forward launch on q and k, ring step 1 of 2: diagonal section, part 2 of 2 of the keys
    sequence 1: queries 6..7 (rows 4..5), keys 6..7 of rank 0 (rows 4..5): all
  operation 14, stream 1: forward launch on q and “k received, slot 0”, ring step 2 of 2: upper section, part 1 of 2 of the keys
    sequence 1: queries 6..7 (rows 4..5), keys 2..4 of rank 1 (rows 2..4): all
  operation 17, stream 1: forward launch on q and “k received, slot 0”, ring step 2 of 2: upper section, part 2 of 2 of the keys
    sequence 1: queries 6..7 (rows 4..5), keys 4..6 of rank 1 (rows 4..6): all

rank 1
  operation 8, stream 0: forward launch on q and k, ring step 1 of 2: diagonal section, part 1 of 2 of the keys
    sequence 0: queries 1..2 (rows 0..1), keys 1..2 of rank 1 (rows 0..1): all
    sequence 0: queries 2..3 (rows 1..2), keys 1..2 of rank 1 (rows 0..1): all
    sequence 1: queries 2..4 (rows 2..4), keys 2..4 of rank 1 (rows 2..4)
      query 2 sees 2..3; query 3 sees 2..4
    sequence 1: queries 4..6 (rows 4..6), keys 2..4 of rank 1 (rows 2..4): all
  operation 10, stream 0: forward launch on q and k, ring step 1 of 2: diagonal section, part 2 of 2 of the keys
    sequence 0: queries 2..3 (rows 1..2), keys 2..3 of rank 1 (rows 1..2): all
    sequence 1: queries 4..6 (rows 4..6), keys 4..6 of rank 1 (rows 4..6)
      query 4 sees 4..5; query 5 sees 4..6
  operation 14, stream 1: forward launch on q and “k received, slot 0”, ring step 2 of 2: lower section, part 1 of 2 of the keys
    sequence 0: queries 1..2 (rows 0..1), keys 0..1 of rank 0 (rows 0..1): all
    sequence 0: queries 2..3 (rows 1..2), keys 0..1 of rank 0 (rows 0..1): all
    sequence 1: queries 2..4 (rows 2..4), keys 0..2 of rank 0 (rows 2..4): all
    sequence 1: queries 4..6 (rows 4..6), keys 0..2 of rank 0 (rows 2..4): all

all ranks together
  forward: every query is asked to see exactly what the mask shows

checked   proved of what is asked, not of what kernels do: 44 operations, 34 pairs
");
}

#[test]
fn an_all_gather_with_every_operation_of_a_rank() {
    let problem = problem(&[(3, 4), (7, 8)], Mask::CAUSAL, Algorithm::AllGather, 2);
    let options = Selection { rank: Some(1), pass: Some(Pass::Forward), operations: true };
    says(&explained(&Emulated::default(), &problem, options), "\
problem   2 sequences (3 of 4, 7 of 8); heads 1/1; dims 1/1; causal top-left; all-gather over 2 ranks, dual-chunk; bf16 flat; forward

layout    a..b is without b; positions count real rows of a sequence; “sees”: is asked to see; “all”: every query sees every key
  sequence 0: 3 real of 4 rows from row 0
  sequence 1: 7 real of 8 rows from row 4
  rank 1 owns
    sequence 0: positions 1..2 in rows 0..1, positions 2..3 in rows 1..2
    sequence 1: positions 2..4 in rows 2..4, positions 4..6 in rows 4..6

rank 1
  operation 0, stream 2: all-gathers k rows 0..6 into “k in rank order” rows 0..6, “k in rank order” rows 6..12 over ranks 0, 1
  operation 1, stream 2: records event 3
  operation 2, stream 2: all-gathers v rows 0..6 into “v in rank order” rows 0..6, “v in rank order” rows 6..12 over ranks 0, 1
  operation 3, stream 2: records event 4
  operation 4, stream 0: waits for event 3
  operation 5, stream 0: copies “k in rank order” to “k gathered”, rows 0..12, reordered
  operation 6, stream 0: waits for event 4
  operation 7, stream 0: copies “v in rank order” to “v gathered”, rows 0..12, reordered
  operation 8, stream 0: fills max_logit with −∞, every head
  operation 9, stream 0: forward launch on q and “k gathered”
    sequence 0: queries 1..2 (rows 0..1), keys 0..2 of ranks 0, 1 (rows 0..2): all
    sequence 0: queries 2..3 (rows 1..2), keys 0..3 of ranks 0, 1 (rows 0..3): all
    sequence 1: queries 2..4 (rows 2..4), keys 0..4 of ranks 0, 1 (rows 4..8)
      query 2 sees 0..3; query 3 sees 0..4
    sequence 1: queries 4..6 (rows 4..6), keys 0..6 of ranks 0, 1 (rows 4..10)
      query 4 sees 0..5; query 5 sees 0..6
  operation 10, stream 0: records event 5
  operation 11, stream 2: waits for event 5
  operation 12, stream 2: takes the maximum of max_logit over ranks 0, 1

all ranks together
  forward: every query is asked to see exactly what the mask shows

checked   proved of what is asked, not of what kernels do: 26 operations, 34 pairs
");
}

#[test]
fn a_window_that_is_one_key_short() {
    let mask = Mask { left: Some(2), ..Mask::CAUSAL };
    let problem = problem(&[(3, 4), (12, 12)], mask, Algorithm::AllGather, 2);
    let options = Selection { rank: Some(0), ..Selection::default() };
    says(&explained(canary().as_ref(), &problem, options), "\
problem   2 sequences (3 of 4, 12); heads 1/1; dims 1/1; window (2, 0) top-left; all-gather over 2 ranks, dual-chunk; bf16 flat; forward

layout    a..b is without b; positions count real rows of a sequence; “sees”: is asked to see; “all”: every query sees every key
  sequence 0: 3 real of 4 rows from row 0
  sequence 1: 12 real of 12 rows from row 4
  rank 0 owns
    sequence 0: positions 0..1 in rows 0..1, padding in rows 1..2
    sequence 1: positions 0..3 in rows 2..5, positions 9..12 in rows 5..8

rank 0
  operation 9, stream 0: forward launch on q and “k gathered”
    sequence 0: queries 0..1 (rows 0..1), keys 0..1 of rank 0 (rows 0..1): all
    sequence 1: queries 0..3 (rows 2..5), keys 0..3 of rank 0 (rows 4..7)
      query 0 sees 0..1
      query 1 sees 0..2
      query 2 sees 1..3, should see 0..3
    sequence 1: queries 9..12 (rows 5..8), keys 0..12 of ranks 0, 1 (rows 4..16)
      query 9 sees 8..10, should see 7..10
      query 10 sees 9..11, should see 8..11
      query 11 sees 10..12, should see 9..12

all ranks together
  forward: not what the mask shows
    query 2 of sequence 0 sees 1..3, should see 0..3
    queries 2..12 of sequence 1: i sees i−1..i+1, should see i−2..i+1

checked   WRONG: 5 errors
  result on rank 0: out of sequence 1, heads 0..1, positions 2..3: pairs with positions 0..1 are missing
  result on rank 0: out of sequence 1, heads 0..1, positions 9..11: pairs with positions 7..8 of the first to 8..9 of the last are missing
  3 errors of other ranks or passes
");
}

/// Test that the text says so where faults of a kernel or at a call are in no schedule. It shows the finding beside
/// what was asked.
#[test]
fn what_no_schedule_shows_is_said() {
    let problem = problem(&[(3, 4)], Mask::CAUSAL, Algorithm::Single, 1);
    let named = |name: &str| {
        let subject = Subject { name: name.to_owned(), options: BTreeMap::new() };
        Case::new(subject, 0, problem.clone())
    };
    let on_gpu = source_faults().next().map(|fault| format!("cuda+{}", fault.id)).unwrap();
    for (name, what) in [
        (&*on_gpu, "NOT SHOWN: the fault in its kernels: "),
        ("emulated~call-scale-off", "NOT SHOWN: the fault at the call: the scale is 2^-8 too large"),
        ("emulated+ds-without-scale", "NOT SHOWN: the fault in its kernels: "),
        ("emulated+ds-without-scale~call-scale-off", "the fault in its kernels: "),
        ("emulated@worker~call-scale-off", "the fault at the call: "),
    ] {
        let text = subject(&named(name), false);
        assert!(text.starts_with(&format!("subject   {name}\n")) && text.contains(what), "{text}");
        assert!(!text.contains("found "), "{text}");
    }
    for name in ["emulated", "cuda", "window-off-by-one", "emulated+merge-twice"] {
        assert_eq!(subject(&named(name), false), format!("subject   {name}\n"));
    }
    let mut case = named("emulated");
    let finding = Finding::new(Check::Exact, None, "wrong".to_owned());
    case.found = Some(Found::drawn(finding));
    assert!(subject(&case, false).contains("\nfound     exact: wrong"), "{}", subject(&case, false));
    assert!(
        subject(&case, true).contains("\nfound     of the file's own subject: "),
        "{}",
        subject(&case, true)
    );
}

/// Test of the other runs of an identity. They are shown too, each with a description.
#[test]
fn the_other_runs_of_an_identity_are_shown() {
    let problem = problem(&[(3, 4), (2, 4)], Mask::CAUSAL, Algorithm::Single, 1);
    let shown = |relation: Option<Relation>| {
        let mut case =
            Case::new(Subject { name: "emulated".to_owned(), options: BTreeMap::new() }, 0, problem.clone());
        let finding =
            Finding { identity: relation, ..Finding::new(Check::Identity, None, "wrong".to_owned()) };
        case.found = Some(Found::drawn(finding));
        other_runs(&case, &Emulated::default(), &Selection::default())
    };
    let text = shown(Some(Relation::SequenceOrder));
    let head = "
identity  sequence-order: the run above is held against a second one, the same sequences in the opposite order

run 2     of another problem
problem   2 sequences (2 of 4, 3 of 4); heads 1/1; dims 1/1; causal top-left; bf16 flat; forward
";
    assert!(text.starts_with(head), "{text}");
    assert!(
        text.contains("    sequence 0: queries 0..2 (rows 0..2), keys 0..2 of rank 0 (rows 0..2)\n"),
        "{text}"
    );
    let text = shown(Some(Relation::Rerun));
    assert!(text.contains("\nrun 2     of the problem above, with the values"), "{text}");
    let text = shown(Some(Relation::History));
    assert!(text.contains("\nrun 2     of another problem\nproblem   1 sequence (3 of 4)"), "{text}");
    assert!(text.contains("\nrun 3     of the problem above"), "{text}");
    assert!(shown(Some(Relation::SumOfDv)).contains("there is no other"));
    assert_eq!(shown(None), "");
}

/// Test that a key of another sequence, and padding, are named as what they are, and so is a schedule that does not
/// run.
#[test]
fn foreign_keys_and_hopeless_schedules() {
    let problem = problem(&[(2, 4), (2, 4)], Mask::FULL, Algorithm::Single, 1);
    let mut schedule = Emulated::default().schedule(&problem).unwrap();
    let launch = schedule.ranks[0].operations.iter_mut().find_map(|operation| match &mut operation.work {
        seamproof_simulator::schedule::Work::Attend(attend) => Some(attend),
        _ => None,
    });
    launch.unwrap().call.segments[0].kv[0] = Run::packed(0, 5, 5);
    let text = explain(&problem, &schedule, &Selection::default());
    let line =
        "of sequence 0 see 0..2 and 2 rows of padding, 0..1 of sequence 1, kv heads 0..1, should see 0..2";
    assert!(text.contains(line), "{text}");
    schedule.ranks.clear();
    let text = explain(&problem, &schedule, &Selection::default());
    assert!(text.contains("the schedule does not run"), "{text}");
}

#[test]
fn what_is_left_out_is_counted() {
    let problem = problem(&[(1, 4); 40], Mask::CAUSAL, Algorithm::Ring, 2);
    let text = explained(&Emulated::default(), &problem, Selection::default());
    for left in ["  … and 24 more sequences", "    … and 8 more segments"] {
        assert!(text.contains(left), "{left}: {text}");
    }
}
