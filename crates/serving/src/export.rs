//! Writing a draft for an engine: a folder that is complete or absent, the same bytes each time.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::files::PTH_FILE;
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::weights::atomic::write_atomically;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::safetensors::tensor_bytes;
use longdraft_models::weights::{gguf, pth, safetensors};
use serde_json::Value;

use crate::error::{Result, ServingError};
use crate::folder::NewFolder;
use crate::hash::hash;
use crate::manifest::{MANIFEST_FILE, Manifest, Provenance, TargetRecord};
use crate::parity::{self, ParityVector};
use crate::render::{compatibility, eagle3_config, longspec, tensors};
use crate::target::TargetFacts;
use crate::{Profile, render};

/// Type of written weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// 32 bits.
    F32,
}

impl WeightType {
    /// As the tensor library names it.
    pub fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
            Self::F32 => DType::F32,
        }
    }
}

/// How to export.
#[derive(Debug, Clone)]
pub struct ExportOptions {
    /// For which engine.
    pub profile: Profile,
    /// Type of the weights; `None`: f16 for longspec, else bf16.
    pub dtype: Option<WeightType>,
    /// Whether the target's embeddings go along, where the engine would read them.
    pub embedding: bool,
    /// Tokens per round that engines should draft by default.
    pub draft_len: usize,
    /// Where the draft comes from.
    pub provenance: Provenance,
}

/// What was written.
#[derive(Debug)]
pub struct Exported {
    /// File names.
    pub files: Vec<String>,
    /// Tensors in the weight file.
    pub tensors: usize,
    /// What the engines of some version do not compute.
    pub warnings: Vec<String>,
    /// The manifest beside it.
    pub manifest: Manifest,
}

/// Files of one export, before its manifest.
struct Rendered {
    tensors: Vec<(String, Tensor)>,
    method: &'static str,
    layers: Vec<usize>,
    map: Option<String>,
    parity: ParityVector,
    dtype: DType,
}

/// Writes a draft for a profile into `folder`, which must be new, empty or an earlier export.
///
/// # Errors
/// - the profile's engines do not compute this draft: every reason
/// - the folder holds something else or cannot be written
pub fn export(
    draft: &dyn Draft,
    target: &TargetFacts,
    options: &ExportOptions,
    folder: &Path,
) -> Result<Exported> {
    let profile = options.profile;
    let fit = if let Some(draft) = draft.of_kind::<Eagle3Draft>() {
        compatibility::eagle3(profile, draft.config(), target)
    } else if let Some(draft) = draft.of_kind::<GlideDraft>() {
        compatibility::glide(profile, draft.config(), target.config())
    } else {
        return Err(ServingError::NoFormat(draft.method()));
    };
    if !fit.refusals.0.is_empty() {
        return Err(ServingError::NotRepresentable { profile, problems: fit.refusals });
    }
    let new = NewFolder::at(folder, |place| place.join(MANIFEST_FILE).is_file())?;
    let rendered = if let Some(draft) = draft.of_kind::<Eagle3Draft>() {
        eagle3(draft, target, options, new.path())?
    } else if let Some(draft) = draft.of_kind::<GlideDraft>() {
        glide(draft, target, options, new.path())?
    } else {
        return Err(ServingError::NoFormat(draft.method()));
    };
    if profile != Profile::Llamacpp {
        target.tokenizer.save(new.path())?;
    }
    let manifest = manifest(rendered, target, options, new.path(), fit.warnings.clone())?;
    let text = manifest.text().map_err(ServingError::io(folder))?;
    write_atomically(&new.path().join(MANIFEST_FILE), text.as_bytes())?;
    new.finish()?;
    let mut files: Vec<String> = manifest.files.keys().cloned().collect();
    files.push(MANIFEST_FILE.into());
    Ok(Exported { files, tensors: manifest.tensors.len(), warnings: fit.warnings, manifest })
}

fn eagle3(
    draft: &Eagle3Draft,
    target: &TargetFacts,
    options: &ExportOptions,
    folder: &Path,
) -> Result<Rendered> {
    let profile = options.profile;
    let dtype = options.dtype.unwrap_or(WeightType::Bf16).dtype();
    let plain = tensors::eagle3(profile, draft, target, dtype, options.embedding)?;
    let config = tensors::published_config(draft.config());
    let written = if profile == Profile::Llamacpp {
        let written = render::gguf::tensors(&config, &plain)?;
        let tokenizer = target.gguf_tokenizer.clone().map_err(|reason| {
            let problems = longdraft_models::error::Problems(vec![format!("tokenizer: {reason}")]);
            ServingError::NotRepresentable { profile, problems }
        })?;
        let name = format!("{} EAGLE-3 draft", last_name(&target.name));
        let metadata = render::gguf::metadata(&config, &name, dtype, &tokenizer);
        let stored: Vec<_> =
            written.iter().map(|(name, tensor)| (name.clone(), tensor.clone().into())).collect();
        gguf::write::save(&folder.join(gguf_name(dtype)), &metadata, &stored)?;
        written
    } else {
        let written = tensors::renamed(profile, &plain);
        write_safetensors(folder, &written)?;
        let value = eagle3_config::render(profile, &config, target, dtype, options.draft_len);
        write_json(&folder.join("config.json"), &value)?;
        written
    };
    let map = draft.vocabulary();
    Ok(Rendered {
        tensors: written,
        method: "eagle3",
        layers: eagle3_config::output_ids(&config).to_vec(),
        map: (!map.is_identity()).then(|| map_hash(map)),
        parity: parity::of_eagle3(&written_network(&config, &plain)?)?,
        dtype,
    })
}

