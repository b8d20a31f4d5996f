//! `longdraft export`: a draft as serving engines read it.

use std::path::{Path, PathBuf};

use longdraft_models::draft::AnyDraft;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::target::Target;
use longdraft_models::weights::memory::MemorySource;
use longdraft_serving::{
    ExportOptions, Profile, Provenance, ServingError, TargetFacts, WeightType, export,
};
use longdraft_train::checkpoint::{CheckpointState, read_draft, read_state};
use longdraft_train::method::Method;
use serde_json::{Value, json};

use super::extract;
use crate::cli::{ExportArguments, ExportDtype};
use crate::decode_record::{DECODE_FILE, DecodeRecord};
use crate::failure::{Failure, Result};

/// Tokens per round where nothing was measured.
const DRAFT_LEN: usize = 3;

/// Writes a folder for every profile asked for.
pub(crate) fn run(arguments: &ExportArguments, json: bool) -> Result<()> {
    let profiles = profiles(&arguments.to)?;
    let source = Source::find(&arguments.draft);
    let name = match (&arguments.target, source.target()) {
        (Some(name), _) => name.clone(),
        (None, Some(name)) => name,
        (None, None) => {
            return Err(Failure::usage("the target is not known").hint(
                "give --target: a Hugging Face folder, a GGUF file or a hub model `org/name`",
            ));
        }
    };
    let mut target = TargetFacts::open(&name)?;
    if let Some(name) = &arguments.target_name {
        target.name.clone_from(name);
    }
    let draft = source.open(&target.target)?;
    let provenance = source.provenance();
    let draft_len = arguments.draft_len.or(best_chain(&provenance)).unwrap_or(DRAFT_LEN);
    if draft_len == 0 {
        return Err(Failure::usage("--draft-len must be at least 1"));
    }
    let mut written = Vec::new();
    for profile in &profiles {
        let several = profiles.len() > 1;
        let folder =
            if several { arguments.output.join(profile.name()) } else { arguments.output.clone() };
        let options = ExportOptions {
            profile: *profile,
            dtype: arguments.dtype.map(weight_type),
            embedding: !arguments.no_embed,
            draft_len,
            provenance: provenance.clone(),
        };
        written.push(write(&draft, &target, &options, &folder, arguments.strict, json)?);
    }
    if json {
        outln!("{}", json!({ "exports": written }));
    }
    Ok(())
}

fn profiles(names: &[String]) -> Result<Vec<Profile>> {
    let known = Profile::ALL.map(Profile::name);
    let parse = |name: &String| {
        Profile::parse(name).ok_or_else(|| {
            Failure::usage(format!("`{name}` is no profile"))
                .hint(format!("profiles: {}", known.join(", ")))
        })
    };
    names.iter().map(parse).collect()
}

fn write(
    draft: &AnyDraft,
    target: &TargetFacts,
    options: &ExportOptions,
    folder: &Path,
    strict: bool,
    json: bool,
) -> Result<Value> {
    let profile = options.profile;
    if strict && let AnyDraft::Eagle3(draft) = draft {
        let fit = longdraft_serving::render::compatibility::eagle3(profile, draft.config(), target);
        if !fit.warnings.is_empty() {
            let reasons = fit.warnings.join("; ");
            return Err(Failure::work(format!("profile `{}`: {reasons}", profile.name()))
                .hint("leave out --strict, and serve with an engine that computes it"));
        }
    }
    let exported = export(draft, target, options, folder)?;
    for warning in &exported.warnings {
        errln!("warning: {}: {warning}", profile.name());
    }
    if !json {
        outln!("wrote {} tensors for {} to {}", exported.tensors, profile.name(), folder.display());
        for (engine, command) in &exported.manifest.serve {
            outln!("  {engine}: {}", command.replace("DIR", &folder.display().to_string()));
        }
    }
    Ok(json!({
        "profile": profile.name(), "output": folder, "tensors": exported.tensors,
        "files": exported.files, "warnings": exported.warnings,
    }))
}

fn weight_type(dtype: ExportDtype) -> WeightType {
    match dtype {
        ExportDtype::Bf16 => WeightType::Bf16,
        ExportDtype::F16 => WeightType::F16,
        ExportDtype::F32 => WeightType::F32,
    }
}

/// A draft on disk: a checkpoint with its run, or files.
pub(crate) enum Source {
    /// As training saved it.
    Checkpoint {
        /// Its folder.
        checkpoint: PathBuf,
        /// The run that it belongs to.
        run: PathBuf,
    },
    /// A draft folder or file.
    Files(PathBuf),
}

