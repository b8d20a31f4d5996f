//! What a block draft takes: keys of the context, the slots' layers, and their loss.

use longdraft_features::TeacherKind;
use longdraft_kernels::bend::Bend;
use longdraft_kernels::block_convolution::COMPOSED_GRADIENTS;
use longdraft_models::TargetConfig;
use longdraft_models::draft::block::{
    BlockConfig, ChainKind, ChainSizes, ConvolutionSizes, LayerKind, SelectorSizes, tensor_specs,
};
use longdraft_models::target_model::Tap;
use longdraft_models::weights::TensorSpec;

use super::blocks::BlockBudget;
use super::build::check_sizes;
use super::divergence;
use super::slot_loss::SlotLoss;
use super::teacher::SoftLoss;
use crate::error::Result;
use crate::footprint::loss::{Against, chunk_bytes, row_bytes, summary_bytes};
use crate::footprint::{
    ALL_PASSES, F32, Footprint, INPUT_PASSES, Layer, Operations, Row, RowMemory, WEIGHT_PASSES,
    matrix_values, tensor_values,
};

/// A block draft trained on some blocks a row.
#[derive(Debug, Clone)]
pub(in crate::method) struct BlockFootprint {
    sizes: BlockConfig,
    budget: BlockBudget,
    /// Whether weights wait for all rows of a step.
    holds_step: bool,
    /// The part of the target's distribution in the loss.
    soft: Option<SoftLoss>,
    /// How slots are held to it.
    loss: SlotLoss,
    /// What becomes of the head's products.
    bend: Bend,
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

    /// Those of the tokens that it proposes, where it has a head of its own and learns whole distributions.
    fn kept_head_values(&self) -> usize {
        let learns_whole = self.teacher() == TeacherKind::EveryToken;
        if learns_whole { self.own_head_values() } else { 0 }
    }

    fn own_head_values(&self) -> usize {
        let config = &self.sizes;
        if config.has_own_head() { config.draft_vocab_size * config.hidden_size } else { 0 }
    }

    fn row_memory(&self, row: &Row) -> RowMemory {
        let (layer, slots) = (self.layer(), self.slots(row));
        let vocabulary = self.sizes.draft_vocab_size as u64;
        // A head of its own is f32.
        let reads_target = row.teacher_logits || !self.sizes.has_own_head();
        let stored_head = row.stored_head && reads_target;
        let of_slots = Row { tokens: slots, learned: slots, stored_head, ..*row };
        let trained = tensor_values(&self.specs());
        let chunks = if self.loss.compares_whole() {
            let low_rank = self.sizes.chain.map(|sizes| sizes.rank as u64).filter(|rank| *rank > 0);
            let sizes = (slots, layer.width, vocabulary);
            divergence::chunk_bytes(self.loss, sizes, (self.bend, low_rank))
                + of_slots.slab_bytes(layer.width, vocabulary)
        } else {
            // An accelerator turns the states of both parts of the logits into factors.
            let second = self.sizes.chain.map_or(0, |sizes| sizes.rank as u64);
            let read = layer.width + if row.is_accelerator() { second } else { 0 };
            chunk_bytes(&of_slots, read, vocabulary, self.against(row))
        };
        RowMemory {
            activations: F32 * self.kept(row, slots),
            chunks: chunks.max(self.normaliser_bytes(row, slots)),
            backward: F32 * self.gradients(row, slots, trained).max(trained),
            left: F32 * trained,
            results: row_bytes(slots),
            packed: self.packed_bytes(&of_slots, row.tokens),
            weight_gradients: F32 * trained,
        }
    }

