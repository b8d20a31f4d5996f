//! Bytes of features: while they are made or read, and while they wait.

use longdraft_features::TeacherKind;
use longdraft_train::footprint::F32;

use crate::target::ForwardPass;
use crate::workload::Workload;

/// Bytes of a most likely token: id and log-probability.
const ENTRY: u64 = 8;

impl Workload {
    /// Bytes while a row's features are made or read: a layer of the target, or what it put out with the
    /// copies that are cut from that; of a store, a row as it is read beside its features.
    pub(crate) fn source_bytes(&self) -> u64 {
        if self.features.store().is_some() {
            return self.record_bytes() + self.feature_bytes();
        }
        let (tokens, width) = (self.row().tokens, self.target.hidden_size as u64);
        // Keys before rotation and the final states, or the layers one by one.
        let copied = if self.taps_keys() {
            self.target.kv_size() as u64 + self.final_values()
        } else {
            self.tapped_layers().len() as u64 * width
        };
        let copies = self.feature_bytes() + F32 * tokens * copied;
        let pass = self.forward_pass();
        if self.run_rows() > self.own_rows() {
            // The own row is run, others of the ranks that share the layers are under way.
            let others = ForwardPass { tapped: 0, ..pass }.layer_bytes(&self.target);
            return (others + F32 * tokens * self.tapped_values()).max(copies);
        }
        pass.layer_bytes(&self.target).max(copies)
    }

    /// Bytes of a row's features: what the draft taps, and of the teacher `4 T H` or `8 T k`. Keys of a
    /// row that ranks share are gathered.
    pub(crate) fn feature_bytes(&self) -> u64 {
        let row = self.row();
        let gathered = if self.taps_keys() { row.parts } else { 1 };
        self.tapped_bytes(row.tokens * gathered) + self.teacher_bytes()
    }

    /// Bytes of what the draft taps of so many tokens: `8 T K D` of keys and values, `4 T Ht` of a layer.
    fn tapped_bytes(&self, tokens: u64) -> u64 {
        let keys = if self.taps_keys() { 2 * self.target.kv_size() } else { 0 };
        let layers = self.tapped_layers().len() * self.target.hidden_size;
        F32 * tokens * (keys + layers) as u64
    }

    fn teacher_bytes(&self) -> u64 {
        let (tokens, width) = (self.row().tokens, self.target.hidden_size as u64);
        let stored = self.features.store().is_some();
        match self.draft.teacher() {
            TeacherKind::None => 0,
            TeacherKind::TopK(k) => ENTRY * tokens * k as u64,
            // A store keeps the tokens alone; the target hands out its states.
            TeacherKind::EveryTokenTopK(k) if stored => ENTRY * tokens * k as u64,
            _ => F32 * tokens * width,
        }
    }

    /// Bytes of a row as it lies in a store, widened to f32.
    pub(crate) fn record_bytes(&self) -> u64 {
        self.tapped_bytes(self.row().tokens) + self.teacher_bytes()
    }

    /// Rows that `train.features: memory` holds: a rank's part of all, which other epochs may change, or
    /// at least those of a step.
    pub(crate) fn rows_in_memory(&self) -> u64 {
        self.training_rows.map_or(self.own_rows(), |rows| {
            let others = if self.layout.ranks > 1 { self.own_rows() } else { 0 };
            rows.div_ceil(self.layout.ranks as u64) + others
        })
    }

    /// Values of a token that a pass hands out: of the last layer keys before and after their rotation, and
    /// values; or tapped layers; and the final states.
    fn tapped_values(&self) -> u64 {
        let keys = if self.taps_keys() { 3 * self.target.kv_size() } else { 0 };
        let layers = self.tapped_layers().len() * self.target.hidden_size;
        self.final_values() + (keys + layers) as u64
    }

    /// Values of a token's final states, if a teacher reads them.
    fn final_values(&self) -> u64 {
        let is_read = self.draft.teacher() != TeacherKind::None;
        if is_read { self.target.hidden_size as u64 } else { 0 }
    }
}
