//! Which terms are alive together, and what they come to.

use longdraft_features::{FeatureMode, TeacherKind};
use longdraft_models::target_model::Layers;
use longdraft_parallel::ZeroStage;
use longdraft_train::footprint::{F32, Operations, RowMemory};
use serde::Serialize;

use crate::communication::{self, RowTraffic, Sent, Way, Ways};
use crate::operations::OfTarget;
use crate::optimizer::Parameters;
use crate::place::{
    COPIES, DRAFT, FACTORS, GATHERED_DRAFT, GATHERED_TARGET, Item, NEW_WEIGHTS, ON_THEIR_WAY,
    PAGE_LOCKED, PROGRAM, Place, SPREAD_TARGET, STATE, SUMS, TARGET, UPDATE,
};
use crate::roofline::Term;
use crate::target::{self, ForwardPass, States};
use crate::workload::{EMBEDDING, Workload};

/// Bytes of the program itself: code, runtime, thread stacks.
pub(crate) const PROCESS: u64 = 24 << 20;

/// Bytes of a message-passing library and its buffers on a rank, as measured with Open MPI 4 on one
/// host.
const MESSAGES: u64 = 14 << 20;

/// A part of a step and what is alive in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Phase {
    /// Which part.
    pub name: &'static str,
    /// Its terms.
    pub items: Vec<Item>,
}

impl Phase {
    /// Sum of the terms of one memory.
    pub fn bytes(&self, place: Place) -> u64 {
        self.items.iter().filter(|item| item.place == place).map(|item| item.bytes).sum()
    }
}

/// What a rank needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// The memory that models and activations lie in.
    pub place: Place,
    /// Parts of a step, in their order.
    pub phases: Vec<Phase>,
    /// What the rank sends in a step.
    pub sent: Vec<Sent>,
    /// Floating-point operations of the rank in a step.
    pub operations: f64,
    /// Those of them that are the target's.
    pub target_operations: f64,
    /// Operations of training on a token.
    pub operations_per_token: f64,
    /// What its kernels do on a GPU; of pretraining that is not known.
    #[serde(skip)]
    pub(crate) terms: Vec<Term>,
    /// Tokens of a step over all ranks, if rows are full.
    pub tokens: u64,
    /// Bytes of the features of a row.
    pub features_of_row: u64,
}

impl Estimate {
    /// The part that needs most of the memory that models lie in.
    ///
    /// # Panics
    /// - there are no parts, which no estimate of a [`Workload`] lacks
    pub fn peak(&self) -> &Phase {
        let largest = self.phases.iter().max_by_key(|phase| phase.bytes(self.place));
        largest.expect("a step has parts")
    }

    /// Bytes of the part that needs most of the memory that models lie in.
    pub fn bytes(&self) -> u64 {
        self.bytes_in(self.place)
    }

    /// Bytes of one memory, at most.
    pub fn bytes_in(&self, place: Place) -> u64 {
        self.phases.iter().map(|phase| phase.bytes(place)).max().unwrap_or(0)
    }

    /// Bytes that the rank sends in a step.
    pub fn sent_bytes(&self) -> u64 {
        self.sent.iter().map(|sent| sent.bytes).sum()
    }
}

impl Workload {
    /// What the rank with most rows needs, if rows are full and all their tokens are learned.
    pub fn estimate(&self) -> Estimate {
        self.products.within(|| self.estimate_within())
    }

    fn estimate_within(&self) -> Estimate {
        let row = self.row_memory();
        let parameters = self.parameters(&row);
        let (of_target, of_draft) = self.operations_per_token();
        let tokens = self.rows_per_step * self.row_tokens;
        // Rows are whole: a rank learns its part of its own, and runs its part of the target over those of all that share
        // its layers.
        let of_rows =
            |per_token: f64, rows: u64| per_token * rows as f64 * self.row().tokens as f64;
        let target_operations = of_rows(of_target.total(), self.run_rows()) / self.tensor() as f64;
        Estimate {
            place: self.places().main(),
            phases: self.phases(&row, &parameters),
            sent: self.sent(&parameters),
            operations: target_operations + of_rows(of_draft.total(), self.own_rows()),
            target_operations,
            operations_per_token: of_target.total() + of_draft.total(),
            terms: self.terms((of_target, &of_draft), &row, &parameters),
            tokens,
            features_of_row: self.feature_bytes(),
        }
    }

