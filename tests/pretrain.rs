//! Pretraining through the binary: from text to a scored artifact, grids, faults.

use std::path::Path;

use crate::support::files::{lines_so_far, read_json, read_rows, repository};
use crate::support::processes::{signal, start_kept, wait_until};
use crate::support::{
    self, fail, fail_with, last_json, require_words, run, shared, stderr, stdout, succeed,
};
use serde_json::{Value, json};

/// Text, a tokenizer, shards and a configuration.
struct Shop {
    dir: tempfile::TempDir,
    config: String,
}

impl Shop {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = |name: &str| dir.path().join(name).display().to_string();
        let rows: String = (0..80)
            .map(|i| {
                let text = format!("row {i}: {}", "the cat sat on the mat. ".repeat(1 + i % 5));
                format!("{}\n", json!({ "text": text }))
            })
            .collect();
        std::fs::write(path("rows.jsonl"), rows).expect("rows");
        let (rows, data) = (path("rows.jsonl"), path("data"));
        let tokenizer = ["data", "tokenizer", &rows, "--vocabulary", "280", "--output", &data];
        let out = succeed(&[&tokenizer[..], &["--json"]].concat());
        assert!(last_json(&out)["vocabulary"].as_u64() <= Some(280));
        let pack = ["data", "pack", &rows, "--tokenizer", &data, "--output", &data];
        let pack = [&pack[..], &["--validation-every", "8", "--byte-counts", "--json"]].concat();
        let packed = last_json(&succeed(&pack));
        assert_eq!((&packed["documents"], &packed["shards"]), (&json!(80), &json!(2)));
        // What an earlier call packed is told, and stays: trainings read all of a folder.
        let other = format!("{data}/train_000001.bin");
        std::fs::write(&other, "of an earlier call").expect("written");
        let again = run(&pack);
        let told = stderr(&again);
        assert!(again.status.success() && told.contains("train_000001.bin is of an earlier call"));
        std::fs::remove_file(&other).expect("it stays");
        // More tokens than a header counts are refused before any is packed.
        let told = stderr(&run(&[&pack[..], &["--shard-tokens", "3000000000"]].concat()));
        assert!(told.contains("--shard-tokens must be 1 to 1073741824"), "{told}");
        let config = path("pretrain.yaml");
        let text = format!(
            "output: {}\nmodel: {{vocab_size: 280, num_hidden_layers: 2, hidden_size: 16, \
             num_attention_heads: 2, num_key_value_heads: 1}}\ndata:\n  train: [{data}/train_000000.bin]\n  \
             held_out: [{data}/val_000000.bin]\n  row_tokens: 32\n  tokenizer: {data}\n\
             optimizer: {{momentum_warmup_steps: 2}}\nschedule: {{warmdown_steps: 3}}\n\
             train: {{steps: 4, tokens_per_step: 64, evaluate_every: 2}}\n\
             artifact: {{quantise: {{keep_max_elements: 64}}}}\n",
            path("run")
        );
        std::fs::write(&config, text).expect("config");
        Self { dir, config }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }
}

