//! Configurations that are shown, checked and refused.

use super::*;
use crate::support::files::repository;
use crate::support::stdout;

#[test]
fn configurations_are_shown_checked_and_described() {
    let shop = Workshop::new();
    let config = curriculum(&shop);
    let shown = succeed(&["config", "show", &config, "train.seed=7"]);
    assert!(shown.contains("# stage answers, starts from best"), "{shown}");
    require_words(&shown, &["command line `train.seed=7`", "# default", "curriculum.yaml:"]);
    let shown = last_json(&succeed(&["config", "show", &config, "train.seed=7", "--json"]));
    let first = &shown["stages"][0];
    assert_eq!(first["stage"], "base");
    assert_eq!(first["configuration"]["train"]["seed"], 7);
    let shown = last_json(&succeed(&["config", "show", &shop.config(), "--json"]));
    assert!(shown["stages"][0]["stage"].is_null(), "{shown}");
    succeed(&["config", "check", &config, &shop.config()]);
    shop.write("bad.yaml", "targte: x\noutput: y\ntrain: {steps: -1}\n");
    let typo = "bad.yaml:1: unknown key `targte` (did you mean `target`?)";
    let words = [typo, "bad.yaml:3", "`data` is missing"];
    fail_with(&["config", "check", &shop.path("bad.yaml"), &config], 2, &words);
    let schema: Value = serde_json::from_str(&succeed(&["config", "schema"])).expect("JSON");
    assert!(schema["properties"]["stages"]["items"]["properties"]["start_from"].is_object());
}

/// The page of keys is generated; so that it stays true, it is compared.
#[test]
fn the_documented_keys_are_those_of_the_types() {
    let page = std::fs::read_to_string(repository("docs/reference/configuration.md"));
    let page = page.expect("docs/reference/configuration.md");
    let tables = succeed(&["config", "schema", "--markdown"]);
    assert!(page.contains(tables.trim()), "run: longdraft config schema --markdown");
}

/// Fragments in these folders do not stand alone.
const FRAGMENTS: [&str; 6] = ["strategy", "stage", "model", "data", "optim", "schedule"];

#[test]
fn every_shipped_configuration_composes() {
    fn collect(folder: &Path, files: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).expect("folder").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.path().is_dir() {
                if !FRAGMENTS.contains(&name.as_str()) && !name.starts_with('_') {
                    collect(&entry.path(), files);
                }
            } else if entry.path().extension().is_some_and(|extension| extension == "yaml")
                && !name.starts_with('_')
            {
                files.push(entry.path().display().to_string());
            }
        }
    }
    let mut files = Vec::new();
    collect(&repository("conf"), &mut files);
    assert!(files.len() >= 3, "{files:?}");
    // Their targets and data need not be here.
    let check = ["config", "check", "--keys"];
    let arguments: Vec<&str> = check.into_iter().chain(files.iter().map(String::as_str)).collect();
    let said = succeed(&arguments);
    assert_eq!(said.trim(), format!("{} configurations are fine", files.len()));
}

/// A curriculum whose later stages cannot find what they need.
fn broken_curriculum(shop: &Workshop) -> String {
    let text = std::fs::read_to_string(&shop.config).expect("config");
    let chats = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    shop.write("chats.jsonl", chats);
    let stages = format!(
        "stages:\n- name: base\n- name: gone\n  data: {{train: [{{path: {}}}]}}\n- name: chats\n  data:\n    \
         train:\n    - path: {}\n- name: own\n  start_from: scratch\n  draft: {{from: {}}}\n- name: again\n  \
         start_from: scratch\n  draft: {{from: {}}}\n- name: stored\n  train: {{features: {}}}\n",
        shop.path("none.jsonl"),
        shop.path("chats.jsonl"),
        shop.path("no-draft"),
        shop.path("run/base"),
        shop.path("no-store"),
    );
    shop.write("broken.yaml", format!("{text}{stages}"))
}

