//! A draft that a training goes on from: what is known of it, and whether it is one of the target.

use std::path::Path;

use longdraft_models::draft::DraftKind;
use longdraft_train::checkpoint::{read_state, saved_draft};
use longdraft_train::config::DraftConfig;
use longdraft_train::method::{Method, Room};
use serde_json::{Map, Value, json};

use crate::draft_source::{DraftSource, configuration};
use crate::failure::{Failure, Result};

/// A draft that is gone on from.
pub(crate) struct Start {
    pub(crate) method: String,
    /// The keys that it was trained with, if they are known.
    trained: Option<Map<String, Value>>,
    /// Those that make its network, as it was saved.
    network: Map<String, Value>,
}

impl Start {
    /// The keys of a training that goes on from it: `otherwise` is how its method is set up where nothing is
    /// known of the training before.
    pub(crate) fn keys(&self, otherwise: Map<String, Value>) -> Map<String, Value> {
        let mut keys = self.trained.clone().unwrap_or(otherwise);
        if self.trained.is_none() {
            keys.extend(self.network.clone());
        }
        keys
    }
}

/// What is known of a draft that is gone on from.
pub(crate) fn start(from: &Path) -> Result<Start> {
    let source = DraftSource::find(from)?;
    let (method, trained) = match &source {
        DraftSource::Files(_) => (DraftKind::at(source.folder())?.name.to_owned(), None),
        DraftSource::Checkpoint(located) => {
            let mut keys = configuration(&located.run)["draft"].as_object().cloned();
            for key in ["method", "from"] {
                keys.as_mut().map(|keys| keys.remove(key));
            }
            (read_state(&located.checkpoint)?.method, keys)
        }
    };
    let saved = saved_draft(from)?;
    let known = Method::named(&method).map(|known| known.fresh().keys_of(&saved)).transpose()?;
    Ok(Start { method, trained, network: known.unwrap_or_default() })
}

/// Refuses a draft that no training of a target goes on from: another network, or one of another target.
pub(super) fn require_start(from: &Path, room: &Room<'_>) -> Result<()> {
    let start = start(from)?;
    let recipe = Method::named(&start.method).and_then(|method| method.fresh().recipe(room));
    let mut keys = start.keys(recipe.map(|recipe| recipe.draft).unwrap_or_default());
    keys.insert("method".into(), json!(start.method));
    keys.insert("from".into(), json!(from));
    let draft: DraftConfig =
        serde_json::from_value(Value::Object(keys)).map_err(Failure::at(from))?;
    let completed = draft.completed()?;
    let checked =
        completed.start.map_or(Ok(()), |saved| completed.method.check_start(room.target, &saved));
    checked.map_err(|error| {
        Failure::usage(format!("--from: {error}")).hint("give a draft of this target, or none")
    })
}
