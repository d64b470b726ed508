//! Pages of folders: the figures of what a campaign, a night or a recording left, hostile texts, and bounds.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use seamproof_judge::case::{Case, Found, Subject};
use seamproof_judge::finding::{Check, Finding};
use seamproof_oracle::TensorName;
use serde_json::{Value, json};

use super::look::{PAGE_MAX, elements, fits_a_telephone, problem, table};
use super::{code, place, refuses, seamproof, stderr, stdout};

/// Text that means something in every language that a page is written in.
const HOSTILE: &str = "</script></title></style><script>alert(1)</script>\"' onload=x &amp; ]]>\u{1b}[2J\u{202e}looks as if <b>";
/// Longest time for a page, with a program that is not optimised and a machine that does other work.
const PAGE_TIME: Duration = Duration::from_secs(20);

/// Runs a campaign that finds something, into the folder `out`.
fn campaign(dir: &Path) {
    let arguments =
        ["run", "--backend", "emulated+window-dropped", "--cases", "200", "--seed", "1", "--out", "out"];
    let output = seamproof(dir, &arguments);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    let told = stdout(&output);
    assert!(told.contains("report    out/report.html\n"), "{told}");
}

/// Returns the page of a folder.
fn page(dir: &Path, folder: &str) -> String {
    let output = seamproof(dir, &["report", folder, "--html", "-"]);
    assert_eq!(code(&output), 0, "{folder}: {}", stderr(&output));
    stdout(&output)
}

/// Returns the data of a page. The page is well-formed, loads nothing, and runs the one script of its own.
#[track_caller]
fn data(page: &str) -> Value {
    let (names, _) = elements(page);
    let count = |name: &str| names.iter().filter(|other| *other == name).count();
    assert_eq!((count("script"), count("img"), count("link"), count("iframe")), (2, 0, 0, 0));
    assert!(page.len() < PAGE_MAX, "{} bytes", page.len());
    // Whatever is wide scrolls inside a frame of its own.
    let framed = |what: &str| page.matches(&format!("<div class=\"wide\" tabindex=\"0\"><{what}")).count();
    assert_eq!((framed("svg"), framed("table")), (count("svg") - 1, count("table")));
    let (_, text) = page.split_once("<script type=\"application/json\" id=\"data\">").expect("data");
    let (text, _) = text.split_once("</script>").expect("it ends");
    let data: Value = serde_json::from_str(text).expect("data is JSON");
    assert_eq!((data["schema"].as_str(), data["version"].as_u64()), (Some("seamproof-report"), Some(1)));
    data
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("the file is there")).expect("the file is JSON")
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

/// Returns a number as the page writes it.
fn fact<'a>(data: &'a Value, name: &str) -> &'a str {
    let facts = list(&data["facts"]).iter();
    text(&facts.clone().find(|fact| fact[0] == name).unwrap_or_else(|| panic!("no fact {name}"))[1])
}

