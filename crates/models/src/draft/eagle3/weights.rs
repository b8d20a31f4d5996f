//! Tensors of an EAGLE-3 draft: names, initial values, reading and writing.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_kernels::matrix::Matrix;

use super::config::Eagle3Config;
use super::model::Eagle3Draft;
use crate::draft::files::{prefix_before, save_draft};
use crate::draft::vocabulary::MAP;
use crate::draft::weights::{initial_value, parameter, table_problem};
use crate::draft::{Draft, DraftWeights, VocabularyMap};
use crate::error::{Problems, Result};
use crate::weights::{TensorSpec, WeightSource};

/// Prefixes under which published files hold the tensors.
const PREFIXES: [&str; 4] = ["module.draft_model.", "draft_model.", "model.", ""];

/// The layer's name in published files: as here, and as engines count it.
const LAYER: [&str; 2] = ["midlayer.", "layers.0."];

pub(super) const EMBEDDING: &str = "embed_tokens.weight";

pub(super) const HEAD: &str = "lm_head.weight";

/// The target's head `[V, H]`, for a draft whose files have none.
pub(super) enum OfTarget {
    /// Held as the target holds it; it is not trained.
    Shared(Matrix),
    /// Copied in f32: the draft's own from here on.
    Copied(Matrix),
}

/// Every trained tensor, in the order of the published table.
pub fn tensor_specs(config: &Eagle3Config) -> Vec<TensorSpec> {
    let (hidden, target, width) =
        (config.hidden_size, config.target_hidden_size, config.intermediate_size);
    let (query, kv) = (config.query_size(), config.kv_size());
    let layers = config.target_layers.len();
    let mut all = vec![TensorSpec::new("fc.weight", &[hidden, layers * target])];
    if config.fc_norm {
        let norm = |i| TensorSpec::new(format!("fc_norm.{i}.weight"), &[target]);
        all.extend((0..layers).map(norm));
    }
    if config.embed_proj {
        all.push(TensorSpec::new("embed_proj.weight", &[hidden, target]));
    }
    let mut add = |name: &str, shape: &[usize]| {
        all.push(TensorSpec::new(format!("midlayer.{name}.weight"), shape));
    };
    add("input_layernorm", &[hidden]);
    add("hidden_norm", &[hidden]);
    add("self_attn.q_proj", &[query, 2 * hidden]);
    add("self_attn.k_proj", &[kv, 2 * hidden]);
    add("self_attn.v_proj", &[kv, 2 * hidden]);
    add("self_attn.o_proj", &[hidden, query]);
    add("post_attention_layernorm", &[hidden]);
    add("mlp.gate_proj", &[width, hidden]);
    add("mlp.up_proj", &[width, hidden]);
    add("mlp.down_proj", &[hidden, width]);
    all.push(TensorSpec::new("norm.weight", &[hidden]));
    all.push(TensorSpec::head(HEAD, &[config.draft_vocab_size, hidden]));
    all
}

impl Eagle3Draft {
    /// Builds the draft with `value(spec)` for every trained tensor: all but a head that is shared.
    fn build(
        config: &Eagle3Config,
        vocabulary: VocabularyMap,
        (embedding, own_embedding): (Matrix, bool),
        shared_head: Option<Matrix>,
        mut value: impl FnMut(&TensorSpec) -> Result<Tensor>,
    ) -> Result<Self> {
        let mut specs = tensor_specs(config);
        specs.retain(|spec| shared_head.is_none() || spec.name != HEAD);
        let parameters = specs.iter().map(|spec| parameter(spec, &value(spec)?));
        let weights = DraftWeights::new(parameters.collect::<Result<_>>()?, config.rms_norm_eps);
        let (rope, config) = (config.rope.build(config.head_dim)?, config.clone());
        Ok(Self { config, weights, vocabulary, embedding, own_embedding, shared_head, rope })
    }

    /// Fresh weights, N(0, `initializer_range`) and norms of 1, beside the target's frozen
    /// embeddings `[V, Ht]`, on their device. The draft holds them as the target does.
    ///
    /// # Errors
    /// - sizes do not fit; the draft is not as wide as the target and has no `embed_proj`
    pub fn initialise(
        config: &Eagle3Config,
        vocabulary: VocabularyMap,
        embedding: impl Into<Matrix>,
        seed: u64,
    ) -> Result<Self> {
        let embedding = embedding.into();
        let mut problems = config.problems();
        problems.0.extend(vocabulary.problems(sizes(config)).0);
        check_embedding(config, &embedding, &mut problems);
        problems.into_result(Path::new("draft configuration"))?;
        let device = embedding.device().clone();
        Self::build(config, vocabulary, (embedding, false), None, |spec| {
            initial_value(spec, config.initializer_range, seed, &device)
        })
    }

