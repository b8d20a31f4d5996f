//! What the GGUF files of drafts have in common: a header of one architecture's keys, and tensors.

use std::path::Path;

use candle_core::{Device, Tensor};
use longdraft_kernels::rope::RopeScaling;

use crate::config::RopeParameters;
use crate::config::rope::yarn_of_gguf;
use crate::error::{ModelError, Problems, Result};
use crate::ids::{EnteredLayerId, LayerId};
use crate::weights::file::WeightFile;
use crate::weights::gguf::header::{ElementType, Header, StoredTensor};
use crate::weights::gguf::split;

/// Divisors of the rotary frequencies, `[D/2]`: they belong to the configuration.
pub(super) const DIVISORS: &str = "rope_freqs.weight";

/// A draft's open GGUF file.
pub(super) struct DraftGguf {
    file: WeightFile,
    header: Header,
    architecture: &'static str,
}

impl DraftGguf {
    /// Opens a file and reads its header; `title` names the drafts of the architecture in errors.
    ///
    /// # Errors
    /// - unreadable, not GGUF, or of another architecture
    pub(super) fn open(path: &Path, architecture: &'static str, title: &str) -> Result<Self> {
        let file = WeightFile::open(path)?;
        let header = split::read(&file)?;
        match header.text("general.architecture") {
            Some(found) if found == architecture => Ok(Self { file, header, architecture }),
            other => {
                let found = other.unwrap_or("none");
                let problem = format!("a GGUF file of architecture {found}, no {title} draft");
                Err(ModelError::invalid(path, problem))
            }
        }
    }

    /// Where it lies.
    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// The header.
    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// A key of the architecture in full.
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// A number under a key of the architecture.
    pub(super) fn number(&self, name: &str) -> Option<f64> {
        self.header.number(&self.key(name))
    }

    /// A switch under a key of the architecture.
    pub(super) fn flag(&self, name: &str) -> Option<bool> {
        self.header.flag(&self.key(name))
    }

    /// A size under a key of the architecture; 1 and a problem without one.
    pub(super) fn size(
        &self,
        name: &str,
        default: Option<usize>,
        problems: &mut Problems,
    ) -> usize {
        let found = self.number(name).filter(|x| *x >= 1.0).map(|x| x as usize);
        found.or(default).unwrap_or_else(|| {
            problems.push(format!("`{}` is missing or not a size", self.key(name)));
            1
        })
    }

    /// Rows of a stored tensor.
    pub(super) fn rows(&self, stored: &str) -> Option<usize> {
        self.header.tensors.get(stored).and_then(|tensor| tensor.shape.first().copied())
    }

    /// What is added under the root of every norm.
    pub(super) fn rms_norm_eps(&self) -> f64 {
        // Stored in 32 bits: 1e-5 comes back as 9.999999747e-6.
        self.number("attention.layer_norm_rms_epsilon")
            .map_or(1e-6, |eps| (eps as f32).to_string().parse().unwrap_or(eps))
    }

    /// The layers whose outputs a list names as states that enter the next one; `None` unless it is a
    /// list of such.
    pub(super) fn layers(&self, key: &str) -> Option<Vec<LayerId>> {
        let output = |id: &i64| EnteredLayerId(usize::try_from(*id).ok()?).output();
        self.header.integers(key)?.iter().map(output).collect()
    }

    /// Base, scaling and divisors of the rotary embedding.
    pub(super) fn rope(&self, context: usize, problems: &mut Problems) -> RopeParameters {
        let number = |name: &str| self.number(&format!("rope.{name}"));
        let factor = number("scaling.factor").unwrap_or(1.0);
        let scaling = match self.header.text(&self.key("rope.scaling.type")) {
            None | Some("none") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor },
            Some("yarn") => {
                yarn_of_gguf(|key| number(&format!("scaling.{key}")), (factor, context), true)
            }
            Some(other) => {
                problems.push(format!("unknown rope scaling `{other}` (none, linear, yarn)"));
                RopeScaling::None
            }
        };
        let theta = number("freq_base").unwrap_or(10_000.0);
        let rope = RopeParameters { theta, scaling, divisors: self.divisors(problems) };
        rope.check(problems);
        rope
    }

    fn divisors(&self, problems: &mut Problems) -> Option<Vec<f32>> {
        let tensor = self.header.tensors.get(DIVISORS)?;
        if tensor.element != ElementType::F32 {
            problems.push(format!("tensor `{DIVISORS}` is not f32"));
            return None;
        }
        let bytes = self.read(tensor).map_err(|error| problems.push(error)).ok()?;
        tensor.element.widen(&bytes)
    }

    /// A tensor's bytes.
    ///
    /// # Errors
    /// - the file cannot be read
    pub(super) fn read(&self, tensor: &StoredTensor) -> Result<Vec<u8>> {
        self.file.read(tensor.bytes.clone())
    }

    /// Whole numbers that ascend by more than their places, as offsets from these: how other formats hold a map of
    /// tokens. `name` stands in errors.
    ///
    /// # Errors
    /// - it holds no whole numbers, or the file cannot be read
    pub(super) fn offsets(&self, name: &str, tensor: &StoredTensor) -> Result<Vec<i64>> {
        let bytes = self.read(tensor)?;
        let ids: Vec<i64> = match tensor.element {
            ElementType::I64 => bytes
                .chunks_exact(8)
                .filter_map(|b| b.try_into().ok().map(i64::from_le_bytes))
                .collect(),
            ElementType::I32 => bytes
                .chunks_exact(4)
                .filter_map(|b| b.try_into().ok().map(i32::from_le_bytes))
                .map(i64::from)
                .collect(),
            other => {
                let problem = format!("tensor `{name}` is {other:?}, integers expected");
                return Err(ModelError::invalid(self.path(), problem));
            }
        };
        Ok(ids.into_iter().zip(0_i64..).map(|(id, i)| id.saturating_sub(i)).collect())
    }

    /// A tensor's values in f32, in its shape; `name` stands in errors.
    ///
    /// # Errors
    /// - it is no weight, or the file cannot be read
    pub(super) fn values(&self, name: &str, tensor: &StoredTensor) -> Result<Tensor> {
        let values = tensor.element.widen(&self.read(tensor)?).ok_or_else(|| {
            let problem = format!("tensor `{name}` is {:?}, not a weight", tensor.element);
            ModelError::invalid(self.path(), problem)
        })?;
        Ok(Tensor::from_vec(values, tensor.shape.as_slice(), &Device::Cpu)?)
    }
}
