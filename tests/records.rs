//! Feature records of the public EAGLE-3 trainer, read in place of the target's passes.

use std::path::{Path, PathBuf};

use crate::support::{Workshop, fail, fail_with, last_json, succeed};
use candle_core::{DType, Device, Tensor};
use longdraft_models::LayerId;
use longdraft_models::target_model::{PackedSequence, Tap, Taps, Target, TargetOptions};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::pth;
use longdraft_models::weights::safetensors::SafetensorsSource;

const LAYERS: [usize; 3] = [0, 1, 2];

/// Tokens that stand for padding after a document.
const PADDING: usize = 5;

/// Tokens of document `index` and its mask, of which the second half is learned.
fn document(index: u32) -> (Vec<u32>, Vec<i64>) {
    let length = 20 + index * 7 % 60;
    let ids = (0..length).map(|t| 1 + (t * t + 31 * index) % 200).collect();
    (ids, (0..length).map(|t| i64::from(t >= length / 2)).collect())
}

/// Writes what the public trainer would: a file a document, padded.
fn write_records(shop: &Workshop, dtype: DType) -> PathBuf {
    let target = Target::open(&shop.target(), &TargetOptions::default()).expect("target");
    let folder = shop.folder.path().join("hidden_states");
    let mut taps = LAYERS.map(|layer| Tap::Hidden(LayerId(layer))).to_vec();
    taps.push(Tap::FinalHidden);
    for index in 0..24 {
        let (ids, mut mask) = document(index);
        let sequence = PackedSequence {
            position_ids: (0..ids.len() as u32).collect(),
            document_ids: vec![0; ids.len()],
            ids: ids.clone(),
        };
        let features = target.forward(&sequence, &Taps::of(&taps)).expect("features");
        let aux = features.hidden_of(&LAYERS.map(LayerId)).expect("layers");
        let padded = |states: &Tensor| {
            let states = states.pad_with_zeros(0, 0, PADDING)?.unsqueeze(0)?;
            states.to_dtype(dtype)
        };
        let integers =
            |values: Vec<i64>| Tensor::from_vec(values, ids.len() + PADDING, &Device::Cpu);
        mask.extend([0; PADDING]);
        let all_ids = ids.iter().map(|id| i64::from(*id)).chain([0; PADDING]).collect();
        let tensors = [
            ("input_ids", integers(all_ids)),
            ("loss_mask", integers(mask)),
            ("aux_hidden_state", padded(&aux)),
            ("hidden_state", padded(features.final_hidden().expect("final"))),
        ];
        let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor.expect(name)));
        let path = folder.join(format!("rows_{}", index / 10 * 10));
        std::fs::create_dir_all(&path).expect("folder");
        pth::save(&path.join(format!("data_{index}.ckpt")), &tensors).expect("record");
    }
    folder
}

/// Writes a record of document 3 whose states are all the same.
fn write_constant(path: &Path, (rows, width): (usize, usize), value: f32) {
    let states = |width, value| Tensor::full(value, (1, rows, width), &Device::Cpu);
    let ids: Vec<i64> = document(3).0.iter().map(|id| i64::from(*id)).collect();
    let count = ids.len();
    let integers = |values: Vec<i64>| Tensor::from_vec(values, (1, count), &Device::Cpu);
    let tensors = [
        ("input_ids", integers(ids)),
        ("loss_mask", integers(vec![1; count])),
        ("aux_hidden_state", states(width, value)),
        ("hidden_state", states(64, 0.5)),
    ];
    let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor.expect(name)));
    pth::save(path, &tensors).expect("record");
}

/// The configuration for the rows of the records.
fn arguments(shop: &Workshop, store: &str) -> Vec<String> {
    [
        format!(
            "data.train=[{{path: {}, template: {{kind: tokens}}}}]",
            shop.path("records.jsonl")
        ),
        format!("train.features={}", shop.path(store)),
        "draft.method=eagle3".to_owned(),
        "draft.target_layers=[0,1,2]".to_owned(),
        "draft.ttt_steps=3".to_owned(),
        "data.anchor.enabled=false".to_owned(),
    ]
    .to_vec()
}

fn call<'a>(command: &'a str, config: &'a str, more: &[&'a [String]]) -> Vec<&'a str> {
    let more = more.iter().flat_map(|list| list.iter().map(String::as_str));
    [command, config].into_iter().chain(more).collect()
}

fn tensors(store: &Path) -> Vec<(String, Vec<f32>)> {
    let source = SafetensorsSource::open_file(&store.join("train-00000.safetensors"));
    let source = source.expect("a shard");
    let values = |name: &str| match source.load(name, DType::F32) {
        Ok(tensor) => tensor.flatten_all().and_then(|flat| flat.to_vec1()).expect("values"),
        Err(_) => source.load_integers(name).expect(name).iter().map(|v| *v as f32).collect(),
    };
    source.names().into_iter().map(|name| (name.clone(), values(&name))).collect()
}

