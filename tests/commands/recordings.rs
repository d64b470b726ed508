//! Recorded runs: recorded, judged, found, and refused where a file is not what it should be.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::{code, place, refuses, seamproof, stderr, stdout};

const GEOMETRY: [&str; 8] = ["--lengths", "17,0,30", "--padded", "32,16,32", "--heads", "4/2", "--dim", "16"];
const RING: [&str; 2] = ["--cp", "ring:4"];

/// Stores a causal case with padding and an empty sequence, with further options.
fn case(dir: &Path, options: &[&str]) {
    let output =
        seamproof(dir, &[&["try", "--causal", "--out", "case.json"], &GEOMETRY[..], options].concat());
    assert_eq!(code(&output), 0, "{}", stderr(&output));
}

/// Records the case, and returns the directory.
fn record(dir: &Path, options: &[&str]) -> PathBuf {
    let output = seamproof(dir, &[&["record", "case.json", "--out", "run"], options].concat());
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).starts_with("recorded run · "), "{}", stdout(&output));
    dir.join("run")
}

/// Returns what a recording is judged to be: the exit code and what is printed.
pub(super) fn judged(dir: &Path) -> (i32, String) {
    let output = seamproof(dir, &["judge-recording", "run"]);
    (code(&output), stdout(&output) + &stderr(&output))
}

fn manifest(run: &Path) -> Value {
    let text = fs::read_to_string(run.join("recording.json")).expect("the manifest is there");
    serde_json::from_str(&text).expect("the manifest is JSON")
}

fn store(run: &Path, manifest: &Value) {
    fs::write(run.join("recording.json"), manifest.to_string()).expect("the manifest is written");
}

/// Edits the manifest.
fn edit(run: &Path, change: impl FnOnce(&mut Value)) {
    let mut manifest = manifest(run);
    change(&mut manifest);
    store(run, &manifest);
}

/// Edits the tensors and the metadata of a rank file, whose digest is right afterwards.
pub(super) fn edit_rank(
    run: &Path,
    rank: usize,
    change: impl FnOnce(&mut Tensors, &mut HashMap<String, String>),
) {
    let path = run.join(format!("rank-{rank:04}.safetensors"));
    let bytes = fs::read(&path).expect("the rank file is there");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("the rank file is whole");
    let mut metadata = header.metadata().clone().expect("a rank file has metadata");
    let parts = SafeTensors::deserialize(&bytes).expect("the rank file is whole");
    let part = |(name, view): (&str, TensorView<'_>)| {
        (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    let mut tensors: Tensors = parts.iter().map(part).collect();
    change(&mut tensors, &mut metadata);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).expect("the shape fits"))
    });
    seal(run, rank, &safetensors::serialize(views, Some(metadata)).expect("the rank file is made"));
}

/// Tensors by name: their type, shape and bytes.
pub(super) type Tensors = HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Writes a rank file and its digest.
fn seal(run: &Path, rank: usize, bytes: &[u8]) {
    fs::write(run.join(format!("rank-{rank:04}.safetensors")), bytes).expect("the rank file is written");
    let digest = blake2b_simd::Params::new().hash_length(32).hash(bytes).to_hex();
    edit(run, |manifest| manifest["ranks"][rank]["blake2b"] = digest.as_str().into());
}

#[test]
fn a_right_run_holds_on_one_rank_and_on_a_ring_and_a_fault_is_found_on_both() {
    for (options, ranks) in [(&[][..], "1 rank"), (&RING[..], "4 ranks")] {
        let place = place();
        case(place.path(), options);
        let run = record(place.path(), &[]);
        let (exit, said) = judged(place.path());
        assert_eq!(exit, 0, "{said}");
        let lines: Vec<&str> = said.lines().collect();
        assert!(lines[0].starts_with(&format!("subject  emulated · {ranks} · run ")), "{said}");
        assert!(lines[1].starts_with("held     run · margin 0."), "{said}");
        assert!(lines[2].starts_with("asked    ") && lines[2].contains("bounds of every row"), "{said}");
        assert!(lines[3].starts_with("left out ") && lines[3].ends_with("the run is over"), "{said}");
        let output = seamproof(place.path(), &["judge-recording", "run", "--rows", "8"]);
        assert!(code(&output) == 0 && stdout(&output).contains("the drawn rows"), "{}", stdout(&output));
        refuses(place.path(), &["record", "case.json", "--out", "run"], &["run: ", "--out"]);

        fs::remove_dir_all(&run).expect("the recording is removed");
        record(place.path(), &["--backend", "emulated+backward-key-duplicated"]);
        let (exit, said) = judged(place.path());
        assert_eq!(exit, 2, "{said}");
        assert!(said.contains("subject  emulated+backward-key-duplicated"), "{said}");
        assert!(said.contains("FAIL     run · envelope · dv · sequence "), "{said}");
        assert_eq!(said.contains(" holds it, in its row "), ranks == "4 ranks", "{said}");
        let output = seamproof(place.path(), &["judge-recording", "run", "--rows", "8", "--seed", "1"]);
        assert!(
            code(&output) == 2 && stdout(&output).contains("FAIL     run · envelope · d"),
            "{}",
            stdout(&output)
        );
    }
}

