//! The reference kernels, halves of statistics, sequences from segment ids, tables of segments, conversions between
//! layouts, the operations of sequence-parallel regions, the quantiser with its turned copies, and the simple kernels on
//! calls with prefixes and sink tokens, run on a CPU thread by thread and held to plain loops (`kernels_reference/`), and
//! the simple forward in pages held to that in rows. So they are seen to be right without a GPU: `cargo test --test
//! kernels_reference -- --ignored`.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output};

use seamproof_kernels::attend::CallTables;
use seamproof_lab::faults::{Detector, SourceFault, source_faults};
use seamproof_oracle::{Run, Sink, Softmax};
use seamproof_simulator::{AttentionCall, RowPolicy, Segment};

const SOURCE: &str = include_str!("../cuda/reference.cu");
const ATTEND: &str = include_str!("../../cuda/attend.cu");
const CODES: &str = include_str!("../../cuda/codes.cuh");
const COMMON: &str = include_str!("../../cuda/common.cuh");
const GROUPED: &str = include_str!("../../cuda/quantise.cuh");
const MERGE: &str = include_str!("../../cuda/merge.cu");
const METADATA: &str = include_str!("../../cuda/metadata.cu");
const QUANTISE: &str = include_str!("../../cuda/quantise.cu");
const ROTATION: &str = include_str!("../../cuda/rotation.cu");
const ROWS: &str = include_str!("../../cuda/rows.cu");
const TURNED: &str = include_str!("../../cuda/turned.cu");

/// The test program holds everything that the checks are compiled from, so that it runs without a checkout.
const CHECKS: [(&str, &str); 16] = [
    ("attend.h", include_str!("kernels_reference/attend.h")),
    ("bands.cpp", include_str!("kernels_reference/bands.cpp")),
    ("check.cpp", include_str!("kernels_reference/check.cpp")),
    ("codes.h", include_str!("kernels_reference/codes.h")),
    ("conversions.cpp", include_str!("kernels_reference/conversions.cpp")),
    ("halves.cpp", include_str!("kernels_reference/halves.cpp")),
    ("narrow.cpp", include_str!("kernels_reference/narrow.cpp")),
    ("pages.cpp", include_str!("kernels_reference/pages.cpp")),
    ("packs.h", include_str!("kernels_reference/packs.h")),
    ("quantise.cpp", include_str!("kernels_reference/quantise.cpp")),
    ("regions.cpp", include_str!("kernels_reference/regions.cpp")),
    ("rooms.h", include_str!("kernels_reference/rooms.h")),
    ("segments.cpp", include_str!("kernels_reference/segments.cpp")),
    ("tables.cpp", include_str!("kernels_reference/tables.cpp")),
    ("threads.h", include_str!("kernels_reference/threads.h")),
    ("turned.cpp", include_str!("kernels_reference/turned.cpp")),
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
        // The C library's check would take a jump to another thread's stack for a mistake.
        .args(["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE"])
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

/// The number of calls with prefixes and sink tokens.
const CALLS: u64 = 36;

/// Numbers that follow from a seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }
}

/// Returns a call with prefixes and sink tokens in some of its segments, and the rows of its tensors.
fn widened(seed: u64) -> (AttentionCall, [usize; 2]) {
    let mut numbers = Numbers(seed);
    let mut rows = [numbers.below(3), numbers.below(3)];
    let mut segments = Vec::new();
    for _ in 0..1 + numbers.below(3) {
        let mut run = |side: usize, len: usize, padding: usize| {
            let first = rows[side] + padding % 2;
            rows[side] = first + len + padding;
            Run::packed(first, len, len + padding)
        };
        let lens: Vec<usize> = (0..3).map(|_| [0, 1, 4, 9, 33, 40][numbers.below(6)]).collect();
        let q = run(0, lens[0], numbers.below(3));
        let kv = vec![run(1, lens[1], numbers.below(3)), run(1, lens[2], numbers.below(2))];
        let near = |numbers: &mut Numbers| numbers.below(30) as i64 - 15;
        let lo = (numbers.below(3) > 0).then(|| near(&mut numbers) + 4);
        let hi = (numbers.below(6) > 0).then(|| near(&mut numbers));
        let prefix = if numbers.below(4) > 0 { numbers.below(44) } else { 0 };
        let sink_tokens = if lo.is_some() { [0, 1, 2, 5, 33][numbers.below(5)] } else { 0 };
        segments.push(Segment { q, kv, lo, hi, prefix, sink_tokens });
    }
    let softmax = Softmax { scale: 0.5, softcap: None, sink: Sink::None };
    let call = AttentionCall { segments, softmax, policy: RowPolicy::Overwrite };
    (call, rows.map(|rows| rows + 1))
}

