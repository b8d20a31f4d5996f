//! Where logins are kept, and texts without what they must not show.

/// Hosts that a netrc file has a login for.
pub(super) fn netrc_hosts(text: &str) -> Vec<String> {
    let mut words = text
        .lines()
        .map(|line| line.split_once('#').map_or(line, |(before, _)| before))
        .flat_map(str::split_whitespace);
    let mut hosts = Vec::new();
    while let Some(word) = words.next() {
        match word {
            "machine" => hosts.extend(words.next().map(str::to_owned)),
            // A value may look like a keyword.
            "login" | "password" | "account" => drop(words.next()),
            _ => {}
        }
    }
    hosts
}

/// Host of an address, without port, path and login.
pub(super) fn host(address: &str) -> &str {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    match host.rsplit_once(':') {
        Some((name, port)) if port.chars().all(|c| c.is_ascii_digit()) => name,
        _ => host,
    }
}

/// A text in which addresses have no login and no query.
pub(super) fn redacted(text: &str) -> String {
    let mut shown = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        shown.push_str(before);
        shown.push_str("://");
        let is_end = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '<' | '>' | '`');
        let end = after.find(is_end).unwrap_or(after.len());
        let (address, remaining) = after.split_at(end);
        shown.push_str(&redacted_address(address));
        rest = remaining;
    }
    shown.push_str(rest);
    shown
}

/// What follows `://`. A password may hold any character, so all before the last `@` goes.
fn redacted_address(address: &str) -> String {
    let (login, rest) = match address.rsplit_once('@') {
        Some((_, rest)) => ("…@", rest),
        None => ("", address),
    };
    match rest.split_once(['?', '#']) {
        Some((before, _)) => format!("{login}{before}?…"),
        None => format!("{login}{rest}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netrc_files_are_read_in_any_shape() {
        let text = "# logins\nmachine api.wandb.ai\n  login user\n  password machine\n\
                    machine other.host login machine password hunter2 # a note\ndefault login x";
        assert_eq!(netrc_hosts(text), ["api.wandb.ai", "other.host"]);
        assert!(netrc_hosts("").is_empty() && netrc_hosts("machine").is_empty());
    }

    #[test]
    fn hosts_are_taken_out_of_addresses() {
        for (address, want) in [
            ("https://api.wandb.ai", "api.wandb.ai"),
            ("http://user:pa@ss@host.org:8080/path?x=1", "host.org"),
            ("host.org", "host.org"),
            ("http://[::1]:5000/", "[::1]"),
        ] {
            assert_eq!(host(address), want);
        }
    }

    #[test]
    fn nothing_secret_is_left_in_a_text() {
        for (text, want) in [
            ("http://user:s3cret@host:1/p", "http://…@host:1/p"),
            ("http://user:a/s3cret@b?s3cret@host/p", "http://…@host/p"),
            ("https://host/p?token=s3cret&x=1", "https://host/p?…"),
            (
                "cannot reach `https://u:s3cret@a/` or https://b/?k=s3cret now",
                "cannot reach `https://…@a/` or https://b/?… now",
            ),
            ("no address here", "no address here"),
        ] {
            assert_eq!(redacted(text), want);
        }
    }
}
