//! What some families store as one tensor and layers read piece by piece: fused projections, stacks of experts.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_kernels::matrix::{BlockFormat, Matrix, QuantisedMatrix};

use super::names::{self, ExpertNames};
use crate::config::{Architecture, ExpertsConfig, TargetConfig};
use crate::error::{Problems, Result};
use crate::weights::{WeightSource, rows_of};

/// Values of an MXFP4 block, and its bytes of codes.
const BLOCK: usize = 32;
const CODES: usize = BLOCK / 2;

/// A source whose fused tensors have a name for each piece.
pub(super) struct Views {
    source: Box<dyn WeightSource>,
    by_name: BTreeMap<String, View>,
    /// Tensors that views stand for.
    stored: BTreeSet<String>,
}

/// A piece of a stored tensor.
struct View {
    /// The stored tensor; of blocks the name without `_blocks` and `_scales`.
    stored: String,
    shape: Vec<usize>,
    piece: Piece,
}

/// Every `step`-th of some rows or columns from `first` on.
#[derive(Clone, Copy)]
struct Every {
    first: usize,
    step: usize,
}

enum Piece {
    /// Neighbouring rows from one on.
    Rows(usize),
    /// Of matrix `0` of a stack `[E, I, O]`: outputs as rows.
    Transposed(usize, Every),
    /// Of row `0` of `[E, O]`.
    Vector(usize, Every),
    /// Of matrix `0` of a stack of MXFP4 blocks `[E, O, I / 32, 16]`: outputs as they are.
    Blocks(usize, Every),
}

impl Views {
    /// The source as it is, or with names for the pieces of its fused tensors.
    ///
    /// # Errors
    /// - a list of every fused tensor of another shape than the configuration says
    pub(super) fn of(
        config: &TargetConfig,
        source: Box<dyn WeightSource>,
    ) -> Result<Box<dyn WeightSource>> {
        use Architecture::{Glm, Glm4, GptOss, Llama4, Phi3};
        if !matches!(config.architecture, Glm | Glm4 | GptOss | Llama4 | Phi3) {
            return Ok(source);
        }
        let mut views = Self { source, by_name: BTreeMap::new(), stored: BTreeSet::new() };
        let mut problems = Problems::default();
        // Bounded by what the file holds, whatever the configuration says.
        let layers = config.num_hidden_layers.min(views.source.names().len());
        for index in 0..layers {
            match config.experts_in(index) {
                Some(sizes) => views.add_experts(config, index, sizes, &mut problems),
                None => views.add_fused(config, index, &mut problems),
            }
        }
        problems.into_result(views.source.path())?;
        Ok(Box::new(views))
    }

    /// Whether a tensor is there; one of another shape is told.
    fn holds(&mut self, name: &str, shape: &[usize], problems: &mut Problems) -> bool {
        let Some(found) = self.source.shape(name) else { return false };
        if found != shape {
            problems.push(format!("tensor `{name}` has shape {found:?}, {shape:?} expected"));
            return false;
        }
        self.stored.insert(name.to_owned());
        true
    }

    fn add(&mut self, name: String, stored: &str, shape: Vec<usize>, piece: Piece) {
        self.by_name.insert(name, View { stored: stored.to_owned(), shape, piece });
    }

    /// `qkv_proj` and `gate_up_proj` of a layer.
    fn add_fused(&mut self, config: &TargetConfig, index: usize, problems: &mut Problems) {
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let (query, kv) = (config.query_size(), config.kv_size());
        let (layer, mlp) = (names::layer(index), names::mlp(config.architecture, index));
        let own = |module: &str| format!("{layer}self_attn.{module}");
        let fused: [(String, Vec<(String, usize)>); 2] = [
            (
                own("qkv_proj"),
                vec![(own("q_proj"), query), (own("k_proj"), kv), (own("v_proj"), kv)],
            ),
            (
                format!("{mlp}.gate_up_proj"),
                ["gate_proj", "up_proj"].map(|name| (format!("{mlp}.{name}"), width)).to_vec(),
            ),
        ];
        for (module, pieces) in fused {
            let stored = format!("{module}.weight");
            let rows = pieces.iter().map(|(_, rows)| rows).sum();
            if !self.holds(&stored, &[rows, hidden], problems) {
                continue;
            }
            let mut first = 0;
            for (name, rows) in pieces {
                self.add(format!("{name}.weight"), &stored, vec![rows, hidden], Piece::Rows(first));
                first += rows;
            }
        }
    }

