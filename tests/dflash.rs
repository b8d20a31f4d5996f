//! DFlash drafts through the binary: train, kill, go on from another draft, decode.

use crate::support::files::read_json;
use crate::support::runs::{
    draft_bytes, drafted, killed_alike, metrics, run_with_kills, written_plainly,
};
use crate::support::{Workshop, borrowed, fail, fail_with, last_json, longdraft, noted, succeed};
use serde_json::Value;

/// Arguments that turn the workshop's configuration into a DFlash run.
const DFLASH: [&str; 8] = [
    "draft.method=dflash",
    "draft.layers=2",
    "draft.target_layers=[0,2]",
    "draft.block_size=4",
    "draft.blocks_per_row=24",
    "data.anchor.enabled=false",
    "schedule.learning_rate=0.002",
    "train.evaluate_every=20",
];

fn arguments<'a>(config: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", config], &DFLASH[..], more].concat()
}

fn losses(run: &str) -> Vec<f64> {
    values(run, "loss")
}

/// A value of every step.
fn values(run: &str, key: &str) -> Vec<f64> {
    let steps = metrics(run).into_iter().filter(|record| record["held_out"].is_null());
    steps.map(|record| record[key].as_f64().expect("a number")).collect()
}

/// Greedy tokens, of which there are some.
fn generated(shop: &Workshop, how: &[&str]) -> Value {
    let target = shop.target();
    let common = ["generate", "--target", &target, "--max-tokens", "40", "--json"];
    let told = last_json(&succeed(&[&common[..], &["--prompt", "the"], how].concat()));
    assert!(told["tokens"].as_array().is_some_and(|tokens| !tokens.is_empty()), "{told}");
    told["tokens"].clone()
}

#[test]
fn a_trained_draft_is_extracted_and_decodes_what_the_target_would_write() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    let output = last_json(&succeed(&arguments(&config, &["train.epochs=6", "--json"])));
    assert_eq!(output["finished"], true);
    let held_out = &output["held_out"];
    assert_eq!(held_out["top1_by_delay"].as_array().map(Vec::len), Some(3), "{held_out}");
    let losses = losses(&shop.path("run"));
    assert!(losses[losses.len() - 1] < 0.9 * losses[0], "the loss does not fall: {losses:?}");

    succeed(&["extract", &shop.path("run"), "--json"]);
    let draft = shop.path("run/draft");
    let written = read_json(format!("{draft}/config.json"));
    assert_eq!(written["architectures"][0], "DFlashDraftModel");
    assert_eq!(written["dflash_config"]["target_layer_ids"], serde_json::json!([0, 2]));
    assert_eq!(written["is_causal"], false);

    let plain = generated(&shop, &["--no-draft"]);
    for shape in [&["--draft-len", "3"][..], &["--tree", "dynamic:3,3,9"]] {
        assert_eq!(generated(&shop, &[&["--draft", &draft][..], shape].concat()), plain);
    }
    let target = shop.target();
    let limit = ["--draft", &draft, "--confidence-threshold", "0.5"];
    let generate = ["generate", "--target", &target, "--prompt", "the"];
    fail_with(&[&generate[..], &limit].concat(), 2, &["confidence head"]);
}

#[test]
fn a_killed_run_goes_on_as_if_nothing_had_happened_whichever_weights_slots_have() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    for weights in ["decay", "dpace"] {
        let weights = format!("draft.slot_weights={weights}");
        let train = arguments(&config, &["train.epochs=2", &weights]);
        let [whole, killed] = killed_alike(&shop, &weights, &train);
        assert_eq!(metrics(&whole), metrics(&killed), "{weights}");
    }
}

