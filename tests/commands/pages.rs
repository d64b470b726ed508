//! Pages of planted faults, one of each kind that is easy to make. Each page tells what is wrong in words that the
//! fault's name does not give away.

use std::fs;
use std::path::Path;

use super::look::{PAGE_MAX, elements};
use super::{at_once, code, place, seamproof, stderr, stdout};

/// A fault, the number of cases in which a campaign finds it, and texts on its page.
type Told = (&'static str, &'static str, &'static [&'static str]);

const FAULTS: [Told; 11] = [
    ("window-off-by-one", "60", &["should see", "missing"]),
    (
        "value-rows-shifted",
        "20",
        &["lse is right and out is not", "read the value 1 row later than they should"],
    ),
    ("chunks-swapped", "60", &["holds v of sequence", "are needed"]),
    ("sent-to-the-world-rank", "60", &["a rank sends to itself", "the group’s ranks are"]),
    (
        "idle-rank-leaves-collectives",
        "60",
        &[
            "waits for something that never comes",
            "does not come to its end",
            "1 operation at the right never begins",
        ],
    ),
    ("padded-keys-as-real", "20", &["rows of padding", "holds padding"]),
    ("kv-head-of-neighbour", "60", &["took the keys and values of KV head", "another KV head’s value"]),
    ("kv-read-before-it-arrives", "60", &["a wait is missing", "✕"]),
    ("gradients-not-reduced", "60", &["never gets into the result"]),
    (
        "scale-one-percent-off",
        "20",
        &["The largest logit of each wrong head is about 1.010 times the exact one"],
    ),
    ("lse-of-a-step-in-backward", "60", &["takes lse of a part of the pairs"]),
];

/// Runs a campaign on a subject with a fault, and returns the page that it leaves.
fn page(dir: &Path, fault: &str, cases: &str) -> String {
    let subject = format!("emulated+{fault}");
    let output =
        seamproof(dir, &["run", "--backend", &subject, "--cases", cases, "--seed", "1", "--out", fault]);
    assert!([2, 3].contains(&code(&output)), "{fault}: {}", stderr(&output));
    let path = format!("{fault}/report.html");
    assert!(stdout(&output).contains(&format!("report    {path}\n")), "{}", stdout(&output));
    fs::read_to_string(dir.join(path)).expect("the page is there")
}

#[test]
fn pages_of_faults_tell_what_is_wrong() {
    let place = place();
    at_once(FAULTS, |(fault, cases, texts)| {
        let page = page(place.path(), fault, cases);
        assert!(page.len() < PAGE_MAX, "{fault}: {} bytes", page.len());
        let (_, shown) = elements(&page);
        for text in texts {
            assert!(shown.contains(text), "{fault}: '{text}' is not on its page");
        }
    });
}
