//! Targets from every kind of file, and what happens with wrong and hostile ones.

use std::path::Path;

use crate::support::files::{change_json, change_tensors, write_tensors};
use crate::support::gguf::{file_of, interleaved, name_of};
use crate::support::{
    self, complaint, fail, loaded, logits as logits_of, random_tensors, relative_error, run,
    stderr, stdout, succeed, tiny_config, with, write_target,
};
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Gguf;
use longdraft_models::TargetConfig;
use longdraft_models::draft::Init;
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::target_model::gguf::GgufSource;
use longdraft_models::target_model::{Target, TargetOptions, tensor_specs};
use longdraft_models::weights::WeightSource;
use serde_json::{Value, json};

const HEADS: usize = 4;

/// The tiny Llama, wide enough for whole blocks of a type.
fn config_for(dtype: GgmlDType) -> Value {
    let width = dtype.block_size();
    let sizes = json!({
        "hidden_size": width, "intermediate_size": 2 * width, "head_dim": width / HEADS,
        "initializer_range": 0.1
    });
    with(tiny_config("llama"), if width > 32 { sizes } else { json!({}) })
}

/// Logits of a fixed text.
fn logits(path: &Path, dtype: DType) -> Vec<f32> {
    logits_of(path, &TargetOptions { dtype, ..TargetOptions::default() })
}

/// The tiny model as a GGUF file with a SentencePiece tokenizer.
fn gguf_bytes() -> Vec<u8> {
    gguf_bytes_of(GgmlDType::F32)
}

/// The same with matrices quantised where their rows consist of whole blocks.
fn gguf_bytes_of(dtype: GgmlDType) -> Vec<u8> {
    gguf_bytes_with(dtype, &[])
}

/// The same with other values of some keys, or more keys.
fn gguf_bytes_with(dtype: GgmlDType, changed: &[(&str, Gguf)]) -> Vec<u8> {
    gguf_bytes_from(&config_for(dtype), dtype, changed)
}

/// The same of another configuration.
fn gguf_bytes_from(config: &Value, dtype: GgmlDType, changed: &[(&str, Gguf)]) -> Vec<u8> {
    let head_dim = config["head_dim"].as_u64().expect("a size") as usize;
    let size = |key: &str| Gguf::U32(config[key].as_u64().expect("a size") as u32);
    let mut tensors = loaded(&random_tensors(config), DType::F32);
    for (name, tensor) in &mut tensors {
        if name.contains("q_proj") || name.contains("k_proj") {
            *tensor = interleaved(tensor, head_dim);
        }
        *name = name_of(name);
    }
    let strings = |items: Vec<String>| Gguf::Array(items.into_iter().map(Gguf::String).collect());
    let mut pieces = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    pieces.extend((0..253).map(|byte| format!("<0x{byte:02X}>")));
    pieces.extend(["▁".to_owned(), "▁t".to_owned()]);
    let scores = (0..pieces.len()).map(|i| Gguf::F32(-(i as f32))).collect();
    let types = (0..pieces.len() as i32)
        .map(|i| {
            Gguf::I32(match i {
                0 => 2,
                1 | 2 => 3,
                3..256 => 6,
                _ => 1,
            })
        })
        .collect();
    let metadata = [
        ("general.architecture", Gguf::String("llama".into())),
        ("llama.embedding_length", size("hidden_size")),
        ("llama.feed_forward_length", size("intermediate_size")),
        ("llama.block_count", Gguf::U32(2)),
        ("llama.attention.head_count", Gguf::U32(4)),
        ("llama.attention.head_count_kv", Gguf::U32(2)),
        ("llama.attention.layer_norm_rms_epsilon", Gguf::F32(1e-5)),
        ("llama.context_length", Gguf::U32(512)),
        ("llama.rope.freq_base", Gguf::F32(10000.0)),
        ("tokenizer.ggml.model", Gguf::String("llama".into())),
        ("tokenizer.ggml.tokens", strings(pieces)),
        ("tokenizer.ggml.scores", Gguf::Array(scores)),
        ("tokenizer.ggml.token_type", Gguf::Array(types)),
        ("tokenizer.ggml.bos_token_id", Gguf::U32(1)),
        ("tokenizer.ggml.eos_token_id", Gguf::U32(2)),
        (
            "tokenizer.chat_template",
            Gguf::String(
                "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}".into(),
            ),
        ),
    ];
    let kept = metadata.iter().filter(|(key, _)| changed.iter().all(|(other, _)| other != key));
    let metadata: Vec<(&str, Gguf)> = kept.chain(changed).cloned().collect();
    file_of(&metadata, &tensors, dtype)
}