#[test]
fn the_targets_distribution_is_learned_wherever_features_come_from() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    for (name, teacher) in [
        ("full", &["draft.soft_weight=1"][..]),
        ("mixed", &["draft.soft_weight=0.4", "draft.init=last_layer"]),
        ("top", &["draft.soft_weight=0.9", "teacher.soft_targets=top_k", "teacher.top_k=8"]),
    ] {
        let run = |place: &str| shop.path(&format!("{name}-{place}"));
        let train = |place: &str, features: &str| -> Vec<String> {
            let set = [format!("output={}", run(place)), format!("train.features={features}")];
            let more = ["train.epochs=2", "train.rows_per_step=2"];
            let more = [teacher, &more].concat();
            arguments(&config, &more).into_iter().map(str::to_owned).chain(set).collect()
        };
        let words = |all: &[String]| longdraft(&borrowed(all));
        let succeed = |all: Vec<String>| succeed(&borrowed(&all));
        succeed(train("online", "online"));
        let losses = losses(&run("online"));
        assert!(losses[losses.len() - 1] < 0.95 * losses[0], "{name}: {losses:?}");
        succeed(train("memory", "memory"));
        let store = shop.path(&format!("{name}-store"));
        let mut capture = train("stored", &store);
        capture[0] = "capture".to_owned();
        capture.push("capture.dtype=f32".to_owned());
        succeed(capture);
        let mut stored = train("stored", &store);
        stored.push("capture.dtype=f32".to_owned());
        run_with_kills(shop.folder.path(), |_| words(&stored));
        for place in ["memory", "stored"] {
            assert_eq!(draft_bytes(&run("online")), draft_bytes(&run(place)), "{name} {place}");
        }
        let records = metrics(&run("stored"));
        let held_out = records.iter().map(|record| &record["held_out"]);
        let held_out: Vec<&Value> = held_out.filter(|held_out| !held_out.is_null()).collect();
        let last = held_out.last().expect("an evaluation");
        assert_eq!(last["as_trained"].is_null(), name != "top", "{last}");
        let length = last["replayed_acceptance_length"].as_f64().expect("rounds");
        assert!((1.0..=4.0).contains(&length), "{last}");
    }
    let more = ["draft.soft_weight=0.5", "draft.slot_weights=dpace"];
    let text = fail(&arguments(&config, &more), 2);
    assert!(text.contains("`draft.soft_weight` learns the target's distribution"), "{text}");
    fail_with(&arguments(&config, &["draft.soft_weight=1.5"]), 2, &["draft.soft_weight"]);
}

/// Arguments that make a DFlash2 run of one of DFlash.
const DFLASH2: [&str; 5] = [
    "draft.method=dflash2",
    "draft.conv_group_size=8",
    "draft.selector_rank=6",
    "draft.selector_top_k=4",
    "train.epochs=2",
];

#[test]
fn a_selector_is_trained_from_a_plain_draft_and_decodes_what_the_target_would_write() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    succeed(&arguments(&config, &["train.epochs=2"]));
    let (whole, from) = (shop.path("whole"), format!("draft.from={}", shop.path("run")));
    let to_whole = format!("output={whole}");
    let more = [&DFLASH2[..], &[&from, &to_whole, "--json"]].concat();
    let output = last_json(&succeed(&arguments(&config, &more)));
    let held_out = &output["held_out"];
    let recall = held_out["candidate_recall"].as_f64().expect("recall");
    assert!(recall > 0.2 && recall <= 1.0, "{held_out}");
    assert!(held_out["selector_loss"].as_f64().expect("a loss") > 0.0, "{held_out}");
    let losses = values(&whole, "selector_loss");
    // Among four candidates at random: ln 4.
    assert!(losses.iter().all(|loss| *loss < 4.0_f64.ln()), "{losses:?}");

    succeed(&["report", &whole]);
    let page = std::fs::read_to_string(format!("{whole}/report.html")).expect("page");
    assert!(page.contains("Candidate recall") && page.contains("Selector loss"));

    succeed(&["extract", &whole, "--json"]);
    let draft = format!("{whole}/draft");
    let written = read_json(format!("{draft}/config.json"));
    assert_eq!(written["architectures"][0], "DFlash2DraftModel");
    assert_eq!(written["dflash_config"]["selector_top_k"], 4);
    let plain = generated(&shop, &["--no-draft"]);
    for shape in [&["--draft-len", "3"][..], &["--tree", "dynamic:3,3,9"]] {
        assert_eq!(generated(&shop, &[&["--draft", &draft][..], shape].concat()), plain);
    }

    // The same again with kills, and with the other divisor, which needs the draft.
    let (killed, hits) = (shop.path("killed"), "draft.selector_over_hits=true");
    for (name, more) in [("killed", None), ("hits", Some(hits))] {
        let output = format!("output={}", shop.path(name));
        let all = [&DFLASH2[..], &[&from, &output]].concat();
        let all = arguments(&config, &[&all[..], &more.into_iter().collect::<Vec<_>>()].concat());
        run_with_kills(shop.folder.path(), |_| longdraft(&all));
    }
    assert_eq!(draft_bytes(&whole), draft_bytes(&killed));
    assert_ne!(draft_bytes(&whole), draft_bytes(&shop.path("hits")), "the divisor changes nothing");

    // A selector is not thrown away silently.
    let (from, output) = (format!("draft.from={whole}"), format!("output={}", shop.path("back")));
    let text = fail(&arguments(&config, &["train.epochs=1", &from, &output]), 2);
    assert!(text.contains("`selector_top_k` = 4, none is configured"), "{text}");
    let more = ["draft.conv_group_size=5", "draft.selector_top_k=0", "draft.selector_weight=-1"];
    let text = fail(&arguments(&config, &[&["draft.method=dflash2"][..], &more].concat()), 2);
    assert!(text.contains("selector_top_k") && text.contains("selector_weight"), "{text}");
}

