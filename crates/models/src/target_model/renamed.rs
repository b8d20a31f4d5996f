//! Files of families that name tensors in ways of their own, under the names of the common layer; experts that
//! stand in one tensor, one by one.

use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_kernels::matrix::QuantisedMatrix;

use super::names;
use crate::config::Architecture;
use crate::error::{ModelError, Result};
use crate::weights::aliases::{Aliased, Aliases};
use crate::weights::{WeightSource, rows_of};

/// A family's names of modules: ours, the file's.
type Names = &'static [(&'static str, &'static str)];

/// LFM2.
const LFM2: Names = &[
    ("model.norm.", "model.embedding_norm."),
    (".input_layernorm.", ".operator_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".mlp.gate_proj.", ".feed_forward.w1."),
    (".mlp.up_proj.", ".feed_forward.w3."),
    (".mlp.down_proj.", ".feed_forward.w2."),
    (".self_attn.o_proj.", ".self_attn.out_proj."),
    (".self_attn.q_norm.", ".self_attn.q_layernorm."),
    (".self_attn.k_norm.", ".self_attn.k_layernorm."),
];

/// Mixtral, as newer writers have it.
const MIXTRAL: Names = &[(".block_sparse_moe.", ".mlp.")];

/// Stacks of gate rows before up rows, `[E, 2I, H]`, and of down, `[E, H, I]`.
const GATE_UP: &str = ".experts.gate_up_proj";
const DOWN: &str = ".experts.down_proj";

/// The source under the common names: as it is where the family's are these.
pub(super) fn of(
    source: Box<dyn WeightSource>,
    architecture: Architecture,
) -> Box<dyn WeightSource> {
    let stacks = source.names().iter().any(|name| name.ends_with(GATE_UP));
    let source: Box<dyn WeightSource> = match architecture {
        Architecture::Lfm2 => Box::new(Aliased(Spelling { source, names: LFM2 })),
        Architecture::Mixtral => Box::new(Aliased(Spelling { source, names: MIXTRAL })),
        _ => source,
    };
    if !stacks {
        return source;
    }
    let matrices = names::expert_matrices(architecture);
    Box::new(Stacks { source, matrices })
}

/// Modules under the common names.
struct Spelling {
    source: Box<dyn WeightSource>,
    names: Names,
}

impl Aliases for Spelling {
    fn source(&self) -> &dyn WeightSource {
        self.source.as_ref()
    }

    fn stored(&self, name: &str) -> String {
        let own = self.names.iter().find(|(ours, _)| name.contains(ours));
        let own = own.map(|(ours, theirs)| name.replacen(ours, theirs, 1));
        // Files that use the common names are read too.
        let own = own.filter(|own| self.source.shape(own).is_some());
        own.unwrap_or_else(|| name.to_owned())
    }

    fn names(&self) -> Vec<String> {
        let spelled = |name: String| {
            let ours = self.names.iter().find(|(_, theirs)| name.contains(theirs));
            ours.map(|(ours, theirs)| name.replacen(theirs, ours, 1)).unwrap_or(name)
        };
        self.source.names().into_iter().map(spelled).collect()
    }
}

/// Experts that stand in stacks, one by one.
struct Stacks {
    source: Box<dyn WeightSource>,
    /// How the family calls an expert's gate, up and down.
    matrices: [&'static str; 3],
}

/// Some rows of one matrix of a stack `[E, O, I]`: the expert, and the half of its rows, if it is cut.
struct Expert {
    stack: String,
    index: usize,
    half: Option<usize>,
}

impl Stacks {
    /// A matrix of an expert, if it stands in a stack.
    fn expert(&self, name: &str) -> Option<Expert> {
        if self.source.shape(name).is_some() {
            return None;
        }
        let (module, rest) = name.split_once(".experts.")?;
        let (expert, matrix) = rest.split_once('.')?;
        let matrix = matrix.strip_suffix(".weight")?;
        let place = self.matrices.iter().position(|own| *own == matrix)?;
        let (stack, half) = if place < 2 { (GATE_UP, Some(place)) } else { (DOWN, None) };
        let (stack, index) = (format!("{module}{stack}"), expert.parse().ok()?);
        self.source.shape(&stack)?;
        Some(Expert { stack, index, half })
    }

    /// Outputs and inputs of an expert's matrix.
    fn size(&self, Expert { stack, index, half }: &Expert) -> Option<[usize; 2]> {
        let &[experts, outputs, inputs] = self.source.shape(stack)?.as_slice() else { return None };
        let parts = if half.is_some() { 2 } else { 1 };
        let is_there = *index < experts && outputs.is_multiple_of(parts);
        is_there.then_some([outputs / parts, inputs])
    }
}

impl WeightSource for Stacks {
    fn path(&self) -> &Path {
        self.source.path()
    }

    /// Every expert counts, as where they stand one by one.
    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for name in self.source.names() {
            let stack = [GATE_UP, DOWN].into_iter().find(|stack| name.ends_with(stack));
            let shape = stack.and_then(|_| self.source.shape(&name));
            let (Some(stack), Some(&[experts, outputs, inputs])) = (stack, shape.as_deref()) else {
                names.push(name);
                continue;
            };
            let module = &name[..name.len() - stack.len()];
            // No more than the tensor has values, whatever its header says.
            let experts = experts.min(experts.saturating_mul(outputs).saturating_mul(inputs));
            let (halves, whole) = self.matrices.split_at(2);
            let matrices = if stack == GATE_UP { halves } else { whole };
            for expert in 0..experts {
                let of = |matrix: &&str| format!("{module}.experts.{expert}.{matrix}.weight");
                names.extend(matrices.iter().map(of));
            }
        }
        names
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match self.expert(name) {
            Some(expert) => self.size(&expert).map(Vec::from),
            None => self.source.shape(name),
        }
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let Some(expert) = self.expert(name) else { return self.source.load(name, dtype) };
        let Expert { stack, index, half } = &expert;
        let [outputs, _] = self.size(&expert).ok_or_else(|| {
            ModelError::invalid(self.path(), format!("tensor `{stack}` holds no `{name}`"))
        })?;
        let rows = self.source.load_rows(stack, *index..index + 1, dtype)?.squeeze(0)?;
        Ok(rows.narrow(0, half.unwrap_or(0) * outputs, outputs)?.force_contiguous()?)
    }

    fn stored_type(&self, name: &str) -> Option<&'static str> {
        let stack = self.expert(name).map(|expert| expert.stack);
        self.source.stored_type(stack.as_deref().unwrap_or(name))
    }

    fn load_quantised(&self, name: &str) -> Result<Option<QuantisedMatrix>> {
        if self.expert(name).is_some() { Ok(None) } else { self.source.load_quantised(name) }
    }

    fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        match self.expert(name) {
            Some(_) => rows_of(&self.load(name, dtype)?, rows),
            None => self.source.load_rows(name, rows, dtype),
        }
    }

    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        self.source.load_integers(name)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::weights::memory::MemorySource;

    #[test]
    fn experts_of_a_stack_are_read_one_by_one() {
        let values: Vec<f32> = (0..3 * 4 * 5).map(|x| x as f32).collect();
        let gate_up = Tensor::from_vec(values, (3, 4, 5), &Device::Cpu).expect("stack");
        let down = Tensor::zeros((3, 5, 2), DType::F32, &Device::Cpu).expect("stack");
        let tensors = [("gate_up_proj", &gate_up), ("down_proj", &down)];
        let named = |(name, tensor): (&str, &Tensor)| (format!("m.experts.{name}"), tensor.clone());
        let source = MemorySource::new(tensors.map(named));
        let source = of(Box::new(source), Architecture::Qwen35Moe);
        let name = |expert: usize, matrix: &str| format!("m.experts.{expert}.{matrix}_proj.weight");
        assert_eq!(source.names().len(), 9);
        assert_eq!(source.shape(&name(2, "up")), Some(vec![2, 5]));
        assert_eq!(source.shape(&name(3, "up")), None);
        let load = |name: &str| source.load(name, DType::F32).and_then(|t| Ok(t.to_vec2::<f32>()?));
        for expert in 0..3 {
            let rows = gate_up.get(expert).and_then(|rows| rows.to_vec2::<f32>()).expect("rows");
            assert_eq!(load(&name(expert, "gate")).expect("gate"), rows[..2]);
            assert_eq!(load(&name(expert, "up")).expect("up"), rows[2..]);
            assert_eq!(load(&name(expert, "down")).expect("down").len(), 5);
            let second = source.load_rows(&name(expert, "up"), 1..2, DType::F32);
            assert_eq!(second.and_then(|t| Ok(t.to_vec2::<f32>()?)).expect("a row"), rows[3..]);
        }
        assert!(load(&name(3, "gate")).is_err());
    }

    #[test]
    fn a_mixtral_s_experts_are_read_from_stacks_and_one_by_one() {
        let zeros =
            |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("zeros");
        let named = |name: &str, shape: &[usize]| (format!("model.layers.0.{name}"), zeros(shape));
        let stacks = MemorySource::new([
            named("mlp.gate.weight", &[2, 5]),
            named("mlp.experts.gate_up_proj", &[2, 6, 5]),
            named("mlp.experts.down_proj", &[2, 5, 3]),
        ]);
        let expert = |matrix: &str| format!("block_sparse_moe.experts.1.{matrix}.weight");
        let published = MemorySource::new([
            named("block_sparse_moe.gate.weight", &[2, 5]),
            named(&expert("w1"), &[3, 5]),
            named(&expert("w3"), &[3, 5]),
            named(&expert("w2"), &[5, 3]),
        ]);
        for source in [stacks, published] {
            let source = of(Box::new(source), Architecture::Mixtral);
            let names = names::experts(Architecture::Mixtral, 0);
            let [gate, up, down] = names.of(1).map(|name| source.shape(&name));
            assert_eq!((gate, up, down), (Some(vec![3, 5]), Some(vec![3, 5]), Some(vec![5, 3])));
            assert_eq!(source.shape(&names.router()), Some(vec![2, 5]));
            let listed = source.names();
            let asked = names.of(1).into_iter().chain([names.router()]);
            assert!(asked.into_iter().all(|name| listed.contains(&name)), "{listed:?}");
        }
    }

    #[test]
    fn both_spellings_of_a_family_are_read() {
        let norm = |name: &str| {
            (name.to_owned(), Tensor::zeros(4, DType::F32, &Device::Cpu).expect("norm"))
        };
        for names in [
            ["model.embedding_norm.weight", "model.layers.0.operator_norm.weight"],
            ["model.norm.weight", "model.layers.0.input_layernorm.weight"],
        ] {
            let source = of(Box::new(MemorySource::new(names.map(norm))), Architecture::Lfm2);
            let mut ours = source.names();
            ours.sort();
            assert_eq!(ours, ["model.layers.0.input_layernorm.weight", "model.norm.weight"]);
            assert!(ours.iter().all(|name| source.shape(name) == Some(vec![4])));
        }
    }
}
