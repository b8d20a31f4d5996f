//! Plans beside what runs take: memory of small trainings, bytes between ranks, and the documentation's
//! tables.

mod gpus;
mod memory;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::support::files::{demonstration, repository};
use crate::support::{
    self, fail, fail_with, finished, last_json, longdraft, require_words, stderr, stdout, succeed,
    succeeded,
};
use serde_json::{Value, json};

/// Largest share by which a prediction may differ from what was measured.
const TOLERANCE: f64 = 0.1;

#[cfg(feature = "mpi")]
const DFLASH: [&str; 5] = [
    "draft.method=dflash",
    "draft.layers=2",
    "draft.target_layers=[0,2]",
    "draft.tokens_per_block=16",
    "data.row_tokens=2048",
];

const EAGLE3: [&str; 4] = [
    "draft.method=eagle3",
    "draft.target_layers=[0,1,2]",
    "draft.ttt_steps=3",
    "data.row_tokens=2048",
];

/// A target whose tensors over some thousand tokens take some MiB each, and text for it.
struct Shop {
    folder: tempfile::TempDir,
}

impl Shop {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("tempdir");
        let mut config = support::tiny_config("llama");
        for (key, value) in [
            ("hidden_size", 256),
            ("intermediate_size", 512),
            ("num_hidden_layers", 4),
            ("head_dim", 64),
            ("max_position_embeddings", 8192),
        ] {
            config[key] = value.into();
        }
        config["initializer_range"] = 0.02.into();
        support::write_target(&folder.path().join("target"), &config);
        let text =
            |i: usize| json!({ "text": format!("{i:03} {}", "a line of text. ".repeat(31)) });
        let rows: String = (0..60).map(|i| format!("{}\n", text(i))).collect();
        std::fs::write(folder.path().join("rows.jsonl"), rows).expect("rows");
        let shop = Self { folder };
        let yaml = format!(
            "target: {}\noutput: {}\ndata:\n  train:\n    - path: {}\n  held_out_rows: 1\n  \
             row_tokens: 4096\ntrain: {{rows_per_step: 1, steps: 2}}\n",
            shop.path("target"),
            shop.path("run"),
            shop.path("rows.jsonl"),
        );
        std::fs::write(shop.path("train.yaml"), yaml).expect("config");
        shop
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Predicted and measured MiB.
    fn memory(&self, more: &[&str]) -> (f64, f64) {
        let config = self.path("train.yaml");
        let arguments = [&["train", &config, "--json"][..], more].concat();
        let plan = plan(&arguments, 1);
        assert!(!Path::new(&self.path("run")).exists(), "a plan writes nothing");
        let mut command = longdraft(&arguments);
        let output = succeeded(finished(exact_allocator(&mut command)));
        let shown = stderr(&output);
        assert!(
            shown.contains(" of memory at most of ") && !shown.contains("may not fit"),
            "{shown}"
        );
        let measured =
            last_json(&stdout(&output))["peak_memory_mib"].as_f64().expect("Linux tells");
        (mib(&plan["bytes"]), measured)
    }
}

/// Training keeps what is freed for the next step. Tensors of these tests are so small that they leave holes
/// between each other there, a tenth of the whole; those of real runs are larger. Limits of the environment
/// come first.
fn exact_allocator(command: &mut Command) -> &mut Command {
    let limits = ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"];
    command.envs(limits.map(|limit| (limit, "131072")))
}

/// What a plan says that does not fit, which is a failure.
#[track_caller]
fn lacking(arguments: &[&str], words: &[&str]) -> String {
    let output = support::run(arguments);
    require_words(&support::told_by(&output, 1), &["error: the run does not fit"]);
    let text = stdout(&output);
    require_words(&text, words);
    text
}

fn plan(arguments: &[&str], ranks: usize) -> Value {
    let ranks = ranks.to_string();
    let more = ["--plan", "--gflops", "10", "--ranks", &ranks];
    let text = succeed(&[arguments, &more].concat());
    last_json(&text)["stages"][0].clone()
}

fn mib(bytes: &Value) -> f64 {
    bytes.as_f64().expect("bytes") / f64::from(1 << 20)
}