#[test]
fn a_chain_is_trained_with_every_head_and_decodes_what_the_target_would_write() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    let plain = generated(&shop, &["--no-draft"]);
    let dspark = ["draft.method=dspark", "train.epochs=2"];
    for head in ["vanilla", "gated", "rnn"] {
        let (run, kind) = (shop.path(head), format!("draft.markov_head={head}"));
        let output = format!("output={run}");
        let more = [&dspark[..], &["draft.markov_rank=6", &kind, &output, "--json"]].concat();
        let out = last_json(&succeed(&arguments(&config, &more)));
        // Every slot proposes.
        assert_eq!(out["held_out"]["top1_by_delay"].as_array().map(Vec::len), Some(4));
        let losses = losses(&run);
        assert!(losses[losses.len() - 1] < 0.95 * losses[0], "{head}: {losses:?}");
        succeed(&["extract", &run, "--json"]);
        let draft = format!("{run}/draft");
        let written = read_json(format!("{draft}/config.json"));
        assert_eq!(written["architectures"][0], "Qwen3DSparkModel");
        assert_eq!(
            (&written["markov_head_type"], &written["markov_rank"]),
            (&head.into(), &6.into())
        );
        assert_eq!(written["enable_confidence_head"], true);
        for shape in [&["--draft-len", "4"][..], &["--tree", "dynamic:3,4,9"]] {
            for threshold in ["0", "0.6", "1.01"] {
                let limit = ["--draft", draft.as_str(), "--confidence-threshold", threshold];
                let drafted = generated(&shop, &[&limit[..], shape].concat());
                assert_eq!(drafted, plain, "{head} {shape:?} {threshold}");
            }
        }
    }
    let (target, draft) = (shop.target(), shop.path("rnn/draft"));
    for wrong in ["-1", "nan"] {
        let limit = format!("--confidence-threshold={wrong}");
        let more = ["--prompt", "the", "--draft", draft.as_str(), limit.as_str()];
        let text = fail(&[&["generate", "--target", target.as_str()][..], &more].concat(), 2);
        assert!(text.contains("--confidence-threshold"), "{text}");
    }
    // From stored features, in steps of several rows, killed and resumed.
    let store = format!("train.features={}", shop.path("store"));
    let stored = ["draft.markov_rank=6", "train.rows_per_step=3", &store];
    let stored = [&dspark[..], &stored].concat();
    succeed(&[&["capture", config.as_str()], &arguments(&config, &stored)[2..]].concat());
    killed_alike(&shop, "stored", &arguments(&config, &stored));
    let text = fail(&arguments(&config, &["draft.method=dspark", "draft.hard_weight=-1"]), 2);
    assert!(text.contains("draft.hard_weight"), "{text}");
}

#[test]
fn a_draft_goes_on_from_another_one_and_another_network_is_refused() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    succeed(&arguments(&config, &["train.steps=2", "draft.mask_token_id=7"]));
    let from = format!("draft.from={}", shop.path("run"));
    let output = format!("output={}", shop.path("next"));
    let warm = ["train.steps=2", &from, &output];
    // The mask token is that of the draft.
    succeed(&arguments(&config, &warm));
    succeed(&["extract", &shop.path("next"), "--json"]);
    let written = read_json(shop.path("next/draft/config.json"));
    assert_eq!(written["dflash_config"]["mask_token_id"], 7);
    let output = format!("output={}", shop.path("another"));
    let more = ["train.steps=2", &from, &output, "draft.target_layers=[1,2]"];
    fail_with(&arguments(&config, &more), 2, &["`target_layers` = [0, 2]"]);
    let output = format!("output={}", shop.path("other"));
    let more = ["train.steps=2", &from, &output, "draft.layers=3"];
    fail_with(&arguments(&config, &more), 2, &["`layers` = 2, 3 is configured"]);
}

