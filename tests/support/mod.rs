//! A tiny random target on disk, and ways to run the binary.

#![allow(dead_code, reason = "every test file uses a part of this")]

pub(crate) mod converted;
pub(crate) mod files;
pub(crate) mod gguf;
pub(crate) mod hub;
pub(crate) mod processes;
pub(crate) mod ranks;
pub(crate) mod runs;
pub(crate) mod server;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use candle_core::quantized::gguf_file::Value as GgufValue;
use candle_core::{DType, Device, Tensor};
use longdraft_models::TargetConfig;
use longdraft_models::target_model::{
    MtpBlock, PackedSequence, Tap, Taps, Target, TargetOptions, tensor_specs,
};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::gguf::header::{Header, StoredTensor};
use longdraft_models::weights::gguf::write;
use longdraft_models::weights::memory::MemorySource;
use serde_json::{Value, json};

use files::{Tensors, change_tensors, write_tensors};

/// Bytes, start and end of text.
pub(crate) const VOCABULARY: usize = 258;

/// The binary with arguments, one thread.
pub(crate) fn longdraft(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longdraft"));
    command.args(arguments).args(["--threads", "1"]).env("NO_COLOR", "1");
    command
}

/// A server that runs, by the arguments of `serve` with `--port 0 --json`, and its address.
pub(crate) fn serving(arguments: &[&str]) -> (Child, String) {
    let mut command = longdraft(arguments);
    command.env_remove("LONGDRAFT_API_KEY").stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().expect("the binary starts");
    let mut line = String::new();
    let stdout = child.stdout.take().expect("stdout");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    let ready: Value = serde_json::from_str(&line).expect("the line is JSON");
    (child, ready["address"].as_str().expect("an address").to_owned())
}

/// A place for this process's jobs: jobs that start at once would race to make a common one, and
/// Open MPI ends the one that comes second.
pub(crate) fn session_folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("longdraft-mpi-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// The binary over ranks of one thread each.
pub(crate) fn mpirun(ranks: usize, arguments: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    command
        .args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
        .arg(env!("CARGO_BIN_EXE_longdraft"))
        .args(arguments)
        .args(["--threads", "1"])
        .envs([("NO_COLOR", "1"), ("OMPI_MCA_btl_vader_single_copy_mechanism", "none")])
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        // Ranks that wait let others have their core.
        .env("OMPI_MCA_mpi_yield_when_idle", "1")
        .env("OMPI_MCA_orte_tmpdir_base", session_folder());
    command
}

/// Words as commands take them.
pub(crate) fn borrowed(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

pub(crate) fn finished(command: &mut Command) -> Output {
    command.output().expect("the binary starts")
}

/// Runs the binary.
pub(crate) fn run(arguments: &[&str]) -> Output {
    finished(&mut longdraft(arguments))
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What was told on stderr by a process, which must have ended with `code`.
#[track_caller]
pub(crate) fn told_by(output: &Output, code: i32) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    text
}

/// The output of a process, which must have succeeded.
#[track_caller]
pub(crate) fn succeeded(output: Output) -> Output {
    assert!(output.status.success(), "{}", stderr(&output));
    output
}

/// Runs the binary, which must succeed; returns its stdout.
#[track_caller]
pub(crate) fn succeed(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?} failed: {}", stderr(&output));
    stdout(&output)
}

/// Runs the binary, which must succeed; returns its stderr.
#[track_caller]
pub(crate) fn noted(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?} failed: {}", stderr(&output));
    stderr(&output)
}

/// Runs the binary, which must end with `code` and without a panic; returns its stderr.
#[track_caller]
pub(crate) fn fail(arguments: &[&str], code: i32) -> String {
    let output = run(arguments);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
    assert!(text.starts_with("error: ") || text.contains("\nerror: "), "no error line: {text}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// The same where all of these words must be told.
#[track_caller]
pub(crate) fn fail_with(arguments: &[&str], code: i32, words: &[&str]) -> String {
    let text = fail(arguments, code);
    require_words(&text, words);
    text
}

#[track_caller]
pub(crate) fn require_words(text: &str, words: &[&str]) {
    for part in words {
        assert!(text.contains(part), "{part} not in {text}");
    }
}

/// What `generate` says of a target, without a panic and with exit 1.
#[track_caller]
pub(crate) fn complaint(target: &Path) -> String {
    let target = target.display().to_string();
    fail(&["generate", "--target", &target, "--no-draft", "--prompt", "a"], 1)
}

/// The last line of `--json` output.
#[track_caller]
pub(crate) fn last_json(text: &str) -> Value {
    let line = text.trim_end().lines().last().unwrap_or_default();
    serde_json::from_str(line).expect("the last line is JSON")
}

/// Names and bytes of a folder's files.
pub(crate) fn files(folder: &str) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).expect("folder").flatten();
    entries
        .filter(|entry| entry.path().is_file())
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, std::fs::read(entry.path()).expect("file"))
        })
        .collect()
}

