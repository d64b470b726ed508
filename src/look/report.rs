//! The page of a folder: what was found first, then what was measured.
//!
//! One file, without network. All of it shows without a script; the one script sorts tables, and the policy of the page
//! lets no other run. The data stands in the page once more as JSON (`docs/look.md`), for programs.

use maud::{Markup, PreEscaped, html};
use seamproof_judge::prose::counted;
use seamproof_oracle::sharding::{self, RankLayout};
use serde::Serialize;

use super::page::document;
use super::svg::{Drawing, told};
use super::table::Table;
use super::{errors, layout, margins, mask, placed, trend, way};
use crate::campaign::{Tone, met};
use crate::explain::Followed;
use crate::paste::quoted;
use crate::report::{Again, ClassCount, Entry, Kind, Measured, Report, State, again};

/// Style of the page, beside that of all pages.
const STYLE: &str = include_str!("report.css");
/// Script of the page.
const SCRIPT: &str = include_str!("report.js");
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
/// Largest number of campaigns whose margins and census are shown.
const CAMPAIGNS_MAX: usize = 12;

/// Returns the page.
pub(crate) fn page(report: &Report) -> String {
    let head = html! {
        p class="faint" { (told(&report.title)) " · " (told(&report.folder)) }
        h1 id="sentence" class=(tone(report.tone)) { (short(&report.sentence)) }
        (contents(report))
        (doubts(&report.doubts))
    };
    let rest = html! {
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
    let articles = articles(report, room);
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
    let policy = format!("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{SCRIPT_HASH}'");
    document(&title, &policy, STYLE, &body)
}

/// Returns the report as JSON that neither ends its element nor means anything in XML. Where it is too long, the last
/// failures are left out and counted.
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

fn escaped(value: &impl Serialize) -> String {
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
fn contents(report: &Report) -> Markup {
    html! {
        @if report.findings.len() > 1 {
            nav aria-label="Findings" {
                ol {
                    @for (at, entry) in report.findings.iter().enumerate() {
                        li { a href=(format!("#{}", anchor(at))) { (short(&entry.sentence)) } " " (tags(report.kind, entry)) }
                    }
                }
            }
        }
    }
}

/// Returns the state of a failure in a word, where the page tells several apart.
fn tags(kind: Kind, entry: &Entry) -> Markup {
    let state = match entry.state {
        State::New if kind == Kind::Night => Some("new"),
        State::New => None,
        State::Again => Some("also the night before"),
        State::Kept => Some("as drawn"),
        State::Own => Some("by itself"),
        State::Flaky => Some("flaky"),
        State::Known => Some("known"),
    };
    html! {
        @if let Some(state) = state { span class="tag" { (state) } }
        @if let Some(campaign) = &entry.campaign { span class="tag" { (told(campaign)) } }
    }
}

fn doubts(doubts: &[String]) -> Markup {
    html! {
        @if !doubts.is_empty() {
            h2 { "What to know" }
            ul { @for doubt in doubts.iter().take(LISTED_MAX) { li { (short(doubt)) } } }
            @if doubts.len() > LISTED_MAX { p class="faint" { "… and " (doubts.len() - LISTED_MAX) " more" } }
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
fn articles(report: &Report, mut room: Room) -> Vec<(State, Markup)> {
    let again = again(&report.findings);
    let of_entry = |(at, (entry, again)): (usize, (&Entry, &Again))| {
        let fair = FAIR * room.pictures / (report.findings.len() - at);
        (entry.state, article(at, report.kind, entry, (again, fair), &mut room))
    };
    report.findings.iter().zip(&again).enumerate().map(of_entry).collect()
}

/// Returns a failure, with as much as there is room for. Its pictures may take `fair` bytes, the first of them more.
fn article(at: usize, kind: Kind, entry: &Entry, (again, fair): (&Again, usize), room: &mut Room) -> Markup {
    let id = anchor(at);
    let texts = Room::take(&mut room.texts, texts(entry));
    let shown = texts.is_some().then(|| pictures(&id, entry, again, fair));
    let shown = shown.and_then(|pictures| Room::take(&mut room.pictures, pictures));
    let pasted = Room::take(&mut room.pictures, script(entry));
    html! {
        article id=(id) {
            h3 { (at + 1) ". " (short(&entry.sentence)) }
            p { (tags(kind, entry)) (short(&entry.problem)) }
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

/// Returns what is told of a failure in words, and its commands.
fn texts(entry: &Entry) -> Markup {
    let explain =
        entry.file.as_ref().map(|file| format!("seamproof explain {} --html case.html", quoted(file)));
    let met = entry.met.map(|(cases, shrunk)| met(cases, shrunk));
    let state = match (entry.minimal, entry.evaluations) {
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
            p { (told(&entry.words)) }
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
}

/// Returns the picture that shows a failure, and the others folded away where all together take at most `fair` bytes.
fn pictures(id: &str, entry: &Entry, again: &Again, fair: usize) -> Markup {
    let mut all = shown(entry, again).into_iter();
    let first = all.next();
    let first = html! {
        @if let Some(first) = &first {
            figure {
                figcaption { (first.drawing.title) ". " (first.lead) }
                (drawn(id, first))
            }
        }
    };
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
                div class="wide" tabindex="0" { (drawing.inline_as(&format!("{id}-way"))) }
            }
        }
    };
    if first.0.len() + others.0.len() <= fair {
        html! { (first) (others) }
    } else {
        first
    }
}

fn drawn(id: &str, shown: &Shown) -> Markup {
    html! {
        div class="wide" tabindex="0" { (shown.drawing.inline_as(&format!("{id}-{}", shown.drawing.id))) }
        @for note in &shown.notes { p class="faint" { (told(note)) } }
        @for table in &shown.tables { (table.markup()) }
    }
}

/// Returns the pictures of a failure, first the one that shows it: the pairs where launches are asked for others than the
/// mask shows, else the errors where there are any past their bounds, else the pairs around the failing row.
fn shown(entry: &Entry, again: &Again) -> Vec<Shown> {
    let Some(case) = &entry.case else { return Vec::new() };
    let problem = &case.problem;
    let layouts: Vec<RankLayout> = match &again.schedule {
        Some(schedule) => placed(schedule),
        None => sharding::layouts(problem).unwrap_or_else(|_| vec![sharding::whole(problem)]),
    };
    let followed = again.schedule.as_ref().and_then(|schedule| Followed::new(problem, schedule));
    let matrices = mask::matrices(case, followed.as_ref());
    let is_asked_wrongly = matrices.iter().any(mask::Matrix::is_wrong);
    let (table, notes) = mask::numbers(problem, &matrices);
    let pairs = Shown {
        drawing: mask::mask(case, &layouts, &matrices),
        lead: "The pairs of query and key that the mask shows, beside those that the launches are asked to show.",
        notes,
        tables: vec![table],
    };
    let rows = Shown {
        drawing: layout::layout(problem, &layouts),
        lead: "The rows of the tensors, and the ranks that hold them.",
        notes: Vec::new(),
        tables: Vec::new(),
    };
    let is_past = again.errors.iter().flat_map(|map| &map.rows).any(|row| row.ratio > 1.0);
    let errors = (!again.errors.is_empty()).then(|| {
        let (drawing, notes) = errors::errors(case, &layouts, &again.errors);
        Shown {
            drawing,
            lead: "Error ÷ bound of each row and head, as the case runs here.",
            notes,
            tables: vec![errors::numbers(&again.errors)],
        }
    });
    let has_row = entry.finding.as_ref().is_some_and(|finding| finding.place.row.is_some());
    match (is_asked_wrongly, is_past, has_row) {
        (true, ..) | (false, false, true) => [Some(pairs), errors, Some(rows)],
        (false, true, _) => [errors, Some(pairs), Some(rows)],
        (false, false, false) => [Some(rows), Some(pairs), errors],
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
                figure { div class="wide" tabindex="0" { (trend::trend(&report.trend).inline()) } }
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
                figure { div class="wide" tabindex="0" { (margins::margins(measured).inline_as(&format!("margins-{at}"))) } }
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