#[track_caller]
fn assert_close(what: &str, (predicted, measured): (f64, f64)) {
    let off = (predicted - measured) / measured;
    eprintln!(
        "{what}: {predicted:.1} MiB predicted, {measured:.1} measured, {:+.1} %",
        100.0 * off
    );
    assert!(
        off.abs() <= TOLERANCE,
        "{what}: {predicted:.1} MiB predicted, {measured:.1} MiB measured"
    );
}

#[test]
fn a_plan_says_what_does_not_fit_and_what_to_lower() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let base = ["train", &config, "--plan", "--gflops", "10"];
    let with_memory =
        |gib: &str, words: &[&str]| lacking(&[&base[..], &["--memory", gib]].concat(), words);
    let fits = "does not fit: 51 MiB free; one of these makes it fit:";
    let text = with_memory("0.05", &["memory at most, in the backward phase:", fits]);
    // No change alone is enough.
    let remedies: Vec<&str> = text.lines().filter(|line| line.contains("row_tokens=")).collect();
    assert!(!remedies.is_empty(), "{text}");
    for remedy in remedies {
        let both = remedy.contains("train.features=FOLDER after `longdraft capture`");
        assert!(both && remedy.contains(" and "), "{text}");
    }
    let shorter = "  data.row_tokens=2048: ";
    with_memory("0.15", &["one of these makes it fit:\n", shorter]);
    with_memory("0.01", &["nothing here makes it fit, but these lower it:", shorter]);
    let text = succeed(&[&base[..], &["--memory", "64"]].concat());
    assert!(text.contains("fits: 64.0 GiB free"), "{text}");
    assert!(!Path::new(&shop.path("run")).exists());
    // Ranks send what they share, and ZeRO-1 lowers what each holds.
    let plan_of = |more: &[&str]| {
        let arguments = [&["train", &config, "--json"][..], more].concat();
        plan(&arguments, 4)
    };
    let (replicated, sharded) = (plan_of(&[]), plan_of(&["parallel.zero=1"]));
    assert!(replicated["sent_bytes"].as_u64() > Some(0));
    let state = |plan: &Value| {
        let items = plan["phases"][0]["items"].as_array().expect("items").clone();
        let state = items.iter().find(|item| item["name"] == "optimizer state").cloned();
        state.expect("moments")["bytes"].as_u64().expect("bytes")
    };
    assert!(state(&sharded) * 3 < state(&replicated));
}

#[test]
fn a_plan_tells_the_cache_that_decoding_has() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    // Quantised blocks, and f32.
    for target in [demonstration(), shop.path("target")] {
        let own = format!("target={target}");
        let plan = ["train", &config, &own, "data.row_tokens=64", "device=cpu", "--plan"];
        let planned = succeed(&[&plan[..], &["--gflops", "10"]].concat());
        let (_, planned) = planned.split_once("decoding later caches ").expect("a cache");
        let (bytes, _) = planned.split_once(" of a sequence of ").expect("a sequence");
        let decode = ["generate", "--target", &target, "--prompt", "a", "--max-tokens", "1"];
        let told = support::noted(&[&decode[..], &["--device", "cpu"]].concat());
        assert!(told.contains("; cache: ") && told.contains(&format!(", {bytes} for ")), "{told}");
    }
}

/// Blocks of the carried target take less than a byte a value, and a file of f32 four.
#[test]
fn a_stored_target_is_planned_by_the_types_of_its_file() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let (shipped, own) = (demonstration(), shop.path("target"));
    let weights = |target: &str, precision: &str, more: &[&str]| {
        let target = format!("target={target}");
        let of = ["train", &config, &target, precision, "data.row_tokens=64", "device=cpu"];
        let told = plan(&[&of[..], &["--json"], more].concat(), 1);
        let items = told["phases"][0]["items"].as_array().expect("items").clone();
        let item = items.iter().find(|item| item["name"] == "target weights").cloned();
        item.expect("a target")["bytes"].as_u64().expect("bytes")
    };
    let [blocks, single] =
        ["precision=stored", "precision=f32"].map(|precision| weights(&shipped, precision, &[]));
    assert!(blocks < single / 3, "{blocks} {single}");
    let size = std::fs::metadata(&shipped).expect("a file").len();
    assert!(blocks.abs_diff(size) < size / 4, "{blocks} of {size}");
    let [stored, single] =
        ["precision=stored", "precision=f32"].map(|precision| weights(&own, precision, &[]));
    assert_eq!(stored, single);
    // What is given counts.
    assert!(weights(&own, "precision=stored", &["--target-bytes", "1"]) < single / 3);
    // A target that is not here has no types.
    let base = ["train", &config, "--plan", "--gflops", "10", "device=cpu", "precision=stored"];
    let assumed = "the target is counted with one byte a value";
    let here = format!("target={shipped}");
    let given = ["target=Qwen/Qwen3-8B", "--memory", "1000"];
    let text = succeed(&[&base[..], &given].concat());
    assert!(text.contains(assumed), "{text}");
    let text = succeed(&[&base[..], &[here.as_str(), "data.row_tokens=64"]].concat());
    assert!(!text.contains(assumed), "{text}");
}

