//! Targets with mixtures of experts: from every kind of file, wrong ones, trained on and decoded.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use crate::support::files::change_tensors;
use crate::support::gguf::{file_of, interleaved, name_of};
use crate::support::runs::{decodes_as_plain, trained_alike_from_a_store};
use crate::support::{
    Workshop, complaint, loaded, logits, random_tensors, relative_error, require_words,
    tiny_mixture, with, write_target,
};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Gguf;
use candle_core::{DType, Tensor};
use longdraft_decode::decoder::{DecodeOptions, SpeculativeDecoder};
use longdraft_decode::drafter::{Drafter, LookupDrafter};
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{PackedSequence, Tap, Taps, Target, TargetOptions};
use serde_json::{Value, json};

const FAMILIES: [&str; 3] = ["mixtral", "qwen2_moe", "qwen3_moe"];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn sixteen_bit_weights_stay_close() {
    let dir = tempfile::tempdir().expect("tempdir");
    for family in FAMILIES {
        let folder = dir.path().join(family);
        let mut config = tiny_mixture(family);
        // All experts, so that rounding cannot choose others.
        config["num_experts_per_tok"] = json!(5);
        write_target(&folder, &config);
        let exact = logits(&folder, &TargetOptions::default());
        let largest = exact.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        for dtype in [DType::BF16, DType::F16] {
            let rounded = logits(&folder, &TargetOptions { dtype, ..TargetOptions::default() });
            let error = exact.iter().zip(&rounded).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(error > 0.0 && error < 0.1 * largest, "{family} {dtype:?}: {error}");
        }
    }
}

/// GGUF name of a tensor, and the place of an expert's in its stack.
fn stored_name(name: &str) -> (String, Option<usize>) {
    let name = name_of(name);
    for module in ["mlp.experts.", "block_sparse_moe.experts."] {
        if let Some((layer, rest)) = name.split_once(module) {
            let (expert, matrix) = rest.split_once('.').expect("an expert's matrix");
            let stack = match matrix.trim_end_matches(".weight") {
                "gate_proj" | "w1" => "ffn_gate_exps",
                "up_proj" | "w3" => "ffn_up_exps",
                _ => "ffn_down_exps",
            };
            return (format!("{layer}{stack}.weight"), Some(expert.parse().expect("number")));
        }
    }
    (name, None)
}

/// The family's tiny target as GGUF, `edit`ed; matrices of whole blocks quantised.
fn gguf(
    family: &str,
    config: &Value,
    dtype: GgmlDType,
    edit: impl FnOnce(&mut BTreeMap<String, Tensor>),
) -> Vec<u8> {
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    let mut stacks: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    for (name, mut tensor) in loaded(&random_tensors(config), DType::F32) {
        if family == "mixtral" && (name.contains("q_proj") || name.contains("k_proj")) {
            tensor = interleaved(&tensor, 8);
        }
        match stored_name(&name) {
            (name, Some(expert)) => {
                stacks.entry(name).or_default().insert(expert, tensor);
            }
            (name, None) => {
                // Converters drop the leading one.
                let tensor = if name.contains("inp_shexp") {
                    tensor.flatten_all().expect("row")
                } else {
                    tensor
                };
                tensors.insert(name, tensor);
            }
        }
    }
    for (name, stack) in stacks {
        let stack: Vec<Tensor> = stack.into_values().collect();
        tensors.insert(name, Tensor::stack(&stack, 0).expect("stack"));
    }
    edit(&mut tensors);
    let architecture = match family {
        "mixtral" => "llama".to_owned(),
        other => other.replace('_', ""),
    };
    let mut metadata =
        vec![("general.architecture".to_owned(), Gguf::String(architecture.clone()))];
    let size = |key: &str| config[key].as_u64().expect("a size") as u32;
    for (key, value) in [
        ("embedding_length", size("hidden_size")),
        ("feed_forward_length", size("intermediate_size")),
        ("block_count", 4),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 8),
        ("context_length", 512),
        ("expert_count", 5),
        ("expert_used_count", size("num_experts_per_tok")),
    ] {
        metadata.push((format!("{architecture}.{key}"), Gguf::U32(value)));
    }
    if family != "mixtral" {
        let key = format!("{architecture}.expert_feed_forward_length");
        metadata.push((key, Gguf::U32(size("moe_intermediate_size"))));
    }
    for (key, value) in [("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 1e4)] {
        metadata.push((format!("{architecture}.{key}"), Gguf::F32(value)));
    }
    file_of(&metadata, &tensors.into_iter().collect::<Vec<_>>(), dtype)
}

