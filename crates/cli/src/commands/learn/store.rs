//! Answers that are kept to learn from: files of rows in a private folder, bounded in size and age.
//!
//! A row is a line of JSON with the tokens of prompt and answer, as `data` reads rows of tokens. Only the
//! newest file grows. A line that a kill cut short is passed over, and the next start begins a new file.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::folder::{private_file, private_folder};
use crate::commands::remove_folder;
use crate::failure::Result;

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
    pub(super) fn new(prompt: &[u32], answer: &[u32], own: usize) -> Self {
        let loss_mask = [vec![0; prompt.len()], vec![1; answer.len()]].concat();
        Self { at: now(), input_ids: [prompt, answer].concat(), loss_mask, own }
    }

    pub(super) fn answer(&self) -> &[u32] {
        let prompt = self.loss_mask.iter().take_while(|learned| **learned == 0).count();
        &self.input_ids[prompt.min(self.input_ids.len())..]
    }

    /// Share of the answer that nobody had proposed.
    pub(super) fn own_share(&self) -> f64 {
        self.own as f64 / self.answer().len().max(1) as f64
    }

    /// Tokens before the answer.
    pub(super) fn prompt(&self) -> &[u32] {
        &self.input_ids[..self.input_ids.len() - self.answer().len()]
    }
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// How much is kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) bytes: u64,
    pub(super) age: Duration,
}

/// The rows of a folder, to be added to.
pub(super) struct Store {
    folder: PathBuf,
    limits: Limits,
    growing: Option<Growing>,
    /// The newest file's number.
    number: u64,
    /// Rows by file, oldest first.
    files: Vec<(u64, usize)>,
}

/// The file that grows.
struct Growing {
    file: File,
    /// Bytes of whole rows.
    size: u64,
    since: SystemTime,
    /// Whether half a row stands at its end.
    is_torn: bool,
}

impl Growing {
    /// Writes a row, whole or as a line of its own that is passed over.
    fn write(&mut self, line: &[u8]) -> std::io::Result<()> {
        let border: &[u8] = if self.is_torn { b"\n" } else { b"" };
        if let Err(error) = self.file.write_all(&[border, line].concat()) {
            // The next row goes into the same file: a full disk is no reason for one file more an answer.
            self.is_torn = self.file.set_len(self.size).is_err();
            return Err(error);
        }
        self.size += (border.len() + line.len()) as u64;
        self.is_torn = false;
        Ok(())
    }
}

impl Store {
    /// Opens the rows of a learner's folder, which is made if it is not there.
    /// It fails where the folder cannot be written.
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

    pub(super) fn rows(&self) -> usize {
        self.files.iter().map(|(_, rows)| rows).sum()
    }

    /// Keeps a row, and lets go of what is too much or too old.
    /// It fails where it cannot be written; what was kept before stays.
    pub(super) fn add(&mut self, row: &Row) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(row)?;
        line.push(b'\n');
        let full = (self.limits.bytes / FILES).max(LEAST.min(self.limits.bytes));
        let is_full = |growing: &Growing| {
            let age = growing.since.elapsed().unwrap_or_default();
            growing.size > 0
                && (growing.size + line.len() as u64 > full || age > DAY.min(self.limits.age))
        };
        let growing = if let Some(growing) = self.growing.take().filter(|one| !is_full(one)) {
            self.growing.insert(growing)
        } else {
            let number = self.number + 1;
            let file = private_file(&path(&self.folder, number))?;
            self.number = number;
            self.files.push((number, 0));
            let since = SystemTime::now();
            self.growing.insert(Growing { file, size: 0, since, is_torn: false })
        };
        growing.write(&line)?;
        if let Some((_, rows)) = self.files.last_mut() {
            *rows += 1;
        }
        self.sweep();
        Ok(())
    }

    /// Removes files that are too old, and the oldest ones while they are too much.
    pub(super) fn sweep(&mut self) {
        let (folder, limits, now) = (&self.folder, self.limits, SystemTime::now());
        let size =
            |number: u64| std::fs::metadata(path(folder, number)).map_or(0, |file| file.len());
        let mut bytes: u64 = self.files.iter().map(|(number, _)| size(*number)).sum();
        self.files.retain(|(number, _)| {
            let (place, own) = (path(folder, *number), size(*number));
            let is_too_much = bytes > limits.bytes || age(&place, now) > limits.age;
            // One that cannot be removed is tried again the next time.
            let goes = is_too_much && std::fs::remove_file(&place).is_ok();
            bytes -= if goes { own.min(bytes) } else { 0 };
            !goes
        });
        if self.files.last().is_none_or(|(number, _)| *number != self.number) {
            self.growing = None;
        }
    }
}

