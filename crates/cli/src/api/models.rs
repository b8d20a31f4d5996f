//! Targets and drafts as handles that sessions and threads share.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use longdraft_models::draft::Draft as Network;
use longdraft_models::target_model::{PackedSequence, Tap, Taps, Target as Weights};
use longdraft_models::tokenizer::{Message, TextTokenizer};
use longdraft_models::{LayerId, TargetTokenId};
use serde_json::{Map, Value};

use super::error::Result;
use crate::cli::{OpenOptions, TemplateArguments};
use crate::decoding::{encode_chat_with, encode_text, open_draft, open_target};
use crate::draft_source::DraftSource;
use crate::failure::Failure;

/// A target that is open, with its tokenizer. Copies share the weights.
#[derive(Clone)]
pub struct Target {
    name: Arc<str>,
    options: OpenOptions,
    pub(super) weights: Arc<Weights>,
    pub(super) tokenizer: Arc<TextTokenizer>,
}

impl Target {
    /// Opens a Hugging Face folder, a GGUF file or a hub model `org/name` (`org/name:Q4_K_M`), its weights as
    /// stored.
    ///
    /// # Errors
    /// - it is not there, damaged, or of no known kind
    pub fn open(name: &str) -> Result<Self> {
        Self::open_with(name, &OpenOptions::default())
    }

    /// The same, held as asked.
    ///
    /// # Errors
    /// - as [`Self::open`], or this machine has no such device
    pub fn open_with(name: &str, options: &OpenOptions) -> Result<Self> {
        // The tokenizer first: what building it takes is free again when the weights come.
        let tokenizer = Weights::open_tokenizer(name)?;
        let weights = open_target(name, *options)?;
        Ok(Self {
            name: name.into(),
            options: *options,
            weights: Arc::new(weights),
            tokenizer: Arc::new(tokenizer),
        })
    }

    /// As it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How it is held.
    pub fn options(&self) -> &OpenOptions {
        &self.options
    }

    /// A hash of its configuration and some of its weights; drafts keep that of their target.
    pub fn fingerprint(&self) -> &str {
        self.weights.fingerprint()
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.weights.config().num_hidden_layers
    }

    /// `H`, the width of hidden states.
    pub fn hidden_size(&self) -> usize {
        self.weights.config().hidden_size
    }

    /// `V`, the number of tokens.
    pub fn vocabulary(&self) -> usize {
        self.weights.config().vocab_size
    }

    /// Tokens that a text may have.
    pub fn context(&self) -> usize {
        self.weights.config().max_position_embeddings
    }

    /// Ids of a text to continue, `[T]`, with the start token of models that have one.
    ///
    /// # Errors
    /// - the tokenizer cannot encode it
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(plain(encode_text(text, &self.tokenizer, &self.weights)?))
    }

    /// Ids of a conversation up to where the answer begins, `[T]`.
    ///
    /// # Errors
    /// - the target has no chat template, or it refuses the messages
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        self.encode_chat_with(messages, &Map::new())
    }

    /// The same where the chat template has more variables (`enable_thinking`, ...).
    ///
    /// # Errors
    /// - as [`Self::encode_chat`], or the template sets one of them itself
    pub fn encode_chat_with(
        &self,
        messages: &[Message],
        chat_template_kwargs: &Map<String, Value>,
    ) -> Result<Vec<u32>> {
        TemplateArguments::of(chat_template_kwargs.clone()).check(&self.tokenizer)?;
        Ok(plain(encode_chat_with(messages, chat_template_kwargs, &self.tokenizer)?))
    }

    /// Text of ids, special tokens left out.
    ///
    /// # Errors
    /// - an id lies outside the vocabulary
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocabulary()) {
            let problem =
                format!("token {id} lies outside the vocabulary of {}", self.vocabulary());
            return Err(Failure::usage(problem).into());
        }
        Ok(self.tokenizer.decode(ids, true)?)
    }

    /// Hidden states after some layers, counted from 0, side by side for every token. They are what a draft reads
    /// when it decodes: factors of products are never rounded, whatever [`capture`](crate::capture) does by the key
    /// `products`.
    ///
    /// # Shapes
    /// - `ids`: `[T]` → `[T, L·H]` in row order
    ///
    /// # Errors
    /// - there are no ids or no layers, or one of them does not exist
    pub fn features(&self, ids: &[u32], layers: &[usize]) -> Result<Vec<f32>> {
        if ids.is_empty() || layers.is_empty() {
            return Err(Failure::usage("features need at least one token and one layer").into());
        }
        if let Some(layer) = layers.iter().find(|layer| **layer >= self.layers()) {
            let problem = format!("layer {layer} of a target with {} layers", self.layers());
            return Err(Failure::usage(problem).hint("layers are counted from 0").into());
        }
        if ids.len() > self.context() {
            let (tokens, context) = (ids.len(), self.context());
            let problem = format!("{tokens} tokens do not fit the context of {context}");
            return Err(Failure::usage(problem).hint("give them in parts").into());
        }
        let layers: Vec<LayerId> = layers.iter().map(|layer| LayerId(*layer)).collect();
        let taps: Vec<Tap> = layers.iter().map(|layer| Tap::Hidden(*layer)).collect();
        let sequence = PackedSequence::single(ids);
        let features = self.weights.forward(&sequence, &Taps::of(&taps))?;
        let rows = features.hidden_of(&layers)?.to_dtype(candle_core::DType::F32)?;
        Ok(rows.flatten_all()?.to_vec1()?)
    }
}

fn plain(ids: Vec<TargetTokenId>) -> Vec<u32> {
    ids.into_iter().map(|id| id.0).collect()
}

/// Weights of a draft beside the target that they were opened for.
type Opened = Option<(String, Arc<dyn Network>)>;

/// A draft on disk: a run, a checkpoint, a draft folder or file. Its weights are read when the first
/// session is opened with it; copies and sessions with the same target share them.
#[derive(Clone)]
pub struct Draft {
    pub(super) path: PathBuf,
    pub(super) source: DraftSource,
    opened: Arc<Mutex<Opened>>,
}

impl Draft {
    /// Finds a draft; of a run the newest checkpoint, of a curriculum that of its last stage.
    ///
    /// # Errors
    /// - there is none
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let source = DraftSource::find(&path)?;
        Ok(Self { path, source, opened: Arc::default() })
    }

    /// Where its weights lie.
    pub fn place(&self) -> &Path {
        self.source.place()
    }

    /// The target that its run was trained for, by name, if that is known.
    ///
    /// # Errors
    /// - the run's configuration cannot be read
    pub fn target(&self) -> Result<Option<String>> {
        Ok(self.source.target()?)
    }

    /// Where it comes from: run, steps, tokens, data.
    pub fn provenance(&self) -> Value {
        serde_json::to_value(self.source.provenance()).unwrap_or_default()
    }

    /// Its weights for a target.
    pub(super) fn weights(&self, target: &Weights) -> Result<Arc<dyn Network>> {
        // A draft lies where its target lies, and has a part of it as that is held.
        let key = format!("{} {:?} {:?}", target.fingerprint(), target.device(), target.held());
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, weights)) = &*opened
            && *known == key
        {
            return Ok(Arc::clone(weights));
        }
        let weights = open_draft(&self.source, target)?;
        *opened = Some((key, Arc::clone(&weights)));
        Ok(weights)
    }
}
