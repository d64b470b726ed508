//! The page of a folder: what was found first, then what was measured.
//!
//! One file, without network. All of it shows without a script; the one script sorts tables, and the policy of the page
//! lets no other run. The data stands in the page once more as JSON (`docs/look.md`), for programs.

use maud::{Markup, PreEscaped, html};
use seamproof_judge::case::{Case, InputSource};
use seamproof_judge::prose::{self, counted};
use seamproof_oracle::Problem;
use seamproof_oracle::sharding::{self, RankLayout};
use serde::Serialize;

use super::page::{document, wide};
use super::schedule::Parts;
use super::svg::{Drawing, told};
use super::table::Table;
use super::{against, errors, hints, in_time, layout, margins, mask, placed, trend, way};
use crate::campaign::{Tone, met};
use crate::explain::Followed;
use crate::paste::quoted;
use crate::report::{Again, ClassCount, Entry, Kind, Measured, Report, Runs, State, again};

/// Style of the page, beside that of all pages.
pub(super) const STYLE: &str = include_str!("report.css");
/// Script of the page.
pub(super) const SCRIPT: &str = include_str!("report.js");
/// SHA-256 of the script in base64, the only one that may run. A test holds it to the script.
const SCRIPT_HASH: &str = "B+Li4Vuwb1WlSirJVyBIS3cg4YKJDj6OFtxTB5PMDVc=";
/// Largest size of a page, in bytes. What the rest leaves of it is for pictures and scripts of failures; later pictures
/// are left to `seamproof explain`.
const PAGE_BYTES_MAX: usize = 1_900_000;
/// Largest size of all texts about failures, in bytes. Later failures have their sentence and their command.
const TEXT_BYTES_MAX: usize = 300_000;
/// Multiple of its equal share of the room that a failure's pictures may take before those folded away are left out.
const FAIR: usize = 2;
/// Largest number of letters of a text in a list or a heading.
const SHORT: usize = 400;
/// Largest size of the data in the page, in bytes.
const DATA_BYTES_MAX: usize = 500_000;
/// Largest number of doubts, and of failures that are gone, that are listed.
const LISTED_MAX: usize = 40;
/// Largest number of hints about a failure.
const HINTS_MAX: usize = 3;
/// Number of doubts that are shown of a long list.
const DOUBTS_SHOWN: usize = 3;
/// Largest number of campaigns whose margins and census are shown.
const CAMPAIGNS_MAX: usize = 12;

/// Returns the page.
pub(crate) fn page(report: &Report) -> String {
    let runs = again(&report.findings);
    let head = html! {
        p class="faint" { (told(&report.title)) " · " (told(&report.folder)) }
        h1 id="sentence" class=(tone(report.tone)) { (short(&report.sentence)) }
        (contents(report, &runs))
        // What was found comes first.
        @if report.findings.is_empty() { (doubts(&report.doubts)) }
    };
    let rest = html! {
        @if !report.findings.is_empty() { (doubts(&report.doubts)) }
        (held(report))
        (gone(&report.gone))
        (trends(report))
        @for (at, measured) in report.measured.iter().take(CAMPAIGNS_MAX).enumerate() { (campaign(at, measured)) }
        h2 { "Facts" }
        dl id="facts" { @for (name, value) in &report.facts { dt { (told(name)) } dd { (told(value)) } } }
        p class="faint" {
            "A program finds all of this as JSON in the element " code { "#data" } " of this page, and the cases in the folder."
        }
    };
    let data = data(report);
    let taken = head.0.len() + rest.0.len() + data.len() + TEXT_BYTES_MAX;
    let room = Room { pictures: PAGE_BYTES_MAX.saturating_sub(taken), texts: TEXT_BYTES_MAX };
    let articles = articles(report, &runs, room);
    let body = html! {
        main {
            (head)
            (groups(report.kind, &articles))
            @if report.findings_left > 0 {
                p class="faint" { "… and " (counted(report.findings_left as u64, "more failure")) " in the folder." }
            }
            (rest)
        }
        script type="application/json" id="data" { (PreEscaped(data)) }
        script { (PreEscaped(SCRIPT)) }
    };
    let title = format!("seamproof: {}", report.folder);
    document(&title, &policy(), STYLE, &body)
}

/// Returns the policy that lets no script run but [`SCRIPT`].
pub(super) fn policy() -> String {
    format!("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{SCRIPT_HASH}'")
}

