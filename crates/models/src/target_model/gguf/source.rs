//! GGUF files, tensor by tensor, widened or as blocks, under the published Hugging Face names.
//!
//! Files of architectures `llama`, `mistral3`, `granite` and `smollm3` store the rows of `attn_q` and `attn_k`, and the values of
//! their biases, for interleaved rotary pairs: inside each head, stored row `2i + j` is half-split row `j·D/2 + i`. They are
//! put back while reading. The matrices of a layer's experts are stored as one stack `[E, O, I]`, those of heads over latent rows
//! likewise ([`super::heads`]).

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::matrix::QuantisedMatrix;
use rayon::prelude::*;

use super::{heads, names};
use crate::config::{Architecture, TargetConfig};
use crate::error::{ModelError, Result};
use crate::weights::file::WeightFile;
use crate::weights::gguf::half_split_row;
use crate::weights::gguf::header::{ElementType, Header};
use crate::weights::gguf::split::{self, Files};
use crate::weights::{Collector, WeightSource, rows_of};

/// Values widened at a time by one thread.
const CHUNK_VALUES: usize = 1 << 18;

/// Tensors of a GGUF file, or of the files that a model was split into.
pub struct GgufSource {
    /// The first one is what was opened.
    files: Vec<WeightFile>,
    /// Files of the stored tensors that do not lie in the first one.
    places: HashMap<String, usize>,
    header: Header,
    config: TargetConfig,
    /// By Hugging Face name.
    names: HashMap<String, Stored>,
}

/// Where a published tensor is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored {
    /// GGUF name.
    pub(super) name: String,
    pub(super) part: Part,
}

/// What of a stored tensor is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Whole,
    /// One of a stack.
    Expert(usize),
    /// Some rows of several matrices that are stored as one.
    Rows {
        first: usize,
        count: usize,
    },
    /// Some rows of one of a stack.
    RowsOfOne {
        index: usize,
        first: usize,
        count: usize,
    },
    /// Keys' and values' matrices of every head, of this tensor and the one beside it, as one matrix: a head's
    /// keys, turned round, before its values.
    JoinedHeads,
    /// All of it, `[I]`, as `[1, I]`.
    Row,
    /// All of it, `[C, n]`, as `[C, 1, n]`.
    Taps,
}

/// Shape, format and place in its file of what is to be read.
struct Located<'a> {
    file: &'a WeightFile,
    dims: Vec<usize>,
    element: ElementType,
    bytes: Range<usize>,
}

impl Part {
    /// Shape of the part of a tensor of shape `dims`.
    fn dims(self, dims: &[usize]) -> Vec<usize> {
        match self {
            Self::Whole | Self::JoinedHeads => dims.to_vec(),
            Self::Expert(_) => dims[1..].to_vec(),
            Self::Rows { count, .. } => [&[count], &dims[1..]].concat(),
            Self::RowsOfOne { count, .. } => [&[count], &dims[2..]].concat(),
            Self::Row => [&[1], dims].concat(),
            Self::Taps => match dims {
                [channels, taps] => vec![*channels, 1, *taps],
                other => other.to_vec(),
            },
        }
    }
}

impl GgufSource {
    /// Opens a file and reads its header. Of a model in parts the first one is opened, and the others are
    /// found beside it.
    ///
    /// # Errors
    /// - unreadable, not GGUF, a part is missing, or a list of every unusable key and every tensor outside
    ///   its file
    pub fn open(path: &Path) -> Result<Self> {
        let Files { parts: files, header, places } = split::open(path)?;
        let config = TargetConfig::from_gguf(&header).map_err(ModelError::all_in(path))?;
        let names = names::published(&header, &config).map_err(ModelError::all_in(path))?;
        let mut source = Self { files, places, header, config, names };
        source.read_rope_divisors()?;
        Ok(source)
    }

    /// The configuration in the header.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// GGUF name of the tensor that holds a published one.
    pub(super) fn stored_name(&self, published: &str) -> Option<&str> {
        self.names.get(published).map(|stored| stored.name.as_str())
    }

    /// Reads a tensor by its GGUF name, rows as stored.
    ///
    /// # Errors
    /// - it does not exist or is no weight
    pub fn load_stored(&self, gguf_name: &str, dtype: DType) -> Result<Tensor> {
        self.read(&Stored { name: gguf_name.to_owned(), part: Part::Whole }, dtype, |row| row)
    }

    /// Frequency divisors that stand in a tensor of their own.
    fn read_rope_divisors(&mut self) -> Result<()> {
        if self.header.tensors.contains_key("rope_freqs.weight") {
            let divisors = self.load_stored("rope_freqs.weight", DType::F32)?;
            self.config.rope.divisors = Some(divisors.flatten_all()?.to_vec1()?);
        }
        if let Some(mut by_length) = self.config.parts.rotary.by_length.take() {
            let numbers = |name: &str| -> Result<Vec<f32>> {
                Ok(self.load_stored(name, DType::F32)?.flatten_all()?.to_vec1()?)
            };
            by_length.short = numbers("rope_factors_short.weight")?;
            by_length.long = numbers("rope_factors_long.weight")?;
            self.config.parts.rotary.by_length = Some(by_length);
        }
        Ok(())
    }

