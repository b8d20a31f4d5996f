//! The training files of the shared folder, where it is there: read, tokenised, packed.

use std::ops::Range;
use std::path::{Path, PathBuf};

use longdraft_data::conversation::Conversation;
use longdraft_data::packing::{Overlong, Packing, arrange, fill, pieces};
use longdraft_data::quarantine::Quarantine;
use longdraft_data::reader::read_source;
use longdraft_data::{Document, SourceConfig, TextEncoder};
use serde_json::json;

/// Every four bytes a token: about the lengths of a real tokenizer, without its time.
struct FourBytes;

impl TextEncoder for FourBytes {
    fn encode(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>), String> {
        let ranges = (0..text.len()).step_by(4).map(|at| at..(at + 4).min(text.len()));
        let ranges: Vec<Range<usize>> = ranges.collect();
        Ok((vec![0; ranges.len()], ranges))
    }

    fn render_chat(&self, conversation: &Conversation, prompt: bool) -> Result<String, String> {
        let mut text = String::new();
        for message in &conversation.messages {
            let role = message["role"].as_str().unwrap_or_default();
            let content = message["content"].as_str().unwrap_or_default();
            text.extend(["<|im_start|>", role, "\n", content, "<|im_end|>\n"]);
        }
        Ok(if prompt { text + "<|im_start|>assistant\n" } else { text })
    }

    fn chat_fingerprint(&self) -> Option<String> {
        Some("a template".to_owned())
    }

    fn end_of_text(&self) -> Option<u32> {
        Some(0)
    }

    fn vocabulary(&self) -> usize {
        1
    }

    fn fingerprint(&self) -> String {
        String::new()
    }
}

fn folder() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: {} is not there", folder.display());
    None
}

fn read(folder: &Path, file: &str, learn: &str, rows: usize) -> Vec<Document> {
    let path = folder.join(file);
    let config = json!({"path": path, "template": {"kind": "auto"}, "learn": learn});
    let config: SourceConfig = serde_json::from_value(config).expect("a source");
    let mut quarantine = Quarantine::new(None, 0.0).expect("nothing to remove");
    let (documents, report) =
        read_source(&config, vec![path], &FourBytes, &mut quarantine).expect("no malformed row");
    assert_eq!((report.rows, report.documents), (rows, rows), "{file}");
    documents
}

#[test]
fn every_row_of_every_file_is_read_and_rows_are_filled_to_97_percent() {
    let Some(folder) = folder() else { return };
    let books = read(&folder, "books-general.jsonl.zst", "all", 1667);
    let chat = read(&folder, "chat.jsonl.zst", "assistant", 1837);
    let gsm8k = read(&folder, "gsm8k-train.jsonl.zst", "answer", 7473);
    let long = read(&folder, "books-long.jsonl.zst", "all", 33);
    // Every one of these chats ends with the assistant, so something is learned and never all.
    for document in chat.iter().chain(&gsm8k) {
        let learned = document.learned();
        assert!(learned > 0 && learned < document.ids.len() - 1, "{}", document.origin);
    }
    for (stage, documents, row_tokens) in
        [("base", [books, chat].concat(), 1024), ("long", long, 32768), ("reasoning", gsm8k, 1024)]
    {
        let all = || pieces(&documents, row_tokens, Overlong::Split);
        let packed = arrange(all(), row_tokens, Packing::BestFit);
        let packed = fill(&packed, row_tokens);
        let single = arrange(all(), row_tokens, Packing::None);
        eprintln!("{stage}: {packed:.4} filled, {:.4} unpacked", fill(&single, row_tokens));
        assert!(packed >= 0.97, "{stage}: {packed}");
    }
}