/// What a draft computes with its weights rounded as an export rounds them, on the fixed input.
///
/// # Errors
/// - a value does not fit the type, or sizes do not fit the target
pub fn rounded_vector(
    draft: &dyn Draft,
    target: &TargetFacts,
    dtype: DType,
) -> Result<ParityVector> {
    if let Some(draft) = draft.of_kind::<Eagle3Draft>() {
        let plain = tensors::eagle3(Profile::Hf, draft, target, dtype, false)?;
        let config = tensors::published_config(draft.config());
        return parity::of_eagle3(&written_network(&config, &plain)?);
    }
    let Some(draft) = draft.of_kind::<GlideDraft>() else {
        return Err(ServingError::NoFormat(draft.method()));
    };
    let written = longspec::tensors(Profile::Longspec, draft, dtype)?;
    let config = GlideConfig::for_target(target.config(), None);
    let network = GlideDraft::from_source(&MemorySource::new(written), &config, &target.target)?;
    parity::of_glide(&network, &target.target)
}

/// The network that was written, weights rounded as in the file, on the stand-in embeddings.
fn written_network(config: &Eagle3Config, plain: &[(String, Tensor)]) -> Result<Eagle3Draft> {
    let source = MemorySource::new(plain.iter().cloned());
    Ok(Eagle3Draft::from_source(&source, config, &parity::stand_in_embedding(config)?)?)
}

fn glide(
    draft: &GlideDraft,
    target: &TargetFacts,
    options: &ExportOptions,
    folder: &Path,
) -> Result<Rendered> {
    let dtype = options.dtype.unwrap_or(WeightType::F16).dtype();
    let written = longspec::tensors(options.profile, draft, dtype)?;
    write_safetensors(folder, &written)?;
    if options.profile == Profile::Longspec {
        pth::save(&folder.join(PTH_FILE), &written)?;
    }
    write_json(&folder.join("config.json"), &longspec::config(draft, target, dtype))?;
    let config = GlideConfig::for_target(target.config(), None);
    let source = MemorySource::new(written.iter().cloned());
    let network = GlideDraft::from_source(&source, &config, &target.target)?;
    Ok(Rendered {
        tensors: written,
        method: "glide",
        layers: vec![target.config().num_hidden_layers - 1],
        map: None,
        parity: parity::of_glide(&network, &target.target)?,
        dtype,
    })
}

/// Name of the GGUF file of weights in `dtype`.
fn gguf_name(dtype: DType) -> String {
    let suffix = match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        _ => "f32",
    };
    format!("draft-{suffix}.gguf")
}

fn write_safetensors(folder: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    Ok(safetensors::save(&folder.join("model.safetensors"), tensors, metadata)?)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    Ok(write_atomically(path, format!("{value:#}\n").as_bytes())?)
}

fn manifest(
    rendered: Rendered,
    target: &TargetFacts,
    options: &ExportOptions,
    folder: &Path,
    warnings: Vec<String>,
) -> Result<Manifest> {
    let Rendered { tensors, method, layers, map, parity, dtype } = rendered;
    let mut hashes = BTreeMap::new();
    for (name, tensor) in &tensors {
        hashes.insert(name.clone(), hash(&tensor_bytes(tensor)?));
    }
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(ServingError::io(folder))? {
        let path = entry.map_err(ServingError::io(folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let bytes = std::fs::read(&path).map_err(ServingError::io(&path))?;
        files.insert(name, hash(&bytes));
    }
    let config = target.config();
    Ok(Manifest {
        tool_version: env!("CARGO_PKG_VERSION").into(),
        profile: options.profile,
        compat: options.profile.compat().into(),
        method: method.into(),
        dtype: eagle3_config::torch_dtype(dtype).into(),
        target_layers_in_words: layers.iter().map(|k| format!("output of layer {k}")).collect(),
        target_layers: layers,
        target: TargetRecord {
            name: target.name.clone(),
            fingerprint: target.target.fingerprint().to_owned(),
            tokenizer: target.tokenizer.fingerprint()?,
            vocab_size: config.vocab_size,
            num_hidden_layers: config.num_hidden_layers,
        },
        provenance: options.provenance.clone(),
        tensors: hashes,
        files,
        vocabulary_map: map,
        parity: Some(parity),
        warnings,
        serve: crate::engine::commands::for_profile(
            options.profile,
            (&target.name, target.is_gguf),
            options.draft_len,
            &gguf_name(dtype),
        ),
    })
}

fn map_hash(map: &VocabularyMap) -> String {
    let bytes: Vec<u8> = map.kept().iter().flat_map(|id| id.0.to_le_bytes()).collect();
    hash(&bytes)
}

fn last_name(name: &str) -> &str {
    name.trim_end_matches('/').rsplit('/').next().unwrap_or(name)
}
