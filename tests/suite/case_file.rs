//! The page on case files names each field, each name of a value and each bound that the types have.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::Path;

use seamproof_judge::case::{
    CASE_BYTES_MAX, CASE_VERSION, Case, EARLIER_MAX, Found, InputSource, Sample, Story, Subject,
};
use seamproof_judge::finding::Earlier;
use seamproof_judge::finding::Phase;
use seamproof_judge::finding::{Cause, Check, Ending, Finding, Place};
use seamproof_oracle::limits::{
    HEAD_DIM_MAX, HEADS_MAX, ROWS_MAX, SCALE_MAX, SCALING_BLOCK_MAX, SEQUENCES_MAX, SOFTCAP_MAX, WORLD_MAX,
};
use seamproof_oracle::{
    Algorithm, Alignment, Balance, Blocks, Borders, ContextParallel, Form, Format, Heads, InputMode, Mask,
    PAGE_SIZE_MAX, Pages, Pass, Problem, ProblemFields, Run, ScaleValues, Sequence, SharedKeys, Sharing,
    Sink, Softmax, Steps, TensorName, TensorRows,
};
use serde_json::{Value, json};

fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/case-file.md");
    std::fs::read_to_string(path).expect("the page is there")
}

/// Returns a problem that writes every optional field.
fn problem(algorithm: Algorithm, balance: Balance) -> Problem {
    let run = Run { offset: 0, step: 2, len: 3, span: 4 };
    let fields = ProblemFields {
        rows: TensorRows { q: 8, kv: 8 },
        heads: Heads { q: 2, kv: 1 },
        mask: Mask { left: Some(2), ..Mask::CAUSAL },
        softmax: Softmax { softcap: Some(4.0), ..Softmax::scaled(0.5) },
        parallel: ContextParallel { region: 2, ..ContextParallel::over(2, algorithm, balance) },
        data_seed: 1,
        ..ProblemFields::of(vec![Sequence { id: 0, q: run, kv: run }], 8)
    };
    Problem::new(fields).expect("the fields are legal")
}

/// Returns a case with a value in every field of the types. A new field must be named here, and then on the page.
fn case() -> Case {
    let finding = Finding {
        check: Check::Crash,
        identity: serde_json::from_value(json!("padding-amount")).expect("an identity"),
        ending: Some(Ending { cause: Cause::Failed, after: Some(Phase::Launched) }),
        tensor: Some(TensorName::Out),
        place: Place { sequence: Some(0), head: Some(0), row: Some(0), lane: Some(0) },
        what: "wrong".to_owned(),
        got: Some("1".to_owned()),
        expected: Some("2".to_owned()),
        bound: Some(0.5),
        ratio: Some(2.0),
        failed: 1,
        compared: 2,
        before: Vec::new(),
    };
    let problem = problem(Algorithm::Hierarchical { all_to_all: 2 }, Balance::Striped { stripe: 1 });
    let options = std::collections::BTreeMap::from([("attention".to_owned(), "simple".to_owned())]);
    Case {
        version: CASE_VERSION,
        story: Some(Story { text: "a story".to_owned(), sources: vec!["https://example.org".to_owned()] }),
        subject: Subject { name: "cuda".to_owned(), options: options.clone() },
        schedule_seed: 0,
        inputs: InputSource::Recorded {
            file: "run".to_owned(),
            digest: "00".to_owned(),
            sample: Some(Sample { rows: 64, seed: 1 }),
        },
        problem: problem.clone(),
        before: vec![Earlier { options, problem }],
        found: Some(Found {
            finding,
            minimal: true,
            evaluations: 1,
            unshrunk: Some("wrong".to_owned()),
            unconfirmed: Some("not again".to_owned()),
        }),
    }
}

/// Adds the paths of all fields of a value, with `[]` for the elements of lists. Options have names of their own, and
/// an earlier run's problem has the fields of every other problem.
fn paths(value: &Value, path: &str, to: &mut BTreeSet<String>) {
    if !path.is_empty() && !path.ends_with(']') {
        to.insert(path.to_owned());
    }
    match value {
        Value::Object(fields) if !path.ends_with("options") && path != "before[].problem" => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                paths(value, &path, to);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| paths(item, &format!("{path}[]"), to)),
        _ => {}
    }
}

/// Returns the names in backquotes in the first column of the page's tables.
fn documented(page: &str) -> BTreeSet<String> {
    let first = page.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let names = first.flat_map(|cell| cell.split(", ").map(|name| name.trim_matches('`').to_owned()));
    names.collect()
}

