//! The record log of W&B and SwanLab files: LevelDB's log format after a header of 7 bytes.
//!
//! A file is cut into blocks of 32 KiB. A record is one fragment, or several where it meets the end
//! of a block; a fragment is `crc32(kind, data)` (4 bytes, little endian), the data's length (2),
//! the kind (1), the data. Fewer than 7 bytes at the end of a block are zeros. The checksum is
//! plain CRC-32, not the masked CRC-32C of LevelDB itself.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::error::{Result, TrackerError};

const BLOCK: usize = 32 * 1024;
const FRAGMENT_HEADER: usize = 7;

/// What a project's files start with: a name of 4 bytes, a number of 2 (little endian), a version.
pub(super) type Header = [u8; FRAGMENT_HEADER];

/// Place of a fragment in its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Full = 1,
    First = 2,
    Middle = 3,
    Last = 4,
}

impl Kind {
    fn of(first: bool, last: bool) -> Self {
        match (first, last) {
            (true, true) => Self::Full,
            (true, false) => Self::First,
            (false, false) => Self::Middle,
            (false, true) => Self::Last,
        }
    }

    fn checksum(self, data: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&[self as u8]);
        hasher.update(data);
        hasher.finalize()
    }
}

/// Appends records to a file.
pub(super) struct RecordLog {
    path: PathBuf,
    file: File,
    position: u64,
}

impl RecordLog {
    /// Starts a file that must not exist.
    pub(super) fn create(path: &Path, header: Header) -> Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        let mut file = file.map_err(TrackerError::file(path))?;
        file.write_all(&header).map_err(TrackerError::file(path))?;
        Ok(Self { path: path.to_path_buf(), file, position: FRAGMENT_HEADER as u64 })
    }

    /// Goes on after the first `keep` bytes of a file; the rest is cut off.
    pub(super) fn reopen(path: &Path, keep: u64) -> Result<Self> {
        let fail = |error| TrackerError::File { path: path.to_path_buf(), source: error };
        let mut file = OpenOptions::new().write(true).open(path).map_err(fail)?;
        file.set_len(keep).map_err(fail)?;
        file.seek(SeekFrom::Start(keep)).map_err(fail)?;
        Ok(Self { path: path.to_path_buf(), file, position: keep })
    }

    /// Appends records with one write, so that a kill tears at most the last ones.
    pub(super) fn append(&mut self, records: &[Vec<u8>]) -> Result<()> {
        let mut bytes = Vec::new();
        for record in records {
            self.frame(record, &mut bytes);
        }
        self.file.write_all(&bytes).map_err(TrackerError::file(&self.path))
    }

    /// Hands the bytes to the disk.
    pub(super) fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(TrackerError::file(&self.path))
    }

    fn frame(&mut self, record: &[u8], bytes: &mut Vec<u8>) {
        let mut rest = record;
        let mut first = true;
        loop {
            let mut room = BLOCK - (self.position % BLOCK as u64) as usize;
            if room < FRAGMENT_HEADER {
                bytes.extend(std::iter::repeat_n(0, room));
                self.position += room as u64;
                room = BLOCK;
            }
            let (data, after) = rest.split_at(rest.len().min(room - FRAGMENT_HEADER));
            let kind = Kind::of(first, after.is_empty());
            bytes.extend(kind.checksum(data).to_le_bytes());
            bytes.extend((data.len() as u16).to_le_bytes());
            bytes.push(kind as u8);
            bytes.extend(data);
            self.position += (FRAGMENT_HEADER + data.len()) as u64;
            (rest, first) = (after, false);
            if rest.is_empty() {
                return;
            }
        }
    }
}

/// Reads the whole records of a file; ends at the first torn or damaged one.
pub(super) struct Records {
    file: BufReader<File>,
    position: u64,
}

impl Records {
    /// Bytes of the file's header: where the first record starts.
    pub(super) const START: u64 = FRAGMENT_HEADER as u64;

