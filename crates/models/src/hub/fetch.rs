//! Files of a commit into the cache, each of them complete or not there.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ureq::Body;
use ureq::http::{Response, header};

use super::client::{Listing, Metadata, Repository};
use super::names::is_file_name;
use super::{Arrived, Tell};
use crate::disk::free_bytes;
use crate::error::{ModelError, Result};
use crate::sha256;

/// Between two looks at another process's download.
const LOOK: Duration = Duration::from_millis(200);
/// How long another process's download may stand still.
const STANDSTILL: Duration = Duration::from_mins(2);
/// Bytes that are read at a time.
const BLOCK: usize = 1 << 20;
/// What helps where a download ended early.
const GOES_ON: &str = "give the same command again: it goes on from what has arrived";

impl Repository {
    /// Where the named files of a listing lie, after fetching those that are not there. All are
    /// of one commit: the cached one if it has them all, else the listing's.
    /// It fails where a name would leave the cache, a file does not arrive whole or cannot be written.
    pub(crate) fn files(
        &self,
        listing: &Listing,
        names: &[String],
        tell: Tell<'_>,
    ) -> Result<Vec<PathBuf>> {
        self.check_names(names)?;
        if let Some(paths) = self.cached(names) {
            return Ok(paths);
        }
        let paths: Result<Vec<PathBuf>> =
            names.iter().map(|name| self.file_of(&listing.commit, name, tell)).collect();
        let paths = paths?;
        let written = self.cache.set_commit(self.revision(), &listing.commit);
        written.map_err(|error| self.error(error))?;
        Ok(paths)
    }

    /// The beginning of a file, so many bytes if it has as many, and how long all of it is. It lies where
    /// a later download goes on from, or is the whole file where that is there. It fails as [`Self::files`] does.
    pub(super) fn beginning(
        &self,
        listing: &Listing,
        name: &str,
        bytes: u64,
    ) -> Result<(PathBuf, u64)> {
        let whole = |path: PathBuf| match path.metadata() {
            Ok(file) => Ok((path, file.len())),
            Err(error) => Err(ModelError::io(path)(error)),
        };
        let names = [name.to_owned()];
        self.check_names(&names)?;
        if let Some([path]) = self.cached(&names).as_deref() {
            return whole(path.clone());
        }
        let place = self.cache.snapshot(&listing.commit).join(name);
        if place.exists() {
            return whole(place);
        }
        let metadata = self.metadata(&listing.commit, name)?;
        let Some(size) = metadata.size.filter(|size| *size > bytes) else {
            return whole(self.file_of(&listing.commit, name, &mut |_| {})?);
        };
        let blob = self.cache.blob(&metadata.tag);
        if blob.exists() {
            return whole(blob);
        }
        let part = beside(&blob, "part");
        let _lock = self.locked(&blob, &part)?;
        self.arrive((&listing.commit, name), &metadata, &part, Some(bytes), &mut |_| {})?;
        Ok((part, size))
    }

    fn check_names(&self, names: &[String]) -> Result<()> {
        match names.iter().find(|name| !is_file_name(name)) {
            None => Ok(()),
            Some(name) => {
                Err(self.error(format!("the hub gives a file an impossible name: `{name}`")))
            }
        }
    }

    /// Where files lie that were fetched earlier, if the same commit has all of them.
    fn cached(&self, names: &[String]) -> Option<Vec<PathBuf>> {
        let folder = self.cache.snapshot(&self.cache.commit_of(self.revision())?);
        let paths: Vec<PathBuf> = names.iter().map(|name| folder.join(name)).collect();
        paths.iter().all(|path| path.exists()).then_some(paths)
    }

    fn file_of(&self, commit: &str, name: &str, tell: Tell<'_>) -> Result<PathBuf> {
        let place = self.cache.snapshot(commit).join(name);
        if place.exists() {
            return Ok(place);
        }
        let metadata = self.metadata(commit, name)?;
        let blob = self.cache.blob(&metadata.tag);
        if !blob.exists() {
            let part = beside(&blob, "part");
            let _lock = self.locked(&blob, &part)?;
            if !blob.exists() {
                self.download((commit, name), &metadata, &part, tell)?;
                std::fs::rename(&part, &blob).map_err(ModelError::io(&blob))?;
            }
        }
        self.cache.link(&metadata.tag, commit, name).map_err(ModelError::io(&place))
    }

