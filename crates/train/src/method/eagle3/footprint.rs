//! What an EAGLE-3 draft takes: the test-time steps' graph and their common loss.

use std::sync::Arc;

use longdraft_features::TeacherKind;
use longdraft_kernels::linear::Pass;
use longdraft_models::draft::eagle3::{Eagle3Config, tensor_specs};
use longdraft_models::target_model::Tap;
use longdraft_models::weights::TensorSpec;

use crate::footprint::graph::{Angles, F32, Graph, Matrix};
use crate::footprint::loss::{chunk_bytes, row_bytes};
use crate::footprint::{Footprint, Row, RowMemory, matrix_values};

/// An EAGLE-3 draft that is trained for some steps under a teacher.
#[derive(Debug, Clone)]
pub(super) struct Eagle3Footprint {
    pub(super) sizes: Eagle3Config,
    pub(super) steps: usize,
    pub(super) teacher: TeacherKind,
    /// Whether the teacher decides which rows are learned.
    pub(super) holds_step: bool,
}

impl Footprint for Eagle3Footprint {
    fn specs(&self) -> Vec<TensorSpec> {
        tensor_specs(&self.sizes)
    }

    fn taps(&self) -> Vec<Tap> {
        self.sizes.target_layers.iter().map(|layer| Tap::Hidden(*layer)).collect()
    }

    fn teacher(&self) -> TeacherKind {
        self.teacher
    }

    fn ahead(&self) -> usize {
        self.steps
    }

    fn holds_step(&self) -> bool {
        self.holds_step
    }

    fn keeps_ends(&self) -> bool {
        true
    }

    /// The head at the draft's vocabulary, `Vd Ht`, where that is smaller.
    fn kept_head_values(&self) -> usize {
        let sizes = &self.sizes;
        let smaller = sizes.draft_vocab_size < sizes.vocab_size;
        if smaller { sizes.draft_vocab_size * sizes.target_hidden_size } else { 0 }
    }

    fn gathered_key_values(&self) -> usize {
        2 * self.sizes.kv_size()
    }

    fn planning_bytes(&self, row: &Row) -> u64 {
        if row.teacher_logits { planning_bytes(&self.sizes, row.tokens) } else { 0 }
    }

    fn row_memory(&self, row: &Row) -> RowMemory {
        row_memory(&self.sizes, self.steps, row)
    }

    /// `S` steps: its matrices and head forward and back, `6` for every value, attention over half of a
    /// row, seven products; the teacher over the draft's vocabulary once and over the target's once,
    /// `2 Vd Ht + 2 V Ht`.
    fn operations(&self, row: &Row, row_tokens: u64) -> f64 {
        let config = &self.sizes;
        let window = config.attention_window.map_or(f64::INFINITY, |window| window as f64 + 1.0);
        let context = (row_tokens as f64 / 2.0).min(window);
        let attention = 7.0 * 2.0 * config.query_size() as f64 * context;
        let whole = config.draft_vocab_size + config.vocab_size;
        let teachers = if row.teacher_logits { whole } else { 0 };
        self.steps as f64 * (6.0 * matrix_values(&self.specs()) + attention)
            + 2.0 * (teachers * config.target_hidden_size) as f64
    }

    fn changes(&self) -> Vec<(String, Arc<dyn Footprint>)> {
        let mut changes: Vec<(String, Arc<dyn Footprint>)> = Vec::new();
        if self.holds_step {
            let text = "draft.oov_rows=keep (one row's features at a time)";
            changes.push((text.to_owned(), Arc::new(Self { holds_step: false, ..self.clone() })));
        }
        if self.steps > 1 {
            let steps = self.steps.div_ceil(2);
            let text = format!("draft.ttt_steps={steps}");
            changes.push((text, Arc::new(Self { steps, ..self.clone() })));
        }
        if self.sizes.draft_vocab_size > 1 {
            let mut other = self.clone();
            other.sizes.draft_vocab_size /= 2;
            let text = format!("draft.draft_vocab_size={}", other.sizes.draft_vocab_size);
            changes.push((text, Arc::new(other)));
        }
        changes
    }
}

/// Rows of step `i` of a document of `tokens` tokens: it reads as far as the teacher of token `i + 2`
/// after the row.
fn rows_of_step(tokens: u64, step: u64) -> u64 {
    tokens.saturating_sub(step + 2).max(1)
}