#[test]
fn of_a_single_text_the_end_is_held_out() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (text, data) = (path("book.txt"), path("data"));
    std::fs::write(&text, "The cat sat on the mat. ".repeat(200)).expect("text");
    succeed(&["data", "tokenizer", &text, "--vocabulary", "280", "--output", &data]);
    // A model's tokenizer stays.
    let model = path("model");
    support::write_target(Path::new(&model), &support::tiny_config("llama"));
    let train = ["data", "tokenizer", &text, "--vocabulary", "280", "--output", &model];
    fail_with(&train, 2, &["is that of a model", "hint: give another folder with --output"]);
    let pack = ["data", "pack", &text, "--tokenizer", &data, "--output", &data, "--json"];
    let packed = |every: &str| {
        let output = run(&[&pack[..], &["--validation-every", every]].concat());
        (last_json(&stdout(&output)), stderr(&output))
    };
    let (whole, told) = packed("0");
    assert!(!told.contains("held out"), "{told}");
    let (cut, told) = packed("8");
    assert!(told.contains("of 1 document, fewer than --validation-every 8"), "{told}");
    let tokens = |of: &Value, key: &str| of[key].as_u64().expect("tokens");
    let held_out = tokens(&cut, "validation_tokens");
    // The part begins as documents do.
    assert_eq!(held_out, tokens(&whole, "train_tokens") / 8 + 1);
    let all = tokens(&cut, "train_tokens") + held_out;
    assert_eq!(all, tokens(&whole, "train_tokens") + 1);
    assert!(Path::new(&path("data/val_000000.bin")).is_file());
    // A last text that is too short is held out whole, with the end of the one before; of next to nothing, nothing.
    let rows = path("rows.jsonl");
    let pack_texts = |texts: &[&str]| {
        let row = |text: &&str| format!("{}\n", serde_json::json!({ "text": text }));
        std::fs::write(&rows, texts.iter().map(row).collect::<String>()).expect("rows");
        let _ = std::fs::remove_file(path("data/val_000000.bin"));
        let output =
            run(&["data", "pack", &rows, "--tokenizer", &data, "--output", &data, "--json"]);
        (last_json(&stdout(&output)), stderr(&output))
    };
    let long = "The cat sat on the mat. ".repeat(100);
    let (packed, _) = pack_texts(&[&long, &long, "The cat."]);
    let all = tokens(&packed, "train_tokens") + tokens(&packed, "validation_tokens");
    assert_eq!(tokens(&packed, "validation_tokens"), (all - 1) / 20 + 1);
    let (packed, told) = pack_texts(&["T"]);
    assert_eq!(tokens(&packed, "validation_tokens"), 0);
    assert!(told.contains("nothing is held out"), "{told}");
}

#[test]
fn text_becomes_a_scored_artifact_and_every_command_reads_it() {
    let shop = Shop::new();
    let out = last_json(&succeed(&["lm", "train", &shop.config, "--json"]));
    assert_eq!(
        (&out["finished"], &out["steps"], &out["tokens"]),
        (&json!(true), &4.into(), &256.into())
    );
    let result = &out["result"];
    for key in ["live_bpb", "artifact_bpb", "sliding_bpb", "penalty", "total_bytes"] {
        assert!(result[key].as_f64().is_some_and(f64::is_finite), "{key}: {result}");
    }
    assert_eq!(result["sliding_scored"], result["total_targets"]);
    let listed = last_json(&succeed(&["runs", "list", &shop.path("run"), "--json"]));
    let listed = &listed["runs"][0];
    assert_eq!(
        (&listed["state"], &listed["step"], &listed["steps"]),
        (&json!("finished"), &4.into(), &4.into())
    );
    // The side-cars' counts and the tokenizer's table agree.
    let data = shop.path("data");
    let score_of = |model: &str, file: &str, more: &[&str]| {
        let score = ["lm", "score", model, "--data", file, "--tokenizer", &data];
        last_json(&succeed(&[&score[..], &["--window", "32", "--json"], more].concat()))
    };
    let bin = format!("{data}/val_000000.bin");
    let score = |model: &str, more: &[&str]| score_of(model, &bin, more);
    let bits = |told: &Value, key: &str| told[key].as_f64().expect("bits per byte");
    let artifact = shop.path("run/model.ldq");
    let with = score(&artifact, &["--plain"]);
    assert!((bits(&with, "bits_per_byte") - bits(result, "artifact_bpb")).abs() < 1e-9);
    std::fs::remove_file(format!("{data}/val_000000.bytes.bin")).expect("remove");
    let without = score(&artifact, &["--plain"]);
    assert_eq!(
        (&with["bytes"], &with["bits_per_byte"]),
        (&without["bytes"], &without["bits_per_byte"])
    );
    let live = score(&shop.path("run"), &["--plain"]);
    // The run knows its rows, whichever of its models is named.
    let checkpoint = score(&shop.path("run/checkpoints/last"), &["--plain"]);
    for scored in [&live, &with, &checkpoint] {
        assert_eq!(scored["training_length"], 32);
    }
    assert_eq!(score(&artifact, &["--training-length", "48"])["training_length"], 48);
    assert!((bits(&live, "bits_per_byte") - bits(result, "live_bpb")).abs() < 1e-9);
    for more in [&["--stride", "5"][..], &["--doc-isolated"], &["--stride", "32"]] {
        let sliding = score(&artifact, more);
        assert_eq!(sliding["tokens"], sliding["total_tokens"], "{more:?}");
    }
    let dropped = score(&artifact, &["--stride", "7", "--tail", "drop"]);
    assert!(dropped["tokens"].as_u64() <= dropped["total_tokens"].as_u64());
    // Text is encoded with the same tokenizer, and has the bytes that it has.
    let rows = shop.path("rows.jsonl");
    let text = score_of(&artifact, &rows, &[]);
    let rows = read_rows(&rows);
    let bytes: usize = rows.iter().map(|row| row["text"].as_str().expect("text").len()).sum();
    assert_eq!(text["bytes"].as_u64(), Some(bytes as u64));
    // Finished: nothing is left to do, and the report reads the run.
    let again = last_json(&succeed(&["lm", "train", &shop.config, "--json"]));
    assert_eq!(again["result"], *result);
    assert!(again["median_tokens_per_second"].is_null() && again["gflops"].is_null(), "{again}");
    succeed(&["report", &shop.path("run")]);
}