#[test]
fn what_any_stage_would_not_find_is_told_before_any_work() {
    let shop = Workshop::new();
    let config = broken_curriculum(&shop);
    let lines = [
        ("broken.yaml:15: `data.train.0.path`: ", "none.jsonl: No such file", "(stage `gone`)"),
        ("broken.yaml:19: `data.train.0.path`: ", "has no chat template", "(stage `chats`)"),
        ("broken.yaml:22: `draft.from`: ", "no-draft: no such file or folder", "(stage `own`)"),
        ("broken.yaml:27: `train.features`: ", "`longdraft capture` writes", "(stage `stored`)"),
    ];
    for command in
        [&["config", "check", &config][..], &["train", &config, "--plan"], &["train", &config]]
    {
        let text = fail(command, 2);
        for (place, problem, stage) in lines {
            let parts = [place, problem, stage];
            let told = text.lines().any(|line| parts.iter().all(|part| line.contains(part)));
            assert!(told, "{parts:?} not in {text}");
        }
        // The first stage writes that draft.
        assert!(!text.contains("(stage `again`)") && !text.contains("(stage `base`)"), "{text}");
        assert!(!Path::new(&shop.path("run")).exists(), "{command:?} began to work");
    }
    // One stage of it, and other commands.
    let wrong = ["capture", &config, "stage=gone", &format!("train.features={}", shop.path("f"))];
    fail_with(&wrong, 2, &["none.jsonl"]);
    assert!(!Path::new(&shop.path("f")).exists());
    // A target that is not there, its sources told beside it.
    let text = fail(&["config", "check", &config, &format!("target={}", shop.path("gone"))], 2);
    assert!(text.contains("gone: no such file or folder") && text.contains("none.jsonl"), "{text}");
}

#[test]
fn checks_take_overrides_and_list_problems_as_json() {
    let (shop, config) = Workshop::new().with_config();
    assert_eq!(
        succeed(&["config", "check", &config, "train.steps=3"]).trim(),
        "1 configuration is fine"
    );
    let text = fail(&["config", "check", &config, "train.steps=0", "~train.save_every"], 2);
    assert!(text.contains("command line `train.steps=0`: `train.steps` must be above 0"), "{text}");
    fail(&["config", "check", "train.steps=0"], 2);
    let rows = format!("data.train=[{{path: {}}}]", shop.path("none.jsonl"));
    let output = run(&["config", "check", "--json", &config, "trian=1", "train.steps=-1"]);
    assert_eq!(output.status.code(), Some(2));
    let listed = last_json(&stdout(&output));
    let problems = listed["problems"].as_array().expect("a list");
    assert_eq!(problems.len(), 2, "{listed}");
    assert!(problems.iter().all(|p| p["message"].is_string() && p["key"].is_string()), "{listed}");
    let listed = last_json(&stdout(&run(&["config", "check", "--json", &config, &rows])));
    assert_eq!(listed["problems"][0]["key"], "data.train.0.path");
    let broken = broken_curriculum(&shop);
    let listed = last_json(&stdout(&run(&["config", "check", "--json", &broken])));
    assert_eq!(listed["problems"][0]["file"], broken.as_str());
    assert_eq!(listed["problems"][0]["line"], 15);
}

/// Numbers that no run can have, through the program: told, or planned without harm.
#[test]
fn huge_numbers_end_in_a_message() {
    let (_shop, config) = Workshop::of_four_layers().with_config();
    for key in [
        "draft.gamma",
        "train.rows_per_step",
        "train.tokens_per_step",
        "train.steps",
        "data.row_tokens",
        "data.held_out_rows",
        "teacher.top_k",
        "capture.shard_mib",
        "parallel.timeout_seconds",
        "draft.head_dim",
        "draft.intermediate_size",
    ] {
        let is_eagle3 = ["draft.head_dim", "draft.intermediate_size"].contains(&key);
        let method = if is_eagle3 { "eagle3" } else { "glide" };
        let method = format!("draft.method={method}");
        let change = format!("{key}=9007199254740992");
        let more = ["draft.target_layers=[0,1,2]"];
        let more = if is_eagle3 { &more[..] } else { &[] };
        for command in [
            &["config", "check", &config, &method, &change][..],
            &["train", &config, "--plan", "--gflops", "1", &method, &change],
        ] {
            let output = run(&[command, more].concat());
            let text = stderr(&output);
            let told = output.status.code() == Some(2) && text.contains(key);
            assert!(told || output.status.success(), "{command:?}: {text}");
        }
    }
}