/// Since when a file is as it is. One from the future is as old as this look at it: a clock that was set
/// back must not keep it longer.
fn age(path: &Path, now: SystemTime) -> Duration {
    let changed = std::fs::metadata(path).and_then(|about| about.modified());
    changed.map_or(Duration::ZERO, |changed| {
        now.duration_since(changed).unwrap_or_else(|_| {
            let file = OpenOptions::new().append(true).open(path);
            let _ = file.and_then(|file| file.set_modified(now));
            Duration::ZERO
        })
    })
}

/// All whole rows of a learner's folder, the newest one first; at most one file is held at a time.
pub(super) fn newest(folder: &Path) -> impl Iterator<Item = Row> + use<> {
    let folder = folder.join(ROWS);
    let files = numbers(&folder).into_iter().rev();
    files.flat_map(move |number| {
        let file = File::open(path(&folder, number)).into_iter();
        let lines =
            file.flat_map(|file| BufReader::new(file).split(b'\n').map_while(std::io::Result::ok));
        let whole = |row: &Row| row.input_ids.len() == row.loss_mask.len();
        let rows = lines.filter_map(|line| serde_json::from_slice(&line).ok()).filter(whole);
        rows.collect::<Vec<Row>>().into_iter().rev()
    })
}

/// Removes all rows; their number. It fails where one cannot be removed.
pub(super) fn remove(folder: &Path) -> Result<usize> {
    let folder = folder.join(ROWS);
    let rows = numbers(&folder).into_iter().map(|number| lines(&path(&folder, number))).sum();
    remove_folder(&folder).map(|()| rows)
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
        let mut found: Vec<Row> = newest(folder.path()).collect();
        found.reverse();
        assert_eq!(found, rows);
        assert_eq!(Store::open(folder.path(), limits).expect("opened").rows(), 20);
        assert_eq!((rows[0].answer(), rows[0].own_share()), (&[1; 5][..], 0.2));
        assert_eq!(rows[4].prompt(), [4; 3]);
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
            let found: Vec<Row> = newest(folder.path()).collect();
            assert_eq!(found.first(), Some(&Row { at: found[0].at, ..row(9, 2) }));
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
        let found: Vec<Row> = newest(folder.path()).collect();
        assert_eq!(found.len(), store.rows());
        assert_eq!(found[0].input_ids[0], 3999);
        let none = Limits { bytes: 1 << 17, age: Duration::ZERO };
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(Store::open(folder.path(), none).expect("opened").rows(), 0);
        assert_eq!(newest(folder.path()).count(), 0);
    }

    #[test]
    fn old_files_go_wherever_they_stand_and_none_stays_because_of_a_clock() {
        let folder = tempfile::tempdir().expect("folder");
        let limits = Limits { bytes: 1 << 20, age: Duration::from_hours(24) };
        for token in 0..4 {
            // A file each, as after new starts.
            Store::open(folder.path(), limits).expect("opened").add(&row(token, 5)).expect("kept");
        }
        let mut store = Store::open(folder.path(), limits).expect("opened");
        let rows = folder.path().join(ROWS);
        let dated = |number: u64, when: SystemTime| {
            let file = OpenOptions::new().append(true).open(path(&rows, number)).expect("file");
            file.set_modified(when).expect("dated");
        };
        let (now, days) = (SystemTime::now(), |days: u64| Duration::from_hours(24 * days));
        dated(1, now + days(300));
        dated(2, now - days(2));
        dated(4, now - days(2));
        store.sweep();
        let left: Vec<u32> = newest(folder.path()).map(|row| row.input_ids[0]).collect();
        assert_eq!((left, store.rows()), (vec![2, 0], 2));
        // The one from the future counts from when it was seen.
        let changed = std::fs::metadata(path(&rows, 1)).and_then(|file| file.modified());
        assert!(changed.expect("there") <= SystemTime::now());
    }

    /// A device that takes nothing stands for a disk without room.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_makes_no_more_files() {
        let folder = tempfile::tempdir().expect("folder");
        let limits = Limits { bytes: 1 << 20, age: AGE };
        let mut store = Store::open(folder.path(), limits).expect("opened");
        store.add(&row(1, 5)).expect("kept");
        let full = || OpenOptions::new().append(true).open("/dev/full").expect("device");
        let swap = |store: &mut Store, file: File| {
            let growing = store.growing.as_mut().expect("one grows");
            std::mem::replace(&mut growing.file, file)
        };
        let file = swap(&mut store, full());
        for _ in 0..5 {
            assert!(store.add(&row(2, 5)).is_err());
        }
        assert_eq!(std::fs::read_dir(folder.path().join(ROWS)).expect("folder").count(), 1);
        // There is room again, and half a row at the end.
        (&file).write_all(br#"{"at": 1, "input"#).expect("written");
        drop(swap(&mut store, file));
        store.add(&row(3, 5)).expect("kept");
        let left: Vec<u32> = newest(folder.path()).map(|row| row.input_ids[0]).collect();
        assert_eq!(left, [3, 1]);
        assert_eq!(store.rows(), 2);
    }
}
