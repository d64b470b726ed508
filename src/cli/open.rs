//! `--open`: a page in the reader's browser.

use std::path::Path;

use super::output::note;

/// Opens a page with the program that `$BROWSER` names, or else with the one that the system has for pages. Where
/// neither does it, that is said, and nothing fails.
pub(super) fn open_page(page: &Path) {
    let whole = page.canonicalize().unwrap_or_else(|_| page.to_owned());
    let named = std::env::var("BROWSER").ok().filter(|name| !name.is_empty());
    let by_name = named.map(|name| open::with_detached(&whole, name));
    let opened = match by_name {
        Some(Ok(())) => Ok(()),
        _ => open::that_detached(&whole),
    };
    if let Err(why) = opened {
        note(&format_args!("--open: nothing here opens pages ({why}); the page is {}", whole.display()));
    }
}
