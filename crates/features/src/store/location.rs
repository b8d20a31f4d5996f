//! Where a store lies: a local folder, or a place in an object store, as a few blocking calls.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    Error as StoreError, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload, PutResult,
};
use serde::de::DeserializeOwned;
use tokio::runtime::{Builder, Runtime};
use url::Url;

use crate::error::{FeatureError, Result};

/// Environment variables that object stores are configured by.
const PREFIXES: [&str; 3] = ["aws_", "google_", "azure_"];

/// Larger objects go to an object store in parts of this size. A request has 30 seconds, unless the
/// environment says otherwise (`AWS_TIMEOUT`), and S3 takes no more than 5 GiB of one.
const PART: usize = 8 << 20;

/// Parts, at most, that S3 and Google take of an object.
const MOST_PARTS: usize = 10_000;

/// How long a process takes at most, between the creation of a small file and its last byte.
const CREATION: Duration = Duration::from_millis(500);

/// A folder of small and large objects, each complete or absent.
#[derive(Clone)]
pub(super) struct Location {
    name: String,
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    /// The folder, if it is one of this machine.
    folder: Option<PathBuf>,
    runtime: Arc<Runtime>,
}

impl Location {
    /// A path, or a URL such as `s3://bucket/folder` (`gs`, `az`, `abfss`, `file`). A local folder
    /// is made if `create`.
    /// It fails where there is no such folder, no such kind of store, or its environment variables are missing.
    pub(super) fn open(spec: &str, create: bool) -> Result<Self> {
        let fail = |error: &dyn std::fmt::Display| FeatureError::store(spec, error);
        let runtime = Builder::new_current_thread();
        let runtime = build(runtime).map_err(|error| fail(&error))?;
        let url = Url::parse(spec).ok().filter(|_| spec.contains("://"));
        let local = match &url {
            None => Some(PathBuf::from(spec)),
            Some(url) if url.scheme() == "file" => {
                Some(url.to_file_path().map_err(|()| fail(&"no local path"))?)
            }
            Some(_) => None,
        };
        let name = spec.to_owned();
        let (store, prefix): (Arc<dyn ObjectStore>, Path) = match (&local, &url) {
            (None, Some(_)) if !cfg!(feature = "cloud") => return Err(fail(&WITHOUT_CLOUD)),
            (None, Some(url)) => {
                let options = std::env::vars().map(|(key, value)| (key.to_lowercase(), value));
                let options =
                    options.filter(|(key, _)| PREFIXES.iter().any(|p| key.starts_with(p)));
                let (store, prefix) =
                    object_store::parse_url_opts(url, options).map_err(|error| fail(&error))?;
                (Arc::from(store), prefix)
            }
            (folder, _) => {
                let folder = folder.clone().unwrap_or_default();
                if create {
                    std::fs::create_dir_all(&folder).map_err(|error| fail(&error))?;
                } else if !folder.is_dir() {
                    return Err(fail(&"no such folder: `longdraft capture` writes feature stores"));
                }
                let store = LocalFileSystem::new_with_prefix(&folder);
                (Arc::new(store.map_err(|error| fail(&error))?), Path::default())
            }
        };
        Ok(Self { name, store, prefix, folder: local, runtime: Arc::new(runtime) })
    }

    /// The local folder, if it is one.
    pub(super) fn folder(&self) -> Option<&FilePath> {
        self.folder.as_deref()
    }

    /// The store as it is named.
    pub(super) fn name(&self) -> &str {
        self.name.trim_end_matches('/')
    }

    /// An error about one object.
    pub(super) fn problem(&self, object: &str, problem: impl std::fmt::Display) -> FeatureError {
        let name = self.name();
        let separator = if object.is_empty() { "" } else { "/" };
        FeatureError::store(format!("{name}{separator}{object}"), problem)
    }

    fn path(&self, object: &str) -> Path {
        object.split('/').fold(self.prefix.clone(), Path::join)
    }

