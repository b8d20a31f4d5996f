//! `longdraft verify`: what is wrong with an export, without any engine.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::DType;
use longdraft_decode::SpeculativeDecoder;
use longdraft_decode::drafter::drafter_of;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::{Draft, DraftKind};
use longdraft_models::paths::folder_of;
use longdraft_models::weights::safetensors;
use longdraft_serving::verify::{Report, Severity, VerifyOptions, verify};
use longdraft_serving::{MANIFEST_FILE, Manifest, Profile, TargetFacts, format_of, parity};
use serde::Serialize;
use serde_json::{Value, json};

use super::export::profile_named;
use crate::cli::{DecodingArguments, PaceChoice, VerifyArguments};
use crate::decoding::{Models, encode_text, open_proposer};
use crate::draft_source::{DraftSource, exports};
use crate::failure::{Failure, Result};
use crate::recording::quoted;
use crate::terminal::counted;

/// Text of `--decode` and `--record`.
const TEXT: &str = "The old lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote the \
                    weather into a book. One night the sea was quiet and a small boat came in without a \
                    sail. He went down to the rocks with a rope and a lantern, and called out to it.";

/// How far tau of the export may lie from the checkpoint's.
const TAU_GAP: f64 = 0.05;

/// Tokens per round of `--decode`.
const DRAFT_LEN: usize = 4;

/// Prints the report; fails if the folder may not be served.
pub(crate) fn run(arguments: &VerifyArguments, json: bool) -> Result<()> {
    let (mut values, mut failures) = (Vec::new(), Vec::new());
    let folders = each(arguments, &mut |finding, is_one| {
        if json {
            values.push(finding.to_json(arguments.strict));
        } else {
            if !is_one {
                outln!("== {}", finding.folder.display());
            }
            finding.print();
        }
        failures.extend(finding.judge(arguments.strict).err());
    })?;
    if json {
        let all = json!({ "clean": failures.is_empty(), "exports": values });
        let one = values.into_iter().next().filter(|_| folders == 1);
        outln!("{}", one.unwrap_or(all));
    }
    match (folders, failures.len()) {
        (_, 0) => Ok(()),
        (1, _) => failures.pop().map_or(Ok(()), Err),
        (all, bad) => Err(Failure::work(format!("{bad} of {all} exports may not be served"))
            .hint("each finding above says what to do")
            .in_result()),
    }
}

/// Hears what was found out about an export, and whether it is the only one.
pub(crate) type Told<'a> = dyn FnMut(Finding, bool) + 'a;

/// Checks every export that the arguments mean; returns how many there are.
pub(crate) fn each(arguments: &VerifyArguments, tell: &mut Told<'_>) -> Result<usize> {
    let profile = arguments.profile.as_deref().map(profile_named).transpose()?;
    if !arguments.folder.exists() {
        let problem = format!("{}: no such folder or file", arguments.folder.display());
        return Err(Failure::usage(problem));
    }
    let folders = exports(&arguments.folder);
    if let [first, _, ..] = &folders[..]
        && (profile.is_some() || arguments.record.is_some())
    {
        let problem = format!("{} holds {} exports", arguments.folder.display(), folders.len());
        return Err(Failure::usage(problem).hint(format!(
            "--profile and --record are for one of them: give {}",
            first.display()
        )));
    }
    if folders == [arguments.folder.clone()]
        && !arguments.folder.join(MANIFEST_FILE).is_file()
        && let Ok(DraftSource::Checkpoint(_)) = DraftSource::find(&arguments.folder)
    {
        let run = quoted(&arguments.folder.display().to_string());
        return Err(Failure::usage(format!("{}: is a run, no export", arguments.folder.display()))
            .hint(format!("write one with `longdraft export {run} --to PROFILE --output DIR`")));
    }
    let target = arguments.target.as_deref().map(TargetFacts::open).transpose()?;
    for folder in &folders {
        tell(check(arguments, folder, profile, target.as_ref())?, folders.len() == 1);
    }
    Ok(folders.len())
}

/// What was found out about an exported folder.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The folder.
    pub folder: PathBuf,
    /// Whether it may be served.
    pub clean: bool,
    /// Errors and warnings.
    pub counts: (usize, usize),
    /// Every finding with its remedy, and each engine's verdict.
    pub report: Report,
    /// tau with the checkpoint and with the export, where both decoded.
    pub tau: Option<(f64, f64)>,
}

fn check(
    arguments: &VerifyArguments,
    folder: &Path,
    profile: Option<Profile>,
    target: Option<&TargetFacts>,
) -> Result<Finding> {
    let checkpoint = match (&arguments.checkpoint, target) {
        (Some(path), Some(target)) => {
            let draft = DraftSource::find(path)?.open(&target.target)?;
            let draft = draft.as_ref();
            Some(format_of(draft)?.rounded(draft, target, stored_dtype(folder))?)
        }
        _ => None,
    };
    let report = verify(folder, &VerifyOptions { profile, target, checkpoint })?;
    let tau = match (arguments.decode, &arguments.checkpoint, &arguments.target) {
        (Some(tokens), Some(checkpoint), Some(target)) if report.is_clean(false) => {
            Some(compare_decoding(tokens, checkpoint, folder, target)?)
        }
        _ => None,
    };
    if let (Some(file), Some(target)) = (&arguments.record, &arguments.target) {
        record(file, folder, target)?;
    }
    let counts = (report.count(Severity::Error), report.count(Severity::Warning));
    let finding = Finding { folder: folder.to_path_buf(), clean: false, counts, report, tau };
    Ok(Finding { clean: finding.judge(arguments.strict).is_ok(), ..finding })
}

