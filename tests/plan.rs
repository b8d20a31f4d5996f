//! Plans beside what runs take: memory of small trainings, bytes between ranks, and the documentation's
//! tables.

use std::path::Path;
use std::process::Command;

use crate::support::{self, fail, last_json, longdraft, stderr, stdout, succeed};
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
        let output = exact_allocator(&mut command).output().expect("the binary starts");
        assert!(output.status.success(), "{}", stderr(&output));
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
fn lacking(arguments: &[&str]) -> String {
    let output = support::run(arguments);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("error: the run does not fit"), "{}", stderr(&output));
    stdout(&output)
}

/// The plan of the one stage.
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
fn glide_takes_the_memory_that_is_planned() {
    assert_close("online", Shop::new().memory(&[]));
}

#[test]
fn glide_over_stored_features_takes_the_memory_that_is_planned() {
    let shop = Shop::new();
    let (config, place) =
        (shop.path("train.yaml"), format!("train.features={}", shop.path("store")));
    succeed(&["capture", &config, &place]);
    assert_close("offline", shop.memory(&[&place]));
}

#[test]
fn accumulated_rows_take_the_memory_that_is_planned() {
    assert_close("three rows", Shop::new().memory(&["train.rows_per_step=3", "train.steps=1"]));
}

#[test]
fn eagle3_takes_the_memory_that_is_planned() {
    assert_close("online", Shop::new().memory(&EAGLE3));
}

#[test]
fn eagle3_holding_a_step_takes_the_memory_that_is_planned() {
    let more = ["train.rows_per_step=6", "draft.ttt_steps=2", "train.steps=1"];
    assert_close("six rows held", Shop::new().memory(&[&EAGLE3[..], &more].concat()));
}

#[test]
fn eagle3_over_stored_features_takes_the_memory_that_is_planned() {
    let shop = Shop::new();
    let (config, place) =
        (shop.path("train.yaml"), format!("train.features={}", shop.path("store")));
    let more = [&EAGLE3[..], &[&place]].concat();
    succeed(&[&["capture", &config][..], &more].concat());
    assert_close("offline", shop.memory(&more));
}

#[test]
fn features_kept_in_memory_are_counted_once_the_rows_are_known() {
    let shop = Shop::new();
    let more = ["train.features=memory", "teacher.soft_targets=top_k", "teacher.top_k=8"];
    let config = shop.path("train.yaml");
    let text = succeed(&[&["train", &config, "--plan", "--gflops", "10"][..], &more].concat());
    assert!(text.contains("for every further training row: `train.features: memory`"), "{text}");
}

#[test]
fn block_drafts_take_the_memory_that_is_planned() {
    let blocks = [
        "draft.layers=2",
        "draft.target_layers=[0,2]",
        "draft.blocks_per_row=64",
        "data.row_tokens=2048",
        "train.steps=1",
    ];
    for (name, more) in [
        ("decay", &["draft.method=dflash"][..]),
        (
            "a step held",
            &["draft.method=dflash", "draft.slot_weights=dpace", "train.rows_per_step=6"],
        ),
        (
            "a block for some tokens",
            &["draft.method=dflash", "draft.blocks_per_row=null", "draft.tokens_per_block=16"],
        ),
        (
            "the target's distribution",
            &["draft.method=dflash", "draft.soft_weight=0.8", "data.row_tokens=1024"],
        ),
        (
            "its most likely tokens",
            &["draft.method=dflash", "draft.soft_weight=1", "teacher.soft_targets=top_k"],
        ),
        (
            "a divergence of whole distributions",
            &[
                "draft.method=dflash",
                "draft.soft_weight=1",
                "draft.loss=jsd",
                "draft.blocks_per_row=256",
            ],
        ),
        ("a selector", &["draft.method=dflash2", "draft.selector_rank=64"]),
        ("a chain", &["draft.method=dspark", "draft.markov_rank=64", "draft.block_size=16"]),
        (
            "a chain with a state",
            &[
                "draft.method=dspark",
                "draft.markov_rank=64",
                "draft.markov_head=rnn",
                "draft.block_size=16",
            ],
        ),
    ] {
        assert_close(name, Shop::new().memory(&[&blocks[..], more].concat()));
    }
}

