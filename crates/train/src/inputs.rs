//! What runs open, tried before any work: targets, tokenizers, sources, drafts, features.
//!
//! A stage of a curriculum may start hours after the first one. All that it will open is opened here as
//! far as that is quick: headers of weights, first rows of sources, the index of a feature store.

use std::collections::HashMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use longdraft_data::reader::check_source;
use longdraft_data::source::{SourceConfig, data_files, is_data_file};
use longdraft_features::StoredFeatures;
use longdraft_features::records::{RecordFolder, is_record_folder};
use longdraft_models::TargetConfig;
use longdraft_models::hub::DataSetId;
use longdraft_models::target_model::{Layers, Target, locate};
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Map, Value};

use crate::config::{CompletedDraft, DraftConfig, TrainConfig};
use crate::error::Result;
use crate::stage::{Encoder, source_paths};

/// Something that a run would not find, or could not use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputProblem {
    /// Dotted key of the configuration that names it.
    pub key: String,
    /// What is wrong.
    pub problem: String,
}

/// How much of what lies on a hub or in an object store is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// What is small: file lists of data sets, a target's configuration and tokenizer.
    Small,
    /// All that the run needs; it is fetched now instead of later.
    All,
}

/// What the stage is checked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Training: stored features must be there.
    Training,
    /// Capturing features, which writes them.
    Capturing,
}

type Description = Rc<(TargetConfig, TextTokenizer)>;

/// Tries the inputs of stages in their order. What several stages share is opened, and told, once.
pub struct InputCheck {
    reach: Reach,
    purpose: Purpose,
    targets: HashMap<String, Option<Description>>,
    weights: Vec<(String, Layers)>,
    /// With their target and the variables of its chat template.
    sources: Vec<(String, SourceConfig, Map<String, Value>)>,
    /// Run directories of the stages so far.
    outputs: Vec<PathBuf>,
}

impl InputCheck {
    /// Nothing is known yet.
    pub fn new(reach: Reach, purpose: Purpose) -> Self {
        Self {
            reach,
            purpose,
            targets: HashMap::new(),
            weights: Vec::new(),
            sources: Vec::new(),
            outputs: Vec::new(),
        }
    }

    /// Problems of the next stage; `follows` if it starts from the draft of the one before.
    pub fn stage(&mut self, config: &TrainConfig, follows: bool) -> Vec<InputProblem> {
        let mut problems = InputProblems::default();
        let target = self.target(config, &mut problems);
        let target = target.as_deref();
        self.data(config, target, &mut problems);
        self.draft(config, target.map(|(target, _)| target), follows, &mut problems);
        self.features(config, &mut problems);
        problems.check_output(&config.output);
        self.outputs.push(config.output.clone());
        problems.0
    }

    fn target(
        &mut self,
        config: &TrainConfig,
        problems: &mut InputProblems,
    ) -> Option<Description> {
        let spec = &config.target;
        if !self.targets.contains_key(spec) {
            let opened = match self.reach {
                Reach::Small => Target::open_description(spec).map_err(Into::into),
                Reach::All => describe(spec),
            };
            let opened = problems.take("target", opened).map(Rc::new);
            self.targets.insert(spec.clone(), opened);
        }
        let description = self.targets.get(spec).cloned().flatten()?;
        let wanted = (spec.clone(), config.needed_layers());
        let is_here = self.reach == Reach::All || Path::new(spec).exists();
        if is_here && !self.weights.contains(&wanted) {
            let check = || -> Result<()> { Ok(Target::check_weights(&locate(spec)?, wanted.1)?) };
            problems.take("target", check());
            self.weights.push(wanted);
        }
        Some(description)
    }

