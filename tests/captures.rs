//! What other engines captured: the same losses as our own capture of the same tokens, and hostile files.

use std::path::{Path, PathBuf};

use crate::support::files::{read_rows, repository};
use crate::support::runs::metrics;
use crate::support::{Workshop, fail, fail_with, last_json, succeed};
use candle_core::{DType, Device, Tensor};
use longdraft_models::LayerId;
use longdraft_models::target_model::{PackedSequence, Tap, Taps, Target, TargetOptions};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::pth;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};
use serde_json::{Value, json};

/// Layers of the workshop's target.
const LAYERS: usize = 4;

/// Width of its states.
const HIDDEN: usize = 64;

/// Longer than half a row, so that every row is a document.
const ROW_TOKENS: &str = "data.row_tokens=80";

/// A document and what the target computed of it.
struct Captured {
    ids: Vec<i64>,
    mask: Vec<i64>,
    /// Outputs of all layers, `[T, 4, H]`.
    layers: Tensor,
    /// After the final norm, `[T, H]`.
    last: Tensor,
}

impl Captured {
    /// The target's pass over document `index`.
    fn of(target: &Target, index: i64) -> Self {
        let length = 45 + index * 7 % 30;
        let ids: Vec<i64> = (0..length).map(|t| 1 + (t * t + 31 * index) % 200).collect();
        let mask = (0..length).map(|t| i64::from(t >= length / 2)).collect();
        let sequence = PackedSequence {
            position_ids: (0..ids.len() as u32).collect(),
            document_ids: vec![0; ids.len()],
            ids: ids.iter().map(|id| *id as u32).collect(),
        };
        let mut taps: Vec<Tap> = (0..LAYERS).map(|layer| Tap::Hidden(LayerId(layer))).collect();
        taps.push(Tap::FinalHidden);
        let features = target.forward(&sequence, &Taps::of(&taps)).expect("features");
        let all: Vec<LayerId> = (0..LAYERS).map(LayerId).collect();
        let layers = features.hidden_of(&all).expect("layers");
        let layers = layers.reshape((ids.len(), LAYERS, HIDDEN)).expect("layers");
        Self { ids, mask, layers, last: features.final_hidden().expect("final").clone() }
    }

    /// Of some layers, `[T, A, H]`.
    fn layers(&self, chosen: &[usize]) -> Tensor {
        let ids: Vec<u32> = chosen.iter().map(|id| *id as u32).collect();
        let ids = Tensor::new(ids, &Device::Cpu).expect("ids");
        self.layers.index_select(&ids, 1).expect("layers")
    }
}

fn captures(shop: &Workshop) -> Vec<Captured> {
    let target = Target::open(&shop.target(), &TargetOptions::default()).expect("target");
    (0..24).map(|index| Captured::of(&target, index)).collect()
}

fn integers(values: &[i64]) -> Tensor {
    Tensor::from_slice(values, values.len(), &Device::Cpu).expect("integers")
}

/// What vLLM would write, and the masks as rows.
fn write_engine(folder: &Path, documents: &[Captured], layers: &[usize]) {
    std::fs::create_dir_all(folder).expect("folder");
    for (index, document) in documents.iter().enumerate() {
        let tensors = [
            ("token_ids".to_owned(), integers(&document.ids)),
            ("hidden_states".to_owned(), document.layers(layers)),
        ];
        let path = folder.join(format!("hs_{index}.safetensors"));
        save(&path, &tensors, std::collections::HashMap::new()).expect("record");
    }
}

fn write_masks(path: &Path, documents: &[Captured]) {
    let row = |document: &Captured| {
        json!({"input_ids": document.ids, "loss_mask": document.mask}).to_string()
    };
    let rows: Vec<String> = documents.iter().map(row).collect();
    std::fs::write(path, rows.join("\n")).expect("masks");
}

