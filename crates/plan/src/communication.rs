//! Bytes that a rank sends in a step, by collective.
//!
//! Counted is what leaves the rank if every pair talks directly; rings send as much. Counters and flags,
//! some hundred bytes, are left out. A sum that all get is counted as two collectives: blocks to those who sum them, and sums
//! to all.

use longdraft_kernels::adamw::BLOCK;
use longdraft_models::TargetConfig;
use longdraft_parallel::{Reduction, SUMS_BY_NCCL, ZeroStage, exchanged_bytes};
use longdraft_train::footprint::F32;
use serde::Serialize;

use crate::layout::Layout;
use crate::optimizer::Parameters;

/// Where ranks exchange something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// On their GPUs, by NCCL.
    Devices,
    /// Through main memory.
    Host,
}

/// Where ranks exchange what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ways {
    /// Weights, which have the same bits whoever gathers them.
    pub(crate) weights: Way,
    /// What is summed.
    pub(crate) sums: Way,
}

impl Ways {
    /// Those of ranks that have a GPU each, in this build or in one with NCCL where that is asked for; else main memory.
    pub(crate) fn of(layout: &Layout, reduction: Reduction) -> Self {
        let has_nccl = SUMS_BY_NCCL || reduction == Reduction::Library;
        let way = |is_free: bool| {
            let by_nccl = layout.is_accelerator() && has_nccl && is_free;
            if by_nccl { Way::Devices } else { Way::Host }
        };
        Self { weights: way(true), sums: way(reduction != Reduction::RankOrder) }
    }
}

/// What a step sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sent {
    /// What for.
    pub name: &'static str,
    /// Bytes of the rank that sends most.
    pub bytes: u64,
    /// Collectives.
    pub calls: u64,
    /// Neighbouring ranks that take part in each.
    pub ranks: u64,
    /// Where they exchange it.
    pub way: Way,
    /// Whether it is under way while the target computes.
    pub is_beside: bool,
}

/// Gradients to who sums them: everything but the rank's own part, `4 P (N − 1) / N`; and sums or new
/// weights back: the largest part to everybody else, `4 P (N − 1) / N`. Small numbers go to everybody:
/// 8 bytes for every tensor, whether it has a gradient, and where the update is spread 8 for every
/// block of squares that the gradient's norm is made of. Under ZeRO-3 weights are not sent back: they
/// are gathered before their use.
pub(crate) fn of_gradients(parameters: &Parameters, reduction: Reduction, way: Way) -> Vec<Sent> {
    let shares = parameters.shares();
    let others = parameters.ranks.saturating_sub(1);
    // Devices exchange blocks of one size.
    let reduction = if way == Way::Devices { Reduction::Library } else { reduction };
    let exchanged = exchanged_bytes(&shares, parameters.bucket_bytes as usize, reduction);
    let blocks: usize = parameters.sizes.iter().map(|size| size.div_ceil(BLOCK)).sum();
    let squares = if parameters.is_sharded() { blocks } else { 0 };
    let numbers = (parameters.sizes.len() + squares) as u64;
    let back = if parameters.is_sharded() { "new weights" } else { "summed gradients" };
    let gathered = if parameters.zero == ZeroStage::Weights { 0 } else { exchanged.gathered };
    // NCCL sums all tensors in one start.
    let at_once = way == Way::Devices && !parameters.is_sharded();
    let calls = if at_once { 1 } else { exchanged.rounds };
    let of = |name, bytes, calls, way| {
        let (ranks, is_beside) = (parameters.ranks, false);
        Sent { name, bytes, calls, ranks, way, is_beside }
    };
    let of_numbers = 1 + u64::from(parameters.is_sharded());
    let mut sent = vec![
        of("gradients", exchanged.reduced, calls, way),
        of(back, gathered, calls, way),
        of("norm and flags", 8 * numbers * others, of_numbers, Way::Host),
    ];
    sent.retain(|sent| sent.bytes > 0);
    sent
}