#[test]
fn every_field_is_on_the_page_and_nothing_else() {
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md"));
    assert!(readme.is_ok_and(|text| text.contains("(docs/case-file.md)")), "the page is linked");
    let mut fields = BTreeSet::new();
    let case = case();
    paths(&serde_json::to_value(&case).expect("a case is JSON"), "", &mut fields);
    // Several ranks are given in the plain form, which is not written.
    let given = ProblemFields { form: Form::Lengths, ..ProblemFields::padded(&[(1, 2)], 8) };
    let given = Problem::new(given).expect("a padded batch");
    paths(&serde_json::to_value(&given).expect("a problem is JSON"), "problem", &mut fields);
    let documents = Borders::new(&[1]).ok().map(Blocks::Documents);
    for blocks in [documents, NonZeroU32::new(2).map(Blocks::Chunks)] {
        let mask = Mask { blocks, prefix: 1, sink_tokens: 1, ..Mask::CAUSAL };
        paths(&serde_json::to_value(mask).expect("a mask is JSON"), "problem.mask", &mut fields);
    }
    let mask = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
    let stepped = ProblemFields { mask, pass: Pass::Forward, ..ProblemFields::packed(&[(2, 2)], 8) };
    let stepped = Problem::new(ProblemFields { steps: Steps(vec![1]), ..stepped }).expect("two calls");
    paths(&serde_json::to_value(&stepped).expect("a problem is JSON"), "problem", &mut fields);
    let any = ProblemFields { scales: ScaleValues::Any, ..ProblemFields::packed(&[(1, 1)], 8) };
    let any = Problem::new(any).expect("a legal problem");
    paths(&serde_json::to_value(&any).expect("a problem is JSON"), "problem", &mut fields);
    let pages = Pages { size: 1, count: 3, table: vec![vec![0, 1], vec![0, 2]], shared: Vec::new() }.shared();
    let paged = ProblemFields { pass: Pass::Forward, ..ProblemFields::packed(&[(1, 2), (1, 2)], 8) };
    let paged = Problem::new(ProblemFields { pages: Some(pages), ..paged }).expect("a shared page");
    paths(&serde_json::to_value(&paged).expect("a problem is JSON"), "problem", &mut fields);
    let keys = [SharedKeys { sequence: 1, with: 0, keys: 1 }];
    let shared =
        ProblemFields { sharing: Sharing(keys.to_vec()), ..ProblemFields::packed(&[(1, 2), (1, 2)], 8) };
    let shared = Problem::new(shared).expect("a shared key");
    paths(&serde_json::to_value(&shared).expect("a problem is JSON"), "problem", &mut fields);
    // These fields hold one of several forms, and the page names only the fields of the forms.
    for form in
        ["inputs.recorded", "problem.parallel.algorithm.hierarchical", "problem.parallel.balance.striped"]
    {
        assert!(fields.remove(form), "{form}");
    }
    assert_eq!(documented(&page()), fields);
    assert_eq!(Case::parse(case.to_json().as_bytes()).expect("it reads back"), case);
}

#[test]
fn every_name_of_a_value_is_on_the_page() {
    let page = page();
    let text = |value: Value| value.as_str().expect("a name").to_owned();
    let named = |value: serde_json::Result<Value>| text(value.expect("a name is JSON"));
    let mut names: Vec<String> = Vec::new();
    names.extend(InputMode::ALL.map(|mode| named(serde_json::to_value(mode))));
    names.extend(Format::ALL.map(|format| format.name().to_owned()));
    names.extend(Check::ALL.map(|check| check.name().to_owned()));
    names.extend(Phase::ALL.map(|phase| phase.name().to_owned()));
    names.extend(TensorName::RESULTS.map(|tensor| tensor.name().to_owned()));
    names.extend([Sink::None, Sink::OffByOne, Sink::Learnable].map(|sink| named(serde_json::to_value(sink))));
    names
        .extend([Alignment::TopLeft, Alignment::BottomRight].map(|align| named(serde_json::to_value(align))));
    names.extend([Pass::Forward, Pass::Backward].map(|pass| named(serde_json::to_value(pass))));
    names.extend(Algorithm::ALL.map(|algorithm| algorithm.name().to_owned()));
    names.extend(
        [Balance::Contiguous, Balance::DualChunk].map(|balance| named(serde_json::to_value(balance))),
    );
    names.extend(ScaleValues::ALL.map(|values| named(serde_json::to_value(values))));
    let causes = [Cause::Failed, Cause::OutOfMemory, Cause::Garbage, Cause::Digest, Cause::Hang];
    names.extend(causes.map(|cause| named(serde_json::to_value(cause))));
    for name in names {
        assert!(page.contains(&format!("`{name}`")), "{name} is not on the page");
    }
}

#[test]
fn every_bound_is_on_the_page() {
    let page = page();
    let line = |field: &str| {
        let mut lines =
            page.lines().filter(|line| line.starts_with('|') && line.contains(&format!("`{field}`")));
        lines.next().unwrap_or_else(|| panic!("{field} is not on the page"))
    };
    let bounds = [
        ("problem.sequences", format!("at most {SEQUENCES_MAX}")),
        ("problem.rows.q", format!("0 to {ROWS_MAX}")),
        ("problem.pages.size", format!("1 to {PAGE_SIZE_MAX}")),
        ("problem.pages.count", format!("at most {ROWS_MAX} rows")),
        ("problem.heads.q", format!("1 to {HEADS_MAX}")),
        ("problem.dims.qk", format!("1 to {HEAD_DIM_MAX}")),
        ("problem.softmax.scale", format!("to {SCALE_MAX}")),
        ("problem.softmax.softcap", format!("to {SOFTCAP_MAX}")),
        ("problem.precision", format!("1 to {SCALING_BLOCK_MAX}")),
        ("problem.parallel.world", format!("1 to {WORLD_MAX}")),
        ("problem.parallel.balance.striped.stripe", format!("1 to {ROWS_MAX}")),
        ("before", format!("at most {EARLIER_MAX}")),
        ("version", CASE_VERSION.to_string()),
    ];
    for (field, bound) in bounds {
        assert!(line(field).contains(&bound), "{field}: {bound} is not in {}", line(field));
    }
    assert!(page.contains(&format!("at most {} MiB", CASE_BYTES_MAX >> 20)));
}