    /// Refuses a named pipe or a device that lies in an object's place in a local folder: reading it might never end.
    fn require_file(&self, object: &str) -> Result<()> {
        let found = self.folder.as_ref().and_then(|root| std::fs::metadata(root.join(object)).ok());
        if found.is_none_or(|found| found.is_file()) {
            return Ok(());
        }
        let problem = "is no regular file: remove it, and run `longdraft capture` again";
        Err(self.problem(object, problem))
    }

    /// An object's bytes; `None` if it does not exist.
    pub(super) fn get(&self, object: &str) -> Result<Option<Vec<u8>>> {
        self.require_file(object)?;
        let path = self.path(object);
        let bytes = self.runtime.block_on(async { self.store.get(&path).await?.bytes().await });
        match bytes {
            Ok(bytes) => Ok(Some(bytes.to_vec())),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.problem(object, error)),
        }
    }

    /// An object's size in bytes; `None` if it does not exist.
    pub(super) fn size(&self, object: &str) -> Result<Option<u64>> {
        self.require_file(object)?;
        match self.runtime.block_on(self.store.head(&self.path(object))) {
            Ok(meta) => Ok(Some(meta.size)),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.problem(object, error)),
        }
    }

    /// An object that [`Self::create`] wrote, as what its JSON says, or why it is none; `None` if it does
    /// not exist. It may be met half written, so it is looked at again before it is called torn.
    pub(super) fn get_created<T: DeserializeOwned>(
        &self,
        object: &str,
    ) -> Result<Option<serde_json::Result<T>>> {
        let read = || -> Result<Option<serde_json::Result<T>>> {
            Ok(self.get(object)?.map(|bytes| serde_json::from_slice(&bytes)))
        };
        let first = read()?;
        if !matches!(first, Some(Err(_))) {
            return Ok(first);
        }
        std::thread::sleep(CREATION);
        read()
    }

    /// Writes an object, whole or not at all.
    pub(super) fn put(&self, object: &str, bytes: Vec<u8>) -> Result<()> {
        let path = self.path(object);
        let written = if self.folder.is_some() || bytes.len() <= PART {
            self.runtime.block_on(self.store.put(&path, PutPayload::from(bytes)))
        } else {
            self.runtime.block_on(async {
                let mut upload = self.store.put_multipart(&path).await?;
                put_in_parts(upload.as_mut(), &bytes).await
            })
        };
        written.map(|_| ()).map_err(|error| self.problem(object, error))
    }

    /// Writes an object unless there is one already; tells whether it was written. It is small: on a file
    /// system without hard links it is there a moment before it is whole.
    pub(super) fn create(&self, object: &str, bytes: &[u8]) -> Result<bool> {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let (path, payload) = (self.path(object), PutPayload::from(bytes.to_vec()));
        match (self.runtime.block_on(self.store.put_opts(&path, payload, options)), &self.folder) {
            (Ok(_), _) => Ok(true),
            (Err(StoreError::AlreadyExists { .. }), _) => Ok(false),
            // The client creates files by a hard link, which exFAT and many network shares refuse.
            (Err(_), Some(folder)) => create_file(&folder.join(object), bytes)
                .map_err(|error| self.problem(object, error)),
            (Err(error), None) => Err(self.problem(object, error)),
        }
    }

    /// Names of the objects in a folder.
    pub(super) fn list(&self, folder: &str) -> Result<Vec<String>> {
        let path = self.path(folder);
        let found = self.runtime.block_on(self.store.list_with_delimiter(Some(&path)));
        let found = found.map_err(|error| self.problem(folder, error))?;
        Ok(found.objects.iter().filter_map(|o| o.location.filename().map(str::to_owned)).collect())
    }

    /// Removes half files that processes left that were killed while they wrote: those in a local
    /// folder of the store (`""` for the store itself) whose name begins with `prefix` and that have
    /// not changed for `age`. The object store's client writes `NAME#N` and renames.
    pub(super) fn remove_staged(&self, folder: &str, prefix: &str, age: Duration) {
        let Some(root) = &self.folder else { return };
        for entry in std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let staged = name
                .rsplit_once('#')
                .is_some_and(|(_, n)| !n.is_empty() && n.chars().all(|c| c.is_ascii_digit()));
            let changed = entry.metadata().and_then(|data| data.modified()).ok();
            let old = changed.and_then(|at| at.elapsed().ok()).is_some_and(|since| since >= age);
            if staged && old && name.starts_with(prefix) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Removes an object if it is there.
    pub(super) fn delete(&self, object: &str) -> Result<()> {
        match self.runtime.block_on(self.store.delete(&self.path(object))) {
            Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.problem(object, error)),
        }
    }
}

