//! Cases as files, and what was found as one line.

use std::collections::BTreeMap;

use seamproof_judge::case::{Case, ERROR_TEXT_MAX, Found, ParseError, Subject};
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::oracle::{Heads, Mask, Problem, ProblemFields, Softmax};

fn case() -> Case {
    let problem = Problem::new(ProblemFields {
        heads: Heads { q: 2, kv: 1 },
        mask: Mask::CAUSAL,
        softmax: Softmax::scaled(0.353_553_4),
        data_seed: u64::MAX,
        ..ProblemFields::padded(&[(3, 4)], 8)
    });
    let subject = Subject { name: "emulated".to_owned(), options: BTreeMap::new() };
    Case::new(subject, 7, problem.expect("the fields are legal"))
}

/// Returns the case's JSON with one text replaced by another.
fn edited(from: &str, to: &str) -> String {
    let text = case().to_json();
    assert!(text.contains(from), "{from} is not in {text}");
    text.replacen(from, to, 1)
}

fn error(text: &str) -> String {
    Case::parse(text.as_bytes()).expect_err("the text is no case").to_string()
}

#[test]
fn a_case_is_written_and_read_back() {
    let case = case();
    assert_eq!(Case::parse(case.to_json().as_bytes()), Ok(case.clone()));
    assert_eq!(case.to_json(), case.clone().to_json());
    assert_eq!(case.id().len(), 8);
}

#[test]
fn a_later_version_says_so_whatever_else_is_in_the_file() {
    assert_eq!(
        Case::parse(br#"{"problem": 7, "version": 2, "news": []}"#),
        Err(ParseError::Version { got: 2 })
    );
    assert!(matches!(Case::parse(b"{}"), Err(ParseError::NotACase { .. })));
}

#[test]
fn errors_name_the_field() {
    assert!(error(&edited("\"len\": 3", "\"len\": -3")).starts_with("problem.sequences[0].q.len: "));
    assert!(error(&edited("\"len\": 3", "\"len\": 1e999")).contains("number out of range"));
    assert!(error(&edited("\"len\": 3", "\"len\": 5")).contains("sequences[0].q: len 5 is more than span 4"));
    assert!(error(&edited("\"offset\": 0", "\"offset\": 18446744073709551615")).contains("reaches past"));
    assert!(error(&edited("\"kv\": 1", "\"kv\": 0")).contains("heads.kv is 0"));
    assert!(error(&edited("\"schedule_seed\"", "\"shedule_seed\"")).contains("`shedule_seed`"));
    assert!(error(&edited("bf16", "bf17")).starts_with("problem.precision.q: "));
}

#[test]
fn what_was_found_is_one_line_that_says_nothing_twice() {
    let line = |what: &str, before: &str| {
        let finding = Finding::new(Check::Envelope, None, what.to_owned());
        Found { unshrunk: Some(before.to_owned()), ..Found::drawn(finding) }.to_string()
    };
    assert_eq!(line("off", "off: missed key 227"), "envelope: off; before shrinking: missed key 227");
    assert_eq!(line("off: saw none", "off: saw one"), "envelope: off: saw none; before shrinking: saw one");
    let at_a_place = line("query 0: saw none", "query 0: saw one");
    assert_eq!(at_a_place, "envelope: query 0: saw none; before shrinking: query 0: saw one");
    assert_eq!(line("off: saw none", "off"), "envelope: off: saw none; before shrinking: off");
    assert_eq!(line("off", "offset: 3"), "envelope: off; before shrinking: offset: 3");
    assert_eq!(line("a\nFAIL b", "c\r\nFAIL d"), "envelope: a FAIL b; before shrinking: c  FAIL d");
    assert_eq!(line("", ""), "envelope: ; before shrinking: ");
}

#[test]
fn what_is_no_case_is_an_error_of_one_short_line() {
    let text = case().to_json();
    for length in 0..text.len() - 1 {
        if Case::parse(&text.as_bytes()[..length]).is_ok() {
            assert_eq!(text[length..].trim(), "", "a truncated case was read");
        }
    }
    assert!(matches!(Case::parse(b"\xff\xfe"), Err(ParseError::NotText { at: 0 })));
    let deep = format!("{{\"version\": 1, \"story\": {}", "[".repeat(1 << 20));
    let name = "x\n".repeat(1 << 20).replace('\n', "\\n");
    for bad in
        [deep.clone(), edited("\"len\": 3", &deep), edited("\"schedule_seed\"", &format!("\"{name}\""))]
    {
        let error = error(&bad);
        assert!(error.len() < 3 * ERROR_TEXT_MAX, "{}", error.len());
        assert!(!error.contains('\n'));
    }
    assert!(error(&format!("{text} x")).contains("trailing characters"));
}