#[test]
fn a_campaigns_page_has_the_figures_of_its_folder() {
    let place = place();
    let dir = place.path();
    campaign(dir);
    let begun = Instant::now();
    let page_of = page(dir, "out");
    let left = fs::read_to_string(dir.join("out/report.html")).expect("the campaign leaves its page");
    assert_eq!(left, page_of, "the same as the command’s");
    assert!(begun.elapsed() < PAGE_TIME, "{:?}", begun.elapsed());
    assert_eq!(page(dir, "out"), page_of, "the same folder, the same bytes");
    let data = data(&page_of);
    let summary = &read(&dir.join("out/run.json"))["summary"];
    let number = |value: &Value| value.as_u64().expect("a number");
    assert_eq!(fact(&data, "cases"), "200");
    assert_eq!(fact(&data, "held"), number(&summary["held"]).to_string());
    let failed: u64 = summary["failed"].as_object().expect("counts").values().map(number).sum();
    assert_eq!(fact(&data, "failed"), failed.to_string());
    let said = format!("{failed} of 200 cases in ");
    assert!(text(&data["sentence"]).contains(&said) && page_of.contains(&said), "{}", data["sentence"]);
    // Each failure of the summary is there once, with its counts, its sentence, its command and a picture.
    let (findings, failures) = (list(&data["findings"]), list(&summary["failures"]));
    let met: u64 = findings.iter().map(|finding| number(&finding["met"][0])).sum();
    assert_eq!(findings.len() as u64, number(&summary["distinct"]));
    assert_eq!(met, failures.iter().map(|failure| number(&failure["cases"])).sum::<u64>());
    for (at, finding) in findings.iter().enumerate() {
        let (_, article) =
            page_of.split_once(&format!("<article id=\"finding-{}\">", at + 1)).expect("it is shown");
        let (article, _) = article.split_once("</article>").expect("it ends");
        let (_, shown) = elements(&format!("<a>{article}</a>"));
        let file = text(&finding["file"]);
        assert!(shown.contains(&format!("seamproof replay {file}")) && dir.join(file).is_file(), "{file}");
        assert!(article.contains("role=\"img\""));
        let way = list(&finding["way"]);
        assert!(way.len() > 1 && article.contains(&format!("finding-{}-way-title", at + 1)), "it was shrunk");
        assert_eq!(way.last().map(|step| &step["problem"]), Some(&finding["problem"]));
        assert!(number(&way[0]["queries"]) >= number(&way[way.len() - 1]["queries"]));
    }
    assert!(page_of.contains("<rect class=\"extra\""), "the fault is in the schedule, and drawn there");
    // Margins and census are those of the sums, in the data and in the tables.
    let (measured, sums) = (&data["measured"][0], &read(&dir.join("out/sums.json"))["sums"]);
    for margin in list(&measured["margins"]) {
        let [tier, tensor] = ["tier", "tensor"].map(|name| text(&margin[name]));
        let told = &summary["margins"][tier][tensor];
        for field in ["count", "p50", "p95", "p99", "max"] {
            assert_eq!(margin[field], told[field], "{tier} {tensor} {field}");
        }
        let bars: u64 = list(&margin["bars"]).iter().map(|bar| number(&bar["count"])).sum();
        assert_eq!(bars, number(&told["count"]));
    }
    let rows = table(&page_of, "Error ÷ bound of the cases that held");
    assert_eq!(rows.len(), list(&measured["margins"]).len());
    for (row, margin) in rows.iter().zip(list(&measured["margins"])) {
        assert_eq!(row[..3], [text(&margin["tensor"]), text(&margin["tier"]), &margin["count"].to_string()]);
    }
    let rows = table(&page_of, "Classes of problems");
    assert_eq!(rows.len(), list(&measured["census"]).len());
    for (row, class) in rows.iter().zip(list(&measured["census"])) {
        let name = text(&class["class"]);
        let count = number(&class["count"]);
        if let Some(own) = sums["census"]["classes"].get(name) {
            assert_eq!(own, &class["count"], "{name}");
        }
        assert_eq!(row[1], count.to_string());
        let is_missed =
            list(&summary["missed"]).iter().any(|what| text(what).starts_with(&format!("{name}: ")));
        assert_eq!(row[3].starts_with("missed: "), is_missed, "{name}");
    }
    fits_a_telephone(dir, &page_of);
}

