//! What pretraining a language model needs.

use longdraft_models::language_model::{Group, LanguageModelConfig, group_of, tensor_specs};
use longdraft_pretrain::PretrainConfig;
use longdraft_train::footprint::loss::{Against, chunk_bytes, row_bytes};
use longdraft_train::footprint::{ALL_PASSES, F32, Layer, Row, RowMemory, tensor_values};

use crate::communication::{self, Ways};
use crate::estimate::{Estimate, PROCESS, Phase};
use crate::layout::Layout;
use crate::optimizer::Parameters;
use crate::place::{AVERAGES, COPIES, NEW_WEIGHTS, PROGRAM, Places, STATE, SUMS, UPDATE, Updates};

/// What a rank of a pretraining run needs.
pub fn of_pretraining(config: &PretrainConfig, layout: &Layout) -> Estimate {
    let Layout { ranks, threads, .. } = *layout;
    let (tokens, sequence) = config.largest_micro_batch(ranks);
    let row = Row {
        tokens: tokens as u64,
        learned: tokens as u64,
        parts: 1,
        teacher_logits: false,
        threads,
        half_products: threads == 0 && config.precision.frozen_bytes(true) == 2,
        stored_head: false,
        chunk_logits: layout.chunk_logits(!config.model.is_llama()),
    };
    let memory = config.products.within(|| row_memory(&config.model, &row));
    let parameters = parameters(config, &memory, ranks);
    let averages = if config.train.ema_share.is_some() { parameters.weight_bytes() } else { 0 };
    let resident = [
        (PROGRAM, PROCESS),
        ("weights", parameters.weight_bytes()),
        (AVERAGES, averages),
        (STATE, parameters.state_bytes()),
        ("packed operands", memory.packed),
    ];
    let places = places(config, layout);
    let phase = |name, parts: &[(&'static str, u64)]| Phase {
        name,
        items: places.items(resident.iter().chain(parts).copied()),
    };
    let before = ("gradients of batches before", parameters.gradient_bytes());
    let kept = [("activations", memory.activations), ("results of rows", memory.results), before];
    let of_row = |more: &[(&'static str, u64)]| [&kept[..], more].concat();
    // Matrices are orthogonalised side by side: direction, two iterates and new values of each.
    let side_by_side = parameters.sizes.len().min(threads.max(1)) as u64;
    let updates = 4 * side_by_side * parameters.largest_tensor_bytes();
    let mut phases = vec![
        phase("forward", &of_row(&[("chunks of the loss", memory.chunks)])),
        phase("backward", &of_row(&[("gradients under way", memory.backward)])),
        phase("gradients", &of_row(&[("gradients under way", memory.left)])),
    ];
    if ranks > 1 {
        let reduction = (SUMS, parameters.reduction_bytes());
        phases.push(phase("reduction", &[("gradients", parameters.gradient_bytes()), reduction]));
    }
    let update = (UPDATE, parameters.update_bytes(places.updates_on_accelerator()));
    let gathered = (NEW_WEIGHTS, parameters.new_weights_bytes());
    phases.push(phase("update", &[update, gathered, ("updates of matrices", updates)]));
    phases.push(phase("checkpoint", &[(COPIES, parameters.checkpoint_bytes())]));
    let per_token = config.model.training_operations_per_token(sequence);
    let reduction = config.parallel.reduction;
    let ways = Ways::of(layout, reduction);
    Estimate {
        place: places.main(),
        phases,
        sent: communication::of_gradients(&parameters, reduction, ways.sums),
        target_operations: 0.0,
        operations: per_token * config.train.tokens_per_step as f64 / ranks as f64,
        operations_per_token: per_token,
        terms: Vec::new(),
        tokens: config.train.tokens_per_step as u64,
        features_of_row: 0,
    }
}

fn places(config: &PretrainConfig, layout: &Layout) -> Places {
    let reduction = config.parallel.reduction;
    let updates = Updates { reduction, by_muon: true, state_in_file: false };
    Places::of(layout, updates)
}

/// What to lower, the most effective first, each with what the estimate would be.
pub fn pretraining_remedies(config: &PretrainConfig, layout: &Layout) -> Vec<(String, u64)> {
    let bytes = of_pretraining(config, layout).bytes();
    let mut smaller = config.clone();
    smaller.train.micro_batch_tokens = (config.train.micro_batch_tokens / 2).max(1);
    let mut shorter = config.clone();
    shorter.data.row_tokens = (config.data.row_tokens / 2).max(1);
    shorter.train.micro_batch_tokens = smaller.train.micro_batch_tokens;
    let changes = [
        (format!("train.micro_batch_tokens={}", smaller.train.micro_batch_tokens), smaller),
        (
            format!(
                "data.row_tokens={} train.micro_batch_tokens={}",
                shorter.data.row_tokens, shorter.train.micro_batch_tokens
            ),
            shorter,
        ),
    ];
    let estimated = changes.map(|(text, config)| {
        let bytes = of_pretraining(&config, layout).bytes();
        (text, bytes)
    });
    let mut lower: Vec<_> = estimated.into_iter().filter(|(_, other)| *other < bytes).collect();
    lower.sort_by_key(|(_, bytes)| *bytes);
    lower
}

fn parameters(config: &PretrainConfig, memory: &RowMemory, ranks: usize) -> Parameters {
    let specs = tensor_specs(&config.model);
    Parameters {
        sizes: specs.iter().map(|spec| spec.shape.iter().product()).collect(),
        moments: specs
            .iter()
            .map(|spec| if group_of(&spec.name) == Group::Matrix { 1 } else { 2 })
            .collect(),
        trained: memory.weight_gradients / F32,
        ranks: ranks as u64,
        zero: config.parallel.zero_stage(),
        bucket_bytes: config.parallel.bucket_bytes as u64,
        whole_tensors: true,
        state_in_file: false,
    }
}

/// Memory of a micro-batch.
fn row_memory(config: &LanguageModelConfig, row: &Row) -> RowMemory {
    let (width, vocabulary) = (config.hidden_size as u64, config.vocab_size as u64);
    let layer = Layer {
        width,
        read: width,
        query: width,
        kv: (config.num_key_value_heads * config.head_dim()) as u64,
        heads: config.num_attention_heads as u64,
        inner: config.mlp_width() as u64,
    };
    let specs = tensor_specs(config);
    let (layers, trained) = (config.num_hidden_layers as u64, tensor_values(&specs));
    let more = if config.is_llama() { 0 } else { baseline_values(&layer) };
    // A baseline's last product reads the rectifier's squares, which are counted as a gate.
    let squares = if config.is_llama() { 0 } else { layer.inner - row.input_values(layer.inner) };
    let more = more + if row.is_accelerator() { composed_values(config, &layer, row) } else { 0 };
    // A baseline norms the embeddings; a layer that has a skip adds it.
    let of_skips = if config.is_llama() { 0 } else { 1 + config.encoder_layers() as u64 };
    let of_token = [
        width + 1,                                           // embedding by its id
        config.rope_dimensions() as u64,                     // angles
        layers * (layer.token_values(row) + more - squares), // layers
        of_skips * width,                                    // normed embeddings, skips
        2 * width,                                           // final norm and its gradient
    ];
    // The head's gradient waits.
    let kept = row.tokens * of_token.iter().sum::<u64>() + vocabulary * width + 1;
    let embedding = if config.tie_word_embeddings { 0 } else { vocabulary * width };
    // Gradients of a baseline's normed embeddings wait for all layers.
    let mixed = if config.is_llama() { 0 } else { row.tokens * width };
    let under_way = mixed + gradients(config, &layer, row, trained - embedding);
    let of_head = (row.chunk(vocabulary), width, vocabulary);
    RowMemory {
        activations: F32 * kept,
        chunks: chunk_bytes(row, width, vocabulary, Against::Labels),
        backward: F32 * under_way.max(trained),
        left: F32 * trained,
        results: row_bytes(row.learned),
        packed: layer.packed_bytes(row, row.tokens).max(row.packed_bytes(&ALL_PASSES, &[of_head])),
        weight_gradients: F32 * trained,
    }
}

/// Gradients under way, at most. The first layer comes last: of all `later` weights only its own have none. A
/// baseline's MLP has no gate.
fn gradients(config: &LanguageModelConfig, layer: &Layer, row: &Row, later: u64) -> u64 {
    let tokens = row.tokens;
    let all_but = |matrices: u64| later.saturating_sub(matrices);
    if !row.is_accelerator() {
        let gate = if config.is_llama() { 0 } else { layer.inner };
        let in_mlp = all_but(layer.matrices()) + layer.mlp_gradients(tokens) - tokens * gate;
        let in_attention =
            all_but(layer.projections()) + layer.attention_gradients(row, tokens, tokens, 0);
        return in_mlp.max(in_attention);
    }
    // Of a baseline's rectifier three steps, as many as of a gate.
    let of_mlp = layer.gated_gradients(tokens);
    let in_mlp = all_but(layer.matrices()) + layer.width * layer.inner + of_mlp;
    let in_attention =
        all_but(layer.projections()) + layer.attended_gradients(row, tokens, tokens, 0);
    let in_queries = all_but(layer.read * layer.query) + layer.queried_gradients(tokens);
    in_mlp.max(in_attention).max(in_queries)
}

/// Kept of a token in a layer on an accelerator, whose ops are not fused: of a Llama's MLP its product. Where the own
/// value is taken out of what attention returns, values in f32 beside those that attention keeps.
fn composed_values(config: &LanguageModelConfig, layer: &Layer, row: &Row) -> u64 {
    let twice = if config.exclusive_attention { 2 * layer.kv - layer.key_values(row) } else { 0 };
    twice + if config.is_llama() { layer.gated_onto_values(row) } else { 0 }
}

/// Kept of a token in a layer of the baseline beside what a Llama's keeps.
fn baseline_values(layer: &Layer) -> u64 {
    [
        layer.width,            // mix of the stream and the embeddings
        layer.query + layer.kv, // queries and keys before their norms
        layer.query,            // queries before their gain
        2 * layer.width,        // outputs of attention and MLP before they are scaled
    ]
    .iter()
    .sum()
}

#[cfg(test)]
mod tests {
    use longdraft_models::language_model::DecoderArchitecture;
    use serde_json::json;

    use super::*;
    use crate::communication::Way;
    use crate::place::Place;

    #[test]
    fn gradients_are_summed_where_the_ranks_sum_them() {
        for (reduction, threads, way, place) in [
            ("library", 0, Way::Devices, Place::Accelerator),
            ("rank_order", 0, Way::Host, Place::Host),
            ("library", 1, Way::Host, Place::Host),
        ] {
            let config = json!({
                "output": "o", "data": { "train": ["p"] }, "parallel": { "reduction": reduction },
            });
            let config: PretrainConfig = serde_json::from_value(config).expect("a configuration");
            let estimate = of_pretraining(&config, &Layout::of(2, threads));
            for name in ["gradients", "new weights"] {
                let sent = estimate.sent.iter().find(|sent| sent.name == name).expect("sent");
                assert_eq!(sent.way, way, "{name}, {reduction}, {threads} threads");
            }
            for name in [SUMS, NEW_WEIGHTS] {
                let mut items = estimate.phases.iter().flat_map(|phase| &phase.items);
                let item = items.find(|item| item.name == name).expect("a term");
                assert_eq!(item.place, place, "{name}, {reduction}, {threads} threads");
            }
        }
    }

    #[test]
    fn a_gpu_keeps_what_a_cpu_forms_again() {
        let baseline = LanguageModelConfig::default();
        let llama =
            LanguageModelConfig { architecture: DecoderArchitecture::Llama, ..baseline.clone() };
        for (config, inner) in [(llama, 1), (baseline, 0)] {
            let on = |threads, half_products| {
                let row = Row {
                    tokens: 512,
                    learned: 512,
                    parts: 1,
                    teacher_logits: false,
                    threads,
                    half_products,
                    stored_head: false,
                    chunk_logits: Layout::of(1, threads).chunk_logits(false),
                };
                row_memory(&config, &row)
            };
            let more = 4 * 512 * config.num_hidden_layers * inner * config.mlp_width();
            let (cpu, gpu) = (on(1, false), on(0, false));
            assert_eq!(gpu.activations - cpu.activations, more as u64);
            assert!(cpu.packed > 0 && gpu.packed == 0, "{gpu:?} {cpu:?}");
            // Two norms, queries, keys and values, and what the last product reads.
            let attended = config.num_attention_heads + 2 * config.num_key_value_heads;
            let halved = 2 * config.hidden_size + attended * config.head_dim() + config.mlp_width();
            let less = 2 * 512 * config.num_hidden_layers * halved;
            assert_eq!(gpu.activations - on(0, true).activations, less as u64);
        }
    }
}
