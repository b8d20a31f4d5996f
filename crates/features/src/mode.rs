//! Where features come from, as configurations say it.

use serde::{Deserialize, Serialize};

/// Where features come from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum FeatureMode {
    /// The target runs for every batch.
    #[default]
    Online,
    /// The target runs once a row; later epochs reuse its features and positions.
    Memory,
    /// `longdraft capture` wrote them to this folder or URL; the target's layers are not loaded.
    Stored(String),
}

impl FeatureMode {
    /// Where stored features lie.
    pub fn store(&self) -> Option<&str> {
        match self {
            Self::Stored(location) => Some(location),
            Self::Online | Self::Memory => None,
        }
    }
}

impl From<String> for FeatureMode {
    fn from(text: String) -> Self {
        match text.as_str() {
            "online" => Self::Online,
            "memory" => Self::Memory,
            _ => Self::Stored(text),
        }
    }
}

impl From<FeatureMode> for String {
    fn from(mode: FeatureMode) -> Self {
        match mode {
            FeatureMode::Online => "online".to_owned(),
            FeatureMode::Memory => "memory".to_owned(),
            FeatureMode::Stored(location) => location,
        }
    }
}