#[test]
fn gguf_and_folder_of_the_same_weights_agree() {
    let dir = tempfile::tempdir().expect("tempdir");
    for family in FAMILIES {
        let (folder, file) = (dir.path().join(family), dir.path().join(format!("{family}.gguf")));
        let mut config = tiny_mixture(family);
        // The format has no switch for it.
        if family == "qwen3_moe" {
            config["mlp_only_layers"] = json!([2]);
        }
        write_target(&folder, &config);
        std::fs::write(&file, gguf(family, &config, GgmlDType::F32, |_| ())).expect("write");
        let plain = TargetOptions::default();
        assert_eq!(bits(&logits(&folder, &plain)), bits(&logits(&file, &plain)), "{family}");
        // All experts, or rounding would choose others.
        config["num_experts_per_tok"] = 5.into();
        std::fs::write(&file, gguf(family, &config, GgmlDType::Q8_0, |_| ())).expect("write");
        let stored = TargetOptions { as_stored: true, ..TargetOptions::default() };
        let pairs = [&stored, &plain].map(|options| logits(&file, options));
        // Activations beside stored blocks are 8-bit fixed-point numbers.
        let error = relative_error(&pairs[0], &pairs[1]);
        assert!(error <= 0.05, "{family}: {error}");
    }
}

/// A mixture whose rows are whole blocks of 256 values.
fn wide_mixture(family: &str, experts_of_a_token: usize) -> Value {
    let sizes = json!({
        "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256, "num_experts_per_tok": experts_of_a_token
    });
    with(tiny_mixture(family), sizes)
}

/// Matrices as small as trained ones: attention that looks at single tokens would make much of little.
fn calm(tensors: &mut BTreeMap<String, Tensor>) {
    for (name, tensor) in tensors {
        if tensor.rank() > 1 && name != "token_embd.weight" {
            *tensor = (&*tensor * 0.2).expect("scaled");
        }
    }
}

/// Greedy tokens after a prompt that repeats itself, with and without lookup.
fn decoded(target: &Target) -> [Vec<TargetTokenId>; 2] {
    let prompt: Vec<_> = (0..12).map(|i| TargetTokenId(60 + i % 4)).collect();
    let options = DecodeOptions { max_new_tokens: 32, ..DecodeOptions::default() };
    let lookup: Box<dyn Drafter> = Box::new(LookupDrafter::new());
    [None, Some(lookup)].map(|drafter| {
        let mut listener = |_| ControlFlow::Continue(());
        let mut decoder = SpeculativeDecoder::new(target, drafter);
        decoder.generate(&prompt, &options, &mut listener).expect("tokens").tokens
    })
}

/// By how much each token of `tokens` falls short of the best one, as a share of the deviation of the
/// logits before it.
fn regrets(target: &Target, tokens: &[TargetTokenId]) -> Vec<f32> {
    let prompt = (0..12).map(|i| 60 + i % 4);
    let ids: Vec<u32> = prompt.chain(tokens.iter().map(|token| token.0)).collect();
    let taps = Taps::of(&[Tap::FinalHidden]);
    let features = target.forward(&PackedSequence::single(&ids), &taps).expect("forward");
    let ends = target.hold_ends().expect("ends");
    let logits = ends.logits(features.final_hidden().expect("tapped")).expect("logits");
    let rows = logits.to_vec2::<f32>().expect("rows");
    let regret = |(row, token): (&Vec<f32>, &TargetTokenId)| {
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let size = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        (best - row[token.0 as usize]) / size.sqrt()
    };
    rows[11..].iter().zip(tokens).map(regret).collect()
}

/// Stacks `[E, O, I]` of K-quants, read expert by expert and held as blocks.
#[test]
fn experts_of_large_blocks_decode_as_their_values_do() {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("model.gguf");
    let types = [
        ("Q2_K", GgmlDType::Q2K),
        ("Q3_K", GgmlDType::Q3K),
        ("Q4_K", GgmlDType::Q4K),
        ("Q5_K", GgmlDType::Q5K),
        ("Q6_K", GgmlDType::Q6K),
    ];
    for (family, (name, dtype)) in FAMILIES.into_iter().cycle().zip(types) {
        let open = |as_stored| {
            let options = TargetOptions { as_stored, ..TargetOptions::default() };
            Target::open_path(&file, &options).expect("target")
        };
        // All experts: rounding would choose others.
        std::fs::write(&file, gguf(family, &wide_mixture(family, 5), dtype, calm)).expect("file");
        let (stored, widened) = (open(true), open(false));
        let experts = 4 * 3 * 5 * 256 * 256 * dtype.type_size() / dtype.block_size();
        let held = stored.held().iter().find(|(held, _)| *held == name).expect("blocks").1;
        assert!(held as usize > experts, "{family} {name}: {held}");
        let [plain, drafted] = decoded(&stored);
        assert_eq!(plain, drafted, "{family} {name}");
        let largest = regrets(&widened, &plain).into_iter().fold(0.0, f32::max);
        assert!(largest <= 0.05, "{family} {name}: {largest}");
        // Two of the five, as such files are used.
        std::fs::write(&file, gguf(family, &wide_mixture(family, 2), dtype, calm)).expect("file");
        let [plain, drafted] = decoded(&open(true));
        assert_eq!(plain, drafted, "{family} {name}, two experts");
    }
}