/// What SpecForge would write, under its names for a method.
fn write_saved(folder: &Path, documents: &[Captured], layers: &[usize], names: [&str; 2]) {
    std::fs::create_dir_all(folder).expect("folder");
    for (index, document) in documents.iter().enumerate() {
        let states = document.layers(layers).flatten_from(1).and_then(|all| all.unsqueeze(0));
        let tensors = [
            ("input_ids", integers(&document.ids)),
            ("loss_mask", integers(&document.mask)),
            (names[0], states.expect("states")),
            (names[1], document.last.unsqueeze(0).expect("states")),
        ];
        let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor));
        pth::save(&folder.join(format!("data_{index}.ckpt")), &tensors).expect("record");
    }
}

fn manifest(samples: usize, layers: &[usize]) -> Value {
    json!({
        "version": 2, "num_samples": samples, "num_shards": 2, "target_layer_ids": layers,
        "hidden_size": HIDDEN, "hidden_dtype": "float32", "token_dtype": "int32",
        "mask_dtype": "uint8", "index_record_size": 56, "target_model_name_or_path": "a/b",
        "shards": [{"shard_id": 0, "file_name": "shard-0.bin"},
                   {"shard_id": 1, "file_name": "shard-1.bin"}],
    })
}

/// What DeepSpec would write, with padding and numbers that are not rounded.
fn write_cache(folder: &Path, documents: &[Captured], layers: &[usize]) {
    std::fs::create_dir_all(folder).expect("folder");
    let (mut shards, mut index) = ([Vec::new(), Vec::new()], Vec::new());
    for (id, document) in documents.iter().enumerate() {
        let (tokens, padded) = (document.ids.len(), document.ids.len() + 3);
        let shard = &mut shards[id % 2];
        index.extend((id as u64).to_le_bytes());
        index.extend([id as u32 % 2, padded as u32].iter().flat_map(|n| n.to_le_bytes()));
        let padding = vec![0; 3];
        let ids = document.ids.iter().chain(&padding).flat_map(|id| (*id as i32).to_le_bytes());
        let attended: Vec<u8> = (0..padded).map(|t| u8::from(t < tokens)).collect();
        let learned: Vec<u8> = document.mask.iter().chain(&padding).map(|m| *m as u8).collect();
        let floats = |states: Tensor| -> Vec<u8> {
            let states = states.pad_with_zeros(0, 0, 3).and_then(|all| all.flatten_all());
            let states = states.and_then(|all| all.to_vec1::<f32>()).expect("states");
            states.iter().flat_map(|value| value.to_le_bytes()).collect()
        };
        for bytes in [
            ids.collect(),
            attended,
            learned,
            floats(document.layers(layers)),
            floats(document.last.clone()),
        ] {
            index.extend((shard.len() as u64).to_le_bytes());
            shard.extend(bytes);
        }
    }
    std::fs::write(folder.join("samples.idx"), index).expect("index");
    for (id, shard) in shards.iter().enumerate() {
        std::fs::write(folder.join(format!("shard-{id}.bin")), shard).expect("shard");
    }
    let manifest = manifest(documents.len(), layers).to_string();
    std::fs::write(folder.join("manifest.json"), manifest).expect("manifest");
}

fn arguments(rows: &str, features: &str, options: &[&str]) -> Vec<String> {
    let own = [
        format!("data.train=[{{path: {rows}, template: {{kind: tokens}}}}]"),
        format!("train.features={features}"),
        ROW_TOKENS.to_owned(),
        "capture.dtype=f32".to_owned(),
        "data.anchor.enabled=false".to_owned(),
        "train.epochs=1".to_owned(),
        "train.evaluate_every=4".to_owned(),
    ];
    own.into_iter().chain(options.iter().map(|option| (*option).to_owned())).collect()
}

fn call(first: &[&str], arguments: &[String]) -> Value {
    let all = first.iter().copied().chain(arguments.iter().map(String::as_str));
    last_json(&succeed(&all.chain(["--json"]).collect::<Vec<_>>()))
}

/// Trains on features and tells what every step measured.
fn trained(
    shop: &Workshop,
    name: &str,
    (rows, features): (&str, &str),
    options: &[&str],
) -> Vec<Value> {
    let output = format!("output={}", shop.path(name));
    let options = [options, &[output.as_str()]].concat();
    let ended = call(&["train", &shop.config()], &arguments(rows, features, &options));
    assert_eq!(ended["finished"], true);
    metrics(&shop.path(name))
}

