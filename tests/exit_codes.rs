//! What every command owes its caller: one table of exit codes, and errors that programs can read.

use crate::support::files::{change_json, demonstration};
use crate::support::{
    Workshop, fail, fail_with, files, last_json, longdraft, require_words, run, stderr, stdout,
    succeed, told_by,
};
use serde_json::Value;

/// Runs a command with `--json`; what the last line tells of the error, or what is wrong with the end.
fn ended(arguments: &[&str], code: i32) -> Result<Value, String> {
    let output = run(&[arguments, &["--json"]].concat());
    let (said, told) = (stderr(&output), stdout(&output));
    let line = told.trim_end().lines().last().unwrap_or_default();
    let error = serde_json::from_str::<Value>(line).unwrap_or_default()["error"].clone();
    let sound = output.status.code() == Some(code)
        && !said.contains("panicked")
        && said.contains("error")
        && error["code"] == code
        && error["message"].as_str().is_some_and(|text| !text.is_empty());
    let problem = || format!("{arguments:?} ended with {:?}: {told}{said}", output.status.code());
    sound.then_some(error).ok_or_else(problem)
}

#[track_caller]
fn error_of(arguments: &[&str], code: i32) -> Value {
    ended(arguments, code).unwrap_or_else(|problem| panic!("{problem}"))
}

