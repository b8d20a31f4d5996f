//! Files of a commit into the cache, each of them complete or not there.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ureq::Body;
use ureq::http::{Response, header};

use super::client::{Listing, Metadata, Repository};
use super::names::is_file_name;
use crate::error::{ModelError, Result};
use crate::sha256;

/// Between two looks at another process's download.
const LOOK: Duration = Duration::from_millis(200);
/// How long another process's download may stand still.
const STANDSTILL: Duration = Duration::from_mins(2);

impl Repository {
    /// Where the named files of a listing lie, after fetching those that are not there. All are
    /// of one commit: the cached one if it has them all, else the listing's.
    ///
    /// # Errors
    /// - a name would leave the cache, a file does not arrive whole or cannot be written
    pub(crate) fn files(&self, listing: &Listing, names: &[String]) -> Result<Vec<PathBuf>> {
        if let Some(name) = names.iter().find(|name| !is_file_name(name)) {
            return Err(self.error(format!("the hub gives a file an impossible name: `{name}`")));
        }
        let cached = self.cache.commit_of(self.revision()).and_then(|commit| {
            let folder = self.cache.snapshot(&commit);
            let paths: Vec<PathBuf> = names.iter().map(|name| folder.join(name)).collect();
            paths.iter().all(|path| path.exists()).then_some(paths)
        });
        if let Some(paths) = cached {
            return Ok(paths);
        }
        let paths: Result<Vec<PathBuf>> =
            names.iter().map(|name| self.file_of(&listing.commit, name)).collect();
        let paths = paths?;
        let written = self.cache.set_commit(self.revision(), &listing.commit);
        written.map_err(|error| self.error(error))?;
        Ok(paths)
    }

    fn file_of(&self, commit: &str, name: &str) -> Result<PathBuf> {
        let place = self.cache.snapshot(commit).join(name);
        if place.exists() {
            return Ok(place);
        }
        let metadata = self.metadata(commit, name)?;
        let blob = self.cache.blob(&metadata.tag);
        let fail = |path: &Path| ModelError::io(path.to_path_buf());
        if !blob.exists() {
            std::fs::create_dir_all(blob.parent().unwrap_or(&blob)).map_err(fail(&blob))?;
            let part = beside(&blob, "part");
            let _lock = self.lock(&beside(&blob, "lock"), &part)?;
            if !blob.exists() {
                self.download(commit, name, &metadata, &part)?;
                std::fs::rename(&part, &blob).map_err(fail(&blob))?;
            }
        }
        self.cache.link(&metadata.tag, commit, name).map_err(fail(&place))
    }

    /// Waits while another process fetches the same content, as long as that goes on.
    fn lock(&self, path: &Path, part: &Path) -> Result<File> {
        let file = File::create(path).map_err(ModelError::io(path))?;
        let (mut size, mut since) = (None, Instant::now());
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(error)) => return Err(ModelError::io(path)(error)),
                Err(TryLockError::WouldBlock) => {}
            }
            let now = part.metadata().ok().map(|file| file.len());
            if now != size {
                (size, since) = (now, Instant::now());
            }
            if since.elapsed() > STANDSTILL {
                let lock = path.display();
                return Err(self.error(format!("another process holds {lock} and stands still")));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Fetches what is missing of a content into `part`.
    fn download(&self, commit: &str, name: &str, told: &Metadata, part: &Path) -> Result<()> {
        let io = |error| ModelError::io(part)(error);
        let mut file =
            OpenOptions::new().create(true).append(true).read(true).open(part).map_err(io)?;
        let mut have = file.metadata().map_err(io)?.len();
        if told.size.is_some_and(|size| have > size) {
            have = 0;
        }
        if told.size != Some(have) || have == 0 {
            let response = self.bytes(commit, name, have)?;
            have = if starts_at(&response, have) { have } else { 0 };
            file.set_len(have).map_err(io)?;
            let body = response.into_body().into_with_config().limit(u64::MAX).reader();
            // One byte more than was told shows that there are more.
            let left = told.size.map_or(u64::MAX, |size| (size - have).saturating_add(1));
            let arrived = io::copy(&mut body.take(left), &mut file);
            // What has arrived stays, for the next try to go on from.
            have += arrived.map_err(|error| self.error(format!("{name}: {error}")))?;
        }
        if let Some(size) = told.size.filter(|size| *size != have) {
            if have > size {
                file.set_len(0).map_err(io)?;
            }
            return Err(self.error(format!("{name}: {have} bytes arrived, {size} were told")));
        }
        if told.is_sum && sha256::of_file(part).map_err(io)? != told.tag {
            file.set_len(0).map_err(io)?;
            return Err(self.error(format!("{name}: its SHA-256 sum is not {}", told.tag)));
        }
        file.sync_all().map_err(io)
    }
}

fn beside(blob: &Path, ending: &str) -> PathBuf {
    let mut path = blob.as_os_str().to_owned();
    path.push(format!(".{ending}"));
    path.into()
}

/// Whether an answer goes on after `have` bytes.
fn starts_at(response: &Response<Body>, have: u64) -> bool {
    let range = response.headers().get(header::CONTENT_RANGE).and_then(|text| text.to_str().ok());
    let start = range.and_then(|text| text.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
    response.status().as_u16() == 206 && start == Some(have)
}