/// Test that a report as text has the verdict, and each failure with the commands that judge it again.
/// Test that counts which nobody can have made are added up to the largest number.
#[test]
fn counts_past_all_numbers_are_no_panic() {
    let place = place();
    seamproof(place.path(), &["run", "--seed", "1", "--cases", "60", "--backend", "window-off-by-one"]);
    let file = place.path().join("seamproof.out/run.json");
    let mut run: Value =
        serde_json::from_str(&fs::read_to_string(&file).expect("a run")).expect("it is JSON");
    for counts in ["failed", "refused", "malformed"] {
        run["summary"][counts] = serde_json::json!({"exact": u64::MAX, "identity": 1});
    }
    fs::write(&file, run.to_string()).expect("the run is written");
    let output = seamproof(place.path(), &["report", "seamproof.out"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
}

#[test]
fn a_report_as_text_has_the_commands() {
    let place = place();
    let dir = place.path();
    campaign(dir);
    let output = seamproof(dir, &["report", "out"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let told = stdout(&output);
    let findings = data(&page(dir, "out"))["findings"].clone();
    let count = |text: &str| told.matches(text).count();
    assert!(told.starts_with("verdict   ") && told.contains(" of 200 cases in "), "{told}");
    assert!(told.contains("\nof        Campaign on emulated+window-dropped · out\n"), "{told}");
    assert_eq!(count("\nFAIL      "), list(&findings).len(), "{told}");
    for finding in list(&findings) {
        assert_eq!(count(&format!("seamproof replay {}\n", text(&finding["file"]))), 1, "{told}");
        assert!(
            told.contains(&format!("seamproof try {}\n", &text(&finding["try"])["seamproof try ".len()..])),
            "{told}"
        );
    }
    // Beside a page it is short.
    let output = seamproof(dir, &["report", "out", "--html", "page.html"]);
    let short = stdout(&output);
    assert!(short.contains("\nFAIL      ") && !short.contains("replay: "), "{short}");
    assert!(short.ends_with("page      page.html\n"), "{short}");
}

/// Test that the only script that a page lets run is its own.
#[test]
fn the_policy_names_the_script() {
    let place = place();
    let dir = place.path();
    fs::create_dir_all(dir.join("out/findings")).expect("a folder");
    fs::write(dir.join("out/seamproof.lock"), "").expect("a file");
    fs::write(dir.join("out/events.jsonl"), "").expect("a file");
    let page = page(dir, "out");
    let (_, script) = page.split_once("<script>").expect("the script");
    let (script, _) = script.split_once("</script>").expect("it ends");
    fs::write(dir.join("script.js"), script).expect("the script is written");
    let hash = "import base64, hashlib; print(base64.b64encode(hashlib.sha256(open('script.js', 'rb').read()).digest()).decode())";
    let output = assert_cmd::Command::new("python3")
        .current_dir(dir)
        .args(["-c", hash])
        .output()
        .expect("Python runs");
    let policy = format!("script-src 'sha256-{}'\"", stdout(&output).trim());
    assert!(page.contains(&policy), "the page's policy is not {policy}");
    assert!(text(&data(&page)["sentence"]).contains("did not end"));
}

#[test]
fn texts_of_a_folder_are_shown_and_never_obeyed() {
    let place = place();
    let dir = place.path();
    campaign(dir);
    // The events and the cases say it, and so does a script that lies beside a case.
    let log = fs::read_to_string(dir.join("out/events.jsonl")).expect("events");
    let spoilt = log.lines().map(|line| {
        let mut event: Value = serde_json::from_str(line).expect("an event");
        if event["event"] == "finding" {
            for field in ["what", "got", "expected"] {
                event["finding"][field] = HOSTILE.into();
            }
            event["problem"] = HOSTILE.into();
            event["replay"] = HOSTILE.into();
            event["unshrunk"] = HOSTILE.into();
            event["try"] = HOSTILE.into();
            let name = text(&event["name"]);
            fs::write(dir.join(format!("out/findings/{name}.py")), HOSTILE).expect("a script");
            let file = dir.join(format!("out/findings/{name}.json"));
            // An event may tell of a case that a later one has taken the place of.
            if file.is_file() {
                let mut case = read(&file);
                case["found"]["unshrunk"] = HOSTILE.into();
                case["found"]["finding"]["what"] = HOSTILE.into();
                fs::write(file, case.to_string()).expect("a case");
            }
        }
        if event["event"] == "start" {
            event["backend"] = HOSTILE.into();
        }
        event.to_string() + "\n"
    });
    fs::write(dir.join("out/events.jsonl"), spoilt.collect::<String>()).expect("events");
    let mut run = read(&dir.join("out/run.json"));
    run["summary"]["missed"] = json!([HOSTILE]);
    run["summary"]["infrastructure"] = json!([HOSTILE]);
    fs::write(dir.join("out/run.json"), run.to_string()).expect("run.json");
    let page = page(dir, "out");
    let data = data(&page);
    assert_eq!(list(&data["findings"])[0]["finding"]["what"], HOSTILE);
    assert!(!page.contains("<script>alert") && !page.contains("<b>"));
    let (_, shown) = elements(&page);
    assert!(shown.contains("&lt;script&gt;alert(1)"), "it is there to read");
    assert!(page.chars().all(|letter| letter == '\n' || !letter.is_control()) && !page.contains('\u{202e}'));
}

#[test]
fn fifty_findings_fit_a_page() {
    let place = place();
    let dir = place.path();
    let findings = dir.join("out/findings");
    fs::create_dir_all(&findings).expect("a folder");
    fs::write(dir.join("out/seamproof.lock"), "").expect("a file");
    fs::write(dir.join("out/events.jsonl"), "{\"event\":\"start\"}\n{\"event\":\"case\",\"ind")
        .expect("a torn log");
    let names = ["single", "ring", "hierarchical", "window", "wide"];
    for at in 0..50 {
        let problem = problem(names[at % names.len()]);
        let subject = Subject { name: "emulated".to_owned(), options: Default::default() };
        let mut finding =
            Finding::new(Check::Envelope, Some(TensorName::Out), format!("{at}: {}", "x".repeat(9000)));
        finding.place.sequence = Some(0);
        finding.place.row = Some(3);
        let case = Case { found: Some(Found::drawn(finding)), ..Case::new(subject, 0, problem) };
        fs::write(findings.join(format!("case-{at:03}.json")), case.to_json()).expect("a case");
    }
    fs::write(findings.join("torn.json"), "{").expect("a torn case");
    let page = page(dir, "out");
    let data = data(&page);
    let shown = list(&data["findings"]).len() as u64 + data["findings_left"].as_u64().expect("a number");
    assert_eq!((shown, page.matches("<article ").count()), (50, 50));
    let pictures = page.matches("role=\"img\"").count();
    assert!(pictures >= 40, "{pictures} pictures: most failures have one");
    let doubts = data["doubts"].to_string();
    assert!(doubts.contains("torn.json") && doubts.contains("events.jsonl, line "), "{doubts}");
    // A line that no event has, in a log that is read as far as it can be.
    let log = vec![b'x'; (64 << 20) + 1];
    fs::write(dir.join("out/events.jsonl"), log).expect("a log");
    let told = seamproof(dir, &["report", "out"]);
    let doubt = stdout(&told).lines().find(|line| line.contains("a line is longer than")).map(str::to_owned);
    assert!(doubt.is_some_and(|doubt| doubt.contains("events.jsonl")), "{}", stderr(&told));
}

/// Makes a night of this number with these failures, on the folder of a campaign.
fn night(dir: &Path, number: u32, p99: f64, failures: &[Value]) {
    let night = dir.join(format!("nights/night-{number:04}"));
    fs::create_dir_all(&night).expect("a folder");
    let copied = night.join("emulated+window-dropped-quick");
    copy(&dir.join("out"), &copied);
    let report = json!({
        "title": "told", "night": number, "program": "0.1.0", "seed": "0x1", "seconds": 1.0, "absent": [["cuda", "no device"]],
        "regressions": [{"subject": "emulated+window-dropped", "held": ["a.json"], "refused": [], "failed": [], "internal": {}, "not_begun": []}],
        "failures": failures, "left": [], "unexplained": 0, "left_out": null, "missed": [], "internal": [], "passed_over": null,
        "known": [{"key": "old · emulated", "standing": {"stale": "it holds now"}}],
    });
    fs::write(night.join("report.json"), report.to_string()).expect("a report");
    let point = json!({
        "night": number, "subject": "emulated+window-dropped", "profile": "quick", "cases": 200, "cases_per_second": 50.0 + f64::from(number),
        "distinct": failures.len(), "failed": 9, "p99": {"out": p99}, "counted": {"out": 5000},
    });
    let mut trend = fs::read_to_string(dir.join("nights/trend.jsonl")).unwrap_or_default();
    trend += &format!("{point}\n");
    fs::write(dir.join("nights/trend.jsonl"), trend).expect("a trend");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let place = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy(&path, &place);
        } else {
            fs::copy(&path, &place).expect("a copy");
        }
    }
}

/// Test that a night's page tells what is new from what is known, was there before, and is gone.
#[test]
fn a_nights_page_leads_with_what_is_new() {
    let place = place();
    let dir = place.path();
    campaign(dir);
    let of_campaign = data(&page(dir, "out"));
    let keys: Vec<&str> =
        list(&of_campaign["findings"]).iter().map(|finding| text(&finding["key"])).collect();
    assert!(keys.len() >= 3, "{keys:?}");
    let failure = |key: &str, known: Value| json!({"key": key, "cases": 7, "shrunk": 2, "is_end": false, "problem": "p", "finding": "f", "replay": "r", "known": known});
    let vanished = "exact · emulated+window-dropped · out · gone";
    night(dir, 1, 0.5, &[failure(keys[1], Value::Null), failure(vanished, Value::Null)]);
    let reason = json!(["because", "https://example.org/1"]);
    night(
        dir,
        2,
        0.9,
        &[failure(keys[2], reason), failure(keys[1], Value::Null), failure(keys[0], Value::Null)],
    );
    let page_of = page(dir, "nights/night-0002");
    let data = data(&page_of);
    let told: Vec<[&str; 2]> =
        list(&data["findings"]).iter().map(|entry| [text(&entry["state"]), text(&entry["key"])]).collect();
    assert_eq!(told, [["new", keys[0]], ["again", keys[1]], ["known", keys[2]]]);
    assert!(list(&data["findings"]).iter().all(|entry| entry["met"] == json!([7, 2])));
    assert_eq!(data["sentence"], "Night 2: told.");
    let gone = data["gone"].to_string();
    assert!(gone.contains(vanished) && gone.contains("it holds now") && !gone.contains(keys[1]), "{gone}");
    assert!(data["doubts"].to_string().contains("no device"));
    let at = |text: &str| page_of.find(text).unwrap_or_else(|| panic!("no {text}"));
    let order = [
        "<h2>New (1)",
        "<h2>Not new, and not known (1)",
        "<h2>Known (1)",
        "<h2>Gone (2)",
        "<h2>Trend over nights",
    ];
    assert!(order.map(at).is_sorted(), "news comes first");
    assert!(page_of.contains("href=\"https://example.org/1\""));
    // The trend is that of the file, and the p99 that moved is marked.
    let rows = table(&page_of, "Campaigns of all nights");
    assert_eq!(
        rows.iter().map(|row| [&*row[0], &*row[8]]).collect::<Vec<_>>(),
        [["2", "52.0"], ["1", "51.0"]]
    );
    assert_eq!(list(&data["trend"]).len(), 2);
    assert_eq!(page_of.matches("<circle class=\"dot-moved\"").count(), 1);
    let margin = &data["measured"][0]["margins"][0];
    assert_eq!((&margin["before"]["night"], &margin["before"]["p99"]), (&json!(1), &margin["p99"]));
    refuses(dir, &["report", "nights"], &["holds nights", "night-0002"]);
    // A night that was killed has no report, and its findings are there.
    fs::remove_file(dir.join("nights/night-0002/report.json")).expect("it was there");
    let killed = page(dir, "nights/night-0002");
    assert!(killed.contains("Night 2 did not end") && killed.contains("<article "), "what it found is shown");
}

/// Test that what shards found is shown once they are merged, and that a campaign that was killed is shown too.
#[test]
fn merged_shards_and_killed_campaigns_have_pages() {
    let place = place();
    let dir = place.path();
    for shard in ["0/2", "1/2"] {
        let out = format!("shard-{}", &shard[..1]);
        let fixed = ["run", "--backend", "emulated+window-dropped", "--cases", "60", "--seed", "1"];
        seamproof(dir, &[&fixed[..], &["--shard", shard, "--out", &out]].concat());
    }
    let output = seamproof(dir, &["merge", "shard-0", "shard-1", "--out", "merged"]);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    let merged = data(&page(dir, "merged"));
    assert_eq!((fact(&merged, "cases"), fact(&merged, "shard")), ("60", "0/1"));
    assert!(
        list(&merged["findings"]).iter().all(|finding| list(&finding["way"]).len() > 1),
        "the ways are merged too"
    );
    for file in ["run.json", "sums.json"] {
        fs::remove_file(dir.join("shard-0").join(file)).expect("it was there");
    }
    let killed = data(&page(dir, "shard-0"));
    assert!(text(&killed["sentence"]).starts_with("The campaign did not end; "), "{}", killed["sentence"]);
    assert!(!list(&killed["findings"]).is_empty());
}

#[test]
fn a_recordings_page_tells_its_verdict() {
    let place = place();
    let dir = place.path();
    let case = [
        "try",
        "--causal",
        "--out",
        "case.json",
        "--lengths",
        "17,0,30",
        "--padded",
        "32,16,32",
        "--cp",
        "ring:4",
    ];
    assert_eq!(code(&seamproof(dir, &case)), 0);
    for (subject, tone) in [("emulated", "good"), ("emulated~call-scale-off", "bad")] {
        let run = format!("run-{tone}");
        let output = seamproof(dir, &["record", "case.json", "--out", &run, "--backend", subject]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        let page = page(dir, &run);
        let data = data(&page);
        assert_eq!((text(&data["tone"]), text(&data["kind"])), (tone, "recording"));
        assert_eq!(list(&data["findings"]).len(), usize::from(tone == "bad"));
        let (_, shown) = elements(&page);
        assert_eq!(shown.contains(&format!("seamproof judge-recording {run}")), tone == "bad");
        // The values are at hand, so errors are mapped whether the run holds or not.
        let errors = table(&page, "Errors");
        let of_out = errors.iter().find(|row| row[0] == "out").expect("out is mapped");
        assert_eq!(of_out[1], "47", "the real rows of one head");
        let past: usize = errors.iter().map(|row| row[2].parse::<usize>().expect("a number")).sum();
        let (_, strips) = page.split_once("the worst of a tensor").expect("the legend of the errors");
        let (strips, _) = strips.split_once("</svg>").expect("it ends");
        assert_eq!((past > 0, strips.contains("class=\"missing\"")), (tone == "bad", tone == "bad"));
    }
    refuses(dir, &["report", "case.json"], &["case.json", "explain"]);
    refuses(dir, &["report", "."], &["is no folder of a campaign"]);
    refuses(dir, &["report", "nowhere"], &["nowhere", "no such folder"]);
}