    /// The stacks of a layer's experts.
    fn add_experts(
        &mut self,
        config: &TargetConfig,
        index: usize,
        sizes: &ExpertsConfig,
        problems: &mut Problems,
    ) {
        let names = names::experts(config.architecture, index);
        let (count, width) = (sizes.num_experts, sizes.moe_intermediate_size);
        let hidden = config.hidden_size;
        let all = names.all();
        // Gate and up are neighbours in gpt-oss, halves in Llama 4.
        let halves = match config.architecture {
            Architecture::GptOss => [0, 1].map(|first| Every { first, step: 2 }),
            _ => [0, width].map(|first| Every { first, step: 1 }),
        };
        let whole = Every { first: 0, step: 1 };
        let stacks = [
            (
                format!("{all}.gate_up_proj"),
                (2 * width, hidden),
                vec![(0, halves[0]), (1, halves[1])],
            ),
            (format!("{all}.down_proj"), (hidden, width), vec![(2, whole)]),
        ];
        for (stack, (outputs, inputs), pieces) in stacks {
            let outputs_of = |pieces: &[(usize, Every)]| outputs / pieces.len();
            let dense = self.holds(&stack, &[count, inputs, outputs], problems);
            let blocks = [count, outputs, inputs / BLOCK, CODES];
            let quantised = self.holds(&format!("{stack}_blocks"), &blocks, problems)
                && self.holds(&format!("{stack}_scales"), &blocks[..3], problems)
                && inputs.is_multiple_of(BLOCK);
            let biases = self.holds(&format!("{stack}_bias"), &[count, outputs], problems);
            let make =
                MakePieces { names: &names, stack: &stack, rows: outputs_of(&pieces), inputs };
            for (matrix, every) in pieces {
                for expert in 0..count {
                    if dense {
                        make.weight(self, (expert, matrix), Piece::Transposed(expert, every));
                    } else if quantised {
                        make.weight(self, (expert, matrix), Piece::Blocks(expert, every));
                    }
                    if biases {
                        make.bias(self, (expert, matrix), Piece::Vector(expert, every));
                    }
                }
            }
        }
    }

    /// A piece's rows of blocks, in the order of GGUF files: a scale, then codes whose low nibbles are the
    /// first half of the block. Published ones hold neighbours in a byte.
    fn block_rows(&self, view: &View, expert: usize, every: Every) -> Result<Vec<u8>> {
        let one = expert..expert + 1;
        let codes = self.source.load_bytes(&format!("{}_blocks", view.stored), one.clone())?;
        let scales = self.source.load_bytes(&format!("{}_scales", view.stored), one)?;
        let (rows, blocks) = (view.shape[0], view.shape[1] / BLOCK);
        let mut stored = Vec::with_capacity(rows * blocks * (CODES + 1));
        for row in (0..rows).map(|row| every.first + row * every.step) {
            for block in row * blocks..(row + 1) * blocks {
                stored.push(scales[block]);
                let codes = &codes[block * CODES..][..CODES];
                let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
                stored.extend((0..CODES).map(|j| code(j) | code(j + CODES) << 4));
            }
        }
        Ok(stored)
    }

    fn quantised(&self, view: &View, expert: usize, every: Every) -> Result<QuantisedMatrix> {
        let rows = self.block_rows(view, expert, every)?;
        let (outputs, inputs) = (view.shape[0], view.shape[1]);
        let row = rows.len() / outputs.max(1);
        QuantisedMatrix::read(BlockFormat::Mxfp4, outputs, inputs, |range| {
            Ok(Cow::Borrowed(&rows[range.start * row..range.end * row]))
        })
    }
}

