//! Tensors of a GLIDE layer: names, initial values, reading and writing.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use super::config::{Compat, FinalNorm, GlideConfig};
use super::model::GlideDraft;
use crate::config::TargetConfig;
use crate::draft::Init;
use crate::draft::files::{
    SavedDraft, folder_beside, open_weights, prefix_before, read_json, save_draft,
};
use crate::draft::weights::{initial_value, parameter};
use crate::draft::{DraftWeights, Parameter};
use crate::error::{ModelError, Result};
use crate::target_model::{Target, norm_before_feed_forward};
use crate::weights::{TensorSpec, WeightSource, check_specs};

/// Prefixes under which published files hold the layer.
const PREFIXES: [&str; 4] = ["module.draft_model.", "draft_model.", "glide.", ""];

struct Layout {
    spec: TensorSpec,
    dead: bool,
}

/// Every tensor of the layer, in the order of the published table.
fn layout(config: &GlideConfig) -> Vec<Layout> {
    let (hidden, width) = (config.hidden_size, config.intermediate_size);
    let (query, kv) = (config.query_size(), config.kv_size());
    let mut all = Vec::new();
    let mut add = |name: &str, shape: &[usize], dead| {
        all.push(Layout { spec: TensorSpec::new(name, shape), dead });
    };
    for norm in
        ["input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm"]
    {
        add(&format!("{norm}.weight"), &[hidden], false);
    }
    let compat = config.compat == Some(Compat::Longspec);
    for (branch, own_kv) in [("self_attn", true), ("cross_attn", false)] {
        for (module, outputs) in [("q_proj", query), ("k_proj", kv), ("v_proj", kv)] {
            let dead = module != "q_proj" && !own_kv;
            if dead && !compat {
                continue;
            }
            add(&format!("{branch}.{module}.weight"), &[outputs, hidden], dead);
            add(&format!("{branch}.{module}.bias"), &[outputs], dead);
        }
        add(&format!("{branch}.o_proj.weight"), &[hidden, query], false);
    }
    for (module, outputs, inputs) in
        [("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width)]
    {
        add(&format!("mlp.{module}.weight"), &[outputs, inputs], false);
        if config.mlp_bias {
            add(&format!("mlp.{module}.bias"), &[outputs], false);
        }
    }
    if config.final_norm == FinalNorm::Trained {
        add("final_layernorm.weight", &[hidden], false);
    }
    all
}

/// Names and shapes of every tensor of the layer, trained and dead.
pub fn tensor_specs(config: &GlideConfig) -> Vec<TensorSpec> {
    layout(config).into_iter().map(|entry| entry.spec).collect()
}

impl GlideDraft {
    /// Builds the layer with `value(name, shape)` for every tensor.
    fn build(
        config: &GlideConfig,
        target_norm: Option<Tensor>,
        mut value: impl FnMut(&Layout) -> Result<Tensor>,
    ) -> Result<Self> {
        let of_entry = |entry: &Layout| {
            let plain = parameter(&entry.spec, &value(entry)?)?;
            let decay = config.compat.is_some() || plain.decay;
            Ok(Parameter { decay, dead: entry.dead, ..plain })
        };
        let parameters = layout(config).iter().map(of_entry).collect::<Result<_>>()?;
        let target_norm = target_norm.filter(|_| config.final_norm == FinalNorm::Target);
        let weights = DraftWeights::new(parameters, config.rms_norm_eps);
        Ok(Self { config: config.clone(), weights, target_norm })
    }

    /// Fresh weights for a target, on its device.
    ///
    /// # Errors
    /// - the configuration does not fit the target, or `init: last_layer` does not fit it
    pub fn initialise(
        config: &GlideConfig,
        target: &Target,
        init: Init,
        seed: u64,
    ) -> Result<Self> {
        check(config, target)?;
        let last: HashMap<&str, Tensor> = target.last_layer()?.into_iter().collect();
        if init == Init::LastLayer && last.is_empty() {
            let problem = "`init: last_layer` needs the target's last layer, which was not loaded";
            return Err(ModelError::invalid(Path::new("draft configuration"), problem));
        }
        let device = target.device();
        Self::build(config, Some(target.final_norm().clone()), |entry| {
            let TensorSpec { name, shape, .. } = &entry.spec;
            if name == "final_layernorm.weight" {
                return Ok(target.final_norm().force_contiguous()?);
            }
            if init == Init::LastLayer
                && let Some(source) = last.get(name_in_last_layer(name, target.config()))
                && source.dims() == shape.as_slice()
            {
                return Ok(source.to_dtype(DType::F32)?.force_contiguous()?);
            }
            initial_value(&entry.spec, config.initializer_range, seed, device)
        })
    }

    /// Reads the layer from a weight file or a folder that holds one (safetensors or `.pth`,
    /// with any of the published prefixes).
    ///
    /// # Errors
    /// - unreadable, or a list of every missing, unexpected and misshapen tensor
    pub fn load(path: &Path, config: &GlideConfig, target: &Target) -> Result<Self> {
        check(config, target)?;
        let source = open_weights(path)?;
        Self::from_source(source.as_ref(), config, target)
    }

    /// Checks names and shapes of the tensors at `path` for [`Self::load`], without reading them.
    ///
    /// # Errors
    /// - as [`Self::load`]
    pub fn check_file(path: &Path, config: &GlideConfig) -> Result<()> {
        strip_prefix(open_weights(path)?.as_ref(), config).map(|_| ())
    }

    /// Reads the layer from an open source; see [`Self::load`].
    ///
    /// # Errors
    /// - a list of every missing, unexpected and misshapen tensor
    pub fn from_source(
        source: &dyn WeightSource,
        config: &GlideConfig,
        target: &Target,
    ) -> Result<Self> {
        let names = strip_prefix(source, config)?;
        Self::build(config, Some(target.final_norm().clone()), |entry| {
            let tensor = match names.get(&entry.spec.name) {
                Some(stored) => source.load(stored, DType::F32)?,
                None => Tensor::zeros(entry.spec.shape.as_slice(), DType::F32, &Device::Cpu)?,
            };
            Ok(tensor.to_device(target.device())?)
        })
    }

    /// Tensors by name, in the order of the published table.
    ///
    /// # Errors
    /// - the draft is held as blocks
    pub fn named_tensors(&self) -> Result<Vec<(String, Tensor)>> {
        self.weights.named()
    }

    /// Writes the tensors as safetensors and `.pth`, with `config.json`, into a folder.
    ///
    /// # Errors
    /// - the folder cannot be written, or the draft is held as blocks
    pub fn save(&self, folder: &Path, target_fingerprint: &str) -> Result<()> {
        save_tensors(folder, &self.config, &self.named_tensors()?, target_fingerprint)
    }

    /// Opens a draft folder or file with the layer that the `config.json` beside it describes; a
    /// published file without one is read as the layer that its tensors and the target make.
    ///
    /// # Errors
    /// - as [`Self::load`], or the configuration is unusable
    pub fn open(path: &Path, target: &Target) -> Result<Self> {
        let file = folder_beside(path).join("config.json");
        let config = match read_json(&file) {
            Err(ModelError::Io { .. }) => None,
            value => read_config(&file, value?)?,
        };
        let config = config.unwrap_or_else(|| GlideConfig::for_target(target.config(), None));
        Self::load(path, &config, target)
    }
}

impl GlideConfig {
    /// What is said of a saved layer; `None` if nothing is.
    ///
    /// # Errors
    /// - it is unusable
    pub fn of_saved(saved: &SavedDraft) -> Result<Option<Self>> {
        // A checkpoint says nothing of a model's type.
        let is_own =
            |value: &&Value| value["model_type"].is_null() || value["model_type"] == "glide";
        let said = saved.config.as_ref().filter(is_own).filter(|value| value.is_object());
        let read = |value: &Value| serde_json::from_value(value.clone());
        said.map(read).transpose().map_err(|error| ModelError::invalid(&saved.path, error))
    }
}

/// The layer's configuration; `None` if the file is some other model's.
fn read_config(path: &Path, value: Value) -> Result<Option<GlideConfig>> {
    if value["model_type"] != "glide" {
        return Ok(None);
    }
    serde_json::from_value(value).map(Some).map_err(|error| ModelError::invalid(path, error))
}

/// The layer's configuration as a checkpoint holds it.
pub(super) fn read_saved(config: &Value) -> Result<GlideConfig> {
    serde_json::from_value(config.clone())
        .map_err(|error| ModelError::invalid(Path::new("draft configuration"), error))
}

/// Writes a layer's tensors with its `config.json`. It fails where the folder cannot be written.
pub(super) fn save_tensors(
    folder: &Path,
    config: &GlideConfig,
    tensors: &[(String, Tensor)],
    target_fingerprint: &str,
) -> Result<()> {
    let metadata = HashMap::from([
        ("draft".to_owned(), "glide".to_owned()),
        ("mode".to_owned(), mode(config).to_owned()),
        ("gamma".to_owned(), config.gamma.to_string()),
        ("window".to_owned(), config.self_window.to_string()),
        ("final_norm".to_owned(), format!("{:?}", config.final_norm).to_lowercase()),
        ("head_dim".to_owned(), config.head_dim.to_string()),
    ]);
    let mut value =
        serde_json::to_value(config).map_err(|error| ModelError::invalid(folder, error))?;
    value["model_type"] = "glide".into();
    save_draft(folder, value, metadata, tensors, target_fingerprint)
}

fn mode(config: &GlideConfig) -> &'static str {
    if config.compat.is_some() { "longspec" } else { "default" }
}

fn check(config: &GlideConfig, target: &Target) -> Result<()> {
    config.problems_with(target.config()).into_result(Path::new("draft configuration"))
}

/// Which of the target's last-layer tensors a draft tensor copies.
fn name_in_last_layer<'a>(name: &'a str, target: &TargetConfig) -> &'a str {
    match name {
        "post_self_attention_layernorm.weight" => "input_layernorm.weight",
        "post_cross_attention_layernorm.weight" => norm_before_feed_forward(target),
        "cross_attn.q_proj.weight" => "self_attn.q_proj.weight",
        "cross_attn.q_proj.bias" => "self_attn.q_proj.bias",
        "cross_attn.o_proj.weight" => "self_attn.o_proj.weight",
        other => other,
    }
}

