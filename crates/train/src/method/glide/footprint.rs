//! What a GLIDE layer takes: the layer and its loss.

use longdraft_features::TeacherKind;
use longdraft_models::draft::glide::{FinalNorm, GlideConfig, tensor_specs};
use longdraft_models::target_model::Tap;
use longdraft_models::weights::TensorSpec;

use crate::footprint::loss::{Against, chunk_bytes, row_bytes};
use crate::footprint::{
    F32, Footprint, INPUT_PASSES, Layer, Operations, Row, RowMemory, matrix_values, tensor_values,
};

/// A GLIDE layer under a teacher.
#[derive(Debug, Clone)]
pub(super) struct GlideFootprint {
    pub(super) sizes: GlideConfig,
    pub(super) teacher: TeacherKind,
}

impl Footprint for GlideFootprint {
    fn specs(&self) -> Vec<TensorSpec> {
        tensor_specs(&self.sizes)
    }

    fn taps(&self) -> Vec<Tap> {
        vec![Tap::LastKv]
    }

    fn teacher(&self) -> TeacherKind {
        self.teacher
    }

    fn row_memory(&self, row: &Row) -> RowMemory {
        let against = match self.teacher {
            TeacherKind::None => Against::Labels,
            TeacherKind::TopK(_) | TeacherKind::EveryTokenTopK(_) => Against::Entries,
            TeacherKind::Full | TeacherKind::EveryToken => Against::Teacher,
        };
        row_memory(&self.sizes, row, against)
    }

    /// Its matrices forward and back, `6` for every value, attention over `W` own keys and half of the
    /// target's, seven products in all of which keys that do not train save two backward; the head
    /// forward, back, and for the teacher, `2 V H` each.
    fn operations(&self, row: &Row, document_tokens: u64) -> Operations {
        let config = &self.sizes;
        let query = config.query_size() as f64;
        let half = document_tokens as f64 / 2.0;
        let own = (config.self_window as f64 + 1.0).min(half);
        let (heads, distributions) = if row.teacher_logits { (3.0, 2.0) } else { (2.0, 1.0) };
        let vocabulary = proposed(config);
        let values = matrix_values(&self.specs());
        Operations {
            forward: 2.0 * values,
            backward: 4.0 * values,
            loss: heads * 2.0 * (vocabulary * config.hidden_size) as f64,
            attention: 2.0 * query * 2.0 * (own + half),
            attention_backward: 2.0 * query * (5.0 * own + 3.0 * half),
            logits: distributions * vocabulary as f64,
            chunk: row.chunk(vocabulary as u64),
            passes: 1.0,
        }
    }
}

/// Rows of the head that are read.
fn proposed(config: &GlideConfig) -> usize {
    config.draft_vocab_size.unwrap_or(config.vocab_size)
}

/// Widths of the layer.
fn layer(config: &GlideConfig) -> Layer {
    Layer {
        width: config.hidden_size as u64,
        read: config.hidden_size as u64,
        query: config.query_size() as u64,
        kv: config.kv_size() as u64,
        heads: config.num_attention_heads as u64,
        inner: config.intermediate_size as u64,
    }
}

/// Gradients under way, at most. The MLP comes first; its own attention comes last, when all but the matrices before
/// it have gradients, on an accelerator all but that of the queries.
fn gradients(layer: &Layer, row: &Row, trained: u64) -> u64 {
    let (tokens, keys) = (row.tokens, row.tokens * row.parts);
    let attending = trained - layer.projections();
    if !row.is_accelerator() {
        let in_attention = attending + layer.attention_gradients(row, tokens, keys, 0);
        return layer.mlp_gradients(tokens).max(in_attention);
    }
    let in_mlp = layer.width * layer.inner + layer.gated_gradients(tokens);
    let in_attention = attending + layer.attended_gradients(row, tokens, keys, 0);
    let in_queries = trained - layer.read * layer.query + layer.queried_gradients(tokens);
    in_mlp.max(in_attention).max(in_queries)
}

/// Memory of a training row. Keys and values of the target belong to the features.
fn row_memory(config: &GlideConfig, row: &Row, against: Against) -> RowMemory {
    let (layer, tokens, vocabulary) = (layer(config), row.tokens, proposed(config) as u64);
    let width = layer.width;
    let trained = tensor_values(&tensor_specs(&GlideConfig { compat: None, ..config.clone() }));
    let has_norm = u64::from(config.final_norm != FinalNorm::None);
    let gathered = if row.parts > 1 { layer.key_values(row) * row.parts } else { 0 };
    let of_token = [
        width,                           // embeddings
        layer.token_values(row),         // attention to its own keys, MLP
        row.input_values(layer.inner),   // product of gate and up
        row.input_values(width),         // norm before attention to the target's keys
        width + layer.query_values(row), // sum of it
        gathered,                        // keys and values of all parts of the row
        has_norm * width,                // final norm
        config.head_dim as u64,          // angles
    ];
    // The state that the head reads with its gradient and its index.
    let of_learned = 2 * width + 1;
    let kept = tokens * of_token.iter().sum::<u64>() + row.learned * of_learned + 1;
    let of_head = (row.chunk(vocabulary), width, vocabulary);
    let packed = row.packed_bytes(&INPUT_PASSES, &[of_head]);
    RowMemory {
        activations: F32 * kept,
        chunks: chunk_bytes(row, width, vocabulary, against),
        backward: F32 * gradients(&layer, row, trained).max(trained),
        left: F32 * trained,
        results: row_bytes(row.learned),
        packed: layer.packed_bytes(row, tokens).max(packed),
        weight_gradients: F32 * trained,
    }
}

#[cfg(test)]
mod tests {
    use longdraft_models::published::published_config;

    use super::*;
    use crate::footprint::tests::{on_cpu, on_gpu};

    fn memory(config: &GlideConfig, row: &Row) -> RowMemory {
        row_memory(config, row, Against::Teacher)
    }

    #[test]
    fn the_graph_keeps_what_the_formula_says() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let config = GlideConfig::for_target(&target, None);
        let row = on_cpu(100, 1);
        let (h, q, kv, i) = (4096, 32 * 128, 8 * 128, 12288);
        let values = 9 * h + 4 * q + 2 * kv + 3 * i + 128 + 2 * 32;
        let memory_of_row = memory(&config, &row);
        // The loss itself is a number.
        assert_eq!(memory_of_row.activations, 100 * (4 * values + 20) + 4);
        let trained = tensor_values(&tensor_specs(&config));
        assert_eq!(memory_of_row.weight_gradients, 4 * trained);
        assert_eq!(memory_of_row.left, 4 * trained);
        let gpu = on_gpu(100);
        let single = Row { half_products: false, ..gpu };
        assert_eq!(memory(&config, &single).activations, memory_of_row.activations);
        // Halves: three norms, the product, queries of both, keys and values.
        let less = memory_of_row.activations - memory(&config, &gpu).activations;
        assert_eq!(less, 100 * 2 * (3 * h + i + 2 * q + 2 * kv));
        let normed = GlideConfig { final_norm: FinalNorm::Trained, ..config };
        let with_norm = memory(&normed, &row).activations;
        assert_eq!(with_norm - memory_of_row.activations, 4 * 100 * h);
    }
}