    fn phases(&self, row: &RowMemory, parameters: &Parameters) -> Vec<Phase> {
        let (resident, places) = (self.resident(row, parameters), self.places());
        let held = if self.draft.holds_step() { self.own_rows() } else { 1 } * self.feature_bytes();
        let (held, kept) = match self.features {
            FeatureMode::Memory => (0, self.rows_in_memory() * self.feature_bytes()),
            FeatureMode::Online => (held, 0),
            // The next row is read meanwhile.
            FeatureMode::Stored(_) => (held + self.record_bytes(), 0),
        };
        let summed = if self.own_rows() > 1 { parameters.gradient_bytes() } else { 0 };
        let whole = parameters.gathered_weight_bytes();
        // Products of 16 bits read weights that are turned once a step, or that the update wrote so and keeps.
        let turned = self.layout.has_half_products();
        let factors = if turned { parameters.weight_bytes().max(whole) / 2 } else { 0 };
        // A rank that updates a part of the weights writes none of them so.
        let is_whole = !parameters.is_sharded();
        let is_written = self.layout.half_states && places.updates_on_accelerator() && is_whole;
        let [written, made] = if is_written { [factors, 0] } else { [0, factors] };
        let phase = |name, parts: Vec<(&'static str, u64)>| {
            let always = [("features kept in memory", kept), (FACTORS, written)];
            let all = resident.into_iter().chain(always).chain(parts);
            Phase { name, items: places.items(all) }
        };
        let before =
            if self.draft.holds_step() { held - self.feature_bytes().min(held) } else { 0 };
        let accumulated =
            ("gradients of rows before", if self.draft.holds_step() { 0 } else { summed });
        let [running, learning] = self.whole_bytes();
        let mut phases = vec![phase(
            "features",
            vec![
                accumulated,
                ("features", before),
                (GATHERED_TARGET, running),
                ("target forward", self.source_bytes()),
            ],
        )];
        if self.draft.holds_step() {
            let planning = self.draft.planning_bytes(&self.row());
            let rows = [("features", held), ("teacher of the rows", planning)];
            let gathered = (GATHERED_TARGET, learning);
            phases.push(phase("rows", [&rows[..], &[gathered]].concat()));
        }
        let common = |more: [(&'static str, u64); 3]| {
            let mut parts = vec![
                (GATHERED_DRAFT, whole),
                (GATHERED_TARGET, learning),
                ("features", held),
                ("activations", row.activations),
                ("results of rows", row.results),
                (FACTORS, made),
            ];
            parts.extend(more);
            parts
        };
        let summed = ("gradients of rows before", summed);
        let chunks = ("chunks of the loss", row.chunks);
        let backward = ("gradients under way", row.backward);
        // They stay where they are. An accelerator forms a further row's gradients of weights onto those before; how many
        // of them are among those under way at the worst moment is not known here, so the backward phase counts all of them twice.
        let is_added = self.layout.is_accelerator() && summed.1 > 0;
        let formed_onto = if is_added { row.weight_gradients.min(row.left) } else { 0 };
        let left = [("gradients under way", row.left - formed_onto), summed, ("", 0)];
        phases.push(phase("forward", common([chunks, summed, ("", 0)])));
        phases.push(phase("backward", common([backward, summed, ("", 0)])));
        phases.push(phase("gradients", common(left)));
        let waiting =
            if matches!(self.features, FeatureMode::Stored(_)) { self.record_bytes() } else { 0 };
        if parameters.ranks > 1 {
            let gradients = ("gradients", parameters.gradient_bytes());
            let reduction = (SUMS, parameters.reduction_bytes());
            phases.push(phase("reduction", vec![("features", waiting), gradients, reduction]));
        }
        let update = (UPDATE, parameters.update_bytes(places.updates_on_accelerator()));
        let gathered = (NEW_WEIGHTS, parameters.new_weights_bytes());
        phases.push(phase("update", vec![("features", waiting), update, gathered]));
        let copies = (COPIES, parameters.checkpoint_bytes());
        phases.push(phase("checkpoint", vec![("features", waiting), copies]));
        phases
    }

    /// What is there all the time.
    fn resident(&self, row: &RowMemory, parameters: &Parameters) -> [(&'static str, u64); 8] {
        let accelerated = self.layout.is_accelerator() && self.features.store().is_some();
        [
            (PROGRAM, PROCESS + if parameters.ranks > 1 { MESSAGES } else { 0 }),
            (ON_THEIR_WAY, if accelerated { self.record_bytes() + PAGE_LOCKED } else { 0 }),
            (TARGET, self.whole_target_bytes()),
            (SPREAD_TARGET, self.spread_target_bytes()),
            ("rows of the target's head", self.kept_head_bytes()),
            (DRAFT, parameters.weight_bytes()),
            (STATE, parameters.state_bytes()),
            ("packed operands", row.packed.max(self.target_packed_bytes())),
        ]
    }

    /// Bytes of some of the target's layers with embedding and head.
    pub(crate) fn layers_bytes(&self, layers: Layers) -> u64 {
        target::weight_bytes(&self.target, layers, &self.held(), self.tensor())
    }

    /// Whether a rank holds a part of the target's weights only.
    fn is_spread(&self) -> bool {
        self.zero == ZeroStage::Weights && self.layout.ranks > 1
    }

    /// Bytes of the target's weights that a rank holds whole; under ZeRO-3 embedding and head, if the draft keeps them.
    fn whole_target_bytes(&self) -> u64 {
        match (self.is_spread(), self.draft.keeps_ends()) {
            (false, _) => self.layers_bytes(self.layers),
            (true, true) => self.layers_bytes(Layers::None),
            (true, false) => 0,
        }
    }

    /// Bytes of the part of a spread target that a rank always holds.
    fn spread_target_bytes(&self) -> u64 {
        let shards = self.layout.ranks as u64;
        if self.is_spread() { self.layers_bytes(self.layers).div_ceil(shards) } else { 0 }
    }

    /// Bytes of a spread target that a rank puts together: two layers, of which one is gathered
    /// while the other computes, or the embedding; and while the draft learns, embedding and head.
    fn whole_bytes(&self) -> [u64; 2] {
        if !self.is_spread() {
            return [0; 2];
        }
        let ends = self.layers_bytes(Layers::None);
        let layer = self.layers_bytes(Layers::Last) - ends;
        let online = self.features.store().is_none();
        [if online { (2 * layer).max(self.embedding_bytes()) } else { ends }, ends]
    }

    fn embedding_bytes(&self) -> u64 {
        let values = self.target.vocab_size * self.target.hidden_size;
        self.held().bytes(EMBEDDING, values as u64)
    }

    /// Bytes of the target that ZeRO-3 gathers for a row: every layer once; and of its ends the embedding for its
    /// lookup, embedding and head while the draft learns, and once more for a distribution's most
    /// likely tokens or for what a store holds.
    fn gathered_bytes(&self) -> [u64; 2] {
        let ends = self.layers_bytes(Layers::None);
        let layers = self.layers_bytes(self.layers) - ends;
        if self.features.store().is_some() {
            return [0, 2 * ends];
        }
        let distribution =
            if matches!(self.draft.teacher(), TeacherKind::TopK(_)) { ends } else { 0 };
        [layers, self.embedding_bytes() + ends + distribution]
    }

    /// Bytes of the rows of the target's head that the draft keeps, for its loss and as a head of its own.
    fn kept_head_bytes(&self) -> u64 {
        let kept = self.held().bytes(self.head_name(), self.draft.kept_head_values() as u64);
        kept + F32 * self.draft.own_head_values() as u64
    }

    pub(crate) fn forward_pass(&self) -> ForwardPass {
        let last = self.target.num_hidden_layers.saturating_sub(1);
        let tapped = self.tapped_layers().into_iter().filter(|layer| *layer < last).count() as u64;
        ForwardPass {
            tokens: self.row().tokens,
            parts: self.parts(),
            tensor: self.tensor(),
            tapped,
            finishes: self.draft.teacher() != TeacherKind::None,
            states: match (self.layout.is_accelerator(), self.layout.half_states) {
                (false, _) => States::OfCpu,
                (true, false) => States::Single,
                (true, true) => States::Half,
            },
            taps_keys: self.taps_keys(),
        }
    }

    fn target_packed_bytes(&self) -> u64 {
        if self.features.store().is_some() {
            return 0;
        }
        self.forward_pass().packed_bytes(&self.target, self.layout.threads)
    }

    fn sent(&self, parameters: &Parameters) -> Vec<Sent> {
        let ways = Ways::of(&self.layout, self.reduction);
        let mut sent = communication::of_gradients(parameters, self.reduction, ways.sums);
        let online = self.features.store().is_none();
        let tokens = self.row().tokens * self.parts();
        let ahead = (self.draft.ahead() as u64).min(self.row().tokens);
        let states = if online { ahead * self.target.hidden_size as u64 } else { 0 };
        let keys = tokens * self.draft.gathered_key_values() as u64;
        let [draft_keys, teacher_ahead] = [keys, states].map(|values| F32 * values);
        let traffic = RowTraffic {
            rows: self.own_rows(),
            ranks: parameters.ranks,
            parts: self.parts(),
            tensor: self.tensor(),
            run_rows: self.run_rows(),
            finishes: self.forward_pass().finishes,
            taps_keys: self.taps_keys(),
            tokens: self.row().tokens,
            layers: if online { self.target.num_hidden_layers as u64 } else { 0 },
            half_layers: if online { self.half_layers(ways.sums) } else { 0 },
            gathered_bytes: self.gathered_bytes(),
            gathers_ahead: self.parts() == 1,
            ways,
            draft_keys,
            teacher_ahead,
        };
        sent.extend(traffic.all(&self.target, parameters));
        sent.retain(|sent| sent.bytes > 0);
        sent
    }

    /// Layers whose heads ranks exchange in bf16: where their devices do it, but for what is handed out.
    fn half_layers(&self, way: Way) -> u64 {
        if !self.layout.half_states || way == Way::Host {
            return 0;
        }
        let handed_out = self.target.last_attention_layer().filter(|_| self.taps_keys());
        let layers = (0..self.target.num_hidden_layers).filter(|layer| Some(*layer) != handed_out);
        layers.filter(|layer| self.target.has_half_heads(*layer)).count() as u64
    }

    /// Operations of a token: the target's and the draft's.
    fn operations_per_token(&self) -> (OfTarget, Operations) {
        let document = self.document_tokens();
        let of_target = if self.features.store().is_some() {
            OfTarget::default()
        } else {
            let specs = Layers::All.tensor_specs(&self.target);
            OfTarget::new(&self.target, &specs, document)
        };
        (of_target, self.draft.operations(&self.row(), document))
    }
}

#[cfg(test)]
mod tests;
