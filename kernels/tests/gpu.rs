//! Needs a Hopper GPU, a driver and NVRTC; fails without them. `cargo test --release -p seamproof-kernels -- --ignored`

use seamproof_kernels::cache::{Cache, Origin};
use seamproof_kernels::check::check;
use seamproof_kernels::source::sources;
use seamproof_kernels::{Gpu, KernelError};

/// Cases of the comparison, and the least that each operation must get to write.
const CASES: u64 = 6800;
const WRITING_CASES_MIN: u64 = 200;

#[test]
#[ignore = "needs a Hopper GPU"]
fn every_kernel_gives_its_twins_bits() {
    let gpu = Gpu::open(0, &Cache::of_user()).unwrap_or_else(|error| panic!("{error}"));
    let outcome = check(&gpu, CASES, 1).unwrap_or_else(|error| panic!("{error}"));
    assert!(outcome.mismatches.is_empty(), "{}", outcome.mismatches[0]);
    for tally in outcome.tallies {
        assert!(tally.wrote >= WRITING_CASES_MIN, "too little run: {tally:?}");
    }
}

/// The check itself under test: source edits, each of which a seam shows. A text must be there exactly once.
const FAULTS: [(&str, &str, &str, &str); 6] = [
    (
        "first offset assumed 0",
        "rows.cu",
        "const i64 x = row - offset;",
        "const i64 x = row - (s == 0 ? 0 : offset);",
    ),
    (
        "global offset on a local shard",
        "rows.cu",
        "const i64 base = offset * cut.cp;",
        "const i64 base = offset;",
    ),
    ("missing guard of -inf", "merge.cu", "if (largest == neg_infinity()) return largest;", ""),
    (
        "last sequence skipped",
        "merge.cu",
        "return {found.row, part.compact",
        "if (found.slot + 1 == part.slots.count) return {-1, -1};\n    return {found.row, part.compact",
    ),
    (
        "a store past the end",
        "rows.cu",
        "if (first + i < slots.rows) mask[first + i] = bytes[i];",
        "if (first + i <= slots.rows) mask[first + i] = bytes[i];",
    ),
    (
        "lengths taken for spans",
        "common.cuh",
        "chunk = __ldg(slots.span + s) >> 1;",
        "chunk = __ldg(slots.len + s) >> 1;",
    ),
];

#[test]
#[ignore = "needs a Hopper GPU"]
fn a_planted_fault_is_seen() {
    for (fault, file, from, to) in FAULTS {
        let gpu = Gpu::with_sources(0, &Cache::of_user(), &edited(file, from, to));
        let gpu = gpu.unwrap_or_else(|error| panic!("{fault}: {error}"));
        let outcome = check(&gpu, 680, 2).unwrap_or_else(|error| panic!("{fault}: {error}"));
        assert!(!outcome.mismatches.is_empty(), "{fault} was not seen");
    }
}

/// All sources, one of them with a text replaced; the header is put into each, so that it can be edited too.
fn edited(file: &str, from: &str, to: &str) -> Vec<seamproof_kernels::source::Source> {
    let (header_name, header) = seamproof_kernels::source::HEADER;
    let edit = |name: &str, text: &str| {
        if name != file {
            return text.to_owned();
        }
        assert_eq!(text.matches(from).count(), 1, "{from} in {name}");
        text.replace(from, to)
    };
    let header = edit(header_name, header).replace("#pragma once", "");
    let mut sources = sources();
    for source in &mut sources {
        source.text = edit(source.file, &source.text).replace("#include \"common.cuh\"", &header);
    }
    sources
}

/// The texts that faults replace are there, with or without a GPU.
#[test]
fn every_fault_edits_a_source() {
    for (_, file, from, to) in FAULTS {
        assert_ne!(edited(file, from, to), edited("none", "", ""));
    }
}

/// Needs NVRTC only. Two processes or threads that compile one source at once both get whole machine code, a truncated
/// entry is compiled again, and an entry is found without compiling.
#[test]
#[ignore = "needs NVRTC"]
fn a_cache_survives_company_and_damage() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let source = &sources()[2];
    std::thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(|| cache.get(source).unwrap().0));
        let [a, b] = both.map(|thread| thread.join().unwrap());
        assert_eq!(a.cubin, b.cubin);
    });
    let entry = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let whole = std::fs::read(&entry).unwrap();
    std::fs::write(&entry, &whole[..whole.len() / 2]).unwrap();
    assert_eq!(cache.get(source).unwrap().1, Origin::Compiled);
    assert_eq!(cache.get(source).unwrap().1, Origin::Cache);
    assert!(
        matches!(Cache::at(&entry).get(source), Ok((_, Origin::Compiled))),
        "a folder that cannot be written"
    );
    let mut broken = source.clone();
    broken.text.push_str("\nint broken = missing;\n");
    assert!(
        matches!(cache.get(&broken), Err(KernelError::Compile { log, .. }) if log.contains("metadata.cu("))
    );
}
