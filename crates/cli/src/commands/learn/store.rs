//! Answers that are kept to learn from: files of rows in a private folder, bounded in size and age.
//!
//! A row is a line of JSON with the tokens of prompt and answer, as `data` reads rows of tokens. Only the
//! newest file grows. A line that a kill cut short is passed over, and the next start begins a new file.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use longdraft_models::sha256;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Result};

/// Folder of the rows.
const ROWS: &str = "rows";
/// Files that the whole has at most, about.
const FILES: u64 = 8;
/// Smallest size at which a file is full.
const LEAST: u64 = 1 << 14;
/// Age at which a file is full, so that old rows go in time.
const DAY: Duration = Duration::from_hours(24);

/// An answer that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Row {
    /// When it was written, in seconds since 1970.
    pub(super) at: u64,
    /// Prompt and answer.
    pub(super) input_ids: Vec<u32>,
    /// 1 for tokens of the answer.
    pub(super) loss_mask: Vec<u8>,
    /// Tokens of the answer that nobody had proposed.
    pub(super) own: usize,
}

impl Row {
    /// Of a prompt and its answer.
    pub(super) fn new(prompt: &[u32], answer: &[u32], own: usize) -> Self {
        let loss_mask = [vec![0; prompt.len()], vec![1; answer.len()]].concat();
        Self { at: now(), input_ids: [prompt, answer].concat(), loss_mask, own }
    }

    /// Tokens of the answer.
    pub(super) fn answer(&self) -> &[u32] {
        let prompt = self.loss_mask.iter().take_while(|learned| **learned == 0).count();
        &self.input_ids[prompt.min(self.input_ids.len())..]
    }

    /// Share of the answer that nobody had proposed.
    pub(super) fn own_share(&self) -> f64 {
        self.own as f64 / self.answer().len().max(1) as f64
    }

    /// Whether it is set aside to compare drafts: one in so many, and the same prompt always or never.
    pub(super) fn is_held_out(&self) -> bool {
        const PART: u8 = 6;
        let prompt = &self.input_ids[..self.input_ids.len() - self.answer().len()];
        let hash = sha256::of_text(&format!("{prompt:?}"));
        let digits = hash.bytes().take(8).fold(0_u64, |sum, digit| 131 * sum + u64::from(digit));
        digits.is_multiple_of(u64::from(PART))
    }
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// How much is kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Bytes.
    pub(super) bytes: u64,
    /// Age.
    pub(super) age: Duration,
}

/// The rows of a folder, to be added to.
pub(super) struct Store {
    folder: PathBuf,
    limits: Limits,
    /// The file that grows, its size, and since when.
    growing: Option<(File, u64, SystemTime)>,
    /// Its number.
    number: u64,
    /// Rows by file, oldest first.
    files: Vec<(u64, usize)>,
}

impl Store {
    /// Opens the rows of a learner's folder, which is made if it is not there.
    ///
    /// # Errors
    /// - the folder cannot be written
    pub(super) fn open(folder: &Path, limits: Limits) -> Result<Self> {
        let folder = folder.join(ROWS);
        private_folder(&folder)?;
        let files: Vec<(u64, usize)> =
            numbers(&folder).into_iter().map(|n| (n, lines(&path(&folder, n)))).collect();
        let number = files.last().map_or(0, |(number, _)| *number);
        let mut store = Self { folder, limits, growing: None, number, files };
        store.sweep();
        Ok(store)
    }

    /// Rows that are kept.
    pub(super) fn rows(&self) -> usize {
        self.files.iter().map(|(_, rows)| rows).sum()
    }

    /// Keeps a row, and lets go of what is too much or too old.
    ///
    /// # Errors
    /// - it cannot be written; what was kept before stays
    pub(super) fn add(&mut self, row: &Row) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(row)?;
        line.push(b'\n');
        let full = (self.limits.bytes / FILES).max(LEAST.min(self.limits.bytes));
        let is_full = |(_, size, since): &(File, u64, SystemTime)| {
            let age = since.elapsed().unwrap_or_default();
            size + line.len() as u64 > full || age > DAY.min(self.limits.age)
        };
        if self.growing.as_ref().is_none_or(is_full) {
            self.growing = None;
            let number = self.number + 1;
            let file = private_file(&path(&self.folder, number))?;
            self.number = number;
            self.growing = Some((file, 0, SystemTime::now()));
            self.files.push((number, 0));
        }
        if let Some((file, size, _)) = &mut self.growing {
            if let Err(error) = file.write_all(&line) {
                // Half a line may stand there: nothing is written after it.
                self.growing = None;
                return Err(error);
            }
            *size += line.len() as u64;
        }
        if let Some((_, rows)) = self.files.last_mut() {
            *rows += 1;
        }
        self.sweep();
        Ok(())
    }

    /// Removes the oldest files while they are too much or too old.
    pub(super) fn sweep(&mut self) {
        let about = |number: u64| std::fs::metadata(path(&self.folder, number));
        let size = |number: u64| about(number).map_or(0, |about| about.len());
        let age = |number: u64| {
            let changed = about(number).and_then(|about| about.modified()).ok();
            changed.and_then(|changed| changed.elapsed().ok()).unwrap_or_default()
        };
        let mut bytes: u64 = self.files.iter().map(|(number, _)| size(*number)).sum();
        let mut gone = 0;
        for (number, _) in &self.files {
            if bytes <= self.limits.bytes && age(*number) <= self.limits.age {
                break;
            }
            bytes -= size(*number).min(bytes);
            // One that cannot be removed is tried again the next time.
            if std::fs::remove_file(path(&self.folder, *number)).is_err() {
                break;
            }
            gone += 1;
        }
        self.files.drain(..gone);
        if self.files.is_empty() {
            self.growing = None;
        }
    }
}

