//! What a hub may call things that become part of a path here.

/// Bytes of one part of a path.
const LONGEST: usize = 255;

/// `org/name` with the characters that the hub allows.
pub fn is_repository(text: &str) -> bool {
    let part = |text: &str| {
        is_part(text)
            && !text.starts_with('-')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    text.split_once('/').is_some_and(|(org, name)| part(org) && part(name))
}

/// Whether a text ends as files of weights do: a path on this machine, and no repository.
pub fn is_weight_file(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    [".gguf", ".safetensors"].iter().any(|ending| text.ends_with(ending))
}

/// A file's name in a repository: parts joined by `/` that stay inside it on every system.
pub fn is_file_name(text: &str) -> bool {
    text.split('/').all(is_inside)
}

/// A branch, a tag or a commit as a user names it.
pub(super) fn is_revision(text: &str) -> bool {
    is_file_name(text)
}

/// A commit or an entity tag: a single part of a path without anything special.
pub(super) fn is_key(text: &str) -> bool {
    is_part(text) && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-+=~".contains(c))
}

/// A part that does not hide.
fn is_part(text: &str) -> bool {
    is_inside(text) && !text.starts_with('.')
}

/// A part that climbs nowhere, is no drive and holds no character that ends or splits a path.
fn is_inside(text: &str) -> bool {
    let unfit = |c: char| c.is_control() || c == '\\' || (cfg!(windows) && c == ':');
    !matches!(text, "" | "." | "..") && text.len() <= LONGEST && !text.contains(unfit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_org_and_name_is_a_repository() {
        assert!(is_repository("Qwen/Qwen2.5-0.5B"));
        for text in ["model", "/abs/path", "../up", "a/b/c", "./a", "a/", "a/..", "-a/b", "a/b?c"] {
            assert!(!is_repository(text), "{text}");
        }
    }

    #[test]
    fn names_stay_in_their_repository() {
        for name in ["a.json", "main/train-0.parquet", ".gitattributes", "a b/ü.txt", "..a/b.."] {
            assert!(is_file_name(name), "{name}");
        }
        let long = "a".repeat(LONGEST + 1);
        for name in [
            "",
            ".",
            "..",
            "../a",
            "a/..",
            "a/../../b",
            "/etc/passwd",
            "a//b",
            "a/",
            "..\\a",
            "a\\b",
            "C:\\a",
            "a\0b",
            "a\nb",
            "a\u{1b}[2J",
            "a\u{85}",
            &long,
        ] {
            assert!(!is_file_name(name), "{name:?}");
        }
    }

    #[test]
    fn commits_and_tags_are_plain() {
        assert!(is_key("0123abc") && is_key("d41d8cd9-5") && is_key("model.safetensors"));
        for key in ["", ".", "..", "../x", "a/b", "/x", ".hidden", "a b", "a\0", "a\\b", "x:y"] {
            assert!(!is_key(key), "{key:?}");
        }
    }
}