/// The checkpoint before was saved before its step was scored, as a kill meanwhile leaves it.
#[test]
fn a_step_whose_score_was_interrupted_is_scored_when_the_run_goes_on() {
    let shop = Shop::new();
    let train = || last_json(&succeed(&["lm", "train", &shop.config, "--json"]));
    let scored = || -> Vec<Value> {
        let records = read_rows(shop.path("run/metrics.jsonl")).into_iter();
        records.filter(|record| record["held_out"].is_object()).collect()
    };
    train();
    let before = scored();
    assert_eq!((before.len(), &before[0]["step"]), (1, &json!(2)));
    std::fs::remove_dir_all(shop.path("run/checkpoints/last")).expect("the last checkpoint");
    let again = train();
    assert_eq!((&again["finished"], &again["steps"]), (&json!(true), &json!(4)));
    assert_eq!(scored(), before);
}

#[test]
fn quantize_writes_reads_back_and_scores_in_every_form() {
    let shop = Shop::new();
    succeed(&["lm", "train", &shop.config]);
    let (run_folder, data) = (shop.path("run"), shop.path("data"));
    let (output, bin) = (shop.path("small.ldq"), format!("{data}/val_000000.bin"));
    let mut sizes = Vec::new();
    for form in [
        &[][..],
        &["--embedding", "f16"],
        &["--format", "modern", "--levels", "31", "--compression", "zstd"],
    ] {
        let quantize = ["lm", "quantize", &run_folder, "--output", &output, "--data", &bin];
        let more = ["--tokenizer", &data, "--window", "32", "--json"];
        let limits = ["--keep-max-elements", "64", "--code-bytes", "1000"];
        let out = last_json(&succeed(&[&quantize[..], &more, &limits, form].concat()));
        let file = std::fs::metadata(&output).expect("artifact").len();
        assert_eq!(out["artifact_bytes"].as_u64(), Some(file));
        assert_eq!(out["total_bytes"].as_u64(), Some(file + 1000));
        assert!(out["penalty"].as_f64().is_some_and(|penalty| penalty.abs() < 1.0));
        sizes.push(file);
    }
    assert!(sizes[0] < sizes[1] && sizes[2] < sizes[1], "{sizes:?}");
    let command = ["lm", "quantize", &run_folder, "--output", &output, "--code-bytes", "16000000"];
    fail_with(&command, 1, &["beyond the limit of 16000000"]);
    let text = fail(&["lm", "quantize", &run_folder, "--output", &output, "--levels", "31"], 2);
    assert!(text.contains("--format modern"), "{text}");
    // Damaged and foreign files.
    let whole = std::fs::read(&output).expect("artifact");
    let broken = shop.path("broken.ldq");
    for bytes in [&whole[..whole.len() / 2], b"LDQ8", b""] {
        std::fs::write(&broken, bytes).expect("write");
        fail(&["lm", "score", &broken, "--data", &bin, "--tokenizer", &data], 1);
    }
}

