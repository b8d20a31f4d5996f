//! Numbers that must not be mixed up: layers, target tokens, draft tokens.

use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};

/// Index of a decoder layer of the target, counted from 0.
///
/// "After layer i" is the residual stream when layer i has added its attention and MLP outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
#[repr(transparent)]
pub struct LayerId(pub usize);

impl LayerId {
    /// The same tensor, named as the state that enters the next layer.
    pub fn entered(self) -> EnteredLayerId {
        EnteredLayerId(self.0 + 1)
    }
}

/// A state of the residual stream, named by the layer that it enters: 0 is the embeddings, `i` the
/// output of layer `i − 1`. vLLM, speculators, GGUF files and `hidden_states` of Hugging Face
/// count so; SGLang and DFlash name outputs ([`LayerId`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
#[repr(transparent)]
pub struct EnteredLayerId(pub usize);

impl EnteredLayerId {
    /// The layer whose output this is; `None` for the embeddings.
    pub fn output(self) -> Option<LayerId> {
        self.0.checked_sub(1).map(LayerId)
    }
}

/// A token of the target's vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
#[repr(transparent)]
pub struct TargetTokenId(pub u32);

/// A token of a draft's own, possibly smaller vocabulary; only a vocabulary map turns it into a
/// [`TargetTokenId`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
#[repr(transparent)]
pub struct DraftTokenId(pub u32);

/// Whether all ids are rows of a table of `vocabulary` tokens. It fails where one lies outside.
pub(crate) fn check_ids(ids: &[u32], vocabulary: usize) -> Result<()> {
    match ids.iter().find(|id| **id as usize >= vocabulary) {
        Some(id) => {
            let message = format!("token {id} lies outside the vocabulary of {vocabulary}");
            Err(ModelError::Tokenizer(message))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_enters_the_next_layer() {
        for k in [0, 1, 15, 28] {
            assert_eq!(LayerId(k).entered(), EnteredLayerId(k + 1));
            assert_eq!(LayerId(k).entered().output(), Some(LayerId(k)));
        }
        assert_eq!(EnteredLayerId(0).output(), None, "the embeddings are no layer's output");
    }
}
