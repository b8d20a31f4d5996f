//! `longdraft export`: a draft as serving engines read it.

use std::path::{Path, PathBuf};

use longdraft_decode::DraftShape;
use longdraft_models::draft::Draft;
use longdraft_models::paths::parent_of;
use longdraft_records::decode::DecodeRecord;
use longdraft_serving::hub::{HUB_NAME, is_hub_name, loaded};
use longdraft_serving::{
    ExportOptions, Exported, MANIFEST_FILE, Profile, Provenance, ServingError, TargetFacts,
    WeightType, export, in_folder, own_command, require_fit,
};
use serde::Serialize;
use serde_json::json;

use crate::cli::{ExportArguments, ExportDtype};
use crate::commands::require_writable;
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};

/// Tokens per round where nothing was measured.
const DRAFT_LEN: usize = 3;
/// Writes a folder for every profile asked for, and says how each is served.
pub(crate) fn run(arguments: &ExportArguments, json: bool) -> Result<()> {
    let mut written = Vec::new();
    each(arguments, &mut |exported| {
        let ExportedFolder { profile, output, tensors, files, warnings, serve } = exported;
        for warning in &warnings {
            errln!("warning: {profile}: {warning}");
        }
        if !json {
            let folder = output.display().to_string();
            outln!("wrote {tensors} tensors for {profile} to {folder}");
            for (engine, command) in &serve {
                outln!("  {engine}: {}", in_folder(command, &folder));
            }
        }
        written.push(json!({
            "profile": profile, "output": output.to_string_lossy(),
            "tensors": tensors, "files": files, "warnings": warnings,
        }));
    })?;
    if json {
        outjson!({ "exports": written });
    }
    Ok(())
}

/// A folder that was written.
#[derive(Debug, Clone, Serialize)]
pub struct ExportedFolder {
    /// Engine it is for: `vllm`, `sglang`, ...
    pub profile: String,
    /// The folder.
    pub output: PathBuf,
    /// Tensors of the weight file.
    pub tensors: usize,
    /// Names.
    pub files: Vec<String>,
    /// What the engines of some version do not compute.
    pub warnings: Vec<String>,
    /// Engines with the command that serves it; `DIR` stands for the folder.
    pub serve: Vec<(String, String)>,
}

/// Writes a folder for every profile asked for, and tells of each.
pub(crate) fn each(
    arguments: &ExportArguments,
    tell: &mut dyn FnMut(ExportedFolder),
) -> Result<()> {
    let profiles = arguments.to.iter().map(|name| profile_named(name));
    let profiles = profiles.collect::<Result<Vec<_>>>()?;
    let source = DraftSource::find(&arguments.draft)?;
    // A single folder is written beside its place.
    let several = profiles.len() > 1;
    if several && arguments.output.join(MANIFEST_FILE).is_file() {
        let output = arguments.output.display();
        return Err(Failure::usage(format!("{output} is the export for one engine"))
            .hint("give another --output for folders of several, or remove that one"));
    }
    require_writable(if several { &arguments.output } else { parent_of(&arguments.output) })?;
    let given = &arguments.options;
    let name = match &given.target {
        Some(name) => Some(name.clone()),
        None => source.target()?,
    };
    let Some(name) = name else {
        return Err(Failure::usage("the target is not known")
            .hint("give --target: a Hugging Face folder, a GGUF file or a hub model `org/name`"));
    };
    let mut target = TargetFacts::open(&name)?;
    match &given.target_name {
        Some(name) => target.name.clone_from(name),
        // A folder beside is no model of the hub.
        None if is_hub_name(&name) && Path::new(&name).exists() => {
            target.name = format!("./{name}");
        }
        None => {}
    }
    let draft = source.open(&target.target)?;
    let provenance = source.provenance();
    let draft_len = given.draft_len.or(best_chain(&provenance)).unwrap_or(DRAFT_LEN);
    if draft_len == 0 {
        return Err(Failure::usage("--draft-len must be at least 1"));
    }
    let mut is_told = loaded(&target.name, target.is_gguf) != HUB_NAME;
    for profile in &profiles {
        let folder =
            if several { arguments.output.join(profile.name()) } else { arguments.output.clone() };
        let options = ExportOptions {
            profile: *profile,
            dtype: given.dtype.map(weight_type),
            embedding: !given.no_embed,
            draft_len,
            provenance: provenance.clone(),
        };
        let mut exported = write(draft.as_ref(), &target, &options, &folder, given.strict)?;
        if given.target_name.is_some() {
            // The file is for others. Who wrote it has the target here.
            exported.manifest.serve.extend([own_command(&name)]);
        }
        let names_target = |(_, command): (&String, &String)| command.contains(HUB_NAME);
        if !is_told && exported.manifest.serve.iter().any(names_target) {
            is_told = true;
            errln!(
                "warning: vLLM and SGLang load the target from the hub, not from a GGUF file: {} stands for \
                 its name below; give --target-name org/name",
                HUB_NAME
            );
        }
        let Exported { files, tensors, warnings, manifest } = exported;
        let (profile, serve) = (profile.name().to_owned(), manifest.serve.into_iter().collect());
        tell(ExportedFolder { profile, output: folder, tensors, files, warnings, serve });
    }
    Ok(())
}

