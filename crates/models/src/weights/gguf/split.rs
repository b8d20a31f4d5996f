//! Models that were split into several files, `NAME-00001-of-00003.gguf`.
//!
//! The first file holds all keys of the model. Each holds `split.no` (from 0), `split.count` and
//! `split.tensors.count`, and the descriptions of its own tensors.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use super::header::Header;
use crate::error::{ModelError, Problems, Result};
use crate::weights::file::WeightFile;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";
/// Digits of a part's number and of the count.
const DIGITS: usize = 5;

/// The files of a model, most of the time one, and what their headers say together.
pub(crate) struct Files {
    /// In order.
    pub(crate) parts: Vec<WeightFile>,
    /// Keys of the first file, tensors of all. A tensor's bytes count from the start of its own file.
    pub(crate) header: Header,
    /// Files of the tensors that do not lie in the first one.
    pub(crate) places: HashMap<String, usize>,
}

/// Name without its number, the number (from 1) and the count of a part; `stem` is a file's name without
/// its ending.
pub(crate) fn part_of(stem: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let read = |text: &str| -> Option<usize> {
        let is_number = text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| text.parse().ok()).flatten()
    };
    let (number, count) = (read(number)?, read(count)?);
    (number >= 1 && number <= count).then_some((name, number, count))
}

/// Whether a file is a later part of a model whose first one lies beside it.
pub(super) fn follows(path: &Path) -> bool {
    let Some((name, number, count)) = stem(path).and_then(part_of) else { return false };
    number > 1 && part(path, name, 1, count).exists()
}

fn stem(path: &Path) -> Option<&str> {
    path.file_stem()?.to_str()
}

fn part(path: &Path, name: &str, number: usize, count: usize) -> PathBuf {
    let ending = path.extension().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{name}-{number:05}-of-{count:05}.{ending}"))
}

/// Opens a model by its file, or by the first of its files.
///
/// # Errors
/// - unreadable, not GGUF, not the first part, or a part is missing or of another model
pub(crate) fn open(path: &Path) -> Result<Files> {
    let first = WeightFile::open(path)?;
    let header = read(&first)?;
    let mut files = vec![first];
    let mut headers = vec![header];
    for path in later_parts(path, &headers[0])? {
        let file = WeightFile::open(&path)?;
        headers.push(read(&file)?);
        files.push(file);
    }
    let (header, places) = joined(headers).map_err(ModelError::all_in(path))?;
    Ok(Files { parts: files, header, places })
}

/// Reads the header of one file.
pub(crate) fn read(file: &WeightFile) -> Result<Header> {
    Header::read_from(file.reader(), file.length()).map_err(ModelError::all_in(file.path()))
}

/// The same header, from beginnings of the files: each where it lies and how long all of it is. A header
/// that does not lie in its file's beginning is an error.
pub(crate) fn header_of_beginnings(beginnings: &[(PathBuf, u64)]) -> Result<Header> {
    let headers = beginnings.iter().map(|(path, length)| {
        let file = File::open(path).map_err(ModelError::io(path))?;
        let length = usize::try_from(*length)
            .map_err(|_| ModelError::invalid(path, "longer than this machine can address"))?;
        Header::read_from(BufReader::new(file), length).map_err(ModelError::all_in(path))
    });
    let path = beginnings.first().map_or_else(PathBuf::new, |(path, _)| path.clone());
    let (header, _) = joined(headers.collect::<Result<_>>()?).map_err(ModelError::all_in(path))?;
    Ok(header)
}

/// Where the parts after the first one lie.
fn later_parts(path: &Path, header: &Header) -> Result<Vec<PathBuf>> {
    let count = header.number(COUNT).unwrap_or(1.0);
    if count <= 1.0 {
        return Ok(Vec::new());
    }
    let refuse = |problem: String| Err(ModelError::invalid(path, problem));
    let Some((name, number, named)) = stem(path).and_then(part_of) else {
        return refuse(format!(
            "a part of a model in {count} files: parts are called NAME-00001-of-{count:05}.gguf"
        ));
    };
    if number != 1 {
        let first = part(path, name, 1, named);
        return refuse(format!("part {number} of {named} of a model: name {}", first.display()));
    }
    if header.number(COUNT) != Some(named as f64) {
        return refuse(format!("called a part of {named}, but `{COUNT}` = {count}"));
    }
    let paths: Vec<PathBuf> = (2..=named).map(|number| part(path, name, number, named)).collect();
    match paths.iter().filter(|path| !path.exists()).collect::<Vec<_>>()[..] {
        [] => Ok(paths),
        [missing, ..] => {
            let missing = missing.display();
            refuse(format!("a model in {named} files, but {missing} is not there"))
        }
    }
}

