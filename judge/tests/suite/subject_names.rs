//! Names of subjects, read and written.

use seamproof_judge::proptest::prelude::*;
use seamproof_judge::subjects::{SubjectName, listed};

/// Parts of names and of their options.
const PARTS: [&str; 20] = [
    "python:",
    "exec:",
    "dir/kernel.py",
    "emulated",
    "cuda",
    "my kernel",
    "+",
    "~",
    "@worker",
    "@",
    ":",
    "=",
    ",",
    "q_tile",
    "4",
    "window-off-by-one",
    "call-scale-off",
    "~call-scale-off",
    "~call-dk-off",
    "~nothing",
];

/// Parts in any order: names of subjects, and texts that are none.
fn texts() -> impl Strategy<Value = String> {
    seamproof_judge::proptest::collection::vec(seamproof_judge::proptest::sample::select(&PARTS[..]), 0..9)
        .prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn a_name_outside_reads_the_same_once_written(text in texts()) {
        for text in ["python:", "exec:"].map(|prefix| format!("{prefix}{text}")) {
            if let Ok(name) = text.parse::<SubjectName>() {
                prop_assert!(name.is_outside() && name.planted.is_none() && !name.at_worker);
                prop_assert_eq!(name.to_string().parse(), Ok(name));
            }
        }
    }

    #[test]
    fn a_name_is_written_as_it_was_read(text in texts()) {
        prop_assert_eq!(SubjectName::from(text.as_str()).name(), text);
    }

    #[test]
    fn what_was_read_reads_the_same_once_written(text in texts()) {
        if let Ok(name) = text.parse::<SubjectName>() {
            prop_assert_eq!(name.to_string().parse(), Ok(name));
        }
    }
}

#[test]
fn a_subject_outside_has_a_place_options_and_faults_at_its_call() {
    let read = |text: &str| -> (String, Vec<&str>, String) {
        let name: SubjectName = text.parse().expect("a name");
        let ids = name.miscalls.iter().map(|miscall| miscall.id).collect();
        (name.base, ids, listed(&name.options))
    };
    let plain = |base: &str| (base.to_owned(), Vec::new(), String::new());
    let with =
        |base: &str, ids: &[&'static str], list: &str| (base.to_owned(), ids.to_vec(), list.to_owned());
    for base in ["python:k.py", "python:a+b/k@worker.py:x", "python:a=b.py", "exec:env A=b ./w x:y=z,q"] {
        assert_eq!(read(base), plain(base));
        assert_eq!(read(&format!("{base}~call-dk-off")), with(base, &["call-dk-off"], ""));
    }
    assert_eq!(read("python:k.py:tile=64,x=1"), with("python:k.py", &[], "tile=64,x=1"));
    for text in ["python:k.py:f~call-dk-off:tile=64", "python:k.py:f:tile=64~call-dk-off"] {
        assert_eq!(read(text), with("python:k.py:f", &["call-dk-off"], "tile=64"));
    }
    assert!("python:k.py:tile=64,x".parse::<SubjectName>().is_err());
}

#[test]
fn every_part_of_a_name_has_its_place() {
    let text = "emulated+merge-twice@worker~call-dk-off~call-scale-off:kv_tile=8,q_tile=4";
    let name: SubjectName = text.parse().expect("a name");
    let ids: Vec<&str> = name.miscalls.iter().map(|miscall| miscall.id).collect();
    let options = [("kv_tile", "8"), ("q_tile", "4")].map(|(option, value)| (option.into(), value.into()));
    assert_eq!((name.base.as_str(), name.planted.as_deref()), ("emulated", Some("merge-twice")));
    assert_eq!((name.at_worker, ids), (true, vec!["call-dk-off", "call-scale-off"]));
    assert_eq!(name.options, options.into());
    assert_eq!(name.called().name(), "emulated+merge-twice@worker");
    assert_eq!(name.to_string(), text);
    assert_eq!("emulated+merge-twice@worker~call-dk-off:q_tile=4,kv_tile=8~call-scale-off".parse(), Ok(name));
}
