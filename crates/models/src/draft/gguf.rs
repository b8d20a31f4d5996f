//! What the GGUF files of drafts have in common: a header of one architecture's keys, and tensors.

use std::marker::PhantomData;
use std::path::Path;

use candle_core::{DType, Device, Tensor};

use crate::config::RopeParameters;
use crate::config::gguf::Keys;
use crate::error::{ModelError, Problems, Result};
use crate::ids::{EnteredLayerId, LayerId};
use crate::weights::file::WeightFile;
use crate::weights::gguf::header::{ElementType, Header, StoredTensor};
use crate::weights::gguf::{half_split_row, split};
use crate::weights::{WeightSource, integers, other_type};

/// Divisors of the rotary frequencies, `[D/2]`: they belong to the configuration.
const DIVISORS: &str = "rope_freqs.weight";

/// How the files of an architecture hold tensors.
pub trait Naming {
    /// `general.architecture`.
    const ARCHITECTURE: &'static str;
    /// What its drafts are called in errors.
    const TITLE: &'static str;
    /// Whether rows of queries and keys stand in the order of interleaved rotary pairs.
    const IS_INTERLEAVED: bool;

    /// The name in files of a published tensor.
    fn stored_name(published: &str) -> Option<String>;

    /// The published name of a file's tensor.
    fn published_name(stored: &str) -> Option<String>;
}

/// A draft's open GGUF file: keys of its architecture, and tensors under their published names.
pub struct DraftGguf<N> {
    file: WeightFile,
    header: Header,
    naming: PhantomData<N>,
}

impl<N: Naming> DraftGguf<N> {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// - unreadable, not GGUF, or of another architecture
    pub fn open(path: &Path) -> Result<Self> {
        let file = WeightFile::open(path)?;
        let header = split::read(&file)?;
        match header.text("general.architecture") {
            Some(found) if found == N::ARCHITECTURE => {
                Ok(Self { file, header, naming: PhantomData })
            }
            other => {
                let (found, title) = (other.unwrap_or("none"), N::TITLE);
                let problem = format!("a GGUF file of architecture {found}, no {title} draft");
                Err(ModelError::invalid(path, problem))
            }
        }
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// A key of the architecture in full.
    pub(super) fn key(name: &str) -> String {
        format!("{}.{name}", N::ARCHITECTURE)
    }

    /// What the keys of the architecture hold.
    pub(super) fn keys(&self) -> Keys<'_> {
        Keys::of(&self.header, N::ARCHITECTURE)
    }

    /// Rows of a stored tensor.
    pub(super) fn rows(&self, stored: &str) -> Option<usize> {
        self.header.tensors.get(stored).and_then(|tensor| tensor.shape.first().copied())
    }

    /// What is added under the root of every norm.
    pub(super) fn rms_norm_eps(keys: &Keys<'_>) -> f64 {
        // Stored in 32 bits: 1e-5 comes back as 9.999999747e-6.
        keys.number("attention.layer_norm_rms_epsilon")
            .map_or(1e-6, |eps| (eps as f32).to_string().parse().unwrap_or(eps))
    }

    /// The layers whose outputs a list names as states that enter the next one; `None` unless it is a
    /// list of such.
    pub(super) fn layers(&self, key: &str) -> Option<Vec<LayerId>> {
        let output = |id: &i64| EnteredLayerId(usize::try_from(*id).ok()?).output();
        self.header.integers(key)?.iter().map(output).collect()
    }

    /// Base, scaling and divisors of the rotary embedding.
    pub(super) fn rope(&self, keys: &mut Keys<'_>, context: usize) -> RopeParameters {
        let divisors = self.divisors(&mut keys.problems);
        let rope = RopeParameters { divisors, ..keys.rope(context) };
        rope.check(&mut keys.problems);
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

    fn read(&self, tensor: &StoredTensor) -> Result<Vec<u8>> {
        self.file.read(tensor.bytes.clone())
    }

    fn stored(&self, published: &str) -> Option<&StoredTensor> {
        self.header.tensors.get(&N::stored_name(published)?)
    }

    fn find(&self, published: &str) -> Result<&StoredTensor> {
        let none = || ModelError::invalid(self.path(), format!("no tensor for `{published}`"));
        self.stored(published).ok_or_else(none)
    }

    /// Interleaved rows of queries or keys `[R, ..]` in half-split order; `name` stands in errors.
    fn half_split(&self, name: &str, values: &Tensor) -> Result<Tensor> {
        let keys = self.keys();
        let heads = keys.number("attention.head_count").unwrap_or(1.0).max(1.0);
        let hidden = keys.number("embedding_length").unwrap_or(1.0);
        let head_dim = keys.number("attention.key_length");
        let head_dim = head_dim.unwrap_or(hidden / heads).max(1.0) as usize;
        let rows = values.dims().first().copied().unwrap_or(1);
        if !head_dim.is_multiple_of(2) || !rows.is_multiple_of(head_dim) {
            let problem = format!("`{name}`: {rows} rows are not whole heads of {head_dim}");
            return Err(ModelError::invalid(self.path(), problem));
        }
        let mut order = vec![0_u32; rows];
        for stored in 0..rows {
            order[half_split_row(stored, head_dim)] = stored as u32;
        }
        Ok(values.index_select(&Tensor::from_vec(order, rows, &Device::Cpu)?, 0)?)
    }
}

impl<N: Naming> WeightSource for DraftGguf<N> {
    fn path(&self) -> &Path {
        self.file.path()
    }

    /// Published names; tensors without one keep theirs, so that they are reported.
    fn names(&self) -> Vec<String> {
        let stored = self.header.tensors.keys().filter(|name| *name != DIVISORS);
        stored.map(|name| N::published_name(name).unwrap_or_else(|| name.clone())).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.stored(name).map(|tensor| tensor.shape.clone())
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let tensor = self.find(name)?;
        let values = tensor.element.widen(&self.read(tensor)?).ok_or_else(|| {
            let problem = format!("tensor `{name}` is {:?}, not a weight", tensor.element);
            ModelError::invalid(self.path(), problem)
        })?;
        let mut values = Tensor::from_vec(values, tensor.shape.as_slice(), &Device::Cpu)?;
        let turns = ["q_proj.weight", "k_proj.weight"].iter().any(|end| name.ends_with(end));
        if N::IS_INTERLEAVED && turns {
            values = self.half_split(name, &values)?;
        }
        Ok(values.to_dtype(dtype)?)
    }

    /// Whole numbers that ascend by more than their places (`d2t`), as offsets from these: as other formats
    /// hold them.
    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        let tensor = self.find(name)?;
        let bytes = self.read(tensor)?;
        let ids = match tensor.element {
            ElementType::I64 => integers(&bytes, i64::from_le_bytes),
            ElementType::I32 => integers(&bytes, i32::from_le_bytes),
            other => return Err(other_type(self.path(), name, other, "integers")),
        };
        Ok(ids.into_iter().zip(0_i64..).map(|(id, i)| id.saturating_sub(i)).collect())
    }
}
