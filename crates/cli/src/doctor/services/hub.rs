//! The Hugging Face hub, which targets written `org/name` are fetched from.

use std::path::PathBuf;

use super::credentials::redacted;
use super::reach::reach;
use super::{Variables, home};
use crate::doctor::finding::Finding;

const LOGIN: &str = "hub login";
const HUB: &str = "hub";
const ADDRESS: &str = "https://huggingface.co";

pub(super) fn examine(variables: Variables<'_>) -> Vec<Finding> {
    let file = token_file(variables);
    let token = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    let has_token = token.is_some_and(|token| !token.trim().is_empty());
    let address = variables("HF_ENDPOINT").unwrap_or_else(|| ADDRESS.into());
    let answer = reach(&address);
    vec![judge_login(variables, file, has_token), judge_hub(&address, &answer)]
}

/// The file that downloads read the token from.
fn token_file(variables: Variables<'_>) -> Option<PathBuf> {
    let folder = match variables("HF_HOME") {
        Some(folder) => PathBuf::from(folder),
        None => home(variables)?.join(".cache").join("huggingface"),
    };
    Some(folder.join("token"))
}

fn judge_login(variables: Variables<'_>, file: Option<PathBuf>, has_token: bool) -> Finding {
    let Some(file) = file.map(|file| file.display().to_string()) else {
        return Finding::note(LOGIN, "neither HF_HOME nor HOME is set", "set one of them");
    };
    if has_token {
        return Finding::ok(LOGIN, format!("a token is in {file}"));
    }
    let variable =
        ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].into_iter().find(|name| variables(name).is_some());
    match variable {
        Some(name) => Finding::note(
            LOGIN,
            format!("{name} is set, but downloads read the token from {file}, which is not there"),
            format!("write it there: printenv {name} > {file}"),
        ),
        None => Finding::note(
            LOGIN,
            "no token",
            format!("only needed for gated and private models: `hf auth login` writes {file}"),
        ),
    }
}

fn judge_hub(address: &str, answer: &Result<u16, String>) -> Finding {
    let shown = redacted(address);
    match answer {
        Ok(status) if *status < 500 => Finding::ok(HUB, format!("{shown} answers")),
        Ok(status) => Finding::note(
            HUB,
            format!("{shown} answers with status {status}"),
            "try again later; folders and files of your own work without it",
        ),
        Err(cause) => Finding::note(
            HUB,
            format!("{shown} cannot be reached: {cause}"),
            "targets given as a folder or file work offline; for hub models check the network \
             and proxy, or set HF_ENDPOINT to a mirror",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn a_token_that_downloads_do_not_read_is_noted_and_not_shown() {
        let variables = |name: &str| (name == "HF_TOKEN").then(|| "hf_s3cret".to_owned());
        let finding = judge_login(&variables, Some("token".into()), false);
        assert_eq!(finding.status, Status::Note);
        assert!(
            finding.fact.contains("HF_TOKEN is set") && !format!("{finding:?}").contains("s3cret")
        );
        assert_eq!(judge_login(&variables, Some("token".into()), true).status, Status::Ok);
        assert!(judge_login(&|_| None, Some("token".into()), false).fact.contains("no token"));
    }

    #[test]
    fn the_token_lies_where_the_hub_library_looks() {
        let with_home = |name: &str| (name == "HOME").then(|| "h".to_owned());
        let path = token_file(&with_home).expect("HOME is set");
        assert_eq!(path, ["h", ".cache", "huggingface", "token"].iter().collect::<PathBuf>());
        let own = |name: &str| (name == "HF_HOME").then(|| "own".to_owned());
        assert_eq!(token_file(&own), Some(["own", "token"].iter().collect()));
        assert_eq!(token_file(&|_| None), None);
    }

    #[test]
    fn an_offline_hub_is_no_problem() {
        let offline = judge_hub("https://u:s3cret@mirror", &Err("no route".into()));
        assert_eq!(offline.status, Status::Note);
        assert!(!format!("{offline:?}").contains("s3cret"));
        assert_eq!(judge_hub(ADDRESS, &Ok(401)).status, Status::Ok);
        assert_eq!(judge_hub(ADDRESS, &Ok(503)).status, Status::Note);
    }
}