/// Maps plain names to stored ones and checks that nothing is missing, misshapen or left over.
/// Dead tensors may be missing or left over: the default mode drops them, compat zeroes them. A language model is
/// told as such, not tensor by tensor.
fn strip_prefix(
    source: &dyn WeightSource,
    config: &GlideConfig,
) -> Result<BTreeMap<String, String>> {
    let stored = source.names();
    let prefix = prefix_before("input_layernorm.weight", &stored, &PREFIXES);
    let mut names: BTreeMap<String, String> = stored
        .iter()
        .filter_map(|name| Some((name.strip_prefix(prefix)?.to_owned(), name.clone())))
        .collect();
    let expected = layout(config);
    let table = stored.iter().find(|name| name.ends_with("embed_tokens.weight"));
    if let Some(table) = table
        && !expected.iter().any(|entry| names.contains_key(&entry.spec.name))
    {
        let problem = format!("a whole language model (it holds `{table}`), no draft");
        return Err(ModelError::unrecognised(source.path(), problem));
    }
    let is_needed = |entry: &&Layout| !entry.dead || names.contains_key(&entry.spec.name);
    let stored_as = |TensorSpec { name, shape, .. }: &TensorSpec| {
        TensorSpec::new(format!("{prefix}{name}"), shape)
    };
    let needed = expected.iter().filter(is_needed).map(|entry| stored_as(&entry.spec));
    let needed: Vec<TensorSpec> = needed.collect();
    let mut problems = check_specs(source, &needed);
    let dead = GlideConfig { compat: Some(Compat::Longspec), ..config.clone() };
    let dead: Vec<Layout> = layout(&dead).into_iter().filter(|entry| entry.dead).collect();
    names.retain(|name, _| {
        let known = |entries: &[Layout]| entries.iter().any(|entry| entry.spec.name == *name);
        if !known(&expected) && !known(&dead) {
            problems.push(format!("tensor `{prefix}{name}` is unexpected"));
        }
        known(&expected)
    });
    problems.into_result(source.path())?;
    Ok(names)
}