impl Source {
    /// What a path holds.
    pub(crate) fn find(path: &Path) -> Self {
        match extract::find(path) {
            Ok((checkpoint, run)) => Self::Checkpoint { checkpoint, run },
            Err(_) => Self::Files(path.to_path_buf()),
        }
    }

    /// Reads the draft.
    pub(crate) fn open(&self, target: &Target) -> Result<AnyDraft> {
        let Self::Checkpoint { checkpoint, .. } = self else {
            let Self::Files(path) = self else { unreachable!("two kinds") };
            return crate::decoding::load_draft(path, target);
        };
        let state = read_state(checkpoint)?;
        if state.target_fingerprint != target.fingerprint() {
            errln!(
                "warning: {} was trained for another target (or another file of this one)",
                checkpoint.display()
            );
        }
        from_checkpoint(checkpoint, &state, target)
    }

    /// The target that the run's configuration names.
    fn target(&self) -> Option<String> {
        match self {
            Self::Checkpoint { run, .. } => Some(configuration(run)["target"].as_str()?.to_owned()),
            Self::Files(_) => None,
        }
    }

    fn provenance(&self) -> Provenance {
        let last =
            |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match self {
            Self::Files(path) => Provenance { source: last(path), ..Provenance::default() },
            Self::Checkpoint { checkpoint, run } => {
                let state = read_state(checkpoint).ok();
                let data = configuration(run)["data"]["train"].as_array().map(|sources| {
                    let name = |source: &Value| Some(last(Path::new(source["path"].as_str()?)));
                    sources.iter().filter_map(name).collect()
                });
                let weights = checkpoint.join("draft.safetensors");
                Provenance {
                    source: last(run),
                    source_sha256: crate::sha256::of_file(&weights).unwrap_or_default(),
                    steps: state.as_ref().map(|state| state.step),
                    tokens: state.as_ref().map(|state| state.tokens),
                    seconds: state.as_ref().map(|state| state.seconds),
                    data: data.unwrap_or_default(),
                    evaluation: evaluation(run),
                }
            }
        }
    }
}

fn from_checkpoint(
    checkpoint: &Path,
    state: &CheckpointState,
    target: &Target,
) -> Result<AnyDraft> {
    let unusable = |error: &dyn std::fmt::Display| {
        Failure::work(format!("{}: {error}", checkpoint.join("state.json").display()))
    };
    let source = MemorySource::new(read_draft(checkpoint)?);
    Ok(match state.method {
        Method::Eagle3 => {
            let layers = target.config().num_hidden_layers;
            let config = Eagle3Config::from_json(&state.draft, Some(layers))
                .map_err(|error| unusable(&error))?;
            config.problems_with(target.config()).into_result(checkpoint)?;
            let draft = Eagle3Draft::from_source(&source, &config, &target.embedding()?)?;
            AnyDraft::Eagle3(Box::new(draft))
        }
        Method::Glide => {
            let config: GlideConfig =
                serde_json::from_value(state.draft.clone()).map_err(|error| unusable(&error))?;
            AnyDraft::Glide(GlideDraft::from_source(&source, &config, target)?)
        }
    })
}

/// The composed configuration of a run; nothing if it is not there.
fn configuration(run: &Path) -> Value {
    let text = std::fs::read_to_string(run.join("config.yaml")).unwrap_or_default();
    serde_saphyr::from_str(&text).unwrap_or_default()
}

/// What was measured of a run; texts, commands and the machine's name stay at home.
fn evaluation(run: &Path) -> Option<Value> {
    let text = std::fs::read_to_string(run.join(DECODE_FILE)).ok()?;
    let record: DecodeRecord = serde_json::from_str(&text).ok()?;
    serde_json::to_value(record.without_circumstances()).ok()
}

/// Length of the measured greedy chain with the largest speed-up.
fn best_chain(provenance: &Provenance) -> Option<usize> {
    let record: DecodeRecord = serde_json::from_value(provenance.evaluation.clone()?).ok()?;
    let chains = record.cells.iter().filter_map(|cell| {
        let length: usize = cell.rule.strip_prefix("chain ")?.parse().ok()?;
        (cell.temperature == 0.0).then_some((length, cell.figures.speed_up))
    });
    chains.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(length, _)| length)
}

impl From<ServingError> for Failure {
    fn from(error: ServingError) -> Self {
        match error {
            ServingError::Model(error) => error.into(),
            ServingError::NotRepresentable { .. } => Self::work(error)
                .hint("another profile may hold it; docs/serve.md lists what each engine computes"),
            other => Self::work(other),
        }
    }
}
