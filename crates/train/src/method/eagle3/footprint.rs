//! What an EAGLE-3 draft takes: the test-time steps and their common loss.

use std::sync::Arc;

use longdraft_features::TeacherKind;
use longdraft_models::draft::eagle3::{Eagle3Config, tensor_specs};
use longdraft_models::target_model::Tap;
use longdraft_models::weights::TensorSpec;

use crate::footprint::loss::{Against, chunk_bytes, row_bytes, summary_bytes};
use crate::footprint::{
    ALL_PASSES, F32, Footprint, Layer, Operations, Row, RowMemory, WEIGHT_PASSES, matrix_values,
    tensor_values,
};

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
        if row.teacher_logits { planning_bytes(&self.sizes, row) } else { 0 }
    }

    fn row_memory(&self, row: &Row) -> RowMemory {
        // Steps share their teachers.
        let shared = Against::SharedTeacher { teachers: row.tokens * row.parts };
        let against = if row.teacher_logits { shared } else { Against::Entries };
        row_memory(&self.sizes, self.steps, (row, against))
    }

    /// `S` steps: the layer's matrices and the head forward and back, `6` for every value, attention over half of a
    /// document, seven products; `fc` once, `4` for every value, since its input trains nothing; the teacher over the
    /// draft's vocabulary once and over the target's once, `2 Vd Ht + 2 V Ht`.
    fn operations(&self, row: &Row, document_tokens: u64) -> Operations {
        let (config, steps) = (&self.sizes, self.steps as f64);
        let window = config.attention_window.map_or(f64::INFINITY, |window| window as f64 + 1.0);
        let context = (document_tokens as f64 / 2.0).min(window);
        let product = steps * 2.0 * config.query_size() as f64 * context;
        let whole = config.draft_vocab_size + config.vocab_size;
        let teachers = if row.teacher_logits { whole } else { 0 };
        let head = (config.draft_vocab_size * config.hidden_size) as f64;
        let fused = (config.target_layers.len() * config.target_hidden_size) as f64
            * config.hidden_size as f64;
        let of_layer = matrix_values(&self.specs()) - head - fused;
        Operations {
            forward: 2.0 * (steps * of_layer + fused),
            backward: 4.0 * steps * of_layer + 2.0 * fused,
            loss: 6.0 * steps * head + 2.0 * (teachers * config.target_hidden_size) as f64,
            attention: 2.0 * product,
            attention_backward: 5.0 * product,
            logits: steps * config.draft_vocab_size as f64 + teachers as f64,
            chunk: row.chunk(config.draft_vocab_size as u64),
            passes: steps,
        }
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
fn row_memory(config: &Eagle3Config, steps: usize, (row, against): (&Row, Against)) -> RowMemory {
    let steps = Steps::new(config, steps, row);
    let (width, vocabulary) = (steps.layer.width, config.draft_vocab_size as u64);
    let trained = tensor_values(&tensor_specs(config));
    let teacher = if against.has_teacher() { config.target_hidden_size as u64 } else { 0 };
    // An accelerator's chunks hold something of the rows of all steps.
    let learned = if row.is_accelerator() { steps.all_rows() } else { row.learned };
    // The draft's own head trains.
    let stored_head = row.stored_head && against.has_teacher();
    let learned = Row { learned, stored_head, ..*row };
    // Logits of a chunk, and the states of draft and teacher that they are products of: an accelerator's loss has those of
    // the draft as factors.
    let read = if row.is_accelerator() { 0 } else { width };
    let chunks = chunk_bytes(&learned, width, vocabulary, against)
        + F32 * row.chunk(vocabulary) * (read + teacher);
    let tapped = (config.target_layers.len() * config.target_hidden_size) as u64;
    let packed = [
        steps.layer.packed_bytes(row, row.tokens),
        row.packed_bytes(&WEIGHT_PASSES, &[(row.tokens, tapped, width)]),
        row.packed_bytes(&ALL_PASSES, &[(row.chunk(vocabulary), width, vocabulary)]),
    ];
    RowMemory {
        // With the head's gradient, which waits, and the loss.
        activations: F32 * (steps.kept() + vocabulary * width + 1),
        chunks,
        backward: F32 * steps.gradients(trained).max(trained),
        left: F32 * trained,
        results: row_bytes(steps.all_rows()),
        packed: packed.into_iter().max().unwrap_or(0),
        weight_gradients: F32 * trained,
    }
}

/// The steps of one row.
struct Steps<'a> {
    config: &'a Eagle3Config,
    layer: Layer,
    row: &'a Row,
    /// Rows of each step; there is a step at least.
    rows: Vec<u64>,
}

