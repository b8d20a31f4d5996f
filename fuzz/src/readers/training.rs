//! Stored features and checkpoints.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_data::Batch;
use longdraft_data::batch::AnchorOffset;
use longdraft_data::sampler::Cursor;
use longdraft_features::records::{RecordFolder, Records};
use longdraft_features::store::{
    Contents, Recipe, Record, StoreDtype, StoreWriter, StoredTeacher, Turn,
};
use longdraft_features::{FeatureNeeds, Part, StoredFeatures, TeacherKind};
use longdraft_models::LayerId;
use longdraft_models::draft::eagle3::Eagle3Draft;
use longdraft_models::draft::{Draft, TokenCounts};
use longdraft_models::target_model::Tap;
use longdraft_models::weights::{pth, safetensors};
use longdraft_parallel::{DataParallel, World};
use longdraft_train::checkpoint::{
    CheckpointState, Checkpointer, Contents as CheckpointContents, LAST, Place, Progress,
    RunIdentity, load,
};
use longdraft_train::method::Method;
use longdraft_train::optim::{AdamW, AdamWConfig};
use serde_json::{Value, json};

use crate::fixtures::{self, TARGET, TOKENIZER, VOCABULARY};
use crate::scratch;

/// Rows at which the teacher is kept.
const TEACHER_ROWS: [u32; 3] = [0, 2, 4];
const INDEX: &str = "index.json";

fn batch() -> Batch {
    Batch { learned: (0..5).collect(), ..Batch::of_document([1, 70, 71, 72, 73, 2]) }
}

fn needs() -> FeatureNeeds {
    let taps = [0, 1, 2].map(|layer| Tap::Hidden(LayerId(layer)));
    let taps = taps.into_iter().chain([Tap::LastKv]).collect();
    FeatureNeeds { taps, teacher: TeacherKind::TopK(4), ahead: 0 }
}

fn recipe(dtype: StoreDtype) -> Recipe {
    let (layers, teacher) = (vec![0, 1, 2], StoredTeacher::TopK(4));
    let contents = Contents { last_kv: true, layers, teacher };
    let mut recipe = Recipe {
        target: "target".to_owned(),
        tokenizer: "tokenizer".to_owned(),
        dtype,
        ..Recipe::of_rows(&contents, 1, 6)
    };
    for part in [&mut recipe.train, &mut recipe.held_out] {
        (part.text, part.teacher_tokens) = ("text".to_owned(), "rows".to_owned());
    }
    recipe
}

fn write_store(folder: &Path, dtype: StoreDtype) {
    let spec = folder.to_string_lossy();
    let store = StoreWriter::open(&spec, recipe(dtype), true).expect("a store");
    store.begin().expect("begun");
    let contents = Contents::of(&needs());
    for shard in store.shards() {
        let Ok(Turn::Mine(mut work)) = store.take(&shard) else { panic!("the shard is free") };
        let record = Record::capture(&TARGET, &batch(), &contents, &TEACHER_ROWS);
        store.add(&mut work, batch(), record.expect("features")).expect("added");
        store.complete(work).expect("written");
    }
    store.finish().expect("written");
}

fn write_exact_store(folder: &Path) {
    write_store(folder, StoreDtype::F32);
}

fn features(folder: &Path) -> bool {
    let (spec, wanted) = (folder.to_string_lossy(), recipe(StoreDtype::F32));
    let Ok(store) = StoredFeatures::open(&spec, &wanted, Arc::clone(&TARGET)) else { return false };
    let _ = store.identity();
    let batch = batch();
    let all = store.features(Part::Train, &batch, &needs(), &TEACHER_ROWS);
    let _ = store.features(Part::Train, &batch, &needs(), &[2]);
    let _ = store.features(Part::HeldOut, &batch, &needs(), &[2]);
    all.is_ok()
}

/// The first shard as the index names it.
fn shard_of(index: &Value) -> String {
    index["train"][0]["object"].as_str().unwrap_or_default().to_owned()
}

fn index_of(folder: &Path) -> Value {
    let text = std::fs::read(folder.join(INDEX)).expect("an index");
    serde_json::from_slice(&text).expect("an index")
}

/// Reads a shard of features; its index says the hash and the size that it has.
pub(super) fn feature_shard(bytes: &[u8]) -> bool {
    let folder = scratch::folder("features", write_exact_store);
    let mut index = index_of(&folder);
    index["train"][0]["blake3"] = blake3::hash(bytes).to_hex().as_str().into();
    index["train"][0]["bytes"] = bytes.len().into();
    std::fs::write(folder.join(INDEX), index.to_string()).expect("written");
    std::fs::write(folder.join(shard_of(&index)), bytes).expect("written");
    features(&folder)
}

pub(super) fn feature_shards() -> Vec<Vec<u8>> {
    let shard = |dtype| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        write_store(folder.path(), dtype);
        std::fs::read(folder.path().join(shard_of(&index_of(folder.path())))).expect("a shard")
    };
    vec![shard(StoreDtype::F32), shard(StoreDtype::Bf16), shard(StoreDtype::Int8)]
}

