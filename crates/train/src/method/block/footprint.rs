//! What a block draft takes: keys of the context, the slots' layers, and their loss.

use longdraft_features::TeacherKind;
use longdraft_kernels::linear::Pass;
use longdraft_models::TargetConfig;
use longdraft_models::draft::block::{
    BlockConfig, ChainKind, ChainSizes, SelectorSizes, tensor_specs,
};
use longdraft_models::target_model::Tap;
use longdraft_models::weights::TensorSpec;

use super::blocks::BlockBudget;
use super::build::check_sizes;
use super::teacher::SoftLoss;
use crate::error::Result;
use crate::footprint::graph::{Angles, Graph, Matrix};
use crate::footprint::loss::{chunk_bytes, row_bytes};
use crate::footprint::{Footprint, Row, RowMemory, matrix_values};

/// A block draft trained on some blocks a row.
#[derive(Debug, Clone)]
pub(in crate::method) struct BlockFootprint {
    sizes: BlockConfig,
    budget: BlockBudget,
    /// Whether weights wait for all rows of a step.
    holds_step: bool,
    /// The part of the target's distribution in the loss.
    soft: Option<SoftLoss>,
}

impl Footprint for BlockFootprint {
    fn specs(&self) -> Vec<TensorSpec> {
        tensor_specs(&self.sizes)
    }

    fn taps(&self) -> Vec<Tap> {
        self.sizes.target_layers.iter().map(|layer| Tap::Hidden(*layer)).collect()
    }

    fn teacher(&self) -> TeacherKind {
        match self.soft {
            _ if self.sizes.chain.is_some() => TeacherKind::EveryToken,
            None => TeacherKind::None,
            Some(soft) => soft.distribution.needs(),
        }
    }

    fn ahead(&self) -> usize {
        let learns_target = self.soft.is_some() || self.sizes.chain.is_some();
        if learns_target { self.sizes.block_size } else { 0 }
    }

    fn gathered_key_values(&self) -> usize {
        2 * self.sizes.layers.len() * self.sizes.kv_size()
    }

    fn holds_step(&self) -> bool {
        self.holds_step
    }

    fn keeps_ends(&self) -> bool {
        true
    }

    fn row_memory(&self, row: &Row) -> RowMemory {
        let slots = self.slots(row);
        let mut graph = Graph::new(row.threads);
        let hidden = self.network(&mut graph, row, slots);
        let learned = graph.select(hidden, slots);
        let (width, vocabulary) = (learned.width, self.sizes.vocab_size as u64);
        let head = graph.given(vocabulary, width);
        let mut factors = vec![learned, head];
        if let Some(sizes) = self.sizes.chain {
            factors
                .extend(self.chained(&mut graph, (hidden, learned), sizes).into_iter().flatten());
        }
        let mut loss = graph.loss(&factors);
        if let Some(sizes) = self.sizes.selector {
            let selected = self.selector(&mut graph, (learned, head), sizes);
            loss = graph.add(loss, selected);
        }
        let of_slots = Row { tokens: slots, learned: slots, ..*row };
        for pass in [Pass::Forward, Pass::InputGradient] {
            graph.pack(pass, (of_slots.chunk(vocabulary), width, vocabulary));
        }
        let chunks = chunk_bytes(&of_slots, width, vocabulary, row.teacher_logits);
        RowMemory::of(&graph, loss, chunks, row_bytes(slots))
    }

    /// Six for every value of a matrix and row it multiplies: context rows go through `fc` and the
    /// projections of keys and values, slots through the layers and, forward and back, the head;
    /// attention takes seven products over half of the row.
    fn operations(&self, row: &Row, row_tokens: u64) -> f64 {
        let config = &self.sizes;
        let (width, layers) = (config.hidden_size as f64, config.layers.len() as f64);
        let of_context = width * width * config.target_layers.len() as f64
            + layers * 2.0 * width * config.kv_size() as f64;
        let of_slots =
            matrix_values(&self.specs()) - width * width * config.target_layers.len() as f64;
        let seen = config.sliding_window.map_or(f64::INFINITY, |window| window as f64);
        let attention =
            14.0 * config.query_size() as f64 * layers * seen.min(row_tokens as f64 / 2.0);
        let heads = 2 + usize::from(row.teacher_logits);
        let head = 2.0 * heads as f64 * width * config.vocab_size as f64;
        let slots = self.slots(row) as f64 / row.tokens.max(1) as f64;
        6.0 * of_context + slots * (6.0 * of_slots + attention + head)
    }
}