/// Sends an object in parts, one after the other: on a slow link, too, each has the time of a request.
async fn put_in_parts(
    upload: &mut dyn MultipartUpload,
    bytes: &[u8],
) -> object_store::Result<PutResult> {
    let sent = send_parts(upload, bytes).await;
    if sent.is_err() {
        // Parts without an object take room until they are given up.
        let _ = upload.abort().await;
    }
    sent
}

async fn send_parts(
    upload: &mut dyn MultipartUpload,
    bytes: &[u8],
) -> object_store::Result<PutResult> {
    for part in bytes.chunks(PART.max(bytes.len().div_ceil(MOST_PARTS))) {
        upload.put_part(PutPayload::from(part.to_vec())).await?;
    }
    upload.complete().await
}

/// Writes a file unless there is one already; tells whether it was written.
fn create_file(path: &FilePath, bytes: &[u8]) -> std::io::Result<bool> {
    let mut file = match File::options().write(true).create_new(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
        Err(error) => return Err(error),
    };
    let written = file.write_all(bytes);
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written.map(|()| true)
}

/// What a program without the feature `cloud` says of stores elsewhere.
const WITHOUT_CLOUD: &str = "this program was built without object stores: \
    `cargo install --locked --path crates/cli --features cloud` builds one with them, wheels and images have them";

#[cfg(feature = "cloud")]
fn build(mut runtime: Builder) -> std::io::Result<Runtime> {
    // Fails if it was done before, which is all that is wanted.
    let _ = rustls::crypto::ring::default_provider().install_default();
    runtime.enable_all().build()
}