/// Test that a NaN in a real row is told as what it is, though every result of the row is NaN as it must be.
#[test]
fn numbers_that_were_not_finite_before_attention_are_no_finding() {
    let place = place();
    case(place.path(), &RING);
    let run = record(place.path(), &[]);
    edit_rank(&run, 1, |tensors, _| {
        let (dtype, shape, bytes) = tensors.get_mut("q").expect("there is a q");
        assert_eq!(*dtype, Dtype::BF16);
        let row = bytes.len() / shape[0];
        bytes.chunks_exact_mut(row).for_each(|row| row[..2].copy_from_slice(&[0xc0, 0x7f]));
    });
    let words = ["rank-0001.safetensors: q: holds NaN in row ", "of sequence ", "before attention"];
    refuses(place.path(), &["judge-recording", "run"], &words);
    refuses(place.path(), &["judge-recording", "run/recording.json"], &["is a file", "name the directory"]);
}

/// Test of a pack in a sequence-parallel region, recorded with hidden rows: it holds, wrong rows and positions are
/// found, and what a recording of a region must not have is refused.
#[test]
fn a_region_is_recorded_with_its_hidden_rows_and_judged() {
    let place = place();
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-2892-region-padded-pack.json");
    fs::copy(stored, place.path().join("case.json")).expect("the case is copied");
    let run = record(place.path(), &["--tables"]);
    let (exit, said) = judged(place.path());
    assert!(exit == 0 && said.contains("placement against the tables"), "{said}");
    let region = manifest(&run)["problem"]["parallel"]["region"].as_u64().expect("a region");
    assert_eq!(manifest(&run)["ranks"].as_array().map(|ranks| ranks.len() as u64), Some(region));
    let output = seamproof(place.path(), &["judge-recording", "run", "--rows", "8"]);
    assert!(code(&output) == 0, "{}", stdout(&output));

    edit(&run, |manifest| manifest["placement"] = "tables".into());
    let (exit, said) = judged(place.path());
    assert!(exit == 1 && said.contains("recording.json: placement: is tables; "), "{said}");
    for fault in ["rotated-twice", "scatter-of-the-neighbours-rows"] {
        fs::remove_dir_all(&run).expect("the recording is removed");
        record(place.path(), &["--backend", &format!("emulated+{fault}")]);
        let (exit, said) = judged(place.path());
        assert!(exit == 2 && said.contains("FAIL     run · "), "{fault}: {said}");
    }
}

/// Test that the problem of a recording runs again as the finding says, and that a fault of its subject shows in it.
#[test]
fn the_problem_of_a_recording_is_a_case_that_runs() {
    let place = place();
    case(place.path(), &RING);
    record(place.path(), &["--backend", "emulated+backward-key-duplicated"]);
    let (exit, said) = judged(place.path());
    let pasted = "live     the same problem with drawn values; --backend names another subject: ";
    assert!(exit == 2 && said.contains(pasted) && said.contains(" try --lengths 17,0,30 "), "{said}");
    let output = seamproof(place.path(), &["judge-recording", "run", "--live", "live.json"]);
    assert!(code(&output) == 2 && stdout(&output).contains(" replay live.json"), "{}", stdout(&output));
    for (backend, exit) in [("emulated", 0), ("emulated+backward-key-duplicated", 2)] {
        let output = seamproof(place.path(), &["replay", "live.json", "--backend", backend]);
        assert_eq!(code(&output), exit, "{backend}: {}", stdout(&output));
    }
}

