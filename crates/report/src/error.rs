//! What can go wrong with a report.

/// Result of making a report.
pub type Result<T> = std::result::Result<T, ReportError>;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// Directories hold nothing to report.
    #[error("{}", .0.join("\n  "))]
    NoRuns(
        /// What is wrong with each, and what was looked for.
        Vec<String>,
    ),
    /// A chart cannot be drawn.
    #[error("chart `{title}`: {cause}")]
    Chart {
        /// What it shows.
        title: String,
        /// The drawing library's own words.
        cause: String,
    },
    /// The page cannot be put together.
    #[error("report: {0}")]
    Page(#[from] minijinja::Error),
}

impl ReportError {
    /// The way out, where there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoRuns(_) => Some(
                "give the `output` directory of `longdraft train`, of a curriculum, or of `eval \
                 decode`; metrics are there after the first logged step",
            ),
            Self::Chart { .. } | Self::Page(_) => None,
        }
    }
}