impl Finding {
    fn counted(&self) -> String {
        let (errors, warnings) = self.counts;
        format!("{}, {}", counted(errors, "error"), counted(warnings, "warning"))
    }

    fn to_json(&self, strict: bool) -> Value {
        let mut value = serde_json::to_value(&self.report).unwrap_or_default();
        value["folder"] = json!(self.folder.to_string_lossy());
        value["clean"] = self.report.is_clean(strict).into();
        value["tau"] = json!(self.tau);
        value
    }

    fn print(&self) {
        out!("{}", self.report);
        if let Some((own, export)) = self.tau {
            outln!("decoding: tau {export:.3} with the export, {own:.3} with the checkpoint");
        }
        let (folder, profile) = (self.folder.display(), self.report.profile.name());
        outln!("{folder} as {profile}: {}", self.counted());
    }

    /// Whether the export may be served.
    fn judge(&self, strict: bool) -> Result<()> {
        if !self.report.is_clean(strict) {
            let what = format!("{}: the export may not be served", self.counted());
            let failure = Failure::work(what).hint("each finding above says what to do");
            return Err(failure.in_result());
        }
        match self.tau {
            Some((own, export)) if (own - export).abs() > TAU_GAP * own => Err(Failure::work(
                format!("tau is {export:.3} with the export and {own:.3} with the checkpoint"),
            )
            .hint("export with --dtype f32 to tell rounding from a fault")
            .in_result()),
            _ => Ok(()),
        }
    }
}

/// Type of an export's weights, by its manifest or its keys; bf16 if nothing says it.
fn stored_dtype(folder: &Path) -> DType {
    let folder = folder_of(folder);
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    let manifest: Option<Manifest> = serde_json::from_str(&read(MANIFEST_FILE)).ok();
    let config: Value = serde_json::from_str(&read("config.json")).unwrap_or_default();
    let name = manifest.map(|manifest| manifest.dtype);
    match name.as_deref().or(config["torch_dtype"].as_str()) {
        Some("float32") => DType::F32,
        Some("float16") => DType::F16,
        _ => DType::BF16,
    }
}

fn open(draft: &Path, target: &str) -> Result<(DecodingArguments, Models)> {
    let decoding = DecodingArguments::chain(draft, DRAFT_LEN);
    let models = decoding.open(target)?;
    Ok((decoding, models))
}

/// tau with the checkpoint and with the export, over the same text.
fn compare_decoding(
    tokens: usize,
    checkpoint: &Path,
    export: &Path,
    target: &str,
) -> Result<(f64, f64)> {
    let (decoding, models) = open(export, target)?;
    let own = open_proposer(&DraftSource::find(checkpoint)?, &models.target)?;
    let mut options = decoding.options(0.0, PaceChoice::Fixed)?;
    options.max_new_tokens = tokens;
    let prompt = encode_text(TEXT, &models.tokenizer, &models.target)?;
    let tau = |draft: &dyn Draft| -> Result<f64> {
        // What an export says of the head may be less: both are asked through the same one.
        let drafter = drafter_of(draft, &models.target, own.head.as_ref())?;
        let mut decoder = SpeculativeDecoder::new(&models.target, Some(drafter));
        let mut go_on = |_| std::ops::ControlFlow::Continue(());
        let generation = decoder.generate(&prompt, &options, &mut go_on)?;
        Ok(generation.metrics.acceptance_length())
    };
    let exported =
        models.draft.as_ref().ok_or_else(|| Failure::work("the export is not a draft"))?;
    Ok((tau(own.draft.as_ref())?, tau(exported.as_ref())?))
}

/// Ids, features and logits of an export on a real text.
fn record(file: &Path, folder: &Path, target: &str) -> Result<()> {
    let (_, models) = open(folder, target)?;
    let draft =
        models.draft.as_deref().ok_or_else(|| Failure::work("the export is not a draft"))?;
    let ids: Vec<u32> = encode_text(TEXT, &models.tokenizer, &models.target)?
        .into_iter()
        .map(|TargetTokenId(id)| id)
        .take(parity::TOKENS)
        .collect();
    let recording = format_of(draft)?.recording(draft, &models.target, &ids)?;
    let tensors = recording.ok_or_else(|| {
        let title = DraftKind::named(draft.method()).map_or(draft.method(), |kind| kind.title);
        Failure::usage(format!("--record: other programs have no reference of {title} exports"))
    })?;
    Ok(safetensors::save(file, &tensors, HashMap::new())?)
}
