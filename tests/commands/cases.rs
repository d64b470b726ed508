//! Stored cases: they are read, replayed, shrunk and explained.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command as Process;

use seamproof_judge::case::{Case, Found};
use seamproof_judge::finding::Relation;
use seamproof_judge::finding::{Check, Finding};

use super::{code, place, refuses, seamproof, stderr, stdout, stored_case, typed};

const DEFECTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/defects");

#[test]
fn a_bad_case_file_is_one_line_that_names_file_and_field() {
    let place = place();
    let dir = place.path();
    let good = stored_case(dir);
    let replace = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        good.replacen(from, to, 1)
    };
    let deep = "[".repeat(1 << 20);
    let heads = good.find("\"heads\"").expect("a case has heads");
    let (before, after) = good.split_at(heads);
    let kv = after.find("\"kv\": ").expect("heads have kv") + "\"kv\": ".len();
    let end = kv + after[kv..].find(|letter: char| !letter.is_ascii_digit()).expect("a number ends");
    let zero_heads = format!("{before}{}0{}", &after[..kv], &after[end..]);
    let overflow = "\"sequences\": [{\"id\": 9, \"q\": {\"offset\": 18446744073709551615, \"len\": 9, \"span\": 9}, \
                    \"kv\": {\"offset\": 0, \"len\": 0, \"span\": 0}}], \"rows\"";
    // Without a sequence, any number of rows is legal.
    let large = {
        let sequences = good.find("\"sequences\"").expect("a case has sequences");
        let heads = good.find("\"heads\"").expect("a case has heads");
        let rows = "\"sequences\": [], \"rows\": {\"q\": 67108864, \"kv\": 67108864}, ";
        format!("{}{rows}{}", &good[..sequences], &good[heads..])
    };
    let sequences = good.find("\"sequences\"").expect("a case has sequences");
    let rows = good.find("\"rows\"").expect("a case has rows") + "\"rows\"".len();
    let overflow = format!("{}{overflow}{}", &good[..sequences], &good[rows..]);
    let cases = [
        ("text", "attention".to_owned(), "line 1"),
        ("truncated", good[..good.len() / 2].to_owned(), "EOF"),
        ("nested", replace("\"problem\": ", &format!("\"problem\": {deep}")), "line"),
        ("version", replace("\"version\": 1", "\"version\": 2"), "version: 2"),
        ("type", replace("\"schedule_seed\": ", "\"schedule_seed\": -"), "schedule_seed"),
        ("unknown", replace("\"problem\"", "\"notes\": 1, \"problem\""), "notes"),
        ("zero", zero_heads, "heads.kv is 0"),
        ("overflow", overflow, "sequences[0].q"),
        ("subject", replace("\"name\": \"", "\"name\": \"un"), "subject"),
        ("escape", replace("\"name\": \"", "\"name\": \"\\u001b[2J\\nerror: "), "\\u{1b}[2J\\nerror: "),
        ("large", large, "at most"),
        (
            "recorded",
            replace("\"generated\"", "{\"recorded\": {\"file\": \"f\", \"digest\": \"d\"}}"),
            "inputs",
        ),
    ];
    for (name, text, field) in cases {
        let file = format!("{name}.json");
        fs::write(dir.join(&file), text).expect("the file is written");
        for command in ["replay", "shrink"] {
            let output = seamproof(dir, &[command, &file]);
            let said = stderr(&output);
            assert_eq!((code(&output), said.lines().count()), (1, 1), "{command} {name}: {said}");
            assert!(said.contains(&file) && said.contains(field), "{command} {name}: {said}");
            assert!(said.len() < 1000, "{command} {name}: {} bytes", said.len());
        }
    }
    fs::write(dir.join("binary.json"), b"\xff\xfe{").expect("the file is written");
    refuses(dir, &["replay", "binary.json"], &["binary.json", "UTF-8"]);
    refuses(dir, &["replay", "missing.json"], &["missing.json"]);
    refuses(dir, &["replay", "seamproof.out/findings"], &["seamproof.out/findings", "*.json"]);
    refuses(dir, &["replay", "seamproof.out"], &["seamproof.out: this campaign found nothing"]);
}