    /// Six for every value of a matrix and row it multiplies: context rows go through `fc` and the
    /// projections of keys and values, slots through the layers and, forward and back, the head;
    /// attention takes seven products over half of the row, in a sliding layer over its window at most. A teacher's
    /// normalisers take the target's head once more where the draft has its own.
    fn operations(&self, row: &Row, document_tokens: u64) -> Operations {
        let config = &self.sizes;
        let (width, layers) = (config.hidden_size as f64, config.layers.len() as f64);
        let half = document_tokens as f64 / 2.0;
        let fused = width * width * config.target_layers.len() as f64;
        let of_context = fused + layers * 2.0 * width * config.kv_size() as f64;
        let slots = self.slots(row) as f64 / row.tokens.max(1) as f64;
        let values = of_context + slots * (matrix_values(&self.specs()) - fused);
        let window = config.sliding_window.map_or(half, |window| half.min(window as f64));
        let seen = |kind: &LayerKind| if *kind == LayerKind::Sliding { window } else { half };
        let seen: f64 = config.layers.iter().map(seen).sum();
        let product = slots * 2.0 * config.query_size() as f64 * seen;
        let (heads, distributions) = if row.teacher_logits { (3.0, 2.0) } else { (2.0, 1.0) };
        let vocabulary = config.draft_vocab_size as f64;
        let normalised = if self.normalises(row) { slots.min(1.0) } else { 0.0 };
        let normalisers = normalised * config.vocab_size as f64;
        Operations {
            forward: 2.0 * values,
            backward: 4.0 * values,
            loss: 2.0 * width * (slots * heads * vocabulary + normalisers),
            attention: 2.0 * product,
            attention_backward: 5.0 * product,
            logits: slots * distributions * vocabulary + normalisers,
            chunk: row.chunk(config.draft_vocab_size as u64),
            passes: 1.0,
        }
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
        let (loss, bend) = (SlotLoss::default(), target.bend());
        Ok(Self { sizes, budget, holds_step, soft: None, loss, bend })
    }

    /// The same where the loss reads the target's distribution.
    pub(in crate::method) fn with_soft(self, soft: Option<SoftLoss>) -> Self {
        Self { soft, ..self }
    }

    /// The same where slots are held to it in this way.
    pub(in crate::method) fn with_loss(self, loss: SlotLoss) -> Self {
        Self { loss, ..self }
    }

    /// Slots of a row at most.
    fn slots(&self, row: &Row) -> u64 {
        // Of a row that ranks share, each runs the blocks that begin in its part.
        let of_row = self.budget.of((row.learned * row.parts) as usize) as u64;
        row.tokens.min(of_row.div_ceil(row.parts)) * self.sizes.block_size as u64
    }

    /// Whether a teacher's probabilities are those among all of the target's tokens, of which the draft proposes some.
    fn normalises(&self, row: &Row) -> bool {
        row.teacher_logits && self.sizes.has_own_head()
    }

    /// Bytes while these probabilities are normalised: states of the tokens that slots have for teachers, and logits
    /// of some of them.
    fn normaliser_bytes(&self, row: &Row, slots: u64) -> u64 {
        if !self.normalises(row) {
            return 0;
        }
        let (width, vocabulary) = (self.layer().width, self.sizes.vocab_size as u64);
        let teachers = slots.min(row.tokens);
        F32 * teachers * width + summary_bytes(row, width, vocabulary)
    }

    /// What the logits of slots are held to, by the distribution that they learn.
    fn against(&self, row: &Row) -> Against {
        match self.teacher() {
            _ if row.teacher_logits => Against::SharedTeacher { teachers: row.tokens * row.parts },
            TeacherKind::None => Against::Labels,
            _ => Against::Entries,
        }
    }

    fn layer(&self) -> Layer {
        let config = &self.sizes;
        Layer {
            width: config.hidden_size as u64,
            read: config.hidden_size as u64,
            query: config.query_size() as u64,
            kv: config.kv_size() as u64,
            heads: config.num_attention_heads as u64,
            inner: config.intermediate_size as u64,
        }
    }

    fn layers(&self) -> u64 {
        self.sizes.layers.len() as u64
    }

    /// Inputs of `fc`.
    fn tapped(&self) -> u64 {
        (self.sizes.hidden_size * self.sizes.target_layers.len()) as u64
    }

    /// Values of the kernels that a convolution computes of a slot.
    fn kernel_values(&self, sizes: ConvolutionSizes) -> u64 {
        (2 * sizes.kernel_size * (self.sizes.hidden_size / sizes.group_size.max(1))) as u64
    }

