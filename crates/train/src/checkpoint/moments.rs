//! What optimizers keep, on disk: one file, or one a rank where ranks keep different parts.
//!
//! ```text
//! optimizer.safetensors                         whole tensors, flat
//! optimizer-00001-of-00002.safetensors          a rank's parts; metadata: start of each part
//! ```
//!
//! Parts are put together when they are read, so that any number of ranks goes on from them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};

use crate::error::{Result, TrainError};
use crate::parallel::{DataParallel, Run, World};

const WHOLE: &str = "optimizer.safetensors";
const PART: &str = "optimizer-";
const STEP: &str = "step";

/// A tensor of the optimizer, or a part of it.
pub(crate) struct Moment<'a> {
    /// With what it is: `first.NAME`.
    pub(crate) name: String,
    /// First element.
    pub(crate) start: usize,
    pub(crate) values: &'a [f32],
}

/// Name of the file that a rank writes; `None` if others write it.
fn file_of(parallel: &DataParallel) -> Option<String> {
    let world = parallel.world();
    if parallel.is_sharded() {
        return Some(part(world));
    }
    world.is_first().then(|| WHOLE.to_owned())
}

/// Whether a file is one rank's part.
pub(super) fn is_part(name: &str) -> bool {
    name.starts_with(PART)
}

/// Whether a file is this rank's part.
pub(super) fn is_part_of(name: &str, world: &World) -> bool {
    name == part(world)
}

fn part(world: &World) -> String {
    format!("{PART}{:05}-of-{:05}.safetensors", world.rank() + 1, world.size())
}

/// Writes a rank's file, if it has one.
pub(crate) fn write(
    folder: &Path,
    parallel: &DataParallel,
    moments: &[Moment<'_>],
    step: u64,
) -> Result<()> {
    let Some(file) = file_of(parallel) else { return Ok(()) };
    let mut metadata = HashMap::from([(STEP.to_owned(), step.to_string())]);
    let mut tensors = Vec::with_capacity(moments.len());
    for moment in moments {
        if moment.start > 0 {
            metadata.insert(start_key(&moment.name), moment.start.to_string());
        }
        let tensor = Tensor::from_slice(moment.values, moment.values.len(), &Device::Cpu)?;
        tensors.push((moment.name.clone(), tensor));
    }
    Ok(save(&folder.join(file), &tensors, metadata)?)
}

fn start_key(name: &str) -> String {
    format!("start of {name}")
}

/// Whole tensors of an optimizer.
#[derive(Debug, Default)]
pub(crate) struct Moments {
    tensors: BTreeMap<String, Vec<f32>>,
    /// Optimizer steps taken.
    pub(crate) step: u64,
}

impl Moments {
    /// Reads a checkpoint's file or files.
    ///
    /// # Errors
    /// - one is missing or unusable, or parts do not meet
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let files = files(folder)?;
        let mut parts: BTreeMap<String, Vec<(usize, Vec<f32>)>> = BTreeMap::new();
        let mut steps = Vec::new();
        for file in &files {
            let path = folder.join(file);
            let source = SafetensorsSource::open_file(&path)?;
            let number = |key: &str| source.metadata().get(key).and_then(|text| text.parse().ok());
            let step = number(STEP)
                .ok_or_else(|| TrainError::checkpoint(&path, "optimizer without a step"))?;
            steps.push(step as u64);
            for name in source.names() {
                let values = source.load(&name, DType::F32)?.flatten_all()?.to_vec1()?;
                let start: usize = number(&start_key(&name)).unwrap_or(0);
                parts.entry(name).or_default().push((start, values));
            }
        }
        if steps.iter().any(|step| *step != steps[0]) {
            return Err(TrainError::checkpoint(folder, "the ranks' files are of different steps"));
        }
        let mut tensors = BTreeMap::new();
        for (name, mut parts) in parts {
            parts.sort_by_key(|(start, _)| *start);
            let mut whole: Vec<f32> = Vec::new();
            for (start, values) in parts {
                if start != whole.len() {
                    let problem = format!("a part of `{name}` is missing at {}", whole.len());
                    return Err(TrainError::checkpoint(folder, problem));
                }
                whole.extend(values);
            }
            tensors.insert(name, whole);
        }
        Ok(Self { tensors, step: steps[0] })
    }

    /// What a run needs of a tensor; empty where nothing was saved, which fits no run.
    pub(crate) fn part(&self, name: &str, run: &Run) -> Vec<f32> {
        let part = self.tensors.get(name).and_then(|whole| whole.get(run.range()));
        part.map(<[f32]>::to_vec).unwrap_or_default()
    }
}

