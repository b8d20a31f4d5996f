//! What `eval decode` measures, keeps, shows, and goes on with.

use super::*;
use crate::support::Workshop;
use crate::support::files::{json_so_far, read_json};
use crate::support::processes::killed_when;

#[test]
fn without_a_draft_plain_decoding_is_measured() {
    let shelf = Shelf::new();
    let target = shelf.path("target");
    let rows = "{\"prompt\": \"the cat\"}\n{\"prompt\": \"a dog\"}\n";
    let prompts = shelf.write("prompts.jsonl", rows);
    let common = ["eval", "decode", "--target", &target, "--prompts", &prompts, "--json"];
    let text = succeed(&[&common[..], &["--max-tokens", "8"]].concat());
    let value = last_json(&text);
    assert!(text.starts_with("plain decoding (greedy)\n"), "{text}");
    assert!(text.contains("outputs equal: 2 of 2") && !text.contains("proposal 1"), "{text}");
    assert_eq!((&value["tau"], &value["lossless"]), (&json!(1.0), &json!(true)));
    assert!(value["plain_tokens_per_second"].as_f64() > Some(0.0), "{value}");
    let output = support::run(&[&common[..], &["--max-tokens", "2", "--draft-len", "3"]].concat());
    let told = support::stderr(&output);
    assert!(told.contains("warning: --draft-len and --tree do nothing without"), "{told}");
    fail_with(&[&common[..], &["--limit", "0"]].concat(), 2, &["--limit must be at least 1"]);
}

#[test]
fn figures_are_measured_written_and_shown() {
    let shelf = Shelf::new();
    let row = |category: &str, turns: &[&str]| {
        format!("{}\n", json!({"question_id": 1, "category": category, "turns": turns}))
    };
    let rows = [row("writing", &["a b", "more"]), row("math", &["1 + 1"]), row("math", &["x"])];
    shelf.write("mt-bench.jsonl", rows.concat());
    let document = "the cat sat on the mat. ".repeat(30);
    let row = json!({"id": 1, "kind": "book", "document": document, "question": "who sat?"});
    shelf.write("longdoc-eval.jsonl", format!("{row}\n"));
    let (target, eagle3) = (shelf.path("target"), shelf.path("eagle3"));
    let output = shelf.path("run");
    let common = ["eval", "decode", "--target", &target, "--draft", &eagle3, "--max-tokens", "16"];
    let measure = |extra: &[&str]| {
        let mut command = longdraft(&[&common[..], extra].concat());
        stdout(&succeeded(finished(command.env("LONGDRAFT_DATA", shelf.folder.path()))))
    };
    let set = ["--prompts", "mt-bench", "--limit", "1", "--output", &output, "--json"];
    let text = measure(&[&set[..], &["--temperature", "0,1", "--tree", "static:2,2"]].concat());
    let value = last_json(&text);
    // Two turns of the first writing row, the first math row.
    assert_eq!(
        (&value["prompts"], &value["equal"], &value["lossless"]),
        (&3.into(), &3.into(), &true.into())
    );
    let cells = value["record"]["cells"].as_array().expect("cells");
    assert_eq!(
        (&cells[0]["verifier"], &cells[1]["verifier"]),
        (&"greedy".into(), &"candidate".into())
    );
    for cell in cells {
        let figures = &cell["figures"];
        let tau = figures["tau_incl_bonus"].as_f64().expect("tau");
        assert!(tau >= 1.0 && figures["tau_interval"][0].as_f64() <= Some(tau));
        assert_eq!(cell["speed_up_of_runs"].as_array().map(Vec::len), Some(3));
        assert_eq!(cell["categories"].as_array().map(Vec::len), Some(2));
        assert_eq!(cell["equal"], cell["checked"]);
        assert_eq!(cell["residual_fallbacks"], 0);
    }
    assert_eq!(read_json(format!("{output}/decode.json")), value["record"]);

    let documents = ["--prompts", "longdoc", "--contexts", "100,200,400,5000"];
    let more = ["--runs", "1", "--lookup", "--json", "--temperature", "1"];
    let curve = last_json(&measure(&[&documents[..], &more].concat()));
    let contexts = curve["record"]["cells"][0]["contexts"].as_array().expect("contexts").clone();
    let names: Vec<&str> = contexts.iter().filter_map(|row| row["name"].as_str()).collect();
    assert_eq!(names, ["128", "256", "512"]);
    assert_eq!(
        curve["record"]["cells"][0]["checked"], 0,
        "drawn proposals: the distribution, not the tokens"
    );

    let mut command = longdraft(&[&common[..], &["--prompts", "gsm8k"]].concat());
    let missing = finished(command.env("LONGDRAFT_DATA", shelf.folder.path()));
    require_words(&told_by(&missing, 2), &["gsm8k-test.jsonl is not there"]);
}