    /// Values that the graph keeps.
    fn kept(&self, row: &Row, slots: u64) -> u64 {
        let (layer, config) = (self.layer(), &self.sizes);
        let (layers, angles) = (self.layers(), config.head_dim as u64);
        // Keys and values of all layers side by side, as they are gathered, and as they are taken apart.
        let gathered = if row.parts > 1 { 2 * layers * layer.kv * (1 + 2 * row.parts) } else { 0 };
        let of_context = [
            layer.width + row.input_values(layer.width), // `fc`, its norm
            angles,                                      // angles
            layers * layer.kv,                           // keys before their norm
            gathered,                                    // keys and values of all parts of the row
        ];
        let (known, ended) = (self.known(row, slots), self.ended(slots));
        let of_slot = [
            angles,                       // angles
            1 + config.block_size as u64, // slots of its block that a query sees
            config.chain.map_or(0, |sizes| self.of_chain(sizes) + self.of_confidence(row, sizes)),
            config.selector.map_or(0, |sizes| self.of_selector(sizes)),
        ];
        let of_ended = [
            if self.asks() { angles } else { layer.width }, // angles of those asked for, or all by an index
            2 * layer.width + 1,                            // the last norm, its gradient
        ];
        let of_layer = |index| self.kept_by_layer(index, row, (slots, known, ended));
        let of_layers = known * layer.width + (0..layers).map(of_layer).sum::<u64>();
        // Every layer joins the keys and values of context and slots.
        let joined = layers * layer.key_values(row) * (row.tokens * row.parts + slots);
        // The gradient of a chain's output table waits.
        let table = config.chain.map_or(0, |sizes| sizes.rank * config.draft_vocab_size) as u64;
        row.tokens * of_context.iter().sum::<u64>()
            + slots * of_slot.iter().sum::<u64>()
            + ended * of_ended.iter().sum::<u64>()
            + of_layers
            + (joined + table + 1)
    }

    /// Values that the graph keeps of a layer beside keys and values: of all slots, of the rows that the first layer
    /// projects (`known`), and of the slots that the last one ends.
    fn kept_by_layer(&self, index: u64, row: &Row, (slots, known, ended): (u64, u64, u64)) -> u64 {
        let (layer, config) = (self.layer(), &self.sizes);
        let is_last = index + 1 == self.layers();
        let (read, made) =
            (if index == 0 { known } else { slots }, if is_last { ended } else { slots });
        // The first layer chooses among its queries, later ones among what these are made of.
        let chooses = is_last && self.asks() && read == slots;
        let asked = if chooses { made } else { read };
        // What a product reads of a norm; a convolution reads the norm itself.
        let halved = row.input_values(layer.width);
        let norm = if config.convolution.is_some() { layer.width } else { halved };
        // Kernels of both, what they read and make, the MLP's product.
        let product = row.input_values(layer.inner);
        let convolved =
            |sizes| 2 * self.kernel_values(sizes) + 4 * layer.width + norm - halved + product;
        let of_made = [
            // All but the first norm: attention, MLP.
            layer.token_values(row) - layer.key_values(row) - halved,
            config.convolution.map_or(0, convolved),
            if self.adds_gated(row) { layer.gated_onto_values(row) } else { 0 },
            if chooses { halved } else { 0 },
        ];
        // The norm, keys before theirs; queries before theirs.
        read * (norm + layer.kv) + asked * layer.query + made * of_made.iter().sum::<u64>()
    }

    /// Whether the last layer runs the learned slots alone: neither convolutions nor a recurrent head read the others.
    fn asks(&self) -> bool {
        let is_recurrent = self.sizes.chain.is_some_and(|sizes| sizes.kind == ChainKind::Rnn);
        self.sizes.convolution.is_none() && !is_recurrent
    }

    /// Slots that the last layer ends, at most. Without sequential heads the first of a block learns nothing.
    fn ended(&self, slots: u64) -> u64 {
        let size = self.sizes.block_size as u64;
        let learns_first = self.sizes.chain.is_some() || !self.asks();
        if learns_first { slots } else { slots / size * (size - 1) }
    }

    /// Rows that the first layer projects: on a CPU the first tokens of blocks and the mask token, without convolutions.
    fn known(&self, row: &Row, slots: u64) -> u64 {
        let tokens = slots / self.sizes.block_size as u64 + 1;
        let shares = !row.is_accelerator() && self.sizes.convolution.is_none();
        if shares && 2 * tokens <= slots { tokens } else { slots }
    }

    /// Whether it keeps what an accelerator's MLPs keep beside a CPU's, which add their output to the residual;
    /// with convolutions both keep the same.
    fn adds_gated(&self, row: &Row) -> bool {
        row.is_accelerator() && self.sizes.convolution.is_none()
    }

    /// Kept of a slot for the product that a chain adds to the logits: the token before it, and the gradient of
    /// what it becomes.
    fn of_chain(&self, sizes: ChainSizes) -> u64 {
        let (rank, width) = (sizes.rank as u64, self.sizes.hidden_size as u64);
        match sizes.kind {
            _ if rank == 0 => 0,
            ChainKind::Vanilla => 2 * rank,
            // Beside the state; a gate, which a sigmoid makes in four steps; the product.
            ChainKind::Gated => width + 9 * rank,
            // The state beside the token and what was before; three parts, a gate, two products; all places joined,
            // the learned ones by an index.
            ChainKind::Rnn => width + 16 * rank + 1,
        }
    }