#[test]
fn the_profile_of_what_ran_is_asked_for_by_name() {
    let place = place();
    let dir = place.path();
    case(dir, &RING);
    let run = record(dir, &[]);
    let judged = |name: &str| seamproof(dir, &["judge-recording", "run", "--profile", name]);
    let held = judged("emulated");
    assert_eq!(code(&held), 0, "{}", stdout(&held));
    assert!(stdout(&held).contains("the roundings of the locked profile"), "{}", stdout(&held));
    for (name, why) in [("unfused", "no profile is locked"), ("nobody", "unknown backend")] {
        let refused = judged(name);
        let is_told = stderr(&refused).starts_with("error: --profile: ") && stderr(&refused).contains(why);
        assert!(code(&refused) == 1 && is_told, "{}", stderr(&refused));
    }
    edit(&run, |manifest| manifest["subject"]["versions"]["seamproof"] = "0.0.1".into());
    let other = judged("emulated");
    assert!(code(&other) == 1 && stderr(&other).contains("made by 0.0.1"), "{}", stderr(&other));
}

#[test]
fn a_sample_says_what_it_leaves_out() {
    let place = place();
    case(place.path(), &[&RING[..], &["--sink", "learnable"]].concat());
    let run = record(place.path(), &[]);
    let left_out = |options: &[&str]| {
        let output = seamproof(place.path(), &[&["judge-recording", "run"], options].concat());
        assert_eq!(code(&output), 0, "{}", stdout(&output));
        stdout(&output)
            .lines()
            .find_map(|line| line.strip_prefix("left out ").map(str::to_owned))
            .expect("a line")
    };
    let rows = ["--rows", "4"];
    let (all, of_rows) = (left_out(&[]), left_out(&rows));
    assert!(all.ends_with("the run is over"), "{all}");
    let further = of_rows.strip_prefix(&*all);
    assert_eq!(further, Some("; the bounds of all other rows; max_logit: it is that of all rows"));
    (0..4).for_each(|rank| edit_rank(&run, rank, |tensors, _| drop(tensors.remove("lse"))));
    assert_eq!(left_out(&[]), all);
    assert_eq!(left_out(&rows), of_rows + "; dk, dv and dsink: no LSE was recorded");
}

#[test]
fn a_sample_judges_dk_where_nobody_knows_what_d_was_made_of() {
    let place = place();
    case(place.path(), &RING);
    let run = record(place.path(), &["--backend", "emulated~call-dk-doubled"]);
    edit(&run, |manifest| {
        let arithmetic = manifest["arithmetic"].as_object_mut().expect("an object");
        assert!(arithmetic.remove("delta").is_some());
    });
    let output = seamproof(place.path(), &["judge-recording", "run", "--rows", "4"]);
    let said = stdout(&output);
    assert!(code(&output) == 2 && said.contains("FAIL     run · envelope · dk · "), "{said}");
}

#[test]
fn tables_place_the_rows_and_contradict_the_rule() {
    let place = place();
    case(place.path(), &RING);
    let run = record(place.path(), &["--tables"]);
    let said = judged(place.path());
    assert!(said.0 == 0 && said.1.contains("placement against the tables"), "{said:?}");
    edit(&run, |manifest| manifest["placement"] = "tables".into());
    assert_eq!(judged(place.path()).0, 0);

    // Rank 1 says that its first two rows are the other way round.
    let swap = |tensors: &mut Tensors| {
        let (_, _, positions) = tensors.get_mut("kv.position").expect("there are tables");
        positions[..8].rotate_left(4);
    };
    edit_rank(&run, 1, |tensors, _| swap(tensors));
    let (exit, said) = judged(place.path());
    assert!(exit == 2 && said.contains("FAIL     run · envelope"), "the rows are misread: {said}");
    edit(&run, |manifest| manifest["placement"] = "rule".into());
    let (exit, said) = judged(place.path());
    assert_eq!(exit, 2, "{said}");
    for text in ["structure · k", "rank 1", "row 0", "got position 5 of sequence 0, expected position 4"] {
        assert!(said.contains(text), "{text}: {said}");
    }

    edit(&run, |manifest| manifest["placement"] = "tables".into());
    edit_rank(&run, 1, |tensors, _| {
        let (_, _, positions) = tensors.get_mut("kv.position").expect("there are tables");
        positions.copy_within(0..4, 4);
    });
    let (exit, said) = judged(place.path());
    assert!(exit == 2 && said.contains("the tables give this position to no rank"), "{said}");
    assert!(said.contains("live     none: its tables deal the rows otherwise than ring does"), "{said}");
    edit_rank(&run, 1, |tensors, _| {
        let (_, _, sequences) = tensors.get_mut("kv.sequence").expect("there are tables");
        sequences[..4].copy_from_slice(&9i32.to_le_bytes());
    });
    refuses(place.path(), &["judge-recording", "run"], &["rank-0001.safetensors: kv.sequence: entry 0 is 9"]);
    edit_rank(&run, 1, |tensors, _| drop(tensors.remove("q.position")));
    refuses(place.path(), &["judge-recording", "run"], &["rank-0001.safetensors: q.position: is missing"]);
}