#[test]
fn gguf_and_folder_of_the_same_weights_agree_bit_for_bit() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (folder, gguf) = (dir.path().join("hf"), dir.path().join("model.gguf"));
    for has_biases in [false, true] {
        let mut config = tiny_config("llama");
        config["attention_bias"] = has_biases.into();
        write_target(&folder, &config);
        std::fs::write(&gguf, gguf_bytes_from(&config, GgmlDType::F32, &[])).expect("write");
        let (a, b) = (logits(&folder, DType::F32), logits(&gguf, DType::F32));
        let same = a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "biases: {has_biases}");
        let target = Target::open_path(&gguf, &TargetOptions::default()).expect("target");
        assert_eq!(target.config().qkv_bias, has_biases);
    }
}

/// A head that lies in a folder decides, whatever `tie_word_embeddings` says.
#[test]
fn a_stored_head_of_its_own_is_used_though_the_configuration_ties_it() {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut config = tiny_config("llama");
    config["tie_word_embeddings"] = json!(false);
    write_target(dir.path(), &config);
    let own = logits(dir.path(), DType::F32);
    change_json(dir.path().join("config.json"), |config| {
        config["tie_word_embeddings"] = json!(true);
    });
    assert_eq!(logits(dir.path(), DType::F32), own);
    let is_tied = || {
        let target = Target::open_path(dir.path(), &TargetOptions::default()).expect("target");
        target.config().tie_word_embeddings
    };
    assert!(!is_tied());
    // A copy of the table is no head of its own.
    change_tensors(dir.path().join("model.safetensors"), |tensors| {
        let of = |name: &str| tensors.iter().position(|(known, _)| known == name).expect(name);
        let [head, table] = [of("lm_head.weight"), of("model.embed_tokens.weight")];
        tensors[head].1 = tensors[table].1.clone();
    });
    assert!(is_tied());
}

/// Files of blocks by the type's name, of every type that there is a writer for; and uneven values,
/// whose blocks are as large as those of another type.
fn files_of_blocks() -> Vec<(&'static str, Vec<u8>)> {
    let types = [
        ("Q4_0", GgmlDType::Q4_0),
        ("Q4_1", GgmlDType::Q4_1),
        ("Q5_0", GgmlDType::Q5_0),
        ("Q5_1", GgmlDType::Q5_1),
        ("Q8_0", GgmlDType::Q8_0),
        ("Q2_K", GgmlDType::Q2K),
        ("Q3_K", GgmlDType::Q3K),
        ("Q4_K", GgmlDType::Q4K),
        ("Q5_K", GgmlDType::Q5K),
        ("Q6_K", GgmlDType::Q6K),
    ];
    let mut files: Vec<_> = types.map(|(name, dtype)| (name, gguf_bytes_of(dtype))).into();
    let mut uneven = gguf_bytes_of(GgmlDType::Q4_0);
    for name in random_tensors(&tiny_config("llama")).names() {
        set_type(&mut uneven, &name_of(&name), (2, 20));
    }
    files.push(("IQ4_NL", uneven));
    files
}