    /// `None` if the file does not start with `header`.
    pub(super) fn open(path: &Path, header: Header) -> Result<Option<Self>> {
        let mut file = BufReader::new(File::open(path).map_err(TrackerError::file(path))?);
        let mut start = [0; FRAGMENT_HEADER];
        let whole = file.read_exact(&mut start).is_ok() && start == header;
        Ok(whole.then_some(Self { file, position: Self::START }))
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes).ok()?;
        self.position += N as u64;
        Some(bytes)
    }

    fn fragment(&mut self) -> Option<(Kind, Vec<u8>)> {
        let room = BLOCK - (self.position % BLOCK as u64) as usize;
        if room < FRAGMENT_HEADER {
            for _ in 0..room {
                self.take::<1>()?;
            }
        }
        let checksum = u32::from_le_bytes(self.take()?);
        let length = u16::from_le_bytes(self.take()?);
        let kind = match self.take()? {
            [1] => Kind::Full,
            [2] => Kind::First,
            [3] => Kind::Middle,
            [4] => Kind::Last,
            _ => return None,
        };
        let mut data = vec![0; length.into()];
        self.file.read_exact(&mut data).ok()?;
        self.position += u64::from(length);
        (kind.checksum(&data) == checksum).then_some((kind, data))
    }
}

impl Iterator for Records {
    /// A record and the file's length up to its end.
    type Item = (Vec<u8>, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let (mut kind, mut record) = self.fragment()?;
        if !matches!(kind, Kind::Full | Kind::First) {
            return None;
        }
        while matches!(kind, Kind::First | Kind::Middle) {
            let (next, data) = self.fragment()?;
            if matches!(next, Kind::Full | Kind::First) {
                return None;
            }
            (kind, record) = (next, [record, data].concat());
        }
        Some((record, self.position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Header = *b":TST\x34\x12\x09";

    fn read(path: &Path) -> Vec<(Vec<u8>, u64)> {
        Records::open(path, HEADER).expect("file").expect("header").collect()
    }

    /// Lengths around every border of a block: full, one header short of it, several blocks.
    #[test]
    fn records_of_any_length_come_back() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("log");
        let lengths = [0, 1, BLOCK - 3 * 7 - 1, 0, 10, BLOCK - 7, 3 * BLOCK, 5, 2 * BLOCK - 40, 7];
        let near: Vec<usize> = (0..20).map(|i| BLOCK - 20 + i).collect();
        let records: Vec<Vec<u8>> = lengths
            .iter()
            .chain(&near)
            .enumerate()
            .map(|(i, length)| (0..*length).map(|j| (i * 31 + j) as u8).collect())
            .collect();
        let mut log = RecordLog::create(&path, HEADER).expect("create");
        for pair in records.chunks(2) {
            log.append(pair).expect("append");
        }
        let found = read(&path);
        assert!(found.iter().map(|(record, _)| record).eq(&records));
        let length = std::fs::metadata(&path).expect("file").len();
        assert_eq!(found.last().expect("records").1, length);
        assert_eq!(log.position, length);
    }

    #[test]
    fn a_torn_file_is_read_up_to_its_last_whole_record_and_goes_on_there() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("log");
        let mut log = RecordLog::create(&path, HEADER).expect("create");
        let records = [vec![1; 40_000], vec![2; 100]];
        log.append(&records).expect("append");
        let bytes = std::fs::read(&path).expect("read");
        for cut in [bytes.len() - 1, bytes.len() - 100, bytes.len() - 107, bytes.len() - 108, 3] {
            std::fs::write(&path, &bytes[..cut]).expect("cut");
            let Some(found) = Records::open(&path, HEADER).expect("file") else {
                assert_eq!(cut, 3);
                continue;
            };
            let found: Vec<_> = found.collect();
            let whole = usize::from(cut >= bytes.len() - 107);
            assert_eq!(found.len(), whole);
            let keep = found.last().map_or(Records::START, |(_, end)| *end);
            RecordLog::reopen(&path, keep).expect("reopen").append(&records[1..]).expect("append");
            assert_eq!(read(&path).last().expect("a record").0, records[1]);
            assert_eq!(read(&path).len(), whole + 1);
        }
        let mut damaged = bytes.clone();
        damaged[30_000] ^= 1;
        std::fs::write(&path, &damaged).expect("damage");
        assert!(read(&path).is_empty());
    }
}
