//! The Hugging Face hub, which targets written `org/name` are fetched from.

use longdraft_models::hub::{Endpoint, Login, LoginError};

use super::Variables;
use super::credentials::redacted;
use super::reach::reach;
use crate::doctor::finding::Finding;

const LOGIN: &str = "hub login";
const HUB: &str = "hub";

pub(super) fn examine(variables: Variables<'_>) -> Vec<Finding> {
    let endpoint = match Endpoint::find(variables) {
        Ok(endpoint) => endpoint,
        Err(error) => {
            let remedy = "set HF_ENDPOINT to an address like https://HOST, or unset it";
            return vec![Finding::problem(HUB, error.to_string(), remedy)];
        }
    };
    let login = Login::find(variables);
    let answer = reach(&endpoint.to_string());
    let file = Login::file(variables).map(|file| file.display().to_string());
    vec![judge_login(login, file, &endpoint), judge_hub(&endpoint.to_string(), &answer)]
}

fn judge_login(
    login: Result<Option<Login>, LoginError>,
    file: Option<String>,
    endpoint: &Endpoint,
) -> Finding {
    match (login, file) {
        (Err(error), _) => {
            Finding::problem(LOGIN, error.to_string(), "set the token anew, or take it away")
        }
        (Ok(Some(login)), _) if !endpoint.may_see_token() => Finding::note(
            LOGIN,
            format!(
                "the token of {} does not go to {endpoint}: it goes over https only",
                login.source
            ),
            "set HF_ENDPOINT to an https:// address if models there are gated or private",
        ),
        (Ok(Some(login)), _) => Finding::ok(LOGIN, format!("a token is in {}", login.source)),
        (Ok(None), Some(file)) => Finding::note(
            LOGIN,
            "no token",
            format!(
                "only needed for gated and private models: set HF_TOKEN, or `hf auth login` \
                 writes {file}"
            ),
        ),
        (Ok(None), None) => Finding::note(
            LOGIN,
            "no token, and neither HF_HOME nor HOME is set",
            "set one of them: models of the hub are kept there",
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

    const ADDRESS: &str = "https://huggingface.co";

    #[test]
    fn a_token_is_told_by_its_place_and_never_shown() {
        let judge = |value: Option<&str>, address: &str| {
            let variables = |name: &str| value.filter(|_| name == "HF_TOKEN").map(str::to_owned);
            let endpoint = Endpoint::parse(address).expect("an address");
            let finding = judge_login(Login::find(&variables), Some("file".into()), &endpoint);
            assert!(!format!("{finding:?}").contains("s3cret"));
            finding
        };
        let found = judge(Some("hf_s3cret"), ADDRESS);
        assert_eq!((found.status, found.fact.as_str()), (Status::Ok, "a token is in HF_TOKEN"));
        assert!(judge(Some("hf_s3cret"), "http://mirror").fact.contains("over https only"));
        assert_eq!(judge(Some("hf_s3cret\nb"), ADDRESS).status, Status::Problem);
        assert_eq!(judge(None, ADDRESS).fact, "no token");
    }

    #[test]
    fn a_login_in_the_address_is_a_problem() {
        let variables = |name: &str| {
            (name == "HF_ENDPOINT").then(|| "http://localhost:s3cret@mirror.example".to_owned())
        };
        let findings = examine(&variables);
        assert_eq!((findings.len(), findings[0].status), (1, Status::Problem));
        assert!(!format!("{findings:?}").contains("s3cret"));
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