/// A short run of a small language model of either architecture.
#[test]
fn pretraining_takes_the_memory_that_is_planned() {
    for (architecture, rope) in [("llama", "{rule: none}"), ("baseline", "{}")] {
        let shop = Shop::new();
        let shard = shop.path("train.bin");
        let tokens: Vec<u16> = (0..40_000_u32).map(|i| (i * i % 250) as u16).collect();
        longdraft_data::token_stream::write_shard(Path::new(&shard), &tokens).expect("shard");
        let yaml = format!(
            "output: {}\nmodel: {{architecture: {architecture}, vocab_size: 258, num_hidden_layers: 3, \
             hidden_size: 256, num_attention_heads: 4, num_key_value_heads: 2, rope: {rope}}}\n\
             data: {{train: [{shard}], row_tokens: 512}}\ntrain: {{steps: 2, tokens_per_step: 8192, \
             micro_batch_tokens: 4096}}\n",
            shop.path("run")
        );
        let config = shop.path("pretrain.yaml");
        std::fs::write(&config, yaml).expect("config");
        let plan = plan(&["lm", "train", &config, "--json"], 1);
        let mut command = longdraft(&["lm", "train", &config, "--json"]);
        let output = exact_allocator(&mut command).output().expect("the binary starts");
        assert!(output.status.success(), "{}", stderr(&output));
        let answer = last_json(&stdout(&output));
        let measured = answer["peak_memory_mib"].as_f64().expect("Linux tells");
        assert_close(architecture, (mib(&plan["bytes"]), measured));
    }
}

#[test]
fn a_plan_says_what_does_not_fit_and_what_to_lower() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let base = ["train", &config, "--plan", "--gflops", "10"];
    let text = lacking(&[&base[..], &["--memory", "0.05"]].concat());
    assert!(text.contains("memory at most, in the backward phase:"), "{text}");
    assert!(text.contains("does not fit: 51 MiB free; one of these makes it fit:"), "{text}");
    // No change alone is enough.
    let remedies: Vec<&str> = text.lines().filter(|line| line.contains("row_tokens=")).collect();
    assert!(!remedies.is_empty(), "{text}");
    for remedy in remedies {
        let both = remedy.contains("train.features=FOLDER after `longdraft capture`");
        assert!(both && remedy.contains(" and "), "{text}");
    }
    let text = lacking(&[&base[..], &["--memory", "0.15"]].concat());
    assert!(text.contains("one of these makes it fit:\n"), "{text}");
    assert!(text.contains("  data.row_tokens=2048: "), "{text}");
    let text = lacking(&[&base[..], &["--memory", "0.01"]].concat());
    assert!(text.contains("nothing here makes it fit, but these lower it:"), "{text}");
    assert!(text.contains("  data.row_tokens=2048: "), "{text}");
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

