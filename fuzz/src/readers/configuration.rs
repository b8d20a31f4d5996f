//! YAML configurations with overrides.

use longdraft::check_configuration;

use crate::scratch;

/// Between a file and its overrides, and between two of them.
const SEPARATOR: u8 = 0;

/// Writes what a configuration's `defaults` may name.
fn write_parts(folder: &std::path::Path) {
    let part = "data:\n  row_tokens: 128\ntrain: {seed: 5, steps: 3}\n";
    std::fs::write(folder.join("part.yaml"), part).expect("written");
}

/// Composes and checks a configuration. Overrides follow the file, each after a zero byte.
pub(super) fn configuration(bytes: &[u8]) -> bool {
    let mut parts = bytes.split(|byte| *byte == SEPARATOR);
    let file = parts.next().unwrap_or_default();
    let overrides: Vec<String> =
        parts.map(|part| String::from_utf8_lossy(part).into_owned()).collect();
    let folder = scratch::folder_with("configuration", write_parts, "own.yaml", file);
    check_configuration(&folder.join("own.yaml"), &overrides).is_ok()
}

pub(super) fn configurations() -> Vec<Vec<u8>> {
    let small = "target: a/b\noutput: runs/x\ndata:\n  train: [{path: rows.jsonl}]\n";
    let whole = "defaults:\n- part\n- _self_\ntarget: a/b\noutput: runs/${oc.env:LONGDRAFT_UNSET,7}-${train.seed}\n\
        data:\n  train:\n  - path: x.jsonl\n    template: {kind: raw, fields: [a]}\n  \
        anchor: {enabled: false}\ntrain: {rows_per_step: 2, epochs: 3}\n\
        draft: {method: eagle3, draft_vocab_size: 60}\nschedule: {kind: warmup_cosine}\n";
    let stages = "target: a\noutput: runs/c\ndata: {train: [{path: x.jsonl}]}\ntrain: {seed: 3}\n\
        stages:\n- name: base\n- {name: long, start_from: best, data: {row_tokens: 4096}}\n";
    let pretrain = "output: runs/p\ndata: {train: [a.bin]}\nmodel: {vocab_size: 1024}\n";
    let with = |file: &str, overrides: &[&str]| {
        let parts = overrides.iter().map(|text| format!("\0{text}"));
        format!("{file}{}", parts.collect::<String>()).into_bytes()
    };
    vec![
        with(small, &[]),
        with(small, &["train.steps=7", "+train.epochs=2", "draft.delay_weights=[1, 0.5]"]),
        with(whole, &["~train.epochs"]),
        with(stages, &["train.steps=9", "stages.long.train.seed=4"]),
        with(pretrain, &[]),
    ]
}