    /// Whether a published name's rows have to be put back into half-split order.
    fn is_interleaved(&self, name: &str) -> bool {
        use Architecture::{Granite, Llama, Ministral3, Mixtral, SmolLm3};
        matches!(self.config.architecture, Llama | Mixtral | Ministral3 | Granite | SmolLm3)
            && (name.contains(".self_attn.q_proj.") || name.contains(".self_attn.k_proj."))
    }

    /// Finds a tensor or a part of one.
    fn locate(&self, stored: &Stored) -> Result<Located<'_>> {
        let Stored { name, part } = stored;
        let file = &self.files[self.places.get(name).copied().unwrap_or(0)];
        let invalid = |problem: String| ModelError::invalid(file.path(), problem);
        let tensor =
            self.header.tensors.get(name).ok_or_else(|| invalid(format!("no tensor `{name}`")))?;
        let element = tensor.element;
        if element.weight_name().is_none() {
            return Err(invalid(format!("tensor `{name}` is {element:?}, which is not a weight")));
        }
        let mut bytes = tensor.bytes.clone();
        let dims = part.dims(&tensor.shape);
        let of_first = match part {
            Part::Expert(index) | Part::RowsOfOne { index, .. } => Some(*index..index + 1),
            Part::Rows { first, count } => Some(*first..first + count),
            Part::Whole | Part::JoinedHeads | Part::Row | Part::Taps => None,
        };
        let mut narrow = |rows: Range<usize>, of: usize| {
            let size = bytes.len() / of.max(1);
            bytes = bytes.start + rows.start * size..bytes.start + rows.end * size;
        };
        if let Some(rows) = of_first {
            narrow(rows, tensor.shape[0]);
        }
        if let Part::RowsOfOne { first, count, .. } = part {
            narrow(*first..first + count, tensor.shape[1]);
        }
        Ok(Located { file, dims, element, bytes })
    }

    /// Where a published tensor is stored.
    fn stored(&self, name: &str) -> Result<&Stored> {
        self.names
            .get(name)
            .ok_or_else(|| ModelError::invalid(self.path(), format!("no tensor for `{name}`")))
    }

    /// Where a stored row of a tensor belongs.
    fn place(&self, name: &str, row: usize) -> usize {
        if self.is_interleaved(name) { half_split_row(row, self.config.head_dim) } else { row }
    }

    /// Where a row of an interleaved tensor is stored: [`Self::place`] turned around.
    fn stored_row(&self, row: usize) -> usize {
        let head_dim = self.config.head_dim;
        let (head, within) = (row / head_dim, row % head_dim);
        head * head_dim + within % (head_dim / 2) * 2 + within / (head_dim / 2)
    }

    /// Values of an interleaved bias, each where its row belongs.
    fn put_back(&self, bias: &Tensor) -> Result<Tensor> {
        let stored: Vec<u32> = (0..bias.dim(0)?).map(|row| self.stored_row(row) as u32).collect();
        Ok(bias.index_select(&Tensor::new(stored.as_slice(), bias.device())?, 0)?)
    }

    /// Keys' and values' matrices of every head as one, `[N (plain + value), r]`.
    fn joined_heads(&self, keys: &str, dtype: DType) -> Result<Tensor> {
        let keys_of = self.load_stored(keys, dtype)?.transpose(1, 2)?;
        let values_of = self.load_stored(&heads::values_beside(keys), dtype)?;
        let joined = Tensor::cat(&[&keys_of.contiguous()?, &values_of], 1)?;
        Ok(joined.flatten(0, 1)?)
    }

    /// Some rows of joined heads. Those of one head are read alone.
    fn joined_rows(
        &self,
        name: &str,
        heads: usize,
        rows: Range<usize>,
        dtype: DType,
    ) -> Result<Tensor> {
        let all = self.shape(name).and_then(|shape| shape.first().copied()).unwrap_or(0);
        let of_head = (all / heads.max(1)).max(1);
        let (head, first) = (rows.start / of_head, rows.start % of_head);
        if head >= heads || first + rows.len() > of_head {
            return rows_of(&self.load(name, dtype)?, rows);
        }
        let keys = &self.stored(name)?.name;
        let part =
            |name: String| self.read(&Stored { name, part: Part::Expert(head) }, dtype, |row| row);
        let joined = [part(keys.clone())?.t()?.contiguous()?, part(heads::values_beside(keys))?];
        rows_of(&Tensor::cat(&joined, 0)?, first..first + rows.len())
    }

    /// Widens a tensor; stored row `r` becomes row `place(r)`.
    fn read(
        &self,
        stored: &Stored,
        dtype: DType,
        place: impl Fn(usize) -> usize + Sync,
    ) -> Result<Tensor> {
        let Located { file, dims, element, bytes } = self.locate(stored)?;
        let invalid = |problem: String| ModelError::invalid(file.path(), problem);
        let width = dims.last().copied().unwrap_or(1).max(1);
        let rows = dims.iter().product::<usize>() / width;
        let mut collector = Collector::zeros(file.path(), dtype, rows * width)?;
        let row_bytes = bytes.len() / rows.max(1);
        let chunk_rows = (CHUNK_VALUES / width).max(1);
        // Some chunks in parallel, then stored in order, so that little f32 exists at a time.
        let starts: Vec<usize> = (0..rows).step_by(chunk_rows).collect();
        for starts in starts.chunks(rayon::current_num_threads()) {
            let chunks: Vec<Vec<f32>> = starts
                .par_iter()
                .map(|&first| {
                    let count = chunk_rows.min(rows - first);
                    let start = bytes.start + first * row_bytes;
                    let raw = file.read(start..start + count * row_bytes)?;
                    let values = element.widen(&raw);
                    values.ok_or_else(|| invalid(format!("{element:?} is not a weight")))
                })
                .collect::<Result<_>>()?;
            for (&first, chunk) in starts.iter().zip(&chunks) {
                for (i, row) in chunk.chunks_exact(width).enumerate() {
                    collector.set(place(first + i) * width, row.iter().copied());
                }
            }
        }
        collector.into_tensor(&dims)
    }
}