/// A GPU that is not here: its memory and the host's apart, its speed unknown.
#[test]
fn a_plan_for_a_gpu_tells_its_memory_from_the_hosts() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let base = ["train", &config, "--plan", "device=cuda:0"];
    let text = succeed(&[&base[..], &["--memory", "8"]].concat());
    assert!(text.contains("the GPU's memory at most, in the "), "{text}");
    assert!(text.contains("beside it, of main memory at most: "), "{text}");
    assert!(text.contains("--gflops tells its time") && text.contains("fits: 8.0 GiB"), "{text}");
    let plan = |more: &[&str]| {
        let text = succeed(&[&base[..], &["--json"], more].concat());
        last_json(&text)["stages"][0].clone()
    };
    let items = |plan: &Value, name: &str| -> Vec<Value> {
        let phases = plan["phases"].as_array().expect("phases").iter();
        let items = phases.flat_map(|phase| phase["items"].as_array().expect("items").clone());
        items.filter(|item| item["name"] == name).collect()
    };
    let place = |plan: &Value, name: &str| {
        let items = items(plan, name);
        assert!(!items.is_empty(), "{name} in {plan}");
        assert!(items.iter().all(|item| item["place"] == items[0]["place"]));
        items[0]["place"].as_str().expect("a place").to_owned()
    };
    let one = plan(&[]);
    assert_eq!(one["place"], "accelerator");
    assert!(one["seconds_per_step"].is_null() && one["free_bytes"].is_null(), "{one}");
    for (name, expected) in [
        ("program", "host"),
        ("copies of tensors", "host"),
        ("target weights", "accelerator"),
        ("activations", "accelerator"),
        ("optimizer state", "accelerator"),
    ] {
        assert_eq!(place(&one, name), expected, "{name}");
    }
    // 16 bits on a GPU unless told otherwise.
    let bytes = |plan: &Value, name: &str| items(plan, name)[0]["bytes"].as_u64().expect("bytes");
    let whole = plan(&["precision=f32"]);
    // Norms stay in f32.
    let (half, single) = (2 * bytes(&one, "target weights"), bytes(&whole, "target weights"));
    assert!(half >= single && half - single < single / 100, "{half} {single}");
    // So are the states of the frozen target and its cache, but not the stream nor the last keys.
    let (half, single) = (bytes(&one, "target forward"), bytes(&whole, "target forward"));
    assert!(half < single && 2 * half > single, "{half} {single}");
    let cache = |plan: &Value| plan["cache_bytes"].as_u64().expect("bytes");
    assert_eq!(2 * cache(&one), cache(&whole));
    // Beside quantised blocks decoding caches 16 bits, however training holds the weights.
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/target/demonstration.gguf");
    let blocks = format!("target={}", shipped.display());
    let [half, single] = ["precision=bf16", "precision=f32"]
        .map(|precision| cache(&plan(&["data.row_tokens=64", &blocks, precision])));
    assert_eq!(half, single);
    for host in
        [&["optimizer.matrices=muon"][..], &["--ranks", "2"], &["parallel.optimizer_state=file"]]
    {
        let plan = plan(host);
        assert_eq!(place(&plan, "gradients and new weights"), "host", "{host:?}");
    }
    let nccl = plan(&["--ranks", "2", "parallel.reduction=library"]);
    assert_eq!(place(&nccl, "optimizer state"), "accelerator");
    // The phase's sum is that of its accelerator's terms.
    let phase = &one["phases"][0];
    let of_gpu = phase["items"].as_array().expect("items").iter();
    let of_gpu = of_gpu.filter(|item| item["place"] == "accelerator");
    let sum: u64 = of_gpu.map(|item| item["bytes"].as_u64().expect("bytes")).sum();
    assert_eq!(phase["bytes"].as_u64(), Some(sum));
    // The CPU's plan knows one memory.
    let text = succeed(&["train", &config, "--plan", "device=cpu", "--json", "--gflops", "10"]);
    let cpu = last_json(&text)["stages"][0].clone();
    assert_eq!((cpu["place"].as_str(), &cpu["host_bytes"]), (Some("host"), &cpu["bytes"]));
}