/// How rows go through the ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowTraffic {
    pub(crate) rows: u64,
    pub(crate) ranks: u64,
    pub(crate) parts: u64,
    /// Ranks that share every layer of the target.
    pub(crate) tensor: u64,
    /// Rows that these ranks run together.
    pub(crate) run_rows: u64,
    /// Whether the last layer runs to its end.
    pub(crate) finishes: bool,
    /// Whether the draft taps the last layer's keys and values.
    pub(crate) taps_keys: bool,
    pub(crate) tokens: u64,
    /// Layers of the target that run.
    pub(crate) layers: u64,
    /// Those of them whose keys and values ranks exchange in bf16.
    pub(crate) half_layers: u64,
    /// Bytes of the target's layers that ZeRO-3 gathers for a row, and of its ends.
    pub(crate) gathered_bytes: [u64; 2],
    /// Whether a layer is gathered while the one before computes.
    pub(crate) gathers_ahead: bool,
    pub(crate) ways: Ways,
    /// Bytes of the keys and values of a whole row that the draft gathers; their gradients take the same way back.
    pub(crate) draft_keys: u64,
    /// Bytes of the teacher's states at a piece's first tokens, for the rank with the piece before.
    pub(crate) teacher_ahead: u64,
}

impl RowTraffic {
    /// What the ranks that share a row or the weights send for a rank's rows: ZeRO-3 gathers what it uses of
    /// the target and the draft once a row, `(N − 1) / N` of the bytes from every rank's part; sequence
    /// parallelism gathers the target's keys and values, `8 T K·D (S − 1) / S` a layer or half of it in bf16, and EAGLE-3's of the first
    /// step, `8 T K·D (S − 1) / S` there and as much for the gradients on the way back, and the teacher's states at
    /// the first tokens of every piece, of a row of one document. Ranks that share the layers (tensor parallelism) give ids, positions and
    /// documents of their rows to all, `12 T (M − 1)`; for every row that any of them has they sum the states
    /// after attention and MLP, `2 · 8 T H (M − 1) / M` a layer, and gather the keys and values that
    /// the draft taps, `8 T K·D (M − 1) / M`.
    pub(crate) fn all(&self, config: &TargetConfig, draft: &Parameters) -> Vec<Sent> {
        let share = |bytes: u64, ranks: u64| bytes * ranks.saturating_sub(1) / ranks.max(1);
        let kv = config.kv_size() as u64;
        let keys = 2 * F32 * self.tokens * self.parts * kv;
        let states = 2 * 2 * F32 * self.tokens * config.hidden_size as u64;
        let summed = self.layers.saturating_sub(u64::from(!self.finishes));
        let tapped = if self.taps_keys && self.layers > 0 { 2 * F32 * self.tokens * kv } else { 0 };
        let ids = if self.layers > 0 { 3 * F32 * self.tokens } else { 0 };
        let spread = |bytes: u64| match draft.zero {
            ZeroStage::Weights => share(bytes, self.ranks),
            _ => 0,
        };
        // A part is two pieces; one of two parts is a single piece in the middle.
        let lent = self.teacher_ahead * self.parts.saturating_sub(1).min(2);
        let [layers, ends] = self.gathered_bytes.map(spread);
        let rounds =
            exchanged_bytes(&draft.shares(), draft.bucket_bytes as usize, Reduction::Library)
                .rounds;
        let Ways { weights, sums } = self.ways;
        let (ranks, parts, tensor) = (self.ranks, self.parts, self.tensor);
        let of = |rows: u64| {
            move |name, (bytes, calls): (u64, u64), ranks, way| {
                let (bytes, calls, is_beside) = (rows * bytes, rows * calls, false);
                Sent { name, bytes, calls, ranks, way, is_beside }
            }
        };
        let (own, run) = (of(self.rows), of(self.run_rows));
        let of_layers = own("target's layers (ZeRO-3)", (layers, self.layers), ranks, weights);
        vec![
            Sent { is_beside: self.gathers_ahead, ..of_layers },
            own("embedding and head (ZeRO-3)", (ends, 2), ranks, weights),
            own("draft's weights (ZeRO-3)", (spread(F32 * draft.all()), rounds), ranks, sums),
            own(
                "keys and values (sequence)",
                (
                    share(keys, parts) * self.layers - share(keys / 2, parts) * self.half_layers,
                    2 * self.layers,
                ),
                parts,
                sums,
            ),
            own(
                "keys of the draft (sequence)",
                (2 * share(self.draft_keys, parts), 2),
                parts,
                sums,
            ),
            own("teacher after the pieces (sequence)", (lent * (parts - 1), 1), parts, sums),
            own("rows (tensor)", (ids * tensor.saturating_sub(1), 3), tensor, Way::Host),
            // Two sums a layer.
            run("states (tensor)", (share(states, tensor) * summed, 4 * summed), tensor, sums),
            run("keys and values (tensor)", (share(tapped, tensor), 2), tensor, sums),
        ]
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor, Var};
    use longdraft_models::draft::Parameter;
    use longdraft_models::weights::TensorRole;
    use longdraft_parallel::threads::in_threads;
    use longdraft_parallel::{DataParallel, Gradients, ParallelConfig};
    use longdraft_train::optim::{AdamW, AdamWConfig};

