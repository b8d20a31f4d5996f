//! `data prepare` beside the tokenizers crate alone on the same texts, alternately, equal threads.
//!
//! ```sh
//! cargo bench --bench tokenize -- TARGET [DATA.jsonl ...] [--rounds N] [--threads N] [--repeat N]
//! ```
//!
//! Ours reads and checks rows, applies the template, encodes, masks by offsets, hashes and writes
//! shards. The crate alone encodes the rendered texts, which are ready in memory, with
//! `encode_batch`, a thousand at a time. Every measurement is a process of its own: what one side
//! leaves in the heap would slow the other. Without data the excerpts of assets/corpus are taken.
//! Every file is read `--repeat` times (4): a set of several shards, as users have. Printed: bytes of
//! text a second on both sides and the median of ratios over rounds.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use longdraft_data::conversation::Conversation;
use longdraft_data::prepare::{PrepareOptions, Source, prepare};
use longdraft_data::source::SourceConfig;
use longdraft_data::{GeneratedText, TextEncoder};
use longdraft_models::target_model::Target;
use longdraft_train::stage::Encoder;
use tokenizers::Tokenizer;

/// Text of a shard.
const SHARD_BYTES: usize = 4 << 20;
/// Texts that the crate encodes at once.
const BATCH: usize = 1000;

type Failure = Box<dyn std::error::Error>;

/// Remembers what is encoded.
struct Recorder<'a> {
    inner: Encoder<'a>,
    texts: Mutex<Vec<String>>,
}

impl TextEncoder for Recorder<'_> {
    fn encode(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>), String> {
        self.texts.lock().map_err(|error| error.to_string())?.push(text.to_owned());
        self.inner.encode(text)
    }

    fn render_chat(&self, conversation: &Conversation, prompt: bool) -> Result<String, String> {
        self.inner.render_chat(conversation, prompt)
    }

    fn render_generated(
        &self,
        conversation: &Conversation,
    ) -> Result<Option<GeneratedText>, String> {
        self.inner.render_generated(conversation)
    }

    fn chat_fingerprint(&self) -> Option<String> {
        self.inner.chat_fingerprint()
    }

    fn end_of_text(&self) -> Option<u32> {
        self.inner.end_of_text()
    }

    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }

    fn fingerprint(&self) -> String {
        self.inner.fingerprint()
    }
}

fn main() -> Result<(), Failure> {
    let (mut data, mut rounds, mut threads, mut repeat) = (Vec::new(), 5, 2, 4_usize);
    let mut side = None;
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--rounds" => rounds = arguments.next().ok_or("--rounds N")?.parse()?,
            "--threads" => threads = arguments.next().ok_or("--threads N")?.parse()?,
            "--repeat" => repeat = arguments.next().ok_or("--repeat N")?.parse()?,
            "--side" => side = arguments.next(),
            _ => data.push(PathBuf::from(argument)),
        }
    }
    if data.is_empty() {
        println!("tokenize: no target given, nothing to measure");
        return Ok(());
    }
    let target = data.remove(0).display().to_string();
    if data.is_empty() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/corpus");
        data.push(corpus.join("books-excerpt.jsonl"));
        data.push(corpus.join("gsm8k-train-excerpt.jsonl"));
    }
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    let work = tempfile::tempdir()?;
    let tokenizer = Target::open_tokenizer(&target)?;
    let config = Target::open_config(&target)?;
    match side.as_deref() {
        Some("ours") => {
            let seconds = ours(&data, &Encoder::new(&tokenizer, &config), work.path())?;
            println!("{seconds}");
            return Ok(());
        }
        Some(_) => {
            println!("{}", alone(&data[0], work.path(), |folder| Ok(tokenizer.save(folder)?))?);
            return Ok(());
        }
        None => {}
    }
    for path in data {
        let recorder =
            Recorder { inner: Encoder::new(&tokenizer, &config), texts: Mutex::new(Vec::new()) };
        ours(&vec![path.clone(); repeat], &recorder, work.path())?;
        let texts = recorder.texts.into_inner()?;
        let bytes: usize = texts.iter().map(String::len).sum();
        let texts_file = work.path().join("texts.json");
        std::fs::write(&texts_file, serde_json::to_vec(&texts)?)?;
        let run = |side: &str, files: &[PathBuf]| -> Result<f64, Failure> {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg(&target).args(files).args(["--side", side]);
            let output = command.args(["--threads", &threads.to_string()]).output()?;
            Ok(String::from_utf8(output.stdout)?.trim().parse()?)
        };
        let mut ratios = Vec::new();
        for _ in 0..rounds {
            let ours = run("ours", &vec![path.clone(); repeat])?;
            let alone = run("alone", std::slice::from_ref(&texts_file))?;
            ratios.push(alone / ours);
            println!(
                "  {:.1} MB/s ours, {:.1} MB/s the crate alone",
                bytes as f64 / ours / 1e6,
                bytes as f64 / alone / 1e6
            );
        }
        ratios.sort_by(f64::total_cmp);
        println!("{}: ratio {:.3}", path.display(), ratios[ratios.len() / 2]);
    }
    Ok(())
}

/// Seconds of the crate alone on the texts of a file.
fn alone(
    texts: &Path,
    work: &Path,
    save: impl Fn(&Path) -> Result<(), Failure>,
) -> Result<f64, Failure> {
    save(work)?;
    let tokenizer =
        Tokenizer::from_file(work.join("tokenizer.json")).map_err(|error| error.to_string())?;
    let texts: Vec<String> = serde_json::from_slice(&std::fs::read(texts)?)?;
    let started = Instant::now();
    let mut tokens = 0;
    for batch in texts.chunks(BATCH) {
        let batch: Vec<&str> = batch.iter().map(String::as_str).collect();
        let encoded = tokenizer.encode_batch(batch, false).map_err(|error| error.to_string())?;
        tokens += encoded.iter().map(tokenizers::Encoding::len).sum::<usize>();
    }
    assert!(tokens > 0, "the crate encoded nothing");
    Ok(started.elapsed().as_secs_f64())
}

/// Seconds of a preparation of files from nothing.
fn ours(files: &[PathBuf], encoder: &dyn TextEncoder, work: &Path) -> Result<f64, Failure> {
    let config: SourceConfig = serde_json::from_value(
        serde_json::json!({ "path": files[0], "template": { "kind": "auto" } }),
    )?;
    let sources = [Source { config, paths: files.to_vec() }];
    let output = work.join("shards");
    if output.exists() {
        std::fs::remove_dir_all(&output)?;
    }
    let options = PrepareOptions { output, shard_bytes: SHARD_BYTES, max_bad_rows: 0.0 };
    let started = Instant::now();
    prepare(&sources, encoder, &options, &mut |_| {})?;
    Ok(started.elapsed().as_secs_f64())
}
