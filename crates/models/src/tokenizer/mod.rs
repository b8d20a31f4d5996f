//! Text to token ids and back, with the model's own chat template.

mod chat_template;
mod checked;
mod gguf;
mod pieces;
mod pre_tokenizers;
mod sentence_piece;
mod stream;
#[cfg(test)]
mod tests;
mod token_bytes;
mod train;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;

use crate::bounded::caught;
use crate::error::{ModelError, Result};
use crate::side_files;
use crate::weights::gguf::header::Header;
use chat_template::written_token;

pub use chat_template::{ChatTemplate, Message, variables_text};
pub use pre_tokenizers::name_of as pre_tokenizer_name;
pub use sentence_piece::{Piece, PieceKind, SentencePieces};
pub use stream::TextStream;
pub use train::{SMALLEST_VOCABULARY, train_bpe};

/// A tokenizer with special-token names and, if the model has one, a chat template.
#[derive(Clone)]
pub struct TextTokenizer {
    inner: Tokenizer,
    /// The steps that its files have, where `inner` splits texts by other expressions into the same pieces.
    own_steps: Option<PreTokenizerWrapper>,
    chat_template: Option<ChatTemplate>,
    adds_bos: bool,
    /// The start token, where the files name one.
    bos: Option<u32>,
    /// By ids whose token a later id has, too: that one, which the library knows alone.
    twins: HashMap<u32, u32>,
    /// Whether one character of a written token is one byte of text.
    is_byte_level: bool,
    fingerprint: OnceLock<String>,
    /// Bytes of the longest token.
    longest: OnceLock<usize>,
    /// The file that describes it.
    path: Option<PathBuf>,
}

/// Ids of a text and the byte range of the text that each of them covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids, `[T]`.
    pub ids: Vec<u32>,
    /// Byte ranges, `[T]`.
    pub offsets: Vec<Range<usize>>,
}

/// What the tokenizer's own post-processing puts before a text.
fn start_of_template(inner: &Tokenizer) -> std::result::Result<Option<u32>, String> {
    let first = |special| inner.encode("a", special).ok()?.get_ids().first().copied();
    let added = || first(true).filter(|id| Some(*id) != first(false));
    caught(added).map_err(|stopped| stopped.to_string())
}

/// Whether the tokenizer decodes written tokens character by character into bytes.
fn is_byte_level(inner: &Tokenizer) -> bool {
    let decoder = inner.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok());
    decoder.is_some_and(|decoder| decoder.to_string().contains("\"ByteLevel\""))
}

/// A JSON file, or null without it.
fn optional_json(path: &Path) -> Result<Value> {
    match side_files::read_text_if_there(path)? {
        Some(text) => serde_json::from_str(&text).map_err(|error| ModelError::invalid(path, error)),
        None => Ok(Value::Null),
    }
}

/// The chat template of a folder, or several by name; null without any.
fn templates(folder: &Path, config: &Value) -> Result<Value> {
    let read = |name: &str| side_files::read_text_if_there(&folder.join(name));
    if let Some(text) = read("chat_template.jinja")? {
        let mut named = vec![json!({ "name": "default", "template": text })];
        let for_tools = read("additional_chat_templates/tool_use.jinja")?;
        named.extend(for_tools.map(|text| json!({ "name": "tool_use", "template": text })));
        return Ok(named.into());
    }
    if let Some(templates) = config.get("chat_template").filter(|own| !own.is_null()) {
        return Ok(templates.clone());
    }
    let mut older = optional_json(&folder.join("chat_template.json"))?;
    Ok(older.get_mut("chat_template").map(Value::take).unwrap_or_default())
}

