//! A model of the Hugging Face hub, with a bar while it arrives.

use std::path::PathBuf;

use longdraft_models::ModelError;
use longdraft_models::disk::readable_bytes;
use longdraft_models::hub::{Arrived, Fetched, ModelId};
use longdraft_models::target_model::Target;

use crate::commands::fit;
use crate::failure::Result;
use crate::status::Bar;

const MIB: u64 = 1 << 20;

/// A model that lies here now.
pub(super) struct Model {
    /// A folder, or the first GGUF file.
    pub(super) path: PathBuf,
    pub(super) files: Vec<PathBuf>,
    /// The command that tries it, where it can be run.
    pub(super) next: Option<String>,
}

/// Fetches what is not there yet.
pub(super) fn fetch(id: &ModelId) -> Result<Model> {
    let next = next_command(id)?;
    let mut arrival = Arrival::default();
    let fetched = id.fetch(&mut |arrived| arrival.hear(arrived));
    arrival.end();
    let Fetched { path, files } = fetched?;
    Ok(Model { path, files, next })
}

/// What to call afterwards. A model that cannot be run is told before gigabytes of it are fetched.
fn next_command(id: &ModelId) -> Result<Option<String>> {
    let name = id.to_string();
    match Target::open_description(&name) {
        Ok((_, tokenizer)) => {
            let [generate, _] = fit::commands(&name, "", 0.0, tokenizer.chat_template().is_some());
            Ok(Some(generate))
        }
        Err(
            error @ (ModelError::Hub { .. } | ModelError::HubFiles { .. } | ModelError::Io { .. }),
        ) => Err(error.into()),
        Err(error) => {
            errln!("warning: longdraft cannot run this model: {error}");
            Ok(None)
        }
    }
}

/// What has arrived, as it is told: a line a file, and a bar on a terminal.
#[derive(Default)]
struct Arrival {
    name: String,
    bar: Option<Bar>,
    /// MiB that the bar shows.
    shown: Option<u64>,
}

impl Arrival {
    fn hear(&mut self, arrived: Arrived<'_>) {
        let Arrived { name, bytes, of } = arrived;
        if self.name != name {
            self.end();
            name.clone_into(&mut self.name);
            let size = of.map_or_else(String::new, |size| format!(" ({})", readable_bytes(size)));
            let from = if bytes > 0 {
                format!(", going on after {}", readable_bytes(bytes))
            } else {
                String::new()
            };
            errln!("fetching {name}{size}{from}");
            self.bar = of.and_then(|_| Bar::new());
        }
        if let (Some(bar), Some(size)) = (&mut self.bar, of)
            && self.shown != Some(bytes / MIB)
        {
            bar.show(bytes / MIB, size.div_ceil(MIB), &format!("MiB {name}"));
            self.shown = Some(bytes / MIB);
        }
    }

    /// Takes the bar away.
    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.clear();
        }
        self.shown = None;
    }
}