/// Reads the index of stored features.
pub(super) fn feature_index(bytes: &[u8]) -> bool {
    features(&scratch::folder_with("features-index", write_exact_store, INDEX, bytes))
}

pub(super) fn feature_indices() -> Vec<Vec<u8>> {
    vec![scratch::made(INDEX, write_exact_store)]
}

/// Reads a record of features that another trainer wrote.
pub(super) fn feature_record(bytes: &[u8]) -> bool {
    records(&scratch::folder_with("records", |_| {}, "data_0.ckpt", bytes))
}

/// Reads a record of features that an engine wrote.
pub(super) fn engine_record(bytes: &[u8]) -> bool {
    records(&scratch::folder_with("engine-records", |_| {}, "hs_0.safetensors", bytes))
}

/// Reads the description of a cache of features.
pub(super) fn cache_manifest(bytes: &[u8]) -> bool {
    records(&scratch::folder_with("cache", write_cache, CACHE_MANIFEST, bytes))
}

/// Reads the index of a cache of features.
pub(super) fn cache_index(bytes: &[u8]) -> bool {
    records(&scratch::folder_with("cache-index", write_cache, CACHE_INDEX, bytes))
}

/// Reads tokens and states of the first document of a folder.
fn records(folder: &Path) -> bool {
    let Ok(found) = RecordFolder::open(folder) else { return false };
    if found.is_empty() {
        return false;
    }
    let Ok(document) = found.document(0) else { return false };
    let Ok(records) = Records::open(folder, None) else { return false };
    let tokens = document.ids.len();
    let batch = Batch {
        position_ids: (0..tokens as u32).collect(),
        document_ids: vec![0; tokens],
        ids: document.ids,
        ..Batch::default()
    };
    let contents = Contents { last_kv: false, ..Contents::of(&needs()) };
    let positions = AnchorOffset { enabled: false, ..AnchorOffset::default() };
    records.check(TARGET.config(), &contents, positions).is_ok()
        && records.record(&TARGET, &batch, &contents, &[0]).is_ok()
}

const CACHE_MANIFEST: &str = "manifest.json";
const CACHE_INDEX: &str = "samples.idx";

/// A cache of one document of three tokens.
fn write_cache(folder: &Path) {
    let hidden = TARGET.config().hidden_size;
    let manifest = json!({
        "version": 2, "num_samples": 1, "num_shards": 1, "target_layer_ids": [0, 1, 2],
        "hidden_size": hidden, "hidden_dtype": "bfloat16", "token_dtype": "int32",
        "mask_dtype": "uint8", "index_record_size": 56,
        "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
    });
    let mut shard: Vec<u8> = [1_i32, 70, 71].iter().flat_map(|id| id.to_le_bytes()).collect();
    shard.extend([1, 1, 1, 0, 1, 1]);
    let layers = shard.len();
    shard.resize(layers + 4 * 3 * hidden * 2, 0x3f);
    let mut index = 0_u64.to_le_bytes().to_vec();
    index.extend([0_u32, 3].iter().flat_map(|number| number.to_le_bytes()));
    let offsets = [0, 12, 15, layers, layers + 3 * 3 * hidden * 2];
    index.extend(offsets.iter().flat_map(|offset| (*offset as u64).to_le_bytes()));
    for (name, bytes) in [
        (CACHE_MANIFEST, manifest.to_string().into_bytes()),
        (CACHE_INDEX, index),
        ("shard-00000.bin", shard),
    ] {
        std::fs::write(folder.join(name), bytes).expect("written");
    }
}

pub(super) fn cache_manifests() -> Vec<Vec<u8>> {
    vec![scratch::made(CACHE_MANIFEST, write_cache)]
}

pub(super) fn cache_indices() -> Vec<Vec<u8>> {
    vec![scratch::made(CACHE_INDEX, write_cache)]
}

pub(super) fn engine_records() -> Vec<Vec<u8>> {
    let hidden = TARGET.config().hidden_size;
    let states = |dtype| {
        let states = Tensor::ones((3, 4, hidden), DType::F32, &Device::Cpu).expect("a tensor");
        states.to_dtype(dtype).expect("a type")
    };
    let record = |dtype| {
        let ids = Tensor::new(&[1_i64, 70, 71], &Device::Cpu).expect("a tensor");
        let tensors = [("token_ids".to_owned(), ids), ("hidden_states".to_owned(), states(dtype))];
        scratch::written("a.safetensors", |path| {
            safetensors::save(path, &tensors, HashMap::new()).expect("written");
        })
    };
    vec![record(DType::F32), record(DType::BF16), record(DType::F16)]
}

