//! The reference kernels, halves of statistics, sequences from segment ids, tables of segments, conversions between
//! layouts and the operations of sequence-parallel regions, run on a CPU thread by thread and held to plain loops
//! (`kernels_reference/`), and the simple forward in pages held to that in rows. So they are seen to be right without a
//! GPU: `cargo test --test kernels_reference -- --ignored`.

use std::path::Path;
use std::process::{Command, Output};

use seamproof_lab::faults::{Detector, SourceFault, source_faults};

const SOURCE: &str = include_str!("../cuda/reference.cu");
const ATTEND: &str = include_str!("../../cuda/attend.cu");
const COMMON: &str = include_str!("../../cuda/common.cuh");
const MERGE: &str = include_str!("../../cuda/merge.cu");
const METADATA: &str = include_str!("../../cuda/metadata.cu");
const ROTATION: &str = include_str!("../../cuda/rotation.cu");
const ROWS: &str = include_str!("../../cuda/rows.cu");

/// The test program holds everything that the checks are compiled from, so that it runs without a checkout.
const CHECKS: [(&str, &str); 10] = [
    ("check.cpp", include_str!("kernels_reference/check.cpp")),
    ("conversions.cpp", include_str!("kernels_reference/conversions.cpp")),
    ("halves.cpp", include_str!("kernels_reference/halves.cpp")),
    ("narrow.cpp", include_str!("kernels_reference/narrow.cpp")),
    ("pages.cpp", include_str!("kernels_reference/pages.cpp")),
    ("packs.h", include_str!("kernels_reference/packs.h")),
    ("regions.cpp", include_str!("kernels_reference/regions.cpp")),
    ("segments.cpp", include_str!("kernels_reference/segments.cpp")),
    ("tables.cpp", include_str!("kernels_reference/tables.cpp")),
    ("threads.h", include_str!("kernels_reference/threads.h")),
];

/// Faults of the count of alike weights, as edits of the source.
const FAULTS: [[&str; 2]; 3] = [
    ["if (atomicOr(word, bit) & bit) atomicOr(word + 1, bit);", "atomicOr(word, bit);"],
    ["int pass = blockIdx.y == 0 ? 0 : 1;", "int pass = 1;"],
    // Weights know only of those before them. The first of a slot's weights, which may be its heaviest, counts as
    // alone.
    [
        "if (counts && pass == 0) take(o.p + place, slots);",
        "if (counts && pass == 1) take(o.p + place, slots);",
    ],
];

/// Faults of the moves of halves. The last two need tables that are wrong.
const FAULTS_OF_HALVES: [[&str; 2]; 6] = [
    ["if (h < count) store_words<EACH>(to,", "store_words<EACH>(to,"],
    ["from += h + 1 < count ? from_rows : 0;", "from += from_rows;"],
    ["rows.at_once &= EACH == 1 || rows.row[0] % 4 == 0;", ""],
    ["if (row >= part.half_rows) return;", ""],
    ["first < part.half_rows && within", "within"],
    ["(u32)found.row <= (u32)part.slots.rows - EACH;", "found.row >= 0;"],
];

/// Returns the text from `begin` to `end`.
fn part<'a>(text: &'a str, begin: &str, end: &str) -> &'a str {
    let from = text.find(begin).unwrap_or_else(|| panic!("no {begin:?}"));
    let len = text[from..].find(end).unwrap_or_else(|| panic!("no {end:?}"));
    &text[from..from + len]
}

/// Asserts that `run` holds the source for right, and sees each of these faults in it, of which there are `least` or more.
fn sees_each(
    source: &str,
    run: impl Fn(&str) -> Output,
    faults: impl Iterator<Item = &'static SourceFault>,
    least: usize,
) {
    let right = run(source);
    assert!(right.status.success(), "{}", String::from_utf8_lossy(&right.stdout));
    let faults: Vec<_> = faults.collect();
    assert!(faults.len() >= least, "{} faults", faults.len());
    for fault in faults {
        let edited = source.replace(fault.edit.find, fault.edit.replace);
        assert_eq!(run(&edited).status.code(), Some(1), "{}: not seen", fault.id);
    }
}

