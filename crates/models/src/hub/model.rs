//! Models of the Hugging Face hub: which files of a repository are the model.

use std::fmt;
use std::path::{Path, PathBuf};

use super::client::Listing;
use super::gguf_names::{GgufModel, gguf_models, matching};
use super::names::{is_file_name, is_repository, is_weight_file};
use super::{Kind, Repository, Tell, printable};
use crate::error::Result;
use crate::weights::safetensors::{INDEX, shards_of};

/// Files that a target's folder may hold beside its weights.
const SMALL_FILES: [&str; 7] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "additional_chat_templates/tool_use.jinja",
];
/// Weights in one file.
const SINGLE: &str = "model.safetensors";
/// Names that an error lists.
const MOST_SHOWN: usize = 20;

/// `org/name`, or with a quantisation of its GGUF files `org/name:Q4_K_M`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelId {
    /// `org/name`.
    pub repo: String,
    /// A quantisation, or a file's name, in any case.
    pub quantisation: Option<String>,
}

/// A model that lies in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// A folder of safetensors, or the first GGUF file.
    pub path: PathBuf,
    /// All of its files.
    pub files: Vec<PathBuf>,
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.quantisation {
            Some(quantisation) => write!(f, "{}:{quantisation}", self.repo),
            None => f.write_str(&self.repo),
        }
    }
}

impl ModelId {
    /// Reads an id; none if the text is none, or ends as a file of weights does: a path that is mistyped is no
    /// repository.
    pub fn parse(text: &str) -> Option<Self> {
        let (repo, quantisation) = match text.split_once(':') {
            Some((repo, quantisation)) => (repo, Some(quantisation)),
            None => (text, None),
        };
        let fits = is_repository(repo) && quantisation.map_or(!is_weight_file(repo), is_file_name);
        let quantisation = quantisation.map(str::to_owned);
        fits.then(|| Self { repo: repo.to_owned(), quantisation })
    }

    /// Fetches the model into the hub's own cache folder (`HF_HOME`; `HF_ENDPOINT` names a mirror) and
    /// hears of what arrives. What lies there already is not fetched again; a model that lies there
    /// completely needs no hub.
    ///
    /// # Errors
    /// - the hub cannot deliver, holds no such model, or several, which are listed
    pub fn fetch(&self, tell: Tell<'_>) -> Result<Fetched> {
        self.with_listing(|repo, listing| {
            if self.quantisation.is_some() {
                let names = self.gguf_files(repo, listing)?;
                let files = repo.files(listing, &names, tell)?;
                let path = files.first().cloned().ok_or_else(|| repo.error("it names no file"))?;
                return Ok(Fetched { path, files });
            }
            let mut names = self.folder_files(repo, listing)?;
            names.extend(weights(repo, listing, tell)?);
            folder_of(repo, repo.files(listing, &names, tell)?)
        })
    }

    /// Fetches configuration and tokenizer alone: of a folder these files, of GGUF files as much of their
    /// beginnings as `is_enough` asks for.
    ///
    /// `is_enough` hears where the beginnings of all files lie, how long the whole files are, and whether
    /// it is asked for the last time; it returns nothing where it needs more.
    ///
    /// # Errors
    /// - as [`Self::fetch`], and those of `is_enough`
    pub(crate) fn describe<T>(
        &self,
        of_folder: impl Fn(&Path) -> Result<T>,
        is_enough: impl Fn(&[(PathBuf, u64)], bool) -> Result<Option<T>>,
    ) -> Result<T> {
        self.with_listing(|repo, listing| {
            if self.quantisation.is_none() {
                let names = self.folder_files(repo, listing)?;
                let files = repo.files(listing, &names, &mut |_| {})?;
                return of_folder(&folder_of(repo, files)?.path);
            }
            let names = self.gguf_files(repo, listing)?;
            let mut bytes = FIRST_BYTES;
            loop {
                let beginnings: Result<Vec<_>> =
                    names.iter().map(|name| repo.beginning(listing, name, bytes)).collect();
                let last = bytes >= MOST_BYTES;
                if let Some(description) = is_enough(&beginnings?, last)? {
                    return Ok(description);
                }
                if last {
                    let reason = format!("{}: no header in its first {bytes} bytes", names[0]);
                    return Err(repo.error(reason));
                }
                bytes *= 2;
            }
        })
    }

    /// Works with what the hub lists, and where that cannot be had with what lies in the cache, if it is
    /// enough.
    fn with_listing<T>(
        &self,
        mut work: impl FnMut(&Repository, &Listing) -> Result<T>,
    ) -> Result<T> {
        let repo = Repository::open(Kind::Model, &self.repo, "main")?;
        match repo.listing() {
            Ok(listing) => work(&repo, &listing),
            Err(error) => match repo.cached_listing() {
                Some(listing) => work(&repo, &listing).map_err(|_| error),
                None => Err(error),
            },
        }
    }

