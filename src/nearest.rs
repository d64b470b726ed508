//! The name that somebody may have meant.

/// Least likeness of two names, from 0 to 1, for one to be taken for the other.
const LIKENESS_LEAST: f64 = 0.8;

/// Returns, as words behind a name that nobody knows, the known one that is most like it; nothing where none is.
pub(crate) fn did_you_mean<'a>(asked: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let likeness = |name: &'a str| (strsim::jaro_winkler(asked, name), name);
    let nearest = known.into_iter().map(likeness).max_by(|(one, _), (other, _)| one.total_cmp(other));
    match nearest.filter(|(likeness, _)| *likeness >= LIKENESS_LEAST) {
        Some((_, name)) => format!(" (did you mean '{name}'?)"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_pen_is_told_from_another_name() {
        let known = ["window-dropped", "scale-dropped", "emulated"];
        assert_eq!(did_you_mean("window-droped", known), " (did you mean 'window-dropped'?)");
        assert_eq!(did_you_mean("emulatd", known), " (did you mean 'emulated'?)");
        assert_eq!(did_you_mean("cudnn", known), "");
        assert_eq!(did_you_mean("", []), "");
    }
}
