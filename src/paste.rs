//! Text that goes into other texts: commands for a shell, code in Markdown.

use std::path::Path;

/// Returns the command that judges a case, or a folder of cases, again; on another subject than the case's own if one
/// is given. The command can be pasted into a POSIX shell as it is.
pub fn replay_command(path: &Path, subject: Option<&str>) -> String {
    let path = path.display().to_string();
    let path = if path.starts_with('-') { format!("./{path}") } else { path };
    let backend = subject.map_or(String::new(), |subject| format!(" --backend {}", quoted(subject)));
    format!("seamproof replay {}{backend}", quoted(&path))
}

/// Returns a word as a POSIX shell takes it: in single quotes where it has anything but letters, digits and harmless
/// signs.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_alphanumeric() || "_@%+=:,./-~".contains(letter);
    match !word.is_empty() && !word.starts_with('~') && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Returns a text as code in Markdown, between more backticks than any run of them in the text.
pub fn code(text: &str) -> String {
    let longest = text.split(|letter| letter != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest + 1);
    let edge = if text.starts_with('`') || text.ends_with('`') { " " } else { "" };
    format!("{fence}{edge}{text}{edge}{fence}")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Test that the command comes out of a shell as it was meant.
    #[test]
    fn a_command_is_quoted_where_a_shell_needs_it() {
        let plain =
            replay_command(Path::new("nights/night-0001/a_b.json"), Some("emulated~reorder:q_tile=2,k=3"));
        assert_eq!(
            plain,
            "seamproof replay nights/night-0001/a_b.json --backend emulated~reorder:q_tile=2,k=3"
        );
        assert_eq!(quoted("größe/my nights"), "'größe/my nights'");
        assert_eq!(replay_command(Path::new("-x"), None), "seamproof replay ./-x");
        let words = [
            "a b",
            "it's",
            "`id`",
            "$HOME",
            "~",
            "",
            "a;b&c|d>e",
            "\\",
            "*?[x]{a,b}",
            "!\"#",
            "\u{3000}",
            "'",
        ];
        for word in words {
            let script = format!("printf %s {}", quoted(word));
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout), word);
        }
    }

    #[test]
    fn code_ends_where_it_should() {
        assert_eq!(code("a b"), "`a b`");
        assert_eq!(code("a`b``c"), "```a`b``c```");
        assert_eq!(code("`"), "`` ` ``");
    }
}