    /// Reads the draft from an open source with any published prefix. The source's own embeddings
    /// are taken only where the target's `[V, Ht]` do not fit the draft's width.
    ///
    /// # Errors
    /// - a list of every missing, unexpected and misshapen tensor, or an unusable vocabulary map
    pub fn from_source(
        source: &dyn WeightSource,
        config: &Eagle3Config,
        embedding: impl Into<Matrix>,
    ) -> Result<Self> {
        Self::with_head(source, config, embedding.into(), None)
    }

    /// The same, with the target's head where the source has none.
    pub(super) fn with_head(
        source: &dyn WeightSource,
        config: &Eagle3Config,
        embedding: Matrix,
        head: Option<OfTarget>,
    ) -> Result<Self> {
        config.problems().into_result(Path::new("draft configuration"))?;
        let names = checked_names(source, config, head.is_none())?;
        let device = embedding.device().clone();
        let embedding = if reads_own_embedding(config) {
            let own = source.load(&names[EMBEDDING], DType::F32)?.to_device(&device)?;
            (Matrix::Dense(own), true)
        } else {
            let mut problems = Problems::default();
            check_embedding(config, &embedding, &mut problems);
            problems.into_result(source.path())?;
            (embedding, false)
        };
        let vocabulary = read_vocabulary(source, &names, config)?;
        let (shared, copied) = match head {
            Some(OfTarget::Shared(head)) => (Some(head), None),
            Some(OfTarget::Copied(head)) => (None, Some(head)),
            None => (None, None),
        };
        Self::build(config, vocabulary, embedding, shared, |spec| {
            let value = match &copied {
                Some(head) if spec.name == HEAD => head.to_dense()?.to_dtype(DType::F32)?,
                _ => source.load(&names[&spec.name], DType::F32)?,
            };
            Ok(value.to_device(&device)?)
        })
    }

    /// Trained tensors by name, in the order of the published table.
    ///
    /// # Errors
    /// - the draft is held for proposing alone
    pub fn named_tensors(&self) -> Result<Vec<(String, Tensor)>> {
        self.weights.named()
    }

    /// What a draft's files hold: trained tensors, the vocabulary map unless every token is kept,
    /// embeddings if they are the draft's own. A head that is the target's is not written.
    ///
    /// # Errors
    /// - a tensor cannot be made, or the draft is held for proposing alone
    pub fn stored_tensors(&self) -> Result<Vec<(String, Tensor)>> {
        let mut all = self.named_tensors()?;
        all.extend(self.fixed_tensors()?);
        Ok(all)
    }

    /// Writes the tensors as safetensors and `.pth`, with `config.json`, into a folder.
    ///
    /// # Errors
    /// - the folder cannot be written, or the draft is held for proposing alone
    pub fn save(&self, folder: &Path, target_fingerprint: &str) -> Result<()> {
        save_tensors(folder, &self.config, &self.stored_tensors()?, target_fingerprint)
    }

    /// The same draft over another vocabulary: head rows of tokens that both keep move along, the
    /// others are drawn afresh.
    ///
    /// # Errors
    /// - the map is for another target's vocabulary, or the draft is held for proposing alone
    pub fn remapped(&self, vocabulary: VocabularyMap, seed: u64) -> Result<Self> {
        self.weights.require_f32()?;
        let config =
            Eagle3Config { draft_vocab_size: vocabulary.draft_size(), ..self.config.clone() };
        vocabulary.problems(sizes(&config)).into_result(Path::new("vocabulary map"))?;
        let kept = vocabulary.kept().to_vec();
        let embedding = (self.embedding.clone(), self.own_embedding);
        let values = |head: &Matrix| head.to_dense()?.to_dtype(DType::F32);
        let shared = self.shared_head.as_ref().map(values).transpose()?;
        Self::build(&config, vocabulary, embedding, None, |spec| {
            let shared = shared.as_ref().filter(|_| spec.name == HEAD);
            match self.weights.get(&spec.name).or(shared) {
                Some(old) if spec.name != HEAD => Ok(old.force_contiguous()?),
                Some(old) => {
                    let range = config.initializer_range;
                    let drawn = initial_value(spec, range, seed, old.device())?;
                    // Rows of the old head, then of the new one.
                    let both = Tensor::cat(&[old, &drawn], 0)?;
                    let new_ids = old.dim(0)? as u32;
                    let rows: Vec<u32> = kept
                        .iter()
                        .zip(new_ids..)
                        .map(|(id, own)| self.vocabulary.to_draft(*id).map_or(own, |old| old.0))
                        .collect();
                    let rows = Tensor::from_slice(&rows, rows.len(), old.device())?;
                    Ok(both.index_select(&rows, 0)?.detach())
                }
                None => {
                    initial_value(spec, config.initializer_range, seed, self.embedding.device())
                }
            }
        })
    }
}

