//! Deliberately broken exports: each is caught by `verify`, under the right code and with words that
//! say what an engine does with it.

mod command;
mod files;
mod fuzz;
mod gguf;
mod keys;
mod profiles;
mod tensors;

use crate::support::files::{Tensors, change_json, change_tensors, read_tensors, write_tensors};
use crate::support::{self, with};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::Init;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_serving::verify::{Effect, Report, Severity, VerifyOptions, verify};
use longdraft_serving::{ExportOptions, Profile, Provenance, TargetFacts, WeightType, export};
use serde_json::{Value, json};

const IDS: &str = "eagle_aux_hidden_state_layer_ids";
const VOCABULARY: usize = support::VOCABULARY;

/// A tiny target and folders beside it.
struct Bench {
    folder: tempfile::TempDir,
    target: TargetFacts,
}

impl Bench {
    fn new() -> Self {
        Self::of("llama", json!({}))
    }

    /// With a target of another family, and more keys of its configuration.
    fn of(kind: &str, keys: Value) -> Self {
        let folder = tempfile::tempdir().expect("tempdir");
        let path = folder.path().join("target");
        let config = with(support::tiny_config(kind), json!({ "num_hidden_layers": 8 }));
        support::write_target(&path, &with(config, keys));
        let target = TargetFacts::open(&path.to_string_lossy()).expect("target");
        Self { folder, target }
    }

    fn eagle3(&self) -> Box<dyn Draft> {
        let config = Eagle3Config::for_target(self.target.config(), 60).expect("config");
        // Every fourth token, and the one that ends a text.
        let mut kept: Vec<TargetTokenId> = (0..59).map(|i| TargetTokenId(4 * i + 1)).collect();
        kept.push(TargetTokenId(257));
        let map = VocabularyMap::new(kept, VOCABULARY).expect("map");
        let embedding = self.target.target.hold_ends().and_then(|ends| ends.embedding());
        let embedding = embedding.expect("embedding");
        let draft = Eagle3Draft::initialise(&config, map, &embedding, 3).expect("draft");
        Box::new(draft)
    }

    fn export(&self, profile: Profile) -> PathBuf {
        self.try_export(profile).expect("export")
    }

    fn try_export(&self, profile: Profile) -> longdraft_serving::Result<PathBuf> {
        let draft: Box<dyn Draft> = match profile {
            Profile::Longspec => {
                let config = GlideConfig::for_target(self.target.config(), None);
                let draft = GlideDraft::initialise(&config, &self.target.target, Init::Random, 3);
                Box::new(draft.expect("draft"))
            }
            _ => self.eagle3(),
        };
        let place = self.folder.path().join(profile.name());
        export(draft.as_ref(), &self.target, &options(profile), &place)?;
        Ok(place)
    }

    fn check(&self, folder: &Path) -> Report {
        let options = VerifyOptions { target: Some(&self.target), ..VerifyOptions::default() };
        verify(folder, &options).expect("a report")
    }
}

pub(crate) fn options(profile: Profile) -> ExportOptions {
    ExportOptions {
        profile,
        dtype: Some(WeightType::F32),
        embedding: true,
        draft_len: 3,
        provenance: Provenance::default(),
    }
}

type Break = Box<dyn Fn(&Path)>;

/// The code that names a fault, and words of the finding.
struct Finding {
    code: &'static str,
    says: &'static str,
    severity: Severity,
}

impl Finding {
    /// The fault, with what makes it in a folder.
    fn by(self, make: impl Fn(&Path) + 'static) -> Fault {
        Fault { finding: self, make: Box::new(make) }
    }
}

/// A fault that is made on purpose, and what has to be found of it.
struct Fault {
    finding: Finding,
    make: Break,
}

fn fault(code: &'static str, says: &'static str) -> Finding {
    Finding { code, says, severity: Severity::Error }
}

fn warning(code: &'static str, says: &'static str) -> Finding {
    Finding { code, says, severity: Severity::Warning }
}

fn config(change: impl Fn(&mut Value) + 'static) -> impl Fn(&Path) {
    move |folder| change_json(folder.join("config.json"), &change)
}

fn set(key: &'static str, value: Value) -> impl Fn(&Path) {
    config(move |keys| keys[key] = value.clone())
}

/// Leaves a key out, which a pointer names where it lies in a table.
fn without(key: &'static str) -> impl Fn(&Path) {
    let (table, key) = key.rsplit_once('/').unwrap_or(("", key));
    config(move |value| {
        let table = value.pointer_mut(table).and_then(Value::as_object_mut);
        table.expect("table").remove(key);
    })
}

/// The draft sees a window in the spelling of engines.
fn windowed() -> impl Fn(&Path) {
    config(|value| {
        value["sliding_window"] = 9.into();
        value["layer_types"] = json!(["sliding_attention"]);
    })
}

fn raw_config(change: impl Fn(String) -> String + 'static) -> impl Fn(&Path) {
    move |folder| {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path).expect("config");
        std::fs::write(&path, change(text)).expect("write");
    }
}

fn tensors(change: impl Fn(&mut Tensors) + 'static) -> impl Fn(&Path) {
    move |folder| change_tensors(folder.join("model.safetensors"), &change)
}

fn tensor(name: &'static str, change: impl Fn(&Tensor) -> Tensor + 'static) -> impl Fn(&Path) {
    tensors(move |all| {
        let entry = all.iter_mut().find(|(known, _)| known == name).expect("tensor");
        entry.1 = change(&entry.1).contiguous().expect("contiguous");
    })
}

fn dropped(name: &'static str) -> impl Fn(&Path) {
    tensors(move |all| all.retain(|(known, _)| known != name))
}

