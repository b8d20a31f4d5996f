//! One store for several configurations, each of which trains from it as from the target, and for several processes that capture
//! it. What cannot share is refused.

use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::support::processes::wait_until;
use crate::support::runs::{draft_bytes, metrics};
use crate::support::{self, Workshop, fail_with, last_json, longdraft, require_words, succeed};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;

/// Methods that read different features: their names and their drafts.
const METHODS: [(&str, &str); 5] = [
    ("glide", "teacher: {soft_targets: top_k, top_k: 8}\n"),
    ("eagle3", "draft: {method: eagle3, target_layers: [2, 0, 1], ttt_steps: 3}\n"),
    (
        "eagle3-top-k",
        "draft: {method: eagle3, target_layers: [1, 3, 0], ttt_steps: 2, draft_vocab_size: 30}\n\
         teacher: {soft_targets: top_k, top_k: 5}\n",
    ),
    (
        "dflash",
        "draft: {method: dflash, layers: 2, target_layers: [0, 3], block_size: 4, blocks_per_row: 24, soft_weight: 0.5}\n\
         teacher: {soft_targets: top_k, top_k: 8}\n",
    ),
    (
        "dspark",
        "draft: {method: dspark, layers: 1, target_layers: [0, 2], block_size: 4, blocks_per_row: 16, markov_rank: 6}\n",
    ),
];

/// The changes that all take: online training keeps the positions of the first epoch, too.
const COMMON: [&str; 2] = ["data.anchor.redraw=false", "capture.dtype=f32"];

/// A configuration per method beside the workshop's, which they begin with.
fn configs(shop: &Workshop) -> Vec<String> {
    let write = |(name, keys): &(&str, &str)| {
        let path = shop.path(&format!("{name}.yaml"));
        let output = shop.path(&format!("{name}-run"));
        let text = format!("defaults: [train, _self_]\noutput: {output}\n{keys}");
        std::fs::write(&path, text).expect("configuration");
        path
    };
    METHODS.iter().map(write).collect()
}

/// A capture for all of some configurations.
fn capture<'a>(configs: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    let also = configs[1..].iter().flat_map(|config| ["--also", config]);
    ["capture", &configs[0]].into_iter().chain(also).chain(more.iter().copied()).collect()
}

fn places(shop: &Workshop, store: &str) -> (String, String) {
    let place = shop.path(store);
    (format!("train.features={place}"), place)
}

#[test]
fn one_capture_serves_methods_that_read_different_features() {
    let shop = Workshop::of_four_layers();
    let configs = configs(&shop);
    let (features, place) = places(&shop, "features");
    let common = [&COMMON[..], &[features.as_str(), "--json"]].concat();
    let told = last_json(&succeed(&capture(&configs, &common)));
    assert_eq!(told["finished"], true);
    // A second call has nothing to do, and one of fewer configurations is another capture.
    let before = support::files(&place);
    succeed(&capture(&configs, &common));
    assert_eq!(before, support::files(&place));
    fail_with(&capture(&configs[..2], &common), 1, &["train features was"]);
    for (config, (name, _)) in configs.iter().zip(METHODS) {
        let of = |features: &str, output: &str| {
            let output = format!("output={}", shop.path(output));
            succeed(&[&["train", config, features, &output], &COMMON[..]].concat());
        };
        let [stored, online] = ["stored", "online"].map(|source| format!("{name}-{source}"));
        of(&features, &stored);
        of("train.features=online", &online);
        let [stored, online] = [stored, online].map(|run| shop.path(&run));
        assert_eq!(metrics(&stored), metrics(&online), "{name}");
        assert_eq!(draft_bytes(&stored), draft_bytes(&online), "{name}");
    }
    // Each is judged from it, too.
    for (config, (name, _)) in configs.iter().zip(METHODS) {
        let run = shop.path(&format!("{name}-stored"));
        let judge = |features: &str| {
            let words = ["eval", "held-out", config, "--draft", &run, "--json", features];
            last_json(&succeed(&[&words[..], &COMMON].concat()))
        };
        assert_eq!(judge(&features), judge("train.features=online"), "{name}");
    }
}