/// Memory of a training row of one document whose tokens are all learned.
///
/// Every step's graph keeps, of each of its rows, in f32 values: seven states of width `H`
/// (embeddings, their norm, the state's choice and norm, the residual, its norm, the output), two of
/// width `2 H` (attention's input; in the first step all rows and those chosen), three of width `N·D`,
/// three of width `K·D` and its part of all keys so far, three of width `I`, `D` angles and `N`
/// log-sum-exps. The head reads the rows of all steps at once: three more states of width `H` (stacked,
/// normed, their gradient) of every row, and the gradient `[Vd, H]` of the head.
fn row_memory(config: &Eagle3Config, steps: usize, row: &Row) -> RowMemory {
    let mut graph = Graph::new(row.threads);
    let hidden = Steps::new(&mut graph, config, row).all(steps as u64);
    let stacked = graph.stack(&hidden);
    let normed = graph.norm(stacked, Some("norm"));
    let (width, vocabulary) = (config.hidden_size as u64, config.draft_vocab_size as u64);
    let head = graph.weight("lm_head", vocabulary, width);
    let loss = graph.loss(&[normed, head]);
    let passes = [Pass::Forward, Pass::InputGradient, Pass::WeightGradient];
    passes
        .into_iter()
        .for_each(|pass| graph.pack(pass, (row.chunk(vocabulary), width, vocabulary)));
    let teacher = if row.teacher_logits { config.target_hidden_size as u64 } else { 0 };
    let rows = F32 * row.chunk(vocabulary) * (width + teacher);
    let chunks = rows + chunk_bytes(row, width, vocabulary, row.teacher_logits);
    RowMemory::of(&graph, loss, chunks, row_bytes(normed.rows))
}

/// The steps of one row.
struct Steps<'a> {
    graph: &'a mut Graph,
    config: &'a Eagle3Config,
    row: &'a Row,
    keys: Vec<[Matrix; 2]>,
}

impl<'a> Steps<'a> {
    fn new(graph: &'a mut Graph, config: &'a Eagle3Config, row: &'a Row) -> Self {
        Self { graph, config, row, keys: Vec::new() }
    }

    /// The states of every step that the head reads.
    fn all(mut self, steps: u64) -> Vec<Matrix> {
        let mut state = self.fused();
        let mut states = Vec::new();
        for step in 0..steps {
            let hidden = if step == 0 { self.first(state) } else { self.later(state, step) };
            states.push(hidden);
            state = if self.config.norm_output {
                self.graph.norm(hidden, Some("norm"))
            } else {
                hidden
            };
        }
        states
    }

    /// `fc` over the tapped layers.
    fn fused(&mut self) -> Matrix {
        let (tokens, target) = (self.row.tokens, self.config.target_hidden_size as u64);
        let layers = self.config.target_layers.len() as u64;
        let width = self.config.hidden_size as u64;
        if !self.config.fc_norm {
            let aux = self.graph.given(tokens, layers * target);
            return self.graph.linear(aux, "fc", width);
        }
        let normed = ["fc_norm.0", "fc_norm.1", "fc_norm.2"].map(|name| {
            // A layer's part of the features is no contiguous tensor: the norm copies it.
            let part = self.graph.constant(tokens, target);
            self.graph.norm(part, Some(name))
        });
        let aux = self.graph.beside(&normed);
        self.graph.linear(aux, "fc", width)
    }

    /// Attention's input of some rows with a token and a state each.
    fn input(&mut self, state: Matrix) -> Matrix {
        let (rows, width) = (state.rows, self.config.hidden_size as u64);
        let embeddings = if self.config.embed_proj {
            let embeddings = self.graph.constant(rows, self.config.target_hidden_size as u64);
            self.graph.linear(embeddings, "embed_proj", width)
        } else {
            self.graph.constant(rows, width)
        };
        let embeddings = self.graph.norm(embeddings, Some("input_layernorm"));
        let state = self.graph.norm(state, Some("hidden_norm"));
        self.graph.beside(&[embeddings, state])
    }

    fn angles(&mut self, rows: u64) -> Angles {
        self.graph.angles(rows, self.config.head_dim as u64)
    }