/// Where an entry's sizes begin, and how many there are. An entry is name, rank, sizes, type.
fn sizes_of(file: &[u8], name: &str) -> (usize, usize) {
    let mut entry = (name.len() as u64).to_le_bytes().to_vec();
    entry.extend(name.bytes());
    let at = file.windows(entry.len()).position(|bytes| bytes == entry).expect("an entry");
    (at + entry.len() + 4, usize::from(file[at + entry.len()]))
}

/// Gives a tensor another type, if it is of the first one.
fn set_type(file: &mut [u8], name: &str, (from, to): (u32, u32)) {
    let (at, rank) = sizes_of(file, name);
    let number = &mut file[at + 8 * rank..][..4];
    if number == from.to_le_bytes() {
        number.copy_from_slice(&to.to_le_bytes());
    }
}

#[test]
fn weights_held_as_stored_compute_nearly_what_their_f32_values_do() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf");
    for (dtype, bytes) in files_of_blocks() {
        std::fs::write(&path, bytes).expect("write");
        let options = TargetOptions { as_stored: true, ..TargetOptions::default() };
        let (stored, widened) = (logits_of(&path, &options), logits(&path, DType::F32));
        // Activations beside blocks are 8-bit fixed-point numbers. Where scale and minimum nearly cancel,
        // as in Q2_K, their rounding weighs more.
        let error = relative_error(&stored, &widened);
        assert!(error > 0.0 && error <= 0.1, "{dtype}: {error}");
        let [stored, widened] = [&options, &TargetOptions::default()]
            .map(|options| Target::open_path(&path, options).expect("target"));
        assert_eq!(stored.fingerprint(), widened.fingerprint());
        let ends = stored.hold_ends().expect("ends");
        assert!(ends.head_matrix().dense().is_none(), "{dtype}");
        assert!(stored.held().iter().any(|(name, bytes)| *name == dtype && *bytes > 0), "{dtype}");
        assert_eq!(widened.held()[0].0, "F32");
        let values = |target: &Target| {
            let head = target.hold_ends().and_then(|ends| ends.head()).expect("head");
            head.to_vec2::<f32>().expect("values")
        };
        assert_eq!(values(&stored), values(&widened));
    }
}

#[test]
fn generate_says_the_same_with_weights_as_stored() {
    for blocks in [GgmlDType::Q8_0, GgmlDType::Q4K, GgmlDType::Q6K] {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("model.gguf").display().to_string();
        std::fs::write(&path, gguf_bytes_of(blocks)).expect("write");
        // A trainable draft reads its tokens off the target's head, quantised or not.
        let draft = dir.path().join("draft");
        std::fs::create_dir(&draft).expect("folder");
        let target = Target::open(&path, &TargetOptions::default()).expect("target");
        let sizes = GlideConfig::for_target(target.config(), None);
        GlideDraft::initialise(&sizes, &target, Init::LastLayer, 1)
            .and_then(|glide| glide.save(&draft, target.fingerprint()))
            .expect("draft");
        let draft = draft.display().to_string();
        let say = |dtype: &str, way: &[&str]| {
            let fixed = ["generate", "--target", &path, "--prompt", "ABC", "--max-tokens", "40"];
            succeed(&[&fixed[..], &["--ignore-eos", "--dtype", dtype], way].concat())
        };
        let caches: &[&str] = if blocks == GgmlDType::Q8_0 { &["auto"] } else { &["auto", "q8"] };
        for dtype in ["stored", "f32"] {
            for cache in caches {
                let plain = say(dtype, &["--no-draft", "--cache", cache]);
                assert!(!plain.is_empty());
                for way in [&["--lookup"][..], &["--draft", &draft, "--pace", "fixed"]] {
                    let drafted = say(dtype, &[way, &["--cache", cache]].concat());
                    assert_eq!(drafted, plain, "{blocks:?} {dtype} {cache} {way:?}");
                }
            }
        }
        if blocks == GgmlDType::Q8_0 {
            let short = ["generate", "--target", &path, "--prompt", "A", "--cache", "q8"];
            let text = fail(&short, 1);
            assert!(text.contains("a cache of q8 takes heads of whole blocks of 32"), "{text}");
        }
    }
}

