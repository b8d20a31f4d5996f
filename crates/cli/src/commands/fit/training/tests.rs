//! What a training's configuration comes to.

use longdraft_configuration::LocatedStage;
use longdraft_models::published::published_config;
use longdraft_train::checkpoint::stages as stages_on_disk;
use longdraft_train::method::{Method, Room};

use super::*;
use crate::commands::fit::stages::{keys_of_rows, of, planned};
use crate::commands::fit::trial::LongRows;

fn trial() -> Trial {
    let long = LongRows { short: 1024, row_tokens: 8192, step: 3e-3, capture: 1e-3 };
    Trial { step: 1e-3, capture: 5e-4, long: Some(long), ..Trial::default() }
}

/// A plan of rows of 8192 tokens, in stages where the target has a chat template.
fn plan(is_chat: bool) -> Plan {
    let stages = of(8192, 1024, is_chat);
    let stages = planned(&stages, (&trial(), true), (1e6, 3.0), 3600.0);
    Plan { row_tokens: 8192, keeps_features: true, stages, ..Plan::default() }
}

/// The configuration of a plan for an hour, after some stages.
fn config_of(folder: &Path, plan: &Plan, text: &Text, done: &[Value]) -> Value {
    let target = published_config("meta-llama/Llama-3.1-8B-Instruct").expect("it is listed");
    let room = Room { target: &target, seconds: 3600.0, row_tokens: plan.row_tokens };
    let recipe = |method: &'static Method| {
        let recipe = method.fresh().recipe(&room)?;
        let has_blocks = recipe.draft.contains_key("blocks_per_row");
        has_blocks.then_some(Candidate { method, recipe })
    };
    let candidate = Method::all().find_map(recipe).expect("drafts of blocks have a recipe");
    let choice = Choice { init: Some("random".to_owned()), rate: 1e-3 };
    let name = "target".to_owned();
    let settings = Settings { target: name, max_tokens: 256, seed: 7, ..Settings::default() };
    let keys = keys_of_rows(candidate.method, &room, &plan.stages);
    let staging = Staging { keys, done: done.to_vec() };
    let (chosen, within) = ((&candidate, &trial(), plan, &choice), (text, 3600.0));
    configured((folder, 1), &settings, chosen, within, None, staging).expect("a configuration")
}

fn located(config: &Value) -> Vec<LocatedStage> {
    parse_stages(&config.to_string(), "fit", &[]).expect("sound")
}

const CHAT: Text = Text { tokens: 1e6, is_chat: true };

#[test]
fn a_training_of_long_rows_is_a_curriculum() {
    let folder = Path::new("somewhere");
    let config = config_of(folder, &plan(true), &CHAT, &[]);
    let stages = located(&config);
    let of = |stage: &LocatedStage| {
        let config = &stage.located.config;
        (stage.name.clone(), config.output.clone(), config.data.row_tokens)
    };
    let place = |name: &str| folder.join("training-1").join(name);
    let expected = [("base", 1024), ("long", 8192), ("answers", 8192)];
    let expected = expected.map(|(name, rows)| (name.to_owned(), place(name), rows));
    assert_eq!(stages.iter().map(of).collect::<Vec<_>>(), expected);
    assert_eq!((run_of(&config, 1), run_of(&config, 2)), (place("long"), place("answers")));
    // Answers alone are learned in the end, each in one row with the end of its prompt.
    let sources: Vec<_> = stages.iter().map(|s| s.located.config.data.train[0].clone()).collect();
    let most: Vec<_> = sources.iter().map(|source| source.max_prompt_tokens).collect();
    assert_eq!(most, [None, None, Some(8192 - 256)]);
    let keys: Vec<&Value> = super::stages(&config).iter().collect();
    let learned: Vec<_> = keys.iter().map(|s| s["data"]["train"][0]["learn"].clone()).collect();
    assert_eq!(learned, ["all", "all", "assistant"]);
    let features: Vec<_> = keys.iter().map(|s| s["train"]["features"].clone()).collect();
    assert_eq!(features, ["memory", "online", "online"]);
    let rates: Vec<_> = keys.iter().map(|s| s["schedule"]["learning_rate"].as_f64()).collect();
    assert_eq!(rates, [Some(1e-3), Some(2.5e-4), Some(2.5e-4)]);
    let blocks: Vec<_> = keys.iter().map(|s| s["draft"]["blocks_per_row"].as_u64()).collect();
    assert!(blocks[1] == blocks[0].map(|blocks| 8 * blocks) && blocks[2] == blocks[1]);
    // A target without a template has no stage of answers.
    let raw = config_of(folder, &plan(false), &Text { is_chat: false, ..CHAT }, &[]);
    assert_eq!(located(&raw).len(), 2);
}

