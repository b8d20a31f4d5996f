//! `longdraft push`: an export to the Hugging Face hub.

use std::path::PathBuf;

use longdraft_serving::hub::{CARD, Client, Content, HubError, card, uploads};
use longdraft_serving::verify::{VerifyOptions, verify};
use longdraft_serving::{MANIFEST_FILE, Manifest, Profile};
use serde_json::json;

use crate::cli::PushArguments;
use crate::draft_source::exports;
use crate::failure::{Failure, Result};

/// Where models go by default.
const ENDPOINT: &str = "https://huggingface.co";

/// Checks the folder, then sends it in one commit.
pub(crate) fn run(arguments: &PushArguments, json: bool) -> Result<()> {
    if !card::is_hub_name(&arguments.repo) {
        return Err(Failure::usage(format!("`{}` is no repository", arguments.repo))
            .hint("repositories are written ORG/REPO"));
    }
    let manifest = manifest(arguments)?;
    let report = verify(&arguments.folder, &VerifyOptions::default())?;
    if !report.is_clean(false) {
        err!("{report}");
        return Err(Failure::work("the export has errors: nothing was sent")
            .hint("export again; `longdraft verify` lists every problem"));
    }
    if !card::is_hub_name(&manifest.target.name) {
        errln!(
            "warning: the model card names no `base_model`: export with --target-name org/name to name \
             the target"
        );
    }
    let text = card::render(&manifest, &arguments.repo, arguments.license.as_deref());
    let files = uploads(&arguments.folder, &manifest, &text)?;
    let bytes: u64 = files.iter().map(|file| file.size).sum();
    if arguments.dry_run {
        if json {
            let list: Vec<_> =
                files.iter().map(|file| json!({"name": file.name, "size": file.size})).collect();
            outln!(
                "{}",
                json!({"repo": arguments.repo, "files": list, "card": text, "sent": false})
            );
            return Ok(());
        }
        outln!("{} files, {bytes} bytes would go to {}:", files.len(), arguments.repo);
        for file in &files {
            let made = if matches!(file.content, Content::Bytes(_)) {
                " (made from the manifest)"
            } else {
                ""
            };
            outln!("  {:>12}  {}{made}", file.size, file.name);
        }
        outln!("\n{CARD}:\n{text}");
        return Ok(());
    }
    let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| ENDPOINT.into());
    let client = Client::new(&endpoint, &token()?, &arguments.repo)?;
    let summary = format!(
        "Upload a draft for {} ({})",
        manifest.target.name.rsplit('/').next().unwrap_or_default(),
        manifest.profile.name()
    );
    let sent = client.send(&files, &summary, arguments.private)?;
    if json {
        outln!(
            "{}",
            json!({
                "repo": arguments.repo, "sent": true, "uploaded": sent.uploaded, "known": sent.known,
                "small": sent.small, "commit": sent.commit,
            })
        );
    } else {
        outln!(
            "sent {} files, {bytes} bytes to {endpoint}/{} ({} large ones were there already)",
            files.len(),
            arguments.repo,
            sent.known
        );
    }
    Ok(())
}

fn manifest(arguments: &PushArguments) -> Result<Manifest> {
    let path = arguments.folder.join(MANIFEST_FILE);
    if let [first, ..] = &exports(&arguments.folder)[..]
        && *first != arguments.folder
    {
        let problem = format!("{} holds exports and is none itself", arguments.folder.display());
        return Err(
            Failure::usage(problem).hint(format!("send one of them, such as {}", first.display()))
        );
    }
    let hint = "only folders written by `longdraft export` are sent";
    let text = std::fs::read_to_string(&path)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())).hint(hint))?;
    let manifest: Manifest = serde_json::from_str(&text)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())).hint(hint))?;
    if manifest.profile == Profile::Speculators && !card::is_hub_name(&manifest.target.name) {
        return Err(Failure::usage(format!(
            "the export names its target `{}`, which nobody else can load",
            manifest.target.name
        ))
        .hint("export again with --target-name ORG/NAME"));
    }
    Ok(manifest)
}

/// The user's token, from where the hub's own client has it.
fn token() -> Result<String> {
    let from = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let file = || {
        let home = from("HF_HOME").map(PathBuf::from);
        let cache = || Some(PathBuf::from(from("HOME")?).join(".cache/huggingface"));
        let text = std::fs::read_to_string(home.or_else(cache)?.join("token")).ok()?;
        Some(text).filter(|text| !text.trim().is_empty())
    };
    let found = from("HF_TOKEN").or_else(|| from("HUGGING_FACE_HUB_TOKEN")).or_else(file);
    found.map(|token| token.trim().to_owned()).ok_or_else(|| {
        Failure::usage("no token for the hub")
            .hint("set HF_TOKEN to a token that may write, or log in with the hub's own client")
    })
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        let hint = match &error {
            HubError::Refused { status: 401 | 403, .. } => {
                "the token may not write there: make one with write access for this organisation"
            }
            HubError::Transport { .. } => "check the network; the same command goes on from there",
            _ => "nothing was committed; run the same command again",
        };
        Self::work(error).hint(hint)
    }
}