/// Scales that are no numbers make logits that are none, and NaN never wins: decoding goes on, and
/// drafting changes nothing.
#[test]
fn blocks_with_impossible_scales_end_alike_with_and_without_drafts() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf").display().to_string();
    for (name, file) in files_of_blocks() {
        for (kind, bits) in [("NaN", 0xFFFF_u16), ("infinite", 0x7C00), ("negative", 0xFC00)] {
            let mut file = file.clone();
            std::fs::write(&path, &file).expect("write");
            let header = GgufSource::open(Path::new(&path)).expect("a file");
            let blocks = header.header().tensors["blk.0.ffn_up.weight"].bytes.clone();
            let pattern = bits.to_le_bytes().into_iter().cycle();
            file[blocks].iter_mut().zip(pattern).for_each(|(byte, bits)| *byte = bits);
            std::fs::write(&path, &file).expect("write");
            let say = |way: &str| {
                let fixed = ["generate", "--target", &path, "--prompt", "ABABAB", "--ignore-eos"];
                let told =
                    run(&[&fixed[..], &["--max-tokens", "8", "--pace", "fixed", way]].concat());
                let problem = stderr(&told);
                let refused = problem.contains("error: the logits are not numbers");
                assert_eq!(
                    told.status.code(),
                    Some(i32::from(refused)),
                    "{name}, {kind}: {problem}"
                );
                (refused, stdout(&told))
            };
            assert_eq!(say("--no-draft"), say("--lookup"), "{name}, {kind}");
        }
    }
}

#[test]
fn rows_of_parts_of_blocks_are_refused_by_name() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf").display().to_string();
    let types = [("Q4_0", 32), ("Q8_0", 32), ("IQ4_NL", 32), ("Q2_K", 256), ("Q6_K", 256)];
    for (name, values) in types {
        let (_, mut file) = files_of_blocks().into_iter().find(|(n, _)| *n == name).expect("type");
        let (at, _) = sizes_of(&file, "blk.1.attn_k.weight");
        file[at] = file[at].wrapping_add(16);
        std::fs::write(&path, file).expect("write");
        let text = complaint(Path::new(&path));
        assert!(text.contains("`blk.1.attn_k.weight` of shape"), "{text}");
        assert!(text.contains(&format!("does not consist of blocks of {values}")), "{text}");
    }
}

#[test]
fn sixteen_bit_weights_stay_close_and_all_architectures_load() {
    let dir = tempfile::tempdir().expect("tempdir");
    for kind in ["llama", "qwen2", "qwen3"] {
        let mut config = tiny_config(kind);
        config["tie_word_embeddings"] = json!(kind != "qwen3");
        let folder = dir.path().join(kind);
        write_target(&folder, &config);
        let exact = logits(&folder, DType::F32);
        let largest = exact.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        for dtype in [DType::BF16, DType::F16] {
            let rounded = logits(&folder, dtype);
            let error = exact.iter().zip(&rounded).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(error > 0.0 && error < 0.1 * largest, "{kind} {dtype:?}: {error} of {largest}");
        }
    }
}

/// Held as the file holds them by default: half the memory, and the bits of f32.
#[test]
fn sixteen_bit_files_are_held_as_they_are_with_the_bits_of_f32() {
    let dir = tempfile::tempdir().expect("tempdir");
    for dtype in [DType::BF16, DType::F16] {
        let folder = dir.path().join(format!("{dtype:?}"));
        write_target(&folder, &tiny_config("llama"));
        let tensors = loaded(&random_tensors(&tiny_config("llama")), dtype);
        write_tensors(folder.join("model.safetensors"), &tensors);
        let stored = TargetOptions { as_stored: true, ..TargetOptions::default() };
        let target = Target::open_path(&folder, &stored).expect("target");
        let table = target.hold_ends().and_then(|ends| ends.embedding()).expect("table");
        assert_eq!(table.dtype(), dtype);
        assert!(!target.holds_blocks() && target.widened().is_empty());
        assert!(logits_of(&folder, &stored) == logits(&folder, DType::F32), "{dtype:?}");
        let path = folder.display().to_string();
        let say = |more: &[&str]| {
            let fixed = ["generate", "--target", &path, "--prompt", "ABC", "--max-tokens", "40"];
            succeed(&[&fixed[..], &["--ignore-eos"], more].concat())
        };
        let plain = say(&[]);
        assert_eq!(plain, say(&["--dtype", "f32"]));
        assert_eq!(plain, say(&["--lookup", "--pace", "fixed"]));
    }
}