impl BlockFootprint {
    /// That of a network that fits the target, and of weights that wait for all rows of a step.
    ///
    /// # Errors
    /// - it does not
    pub(in crate::method) fn new(
        sizes: BlockConfig,
        holds_step: bool,
        budget: BlockBudget,
        target: &TargetConfig,
    ) -> Result<Self> {
        check_sizes(&sizes, target)?;
        Ok(Self { sizes, budget, holds_step, soft: None })
    }

    /// The same where the loss learns the target's distribution.
    pub(in crate::method) fn with_soft(self, soft: Option<SoftLoss>) -> Self {
        Self { soft, ..self }
    }

    /// Slots of a row at most.
    fn slots(&self, row: &Row) -> u64 {
        // Of a row that ranks share, each runs the blocks that begin in its part.
        let of_row = self.budget.of((row.learned * row.parts) as usize) as u64;
        row.tokens.min(of_row.div_ceil(row.parts)) * self.sizes.block_size as u64
    }

    fn network(&self, graph: &mut Graph, row: &Row, slots: u64) -> Matrix {
        let config = &self.sizes;
        let width = config.hidden_size as u64;
        let features = graph.given(row.tokens, width * config.target_layers.len() as u64);
        let fused = graph.linear(features, "fc", width);
        let context = graph.norm(fused, Some("hidden_norm"));
        let of_context = graph.angles(row.tokens, config.head_dim as u64);
        let mut contexts: Vec<[Matrix; 2]> = (0..config.layers.len())
            .map(|i| self.key_values(graph, i, context, of_context))
            .collect();
        if row.parts > 1 {
            // Gathered side by side, then taken apart: each part's gradient is padded to all of them.
            let own = graph.beside(contexts.as_flattened());
            let all = graph.gathered(own, row.parts);
            for side in contexts.as_flattened_mut() {
                *side = graph.part(all, side.width);
            }
        }
        let mut x = graph.constant(slots, width);
        let angles = graph.angles(slots, config.head_dim as u64);
        for (i, context) in contexts.into_iter().enumerate() {
            x = self.layer(graph, i, (x, angles), context);
        }
        graph.enter("");
        graph.norm(x, Some("norm"))
    }

    fn key_values(&self, graph: &mut Graph, i: usize, x: Matrix, angles: Angles) -> [Matrix; 2] {
        graph.enter(format!("layers.{i}."));
        let kv = self.sizes.kv_size() as u64;
        let k = graph.linear(x, "k_proj", kv);
        let k = self.heads_norm(graph, k, "k_norm");
        let k = graph.rotate(k, angles);
        let v = graph.linear(x, "v_proj", kv);
        [k, graph.view(v)]
    }

    /// A norm of every head.
    fn heads_norm(&self, graph: &mut Graph, x: Matrix, name: &str) -> Matrix {
        let head = self.sizes.head_dim as u64;
        let heads = graph.view(x);
        let rows = x.rows * x.width / head;
        let normed = graph.norm(Matrix { rows, width: head, ..heads }, Some(name));
        Matrix { rows: x.rows, width: x.width, ..normed }
    }

    fn layer(
        &self,
        graph: &mut Graph,
        i: usize,
        (x, angles): (Matrix, Angles),
        context: [Matrix; 2],
    ) -> Matrix {
        let config = &self.sizes;
        graph.enter(format!("layers.{i}."));
        let normed = graph.norm(x, Some("input_layernorm"));
        let of_attention = self.kernels(graph, normed, "attention_conv");
        let normed = self.convolved(graph, normed, ("attention_conv", of_attention));
        let q = graph.linear(normed, "q_proj", config.query_size() as u64);
        let q = self.heads_norm(graph, q, "q_norm");
        let q = graph.rotate(q, angles);
        let own = self.key_values(graph, i, normed, angles);
        let [k, v] = [0, 1].map(|part| graph.stack(&[context[part], own[part]]));
        let heads = config.num_attention_heads as u64;
        let attended = graph.attention(q, [k, v], heads, config.block_size as u64);
        let attended = graph.linear(attended, "o_proj", x.width);
        let attended = self.convolved(graph, attended, ("attention_conv", of_attention));
        let x = graph.add(x, attended);
        let normed = graph.norm(x, Some("post_attention_layernorm"));
        let inner = config.intermediate_size as u64;
        let of_mlp = self.kernels(graph, normed, "mlp_conv");
        if of_mlp.is_none() {
            return graph.gated_mlp_onto(x, normed, inner);
        }
        let normed = self.convolved(graph, normed, ("mlp_conv", of_mlp));
        let [gate, up] = ["gate", "up"].map(|name| graph.linear(normed, name, inner));
        let gated = graph.swiglu(gate, up);
        let out = graph.linear(gated, "down", x.width);
        let out = self.convolved(graph, out, ("mlp_conv", of_mlp));
        graph.add(x, out)
    }