#[test]
fn a_sink_that_is_not_the_same_on_all_ranks_is_found() {
    let place = place();
    case(place.path(), &[&RING[..], &["--sink", "learnable"]].concat());
    let run = record(place.path(), &[]);
    assert_eq!(judged(place.path()).0, 0, "{}", judged(place.path()).1);
    edit_rank(&run, 2, |tensors, _| {
        let (_, _, sink) = tensors.get_mut("sink").expect("the sink is recorded");
        sink[4..8].copy_from_slice(&7f32.to_le_bytes());
    });
    let (exit, said) = judged(place.path());
    assert!(exit == 2 && said.contains("structure · sink · head 1: rank 2 holds another sink"), "{said}");
}

#[test]
fn other_forms_of_the_lse_and_of_dsink_are_read() {
    let place = place();
    case(place.path(), &[&RING[..], &["--sink", "learnable"]].concat());
    let run = record(place.path(), &[]);
    let mut total = [0f64; 4];
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes"))).collect()
    };
    for rank in 0..4 {
        edit_rank(&run, rank, |tensors, _| {
            let (_, shape, lse) = tensors.get_mut("lse").expect("the LSE is recorded");
            let (heads, rows, old) = (shape[0], shape[1], floats(lse));
            let in_base_2 = |value: f32| (f64::from(value) / std::f64::consts::LN_2) as f32;
            let turned = (0..rows).flat_map(|row| (0..heads).map(move |head| (head, row)));
            *lse = turned.flat_map(|(head, row)| in_base_2(old[head * rows + row]).to_le_bytes()).collect();
            shape.reverse();
            for (sum, part) in total.iter_mut().zip(floats(&tensors["dsink"].2)) {
                *sum += f64::from(part);
            }
        });
    }
    edit(&run, |manifest| {
        manifest["lse"]["order"] = "th".into();
        manifest["lse"]["base"] = "2".into();
    });
    assert_eq!(judged(place.path()).0, 0, "{}", judged(place.path()).1);

    edit(&run, |manifest| manifest["dsink"] = "reduced".into());
    let (exit, said) = judged(place.path());
    assert!(exit == 2 && said.contains("structure · dsink"), "the parts differ: {said}");
    let reduced: Vec<u8> = total.iter().flat_map(|sum| (*sum as f32).to_le_bytes()).collect();
    for rank in 0..4 {
        edit_rank(&run, rank, |tensors, _| {
            tensors.get_mut("dsink").expect("recorded").2.clone_from(&reduced);
        });
    }
    assert_eq!(judged(place.path()).0, 0, "{}", judged(place.path()).1);
}

