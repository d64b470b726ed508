//! Subjects of narrow tables in a campaign: nothing outside reaches them, the right ones hold, and those that are wrong
//! just inside an edge are found.

use std::sync::atomic::{AtomicU64, Ordering};

use seamproof_judge::campaign::{Campaign, CampaignSummary};
use seamproof_judge::finding::Check;
use seamproof_judge::prelude::*;
use seamproof_judge::subject::{BalanceKind, Layouts, SideLayout, Unpadded};
use seamproof_judge::subjects::Emulated;
use seamproof_oracle::{Algorithm, Balance};

use crate::tables::random;

/// The emulated kernel behind a table, wrong where `wrong` says so.
struct Behind {
    kernel: Emulated,
    table: Table,
    refuses: bool,
    wrong: fn(&Problem) -> bool,
    /// Number of problems outside the table that were asked.
    outside: AtomicU64,
}

impl Behind {
    fn new(table: Table, refuses: bool, wrong: fn(&Problem) -> bool) -> Behind {
        let table = table.validated().expect("some problem passes");
        Behind { kernel: Emulated::default(), table, refuses, wrong, outside: AtomicU64::new(0) }
    }
}

impl Backend for Behind {
    fn name(&self) -> &str {
        "behind"
    }

    fn declaration(&self) -> Declaration {
        let mut declaration = self.kernel.declaration();
        let statistics = std::mem::replace(&mut declaration.table, self.table.clone()).statistics;
        declaration.table.statistics = statistics;
        declaration.refuses = self.refuses;
        declaration
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.kernel)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        if let Some(refusal) = self.table.refusal(problem) {
            self.outside.fetch_add(1, Ordering::Relaxed);
            return Err(refusal.into());
        }
        if !(self.wrong)(problem) {
            return self.kernel.run(problem, inputs);
        }
        let mut inputs = inputs.clone();
        inputs.v.mapv_inplace(|v| -v);
        self.kernel.run(problem, &inputs)
    }
}

fn campaign(subject: &Behind, seed: u64, cases: u64) -> CampaignSummary {
    Campaign { seed, cases, profile: Profile::Seams }.run(subject)
}

/// Test that a right kernel of any table has no finding, and that nothing outside its table reaches it but the probes
/// that it refuses.
#[test]
fn a_right_kernel_behind_a_random_table_has_no_finding() {
    let mut probes = 0;
    for seed in 0..24 {
        let subject = Behind::new(random(seed), seed % 2 == 0, |_| false);
        let summary = campaign(&subject, seed, 60);
        assert!(summary.failures.is_empty() && summary.internal.is_empty(), "{summary}\n{:?}", subject.table);
        let refused: u64 = summary.refused.values().sum();
        assert_eq!(subject.outside.into_inner(), refused, "{summary}");
        assert!(subject.refuses || refused == 0, "{summary}");
        probes += refused;
    }
    assert!(probes > 0);
}