#[test]
fn an_evaluation_that_was_killed_goes_on() {
    let shelf = Shelf::new();
    let (target, glide, prompts) =
        (shelf.path("target"), shelf.path("glide"), shelf.path("prompts.jsonl"));
    let row = |index: usize| format!("{}\n", json!({"prompt": format!("the cat {index}")}));
    std::fs::write(&prompts, (0..16).map(row).collect::<String>()).expect("prompts");
    let evaluation = |output: &str, temperatures: &str| {
        let command = ["eval", "decode", "--target", &target, "--draft", &glide];
        let set = ["--prompts", &prompts, "--max-tokens", "60", "--runs", "2"];
        let more = ["--json", "--output", output, "--temperature", temperatures];
        longdraft(&[&command[..], &set, &more].concat())
    };
    let ended = |output: std::process::Output| {
        assert!(output.status.success(), "{}", stderr(&output));
        (last_json(&stdout(&output))["record"]["cells"].clone(), stderr(&output))
    };
    let cells = |cells: &Value| -> Vec<Value> {
        let cells = cells.as_array().expect("cells").iter();
        cells
            .map(|cell| json!([cell["tested_by_position"], cell["checked"], cell["equal"]]))
            .collect()
    };
    let (output, whole) = (shelf.path("killed"), shelf.path("whole"));
    let (whole, _) = ended(evaluation(&whole, "0,1").output().expect("the binary starts"));
    let left = Path::new(&output).join("decode-unfinished.json");
    let mut state = Value::Null;
    killed_when(&mut evaluation(&output, "0,1"), "its prompts", || {
        state = json_so_far(&left);
        state["progress"]["prompts"].as_u64() > Some(3)
    });
    assert!(!Path::new(&output).join("decode.json").exists());
    let (resumed, told) = ended(evaluation(&output, "0,1").output().expect("the binary starts"));
    assert!(told.contains("going on after "), "{told}");
    assert_eq!(cells(&resumed), cells(&whole));
    assert_eq!(resumed[0]["speed_up_of_runs"].as_array().map(Vec::len), Some(2));
    assert!(!left.exists());
    // What other settings left, or nobody can read, is told and not used.
    for (text, problem) in [(state.to_string(), "of another evaluation"), ("{".into(), "EOF")] {
        std::fs::write(&left, text).expect("state");
        let (anew, told) = ended(evaluation(&output, "0").output().expect("the binary starts"));
        assert!(told.contains(problem) && !told.contains("going on"), "{told}");
        assert_eq!(cells(&anew)[0], cells(&whole)[0]);
    }
}

