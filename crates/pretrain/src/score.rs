//! The stream that a model is scored on, with the bytes of its targets.

use std::path::Path;

use longdraft_data::token_stream::{START_OF_DOCUMENT, TokenStream, sidecar_path};
use longdraft_models::bits_per_byte::{
    ByteTable, Score, Scorer, Tail, Window, evaluate, plain_windows, sliding_windows,
};
use longdraft_models::paths::folder_of;
use longdraft_models::tokenizer::{SentencePieces, TextTokenizer};

use crate::error::{PretrainError, Result};

/// Documents whose text is compared with the table's count.
const TESTED_DOCUMENTS: usize = 10_000;

/// What tokens stand for.
pub enum Tokenizer {
    /// A SentencePiece model.
    SentencePiece(Box<SentencePieces>),
    /// A `tokenizer.json`.
    Json(Box<TextTokenizer>),
}

impl Tokenizer {
    /// Opens a `.model` file, or a folder with a `tokenizer.json` (or that file).
    ///
    /// # Errors
    /// - it is neither, or unusable
    pub fn open(path: &Path) -> Result<Self> {
        if path.extension().is_some_and(|extension| extension == "model") {
            return Ok(Self::SentencePiece(Box::new(SentencePieces::open(path)?)));
        }
        Ok(Self::Json(Box::new(TextTokenizer::from_folder(folder_of(path))?)))
    }

    /// Tells tokenizers apart.
    pub fn hash(&self) -> String {
        match self {
            Self::SentencePiece(pieces) => pieces.hash().to_owned(),
            Self::Json(tokenizer) => tokenizer.fingerprint().unwrap_or_default(),
        }
    }

    /// Number of ids.
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::SentencePiece(pieces) => pieces.vocabulary(),
            Self::Json(tokenizer) => tokenizer.vocabulary(),
        }
    }

    /// A tokenizer that encodes text.
    ///
    /// # Errors
    /// - the pieces make none
    pub fn text_tokenizer(&self) -> Result<TextTokenizer> {
        Ok(match self {
            Self::SentencePiece(pieces) => pieces.tokenizer()?,
            Self::Json(tokenizer) => tokenizer.as_ref().clone(),
        })
    }

    /// Bytes of its tokens, if a table can say them.
    pub fn byte_table(&self, vocabulary: usize) -> Option<ByteTable> {
        match self {
            Self::SentencePiece(pieces) => Some(ByteTable::new(pieces, vocabulary)),
            Self::Json(tokenizer) => ByteTable::of_byte_level(tokenizer, vocabulary),
        }
    }
}

/// Tokens with their bytes.
pub struct ScoredStream {
    tokens: Vec<u32>,
    bytes: Vec<u32>,
    warnings: Vec<String>,
}

impl ScoredStream {
    /// The first tokens of a stream; bytes are those of side-cars where every shard has one, and
    /// of the tokenizer's table otherwise.
    ///
    /// # Errors
    /// - the stream cannot be read, or nothing says the tokens' bytes
    pub fn new(
        stream: &TokenStream,
        tokenizer: &Tokenizer,
        vocabulary: usize,
        max_tokens: Option<usize>,
    ) -> Result<Self> {
        let count = stream.len().min(max_tokens.unwrap_or(usize::MAX));
        let tokens: Vec<u32> = stream.read(0..count)?.into_iter().map(u32::from).collect();
        let sidecars: Vec<_> = stream.paths().map(sidecar_path).collect();
        let mut warnings = Vec::new();
        let bytes = if sidecars.iter().all(|path| path.is_file()) {
            let counts = TokenStream::open(&sidecars)?;
            if counts.len() != stream.len() {
                let problem = format!("{} byte counts for {} tokens", counts.len(), stream.len());
                return Err(PretrainError::bytes(&sidecars[0], problem));
            }
            counts.read(0..count)?.into_iter().skip(1).map(u32::from).collect()
        } else {
            let table = tokenizer.byte_table(vocabulary).ok_or_else(|| {
                let problem = "nothing says how many bytes these tokens stand for: give a \
                               SentencePiece model, a byte-level tokenizer, or side-cars";
                PretrainError::bytes(stream.paths().next().unwrap_or(Path::new("")), problem)
            })?;
            if table.inner_marks() > 0 {
                warnings.push(format!(
                    "{} pieces of the tokenizer hold a space inside, counted as 3 bytes each",
                    table.inner_marks()
                ));
            }
            warnings.extend(self_test(&tokens, &table, tokenizer)?);
            table.of_stream(&tokens)
        };
        Ok(Self { tokens, bytes, warnings })
    }

    /// A stream whose bytes are known.
    pub fn of(tokens: Vec<u32>, bytes: Vec<u32>) -> Self {
        Self { tokens, bytes, warnings: Vec::new() }
    }

    /// What is odd about the byte counts.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Targets, one fewer than tokens.
    pub fn targets(&self) -> usize {
        self.bytes.len()
    }

    /// Targets that are the token `start` of documents, which counts with 0 bytes.
    pub fn document_starts(&self, start: u32) -> usize {
        self.tokens.iter().skip(1).filter(|token| **token == start).count()
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Score in any windows, whose configured length is `window`.
    ///
    /// # Errors
    /// - an id lies outside the vocabulary, or a window leaves the stream
    pub fn score_windows(
        &self,
        scorer: &dyn Scorer,
        windows: &[Window],
        window: usize,
        batch_tokens: usize,
    ) -> Result<Score> {
        let windows = (windows, window);
        Ok(evaluate(scorer, &self.tokens, &self.bytes, windows, batch_tokens, &mut |_, _| {})?)
    }

    /// Score in windows that do not overlap.
    ///
    /// # Errors
    /// - an id lies outside the vocabulary
    pub fn score_plain(
        &self,
        scorer: &dyn Scorer,
        window: usize,
        batch_tokens: usize,
    ) -> Result<Score> {
        let windows = plain_windows(self.targets(), window);
        self.score_windows(scorer, &windows, window, batch_tokens)
    }

    /// Score in windows that move on by `stride` targets.
    ///
    /// # Errors
    /// - an id lies outside the vocabulary
    pub fn score_sliding(
        &self,
        scorer: &dyn Scorer,
        (window, stride): (usize, usize),
        tail: Tail,
        batch_tokens: usize,
    ) -> Result<Score> {
        let windows = sliding_windows(self.targets(), window, stride, tail);
        self.score_windows(scorer, &windows, window, batch_tokens)
    }
}

/// The text of the first documents has as many bytes as the table says.
fn self_test(tokens: &[u32], table: &ByteTable, tokenizer: &Tokenizer) -> Result<Option<String>> {
    let tokenizer = tokenizer.text_tokenizer()?;
    let start = u32::from(START_OF_DOCUMENT);
    let (mut decoded, mut counted) = (0_usize, 0_usize);
    let documents = tokens.split(|token| *token == start).filter(|ids| !ids.is_empty());
    for document in documents.take(TESTED_DOCUMENTS) {
        decoded += tokenizer.decode(document, true)?.len();
        let mut previous = start;
        for token in document {
            counted += table.bytes(*token, previous) as usize;
            previous = *token;
        }
    }
    Ok((decoded != counted).then(|| {
        format!(
            "the text of the first documents has {decoded} bytes, the byte table says {counted}: \
             bits per byte are off by {:.4} %",
            100.0 * (counted as f64 / decoded.max(1) as f64 - 1.0)
        )
    }))
}