#[cfg(not(feature = "cloud"))]
fn build(mut runtime: Builder) -> std::io::Result<Runtime> {
    runtime.build()
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::pin::Pin;

    use object_store::memory::InMemory;
    use object_store::{Extensions, UploadPart};

    use super::*;

    fn runtime() -> Runtime {
        build(Builder::new_current_thread()).expect("runtime")
    }

    /// What a client would send: sizes of parts.
    #[derive(Debug, Default)]
    struct Upload {
        parts: Vec<usize>,
        /// The part that fails.
        fails: Option<usize>,
        aborted: bool,
    }

    type Answer<'a, T> = Pin<Box<dyn Future<Output = object_store::Result<T>> + Send + 'a>>;

    impl MultipartUpload for Upload {
        fn put_part(&mut self, data: PutPayload) -> UploadPart {
            self.parts.push(data.content_length());
            let failure = StoreError::Generic { store: "test", source: "timed out".into() };
            let failed = self.fails == Some(self.parts.len());
            Box::pin(ready(if failed { Err(failure) } else { Ok(()) }))
        }

        fn complete<'life0, 'async_trait>(&'life0 mut self) -> Answer<'async_trait, PutResult>
        where
            'life0: 'async_trait,
            Self: 'async_trait,
        {
            let extensions = Extensions::new();
            Box::pin(ready(Ok(PutResult { e_tag: None, version: None, extensions })))
        }

        fn abort<'life0, 'async_trait>(&'life0 mut self) -> Answer<'async_trait, ()>
        where
            'life0: 'async_trait,
            Self: 'async_trait,
        {
            self.aborted = true;
            Box::pin(ready(Ok(())))
        }
    }

    #[test]
    fn large_objects_are_sent_in_parts_that_a_slow_link_carries() {
        let (runtime, bytes) = (runtime(), vec![7; 2 * PART + 3]);
        let mut upload = Upload::default();
        runtime.block_on(put_in_parts(&mut upload, &bytes)).expect("sent");
        assert_eq!(upload.parts, [PART, PART, 3]);
        assert!(!upload.aborted);
        let mut upload = Upload { fails: Some(2), ..Upload::default() };
        let told = runtime.block_on(put_in_parts(&mut upload, &bytes)).expect_err("failed");
        assert!(told.to_string().contains("timed out"), "{told}");
        assert!(upload.aborted && upload.parts.len() == 2);
    }

    #[test]
    fn objects_of_several_parts_are_read_as_they_were_written() -> Result<()> {
        let elsewhere = Location {
            name: "memory://store".to_owned(),
            store: Arc::new(InMemory::new()),
            prefix: Path::from("features"),
            folder: None,
            runtime: Arc::new(runtime()),
        };
        let bytes: Vec<u8> = (0..PART as u32 + 5).map(|i| (i >> 3) as u8).collect();
        elsewhere.put("shard", bytes.clone())?;
        assert!(elsewhere.get("shard")?.is_some_and(|read| read == bytes));
        elsewhere.put("small", b"{}".to_vec())?;
        assert_eq!(elsewhere.get("small")?, Some(b"{}".to_vec()));
        Ok(())
    }

    /// A name that leaves no room for the file that is linked stands for a file system without hard links.
    #[cfg(unix)]
    #[test]
    fn files_are_created_once_where_nothing_can_be_linked() -> Result<()> {
        let folder = tempfile::tempdir().expect("folder");
        let location = Location::open(&folder.path().display().to_string(), true)?;
        let name = "n".repeat(254);
        assert!(location.create(&name, b"first")?);
        assert!(!location.create(&name, b"second")?);
        assert_eq!(std::fs::read(folder.path().join(&name)).expect("file"), b"first");
        assert!(location.create("absent/name", b"made")?);
        Ok(())
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_file_is_refused_and_not_waited_for() -> Result<()> {
        let folder = tempfile::tempdir().expect("folder");
        let location = Location::open(&folder.path().display().to_string(), true)?;
        std::fs::create_dir(folder.path().join("recipe.json")).expect("a folder");
        let socket = folder.path().join("index.json");
        let _socket = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
        for name in ["recipe.json", "index.json"] {
            let errors = [location.get(name).err(), location.size(name).err()];
            for error in errors.map(|error| error.expect("refused").to_string()) {
                assert!(error.contains(name) && error.contains("no regular file"), "{error}");
            }
        }
        assert_eq!((location.get("absent")?, location.size("absent")?), (None, None));
        Ok(())
    }

    #[test]
    fn what_is_being_created_is_looked_at_again() -> Result<()> {
        let folder = tempfile::tempdir().expect("folder");
        let location = Location::open(&folder.path().display().to_string(), true)?;
        let path = folder.path().join("recipe.json");
        std::fs::write(&path, "[1, 2").expect("half");
        let read = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(CREATION / 10);
                std::fs::write(&path, "[1, 2]").expect("whole");
            });
            location.get_created::<Vec<u32>>("recipe.json")
        })?;
        assert_eq!(read.expect("there").expect("whole"), [1, 2]);
        std::fs::write(&path, "[1").expect("torn");
        assert!(location.get_created::<Vec<u32>>("recipe.json")?.expect("there").is_err());
        assert!(location.get_created::<Vec<u32>>("other.json")?.is_none());
        Ok(())
    }
}
