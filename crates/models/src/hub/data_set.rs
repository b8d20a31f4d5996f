//! Data files of the Hugging Face hub.

use std::path::PathBuf;

use super::client::Listing;
use super::names::{is_file_name, is_repository, is_revision};
use super::{Kind, Repository, printable};
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
        let repo = parts.iter().take(2).copied().collect::<Vec<_>>().join("/");
        let path = (parts.len() > 2).then(|| parts[2..].join("/"));
        let is_path = path.as_deref().is_none_or(is_file_name);
        if !is_repository(&repo) || !is_path || !is_revision(revision) {
            let problem = "a hub data set is written hf://org/name[/path][@revision]";
            return Some(Err(ModelError::invalid(printable(text, &[]), problem)));
        }
        Some(Ok(Self { repo, path, revision: revision.to_owned() }))
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
        self.listed(is_data).map(|(_, _, chosen)| chosen)
    }

    /// Fetches the files into the hub's own cache folder (`HF_HOME`; `HF_ENDPOINT` names a mirror)
    /// and returns where they lie. `is_data` says which names hold data.
    ///
    /// # Errors
    /// - the hub cannot deliver, or holds no such data file
    pub fn fetch(&self, is_data: &dyn Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
        let (repo, listing, chosen) = self.listed(is_data)?;
        repo.files(&listing, &chosen, &mut |_| {})
    }

    fn listed(&self, is_data: &dyn Fn(&str) -> bool) -> Result<(Repository, Listing, Vec<String>)> {
        let repo = Repository::open(Kind::DataSet, &self.repo, &self.revision)?;
        let listing = repo.listing()?;
        let chosen = self.choose(&listing.names, is_data);
        if chosen.is_empty() {
            let wanted = self.path.as_deref().unwrap_or("any data file");
            let shown = listing.names.iter().take(20).cloned().collect::<Vec<_>>().join(", ");
            return Err(repo.error(format!("no data file at {wanted} (it holds {shown})")));
        }
        Ok((repo, listing, chosen))
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
        for wrong in [
            "hf://org",
            "hf://",
            "hf://org/name/../x",
            "hf://a//b",
            "hf://a/b@",
            "hf://a/b@../../x",
            "hf://a/b@/x",
            "hf://a/b?c",
            "hf://a/b/c\\d",
        ] {
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
