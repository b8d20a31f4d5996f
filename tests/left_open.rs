//! What a configuration leaves open of a draft comes from the draft that is gone on from, or measured.

use serde_json::{Value, json};

use crate::support::files::read_json;
use crate::support::{Workshop, fail, last_json, noted, run, stderr, succeed, succeeded};

const BLOCKS: [&str; 6] = [
    "draft.method=dflash",
    "draft.layers=2",
    "draft.block_size=4",
    "draft.blocks_per_row=24",
    "data.anchor.enabled=false",
    "train.steps=2",
];

/// Keys that a draft to start from can tell.
const OPEN: [&str; 4] = [
    "draft.target_layers=[0,2]",
    "draft.num_key_value_heads=4",
    "draft.draft_vocab_size=24",
    "draft.sliding_window=8",
];

fn with<'a>(command: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [command, &BLOCKS, more].concat()
}

/// A workshop with the draft of a run that was told all.
fn trained() -> (Workshop, String) {
    let (shop, config) = Workshop::with_four_layers().with_config();
    succeed(&with(&["train", &config], &OPEN));
    (shop, config)
}

fn network(shop: &Workshop, run: &str) -> Value {
    succeed(&["extract", &shop.path(run)]);
    read_json(shop.path(&format!("{run}/draft/config.json")))
}

fn planned(config: &str, more: &[&str]) -> Value {
    let plan = ["train", config, "--plan", "--gflops", "1", "--json"];
    let mut plan = last_json(&succeed(&with(&plan, more)));
    for stage in plan["stages"].as_array_mut().expect("stages") {
        stage["free_bytes"] = Value::Null;
    }
    plan
}

#[test]
fn training_goes_on_with_the_network_of_the_draft() {
    let (shop, config) = trained();
    let from = format!("draft.from={}", shop.path("run"));
    let [next, full] = ["next", "full"].map(|run| format!("output={}", shop.path(run)));

    let told = noted(&with(&["train", &config], &[&from, &next]));
    assert!(told.contains("from the draft to start from: "), "{told}");
    assert!(told.contains("num_key_value_heads = 4") && told.contains("sliding_window = 8"));
    let of_next = network(&shop, "next");
    assert_eq!(of_next, network(&shop, "run"));
    let keys = ["num_key_value_heads", "draft_vocab_size", "sliding_window"];
    assert_eq!(keys.map(|key| of_next[key].clone()), [json!(4), json!(24), json!(8)]);

    // A finished run goes on with what it took.
    let longer = ["train.steps=4", &from, &next];
    succeed(&with(&["train", &config, "--extend"], &longer));
    assert_eq!(network(&shop, "next"), of_next);

    // What layers see is told as a whole.
    let kinds = "draft.layer_types=[full_attention,full_attention]";
    succeed(&with(&["train", &config], &[&from, &full, kinds]));
    let of_full = network(&shop, "full");
    assert!(of_full["sliding_window"].is_null(), "{of_full}");
    assert_eq!(of_full["num_key_value_heads"], 4);

    // As many key-value heads as the target has are others, too.
    let text = fail(&with(&["train", &config], &[&from, "draft.num_key_value_heads=2"]), 2);
    assert!(text.contains("`num_key_value_heads` = 4, 2 is configured"), "{text}");
}

#[test]
fn plans_know_the_network_of_the_draft() {
    let (shop, config) = trained();
    let from = format!("draft.from={}", shop.path("run"));
    let said = planned(&config, &[&[from.as_str()][..], &OPEN].concat());
    assert_eq!(planned(&config, &[&from]), said);
    assert_ne!(planned(&config, &[]), said);

    // A stage goes on with the network of the stage before.
    let text = std::fs::read_to_string(&config).expect("configuration");
    let of_first: String = OPEN
        .iter()
        .map(|key| key.trim_start_matches("draft.").replacen('=', ": ", 1))
        .map(|line| format!("      {line}\n"))
        .collect();
    let stages = format!(
        "stages:\n  - name: first\n    draft:\n{of_first}  - name: second\n    train: {{ steps: 3 }}\n"
    );
    let curriculum = shop.write("curriculum.yaml", format!("{text}\n{stages}"));
    let bytes = |plan: &Value| plan["stages"][1]["bytes"].clone();
    let followed = bytes(&planned(&curriculum, &[]));
    assert!(followed.is_u64());
    assert_eq!(followed, bytes(&planned(&curriculum, &OPEN)));
    let output = format!("output={}", shop.path("curriculum"));
    succeed(&with(&["train", &curriculum], &[&output]));
    assert_eq!(network(&shop, "curriculum/first"), network(&shop, "curriculum/second"));
    let scratch = std::fs::read_to_string(&curriculum).expect("configuration");
    let scratch = scratch.replace("name: second\n", "name: second\n    start_from: scratch\n");
    std::fs::write(&curriculum, scratch).expect("written");
    assert_ne!(followed, bytes(&planned(&curriculum, &[])));
}

#[test]
fn drafts_are_measured_as_they_were_trained() {
    let (shop, config) = trained();
    let draft = shop.path("run");
    let ask = ["eval", "held-out", &config, "--draft", &draft, "--json"];
    let said = last_json(&succeed(&with(&ask, &OPEN)));
    assert!(said["drafts"][0]["simulated_acceptance_length"].as_f64() >= Some(1.0), "{said}");
    assert_eq!(last_json(&succeed(&with(&ask, &[]))), said);

    let own = ["draft.layer_types=[sliding_attention,sliding_attention]", "draft.sliding_window=8"];
    let asked = run(&with(&ask, &own));
    assert!(asked.status.success() && !stderr(&asked).contains("measured as"), "{asked:?}");
    let more = ["draft.block_size=3", "draft.sliding_window=4"];
    let asked = run(&with(&ask, &more));
    let told = stderr(&asked);
    assert!(told.contains("measured as it was trained, with "), "{told}");
    assert!(told.contains("block_size = 4") && told.contains("sliding_window = 8"), "{told}");
    assert_eq!(last_json(&String::from_utf8_lossy(&asked.stdout)), said);
}

/// A store holds the layers that one of the drafts reads: the other is not measured on them.
#[test]
fn a_store_serves_no_draft_of_other_layers() {
    let (shop, config) = trained();
    let store = format!("train.features={}", shop.path("store"));
    let other = format!("output={}", shop.path("other"));
    let of_other = [&OPEN[1..], &["draft.target_layers=[0,3]", &other]].concat();
    succeed(&with(&["train", &config], &of_other));
    succeed(&with(&["capture", &config], &[&OPEN[..], &[store.as_str()]].concat()));
    let [draft, other] = ["run", "other"].map(|run| shop.path(run));
    let ask = |drafts: &[&str]| {
        let drafts: Vec<_> = drafts.iter().flat_map(|draft| ["--draft", draft]).collect();
        run(&with(&[&["eval", "held-out", &config][..], &drafts].concat(), &[&store]))
    };
    succeeded(ask(&[&draft]));
    for drafts in [&[draft.as_str(), &other][..], &[&other]] {
        let asked = ask(drafts);
        assert!(!asked.status.success(), "{}", String::from_utf8_lossy(&asked.stdout));
        assert!(stderr(&asked).contains("layers"), "{}", stderr(&asked));
    }
}
