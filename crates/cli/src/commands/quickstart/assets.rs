//! What the program carries: the demonstration target and the text of the quickstart, both with
//! their licences under `assets/`.

use std::path::{Path, PathBuf};

use longdraft_models::weights::atomic::write_atomically;

use crate::failure::{Failure, Result};

/// A Llama of `conf/pretrain/demonstration.yaml`, Q8_0.
const TARGET: &[u8] = include_bytes!("../../../assets/target/demonstration.gguf");
const TARGET_FILE: &str = "demonstration.gguf";

/// Questions that no draft is trained on.
pub(super) const TEST_FILE: &str = "gsm8k-test-20.jsonl";
/// Text of books, in paragraphs and in long parts; questions with answers.
pub(crate) const BOOKS: &str = "books-excerpt.jsonl";
pub(crate) const LONG_BOOKS: &str = "books-long.jsonl";
pub(crate) const ANSWERS: &str = "gsm8k-train-excerpt.jsonl";

const CORPUS: [(&str, &str); 4] = [
    (BOOKS, include_str!("../../../assets/corpus/books-excerpt.jsonl")),
    (LONG_BOOKS, include_str!("../../../assets/corpus/books-long.jsonl")),
    (ANSWERS, include_str!("../../../assets/corpus/gsm8k-train-excerpt.jsonl")),
    (TEST_FILE, include_str!("../../../assets/corpus/gsm8k-test-20.jsonl")),
];

/// The demonstration target as a file under `output`, where every command can open it.
pub(crate) fn write_target(output: &Path) -> Result<PathBuf> {
    let folder = output.join("target");
    std::fs::create_dir_all(&folder).map_err(Failure::at(&folder))?;
    let path = folder.join(TARGET_FILE);
    if !std::fs::read(&path).is_ok_and(|bytes| bytes == TARGET) {
        write_atomically(&path, TARGET)?;
    }
    Ok(path)
}

/// The text as files, where the data reader and the user can see it.
pub(crate) fn write_corpus(output: &Path) -> Result<PathBuf> {
    let folder = output.join("data");
    std::fs::create_dir_all(&folder).map_err(Failure::at(&folder))?;
    for (name, text) in CORPUS {
        write_atomically(&folder.join(name), text.as_bytes())?;
    }
    Ok(folder)
}