#[test]
fn memory_that_is_given_is_of_one_rank() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let told = plan(&["train", &config, "device=cpu", "--memory", "2", "--json"], 4);
    assert_eq!(told["free_bytes"], 2_u64 << 30);
}

#[test]
fn ranks_without_a_row_are_told() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let arguments = ["train", &config, "device=cpu", "train.rows_per_step=1"];
    let told = ["--plan", "--gflops", "10", "--ranks", "4"];
    let text = succeed(&[&arguments[..], &told].concat());
    assert!(text.contains("1 rows a step for 4 ranks: 3 of them idle"), "{text}");
    let json = [&arguments[..], &["--json"]].concat();
    let (one, four) = (plan(&json, 1), plan(&json, 4));
    assert_eq!((&one["idle_ranks"], &four["idle_ranks"]), (&0.into(), &3.into()));
    // One row takes as long, and what ranks send comes on top.
    assert!(four["seconds_per_step"].as_f64() >= one["seconds_per_step"].as_f64());
}

#[test]
fn a_plan_needs_no_target_on_this_machine_but_its_shape() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let base = ["train", &config, "--plan", "--gflops", "10"];
    let large = [&base[..], &["target=Qwen/QwQ-32B", "--memory", "10"]].concat();
    lacking(&large, &["target weights                 122.1 GiB"]);
    let unknown = "target `nobody/knows` is not on this machine";
    let words = [unknown, "hint: name a folder with its config.json"];
    fail_with(&[&base[..], &["target=nobody/knows"]].concat(), 1, &words);
    // A folder needs no weights for it.
    std::fs::remove_file(shop.folder.path().join("target/model.safetensors")).expect("weights");
    std::fs::remove_file(shop.folder.path().join("rows.jsonl")).expect("text");
    succeed(&base);
    fail(&["train", &config, "--ranks", "2"], 2);
    let error = fail(&[&base[..], &["--ranks", "6", "parallel.sequence=4"]].concat(), 2);
    assert!(error.contains("6 ranks do not make groups of `parallel.sequence` = 4"), "{error}");
    let error = fail(&[&base[..], &["--ranks", "6", "parallel.tensor=4"]].concat(), 2);
    assert!(error.contains("`parallel.tensor: 4` does not divide the 6 ranks"), "{error}");
}

/// A page whose commands are a line each.
fn page(path: &str) -> String {
    std::fs::read_to_string(repository(path)).expect(path).replace("\\\n", " ")
}

/// What a command of a page prints, with further options.
#[track_caller]
fn printed_by(command: &str, more: &[&str]) -> String {
    let arguments: Vec<&str> =
        command.split_whitespace().skip(1).chain(more.iter().copied()).collect();
    stdout(&succeeded(finished(longdraft(&arguments).current_dir(repository("")))))
}

/// The tables of docs/results/ranks.md stand below the commands that print them.
#[test]
fn the_tables_of_the_documentation_are_what_their_commands_print() {
    let text = page("docs/results/ranks.md");
    let commands: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("longdraft train"))
        .filter(|line| line.contains("--table") || line.contains("--collectives"))
        .collect();
    assert!(commands.len() >= 3, "{commands:?}");
    for command in commands {
        let printed = printed_by(command, &[]);
        assert!(text.contains(printed.trim_end()), "`{command}` prints\n{printed}");
    }
}

/// Every key in some JSON, at any depth.
fn keys(value: &Value) -> BTreeSet<String> {
    match value {
        Value::Array(list) => list.iter().flat_map(keys).collect(),
        Value::Object(fields) => {
            fields.values().flat_map(keys).chain(fields.keys().cloned()).collect()
        }
        _ => BTreeSet::new(),
    }
}

