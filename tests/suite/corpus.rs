//! The stored regressions as cases: they can be read, they say why they are kept, and nothing in them is written
//! twice.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use seamproof::prove::{Proved, prove};
use seamproof::replay::replay;
use seamproof_judge::case::{CASE_VERSION, Case, InputSource};
use seamproof_judge::subjects::Emulated;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{Algorithm, Balance};
use seamproof_simulator::schedule::{MergeOrder, MergeStyle, Schedule, Work, build_with};
use serde_json::Value;

/// Number of the last entry of the list of known bugs.
const LAST: u16 = 214;

/// Regressions, with the entries of the list of known bugs that they express.
const SAID: &[(&str, &[u16])] = &[
    ("aotriton-55-fewer-queries-than-keys", &[85]),
    ("cudnn-1083-lse-of-one-query-groups", &[122]),
    ("cudnn-624-slack-poisons-tiles", &[53]),
    ("cudnn-737-offsets-recomputed", &[42]),
    ("diffusers-14316-mask-under-all-to-all", &[104, 119]),
    ("empty-runs-head-middle-tail", &[77]),
    ("fa-1254-empty-queries-then-long", &[76]),
    ("fa-1537-at-most-one-query", &[75]),
    ("fa-2258-hidden-tiles-in-a-row", &[180]),
    ("fa-2301-odd-group-ratio", &[146]),
    ("fa-2421-empty-queries-in-a-batch", &[57, 58]),
    ("fa-2515-all-empty-pack", &[70]),
    ("fa-2515-no-sequences", &[71]),
    ("fa-2665-rows-apart", &[140]),
    ("fa-2745-value-dim-above-key-dim", &[143, 157]),
    ("fa-6998e0ec-keys-right-of-all-queries", &[69]),
    ("fa-9e5e8bc9-more-keys-than-queries", &[84, 86]),
    ("fa-a4f148b6-one-past-a-tile", &[161, 163]),
    ("fa-c65b5106-far-more-queries-than-keys", &[68]),
    ("fa-eeca63a7-head-dim-16", &[159, 160]),
    ("magi-117-no-multiple-of-a-block", &[90]),
    ("magi-17-ranks-of-padding", &[55, 78]),
    ("magi-71-ring-over-a-sub-group", &[99]),
    ("megatron-1a244a5f-bin-not-full", &[31, 37]),
    ("megatron-2574-region-in-a-ring", &[35, 41]),
    ("megatron-bridge-4489-repeated-closing-offsets", &[33]),
    ("no-sequences-rows-of-slack", &[34]),
    ("pytorch-103963-rows-that-see-nothing", &[72]),
    ("pytorch-141429-balanced-without-a-mask", &[95]),
    ("pytorch-186142-longer-than-the-head-dim", &[43]),
    ("ring-flash-attention-42-partial-outs", &[190]),
    ("ring-flash-attention-63b1c31-causal-ring", &[97, 100, 103, 144]),
    ("sglang-30107-more-padding-than-tokens", &[48]),
    ("sglang-32087-oldest-key-of-the-window", &[81]),
    ("sglang-34273-prefill-past-the-window", &[82]),
    ("te-1012-first-offset-and-slack-ring", &[26]),
    ("te-1069-cross-attention-equal-maxima", &[39]),
    ("te-1212-window-one-key-short", &[80]),
    ("te-1282-all-gather-causal", &[96]),
    ("te-1896-value-dim-below-key-dim-ring", &[107]),
    ("te-1930-seven-in-eight-ring", &[24]),
    ("te-2186-last-chunk-all-padding-ring", &[25]),
    ("te-2596-padded-pack-ring", &[5, 8, 51, 94]),
    ("te-2596-wide-forward", &[11, 168]),
    ("te-2692-ids-under-vmap", &[15]),
    ("te-2692-one-side-batched-alone", &[16]),
    ("te-2829-all-gather-pack", &[20]),
    ("te-2829-all-gather-ranks", &[17, 21]),
    ("te-2829-first-offset-and-slack", &[18, 19]),
    ("te-2892-fp8-padded-pack", &[1, 2]),
    ("te-2892-region-padded-pack", &[3, 27, 28]),
    ("te-3063-one-query-long-keys", &[12]),
    ("te-3063-scale-of-a-layer", &[13]),
    ("te-3331-padding-after-the-last-ring", &[23]),
    ("te-3551-learnable-sink-ring", &[108, 192]),
    ("te-716-large-logits-ring", &[117]),
    ("te-docstring-padded-pack", &[4]),
    ("tpu-inference-3241-single-tokens-ring", &[112]),
    ("triton-4541-not-causal", &[87, 88]),
    ("verl-4656-shorter-than-the-ranks", &[38, 79]),
    ("vllm-39148-steps-without-keys", &[64, 65, 66]),
];

