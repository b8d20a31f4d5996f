//! The user's token, from where the hub's own clients have it.

use std::fmt;
use std::path::PathBuf;

use super::{Variables, home};

/// Variables that hold a token, the first one wins.
const VARIABLES: [&str; 2] = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];

/// A token that is no token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}: a token is one word of letters, digits and signs")]
pub struct LoginError(Source);

/// A secret; printing it shows none of it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Takes a text, white space around it left out; none if it cannot be a token.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let fits = !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic());
        fits.then(|| Self(text.to_owned()))
    }

    /// Value of the `Authorization` header.
    pub fn authorization(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// The secret itself.
    pub fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}

/// Where a token was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// An environment variable.
    Variable(&'static str),
    /// The file that a login writes.
    File(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Variable(name) => f.write_str(name),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A token and where it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Login {
    /// The secret.
    pub token: Token,
    /// Where it was found.
    pub source: Source,
}

impl Login {
    /// The token of `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN` or the token file, in this order.
    ///
    /// # Errors
    /// - the first one that is there cannot be a token
    pub fn find(variables: Variables<'_>) -> Result<Option<Self>, LoginError> {
        let set = VARIABLES.iter().find_map(|name| {
            let text = variables(name).filter(|text| !text.trim().is_empty())?;
            Some((text, Source::Variable(name)))
        });
        let stored = || {
            let path = Self::file(variables)?;
            let text = std::fs::read_to_string(&path).ok()?;
            (!text.trim().is_empty()).then_some((text, Source::File(path)))
        };
        let Some((text, source)) = set.or_else(stored) else { return Ok(None) };
        match Token::parse(&text) {
            Some(token) => Ok(Some(Self { token, source })),
            None => Err(LoginError(source)),
        }
    }

    /// The file that a login writes.
    pub fn file(variables: Variables<'_>) -> Option<PathBuf> {
        Some(home(variables)?.join("token"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_come_before_the_file() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("token");
        let find = |set: &[(&str, &str)]| {
            let variables = |name: &str| match set.iter().find(|(key, _)| *key == name) {
                Some((_, value)) => Some((*value).to_owned()),
                None => (name == "HF_HOME").then(|| folder.path().display().to_string()),
            };
            Login::find(&variables)
        };
        let found = |login: Login| (login.token.secret().to_owned(), login.source);
        assert_eq!(find(&[]), Ok(None));
        std::fs::write(&path, " hf_file\n").expect("write");
        let login = find(&[]).expect("readable").expect("there");
        assert_eq!(found(login), ("hf_file".into(), Source::File(path)));
        let old = ("HUGGING_FACE_HUB_TOKEN", "hf_old");
        let login = find(&[old, ("HF_TOKEN", "\n")]).expect("readable").expect("there");
        assert_eq!(found(login), ("hf_old".into(), Source::Variable(old.0)));
        let login = find(&[old, ("HF_TOKEN", "hf_new\n")]).expect("readable").expect("there");
        assert_eq!(login.token.authorization(), "Bearer hf_new");
        assert!(!format!("{login:?}").contains("hf_new"));
        let error = find(&[("HF_TOKEN", "hf_a\r\nX: y")]).expect_err("two lines");
        assert!(error.to_string().starts_with("HF_TOKEN: ") && !error.to_string().contains("hf_a"));
    }

    #[test]
    fn the_token_lies_where_the_hubs_own_clients_look() {
        let with_home = |name: &str| (name == "HOME").then(|| "h".to_owned());
        let path = Login::file(&with_home).expect("HOME is set");
        assert_eq!(path, ["h", ".cache", "huggingface", "token"].iter().collect::<PathBuf>());
        let own = |name: &str| (name == "HF_HOME").then(|| "own".to_owned());
        assert_eq!(Login::file(&own), Some(["own", "token"].iter().collect()));
        assert_eq!(Login::file(&|_| None), None);
    }
}
