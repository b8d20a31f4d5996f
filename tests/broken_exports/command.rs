//! The command itself.

use super::*;

#[test]
fn the_command_lists_everything_at_once_and_fails() {
    let bench = Bench::new();
    let folder = bench.export(Profile::Vllm);
    let place = folder.display().to_string();
    let out = support::succeed(&["verify", &place]);
    let words = ["vLLM: passes our reading of its loader; vLLM was not run", "0 errors"];
    support::require_words(&out, &words);
    config(|v| v[IDS] = json!([1, 3, 4]))(&folder);
    absolute()(&folder);
    dropped("norm.weight")(&folder);
    let output = support::run(&["verify", &place, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = support::last_json(&support::stdout(&output));
    let codes: Vec<&str> = report["problems"]
        .as_array()
        .expect("list")
        .iter()
        .filter_map(|p| p["code"].as_str())
        .collect();
    for code in ["layer-shift", "absolute-d2t", "missing-tensor"] {
        assert!(codes.contains(&code), "{code} not in {codes:?}");
    }
    assert_eq!(report["clean"], false);
    let command = ["verify", &bench.folder.path().join("absent").display().to_string()];
    support::fail_with(&command, 2, &["no such folder"]);
    support::fail(&["verify", &place, "--profile", "tensorrt"], 2);
}
