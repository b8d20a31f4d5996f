//! `longdraft push`: an export to the Hugging Face hub.

use longdraft_models::hub::{Endpoint, Login, Token, environment, is_repository};
use longdraft_serving::hub::{CARD, Client, Content, HubError, Package, card, is_hub_name};
use longdraft_serving::verify::{VerifyOptions, verify};
use longdraft_serving::{MANIFEST_FILE, Manifest, Profile};
use serde_json::json;

use crate::cli::PushArguments;
use crate::draft_source::exports;
use crate::failure::{Failure, Result};

/// Checks the folder, then sends it in one commit.
pub(crate) fn run(arguments: &PushArguments, json: bool) -> Result<()> {
    if !is_repository(&arguments.repo) {
        return Err(Failure::usage(format!("`{}` is not a repository", arguments.repo))
            .hint("repositories are written ORG/REPO"));
    }
    let manifest = manifest(arguments)?;
    let report = verify(&arguments.folder, &VerifyOptions::default())?;
    if !report.is_clean(false) {
        err!("{report}");
        return Err(Failure::work("the export has errors: nothing was sent")
            .hint("export again; `longdraft verify` lists every problem"));
    }
    let public = manifest.public();
    if !is_hub_name(&manifest.target.name) {
        errln!(
            "warning: manifest and model card call the target `{}`, without the path that it has on this \
             machine, and the card names no `base_model`: export with --target-name org/name to name the \
             target",
            public.target.name
        );
    }
    let text = card::render(&public, &arguments.repo, arguments.license.as_deref());
    let package = Package::of(&arguments.folder, &manifest, &text)?;
    if arguments.dry_run {
        show(arguments, &package, &text, json);
        return Ok(());
    }
    let endpoint = Endpoint::find(&environment).map_err(Failure::usage)?;
    let address = endpoint.to_string();
    let client = Client::new(endpoint, token()?, &arguments.repo)?;
    let summary = format!(
        "Upload a draft for {} ({})",
        public.target.name.rsplit('/').next().unwrap_or_default(),
        manifest.profile.name()
    );
    let sent = client.send(&package.files, &summary, arguments.private)?;
    if json {
        outjson!({
            "repo": arguments.repo, "sent": true, "uploaded": sent.uploaded, "known": sent.known,
            "small": sent.small, "commit": sent.commit,
        });
    } else {
        outln!(
            "sent {} files, {} bytes to {address}/{} ({} large ones were there already)",
            package.files.len(),
            package.bytes(),
            arguments.repo,
            sent.known
        );
    }
    if !package.left_out.is_empty() {
        errln!(
            "{} others in the folder stayed here (--dry-run lists them)",
            package.left_out.len()
        );
    }
    Ok(())
}

/// What would be sent, and what would stay.
fn show(arguments: &PushArguments, package: &Package, card: &str, json: bool) {
    if json {
        let files: Vec<_> = package
            .files
            .iter()
            .map(|file| json!({"name": file.name, "size": file.size}))
            .collect();
        let left_out: Vec<_> = package
            .left_out
            .iter()
            .map(|file| json!({"name": file.name, "reason": file.reason}))
            .collect();
        outjson!({
            "repo": arguments.repo, "files": files, "left_out": left_out, "card": card,
            "sent": false
        });
        return;
    }
    let (count, bytes) = (package.files.len(), package.bytes());
    outln!("{count} files, {bytes} bytes would go to {}:", arguments.repo);
    for file in &package.files {
        let made = match &file.content {
            Content::File(_) => "",
            Content::Bytes(_) if file.name == MANIFEST_FILE => " (without paths of this machine)",
            Content::Bytes(_) => " (made from the manifest)",
        };
        outln!("  {:>12}  {}{made}", file.size, file.name);
    }
    if !package.left_out.is_empty() {
        outln!("\nleft out:");
    }
    for file in &package.left_out {
        outln!("  {:>12}  {}: {}", "", file.name, file.reason);
    }
    outln!("\n{CARD}:\n{card}");
}

fn manifest(arguments: &PushArguments) -> Result<Manifest> {
    let path = arguments.folder.join(MANIFEST_FILE);
    if let [first, ..] = &exports(&arguments.folder)[..]
        && *first != arguments.folder
    {
        let problem = format!("{} holds exports and is not one itself", arguments.folder.display());
        return Err(
            Failure::usage(problem).hint(format!("send one of them, such as {}", first.display()))
        );
    }
    let text = std::fs::read_to_string(&path);
    let read = text.and_then(|text| Ok(serde_json::from_str::<Manifest>(&text)?));
    let manifest = read.map_err(|error| {
        Failure::usage(format!("{}: {error}", path.display()))
            .hint("only folders written by `longdraft export` are sent")
    })?;
    if manifest.profile == Profile::Speculators && !is_hub_name(&manifest.target.name) {
        return Err(Failure::usage(format!(
            "the export names its target `{}`, which nobody else can load",
            manifest.target.name
        ))
        .hint("export again with --target-name ORG/NAME"));
    }
    Ok(manifest)
}

/// The user's token, from where the hub's own client has it.
fn token() -> Result<Token> {
    let login = Login::find(&environment).map_err(Failure::usage)?;
    login.map(|login| login.token).ok_or_else(|| {
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
            HubError::Insecure(_) => "set HF_ENDPOINT to an https:// address",
            HubError::Transport { .. } => "check the network; the same command goes on from there",
            _ => "nothing was committed; run the same command again",
        };
        Self::work(error).hint(hint)
    }
}