#[test]
fn stacks_of_another_number_of_experts_are_named() {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("model.gguf");
    let config = tiny_mixture("qwen3_moe");
    let refusal = || {
        let opened = Target::open_path(&file, &TargetOptions::default()).map(|_| ());
        opened.expect_err("an unusable file").to_string()
    };
    let short = gguf("qwen3_moe", &config, GgmlDType::F32, |tensors| {
        let stack = tensors.get_mut("blk.1.ffn_up_exps.weight").expect("stack");
        let four = Tensor::new(&[0_u32, 1, 2, 3], stack.device()).expect("places");
        *stack = stack.index_select(&four, 0).expect("four");
        tensors.remove("blk.3.ffn_down_exps.weight");
    });
    std::fs::write(&file, short).expect("write");
    let text = refusal();
    assert!(text.contains("`blk.1.ffn_up_exps.weight` has shape [4, 32, 32]"), "{text}");
    assert!(text.contains("5 experts expected"), "{text}");
    let without = gguf("qwen3_moe", &config, GgmlDType::F32, |tensors| {
        tensors.remove("blk.3.ffn_down_exps.weight");
    });
    std::fs::write(&file, without).expect("write");
    let text = refusal();
    require_words(&text, &["`model.layers.3.mlp.experts.4.down_proj.weight`", "is missing"]);
}

#[test]
fn missing_and_misshapen_experts_are_named_at_once() {
    let dir = tempfile::tempdir().expect("tempdir");
    for (family, module, down) in
        [("mixtral", "block_sparse_moe", "w2"), ("qwen3_moe", "mlp", "down_proj")]
    {
        let folder = dir.path().join(family);
        let mut config = tiny_mixture(family);
        write_target(&folder, &config);
        let dropped = [
            format!("model.layers.1.{module}.experts.3.{down}.weight"),
            format!("model.layers.2.{module}.gate.weight"),
        ];
        change_tensors(folder.join("model.safetensors"), |tensors| {
            tensors.retain(|(name, _)| !dropped.contains(name));
        });
        let text = complaint(&folder);
        for name in &dropped {
            assert!(text.contains(name.as_str()), "{name} not in {text}");
        }
        for key in ["moe_intermediate_size", "intermediate_size"] {
            config[key] = json!(31);
        }
        std::fs::write(folder.join("config.json"), config.to_string()).expect("config");
        let text = complaint(&folder);
        let named = format!("model.layers.0.{module}.experts.0.{down}.weight` has shape [32, ");
        assert!(text.contains(&named), "{text}");
    }
}

#[test]
fn impossible_routing_is_refused_before_any_weight_is_read() {
    let dir = tempfile::tempdir().expect("tempdir");
    write_target(dir.path(), &tiny_mixture("qwen3_moe"));
    for (key, value, part) in [
        ("num_experts_per_tok", json!(6), "`num_experts_per_tok` = 6 exceeds `num_experts` = 5"),
        ("num_experts_per_tok", json!(0), "`num_experts_per_tok` = 0"),
        ("num_experts_per_tok", Value::Null, "`num_experts_per_tok` is missing"),
        ("num_experts", json!(u64::MAX), "`num_experts` ="),
        ("num_experts", json!(1 << 19), "more than 131072 in all"),
        ("moe_intermediate_size", json!(0), "`moe_intermediate_size` = 0"),
        ("decoder_sparse_step", json!(0), "`decoder_sparse_step` = 0"),
        ("mlp_only_layers", json!(["a"]), "`mlp_only_layers`"),
        ("layer_types", json!(["full_attention"]), "`layer_types` lists 1 of"),
    ] {
        let mut config = tiny_mixture("qwen3_moe");
        config[key] = value;
        std::fs::write(dir.path().join("config.json"), config.to_string()).expect("config");
        let text = complaint(dir.path());
        assert!(text.contains(part), "{part} not in {text}");
    }
}

/// Trains, captures, trains on what was captured, extracts and decodes with either method.
#[test]
fn drafts_train_and_decode_on_a_mixture_like_on_any_target() {
    let eagle3 = ["draft.method=eagle3", "draft.target_layers=[2,0,1]", "draft.ttt_steps=3"];
    for (family, options) in [
        ("qwen3_moe", &["draft.init=last_layer"][..]),
        ("mixtral", &eagle3),
        ("qwen2_moe", &eagle3),
    ] {
        let shop = Workshop::new();
        write_target(&shop.target, &tiny_mixture(family));
        let options = [options, &["data.anchor.redraw=false"]].concat();
        let drafted = trained_alike_from_a_store(&shop, &options);
        decodes_as_plain(&shop, &drafted, family);
    }
}