/// Published configuration keys of a tiny model.
pub(crate) fn tiny_config(kind: &str) -> Value {
    json!({
        "model_type": kind, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "initializer_range": 0.3,
        "bos_token_id": 256, "eos_token_id": 257
    })
}

/// A configuration with other values of some keys.
pub(crate) fn with(mut config: Value, keys: Value) -> Value {
    let Value::Object(keys) = keys else { panic!("no keys: {keys}") };
    config.as_object_mut().expect("keys").extend(keys);
    config
}

/// The same for a family with mixtures of experts; the draft's three layers fit in it.
pub(crate) fn tiny_mixture(kind: &str) -> Value {
    let experts = json!({
        "num_hidden_layers": 4, "num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "norm_topk_prob": kind == "qwen3_moe", "intermediate_size": 64
    });
    with(tiny_config(kind), experts)
}

/// A tokenizer whose tokens are bytes.
pub(crate) fn byte_tokenizer() -> Value {
    let mut vocabulary: serde_json::Map<String, Value> =
        (0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte))).collect();
    vocabulary.insert("<s>".into(), json!(256));
    vocabulary.insert("</s>".into(), json!(257));
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false
        })
    };
    json!({
        "version": "1.0", "added_tokens": [special(256, "<s>"), special(257, "</s>")],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": true,
            "unk_token": "<s>", "fuse_unk": false
        }
    })
}

/// Random tensors of a configuration.
pub(crate) fn random_tensors(config: &Value) -> MemorySource {
    let config = TargetConfig::from_json(config).expect("valid configuration");
    MemorySource::random(&tensor_specs(&config), 0.3, 7).expect("random tensors")
}

/// Writes a Hugging Face folder with random weights.
pub(crate) fn write_target(folder: &Path, config: &Value) {
    std::fs::create_dir_all(folder).expect("folder");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("config");
    std::fs::write(folder.join("tokenizer.json"), byte_tokenizer().to_string()).expect("tokenizer");
    let tensors = loaded(&random_tensors(config), DType::F32);
    write_tensors(folder.join("model.safetensors"), &tensors);
}

/// Every tensor of a source in one type.
pub(crate) fn loaded(source: &dyn WeightSource, dtype: DType) -> Tensors {
    let load = |name: String| {
        let tensor = source.load(&name, dtype).expect("tensor");
        (name, tensor)
    };
    source.names().into_iter().map(load).collect()
}

/// Logits of a fixed text of 40 tokens, one row after another.
pub(crate) fn logits(path: &Path, options: &TargetOptions) -> Vec<f32> {
    let target = Target::open_path(path, options).expect("target");
    let ids: Vec<u32> = (0..40).map(|i| i * 5 % 250).collect();
    let taps = Taps::of(&[Tap::FinalHidden]);
    let features = target.forward(&PackedSequence::single(&ids), &taps).expect("forward");
    let ends = target.hold_ends().expect("ends");
    let logits = ends.logits(features.final_hidden().expect("tapped")).expect("logits");
    logits.flatten_all().and_then(|l| l.to_vec1()).expect("values")
}

