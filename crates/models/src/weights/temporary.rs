//! Names of what is being written, beside its place: `NAME.HOST.PID.ENDING`. What processes that were
//! killed left under such names is removed by the next one that writes in the folder.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use crate::paths::parent_of;

/// Endings of such names.
const ENDINGS: [&str; 3] = [".tmp", ".writing", ".writing.old"];

/// Age at which what a process of another machine left is removed: whether that lives is not known.
const OLD: Duration = Duration::from_hours(24);

/// Says which machine a process id belongs to, where several share a folder.
static HOST: LazyLock<String> = LazyLock::new(|| {
    let name = gethostname::gethostname();
    blake3::hash(name.as_encoded_bytes()).to_hex()[..HOST_DIGITS].to_owned()
});
const HOST_DIGITS: usize = 8;

/// Folders that this process has tidied.
static TIDY: Mutex<Option<HashSet<PathBuf>>> = Mutex::new(None);

/// Where this process writes what is to stand at `place`, in the same folder: `before`, the place's
/// name, whose it is, and `ending`, which is `.tmp` for files and `.writing` for folders.
pub fn temporary(place: &Path, before: &str, ending: &str) -> PathBuf {
    let folder = parent_of(place);
    let mut tidy = TIDY.lock().unwrap_or_else(PoisonError::into_inner);
    if tidy.get_or_insert_default().insert(folder.to_path_buf()) {
        remove_left(folder);
    }
    drop(tidy);
    let mut name = std::ffi::OsString::from(before);
    name.push(place.file_name().unwrap_or_default());
    name.push(format!(".{}.{}{ending}", *HOST, std::process::id()));
    folder.join(name)
}

/// Removes what processes that are gone left in a folder. Whoever cannot is no worse off.
fn remove_left(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let Some((host, pid)) = owner(&entry.file_name()) else { continue };
        let Ok(about) = entry.metadata() else { continue };
        let age = about.modified().ok().and_then(|modified| modified.elapsed().ok());
        let gone = if host == *HOST { !is_alive(pid) } else { age.is_some_and(|age| age > OLD) };
        let path = entry.path();
        let _ = match (gone, about.is_dir()) {
            (true, true) => std::fs::remove_dir_all(path),
            (true, false) => std::fs::remove_file(path),
            (false, _) => Ok(()),
        };
    }
}

/// Host and process of a name that [`temporary`] gave.
fn owner(name: &OsStr) -> Option<(String, u32)> {
    let name = name.to_str()?;
    let name = ENDINGS.iter().find_map(|ending| name.strip_suffix(ending))?;
    let (name, pid) = name.rsplit_once('.')?;
    let (_, host) = name.rsplit_once('.')?;
    let is_host = host.len() == HOST_DIGITS && host.bytes().all(|byte| byte.is_ascii_hexdigit());
    Some((host.to_owned(), pid.parse().ok()?)).filter(|_| is_host)
}

#[cfg(unix)]
fn is_alive(pid: u32) -> bool {
    use nix::errno::Errno;
    use nix::sys::signal::kill;
    use nix::unistd::Pid;
    i32::try_from(pid).is_ok_and(|pid| kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH))
}

/// Without a way to ask, none is removed.
#[cfg(not(unix))]
fn is_alive(_: u32) -> bool {
    true
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_the_killed_left_goes_and_what_the_living_write_stays() {
        let folder = tempfile::tempdir().expect("folder");
        let path = |name: &str| folder.path().join(name);
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        let dead = child.id();
        child.wait().expect("its end");
        let (host, own) = (&*HOST, std::process::id());
        let left = [format!("a.{host}.{dead}.tmp"), format!(".b.{host}.{dead}.writing")];
        let kept = [
            format!("a.{host}.{own}.tmp"),
            // Of another machine, and not old.
            format!("a.00000000.{dead}.tmp"),
            // Somebody else's names.
            format!("a.{dead}.tmp"),
            format!("a.{host}.{dead}.txt"),
            format!("a.{host}.x.tmp"),
        ];
        std::fs::write(path(&left[0]), "half").expect("file");
        std::fs::create_dir(path(&left[1])).expect("folder");
        std::fs::write(path(&left[1]).join("file"), "half").expect("file");
        kept.iter().for_each(|name| std::fs::write(path(name), "").expect("file"));
        assert_eq!(temporary(&path("a"), "", ".tmp"), path(&kept[0]));
        for name in &left {
            assert!(!path(name).exists(), "{name} is left");
        }
        for name in &kept {
            assert!(path(name).exists(), "{name} is gone");
        }
    }
}
