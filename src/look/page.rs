//! The page: one file that holds everything it shows, and needs neither a script nor the network.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use seamproof_judge::case::{Case, InputSource, Story};
use seamproof_judge::prose;
use seamproof_oracle::Sink;

use super::svg::{Drawing, STYLE, patterns, told};
use super::table::Table;

/// Style of the page around the pictures.
const PAGE_STYLE: &str = include_str!("page.css");
/// Policy that forbids scripts and whatever would be loaded, should a text ever slip through.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// A picture with what stands around it.
pub(super) struct Section {
    pub(super) drawing: Result<Drawing, String>,
    /// Heading.
    pub(super) title: &'static str,
    /// How to read it.
    pub(super) lead: &'static str,
    pub(super) tables: Vec<Table>,
    pub(super) notes: Vec<String>,
}

/// Texts above the pictures.
pub(super) struct Head<'a> {
    pub(super) case: &'a Case,
    /// Name of the case's file.
    pub(super) file: &'a str,
    /// Command that judges the case again.
    pub(super) replay: &'a str,
    /// Faults of the subject that no schedule shows.
    pub(super) unscheduled: &'a [String],
    /// Answer of the checker.
    pub(super) checked: Option<String>,
}

/// Returns the page.
pub(super) fn page(head: &Head, sections: &[Section]) -> String {
    let title = format!("seamproof: {}", head.file);
    let body = html! {
        main {
            h1 { (told(head.file)) }
            (finding(head))
            h2 { "The case" }
            (numbers(head.case))
            @if let Some(story) = &head.case.story { (self::story(story)) }
            @if let Some(checked) = &head.checked {
                h2 { "What the checker says of the schedule" }
                pre { (told(checked)) }
            }
            @for section in sections { (self::section(section)) }
        }
    };
    document(&title, POLICY, "", &body)
}

/// Returns a document, in the form that is both HTML and XML. `policy` says what may be loaded or run, `style` is added
/// to that of all pages.
pub(super) fn document(title: &str, policy: &str, style: &str, body: &Markup) -> String {
    html! {
        (DOCTYPE) "\n"
        html lang="en" xmlns="http://www.w3.org/1999/xhtml" {
            head {
                // Elements without an end.
                (PreEscaped("<meta charset=\"utf-8\"/>\n"))
                (PreEscaped(format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\"/>\n")))
                (PreEscaped("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"))
                (PreEscaped("<meta name=\"referrer\" content=\"no-referrer\"/>\n"))
                title { (told(title)) }
                style { (PreEscaped(PAGE_STYLE)) (PreEscaped(STYLE)) (PreEscaped(style)) }
            }
            body {
                svg xmlns="http://www.w3.org/2000/svg" class="picture patterns" aria-hidden="true" { (patterns()) }
                (body)
            }
        }
        "\n"
    }
    .into_string()
}

fn finding(head: &Head) -> Markup {
    let found = head.case.found.as_ref();
    html! {
        @if let Some(found) = found {
            div class="found" id="finding" {
                p { strong { "Finding" } }
                p { (told(found)) }
                @if let Some(why) = &found.unconfirmed { p { "Not confirmed: " (told(why)) } }
                @if found.finding.identity.is_some() {
                    p class="faint" { "An identity compares this run with others. The pictures show this one; the text of explain shows all." }
                }
            }
        }
        @for what in head.unscheduled {
            p { strong { "Not shown: " } (told(what)) ". The pictures show what is asked of the subject without it." }
        }
        p class="faint" { "Judge it again:" }
        pre id="replay" { (told(head.replay)) }
    }
}

/// Returns the case's own numbers.
fn numbers(case: &Case) -> Markup {
    let problem = &case.problem;
    let (heads, dims, softmax) = (problem.heads, problem.dims, problem.softmax);
    let parallel = &problem.parallel;
    let recorded = case.inputs != InputSource::Generated;
    let described = if recorded { prose::describe_recorded(problem) } else { prose::describe(problem) };
    let options: Vec<String> =
        case.subject.options.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let sink = if softmax.sink == Sink::None { "none".to_owned() } else { prose::word(&softmax.sink) };
    let rows = [
        ("subject", case.subject.name.clone()),
        ("options", if options.is_empty() { "none".to_owned() } else { options.join(", ") }),
        ("problem", described),
        ("sequences", problem.sequences.len().to_string()),
        ("rows of q", problem.rows.q.to_string()),
        ("rows of kv", problem.rows.kv.to_string()),
        ("queries", problem.tokens().to_string()),
        ("visible pairs", format!("{} of each head", problem.pairs())),
        ("heads", format!("{} of q, {} of kv", heads.q, heads.kv)),
        ("head dimensions", format!("{} of q and k, {} of v", dims.qk, dims.v)),
        ("scale", softmax.scale.to_string()),
        ("soft cap", softmax.softcap.map_or("none".to_owned(), |cap| cap.to_string())),
        ("sink", sink),
        (
            "ranks",
            format!("{} of a world of {}, {}", parallel.size(), parallel.world, parallel.algorithm.name()),
        ),
        ("pass", super::schedule::passes(problem).to_owned()),
        ("seeds", format!("{} of the data, {} of the schedule", problem.data_seed, case.schedule_seed)),
    ];
    html! {
        dl id="numbers" { @for (name, value) in rows { dt { (name) } dd { (told(&value)) } } }
        @if !case.before.is_empty() {
            p class="faint" { (prose::counted(case.before.len(), "earlier run")) " must come first, in the same process." }
        }
    }
}

fn story(story: &Story) -> Markup {
    html! {
        h2 { "Why the case is kept" }
        p { (told(&story.text)) }
        ul {
            @for source in &story.sources {
                li {
                    @if source.starts_with("https://") { a href=(told(source)) rel="noreferrer" { (told(source)) } }
                    @else { (told(source)) }
                }
            }
        }
    }
}

/// Returns a picture that scrolls where it is wider than the page, and a switch that makes it three times as wide.
pub(super) fn wide(picture: &Markup) -> Markup {
    html! {
        details class="larger" { summary { "larger" } }
        div class="wide" tabindex="0" { (picture) }
    }
}

fn section(section: &Section) -> Markup {
    html! {
        section {
            h2 { (section.title) }
            p class="faint" { (section.lead) }
            @match &section.drawing {
                Ok(drawing) => figure { (wide(&drawing.inline())) },
                Err(why) => p { (told(why)) },
            }
            @for note in &section.notes { p class="faint" { (told(note)) } }
            @for table in &section.tables { (table.markup()) }
        }
    }
}
