//! Data files of the Hugging Face hub.

use std::path::PathBuf;

use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Repo, RepoType};

use crate::error::{ModelError, Result};

const SCHEME: &str = "hf://";

/// `hf://org/name[/path][@revision]`; a path may end in `*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataSetId {
    /// `org/name`.
    pub repo: String,
    /// A file or folder in it.
    pub path: Option<String>,
    /// Branch, tag or commit.
    pub revision: String,
}

impl DataSetId {
    /// Reads an id; none if the text is no `hf://` address at all.
    ///
    /// # Errors
    /// - it begins like one but names no `org/name`
    pub fn parse(text: &str) -> Option<Result<Self>> {
        let rest = text.strip_prefix(SCHEME)?;
        let (rest, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let parts: Vec<&str> = rest.split('/').collect();
        let named = |part: &&str| !part.is_empty() && !part.starts_with('.');
        let (Some([org, name]), true, false) =
            (parts.get(..2), parts.iter().all(named), revision.is_empty())
        else {
            let problem = "a hub data set is written hf://org/name[/path][@revision]";
            return Some(Err(ModelError::invalid(text, problem)));
        };
        Some(Ok(Self {
            repo: format!("{org}/{name}"),
            path: (parts.len() > 2).then(|| parts[2..].join("/")),
            revision: revision.to_owned(),
        }))
    }

    /// Files of `names` that the id stands for: its path, or what lies below it; without a path
    /// the training files if some are called so, else all.
    fn choose(&self, names: &[String], is_data: &dyn Fn(&str) -> bool) -> Vec<String> {
        let inside = |name: &&String| match &self.path {
            Some(path) if path.ends_with('*') => name.starts_with(path.trim_end_matches('*')),
            Some(path) => *name == path || name.starts_with(&format!("{path}/")),
            None => true,
        };
        let mut files: Vec<String> =
            names.iter().filter(inside).filter(|name| is_data(name)).cloned().collect();
        files.sort();
        if self.path.is_none() && files.iter().any(|name| name.contains("train")) {
            files.retain(|name| name.contains("train"));
        }
        files
    }

    /// Asks the hub which files these are, and fetches none.
    ///
    /// # Errors
    /// - the hub cannot tell, or holds no such data file
    pub fn list(&self, is_data: &dyn Fn(&str) -> bool) -> Result<Vec<String>> {
        self.listed(is_data).map(|(_, chosen)| chosen)
    }

    /// Fetches the files into the hub's own cache folder (`HF_HOME`; `HF_ENDPOINT` names a mirror)
    /// and returns where they lie. `is_data` says which names hold data.
    ///
    /// # Errors
    /// - the hub cannot deliver, or holds no such data file
    pub fn fetch(&self, is_data: &dyn Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
        let (repo, chosen) = self.listed(is_data)?;
        let get =
            |name: &String| repo.get(name).map_err(|error| self.error(&format!("{name}: {error}")));
        chosen.iter().map(get).collect()
    }

    fn error(&self, error: &dyn std::fmt::Display) -> ModelError {
        ModelError::Hub { repo: self.repo.clone(), reason: error.to_string() }
    }

    fn listed(&self, is_data: &dyn Fn(&str) -> bool) -> Result<(ApiRepo, Vec<String>)> {
        let fail = |error: &dyn std::fmt::Display| self.error(error);
        let api = ApiBuilder::from_env().with_progress(false).build().map_err(|e| fail(&e))?;
        let repo = Repo::with_revision(self.repo.clone(), RepoType::Dataset, self.revision.clone());
        let repo = api.repo(repo);
        let info = repo.info().map_err(|error| fail(&error))?;
        let names: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
        let chosen = self.choose(&names, is_data);
        if chosen.is_empty() {
            let wanted = self.path.as_deref().unwrap_or("any data file");
            let shown = names.iter().take(20).cloned().collect::<Vec<_>>().join(", ");
            return Err(fail(&format!("no data file at {wanted} (it holds {shown})")));
        }
        Ok((repo, chosen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> DataSetId {
        DataSetId::parse(text).expect("an address").expect("valid")
    }

    #[test]
    fn addresses_name_repository_path_and_revision() {
        assert!(DataSetId::parse("org/name").is_none());
        let whole = id("hf://org/name");
        assert_eq!(
            (whole.repo.as_str(), whole.path, whole.revision.as_str()),
            ("org/name", None, "main")
        );
        let part = id("hf://org/name/main/train.parquet@v1.0");
        assert_eq!(part.path.as_deref(), Some("main/train.parquet"));
        assert_eq!(part.revision, "v1.0");
        for wrong in ["hf://org", "hf://", "hf://org/name/../x", "hf://a//b", "hf://a/b@"] {
            assert!(DataSetId::parse(wrong).expect("an address").is_err(), "{wrong}");
        }
    }

    #[test]
    fn training_files_are_taken_unless_a_path_is_given() {
        let names: Vec<String> = [
            "README.md",
            "main/test-0.parquet",
            "main/train-1.parquet",
            "main/train-0.parquet",
            "socratic/train-0.parquet",
        ]
        .map(str::to_owned)
        .to_vec();
        let parquet = |name: &str| name.ends_with("parquet");
        let choose = |text: &str| id(text).choose(&names, &parquet);
        assert_eq!(
            choose("hf://o/n/main"),
            ["main/test-0.parquet", "main/train-0.parquet", "main/train-1.parquet"]
        );
        assert_eq!(choose("hf://o/n").len(), 3);
        assert_eq!(choose("hf://o/n/main/test-0.parquet"), ["main/test-0.parquet"]);
        assert_eq!(choose("hf://o/n/main/train*").len(), 2);
        assert!(choose("hf://o/n/mai").is_empty());
    }
}