/// One more tensor with the values of another.
fn copied(from: &'static str, to: &'static str) -> impl Fn(&Path) {
    tensors(move |all| {
        let values = all.iter().find(|(known, _)| known == from).expect("tensor").1.clone();
        all.push((to.to_owned(), values));
    })
}

fn rename(from: &'static str, to: &'static str) -> impl Fn(&Path) {
    tensors(move |all| {
        for (name, _) in all.iter_mut() {
            *name = name.replace(from, to);
        }
    })
}

fn map(change: impl Fn(&mut Vec<i64>) + 'static) -> impl Fn(&Path) {
    tensor("d2t", move |old| {
        let mut values: Vec<i64> = old.to_vec1().expect("values");
        change(&mut values);
        Tensor::from_vec(values.clone(), values.len(), &Device::Cpu).expect("tensor")
    })
}

/// Ids where offsets are expected.
fn absolute() -> impl Fn(&Path) {
    map(|d| d.iter_mut().zip(0..).for_each(|(value, i)| *value += i))
}

/// The flags of two tokens in each other's place.
fn flags_swapped(a: usize, b: usize) -> impl Fn(&Path) {
    tensor("t2d", move |t| {
        let mut flags: Vec<u8> = t.to_vec1().expect("flags");
        flags.swap(a, b);
        Tensor::from_vec(flags.clone(), flags.len(), &Device::Cpu).expect("tensor")
    })
}

fn bytes(change: impl Fn(&mut Vec<u8>) + 'static) -> impl Fn(&Path) {
    move |folder| {
        let path = folder.join("model.safetensors");
        let mut all = std::fs::read(&path).expect("read");
        change(&mut all);
        std::fs::write(&path, all).expect("write");
    }
}

/// Replaces the safetensors header, keeping the data.
fn header(change: impl Fn(String) -> String + 'static) -> impl Fn(&Path) {
    bytes(move |all| {
        let length = u64::from_le_bytes(all[..8].try_into().expect("8")) as usize;
        let text = String::from_utf8(all[8..8 + length].to_vec()).expect("UTF-8");
        let text = change(text);
        let mut out = (text.len() as u64).to_le_bytes().to_vec();
        out.extend(text.bytes());
        out.extend(&all[8 + length..]);
        *all = out;
    })
}

/// Two shards with an index; `change` spoils the table.
fn sharded(change: impl Fn(&Path, &mut Value) + 'static) -> impl Fn(&Path) {
    move |folder| {
        let single = folder.join("model.safetensors");
        let all = read_tensors(&single);
        std::fs::remove_file(&single).expect("remove");
        let (a, b) = all.split_at(all.len() / 2);
        write_tensors(folder.join("model-1.safetensors"), a);
        write_tensors(folder.join("model-2.safetensors"), b);
        let entry = |name: &String, file: &str| (name.clone(), json!(file));
        let map: serde_json::Map<String, Value> = a
            .iter()
            .map(|(name, _)| entry(name, "model-1.safetensors"))
            .chain(b.iter().map(|(name, _)| entry(name, "model-2.safetensors")))
            .collect();
        let mut index = json!({ "weight_map": map });
        change(folder, &mut index);
        std::fs::write(folder.join("model.safetensors.index.json"), index.to_string())
            .expect("index");
    }
}

/// Two shards whose index says that a tensor lies in another file.
fn listed(name: &'static str, file: &'static str) -> impl Fn(&Path) {
    sharded(move |_, index| index["weight_map"][name] = file.into())
}

/// A file of the folder that is not there any more.
fn removed(file: &'static str) -> impl Fn(&Path) {
    move |folder| std::fs::remove_file(folder.join(file)).expect("remove")
}

/// A file of the folder with other bytes.
fn written(file: &'static str, bytes: &'static str) -> impl Fn(&Path) {
    move |folder| std::fs::write(folder.join(file), bytes).expect("write")
}

fn transposed(tensor: &Tensor) -> Tensor {
    tensor.t().expect("transposed")
}

fn scaled(tensor: &Tensor, by: f64) -> Tensor {
    (tensor * by).expect("scaled")
}

fn swap(a: &'static str, b: &'static str) -> impl Fn(&Path) {
    tensors(move |all| {
        for (name, _) in all.iter_mut() {
            if name == a {
                b.clone_into(name);
            } else if name == b {
                a.clone_into(name);
            }
        }
    })
}

/// Every fault of an otherwise clean export is found under its code, with its words.
fn expect_caught(bench: &Bench, profile: Profile, faults: &[Fault]) {
    let clean = bench.export(profile);
    let report = bench.check(&clean);
    assert!(report.is_clean(true), "{} before any fault:\n{report}", profile.name());
    assert!(report.parity.is_some(), "{}: the network was not run", profile.name());
    for (number, fault) in faults.iter().enumerate() {
        let Finding { code, says, severity } = fault.finding;
        let folder = bench.export(profile);
        (fault.make)(&folder);
        let report = bench.check(&folder);
        let place = format!("{} fault {number} `{code}`:\n{report}", profile.name());
        let found: Vec<_> = report.problems.iter().filter(|p| p.code == code).collect();
        assert!(!found.is_empty(), "{place}");
        assert!(found.iter().any(|p| p.severity == severity), "{place}");
        assert!(found.iter().any(|p| p.to_string().contains(says)), "`{says}` in {place}");
        assert!(found.iter().all(|p| !p.remedy.is_empty()), "{place}");
        if severity == Severity::Error {
            assert!(!report.is_clean(false), "{place}");
            let blamed = report.verdicts.iter().any(|verdict| verdict.effect != Effect::Works);
            assert!(blamed, "no engine is affected: {place}");
        }
    }
}