/// Adds a block for prediction of several tokens to a target's folder: among the layers, or apart from them as
/// Qwen's folders have it. `change` may change or drop (by an empty name) its tensors.
pub(crate) fn add_block(folder: &Path, apart: bool, change: &dyn Fn(&mut String, &mut Tensor)) {
    let config = TargetConfig::from_file(&folder.join("config.json")).expect("configuration");
    let specs = MtpBlock::tensor_specs(&config);
    let block = MemorySource::random(&specs, 0.3, 9).expect("random tensors");
    let prefix = format!("model.layers.{}.", config.num_hidden_layers);
    let own = [
        ("eh_proj.weight", "mtp.fc.weight"),
        ("enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        ("hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
        ("shared_head.norm.weight", "mtp.norm.weight"),
    ];
    let of_block = loaded(&block, DType::F32).into_iter().map(|(name, mut tensor)| {
        let rest = name.strip_prefix(&prefix).expect("of the block");
        let theirs = own.iter().find(|(ours, _)| *ours == rest);
        let mut name = match theirs {
            _ if !apart => name.clone(),
            Some((_, theirs)) => (*theirs).to_owned(),
            None => format!("mtp.layers.0.{rest}"),
        };
        change(&mut name, &mut tensor);
        (name, tensor)
    });
    let named = of_block.filter(|(name, _)| !name.is_empty());
    change_tensors(folder.join("model.safetensors"), |tensors| tensors.extend(named));
}

/// Keys and tensors of a GGUF file of floats, of `d2t` whole numbers, to be changed in place.
pub(crate) type GgufChange<'a> =
    &'a dyn Fn(&mut Vec<(String, GgufValue)>, &mut Vec<(String, Tensor)>);

/// Rewrites a GGUF file's keys and tensors.
pub(crate) fn change_gguf(path: &Path, change: GgufChange) {
    let all = std::fs::read(path).expect("read");
    let header = Header::read(&all).expect("header");
    let mut keys: Vec<(String, GgufValue)> = header.metadata.into_iter().collect();
    let read = |(name, stored): (&String, &StoredTensor)| {
        let data = &all[stored.bytes.clone()];
        let shape = stored.shape.as_slice();
        let tensor = if name == "d2t" {
            let ids = data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8")));
            Tensor::from_vec(ids.collect(), shape, &Device::Cpu)
        } else {
            let values = data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4")));
            Tensor::from_vec(values.collect(), shape, &Device::Cpu)
        };
        (name.clone(), tensor.expect("tensor"))
    };
    let mut tensors: Vec<(String, Tensor)> = header.tensors.iter().map(read).collect();
    change(&mut keys, &mut tensors);
    let tensors: Vec<_> = tensors.into_iter().map(|(name, t)| (name, t.into())).collect();
    write::save(path, &keys, &tensors).expect("write");
}

/// A tiny target, some text and a configuration that trains on it.
pub(crate) struct Workshop {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) target: PathBuf,
    pub(crate) config: PathBuf,
}

impl Workshop {
    /// A workshop whose target has four layers, enough for drafts that read several.
    pub(crate) fn with_four_layers() -> Self {
        Self::with(json!({ "num_hidden_layers": 4 }))
    }

    fn with(keys: Value) -> Self {
        let shop = Self::new();
        write_target(&shop.target, &with(tiny_config("llama"), keys));
        shop
    }

    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("tempdir");
        let target = folder.path().join("target");
        write_target(&target, &tiny_config("llama"));
        let rows: String = (0..60)
            .map(|i| {
                let text = format!("row {i}: {}", "the cat sat on the mat. ".repeat(1 + i % 5));
                format!("{}\n", json!({ "text": text }))
            })
            .collect();
        std::fs::write(folder.path().join("rows.jsonl"), rows).expect("rows");
        let config = folder.path().join("train.yaml");
        let text = format!(
            "target: {}\noutput: {}\ndata:\n  train:\n    - path: {}\n  held_out_rows: 2\n  \
             row_tokens: 128\ntrain:\n  rows_per_step: 2\n  epochs: 3\n  save_every: 4\n",
            target.display(),
            folder.path().join("run").display(),
            folder.path().join("rows.jsonl").display()
        );
        std::fs::write(&config, text).expect("config");
        Self { folder, target, config }
    }

    /// The same with a target of four layers, which are enough for EAGLE-3 to tap three.
    pub(crate) fn of_four_layers() -> Self {
        Self::with(json!({ "num_hidden_layers": 4, "hidden_size": 64 }))
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Writes a file of this folder and returns its path.
    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("written");
        path
    }

    /// Writes rows of JSON, a line each, and returns their path.
    pub(crate) fn write_rows(&self, name: &str, rows: &[Value]) -> String {
        self.write(name, rows.iter().map(|row| format!("{row}\n")).collect::<String>())
    }

    /// The same with a target that has a chat template.
    pub(crate) fn with_chat(template: &str) -> Self {
        let shop = Self::new();
        let config = json!({ "chat_template": template }).to_string();
        std::fs::write(shop.target.join("tokenizer_config.json"), config).expect("written");
        shop
    }

    pub(crate) fn config(&self) -> String {
        self.config.display().to_string()
    }

    /// Its configuration with these stages, as a file of its own.
    pub(crate) fn with_stages(&self, stages: &str) -> String {
        let text = std::fs::read_to_string(&self.config).expect("config");
        self.write("curriculum.yaml", format!("{text}stages:\n{stages}"))
    }

    /// With the path of its configuration.
    pub(crate) fn with_config(self) -> (Self, String) {
        let config = self.config();
        (self, config)
    }

    pub(crate) fn target(&self) -> String {
        self.target.display().to_string()
    }
}

/// Size of the differences, as a share of the size of what is wanted (both in the Euclidean norm).
pub(crate) fn relative_error(got: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(got.len(), wanted.len());
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    let difference = norm(&mut got.iter().zip(wanted).map(|(x, y)| x - y));
    difference / norm(&mut wanted.iter().copied())
}

/// The folder of larger reference cases beside a development checkout.
pub(crate) fn shared(name: &str) -> Option<PathBuf> {
    let path = files::repository("../shared").join(name);
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}