/// One header for all parts, and the parts of the tensors that do not lie in the first one.
fn joined(headers: Vec<Header>) -> std::result::Result<(Header, HashMap<String, usize>), Problems> {
    let count = headers.len();
    let mut headers = headers.into_iter();
    let (mut all, mut places) = match headers.next() {
        Some(first) => (first, HashMap::new()),
        None => return Err(Problems(vec!["no file".to_owned()])),
    };
    let mut problems = Problems::default();
    for (index, header) in headers.enumerate().map(|(index, header)| (index + 1, header)) {
        let is_part = header.number(NUMBER) == Some(index as f64)
            && header.number(COUNT) == Some(count as f64);
        if !is_part {
            problems.push(format!("the file in place {} of {count} is another part", index + 1));
        }
        for (name, tensor) in header.tensors {
            if all.tensors.contains_key(&name) {
                problems.push(format!("tensor `{name}` is in more than one part"));
            }
            places.insert(name.clone(), index);
            all.tensors.insert(name, tensor);
        }
    }
    let told = all.number(TENSORS).filter(|_| count > 1);
    if let Some(told) = told
        && Some(told) != Some(all.tensors.len() as f64)
    {
        let found = all.tensors.len();
        problems.push(format!("`{TENSORS}` = {told}, but the parts hold {found}"));
    }
    if problems.0.is_empty() { Ok((all, places)) } else { Err(problems) }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file::Value;
    use candle_core::{DType, Device, Tensor};

    use super::super::write::{Stored, save};
    use super::*;
    use crate::test_support::assert_refused;

    #[test]
    fn names_of_parts_are_told_apart() {
        assert_eq!(part_of("m-Q4-00002-of-00003"), Some(("m-Q4", 2, 3)));
        for stem in
            ["m", "m-1-of-2", "m-00003-of-00002", "m-00000-of-00002", "-of-", "m-0000x-of-00002"]
        {
            assert_eq!(part_of(stem), None, "{stem}");
        }
    }

    /// A part with one tensor of ones.
    fn write(path: &Path, (number, count, tensors): (u16, u16, i32), name: &str) {
        let keys = [
            (NUMBER.to_owned(), Value::U16(number)),
            (COUNT.to_owned(), Value::U16(count)),
            (TENSORS.to_owned(), Value::I32(tensors)),
        ];
        let tensor = Tensor::ones(4, DType::F32, &Device::Cpu).expect("a tensor");
        save(path, &keys, &[(name.to_owned(), Stored::Plain(tensor))]).expect("written");
    }

    #[test]
    fn parts_are_one_model_and_what_is_wrong_with_them_is_told() {
        let folder = tempfile::tempdir().expect("folder");
        let path = |number: usize| folder.path().join(format!("m-{number:05}-of-00002.gguf"));
        let refused = || open(&path(1)).err().expect("refused").to_string();
        write(&path(1), (0, 2, 2), "a");
        assert!(refused().contains("m-00002-of-00002.gguf is not there"), "{}", refused());
        write(&path(2), (1, 2, 2), "b");
        let files = open(&path(1)).expect("whole");
        assert_eq!(files.parts.len(), 2);
        assert_eq!(files.header.tensors.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(files.places, HashMap::from([("b".to_owned(), 1)]));
        assert!(follows(&path(2)) && !follows(&path(1)));
        let beginnings: Vec<(PathBuf, u64)> = [1, 2]
            .map(|number| (path(number), path(number).metadata().expect("file").len()))
            .to_vec();
        let header = header_of_beginnings(&beginnings).expect("whole");
        assert_eq!(header.tensors.len(), 2);

        assert_refused(open(&path(2)), &["name ", "m-00001-of-00002.gguf"]);
        for (keys, name, says) in [
            ((0, 2, 2), "b", "place 2 of 2 is another part"),
            ((1, 3, 2), "b", "place 2 of 2 is another part"),
            ((1, 2, 2), "a", "tensor `a` is in more than one part"),
        ] {
            write(&path(2), keys, name);
            assert!(refused().contains(says), "{}", refused());
        }
        write(&path(2), (1, 2, 2), "b");
        write(&path(1), (0, 2, 9), "a");
        assert!(refused().contains("the parts hold 2"), "{}", refused());
        write(&path(1), (0, 3, 2), "a");
        assert!(refused().contains("called a part of 2"), "{}", refused());
        let lone = folder.path().join("m.gguf");
        write(&lone, (0, 2, 2), "a");
        assert_refused(open(&lone), &["NAME-00001-of-00002.gguf"]);
    }
}