#[test]
fn more_key_value_heads_than_the_target_s_are_trained_and_kept() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    let heads = |run: &str| {
        succeed(&["extract", &shop.path(run)]);
        read_json(shop.path(&format!("{run}/draft/config.json")))["num_key_value_heads"].clone()
    };
    let more = ["draft.num_key_value_heads=4", "draft.init=last_layer", "train.epochs=2"];
    succeed(&arguments(&config, &more));
    assert_eq!(heads("run"), 4);
    assert_eq!(drafted(&shop, &shop.path("run")).0, written_plainly(&shop));

    // A draft keeps its heads, and takes no others.
    let from = format!("draft.from={}", shop.path("run"));
    let output = format!("output={}", shop.path("next"));
    let next = ["train.steps=2", &from, &output];
    let fewer = [&next[..], &["draft.num_key_value_heads=1"]].concat();
    fail_with(&arguments(&config, &fewer), 2, &["`num_key_value_heads` = 4, 1 is configured"]);
    succeed(&arguments(&config, &next));
    assert_eq!(heads("next"), 4);
    // Query heads share them evenly.
    let text = fail(&arguments(&config, &["draft.num_key_value_heads=3"]), 2);
    assert!(text.contains("does not divide `num_attention_heads` = 4"), "{text}");
    let text = fail(&arguments(&config, &["draft.num_key_value_heads=0"]), 2);
    assert!(text.contains("`draft.num_key_value_heads` must be in 1 to 4096"), "{text}");
}

#[test]
fn keys_that_make_no_sense_are_named_before_any_work() {
    let (_shop, config) = Workshop::with_four_layers().with_config();
    let more = ["draft.dpace_alpha=0.2", "draft.divide_by_rows=true", "draft.divide_by_slots=true"];
    let words = ["`draft.dpace_alpha` belongs to", "`draft.divide_by_slots` is a second divisor"];
    fail_with(&arguments(&config, &more), 2, &words);
    let text = fail(&arguments(&config, &["draft.tokens_per_block=8"]), 2);
    assert!(text.contains("is a second number of blocks beside `draft.blocks_per_row`"), "{text}");
    let more = [
        "draft.block_size=1",
        "draft.blocks_per_row=0",
        "draft.dpace_alpha=2",
        "draft.slot_decay=-1",
        "draft.target_layers=[2,2]",
    ];
    let text = fail(&arguments(&config, &more), 2);
    for key in ["block_size", "blocks_per_row", "dpace_alpha", "slot_decay", "target_layers"] {
        assert!(text.contains(&format!("draft.{key}")), "{key} not in {text}");
    }
    let text = fail(&arguments(&config, &["draft.target_layers=[-1,2]"]), 2);
    assert!(text.contains("layer -1 is the output of the embeddings"), "{text}");
    let more = ["draft.method=dflash2", "draft.selector_ramp=1.5"];
    fail_with(&arguments(&config, &more), 2, &["`draft.selector_ramp` must be between 0 and 1"]);
}

#[test]
fn kinds_of_layers_that_contradict_the_rest_are_told_with_their_line() {
    let shop = Workshop::with_four_layers();
    let check = |keys: &str| {
        let text =
            format!("defaults: [{}, _self_]\ndraft:\n  method: dflash\n{keys}", shop.config());
        let file = shop.write("kinds.yaml", text);
        fail(&["config", "check", "--keys", &file], 2)
    };
    for (keys, told) in [
        (
            "  layers: 3\n  sliding_window: 6\n  layer_types: [sliding_attention, full_attention]\n",
            "kinds.yaml:6: `draft.layer_types` names 2 layers, and `draft.layers` is 3",
        ),
        (
            "  sliding_window_pattern: 2\n",
            "kinds.yaml:4: `draft.sliding_window_pattern` is about layers with a window",
        ),
        (
            "  layers: 2\n  sliding_window: 6\n  sliding_window_pattern: 4\n",
            "kinds.yaml:6: `draft.sliding_window_pattern` is 4",
        ),
        ("  layer_types: [round_attention]\n", "kinds.yaml:4"),
    ] {
        let text = check(keys);
        assert!(text.contains(told), "{told} not in {text}");
    }
}