/// Further regressions: more packs of the same entries, and what this suite and its peers measure.
const OTHERS: &[&str] = &[
    "accelerate-4177-chunks-all-gather",
    "attention-gym-148-sink-tokens-of-documents",
    "attention-sinks-17-sink-tokens-in-steps",
    "colossalai-6071-two-groups-of-one-world",
    "cudnn-745-deep-logits-in-fp8-backward",
    "cudnn-822-ragged-fp8-backward",
    "cudnn-943-queries-without-keys",
    "dsink-underflow",
    "fa-1713-keys-without-queries",
    "fa-1990-nan-in-padding",
    "fa-2562-empty-queries-head-dim-256",
    "grouped-heads-over-four-tiles",
    "many-heads-of-one",
    "nemo-rl-4008-answers-around-a-ring",
    "nemo-rl-4008-answers-in-a-hierarchy",
    "nemo-rl-4008-answers-in-a-region",
    "nemo-rl-4008-answers-over-an-all-to-all",
    "nemo-rl-4008-answers-over-ranks",
    "ragged32-one-sequence",
    "ring-attention-pytorch-11-wide-stripes-ring",
    "rocm-libraries-6914-sink-tokens",
    "rocm-libraries-6914-sink-tokens-ring",
    "rows-of-packed-heads",
    "sglang-26436-scales-of-heads-all-to-all",
    "share-beside-a-sink-below-f32",
    "shark-1452-chunks-of-ranks-ring",
    "swiss-megatron-40-border-of-a-document",
    "te-1896-value-dim-below-key-dim",
    "te-1930-seven-in-eight",
    "te-2186-last-chunk-all-padding",
    "te-2186-short-sequences",
    "te-2596-padded-all-to-all-full-mask",
    "te-2596-padded-all-to-all-one-head",
    "te-2596-padded-all-to-all-several-heads",
    "te-2596-padded-all-to-all-window",
    "te-2596-padded-pack-ring-full-mask",
    "te-2596-padded-ring-one-head",
    "te-2596-padded-ring-two-sided-window",
    "te-2596-padded-ring-window",
    "te-2596-said-no-padding-ring",
    "te-2596-said-padding-all-to-all",
    "te-2596-said-padding-ring",
    "te-2596-seqused-beside-padded-offsets",
    "te-2692-extra-shapes-that-differ",
    "te-2692-extra-sizes-that-differ",
    "te-2692-ids-dealt-in-stripes",
    "te-2692-lengths-of-a-batch",
    "te-2692-lengths-on-ranks",
    "te-2692-lists-that-differ",
    "te-2692-segments-of-a-pack",
    "te-2829-all-gather-full-mask",
    "te-2829-all-gather-full-mask-without-padding",
    "te-2829-all-gather-pack-two-ranks",
    "te-2829-all-gather-pack-window",
    "te-2829-all-gather-window-128-0",
    "te-2829-all-gather-window-512-0",
    "te-2829-all-gather-window-512-512",
    "te-2829-all-gather-window-without-padding",
    "te-2829-all-gather-without-padding",
    "te-2829-first-offset-and-slack-two-ranks",
    "te-2829-said-padding-all-gather",
    "te-2829-slots-of-unequal-stripes",
    "te-2829-stripes-of-one-in-rising-rows",
    "te-2892-equal-offsets",
    "te-2892-padded-pack-full-mask",
    "te-2892-padded-pack-in-fp8",
    "te-2892-padded-pack-in-fp8-backward",
    "te-2892-padded-pack-in-fp8-region",
    "te-2892-padded-pack-in-fp8-ring",
    "te-3063-batch-without-a-mask",
    "te-3063-cache-in-steps",
    "te-3063-kv-in-sbhd-over-an-all-gather",
    "te-3063-kv-in-sbhd-over-an-all-to-all",
    "te-3063-q-in-sbhd-kv-in-bshd",
    "te-3063-q-in-sbhd-over-a-ring",
    "te-3063-q-in-thd-kv-in-bshd",
    "te-3331-padding-after-the-last-only",
    "te-3331-tail-padding-698",
    "te-3487-said-padding-without-any",
    "te-3551-learnable-sink",
    "te-3551-off-by-one-sink",
    "te-716-large-logits",
    "te-cp-tests-100-271",
    "te-cp-tests-2794-3301-causal",
    "te-cp-tests-2794-3301-window",
    "te-cp-tests-sbhd-ring",
    "te-docstring-padded-pack-full-mask",
    "te-golden-empty-middle",
    "te-golden-four-sequences",
    "transformers-46634-documents-ring",
    "unsloth-zoo-868-answers-to-one-prompt",
    "vllm-42494-pages-of-a-cache",
    "vllm-gaudi-1797-prefix",
    "vllm-gaudi-1797-prefix-all-to-all",
    "vllm-gaudi-1797-prefix-in-strided-rows",
    "vllm-gaudi-1797-prefix-ring",
];