/// Every key of a plan stands in the manual's table, and what stands in its first column is a key.
#[test]
fn the_keys_of_a_plan_are_those_that_the_manual_lists() {
    let text = page("docs/reference/metrics.md");
    let (_, section) = text.split_once("## Plans for programs").expect("a section");
    let named = |text: &str| -> BTreeSet<String> {
        text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
    let first = rows.iter().flat_map(|row| named(row.split(" | ").next().unwrap_or_default()));
    // One that does not fit has remedies, too.
    let output = longdraft(&["train", "conf/eagle3/llama3.1-8b.yaml", "--plan", "--json"])
        .args(["--gpu", "h100", "--ranks", "16", "--memory", "10"])
        .arg("parallel.reduction=library")
        .current_dir(repository(""))
        .output();
    let all = keys(&last_json(&stdout(&output.expect("longdraft starts")))["stages"][0]);
    let unlisted: Vec<_> = all.difference(&named(&rows.concat())).cloned().collect();
    assert!(unlisted.is_empty(), "not in the table: {unlisted:?}");
    let unknown: Vec<_> = first.filter(|key| !all.contains(key)).collect();
    assert!(unknown.is_empty(), "not in a plan: {unknown:?}");
}

/// Two ranks: memory of the first one, and bytes that it sends.
#[cfg(feature = "mpi")]
#[test]
fn mpi_ranks_take_and_send_what_is_planned() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let glide: &[&str] = &[];
    for (sharing, method, row_tokens) in [
        ("parallel.zero=1", glide, 4096.0),
        ("parallel.zero=3", glide, 4096.0),
        ("parallel.sequence=2", glide, 4096.0),
        ("parallel.zero=3", &EAGLE3, 2048.0),
        ("parallel.sequence=2", &EAGLE3, 2048.0),
        ("parallel.zero=3", &DFLASH, 2048.0),
        ("parallel.sequence=2", &DFLASH, 2048.0),
        ("parallel.tensor=2", glide, 4096.0),
        ("parallel.tensor=2", &EAGLE3, 2048.0),
    ] {
        let more = [sharing, "train.rows_per_step=2", "parallel.bucket_bytes=1048576"];
        let arguments = [&["train", &config, "--json"][..], &more, method].concat();
        let plan = plan(&arguments, 2);
        let mut command = support::mpirun(2, &arguments);
        let output = exact_allocator(&mut command).output().expect("mpirun starts");
        let _ = std::fs::remove_dir(support::session_folder());
        assert!(output.status.success(), "{sharing}: {}", stderr(&output));
        let said = last_json(&stdout(&output));
        let measured = said["peak_memory_mib"].as_f64().expect("Linux tells");
        assert_close(sharing, (mib(&plan["bytes"]), measured));
        let record = &support::files::read_rows(shop.path("run/metrics.jsonl"))[0];
        let sent = record["sent_bytes"].as_f64().expect("bytes");
        // Plans are of full rows.
        let fill = record["tokens"].as_f64().expect("tokens") / (2.0 * row_tokens);
        let planned: f64 = plan["sent"].as_array().expect("a list").iter().map(sent_of(fill)).sum();
        // The plan is of the rank that sends most, the record of the first one, whose share may be larger
        // by a block; counters of the step come on top, and norms of a target are never spread.
        let ratio = sent / planned;
        assert!((ratio - 1.0).abs() < 0.01, "{sharing}: {sent} sent, {planned} planned");
        assert!(record["waited_seconds"].as_f64() > Some(0.0));
        std::fs::remove_dir_all(shop.path("run")).expect("run");
    }
}

/// Bytes of a planned term where rows are filled to a share.
#[cfg(feature = "mpi")]
fn sent_of(fill: f64) -> impl Fn(&Value) -> f64 {
    move |term| {
        let bytes = term["bytes"].as_f64().expect("bytes");
        let of_tokens = [
            "keys and values (sequence)",
            "keys of the draft (sequence)",
            "rows (tensor)",
            "states (tensor)",
            "keys and values (tensor)",
        ];
        if of_tokens.iter().any(|name| term["name"] == *name) { fill * bytes } else { bytes }
    }
}
