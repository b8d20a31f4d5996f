//! Uploading an offline run with W&B's own program, which reads the key from the environment.

use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::run::shell;

const PROGRAM: &str = "wandb";
const LIMIT: Duration = Duration::from_mins(10);
const POLL: Duration = Duration::from_millis(50);

/// Runs `wandb sync` and says what came of it.
pub(super) fn upload(folder: &Path) -> String {
    let failure = match sync(folder) {
        Ok(Some(status)) if status.success() => {
            return format!("W&B: uploaded {}", folder.display());
        }
        Ok(Some(status)) => format!("failed ({status})"),
        Ok(None) => format!("took more than {} s", LIMIT.as_secs()),
        Err(error) => format!("did not start ({error}; install it with `pip install wandb`)"),
    };
    format!(
        "W&B: `{PROGRAM} sync` {failure}; the run is kept, upload it with\n  {}",
        command(folder)
    )
}

/// How the user uploads the run.
pub(super) fn by_hand(folder: &Path) -> String {
    format!("W&B: an offline run; upload it with\n  {}", command(folder))
}

fn command(folder: &Path) -> String {
    shell(&[PROGRAM, "sync"], folder)
}

/// `None` if it took too long.
fn sync(folder: &Path) -> std::io::Result<Option<ExitStatus>> {
    let mut child = Command::new(PROGRAM)
        .arg("sync")
        .arg(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let started = Instant::now();
    while started.elapsed() < LIMIT {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(POLL);
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}