/// Writes a draft's tensors with its `config.json`. It fails where the folder cannot be written.
pub(super) fn save_tensors(
    folder: &Path,
    config: &Eagle3Config,
    tensors: &[(String, Tensor)],
    target_fingerprint: &str,
) -> Result<()> {
    let layers = config.target_layers.map(|layer| layer.0);
    let metadata = HashMap::from([
        ("draft".to_owned(), "eagle3".to_owned()),
        ("target_layers".to_owned(), format!("{layers:?}")),
        ("fc_norm".to_owned(), config.fc_norm.to_string()),
        ("norm_output".to_owned(), config.norm_output.to_string()),
    ]);
    save_draft(folder, config.to_json(), metadata, tensors, target_fingerprint)
}

fn check_embedding(config: &Eagle3Config, embedding: &Matrix, problems: &mut Problems) {
    problems.0.extend(table_problem(embedding, [config.vocab_size, config.target_hidden_size]));
    if config.hidden_size != config.target_hidden_size && !config.embed_proj {
        problems.push(format!(
            "a draft of width {} cannot read embeddings of width {}: set `embed_proj`, or give \
             embeddings of its own",
            config.hidden_size, config.target_hidden_size
        ));
    }
}

/// Stored names by plain ones: without prefix, the layer as `midlayer.`. Two that come to the same
/// plain name are an error.
pub(super) fn published_names(source: &dyn WeightSource) -> Result<BTreeMap<String, String>> {
    let stored = source.names();
    let prefix = prefix_before("fc.weight", &stored, &PREFIXES);
    let mut names = BTreeMap::new();
    let mut problems = Problems::default();
    for name in &stored {
        let plain = name.strip_prefix(prefix).unwrap_or(name);
        let plain = match plain.strip_prefix(LAYER[1]) {
            Some(rest) => format!("{}{rest}", LAYER[0]),
            None => plain.to_owned(),
        };
        if let Some(other) = names.insert(plain, name.clone()) {
            problems.push(format!("tensors `{other}` and `{name}` are the same one"));
        }
    }
    problems.into_result(source.path())?;
    Ok(names)
}

/// Stored names by plain ones, as [`published_names`] finds them, if they are those of the network in their shapes: else a
/// list of what is missing, misshapen or left over. Without `has_head` the target's serves.
pub(super) fn checked_names(
    source: &dyn WeightSource,
    config: &Eagle3Config,
    has_head: bool,
) -> Result<BTreeMap<String, String>> {
    let names = published_names(source)?;
    let mut expected = tensor_specs(config);
    expected.retain(|spec| has_head || spec.name != HEAD);
    if reads_own_embedding(config) {
        let shape = [config.vocab_size, config.hidden_size];
        expected.push(TensorSpec::embedding(EMBEDDING, &shape));
    }
    if config.draft_vocab_size < config.vocab_size {
        expected.push(TensorSpec::new(MAP[0], &[config.draft_vocab_size]));
    }
    let found = |name: &String| names.get(name).and_then(|stored| source.shape(stored));
    let mut problems =
        Problems(expected.iter().filter_map(|spec| spec.problem(found(&spec.name))).collect());
    for (name, stored) in &names {
        let known = expected.iter().any(|spec| spec.name == *name);
        if !known && name != EMBEDDING && !MAP.contains(&name.as_str()) {
            problems.push(format!("tensor `{stored}` is unexpected"));
        }
    }
    problems.into_result(source.path())?;
    Ok(names)
}

/// Whether the embeddings are the draft's own: the target's have another width.
fn reads_own_embedding(config: &Eagle3Config) -> bool {
    !config.embed_proj && config.hidden_size != config.target_hidden_size
}

/// Which of the target's tokens a draft's files map its own to; every one where they hold no map.
pub(super) fn read_vocabulary(
    source: &dyn WeightSource,
    names: &BTreeMap<String, String>,
    config: &Eagle3Config,
) -> Result<VocabularyMap> {
    let read = |name: &str| names.get(name).map(|stored| source.load_integers(stored)).transpose();
    let map = VocabularyMap::read(source.path(), sizes(config), read)?;
    Ok(map.unwrap_or_else(|| VocabularyMap::identity(config.vocab_size)))
}

/// `[Vd, V]`
fn sizes(config: &Eagle3Config) -> [usize; 2] {
    [config.draft_vocab_size, config.vocab_size]
}