    use super::*;

    const SIZES: [usize; 3] = [3 * BLOCK + 17, 40, 2 * BLOCK];

    /// Bytes that the busiest of `ranks` sends in an update.
    fn measured(config: &ParallelConfig, ranks: usize) -> u64 {
        let sent = in_threads(ranks, |world| {
            let parameter = |(index, size): (usize, &usize)| {
                let tensor = Tensor::ones(*size, candle_core::DType::F32, &Device::Cpu);
                let var = Var::from_tensor(&tensor.expect("tensor")).expect("variable");
                let (name, role) = (index.to_string(), TensorRole::Layer);
                Parameter { name, var, role, decay: true, dead: false }
            };
            let parameters: Vec<Parameter> = SIZES.iter().enumerate().map(parameter).collect();
            let parallel = DataParallel::by_blocks(&world, config, &parameters);
            let mut optimizer = AdamW::over(AdamWConfig::default(), &parallel);
            let before = world.traffic();
            let gradients = SIZES.map(|size| Some(vec![0.5; size])).to_vec();
            let sums = parallel.reduce(Gradients::from_values(gradients)).expect("sums");
            let norm = parallel.norm(&sums).expect("norm");
            optimizer.update(&parallel, &parameters, &sums, norm, 1e-3).expect("update");
            let traffic = world.traffic() - before;
            assert_eq!(traffic.seconds > 0.0, ranks > 1, "{traffic:?}");
            traffic.sent_bytes
        });
        sent.into_iter().max().unwrap_or(0)
    }

    #[test]
    fn what_is_predicted_is_what_ranks_send() {
        for ranks in [1, 2, 3, 4] {
            for zero in [0, 1] {
                for reduction in [Reduction::RankOrder, Reduction::Library] {
                    for bucket_bytes in [1024, 1 << 20] {
                        let config =
                            ParallelConfig { zero, bucket_bytes, reduction, ..Default::default() };
                        let parameters = Parameters {
                            sizes: SIZES.to_vec(),
                            moments: vec![2; SIZES.len()],
                            trained: SIZES.iter().sum::<usize>() as u64,
                            ranks: ranks as u64,
                            zero: config.zero_stage(),
                            bucket_bytes: bucket_bytes as u64,
                            whole_tensors: false,
                            state_in_file: false,
                        };
                        let sent = of_gradients(&parameters, reduction, Way::Host);
                        let predicted: u64 = sent.iter().map(|sent| sent.bytes).sum();
                        assert_eq!(
                            measured(&config, ranks),
                            predicted,
                            "{ranks} ranks, {config:?}"
                        );
                    }
                }
            }
        }
    }
}