/// Test that memory is bounded. The shell limits the address space, so the test needs no unsafe code.
#[cfg(target_os = "linux")]
#[test]
fn memory_is_bounded_whatever_the_file_holds() {
    const LIMIT_KIB: &str = "1000000";
    let place = place();
    let dir = place.path();
    let huge = File::create(dir.join("huge.json")).expect("a file");
    huge.set_len(1 << 36).expect("a sparse file");
    fs::write(dir.join("deep.json"), "{\"version\": 1, \"story\": ".to_owned() + &"[".repeat(50 << 20))
        .expect("a file");
    fs::write(dir.join("long.json"), "{\"version\": 1, \"".to_owned() + &"x".repeat(50 << 20))
        .expect("a file");
    for (file, text) in [("huge.json", "larger than"), ("deep.json", "no case"), ("long.json", "EOF")] {
        let program = assert_cmd::cargo::cargo_bin("seamproof");
        let output = Process::new("sh")
            .current_dir(dir)
            .args(["-c", "ulimit -v $0 && exec \"$1\" replay \"$2\"", LIMIT_KIB])
            .args([program.as_os_str(), file.as_ref()])
            .output()
            .expect("the shell runs");
        let said = stderr(&output);
        assert_eq!((code(&output), said.lines().count()), (1, 1), "{file}: {said}");
        assert!(said.contains(file) && said.contains(text), "{file}: {said}");
    }
}

/// Test that the canary is a finding like any other: it replays, and it shrinks.
#[test]
fn a_stored_finding_fails_again() {
    let place = place();
    stored_case(place.path());
    let output = seamproof(place.path(), &["replay", "seamproof.out/canary"]);
    assert!([2, 3].contains(&code(&output)), "{}{}", stdout(&output), stderr(&output));
    assert!(stdout(&output).contains("FAIL"));
}

/// Test that the name of a campaign's directory stands for its findings, and not for the summary that lies there too.
#[test]
fn a_campaign_s_directory_replays_its_findings() {
    let place = place();
    let output =
        seamproof(place.path(), &["run", "--backend", "window-off-by-one", "--cases", "50", "--seed", "1"]);
    assert_eq!(code(&output), 2, "{}{}", stdout(&output), stderr(&output));
    let output = seamproof(place.path(), &["replay", "seamproof.out"]);
    assert_eq!(code(&output), 2, "{}{}", stdout(&output), stderr(&output));
    assert!(stdout(&output).contains("unreadable 0"), "{}", stdout(&output));
}