impl WeightSource for GgufSource {
    fn path(&self) -> &Path {
        self.files[0].path()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.names.keys().cloned().collect();
        names.sort();
        names
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let Stored { name, part } = self.names.get(name)?;
        let shape = &self.header.tensors.get(name)?.shape;
        if *part == Part::JoinedHeads {
            let values = self.header.tensors.get(&heads::values_beside(name))?;
            let (&[heads, rank, plain], &[_, value, _]) =
                (shape.as_slice(), values.shape.as_slice())
            else {
                return None;
            };
            return Some(vec![heads * (plain + value), rank]);
        }
        Some(part.dims(shape))
    }

    fn stored_type(&self, name: &str) -> Option<&'static str> {
        let Stored { name, .. } = self.names.get(name)?;
        self.header.tensors.get(name)?.element.weight_name()
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let stored = self.stored(name)?;
        if stored.part == Part::JoinedHeads {
            return self.joined_heads(&stored.name, dtype);
        }
        let tensor = self.read(stored, dtype, |row| self.place(name, row))?;
        // All of a bias is one row to the reader.
        if tensor.rank() == 1 && self.is_interleaved(name) {
            return self.put_back(&tensor);
        }
        Ok(tensor)
    }

    fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        let stored = self.stored(name)?;
        let Located { file, dims, element, bytes } = self.locate(stored)?;
        let &[outputs, width] = dims.as_slice() else {
            return match (stored.part, dims.first()) {
                (Part::JoinedHeads, Some(heads)) => self.joined_rows(name, *heads, rows, dtype),
                _ => rows_of(&self.load(name, dtype)?, rows),
            };
        };
        let invalid = |problem: String| ModelError::invalid(file.path(), problem);
        if rows.start > rows.end || rows.end > outputs {
            return Err(invalid(format!("tensor `{name}` has {outputs} rows, {rows:?} expected")));
        }
        let row_bytes = bytes.len() / outputs.max(1);
        let interleaved = self.is_interleaved(name);
        let mut values = Vec::with_capacity(rows.len() * width);
        for row in rows.clone() {
            let stored = if interleaved { self.stored_row(row) } else { row };
            let start = bytes.start + stored * row_bytes;
            let widened = element.widen(&file.read(start..start + row_bytes)?);
            values.extend(widened.ok_or_else(|| invalid(format!("{element:?} is not a weight")))?);
        }
        Ok(Tensor::from_vec(values, (rows.len(), width), &Device::Cpu)?.to_dtype(dtype)?)
    }

    fn load_quantised(&self, name: &str) -> Result<Option<QuantisedMatrix>> {
        let stored = self.stored(name)?;
        if stored.part == Part::JoinedHeads {
            return Ok(None);
        }
        let Located { file, dims, element, bytes } = self.locate(stored)?;
        let (ElementType::Blocks(format), &[outputs, inputs]) = (element, dims.as_slice()) else {
            return Ok(None);
        };
        let row_bytes = bytes.len() / outputs.max(1);
        let read = |rows: Range<usize>| {
            let rows = bytes.start + rows.start * row_bytes..bytes.start + rows.end * row_bytes;
            file.read(rows)
        };
        let interleaved = self.is_interleaved(name);
        let matrix = QuantisedMatrix::read(format, outputs, inputs, |rows| {
            if !interleaved {
                return Ok(Cow::Owned(read(rows)?));
            }
            let mut placed = Vec::with_capacity(rows.len() * row_bytes);
            for row in rows {
                let stored = self.stored_row(row);
                placed.extend(read(stored..stored + 1)?);
            }
            Ok::<_, ModelError>(Cow::Owned(placed))
        })?;
        Ok(Some(matrix))
    }
}
