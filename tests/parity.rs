//! Reference cases through the binary.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use crate::support::files::{change_json, change_tensors, copy_files};
use crate::support::{self, fail, last_json, run, shared, stdout, succeed};

/// Cases in the folder of the repository.
const SHIPPED: usize = 14;

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases")
}

/// A copy of a case that a test may break.
fn copy_case(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("tempdir");
    copy_files(cases().join(name), folder.path());
    folder
}

fn edit_meta(folder: &Path, edit: impl FnOnce(&mut Value)) {
    change_json(folder.join("meta.json"), edit);
}

/// Lines of JSON.
fn parsed(out: &str) -> Vec<Value> {
    out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// What is reported of a case, with the exit code of the program.
#[track_caller]
fn reported(case: &Path, code: i32) -> Value {
    let output = run(&["parity", &case.display().to_string(), "--json"]);
    assert_eq!(output.status.code(), Some(code), "{}: {}", case.display(), stdout(&output));
    parsed(&stdout(&output)).into_iter().next().unwrap_or_default()
}

/// All cases of a folder pass: so many at least.
#[track_caller]
fn all_pass(folder: &Path, least: u64, more: &[&str]) -> String {
    let folder = folder.display().to_string();
    let out = succeed(&[&["parity", &folder, "--json"], more].concat());
    let summary = last_json(&out);
    assert_eq!(summary["pass"], true, "{out}");
    assert!(summary["cases"].as_u64() >= Some(least) && summary["passed"] == summary["cases"]);
    out
}

#[test]
fn shipped_cases_pass_with_a_line_each_and_a_summary() {
    let lines = parsed(&succeed(&["parity", &cases().display().to_string(), "--json"]));
    let (summary, lines) = lines.split_last().expect("lines");
    assert_eq!(*summary, serde_json::json!({"cases": SHIPPED, "passed": SHIPPED, "pass": true}));
    assert_eq!(lines.len(), SHIPPED);
    let case = |name: &str, kind: &str| {
        let case = lines.iter().find(|line| line["case"] == name).expect(name);
        assert_eq!((&case["kind"], &case["pass"]), (&kind.into(), &true.into()), "{name}");
        case
    };
    for name in ["mixtral", "qwen2_moe", "qwen3_moe"] {
        let checks = case(name, "forward")["checks"].as_array().expect("checks");
        for what in ["whole logits_last", "whole hidden_after_layer_0", "whole last_layer_k"] {
            assert!(checks.iter().any(|check| check["name"] == what), "{what} of {name}");
        }
        let greedy = |check: &&Value| {
            check["name"].as_str().is_some_and(|name| name.contains("greedy, 24 tokens"))
        };
        assert_eq!(checks.iter().filter(greedy).count(), 2, "{name}");
    }
    for (name, kind) in
        [("eagle31_norms", "eagle3"), ("eagle3_lk_lambda", "eagle3"), ("qwen2_short", "glide")]
    {
        let case = case(name, kind);
        for key in ["loss_error", "grad_error", "weight_error"] {
            assert!(case[key].as_f64().is_some_and(|error| error > 0.0 && error < 1e-4), "{key}");
        }
        assert!(case["checks"].as_array().is_some_and(|checks| checks.len() > 80));
    }
    for (name, kind, what) in [
        ("block_dflash", "dflash", "gradient layers.2.self_attn.o_proj.bias"),
        ("block_dflash2", "dflash2", "row 1 choices"),
        ("block_dspark", "dspark", "gradient markov_head.joint_proj.bias"),
    ] {
        let case = case(name, kind);
        let checks = case["checks"].as_array().expect("checks");
        assert!(checks.iter().any(|check| check["name"] == what), "{what} of {name}");
        for key in ["loss_error", "grad_error"] {
            assert!(case[key].as_f64().is_some_and(|error| error > 0.0 && error < 1e-4), "{key}");
        }
    }
}

#[test]
fn a_wrong_expectation_fails_the_case() {
    for edit in [
        (|meta: &mut Value| meta["steps"][1]["loss"] = 9.0.into()) as fn(&mut Value),
        |meta| meta["optimizer"]["eps"] = 1e-2.into(),
        |meta| meta["objective"]["self_window"] = 9.into(),
        |meta| meta["steps"][0]["by_delay"]["1"]["top1_count"] = 17.into(),
    ] {
        let case = copy_case("packed_agree");
        edit_meta(case.path(), edit);
        assert_eq!(reported(case.path(), 1)["pass"], false);
    }
}

#[test]
fn rates_are_the_targets_own_where_the_loss_is_of_labels_alone() {
    // The first step's rates do not depend on the loss. Of the files gradients and weights do.
    let as_labels = |meta: &mut Value, soft_targets: Value| {
        meta["objective"]["soft_weight"] = 0.0.into();
        meta["objective"]["soft_targets"] = soft_targets;
        for step in meta["steps"].as_array_mut().expect("steps") {
            step["loss"] = step["hard_loss"].take();
        }
    };
    for soft_targets in ["topk".into(), "full".into(), Value::Null] {
        let case = copy_case("packed_agree");
        edit_meta(case.path(), |meta| as_labels(meta, soft_targets.clone()));
        let output = run(&["parity", &case.path().display().to_string(), "--json"]);
        let report = parsed(&stdout(&output)).swap_remove(0);
        let of_rates = |check: &&Value| {
            let name = check["name"].as_str().expect("name");
            name == "step 1 loss"
                || name.starts_with("step 1 delay")
                || name.starts_with("step 1 simulated")
        };
        let checks = report["checks"].as_array().expect("checks");
        let checks: Vec<&Value> = checks.iter().filter(of_rates).collect();
        assert_eq!(checks.len(), 1 + 5 * 5 + 4);
        assert!(checks.iter().all(|check| check["pass"] == true), "{checks:?}");
    }
}

#[test]
fn a_wrong_expectation_fails_an_eagle3_case() {
    for edit in [
        (|meta: &mut Value| meta["steps"][1]["loss"] = 9.0.into()) as fn(&mut Value),
        |meta| meta["optimizer"]["eps"] = 1e-2.into(),
        |meta| meta["objective"]["step_decay"] = 0.7.into(),
        |meta| meta["objective"]["lk_kl_decay"] = 1.0.into(),
        |meta| meta["default_mode"][0]["mask_rule"] = "input".into(),
        |meta| meta["default_mode"][0]["rows_R_and_M"][0][0] = 1.into(),
        |meta| meta["draft_config"]["rope_theta"] = 5e5.into(),
    ] {
        let case = copy_case("eagle3_lk_lambda");
        edit_meta(case.path(), edit);
        assert_eq!(reported(case.path(), 1)["pass"], false);
    }
}

#[test]
fn malformed_eagle3_cases_are_exit_2_without_a_panic() {
    for (edit, part) in [
        (
            (|meta: &mut Value| meta["record_lengths"] = serde_json::json!([19, 0]))
                as fn(&mut Value),
            "record_lengths",
        ),
        (|meta| meta["record_lengths"][0] = 18.into(), "values"),
        (|meta| meta["objective"]["lk_type"] = "beta".into(), "`lk_type` is unknown"),
        (|meta| meta["default_mode"][0]["mask_rule"] = "all".into(), "`mask_rule` is unknown"),
        (|meta| meta["default_mode"][0]["grads_file"] = "../x".into(), "is not a file name"),
        (|meta| meta["draft_config"]["num_key_value_heads"] = 2.into(), "does not divide"),
        (|meta| meta["steps"][0]["acc"] = serde_json::json!([0.0]), "`acc` has 1 values"),
        (|meta| meta["steps"][0]["lr"] = Value::Null, "no `lr`"),
    ] {
        let case = copy_case("eagle3_lk_lambda");
        edit_meta(case.path(), edit);
        let text = fail(&["parity", &case.path().display().to_string()], 2);
        assert!(text.contains(part), "{part} not in {text}");
    }
}

#[test]
fn unknown_and_broken_cases_are_exit_2_or_1_without_a_panic() {
    let case = copy_case("packed_agree");
    let path = case.path().display().to_string();
    edit_meta(case.path(), |meta| meta["kind"] = "riddle".into());
    assert!(fail(&["parity", &path], 2).contains("unknown kind `riddle`"));
    edit_meta(case.path(), |meta| meta["kind"] = "glide".into());
    edit_meta(case.path(), |meta| meta["seq_len"] = 97.into());
    assert!(fail(&["parity", &path], 2).contains("values, not"));
    std::fs::write(case.path().join("meta.json"), "{").expect("write");
    fail(&["parity", &path], 2);
    let case = copy_case("packed_agree");
    let weights = case.path().join("weights.safetensors");
    let bytes = std::fs::read(&weights).expect("read");
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).expect("write");
    fail(&["parity", &case.path().display().to_string()], 1);
    fail(&["parity", "no/such/folder"], 2);
}