/// Returns what each row of a tensor holds: 0 for nothing, 1 for a token, 2 for padding.
fn kinds(rows: usize, runs: impl Iterator<Item = Run>) -> Vec<u8> {
    let mut kinds = vec![0; rows];
    for run in runs {
        run.real_rows().for_each(|row| kinds[row] = 1);
        run.padding_rows().for_each(|row| kinds[row] = 2);
    }
    kinds
}

/// Returns what the kernels of attention calls have in common.
fn of_calls() -> String {
    let search = part(COMMON, "template <class Value>", "constexpr u32 ALL_LANES");
    let numbers = part(
        COMMON,
        "__device__ __forceinline__ float two_to",
        "__device__ __forceinline__ float rounded_to",
    );
    let tables = &COMMON[COMMON.find("// The tables of an attention call.").expect("the tables of a call")..];
    [search, numbers, tables].concat()
}

/// Returns the pairs of a query row and a key row that a call shows.
fn pairs_of(call: &AttentionCall) -> Vec<[usize; 2]> {
    let of = |segment: &Segment| {
        let keys: Vec<usize> = segment.kv.iter().flat_map(Run::real_rows).collect();
        let rows = segment.q.real_rows().enumerate();
        rows.flat_map(|(i, row)| segment.visible(i).map(|key| [row, keys[key]]).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    call.segments.iter().flat_map(of).collect()
}

/// Returns calls as C++. `told` makes the calls that the tables are of; the pairs are those of the drawn ones.
fn cases(told: fn(AttentionCall) -> AttentionCall) -> String {
    let mut text = "const std::vector<Case> CASES = {\n".to_owned();
    for seed in 0..CALLS {
        let (call, rows) = widened(seed);
        let (q, kv) = (
            kinds(rows[0], call.segments.iter().map(|segment| segment.q)),
            kinds(rows[1], call.segments.iter().flat_map(|segment| segment.kv.iter().copied())),
        );
        let pairs = pairs_of(&call);
        let call = told(call);
        let tables = CallTables::new(&call, rows, true).unwrap();
        let bands: usize = call.segments.iter().map(|segment| segment.bands_of_keys().len()).sum();
        let bands = if tables.has_bands_of_keys() { bands } else { 0 };
        let words = tables.bytes().chunks_exact(8).map(|word| i64::from_le_bytes(word.try_into().unwrap()));
        let ([segments, runs], [q_owned, kv_owned]) = (tables.counts(), tables.owned());
        let numbers = |numbers: Vec<String>| format!("{{{}}}", numbers.join(", "));
        let [q, kv] = [q, kv].map(|kinds| numbers(kinds.iter().map(u8::to_string).collect()));
        let words = numbers(words.map(|word| word.to_string()).collect());
        let pairs = numbers(pairs.iter().map(|[q, k]| format!("{{{q}, {k}}}")).collect());
        writeln!(
            text,
            "{{{segments}, {bands}, {runs}, {q_owned}, {kv_owned}, {words}, {q}, {kv}, {pairs}}},"
        )
        .unwrap();
    }
    text + "};\n"
}

/// Test that the simple kernels give what sink tokens show, and a prefix, from the bands that it is cut into, and that
/// wrong bands are seen: those planted in the kernels on a GPU, a prefix that is cut one row off or that the keys do not
/// know, and one sink token too few.
#[test]
#[ignore = "needs a C++ compiler"]
fn a_prefix_as_two_bands_and_sink_tokens_are_right_thread_by_thread() {
    let calls = |what: fn(&Segment) -> bool| {
        (0..CALLS).filter(|&seed| widened(seed).0.segments.iter().any(what)).count()
    };
    let count = calls(Segment::is_widened);
    assert!(count > 12, "{count} calls whose prefix shows a key");
    let count = calls(|segment| (0..segment.q.len).any(|i| !segment.visible(i).gap().is_empty()));
    assert!(count > 8, "{count} calls whose sink tokens lie apart from a window");
    let source = &ATTEND[ATTEND.find("constexpr u32 FULL").expect("the kernels")..];
    let common = of_calls();
    let with = |cases: &str, source: &str| {
        run("bands.cpp", &[("common.cuh", &common), ("source.cu", source), ("cases.h", cases)])
    };
    let right = cases(|call| call);
    let of_bands = [
        "bands-of-keys-by-the-last-of-queries",
        "first-key-of-a-run-forgotten",
        "tiles-from-the-window-on",
        "sink-tokens-of-a-window-twice",
        "keys-without-sink-tokens",
    ];
    let values = |fault: &SourceFault| fault.id.starts_with("queries-") || of_bands.contains(&fault.id);
    sees_each(source, |source| with(&right, source), source_faults().filter(|fault| values(fault)), 7);

    let wrong: [fn(AttentionCall) -> AttentionCall; 4] = [
        |call| AttentionCall {
            segments: call.segments.into_iter().map(|segment| Segment { prefix: 0, ..segment }).collect(),
            ..call
        },
        |mut call| {
            call.segments.iter_mut().for_each(|segment| segment.prefix = segment.prefix.saturating_sub(1));
            call
        },
        |mut call| {
            call.segments.iter_mut().for_each(|segment| segment.prefix += usize::from(segment.prefix > 0));
            call
        },
        |mut call| {
            let fewer = |segment: &mut Segment| segment.sink_tokens = segment.sink_tokens.saturating_sub(1);
            call.segments.iter_mut().for_each(fewer);
            call
        },
    ];
    for (index, wrong) in wrong.into_iter().enumerate() {
        assert_eq!(with(&cases(wrong), source).status.code(), Some(1), "wrong call {index}: not seen");
    }
}

/// Test that keys which are found through a block table are those of the same rows, and that the faults that are
/// planted in the table's reader on a GPU are seen here too.
#[test]
#[ignore = "needs a C++ compiler"]
fn a_forward_in_pages_has_the_bits_of_rows_thread_by_thread() {
    let source = part(ATTEND, "constexpr u32 FULL", "// <dout, out> of a row, the sum serial.");
    let common = of_calls();
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
    const SEEN: [&str; 9] = [
        "local-offset-of-gathered-keys",
        "second-chunk-of-the-first-rank",
        "ring-pieces-exchanged",
        "ring-keys-of-the-own-rank",
        "members-of-a-ring-in-turn",
        "edge-on-the-own-stripe",
        "edge-without-the-other-bound",
        "band-beside-the-edge",
        "band-of-residues-unscaled",
    ];
    let slots = part(COMMON, "struct Slots {", "constexpr u32 ALL_LANES");
    let pieces = part(
        METADATA,
        "__device__ __forceinline__ i64 real_of",
        "extern \"C\" __global__ void __launch_bounds__(SCAN_THREADS) rank_slots(",
    );
    let segments = part(METADATA, "// What a launch of a step receives", "// The bound that stands");
    let residues =
        part(METADATA, "// All-gather, backward, of stripes of 1", "// Segment ids and positions → runs.");
    let source = [pieces, segments, residues].concat();
    let run = |source: &str| run("tables.cpp", &[("slots.cuh", slots), ("source.cu", source)]);
    sees_each(&source, run, source_faults().filter(|fault| SEEN.contains(&fault.id)), SEEN.len());
}

/// Returns what kernels of codes have in common, and their source from `begin`.
fn of_codes(source: &str, begin: &str) -> String {
    let by_format = |name: &str| format!("template <int FORMAT>\n__device__ __forceinline__ {name}");
    let by_vector = |name: &str| format!("template <int FORMAT, int N>\n__device__ __forceinline__ {name}");
    let own = &source[source.find(begin).expect("the kernels")..];
    [
        part(COMMON, "constexpr u32 ALL_LANES", "// A slot;"),
        part(COMMON, &by_format("float decode("), &by_format("u16 encode(")),
        part(COMMON, "// N consecutive elements", "// 16 bytes, asked for"),
        part(COMMON, &by_vector("void load("), "// EACH words"),
        part(COMMON, &by_vector("float unpacked("), &by_vector("void store(")),
        &CODES[CODES.find("// Four codes, the first in the lowest byte").expect("codes")..],
        GROUPED,
        own,
    ]
    .concat()
}

/// Test that magnitudes, factors and codes are those of the definition, and that the faults that are planted in them on a
/// GPU are seen here too.
#[test]
#[ignore = "needs a C++ compiler"]
fn the_quantiser_is_right_thread_by_thread() {
    let source = of_codes(QUANTISE, "constexpr u32 IN_FLIGHT");
    let run = |source: &str| run("quantise.cpp", &[("source.cu", source)]);
    let faults = source_faults().filter(|fault| fault.edit.file == "quantise.cu");
    sees_each(&source, run, faults, 15);
}

/// Test that turned copies have the codes of the definition in the order of tensor cores, and that the faults that are
/// planted in them on a GPU are seen here too: a barrier that is left out as well, since late warps are late here.
#[test]
#[ignore = "needs a C++ compiler"]
fn turned_copies_are_right_thread_by_thread() {
    let source = of_codes(TURNED, "constexpr u32 ROWS");
    let run = |source: &str| run("turned.cpp", &[("source.cu", source)]);
    let faults = source_faults().filter(|fault| fault.edit.file == "turned.cu");
    sees_each(&source, run, faults, 4);
}