#[test]
fn generate_tells_how_a_target_is_held() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf").display().to_string();
    std::fs::write(&path, gguf_bytes_of(GgmlDType::Q5K)).expect("write");
    for (dtype, says) in [("stored", "weights: Q5_K "), ("bf16", "weights: BF16 ")] {
        let generate = ["generate", "--target", &path, "--prompt", "ABC", "--max-tokens", "4"];
        let told = stderr(&run(&[&generate[..], &["--dtype", dtype]].concat()));
        let line = told.lines().find(|line| line.starts_with(says)).expect(says);
        assert_eq!(line.contains("; blocks times activations of 8 bits by "), dtype == "stored");
    }
    for (cache, says) in [("auto", "f16"), ("f32", "f32"), ("f16", "f16"), ("q8", "q8")] {
        let generate = ["generate", "--target", &path, "--prompt", "ABC", "--max-tokens", "4"];
        let told = stderr(&run(&[&generate[..], &["--cache", cache]].concat()));
        assert!(told.contains(&format!("; cache: {says}, ")), "{cache}: {told}");
    }
}

#[test]
fn a_gguf_carries_its_tokenizer_and_template() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, gguf_bytes()).expect("write");
    let tokenizer = Target::open_tokenizer(&path.to_string_lossy()).expect("tokenizer");
    let ids = tokenizer.encode("AB").expect("ids").ids;
    assert_eq!(tokenizer.decode(&ids, true).expect("text"), "AB");
    let turn = longdraft_models::tokenizer::Message::new("user", "hi");
    let template = tokenizer.chat_template().expect("template");
    assert_eq!(template.render(&[turn], false).expect("text"), "<s>hi");
    // As `tokenizer.json` it is the same one.
    let folder = dir.path().join("saved");
    std::fs::create_dir(&folder).expect("folder");
    tokenizer.save(&folder).expect("saved");
    let saved = longdraft_models::tokenizer::TextTokenizer::from_folder(&folder).expect("opened");
    assert_eq!(saved.fingerprint().expect("hash"), tokenizer.fingerprint().expect("hash"));
}