/// Entries that no problem can express, and the reason.
const UNSAID: &[(&str, &[u16])] = &[
    ("rotary angles: a region's rotation is another one, which is exact", &[106, 191]),
    ("labels, rolls and losses outside attention", &[30, 113, 114]),
    (
        "memory, launches and host reads: their growth is of an algorithm, and every case has it",
        &[7, 14, 22, 49, 203, 204, 206],
    ),
    (
        "signatures, options, dispatch and tracing of a framework",
        &[6, 10, 36, 44, 92, 93, 115, 116, 127, 128, 130, 131, 138, 199, 202],
    ),
    ("splits of paged keys, and flags of a library: a problem has neither", &[46, 47, 50, 62, 123, 164, 166]),
    ("caches of metadata and compile keys: a case is one problem", &[194, 195, 196, 197, 198, 200, 201]),
    (
        "custom masks, additive ones, dropout and sparsity: outside the scope",
        &[54, 73, 89, 129, 135, 137, 148, 162, 167, 172, 179],
    ),
    (
        "strides of views, gradients and statistics: tensors are dense or of one step",
        &[59, 102, 132, 133, 142, 145],
    ),
    ("FP8 arithmetic that no subject has", &[139, 188, 193]),
    ("more elements than a case may have", &[149, 150, 152, 153, 155, 156]),
    (
        "orders, lifetimes and tables inside a kernel or its device, at any geometry",
        &[56, 110, 111, 125, 165, 169, 171, 173, 174, 175, 176, 177, 181, 182, 183, 184, 185],
    ),
    ("uneven shards, which must be refused: a regression holds", &[105]),
    ("the cause is not known", &[60, 147, 170, 187]),
    ("of oracles and tests", &[9, 207, 208, 209, 210, 211, 212, 213, 214]),
];

/// Numbers below the last one that the list does not use.
const UNUSED: &[u16] = &[
    29, 32, 40, 45, 52, 61, 63, 67, 74, 83, 91, 98, 101, 109, 118, 120, 121, 124, 126, 134, 136, 141, 151,
    154, 158, 178, 186, 189, 205,
];

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_file_is_a_case_with_its_story() {
    for path in files() {
        let name = path.display();
        let text = fs::read_to_string(&path).unwrap();
        let case: Case = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(case.version, CASE_VERSION, "{name}");
        assert_eq!(case.inputs, InputSource::Generated, "{name}");
        assert_eq!(case.found, None, "{name}: a regression is a case that passes");
        let story = case.story.as_ref().unwrap_or_else(|| panic!("{name} has no story"));
        assert!(story.text.ends_with('.'), "{name}");
        assert!(!story.sources.is_empty(), "{name}");
        for source in &story.sources {
            assert!(source.starts_with("https://github.com/"), "{name}: {source}");
        }
    }
}

/// Test that the reader takes in everything that a file says and that defaults are left out: writing the case gives
/// the same JSON.
#[test]
fn every_file_is_what_its_case_is_written_as() {
    for path in files() {
        let text = fs::read_to_string(&path).unwrap();
        let case: Case = serde_json::from_str(&text).unwrap();
        let written = serde_json::to_string(&case).unwrap();
        let (written, stored): (Value, Value) =
            (serde_json::from_str(&written).unwrap(), serde_json::from_str(&text).unwrap());
        assert_eq!(written, stored, "{}", path.display());
    }
}

