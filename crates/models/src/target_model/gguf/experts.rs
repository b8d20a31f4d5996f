//! Published names of the tensors of a mixture of experts in a GGUF file.

use super::source::{Part, Stored};
use crate::config::TargetConfig;
use crate::target_model::names::{ExpertNames, experts};
use crate::weights::gguf::header::StoredTensor;

/// What a tensor of a layer's experts holds, by published name.
pub(super) fn of_experts(
    config: &TargetConfig,
    layer: usize,
    tensor: Tensor,
    (name, info): (&str, &StoredTensor),
) -> Result<Vec<(String, Stored)>, String> {
    let Some(sizes) = &config.experts else {
        return Err(format!("tensor `{name}` of a model without experts"));
    };
    let ours = experts(config.architecture, layer);
    let stored = |part| Stored { name: name.to_owned(), part };
    let expected = |what: &str| {
        let (dims, count) = (&info.shape, sizes.num_experts);
        Err(format!("tensor `{name}` has shape {dims:?}, {what} of {count} experts expected"))
    };
    let whole = |published: String| Ok(vec![(published, stored(Part::Whole))]);
    match tensor {
        Tensor::Router => whole(ours.router()),
        Tensor::RouterBias => {
            let bias = ours.router_bias(&config.parts.router);
            Ok(bias.into_iter().map(|bias| (bias, stored(Part::Whole))).collect())
        }
        Tensor::Biases(matrix) => match info.shape.as_slice() {
            &[count, _] if count == sizes.num_experts => {
                let of =
                    |expert| ours.biases_of(expert).into_iter().nth(matrix).unwrap_or_default();
                Ok((0..count).map(|expert| (of(expert), stored(Part::Expert(expert)))).collect())
            }
            _ => expected("biases"),
        },
        Tensor::Shared(matrix) => whole(format!("{}.{matrix}.weight", ours.shared())),
        Tensor::SharedGate => {
            let part = if info.shape.len() == 1 { Part::Row } else { Part::Whole };
            Ok(vec![(format!("{}_gate.weight", ours.shared()), stored(part))])
        }
        Tensor::Stack(matrix) => match info.shape.as_slice() {
            &[count, _, _] if count == sizes.num_experts => {
                Ok(stack(&ours, matrix, count, name).collect())
            }
            _ => expected("matrices"),
        },
        Tensor::GateUpStack => match info.shape.as_slice() {
            &[count, rows, _] if count == sizes.num_experts && rows.is_multiple_of(2) => {
                let halves = |expert: usize| {
                    let [gate, up, _] = ours.of(expert);
                    let half = |first| Part::RowsOfOne { index: expert, first, count: rows / 2 };
                    [(gate, stored(half(0))), (up, stored(half(rows / 2)))]
                };
                Ok((0..count).flat_map(halves).collect())
            }
            _ => expected("gate and up matrices"),
        },
    }
}

/// The experts of a stack.
fn stack<'a>(
    names: &'a ExpertNames,
    matrix: usize,
    count: usize,
    stored: &'a str,
) -> impl Iterator<Item = (String, Stored)> + 'a {
    (0..count).map(move |expert| {
        let [gate, up, down] = names.of(expert);
        let published = [gate, up, down].into_iter().nth(matrix).unwrap_or_default();
        (published, Stored { name: stored.to_owned(), part: Part::Expert(expert) })
    })
}

/// A tensor of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tensor {
    Router,
    RouterBias,
    /// Biases of gate, up or down of every expert.
    Biases(usize),
    /// Gate, up or down (0, 1, 2) of every expert.
    Stack(usize),
    /// Gate and up of every expert, as rows of one matrix.
    GateUpStack,
    /// A matrix of the expert that every token visits.
    Shared(&'static str),
    SharedGate,
}

/// Layer and kind of an experts' tensor.
pub(super) fn expert_tensor(name: &str) -> Option<(usize, Tensor)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let stacks = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
    if let Some(module) = rest.strip_suffix(".bias") {
        let tensor = match stacks.iter().position(|stack| *stack == module) {
            Some(matrix) => Tensor::Biases(matrix),
            None if matches!(module, "ffn_gate_inp" | "exp_probs_b") => Tensor::RouterBias,
            None => return None,
        };
        return Some((layer.parse().ok()?, tensor));
    }
    let tensor = match rest.strip_suffix(".weight")? {
        "ffn_gate_inp" => Tensor::Router,
        "ffn_gate_exps" => Tensor::Stack(0),
        "ffn_up_exps" => Tensor::Stack(1),
        "ffn_down_exps" => Tensor::Stack(2),
        "ffn_gate_up_exps" => Tensor::GateUpStack,
        "ffn_gate_shexp" => Tensor::Shared("gate_proj"),
        "ffn_up_shexp" => Tensor::Shared("up_proj"),
        "ffn_down_shexp" => Tensor::Shared("down_proj"),
        "ffn_gate_inp_shexp" => Tensor::SharedGate,
        _ => return None,
    };
    Some((layer.parse().ok()?, tensor))
}