/// What spoils a recording, by name, and the texts of the one line about it.
type Spoiled = (&'static str, fn(&Path), &'static [&'static str]);

#[test]
fn a_spoiled_recording_is_one_line_that_names_file_and_field() {
    const RANK: &str = "run/rank-0002.safetensors";
    const MANIFEST: &str = "run/recording.json";
    let rank = |run: &Path| run.join("rank-0002.safetensors");
    let cases: &[Spoiled] = &[
        ("byte", |run| flip(&run.join("rank-0002.safetensors")), &[RANK, "blake2b", "record the run again"]),
        ("truncated", |run| halve(&run.join("rank-0002.safetensors")), &[RANK, "blake2b", "torn"]),
        ("manifest", |run| halve(&run.join("recording.json")), &[MANIFEST, "EOF"]),
        ("missing", |run| remove(&run.join("rank-0002.safetensors")), &[RANK, "file: is missing"]),
        (
            "unfinished",
            |run| remove(&run.join("recording.json")),
            &["run: ", "recording.json", "never finished"],
        ),
        ("stranger", |run| drop(fs::write(run.join("x.json"), "{}")), &["run/x.json", "does not belong"]),
        ("unknown", |run| edit(run, |m| m["seed"] = 1.into()), &[MANIFEST, "seed", "unknown field"]),
        ("mode", |run| edit(run, |m| m["problem"]["mode"] = "flat".into()), &[MANIFEST, "problem.mode"]),
        (
            "version",
            |run| edit(run, |m| m["seamproof_recording"] = 2.into()),
            &[MANIFEST, "seamproof_recording: 2"],
        ),
        (
            "heads",
            |run| edit(run, |m| m["problem"]["heads"]["kv"] = 3.into()),
            &[MANIFEST, "problem: heads.q"],
        ),
        (
            "fp8",
            |run| edit(run, |m| m["problem"]["precision"]["k"] = "e4m3/tensor".into()),
            &[MANIFEST, "precision.k"],
        ),
        (
            "path",
            |run| edit(run, |m| m["ranks"][2]["file"] = "../q".into()),
            &[MANIFEST, "ranks[2].file", "../q"],
        ),
        (
            "world",
            |run| edit(run, |m| m["ranks"][2]["world_rank"] = 9.into()),
            &[MANIFEST, "ranks[2].world_rank"],
        ),
        (
            "short",
            |run| edit(run, |m| drop(m["ranks"].as_array_mut().and_then(Vec::pop))),
            &[MANIFEST, "ranks: has 3"],
        ),
        (
            "shape",
            |run| edit(run, |m| m["problem"]["dims"]["v"] = 8.into()),
            &["rank-0000", "v: has shape [20, 2, 16]"],
        ),
        (
            "dtype",
            |run| edit(run, |m| m["problem"]["precision"]["out"] = "f32".into()),
            &["rank-0000", "out: has dtype BF16"],
        ),
        (
            "run",
            |run| edit(run, |m| m["run"] = "other".into()),
            &["rank-0000", "seamproof.run", "not of one run"],
        ),
        (
            "step",
            |run| edit_rank(run, 2, |_, m| drop(m.insert("seamproof.step".into(), "7".into()))),
            &[RANK, "seamproof.step", "\"7\""],
        ),
        (
            "layer",
            |run| edit_rank(run, 2, |_, m| drop(m.remove("seamproof.layer"))),
            &[RANK, "seamproof.layer: is missing"],
        ),
        ("tensor", |run| edit_rank(run, 2, |t, _| drop(t.remove("dv"))), &[RANK, "dv: is missing"]),
        ("lse", |run| edit_rank(run, 2, |t, _| drop(t.remove("lse"))), &[RANK, "lse: is missing; rank 0"]),
        (
            "extra",
            |run| edit_rank(run, 2, |t, _| drop(t.insert("sink".into(), t["lse"].clone()))),
            &[RANK, "sink: is not expected"],
        ),
        (
            "name",
            |run| edit_rank(run, 2, |t, _| drop(t.insert("o\nut".into(), t["lse"].clone()))),
            &[RANK, "o ut: is not expected"],
        ),
        (
            "header",
            |run| seal(run, 2, b"\xff\xff\xff\xff\xff\xff\xff\xff{}"),
            &[RANK, "header", "18446744073709551615"],
        ),
        ("sizes", overflowing, &[RANK, "header", "announces"]),
        ("empty", |run| seal(run, 2, b""), &[RANK, "header", "fewer than 8 bytes"]),
        #[cfg(unix)]
        ("link", linked, &[RANK, "file: is a symbolic link"]),
        #[cfg(unix)]
        ("directory", |run| nested(&run.join("rank-0002.safetensors")), &[RANK, "file: is no regular file"]),
    ];
    let place = place();
    case(place.path(), &RING);
    let run = record(place.path(), &[]);
    assert!(rank(&run).is_file());
    let files: Vec<(PathBuf, Vec<u8>)> = fs::read_dir(&run)
        .expect("the recording is there")
        .map(|entry| entry.expect("an entry").path())
        .map(|path| (path.clone(), fs::read(path).expect("a file")))
        .collect();
    for (name, spoil, texts) in cases {
        fs::remove_dir_all(&run).expect("the recording is removed");
        fs::create_dir(&run).expect("the directory is made");
        for (path, bytes) in &files {
            fs::write(path, bytes).expect("the file is written");
        }
        spoil(&run);
        let output = seamproof(place.path(), &["judge-recording", "run"]);
        let said = stderr(&output);
        assert_eq!((code(&output), said.lines().count()), (1, 1), "{name}: {said}{}", stdout(&output));
        for text in *texts {
            assert!(said.contains(text), "{name}: '{text}' is not in: {said}");
        }
        assert!(said.len() < 1000 && !said.contains("panicked"), "{name}: {said}");
    }
    refuses(place.path(), &["judge-recording", "nowhere"], &["nowhere/recording.json: cannot be read"]);
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).expect("the file is there");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).expect("the file is written");
}

