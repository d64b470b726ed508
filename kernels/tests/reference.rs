//! The reference kernels on a CPU, thread by thread, held to plain loops (`reference/`): that they are right can be seen
//! without a GPU. `cargo test -p seamproof-kernels --test reference -- --ignored`

use std::path::Path;
use std::process::{Command, Output};

const SOURCE: &str = include_str!("../cuda/reference.cu");
const COMMON: &str = include_str!("../cuda/common.cuh");

/// Faults of the count of alike weights, as edits of the source.
const FAULTS: [[&str; 2]; 3] = [
    ["if (atomicOr(word, bit) & bit) atomicOr(word + 1, bit);", "atomicOr(word, bit);"],
    ["int pass = blockIdx.y == 0 ? 0 : 1;", "int pass = 1;"],
    // Weights know of those before them alone: the first of a slot's, which may be its heaviest, counts as alone.
    [
        "if (counts && pass == 0) take(o.p + place, slots);",
        "if (counts && pass == 1) take(o.p + place, slots);",
    ],
];

/// The text from `begin` to `end`.
fn part<'a>(text: &'a str, begin: &str, end: &str) -> &'a str {
    let from = text.find(begin).unwrap_or_else(|| panic!("no {begin:?}"));
    let len = text[from..].find(end).unwrap_or_else(|| panic!("no {end:?}"));
    &text[from..from + len]
}

fn run(source: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference");
    let source = source.replace("#include \"common.cuh\"", "").replace("extern __shared__", "extern");
    std::fs::write(folder.path().join("source.cu"), source).unwrap();
    let view = part(COMMON, "struct View {", "__device__ __forceinline__ void put(const View");
    std::fs::write(folder.path().join("view.cuh"), view).unwrap();
    let program = folder.path().join("check");
    let compiled = Command::new("c++")
        .args(["-std=c++17", "-O1", "-w", "-I"])
        .args([&here, Path::new("-I"), folder.path(), &here.join("check.cpp"), Path::new("-o"), &program])
        .output()
        .unwrap_or_else(|error| panic!("c++: {error}"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Command::new(program).output().unwrap()
}

#[test]
#[ignore = "needs a C++ compiler"]
fn the_reference_kernels_are_right_thread_by_thread() {
    let right = run(SOURCE);
    assert!(right.status.success(), "{}", String::from_utf8_lossy(&right.stdout));
    for [text, edit] in FAULTS {
        assert_eq!(SOURCE.matches(text).count(), 1, "{text}");
        let wrong = run(&SOURCE.replace(text, edit));
        assert_eq!(wrong.status.code(), Some(1), "{edit}: not seen");
    }
}