const EAGLE3: [&str; 3] =
    ["draft.method=eagle3", "draft.target_layers=[0,1,2]", "draft.ttt_steps=2"];

/// A block draft's options.
fn of_blocks<'a>(method: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let common = [
        "draft.layers=1",
        "draft.target_layers=[0,2]",
        "draft.block_size=4",
        "draft.blocks_per_row=8",
    ];
    [&[method], &common[..], more].concat()
}

/// Losses first: they say most in fewest words.
#[track_caller]
fn assert_alike(found: &[Value], wanted: &[Value], what: &str) {
    let losses = |records: &[Value]| -> Vec<Value> {
        records.iter().map(|record| json!([record["loss"], record["held_out"]["loss"]])).collect()
    };
    assert_eq!(losses(found), losses(wanted), "{what}");
    assert!(found == wanted, "{what}");
}

/// Our own store of the documents, and every engine's records of the same: all train alike, from the records and
/// from the store that they become.
fn trains_alike(method: &str, layers: &[usize], options: &[&str], names: [&str; 2]) {
    let shop = Workshop::of_four_layers();
    let (config, documents) = (shop.config(), captures(&shop));
    let (rows, own) = (shop.path("rows.jsonl"), shop.path("own"));
    write_masks(Path::new(&rows), &documents);
    call(&["capture", &config], &arguments(&rows, &own, options));
    let wanted = trained(&shop, "of-own", (&rows, &own), options);
    assert!(wanted.iter().filter(|record| record["loss"].is_number()).count() > 2);

    let with_last = [layers, &[LAYERS - 1]].concat();
    let place = |name: &str| PathBuf::from(shop.path(name));
    write_engine(&place("engine"), &documents, &with_last);
    write_engine(&place("engine-all"), &documents, &[3, 1, 0, 2]);
    write_saved(&place("saved"), &documents, layers, names);
    write_cache(&place("cache"), &documents, layers);
    let all = "capture.record_layers=[3,1,0,2]";
    for (kind, told) in
        [("engine", &[][..]), ("engine-all", &[all]), ("saved", &[]), ("cache", &[])]
    {
        let records = shop.path(kind);
        let options = [options, told].concat();
        let of_kind = shop.path(&format!("{kind}.jsonl"));
        let mut command = vec!["data", "records", &records, "--output", &of_kind];
        if kind.starts_with("engine") {
            command.extend(["--masks", &rows]);
        }
        let told = call(&command, &[]);
        let tokens: usize = documents.iter().map(|document| document.ids.len()).sum();
        assert_eq!((&told["records"], &told["tokens"]), (&json!(24), &json!(tokens)));
        let direct = trained(&shop, &format!("of-{kind}"), (&of_kind, &records), &options);
        assert_alike(&direct, &wanted, &format!("{method} of {kind}"));

        let store = shop.path(&format!("{kind}-store"));
        let capture = [&command[..], &["--capture", &config]].concat();
        let more = arguments(&of_kind, &store, &options);
        assert_eq!(call(&capture, &more)["finished"], true);
        let stored = trained(&shop, &format!("stored-{kind}"), (&of_kind, &store), &options);
        assert_alike(&stored, &wanted, &format!("{method} of the store of {kind}"));
    }
}

#[test]
fn eagle3_trains_alike_on_every_engines_captures() {
    trains_alike("eagle3", &[0, 1, 2], &EAGLE3, ["aux_hidden_state", "hidden_state"]);
}

#[test]
fn block_drafts_train_alike_on_every_engines_captures() {
    let names = ["hidden_states", "target_last_hidden_states"];
    let dflash = of_blocks("draft.method=dflash", &["draft.soft_weight=0.5"]);
    trains_alike("dflash", &[0, 2], &dflash, names);
    let dspark = of_blocks("draft.method=dspark", &[]);
    trains_alike("dspark", &[0, 2], &dspark, names);
}