#[test]
fn every_missing_and_misshapen_tensor_is_named_at_once() {
    let dir = tempfile::tempdir().expect("tempdir");
    write_target(dir.path(), &tiny_config("llama"));
    let mut config = tiny_config("qwen3");
    config["intermediate_size"] = json!(50);
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("config");
    let text = complaint(dir.path());
    for part in [
        "`model.layers.0.self_attn.q_norm.weight` [8] is missing",
        "`model.layers.1.self_attn.k_norm.weight` [8] is missing",
        "`model.layers.1.mlp.down_proj.weight` has shape [32, 48], [32, 50] expected",
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
}

#[test]
fn unusable_configurations_name_every_problem() {
    let dir = tempfile::tempdir().expect("tempdir");
    write_target(dir.path(), &tiny_config("llama"));
    let write = |config: Value| {
        std::fs::write(dir.path().join("config.json"), config.to_string()).expect("config");
    };
    let mut config = tiny_config("mamba");
    config["num_key_value_heads"] = json!(3);
    config["rope_scaling"] = json!({"type": "magic"});
    write(config);
    let text = complaint(dir.path());
    for part in ["unknown architecture `mamba`", "does not divide", "unknown rope scaling `magic`"]
    {
        assert!(text.contains(part), "{part} not in {text}");
    }
    for key in ["hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size"] {
        let mut config = tiny_config("llama");
        config[key] = json!(u64::MAX);
        write(config);
        assert!(complaint(dir.path()).contains(key));
    }
    std::fs::write(dir.path().join("config.json"), "[]").expect("config");
    complaint(dir.path());
    std::fs::write(dir.path().join("config.json"), b"\xff\xfe").expect("config");
    complaint(dir.path());
}

#[test]
fn sizes_that_no_file_holds_are_refused_before_anything_is_made_of_them() {
    let dir = tempfile::tempdir().expect("tempdir");
    let folder = dir.path().join("folder");
    write_target(&folder, &tiny_config("llama"));
    for (key, size, part) in [
        ("num_hidden_layers", 1 << 24, "is not between 1 and 4096"),
        ("num_hidden_layers", 4000, "= 4000, but only 20 tensors are there"),
        ("head_dim", 1 << 22, "is not between 1 and 8192"),
        ("max_position_embeddings", 1_u64 << 40, "is not between 1 and 16777216"),
    ] {
        let mut config = tiny_config("llama");
        config[key] = json!(size);
        std::fs::write(folder.join("config.json"), config.to_string()).expect("config");
        let text = complaint(&folder);
        assert!(text.contains(part) && text.contains(key), "{text}");
    }
    let mut config = support::tiny_mixture("qwen3_moe");
    config["num_experts"] = json!(5000);
    std::fs::write(folder.join("config.json"), config.to_string()).expect("config");
    let text = complaint(&folder);
    assert!(text.contains("20000 experts in 4 layers, but only 20 tensors"), "{text}");
    let file = dir.path().join("model.gguf");
    for (key, value, part) in [
        ("llama.block_count", Gguf::U32(1 << 24), "is not between 1 and 4096"),
        ("llama.block_count", Gguf::U32(4000), "= 4000, but only 20 tensors are there"),
        ("general.alignment", Gguf::U32(0), "`general.alignment` = U32(0) is not an alignment"),
        ("general.alignment", Gguf::U32(33), "`general.alignment` = U32(33) is not an alignment"),
    ] {
        let bytes = gguf_bytes_with(GgmlDType::F32, &[(key, value)]);
        std::fs::write(&file, bytes).expect("write");
        let text = complaint(&file);
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_gguf_file_that_is_cut_off_is_told_so_without_frames() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf");
    let whole = gguf_bytes();
    for length in [20, 3000, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).expect("write");
        let target = path.display().to_string();
        let fixed = ["generate", "--target", &target, "--no-draft", "--prompt", "a"];
        let output = support::longdraft(&fixed)
            .env("RUST_BACKTRACE", "1")
            .output()
            .expect("the binary starts");
        let text = support::stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("is the download complete?") && text.contains("GGUF"), "{text}");
        assert!(!text.contains("not GGUF") && text.lines().count() < 4, "{text}");
    }
}

#[test]
fn tokenizers_that_break_their_reader_are_errors_that_name_the_file() {
    let dir = tempfile::tempdir().expect("tempdir");
    write_target(dir.path(), &tiny_config("llama"));
    let mut tokenizer = support::byte_tokenizer();
    // Strips a character off texts that have none.
    tokenizer["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"Regex": "(?s)."}, "content": ""},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
    ]});
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).expect("tokenizer");
    let text = complaint(dir.path());
    assert!(text.contains("tokenizer.json") && text.contains("its reader failed"), "{text}");
}

