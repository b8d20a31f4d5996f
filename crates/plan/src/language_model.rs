//! What pretraining a language model needs.

use longdraft_kernels::linear::Pass;
use longdraft_models::language_model::{Group, LanguageModelConfig, group_of, tensor_specs};
use longdraft_pretrain::PretrainConfig;
use longdraft_train::footprint::graph::{Angles, Graph, Matrix};
use longdraft_train::footprint::loss::{chunk_bytes, row_bytes};
use longdraft_train::footprint::{Row, RowMemory};

use crate::communication;
use crate::estimate::{Estimate, PROCESS, Phase};
use crate::layout::Layout;
use crate::optimizer::Parameters;
use crate::place::{AVERAGES, COPIES, PROGRAM, Places, STATE, SUMS, UPDATE, Updates};

/// What a rank of a pretraining run needs.
pub fn of_pretraining(config: &PretrainConfig, ranks: usize, threads: usize) -> Estimate {
    let (tokens, sequence) = config.largest_micro_batch(ranks);
    let row = Row {
        tokens: tokens as u64,
        learned: tokens as u64,
        parts: 1,
        teacher_logits: false,
        threads,
    };
    let memory = row_memory(&config.model, &row);
    let parameters = parameters(config, &memory, ranks);
    let averages = if config.train.ema_share.is_some() { parameters.weight_bytes() } else { 0 };
    let resident = [
        (PROGRAM, PROCESS),
        ("weights", parameters.weight_bytes()),
        (AVERAGES, averages),
        (STATE, parameters.state_bytes()),
        ("packed operands", memory.packed),
    ];
    let places = places(config, ranks, threads);
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
    let update = (UPDATE, parameters.update_bytes());
    phases.push(phase("update", &[update, ("updates of matrices", updates)]));
    phases.push(phase("checkpoint", &[(COPIES, parameters.checkpoint_bytes())]));
    let per_token = config.model.training_operations_per_token(sequence);
    Estimate {
        place: places.main(),
        phases,
        sent: communication::of_gradients(&parameters, config.parallel.reduction),
        operations: per_token * config.train.tokens_per_step as f64 / ranks as f64,
        operations_per_token: per_token,
        tokens: config.train.tokens_per_step as u64,
        features_of_row: 0,
    }
}

fn places(config: &PretrainConfig, ranks: usize, threads: usize) -> Places {
    let (zero, reduction) = (config.parallel.zero_stage(), config.parallel.reduction);
    let updates = Updates { zero, reduction, by_muon: true, state_in_file: false };
    Places::of(&Layout::of(ranks, threads), updates)
}

/// What to lower, the most effective first, each with what the estimate would be.
pub fn pretraining_remedies(
    config: &PretrainConfig,
    ranks: usize,
    threads: usize,
) -> Vec<(String, u64)> {
    let bytes = of_pretraining(config, ranks, threads).bytes();
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
        let bytes = of_pretraining(&config, ranks, threads).bytes();
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
        trained: memory.weight_gradients / longdraft_train::footprint::graph::F32,
        ranks: ranks as u64,
        zero: config.parallel.zero_stage(),
        bucket_bytes: config.parallel.bucket_bytes as u64,
        whole_tensors: true,
        state_in_file: false,
    }
}

/// Memory of a micro-batch. A Llama's layer keeps, of each token, in f32 values: five states of width
/// `d`, six of the width of queries and keys, and three of the MLP's; a layer of the baseline keeps
/// mixes, scales and gains besides.
fn row_memory(config: &LanguageModelConfig, row: &Row) -> RowMemory {
    let mut graph = Graph::new(row.threads);
    let (width, vocabulary) = (config.hidden_size as u64, config.vocab_size as u64);
    let table = graph.weight("embedding", vocabulary, width);
    let embedded = graph.select(table, row.tokens);
    let angles = graph.angles(row.tokens, config.rope_dimensions() as u64);
    let hidden = if config.is_llama() {
        let mut x = embedded;
        for layer in 0..config.num_hidden_layers {
            graph.enter(format!("{layer}."));
            x = llama_layer(&mut graph, config, x, angles);
        }
        graph.enter("");
        graph.norm(x, Some("final_norm"))
    } else {
        baseline(&mut graph, config, embedded, angles)
    };
    let head =
        if config.tie_word_embeddings { table } else { graph.weight("head", vocabulary, width) };
    let loss = graph.loss(&[hidden, head]);
    let passes = [Pass::Forward, Pass::InputGradient, Pass::WeightGradient];
    passes
        .into_iter()
        .for_each(|pass| graph.pack(pass, (row.chunk(vocabulary), width, vocabulary)));
    let chunks = chunk_bytes(row, width, vocabulary, false);
    RowMemory::of(&graph, loss, chunks, row_bytes(row.learned))
}