/// Labels alone are learned: records without final states are enough.
#[test]
fn final_states_may_be_missing_where_no_teacher_is_read() {
    let shop = Workshop::of_four_layers();
    let documents = captures(&shop);
    let (rows, records) = (shop.path("rows.jsonl"), shop.path("records"));
    write_masks(Path::new(&rows), &documents);
    write_engine(Path::new(&records), &documents, &[0, 2]);
    let error = |options: &[&str]| {
        let output = format!("output={}", shop.path("refused"));
        let options = [options, &[output.as_str()]].concat();
        let (config, arguments) = (shop.config(), arguments(&rows, &records, &options));
        let all = ["train", config.as_str()].into_iter();
        fail(&all.chain(arguments.iter().map(String::as_str)).collect::<Vec<_>>(), 1)
    };
    let told = error(&of_blocks("draft.method=dflash", &["draft.soft_weight=0.5"]));
    assert!(told.contains("no final states") && told.contains("hs_"), "{told}");
    let told = error(&of_blocks("draft.method=dflash", &["capture.record_layers=[0,1]"]));
    assert!(told.contains("not 2") && told.contains("[0, 1]"), "{told}");
    let told = error(&of_blocks("draft.method=dflash", &["capture.record_layers=[1,4]"]));
    assert!(told.contains("layer 4 of a target of 4"), "{told}");
}

#[test]
fn held_out_text_without_records_is_refused_before_a_step() {
    let shop = Workshop::of_four_layers();
    let documents = captures(&shop);
    let (rows, records) = (shop.path("rows.jsonl"), shop.path("records"));
    let (config, other) = (shop.config(), shop.path("other.jsonl"));
    let (held, missing) = documents.split_at(23);
    write_masks(Path::new(&rows), held);
    write_masks(Path::new(&other), missing);
    write_engine(Path::new(&records), held, &[0, 1, 2, 3]);
    let held_out = format!("data.held_out=[{{path: {other}, template: {{kind: tokens}}}}]");
    let options = [&EAGLE3[..], &[held_out.as_str()]].concat();
    let arguments = arguments(&rows, &records, &options);
    let all = ["train", config.as_str()].into_iter();
    let told = fail(&all.chain(arguments.iter().map(String::as_str)).collect::<Vec<_>>(), 1);
    assert!(told.contains("no record has the") && told.contains("other.jsonl"), "{told}");
    assert!(!Path::new(&shop.path("run/metrics.jsonl")).exists());
}

/// The record that speculators itself read: tests/fixtures/records/README.md.
#[test]
fn records_of_speculators_are_read_with_the_masks_beside_them() {
    let shop = Workshop::of_four_layers();
    let records = repository("tests/fixtures/records/speculators/hidden_states");
    let records = records.display().to_string();
    let (rows, store) = (shop.path("rows.jsonl"), shop.path("store"));
    let held_out = format!("data.held_out=[{{path: {rows}, template: {{kind: tokens}}}}]");
    let options = [&EAGLE3[..], &[held_out.as_str()]].concat();
    let command = ["data", "records", &records, "--output", &rows, "--capture", &shop.config()];
    call(&command, &arguments(&rows, &store, &options));
    let found = read_rows(&rows);
    assert_eq!(found[0]["input_ids"], json!([5, 60, 7, 0, 9]));
    assert_eq!(found[0]["loss_mask"], json!([0, 0, 1, 1, 1]));
    assert_eq!(found[1]["input_ids"], json!([8, 200, 11]));
    assert_eq!(found[1]["loss_mask"], json!([0, 1, 1]));
    let shard = Path::new(&store).join("train-00000.safetensors");
    let source = SafetensorsSource::open_file(&shard).expect("a shard");
    let ids = source.load_integers("0.input_ids").expect("ids");
    let states = source.load("0.aux_hidden_states", DType::F32).expect("states");
    let states: Vec<Vec<f32>> = states.to_vec2().expect("states");
    for (id, wanted) in [
        (60, [-0.039_306_64, -0.255_859_38, -0.128_906_25, -0.244_140_63]),
        (200, [-0.769_531_25, 1.296_875, 0.239_257_81, 0.431_640_63]),
    ] {
        let at = ids.iter().position(|other| *other == id).expect("the token");
        let found = [0, 63, 64, 191].map(|place: usize| states[at][place].to_bits());
        assert_eq!(found, wanted.map(f32::to_bits), "token {id}");
    }
}

