//! What the kernels of a step compute and move on a GPU, as terms of its roofline.

use longdraft_features::FeatureMode;
use longdraft_models::TargetConfig;
use longdraft_models::target_model::Layers;
use longdraft_train::footprint::{F32, Operations, RowMemory};

use crate::operations::OfTarget;
use crate::optimizer::Parameters;
use crate::roofline::{Kernel, Part, Term};
use crate::target::ForwardPass;
use crate::workload::Workload;

/// Kernels of a layer of the target: 395 in a pass of 30 layers.
const OF_LAYER: f64 = 13.0;

/// Kernels for each tensor of the draft, forward and backward; and for each chunk of the loss.
const OF_TENSOR: [f64; 2] = [2.0, 4.0];
const OF_CHUNK: f64 = 12.0;

/// Bytes that each logit is read and written: in f32 by the product, by the loss, and as a gradient of 16 bits.
const OF_LOGIT: f64 = 10.0;

/// Rows of a tile of products.
const TILE: u64 = 128;

/// How often an activation that is kept passes through memory: written and read; read again, with its gradient, which is
/// written before.
const OF_ACTIVATIONS: [f64; 2] = [2.0, 3.0];

/// Bytes that adding a row's gradient to that of the rows before reads and writes, for each weight.
const OF_SUM: f64 = 12.0;

/// A pass of the target over some tokens.
pub(crate) struct TargetPass<'a> {
    pub(crate) config: &'a TargetConfig,
    pub(crate) forward: ForwardPass,
    /// Of a token.
    pub(crate) work: OfTarget,
    /// Bytes of the layers' weights.
    pub(crate) weights: u64,
    /// Keys that attention reads.
    pub(crate) keys: u64,
    /// Whether factors of products have 16 bits.
    pub(crate) half: bool,
}

impl TargetPass<'_> {
    /// Of a rank that shares its layers with others its part: weights are read once, so are queries, keys and values.
    pub(crate) fn terms(&self) -> [Term; 3] {
        let Self { config, forward, work, .. } = self;
        let (tokens, tensor) = (forward.tokens as f64, forward.tensor as f64);
        let layers = config.num_hidden_layers as f64;
        let heads = 2 * config.query_size() as u64 * forward.tokens
            + 2 * config.kv_size() as u64 * self.keys;
        let heads = (forward.value_bytes() * heads) as f64 * config.attention_layers() as f64;
        let of = |kernel, operations: f64, bytes: f64, starts: f64| Term {
            operations: operations * tokens / tensor,
            bytes,
            starts,
            ..self.term(kernel)
        };
        [
            of(Kernel::Product, work.products, self.weights as f64, OF_LAYER * layers),
            of(Kernel::Attention, work.attention, heads / tensor, 0.0),
            of(Kernel::Memory, 0.0, tokens * forward.moved_bytes(config) as f64, 0.0),
        ]
    }

    fn term(&self, kernel: Kernel) -> Term {
        Term { half: self.half, ..Term::new(Part::Target, kernel) }
    }
}

impl Workload {
    /// Terms of a step of the rank with most rows.
    pub(crate) fn terms(
        &self,
        (of_target, of_draft): (OfTarget, &Operations),
        row: &RowMemory,
        parameters: &Parameters,
    ) -> Vec<Term> {
        let half = self.layout.has_half_products();
        let times = |rows: u64, term: Term| Term {
            half,
            operations: rows as f64 * term.operations,
            bytes: rows as f64 * term.bytes,
            starts: rows as f64 * term.starts,
            ..term
        };
        let mut terms = Vec::new();
        if self.features.store().is_none() {
            let pass = TargetPass {
                config: &self.target,
                forward: self.forward_pass(),
                work: of_target,
                weights: self.layers_bytes(self.layers) - self.layers_bytes(Layers::None),
                keys: self.row_tokens,
                half,
            };
            terms.extend(pass.terms().map(|term| times(self.run_rows(), term)));
        }
        let of_rows = self.draft_terms(of_draft, row, parameters);
        terms.extend(of_rows.into_iter().map(|term| times(self.own_rows(), term)));
        let more = self.own_rows().saturating_sub(1) as f64;
        let sums = more * OF_SUM * parameters.trained as f64;
        terms.push(Term { bytes: sums, ..Term::new(Part::Sums, Kernel::Memory) });
        terms.push(parameters.update_term(self.places()));
        let uploads = if matches!(self.features, FeatureMode::Stored(_)) {
            self.own_rows() * self.record_bytes()
        } else {
            0
        };
        terms.push(Term { bytes: uploads as f64, ..Term::new(Part::Upload, Kernel::Upload) });
        terms
    }

    /// Those of a row in the draft and its loss.
    fn draft_terms(
        &self,
        work: &Operations,
        row: &RowMemory,
        parameters: &Parameters,
    ) -> Vec<Term> {
        let tokens = self.row().tokens as f64;
        let of = |part, kernel, operations: f64| Term {
            operations: operations * tokens,
            ..Term::new(part, kernel)
        };
        let [forward, backward] = [Part::Forward, Part::Backward];
        let starts = OF_TENSOR.map(|kernels| kernels * work.passes * parameters.sizes.len() as f64);
        // Weights are read as factors; their gradients are added to those of passes before.
        let factor = if self.layout.has_half_products() { 2.0 } else { F32 as f64 };
        let read = work.passes * factor * parameters.trained as f64;
        let added = work.passes * 2.0 * F32 as f64 * parameters.trained as f64;
        let moved = OF_ACTIVATIONS.map(|times| times * row.activations as f64);
        let logits = work.logits * tokens;
        let (rows, waste) = match work.chunk {
            0 => (tokens.max(1.0), 1.0),
            rows => (rows as f64, (rows.div_ceil(TILE) * TILE) as f64 / rows as f64),
        };
        // Each product of a chunk reads the whole head, `2` operations a row for every value.
        let heads = factor * work.loss * tokens / (2.0 * rows);
        let chunks = OF_CHUNK * (logits / self.row().chunk_logits as f64).ceil();
        vec![
            Term { bytes: read, starts: starts[0], ..of(forward, Kernel::Product, work.forward) },
            of(forward, Kernel::Attention, work.attention),
            Term { bytes: moved[0], ..of(forward, Kernel::Memory, 0.0) },
            Term {
                waste,
                bytes: heads,
                starts: chunks,
                ..of(Part::Loss, Kernel::Product, work.loss)
            },
            Term { bytes: OF_LOGIT * logits, ..of(Part::Loss, Kernel::Memory, 0.0) },
            Term {
                bytes: read + added,
                starts: starts[1],
                ..of(backward, Kernel::Product, work.backward)
            },
            of(backward, Kernel::AttentionBackward, work.attention_backward),
            Term { bytes: moved[1], ..of(backward, Kernel::Memory, 0.0) },
        ]
    }
}

#[cfg(test)]
mod tests;
