//! `longdraft fit`: from a model to a faster model, within a time.
//!
//! ```text
//! prompts -> measure -> plan -> answers -> training -> proof -> delivery
//! ```
//!
//! `fit.json` holds what is done; every phase can be repeated, and goes on where it was killed.

mod answers;
mod beginning;
mod candidate;
mod comparing;
mod delivery;
mod divergence;
mod ending;
mod expect;
mod following;
mod hearing;
mod learning;
mod lengths;
mod lookup;
mod measure;
mod parting;
mod phases;
mod prompts;
mod proof;
mod rounds;
mod rules;
mod search;
mod speed;
mod stages;
mod state;
mod telling;
mod training;
mod trial;

use std::path::{Path, PathBuf};

use longdraft_models::hub::ModelId;
use longdraft_models::sha256;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_serving::Profile;
use longdraft_train::method::Room;

use crate::cli::FitArguments;
use crate::commands::{require_text, watch};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::model_source::no_target;
use crate::screen::Screen;
use rules::Candidate;
use state::{Ledger, Settings};

pub(crate) use beginning::start;
pub(crate) use delivery::commands;
pub(crate) use speed::{TrainingSpeed, timed};

/// The engine that is this program.
const OWN_ENGINE: &str = "longdraft";

/// What the phases know of the call.
struct Fit<'a> {
    arguments: &'a FitArguments,
    json: bool,
    engines: Vec<Profile>,
    tokenizer: TextTokenizer,
    config: longdraft_models::TargetConfig,
    ledger: Ledger,
    interrupts: Interrupts,
}

/// Fits; a second call goes on where the first one stopped, and adds where it has more time.
pub(crate) fn run(arguments: &FitArguments, json: bool) -> Result<()> {
    let engines = checked(arguments)?;
    let described = Target::open_description(&arguments.target);
    let (config, tokenizer) = described.map_err(no_target(&arguments.target))?;
    let tokenizer = arguments.template.apply(tokenizer)?;
    let has_chat_template = tokenizer.chat_template().is_some();
    if !has_chat_template {
        errln!(
            "note: the target has no chat template: prompts are given as plain text and continued as they are"
        );
    }
    let (prompts, field) = (arguments.prompts.as_deref(), arguments.field.as_deref());
    let parts = prompts::read(prompts, field, has_chat_template)?;
    let output = arguments.output.clone().unwrap_or_else(|| default_output(&arguments.target));
    let settings = Settings {
        target: arguments.target.clone(),
        files: files_digest(&arguments.target)?,
        weights: Target::fingerprint_of(&arguments.target)?,
        prompts: parts.digest.clone(),
        temperature: arguments.temperature,
        max_tokens: arguments.max_tokens,
        seed: arguments.seed,
        chat_template_kwargs: arguments.template.variables(),
    };
    if let Some(from) = &arguments.from {
        // A draft that cannot be gone on from is told before any work; rows of any length show it.
        let room = Room { target: &config, seconds: arguments.time, row_tokens: 512 };
        beginning::require_start(from, &room)?;
    }
    prompts::Parts::require_own(&output)?;
    let mut ledger = Ledger::open(&output, &settings, &parts.split)?;
    // The same weights may have moved.
    ledger.state.settings = settings;
    telling::prompts(&parts.split);
    parts.write(&output)?;
    rounds::begin(&mut ledger, arguments)?;
    let interrupts = Interrupts::listen();
    let folder = ledger.folder.clone();
    let watched = arguments.open.then(|| watch::beside(&folder)).transpose()?;
    let plain = arguments.plain || arguments.plan || json;
    let screen = if plain { None } else { Screen::start(&folder, &interrupts) };
    let fit = Fit { arguments, json, engines, tokenizer, config, ledger, interrupts };
    let ended = fit.run().map_err(in_terms_of_fit);
    // What waited is printed, and whoever watches sees the end.
    drop(screen);
    if let Some(watched) = watched {
        watched.end();
    }
    ended
}

/// A failure with remedies that a fit has: no configuration is written by hand there.
fn in_terms_of_fit(failure: Failure) -> Failure {
    if !failure.lacks_device_memory() {
        return failure;
    }
    failure.hint(
        "end what else uses the GPU: what is done is kept, and the same command goes on. Less memory is needed \
         with fewer --max-tokens, another --method or a target of fewer bits: give another --output with them",
    )
}

/// The profiles that are asked for; all that is wrong with the arguments is told before any work.
fn checked(arguments: &FitArguments) -> Result<Vec<Profile>> {
    if arguments.max_tokens == 0 || !(0.0..=100.0).contains(&arguments.temperature) {
        return Err(Failure::usage("--max-tokens must be at least 1, --temperature 0 to 100"));
    }
    let others = arguments.engines.iter().filter(|name| *name != OWN_ENGINE);
    let parse = |name: &String| {
        Profile::parse(name).ok_or_else(|| {
            let known = Profile::ALL.map(Profile::name).join(", ");
            Failure::usage(format!("`{name}` is not an engine"))
                .hint(format!("engines: {OWN_ENGINE}, {known}"))
        })
    };
    let engines = others.map(parse).collect::<Result<_>>()?;
    for (path, option) in [(&arguments.output, "--output"), (&arguments.from, "--from")] {
        path.as_deref().map_or(Ok(()), |path| require_text(path, option))?;
    }
    Ok(engines)
}

