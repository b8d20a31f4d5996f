//! Cases that are computed in other ways: in bf16, with composed ops, on other devices.

use super::*;

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
        let cases = json_lines(out).into_iter();
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
        fail_with(&["parity", &case, "--device", device], 2, &[device, feature]);
    }
    fail_with(&["parity", "x", "--device", "gpu7"], 2, &["cuda:0"]);
}

fn built_for_a_gpu() -> bool {
    candle_core::utils::cuda_is_available() || candle_core::utils::metal_is_available()
}
