//! Parts that all pictures share: their frame, their legend, numbers and texts.

use std::fmt::Display;

use maud::{Markup, PreEscaped, html};

use crate::paste::visible;

/// Width of a picture, in its own units. Heights follow from what is in it.
pub(super) const WIDTH: f64 = 760.0;
/// Largest number of characters of a text from a file.
const TEXT_MAX: usize = 4096;
/// Width of a letter in the size that pictures use, at most.
const LETTER: f64 = 6.7;

/// Colours, and what they fill. A page has them once, and a picture that stands alone brings them along.
pub(super) const STYLE: &str = include_str!("picture.css");

/// A picture: markup inside of a frame, with the texts that stand in its place.
pub(super) struct Drawing {
    /// Name, unique on a page.
    pub(super) id: &'static str,
    /// Title, in a few words.
    pub(super) title: String,
    /// What the picture shows, for who cannot see it.
    pub(super) desc: String,
    /// Height in the picture's units.
    pub(super) height: f64,
    /// Everything in the frame.
    pub(super) body: Markup,
}

impl Drawing {
    /// Returns the picture as part of a page.
    pub(super) fn inline(&self) -> Markup {
        self.framed(self.id, &html! {})
    }

    /// Returns the picture as part of a page that has others of its name: `id` is its own.
    pub(super) fn inline_as(&self, id: &str) -> Markup {
        self.framed(id, &html! {})
    }

    /// Returns the picture as a file of its own.
    pub(super) fn alone(&self) -> String {
        let own = html! { style { (PreEscaped(STYLE)) } (patterns()) };
        let xml = PreEscaped("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        html! { (xml) (self.framed(self.id, &own)) "\n" }.into_string()
    }

    fn framed(&self, id: &str, own: &Markup) -> Markup {
        let (title, desc) = (format!("{id}-title"), format!("{id}-desc"));
        html! {
            svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img"
                width=(number(WIDTH)) height=(number(self.height))
                viewBox=(format!("0 0 {} {}", number(WIDTH), number(self.height)))
                aria-labelledby=(format!("{title} {desc}")) {
                title id=(title) { (told(&self.title)) }
                desc id=(desc) { (told(&self.desc)) }
                (own)
                (self.body)
            }
        }
    }
}

/// Returns the patterns that tell fills apart without colours.
pub(super) fn patterns() -> Markup {
    let pattern = |id: &str, path: &str, kind: &str| {
        html! {
            pattern id=(id) width="6" height="6" patternUnits="userSpaceOnUse" {
                rect class=(format!("ground {kind}")) width="6" height="6" {}
                path class=(format!("lines {kind}")) d=(path) {}
            }
        }
    };
    html! {
        defs {
            (pattern("fill-padding", "M-1 7L7 -1M-1 1L1 -1M5 7L7 5", "on-padding"))
            (pattern("fill-partly", "M-1 -1L7 7M-1 5L1 7M5 -1L7 1", "on-partly"))
            (pattern("fill-missing", "M1 1L5 5M5 1L1 5", "on-missing"))
            (pattern("fill-extra", "M3 0.5V5.5M0.5 3H5.5", "on-extra"))
            (pattern("fill-twice", "M0 2H6M0 5H6", "on-twice"))
            (pattern("fill-several", "M1 1h1v1h-1zM4 4h1v1h-1z", "on-several"))
            (pattern("fill-wait", "M2.5 2.5h1v1h-1z", "on-wait"))
            marker id="arrow" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto" {
                path class="arrowhead" d="M0 0L6 3L0 6z" {}
            }
        }
    }
}

/// Returns a number of a picture with one decimal at most: pictures are the same bytes on every machine.
pub(super) fn number(value: f64) -> String {
    format!("{}", (value * 10.0).round() / 10.0)
}

/// Returns a text that may come from a file, without what would disturb its reader, and cut where it is long. Markup
/// in it is escaped where it is put into a page.
pub(super) fn told(text: &(impl Display + ?Sized)) -> String {
    let text = text.to_string();
    let mut letters = text.chars();
    let kept: String = letters.by_ref().take(TEXT_MAX).collect();
    let left = letters.count();
    let cut = if left > 0 { format!(" … and {left} more characters") } else { String::new() };
    visible(&kept, true) + &cut
}

/// Returns a ratio with as many digits as tell something.
pub(super) fn ratio(value: f64) -> String {
    match value {
        _ if value.is_nan() || value.is_infinite() => "no number".to_owned(),
        0.0 => "0".to_owned(),
        _ if value.fract() == 0.0 && value.abs() < 1e6 => format!("{value:.0}"),
        _ if !(0.001..100_000.0).contains(&value) => format!("{value:.1e}"),
        _ if value < 10.0 => format!("{value:.3}"),
        _ => format!("{value:.1}"),
    }
}

/// Returns a rectangle with a title, which shows when a pointer rests on it.
pub(super) fn block(class: &str, [x, y, width, height]: [f64; 4], title: &str) -> Markup {
    html! {
        rect class=(class) x=(number(x)) y=(number(y)) width=(number(width.max(0.4))) height=(number(height)) {
            title { (told(title)) }
        }
    }
}

/// Returns a text that begins at a place.
pub(super) fn words(class: &str, [x, y]: [f64; 2], text: &str) -> Markup {
    html! { text class=(class) x=(number(x)) y=(number(y)) { (told(text)) } }
}

/// Returns a text in the middle of a width, where there is room for it.
pub(super) fn label(class: &str, [x, y]: [f64; 2], width: f64, text: &str) -> Option<Markup> {
    let fits = text.chars().count() as f64 * LETTER + 2.0 <= width;
    fits.then(|| words(&format!("{class} middle"), [x + width / 2.0, y], text))
}

/// Returns a legend, line after line, and its height.
pub(super) fn legend(entries: &[(&str, &str)]) -> (Markup, f64) {
    let (mut x, mut y) = (0.0, 2.0);
    let mut placed = Vec::new();
    for (class, text) in entries {
        let width = 20.0 + text.chars().count() as f64 * LETTER + 14.0;
        if x > 0.0 && x + width > WIDTH {
            (x, y) = (0.0, y + 20.0);
        }
        placed.push((class, text, x, y));
        x += width;
    }
    let markup = html! {
        @for (class, text, x, y) in placed {
            @if class.starts_with("line") {
                path class=(class) d=(format!("M{} {}h14", number(x), number(y + 6.0))) {}
            } @else {
                rect class=(class) x=(number(x)) y=(number(y)) width="14" height="12" {}
            }
            (words("", [x + 19.0, y + 10.0], text))
        }
    };
    (markup, y + 26.0)
}
