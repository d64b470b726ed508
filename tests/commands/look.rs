//! Pages and pictures of cases: valid XML, the case's own numbers, hostile texts, and no file too large.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command as Process;

use quick_xml::Reader;
use quick_xml::events::Event;
use seamproof_judge::case::{Case, Found, Story, Subject};
use seamproof_judge::finding::{Check, Finding};
use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Heads, Mask, Pass, Problem, ProblemFields,
};

use super::{code, place, refuses, seamproof, stderr, stdout};

/// Largest size of a page, in bytes.
pub(super) const PAGE_MAX: usize = 2 << 20;
const PICTURES: [&str; 3] = ["layout", "mask", "schedule"];

/// Names of the cases.
const CASES: [&str; 8] = ["single", "ring", "hierarchical", "window", "empty", "crossed", "wide", "long"];

/// Returns the problem of a case.
pub(super) fn problem(name: &str) -> Problem {
    let padded = |lengths: &[(usize, usize)]| ProblemFields {
        mask: Mask::CAUSAL,
        ..ProblemFields::padded(lengths, 4)
    };
    let over = |fields: ProblemFields, ranks, algorithm| ProblemFields {
        parallel: ContextParallel::over(ranks, algorithm, Balance::DualChunk),
        heads: Heads { q: 2, kv: 2 },
        ..fields
    };
    let window =
        |left, right| Mask { left: Some(left), right: Some(right), align: Alignment::TopLeft, ..Mask::FULL };
    let hierarchical = Algorithm::Hierarchical { all_to_all: 2 };
    let fields = match name {
        "single" => padded(&[(7, 8), (5, 6)]),
        "ring" => over(padded(&[(13, 16), (30, 32)]), 4, Algorithm::Ring),
        "hierarchical" => over(padded(&[(29, 32), (8, 16)]), 4, hierarchical),
        "window" => ProblemFields { mask: window(5, 0), ..ProblemFields::padded(&[(30, 30)], 4) },
        "empty" => padded(&[(0, 0), (9, 16), (0, 8)]),
        "crossed" => ProblemFields { pass: Pass::Forward, ..ProblemFields::packed(&[(12, 20), (3, 0)], 4) },
        "wide" => over(padded(&[(250, 256), (128, 128)]), 64, Algorithm::Ring),
        _ => ProblemFields { mask: window(4, 0), ..ProblemFields::padded(&[(100_000, 100_000)], 1) },
    };
    Problem::new(fields).expect("the problem is valid")
}

/// Stores a case, and returns it.
fn stored(dir: &Path, name: &str) -> Case {
    let subject = Subject { name: "emulated".to_owned(), options: BTreeMap::new() };
    let case = Case::new(subject, 0, problem(name));
    fs::write(dir.join(format!("{name}.json")), case.to_json()).expect("the case is written");
    case
}

fn page(dir: &Path, name: &str) -> String {
    let output = seamproof(dir, &["explain", &format!("{name}.json"), "--html", "-"]);
    assert_eq!(code(&output), 0, "{name}: {}", stderr(&output));
    stdout(&output)
}

/// Returns the names of the elements, in order, and the text of all. The document is well-formed, and each of its ids
/// is there once.
#[track_caller]
pub(super) fn elements(document: &str) -> (Vec<String>, String) {
    let mut reader = Reader::from_str(document);
    let (mut names, mut ids, mut text) = (Vec::new(), Vec::new(), String::new());
    loop {
        match reader.read_event().expect("the document is XML") {
            Event::Start(tag) | Event::Empty(tag) => {
                names.push(String::from_utf8_lossy(tag.name().as_ref()).into_owned());
                for attribute in tag.attributes() {
                    let attribute = attribute.expect("an attribute is whole");
                    if attribute.key.as_ref() == b"id" {
                        ids.push(attribute.value.into_owned());
                    }
                }
            }
            Event::Text(part) => text += &part.decode().expect("text is text"),
            Event::GeneralRef(name) => text += &format!("&{};", String::from_utf8_lossy(&name)),
            Event::Eof => break,
            _ => {}
        }
    }
    let count = ids.len();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), count, "an id is there twice");
    (names, text)
}