    fn key_values(&mut self, input: Matrix, angles: Angles) -> [Matrix; 2] {
        let kv = self.config.kv_size() as u64;
        let k = self.graph.linear(input, "k", kv);
        let k = self.graph.rotate(k, angles);
        let v = self.graph.linear(input, "v", kv);
        [k, self.graph.view(v)]
    }

    /// Keys of all tokens, attention and MLP of the chosen ones.
    fn first(&mut self, state: Matrix) -> Matrix {
        let input = self.input(state);
        let angles = self.angles(state.rows);
        let keys = self.key_values(input, angles);
        let keys = keys.map(|part| self.graph.gathered(part, self.row.parts));
        self.keys.push(keys);
        let rows = rows_of_step(state.rows, 0);
        let (state, input) = (self.graph.select(state, rows), self.graph.select(input, rows));
        let angles = self.angles(rows);
        self.layer(state, input, angles, (keys, 0))
    }

    fn later(&mut self, state: Matrix, step: u64) -> Matrix {
        let state = self.graph.select(state, rows_of_step(self.row.tokens, step));
        let input = self.input(state);
        let angles = self.angles(state.rows);
        let own = self.key_values(input, angles);
        self.keys.push(own);
        let all = [0, 1].map(|part| {
            let parts: Vec<Matrix> = self.keys.iter().map(|keys| keys[part]).collect();
            self.graph.stack(&parts)
        });
        self.layer(state, input, angles, (all, step))
    }

    fn layer(
        &mut self,
        state: Matrix,
        input: Matrix,
        angles: Angles,
        (keys, singles): ([Matrix; 2], u64),
    ) -> Matrix {
        let (graph, config) = (&mut *self.graph, self.config);
        let q = graph.linear(input, "q", config.query_size() as u64);
        let q = graph.rotate(q, angles);
        let attended = graph.attention(q, keys, config.num_attention_heads as u64, singles);
        let normed = config.norm_before_residual;
        let base = if normed { graph.norm(state, Some("hidden_norm")) } else { state };
        let residual = graph.linear_onto(base, attended, "o");
        let normed = graph.norm(residual, Some("post_attention_layernorm"));
        graph.gated_mlp_onto(residual, normed, config.intermediate_size as u64)
    }
}

/// Bytes while a row's rows are planned: the teacher's states that are read, `4 T Ht`, and logits over
/// the target's vocabulary of 128 of them.
fn planning_bytes(config: &Eagle3Config, tokens: u64) -> u64 {
    const CHUNK: u64 = 128;
    let logits = CHUNK.min(tokens) * config.vocab_size as u64;
    F32 * (tokens * config.target_hidden_size as u64 + logits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_a_row_less_than_the_one_before() {
        let rows: Vec<u64> = (0..3).map(|step| rows_of_step(10, step)).collect();
        assert_eq!(rows, [8, 7, 6]);
        assert_eq!(rows_of_step(2, 5), 1);
    }

    #[test]
    fn the_first_step_keeps_what_its_parts_say() {
        let target = longdraft_models::published::published_config("Qwen/Qwen3-8B");
        let config = Eagle3Config::for_target(&target.expect("a published target"), 1000);
        let config = config.expect("published layers");
        let row = Row { tokens: 100, learned: 100, parts: 1, teacher_logits: true, threads: 1 };
        let (h, q, kv, i, rows) = (4096, 32 * 128, 8 * 128, 12288, 98);
        // fc, embeddings, two norms, the input, angles, keys of all tokens.
        let of_tokens = 4 * h + 2 * h + 128 + 3 * kv;
        // Choices of state and input, angles, queries, the rest of the layer; what the head reads.
        let of_rows = h + 2 * h + 128 + 3 * q + 32 + 3 * h + 2 * i + 3 * h;
        let memory = row_memory(&config, 1, &row);
        let bytes = 4 * (100 * of_tokens + rows * of_rows + 1000 * h + 1) + rows * (8 + 2 * 4);
        assert_eq!(memory.activations, bytes);
        let trained: u64 = tensor_specs(&config)
            .iter()
            .map(|spec| spec.shape.iter().product::<usize>() as u64)
            .sum();
        assert_eq!((memory.weight_gradients, memory.left), (4 * trained, 4 * trained));
        // Steps share their weights.
        assert_eq!(row_memory(&config, 3, &row).weight_gradients, 4 * trained);
    }
}