#[test]
fn a_shared_store_holds_each_feature_once() {
    let shop = Workshop::of_four_layers();
    let configs = configs(&shop);
    let (features, place) = places(&shop, "features");
    succeed(&capture(&configs, &[&COMMON[..], &[&features]].concat()));
    let shard = format!("{place}/train-00000.safetensors");
    let shard = SafetensorsSource::open_file(shard.as_ref()).expect("shard");
    let width = |name: &str| *shard.shape(&format!("0.{name}")).expect(name).last().expect("rank");
    // Layers 2, 0, 1 and 3 of width 64, and 8 tokens, of which 5 are the first.
    assert_eq!(width("aux_hidden_states"), 4 * 64);
    assert_eq!(width("topk_ids"), 8);
    assert_eq!(width("final_hidden"), 64);
    assert!(shard.shape("0.keys").is_some());
}

#[test]
fn rounded_layers_are_picked_with_their_own_scales() {
    let shop = Workshop::of_four_layers();
    let configs = configs(&shop);
    let (shared, alone) = (places(&shop, "shared").0, places(&shop, "alone").0);
    let common = ["data.anchor.enabled=false", "capture.dtype=int8", "capture.compression=zstd"];
    succeed(&capture(&configs, &[&common[..], &[&shared]].concat()));
    let config = &configs[3];
    succeed(&[&["capture", config, &alone], &common[..]].concat());
    let of = |features: &str, run: &str| {
        let output = format!("output={}", shop.path(run));
        succeed(&[&["train", config, features, &output], &common[..]].concat());
        draft_bytes(&shop.path(run))
    };
    // The store of one draft holds the same codes, scales and most likely tokens.
    assert_eq!(of(&shared, "from-shared"), of(&alone, "from-alone"));
}

#[test]
fn configurations_that_cannot_share_are_refused_with_what_differs() {
    let shop = Workshop::of_four_layers();
    configs(&shop);
    let (features, place) = places(&shop, "features");
    for (keys, code, parts) in [
        (
            "data: {row_tokens: 64}\n",
            1,
            &["training text: ", "first.yaml and ", "other.yaml: "][..],
        ),
        ("train: {seed: 7}\n", 1, &["train.seed: 0 and 7"]),
        ("capture: {dtype: bf16}\n", 1, &["capture.dtype: f32 and bf16"]),
        ("data: {held_out_rows: 1}\n", 1, &["held-out text: "]),
        ("precision: bf16\n", 2, &["`precision` is \"auto\" and \"bf16\"", "other.yaml"]),
        ("capture: {record_layers: [0, 2]}\n", 2, &["`capture.record_layers` is null and [0,2]"]),
        ("train: {features: elsewhere}\n", 2, &["`train.features` is ", "elsewhere"]),
    ] {
        let text = format!("defaults: [dspark, _self_]\n{keys}");
        let other = shop.write("other.yaml", text);
        // What the changes say counts for all files: so the first file says it itself.
        let text = format!(
            "defaults: [glide, _self_]\ncapture: {{dtype: f32}}\ntrain: {{features: {place}}}\n"
        );
        let first = shop.write("first.yaml", text);
        let features = if keys.contains("features") { None } else { Some(features.as_str()) };
        let words = ["capture", &first, "--also", &other, "data.anchor.enabled=false"];
        let dtype = if keys.contains("dtype") { None } else { Some("capture.dtype=f32") };
        let all: Vec<&str> = words.into_iter().chain(features).chain(dtype).collect();
        fail_with(&all, code, parts);
    }
    assert!(!std::path::Path::new(&place).join("index.json").exists());
}

#[test]
fn a_capture_says_once_which_process_it_waits_for() {
    let shop = Workshop::of_four_layers();
    let (config, store) = (shop.config(), shop.path("store"));
    let claim = format!("{store}/claims/train-00000.0");
    std::fs::create_dir_all(format!("{store}/claims")).expect("folder");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970").as_secs();
    let owner = json!({"host": "elsewhere", "pid": 4711, "started": null, "renewed": now});
    std::fs::write(&claim, owner.to_string()).expect("claim");
    let log = shop.path("told");
    let told = || std::fs::read_to_string(&log).unwrap_or_default();
    let mut command = longdraft(&["capture", &config, &format!("train.features={store}")]);
    let file = std::fs::File::create(&log).expect("log");
    let mut child = command.stdout(Stdio::null()).stderr(file).spawn().expect("runs");
    wait_until("a word about the claim", || told().contains("waits for"));
    // It looks again and again, and says no more.
    std::thread::sleep(Duration::from_millis(700));
    std::fs::remove_file(&claim).expect("let go");
    assert!(child.wait().expect("ends").success(), "{}", told());
    let told = told();
    assert_eq!(told.matches("waits for").count(), 1, "{told}");
    require_words(&told, &["shard train-00000", "process 4711 on elsewhere", &claim, "10 minutes"]);
}