/// Returns the cells of the table with this caption, without its head.
pub(super) fn table(page: &str, name: &str) -> Vec<Vec<String>> {
    let (_, from) = page.split_once(&format!("<caption>{name}</caption>")).expect("the table is there");
    let (_, body) = from.split_once("<tbody>").expect("a table has a body");
    let (body, _) = body.split_once("</tbody>").expect("a body ends");
    let cells = |row: &str| {
        let cells = row.split("<td>").skip(1).filter_map(|cell| cell.split("</td>").next());
        cells.map(str::to_owned).collect()
    };
    body.split("<tr>").skip(1).map(cells).collect()
}

/// Checks the numbers of a page against those of its case.
fn has_the_numbers(page: &str, case: &Case, name: &str) {
    let problem = &case.problem;
    let sequences = table(page, "Sequences");
    let text = |numbers: &[usize]| numbers.iter().map(ToString::to_string).collect::<Vec<_>>();
    for (index, (row, both)) in sequences.iter().zip(&problem.sequences).enumerate() {
        let (q, kv) = (both.q, both.kv);
        let pairs = problem.mask.pairs(q.len, kv.len) as usize;
        let sides = [q.offset, q.len, q.span - q.len, q.step, kv.offset, kv.len, kv.span - kv.len, kv.step];
        let own = [&[index, both.id as usize], &sides[..], &[pairs]].concat();
        assert_eq!(row, &text(&own), "{name}");
    }
    assert_eq!(sequences.len(), problem.sequences.len().min(64), "{name}");
    let ranks = table(page, "Ranks");
    let sum = |column: usize| {
        ranks.iter().map(|row| row[column].parse::<usize>().expect("a number")).sum::<usize>()
    };
    assert_eq!(ranks.len(), problem.parallel.size(), "{name}");
    assert_eq!(sum(3), problem.tokens(), "{name}: every query is on one rank");
    assert_eq!(sum(6), problem.sequences.iter().map(|both| both.kv.len).sum::<usize>(), "{name}");
    for row in table(page, "Pairs of one head") {
        let both = problem.sequences[row[0].parse::<usize>().expect("an index")];
        let visible = problem.mask.pairs(both.q.len, both.kv.len);
        assert_eq!(row[4], visible.to_string(), "{name}");
        assert!(["0", "not known"].contains(&row[5].as_str()), "{name}: a right subject misses no pair");
    }
    let numbers = [("queries", problem.tokens().to_string()), ("rows of q", problem.rows.q.to_string())];
    for (field, value) in numbers {
        assert!(page.contains(&format!("<dt>{field}</dt><dd>{value}</dd>")), "{name}: {field}");
    }
}

#[test]
fn pages_are_whole_and_hold_the_numbers_of_their_cases() {
    let place = place();
    let dir = place.path();
    for name in CASES {
        let case = stored(dir, name);
        let page_of = page(dir, name);
        assert!(page_of.len() < PAGE_MAX, "{name}: {} bytes", page_of.len());
        let (names, text) = elements(&page_of);
        let count = |name: &str| names.iter().filter(|other| *other == name).count();
        assert_eq!((count("script"), count("img"), count("link")), (0, 0, 0), "{name}");
        assert_eq!(page_of.matches("role=\"img\"").count(), PICTURES.len(), "{name}");
        assert!(text.contains(&format!("seamproof replay {name}.json")), "{name}");
        has_the_numbers(&page_of, &case, name);
        assert_eq!(page(dir, name), page_of, "{name}: the same case, the same bytes");
    }
}