impl TextTokenizer {
    /// Reads `tokenizer.json`, `tokenizer_config.json` and a chat template of a folder. The template stands in
    /// `chat_template.jinja`, else in `tokenizer_config.json`, else in `chat_template.json`.
    ///
    /// # Errors
    /// - `tokenizer.json` is missing or unusable, another file is no JSON, or the template does not parse
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let bytes = side_files::read(&path)?;
        let inner = checked::from_json(bytes)
            .map_err(|problem| ModelError::invalid(&path, format!("not a tokenizer: {problem}")))?;
        let config = optional_json(&folder.join("tokenizer_config.json"))?;
        let chat_template = ChatTemplate::from_config(&config, &templates(folder, &config)?)?;
        let start = start_of_template(&inner);
        let start = start.map_err(|problem| ModelError::invalid(&path, problem))?;
        let asked = config.get("add_bos_token").and_then(Value::as_bool).unwrap_or(false);
        let adds_bos = asked || start.is_some();
        let written = || written_token(&config, "bos_token").and_then(|bos| inner.token_to_id(bos));
        let bos = start.or_else(written);
        let tokenizer = Self::new(inner, chat_template, adds_bos).of_file(&path);
        Ok(Self { bos, ..tokenizer })
    }

    /// Builds the tokenizer that the header of a GGUF file describes.
    ///
    /// # Errors
    /// - the header holds none, or one of an unknown kind
    pub fn from_gguf(header: &Header, path: &Path) -> Result<Self> {
        gguf::read(header)
            .map(|tokenizer| tokenizer.of_file(path))
            .map_err(|problem| ModelError::invalid(path, format!("not a tokenizer: {problem}")))
    }

    fn new(mut inner: Tokenizer, chat_template: Option<ChatTemplate>, adds_bos: bool) -> Self {
        let own_steps = pre_tokenizers::split_in_linear_time(&mut inner);
        let is_byte_level = is_byte_level(&inner);
        let (fingerprint, longest) = (OnceLock::new(), OnceLock::new());
        let (bos, path, twins) = (None, None, HashMap::new());
        Self {
            inner,
            own_steps,
            chat_template,
            adds_bos,
            bos,
            twins,
            is_byte_level,
            fingerprint,
            longest,
            path,
        }
    }

    /// The same, named by its file in errors.
    fn of_file(self, path: &Path) -> Self {
        Self { path: Some(path.to_path_buf()), ..self }
    }

    /// What the library makes of a text, without its panics.
    fn attempt<T>(&self, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
        let problem = match caught(work) {
            Ok(Ok(made)) => return Ok(made),
            Ok(Err(error)) => error.to_string(),
            Err(stopped) => stopped.to_string(),
        };
        Err(match &self.path {
            Some(path) => ModelError::invalid(path, format!("tokenizer: {problem}")),
            None => ModelError::Tokenizer(problem),
        })
    }

    /// Whether the model wants its start token before a raw text.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// Ids of `text`, without special tokens added around it; special tokens written out in the
    /// text are recognised.
    ///
    /// # Errors
    /// - the tokenizer cannot encode the text
    pub fn encode(&self, text: &str) -> Result<Encoded> {
        pieces::encode(text, pieces::USUAL, |part| {
            let encoding = self.attempt(|| self.inner.encode(part, false))?;
            Ok(Encoded {
                ids: encoding.get_ids().to_vec(),
                offsets: encoding.get_offsets().iter().map(|&(start, end)| start..end).collect(),
            })
        })
    }

    /// The token that prompts of plain text begin with, where the tokenizer adds one: the one that the tokenizer's files
    /// name, else the model's `bos`. Where they differ, as in distilled models that keep the configuration of another
    /// one, engines take the tokenizer's.
    pub fn start_token(&self, bos: Option<u32>) -> Option<u32> {
        self.bos.or(bos).filter(|_| self.adds_bos)
    }

    /// Ids of a text to continue: it gets the [start token](Self::start_token) where it has none.
    ///
    /// # Errors
    /// - the tokenizer cannot encode the text
    pub fn encode_prompt(&self, text: &str, bos: Option<u32>) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?.ids;
        if let Some(bos) = self.start_token(bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Text of `ids`.
    ///
    /// # Errors
    /// - the tokenizer's decoder fails
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        let ids: Vec<u32> = ids.iter().map(|id| self.known(*id)).collect();
        self.attempt(|| self.inner.decode(&ids, skip_special_tokens))
    }

    /// The written form of a token, special ones included.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(self.known(id))
    }

    /// The id by which the library knows the token of `id`.
    fn known(&self, id: u32) -> u32 {
        self.twins.get(&id).copied().unwrap_or(id)
    }

    /// Id of a written token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Ids of special tokens, ascending.
    pub fn special_ids(&self) -> Vec<u32> {
        let added = self.inner.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special);
        let mut ids: Vec<u32> = special.map(|(id, _)| *id).collect();
        let is_special = |(_, known): &(&u32, &u32)| added.get(*known).is_some_and(|t| t.special);
        ids.extend(self.twins.iter().filter(is_special).map(|(id, _)| *id));
        ids.sort_unstable();
        ids
    }

    /// Number of token ids, added tokens included.
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab_size(true) + self.twins.len()
    }

    /// Whether one character of a written token is one byte of text (GPT-2's way).
    pub fn is_byte_level(&self) -> bool {
        self.is_byte_level
    }

    /// Whether a token is special: no text of its own.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary();
        self.token(id).is_some_and(|token| added.is_special_token(&token))
    }

    /// The tokenizer as its files have it.
    fn described(&self) -> Cow<'_, Tokenizer> {
        let mut described = Cow::Borrowed(&self.inner);
        if let Some(steps) = &self.own_steps {
            described.to_mut().with_pre_tokenizer(Some(steps.clone()));
        }
        described
    }

    /// Tells tokenizers apart: equal for the same vocabulary, merges and normalisation.
    ///
    /// # Errors
    /// - the tokenizer cannot be written as JSON
    pub fn fingerprint(&self) -> Result<String> {
        if let Some(known) = self.fingerprint.get() {
            return Ok(known.clone());
        }
        let text = self.attempt(|| self.described().to_string(false))?;
        let fingerprint = blake3::hash(text.as_bytes()).to_hex()[..16].to_owned();
        Ok(self.fingerprint.get_or_init(|| fingerprint).clone())
    }

    /// The chat template, if the model has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// Refuses variables that no rendering would read; the message says why, and what to do.
    ///
    /// # Errors
    /// - there is no chat template, or it sets one of them itself
    pub fn check_variables(
        &self,
        variables: &Map<String, Value>,
    ) -> std::result::Result<(), String> {
        let Some(template) = &self.chat_template else {
            let problem = "the target has no chat template that reads variables: leave them out";
            return if variables.is_empty() { Ok(()) } else { Err(problem.to_owned()) };
        };
        match variables.keys().find(|name| template.sets(name)) {
            Some(name) => Err(format!("`{name}` is set for every conversation: leave it out")),
            None => Ok(()),
        }
    }

    /// The same whose chat template has more variables ([`ChatTemplate::with_variables`]), if there is a template.
    #[must_use]
    pub fn with_variables(mut self, variables: &Map<String, Value>) -> Self {
        self.chat_template = self.chat_template.map(|template| template.with_variables(variables));
        self
    }

    /// A decoder that returns text as soon as its characters are complete.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    /// The same for a text that goes on where `before` ends: its first space is a space like any other.
    ///
    /// # Errors
    /// - the tokenizer's decoder fails
    pub fn stream_after(&self, before: &[u32]) -> Result<TextStream<'_>> {
        TextStream::after(self, before)
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json`.
    ///
    /// # Errors
    /// - the files cannot be written
    pub fn save(&self, folder: &Path) -> Result<()> {
        let path = folder.join("tokenizer.json");
        self.described().save(&path, false).map_err(|error| ModelError::invalid(&path, error))?;
        if let Some(template) = &self.chat_template {
            let path = folder.join("tokenizer_config.json");
            let text = format!("{:#}\n", template.to_config());
            std::fs::write(&path, text).map_err(ModelError::io(&path))?;
        }
        Ok(())
    }
}