/// The profile of a name on the command line.
pub(super) fn profile_named(name: &str) -> Result<Profile> {
    Profile::parse(name).ok_or_else(|| {
        let known = Profile::ALL.map(Profile::name).join(", ");
        Failure::usage(format!("`{name}` is not a profile")).hint(format!("profiles: {known}"))
    })
}

fn write(
    draft: &dyn Draft,
    target: &TargetFacts,
    options: &ExportOptions,
    folder: &Path,
    strict: bool,
) -> Result<Exported> {
    let profile = options.profile;
    if strict {
        let warnings =
            require_fit(draft, target, profile).map_err(|error| refused(error, draft, target))?;
        if !warnings.is_empty() {
            let reasons = warnings.join("; ");
            return Err(Failure::work(format!("profile `{}`: {reasons}", profile.name()))
                .hint("leave out --strict, and serve with an engine that computes it"));
        }
    }
    export(draft, target, options, folder).map_err(|error| refused(error, draft, target))
}

/// What is said where a profile cannot hold a draft: which ones do.
fn refused(error: ServingError, draft: &dyn Draft, target: &TargetFacts) -> Failure {
    if !matches!(error, ServingError::NotRepresentable { .. }) {
        return error.into();
    }
    let holds = |profile: &Profile| require_fit(draft, target, *profile).is_ok();
    let names: Vec<&str> = Profile::ALL.into_iter().filter(holds).map(Profile::name).collect();
    Failure::from(error).hint(match &names[..] {
        [] => "no profile holds it: use it here, with `longdraft generate` or `longdraft serve`"
            .to_owned(),
        names => format!("these profiles hold it: {}", names.join(", ")),
    })
}

fn weight_type(dtype: ExportDtype) -> WeightType {
    match dtype {
        ExportDtype::Bf16 => WeightType::Bf16,
        ExportDtype::F16 => WeightType::F16,
        ExportDtype::F32 => WeightType::F32,
    }
}

/// Length of the measured greedy chain with the largest speed-up.
fn best_chain(provenance: &Provenance) -> Option<usize> {
    let record: DecodeRecord = serde_json::from_value(provenance.evaluation.clone()?).ok()?;
    let greedy = record.cells.iter().filter(|cell| cell.temperature == 0.0);
    let chains = greedy.filter_map(|cell| match cell.shape {
        DraftShape::Chain { length } => Some((length, cell.figures.speed_up)),
        _ => None,
    });
    chains.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(length, _)| length)
}

impl From<ServingError> for Failure {
    fn from(error: ServingError) -> Self {
        match error {
            ServingError::Model(error) => error.into(),
            ServingError::NotRepresentable { .. } => {
                Self::work(error).hint("docs/guides/exporting.md lists what each engine computes")
            }
            ServingError::Io { ref source, .. } => Self::file(&error, source),
            other => Self::work(other),
        }
    }
}