#[test]
fn layers_with_and_without_a_window_are_trained_exported_and_gone_on_from() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    let mixed = ["draft.layers=3", "draft.sliding_window=6", "draft.sliding_window_pattern=3"];
    let training = ["schedule.learning_rate=0.01", "train.epochs=2"];
    succeed(&arguments(&config, &[&mixed[..], &training].concat()));
    let own = drafted(&shop, &shop.path("run"));
    for profile in ["vllm", "sglang", "hf", "llamacpp-hf", "speculators", "llamacpp"] {
        let output = shop.path(&format!("export-{profile}"));
        let export = ["export", &shop.path("run"), "--to", profile, "--output", &output];
        succeed(&[&export[..], &["--dtype", "f32"]].concat());
        assert_eq!(drafted(&shop, &output), own, "{profile}");
        let verify = ["verify", &output, "--target", &shop.target()];
        succeed(&[&verify[..], &["--checkpoint", &shop.path("run")]].concat());
    }
    let written = read_json(shop.path("export-hf/config.json"));
    let (slides, full) = ("sliding_attention", "full_attention");
    assert_eq!(written["layer_types"], serde_json::json!([slides, slides, full]));
    assert_eq!((&written["sliding_window"], &written["is_causal"]), (&6.into(), &false.into()));

    // The list says the same as its short form. A draft goes on with other windows, and is told so.
    let from = format!("draft.from={}", shop.path("export-llamacpp/draft-f32.gguf"));
    let listed = ["draft.layers=3", "draft.sliding_window=6", "train.steps=1", &from];
    let kinds = format!("draft.layer_types=[{slides},{slides},{full}]");
    let told = |folder: &str, kinds: &str| {
        let output = format!("output={}", shop.path(folder));
        let told = noted(&arguments(&config, &[&listed[..], &[kinds, &output]].concat()));
        told.contains("none, 6, none here")
    };
    assert!(!told("same", &kinds));
    let kinds = format!("draft.layer_types=[{full},{slides},{full}]");
    assert!(told("other", &kinds));
    let output = format!("output={}", shop.path("causal"));
    let text =
        fail(&arguments(&config, &[&listed[..], &["draft.causal=true", &output]].concat()), 2);
    assert!(text.contains("causal (of every layer)"), "{text}");
}

#[test]
fn what_engines_take_where_nothing_is_said_of_causality_can_be_trained() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    let windows = ["draft.sliding_window=6", "draft.sliding_window_pattern=2"];
    let silent = [&windows[..], &["draft.causal=null", "train.steps=2"]].concat();
    succeed(&arguments(&config, &silent));
    succeed(&["extract", &shop.path("run"), "--json"]);
    let draft = shop.path("run/draft");
    let written = read_json(format!("{draft}/config.json"));
    assert!(written.get("is_causal").is_none(), "{written}");
    let from = format!("draft.from={draft}");
    let output = format!("output={}", shop.path("next"));
    succeed(&arguments(&config, &[&silent[..], &[&from, &output]].concat()));
    let output = format!("output={}", shop.path("other"));
    let said = [&silent[..], &[&from, &output, "draft.causal=false"]].concat();
    fail_with(&arguments(&config, &said), 2, &["`causal (of every layer)` = [true, false]"]);
}

#[test]
fn runs_with_every_loss_go_on_after_a_kill_and_come_to_other_drafts() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    let mut drafts = Vec::new();
    for (name, keys) in [
        ("plain", &[][..]),
        ("lambda", &["draft.loss=lk_lambda"]),
        ("labels", &["draft.labels=target", "draft.slot_weights=dpace"]),
        ("dpard", &["draft.loss=renyi", "draft.soft_weight=1", "draft.slot_weights=dpard"]),
        ("places", &["draft.block_starts=whole_blocks"]),
        ("selector", &["draft.method=dflash2", "draft.selector_rank=6"]),
        // A run that goes on counts its steps from the first.
        ("ramp", &["draft.method=dflash2", "draft.selector_rank=6", "draft.selector_ramp=1"]),
        (
            "chain",
            &[
                "draft.method=dspark",
                "draft.markov_rank=6",
                "draft.distance=renyi",
                "draft.slot_weights=dpard",
                "draft.hard_weight=0",
                "draft.divide_by_rows=true",
            ],
        ),
    ] {
        let more = [keys, &["train.epochs=2", "train.rows_per_step=2"]].concat();
        let [whole, _] = killed_alike(&shop, name, &arguments(&config, &more));
        let losses = losses(&whole);
        assert!(losses.len() > 1 && losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
        let draft = draft_bytes(&whole);
        assert!(!drafts.contains(&draft), "{name}: the loss changes nothing");
        drafts.push(draft);
    }
}
