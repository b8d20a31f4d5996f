//! Files of runs, and runs that are killed.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::files::read_rows;
use super::processes::killed_after;
use super::{Workshop, last_json, longdraft, succeed, succeeded};

/// Bytes of the draft in a run's newest checkpoint.
pub(crate) fn draft_bytes(run: &str) -> Vec<u8> {
    std::fs::read(format!("{run}/checkpoints/last/draft.safetensors")).expect("a checkpoint")
}

/// Trains, captures, and trains on what was captured: both runs end with the same draft. Extracts it and
/// returns its folder.
pub(crate) fn trained_alike_from_a_store(shop: &Workshop, options: &[&str]) -> String {
    let config = shop.config();
    let of = |verb: &str, more: &[&str]| {
        let common = [options, &["capture.dtype=f32"]].concat();
        last_json(&succeed(&[&[verb, &config, "--json"], &common[..], more].concat()))
    };
    assert_eq!(of("train", &[])["finished"], true);
    let features = format!("train.features={}", shop.path("features"));
    of("capture", &[&features]);
    let output = format!("output={}", shop.path("offline"));
    of("train", &[&features, &output]);
    assert_eq!(draft_bytes(&shop.path("run")), draft_bytes(&shop.path("offline")), "{options:?}");
    succeed(&["extract", &shop.path("run")]);
    shop.path("run/draft")
}

/// Tokens and acceptance of greedy decoding with a draft.
pub(crate) fn drafted(shop: &Workshop, draft: &str) -> (Value, Value) {
    let line = written(shop, &["--draft", draft, "--pace", "fixed"]);
    (line["tokens"].clone(), line["conditional_acceptance"].clone())
}

/// Tokens of greedy decoding without a draft after the same prompt.
pub(crate) fn written_plainly(shop: &Workshop) -> Value {
    written(shop, &["--no-draft"])["tokens"].clone()
}

fn written(shop: &Workshop, how: &[&str]) -> Value {
    let target = shop.target();
    let arguments = ["generate", "--target", &target, "--prompt", "the cat sat"];
    let more = ["--max-tokens", "40", "--ignore-eos", "--json"];
    last_json(&succeed(&[&arguments[..], &more, how].concat()))
}

/// A draft's chains and trees give the plain text, whatever the cache is held as.
pub(crate) fn decodes_as_plain(shop: &Workshop, drafted: &str, what: &str) {
    let target = shop.target();
    let prompt = ["generate", "--target", &target, "--prompt", "the cat", "--ignore-eos"];
    let say = |more: &[&str]| {
        succeed(&[&prompt[..], &["--max-tokens", "40", "--pace", "fixed"], more].concat())
    };
    for cache in ["f32", "f16"] {
        let plain = say(&["--no-draft", "--cache", cache]);
        let of_draft = ["--draft", drafted, "--cache", cache];
        assert_eq!(plain, say(&of_draft), "{what} {cache}");
        let tree = [&of_draft[..], &["--tree", "static:3,4"]].concat();
        assert_eq!(plain, say(&tree), "{what} {cache}");
    }
}

/// Every record of a run.
pub(crate) fn metrics_with_clocks(run: &str) -> Vec<Value> {
    read_rows(format!("{run}/metrics.jsonl"))
}

/// Every record without what clocks and memory decide.
pub(crate) fn metrics(run: &str) -> Vec<Value> {
    let mut records = metrics_with_clocks(run);
    for record in &mut records {
        for clock in ["tokens_per_second", "memory_mib", "gflops", "waited_seconds", "sent_bytes"] {
            record.as_object_mut().map(|record| record.remove(clock));
        }
    }
    records
}

/// Runs a command until it ends by itself. Before that it is killed again and again, each time after more
/// changes of the files under a folder: kills fall on loading, stepping and saving, on any machine.
/// `command` gets the number of kills so far.
pub(crate) fn run_with_kills(folder: &Path, command: impl Fn(usize) -> Command) {
    let mut changes = 1;
    for kills in 0..200 {
        if !killed_after(changes, folder, &mut command(kills)) {
            assert!(kills > 0, "nothing was interrupted");
            return;
        }
        changes += 1 + changes / 8;
    }
    panic!("the run never ends");
}

/// Trains at once, and once more with kills on the way: both come to the same draft. Returns both runs;
/// `train` holds all arguments but their output.
#[track_caller]
pub(crate) fn killed_alike(shop: &Workshop, name: &str, train: &[&str]) -> [String; 2] {
    let [whole, killed] = ["whole", "killed"].map(|kind| shop.path(&format!("{name}-{kind}")));
    let into = |run: &str| {
        let output = format!("output={run}");
        longdraft(&[train, &[output.as_str()]].concat())
    };
    succeeded(into(&whole).output().expect("the binary starts"));
    run_with_kills(shop.folder.path(), |_| into(&killed));
    assert_eq!(draft_bytes(&whole), draft_bytes(&killed), "{name}");
    [whole, killed]
}