/// The optimizer's files in a checkpoint: all that the first of them promises.
fn files(folder: &Path) -> Result<Vec<String>> {
    let fail = |error: std::io::Error| TrainError::checkpoint(folder, error);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name().to_string_lossy().into_owned();
        if name == WHOLE || is_part(&name) {
            found.push(name);
        }
    }
    found.sort();
    let promised = |name: &String| -> Option<usize> {
        let (_, of) = name.strip_prefix(PART)?.strip_suffix(".safetensors")?.split_once("-of-")?;
        of.parse().ok()
    };
    let wanted = found.first().map_or(1, |name| promised(name).unwrap_or(1));
    if found.len() != wanted {
        let problem = format!("{} of {wanted} files of the optimizer", found.len());
        return Err(TrainError::checkpoint(folder, problem));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use candle_core::Var;
    use longdraft_models::draft::Parameter;

    use super::*;
    use crate::config::ParallelConfig;
    use crate::parallel::in_threads;

    fn parameters() -> Vec<Parameter> {
        let parameter = |(name, count): (&str, usize)| {
            let tensor = Tensor::zeros(count, DType::F32, &Device::Cpu).expect("tensor");
            let var = Var::from_tensor(&tensor).expect("variable");
            Parameter { name: name.to_owned(), var, decay: true, dead: false }
        };
        [("a", 40_000), ("b", 3), ("c", 20_000)].map(parameter).into()
    }

    #[test]
    fn parts_of_any_number_of_ranks_are_read_by_any_other() {
        let value = |parameter: usize, at: usize| (parameter * 100_000 + at) as f32;
        let folder = tempfile::tempdir().expect("folder");
        for ranks in [1, 2, 3] {
            let path = folder.path().join(ranks.to_string());
            std::fs::create_dir(&path).expect("folder");
            let over = |world: &World| {
                let config = ParallelConfig { zero: 1, ..ParallelConfig::default() };
                DataParallel::by_blocks(world, &config, &parameters())
            };
            in_threads(ranks, |world| {
                let parallel = over(&world);
                let values: Vec<Vec<f32>> = parallel
                    .runs()
                    .iter()
                    .map(|run| run.range().map(|at| value(run.parameter, at)).collect())
                    .collect();
                let moment = |(run, values): (&Run, &'_ Vec<f32>)| {
                    (
                        format!("first.{}", parameters()[run.parameter].name),
                        run.start,
                        values.clone(),
                    )
                };
                let named: Vec<_> = parallel.runs().iter().zip(&values).map(moment).collect();
                let moments: Vec<Moment<'_>> = named
                    .iter()
                    .map(|(name, start, values)| Moment {
                        name: name.clone(),
                        start: *start,
                        values,
                    })
                    .collect();
                write(&path, &parallel, &moments, 7).expect("written");
            });
            let read = Moments::read(&path).expect("read");
            assert_eq!(read.step, 7);
            for others in [1, 2, 4] {
                for parallel in in_threads(others, |world| over(&world)) {
                    for run in parallel.runs() {
                        let name = format!("first.{}", parameters()[run.parameter].name);
                        let want: Vec<f32> =
                            run.range().map(|at| value(run.parameter, at)).collect();
                        assert_eq!(read.part(&name, run), want);
                    }
                }
            }
        }
        let two = folder.path().join("2");
        std::fs::remove_file(two.join("optimizer-00002-of-00002.safetensors")).expect("remove");
        let error = Moments::read(&two).expect_err("a part is missing").to_string();
        assert!(error.contains("1 of 2 files"), "{error}");
    }
}
