//! Where the hub is, and who may see the token.

use std::fmt;

use url::{Host, Url};

use super::Variables;

/// Where models are by default.
const DEFAULT: &str = "https://huggingface.co";

/// Why an address cannot be a hub's. The address is not told: it may hold a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// Not an address of the web.
    #[error("HF_ENDPOINT: an address begins with https://")]
    NoAddress,
    /// A login in the address.
    #[error(
        "HF_ENDPOINT: an address with a user or password is refused: a token goes into HF_TOKEN"
    )]
    UserInfo,
    /// Parts that no API address has.
    #[error("HF_ENDPOINT: an address without `?` and `#` is expected")]
    Query,
}

/// Address of a hub, without a slash at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    url: Url,
}

impl Endpoint {
    /// Reads an address.
    ///
    /// # Errors
    /// - no http or https address, or one with a login, a query or a fragment
    pub fn parse(text: &str) -> Result<Self, EndpointError> {
        let mut url = Url::parse(text.trim()).map_err(|_| EndpointError::NoAddress)?;
        if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
            return Err(EndpointError::NoAddress);
        }
        // An empty login also counts: no address needs the `@`.
        let authority = text.split_once("://").map_or(text, |(_, rest)| rest);
        let authority = authority.split(['/', '\\', '?', '#']).next().unwrap_or_default();
        if has_login(&url) || authority.contains('@') {
            return Err(EndpointError::UserInfo);
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(EndpointError::Query);
        }
        let path = url.path().trim_end_matches('/').to_owned();
        url.set_path(&path);
        Ok(Self { url })
    }

    /// `HF_ENDPOINT`, else the public hub.
    ///
    /// # Errors
    /// - as [`Self::parse`]
    pub fn find(variables: Variables<'_>) -> Result<Self, EndpointError> {
        Self::parse(&variables("HF_ENDPOINT").unwrap_or_else(|| DEFAULT.into()))
    }

    /// Whether a token may go there: over TLS, or to this machine.
    pub fn may_see_token(&self) -> bool {
        is_confidential(&self.url)
    }

    /// Whether the endpoint is this machine itself.
    pub(super) fn is_local(&self) -> bool {
        is_loopback(&self.url)
    }

    /// Whether an address is of the same scheme, host and port, so that the token may go there.
    pub fn is_own(&self, address: &Url) -> bool {
        address.origin() == self.url.origin()
    }

    /// The address of a path below, each segment escaped.
    pub fn address<'a>(&self, segments: impl IntoIterator<Item = &'a str>) -> Url {
        let mut url = self.url.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.url.as_str().trim_end_matches('/'))
    }
}

/// Whether nobody on the way can read what is sent to an address.
pub fn is_confidential(address: &Url) -> bool {
    address.scheme() == "https" || is_loopback(address)
}

/// Whether an address holds a user or a password.
pub(super) fn has_login(address: &Url) -> bool {
    !address.username().is_empty() || address.password().is_some()
}

fn is_loopback(address: &Url) -> bool {
    match address.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(text: &str) -> Endpoint {
        Endpoint::parse(text).expect("an address")
    }

    #[test]
    fn tokens_go_over_tls_or_to_this_machine() {
        for (address, want) in [
            ("https://hub.example", true),
            ("HTTPS://hub.example/", true),
            ("http://127.0.0.1:8080", true),
            ("http://localhost/mirror", true),
            ("http://[::1]:1", true),
            ("http://hub.example", false),
            ("http://localhost.example", false),
            ("http://127.0.0.1.example:1", false),
        ] {
            assert_eq!(endpoint(address).may_see_token(), want, "{address}");
        }
    }

    #[test]
    fn logins_queries_and_nonsense_are_refused_without_being_told() {
        for (address, want) in [
            ("http://localhost:s3cret@hub.example", EndpointError::UserInfo),
            ("https://s3cret@hub.example/", EndpointError::UserInfo),
            ("https://@hub.example/", EndpointError::UserInfo),
            ("https://hub.example?s3cret", EndpointError::Query),
            ("https://hub.example/#s3cret", EndpointError::Query),
            ("ftp://s3cret", EndpointError::NoAddress),
            ("s3cret", EndpointError::NoAddress),
            ("https://", EndpointError::NoAddress),
        ] {
            let error = Endpoint::parse(address).expect_err(address);
            assert_eq!(error, want, "{address}");
            assert!(!error.to_string().contains("s3cret"));
        }
    }

    #[test]
    fn only_the_same_scheme_host_and_port_are_its_own() {
        let own = endpoint("https://hub.example/mirror/");
        let is_own = |text: &str| own.is_own(&Url::parse(text).expect("an address"));
        assert!(is_own("https://hub.example/x") && is_own("https://hub.example:443/"));
        for other in [
            "http://hub.example/x",
            "https://hub.example:8443/",
            "https://cdn.hub.example/",
            "https://hub.example.evil/",
            "https://hub.example@evil/",
        ] {
            assert!(!is_own(other), "{other}");
        }
    }

    #[test]
    fn names_are_escaped_in_addresses() {
        let own = endpoint("https://hub.example/mirror/");
        assert_eq!(own.to_string(), "https://hub.example/mirror");
        let address = own.address(["o", "n", "resolve", "a/b", "x?y#z %.txt"]);
        let want = "https://hub.example/mirror/o/n/resolve/a%2Fb/x%3Fy%23z%20%25.txt";
        assert_eq!(address.as_str(), want);
        assert_eq!(endpoint("https://hub.example").address(["a"]).path(), "/a");
    }
}