fn halve(path: &Path) {
    let bytes = fs::read(path).expect("the file is there");
    fs::write(path, &bytes[..bytes.len() / 2]).expect("the file is written");
}

fn remove(path: &Path) {
    fs::remove_file(path).expect("the file was there");
}

/// Announces tensors whose sizes add up to more than a number of 64 bits holds.
fn overflowing(run: &Path) {
    let part = u64::MAX / 16;
    let tensor = |index: u64| {
        let (start, end) = (part * index, part * (index + 1));
        format!(
            "\"x.{index}\": {{\"dtype\": \"U8\", \"shape\": [{part}], \"data_offsets\": [{start}, {end}]}}"
        )
    };
    let mut header: Vec<String> = (0..16).map(tensor).collect();
    header.push(format!(
        "\"x.z\": {{\"dtype\": \"U8\", \"shape\": [15], \"data_offsets\": [{}, {}]}}",
        part * 16,
        u64::MAX
    ));
    let header = format!("{{{}}}", header.join(", "));
    let size = (header.len() as u64).to_le_bytes();
    seal(run, 2, &[&size[..], header.as_bytes()].concat());
}

#[cfg(unix)]
fn linked(run: &Path) {
    let (path, elsewhere) = (run.join("rank-0002.safetensors"), run.with_file_name("elsewhere"));
    let _ = fs::remove_file(&elsewhere);
    fs::rename(&path, &elsewhere).expect("the file moves");
    std::os::unix::fs::symlink(&elsewhere, &path).expect("the link is made");
}

#[cfg(unix)]
fn nested(path: &Path) {
    remove(path);
    fs::create_dir(path).expect("the directory is made");
}

/// Asserts that `explain` shows who held what of a recorded case, and no launches, which are this project's own.
fn explains_the_recording(dir: &Path) {
    let output = seamproof(dir, &["explain", "found.json", "--rank", "3"]);
    let said = stdout(&output);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    for text in [
        "subject   emulated+backward-key-duplicated, recorded\n",
        "; bf16 recorded; ",
        "\nrow       key 6 of sequence 0, of rank 1, is seen by queries 6..17 of ranks 1, 2, 3\n",
        "  rank 3 owns\n    sequence 0: positions 12..17 in rows 0..5, padding in rows 5..8\n",
        "\nlaunches  not shown",
    ] {
        assert!(said.contains(text), "{text}: {said}");
    }
    assert!(!said.contains("operation") && !said.contains("rank 0 owns"), "{said}");
    for option in [&["--operations"][..], &["--pass", "forward"], &["--backend", "emulated"]] {
        refuses(dir, &[&["explain", "found.json"], option].concat(), &[option[0], "leave it out"]);
    }
    refuses(dir, &["explain", "found.json", "--rank", "4"], &["--rank is 4"]);
    let page = stdout(&seamproof(dir, &["explain", "found.json", "--html", "-"]));
    for text in
        ["padding of sequence 0, rank 3, local row 5", " of key 6</title>", "<p>A recording holds what"]
    {
        assert!(page.contains(text), "{text}: {page}");
    }
    refuses(dir, &["explain", "found.json", "--svg", "schedule"], &["--svg: A recording", "no schedule"]);
}