/// `runs/fit/NAME`; of a model of the hub its name there, and its quantisation.
fn default_output(target: &str) -> PathBuf {
    let path = Path::new(target);
    let name = if let Some(id) = ModelId::parse(target).filter(|_| !path.exists()) {
        id.to_string().split('/').next_back().unwrap_or_default().replace(':', "-")
    } else {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
    };
    Path::new("runs/fit").join(if name.is_empty() { "target".to_owned() } else { name })
}

/// A digest of names and sizes of files: it changes with a tokenizer, a template or a configuration. What else lies in
/// a model's folder, a fit among it, makes no other target.
fn files_digest(target: &str) -> Result<String> {
    const READ: [&str; 5] = ["safetensors", "json", "bin", "model", "jinja"];
    let path = longdraft_models::target_model::locate(target)?;
    let changed = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
    let is_read = |path: &Path| path.extension().is_some_and(|end| READ.iter().any(|e| end == *e));
    let mut files: Vec<(String, u64)> = std::fs::read_dir(&path)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| is_read(&entry.path()))
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), changed(&entry.path())))
        .collect();
    files.sort();
    let of_file = if path.is_file() { changed(&path) } else { 0 };
    Ok(sha256::of_text(&format!("{files:?} {of_file}")))
}

impl Fit<'_> {
    fn run(mut self) -> Result<()> {
        let done = self.rounds();
        if !matches!(done, Ok(true)) {
            // Who watches waits for nothing.
            self.ledger.events.stopped();
        }
        done.map(drop)
    }

    /// Whether all that was asked for is done: a call may only plan.
    fn rounds(&mut self) -> Result<bool> {
        if self.ledger.round().delivered {
            if self.without_export().is_empty() || self.arguments.plan {
                // A call that failed to export left another phase.
                self.ledger.finish()?;
            } else {
                self.deliver()?;
            }
            outln!("already finished: {}", self.ledger.folder.display());
            return self.tell_result().map(|()| true);
        }
        loop {
            let candidate = self.measure()?;
            self.plan(&candidate)?;
            if self.arguments.plan || !self.is_worth_it() {
                return self.end_of_plan().map(|()| false);
            }
            // A full disk, or a target that went away.
            self.work(&candidate).map_err(|failure| {
                failure.or_hint("what is done is kept: the same command goes on")
            })?;
            // The round that ended may be of an earlier call with less time.
            if !rounds::add(&mut self.ledger, self.arguments)? {
                return self.tell_result().map(|()| true);
            }
        }
    }

    /// The phases that take the time.
    fn work(&mut self, candidate: &Candidate) -> Result<()> {
        self.answer()?;
        self.train(candidate)?;
        self.prove()?;
        self.deliver()
    }

    /// The engines that lack the draft that is kept: those of this call, and those of earlier calls.
    fn without_export(&self) -> Vec<Profile> {
        let (kept, exported) = (self.ledger.kept(), &self.ledger.state.exported);
        let earlier = exported.keys().filter_map(|name| Profile::parse(name));
        let earlier = earlier.filter(|engine| !self.engines.contains(engine));
        let all = self.engines.iter().copied().chain(earlier);
        all.filter(|engine| {
            let folder = self.ledger.folder.join("exports").join(engine.name());
            exported.get(engine.name()).is_none_or(|export| export.round != kept)
                || !folder.is_dir()
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use longdraft_models::ModelError;

    use super::*;

    #[test]
    fn a_full_gpu_is_told_with_remedies_that_a_fit_has() {
        let source = candle_core::Error::Msg("CUDA_ERROR_OUT_OF_MEMORY".to_owned());
        let told = in_terms_of_fit(ModelError::DeviceMemory { source }.into());
        let hint = told.hint.unwrap_or_default();
        assert!(hint.contains("--max-tokens") && !hint.contains("data.row_tokens"), "{hint}");
        let other = in_terms_of_fit(Failure::work("x").hint("as it was"));
        assert_eq!(other.hint.as_deref(), Some("as it was"));
    }

    #[test]
    fn outputs_are_named_after_all_of_a_target_s_name() {
        for (target, name) in [
            ("models/Qwen2.5-0.5B/", "Qwen2.5-0.5B"),
            ("models/Qwen2.5-1.5B", "Qwen2.5-1.5B"),
            ("a/SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1"),
            ("/", "target"),
        ] {
            // Names of the hub are two words at most.
            let target = if target == "/" { target.to_owned() } else { format!("./{target}") };
            assert_eq!(default_output(&target), Path::new("runs/fit").join(name), "{target}");
        }
    }
}