#[test]
fn a_case_that_fails_on_another_subject_is_shrunk_for_that_subject() {
    const CANARY: &str = "window-off-by-one";
    let place = place();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-1212-window-one-key-short.json");
    let output = seamproof(place.path(), &["shrink", file, "--out", "small.json"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("nothing to shrink"));
    let output = seamproof(place.path(), &["shrink", file, "--backend", CANARY, "--out", "small.json"]);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    assert!(stdout(&output).contains("step "), "{}", stdout(&output));
    // One lane says nothing. The words before shrinking name the key, and are kept however often the case is shrunk.
    const LOST: &str = "; before shrinking: looks as if query 237 of sequence 0 missed key 227 ";
    let kept = |arguments: &[&str]| stdout(&seamproof(place.path(), arguments)).contains(LOST);
    assert!(stdout(&output).contains(LOST), "{}", stdout(&output));
    assert!(kept(&["shrink", "small.json"]) && kept(&["explain", "small.json"]));
    assert!(!kept(&["shrink", "small.json", "--backend", CANARY]), "the file may tell of another subject");
    assert_eq!(code(&seamproof(place.path(), &["replay", "small.json"])), 2);
    assert_eq!(code(&seamproof(place.path(), &["replay", "small.json", "--backend", "emulated"])), 0);
}

/// Test that `explain` shows every run that an identity compares.
#[test]
fn an_identity_s_finding_is_explained_with_all_its_runs() {
    let place = place();
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-1212-window-one-key-short.json");
    let mut case = Case::load(Path::new(stored)).expect("the case is there");
    let broken = Finding::new(Check::Identity, None, "the runs differ".to_owned());
    let finding = Finding { identity: Some(Relation::SequenceOrder), ..broken };
    case.found = Some(Found::drawn(finding));
    fs::write(place.path().join("case.json"), case.to_json()).expect("a file");
    let output = seamproof(place.path(), &["explain", "case.json"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let said = stdout(&output);
    assert!(said.contains("problem   2 sequences (256, 61)"), "{said}");
    assert!(said.contains("\nrun 2     of another problem\nproblem   2 sequences (61, 256)"), "{said}");
}

/// Test of a case that a campaign of another crate left. No command has its subject, and each says what to do.
#[test]
fn a_case_of_another_crates_subject_says_where_it_is_judged() {
    let place = place();
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-1930-seven-in-eight.json");
    let mut case = Case::load(Path::new(stored)).expect("a stored case");
    case.subject.name = "mine".to_owned();
    fs::write(place.path().join("case.json"), case.to_json()).expect("the case is written");
    let help = ["case.json: subject: ", "'mine'", "known: emulated, cuda", "--backend", "NAME.rs"];
    for command in ["shrink", "explain"] {
        refuses(place.path(), &[command, "case.json"], &help);
    }
    let replayed = seamproof(place.path(), &["replay", "case.json"]);
    let said = stderr(&replayed);
    assert_eq!((code(&replayed), said.lines().count()), (1, 1), "{said}");
    assert!(help.iter().all(|text| said.contains(text)), "{said}");
    let named = ["case.json", "--backend", "another"];
    for command in ["replay", "shrink", "explain"] {
        let said = stderr(&seamproof(place.path(), &[&[command], &named[..]].concat()));
        assert!(said.contains("'another'") && !said.contains("NAME.rs"), "{said}");
    }
    assert_eq!(code(&seamproof(place.path(), &["replay", "case.json", "--backend", "emulated"])), 0);
}

/// Test that a minimal case is not written once more, since a replay of its folder would count it twice.
#[test]
fn a_minimal_case_is_not_written_again() {
    let place = place();
    let (file, subject) = ("case.json", "window-off-by-one");
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-1212-window-one-key-short.json");
    fs::copy(stored, place.path().join(file)).expect("a copy");
    let shrink = |file: &str| {
        let output = seamproof(place.path(), &["shrink", file, "--backend", subject]);
        assert_eq!(code(&output), 2, "{}", stderr(&output));
        stdout(&output)
    };
    let said = shrink(file);
    let replay = format!("replay:  {}\n", typed("replay case.min.json"));
    assert!(said.contains(&replay) && !said.contains("no file"), "{said}");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.windows(2).all(|pair| pair[0] != pair[1]), "no step is told twice: {said}");
    // The story is that of the large case.
    let story = |file: &str| Case::load(&place.path().join(file)).expect("a case").story;
    assert!(story("case.json").is_some() && story("case.min.json").is_none());
    let said = shrink("case.min.json");
    assert!(
        said.contains("minimal after 0 steps") && said.contains("nothing got smaller: no file is written"),
        "{said}"
    );
    let replay = typed("replay case.min.json --backend window-off-by-one");
    assert!(said.contains(&format!("\nreplay:  {replay}\ntry:     {}", typed("try --lengths "))), "{said}");
    assert!(!place.path().join("case.min.min.json").exists());
    let replayed = seamproof(place.path(), &["replay", ".", "--backend", subject]);
    assert!(stdout(&replayed).contains("failed 2"), "{}", stdout(&replayed));
}

/// Test that options make a case, which fails on a wrong subject and holds on a right one, and can be stored.
#[test]
fn a_case_is_judged_from_options_alone() {
    let place = place();
    let options =
        ["try", "--lengths", "17,0x5,300", "--padded", "32,16x5,304", "--heads", "4/2", "--dim", "16"];
    let run = |more: &[&str]| seamproof(place.path(), &[&options[..], more].concat());
    let held = run(&["--window", "3,0", "--cp", "ring:2", "--padded", "32,16x8,304"]);
    assert_eq!(code(&held), 1, "--padded stands twice: {}", stderr(&held));
    let held = run(&["--window", "3,0"]);
    assert!(code(&held) == 0 && stdout(&held).starts_with("held     this case · "), "{}", stdout(&held));
    let failed = run(&["--window", "3,0", "--backend", "window-off-by-one", "--out", "case.json"]);
    assert!(
        code(&failed) == 2 && stdout(&failed).starts_with("FAIL     case.json · "),
        "{}",
        stdout(&failed)
    );
    let replayed = seamproof(place.path(), &["replay", "case.json"]);
    assert_eq!(code(&replayed), 2, "{}", stdout(&replayed));
    // The same on a subject that is right, as where the fault was mended.
    let mut mended = Case::load(&place.path().join("case.json")).expect("it is stored");
    mended.subject.name = "emulated".to_owned();
    let far_off = Finding::new(Check::Envelope, None, "far off".to_owned());
    mended.found = Some(Found::drawn(far_off));
    fs::write(place.path().join("mended.json"), mended.to_json()).expect("the folder is there");
    let replayed = stdout(&seamproof(place.path(), &["replay", "mended.json"]));
    assert!(replayed.contains(" · what was found here (envelope) did not recur\n"), "{replayed}");
    let wrong = run(&["--window", "3"]);
    assert!(code(&wrong) == 1 && stderr(&wrong).contains("a comma and the right one"), "{}", stderr(&wrong));
}

/// Test of each stored defect: `explain` shows what is computed beside what should be, and the step in which it goes
/// wrong.
#[test]
fn a_stored_defect_is_explained() {
    let place = place();
    for (name, texts) in [
        ("te-all-gather-window-shift", ["should see", "checked   WRONG"]),
        ("te-all-gather-real-offsets", ["should see", "checked   WRONG"]),
        ("te-reorder-tail", ["checked   WRONG", "layout"]),
        ("te-ring-floored-lengths", ["ring step 2 of 2: lower section", "checked   WRONG"]),
        ("te-ring-window-opens", ["ring step 2 of 2: full section", "should see"]),
    ] {
        let file = format!("{DEFECTS}/{name}.json");
        let output = seamproof(place.path(), &["explain", &file]);
        let said = stdout(&output);
        assert_eq!(code(&output), 0, "{name}: {}", stderr(&output));
        for text in texts {
            assert!(said.contains(text), "{name}: {text} is not in {said}");
        }
        assert!(said.starts_with("subject   emulated+"), "{said}");
        let right = seamproof(place.path(), &["explain", &file, "--backend", "emulated"]);
        assert!(stdout(&right).contains("checked   proved"), "{name}: {}", stdout(&right));
        assert_eq!(
            code(&seamproof(place.path(), &["prove", &file])),
            0,
            "{name}: the builder's own is right"
        );
        assert!([2, 3].contains(&code(&seamproof(place.path(), &["replay", &file]))), "{name}");
    }
    let file = format!("{DEFECTS}/te-ring-window-opens.json");
    let one =
        seamproof(place.path(), &["explain", &file, "--rank", "1", "--pass", "forward", "--operations"]);
    assert!(stdout(&one).contains("merges") && !stdout(&one).contains("\nrank 0\n"), "{}", stdout(&one));
    refuses(place.path(), &["explain", &file, "--rank", "2"], &["--rank", "0, 1"]);
    refuses(place.path(), &["explain", &file, "--pass", "sideways"], &["sideways"]);
    refuses(place.path(), &["explain", "missing.json"], &["missing.json"]);
}

/// Test that bytes of choices are read up to a limit, which the error says, and that nothing waits for a pipe.
#[cfg(unix)]
#[test]
fn a_fuzzer_s_file_is_read_up_to_a_limit() {
    let place = place();
    let dir = place.path();
    let values = |from: &str| ["values".to_owned(), from.to_owned(), "--out".to_owned(), "out".to_owned()];
    let refuses = |from: &str, texts: &[&str]| {
        let arguments = values(from);
        refuses(dir, &arguments.each_ref().map(String::as_str), texts);
    };
    let file = fs::File::create(dir.join("bytes")).expect("a file");
    // The file is a hole, so nothing is written.
    file.set_len(1 << 40).expect("a length");
    refuses("bytes", &["bytes: cannot be read: larger than 1048576 bytes"]);
    assert!(Process::new("mkfifo").arg(dir.join("pipe")).status().expect("mkfifo runs").success());
    refuses("pipe", &["pipe: cannot be read: is no regular file"]);
    refuses("/dev/zero", &["/dev/zero: cannot be read: is no regular file"]);
    file.set_len(1 << 20).expect("a length");
    let output = seamproof(dir, &values("bytes").each_ref().map(String::as_str));
    assert_eq!((code(&output), &*stdout(&output)), (0, "values    1 read, 1 new in out\n"));
}

/// Test that the line that replays a finding can be pasted, whatever the name of the folder.
#[test]
fn a_replay_line_can_be_pasted() {
    let place = place();
    let dir = place.path().join("it's `my` $HOME");
    fs::create_dir(&dir).expect("a directory");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/defects/te-reorder-tail.json");
    fs::copy(from, dir.join("a case.json")).expect("a copy");
    let file = format!("{}/a case.json", dir.file_name().expect("a name").to_string_lossy());
    let said = stdout(&seamproof(place.path(), &["shrink", &file, "--budget", "1"]));
    let line = said.lines().find_map(|line| line.strip_prefix("replay:  ")).expect("a command");
    let output = Process::new("sh").args(["-c", line]).current_dir(place.path()).output().expect("a shell");
    assert_eq!(output.status.code(), Some(2), "{line}: {output:?}");
}

/// Test that a case is judged beside another subject: within the bounds of both, bit for bit, and where one of them is
/// wrong.
#[test]
fn a_case_is_judged_beside_another_subject() {
    let place = place();
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-2596-padded-pack-ring.json");
    let beside = |options: &[&str]| code(&seamproof(place.path(), &[&["replay", stored], options].concat()));
    assert_eq!(beside(&["--beside", "emulated:kv_tile=2"]), 0);
    assert_eq!(beside(&["--beside", "emulated:order=7,merge=deferred", "--bitwise"]), 0);
    assert_eq!(beside(&["--beside", "emulated:kv_tile=2,merge=deferred", "--bitwise"]), 2);
    assert_eq!(beside(&["--beside", "emulated~call-scale-off"]), 2);
    refuses(place.path(), &["replay", stored, "--bitwise"], &["--beside"]);
    refuses(place.path(), &["replay", stored, "--beside", "nobody"], &["unknown backend 'nobody'"]);
    let run = ["run", "--cases", "60", "--seed", "1", "--beside", "emulated~call-scale-off", "--out", "out"];
    let found = seamproof(place.path(), &run);
    let said = stdout(&found);
    assert!(code(&found) == 2 && said.contains("beside"), "{said}{}", stderr(&found));
    // What was found names the other subject, and is found again beside it.
    assert_eq!(code(&seamproof(place.path(), &["replay", "out"])), 2);
}

/// Test that the unfused path holds on what its review is about, and that a call which cuts keys at the queries, or takes
/// the module's scale, is found there.
#[test]
fn the_unfused_path_holds_where_its_review_found_faults() {
    let place = place();
    for (stored, id) in [
        ("te-3063-one-query-long-keys", "kv-sliced-by-q"),
        ("te-3063-scale-of-a-layer", "scale-of-the-module"),
        ("te-cp-tests-100-271", "causal-dropped"),
        ("te-docstring-padded-pack", "causal-dropped"),
    ] {
        let file = format!("{}/corpus/regressions/{stored}.json", env!("CARGO_MANIFEST_DIR"));
        let replayed = |name: &str| code(&seamproof(place.path(), &["replay", &file, "--backend", name]));
        assert_eq!((replayed("unfused"), replayed(&format!("unfused+{id}"))), (0, 2), "{stored}");
    }
}

/// Test of the unfused path, by name: right, and with the mask of all queries by all keys.
#[test]
fn the_unfused_path_is_known_by_its_name() {
    let place = place();
    let run = |name: &str| {
        let run = ["run", "--cases", "120", "--seed", "1", "--backend", name, "--out", name];
        let output = seamproof(place.path(), &run);
        (code(&output), stdout(&output))
    };
    let (right, said) = run("unfused");
    assert!(right != 2 && !said.contains("memory"), "{right}: {said}");
    let (wrong, said) = run("unfused+full-mask");
    assert!(wrong == 2 && said.contains("peak bytes grow faster than tokens do"), "{wrong}: {said}");
}
