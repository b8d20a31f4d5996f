//! What a GLIDE layer takes: the layer's graph and its loss.

use longdraft_features::TeacherKind;
use longdraft_kernels::linear::Pass;
use longdraft_models::draft::glide::{FinalNorm, GlideConfig, tensor_specs};
use longdraft_models::target_model::Tap;
use longdraft_models::weights::TensorSpec;

use crate::footprint::graph::{Graph, Matrix};
use crate::footprint::loss::{chunk_bytes, row_bytes};
use crate::footprint::{Footprint, Row, RowMemory, matrix_values};

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
        row_memory(&self.sizes, row)
    }

    /// Its matrices forward and back, `6` for every value, attention over `W` own keys and half of the
    /// target's, seven products in all of which keys that do not train save one and a half; the head
    /// forward, back, and for the teacher, `2 V H` each.
    fn operations(&self, row: &Row, row_tokens: u64) -> f64 {
        let config = &self.sizes;
        let query = config.query_size() as f64;
        let own = (config.self_window as f64 + 1.0).min(row_tokens as f64 / 2.0);
        let attention = 2.0 * query * (7.0 * own + 5.0 * row_tokens as f64 / 2.0);
        let heads = if row.teacher_logits { 3.0 } else { 2.0 };
        let head = (proposed(config) * config.hidden_size) as f64;
        6.0 * matrix_values(&self.specs()) + attention + heads * 2.0 * head
    }
}

/// Rows of the head that are read.
fn proposed(config: &GlideConfig) -> usize {
    config.draft_vocab_size.unwrap_or(config.vocab_size)
}

/// Memory of a training row.
///
/// The graph keeps, of each of `T` tokens, in f32 values: 12 states of width `H` (embeddings, three
/// norms, two outputs of attention, `h1`, `h2`, MLP, `h3`, what the head reads and its gradient), six
/// of width `N·D` (queries before and after rotation, what attention returns, in both branches), three
/// of width `K·D` (keys before and after rotation, values), three of width `I`, `D` angles and `2 N`
/// log-sum-exps; and 20 bytes of ranges and indices. A final norm adds one state. Keys and values of
/// the target belong to the features.
fn row_memory(config: &GlideConfig, row: &Row) -> RowMemory {
    let mut graph = Graph::new(row.threads);
    let hidden = layer(&mut graph, config, row);
    let learned = graph.select(hidden, row.learned);
    let vocabulary = proposed(config) as u64;
    let head = graph.given(vocabulary, learned.width);
    let loss = graph.loss(&[learned, head]);
    for pass in [Pass::Forward, Pass::InputGradient] {
        graph.pack(pass, (row.chunk(vocabulary), learned.width, vocabulary));
    }
    let chunks = chunk_bytes(row, learned.width, vocabulary, row.teacher_logits);
    RowMemory::of(&graph, loss, chunks, row_bytes(row.learned))
}

fn layer(graph: &mut Graph, config: &GlideConfig, row: &Row) -> Matrix {
    let (width, inner) = (config.hidden_size as u64, config.intermediate_size as u64);
    let (query, kv) = (config.query_size() as u64, config.kv_size() as u64);
    let (heads, tokens) = (config.num_attention_heads as u64, row.tokens);
    let embeddings = graph.constant(tokens, width);
    let angles = graph.angles(tokens, config.head_dim as u64);

    let normed = graph.norm(embeddings, Some("input_layernorm"));
    let k = graph.affine(normed, ["self.k", "self.k.bias"], kv);
    let k = graph.rotate(k, angles);
    let v = graph.affine(normed, ["self.v", "self.v.bias"], kv);
    let v = graph.view(v);
    let keys = [k, v].map(|part| graph.gathered(part, row.parts));
    let q = graph.affine(normed, ["self.q", "self.q.bias"], query);
    let q = graph.rotate(q, angles);
    let attended = graph.attention(q, keys, heads, 0);
    let attended = graph.linear(attended, "self.o", width);
    let h1 = graph.add(embeddings, attended);

    let normed = graph.norm(h1, Some("post_self_attention_layernorm"));
    let q = graph.affine(normed, ["cross.q", "cross.q.bias"], query);
    let q = graph.rotate(q, angles);
    let target_keys = [(); 2].map(|()| graph.given(tokens * row.parts, kv));
    let attended = graph.attention(q, target_keys, heads, 0);
    let attended = graph.linear(attended, "cross.o", width);
    let h2 = graph.add(h1, attended);

    let normed = graph.norm(h2, Some("post_cross_attention_layernorm"));
    let project = |graph: &mut Graph, x, names: [&str; 2], outputs| {
        if config.mlp_bias {
            graph.affine(x, names, outputs)
        } else {
            graph.linear(x, names[0], outputs)
        }
    };
    let gate = project(graph, normed, ["gate", "gate.bias"], inner);
    let up = project(graph, normed, ["up", "up.bias"], inner);
    let gated = graph.swiglu(gate, up);
    let mlp = project(graph, gated, ["down", "down.bias"], width);
    let h3 = graph.add(h2, mlp);
    match config.final_norm {
        FinalNorm::None => h3,
        FinalNorm::Trained => graph.norm(h3, Some("final_layernorm")),
        FinalNorm::Target => graph.norm(h3, None),
    }
}

#[cfg(test)]
mod tests {
    use longdraft_models::published::published_config;

    use super::*;

    #[test]
    fn the_graph_keeps_what_the_formula_says() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let config = GlideConfig::for_target(&target, None);
        let row = Row { tokens: 100, learned: 100, parts: 1, teacher_logits: true, threads: 1 };
        let (h, q, kv, i) = (4096, 32 * 128, 8 * 128, 12288);
        let values = 12 * h + 6 * q + 3 * kv + 3 * i + 128 + 2 * 32;
        let memory = row_memory(&config, &row);
        // The loss itself is a number.
        assert_eq!(memory.activations, 100 * (4 * values + 20) + 4);
        let trained: u64 = tensor_specs(&config)
            .iter()
            .map(|spec| spec.shape.iter().product::<usize>() as u64)
            .sum();
        assert_eq!(memory.weight_gradients, 4 * trained);
        // The embeddings' gradient is kept although nobody asks for it.
        assert_eq!(memory.left, 4 * (trained + 100 * h));
        let normed = GlideConfig { final_norm: FinalNorm::Trained, ..config };
        let with_norm = row_memory(&normed, &row).activations;
        assert_eq!(with_norm - memory.activations, 4 * 100 * h);
    }
}
