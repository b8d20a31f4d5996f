//! Why there is no configuration.

use super::Problem;

/// Result of composing.
pub type Result<T> = std::result::Result<T, ConfigurationError>;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigurationError {
    /// All that is wrong with it.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  "))]
    Problems(Vec<Problem>),
    /// A stage is picked where there are none.
    #[error("{name}: there are no stages, so no `{picked}`")]
    NoStages {
        /// What the configuration goes by.
        name: String,
        /// As it was picked.
        picked: String,
    },
    /// None of a curriculum's stages is picked.
    #[error("{name}: which stage? there are `{}`", stages.join("`, `"))]
    WhichStage {
        /// What the configuration goes by.
        name: String,
        /// Those that there are.
        stages: Vec<String>,
    },
}

impl ConfigurationError {
    /// The way out, where there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::WhichStage { .. } => Some("add stage=NAME"),
            Self::Problems(problems) if problems.iter().any(|one| one.is_missing_file) => {
                Some("`longdraft init` writes a configuration; recipes lie in conf/ of the sources")
            }
            Self::Problems(_) | Self::NoStages { .. } => None,
        }
    }
}

impl From<Vec<Problem>> for ConfigurationError {
    fn from(problems: Vec<Problem>) -> Self {
        Self::Problems(problems)
    }
}

impl From<Problem> for ConfigurationError {
    fn from(problem: Problem) -> Self {
        Self::Problems(vec![problem])
    }
}
