//! What can go wrong while decoding.

use longdraft_models::ModelError;

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
    Tensor(#[from] candle_core::Error),
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
}
