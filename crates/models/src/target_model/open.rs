//! Targets by name, by path, of any source, and what is told of them before they are loaded.

use std::collections::BTreeMap;
use std::path::Path;

use super::files::{Files, files, open_config, open_tokenizer};
use super::fingerprint::fingerprint;
use super::load::{check_gguf, check_tensor_count};
use super::{Layers, MtpBlock, StoredType, Target, TargetOptions, locate, tensor_specs};
use crate::config::TargetConfig;
use crate::error::Result;
use crate::tokenizer::TextTokenizer;
use crate::weights::memory::MemorySource;
use crate::weights::{TensorRole, TensorSpec, check_specs};

impl Target {
    /// Loads a Hugging Face folder, a GGUF file, or a hub model `org/name` or `org/name:QUANTISATION`.
    ///
    /// # Errors
    /// - one error that names every problem of the files
    pub fn open(spec: &str, options: &TargetOptions) -> Result<Self> {
        Self::open_path(&locate(spec)?, options)
    }

    /// Loads from an existing folder or file.
    ///
    /// # Errors
    /// - as [`Self::open`]
    pub fn open_path(path: &Path, options: &TargetOptions) -> Result<Self> {
        let files = files(path)?;
        if let Files::Gguf(source) = &files {
            check_gguf(source, options.layers)?;
        }
        let (config, source) = files.parts();
        Self::from_source(config.clone(), source, options)
    }

    /// A target with random weights of the configuration's deviation, for tests and benchmarks.
    ///
    /// # Errors
    /// - the configuration is unusable
    pub fn random(config: TargetConfig, seed: u64, options: &TargetOptions) -> Result<Self> {
        let specs = tensor_specs(&config);
        let source = MemorySource::random(&specs, config.initializer_range, seed)?;
        Self::from_source(config, &source, options)
    }

    /// Loads the block for prediction of several tokens that lies in a target's files, held as the target is.
    ///
    /// # Errors
    /// - as [`MtpBlock::from_source`], or as [`Self::open`]
    pub fn open_mtp(spec: &str, options: &TargetOptions) -> Result<MtpBlock> {
        let files = files(&locate(spec)?)?;
        let (config, source) = files.parts();
        MtpBlock::from_source(config, source, options)
    }

    /// The fingerprint of `spec`, by a few rows of its files.
    ///
    /// # Errors
    /// - the target is not found, or its configuration, embeddings or final norm are unusable
    pub fn fingerprint_of(spec: &str) -> Result<String> {
        let files = files(&locate(spec)?)?;
        let (config, source) = files.parts();
        check_specs(source, &Layers::None.tensor_specs(config)).into_result(source.path())?;
        fingerprint(config, source)
    }

    /// The tokenizer that belongs to the same folder or file.
    ///
    /// # Errors
    /// - there is none or it is unusable
    pub fn open_tokenizer(spec: &str) -> Result<TextTokenizer> {
        open_tokenizer(&locate(spec)?)
    }

    /// Reads only the configuration of `spec`.
    ///
    /// # Errors
    /// - the target is not found or its configuration is unusable
    pub fn open_config(spec: &str) -> Result<TargetConfig> {
        open_config(&locate(spec)?)
    }

    /// Reads the configuration and the tokenizer of `spec`; of a hub model no weights are fetched.
    ///
    /// # Errors
    /// - the target is not found, or its configuration or tokenizer is unusable
    pub fn open_description(spec: &str) -> Result<(TargetConfig, TextTokenizer)> {
        locate::describe(spec)
    }

    /// Checks names and shapes of the tensors that `layers` need, in the headers of a local target's
    /// files.
    ///
    /// # Errors
    /// - there are no weights, or a list of every missing and misshapen tensor
    pub fn check_weights(path: &Path, layers: Layers) -> Result<()> {
        match files(path)? {
            Files::Folder(config, source) => {
                let specs = layers.tensor_specs(&config);
                check_specs(source.as_ref(), &specs).into_result(source.path())
            }
            Files::Gguf(source) => check_gguf(&source, layers),
        }
    }

    /// Types of a local target's matrices, from the headers of its files; the largest first.
    ///
    /// # Errors
    /// - there are no weights, or the configuration is unusable
    pub fn stored_types(path: &Path) -> Result<Vec<StoredType>> {
        let files = files(path)?;
        let (config, source) = files.parts();
        check_tensor_count(source, config, 0..config.num_hidden_layers)?;
        let mut types = BTreeMap::<&'static str, StoredType>::new();
        for spec in Layers::All.tensor_specs(config) {
            let (Some(name), &[outputs, inputs]) =
                (source.stored_type(&spec.name), spec.shape.as_slice())
            else {
                continue;
            };
            let values = (outputs * inputs) as u64;
            let values_of_a_token = match &config.experts {
                _ if spec.role == TensorRole::Embedding => inputs as u64,
                Some(experts) if spec.name.contains(".experts.") => {
                    values * experts.num_experts_per_tok as u64 / experts.num_experts.max(1) as u64
                }
                _ => values,
            };
            let start = StoredType { name, values: 0, values_of_a_token: 0 };
            let sum = types.entry(name).or_insert(start);
            sum.values += values;
            sum.values_of_a_token += values_of_a_token;
        }
        let mut types: Vec<_> = types.into_values().collect();
        types.sort_by_key(|of_type| std::cmp::Reverse(of_type.values));
        Ok(types)
    }

    /// The type of each of a local target's matrices as the format writes it (`Q4_K`, `BF16`), by published names, from
    /// the headers of its files.
    ///
    /// # Errors
    /// - as [`Self::stored_types`]
    pub fn stored_matrices(path: &Path) -> Result<BTreeMap<String, &'static str>> {
        let files = files(path)?;
        let (config, source) = files.parts();
        check_tensor_count(source, config, 0..config.num_hidden_layers)?;
        let matrices =
            Layers::All.tensor_specs(config).into_iter().filter(|spec| spec.shape.len() == 2);
        let typed = |spec: TensorSpec| {
            let stored = source.stored_type(&spec.name)?;
            Some((spec.name, stored))
        };
        Ok(matrices.filter_map(typed).collect())
    }
}