#[test]
fn names_are_plain() {
    for path in files() {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let stem = name.strip_suffix(".json").unwrap_or_else(|| panic!("{name} is no JSON file"));
        assert!(stem.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'), "{name}");
    }
}

/// Every regression holds on its subject, which refuses a contradiction, and its schedule is proved.
#[test]
fn every_regression_replays() {
    let files = files();
    assert!(files.len() >= 70, "only {} regressions", files.len());
    files.par_iter().for_each(|path| {
        let name = path.display();
        let case = Case::load(path).unwrap_or_else(|error| panic!("{error}"));
        match replay(&case) {
            Ok(Verdict::Pass(_)) => {}
            Ok(Verdict::Refused(_)) if case.problem.form.is_contradiction() => {}
            verdict => panic!("{name}: {verdict:?}"),
        }
        for &order in MergeOrder::of(case.problem.parallel.algorithm) {
            assert!(matches!(prove(&case.problem, order), Proved::Held(_)), "{name}: not proved");
        }
    });
}

/// Test that a stored case expresses every entry of the list of known bugs, or that there is a reason why none does.
/// Every file has its entries, or is among the others.
#[test]
fn every_entry_of_the_list_is_a_regression_or_has_a_reason() {
    let said = SAID.iter().flat_map(|(_, entries)| *entries);
    let mut entries: Vec<u16> =
        said.chain(UNSAID.iter().flat_map(|(_, entries)| *entries)).copied().collect();
    entries.extend(UNUSED);
    entries.sort_unstable();
    assert_eq!(entries, (1..=LAST).collect::<Vec<_>>(), "each number once");
    assert!(UNSAID.iter().all(|(reason, _)| reason.len() > 10));
    let mut named: Vec<&str> = SAID.iter().map(|(name, _)| *name).chain(OTHERS.iter().copied()).collect();
    named.sort_unstable();
    let stem = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    let mut stems: Vec<String> = files().into_iter().map(stem).collect();
    stems.sort_unstable();
    assert_eq!(named, stems);
}

/// Test that bugs on several ranks are stored as problems of several ranks.
#[test]
fn every_algorithm_is_among_the_regressions() {
    let algorithms: HashSet<_> =
        files().iter().map(|path| Case::load(path).unwrap().problem.parallel.algorithm).collect();
    for algorithm in [Algorithm::Single, Algorithm::Ring, Algorithm::AllGather, Algorithm::AllToAll] {
        assert!(algorithms.contains(&algorithm), "{algorithm:?}");
    }
}

/// Returns the schedule that the replay of a case on the emulated kernel runs.
fn schedule(case: &Case) -> Schedule {
    let kernel = Emulated::from_options(&case.subject.options).expect("options of the emulated kernel");
    build_with(&case.problem, kernel.merge).expect("a schedule")
}

/// Test that an all-gather is replayed as TransformerEngine runs it: every rank attends in steps, and copies the valid
/// rows of each. Stripes of 1 are one step.
#[test]
fn the_cases_of_an_all_gather_run_in_steps() {
    let mut seen = 0;
    for path in files() {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let case = Case::load(&path).unwrap();
        let parallel = &case.problem.parallel;
        if !name.starts_with("te-2829-") || parallel.algorithm != Algorithm::AllGather {
            continue;
        }
        let least = if parallel.balance == (Balance::Striped { stripe: 1 }) { 1 } else { 2 };
        for program in schedule(&case).ranks {
            let forward = &program.operations[..program.backward.unwrap_or(program.operations.len())];
            let count =
                |is: fn(&Work) -> bool| forward.iter().filter(|operation| is(&operation.work)).count();
            let launches = count(|work| matches!(work, Work::Attend(_)));
            let copies = count(|work| matches!(work, Work::CopyValid { .. }));
            assert!(launches >= least && copies == launches, "{name}: {launches} launches, {copies} copies");
        }
        seen += 1;
    }
    assert!(seen >= 8, "{seen} cases");
}

/// Test that a ring is replayed as TransformerEngine runs it: outs of the steps are added up behind the last launch.
#[test]
fn the_cases_of_a_padded_ring_correct_after_the_last_step() {
    let mut seen = 0;
    for path in files() {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let case = Case::load(&path).unwrap();
        if !name.starts_with("te-2596-") || case.problem.parallel.algorithm != Algorithm::Ring {
            continue;
        }
        for program in schedule(&case).ranks {
            let last =
                program.operations.iter().rposition(|operation| matches!(operation.work, Work::Attend(_)));
            let merges: Vec<(usize, MergeStyle)> = program
                .operations
                .iter()
                .enumerate()
                .filter_map(|(at, operation)| match &operation.work {
                    Work::Merge(merge) => Some((at, merge.style)),
                    _ => None,
                })
                .collect();
            let behind =
                |&(at, style): &(usize, MergeStyle)| style == MergeStyle::Statistics || Some(at) > last;
            assert!(!merges.is_empty() && merges.iter().all(behind), "{name}: {last:?} {merges:?}");
        }
        seen += 1;
    }
    assert!(seen >= 7, "{seen} cases");
}

/// Test of the seeds. A fuzzer that cannot read its seeds begins with nothing, and does not say so.
#[test]
fn every_seed_of_case_value_is_a_value_and_seeds_are_few() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/fuzz");
    let (mut values, mut bytes) = (0, 0);
    for target in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        for seed in fs::read_dir(target.path()).unwrap().map(|entry| entry.unwrap()) {
            let text = fs::read(seed.path()).unwrap();
            bytes += text.len();
            if target.file_name() == "case_value" {
                assert!(seamproof::fuzz::from_bytes(&text).is_some(), "{}", seed.path().display());
                values += 1;
            }
        }
    }
    assert!(values > 100 && bytes < 2 << 20, "{values} values, {bytes} bytes in all");
}