/// Ways to spoil a file, and what is said of it.
type Spoilt<'a> = (&'a str, Vec<u8>, &'a str);

#[test]
fn hostile_records_of_engines_are_refused_by_name() {
    let shop = Workshop::of_four_layers();
    let documents = captures(&shop);
    let (rows, records) = (shop.path("rows.jsonl"), shop.path("records"));
    write_masks(Path::new(&rows), &documents);
    write_engine(Path::new(&records), &documents, &[0, 1, 2, 3]);
    let path = Path::new(&records).join("hs_3.safetensors");
    let whole = std::fs::read(&path).expect("record");
    let record = |ids: &[i64], states: Tensor| {
        let tensors =
            [("token_ids".to_owned(), integers(ids)), ("hidden_states".to_owned(), states)];
        save(&path, &tensors, std::collections::HashMap::new()).expect("record");
        std::fs::read(&path).expect("record")
    };
    let own = &documents[3];
    let nan = Tensor::full(f32::NAN, (own.ids.len(), 4, HIDDEN), &Device::Cpu).expect("states");
    let ids = |id: i64| [&own.ids[1..], &[id]].concat();
    let numbers = integers(&own.ids).reshape((own.ids.len(), 1, 1)).expect("numbers");
    let mut long = whole.clone();
    long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let pickle = b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.".to_vec();
    let spoilt: [Spoilt<'_>; 9] = [
        ("half", whole[..whole.len() / 2].to_vec(), "bytes of tensors are there"),
        ("header", long, "a header of 18446744073709551615 bytes"),
        ("pickle", pickle, "not safetensors"),
        ("flat", record(&own.ids, own.last.clone()), "[T, layers, H] is needed"),
        ("short", record(&own.ids[1..], own.layers.clone()), "`hidden_states`"),
        ("integers", record(&own.ids, numbers), "`hidden_states` is of type I64"),
        ("below", record(&ids(-1), own.layers.clone()), "token id -1"),
        ("beyond", record(&ids(258), own.layers.clone()), "token id 258 is beyond"),
        (
            "NaN",
            record(&own.ids, nan),
            "`hidden_states`, its layer 0, holds values that are not finite",
        ),
    ];
    for (name, bytes, wanted) in spoilt {
        std::fs::write(&path, bytes).expect("record");
        let output = format!("output={}", shop.path(name));
        let options = [&EAGLE3[..], &[output.as_str()]].concat();
        let (config, arguments) = (shop.config(), arguments(&rows, &records, &options));
        let all = ["train", config.as_str()].into_iter();
        let all: Vec<&str> = all.chain(arguments.iter().map(String::as_str)).collect();
        fail_with(&all, 1, &["hs_3.safetensors", wanted]);
    }
    std::fs::write(&path, &whole).expect("record");
    let told = fail(&["data", "records", &records, "--output", &shop.path("no.jsonl")], 1);
    assert!(told.contains("--masks") && told.contains("--learn-all"), "{told}");
    assert!(!Path::new(&shop.path("no.jsonl")).exists());
    let all = ["data", "records", &records, "--output", &shop.path("all.jsonl"), "--learn-all"];
    let told = call(&all, &[]);
    assert_eq!(told["learned"], told["tokens"]);
    // Records of other lengths do not become other engines' by a name.
    std::fs::write(Path::new(&records).join("x.ckpt"), b"").expect("file");
    fail_with(&all, 1, &["two kinds"]);
}