    fn data(
        &mut self,
        config: &TrainConfig,
        target: Option<&(TargetConfig, TextTokenizer)>,
        problems: &mut InputProblems,
    ) {
        let variables = &config.data.chat_template_kwargs;
        if let Some((_, tokenizer)) = target {
            problems.take("data.chat_template_kwargs", tokenizer.check_variables(variables));
        }
        for (part, sources) in [("train", &config.data.train), ("held_out", &config.data.held_out)]
        {
            for (index, source) in sources.iter().enumerate() {
                let known = (config.target.clone(), source.clone(), variables.clone());
                if self.sources.contains(&known) {
                    continue;
                }
                self.sources.push(known);
                let key = format!("data.{part}.{index}.path");
                problems.take(&key, self.source(source, target, variables));
            }
        }
    }

    fn source(
        &self,
        source: &SourceConfig,
        target: Option<&(TargetConfig, TextTokenizer)>,
        variables: &Map<String, Value>,
    ) -> Result<()> {
        let address = source.path.to_str().and_then(DataSetId::parse);
        if let (Some(id), Reach::Small) = (address, self.reach) {
            id?.list(&|name| is_data_file(name.as_ref()))?;
            return Ok(());
        }
        let paths = source_paths(source)?;
        match target {
            Some((target, tokenizer)) => {
                let encoder = Encoder::new(tokenizer, target).with_variables(variables);
                check_source(source, paths, &encoder)?;
            }
            // Without a tokenizer, whether it is there.
            None => paths.iter().try_for_each(|path| data_files(path).map(|_| ()))?,
        }
        Ok(())
    }

    fn draft(
        &self,
        config: &TrainConfig,
        target: Option<&TargetConfig>,
        follows: bool,
        problems: &mut InputProblems,
    ) {
        // Nothing is there yet of what an earlier stage writes.
        let is_written = |path: &PathBuf| self.outputs.iter().any(|out| path.starts_with(out));
        let from = config.draft.from.as_ref().filter(|path| !follows && !is_written(path));
        let draft = DraftConfig { from: from.cloned(), ..config.draft.clone() };
        let Some(CompletedDraft { start, method, .. }) =
            problems.take("draft.from", draft.completed())
        else {
            return;
        };
        if let (Some(start), Some(path)) = (&start, from)
            && !start.path.exists()
        {
            let problem = format!("{}: no such file or folder", path.display());
            return problems.add("draft.from", problem);
        }
        let Some(target) = target else { return };
        if let Some(start) = start
            && problems.take("draft.from", method.check_start(target, &start)).is_none()
        {
            return;
        }
        problems.take("draft", method.footprint(&config.teacher, target));
    }

    fn features(&self, config: &TrainConfig, problems: &mut InputProblems) {
        let Some(place) = config.train.features.store() else { return };
        let is_remote = place.contains("://") && !place.starts_with("file://");
        if self.purpose == Purpose::Training && (self.reach == Reach::All || !is_remote) {
            if is_record_folder(place) {
                let folder = Path::new(place.strip_prefix("file://").unwrap_or(place));
                problems.take("train.features", RecordFolder::open(folder).map(drop));
            } else {
                problems.take("train.features", StoredFeatures::recipe(place).map(drop));
            }
        }
    }
}

/// Fetches a hub target whole.
fn describe(spec: &str) -> Result<(TargetConfig, TextTokenizer)> {
    Ok((Target::open_config(spec)?, Target::open_tokenizer(spec)?))
}

/// Problems as they are found.
#[derive(Debug, Default)]
pub struct InputProblems(pub Vec<InputProblem>);

impl InputProblems {
    fn add(&mut self, key: &str, problem: String) {
        self.0.push(InputProblem { key: key.to_owned(), problem });
    }

    /// What was opened, or its problem taken down.
    pub fn take<T>(
        &mut self,
        key: &str,
        opened: std::result::Result<T, impl Display>,
    ) -> Option<T> {
        match opened {
            Ok(opened) => Some(opened),
            Err(error) => {
                self.add(key, error.to_string());
                None
            }
        }
    }

    /// Takes down where a file stands in the way of the run's folder.
    pub fn check_output(&mut self, folder: &Path) {
        let there = folder.ancestors().find(|path| path.exists());
        if let Some(file) = there.filter(|path| !path.is_dir()) {
            self.add("output", format!("{} is a file, no folder", file.display()));
        }
    }
}
