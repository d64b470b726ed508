//! Numbers under a picture.

use maud::{Markup, html};

use super::svg::told;

/// A table of numbers.
pub(super) struct Table {
    pub(super) name: &'static str,
    pub(super) head: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
    /// Number of further rows that are not shown.
    pub(super) left: usize,
}

impl Table {
    /// Returns the table as markup. Wide ones scroll inside their own frame.
    pub(super) fn markup(&self) -> Markup {
        self.marked("", |name| html! { (told(name)) })
    }

    /// Returns the same with heads by which a script sorts the rows.
    pub(super) fn sortable(&self) -> Markup {
        self.marked("sorts", |name| html! { button type="button" { (told(name)) } })
    }

    fn marked(&self, class: &str, head: impl Fn(&str) -> Markup) -> Markup {
        html! {
            div class="wide" tabindex="0" {
                table class=[(!class.is_empty()).then_some(class)] {
                    caption { (self.name) }
                    thead { tr { @for name in &self.head { th scope="col" { (head(name)) } } } }
                    tbody { @for row in &self.rows { tr { @for cell in row { td { (told(cell)) } } } } }
                }
            }
            @if self.left > 0 { p class="faint" { "… and " (self.left) " more" } }
        }
    }
}