    /// The right to write a content.
    fn locked(&self, blob: &Path, part: &Path) -> Result<File> {
        std::fs::create_dir_all(blob.parent().unwrap_or(blob)).map_err(ModelError::io(blob))?;
        self.lock(&beside(blob, "lock"), part)
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

    /// Fetches what is missing of a content into `part`, and checks it.
    fn download(
        &self,
        (commit, name): (&str, &str),
        told: &Metadata,
        part: &Path,
        tell: Tell<'_>,
    ) -> Result<()> {
        let (file, have) = self.arrive((commit, name), told, part, None, tell)?;
        let io = |error| ModelError::io(part)(error);
        if let Some(size) = told.size.filter(|size| *size != have) {
            if have > size {
                file.set_len(0).map_err(io)?;
            }
            let reason = format!("{name}: {have} bytes arrived, {size} were told");
            return Err(self.error_with(reason, GOES_ON));
        }
        if told.is_sum && sha256::of_file(part).map_err(io)? != told.tag {
            file.set_len(0).map_err(io)?;
            let reason = format!("{name}: its SHA-256 sum is not {}", told.tag);
            return Err(self.error_with(
                reason,
                "what arrived is thrown away: give the same command again; if it stays so, the mirror or a \
                 proxy changes files (HF_ENDPOINT)",
            ));
        }
        file.sync_all().map_err(io)
    }

    /// Fetches what is missing of a content, or of its first `limit` bytes, into `part`; the bytes that are
    /// there then.
    fn arrive(
        &self,
        (commit, name): (&str, &str),
        told: &Metadata,
        part: &Path,
        limit: Option<u64>,
        tell: Tell<'_>,
    ) -> Result<(File, u64)> {
        let io = |error| ModelError::io(part)(error);
        let mut file =
            OpenOptions::new().create(true).append(true).read(true).open(part).map_err(io)?;
        let mut have = file.metadata().map_err(io)?.len();
        if told.size.is_some_and(|size| have > size) {
            have = 0;
        }
        let is_enough = limit.is_some_and(|limit| have >= limit);
        if is_enough || (told.size == Some(have) && have > 0) {
            return Ok((file, have));
        }
        self.require_room(name, told.size.map(|size| limit.unwrap_or(size) - have), part)?;
        let response = self.bytes(commit, name, have)?;
        have = if starts_at(&response, have) { have } else { 0 };
        file.set_len(have).map_err(io)?;
        let body = response.into_body().into_with_config().limit(u64::MAX).reader();
        // One byte more than was told shows that there are more.
        let most = limit.or(told.size.map(|size| size.saturating_add(1)));
        let mut body = body.take(most.map_or(u64::MAX, |most| most.saturating_sub(have)));
        let mut block = vec![0; BLOCK];
        tell(Arrived { name, bytes: have, of: told.size });
        // What has arrived stays, for the next try to go on from.
        loop {
            let count = match body.read(&mut block) {
                Ok(0) => return Ok((file, have)),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.error_with(format!("{name}: {error}"), GOES_ON)),
            };
            file.write_all(&block[..count]).map_err(|error| self.unwritten(name, part, error))?;
            have += count as u64;
            tell(Arrived { name, bytes: have, of: told.size });
        }
    }

    /// Refuses a download that the disk has no room for, where the system tells.
    fn require_room(&self, name: &str, bytes: Option<u64>, part: &Path) -> Result<()> {
        let free = part.parent().and_then(free_bytes);
        match (bytes, free) {
            (Some(bytes), Some(free)) if bytes > free => Err(self.no_room(
                name,
                part,
                &format!("{bytes} bytes are to come, {free} are free"),
            )),
            _ => Ok(()),
        }
    }

    fn unwritten(&self, name: &str, part: &Path, error: io::Error) -> ModelError {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        match error.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => {
                self.no_room(name, part, &error.to_string())
            }
            _ => ModelError::io(part)(error),
        }
    }

    fn no_room(&self, name: &str, part: &Path, problem: &str) -> ModelError {
        let folder = part.parent().unwrap_or(part).display();
        self.error_with(
            format!("{name}: no room in {folder}: {problem}"),
            "free some space, or set HF_HOME to a folder on another disk; what has arrived is kept",
        )
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