#[test]
fn records_give_the_store_that_the_target_would() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let records = write_records(&shop, DType::F32).display().to_string();
    let (rows, json) = (shop.path("records.jsonl"), "--json");
    let out = last_json(&succeed(&["data", "records", &records, "--output", &rows, json]));
    assert_eq!(out["records"], 24);
    let tokens: u64 = (0..24).map(|index| document(index).0.len() as u64).sum();
    assert_eq!(out["tokens"].as_u64(), Some(tokens), "padding is not counted");

    let exact = ["capture.dtype=f32".to_owned()];
    let (of_target, of_records) = (arguments(&shop, "own"), arguments(&shop, "published"));
    succeed(&call("capture", &config, &[&of_target, &exact]));
    let from = ["--records".to_owned(), records.clone()];
    succeed(&call("capture", &config, &[&of_records, &exact, &from]));
    let own = tensors(Path::new(&shop.path("own")));
    let published = tensors(Path::new(&shop.path("published")));
    assert_eq!(own.len(), published.len());
    assert!(own.iter().any(|(name, _)| name.ends_with("aux_hidden_states")));
    for ((name, own), (other, published)) in own.iter().zip(&published) {
        assert_eq!((name, own.len()), (other, published.len()));
        let largest = own.iter().fold(1e-3_f32, |largest, x| largest.max(x.abs()));
        for (a, b) in own.iter().zip(published) {
            assert!((a - b).abs() <= 1e-4 * largest, "{name}: {a} and {b}");
        }
    }
    let out = last_json(&succeed(&call("train", &config, &[&of_records, &["--json".to_owned()]])));
    assert_eq!(out["finished"], true);
}

#[test]
fn what_records_cannot_serve_is_refused_with_a_reason() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let folder = write_records(&shop, DType::BF16);
    let records = folder.display().to_string();
    succeed(&["data", "records", &records, "--output", &shop.path("records.jsonl")]);
    let from = ["--records".to_owned(), records.clone()];
    let capture = |store: &str, more: &[&str]| {
        let more: Vec<String> = more.iter().map(|text| (*text).to_owned()).collect();
        fail(&call("capture", &config, &[&arguments(&shop, store), &more, &from]), 1)
    };
    let of_eagle3 = arguments(&shop, "glide");
    let of_glide: Vec<String> = [0, 1, 5].map(|index: usize| of_eagle3[index].clone()).to_vec();
    let text = fail(&call("capture", &config, &[&of_glide, &from]), 1);
    assert!(text.contains("no keys and values"), "{text}");
    // The workshop's own text is in no record.
    let own = format!("data.train=[{{path: {}}}]", shop.path("rows.jsonl"));
    let text = capture("own", &[&own]);
    assert!(text.contains("no record has the"), "{text}");

    let text = capture("anchor", &["data.anchor.enabled=true"]);
    assert!(text.contains("data.anchor.enabled=false"), "{text}");
    // A store of the target's passes is not filled up from records.
    succeed(&call("capture", &config, &[&arguments(&shop, "mixed")]));
    let text = capture("mixed", &[]);
    assert!(text.contains("source was the target, now records"), "{text}");

    let path = folder.join("rows_0/data_3.ckpt");
    let whole = std::fs::read(&path).expect("record");
    std::fs::write(&path, &whole[..whole.len() / 2]).expect("half");
    let text = fail(&["data", "records", &records, "--output", &shop.path("again.jsonl")], 1);
    assert!(text.contains("data_3.ckpt"), "{text}");
    let names = std::fs::read_dir(shop.folder.path()).expect("folder").flatten();
    let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    assert!(!names.any(|name| name.starts_with("again.jsonl")), "half a file was left");
    std::fs::write(&path, &whole).expect("whole");
    for (rows, width, value, wanted) in [
        (100, 192, f32::NAN, "not finite"),
        (100, 128, 0.5, "target_layers"),
        (10, 192, 0.5, "[1, 41 or more, width] is needed"),
    ] {
        write_constant(&path, (rows, width), value);
        let text = capture(&format!("constant-{rows}-{width}"), &[]);
        assert!(text.contains("data_3.ckpt") && text.contains(wanted), "{text}");
    }
    std::fs::write(folder.join("rows_0/data_99.ckpt.gz"), b"").expect("file");
    let text = fail(&["data", "records", &records, "--output", &shop.path("again.jsonl")], 1);
    assert!(text.contains("data_99.ckpt.gz is compressed"), "{text}");
    // They are no store that `capture` began, and none is written among them.
    let in_place = arguments(&shop, "hidden_states");
    let text = fail(&call("train", &config, &[&in_place]), 2);
    assert!(text.contains("data_99.ckpt.gz is compressed: unpack such records first"), "{text}");
    fail_with(&call("capture", &config, &[&in_place]), 1, &["name another place for the store"]);
    assert!(!folder.join("recipe.json").exists());
    let text = fail(&["data", "records", &shop.path("target"), "--output", "x.jsonl"], 1);
    assert!(text.contains("no record of an engine"), "{text}");
}
