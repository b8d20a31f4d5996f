//! Bytes of features: while they are made or read, and while they wait.

use longdraft_features::TeacherKind;
use longdraft_features::store::StoreDtype;
use longdraft_train::footprint::F32;

use crate::target::ForwardPass;
use crate::workload::Workload;

/// Bytes of a most likely token: id and log-probability.
const ENTRY: u64 = 8;
/// Bytes of a bf16.
const HALF: u64 = 2;

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
        self.tapped_bytes(row.tokens * gathered, [F32; 2]) + self.teacher_bytes(F32)
    }

    /// Bytes of what the draft taps of so many tokens, of so many bytes a value of keys and values, `2 T K D`, and of
    /// layers, `T Ht` each.
    fn tapped_bytes(&self, tokens: u64, [of_keys, of_layers]: [u64; 2]) -> u64 {
        let keys = if self.taps_keys() { 2 * self.target.kv_size() as u64 } else { 0 };
        let layers = (self.tapped_layers().len() * self.target.hidden_size) as u64;
        tokens * (of_keys * keys + of_layers * layers)
    }

    /// Bytes of what the teacher hands out, of so many bytes a value of its states.
    fn teacher_bytes(&self, of_states: u64) -> u64 {
        let (tokens, width) = (self.row().tokens, self.target.hidden_size as u64);
        let stored = self.features.store().is_some();
        match self.draft.teacher() {
            TeacherKind::None => 0,
            TeacherKind::TopK(k) => ENTRY * tokens * k as u64,
            // A store keeps the tokens alone; the target hands out its states.
            TeacherKind::EveryTokenTopK(k) if stored => ENTRY * tokens * k as u64,
            _ => of_states * tokens * width,
        }
    }

    /// Bytes of a row of a store as it is read: for an accelerator as the store holds it, but for layers of 8 bits, which
    /// are widened to f32 as all is for a CPU.
    pub(crate) fn record_bytes(&self) -> u64 {
        let (of_states, of_layers) = match self.stored_as {
            _ if !self.layout.is_accelerator() => (F32, F32),
            StoreDtype::F32 => (F32, F32),
            StoreDtype::Int8 => (HALF, F32),
            StoreDtype::Bf16 => (HALF, HALF),
        };
        let tapped = self.tapped_bytes(self.row().tokens, [of_states, of_layers]);
        tapped + self.teacher_bytes(of_states)
    }

    /// Rows that `train.features: memory` holds at the end of the run, about: the rank with most rows takes another
    /// share of all of them in every epoch, since each has an order of its own, and keeps them all. Where the text is
    /// not read yet, those of a step.
    pub(crate) fn rows_in_memory(&self) -> u64 {
        let Some(rows) = self.training_rows else { return self.own_rows() };
        let share = (self.own_rows() as f64 / self.rows_per_step.max(1) as f64).min(1.0);
        let epochs = self.extent.epochs(rows, (self.rows_per_step, self.row_tokens));
        let missed = (1.0 - share).powf(epochs.floor()) * (1.0 - share * epochs.fract());
        ((rows as f64 * (1.0 - missed)).ceil() as u64).max(self.own_rows()).min(rows)
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::Layout;
    use crate::sample::workload;

    #[test]
    fn a_gpu_reads_rows_as_a_store_holds_them() {
        let bytes = |dtype: &str, threads: usize| {
            let given = json!({
                "data": { "row_tokens": 1024 }, "train": { "features": "STORE" },
                "capture": { "dtype": dtype },
            });
            workload("eagle3", &given, Layout::of(1, threads)).record_bytes()
        };
        // Three tapped layers and the final states.
        let values = 1024 * 4096;
        assert_eq!(bytes("bf16", 1), 4 * 4 * values);
        assert_eq!(bytes("bf16", 0), 2 * 4 * values);
        assert_eq!(bytes("f32", 0), 4 * 4 * values);
        assert_eq!(bytes("int8", 0), (4 * 3 + 2) * values);
    }

    #[test]
    fn every_epoch_brings_a_rank_other_rows_to_keep() {
        let rows = |layout: Layout, train: &[(&str, u64)]| {
            let mut given = json!({
                "data": { "row_tokens": 100 },
                "train": { "features": "memory", "rows_per_step": 8 },
            });
            train.iter().for_each(|(key, value)| given["train"][*key] = (*value).into());
            workload("eagle3", &given, layout).with_training_rows(1024).rows_in_memory()
        };
        let four = Layout::of(4, 1);
        assert_eq!(rows(Layout::of(1, 1), &[("epochs", 3)]), 1024);
        assert_eq!(rows(four, &[("epochs", 1)]), 256);
        // 1 - (3/4)^2, and 1 - (3/4)^10.
        assert_eq!((rows(four, &[("epochs", 2)]), rows(four, &[("epochs", 10)])), (448, 967));
        // Two groups of two ranks.
        assert_eq!(rows(Layout { sequence: 2, ..four }, &[("epochs", 2)]), 768);
        // Two epochs, told otherwise; and half of one.
        assert_eq!(rows(four, &[("steps", 256)]), 448);
        assert_eq!(rows(four, &[("tokens", 2 * 1024 * 100)]), 448);
        assert_eq!(rows(four, &[("steps", 64)]), 128);
        // The one row of a step is always the first rank's.
        assert_eq!(rows(four, &[("rows_per_step", 1), ("epochs", 1)]), 1024);
    }
}