#[test]
fn a_grid_runs_once_and_prints_means_with_intervals() {
    let shop = Shop::new();
    let grid = shop.path("grid.yaml");
    let text = format!(
        "base: pretrain.yaml\noutput: {}\nseeds: [1, 2]\nset: [train.steps=2]\nruns:\n\
         - {{name: a}}\n- {{name: b, set: [optimizer.matrix_learning_rate=0.01]}}\nevaluations:\n\
         - {{name: plain, weights: live}}\n- {{name: sliding, stride_factor: 0.5}}\n\
         - {{name: half, weights: artifact_f16_embedding, window_factor: 1.375}}\n",
        shop.path("grid")
    );
    std::fs::write(&grid, text).expect("grid");
    let first = succeed(&["lm", "grid", &grid, "--json"]);
    let table = last_json(&first);
    for name in ["plain", "sliding", "half", "tokens_per_second"] {
        assert_eq!(table["runs"]["b"][name]["n"], 2, "{name}");
        assert!(table["runs"]["b"][name]["half_width_95"].is_number(), "{name}");
    }
    let values = |run: &str| -> Vec<f64> {
        let values = table["runs"][run]["plain"]["values"].as_array().expect("values");
        values.iter().filter_map(Value::as_f64).collect()
    };
    let paired = values("b").iter().zip(values("a")).map(|(b, a)| b - a).sum::<f64>() / 2.0;
    assert_eq!(table["against"], "a");
    assert_eq!(table["differences"]["b"]["plain"]["mean"].as_f64(), Some(paired));
    assert!(table["differences"]["a"].is_null());
    assert!(table["runs"]["b"]["artifact_bytes"]["mean"].as_f64() > Some(0.0));
    let again = run(&["lm", "grid", &grid, "--json"]);
    assert_eq!(stdout(&again), first);
    assert!(!support::stderr(&again).contains("=="), "nothing runs again");
    assert!(fail(&["lm", "grid", &grid, "--only", "c"], 2).contains("no run `c`"));
}

#[test]
fn a_run_is_interrupted_with_an_exit_code_and_extended_on_demand() {
    let shop = Shop::new();
    let output = shop.path("long");
    let long = format!("output={output}");
    let train = ["lm", "train", &shop.config, &long, "train.steps=100000", "--json"];
    let child = start_kept(&mut support::longdraft(&train));
    wait_until("steps", || lines_so_far(format!("{output}/metrics.jsonl")) >= 3);
    signal(&child, "-TERM");
    let ended = child.wait_with_output().expect("wait");
    assert_eq!(ended.status.code(), Some(143));
    assert_eq!(last_json(&stdout(&ended))["finished"], false);
    assert!(Path::new(&output).join("checkpoints/last/manifest.json").is_file());

    succeed(&["lm", "train", &shop.config]);
    let longer = ["lm", "train", &shop.config, "train.steps=6"];
    fail_with(&longer, 1, &["was 4, now 6", "--extend"]);
    fail_with(&["lm", "train", &shop.config, "--extend"], 1, &["nothing to extend"]);
    let extended = run(&[&longer[..], &["--extend", "--json"]].concat());
    let told = support::stderr(&extended);
    require_words(&told, &["multiplier of every rate after step 4 goes from 0.000 to 0.667"]);
    assert_eq!(last_json(&stdout(&extended))["steps"], 6);
    assert!(fail(&["lm", "train", &shop.config], 1).contains("cannot become shorter"));
}

#[test]
fn wrong_configurations_and_data_are_named() {
    let shop = Shop::new();
    let train = ["lm", "train", &shop.config, "train.tokens_per_step=65"];
    let train = [&train[..], &["model.num_attention_heads=3"]].concat();
    let text = fail(&[&train[..], &["+model.num_attention_head=2"]].concat(), 2);
    assert!(text.contains("did you mean `num_attention_heads`"), "{text}");
    fail_with(&train, 2, &["tokens_per_step", "num_attention_heads"]);
    // What belongs to drafts is refused, by a plan too.
    for (key, reason) in [
        ("parallel.zero=3", "spreads a draft and its target"),
        ("parallel.sequence=2", "cuts rows of drafts"),
        ("parallel.tensor=2", "shares a draft's target"),
        ("parallel.optimizer_state=file", "is for drafts"),
        ("precision=stored", "holds a draft's target"),
    ] {
        for more in [&[][..], &["--plan"]] {
            fail_with(&[&["lm", "train", &shop.config, key], more].concat(), 2, &[reason]);
        }
    }
    let text = fail(&["lm", "train", &shop.config, "model.vocab_size=40"], 2);
    assert!(text.contains("beyond the vocabulary of 40"), "{text}");
    succeed(&["lm", "train", &shop.config]);
    fail_with(&["lm", "train", &shop.config, "train.seed=5"], 1, &["train.seed was 1337, now 5"]);
    let kept = std::fs::read_to_string(shop.path("run/config.yaml")).expect("config.yaml");
    assert!(kept.contains("seed: 1337"), "{kept}");
    let command = ["lm", "score", &shop.path("run"), "--data", &shop.path("data/val_000000.bin")];
    fail_with(&command, 2, &["--tokenizer"]);
    let (rows, output) = (shop.path("rows.jsonl"), shop.path("t"));
    fail(&["data", "tokenizer", &rows, "--vocabulary", "9", "--output", &output], 1);
}