    /// Files of the quantisation, the first part first.
    fn gguf_files(&self, repo: &Repository, listing: &Listing) -> Result<Vec<String>> {
        let wanted = self.quantisation.as_deref().unwrap_or_default();
        let models = gguf_models(&listing.names);
        let chosen = match matching(&models, wanted)[..] {
            [one] => one,
            [] if models.is_empty() => {
                let problem = format!("it holds no GGUF file, so no `{wanted}`{}", held(listing));
                let remedy = if has_weights(listing) {
                    format!("its safetensors are called {}", self.repo)
                } else {
                    "look for a repository with GGUF files of the model".to_owned()
                };
                return Err(repo.other_files(problem, remedy));
            }
            [] => {
                let problem = format!("no GGUF file of it is `{wanted}`; it has {}", told(&models));
                return Err(repo.other_files(problem, self.how_to_say(&models)));
            }
            ref several => {
                let names: Vec<&str> = several.iter().map(|model| model.name.as_str()).collect();
                let problem = format!("`{wanted}` names several: {}", names.join(", "));
                let remedy = format!("write out more of the name: {}:{}", self.repo, names[0]);
                return Err(repo.other_files(problem, remedy));
            }
        };
        if let Some(missing) = chosen.missing() {
            return Err(repo.other_files(
                format!("of {} parts of {} the hub lists no {missing}", chosen.parts, chosen.name),
                self.how_to_say(&models),
            ));
        }
        Ok(chosen.files.iter().map(|name| (*name).to_owned()).collect())
    }

    /// Configuration and tokenizer of a folder; refused where there is no such folder.
    fn folder_files(&self, repo: &Repository, listing: &Listing) -> Result<Vec<String>> {
        let models = gguf_models(&listing.names);
        let is_there = |name: &&str| listing.names.iter().any(|listed| listed == name);
        if !has_weights(listing) && !models.is_empty() {
            let problem = format!("it holds GGUF files only: {}", told(&models));
            return Err(repo.other_files(problem, self.how_to_say(&models)));
        }
        if !has_weights(listing) || !is_there(&"config.json") {
            let problem =
                format!("it holds no config.json with safetensors weights{}", held(listing));
            return Err(repo.other_files(
                problem,
                "take a repository with the whole model in safetensors, or one with GGUF files",
            ));
        }
        Ok(SMALL_FILES
            .iter()
            .filter(|name| is_there(name))
            .map(|name| (*name).to_owned())
            .collect())
    }

    fn how_to_say(&self, models: &[GgufModel<'_>]) -> String {
        let labels: Vec<&str> = models.iter().filter_map(|model| model.label.as_deref()).collect();
        let usual = labels.iter().find(|label| **label == "Q4_K_M").or(labels.first());
        let example = usual.copied().or(models.first().map(|model| model.name.as_str()));
        format!("name one of them: {}:{}", self.repo, example.unwrap_or("Q4_K_M"))
    }
}

/// Bytes that a GGUF file's header is looked for in, first and at most.
const FIRST_BYTES: u64 = 8 << 20;
const MOST_BYTES: u64 = 128 << 20;

fn has_weights(listing: &Listing) -> bool {
    listing.names.iter().any(|name| name == SINGLE || name == INDEX)
}

/// Files of the weights: those that the index names, else the single one. Repositories hold others too.
fn weights(repo: &Repository, listing: &Listing, tell: Tell<'_>) -> Result<Vec<String>> {
    if !listing.names.iter().any(|name| name == INDEX) {
        return Ok(vec![SINGLE.to_owned()]);
    }
    let index = repo.files(listing, &[INDEX.to_owned()], tell)?;
    let mut names = vec![INDEX.to_owned()];
    for path in &index {
        names.extend(shards_of(path)?);
    }
    match names.iter().find(|name| !listing.names.contains(name)) {
        None => Ok(names),
        Some(missing) => {
            let problem = format!("{INDEX} names `{missing}`, which the hub does not list");
            Err(repo.other_files(problem, "its upload may not be complete: tell its owner"))
        }
    }
}

fn folder_of(repo: &Repository, files: Vec<PathBuf>) -> Result<Fetched> {
    let folder = files.first().and_then(|path| path.parent()).map(Path::to_path_buf);
    let path = folder.ok_or_else(|| repo.error("it names no file"))?;
    Ok(Fetched { path, files })
}

/// Quantisations, or names where a name tells none.
fn told(models: &[GgufModel<'_>]) -> String {
    let mut names: Vec<&str> =
        models.iter().map(|model| model.label.as_deref().unwrap_or(&model.name)).collect();
    names.dedup();
    let more = names.len().saturating_sub(MOST_SHOWN);
    names.truncate(MOST_SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names.join(", "))
}

/// What there is in place of a model.
fn held(listing: &Listing) -> String {
    if listing.names.is_empty() {
        return " (it is empty)".to_owned();
    }
    let names: Vec<&str> = listing.names.iter().take(8).map(String::as_str).collect();
    format!(" (it holds {})", printable(&names.join(", "), &[]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_name_a_repository_and_perhaps_a_quantisation() {
        let id = |text: &str| ModelId::parse(text).map(|id| (id.repo, id.quantisation));
        assert_eq!(id("org/name"), Some(("org/name".into(), None)));
        assert_eq!(id("org/name:q4_k_m"), Some(("org/name".into(), Some("q4_k_m".into()))));
        let file = "org/name:Q8_0/model-Q8_0.gguf";
        assert_eq!(ModelId::parse(file).map(|id| id.to_string()).as_deref(), Some(file));
        assert_eq!(
            id("org/name.gguf:Q8_0").map(|(repo, _)| repo).as_deref(),
            Some("org/name.gguf")
        );
        for wrong in [
            "models/mistyped.gguf",
            "models/mistyped.Safetensors",
            "name",
            "name:Q4",
            "org/name:",
            "org/name:../x",
            "org/name:a\u{1b}[2J",
            "hf://org/name",
            "C:\\a/b",
            "/a/b:c",
            "a/b/c:d",
        ] {
            assert_eq!(id(wrong), None, "{wrong}");
        }
    }
}
