//! Numbers that must not be mixed up: layers, target tokens, draft tokens.

use serde::{Deserialize, Serialize};

/// Index of a decoder layer of the target, counted from 0.
///
/// "After layer i" is the residual stream when layer i has added its attention and MLP outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
#[repr(transparent)]
pub struct LayerId(pub usize);

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
