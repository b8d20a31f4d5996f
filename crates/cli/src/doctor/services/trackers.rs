//! Experiment trackers. None of them is needed: metrics are always written to `metrics.jsonl`.

use std::path::PathBuf;

use super::credentials::{host, netrc_hosts, redacted};
use super::reach::reach;
use super::{Variables, home};
use crate::doctor::finding::Finding;

const WANDB: &str = "wandb";
const SWANLAB: &str = "swanlab";
const MLFLOW: &str = "mlflow";

pub(super) fn examine(variables: Variables<'_>) -> Vec<Finding> {
    vec![wandb(variables), swanlab(variables), mlflow(variables, reach)]
}

fn wandb(variables: Variables<'_>) -> Finding {
    let mode = variables("WANDB_MODE").map(|mode| mode.trim().to_lowercase());
    if let Some(mode) = mode.filter(|mode| matches!(mode.as_str(), "offline" | "disabled")) {
        return Finding::ok(WANDB, format!("WANDB_MODE is `{mode}`: nothing is sent"));
    }
    if let Some(key) = variables("WANDB_API_KEY") {
        if key.trim() != key {
            let fact = "WANDB_API_KEY is set, with blanks around it";
            return Finding::problem(WANDB, fact, "set it again without them");
        }
        return Finding::ok(WANDB, "WANDB_API_KEY is set");
    }
    let address = variables("WANDB_BASE_URL").unwrap_or_else(|| "https://api.wandb.ai".into());
    let wanted = host(&address);
    let files = match variables("NETRC") {
        Some(file) => vec![PathBuf::from(file)],
        None => home(variables)
            .map(|home| vec![home.join(".netrc"), home.join("_netrc")])
            .unwrap_or_default(),
    };
    let login = files.iter().find(|file| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        netrc_hosts(&text).iter().any(|host| host == wanted)
    });
    match login {
        Some(file) => Finding::ok(WANDB, format!("{} has a login for {wanted}", file.display())),
        None => Finding::note(
            WANDB,
            format!("no login for {wanted}"),
            "only needed to upload runs: set WANDB_API_KEY, or `wandb login`",
        ),
    }
}

fn swanlab(variables: Variables<'_>) -> Finding {
    if variables("SWANLAB_API_KEY").is_some() {
        return Finding::ok(SWANLAB, "SWANLAB_API_KEY is set");
    }
    let own = variables("SWANLAB_ROOT").or_else(|| variables("SWANLAB_SAVE_DIR"));
    let folder = own.map(PathBuf::from).or_else(|| Some(home(variables)?.join(".swanlab")));
    let files = [Some(PathBuf::from(".swanlab")), folder].into_iter().flatten();
    let login = files.map(|folder| folder.join(".netrc")).find(|file| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        !netrc_hosts(&text).is_empty()
    });
    match login {
        Some(file) => Finding::ok(SWANLAB, format!("{} has a login", file.display())),
        None => Finding::note(
            SWANLAB,
            "no login",
            "only needed to upload runs: set SWANLAB_API_KEY, or `swanlab login`",
        ),
    }
}

fn mlflow(variables: Variables<'_>, reach: impl Fn(&str) -> Result<u16, String>) -> Finding {
    let Some(address) = variables("MLFLOW_TRACKING_URI") else {
        let remedy = "only needed to log to an MLflow server: set it to the server's address";
        return Finding::note(MLFLOW, "MLFLOW_TRACKING_URI is not set", remedy);
    };
    let shown = redacted(&address);
    if !(address.starts_with("http://") || address.starts_with("https://")) {
        return Finding::note(
            MLFLOW,
            format!("MLFLOW_TRACKING_URI is {shown}, which is not a server"),
            "only servers can be logged to: `mlflow server` serves such a store over http",
        );
    }
    let repair = "start the server, correct MLFLOW_TRACKING_URI, or unset it";
    match reach(&format!("{}/health", address.trim_end_matches('/'))) {
        Ok(status) if status < 400 => Finding::ok(MLFLOW, format!("{shown} answers")),
        Ok(status @ (401 | 403)) => Finding::problem(
            MLFLOW,
            format!("{shown} refuses access (status {status})"),
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        ),
        Ok(status) => {
            Finding::problem(MLFLOW, format!("{shown} answers with status {status}"), repair)
        }
        Err(cause) => {
            Finding::problem(MLFLOW, format!("{shown} cannot be reached: {cause}"), repair)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::doctor::Status;

    fn with(pairs: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        let map: HashMap<String, String> =
            pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        move |name| map.get(name).cloned()
    }

    #[test]
    fn a_wandb_login_is_found_in_variable_or_netrc() {
        let dir = tempfile::tempdir().expect("tempdir");
        let home = dir.path().display().to_string();
        assert_eq!(wandb(&with(&[("HOME", &home)])).status, Status::Note);
        let text = "machine api.wandb.ai\n  login user\n  password s3cret\n";
        std::fs::write(dir.path().join(".netrc"), text).expect("netrc");
        assert_eq!(wandb(&with(&[("HOME", &home)])).status, Status::Ok);
        let other = [("HOME", home.as_str()), ("WANDB_BASE_URL", "https://wandb.example.org:8080")];
        assert!(wandb(&with(&other)).fact.contains("no login for wandb.example.org"));
        assert_eq!(wandb(&with(&[("WANDB_API_KEY", "s3cret")])).status, Status::Ok);
        let spaced = wandb(&with(&[("WANDB_API_KEY", "s3cret\n")]));
        assert_eq!(spaced.status, Status::Problem);
        assert!(!format!("{spaced:?}").contains("s3cret"));
        assert!(wandb(&with(&[("WANDB_MODE", "offline")])).fact.contains("nothing is sent"));
    }

    #[test]
    fn a_swanlab_login_is_found_in_its_own_netrc() {
        let dir = tempfile::tempdir().expect("tempdir");
        let home = dir.path().display().to_string();
        assert_eq!(swanlab(&with(&[("HOME", &home)])).status, Status::Note);
        std::fs::create_dir(dir.path().join(".swanlab")).expect("folder");
        let text = "machine api.swanlab.cn login x password s3cret\n";
        std::fs::write(dir.path().join(".swanlab/.netrc"), text).expect("netrc");
        assert_eq!(swanlab(&with(&[("HOME", &home)])).status, Status::Ok);
        assert_eq!(swanlab(&with(&[("SWANLAB_API_KEY", "s3cret")])).status, Status::Ok);
    }

    #[test]
    fn an_mlflow_server_must_answer() {
        let judge = |address: &str, answer: Result<u16, String>| {
            mlflow(&with(&[("MLFLOW_TRACKING_URI", address)]), |asked| {
                assert!(asked.ends_with("host:5000/health"), "{asked}");
                answer.clone()
            })
        };
        assert_eq!(judge("http://host:5000/", Ok(200)).status, Status::Ok);
        assert_eq!(judge("http://host:5000", Ok(404)).status, Status::Problem);
        assert!(judge("http://host:5000", Ok(401)).remedy.is_some_and(|r| r.contains("USERNAME")));
        let dead = judge("http://user:s3cret@host:5000", Err("refused".into()));
        assert_eq!((dead.status, dead.blocking), (Status::Problem, false));
        assert!(!format!("{dead:?}").contains("s3cret"), "{dead:?}");
        assert_eq!(judge("sqlite:///runs.db", Ok(200)).status, Status::Note);
        assert_eq!(mlflow(&with(&[]), |_| Ok(200)).status, Status::Note);
    }
}
