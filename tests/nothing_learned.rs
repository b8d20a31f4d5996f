//! Rows of which nothing is learned: some do not end a training, and if all are such the run is refused.

use crate::support::runs::metrics;
use crate::support::{Workshop, fail_with, last_json, run, stderr, stdout, succeed};
use serde_json::json;

/// Rows of tokens: short ones whose second half is learned, and long ones of which only the end is.
fn rows_with_long_prompts(shop: &Workshop, (short, long): (usize, usize)) -> String {
    let row = |tokens: usize, prompt: usize| {
        let ids: Vec<usize> = (0..tokens).map(|t| 1 + (7 * t + tokens) % 200).collect();
        let mask: Vec<u8> = (0..tokens).map(|t| u8::from(t >= prompt)).collect();
        format!("{}\n", json!({ "input_ids": ids, "loss_mask": mask }))
    };
    let short = (0..short).map(|i| row(40 + i, 20));
    let rows: String = short.chain((0..long).map(|_| row(300, 290))).collect();
    let path = shop.write("tokens.jsonl", rows);
    format!("data.train=[{{path: {path}, template: {{kind: tokens}}}}]")
}

#[test]
fn prompts_longer_than_a_row_do_not_end_a_training() {
    let (shop, config) = Workshop::new().with_config();
    let data = rows_with_long_prompts(&shop, (20, 2));
    let common = ["data.held_out_rows=0", "train.rows_per_step=1", "train.epochs=1", "--json"];
    let train = [&["train", &config, &data], &common[..]].concat();
    let output = run(&train);
    assert_eq!(last_json(&stdout(&output))["finished"], true, "{}", stderr(&output));
    // Of 300 tokens the first two rows hold nothing but the prompt.
    let text = stderr(&output);
    assert!(text.contains("4 pieces of the training text have no token to learn"), "{text}");
    assert!(!text.contains("no token is learned"), "{text}");
    // Published rows are one document each, cut off; a step over a prompt alone counts.
    let output = format!("output={}", shop.path("compat"));
    let published = ["draft.compat=longspec", "draft.soft_weight=0", "data.anchor.enabled=false"];
    let compat = [&published[..], &[&output]].concat();
    let output = run(&[&train[..], &compat].concat());
    assert_eq!(last_json(&stdout(&output))["finished"], true, "{}", stderr(&output));
    let text = stderr(&output);
    assert!(text.contains("no token is learned of tokens.jsonl:2"), "{text}");
    // Of the 22 steps two learned nothing.
    let losses = metrics(&shop.path("compat"));
    assert_eq!(losses.iter().filter(|record| record["loss"].is_number()).count(), 20);
}

/// Held-out rows are counted with those of prompts alone: else they would take all answers.
#[test]
fn held_out_rows_of_long_prompts_leave_text_to_train_on() {
    let (shop, config) = Workshop::new().with_config();
    let data = rows_with_long_prompts(&shop, (0, 5));
    succeed(&["train", &config, &data, "data.held_out_rows=4", "train.epochs=1"]);
}

#[test]
fn rows_of_which_nothing_is_learned_are_refused_before_the_first_step() {
    let (shop, config) = Workshop::new().with_config();
    let data = rows_with_long_prompts(&shop, (0, 2));
    let cut = ["data.held_out_rows=0", "data.overlong=truncate"];
    let words = ["no token of the training text is learned", "longdraft data inspect"];
    fail_with(&[&["train", &config, &data], &cut[..]].concat(), 1, &words);
}