#[test]
fn a_picture_stands_alone() {
    let place = place();
    let dir = place.path();
    stored(dir, "ring");
    for picture in PICTURES {
        let output = seamproof(dir, &["explain", "ring.json", "--svg", picture]);
        let drawn = stdout(&output);
        let (names, _) = elements(&drawn);
        assert_eq!(names[..3], ["svg", "title", "desc"], "{picture}");
        assert!(drawn.contains("<pattern id=\"fill-partly\"") && drawn.contains("<style>"), "{picture}");
    }
    refuses(dir, &["explain", "ring.json", "--svg", "cat"], &["cat", "layout"]);
    refuses(dir, &["explain", "ring.json", "--html", "f.html", "--rank", "0"], &["--rank"]);
}

/// Test that a wrong schedule shows: pairs that it misses are counted, and drawn as missing.
#[test]
fn a_planted_fault_is_drawn() {
    let place = place();
    let dir = place.path();
    stored(dir, "window");
    let shown = |subject: &[&str]| {
        stdout(&seamproof(dir, &[&["explain", "window.json", "--html", "-"], subject].concat()))
    };
    let counts = |page: &str| {
        let row = table(page, "Pairs of one head").remove(0);
        [5, 6, 7].map(|column| row[column].parse::<u64>().expect("a number"))
    };
    assert_eq!(counts(&shown(&[])), [0, 0, 0]);
    let wrong = shown(&["--backend", "window-off-by-one"]);
    let [missing, extra, _] = counts(&wrong);
    assert!(missing + extra > 0, "{missing} {extra}");
    let class = if missing > 0 { "missing" } else { "extra" };
    let in_matrix = wrong.matches(&format!("<rect class=\"{class}\"")).count();
    assert!(in_matrix > 1, "beside the legend’s, tiles are marked");
}

#[test]
fn texts_from_a_file_are_shown_and_never_obeyed() {
    let place = place();
    let dir = place.path();
    let mut case = stored(dir, "single");
    let hostile =
        "</title></style><script>alert(1)</script>\"' onload=x &amp; ]]>\u{1b}[2J\u{0}\u{ffff}\u{202e}";
    case.subject.options.insert("q_tile".to_owned(), "4".to_owned());
    let mut finding = Finding::new(Check::Crash, None, hostile.to_owned());
    finding.got = Some(hostile.to_owned());
    finding.expected = Some(hostile.to_owned());
    case.found = Some(Found { unconfirmed: Some(hostile.to_owned()), ..Found::drawn(finding) });
    let sources = vec![format!("https://{hostile}"), "javascript:alert(1)".to_owned(), "x".repeat(1 << 20)];
    case.story = Some(Story { text: hostile.repeat(3), sources });
    fs::write(dir.join("hostile.json"), case.to_json()).expect("the file is written");
    let page = page(dir, "hostile");
    let (names, text) = elements(&page);
    assert!(!names.iter().any(|name| name == "script"));
    assert!(text.contains("&lt;script&gt;alert(1)"), "it is there to read");
    assert!(!page.contains("href=\"javascript:"));
    assert!(page.len() < PAGE_MAX / 8, "{} bytes", page.len());
    let kept = |letter: char| letter == '\n' || !letter.is_control();
    assert!(page.chars().all(kept) && !page.contains(['\u{ffff}', '\u{202e}']));
}

