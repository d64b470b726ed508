//! A cache in pages: the schedule is proved, its answer has the bits of rows that lie together, and every fault of a
//! reader of the table is seen.

use seamproof_oracle::replay::ReplayedLaunch;
use seamproof_oracle::{Alignment, Mask, Pages, Pass, Problem, ProblemFields, Run, SharedPrefix, Steps};
use seamproof_simulator::AttentionCall;
use seamproof_simulator::check::check;
use seamproof_simulator::faults;
use seamproof_simulator::schedule::build;

/// Returns a decode step of three sequences whose pages of four rows lie in any order. The third shares the first page
/// of the second, and the first has a page that holds no key yet.
fn paged() -> Problem {
    let pages = Pages {
        size: 4,
        count: 9,
        table: vec![vec![7, 2, 5], vec![0, 3], vec![0, 6]],
        shared: vec![SharedPrefix { sequence: 2, with: 1, pages: 1 }],
    };
    let mask = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
    let fields = ProblemFields::packed(&[(3, 7), (1, 6), (2, 8)], 8);
    let fields = ProblemFields { mask, pass: Pass::Forward, pages: Some(pages), ..fields };
    Problem::new(fields).unwrap()
}

#[test]
fn keys_are_read_through_the_table() {
    let call = AttentionCall::whole(&paged());
    let runs: Vec<Vec<Run>> = call.segments.iter().map(|segment| segment.kv.clone()).collect();
    let packed = |offset, len| Run::packed(offset, len, len);
    assert_eq!(
        runs,
        [
            vec![packed(28, 4), packed(8, 3)],
            vec![packed(0, 4), packed(12, 2)],
            vec![packed(0, 4), packed(24, 4)]
        ]
    );
}

#[test]
fn a_schedule_in_pages_is_proved_also_where_pages_are_shared() {
    for problem in [paged(), Problem::new(ProblemFields { steps: Steps(vec![1]), ..paged().into() }).unwrap()]
    {
        let schedule = build(&problem).unwrap();
        assert!(check(&problem, &schedule).is_ok(), "{problem:?}");
    }
    // Each launch shows the queries of a sequence all of its keys, in tier R as well.
    let launches = build(&paged()).unwrap().launches(&paged(), None).unwrap();
    let keys = |launch: &ReplayedLaunch| launch.keys.iter().map(|keys| keys.line.len).sum::<usize>();
    assert_eq!(launches.iter().map(keys).collect::<Vec<_>>(), [7, 6, 8]);
    // The prefix is shared, and nothing else of the second sequence.
    let mut schedule = build(&paged()).unwrap();
    let wrong = AttentionCall::through(&paged(), |_, position| 12 * (position / 4) + position % 4);
    for operation in &mut schedule.ranks[0].operations {
        if let seamproof_simulator::schedule::Work::Attend(attend) = &mut operation.work {
            attend.call = wrong.clone();
        }
    }
    assert!(check(&paged(), &schedule).is_err());
}

#[test]
fn a_wrong_reader_of_the_table_is_rejected() {
    let ids = [
        "page-of-the-next-entry",
        "page-behind-a-page",
        "pages-of-the-next-sequence",
        "page-of-one-row",
        "last-page-taken-for-full",
        "page-of-an-append-unknown",
    ];
    for id in ids {
        let (fault, problem) = (faults::by_id(id).unwrap(), paged());
        let mut schedule = build(&problem).unwrap();
        assert!(fault.plant(&problem, &mut schedule), "{id}");
        assert!(check(&problem, &schedule).is_err(), "{id}");
        // Without pages there is nothing to read wrongly.
        let plain = problem.without_pages();
        assert!(!fault.plant(&plain, &mut build(&plain).unwrap()), "{id}");
    }
    // A mask of four rows is right for pages of four, and wrong for pages of three.
    let fault = faults::by_id("page-offset-of-another-size").unwrap();
    let of_size = |size| {
        let pages = Pages::in_order(size, [7, 6, 8]);
        let problem = Problem::new(ProblemFields { pages: Some(pages), ..paged().into() }).unwrap();
        let mut schedule = build(&problem).unwrap();
        fault.plant(&problem, &mut schedule);
        check(&problem, &schedule).is_ok()
    };
    assert!(of_size(4) && !of_size(3));
}