#[test]
fn chat_templates_without_an_end_are_errors() {
    let dir = tempfile::tempdir().expect("tempdir");
    write_target(dir.path(), &tiny_config("llama"));
    for (template, part) in [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "instructions",
        ),
        (
            "{% set s = namespace(x='xxxxxxxx') %}{% for i in range(60) %}\
             {% set s.x = s.x ~ s.x %}{% endfor %}",
            "it asks for more than 256 MiB",
        ),
    ] {
        let config = json!({ "chat_template": template }).to_string();
        std::fs::write(dir.path().join("tokenizer_config.json"), config).expect("configuration");
        let target = dir.path().display().to_string();
        let fixed = ["generate", "--target", &target, "--no-draft", "--chat", "--prompt", "a"];
        let text = fail(&fixed, 1);
        assert!(text.contains("chat template: ") && text.contains(part), "{text}");
    }
}

#[test]
fn a_process_without_memory_says_so() {
    if !cfg!(target_os = "linux") {
        // Other systems limit no address space.
        return;
    }
    let dir = tempfile::tempdir().expect("tempdir");
    let mut config = tiny_config("llama");
    config["vocab_size"] = json!(1 << 20);
    config["hidden_size"] = json!(1 << 10);
    write_empty_target(dir.path(), &config);
    // Embeddings of 4 GiB for a process of 2.
    let script = "ulimit -v 2097152 && exec \"$@\"";
    let output = std::process::Command::new("sh")
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_longdraft"), "generate", "--no-draft"])
        .args(["--dtype", "f32", "--threads", "1", "--prompt", "a", "--target"])
        .arg(dir.path())
        .output()
        .expect("the binary starts");
    let text = support::stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("error: no memory left: 4294967296 bytes"), "{text}");
    assert!(text.contains("\nhint: "), "{text}");
}

/// A folder whose weights are a hole in a file: all zeros, and no room taken.
fn write_empty_target(folder: &Path, config: &Value) {
    let sizes = TargetConfig::from_json(config).expect("configuration");
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for spec in tensor_specs(&sizes) {
        let start = end;
        end += 4 * spec.shape.iter().product::<usize>();
        let entry = json!({"dtype": "F32", "shape": spec.shape, "data_offsets": [start, end]});
        header.insert(spec.name, entry);
    }
    let header = Value::from(header).to_string().into_bytes();
    let path = folder.join("model.safetensors");
    std::fs::write(&path, [&header.len().to_le_bytes()[..], &header].concat()).expect("header");
    let file = std::fs::File::options().write(true).open(&path).expect("file");
    file.set_len((8 + header.len() + end) as u64).expect("a file with a hole");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("config");
    std::fs::write(folder.join("tokenizer.json"), support::byte_tokenizer().to_string())
        .expect("tokenizer");
}

#[test]
fn truncated_and_damaged_gguf_files_are_errors_not_panics() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf");
    let whole = gguf_bytes();
    let open = |bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("write");
        let target = Target::open_path(&path, &TargetOptions::default()).map(|_| ());
        let tokenizer = Target::open_tokenizer(&path.to_string_lossy()).map(|_| ());
        (target, tokenizer)
    };
    for length in (0..whole.len()).step_by(whole.len() / 97) {
        assert!(open(&whole[..length]).0.is_err(), "prefix of {length} bytes");
    }
    let header = 6000.min(whole.len());
    for at in (0..header).step_by(7) {
        for value in [0x00, 0x7f, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            let _ = open(&bytes);
        }
    }
    let mut absurd = whole.clone();
    absurd[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(open(&absurd).0.is_err());
}

#[test]
fn what_is_no_target_says_what_one_is() {
    let dir = tempfile::tempdir().expect("tempdir");
    let wrong_use = |path: &Path| {
        let path = path.display().to_string();
        fail(&["generate", "--target", &path, "--no-draft", "--prompt", "a"], 2)
    };
    assert!(wrong_use(dir.path()).contains("a target is a Hugging Face folder"));
    assert!(wrong_use(&dir.path().join("absent")).contains("no such file or folder"));
    std::fs::write(dir.path().join("x.gguf"), "hello").expect("write");
    assert!(complaint(&dir.path().join("x.gguf")).contains("not GGUF"));
}