/// A row of the table: an edit that narrows it, and the problems just inside the edge. A row that says yes or no is
/// left at yes, with the rows beside it at no, and the problems are those that need the yes.
type Edge = (&'static str, fn(&mut Table), fn(&Problem) -> bool);

fn any(problem: &Problem, holds: impl Fn(&Sequence) -> bool) -> bool {
    problem.sequences.iter().any(holds)
}

/// Takes of all layouts one alone.
fn only(table: &mut Table, layout: fn(&mut Layouts)) {
    table.layout = Layouts {
        padding: false,
        padding_except: Vec::new(),
        gaps: false,
        first_offset: false,
        slack: false,
        steps: false,
        order: false,
        equal: false,
    };
    layout(&mut table.layout);
}

/// Whether a problem is laid out in a way that these layouts forbid.
fn lies(problem: &Problem, forbid: fn(&mut Layouts)) -> bool {
    let mut table = Table::widest();
    forbid(&mut table.layout);
    table.refusal(problem).is_some()
}

const EDGES: [Edge; 45] = [
    ("precisions", |t| t.precisions = vec![Precision::uniform(Format::Bf16)], |p| p.dims.v > 8),
    ("dims.qk", |t| t.dims.qk = Sizes::multiples(8, 64, 8).unwrap(), |p| p.dims.qk == 64),
    ("dims.v", |t| t.dims.v = Sizes::new([16, 48]).unwrap(), |p| p.dims.v == 48),
    ("dims.equal", |t| t.dims.equal = true, |p| p.dims.qk == p.dims.v && p.dims.v > 16),
    ("heads.groups", |t| t.heads.groups = Sizes::new([1, 2, 4]).unwrap(), |p| p.group() == 4),
    ("heads.most", |t| t.heads.most = 4, |p| p.heads.q == 4),
    (
        "masks.forms",
        |t| t.masks.forms = vec![MaskForm::Full, MaskForm::CausalWindow],
        |p| MaskForm::of(&p.mask) == MaskForm::CausalWindow,
    ),
    (
        "masks.kinds",
        |t| t.masks.kinds = vec![MaskKind::Documents, MaskKind::Prefix],
        |p| p.mask.blocks.is_some() && p.mask.prefix > 0 && p.pairs() > 0,
    ),
    (
        "masks.alignments",
        |t| t.masks.alignments = vec![Alignment::BottomRight],
        |p| p.mask.right == Some(0) && any(p, |s| s.q.len > 1 && s.kv.len > s.q.len),
    ),
    ("masks.window_most", |t| t.masks.window_most = 3, |p| p.mask.left == Some(3)),
    ("lengths.equal", |t| t.lengths.equal = true, |p| any(p, |s| s.q.len == s.kv.len && s.q.len > 5)),
    ("lengths.empty_q", |t| t.lengths.empty_q = false, |p| any(p, |s| s.q.len == 1 && s.kv.len > 1)),
    ("lengths.empty_kv", |t| t.lengths.empty_kv = false, |p| any(p, |s| s.kv.len == 1 && s.q.len > 1)),
    (
        "lengths.blind_queries",
        |t| t.lengths.blind_queries = false,
        |p| any(p, |s| s.q.len > 1 && s.kv.len > 1 && p.mask.visible(0, s.q.len, s.kv.len).len() == 1),
    ),
    ("lengths.no_sequences", |t| t.lengths.no_sequences = false, |p| p.sequences.len() == 1),
    ("lengths.multiple_q", |t| t.lengths.multiple_q = 4, |p| any(p, |s| s.q.len == 4)),
    ("lengths.multiple_kv", |t| t.lengths.multiple_kv = 3, |p| any(p, |s| s.kv.len == 6)),
    ("lengths.least_kv", |t| t.lengths.least_kv = 3, |p| any(p, |s| s.kv.len == 3)),
    ("lengths.most", |t| t.lengths.most = 7, |p| any(p, |s| s.kv.len == 7)),
    ("lengths.sequences_most", |t| t.lengths.sequences_most = 3, |p| p.sequences.len() == 3),
    ("lengths.rows_most", |t| t.lengths.rows_most = 20, |p| p.rows.kv > 17),
    ("layout.padding", |t| only(t, |l| l.padding = true), |p| lies(p, |l| l.padding = false)),
    (
        "layout.padding_except",
        |t| {
            let (algorithm, layout) = (Some("ring"), Some(SideLayout::Thd));
            t.layout.padding_except = vec![Unpadded { algorithm, layout }];
        },
        |p| p.parallel.algorithm.name() == "all-to-all" && lies(p, |l| l.padding = false) && p.pairs() > 0,
    ),
    ("layout.gaps", |t| only(t, |l| l.gaps = true), |p| lies(p, |l| l.gaps = false)),
    ("layout.first_offset", |t| only(t, |l| l.first_offset = true), |p| lies(p, |l| l.first_offset = false)),
    ("layout.slack", |t| only(t, |l| l.slack = true), |p| lies(p, |l| l.slack = false)),
    ("layout.steps", |t| only(t, |l| l.steps = true), |p| lies(p, |l| l.steps = false)),
    ("layout.order", |t| only(t, |l| l.order = true), |p| lies(p, |l| l.order = false)),
    (
        "layout.equal",
        |t| (t.lengths.equal, t.layout.equal) = (true, true),
        |p| p.sequences.len() > 1 && any(p, |s| s.q.len > 1 && s.kv.span > s.kv.len),
    ),
    ("softcap", |t| t.sinks = vec![Sink::None], |p| p.softmax.softcap.is_some()),
    ("sinks", |t| t.sinks = vec![Sink::None, Sink::OffByOne], |p| p.softmax.sink == Sink::OffByOne),
    ("backward", |t| t.softcap = false, |p| p.pass == Pass::Backward),
    (
        "parallel.algorithms",
        |t| t.parallel.algorithms = vec!["single", "ring"],
        |p| p.parallel.algorithm.name() == "ring" && p.parallel.size() > 1,
    ),
    (
        "parallel.balances",
        |t| t.parallel.balances = vec![BalanceKind::Contiguous, BalanceKind::DualChunk],
        |p| p.parallel.balance == seamproof_oracle::Balance::DualChunk && p.parallel.size() > 1,
    ),
    (
        "parallel.ranks_least",
        |t| {
            t.parallel.algorithms = vec!["ring", "all-to-all"];
            t.parallel.ranks_least = 2;
        },
        |p| p.parallel.size() == 2,
    ),
    ("parallel.ranks_most", |t| t.parallel.ranks_most = 3, |p| p.parallel.size() == 3),
    (
        "parallel.ring_stripes",
        |t| t.softcap = false,
        |p| {
            let is_ring = matches!(p.parallel.algorithm, Algorithm::Ring | Algorithm::Hierarchical { .. });
            is_ring && matches!(p.parallel.balance, Balance::Striped { stripe: 2.. })
        },
    ),
    ("parallel.sub_groups", |t| t.parallel.sub_groups = false, |p| p.parallel.size() > 1),
    (
        "parallel.world_most",
        |t| (t.parallel.ranks_most, t.parallel.world_most) = (3, 4),
        |p| p.parallel.world > p.parallel.size() && p.parallel.size() > 1,
    ),
    ("parallel.order", |t| t.softcap = false, |p| !p.parallel.ranks.is_sorted()),
    ("forms", |t| t.forms = vec![Form::CuSeqlens, Form::Segments], |p| p.form == Form::Segments),
    ("cache", |t| t.softcap = false, |p| !p.steps.is_empty()),
    (
        "pages",
        |t| t.pages = Some(Sizes::new([2, 3]).unwrap()),
        |p| p.pages.as_ref().is_some_and(|pages| pages.size == 3),
    ),
    ("sharing", |t| t.softcap = false, |p| !p.sharing.is_empty() && p.pairs() > 0),
    ("parallel.regions", |t| t.softcap = false, |p| p.parallel.region > 1 && p.tokens() > 0),
];

/// Test that a kernel that is wrong just inside the edge of a row is found, and shrunk to a case inside.
#[test]
fn a_kernel_that_is_wrong_at_an_edge_of_its_table_is_found() {
    for (row, narrow, wrong) in EDGES {
        let mut table = Table::widest();
        narrow(&mut table);
        let subject = Behind::new(table, false, wrong);
        let summary = campaign(&subject, 5, 128);
        assert!(!summary.failures.is_empty(), "{row}: {summary}");
        assert_eq!(subject.outside.load(Ordering::Relaxed), 0, "{row}: {summary}");
        for failure in &summary.failures {
            let problem = &failure.case.problem;
            assert_eq!(subject.table.refusal(problem), None, "{row}: {problem:?}");
            // An identity may have asked the problem at the edge.
            let by_identity = failure.key.check == Check::Identity;
            assert!(wrong(problem) || by_identity, "{row}: {problem:?}");
            assert!(problem.tokens() <= 12, "{row}: {problem:?}");
        }
    }
}

/// Test that every row of the table has an edge here, so that a new row cannot be forgotten.
#[test]
fn every_row_has_an_edge() {
    let rows: std::collections::BTreeSet<&str> = EDGES.iter().map(|(row, ..)| *row).collect();
    assert_eq!(rows.len(), EDGES.len());
    assert_eq!(rows, Refusal::table_rows().collect());
}

/// Test that relations whose second problem lies outside a table are counted, and only these.
#[test]
fn what_cannot_be_asked_is_counted() {
    let mut table = Table::widest();
    table.layout.padding = false;
    table.lengths.empty_q = false;
    table.masks.window_most = 3;
    let narrow = campaign(&Behind::new(table, false, |_| false), 2, 300);
    let named: Vec<&str> = narrow.not_asked.keys().map(|relation| relation.name()).collect();
    let expected = ["padding-amount", "empty-sequence", "closing-offsets", "wide-window", "narrower-window"];
    assert_eq!(named, expected, "{narrow}");
    assert!(narrow.to_string().contains("not asked: padding-amount ("), "{narrow}");
    let wide = campaign(&Behind::new(Table::widest(), true, |_| false), 2, 300);
    assert!(wide.not_asked.is_empty(), "{wide}");
}

/// Test that a subject that refuses nothing by itself never sees a problem outside its table, whoever asks.
#[test]
fn a_subject_that_refuses_nothing_is_not_asked_outside_its_table() {
    let mut table = Table::widest();
    table.softcap = false;
    let softmax = Softmax { softcap: Some(20.0), ..Softmax::scaled(0.5) };
    let problem = Problem::new(ProblemFields { softmax, ..ProblemFields::packed(&[(2, 2)], 8) });
    let problem = problem.expect("it is legal");
    for (refuses, outside) in [(false, 0), (true, 1)] {
        let subject = Behind::new(table.clone(), refuses, |_| false);
        assert_eq!(judge(&subject, &problem), Verdict::Refused(Refusal::Softcap));
        assert_eq!(subject.outside.into_inner(), outside);
    }
}

/// Test that an adapter whose table and kernel do not fit each other is told so.
#[test]
fn an_adapter_at_fault_is_told() {
    struct Refusing(Emulated);
    impl Backend for Refusing {
        fn name(&self) -> &str {
            "refusing"
        }

        fn declaration(&self) -> Declaration {
            self.0.declaration()
        }

        fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
            match problem.dims.qk {
                8 => self.0.run(problem, inputs),
                _ => Err(Refusal::HeadDim { which: "qk", dim: problem.dims.qk }.into()),
            }
        }
    }
    let refusing =
        Campaign { seed: 1, cases: 64, profile: Profile::Seams }.run(&Refusing(Emulated::default()));
    let told = refusing.adapter();
    assert!(told.iter().any(|what| what.contains("inside its table")), "{told:?}");

    let mut table = Table::widest();
    // The one that is in the list already is taken for the first.
    table.precisions.push(table.precisions[0]);
    let unshown = campaign(&Behind::new(table, false, |_| false), 4, 1100);
    assert!(unshown.failures.is_empty() && !unshown.holds(), "{unshown}");
    assert_eq!(unshown.adapter().len(), 1, "{unshown}");
    assert!(unshown.adapter()[0].starts_with("precisions[4] is in the table"), "{unshown}");
    let wide = campaign(&Behind::new(Table::widest(), true, |_| false), 4, 1100);
    assert!(wide.holds() && wide.adapter().is_empty() && wide.missed().is_empty(), "{wide}");
}