impl<'a> Steps<'a> {
    fn new(config: &'a Eagle3Config, steps: usize, row: &'a Row) -> Self {
        let layer = Layer {
            width: config.hidden_size as u64,
            read: 2 * config.hidden_size as u64,
            query: config.query_size() as u64,
            kv: config.kv_size() as u64,
            heads: config.num_attention_heads as u64,
            inner: config.intermediate_size as u64,
        };
        let rows = (0..steps.max(1) as u64).map(|step| rows_of_step(row.tokens, step)).collect();
        Self { config, layer, row, rows }
    }

    fn all_rows(&self) -> u64 {
        self.rows.iter().sum()
    }

    /// Keys that a step sees: of all parts of the row, and of the later steps so far.
    fn keys(&self, step: usize) -> u64 {
        self.row.tokens * self.row.parts + self.rows[1..=step].iter().sum::<u64>()
    }

    /// Values that the graph keeps.
    fn kept(&self) -> u64 {
        let (config, layer, rows) = (self.config, &self.layer, &self.rows);
        let (width, angles) = (layer.width, config.head_dim as u64);
        let target = config.target_hidden_size as u64;
        let tapped = config.target_layers.len() as u64 * target;
        let if_set = |switch: bool, values: u64| if switch { values } else { 0 };
        let of_input = [
            width,                             // embeddings
            if_set(config.embed_proj, target), // what they are projected from
            self.row.input_values(2 * width),  // their norm and the state's, side by side
            angles,                            // angles
        ];
        let of_row = [
            width + 1,                                  // the state, chosen by an index
            layer.query_values(self.row),               // attention
            if_set(config.norm_before_residual, width), // norm of the residual
            width + self.row.input_values(width),       // sum after attention, its norm
            2 * layer.inner + width,                    // gate and up, output
            2 * width,                                  // steps joined, the gradient of their norm
            if_set(self.row.is_accelerator(), layer.gated_onto_values(self.row)), // what the MLP keeps
        ];
        let gathered = layer.key_values(self.row) * self.row.parts;
        let of_token = [
            width, // `fc`
            // Tapped layers as they are cut out, normed, joined.
            if_set(config.fc_norm, 2 * tapped + self.row.input_values(tapped)),
            if_set(self.row.parts > 1, gathered), // keys and values of all parts of the row
        ];
        let [of_input, of_row, of_token] =
            [&of_input[..], &of_row, &of_token].map(|t| t.iter().sum::<u64>());
        let later = rows.iter().zip(0_u64..).skip(1);
        let of_later = later.map(|(rows, step)| {
            // Keys outside of a query's range, and all keys and values so far one after the other.
            rows * (of_input + 1 + step) + layer.key_values(self.row) * self.keys(step as usize)
        });
        // The first step makes inputs and keys of all tokens and chooses among them, with angles of their own.
        let of_keys = of_token + of_input + layer.key_values(self.row);
        let of_first =
            self.row.tokens * of_keys + rows[0] * (self.row.input_values(2 * width) + 1 + angles);
        let handed_on = rows[..rows.len() - 1].iter().sum::<u64>();
        of_first
            + of_later.sum::<u64>()
            + self.all_rows() * of_row
            + if_set(config.norm_output, handed_on * width)
    }

    /// Gradients under way, at most. That is in the step before the last one: the states of the steps before
    /// it and the keys that it sees wait, and all weights but `fc` have gradients. Where it is the only step,
    /// its layer's matrices get theirs only now. On an accelerator it may be at the norm of all steps' states.
    fn gradients(&self, trained: u64) -> u64 {
        let (layer, is_only) = (&self.layer, self.rows.len() == 1);
        let step = self.rows.len().saturating_sub(2);
        let (rows, keys) = (self.rows[step], self.keys(step));
        let fused = (self.config.target_layers.len() * self.config.target_hidden_size) as u64;
        let states = layer.width * self.rows[..step].iter().sum::<u64>();
        let later_keys = if is_only { 0 } else { 2 * layer.kv * keys };
        let waiting = trained - layer.width * fused + states + later_keys;
        let missing = |matrices: u64| if is_only { matrices } else { 0 };
        let singles = keys - self.row.tokens * self.row.parts;
        if self.row.is_accelerator() {
            let of_layer = [
                // Of the MLP's matrices the last has its gradient.
                waiting + missing(layer.width * layer.inner) - missing(layer.matrices())
                    + layer.gated_gradients(rows),
                waiting - missing(layer.projections())
                    + layer.attended_gradients(self.row, rows, keys, singles),
                waiting - missing(layer.read * layer.query) + layer.queried_gradients(rows),
                self.norm_gradients(),
            ];
            return of_layer.into_iter().max().unwrap_or(0);
        }
        let in_mlp = waiting - missing(layer.matrices()) + layer.mlp_gradients(rows);
        let in_attention = waiting - missing(layer.projections())
            + layer.attention_gradients(self.row, rows, keys, singles);
        in_mlp.max(in_attention)
    }