#[test]
fn a_plan_tells_the_cache_that_decoding_has() {
    let shop = Shop::new();
    let config = shop.path("train.yaml");
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/target/demonstration.gguf");
    // Quantised blocks, and f32.
    for target in [shipped.display().to_string(), shop.path("target")] {
        let own = format!("target={target}");
        let plan = ["train", &config, &own, "data.row_tokens=64", "device=cpu", "--plan"];
        let planned = succeed(&[&plan[..], &["--gflops", "10"]].concat());
        let (_, planned) = planned.split_once("decoding later caches ").expect("a cache");
        let (bytes, _) = planned.split_once(" of a sequence of ").expect("a sequence");
        let decode = ["generate", "--target", &target, "--prompt", "a", "--max-tokens", "1"];
        let told = support::run(&[&decode[..], &["--device", "cpu"]].concat());
        assert!(told.status.success(), "{}", stderr(&told));
        let told = stderr(&told);
        assert!(told.contains("; cache: ") && told.contains(&format!(", {bytes} for ")), "{told}");
    }
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
    let text = lacking(&[&base[..], &["target=Qwen/QwQ-32B", "--memory", "10"]].concat());
    assert!(text.contains("target weights                 122.1 GiB"), "{text}");
    let error = fail(&[&base[..], &["target=nobody/knows"]].concat(), 1);
    assert!(error.contains("target `nobody/knows` is not on this machine"), "{error}");
    assert!(error.contains("hint: name a folder with its config.json"), "{error}");
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

/// The tables of docs/results/ranks.md stand below the commands that print them.
#[test]
fn the_tables_of_the_documentation_are_what_their_commands_print() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text =
        std::fs::read_to_string(root.join("docs/results/ranks.md")).expect("docs/results/ranks.md");
    let text = text.replace("\\\n", " ");
    let commands: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("longdraft train"))
        .filter(|line| line.contains("--table") || line.contains("--collectives"))
        .collect();
    assert!(commands.len() >= 3, "{commands:?}");
    for command in commands {
        let arguments: Vec<&str> = command.split_whitespace().skip(1).collect();
        let output = longdraft(&arguments).current_dir(&root).output().expect("the binary starts");
        assert!(output.status.success(), "{}", stderr(&output));
        let printed = stdout(&output);
        assert!(text.contains(printed.trim_end()), "`{command}` prints\n{printed}");
    }
}

/// Peaks that a GPU took stand in docs/results/gpu.md, below the commands that plan the same rows.
#[test]
fn plans_of_gpus_say_what_one_took() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text =
        std::fs::read_to_string(root.join("docs/results/gpu.md")).expect("docs/results/gpu.md");
    let text = text.replace("\\\n", " ");
    let commands = text.lines().filter(|line| line.starts_with("longdraft train"));
    let commands = commands.filter(|line| line.contains("--ranks 1 --device cuda:0"));
    let commands: Vec<&str> = commands.collect();
    let table = text.lines().skip_while(|line| !line.starts_with("| step | planned, GiB"));
    let table = table.skip(2).take_while(|line| line.starts_with('|'));
    let rows: Vec<Vec<&str>> = table.map(|line| line.split(" | ").collect()).collect();
    assert!(commands.len() >= 4 && commands.len() == rows.len(), "{commands:?} {rows:?}");
    for (command, row) in commands.iter().zip(&rows) {
        let [_, planned, taken] = row[..] else { panic!("three columns: {row:?}") };
        let taken: f64 = taken.trim_end_matches(" |").parse().expect("a number");
        let arguments: Vec<&str> = command.split_whitespace().skip(1).chain(["--json"]).collect();
        let output = longdraft(&arguments).current_dir(&root).output().expect("the binary starts");
        assert!(output.status.success(), "{}", stderr(&output));
        let bytes = last_json(&stdout(&output))["stages"][0]["bytes"].as_f64().expect("bytes");
        let gib = bytes / f64::from(1 << 30);
        assert_eq!(format!("{gib:.1}"), planned, "`{command}`");
        // They were taken with candle's graph. Ours holds less; no GPU has said yet how much.
        let off = gib / taken - 1.0;
        assert!((-0.3..=0.05).contains(&off), "`{command}`: {gib:.1} GiB planned, {taken} taken");
    }
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
        let log = std::fs::read_to_string(shop.path("run/metrics.jsonl")).expect("metrics");
        let first = log.lines().next().expect("a step");
        let record: Value = serde_json::from_str(first).expect("JSON");
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
