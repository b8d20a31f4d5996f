//! What can go wrong while decoding.

use longdraft_models::error::without_backtrace;
use longdraft_models::{ModelError, TargetTokenId};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, DecodeError>;

/// An error of a decoding request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The model cannot run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(candle_core::Error),
    /// The prompt is empty.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// The prompt fills the context.
    #[error("the prompt of {prompt} tokens leaves no room in the context of {context}")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Longest context of the target.
        context: usize,
    },
    /// The tokenizer has tokens that the target has not.
    #[error("the prompt holds token {token}, which is not one of the target's {vocabulary}")]
    UnknownToken {
        /// Id of the token.
        token: u32,
        /// Tokens of the target.
        vocabulary: usize,
    },
    /// A batch decoder without places.
    #[error("a batch needs at least one place to decode at")]
    NoPlace,
    /// A temperature or truncation that makes no distribution.
    #[error("{0}")]
    Sampling(String),
    /// A shape of proposals that cannot be.
    #[error("{0}")]
    Shape(String),
    /// A grammar that cannot be followed.
    #[error("the answer cannot follow its grammar any further: {0}")]
    Grammar(String),
    /// Logits without a single number.
    #[error("the logits are not numbers: the weights are damaged, or of another model")]
    NoDistribution,
    /// A draft of a method that has no drafter here.
    #[error("no drafter proposes with drafts of method `{0}`")]
    NoDrafter(&'static str),
    /// A draft's state is older than the text.
    #[error("the draft saw features of {seen} tokens, the root stands at {root}")]
    Features {
        /// Tokens whose features the draft has seen.
        seen: usize,
        /// Index of the root.
        root: usize,
    },
}

impl From<candle_core::Error> for DecodeError {
    fn from(error: candle_core::Error) -> Self {
        Self::Tensor(without_backtrace(error))
    }
}

impl DecodeError {
    /// Refuses a prompt that a target of such a context and vocabulary cannot read.
    ///
    /// # Errors
    /// - the prompt is empty, fills the context, or holds a token that the target does not know
    pub fn check_prompt(prompt: &[TargetTokenId], context: usize, vocabulary: usize) -> Result<()> {
        if prompt.is_empty() {
            return Err(Self::EmptyPrompt);
        }
        if prompt.len() >= context {
            return Err(Self::PromptTooLong { prompt: prompt.len(), context });
        }
        match prompt.iter().find(|token| token.0 as usize >= vocabulary) {
            Some(token) => Err(Self::UnknownToken { token: token.0, vocabulary }),
            None => Ok(()),
        }
    }

    /// Whether the prompt alone is to blame: other requests can go on.
    pub fn is_of_the_prompt(&self) -> bool {
        matches!(self, Self::EmptyPrompt | Self::PromptTooLong { .. } | Self::UnknownToken { .. })
    }
}