/// Adds the pieces of one stack.
struct MakePieces<'a> {
    names: &'a ExpertNames,
    stack: &'a str,
    rows: usize,
    inputs: usize,
}

impl MakePieces<'_> {
    fn weight(&self, views: &mut Views, (expert, matrix): (usize, usize), piece: Piece) {
        let name = self.names.of(expert).into_iter().nth(matrix).unwrap_or_default();
        views.add(name, self.stack, vec![self.rows, self.inputs], piece);
    }

    fn bias(&self, views: &mut Views, (expert, matrix): (usize, usize), piece: Piece) {
        let name = self.names.biases_of(expert).into_iter().nth(matrix).unwrap_or_default();
        views.add(name, &format!("{}_bias", self.stack), vec![self.rows], piece);
    }
}

/// Every so manieth column of a matrix, as rows.
fn columns(matrix: &Tensor, count: usize, Every { first, step }: Every) -> Result<Tensor> {
    let (inputs, _) = matrix.dims2()?;
    let some = matrix.narrow(1, first, (count.max(1) - 1) * step + 1)?;
    if step == 1 {
        return Ok(some.t()?.force_contiguous()?);
    }
    let places: Vec<u32> = (0..count).map(|place| (place * step) as u32).collect();
    let places = Tensor::from_vec(places, count, matrix.device())?;
    let rows = some.contiguous()?.index_select(&places, 1)?.t()?.force_contiguous()?;
    Ok(rows.reshape((count, inputs))?)
}

impl WeightSource for Views {
    fn path(&self) -> &Path {
        self.source.path()
    }

    fn names(&self) -> Vec<String> {
        let own = self.source.names().into_iter().filter(|name| !self.stored.contains(name));
        own.chain(self.by_name.keys().cloned()).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match self.by_name.get(name) {
            Some(view) => Some(view.shape.clone()),
            None => self.source.shape(name),
        }
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let Some(view) = self.by_name.get(name) else { return self.source.load(name, dtype) };
        let View { stored, shape, piece } = view;
        let of_expert = |expert: usize| -> Result<Tensor> {
            Ok(self.source.load_rows(stored, expert..expert + 1, dtype)?.squeeze(0)?)
        };
        match *piece {
            Piece::Rows(first) => self.source.load_rows(stored, first..first + shape[0], dtype),
            Piece::Transposed(expert, every) => columns(&of_expert(expert)?, shape[0], every),
            Piece::Vector(expert, every) => {
                let row = of_expert(expert)?.unsqueeze(0)?;
                Ok(columns(&row, shape[0], every)?.reshape(shape[0])?)
            }
            Piece::Blocks(expert, every) => {
                let matrix = Matrix::Quantised(self.quantised(view, expert, every)?.into());
                Ok(matrix.to_dense()?.to_dtype(dtype)?)
            }
        }
    }

    fn stored_type(&self, name: &str) -> Option<&'static str> {
        match self.by_name.get(name) {
            Some(View { piece: Piece::Blocks(..), .. }) => Some(BlockFormat::Mxfp4.name()),
            Some(view) => self.source.stored_type(&view.stored),
            None => self.source.stored_type(name),
        }
    }

    fn load_quantised(&self, name: &str) -> Result<Option<QuantisedMatrix>> {
        match self.by_name.get(name) {
            Some(view) => match view.piece {
                Piece::Blocks(expert, every) => Ok(Some(self.quantised(view, expert, every)?)),
                _ => Ok(None),
            },
            None => self.source.load_quantised(name),
        }
    }

    fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        match self.by_name.get(name) {
            Some(View { stored, shape, piece: Piece::Rows(first) }) if rows.end <= shape[0] => {
                self.source.load_rows(stored, first + rows.start..first + rows.end, dtype)
            }
            Some(_) => rows_of(&self.load(name, dtype)?, rows),
            None => self.source.load_rows(name, rows, dtype),
        }
    }

    fn load_bytes(&self, name: &str, rows: Range<usize>) -> Result<Vec<u8>> {
        self.source.load_bytes(name, rows)
    }

    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        self.source.load_integers(name)
    }
}