/// Stored cases, each with a fault that it must show.
const SHOWN: &[(&str, &str)] = &[
    ("te-2596-padded-all-to-all-one-head", "offsets-from-lengths-in-the-backward"),
    ("te-2596-padded-all-to-all-one-head", "query-offsets-from-lengths"),
    ("te-2596-padded-all-to-all-several-heads", "head-blocks-swapped"),
    ("te-2596-padded-all-to-all-window", "window-off-by-one"),
    ("te-2596-padded-pack-ring", "global-offsets-in-the-backward"),
    ("te-2596-padded-pack-ring", "offsets-from-lengths-in-the-backward"),
    ("te-2596-padded-pack-ring", "one-call-without-padded-offsets"),
    ("te-2596-padded-ring-one-head", "global-offsets-on-a-shard"),
    ("te-2596-said-padding-all-to-all", "said-padding-dropped"),
    ("te-2596-said-padding-ring", "said-padding-dropped"),
    ("te-2829-all-gather-pack-two-ranks", "table-of-floored-lengths"),
    ("te-2829-all-gather-pack-two-ranks", "table-of-the-other-step"),
    ("te-2829-all-gather-window-512-0", "window-off-by-one"),
    ("te-2829-all-gather-window-512-512", "right-bound-one-short"),
    ("te-2829-first-offset-and-slack-two-ranks", "first-offset-taken-for-zero"),
    ("te-2829-first-offset-and-slack-two-ranks", "rows-before-the-first-offset"),
    ("te-2829-said-padding-all-gather", "said-padding-dropped"),
    ("te-2892-fp8-padded-pack", "padded-offsets-in-both-roles"),
    ("te-docstring-padded-pack", "offsets-from-lengths"),
    ("te-docstring-padded-pack", "query-offsets-from-lengths"),
];

/// Test that a case shows the fault of its report, and not only some drawn problem.
#[test]
fn a_stored_case_shows_the_fault_of_its_report() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions");
    SHOWN.par_iter().for_each(|(name, fault)| {
        let mut case = Case::load(&folder.join(format!("{name}.json"))).expect("it is stored");
        case.subject.name = format!("emulated+{fault}");
        let verdict = replay(&case).expect("the case runs");
        assert!(matches!(verdict, Verdict::Finding(_)), "{name}, {fault}: {verdict:?}");
    });
}

/// Test of a stored case with rows that see no key, on a kernel with a window one key too narrow or too wide. The
/// text of the finding says what such a row saw, not which one key would explain it best.
#[test]
fn rows_without_keys_are_told_from_rows_with_another_key() {
    let mut stored = files().into_iter();
    let path = stored
        .find(|path| path.ends_with("pytorch-103963-rows-that-see-nothing.json"))
        .expect("it is stored");
    let mut case = Case::load(&path).expect("a case");
    let mut told = |subject: &str| {
        case.subject.name = subject.to_owned();
        match replay(&case).expect("the case runs") {
            Verdict::Finding(finding) => finding.what,
            other => panic!("{subject}: {other:?}"),
        }
    };
    let narrow = told("emulated+window-off-by-one");
    assert!(
        narrow.ends_with("looks as if query 4 of sequence 0 saw no key, should see keys 3..4"),
        "{narrow}"
    );
    let wide = told("emulated+window-one-too-wide");
    assert!(wide.ends_with("looks as if query 5 of sequence 0 saw hidden key 3 (weight 1.0e0)"), "{wide}");
}
