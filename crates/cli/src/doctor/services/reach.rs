//! Whether a server answers.

use std::time::Duration;

use ureq::Agent;

use super::credentials::redacted;

/// Long enough for a far server, short enough to wait for.
const PATIENCE: Duration = Duration::from_secs(3);

/// Asks for an address and returns the status of the answer, whatever it is.
/// The error is why there is none, without anything secret.
pub(super) fn reach(address: &str) -> Result<u16, String> {
    reach_within(address, PATIENCE)
}

fn reach_within(address: &str, patience: Duration) -> Result<u16, String> {
    let agent: Agent = Agent::config_builder()
        .timeout_global(Some(patience))
        .http_status_as_error(false)
        .build()
        .into();
    match agent.get(address).call() {
        Ok(response) => Ok(response.status().as_u16()),
        Err(ureq::Error::Timeout(_)) => {
            Err(format!("no answer within {} s", patience.as_secs_f32()))
        }
        Err(error) => Err(redacted(&error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_server_that_never_answers_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let answer = reach_within(&format!("http://127.0.0.1:{port}"), Duration::from_millis(50));
        assert_eq!(answer, Err("no answer within 0.05 s".into()));
    }

    #[test]
    fn a_closed_port_and_nonsense_are_told_without_secrets() {
        for address in ["http://user:s3cret@127.0.0.1:9/", "http://user:s3cret@", "s3 cret"] {
            let cause = reach(address).expect_err("nobody answers");
            assert!(!cause.contains("s3cret"), "{cause}");
        }
    }
}