#[test]
fn the_steps_of_all_stages_hold_the_time() {
    let config = config_of(Path::new("x"), &plan(true), &CHAT, &[]);
    let (mut seconds, mut minutes) = (0.0, 0.0);
    for stage in super::stages(&config) {
        let of = |part: &str, key: &str| stage[part][key].as_f64().expect("a number");
        let row_tokens = of("data", "row_tokens");
        let trial = trial().in_rows(row_tokens as usize);
        let keeps = stage["train"]["features"] == "memory";
        let OfToken { once, each } = OfToken::of(&trial, keeps);
        seconds += CHAT.tokens * once + of("train", "steps") * row_tokens * each;
        let held_out = of("data", "held_out_rows") * row_tokens;
        seconds += held_out * (trial.capture + OF_ROW * trial.step);
        minutes += of("train", "max_minutes");
    }
    assert!((0.8 * 3600.0..=3600.0).contains(&seconds), "{seconds}");
    assert!((minutes - GRACE * 60.0).abs() < 1e-6, "{minutes}");
}

#[test]
fn what_comes_after_a_stage_is_made_anew_without_it() {
    let folder = tempfile::tempdir().expect("folder");
    let before = config_of(folder.path(), &plan(true), &CHAT, &[]);
    let done = &super::stages(&before)[..1];
    let mut after = config_of(folder.path(), &plan(true), &CHAT, done);
    assert_eq!(super::stages(&after)[0], done[0]);
    let steps = |config: &Value, stage: usize| {
        super::stages(config)[stage]["train"]["steps"].as_u64().expect("steps")
    };
    // The others have the whole time.
    assert!(steps(&after, 1) > steps(&before, 1) && steps(&after, 2) > steps(&before, 2));
    stage_mut(&mut after, 1)["train"]["steps"] = json!(3);
    assert_eq!(steps(&after, 1), 3);
    end_after(&mut after, 2).expect("written");
    let runs = ["base", "long"].map(|name| folder.path().join("training-1").join(name));
    runs.iter().for_each(|run| std::fs::create_dir_all(run).expect("folder"));
    assert_eq!((super::stages(&after).len(), located(&after).len()), (2, 2));
    assert_eq!(stages_on_disk(&folder.path().join("training-1")), runs);
}

#[test]
fn a_training_moves_with_its_fit() {
    // A folder with the name of something else.
    let (here, there) = (Path::new("messages"), Path::new("/elsewhere/b"));
    let mut config = config_of(here, &plan(true), &CHAT, &[]);
    config["draft"]["from"] = json!("drafts/messages/given");
    let mut expected = config_of(there, &plan(true), &CHAT, &[]);
    expected["draft"]["from"] = config["draft"]["from"].clone();
    expected["target"] = json!("models/target");
    assert_eq!(moved(config.clone(), &run_folder(there, 1), "models/target"), expected);
    assert_eq!(moved(config.clone(), &run_folder(here, 1), "target"), config);
}

#[test]
fn the_first_stage_is_a_training_of_its_own() {
    let config = config_of(Path::new("x"), &plan(true), &CHAT, &[]);
    let first = first_stage(&config);
    let stages = located(&first);
    assert_eq!(stages.len(), 1, "{first}");
    let own = &stages[0].located.config;
    assert_eq!((own.data.row_tokens, own.output.as_path()), (1024, Path::new("x/training-1")));
    let blocks = |config: &Value| config["draft"]["blocks_per_row"].clone();
    assert_eq!(blocks(&first), blocks(&super::stages(&config)[0]));
    assert_eq!(first_stage(&first), first);
}

#[test]
fn short_rows_are_trained_at_once() {
    let short = Plan { row_tokens: 1024, keeps_features: true, ..Plan::default() };
    let text = Text { tokens: 1e5, is_chat: true };
    let mut config = config_of(Path::new("x"), &short, &text, &[]);
    let path = training_file(Path::new("x"));
    let data = json!({
        "train": [{ "path": path, "template": { "kind": "messages" }, "learn": "all" }],
        "held_out_rows": 4, "row_tokens": 1024, "anchor": { "enabled": false },
    });
    assert_eq!((&config["data"], config.get("stages")), (&data, None));
    // As often over the text as pays.
    assert_eq!(
        (&config["train"]["steps"], &config["train"]["evaluate_every"]),
        (&json!(781), &json!(196))
    );
    assert_eq!(located(&config).len(), 1);
    assert_eq!(run_of(&config, 0), Path::new("x/training-1"));
    let same = config.clone();
    end_after(&mut config, 1).expect("nothing to end");
    assert_eq!(super::stages(&config), std::slice::from_ref(&same));
    assert_eq!(*stage_mut(&mut config, 0), same);
}
