//! Values that an optimizer keeps of every run that a rank updates: in memory, that of a GPU where the
//! steps are taken there, or in a file.
//!
//! A file is read and written run by run, so that memory holds one of them; the system's page cache
//! decides what really goes to the disk. The file has no name: it goes with the process, however that
//! ends, and checkpoints hold what is worth keeping.

use std::borrow::Cow;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_core::Tensor;

use crate::error::{Result, TrainError};

/// Values of runs, by their place among those that the rank updates.
#[derive(Debug)]
pub(crate) enum RunValues {
    Memory(Vec<Kept>),
    File(RunFile),
}

/// A run's values in memory.
#[derive(Debug)]
pub(crate) enum Kept {
    Host(Vec<f32>),
    Device(Tensor),
}

impl Kept {
    fn on_host(&self) -> Result<Cow<'_, [f32]>> {
        Ok(match self {
            Self::Host(values) => Cow::Borrowed(values),
            Self::Device(tensor) => Cow::Owned(tensor.flatten_all()?.to_vec1()?),
        })
    }
}

impl RunValues {
    /// Zeros in memory.
    pub(crate) fn zeros(lengths: &[usize]) -> Self {
        Self::Memory(lengths.iter().map(|length| Kept::Host(vec![0.0; *length])).collect())
    }

    /// Zeros in a file without a name in `folder`, whose room is taken at once.
    /// It fails where the folder cannot be written or is full.
    pub(crate) fn zeros_in(folder: &Path, lengths: &[usize]) -> Result<Self> {
        RunFile::new(folder, lengths).map(Self::File)
    }

    /// A run's values. It fails where the file or the device cannot be read.
    pub(crate) fn get(&self, index: usize) -> Result<Cow<'_, [f32]>> {
        match self {
            Self::Memory(runs) => runs[index].on_host(),
            Self::File(file) => file.read(index).map(Cow::Owned),
        }
    }

    /// Changes a run's values. It fails where the file cannot be read or written, or the change fails.
    pub(crate) fn change(
        &mut self,
        index: usize,
        change: impl FnOnce(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Memory(runs) => {
                let run = &mut runs[index];
                if let Kept::Device(_) = run {
                    *run = Kept::Host(run.on_host()?.into_owned());
                }
                match run {
                    Kept::Host(values) => change(values),
                    Kept::Device(_) => Ok(()),
                }
            }
            Self::File(file) => {
                let mut values = file.read(index)?;
                change(&mut values)?;
                file.write(index, &values)
            }
        }
    }

    /// A run's values in the shape and on the device of `like`; `None` if they are kept in a file.
    /// It fails where the device has no memory for them.
    pub(crate) fn on_device_of(&self, index: usize, like: &Tensor) -> Result<Option<Tensor>> {
        let Self::Memory(runs) = self else { return Ok(None) };
        Ok(Some(match &runs[index] {
            Kept::Host(values) => Tensor::from_slice(values, like.shape(), like.device())?,
            Kept::Device(tensor) => tensor.clone(),
        }))
    }

    /// Whether some of them are left on a device.
    #[cfg(test)]
    pub(super) fn lies_on_device(&self) -> bool {
        matches!(self, Self::Memory(runs) if runs.iter().any(|run| matches!(run, Kept::Device(_))))
    }

    /// Leaves a run's values on their device.
    pub(crate) fn keep(&mut self, index: usize, values: Tensor) {
        if let Self::Memory(runs) = self {
            runs[index] = Kept::Device(values);
        }
    }
}

/// A file of runs, one after the other.
#[derive(Debug)]
pub(crate) struct RunFile {
    folder: PathBuf,
    file: File,
    lengths: Vec<usize>,
}

impl RunFile {
    fn new(folder: &Path, lengths: &[usize]) -> Result<Self> {
        let fail = |error: std::io::Error| unusable(folder, &error);
        std::fs::create_dir_all(folder).map_err(fail)?;
        let mut file = tempfile::tempfile_in(folder).map_err(fail)?;
        let zeros = vec![0_u8; 1 << 20];
        let mut left = size_of::<f32>() * lengths.iter().sum::<usize>();
        while left > 0 {
            let part = left.min(zeros.len());
            file.write_all(&zeros[..part]).map_err(fail)?;
            left -= part;
        }
        Ok(Self { folder: folder.to_path_buf(), file, lengths: lengths.to_vec() })
    }

    fn seek(&self, index: usize) -> Result<&File> {
        let start = size_of::<f32>() * self.lengths[..index].iter().sum::<usize>();
        let mut file = &self.file;
        file.seek(SeekFrom::Start(start as u64)).map_err(|error| unusable(&self.folder, &error))?;
        Ok(file)
    }

    fn read(&self, index: usize) -> Result<Vec<f32>> {
        let mut values = vec![0.0_f32; self.lengths[index]];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        let mut file = self.seek(index)?;
        file.read_exact(bytes).map_err(|error| unusable(&self.folder, &error))?;
        Ok(values)
    }

    fn write(&mut self, index: usize, values: &[f32]) -> Result<()> {
        let mut file = self.seek(index)?;
        let written = file.write_all(bytemuck::cast_slice(values));
        written.map_err(|error| unusable(&self.folder, &error))
    }
}

fn unusable(folder: &Path, error: &std::io::Error) -> TrainError {
    let problem = format!(
        "the optimizer's state cannot be kept here: {error}; make room, or set \
         `parallel.optimizer_state: memory`"
    );
    TrainError::checkpoint(folder, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_in_a_file_are_those_in_memory() -> Result<()> {
        let folder = tempfile::tempdir().expect("folder");
        // The file is longer than the zeros that are written at a time.
        let lengths = [3, 0, 300_000, 1];
        let mut memory = RunValues::zeros(&lengths);
        let mut file = RunValues::zeros_in(&folder.path().join("new"), &lengths)?;
        for round in 0..2 {
            for index in 0..lengths.len() {
                for values in [&mut memory, &mut file] {
                    values.change(index, |run| {
                        let new = (0_u32..).map(|i| (index + round) as f32 + i as f32);
                        run.iter_mut().zip(new).for_each(|(value, new)| *value += new);
                        Ok(())
                    })?;
                }
            }
        }
        for index in 0..lengths.len() {
            assert_eq!(memory.get(index)?, file.get(index)?);
        }
        // Nothing is left to be cleaned away.
        assert_eq!(std::fs::read_dir(folder.path().join("new")).expect("folder").count(), 0);
        let failed = file.change(0, |_| Err(TrainError::checkpoint("here", "on purpose")));
        assert!(failed.is_err() && file.get(0)? == memory.get(0)?);
        Ok(())
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error_with_a_remedy() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("write");
        let error = RunValues::zeros_in(&file, &[1]).expect_err("no folder").to_string();
        assert!(error.contains("parallel.optimizer_state"), "{error}");
    }
}
