//! The parts of a drafter: a draft model, prompt lookup, both or neither.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What proposed; nothing of it in plain decoding.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrafterParts {
    /// Method of the draft: `glide`, `mtp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Tokens that the draft proposes, where these are not all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<usize>,
    /// How prompt lookup takes part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lookup: Option<Lookup>,
    /// Texts beside the context that lookup finds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
}

/// Place of prompt lookup in a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lookup {
    /// There is no draft model.
    Alone,
    /// In one tree with the draft's proposals.
    Merged,
    /// In the draft's place where it finds much.
    Switched,
}

/// In short: `glide with 512 tokens + lookup (switched)`.
impl fmt::Display for DrafterParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(lookup) = self.lookup else {
            return write!(f, "{}", self.draft().as_deref().unwrap_or("none"));
        };
        if let Some(draft) = self.draft() {
            write!(f, "{draft} + ")?;
        }
        f.write_str(match lookup {
            Lookup::Alone => "lookup",
            Lookup::Merged => "lookup (merged)",
            Lookup::Switched => "lookup (switched)",
        })?;
        self.datastore.iter().try_for_each(|texts| write!(f, " in {texts}"))
    }
}

impl DrafterParts {
    fn draft(&self) -> Option<String> {
        let method = self.method.as_ref()?;
        Some(match self.vocabulary {
            Some(tokens) => format!("{method} with {tokens} tokens"),
            None => method.clone(),
        })
    }
}