    /// Kept of a slot for its confidence: what it is a product of, and numbers.
    fn of_confidence(&self, row: &Row, sizes: ChainSizes) -> u64 {
        let width = self.sizes.hidden_size as u64;
        match sizes.confidence {
            None => 0,
            Some(true) if sizes.rank > 0 => row.input_values(width + sizes.rank as u64) + 8,
            // The state itself, or its factor.
            Some(_) if row.half_products => row.input_values(width) + 8,
            Some(_) => 8,
        }
    }

    /// Kept of a slot for the loss of a selector whose candidates hold every label: its state by an index;
    /// logits, preferences and scores of candidates; the state, the token before and both in the codebooks' space.
    fn of_selector(&self, sizes: SelectorSizes) -> u64 {
        (self.sizes.hidden_size + 1 + 3 * (sizes.top_k + sizes.rank)) as u64
    }

    /// Gradients under way, at most. That is in the first layer, which comes last: all weights but `fc` and its
    /// own have gradients, and keys and values of the context wait for the layers above.
    fn gradients(&self, row: &Row, slots: u64, trained: u64) -> u64 {
        let (layer, config, tokens) = (self.layer(), &self.sizes, row.tokens * row.parts);
        let later = trained - self.tapped() * layer.width;
        let gathered = 2 * self.layers() * layer.kv * tokens;
        // What one layer adds to its context's gradient: a part of what was gathered is padded to all of it.
        let (context, added) = if row.parts > 1 {
            (gathered, layer.kv * tokens + 3 * gathered)
        } else {
            (tokens * layer.width, tokens * (3 * layer.width + 2 * layer.kv))
        };
        let waiting = if self.layers() > 1 { context } else { 0 };
        if row.is_accelerator() {
            // Those of kernels, from the second convolution of a part of the layer to the first.
            let kernels = slots * config.convolution.map_or(0, |sizes| self.kernel_values(sizes));
            let waiting = waiting + kernels;
            let mlp = layer.gated_gradients(slots);
            let last_matrix = layer.width * layer.inner;
            let in_mlp = later + last_matrix - layer.matrices() + waiting + mlp;
            let in_mlp = in_mlp.max(self.convolved_gradients(later + waiting, slots));
            let attended = waiting + layer.attended_gradients(row, slots, tokens + slots, slots);
            // Queries come after the context: all other weights have gradients.
            let queried = kernels + layer.queried_gradients(slots);
            let in_queries = trained - layer.read * layer.query + queried;
            return in_mlp.max(later - layer.projections() + attended).max(in_queries);
        }
        let of_slot = layer.width + layer.query + 2 * layer.kv;
        let made = if self.layers() > 1 { slots } else { self.ended(slots) };
        let in_mlp = later - layer.matrices() + waiting + layer.mlp_gradients(made);
        let in_attention = waiting + layer.attention_gradients(row, made, tokens + slots, slots);
        let in_context = slots * of_slot + added;
        in_mlp.max(later - layer.projections() + in_attention.max(in_context))
    }

    /// Gradients under way around the first layer's MLP where an accelerator's convolutions stand around it, beside
    /// `others` and those of kernels: in the MLP, or before it, when all of its matrices have theirs. That of the
    /// residual waits.
    fn convolved_gradients(&self, others: u64, slots: u64) -> u64 {
        if self.sizes.convolution.is_none() {
            return 0;
        }
        let layer = self.layer();
        let matrix = layer.width * layer.inner;
        let inside = layer.gated_gradients(slots) + slots * layer.width + matrix;
        let before = (2 + COMPOSED_GRADIENTS as u64) * layer.width * slots + 3 * matrix;
        others - layer.matrices() + inside.max(before)
    }

    fn packed_bytes(&self, slots: &Row, tokens: u64) -> u64 {
        let (layer, vocabulary) = (self.layer(), self.sizes.draft_vocab_size as u64);
        let kernels = self.sizes.convolution.map_or(0, |sizes| self.kernel_values(sizes));
        let trained = [(tokens, layer.width, layer.kv), (slots.tokens, layer.width, kernels)];
        let of_head = (slots.chunk(vocabulary), layer.width, vocabulary);
        layer
            .packed_bytes(slots, slots.tokens)
            .max(slots.packed_bytes(&ALL_PASSES, &trained))
            .max(slots.packed_bytes(&WEIGHT_PASSES, &[(tokens, self.tapped(), layer.width)]))
            .max(slots.packed_bytes(&INPUT_PASSES, &[of_head]))
    }
}

#[cfg(test)]
mod tests;
