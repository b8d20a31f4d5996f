//! What of an export folder goes to the hub, and what stays.

use std::path::{Path, PathBuf};

use longdraft_models::error::Problems;
use longdraft_models::hub::{is_file_name, printable};
use longdraft_models::sha256;

use super::CARD;
use crate::error::{Result, ServingError};
use crate::{MANIFEST_FILE, Manifest};

/// Endings of files that a killed command leaves.
const UNFINISHED: [&str; 4] = [".tmp", ".writing", ".part", ".old"];

/// A file to send.
#[derive(Debug, Clone)]
pub struct Upload {
    /// Name in the repository.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
    /// Where the bytes are.
    pub content: Content,
}

impl Upload {
    /// A file that is not on disk.
    fn made(name: &str, bytes: Vec<u8>) -> Self {
        let (size, sha256) = (bytes.len() as u64, sha256::of_bytes(&bytes));
        Self { name: name.to_owned(), size, sha256, content: Content::Bytes(bytes) }
    }
}

/// Bytes in a file, or in memory.
#[derive(Debug, Clone)]
pub enum Content {
    /// On disk.
    File(PathBuf),
    /// Made here.
    Bytes(Vec<u8>),
}

impl Content {
    /// All of them.
    pub(crate) fn read(&self) -> std::io::Result<Vec<u8>> {
        match self {
            Self::File(path) => std::fs::read(path),
            Self::Bytes(bytes) => Ok(bytes.clone()),
        }
    }
}

/// Something in the folder that is not sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Its name, fit for a terminal.
    pub name: String,
    /// Why.
    pub reason: &'static str,
}

/// An export, taken apart for the hub.
#[derive(Debug, Clone)]
pub struct Package {
    /// Everything that is sent: what the manifest lists, the manifest, the card.
    pub files: Vec<Upload>,
    /// Everything else in the folder.
    pub left_out: Vec<LeftOut>,
}

impl Package {
    /// Reads the folder of an export. Of the manifest goes what is public ([`Manifest::public`]).
    ///
    /// # Errors
    /// - the manifest lists hidden or unfinished files, links, or files outside the folder: all of
    ///   them are named
    /// - a file cannot be read
    pub fn of(folder: &Path, manifest: &Manifest, card: &str) -> Result<Self> {
        let listed = manifest.files.keys().map(String::as_str);
        let names: Vec<&str> = listed.chain([MANIFEST_FILE]).filter(|name| *name != CARD).collect();
        let mut problems = Problems::default();
        for name in &names {
            if let Some(problem) = unfit(folder, name) {
                problems.push(format!("`{}` {problem}", printable(name, &[])));
            }
        }
        problems.into_result(&folder.join(MANIFEST_FILE))?;
        let mut left_out = Vec::new();
        rest(folder, "", &names, &mut left_out)?;
        left_out.sort_by(|a, b| a.name.cmp(&b.name));
        let mut files = Vec::new();
        let public = manifest.public();
        for name in names {
            let path = folder.join(name);
            if name == MANIFEST_FILE && public != *manifest {
                let text = public.text().map_err(ServingError::io(&path))?;
                files.push(Upload::made(name, text.into_bytes()));
                continue;
            }
            let (size, sha256) = sha256::measured(&path).map_err(ServingError::io(&path))?;
            files.push(Upload {
                name: name.to_owned(),
                size,
                sha256,
                content: Content::File(path),
            });
        }
        files.push(Upload::made(CARD, card.as_bytes().to_vec()));
        Ok(Self { files, left_out })
    }

    /// Bytes of everything that is sent.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }
}

/// Why a listed file is not sent, if so.
fn unfit(folder: &Path, name: &str) -> Option<&'static str> {
    if !is_file_name(name) {
        return Some("lies outside the folder");
    }
    let mut path = folder.to_path_buf();
    for part in name.split('/') {
        path.push(part);
        if path.is_symlink() {
            return Some("is a link");
        }
        if let Some(reason) = never_sent(part) {
            return Some(reason);
        }
    }
    (!path.is_file()).then_some("is not there")
}

/// Why a file of this name is never sent, if so.
fn never_sent(name: &str) -> Option<&'static str> {
    if name.starts_with('.') {
        Some("is hidden")
    } else if UNFINISHED.iter().any(|ending| name.ends_with(ending)) {
        Some("is unfinished")
    } else {
        None
    }
}

/// What lies in a folder beside `names`; `above` is its own name with a slash.
fn rest(folder: &Path, above: &str, names: &[&str], out: &mut Vec<LeftOut>) -> Result<()> {
    let place = folder.join(above);
    let fail = || ServingError::io(place.clone());
    for entry in std::fs::read_dir(&place).map_err(fail())? {
        let entry = entry.map_err(fail())?;
        let kind = entry.file_type().map_err(fail())?;
        let own = entry.file_name().to_string_lossy().into_owned();
        let name = format!("{above}{own}");
        let within = format!("{name}/");
        if kind.is_dir() && names.iter().any(|listed| listed.starts_with(&within)) {
            rest(folder, &within, names, out)?;
        } else if !names.contains(&name.as_str()) {
            let reason = if kind.is_symlink() {
                "is a link"
            } else if let Some(reason) = never_sent(&own) {
                reason
            } else if kind.is_dir() {
                "is a folder"
            } else if name == CARD {
                "the card is made from the manifest instead"
            } else {
                "is not a part of the export"
            };
            out.push(LeftOut { name: printable(&name, &[]), reason });
        }
    }
    Ok(())
}
