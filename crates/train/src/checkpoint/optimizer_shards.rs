//! What optimizers keep, on disk: one file, or one a rank where ranks keep different parts.
//!
//! ```text
//! optimizer.safetensors                         whole tensors, flat
//! optimizer-00001-of-00002.safetensors          a rank's parts; metadata: start of each part
//! ```
//!
//! Parts are put together when they are read, so that any number of ranks goes on from them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use candle_core::DType;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_models::weights::streamed::{Streamed, save_streamed};
use longdraft_parallel::{DataParallel, Run, World};

use crate::error::{Result, TrainError};

const WHOLE: &str = "optimizer.safetensors";
const PART: &str = "optimizer-";
const STEP: &str = "step";

/// A tensor of the optimizer, or a part of it.
pub struct Moment<'a> {
    /// First element.
    pub start: usize,
    /// With what it is in its name: `first.NAME`.
    pub part: Streamed<'a, TrainError>,
}

impl<'a> Moment<'a> {
    /// One whose values are in memory.
    pub fn held(name: String, start: usize, values: &'a [f32]) -> Self {
        let part = Streamed {
            name,
            length: values.len(),
            values: Box::new(move || Ok(Cow::Borrowed(values))),
        };
        Self { start, part }
    }
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

/// Writes a rank's file, if it has one, tensor by tensor.
///
/// # Errors
/// - values cannot be read, or the file cannot be written
pub fn write(
    folder: &Path,
    parallel: &DataParallel,
    moments: Vec<Moment<'_>>,
    step: u64,
) -> Result<()> {
    let Some(file) = file_of(parallel) else { return Ok(()) };
    let mut metadata = BTreeMap::from([(STEP.to_owned(), step.to_string())]);
    let mut tensors = Vec::with_capacity(moments.len());
    for Moment { start, part } in moments {
        if start > 0 {
            metadata.insert(start_key(&part.name), start.to_string());
        }
        tensors.push(part);
    }
    save_streamed(&folder.join(file), &tensors, &metadata)
}

fn start_key(name: &str) -> String {
    format!("start of {name}")
}

/// Saved tensors of an optimizer; read when they are asked for.
#[derive(Debug)]
pub struct Moments {
    sources: Vec<SafetensorsSource>,
    /// Parts of every tensor, one after the other.
    tensors: BTreeMap<String, Vec<Part>>,
    /// Optimizer steps taken.
    pub step: u64,
}

/// Where a part of a tensor stands.
#[derive(Debug)]
struct Part {
    /// Its place in the whole tensor.
    range: Range<usize>,
    source: usize,
}

impl Moments {
    /// Reads a checkpoint's file or files.
    ///
    /// # Errors
    /// - one is missing or unusable, or parts do not meet
    pub fn read(folder: &Path) -> Result<Self> {
        let (mut sources, mut steps) = (Vec::new(), Vec::new());
        let mut tensors: BTreeMap<String, Vec<Part>> = BTreeMap::new();
        for file in files(folder)? {
            let path = folder.join(file);
            let source = SafetensorsSource::open_file(&path)?;
            let number = |key: &str| source.metadata().get(key).and_then(|text| text.parse().ok());
            let step = number(STEP)
                .ok_or_else(|| TrainError::checkpoint(&path, "optimizer without a step"))?;
            steps.push(step as u64);
            for name in source.names() {
                let start: usize = number(&start_key(&name)).unwrap_or(0);
                let length = source.shape(&name).unwrap_or_default().iter().product::<usize>();
                let range = start..start.saturating_add(length);
                let part = Part { range, source: sources.len() };
                tensors.entry(name).or_default().push(part);
            }
            sources.push(source);
        }
        if steps.iter().any(|step| *step != steps[0]) {
            return Err(TrainError::checkpoint(folder, "the ranks' files are of different steps"));
        }
        for (name, parts) in &mut tensors {
            parts.sort_by_key(|part| part.range.start);
            let mut end = 0;
            for part in parts {
                if part.range.start != end {
                    let problem = format!("a part of `{name}` is missing at {end}");
                    return Err(TrainError::checkpoint(folder, problem));
                }
                end = part.range.end;
            }
        }
        Ok(Self { sources, tensors, step: steps[0] })
    }

    /// What a run needs of a tensor; less where less was saved, which fits no run.
    ///
    /// # Errors
    /// - the file is damaged
    pub fn part(&self, name: &str, run: &Run) -> Result<Vec<f32>> {
        let wanted = run.range();
        let mut values = Vec::with_capacity(run.len);
        for Part { range, source } in self.tensors.get(name).into_iter().flatten() {
            let start = wanted.start.max(range.start);
            let end = wanted.end.min(range.end);
            if start < end {
                let part = self.sources[*source].load(name, DType::F32)?.flatten_all()?;
                let part = part.narrow(0, start - range.start, end - start)?;
                values.extend(part.to_vec1::<f32>()?);
            }
        }
        Ok(values)
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
    use candle_core::{Device, Tensor, Var};
    use longdraft_models::draft::Parameter;
    use longdraft_models::weights::TensorRole;

    use super::*;
    use crate::config::ParallelConfig;
    use longdraft_parallel::threads::in_threads;

    fn parameters() -> Vec<Parameter> {
        let parameter = |(name, count): (&str, usize)| {
            let tensor = Tensor::zeros(count, DType::F32, &Device::Cpu).expect("tensor");
            let var = Var::from_tensor(&tensor).expect("variable");
            let (name, role) = (name.to_owned(), TensorRole::Layer);
            Parameter { name, var, role, decay: true, dead: false }
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
                let moments = named
                    .iter()
                    .map(|(name, start, values)| Moment::held(name.clone(), *start, values));
                write(&path, &parallel, moments.collect(), 7).expect("written");
            });
            let read = Moments::read(&path).expect("read");
            assert_eq!(read.step, 7);
            for others in [1, 2, 4] {
                for parallel in in_threads(others, |world| over(&world)) {
                    for run in parallel.runs() {
                        let name = format!("first.{}", parameters()[run.parameter].name);
                        let want: Vec<f32> =
                            run.range().map(|at| value(run.parameter, at)).collect();
                        assert_eq!(read.part(&name, run).expect("part"), want);
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