    /// Gradients under way on an accelerator at the norm of all steps' states, where the backward pass begins: of
    /// the normed states, of the states, and of each step's; and of the head.
    fn norm_gradients(&self) -> u64 {
        let head = self.config.draft_vocab_size as u64 * self.layer.width;
        3 * self.all_rows() * self.layer.width + head
    }
}

/// Bytes while a row's rows are planned: the teacher's states that are read, `4 T Ht`, and logits over
/// the target's vocabulary of 128 of them, on an accelerator of a chunk.
fn planning_bytes(config: &Eagle3Config, row: &Row) -> u64 {
    let (width, vocabulary) = (config.target_hidden_size as u64, config.vocab_size as u64);
    F32 * row.tokens * width + summary_bytes(row, width, vocabulary)
}

#[cfg(test)]
mod tests {
    use longdraft_models::published::published_config;

    use super::*;
    use crate::footprint::tests::{on_cpu, on_gpu};

    fn memory(config: &Eagle3Config, steps: usize, row: &Row) -> RowMemory {
        row_memory(config, steps, (row, Against::SharedTeacher { teachers: row.tokens }))
    }

    #[test]
    fn a_step_has_a_row_less_than_the_one_before() {
        let rows: Vec<u64> = (0..3).map(|step| rows_of_step(10, step)).collect();
        assert_eq!(rows, [8, 7, 6]);
        assert_eq!(rows_of_step(2, 5), 1);
    }

    #[test]
    fn steps_share_what_is_fused_once() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let sizes = Eagle3Config::for_target(&target, 1000).expect("published layers");
        let of = |steps| {
            let (teacher, holds_step) = (TeacherKind::EveryToken, false);
            let footprint = Eagle3Footprint { sizes: sizes.clone(), steps, teacher, holds_step };
            footprint.operations(&on_gpu(4096), 4096)
        };
        let [one, two, three] = [1, 2, 3].map(|steps| of(steps).total());
        assert!((three - two - (two - one)).abs() < 1.0, "{one} {two} {three}");
        // `fc`, `4` for every value; both teachers, `2` each.
        let (fused, teachers) = (4096.0 * 3.0 * 4096.0, 4096.0 * (1000.0 + 151_936.0));
        assert!((2.0 * one - two - 4.0 * fused - 2.0 * teachers).abs() < 1.0, "{one} {two}");
    }

    #[test]
    fn the_first_step_keeps_what_its_parts_say() {
        let target = published_config("Qwen/Qwen3-8B");
        let config = Eagle3Config::for_target(&target.expect("a published target"), 1000);
        let config = config.expect("published layers");
        let row = on_cpu(100, 1);
        let (h, q, kv, i, rows) = (4096, 32 * 128, 8 * 128, 12288, 98);
        // fc, embeddings, the input, angles, keys of all tokens.
        let of_tokens = 2 * h + 2 * h + 128 + 2 * kv;
        // Choices of state and input, angles, queries, the rest of the layer; what the head reads.
        let of_rows = h + 2 * h + 128 + 2 * q + 32 + 3 * h + 2 * i + 2 * h;
        let first = memory(&config, 1, &row);
        let bytes = 4 * (100 * of_tokens + rows * of_rows + 1000 * h + 1) + rows * (8 + 2 * 4);
        assert_eq!(first.activations, bytes);
        // A GPU keeps the MLP's product.
        let gpu = on_gpu(100);
        let kept_on_gpu = |row: &Row| -> u64 { memory(&config, 1, row).activations };
        let single = kept_on_gpu(&Row { half_products: false, ..gpu });
        assert_eq!(single - bytes, 4 * rows * i);
        // Halves: the input of all tokens with keys and values, that of the rows, queries, the norm before the MLP, the
        // product.
        let halved = 100 * (2 * h + 2 * kv) + rows * (2 * h + q + h + i);
        assert_eq!(single - kept_on_gpu(&gpu), 2 * halved);
        let trained = tensor_values(&tensor_specs(&config));
        assert_eq!((first.weight_gradients, first.left), (4 * trained, 4 * trained));
        // Steps share their weights.
        assert_eq!(memory(&config, 3, &row).weight_gradients, 4 * trained);
    }
}
