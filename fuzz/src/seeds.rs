//! What fuzzing starts from: valid inputs, and inputs that once did harm.
//!
//! Small harmful inputs are files in `seeds/READER/`. Long ones are built in [`built`].

use std::collections::BTreeSet;
use std::path::Path;

use crate::readers::Reader;

mod built;

/// An input with a name.
#[derive(Debug, Clone)]
pub struct Seed {
    /// Of its file; the valid ones begin with `valid-`.
    pub name: String,
    /// What the reader gets.
    pub bytes: Vec<u8>,
}

/// All seeds of a reader.
///
/// # Panics
/// - a file of `seeds/` cannot be read
pub fn seeds(reader: &Reader) -> Vec<Seed> {
    let valid = (reader.valid)().into_iter().enumerate();
    let valid = valid.map(|(at, bytes)| Seed { name: format!("valid-{at}"), bytes });
    let built = built::of(reader.name).into_iter();
    let built = built.map(|(name, bytes)| Seed { name: name.to_owned(), bytes });
    valid.chain(built).chain(kept(reader.name)).collect()
}

/// The files of `seeds/NAME/`, by name.
fn kept(name: &str) -> Vec<Seed> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(name);
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Seed { name, bytes: std::fs::read(&path).expect("a file of seeds") }
    };
    let mut seeds: Vec<Seed> = entries.map(read).collect();
    seeds.sort_by(|a, b| a.name.cmp(&b.name));
    seeds
}

/// Numbers at borders of what readers can count and hold.
const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1e308",
    "NaN",
    "255",
    "65536",
    "16777216",
    "2147483647",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "0.0000001",
];

/// Longest word of a dictionary.
const LONGEST_WORD: usize = 48;

/// A libFuzzer dictionary: the words of the valid inputs, and hostile numbers.
pub fn dictionary(reader: &Reader) -> String {
    let mut words: BTreeSet<String> = NUMBERS.map(str::to_owned).into();
    for bytes in (reader.valid)() {
        let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-<>|".contains(byte);
        let runs = bytes.split(|byte| !is_part(byte));
        let runs = runs.filter(|run| (3..=LONGEST_WORD).contains(&run.len()));
        words.extend(runs.filter_map(|run| String::from_utf8(run.to_vec()).ok()));
    }
    words.iter().take(400).map(|word| format!("\"{word}\"\n")).collect()
}