pub(super) fn feature_records() -> Vec<Vec<u8>> {
    let ids = |ids: &[i64]| Tensor::new(ids, &Device::Cpu).expect("a tensor");
    let hidden = TARGET.config().hidden_size;
    let states = |width| Tensor::ones((1, 3, width), DType::F32, &Device::Cpu).expect("a tensor");
    let tensors = [
        ("input_ids", ids(&[1, 70, 71])),
        ("loss_mask", ids(&[0, 1, 1])),
        ("aux_hidden_state", states(3 * hidden)),
        ("hidden_state", states(hidden)),
    ];
    let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor));
    vec![scratch::written("a.ckpt", |path| pth::save(path, &tensors).expect("written"))]
}

const STATE: &str = "state.json";
const MANIFEST: &str = "manifest.json";
const OPTIMIZER: &str = "optimizer.safetensors";

fn write_checkpoint(folder: &Path) {
    let draft = fixtures::eagle3();
    let (parallel, optimizer) = optimizer(&draft);
    let state = CheckpointState {
        progress: Progress {
            step: 3,
            learned_rows: 10,
            tokens: 20,
            seconds: 1.5,
            ..Progress::default()
        },
        cursor: Cursor { epoch: 1, position: 2 },
        first_steps: None,
        max_minutes: None,
        metrics_bytes: 100,
        identity: RunIdentity { values: vec![("data".into(), "x".into())] },
        method: Method::first().name().to_owned(),
        draft: draft.config_json(),
        target_fingerprint: TARGET.fingerprint().to_owned(),
    };
    let contents = CheckpointContents {
        state: &state,
        draft: &draft,
        optimizer: &optimizer,
        parallel: &parallel,
        tokenizer: &TOKENIZER,
        token_counts: &TokenCounts::new(VOCABULARY),
    };
    let checkpointer = Checkpointer::new(folder, &World::single());
    checkpointer.put(Place::Last, |folder| contents.write(folder)).expect("written");
}

fn optimizer(draft: &Eagle3Draft) -> (DataParallel, AdamW) {
    let parallel = DataParallel::single(draft.parameters());
    let optimizer = AdamW::over(AdamWConfig::default(), &parallel);
    (parallel, optimizer)
}

/// Goes on from a checkpoint.
fn resume(folder: &Path) -> bool {
    let checkpoint = Checkpointer::new(folder, &World::single()).newest(load);
    let Ok(Some((loaded, _))) = checkpoint else { return false };
    let draft = fixtures::eagle3();
    let (parallel, mut optimizer) = optimizer(&draft);
    loaded.restore(&mut optimizer, &parallel, draft.parameters()).is_ok()
}

/// A checkpoint with `bytes` as one of its files, of which the manifest knows.
fn checkpoint(name: &str, changed: &str, bytes: &[u8]) -> bool {
    let folder = scratch::folder(name, write_checkpoint);
    let place = folder.join(LAST);
    std::fs::write(place.join(changed), bytes).expect("written");
    let text = std::fs::read(place.join(MANIFEST)).expect("a manifest");
    let mut manifest: Value = serde_json::from_slice(&text).expect("a manifest");
    manifest["files"][changed] =
        json!({"bytes": bytes.len(), "blake3": blake3::hash(bytes).to_hex().as_str()});
    std::fs::write(place.join(MANIFEST), manifest.to_string()).expect("written");
    resume(&folder)
}

fn checkpoint_file(name: &str) -> Vec<Vec<u8>> {
    vec![scratch::made(&format!("{LAST}/{name}"), write_checkpoint)]
}

/// Reads a checkpoint's small state.
pub(super) fn checkpoint_state(bytes: &[u8]) -> bool {
    checkpoint("state", STATE, bytes)
}

pub(super) fn checkpoint_states() -> Vec<Vec<u8>> {
    checkpoint_file(STATE)
}

/// Reads a checkpoint's manifest.
pub(super) fn checkpoint_manifest(bytes: &[u8]) -> bool {
    let folder = scratch::folder("manifest", write_checkpoint);
    std::fs::write(folder.join(LAST).join(MANIFEST), bytes).expect("written");
    resume(&folder)
}

pub(super) fn checkpoint_manifests() -> Vec<Vec<u8>> {
    checkpoint_file(MANIFEST)
}

/// Reads the optimizer's state of a checkpoint.
pub(super) fn checkpoint_optimizer(bytes: &[u8]) -> bool {
    checkpoint("optimizer", OPTIMIZER, bytes)
}

pub(super) fn checkpoint_optimizers() -> Vec<Vec<u8>> {
    checkpoint_file(OPTIMIZER)
}

/// Reads token counts.
pub(super) fn token_counts(bytes: &[u8]) -> bool {
    let mut counts = TokenCounts::new(VOCABULARY);
    std::str::from_utf8(bytes).is_ok_and(|text| counts.add_text(text).is_ok())
}

pub(super) fn token_count_files() -> Vec<Vec<u8>> {
    vec![b"1 20\n70 3\n271 1\n".to_vec()]
}
