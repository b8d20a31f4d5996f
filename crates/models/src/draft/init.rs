//! What a fresh draft begins with.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Initial values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Matrices N(0, `initializer_range`), biases 0, norms 1.
    #[default]
    Random,
    /// The target's last layer: norms, attention and MLP. GLIDE's cross branch takes its q and o, too;
    /// a block draft begins over the keys and values that this layer has, in its own last layer.
    LastLayer,
}
