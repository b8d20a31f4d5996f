//! Wrong and hostile targets.

use candle_core::Tensor;
use longdraft_models::TargetConfig;
use longdraft_models::target_model::tensor_specs;

use super::*;

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

/// Else a token would never be chosen, or texts with it would be spoilt, without a word.
#[test]
fn ends_that_hold_no_numbers_are_refused_by_name_and_row() {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut config = tiny_config("llama");
    config["tie_word_embeddings"] = json!(false);
    for (name, value, part) in [
        ("model.embed_tokens.weight", f64::NAN, "`model.embed_tokens.weight`: row 1 holds"),
        ("lm_head.weight", f64::INFINITY, "`lm_head.weight`: row 1 holds"),
        ("model.norm.weight", f64::NAN, "`model.norm.weight`: NaN at 1"),
        ("model.norm.weight", 3e38, "`model.norm.weight`: 3e38 at 1"),
    ] {
        write_target(dir.path(), &config);
        change_tensors(dir.path().join("model.safetensors"), |tensors| {
            let found = tensors.iter_mut().find(|(own, _)| own == name);
            let (_, tensor) = found.expect("the tensor");
            let one = tensor.narrow(0, 1, 1).and_then(|row| row.zeros_like());
            let row = one.and_then(|row| row.affine(1.0, value)).expect("a row");
            let [first, rest] = [(0, 1), (2, tensor.dims()[0] - 2)]
                .map(|(start, rows)| tensor.narrow(0, start, rows).expect("rows"));
            *tensor = Tensor::cat(&[&first, &row, &rest], 0).expect("a tensor");
        });
        let text = complaint(dir.path());
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
        let output = support::finished(support::longdraft(&fixed).env("RUST_BACKTRACE", "1"));
        let text = support::told_by(&output, 1);
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
        fail_with(&fixed, 1, &["chat template: ", part]);
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
    let text = support::told_by(&output, 1);
    support::require_words(&text, &["error: no memory left: 4294967296 bytes", "\nhint: "]);
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
