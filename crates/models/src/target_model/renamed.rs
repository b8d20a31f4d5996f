//! Files of families that name tensors in ways of their own, under the names of the common layer; experts that
//! stand in one tensor, one by one.

use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_kernels::matrix::QuantisedMatrix;

use crate::config::Architecture;
use crate::error::{ModelError, Result};
use crate::weights::WeightSource;

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

/// A source under the common names.
struct Renamed {
    source: Box<dyn WeightSource>,
    names: Names,
}

/// Where a tensor of ours is stored.
enum Stored {
    /// As a tensor of this name.
    Whole(String),
    /// As some rows of one matrix of a stack `[E, O, I]`: the expert, and the half of its rows, if it is cut.
    Expert { stack: String, expert: usize, half: Option<usize> },
}

/// The source under the common names: as it is where the family's are these.
pub(super) fn of(
    source: Box<dyn WeightSource>,
    architecture: Architecture,
) -> Box<dyn WeightSource> {
    let names = match architecture {
        Architecture::Lfm2 => LFM2,
        _ => &[],
    };
    let stacks = source.names().iter().any(|name| name.ends_with(GATE_UP));
    if names.is_empty() && !stacks {
        return source;
    }
    Box::new(Renamed { source, names })
}

/// Stacks of gate rows before up rows, `[E, 2I, H]`, and of down, `[E, H, I]`.
const GATE_UP: &str = ".experts.gate_up_proj";
const DOWN: &str = ".experts.down_proj";

impl Renamed {
    fn stored(&self, name: &str) -> Stored {
        if let Some(expert) = self.expert(name) {
            return expert;
        }
        let own = self.names.iter().find(|(ours, _)| name.contains(ours));
        let own = own.map(|(ours, theirs)| name.replacen(ours, theirs, 1));
        // Files that use the common names are read too.
        let own = own.filter(|own| self.source.shape(own).is_some());
        Stored::Whole(own.unwrap_or_else(|| name.to_owned()))
    }

    /// A matrix of an expert, if it stands in a stack.
    fn expert(&self, name: &str) -> Option<Stored> {
        if self.source.shape(name).is_some() {
            return None;
        }
        let (module, rest) = name.split_once(".experts.")?;
        let (expert, matrix) = rest.split_once('.')?;
        let (stack, half) = match matrix {
            "gate_proj.weight" => (GATE_UP, Some(0)),
            "up_proj.weight" => (GATE_UP, Some(1)),
            "down_proj.weight" => (DOWN, None),
            _ => return None,
        };
        let (stack, expert) = (format!("{module}{stack}"), expert.parse().ok()?);
        self.source.shape(&stack)?;
        Some(Stored::Expert { stack, expert, half })
    }
}

impl WeightSource for Renamed {
    fn path(&self) -> &Path {
        self.source.path()
    }

    /// Every expert counts, as where they stand one by one.
    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for name in self.source.names() {
            let stack = [GATE_UP, DOWN].into_iter().find(|stack| name.ends_with(stack));
            let shape = stack.and_then(|_| self.source.shape(&name));
            if let (Some(stack), Some(&[experts, outputs, inputs])) = (stack, shape.as_deref()) {
                let module = name[..name.len() - stack.len()].to_owned();
                // No more than the tensor has values, whatever its header says.
                let experts = experts.min(experts.saturating_mul(outputs).saturating_mul(inputs));
                let matrices: &[_] = if stack == GATE_UP { &["gate", "up"] } else { &["down"] };
                names.extend((0..experts).flat_map(|expert| {
                    let of = |matrix| format!("{module}.experts.{expert}.{matrix}_proj.weight");
                    matrices.iter().map(of).collect::<Vec<_>>()
                }));
            } else {
                let ours = self.names.iter().find(|(_, theirs)| name.contains(theirs));
                let ours = ours.map(|(ours, theirs)| name.replacen(theirs, ours, 1));
                names.push(ours.unwrap_or(name));
            }
        }
        names
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let (stack, expert, half) = match self.stored(name) {
            Stored::Whole(stored) => return self.source.shape(&stored),
            Stored::Expert { stack, expert, half } => (stack, expert, half),
        };
        match (self.source.shape(&stack)?.as_slice(), half) {
            (&[experts, outputs, inputs], None) if expert < experts => Some(vec![outputs, inputs]),
            (&[experts, outputs, inputs], Some(_))
                if expert < experts && outputs.is_multiple_of(2) =>
            {
                Some(vec![outputs / 2, inputs])
            }
            _ => None,
        }
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let (stack, expert, half) = match self.stored(name) {
            Stored::Whole(stored) => return self.source.load(&stored, dtype),
            Stored::Expert { stack, expert, half } => (stack, expert, half),
        };
        let shape = self.shape(name).ok_or_else(|| {
            ModelError::invalid(self.path(), format!("tensor `{stack}` holds no `{name}`"))
        })?;
        let rows = self.source.load_rows(&stack, expert..expert + 1, dtype)?.squeeze(0)?;
        let first = half.unwrap_or(0) * shape[0];
        Ok(rows.narrow(0, first, shape[0])?.force_contiguous()?)
    }

    fn stored_type(&self, name: &str) -> Option<&'static str> {
        match self.stored(name) {
            Stored::Whole(stored) => self.source.stored_type(&stored),
            Stored::Expert { stack, .. } => self.source.stored_type(&stack),
        }
    }

    fn load_quantised(&self, name: &str) -> Result<Option<QuantisedMatrix>> {
        match self.stored(name) {
            Stored::Whole(stored) => self.source.load_quantised(&stored),
            Stored::Expert { .. } => Ok(None),
        }
    }

    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        match self.stored(name) {
            Stored::Whole(stored) => self.source.load_integers(&stored),
            Stored::Expert { stack, .. } => self.source.load_integers(&stack),
        }
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
        }
        assert!(load(&name(3, "gate")).is_err());
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
