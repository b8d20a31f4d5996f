//! Files beside weights: configurations, tokenizers, templates
//!
//! Folders come from elsewhere: what looks like such a file may lead to a pipe or a device, which never ends.

use std::fs::Metadata;
use std::path::Path;

use crate::disk::readable_bytes;
use crate::error::{ModelError, Result};

/// Bytes of the longest file that is read. The tokenizers of the largest vocabularies have some 40 MB.
const LONGEST: u64 = 512 << 20;

/// Refuses what is no regular file: opening a pipe waits for its writer, and a device may never end.
///
/// # Errors
/// - missing, unreadable, or no regular file
pub(crate) fn require_file(path: &Path) -> Result<Metadata> {
    let metadata = std::fs::metadata(path).map_err(ModelError::io(path))?;
    if metadata.is_file() {
        Ok(metadata)
    } else {
        Err(ModelError::invalid(path, "not a regular file"))
    }
}

/// All bytes of a file.
///
/// # Errors
/// - missing, unreadable, no regular file, or longer than 512 MiB
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let length = require_file(path)?.len();
    if length > LONGEST {
        let [length, longest] = [length, LONGEST].map(readable_bytes);
        return Err(ModelError::invalid(path, format!("{length}, at most {longest} are read")));
    }
    std::fs::read(path).map_err(ModelError::io(path))
}

/// As [`read`] for text.
///
/// # Errors
/// - as [`read`], or not UTF-8
pub(crate) fn read_text(path: &Path) -> Result<String> {
    String::from_utf8(read(path)?)
        .map_err(|error| ModelError::invalid(path, format!("not UTF-8: {}", error.utf8_error())))
}

/// As [`read_text`]; none where nothing is at the path.
///
/// # Errors
/// - as [`read_text`]
pub(crate) fn read_text_if_there(path: &Path) -> Result<Option<String>> {
    if !path.try_exists().map_err(ModelError::io(path))? {
        return Ok(None);
    }
    read_text(path).map(Some)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn no_memory_is_taken_for_a_file_of_nothing_but_holes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("chat_template.jinja");
        assert_eq!(read_text_if_there(&path).expect("none"), None);
        File::create(&path).and_then(|file| file.set_len(LONGEST + 1)).expect("a file");
        let text = read_text_if_there(&path).expect_err("refused").to_string();
        assert!(text.contains("512 MiB are read"), "{text}");
    }
}