#[test]
fn a_case_of_a_sample_is_replayed_on_the_same_rows() {
    let place = place();
    case(place.path(), &[&RING[..], &["--forward"]].concat());
    let run = record(place.path(), &[]);
    // Row 1 of rank 1 is position 5 of sequence 0. Borders of chunks are every fourth position and the one before it.
    edit_rank(&run, 1, |tensors, _| {
        let (_, shape, out) = tensors.get_mut("out").expect("the output is recorded");
        let row = 2 * shape[1] * shape[2];
        out[row..row + 2].copy_from_slice(&[0x80, 0x42]);
    });
    let judge = |seed: &str| {
        let asked = ["judge-recording", "run", "--rows", "8", "--seed", seed, "--out", "found.json"];
        code(&seamproof(place.path(), &asked))
    };
    let exits: Vec<i32> =
        (0..100).map(|seed| judge(&seed.to_string())).take_while(|exit| *exit == 0).collect();
    let (held, found) = (exits.len() - 1, exits.len());
    assert!(found > 1 && judge(&found.to_string()) == 2, "{found}");

    let path = place.path().join("found.json");
    let mut stored: Value =
        serde_json::from_slice(&fs::read(&path).expect("the case is there")).expect("JSON");
    assert_eq!(stored["inputs"]["recorded"]["sample"], serde_json::json!({ "rows": 8, "seed": found }));
    assert_eq!(code(&seamproof(place.path(), &["replay", "found.json"])), 2);
    stored["inputs"]["recorded"]["sample"]["seed"] = held.into();
    fs::write(&path, stored.to_string()).expect("it is written");
    let output = seamproof(place.path(), &["replay", "found.json"]);
    assert_eq!(code(&output), 0, "other rows: {}", stdout(&output));
    drop(stored["inputs"]["recorded"].as_object_mut().expect("an object").remove("sample"));
    fs::write(&path, stored.to_string()).expect("it is written");
    assert_eq!(code(&seamproof(place.path(), &["replay", "found.json"])), 2, "every row");
}

#[test]
fn a_case_with_descales_is_refused_before_anything_is_written() {
    let place = place();
    let scaled = "q=e4m3/head,k=e4m3/head,v=e4m3/head,p=e4m3";
    let options = ["--precision", scaled, "--forward", "--backend", "emulated-fp8"];
    case(place.path(), &options);
    let says = ["case.json: nothing was recorded: q is e4m3/head, and a recording holds no scales"];
    refuses(place.path(), &["record", "case.json", "--out", "run"], &says);
    assert!(!place.path().join("run").exists());
}

#[test]
fn a_case_is_not_written_into_the_recording() {
    let place = place();
    case(place.path(), &RING);
    let run = record(place.path(), &["--backend", "emulated+backward-key-duplicated"]);
    for (dir, out) in [(".", "found.json"), (".", "./found.json"), ("../run", "found.json")] {
        refuses(&run, &["judge-recording", dir, "--out", out], &["--out: ", "does not lie beside", "run; "]);
    }
    let output = seamproof(&run, &["judge-recording", ".", "--out", "../found.json"]);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    assert_eq!(code(&seamproof(place.path(), &["replay", "found.json"])), 2);
}

#[test]
fn a_finding_in_a_recording_is_a_case_that_replay_and_explain_take() {
    let place = place();
    case(place.path(), &RING);
    let run = record(place.path(), &["--backend", "emulated+backward-key-duplicated"]);
    let output = seamproof(place.path(), &["judge-recording", "run", "--out", "found.json"]);
    assert!(code(&output) == 2 && stdout(&output).ends_with("case     found.json\n"), "{}", stdout(&output));
    let found = |output: &str| output.lines().find(|line| line.starts_with("FAIL")).map(str::to_owned);
    let first = found(&stdout(&output)).expect("a finding");

    let output = seamproof(place.path(), &["replay", "found.json"]);
    let again = found(&stdout(&output)).expect("a finding");
    assert_eq!(code(&output), 2);
    let what = |line: &str| line.split(" · ").skip(1).collect::<Vec<_>>().join(" · ");
    assert_eq!(what(&first), what(&again));
    assert!(again.contains("; bf16 recorded; "), "the values were not drawn: {again}");
    explains_the_recording(place.path());
    refuses(place.path(), &["shrink", "found.json"], &["found.json: inputs", "replay judges it"]);
    refuses(
        place.path(),
        &["judge-recording", "run", "--out", "elsewhere/found.json"],
        &["--out: ", "does not lie beside", "run; "],
    );

    edit(&run, |manifest| manifest["note"] = "another".into());
    refuses(
        place.path(),
        &["explain", "found.json"],
        &["found.json: inputs.recorded.digest", "another recording"],
    );
    let text = fs::read_to_string(place.path().join("found.json")).expect("the case is there");
    fs::write(place.path().join("found.json"), text.replace("\"run\"", "\"../run\"")).expect("it is written");
    refuses(
        place.path(),
        &["explain", "found.json"],
        &["found.json: inputs.recorded.file", "without a path"],
    );
}