#[test]
fn a_case_that_cannot_be_computed_fails_beside_others_that_still_run() {
    let folder = tempfile::tempdir().expect("tempdir");
    for name in ["packed_agree", "eagle3_lk_lambda", "qwen2_short"] {
        copy_files(cases().join(name), folder.path().join(name));
    }
    edit_meta(&folder.path().join("eagle3_lk_lambda"), |meta| meta["kind"] = "riddle".into());
    let weights = folder.path().join("packed_agree/weights.safetensors");
    std::fs::write(weights, b"short").expect("write");
    let path = folder.path().display().to_string();
    let output = run(&["parity", &path, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let out = stdout(&output);
    let lines = parsed(&out);
    assert_eq!(lines.len(), 4, "{out}");
    assert_eq!(
        (&lines[0]["case"], &lines[0]["error"]["code"]),
        (&"eagle3_lk_lambda".into(), &2.into())
    );
    assert_eq!((&lines[1]["pass"], &lines[1]["error"]["code"]), (&false.into(), &1.into()));
    assert_eq!((&lines[2]["case"], &lines[2]["pass"]), (&"qwen2_short".into(), &true.into()));
    assert_eq!(lines[3], serde_json::json!({"cases": 3, "passed": 1, "pass": false}));
    let output = run(&["parity", &path]);
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(errors.contains("unknown kind `riddle`"), "{errors}");
    assert!(stdout(&output).contains("1 of 3 cases passed"));
}

#[test]
fn bf16_has_tolerances_of_its_own_and_still_finds_wrong_values() {
    let path = cases().display().to_string();
    let out = succeed(&["parity", &path, "--precision", "bf16", "--json"]);
    assert_eq!(
        last_json(&out),
        serde_json::json!({"cases": SHIPPED, "passed": SHIPPED, "pass": true})
    );
    // Blocks are multiplied as integers whatever the precision is.
    let errors = |out: &str| -> Vec<f64> {
        let cases = parsed(out).into_iter();
        let rounded = cases.filter(|case| case["kind"].is_string() && case["kind"] != "quants");
        let of = |case: Value| {
            let checks = case["checks"].as_array().cloned().unwrap_or_default();
            checks.iter().filter_map(|check| check["error"].as_f64()).fold(0.0, f64::max)
        };
        rounded.map(of).collect()
    };
    let exact = errors(&succeed(&["parity", &path, "--json"]));
    // Without `quants`.
    assert_eq!(exact.len(), SHIPPED - 1);
    for (rounded, exact) in errors(&out).iter().zip(exact) {
        assert!(*rounded > 10.0 * exact, "{rounded} {exact}");
    }
    for edit in [
        (|meta: &mut Value| meta["steps"][0]["loss"] = 9.0.into()) as fn(&mut Value),
        |meta| meta["steps"][0]["by_delay"]["1"]["rows"] = 3.into(),
        |meta| meta["objective"]["self_window"] = 1.into(),
    ] {
        let case = copy_case("packed_agree");
        edit_meta(case.path(), edit);
        let case = case.path().display().to_string();
        let output = run(&["parity", &case, "--precision", "bf16", "--json"]);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(last_json(&stdout(&output))["pass"], false);
    }
}

#[test]
fn a_wrong_or_senseless_case_of_blocks_is_told() {
    let Some(folder) = shared("golden/block/dflash2-over-base-weights") else { return };
    let expect = |code: i32, edit: &dyn Fn(&mut Value)| {
        let case = tempfile::tempdir().expect("tempdir");
        copy_files(&folder, case.path());
        edit_meta(case.path(), edit);
        reported(case.path(), code);
    };
    expect(0, &|_| {});
    expect(1, &|meta| meta["loss"] = 9.0.into());
    expect(1, &|meta| meta["gamma"] = 2.0.into());
    expect(1, &|meta| meta["selector_rank"] = 7.into());
    expect(1, &|meta| meta["selector_divisor"] = "over_hit_weights".into());
    for (key, value) in [
        ("heads", Value::from(0)),
        ("block_size", 1_u64.into()),
        ("block_size", (1_u64 << 40).into()),
        ("top_k", 0.into()),
        ("conv_group_size", 5.into()),
        ("mask_token_id", 256.into()),
        ("target_layer_ids", serde_json::json!([3, 1, 5])),
        ("layer_types", serde_json::json!(["linear_attention"])),
        ("loss_type", "riddle".into()),
    ] {
        expect(2, &|meta| meta[key] = value.clone());
    }
}

/// A copy of a case of blocks whose tensors a test changes; `None` where the cases are not at hand.
fn blocks_with(
    edit: impl Fn(&mut BTreeMap<String, Tensor>) -> candle_core::Result<()>,
) -> Option<tempfile::TempDir> {
    let folder = shared("golden/block/dflash2-over-hit-weights")?;
    let case = tempfile::tempdir().expect("tempdir");
    copy_files(folder, case.path());
    edit_tensors(case.path(), |tensors| edit(tensors).expect("edit"));
    Some(case)
}

#[test]
fn blocks_may_come_with_other_flags_with_ties_and_with_a_row_that_counts_for_nothing() {
    let case = blocks_with(|tensors| {
        tensors.insert("in.loss_mask".into(), tensors["in.loss_mask"].to_dtype(DType::U8)?);
        tensors.insert("in.keep".into(), tensors["in.keep"].to_dtype(DType::F32)?);
        // The first two candidates of all slots change places.
        let swap = Tensor::new(&[1_u32, 0], &Device::Cpu)?;
        for name in ["out.candidates", "out.scores"] {
            let all = &tensors[name];
            let last = all.dim(3)? - 2;
            let head = all.narrow(3, 0, 2)?.contiguous()?.index_select(&swap, 3)?;
            tensors.insert(name.into(), Tensor::cat(&[head, all.narrow(3, 2, last)?], 3)?);
        }
        // A third row: as the first one, but no block is kept, and nothing is known of its outputs.
        for name in ["in.input_ids", "in.loss_mask", "in.features", "in.last_hidden", "in.anchors"]
        {
            let all = &tensors[name];
            tensors.insert(name.into(), Tensor::cat(&[all, &all.narrow(0, 0, 1)?], 0)?);
        }
        for name in ["in.keep", "out.hidden", "out.candidates", "out.scores", "out.walk"] {
            let all = &tensors[name];
            tensors
                .insert(name.into(), Tensor::cat(&[all, &all.narrow(0, 0, 1)?.zeros_like()?], 0)?);
        }
        Ok(())
    });
    if let Some(case) = case {
        succeed(&["parity", &case.path().display().to_string(), "--json"]);
    }
}

#[test]
fn candidates_of_other_blocks_and_features_of_other_rows_are_malformed() {
    for (cut, dimension, rest, told) in [
        // Fewer candidates than the blocks of all rows have.
        (&["out.candidates", "out.scores", "out.walk"][..], 1, 2, "are of different slots"),
        (&["in.features"], 0, 1, "anchors and features are of different rows"),
        (&["in.features"], 1, 5, "anchors and features are of different rows"),
    ] {
        let case = copy_case("block_dflash2");
        change_tensors(case.path().join("case.safetensors"), |tensors| {
            for (_, all) in tensors.iter_mut().filter(|(name, _)| cut.contains(&name.as_str())) {
                let part = all.narrow(dimension, 0, rest).and_then(|part| part.contiguous());
                *all = part.expect("a part");
            }
        });
        let text = fail(&["parity", &case.path().display().to_string()], 2);
        assert!(text.contains(told), "{text}");
    }
}

#[test]
fn a_block_case_of_another_window_causality_or_bias_fails() {
    for (name, key, value, code) in [
        ("block_dflash", "sliding_window", Value::from(3), 1),
        ("block_dflash", "is_causal", true.into(), 1),
        ("block_dflash", "attention_bias", false.into(), 1),
        ("block_dflash", "layer_types", serde_json::json!(["full_attention"]), 2),
        ("block_dflash2", "is_causal", Value::Null, 1),
        ("block_dflash2", "conv_kernel_size", 2.into(), 1),
        ("block_dspark", "is_causal", false.into(), 1),
        ("block_dspark", "confidence_head_with_markov", true.into(), 1),
        ("block_dspark", "target_layer_ids", serde_json::json!([-1, 0, 2, 7]), 2),
        ("block_dspark", "target_layer_ids", serde_json::json!([-2, 0, 2, 5]), 2),
    ] {
        let case = copy_case(name);
        edit_meta(case.path(), |meta| meta[key] = value.clone());
        reported(case.path(), code);
    }
}

/// Changes the tensors of a copied case of blocks.
fn edit_tensors(case: &Path, edit: impl FnOnce(&mut BTreeMap<String, Tensor>)) {
    change_tensors(case.join("case.safetensors"), |tensors| {
        let mut named = tensors.drain(..).collect();
        edit(&mut named);
        tensors.extend(named);
    });
}

#[test]
fn a_case_of_blocks_may_multiply_its_embeddings() {
    for name in ["block_dflash", "block_dflash2", "block_dspark"] {
        let case = copy_case(name);
        edit_tensors(case.path(), |tensors| {
            let table = tensors["in.embed"].clone();
            tensors.insert("in.embed".into(), (&table / 4.0).expect("a table"));
            tensors.entry("in.head".into()).or_insert(table);
        });
        for (scale, code) in [(Value::from(4), 0), (Value::Null, 1), ((-4).into(), 2)] {
            edit_meta(case.path(), |meta| meta["input_embedding_scale"] = scale.clone());
            let output = run(&["parity", &case.path().display().to_string(), "--json"]);
            assert_eq!(output.status.code(), Some(code), "{name} {scale}: {}", stdout(&output));
        }
    }
}

#[test]
fn unknown_words_and_tensors_of_other_shapes_are_told_with_case_and_name() {
    for (name, key, known) in [
        ("block_dflash", "divisor", "weights and rows are known"),
        ("block_dflash", "loss_type", "dflash, dpace"),
        ("block_dflash2", "selector_divisor", "over_hit_weights are known"),
    ] {
        for value in [Value::from("riddle"), 3.into()] {
            let case = copy_case(name);
            edit_meta(case.path(), |meta| meta[key] = value.clone());
            let path = case.path().display().to_string();
            let text = fail(&["parity", &path], 2);
            for part in [path.as_str(), &format!("`{key}` = {value} is unknown"), known] {
                assert!(text.contains(part), "{part} not in {text}");
            }
        }
    }
    for (name, tensor) in [
        ("block_dflash", "in.features"),
        ("block_dflash", "out.hidden"),
        ("block_dspark", "in.last_hidden"),
        ("block_dspark", "in.head"),
    ] {
        let case = copy_case(name);
        edit_tensors(case.path(), |tensors| {
            let all = &tensors[tensor];
            let last = all.rank() - 1;
            let less = all.narrow(last, 0, all.dims()[last] - 1).and_then(|all| all.contiguous());
            tensors.insert(tensor.into(), less.expect("a part"));
        });
        let path = case.path().display().to_string();
        let text = fail(&["parity", &path], 2);
        for part in [path.as_str(), &format!("`{tensor}` has the shape"), "expected"] {
            assert!(text.contains(part), "{part} not in {text}");
        }
    }
}

#[test]
fn a_gradient_that_nothing_here_has_is_named() {
    let case = copy_case("packed_agree");
    change_tensors(case.path().join("grads.safetensors"), |tensors| {
        tensors.push(("draft_model.riddle.weight".into(), tensors[0].1.clone()));
    });
    let report = reported(case.path(), 1);
    let checks = report["checks"].as_array().expect("checks");
    let named = |check: &&Value| {
        check["pass"] == false
            && check["name"].as_str().is_some_and(|name| name.contains("draft_model.riddle.weight"))
    };
    assert_eq!(checks.iter().filter(named).count(), 1, "{checks:?}");
}

#[test]
fn a_chain_whose_rank_nobody_says_has_none_and_is_a_chain() {
    for rank in [Value::Null, 0.into()] {
        let case = copy_case("block_dspark");
        edit_meta(case.path(), |meta| {
            meta["markov_rank"] = rank.clone();
            meta["markov_head_type"] = Value::Null;
        });
        // The file's loss is that of another head.
        let report = reported(case.path(), 1);
        let checks = report["checks"].as_array().expect("checks");
        let has = |name: &str| checks.iter().any(|check| check["name"] == name);
        assert!(has("gradient confidence_head.proj.bias"), "it ran as a draft without heads");
        assert!(!has("gradient markov_head.markov_w1.weight"), "{report}");
    }
}

#[test]
fn a_selector_without_a_hit_has_gradients_of_zeros() {
    let case = blocks_with(|tensors| {
        tensors.retain(|name, _| !name.starts_with("grad.candidate_selector."));
        // No token is learned.
        let mask = tensors["in.loss_mask"].zeros_like()?;
        tensors.insert("in.loss_mask".into(), mask);
        Ok(())
    });
    let Some(case) = case else { return };
    // The loss of the file is another one.
    let report = reported(case.path(), 1);
    let of_selector = |check: &&Value| {
        check["name"].as_str().is_some_and(|name| name.contains("gradient candidate_selector"))
    };
    let checks = report["checks"].as_array().expect("checks");
    let checks: Vec<&Value> = checks.iter().filter(of_selector).collect();
    assert_eq!(checks.len(), 3);
    assert!(
        checks.iter().all(|check| check["pass"] == true && check["error"] == 0.0),
        "{checks:?}"
    );
}

#[test]
fn every_development_case_passes_where_they_are_at_hand() {
    for (kind, least) in [("glide", 4), ("eagle3", 3), ("block", 11), ("pretrain", 3)] {
        if let Some(cases) = shared(&format!("golden/{kind}")) {
            all_pass(&cases, least, &[]);
        }
    }
    if let (Some(case), Some(target)) = (shared("golden/stories260K"), shared("models/stories260K"))
    {
        let target = target.display().to_string();
        let case = case.display().to_string();
        let out = succeed(&["parity", &case, "--target", &target, "--json"]);
        assert_eq!(last_json(&out)["pass"], true);
        let text = fail(&["parity", &case], 2);
        assert!(text.contains("--target"), "{text}");
        let other = tempfile::tempdir().expect("tempdir");
        support::write_target(other.path(), &support::tiny_config("llama"));
        let text = fail(&["parity", &case, "--target", &other.path().display().to_string()], 1);
        assert!(text.contains("SHA-256"), "{text}");
    }
}

/// Cases of target families that the loader knows.
const FAMILIES: [&str; 36] = [
    "deepseek_v3",
    "gemma4",
    "gemma4_moe",
    "lfm2",
    "qwen3_5",
    "qwen3_5_gguf",
    "qwen3_5_moe",
    "qwen3_5_nested",
    "qwen3_next",
    "qwen3_next_moe",
    "qwen3_next_moe_gguf",
    "gemma2",
    "gemma3",
    "gemma3_old_keys",
    "gemma3_old_keys_gguf",
    "ministral3",
    "mistral_window",
    "mixtral_window",
    "qwen2_window",
    "smollm3",
    "smollm3_gguf",
    "granite",
    "granite_gguf",
    "olmo2",
    "olmo3",
    "olmo3_gguf",
    "phi3_longrope",
    "phi3_longrope_gguf",
    "phi3_window",
    "glm4",
    "glm4_gguf",
    "glm4_moe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "gpt_oss_mxfp4_gguf",
    "llama4",
];

#[test]
fn targets_of_every_family_pass_with_fused_and_with_composed_ops() {
    for family in FAMILIES {
        let Some(folder) = shared(&format!("golden/targets/{family}")) else { return };
        for ops in ["fused", "composed"] {
            let case = parsed(&all_pass(&folder, 1, &["--ops", ops])).swap_remove(0);
            let checks = case["checks"].as_array().expect("checks");
            let count = |part: &str| {
                let named =
                    |check: &&Value| check["name"].as_str().is_some_and(|n| n.contains(part));
                checks.iter().filter(named).count()
            };
            let prompts = count("log-sum-exp");
            assert!(prompts >= 3, "{family}");
            for what in ["logits_at", "last_layer_k", "greedy, 16 tokens", "hidden_after_layer_2"] {
                assert_eq!(count(what), prompts, "{family}: {what}");
            }
            // Two prompts are longer than the cut; a layer's convolution, and its matrix where it has one.
            let recurrent = ["lfm2", "qwen3_5", "qwen3_next"];
            let states = recurrent.iter().any(|name| family.starts_with(name));
            assert_eq!(count("conv_state_layer_0_at_37"), if states { 2 } else { 0 }, "{family}");
            assert_eq!(
                count("recurrent_state_layer_0") > 0,
                states && family != "lfm2",
                "{family}"
            );
        }
    }
}

#[test]
fn a_case_of_another_window_scale_or_cap_fails() {
    for (case, key, value) in [
        ("mistral", "sliding_window", Value::from(21)),
        ("gemma2", "attn_logit_softcapping", 5.0.into()),
        ("gemma2", "final_logit_softcapping", Value::Null),
        ("gemma2", "query_pre_attn_scalar", 16.into()),
        ("gemma3", "sliding_window_pattern", 2.into()),
        ("gemma3", "rope_local_base_freq", 1e6.into()),
        ("gemma3", "rope_scaling", Value::Null),
    ] {
        let folder = copy_case_with_target(case);
        change_json(folder.path().join("target/config.json"), |config| config[key] = value);
        reported(folder.path(), 1);
    }
}

/// A copy of a forward case and of its weights.
fn copy_case_with_target(name: &str) -> tempfile::TempDir {
    let case = copy_case(name);
    copy_files(cases().join(name).join("target"), case.path().join("target"));
    case
}

#[test]
fn golden_cases_pass_in_bf16() {
    for kind in ["glide", "eagle3"] {
        let Some(folder) = shared(&format!("golden/{kind}")) else { return };
        all_pass(&folder, 3, &["--precision", "bf16"]);
    }
}

#[test]
fn composed_ops_pass_the_shipped_cases_too() {
    let out = succeed(&["parity", &cases().display().to_string(), "--ops", "composed", "--json"]);
    assert_eq!(
        last_json(&out),
        serde_json::json!({"cases": SHIPPED, "passed": SHIPPED, "pass": true})
    );
    let fused = succeed(&["parity", &cases().display().to_string(), "--json"]);
    // They are other ops: some last digit differs.
    assert_ne!(out, fused);
}

#[test]
fn blocks_of_every_type_have_the_values_of_the_case_and_others_fail() {
    let case = copy_case("quants");
    let folder = case.path().display().to_string();
    let report = reported(case.path(), 0);
    let checks = report["checks"].as_array().expect("checks");
    for name in ["Q2_K values", "MXFP4 values in memory", "Q4_K product 1", "IQ4_XS product 0"] {
        let check = checks.iter().find(|check| check["name"] == name).expect(name);
        assert_eq!(check["pass"], true, "{check}");
    }
    // Products with other activations than those of the case.
    let types = serde_json::json!({ "Q5_K": { "activations": "Q8_0" } });
    edit_meta(case.path(), |meta| meta["types"] = types.clone());
    let report = reported(case.path(), 1);
    assert_eq!(report["checks"][0]["pass"], true, "values do not depend on activations");
    assert_eq!(report["pass"], false);
    for (types, says) in [
        (serde_json::json!({ "IQ1_S": { "activations": "Q8_K" } }), "unknown type `IQ1_S`"),
        (serde_json::json!({ "Q4_K": { "activations": "Q8_9" } }), "times activations"),
        (Value::Null, "`types` is missing"),
    ] {
        edit_meta(case.path(), |meta| meta["types"] = types.clone());
        let output = run(&["parity", &folder]);
        assert_eq!(output.status.code(), Some(2), "{says}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(says), "{says}");
    }
}

#[test]
fn composed_ops_pass_the_golden_cases() {
    let Some(golden) = shared("golden") else { return };
    // Those of `pretrain` take half a minute of a core; `scripts/gpu-check` runs them.
    for kind in ["glide", "eagle3", "targets/quants"] {
        all_pass(&golden.join(kind), 1, &["--ops", "composed"]);
    }
}

#[test]
fn a_device_that_the_build_lacks_is_named_with_the_way_out() {
    if built_for_a_gpu() {
        return;
    }
    for (device, feature) in [("cuda:0", "--features cuda"), ("metal:0", "--features metal")] {
        let case = cases().join("packed_agree").display().to_string();
        let output = run(&["parity", &case, "--device", device]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(device) && message.contains(feature), "{message}");
    }
    let output = run(&["parity", "x", "--device", "gpu7"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cuda:0"));
}

fn built_for_a_gpu() -> bool {
    candle_core::utils::cuda_is_available() || candle_core::utils::metal_is_available()
}
