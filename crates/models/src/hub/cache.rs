//! The folder in which the hub's clients keep what they fetched.
//!
//! ```text
//! HF_HOME/hub/models--ORG--NAME/
//!   refs/main                       the commit that a branch stood at
//!   snapshots/COMMIT/config.json -> ../../blobs/TAG
//!   blobs/TAG, TAG.part, TAG.lock   content; what has arrived of it; held while it arrives
//! ```

use std::io;
use std::path::{Path, PathBuf};

use super::names::{is_key, is_revision};
use super::{Kind, Variables, home};
use crate::weights::atomic::write_atomically;

/// The part of the cache that belongs to one repository.
#[derive(Debug)]
pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// None where no home folder is known.
    pub(super) fn find(variables: Variables<'_>, kind: Kind, repo: &str) -> Option<Self> {
        let folder = format!("{}--{}", kind.plural(), repo.replace('/', "--"));
        Some(Self { folder: home(variables)?.join("hub").join(folder) })
    }

    /// The commit that a branch or tag stood at when it was last fetched. A commit stands for
    /// itself.
    pub(super) fn commit_of(&self, revision: &str) -> Option<String> {
        if self.snapshot(revision).is_dir() && is_key(revision) {
            return Some(revision.to_owned());
        }
        let text = std::fs::read_to_string(self.reference(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_key(commit))
    }

    /// Where a branch or tag stands now. Names must have been checked.
    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> io::Result<()> {
        debug_assert!(is_revision(revision) && is_key(commit));
        if revision == commit || self.commit_of(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.reference(revision);
        std::fs::create_dir_all(path.parent().unwrap_or(&self.folder))?;
        write_atomically(&path, commit.as_bytes()).map_err(io::Error::other)
    }

    fn reference(&self, revision: &str) -> PathBuf {
        self.folder.join("refs").join(revision)
    }

    /// The folder of one commit's files.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Names of the files of a commit that are there, links to nothing left out.
    pub(super) fn names(&self, commit: &str) -> Vec<String> {
        let root = self.snapshot(commit);
        let (mut names, mut folders) = (Vec::new(), vec![root.clone()]);
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                let path = path.path();
                if path.is_file() {
                    let name = path.strip_prefix(&root).ok().and_then(Path::to_str);
                    names.extend(name.map(str::to_owned));
                } else if path.is_dir() && !path.is_symlink() {
                    folders.push(path);
                }
            }
        }
        names.sort();
        names
    }

    /// A content by its entity tag.
    pub(super) fn blob(&self, tag: &str) -> PathBuf {
        self.folder.join("blobs").join(tag)
    }

    /// Lets a file of a commit stand for a content that is there. Names must have been checked.
    pub(super) fn link(&self, tag: &str, commit: &str, name: &str) -> io::Result<PathBuf> {
        let place = self.snapshot(commit).join(name);
        if place.exists() {
            return Ok(place);
        }
        std::fs::create_dir_all(place.parent().unwrap_or(&self.folder))?;
        // A link to a content that somebody removed.
        if place.is_symlink() {
            std::fs::remove_file(&place)?;
        }
        let mut content = PathBuf::from("../..");
        content.extend(name.split('/').skip(1).map(|_| ".."));
        content.extend(["blobs", tag]);
        match stand_for(&content, &self.blob(tag), &place) {
            // Another process was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && place.exists() => {}
            other => other?,
        }
        Ok(place)
    }
}

#[cfg(unix)]
fn stand_for(relative: &Path, _content: &Path, place: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(relative, place)
}

/// Links need rights that not every user has.
#[cfg(not(unix))]
fn stand_for(_relative: &Path, content: &Path, place: &Path) -> io::Result<()> {
    std::fs::hard_link(content, place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_where_other_clients_left_them() {
        let folder = tempfile::tempdir().expect("folder");
        let variables =
            |name: &str| (name == "HF_HOME").then(|| folder.path().display().to_string());
        let cache = Cache::find(&variables, Kind::DataSet, "org/name").expect("a home");
        let own = folder.path().join("hub/datasets--org--name");
        assert_eq!(cache.blob("abc"), own.join("blobs/abc"));
        assert_eq!(cache.commit_of("main"), None);
        std::fs::create_dir_all(own.join("blobs")).expect("folder");
        std::fs::write(own.join("blobs/abc"), "content").expect("write");
        let place = cache.link("abc", "0123", "a/b/c.txt").expect("linked");
        assert_eq!(place, own.join("snapshots/0123/a/b/c.txt"));
        assert_eq!(std::fs::read(&place).expect("content"), b"content");
        assert_eq!(cache.link("abc", "0123", "a/b/c.txt").expect("again"), place);
        assert_eq!(cache.names("0123"), ["a/b/c.txt"]);
        cache.set_commit("refs/pr/1", "0123").expect("written");
        assert_eq!(cache.commit_of("refs/pr/1").as_deref(), Some("0123"));
        assert_eq!(cache.commit_of("0123").as_deref(), Some("0123"));
        std::fs::write(own.join("refs/main"), "../../../0123").expect("write");
        assert_eq!(cache.commit_of("main"), None, "a commit that is none");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_nothing_is_replaced() {
        let folder = tempfile::tempdir().expect("folder");
        let variables =
            |name: &str| (name == "HF_HOME").then(|| folder.path().display().to_string());
        let cache = Cache::find(&variables, Kind::Model, "org/name").expect("a home");
        std::fs::create_dir_all(cache.blob("x")).expect("folder");
        cache.link("gone", "0123", "a").expect("linked");
        std::fs::write(cache.blob("new"), "content").expect("write");
        let place = cache.link("new", "0123", "a").expect("linked");
        assert_eq!(std::fs::read(place).expect("content"), b"content");
    }
}