/// All whole rows of a learner's folder, oldest first.
pub(super) fn read(folder: &Path) -> Vec<Row> {
    let folder = folder.join(ROWS);
    let rows =
        numbers(&folder).into_iter().filter_map(|number| File::open(path(&folder, number)).ok());
    let rows =
        rows.flat_map(|file| BufReader::new(file).split(b'\n').map_while(std::io::Result::ok));
    let whole = |row: &Row| row.input_ids.len() == row.loss_mask.len();
    rows.filter_map(|line| serde_json::from_slice(&line).ok()).filter(whole).collect()
}

/// Whether a learner's folder has rows.
pub(super) fn is_there(folder: &Path) -> bool {
    folder.join(ROWS).is_dir()
}

/// Removes all rows; their number.
///
/// # Errors
/// - one cannot be removed
pub(super) fn remove(folder: &Path) -> Result<usize> {
    let folder = folder.join(ROWS);
    let rows = numbers(&folder).into_iter().map(|number| lines(&path(&folder, number))).sum();
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::work(format!("{}: {error}", folder.display())))
        }
        _ => Ok(rows),
    }
}

fn path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{number:08}.jsonl"))
}

fn lines(path: &Path) -> usize {
    let Ok(file) = File::open(path) else { return 0 };
    BufReader::new(file).split(b'\n').map_while(std::result::Result::ok).count()
}

/// Numbers of the files, in order.
fn numbers(folder: &Path) -> Vec<u64> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let number =
        |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_suffix(".jsonl")?.parse().ok();
    let mut numbers: Vec<u64> = entries.filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// Makes a folder that only its owner may look into; one that is there is closed to others.
///
/// # Errors
/// - it cannot be made or closed
pub(super) fn private_folder(path: &Path) -> Result<()> {
    let fail = |error: std::io::Error| {
        Failure::file(format!("{}: {error}", path.display()), &error)
            .hint("--learn needs a folder that it may write")
    };
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path).map_err(fail)?;
    #[cfg(unix)]
    {
        let closed = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(path, closed).map_err(fail)?;
    }
    Ok(())
}

/// Makes a file that only its owner may read, to be written at its end.
///
/// # Errors
/// - it is there, or cannot be made
pub(super) fn private_file(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGE: Duration = Duration::from_hours(1000);

    fn row(token: u32, length: usize) -> Row {
        Row::new(&[token; 3], &vec![token + 1; length], 1)
    }

    #[test]
    fn rows_are_read_as_they_were_kept_in_private_files() {
        let folder = tempfile::tempdir().expect("folder");
        let limits = Limits { bytes: 1 << 20, age: AGE };
        let rows: Vec<Row> = (0..20).map(|token| row(token, 5)).collect();
        for part in rows.chunks(7) {
            // As after a new start.
            let mut store = Store::open(folder.path(), limits).expect("opened");
            part.iter().for_each(|row| store.add(row).expect("kept"));
        }
        assert_eq!(read(folder.path()), rows);
        assert_eq!(Store::open(folder.path(), limits).expect("opened").rows(), 20);
        assert_eq!((rows[0].answer(), rows[0].own_share()), (&[1; 5][..], 0.2));
        let held_out = rows.iter().filter(|row| row.is_held_out()).count();
        assert!((1..12).contains(&held_out), "{held_out}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode();
            let rows = folder.path().join(ROWS);
            assert_eq!(mode(&rows) & 0o777, 0o700);
            assert_eq!(mode(&path(&rows, 1)) & 0o777, 0o600);
        }
    }

    #[test]
    fn what_a_kill_cut_short_is_passed_over() {
        let folder = tempfile::tempdir().expect("folder");
        let limits = Limits { bytes: 1 << 20, age: AGE };
        let mut store = Store::open(folder.path(), limits).expect("opened");
        [1, 2].iter().for_each(|token| store.add(&row(*token, 4)).expect("kept"));
        let file = path(&folder.path().join(ROWS), 1);
        let text = std::fs::read(&file).expect("file");
        for end in 0..text.len() {
            std::fs::write(&file, &text[..end]).expect("cut");
            let mut store = Store::open(folder.path(), limits).expect("opened");
            store.add(&row(9, 2)).expect("kept");
            let found = read(folder.path());
            assert_eq!(found.last(), Some(&Row { at: found[found.len() - 1].at, ..row(9, 2) }));
            assert!(found.len() <= 3, "{end}");
            std::fs::remove_file(path(&folder.path().join(ROWS), 2)).expect("removed");
        }
    }

    #[test]
    fn the_oldest_go_when_there_is_too_much_or_they_are_too_old() {
        let folder = tempfile::tempdir().expect("folder");
        let limits = Limits { bytes: 1 << 17, age: AGE };
        let mut store = Store::open(folder.path(), limits).expect("opened");
        for token in 0..4000 {
            store.add(&row(token, 40)).expect("kept");
        }
        let bytes: u64 = std::fs::read_dir(folder.path().join(ROWS))
            .expect("folder")
            .map(|entry| entry.expect("entry").metadata().expect("file").len())
            .sum();
        assert!(bytes <= limits.bytes && bytes > limits.bytes / 2, "{bytes}");
        let found = read(folder.path());
        assert_eq!(found.len(), store.rows());
        assert_eq!(found[found.len() - 1].input_ids[0], 3999);
        let none = Limits { bytes: 1 << 17, age: Duration::ZERO };
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(Store::open(folder.path(), none).expect("opened").rows(), 0);
        assert!(read(folder.path()).is_empty());
    }
}