/// Returns the report as JSON. Where it is too long, the last failures are left out and counted.
fn data(report: &Report) -> String {
    let mut kept = report.clone();
    loop {
        let text = escaped(&kept);
        if text.len() <= DATA_BYTES_MAX || kept.findings.is_empty() {
            return text;
        }
        let least = kept.findings.len() / 2;
        kept.findings_left += kept.findings.len() - least;
        kept.findings.truncate(least);
    }
}

/// Returns data as JSON that neither ends its element nor means anything in XML.
pub(super) fn escaped(value: &impl Serialize) -> String {
    // Plain data with text keys is JSON. Letters that mean something outside of it, and all but plain ones, stand in
    // strings alone.
    let text = serde_json::to_string(value).unwrap_or_default();
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        if matches!(letter, ' '..='~') && !"<>&".contains(letter) {
            escaped.push(letter);
        } else {
            let mut units = [0; 2];
            escaped.extend(letter.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    escaped
}

fn tone(tone: Tone) -> &'static str {
    match tone {
        Tone::Good => "tone-good",
        Tone::Bad => "tone-bad",
        Tone::Doubt => "tone-doubt",
        Tone::Plain | Tone::Command => "tone-plain",
    }
}

/// Returns the name of a failure's place in the page.
fn anchor(at: usize) -> String {
    format!("finding-{}", at + 1)
}

/// Returns the list of failures, where there are several.
fn contents(report: &Report, runs: &[Runs]) -> Markup {
    let both = report.findings.iter().zip(runs);
    let whys: Vec<Option<String>> = both.map(|(entry, runs)| in_short(entry, runs)).collect();
    html! {
        @if report.findings.len() > 1 {
            @for line in report.common() { p { (line.text) } }
            nav aria-label="Findings" {
                ol {
                    @for (at, (entry, why)) in report.findings.iter().zip(&whys).enumerate() {
                        li {
                            a href=(format!("#{}", anchor(at))) { (short(&entry.sentence)) } " " (tags(report.kind, entry))
                            // Said once where several failures in a row have the same cause.
                            @if let Some(why) = why && (at == 0 || whys[at - 1].as_ref() != Some(why)) {
                                span class="faint" { (short(why)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Returns the state of a failure in a word, where the page tells several apart.
fn tags(kind: Kind, entry: &Entry) -> Markup {
    html! {
        @if let Some(state) = entry.state.mark(kind) { span class="tag" { (state) } }
        @if let Some(campaign) = &entry.campaign { span class="tag" { (told(campaign)) } }
    }
}

/// Returns what makes the result doubtful, with most of a long list folded away.
fn doubts(doubts: &[String]) -> Markup {
    let shown = if doubts.len() > DOUBTS_SHOWN + 1 { DOUBTS_SHOWN } else { doubts.len() };
    let (first, others) = doubts.split_at(shown);
    html! {
        @if !doubts.is_empty() {
            h2 { "What to know" }
            ul { @for doubt in first { li { (short(doubt)) } } }
            @if !others.is_empty() {
                details {
                    summary { "… and " (others.len()) " more" }
                    ul { @for doubt in others.iter().take(LISTED_MAX) { li { (short(doubt)) } } }
                    @if others.len() > LISTED_MAX { p class="faint" { "… and " (others.len() - LISTED_MAX) " more" } }
                }
            }
        }
    }
}

/// Returns how far the results of a recorded run that holds lie from the exact ones.
fn held(report: &Report) -> Markup {
    let Some((case, layouts, maps)) = &report.held else { return html! {} };
    let (drawing, notes) = errors::errors(case, layouts, maps);
    let shown =
        Shown { drawing, lead: errors::LEAD, notes, tables: vec![errors::numbers(maps)], tells: true };
    html! {
        section {
            h2 { "How far the results lie from the exact ones" }
            p class="faint" { (shown.lead) }
            figure { (drawn("held", &shown)) }
        }
    }
}

/// Returns the failures under the heads of their states.
fn groups(kind: Kind, articles: &[(State, Markup)]) -> Markup {
    let mut groups: Vec<(State, Vec<&Markup>)> = Vec::new();
    for (state, article) in articles {
        match groups.last_mut().filter(|(last, _)| last == state) {
            Some((_, group)) => group.push(article),
            None => groups.push((*state, vec![article])),
        }
    }
    html! {
        @if articles.is_empty() && kind == Kind::Night { h2 { "New" } p { "No failure." } }
        @for (state, group) in &groups {
            @let [title, lead] = heading(kind, *state);
            section {
                h2 { (title) " (" (group.len()) ")" }
                @if !lead.is_empty() { p class="faint" { (lead) } }
                @for article in group { (article) }
            }
        }
    }
}

fn heading(kind: Kind, state: State) -> [&'static str; 2] {
    match state {
        State::New if kind == Kind::Night => {
            ["New", "Failures that are on no list, and that the night before had not."]
        }
        State::New => ["Found", "Each failure with the smallest case that shows it."],
        State::Again => ["Not new, and not known", "The night before had these too, and no list names them."],
        State::Kept => ["Like none above", "Failing cases as they were drawn. Nobody has shrunk them."],
        State::Own => {
            ["The subject fails by itself", "Seen in the search for the planted fault, with the right call."]
        }
        State::Flaky => ["Flaky", "They were looked for again and not seen."],
        State::Known => ["Known", "Failures on the list of those that are known."],
    }
}

/// Bytes that are left for failures in the page.
struct Room {
    /// For pictures and scripts.
    pictures: usize,
    /// For everything else.
    texts: usize,
}

impl Room {
    /// Takes what a part needs, if there is room for it.
    fn take(left: &mut usize, part: Markup) -> Option<Markup> {
        *left = left.checked_sub(part.0.len())?;
        Some(part)
    }
}

/// Returns the failures with their states.
fn articles(report: &Report, runs: &[Runs], mut room: Room) -> Vec<(State, Markup)> {
    let of_entry = |(at, (entry, runs)): (usize, (&Entry, &Runs))| {
        let fair = FAIR * room.pictures / (report.findings.len() - at);
        (entry.state, article(at, report.kind, entry, (runs, fair), &mut room))
    };
    report.findings.iter().zip(runs).enumerate().map(of_entry).collect()
}

/// Returns a failure, with as much as there is room for. Its pictures may take `fair` bytes, the first of them more.
fn article(at: usize, kind: Kind, entry: &Entry, (runs, fair): (&Runs, usize), room: &mut Room) -> Markup {
    let id = anchor(at);
    let texts = Room::take(&mut room.texts, texts(entry));
    let shown = texts.is_some().then(|| pictures(&id, entry, runs, fair));
    let shown = shown.and_then(|pictures| Room::take(&mut room.pictures, pictures));
    let pasted = Room::take(&mut room.pictures, script(entry));
    html! {
        article id=(id) {
            h3 { (at + 1) ". " (short(&entry.sentence)) }
            p { (tags(kind, entry)) (short(&entry.problem)) @if let Some(case) = &entry.case { (world(&case.problem)) } }
            (values(entry))
            @if texts.is_some() { @for hint in told_by_runs(entry, runs) { p { strong { (told(&hint)) } } } }
            @if texts.is_some() && let Some(schedule) = &runs.small.schedule { (against::against(schedule, &runs.small.checked)) }
            @if let Some((why, source)) = &entry.known {
                p { strong { "Known: " } (short(why)) " " (link(source)) }
            }
            @if entry.finding.as_ref().is_some_and(|finding| finding.identity.is_some()) {
                p class="faint" {
                    "An identity compares this run with others. The pictures show this one; the text of explain shows all."
                }
            }
            @match &shown {
                Some(pictures) => (pictures),
                None => p class="faint" { "The page has no room for its pictures; " code { "explain" } " draws them." },
            }
            @match (&pasted, &entry.script) {
                (None, Some(script)) => p { "Script to paste: " code { (short(&script.path)) } },
                _ => (pasted.unwrap_or_default()),
            }
            @match &texts {
                Some(texts) => (texts),
                None => pre class="replay" { (short(&entry.replay)) },
            }
        }
    }
}

/// Returns the most that the runs of a failure tell of its mistake, in a sentence: what the checker says against the
/// schedule, else whose values were read, else a common factor, else which keys were seen.
fn in_short(entry: &Entry, runs: &Runs) -> Option<String> {
    let drawn = runs.drawn.iter().map(|(case, again)| (&**case, again));
    let small = entry.case.iter().map(|case| (&**case, &runs.small));
    let both: Vec<(&Case, &Again)> = drawn.chain(small).collect();
    let first = |of: fn(&Problem, &Again) -> Option<String>| {
        both.iter().find_map(|(case, again)| of(&case.problem, again))
    };
    against::in_short(&runs.small.checked)
        .or_else(|| first(|problem, again| hints::misread(problem, &again.read)))
        .or_else(|| first(|problem, again| again.errors.iter().find_map(|map| hints::factor(problem, map))))
        .or_else(|| first(|problem, again| mask::differences(problem, None, &again.seen).into_iter().next()))
}

/// Returns what the runs of a failure tell of where the mistake is: those of its drawn case, which has more rows, and
/// of its smallest.
fn told_by_runs(entry: &Entry, runs: &Runs) -> Vec<String> {
    let of = |case: &Case, again: &Again| {
        let hints = hints::hints(&case.problem, &again.errors, &again.seen);
        hints.into_iter().chain(hints::misread(&case.problem, &again.read)).collect::<Vec<_>>()
    };
    let mut told = runs.drawn.as_ref().map(|(case, again)| of(case, again)).unwrap_or_default();
    let subject = |hint: &str| hint.split([':', ',']).next().unwrap_or_default().to_owned();
    for hint in entry.case.iter().flat_map(|case| of(case, &runs.small)) {
        if !told.iter().any(|other| subject(other) == subject(&hint)) {
            told.push(hint);
        }
    }
    told.truncate(HINTS_MAX);
    told
}

/// Returns the worst element of a failure in numbers, and the mistake that its drawn case looks like.
fn values(entry: &Entry) -> Markup {
    let Some(finding) = &entry.finding else { return html! {} };
    let place = finding.place.to_string();
    let drawn = entry.case.as_ref().and_then(|case| case.found.as_ref()?.unshrunk.as_ref());
    let is_said = |told: &String| {
        told.split(": ").last().is_some_and(|last| entry.sentence.contains(last.trim_end_matches('.')))
    };
    let drawn = drawn.filter(|told| !is_said(told));
    html! {
        @if let Some(got) = &finding.got {
            p {
                @if !place.is_empty() { (told(&place)) ": " }
                "got " strong { (short(got)) }
                @if let Some(expected) = &finding.expected { ", expected " strong { (short(expected)) } }
                @if let Some(bound) = finding.bound { " ± " (format!("{bound:.1e}")) }
                @if finding.compared > 0 {
                    "; " (finding.failed) " of " (counted(finding.compared as u64, "element")) " wrong"
                }
                "."
            }
        }
        @if let Some(told_of_drawn) = drawn { p { "Before it was shrunk: " (short(told_of_drawn)) "." } }
    }
}

/// Returns what is told of a failure in words, and its commands.
fn texts(entry: &Entry) -> Markup {
    let run = entry.case.as_ref().filter(|case| {
        let is_end = case.found.as_ref().is_some_and(|found| found.finding.check.is_end());
        case.inputs == InputSource::Generated && !is_end
    });
    let run = if run.is_some() { " --run" } else { "" };
    let explain =
        entry.file.as_ref().map(|file| format!("seamproof explain {} --html case.html{run}", quoted(file)));
    let met = entry.met.map(|(cases, shrunk)| met(cases, shrunk));
    let is_recorded = entry.case.as_ref().is_some_and(|case| case.inputs != InputSource::Generated);
    let state = match (entry.minimal, entry.evaluations) {
        _ if is_recorded => "As it was recorded".to_owned(),
        (_, 0) => "As it was drawn".to_owned(),
        (true, count) => format!("Minimal after {}", counted(count, "evaluation")),
        (false, count) => format!("Not minimal after {}", counted(count, "evaluation")),
    };
    html! {
        p class="faint" {
            @if let Some(met) = &met { (met) ". " }
            (state) "."
        }
        h4 { "Judge it again" }
        pre class="replay" { (told(&entry.replay)) }
        @if let Some(explain) = &explain { h4 { "See all of the case" } pre { (told(explain)) } }
        details {
            summary { "All that was found, in words" }
            @for line in entry.words.lines() { p { (told(line)) } }
            p class="faint" { "Key: " (told(&entry.key)) }
            @if let Some(command) = &entry.try_command { pre { (told(command)) } }
        }
    }
}

/// Returns the beginning of a text that stands where there is little room.
fn short(text: &str) -> String {
    let mut letters = text.chars();
    let kept: String = letters.by_ref().take(SHORT).collect();
    if letters.next().is_some() { told(&(kept + "…")) } else { told(&kept) }
}

fn link(source: &str) -> Markup {
    html! {
        @if source.starts_with("https://") { a href=(told(source)) rel="noreferrer" { (told(source)) } }
        @else { (told(source)) }
    }
}

/// Returns the script to paste.
fn script(entry: &Entry) -> Markup {
    html! {
        @if let Some(script) = &entry.script {
            details {
                summary { "Script to paste: " code { (told(&script.path)) } }
                @if let Some(doubt) = &script.doubt { p class="faint" { (told(doubt)) } }
                @if let Some(text) = &script.text { pre { (whole(text)) } }
            }
        }
    }
}

/// Returns a text without what would disturb its reader, and not cut.
fn whole(text: &str) -> String {
    crate::paste::visible(text, true)
}

/// A picture with its words and numbers.
struct Shown {
    drawing: Drawing,
    lead: &'static str,
    notes: Vec<String>,
    tables: Vec<Table>,
    /// Whether it shows something wrong.
    tells: bool,
}

/// Returns the picture that shows a failure, the same of its drawn case, and the others folded away, as far as all
/// together take at most `fair` bytes.
fn pictures(id: &str, entry: &Entry, runs: &Runs, fair: usize) -> Markup {
    let Some(case) = &entry.case else { return html! {} };
    let mut all = shown(case, &runs.small).into_iter();
    let first = all.next();
    let first = html! { @if let Some(first) = &first { (pictured(id, first)) } };
    let of_drawn = html! { @if let Some((case, again)) = &runs.drawn { (as_drawn(id, case, again)) } };
    let others = html! {
        @for other in all {
            details {
                summary { (other.drawing.title) }
                p class="faint" { (other.lead) }
                (drawn(id, &other))
            }
        }
        @if entry.way.len() > 1 {
            @let drawing = way::way(&entry.way);
            details {
                summary { (drawing.title) }
                (wide(&drawing.inline_as(&format!("{id}-way"))))
            }
        }
    };
    let mut left = fair.saturating_sub(first.0.len());
    let others = Room::take(&mut left, others);
    let of_drawn = Room::take(&mut left, of_drawn);
    html! { (first) (of_drawn.unwrap_or_default()) (others.unwrap_or_default()) }
}

/// Returns what a failure's case looks like as it was drawn, where that shows something wrong.
fn as_drawn(id: &str, case: &Case, again: &Again) -> Markup {
    let first = shown(case, again).into_iter().next().filter(|first| first.tells);
    html! {
        @if first.is_some() || !again.checked.is_empty() {
            h4 { "The same on the case as it was drawn" }
            p class="faint" { (short(&prose::describe(&case.problem))) (world(&case.problem)) }
            @if let Some(schedule) = &again.schedule { (against::against(schedule, &again.checked)) }
            @if let Some(first) = &first { (pictured(&format!("{id}-drawn"), first)) }
        }
    }
}

/// Returns in words which ranks of the world a group has, where these are not the first.
fn world(problem: &Problem) -> String {
    let parallel = &problem.parallel;
    if parallel.ranks.iter().enumerate().all(|(rank, of_world)| rank == *of_world) {
        return String::new();
    }
    let named: Vec<String> = parallel.ranks.iter().take(16).map(ToString::to_string).collect();
    format!("; the group’s ranks are {} of a world of {}", named.join(", "), parallel.world)
}

fn pictured(id: &str, shown: &Shown) -> Markup {
    html! {
        figure {
            figcaption { (shown.drawing.title) ". " (shown.lead) }
            (drawn(id, shown))
        }
    }
}

fn drawn(id: &str, shown: &Shown) -> Markup {
    html! {
        (wide(&shown.drawing.inline_as(&format!("{id}-{}", shown.drawing.id))))
        @for note in &shown.notes { p class="faint" { (told(note)) } }
        @for table in &shown.tables { (table.markup()) }
    }
}

/// Returns the pictures of a case, first the one that shows what is wrong: the schedule where operations are not in
/// order, the pairs where others are shown than the mask shows, the schedule where it is wrong otherwise, the errors
/// where there are any past their bounds, else the pairs around the failing row.
fn shown(case: &Case, again: &Again) -> Vec<Shown> {
    let problem = &case.problem;
    let layouts: Vec<RankLayout> = match &again.schedule {
        Some(schedule) => placed(schedule),
        None => sharding::layouts(problem).unwrap_or_else(|_| vec![sharding::whole(problem)]),
    };
    let followed = again.schedule.as_ref().and_then(|schedule| Followed::new(problem, schedule));
    let matrices = mask::matrices(case, followed.as_ref(), &again.seen);
    let has_wrong_pairs = matrices.iter().any(mask::Matrix::is_wrong);
    let is_past = again.errors.iter().any(|map| map.past().next().is_some());
    let (table, notes) = mask::numbers(problem, &matrices);
    let mut told = mask::differences(problem, followed.as_ref(), &again.seen);
    told.extend(notes);
    let notes = told;
    let pairs = Shown {
        drawing: mask::mask(case, &layouts, &matrices),
        lead: mask::LEAD,
        notes,
        tables: vec![table],
        tells: has_wrong_pairs,
    };
    let rows = Shown {
        drawing: layout::layout(problem, &layouts),
        lead: "The rows of the tensors, and the ranks that hold them.",
        notes: Vec::new(),
        tables: Vec::new(),
        tells: false,
    };
    let errors = (!again.errors.is_empty()).then(|| {
        let (drawing, notes) = errors::errors(case, &layouts, &again.errors);
        Shown {
            drawing,
            lead: errors::LEAD,
            notes,
            tables: vec![errors::numbers(&again.errors)],
            tells: is_past,
        }
    });
    let in_time = again.schedule.as_ref().filter(|_| !again.checked.is_empty()).and_then(|schedule| {
        let (drawing, _, notes) = in_time(problem, schedule, &again.checked, &Parts::none()).ok()?;
        let lead = "What each rank does, stream by stream, as early as the schedule allows. A title says what a bar does.";
        Some(Shown { drawing, lead, notes, tables: Vec::new(), tells: true })
    });
    let is_unordered = again.checked.iter().any(against::is_of_order);
    let has_row = case.found.as_ref().is_some_and(|found| found.finding.place.row.is_some());
    match (is_unordered && in_time.is_some(), has_wrong_pairs, in_time.is_some() || is_past) {
        (true, ..) => vec![in_time, Some(pairs), errors, Some(rows)],
        (_, true, _) => vec![Some(pairs), in_time, errors, Some(rows)],
        (_, _, true) => vec![in_time, errors, Some(pairs), Some(rows)],
        _ if has_row => vec![Some(pairs), errors, Some(rows)],
        _ => vec![Some(rows), Some(pairs), errors],
    }
    .into_iter()
    .flatten()
    .collect()
}

fn gone(gone: &[String]) -> Markup {
    html! {
        @if !gone.is_empty() {
            h2 { "Gone (" (gone.len()) ")" }
            p class="faint" { "Failures that this night has not seen." }
            ul { @for one in gone.iter().take(LISTED_MAX) { li { (short(one)) } } }
            @if gone.len() > LISTED_MAX { p class="faint" { "… and " (gone.len() - LISTED_MAX) " more" } }
        }
    }
}

fn trends(report: &Report) -> Markup {
    html! {
        @if !report.trend.is_empty() {
            section {
                h2 { "Trend over nights" }
                p class="faint" { "The number at the end of a line is that of the last night. Rings mark a p99 that moved against the night before." }
                figure { (wide(&trend::trend(&report.trend).inline())) }
                (trend::numbers(&report.trend).markup())
            }
        }
    }
}

/// Returns margins and census of a campaign.
fn campaign(at: usize, measured: &Measured) -> Markup {
    let missed = measured.census.iter().filter(|class| class.missed.is_some()).count();
    let undrawn = measured.census.iter().filter(|class| class.count == 0).count();
    html! {
        @if !measured.margins.is_empty() {
            section {
                h2 { "Margins: " (told(&measured.campaign)) }
                p class="faint" {
                    "Error ÷ bound of the cases that held, where the error is not 0. The solid line is the bound; the dashed \
                     outline is the night before. Tier R is made of the subject’s locked profile."
                }
                figure { (wide(&margins::margins(measured).inline_as(&format!("margins-{at}")))) }
                details { summary { "Numbers" } (margins::numbers(measured).markup()) }
            }
        }
        section {
            h2 { "Census: " (told(&measured.campaign)) }
            p {
                (counted(measured.drawn, "case")) " drawn; "
                (undrawn) " of " (measured.census.len()) " classes of problems without any, "
                (missed) " with fewer than wanted."
            }
            div class="tall" tabindex="0" { (census(&measured.census).sortable()) }
        }
    }
}

fn census(classes: &[ClassCount]) -> Table {
    let row = |class: &ClassCount| {
        let state = match &class.missed {
            Some(missed) => format!("missed: {missed}"),
            None if class.count == 0 => "not drawn".to_owned(),
            None => "met".to_owned(),
        };
        vec![class.class.clone(), class.count.to_string(), format!("{:.2} %", 100.0 * class.share), state]
    };
    Table {
        name: "Classes of problems",
        head: ["class", "cases", "share", "state"].map(String::from).to_vec(),
        rows: classes.iter().map(row).collect(),
        left: 0,
    }
}