#[test]
fn shipped_configurations_compose() {
    for name in ["baseline", "pr96", "modern", "books", "demonstration"] {
        let config = repository(&format!("conf/pretrain/{name}.yaml")).display().to_string();
        // The data is not there: the configuration itself is in order.
        let folder = tempfile::tempdir().expect("tempdir");
        let output = format!("output={}", folder.path().join("run").display());
        let missing = format!("data.train=[{}]", folder.path().join("none.bin").display());
        let text = fail(&["lm", "train", &config, &output, &missing], 2);
        assert!(text.contains("`data.train.0`: ") && text.contains("none.bin"), "{text}");
    }
}

/// Scripts that were written before keep working, and learn the new names.
#[test]
fn old_names_of_the_commands_work_and_say_the_new_ones() {
    let shop = Shop::new();
    assert!(support::noted(&["pretrain", &shop.config]).contains("`longdraft lm train`"));
    let bin = shop.path("data/val_000000.bin");
    let (folder, data) = (shop.path("run"), shop.path("data"));
    for (old, new) in [
        (vec!["eval", "bpb", &folder, "--data", &bin, "--tokenizer", &data], "lm score"),
        (vec!["quantize", &folder, "--output", &shop.path("old.ldq")], "lm quantize"),
    ] {
        support::require_words(&support::noted(&old), &[new]);
    }
    let help = succeed(&["--help"]);
    assert!(!help.contains("pretrain") && help.contains("  lm "), "{help}");
}

#[test]
fn the_keys_in_the_docs_are_those_of_the_types() {
    let page =
        std::fs::read_to_string(repository("docs/reference/pretraining-keys.md")).expect("page");
    let (_, keys) = page.split_once("# Keys\n").expect("keys");
    let schema = succeed(&["config", "schema", "--pretrain", "--markdown"]);
    assert_eq!(
        keys, schema,
        "docs/reference/pretraining-keys.md differs from `config schema --pretrain --markdown`"
    );
}

#[test]
fn a_target_is_scored_over_text() {
    let shop = support::Workshop::new();
    let rows = shop.path("rows.jsonl");
    let target = shop.target();
    let mut scores = Vec::new();
    for more in [&["--plain"][..], &["--stride", "16"], &["--ntk-reference", "32"]] {
        let mut arguments = vec!["lm", "score", &target, "--data", &rows, "--window", "64"];
        arguments.extend(["--max-tokens", "700", "--json"]);
        arguments.extend(more);
        scores.push(last_json(&succeed(&arguments)));
    }
    assert_eq!(scores[1]["tokens"], scores[1]["total_tokens"]);
    assert!(scores.iter().all(|score| score["bits_per_byte"].as_f64().is_some_and(|b| b > 1.0)));
    assert_eq!(scores[2]["rope_rule"], "ntk");
    assert!(scores[2]["rope_base"].as_f64() > scores[1]["rope_base"].as_f64());
}

