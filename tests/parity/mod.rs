//! Reference cases through the binary.

mod blocks;
mod families;
mod ways;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use serde_json::Value;

use crate::support::files::{change_json, change_tensors, copy_files, json_lines, repository};
use crate::support::{self, fail, fail_with, last_json, run, shared, stdout, succeed};

/// Cases in the folder of the repository.
const SHIPPED: usize = 14;

fn cases() -> PathBuf {
    repository("tests/cases")
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

/// What is reported of a case, with the exit code of the program.
#[track_caller]
fn reported(case: &Path, code: i32) -> Value {
    let output = run(&["parity", &case.display().to_string(), "--json"]);
    assert_eq!(output.status.code(), Some(code), "{}: {}", case.display(), stdout(&output));
    json_lines(&stdout(&output)).into_iter().next().unwrap_or_default()
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
    let lines = json_lines(&succeed(&["parity", &cases().display().to_string(), "--json"]));
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
        let report = json_lines(&stdout(&output)).swap_remove(0);
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
        fail_with(&["parity", &case.path().display().to_string()], 2, &[part]);
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
    let lines = json_lines(&out);
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

/// Changes the tensors of a copied case of blocks.
fn edit_tensors(case: &Path, edit: impl FnOnce(&mut BTreeMap<String, Tensor>)) {
    change_tensors(case.join("case.safetensors"), |tensors| {
        let mut named = tensors.drain(..).collect();
        edit(&mut named);
        tensors.extend(named);
    });
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
            let words = [path.as_str(), &format!("`{key}` = {value} is unknown"), known];
            fail_with(&["parity", &path], 2, &words);
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
        let words = [path.as_str(), &format!("`{tensor}` has the shape"), "expected"];
        fail_with(&["parity", &path], 2, &words);
    }
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
        fail_with(&["parity", &case], 2, &["--target"]);
        let other = tempfile::tempdir().expect("tempdir");
        support::write_target(other.path(), &support::tiny_config("llama"));
        let text = fail(&["parity", &case, "--target", &other.path().display().to_string()], 1);
        assert!(text.contains("SHA-256"), "{text}");
    }
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
        fail_with(&["parity", &folder], 2, &[says]);
    }
}