fn llama_layer(
    graph: &mut Graph,
    config: &LanguageModelConfig,
    x: Matrix,
    angles: Angles,
) -> Matrix {
    let (width, inner) = (config.hidden_size as u64, config.mlp_width() as u64);
    let kv = (config.num_key_value_heads * config.head_dim()) as u64;
    let normed = graph.norm(x, Some("input_layernorm"));
    let q = graph.linear(normed, "q", width);
    let q = graph.rotate(q, angles);
    let k = graph.linear(normed, "k", kv);
    let k = graph.rotate(k, angles);
    let v = graph.linear(normed, "v", kv);
    let v = graph.view(v);
    let attended = graph.attention(q, [k, v], config.num_attention_heads as u64, 0);
    let attended = graph.linear(attended, "o", width);
    let x = graph.add(x, attended);
    let normed = graph.norm(x, Some("post_attention_layernorm"));
    graph.gated_mlp_onto(x, normed, inner)
}

fn baseline(
    graph: &mut Graph,
    config: &LanguageModelConfig,
    embedded: Matrix,
    angles: Angles,
) -> Matrix {
    let x0 = graph.norm(embedded, None);
    let mut kept = Vec::new();
    let mut x = x0;
    for layer in 0..config.num_hidden_layers {
        graph.enter(format!("{layer}."));
        if layer >= config.encoder_layers()
            && let Some(skip) = kept.pop()
        {
            x = graph.scale(skip, "skip", Some(x));
        }
        x = baseline_layer(graph, config, (x, x0), angles);
        if layer < config.encoder_layers() {
            kept.push(x);
        }
    }
    graph.enter("");
    graph.norm(x, None)
}

fn baseline_layer(
    graph: &mut Graph,
    config: &LanguageModelConfig,
    (x, x0): (Matrix, Matrix),
    angles: Angles,
) -> Matrix {
    let (width, inner) = (config.hidden_size as u64, config.mlp_width() as u64);
    let kv = (config.num_key_value_heads * config.head_dim()) as u64;
    let mixed = graph.scale(x, "mix.0", None);
    let x = graph.scale(x0, "mix.1", Some(mixed));
    let normed = branch(graph, config, x);
    let q = turned(graph, config, (normed, "q", width), angles);
    let k = turned(graph, config, (normed, "k", kv), angles);
    let v = graph.linear(normed, "v", kv);
    let v = graph.view(v);
    let q = graph.view(q);
    let q = graph.scale(q, "q_gain", None);
    let q = graph.view(q);
    let attended = graph.attention(q, [k, v], config.num_attention_heads as u64, 0);
    let attended = graph.linear(attended, "proj", width);
    let x = graph.scale(attended, "attn_scale", Some(x));
    let normed = branch(graph, config, x);
    let hidden = graph.linear(normed, "fc", inner);
    let hidden = graph.relu_squared(hidden);
    let mlp = graph.linear(hidden, "mlp_proj", width);
    graph.scale(mlp, "mlp_scale", Some(x))
}

/// The normed stream that a branch reads.
fn branch(graph: &mut Graph, config: &LanguageModelConfig, x: Matrix) -> Matrix {
    let normed = graph.norm(x, None);
    if config.depth_scaled_norm { graph.relu_squared(normed) } else { normed }
}

/// A projection whose heads are normed and rotated.
fn turned(
    graph: &mut Graph,
    config: &LanguageModelConfig,
    (x, name, outputs): (Matrix, &str, u64),
    angles: Angles,
) -> Matrix {
    let heads = graph.linear(x, name, outputs);
    let heads = graph.view(heads);
    let normed = graph.norm(heads, None);
    if config.rope_dimensions() == config.head_dim() {
        return graph.rotate(normed, angles);
    }
    // Both parts of a head are copied, the first is rotated, and they are put together.
    let share = config.rope_dimensions() as u64 * outputs / config.head_dim() as u64;
    let front = graph.part(normed, share);
    let front = graph.rotate(front, angles);
    let back = graph.part(normed, outputs - share);
    graph.beside(&[front, back])
}