#[test]
fn a_file_that_is_not_there_or_of_no_known_kind_is_wrong_use() {
    let shop = Workshop::new();
    let (config, target) = (shop.config(), shop.target());
    let (none, table, output) = (shop.path("none"), shop.path("table.xls"), shop.path("output"));
    std::fs::write(&table, "a,b\n1,2\n").expect("a table");
    let (features, rows) = (format!("train.features={output}"), shop.path("rows.jsonl"));
    let mut problems = Vec::new();
    for wrong in [none.as_str(), "models/nope.gguf", table.as_str()] {
        let generate = ["generate", "--prompt", "a", "--max-tokens", "2"];
        let eval = ["eval", "decode", "--max-tokens", "2", "--prompts", &rows, "--field", "text"];
        let named = format!("data.train=[{{path: {wrong}}}]");
        let commands: &[&[&str]] = &[
            &["train", wrong],
            &["train", &config, &format!("target={wrong}")],
            &["train", &config, &named],
            &["lm", "train", wrong],
            &["lm", "grid", wrong],
            &["capture", wrong],
            &["capture", &config, &features, "--records", wrong],
            &["config", "show", wrong],
            &["extract", wrong],
            &["export", wrong, "--to", "longspec", "--output", &output, "--target", &target],
            &["verify", wrong],
            &["push", wrong, "org/name", "--dry-run"],
            &[&generate[..], &["--target", wrong, "--no-draft"]].concat(),
            &[&generate[..], &["--target", &target, "--draft", wrong]].concat(),
            &[&generate[..], &["--target", &target, "--lookup", "--datastore", wrong]].concat(),
            &[&eval[..], &["--target", wrong, "--lookup"]].concat(),
            &[&eval[..], &["--target", &target, "--draft", wrong]].concat(),
            &["eval", "decode", "--target", &target, "--lookup", "--prompts", wrong],
            &["eval", "held-out", &config, "--draft", wrong],
            &["lm", "score", wrong, "--data", &rows],
            &["lm", "quantize", wrong, "--output", &shop.path("model.ldq")],
            &["data", "inspect", wrong, "--target", &target],
            &["data", "stats", wrong, "--target", &target],
            &["data", "prepare", wrong, "--target", &target, "--output", &output],
            &["data", "regenerate", wrong, "--target", &target, "--output", &output],
            &["data", "regenerate", &rows, "--target", wrong, "--output", &output],
            &["data", "tokenizer", wrong, "--vocabulary", "300", "--output", &output],
            &["data", "records", wrong, "--output", &output],
            &["report", wrong],
            &["parity", wrong],
            &["quickstart", "--target", wrong, "--output", &output],
        ];
        for arguments in commands {
            // Text and JSONL may have any name; what a folder lacks is for `verify` to list.
            let any_name = arguments.ends_with(&["--prompts", wrong])
                || matches!(arguments[..2], ["data", "tokenizer"] | ["verify", _]);
            if wrong != table || !any_name {
                problems.extend(ended(arguments, 2).err());
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[cfg(unix)]
#[test]
fn prompts_that_can_be_read_only_once_are_refused_for_that() {
    let shop = Workshop::new();
    let (target, pipe) = (shop.target(), shop.path("pipe.jsonl"));
    let _socket = std::os::unix::net::UnixListener::bind(&pipe).expect("a socket");
    let eval = ["eval", "decode", "--target", &target, "--lookup", "--prompts", &pipe];
    let output = longdraft(&eval).output().expect("the binary starts");
    let text = stderr(&output);
    assert!(!output.status.success() && text.contains("could be read only once"), "{text}");
}

#[test]
fn a_configuration_that_is_not_there_comes_with_a_way_out() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    for (arguments, meant) in [
        (&["train", "zzz.yaml"][..], ""),
        // What is near is a part of recipes, and no recipe.
        (&["train", "zero2.yaml"], ""),
        (&["train", "conf/glide/smolm2.yaml"], " (did you mean `conf/glide/smollm2.yaml`?)"),
        (&["config", "check", "own-answer.yaml"], " (did you mean `conf/glide/own-answers.yaml`?)"),
        (
            &["lm", "train", "conf/pretrian/books.yaml"],
            " (did you mean `conf/pretrain/books.yaml`?)",
        ),
    ] {
        let output = longdraft(arguments).current_dir(root).output().expect("the binary starts");
        let text = told_by(&output, 2);
        let file = arguments.last().expect("a file");
        assert!(text.contains(&format!("error: {file}: no such file{meant}\n")), "{text}");
        assert!(text.contains("hint: `longdraft init` writes a configuration; recipes"), "{text}");
    }
}

/// Below a file nothing can be written, not even by root.
#[test]
fn where_nothing_can_be_written_another_place_is_named() {
    let shop = Workshop::new();
    let (config, target, rows) = (shop.config(), shop.target(), shop.path("rows.jsonl"));
    succeed(&["train", &config, "train.steps=2"]);
    let run = shop.path("run");
    let below = format!("{rows}/below");
    let place = |key: &str| format!("{key}={below}");
    let [file, answers] = ["configuration.yaml", "a.jsonl"].map(|name| format!("{below}/{name}"));
    // The configuration's own check finds it first.
    fail_with(&["train", &config, &place("output")], 2, &["rows.jsonl is a file, no folder"]);
    let commands: [(&[&str], &str); 7] = [
        (&["capture", &config, &place("train.features")], "train.features=FOLDER"),
        (&["quickstart", "--output", &below], "--output"),
        (&["extract", &run, "--output", &below], "--output"),
        (
            &["export", &run, "--to", "longspec", "--target", &target, "--output", &below],
            "--output",
        ),
        (&["init", &file, "--for", "train", "--yes", "--target", &target, "--data", &rows], "FILE"),
        (&["data", "prepare", &rows, "--target", &target, "--output", &below], "--output"),
        (&["data", "regenerate", &rows, "--target", &target, "--output", &answers], "--output"),
    ];
    for (arguments, remedy) in commands {
        let text = fail_with(arguments, 2, &["nothing can be written there: Not a directory"]);
        let hint = text.lines().find(|line| line.starts_with("hint: "));
        assert!(hint.is_some_and(|hint| hint.contains(remedy)), "{arguments:?}: {text}");
    }
}

#[test]
fn a_draft_that_does_not_fit_says_what_it_is() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    succeed(&["train", &config, "train.steps=2"]);
    let (run, draft) = (shop.path("run"), shop.path("draft"));
    for _ in 0..2 {
        succeed(&["extract", &run, "--output", &draft]);
    }
    // Files of others are no draft's to write over.
    let before = files(&shop.target());
    let words = ["config.json would be written over", "hint: give another place with --output"];
    fail_with(&["extract", &run, "--output", &shop.target()], 2, &words);
    assert_eq!(files(&shop.target()), before);
    let other = demonstration();
    let generate = |target: &str, draft: &str| {
        fail(&["generate", "--target", target, "--draft", draft, "--prompt", "a"], 1)
    };
    for path in [&run, &draft] {
        let text = generate(&other, path);
        assert!(text.contains("was trained for another target: "), "{text}");
        assert!(!text.contains("(memory)"), "{text}");
        assert!(text.contains("the target's is") && text.contains("longdraft fit"), "{text}");
    }
    // One that does not say for which target it was trained.
    change_json(format!("{draft}/config.json"), |keys| keys["target_fingerprint"] = Value::Null);
    let text = generate(&other, &draft);
    require_words(&text, &["the target's is", "hint: if it was trained for another target"]);
    let text = generate(&shop.target(), &other);
    assert!(text.contains("other language models are no drafts here"), "{text}");
    // The same of a folder, whose tensors are not listed one by one.
    let file = shop.target.join("config.json");
    let config_text = std::fs::read_to_string(&file).expect("a configuration");
    let mut model: serde_json::Value = serde_json::from_str(&config_text).expect("JSON");
    model["architectures"] = serde_json::json!(["LlamaForCausalLM"]);
    std::fs::write(&file, model.to_string()).expect("written");
    let target = shop.target();
    let text = fail(&["generate", "--target", &other, "--draft", &target, "--prompt", "a"], 2);
    std::fs::write(&file, config_text).expect("written");
    require_words(&text, &["a whole language model (it holds `model.embed_tokens.weight`)"]);
    assert!(text.contains("longdraft fit") && text.lines().count() < 4, "{text}");
    // Another method than the configuration's.
    let eagle3 = ["draft.method=eagle3", "draft.draft_vocab_size=64", "data.anchor.enabled=false"];
    let text = fail(&[&["eval", "held-out", &config, "--draft", &run][..], &eagle3].concat(), 2);
    let wanted = "is a draft of method glide, the configuration's is eagle3";
    assert!(text.contains(wanted), "{text}");
}

#[test]
fn errors_are_told_to_programs_too() {
    let (shop, config) = Workshop::new().with_config();
    // Arguments that cannot be read.
    let error = error_of(&["train", &config, "--no-such-flag"], 2);
    assert!(error["message"].as_str().is_some_and(|text| text.contains("--no-such-flag")));
    let error = error_of(&["train", &config, "--threads", "many"], 2);
    assert!(error["hint"].as_str().is_some_and(|text| text.contains("a whole number")), "{error}");
    // Every problem of a configuration on its own.
    let error = error_of(&["train", &config, "train.stepz=1", "data.row_tokenz=5"], 2);
    let problems = error["problems"].as_array().expect("problems");
    assert_eq!(problems.len(), 2, "{error}");
    assert!(problems[0].as_str().is_some_and(|text| text.contains("did you mean")), "{error}");
    // Work that fails, with the way out.
    succeed(&["train", &config, "train.steps=2"]);
    let error = error_of(&["train", &config, "train.steps=2", "train.seed=9"], 1);
    assert!(error["hint"].as_str().is_some_and(|text| text.contains("--force-resume")), "{error}");
    // Without --json stdout stays empty.
    let output = run(&["train", &config, "train.seed=9"]);
    let told = stderr(&output);
    assert!(output.stdout.is_empty() && told.lines().any(|line| line.starts_with("error: ")));
    // A result that says what is wrong stays the last line.
    let output = run(&["verify", &shop.target(), "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert_eq!(last_json(&stdout(&output))["clean"], false);
}

#[test]
fn a_plan_that_does_not_fit_is_a_failure() {
    let shop = Workshop::new();
    let plan = |memory: &str| {
        run(&["train", &shop.config(), "--plan", "--gflops", "10", "--memory", memory, "--json"])
    };
    let (fits, lacks) = (plan("64"), plan("0.000001"));
    assert_eq!((fits.status.code(), lacks.status.code()), (Some(0), Some(1)));
    let fits = |output| last_json(&stdout(output))["stages"][0]["fits"].clone();
    assert_eq!((fits(&plan("64")), fits(&lacks)), (true.into(), false.into()));
    assert!(stderr(&lacks).contains("error: the run does not fit"), "{}", stderr(&lacks));
}

#[test]
fn help_and_docs_have_the_same_table_of_exit_codes() {
    let help = succeed(&["--help"]);
    let (_, table) = help.split_once("Exit codes:\n").expect("a table in the help");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/exit-codes.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let codes = |text: &str, before: &str| -> Vec<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(before));
        let codes = lines.filter_map(|line| line.split_whitespace().next());
        codes.filter(|code| code.parse::<u8>().is_ok()).map(str::to_owned).collect()
    };
    assert_eq!(codes(table, "  "), codes(&page, "| "));
    assert!(codes(table, "  ").contains(&"130".to_owned()));
}

#[test]
fn prompts_of_another_field_lead_to_its_option() {
    let (shop, _) = Workshop::new().with_config();
    let (target, rows) = (shop.target(), shop.path("rows.jsonl"));
    let decode = ["eval", "decode", "--target", &target, "--lookup", "--prompts", &rows];
    fail_with(&decode, 1, &["field `prompt` is missing", "hint: --field names the field"]);
}