/// Test that a mistake inside of a kernel, which no schedule shows, is seen once the case is run: in the pairs that the
/// subject saw and in the errors of its results. A right subject has no mark, and its errors are within their bounds.
#[test]
fn a_run_shows_what_a_schedule_does_not() {
    let place = place();
    let dir = place.path();
    stored(dir, "window");
    let page = |subject: &str| {
        let output =
            seamproof(dir, &["explain", "window.json", "--html", "-", "--run", "--backend", subject]);
        assert_eq!(code(&output), 0, "{subject}: {}", stderr(&output));
        let page = stdout(&output);
        let errors = table(&page, "Errors");
        let past: u64 = errors.iter().map(|row| row[2].parse::<u64>().expect("a number")).sum();
        (elements(&page).1, table(&page, "Pairs of one head"), past)
    };
    let (shown, pairs, past) = page("emulated");
    assert_eq!((pairs.len(), past), (1, 0), "{pairs:?}");
    assert!(!shown.contains("As the subject saw it"));
    let (_, _, past) = page("emulated@worker");
    assert_eq!(past, 0, "a subject in a worker is run like any other");
    let (shown, pairs, past) = page("emulated+window-one-key-long");
    assert_eq!(
        pairs.iter().map(|row| row[1].as_str()).collect::<Vec<_>>(),
        ["forward", "as the subject saw it"]
    );
    assert_eq!(
        pairs.iter().map(|row| row[6].as_str()).collect::<Vec<_>>(),
        ["0", "24"],
        "one key each, from query 6 on"
    );
    assert!(shown.contains(
        "As the subject saw it: queries 6..30 of sequence 0, head 0: i sees i−6..i+1, should see i−5..i+1."
    ));
    assert!(past > 0);
    // As text too.
    let output =
        seamproof(dir, &["explain", "window.json", "--run", "--backend", "emulated+window-one-key-long"]);
    let told = stdout(&output);
    assert!(told.contains("\nrun       one more, ") && told.contains("As the subject saw it: "), "{told}");
    refuses(dir, &["explain", "window.json", "--open"], &["--html"]);
}

/// Test of the map of a case in a terminal, which a terminal without its letters does not get.
#[test]
fn a_terminal_has_a_map() {
    let place = place();
    let dir = place.path();
    stored(dir, "window");
    stored(dir, "ring");
    stored(dir, "long");
    let map = |arguments: &[&str], locale: &str| {
        let mut command = assert_cmd::Command::cargo_bin("seamproof").expect("the program is built");
        let arguments = [&["explain"], arguments].concat();
        let output =
            command.current_dir(dir).args(arguments).env("LC_ALL", locale).output().expect("it runs");
        let text = stdout(&output);
        text.find("\nmap ").map(|at| text[at + 1..].to_owned())
    };
    assert_eq!(map(&["ring.json"], "C"), None);
    let ring = map(&["ring.json"], "C.UTF-8").expect("a map");
    let first: Vec<&str> = ring.lines().take(9).collect();
    assert_eq!(
        first,
        [
            "map       █ visible  ▒ some of a tile’s pairs  · hidden",
            "          numbers at the sides: ranks that own them",
            "  sequence 0, forward: 13 × 13, queries ↓, keys →",
            "       0   1   2   3       2   1",
            "     0 ██························",
            "       ████······················",
            "     1 ██████····················",
            "       ████████··················",
            "     2 ██████████················",
        ]
    );
    let wrong = map(&["window.json", "--backend", "emulated+window-off-by-one"], "C.UTF-8").expect("a map");
    assert!(
        wrong.lines().next().is_some_and(|key| key.contains("╳ missing")) && wrong.contains("╳"),
        "{wrong}"
    );
    for name in ["window.json", "ring.json", "long.json"] {
        let map = map(&[name], "C.UTF-8").expect("a map");
        assert!(
            map.lines().count() <= 4 * 26 + 2 && map.lines().all(|line| line.chars().count() <= 100),
            "{name}"
        );
    }
}