#[test]
fn the_reference_stream_is_scored_exactly() {
    let Some(golden) = shared("golden/pretrain/tied-l4-d64") else { return };
    let meta = read_json(golden.join("meta.json"));
    let given = &meta["config"];
    let keys = [
        "vocab_size",
        "num_layers",
        "model_dim",
        "num_heads",
        "num_kv_heads",
        "mlp_mult",
        "tie_embeddings",
        "logit_softcap",
    ];
    let mut model = json!({
        "rms_norm_eps": meta["rms_norm_eps"],
        "rope": {"base": given["rope_base"], "reference_length": given["rope_train_len"]}
    });
    for key in keys {
        model[key] = given[key].clone();
    }
    let dir = tempfile::tempdir().expect("tempdir");
    // The reference's names of keys are read, too.
    let config =
        json!({"model_type": "longdraft_language_model", "tokenizer_hash": "", "model": model});
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("config");
    let weights = golden.join("weights_trained.safetensors");
    std::fs::copy(weights, dir.path().join("model.safetensors")).expect("weights");
    let path = |name: &str| golden.join(name).display().to_string();
    let want = &meta["eval"]["fp32"]["L128_s32"]["sliding_full"];
    let out = last_json(&succeed(&[
        "lm",
        "score",
        &dir.path().display().to_string(),
        "--data",
        &path("val_000000.bin"),
        "--tokenizer",
        &path("tokenizer.model"),
        "--window",
        "128",
        "--stride",
        "32",
        "--json",
    ]));
    for key in ["windows", "tokens", "bytes"] {
        assert_eq!(out[key], want[key], "{key}");
    }
    let error =
        out["bits_per_byte"].as_f64().expect("bpb") - want["val_bpb"].as_f64().expect("bpb");
    assert!(error.abs() < 1e-6, "{error}");
}

#[test]
fn a_llama_becomes_a_file_that_generates_and_takes_drafts() {
    let shop = Shop::new();
    let llama = ["model.architecture=llama", "model.rope.rule=none", "model.hidden_size=32"];
    succeed(&[&["lm", "train", &shop.config][..], &llama].concat());
    let (file, data) = (shop.path("model.gguf"), shop.path("data"));
    let quantize = ["lm", "quantize", &shop.path("run"), "--output", &file, "--json"];
    fail_with(&quantize, 2, &["--tokenizer"]);
    let out = last_json(&succeed(&[&quantize[..], &["--tokenizer", &data]].concat()));
    assert!(out["bytes"].as_u64() > Some(1000), "{out}");

    // Until it has a tokenizer it is no target: the run, its checkpoint and its artifact say what makes one of it.
    let folder = shop.path("run/checkpoints/last");
    let generate =
        |target: &str| fail(&["generate", "--target", target, "--no-draft", "--prompt", "the"], 2);
    for place in [&shop.path("run"), &folder, &shop.path("run/model.ldq")] {
        let text = generate(place);
        assert!(text.contains("without a tokenizer"), "{text}");
        let command = format!("lm quantize {place} --output lm.gguf --tokenizer {data}`");
        assert!(text.contains(&command), "{text}");
    }
    std::fs::copy(format!("{data}/tokenizer.json"), format!("{folder}/tokenizer.json"))
        .expect("tokenizer");
    let text = generate(&shop.path("run"));
    assert!(text.contains(&format!("name its checkpoint: {folder}")), "{text}");
    let bits = |model: &str, more: &[&str]| {
        let rows = shop.path("rows.jsonl");
        let common = ["lm", "score", model, "--data", &rows, "--window", "32", "--json"];
        last_json(&succeed(&[&common[..], more].concat()))["bits_per_byte"].as_f64().expect("bits")
    };
    let (of_file, of_folder) = (bits(&file, &[]), bits(&folder, &["--tokenizer", &data]));
    assert!((of_file - of_folder).abs() < 0.02 * of_folder, "{of_file} and {of_folder}");
    let few = ["generate", "--target", &file, "--no-draft", "--prompt", "the cat"];
    let out = succeed(&[&few[..], &["--max-tokens", "4", "--json"]].concat());
    assert!(last_json(&out)["tokens"].is_array());

    succeed(&["lm", "train", &shop.config, &format!("output={}", shop.path("baseline"))]);
    let baseline =
        ["lm", "quantize", &shop.path("baseline"), "--output", &file, "--tokenizer", &data];
    fail_with(&baseline, 1, &["architecture: llama"]);
    // Nothing makes a target of this one, with a tokenizer or without.
    let folder = shop.path("baseline/checkpoints/last");
    for place in [&shop.path("baseline"), &folder] {
        let text = generate(place);
        assert!(
            text.contains("which is no target") && text.contains("architecture: llama"),
            "{text}"
        );
    }
    std::fs::copy(format!("{data}/tokenizer.json"), format!("{folder}/tokenizer.json"))
        .expect("tokenizer");
    assert!(generate(&folder).contains("which is no target"));
}