#[test]
fn figures_that_could_not_be_kept_are_not_measured() {
    let shelf = Shelf::new();
    let (target, prompts) = (shelf.path("target"), shelf.path("prompts.jsonl"));
    std::fs::write(&prompts, "{\"prompt\": \"the cat\"}\n").expect("prompts");
    let command = ["eval", "decode", "--target", &target, "--lookup", "--prompts", &prompts];
    let into = |output: &str, code| fail(&[&command[..], &["--output", output]].concat(), code);
    let told = into(&format!("{prompts}/figures"), 2);
    assert!(told.contains("figures: nothing can be written there"), "{told}");
    assert!(told.contains("hint: ") && !told.contains("each answered"), "{told}");
    // Another process measures there.
    let output = shelf.path("figures");
    std::fs::create_dir(&output).expect("folder");
    let lock = std::fs::File::create(format!("{output}/.decode.lock")).expect("file");
    lock.lock().expect("free");
    let told = into(&output, 1);
    assert!(told.contains("another process works in this folder"), "{told}");
    assert!(told.contains("hint: ") && !told.contains("each answered"), "{told}");
    drop(lock);
    let few = ["--max-tokens", "2", "--runs", "1", "--output", &output];
    succeed(&[&command[..], &few].concat());
    // Lengths of a file's prompts are as they are.
    fail_with(&[&command[..], &["--contexts", "64"]].concat(), 2, &["--contexts cuts documents"]);
}

#[test]
fn a_run_shows_what_was_measured_beside_its_plots() {
    let shop = Workshop::new();
    succeed(&["train", &shop.config(), "train.steps=4"]);
    succeed(&["extract", &shop.path("run")]);
    let prompts = shop.write("prompts.jsonl", "{\"prompt\": \"the cat\"}\n{\"prompt\": \"a\"}\n");
    let (target, draft, output) = (shop.target(), shop.path("run/draft"), shop.path("run"));
    let measure = ["eval", "decode", "--target", &target, "--draft", &draft, "--prompts", &prompts];
    let more = ["--max-tokens", "20", "--runs", "1", "--output", &output];
    succeed(&[&measure[..], &more].concat());
    succeed(&["report", &shop.path("run")]);
    let page = std::fs::read_to_string(shop.path("run/report.html")).expect("page");
    assert!(page.contains("Acceptance by position, where reached"), "{page}");
    assert!(page.contains("GLIDE draft; chains of 4 tokens, greedy"), "{page}");
    // What it opens with is what the file says.
    let mut record = read_json(shop.path("run/decode.json"));
    let cell = &record["cells"][0];
    let tile = |label: &str| {
        let at = page.find(&format!("<div class=\"label\">{label}</div>")).expect(label);
        let value = page[at..].split("<div class=\"value\">").nth(1).expect("a value");
        value.split('<').next().expect("its end").to_owned()
    };
    let figure = |name: &str| cell["figures"][name].as_f64().expect("a figure");
    assert_eq!(tile("Speed-up"), format!("{:.2}×", figure("speed_up")));
    assert_eq!(tile("Tokens per target pass (tau)"), format!("{:.2}", figure("tau_incl_bonus")));
    assert_eq!(tile("Equal outputs"), format!("{} of {}", cell["equal"], cell["checked"]));
    assert_eq!(tile("Machine"), "1 thread");
    assert!(page.contains("<code>longdraft eval decode --target "), "the command is shown");
    // The answer is shown token by token, its text is escaped.
    let tokens = cell["sample"]["tokens"].as_array().expect("a sample").clone();
    let proposed = |token: &&serde_json::Value| token["proposed_by"] == "draft";
    let marked = tokens.iter().filter(proposed).count();
    assert_eq!(page.matches("<span class=\"draft\">").count(), marked);
    assert!(!tokens.is_empty(), "{record}");
    // A file alone is a report, also one without a sample.
    std::fs::create_dir(shop.path("alone")).expect("folder");
    record.as_object_mut().expect("an object").remove("circumstances");
    record["cells"][0].as_object_mut().expect("an object").remove("sample");
    shop.write("alone/decode.json", record.to_string());
    let told = support::run(&["report", &shop.path("alone")]);
    assert!(told.status.success() && stderr(&told).is_empty(), "{}", stderr(&told));
    let alone = std::fs::read_to_string(shop.path("alone/report.html")).expect("page");
    assert!(alone.contains(&tile("Speed-up")) && !alone.contains("A sample answer"), "{alone}");
    assert!(alone.contains("GLIDE draft; chains of 4 tokens, greedy"), "{alone}");
    shop.write("run/decode.json", "{\"version\": 1}");
    require_words(&noted(&["report", &shop.path("run")]), &["skipped decode.json"]);
}