/// Test that `--open` opens the page with the reader's own program, and that nothing fails where there is none.
#[cfg(unix)]
#[test]
fn a_page_is_opened_where_that_can_be() {
    use std::os::unix::fs::PermissionsExt;

    let place = place();
    let dir = place.path();
    stored(dir, "single");
    let browser = dir.join("browser");
    fs::write(&browser, format!("#!/bin/sh\necho \"$1\" >{}\n", dir.join("opened").display()))
        .expect("a script");
    fs::set_permissions(&browser, fs::Permissions::from_mode(0o755)).expect("it may run");
    let open = |arguments: &[&str], browser: &str, path: &str| {
        let mut command = assert_cmd::Command::cargo_bin("seamproof").expect("the program is built");
        command
            .current_dir(dir)
            .args(arguments)
            .env("BROWSER", browser)
            .env("PATH", path)
            .output()
            .expect("it runs")
    };
    let explain = ["explain", "single.json", "--html", "page.html", "--open"];
    let output = open(&explain, "", "/nowhere");
    assert_eq!(code(&output), 0);
    assert!(
        stderr(&output).contains("--open: nothing here opens pages") && stderr(&output).contains("page.html")
    );
    let run = [
        "run",
        "--backend",
        "emulated+window-dropped",
        "--cases",
        "20",
        "--seed",
        "1",
        "--out",
        "out",
        "--open",
    ];
    let path = std::env::var("PATH").expect("a search path");
    for (arguments, page) in [(&explain[..], "page.html"), (&run[..], "out/report.html")] {
        let _ = fs::remove_file(dir.join("opened"));
        let output = open(arguments, &browser.display().to_string(), &path);
        assert!(!stderr(&output).contains("--open:"), "{}", stderr(&output));
        let told = wait_for(&dir.join("opened"));
        assert_eq!(Path::new(told.trim()), dir.join(page).canonicalize().expect("the page is there"));
    }
}

/// Returns what a file holds, once it is there.
#[cfg(unix)]
fn wait_for(path: &Path) -> String {
    let begun = std::time::Instant::now();
    loop {
        match fs::read_to_string(path) {
            Ok(text) if text.ends_with('\n') => return text,
            _ if begun.elapsed().as_secs() > 20 => panic!("{} is not there", path.display()),
            _ => std::thread::sleep(std::time::Duration::from_millis(20)),
        }
    }
}

/// Test that pages fit a telephone, as a browser lays them out. It runs where Chromium is, and says so where it is not.
#[test]
fn pages_do_not_overflow_a_telephone() {
    let place = place();
    let dir = place.path();
    for name in CASES {
        stored(dir, name);
        fits_a_telephone(dir, &page(dir, name));
    }
}

/// Checks in Chromium, where it is, that a page fits a telephone and a desk, and that its script sorts.
pub(super) fn fits_a_telephone(dir: &Path, page: &str) {
    let has_chromium =
        Process::new("chromium").arg("--version").output().is_ok_and(|output| output.status.success());
    if !has_chromium {
        eprintln!("not run: there is no chromium here");
        return;
    }
    // A page of the test’s own holds the page in frames as wide as a telephone and as a desk, and measures it.
    let quoted = page.replace('&', "&amp;").replace('"', "&quot;");
    let measure = "let inner = this.contentDocument; let root = inner.documentElement; \
                   let head = inner.querySelector('table.sorts th button'); if (head) head.click(); \
                   let sorted = head ? head.parentElement.getAttribute('aria-sort') : 'none'; \
                   document.title += root.scrollWidth + ' of ' + root.clientWidth + ' ' + sorted + ';'";
    let frame = |width: usize| {
        format!(
            "<iframe width={width} height=900 frameborder=0 onload=\"{measure}\" srcdoc=\"{quoted}\"></iframe>"
        )
    };
    let outer = format!("<!DOCTYPE html><title></title>{}{}", frame(390), frame(1280));
    fs::write(dir.join("measured.html"), outer).expect("the file is written");
    let url = format!("file://{}", dir.join("measured.html").display());
    let flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"];
    let output = Process::new("chromium").args(flags).arg(url).output().expect("chromium runs");
    let dom = stdout(&output);
    let (_, title) = dom.split_once("<title>").expect("the page has a title");
    let (measured, _) = title.split_once("</title>").expect("a title ends");
    let frames: Vec<&str> = measured.split_terminator(';').collect();
    assert_eq!(frames.len(), 2, "{measured}");
    for frame in frames {
        let [wide, "of", of, sorted] = frame.split(' ').collect::<Vec<_>>()[..] else { panic!("{measured}") };
        let [wide, of] = [wide, of].map(|width| width.parse::<usize>().expect("a width"));
        assert!(of <= 1280 && wide <= of, "{measured}");
        assert_eq!(
            sorted,
            if page.contains("class=\"sorts\"") { "descending" } else { "none" },
            "{measured}"
        );
    }
}