#[test]
fn hostile_caches_are_refused_by_name() {
    let shop = Workshop::of_four_layers();
    let documents = captures(&shop);
    let (rows, cache) = (shop.path("rows.jsonl"), shop.path("cache"));
    write_masks(Path::new(&rows), &documents);
    write_cache(Path::new(&cache), &documents, &[0, 1, 2]);
    let bytes = |name: &str| std::fs::read(Path::new(&cache).join(name)).expect("file");
    let changed = |key: &str, value: Value| {
        let mut manifest = manifest(documents.len(), &[0, 1, 2]);
        manifest[key] = value;
        manifest.to_string().into_bytes()
    };
    let patched = |name: &str, at: usize, value: &[u8]| {
        let mut all = bytes(name);
        all[at..at + value.len()].copy_from_slice(value);
        all
    };
    let (index, shard) = (bytes("samples.idx"), bytes("shard-0.bin"));
    let tokens = documents[0].ids.len() + 3;
    let away = json!([{"shard_id": 0, "file_name": "../cache/shard-0.bin"},
                      {"shard_id": 1, "file_name": "shard-1.bin"}]);
    let twice = json!([{"shard_id": 1, "file_name": "shard-0.bin"},
                       {"shard_id": 0, "file_name": "shard-1.bin"}]);
    let spoilt: Vec<(&str, Vec<u8>, &str)> = vec![
        ("manifest.json", changed("version", json!(3)), "version 2 is read"),
        ("manifest.json", b"{".to_vec(), "no JSON"),
        ("manifest.json", changed("shards", away), "no file of this folder"),
        ("manifest.json", changed("shards", twice), "out of order"),
        ("manifest.json", changed("num_shards", json!(3)), "`num_shards` 3"),
        ("manifest.json", changed("num_samples", json!(u64::MAX)), "samples take 56 each"),
        ("manifest.json", changed("token_dtype", json!("int64")), "`token_dtype`"),
        ("manifest.json", changed("hidden_dtype", json!("object")), "expected one of `bfloat16`"),
        ("manifest.json", changed("index_record_size", json!(64)), "`index_record_size` 64"),
        ("manifest.json", changed("target_layer_ids", json!([2, 1, 0])), "do not ascend"),
        ("manifest.json", changed("target_layer_ids", json!([0, 1, 3])), "not 2"),
        (
            "manifest.json",
            changed("target_layer_ids", json!([0, 1, 9])),
            "layer 9 of a target of 4",
        ),
        ("manifest.json", changed("hidden_size", json!(32)), "states of width 32"),
        ("manifest.json", changed("hidden_size", json!(u64::MAX)), "sample 0"),
        ("samples.idx", index[..index.len() - 8].to_vec(), "samples take 56 each"),
        ("samples.idx", patched("samples.idx", 16, &u64::MAX.to_le_bytes()), "`input_ids`"),
        ("samples.idx", patched("samples.idx", 8, &7_u32.to_le_bytes()), "in shard 7"),
        ("samples.idx", patched("samples.idx", 12, &0_u32.to_le_bytes()), "of 0 tokens"),
        ("shard-0.bin", shard[..shard.len() / 2].to_vec(), "cut off"),
        ("shard-0.bin", patched("shard-0.bin", 0, &(-5_i32).to_le_bytes()), "token id -5"),
        ("shard-0.bin", patched("shard-0.bin", 0, &900_i32.to_le_bytes()), "token id 900"),
        ("shard-0.bin", patched("shard-0.bin", tokens * 4, &[0]), "`attention_mask`"),
        ("shard-0.bin", patched("shard-0.bin", tokens * 5, &[2]), "`loss_mask` is 2"),
        (
            "shard-0.bin",
            patched("shard-0.bin", tokens * 6, &f32::NAN.to_le_bytes()),
            "`target_hidden_states`, its layer 0, holds values that are not finite",
        ),
    ];
    for (case, (name, bytes, wanted)) in spoilt.into_iter().enumerate() {
        let path = Path::new(&cache).join(name);
        let whole = std::fs::read(&path).expect("file");
        std::fs::write(&path, bytes).expect("file");
        let output = format!("output={}", shop.path(&format!("run-{case}")));
        let options = [&EAGLE3[..], &[output.as_str()]].concat();
        let (config, arguments) = (shop.config(), arguments(&rows, &cache, &options));
        let all = ["train", config.as_str()].into_iter();
        let all: Vec<&str> = all.chain(arguments.iter().map(String::as_str)).collect();
        let out = crate::support::run(&all);
        let told = crate::support::stderr(&out);
        assert!(!out.status.success() && told.contains(wanted), "{name} ({wanted}): {told}");
        assert!(told.contains("cache"), "{name}: {told}");
        std::fs::write(&path, whole).expect("file");
    }
}