/// Compiles one of [`CHECKS`] beside files of these names and texts, and runs it.
fn run(check: &str, files: &[(&str, &str)]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in CHECKS.iter().chain(files) {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let program = folder.path().join("check");
    let compiled = Command::new("c++")
        .args(["-std=c++17", "-O1", "-w"])
        .args([&folder.path().join(check), Path::new("-o"), &program])
        .output()
        .unwrap_or_else(|error| panic!("c++: {error}"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Command::new(program).output().unwrap()
}

#[test]
#[ignore = "needs a C++ compiler"]
fn the_reference_kernels_are_right_thread_by_thread() {
    let view = part(COMMON, "struct View {", "__device__ __forceinline__ void put(const View");
    let run = |source: &str| {
        let source = source.replace("#include \"common.cuh\"", "").replace("extern __shared__", "extern");
        run("check.cpp", &[("source.cu", &source), ("view.cuh", view)])
    };
    let right = run(SOURCE);
    assert!(right.status.success(), "{}", String::from_utf8_lossy(&right.stdout));
    for [text, edit] in FAULTS {
        assert_eq!(SOURCE.matches(text).count(), 1, "{text}");
        let wrong = run(&SOURCE.replace(text, edit));
        assert_eq!(wrong.status.code(), Some(1), "{edit}: not seen");
    }
}

#[test]
#[ignore = "needs a C++ compiler"]
fn halves_of_statistics_are_right_thread_by_thread() {
    let slots = part(COMMON, "struct Slots {", "__device__ __forceinline__ bool is_real");
    let half_rows = part(COMMON, "struct HalfRow {", "__device__ __forceinline__ HalfRow half_row_of_lane");
    let words = part(
        COMMON,
        "template <int EACH>\n__device__ __forceinline__ void load_words",
        "template <int FORMAT",
    );
    let of_part = part(MERGE, "struct Part {", "struct Pair {");
    let source = part(MERGE, "template <int EACH>\nstruct HalfRows {", "#define HALF_STATISTICS");
    let common = [slots, half_rows, words, of_part].concat();
    let run = |source: &str| run("halves.cpp", &[("slots.cuh", &common), ("source.cu", source)]);
    let right = run(source);
    assert!(right.status.success(), "{}", String::from_utf8_lossy(&right.stdout));
    for [text, edit] in FAULTS_OF_HALVES {
        assert_eq!(source.matches(text).count(), 1, "{text}");
        assert_eq!(run(&source.replace(text, edit)).status.code(), Some(1), "{edit}: not seen");
    }
}

/// Test that the kernels give the sequences of the definition, and that the faults that are planted in them on a GPU
/// are seen here too.
#[test]
#[ignore = "needs a C++ compiler"]
fn sequences_from_segment_ids_are_right_thread_by_thread() {
    let search = part(COMMON, "template <class Value>", "// A slot; index -1");
    let source = &METADATA[METADATA.find("constexpr u32 TILE").expect("the kernels of runs")..];
    let run = |source: &str| run("segments.cpp", &[("search.cuh", search), ("source.cu", source)]);
    let right = run(source);
    assert!(right.status.success(), "{}", String::from_utf8_lossy(&right.stdout));
    let of_sequences = |seen| matches!(seen, Detector::Bits(of) if of.contains(&"segment sequences"));
    let mut seen = 0;
    for fault in source_faults().filter(|fault| of_sequences(fault.edit.seen)) {
        // Here all runs have room.
        let expected = i32::from(fault.id != "a-run-without-room");
        let edited = source.replace(fault.edit.find, fault.edit.replace);
        assert_eq!(run(&edited).status.code(), Some(expected), "{}", fault.id);
        seen += expected;
    }
    assert!(seen >= 8, "{seen} faults");
}

/// Test that conversions give the rows of the definition, and that the faults that are planted in them on a GPU are
/// seen here too.
#[test]
#[ignore = "needs a C++ compiler"]
fn conversions_are_right_thread_by_thread() {
    let slots = part(COMMON, "struct Slots {", "// `count` ones from bit");
    let moves = part(ROWS, "constexpr u32 TILE_ROWS_MAX", "// 2: striped.");
    let conversion = part(ROWS, "// Layouts of a batch", "// The same by the bulk copy engine");
    let source = [moves, conversion].concat();
    let run = |source: &str| run("conversions.cpp", &[("slots.cuh", slots), ("source.cu", source)]);
    let of_conversions = |seen| matches!(seen, Detector::Bits(["convert"]));
    let faults = source_faults().filter(|fault| of_conversions(fault.edit.seen));
    sees_each(&source, run, faults, 4);
}

/// Test that keys which are found through a block table are those of the same rows, and that the faults that are
/// planted in the table's reader on a GPU are seen here too.
#[test]
#[ignore = "needs a C++ compiler"]
fn a_forward_in_pages_has_the_bits_of_rows_thread_by_thread() {
    let search = part(COMMON, "template <class Value>", "constexpr u32 ALL_LANES");
    let numbers = part(
        COMMON,
        "__device__ __forceinline__ float two_to",
        "__device__ __forceinline__ float rounded_to",
    );
    let tables = &COMMON[COMMON.find("// The tables of an attention call.").expect("the tables of a call")..];
    let source = part(ATTEND, "constexpr u32 FULL", "// <dout, out> of a row, the sum serial.");
    let common = [search, numbers, tables].concat();
    let run = |source: &str| run("pages.cpp", &[("common.cuh", &common), ("source.cu", source)]);
    let of_pages = |text: &str| text.contains("table.");
    let faults = source_faults().filter(|fault| fault.edit.file == "attend.cu" && of_pages(fault.edit.find));
    sees_each(source, run, faults, 4);
}

/// Test that tables of 64 bits become the nearest ones of 32, and that the faults that are planted there on a GPU are
/// seen here too.
#[test]
#[ignore = "needs a C++ compiler"]
fn tables_are_narrowed_thread_by_thread() {
    let source = part(METADATA, "struct WideSlots {", "// The sum over the block's threads");
    let run = |source: &str| run("narrow.cpp", &[("source.cu", source)]);
    let of_narrowing = |seen| matches!(seen, Detector::Bits(["narrow tables"]));
    let faults = source_faults().filter(|fault| of_narrowing(fault.edit.seen));
    sees_each(source, run, faults, 3);
}

/// Test that layers and rotations are those of the definition, and that the faults that are planted in them on a GPU
/// are seen here too.
#[test]
#[ignore = "needs a C++ compiler"]
fn regions_are_right_thread_by_thread() {
    let slots = part(COMMON, "struct Slots {", "// `count` ones from bit");
    let moves = part(ROWS, "constexpr u32 TILE_ROWS_MAX", "// 2: striped.");
    let layers = part(ROWS, "// A tensor-parallel linear layer", "// The same by the bulk copy engine");
    let rotation = part(ROTATION, "constexpr u32 TILE_BYTES", "#define ROTATE");
    let rotation = rotation.replace("constexpr u32 IN_FLIGHT = 4;", "");
    let source = [moves, layers, &rotation].concat();
    let run = |source: &str| run("regions.cpp", &[("slots.cuh", slots), ("source.cu", source)]);
    let of_regions = |seen| matches!(seen, Detector::Bits(["layer" | "rotation"]));
    let faults = source_faults().filter(|fault| of_regions(fault.edit.seen));
    sees_each(&source, run, faults, 8);
}

/// Test that tables of a ring's steps and of an all-gather's show the pairs of the mask, position by position, and that
/// the faults that are planted in them on a GPU are seen here too.
#[test]
#[ignore = "needs a C++ compiler"]
fn tables_of_segments_are_right_thread_by_thread() {
    const SEEN: [&str; 4] = [
        "local-offset-of-gathered-keys",
        "second-chunk-of-the-first-rank",
        "ring-pieces-exchanged",
        "ring-keys-of-the-own-rank",
    ];
    let slots = part(COMMON, "struct Slots {", "constexpr u32 ALL_LANES");
    let pieces = part(METADATA, "__device__ __forceinline__ i64 real_of", "// Real rows of a striped slot");
    let segments = part(METADATA, "// What a launch of a step receives", "// The bound that stands");
    let source = [pieces, segments].concat();
    let run = |source: &str| run("tables.cpp", &[("slots.cuh", slots), ("source.cu", source)]);
    sees_each(&source, run, source_faults().filter(|fault| SEEN.contains(&fault.id)), SEEN.len());
}
