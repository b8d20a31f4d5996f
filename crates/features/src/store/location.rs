//! Where a store lies: a local folder, or a place in an object store, as a few blocking calls.

use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    Error as StoreError, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
};
use tokio::runtime::{Builder, Runtime};
use url::Url;

use crate::error::{FeatureError, Result};

/// Environment variables that object stores are configured by.
const PREFIXES: [&str; 3] = ["aws_", "google_", "azure_"];

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
    ///
    /// # Errors
    /// - there is no such folder, no such kind of store, or its environment variables are missing
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

    /// An object's bytes; `None` if it does not exist.
    pub(super) fn get(&self, object: &str) -> Result<Option<Vec<u8>>> {
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
        match self.runtime.block_on(self.store.head(&self.path(object))) {
            Ok(meta) => Ok(Some(meta.size)),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.problem(object, error)),
        }
    }

    /// Writes an object, whole or not at all.
    pub(super) fn put(&self, object: &str, bytes: Vec<u8>) -> Result<()> {
        let payload = PutPayload::from(bytes);
        let written = self.runtime.block_on(self.store.put(&self.path(object), payload));
        written.map(|_| ()).map_err(|error| self.problem(object, error))
    }

    /// Writes an object unless there is one already; tells whether it was written.
    pub(super) fn create(&self, object: &str, bytes: Vec<u8>) -> Result<bool> {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let (path, payload) = (self.path(object), PutPayload::from(bytes));
        match self.runtime.block_on(self.store.put_opts(&path, payload, options)) {
            Ok(_) => Ok(true),
            Err(StoreError::AlreadyExists { .. }) => Ok(false),
            Err(error) => Err(self.problem(object, error)),
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