    /// The kernels that a convolution computes of its sublayer's input.
    fn kernels(&self, graph: &mut Graph, x: Matrix, name: &str) -> Option<Matrix> {
        let sizes = self.sizes.convolution?;
        let groups = self.sizes.hidden_size / sizes.group_size.max(1);
        let kernels = 2 * sizes.kernel_size * groups;
        Some(graph.linear(x, &format!("{name}.kernel_projection"), kernels as u64))
    }

    fn convolved(
        &self,
        graph: &mut Graph,
        x: Matrix,
        (name, kernels): (&str, Option<Matrix>),
    ) -> Matrix {
        let (Some(sizes), Some(kernels)) = (self.sizes.convolution, kernels) else { return x };
        let base = format!("{name}.base_kernel");
        graph.convolve(x, (&base, 2 * sizes.kernel_size as u64), kernels)
    }

    /// The factors of the product that a chain adds to the logits.
    fn chained(
        &self,
        graph: &mut Graph,
        (all, learned): (Matrix, Matrix),
        sizes: ChainSizes,
    ) -> Option<[Matrix; 2]> {
        let (rank, vocabulary) = (sizes.rank as u64, self.sizes.vocab_size as u64);
        if rank == 0 {
            return None;
        }
        graph.enter("markov_head.");
        let table = graph.weight("markov_w1", vocabulary, rank);
        let embedded = graph.lookup(table, learned.rows);
        let mixed = match sizes.kind {
            ChainKind::Vanilla => embedded,
            ChainKind::Gated => {
                let both = graph.beside(&[learned, embedded]);
                let gate = graph.linear(both, "gate_proj", rank);
                let gate = sigmoid(graph, gate);
                graph.multiply(gate, embedded)
            }
            ChainKind::Rnn => {
                // All slots, one place of the blocks after the other; three parts of each stay.
                let embedded = graph.lookup(table, all.rows);
                let states = graph.part(all, all.width);
                let both = graph.beside(&[embedded, embedded, states]);
                let joint = graph.linear(both, "joint_proj", 3 * rank);
                let [gate, candidate, mixed] = [(); 3].map(|()| graph.part(joint, rank));
                let gate = sigmoid(graph, gate);
                let state = graph.multiply(gate, candidate);
                let mixed = graph.multiply(state, mixed);
                let mixed = graph.stack(&[mixed]);
                graph.select(mixed, learned.rows)
            }
        };
        let output = graph.weight("markov_w2", vocabulary, rank);
        Some([mixed, output])
    }

    /// The loss of a selector whose candidates hold every label.
    fn selector(
        &self,
        graph: &mut Graph,
        (learned, head): (Matrix, Matrix),
        sizes: SelectorSizes,
    ) -> Matrix {
        graph.enter("candidate_selector.");
        let (rank, each) = (sizes.rank as u64, sizes.top_k as u64);
        let vocabulary = self.sizes.vocab_size as u64;
        let states = graph.select(learned, learned.rows);
        let logits = graph.chosen(states, head, each);
        let projected = graph.linear(states, "hidden_projection", rank);
        let [predecessors, successors] = ["predecessor_codebook", "successor_codebook"]
            .map(|name| graph.weight(name, vocabulary, rank));
        let before = graph.lookup(predecessors, learned.rows);
        let queries = graph.multiply(before, projected);
        let preferences = graph.chosen(queries, successors, each);
        let scores = graph.add(logits, preferences);
        graph.view(scores)
    }
}

/// `(tanh(x / 2) + 1) / 2`: four values for each one.
fn sigmoid(graph: &mut Graph, x: Matrix) -> Matrix {
    (0..4).fold(x, |x, _| graph.relu_squared(x))
}
