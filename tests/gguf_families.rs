//! GGUF files of `deepseek2` and `gemma4`: the bits of the folders that they were made of, blocks, blocks for several
//! tokens, reference cases, hostile headers.

use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Gguf;
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_models::weights::gguf::header::Header;
use serde_json::{Value, json};

use crate::families::{gemma4, latent};
use crate::support::converted::{self, Changes, Form};
use crate::support::{
    add_block, fail, fail_with, last_json, logits, relative_error, shared, succeed, with,
    write_target,
};

type Convert = fn(&Path, &Path, Form, Changes<'_>);

/// A folder of a configuration and where a file made of it goes.
fn folder_of(config: &Value) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().expect("tempdir");
    let folder = dir.path().join("folder");
    write_target(&folder, config);
    let file = dir.path().join("model.gguf");
    (dir, folder, file)
}

fn yarn(mscale: f64) -> Value {
    json!({
        "type": "yarn", "factor": 8.0, "mscale": mscale, "mscale_all_dim": mscale,
        "original_max_position_embeddings": 16
    })
}

fn plain(path: &Path) -> Vec<f32> {
    logits(path, &TargetOptions::default())
}

/// The file's logits are the folder's, bit for bit.
fn same_bits(config: &Value, convert: Convert, form: Form, what: &str) {
    let (_dir, folder, file) = folder_of(config);
    convert(&folder, &file, form, &[]);
    let (wanted, found) = (plain(&folder), plain(&file));
    assert_eq!(wanted.len(), found.len());
    let differ = wanted.iter().zip(&found).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    assert_eq!(differ, 0, "{what}");
}

#[test]
fn files_of_deepseek2_have_the_bits_of_their_folders() {
    let form = Form::default();
    let older = Form { heads_apart: false, ..form };
    let fused = Form { fused: true, ..form };
    for (what, form, changes) in [
        ("newer", form, json!({})),
        ("older", older, json!({})),
        ("fused experts", fused, json!({})),
        ("plain queries", form, json!({ "q_lora_rank": null })),
        ("weights that sum to one", form, json!({ "norm_topk_prob": true })),
        ("yarn", form, json!({ "rope_scaling": yarn(1.0) })),
        ("a head of its own", form, json!({ "tie_word_embeddings": false })),
        ("one group", form, json!({ "n_group": 1, "topk_group": 1 })),
        ("no dense layer", form, json!({ "first_k_dense_replace": 0 })),
    ] {
        same_bits(&with(latent(), changes), converted::deepseek2, form, what);
    }
    // A multiplier that is no power of two is rounded to an f32 on its way into the file.
    let (_dir, folder, file) = folder_of(&with(latent(), json!({ "rope_scaling": yarn(0.707) })));
    converted::deepseek2(&folder, &file, form, &[]);
    assert!(relative_error(&plain(&file), &plain(&folder)) < 1e-6);
}

#[test]
fn files_of_gemma4_have_the_bits_of_their_folders() {
    for experts in [false, true] {
        for fused in [false, true] {
            let form = Form { fused, ..Form::default() };
            let config = with(gemma4(experts), json!({ "final_logit_softcapping": 8.0 }));
            same_bits(&config, converted::gemma4, form, &format!("{experts} {fused}"));
        }
    }
    let unshared = with(gemma4(false), json!({ "num_kv_shared_layers": 0 }));
    same_bits(&unshared, converted::gemma4, Form::default(), "no shared keys");
}

/// Rows of whole blocks of 32.
fn wide(config: Value) -> Value {
    let widths = json!({
        "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "hidden_size_per_layer_input": 32, "attention_k_eq_v": false, "head_dim": 32,
        "global_head_dim": 64
    });
    with(config, widths)
}

#[test]
fn blocks_are_held_as_stored_and_decode_losslessly() {
    let latent = || wide(latent());
    for (config, convert, what) in [
        (latent(), converted::deepseek2 as Convert, "latent"),
        (wide(gemma4(false)), converted::gemma4, "gemma"),
        (wide(gemma4(true)), converted::gemma4, "gemma with experts"),
    ] {
        let (_dir, folder, file) = folder_of(&config);
        for fused in [false, true] {
            let form = Form { blocks: GgmlDType::Q8_0, fused, ..Form::default() };
            convert(&folder, &file, form, &[]);
            let options = TargetOptions { as_stored: true, ..TargetOptions::default() };
            let held = Target::open_path(&file, &options).expect("target");
            let types: Vec<&str> = held.held().iter().map(|(name, _)| *name).collect();
            assert_eq!(types, ["Q8_0"], "{what}");
            let (rounded, of_blocks) = (logits(&file, &options), plain(&file));
            // Activations are of 8 bits beside blocks. Experts that this swaps leave nothing alike.
            let error = relative_error(&rounded, &of_blocks);
            assert!(error > 1e-6 && (error < 0.7 || what.contains("experts")), "{what}: {error}");
            convert(&folder, &file, Form { widened: true, ..form }, &[]);
            let same = of_blocks.iter().zip(plain(&file)).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{what}");
            convert(&folder, &file, form, &[]);
        }
        let target = beside_tokenizer(&folder, &file);
        let plain = generate(&target, &["--no-draft"]);
        assert_eq!(generate(&target, &["--lookup", "--pace", "fixed"])["text"], plain["text"]);
    }
}

/// A folder of the file and of the tokenizer that its header lacks.
fn beside_tokenizer(folder: &Path, file: &Path) -> PathBuf {
    let both = file.with_extension("folder");
    std::fs::create_dir_all(&both).expect("a folder");
    std::fs::copy(file, both.join("model.gguf")).expect("copied");
    std::fs::copy(folder.join("tokenizer.json"), both.join("tokenizer.json")).expect("copied");
    both
}

fn generate(target: &Path, way: &[&str]) -> Value {
    let target = target.display().to_string();
    let common = ["generate", "--target", &target, "--max-tokens", "24", "--json"];
    let more = ["--prompt", "the cat and the cat", "--ignore-eos"];
    last_json(&succeed(&[&common[..], &more, way].concat()))
}

#[test]
fn experts_chosen_by_softmax_are_weighed_as_one_of_one() {
    let one = json!({
        "n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 1.75
    });
    let (_dir, folder, file) = folder_of(&with(latent(), one));
    let wanted = plain(&folder);
    // The weight of an expert that is the only one is 1 by softmax, and by a sigmoid that is divided by itself.
    let changes = [
        ("expert_gating_func", Some(Gguf::U32(1))),
        ("expert_weights_norm", None),
        ("expert_group_count", None),
        ("expert_group_used_count", None),
    ];
    for tensors in [true, false] {
        converted::deepseek2(&folder, &file, Form::default(), &changes);
        crate::support::change_gguf(&file, &|keys, stored| {
            if tensors {
                stored.retain(|(name, _)| !name.contains("exp_probs_b"));
            }
            // Files of DeepSeek-V2 do not say how they choose.
            keys.retain(|(key, _)| !tensors || !key.contains("expert_gating_func"));
        });
        if tensors {
            assert!(relative_error(&plain(&file), &wanted) < 1e-6);
        } else {
            let error = Target::open_path(&file, &TargetOptions::default()).err().expect("refused");
            assert!(error.to_string().contains("exp_probs_b"), "{error}");
        }
    }
}

#[test]
fn a_file_without_experts_is_read() {
    let (_dir, folder, file) = folder_of(&with(latent(), json!({ "first_k_dense_replace": 4 })));
    let without: Vec<(&str, Option<Gguf>)> = [
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_count",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
        "expert_group_count",
        "expert_group_used_count",
    ]
    .map(|key| (key, None))
    .to_vec();
    converted::deepseek2(&folder, &file, Form::default(), &without);
    let (wanted, found) = (plain(&folder), plain(&file));
    assert!(wanted.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits()));
}

/// The block of a file drafts as that of its folder does.
#[test]
fn a_block_for_several_tokens_of_deepseek2_drafts_losslessly() {
    let (_dir, folder, file) = folder_of(&latent());
    add_block(&folder, false, &|_, _| ());
    let further =
        [("block_count", Some(Gguf::U32(5))), ("nextn_predict_layers", Some(Gguf::U32(1)))];
    for heads_apart in [true, false] {
        converted::deepseek2(&folder, &file, Form { heads_apart, ..Form::default() }, &further);
        let both = beside_tokenizer(&folder, &file);
        let drafted = generate(&both, &["--mtp", "--pace", "fixed"]);
        let of_folder = generate(&folder, &["--mtp", "--pace", "fixed"]);
        assert_eq!(drafted["text"], generate(&both, &["--no-draft"])["text"]);
        assert_eq!(drafted["text"], of_folder["text"]);
        assert_eq!(drafted["rounds"], of_folder["rounds"]);
    }
}

/// The reference cases of the two families, with files in place of their folders.
#[test]
fn files_made_of_reference_cases_pass_them() {
    for (case, convert) in [
        ("deepseek_v3", converted::deepseek2 as Convert),
        ("gemma4", converted::gemma4),
        ("gemma4_moe", converted::gemma4),
    ] {
        let Some(original) = shared(&format!("golden/targets/{case}")) else { return };
        for (heads_apart, fused) in [(true, true), (false, false)] {
            let dir = tempfile::tempdir().expect("tempdir");
            for name in ["meta.json", "prompts.json", "tensors.safetensors"] {
                std::fs::copy(original.join(name), dir.path().join(name)).expect("copied");
            }
            let file = dir.path().join("target/model.gguf");
            std::fs::create_dir(dir.path().join("target")).expect("a folder");
            let form = Form { heads_apart, fused, ..Form::default() };
            convert(&original.join("target"), &file, form, &[]);
            let told = succeed(&["parity", &dir.path().display().to_string(), "--json"]);
            let line: Value =
                serde_json::from_str(told.lines().next().expect("a line")).expect("JSON");
            assert_eq!(line["pass"], true, "{case}: {line}");
        }
    }
}

/// A changed header is refused with a sentence that names what is wrong.
fn refused(convert: Convert, folder: &Path, form: Form, change: &(&str, Option<Gguf>), told: &str) {
    let file = folder.with_extension("hostile.gguf");
    convert(folder, &file, form, std::slice::from_ref(change));
    let target = beside_tokenizer(folder, &file).display().to_string();
    let text = fail(&["generate", "--target", &target, "--prompt", "x", "--no-draft"], 1);
    assert!(text.contains(told), "{change:?}: {told} not in {text}");
    assert!(text.len() < 60_000, "{change:?}: {} bytes", text.len());
}

#[test]
fn hostile_headers_of_deepseek2_are_named_by_key() {
    let (_dir, folder, _) = folder_of(&latent());
    let number = |number: u32| Some(Gguf::U32(number));
    for (key, value, told) in [
        ("attention.kv_lora_rank", None, "kv_lora_rank"),
        ("attention.kv_lora_rank", number(0), "kv_lora_rank"),
        ("attention.kv_lora_rank", number(19), "`blk.0.attn_k_b.weight` has shape [4, 20, 12]"),
        ("attention.kv_lora_rank", number(u32::MAX), "kv_lora_rank"),
        ("attention.kv_lora_rank", Some(Gguf::F32(f32::NAN)), "kv_lora_rank"),
        ("attention.q_lora_rank", None, "attention.q_lora_rank"),
        ("attention.q_lora_rank", number(25), "q_a_proj.weight"),
        ("attention.q_lora_rank", number(u32::MAX), "q_lora_rank"),
        ("attention.key_length_mla", number(8), "leaves nothing of a head"),
        ("attention.key_length_mla", number(u32::MAX), "head_dim"),
        (
            "attention.key_length_mla",
            Some(Gguf::String("wide".into())),
            "attention.key_length_mla` is not a number",
        ),
        ("attention.value_length_mla", number(0), "v_head_dim"),
        ("attention.value_length_mla", number(11), "`blk.0.attn_v_b.weight` has shape"),
        ("attention.value_length_mla", number(u32::MAX), "v_head_dim"),
        ("attention.head_count", number(0), "num_attention_heads"),
        ("attention.head_count", number(u32::MAX), "num_attention_heads"),
        ("rope.dimension_count", None, "rope.dimension_count"),
        ("rope.dimension_count", number(7), "turned"),
        ("rope.dimension_count", number(0), "qk_rope_head_dim"),
        ("rope.dimension_count", number(u32::MAX), "rope.dimension_count"),
        ("attention.temperature_scale", Some(Gguf::F32(0.1)), "temperature_scale"),
        ("expert_count", None, "without experts"),
        ("expert_count", number(7), "of 7 experts"),
        ("expert_count", number(16), "matrices of 16 experts expected"),
        ("expert_count", number(u32::MAX), "num_experts"),
        ("expert_used_count", number(9), "num_experts_per_tok"),
        ("expert_used_count", number(0), "num_experts_per_tok"),
        ("expert_gating_func", number(3), "expert_gating_func"),
        ("expert_gating_func", number(1), "exp_probs_b"),
        ("expert_group_count", number(3), "groups of 8 experts"),
        ("expert_group_count", number(u32::MAX), "expert_group_count"),
        ("expert_group_used_count", number(9), "groups of 8 experts"),
        ("expert_weights_scale", Some(Gguf::F32(f32::INFINITY)), "expert_weights_scale"),
        ("nextn_predict_layers", number(4), "nextn_predict_layers"),
        ("block_count", number(5), "missing"),
        ("block_count", number(u32::MAX), "num_hidden_layers"),
        ("rope.scaling.type", Some(Gguf::String("longrope".into())), "unknown rope scaling"),
    ] {
        refused(converted::deepseek2, &folder, Form::default(), &(key, value), told);
    }
    let older = Form { heads_apart: false, ..Form::default() };
    for (key, value, told) in [
        ("attention.key_length", number(22), "q_b_proj.weight"),
        ("attention.key_length", number(21), "is odd"),
        ("attention.value_length", number(12), "kv_b_proj.weight"),
        ("attention.value_length", None, "attention.value_length"),
    ] {
        refused(converted::deepseek2, &folder, older, &(key, value), told);
    }
}

#[test]
fn hostile_headers_of_gemma4_are_named_by_key() {
    let (_dir, folder, _) = folder_of(&gemma4(false));
    let number = |number: u32| Some(Gguf::U32(number));
    let list = |numbers: &[u32]| Some(Gguf::Array(numbers.iter().map(|n| Gguf::U32(*n)).collect()));
    let flags = |flags: &[bool]| Some(Gguf::Array(flags.iter().map(|f| Gguf::Bool(*f)).collect()));
    let pattern = "attention.sliding_window_pattern";
    for (key, value, told) in [
        (pattern, None, "lists 0 of 6 layers"),
        (pattern, flags(&[true; 5]), "lists 5 of 6 layers"),
        (pattern, flags(&[true; 6]), "layers.1.self_attn.k_norm.weight` has shape"),
        (pattern, number(2), "lists 0 of 6 layers"),
        ("attention.sliding_window", None, "sliding_window"),
        ("attention.sliding_window", number(0), "sliding_window"),
        ("attention.key_length", number(8), "value_length"),
        ("attention.key_length", number(u32::MAX), "head_dim"),
        ("attention.key_length_swa", None, "key_length_swa"),
        ("attention.key_length_swa", number(0), "head_dim"),
        ("attention.head_count_kv", number(4), "k_proj.weight` has shape"),
        ("attention.head_count_kv", list(&[2; 5]), "head_count_kv"),
        ("attention.head_count_kv", list(&[0; 6]), "num_key_value_heads"),
        ("attention.head_count_kv", list(&[u32::MAX; 6]), "num_key_value_heads"),
        ("attention.shared_kv_layers", number(6), "shared_kv_layers"),
        ("attention.shared_kv_layers", number(u32::MAX), "shared_kv_layers"),
        ("attention.shared_kv_layers", Some(Gguf::F32(1.5)), "shared_kv_layers"),
        ("attention.shared_kv_layers", number(5), "no earlier layer of the same kind"),
        ("feed_forward_length", list(&[64; 5]), "feed_forward_length"),
        ("feed_forward_length", list(&[64, 64, 32, 64, 64, 64]), "feed_forward_length"),
        ("feed_forward_length", list(&[0; 6]), "feed_forward_length"),
        ("embedding_length_per_layer_input", number(u32::MAX), "hidden_size_per_layer_input"),
        ("embedding_length_per_layer_input", number(5), "embed_tokens_per_layer"),
        ("rope.dimension_count", number(4), "rope.dimension_count"),
        ("rope.dimension_count_swa", number(4), "rope.dimension_count_swa"),
        ("rope.freq_base_swa", Some(Gguf::F32(f32::NAN)), "rope.freq_base_swa"),
        ("final_logit_softcapping", Some(Gguf::F32(f32::NAN)), "final_logit_softcapping"),
        ("block_count", number(u32::MAX), "lists 6 of"),
    ] {
        refused(converted::gemma4, &folder, Form::default(), &(key, value), told);
    }
    // Layers 1 and 3 are full and have keys of their own.
    let (_other, unshared, _) =
        folder_of(&with(gemma4(false), json!({ "num_kv_shared_layers": 1 })));
    for (folder, missing, told) in [
        (&folder, "rope_freqs.weight", "`rope_freqs.weight` of full layers is missing"),
        (&unshared, "blk.1.attn_v.weight", "some full layers have no `attn_v`, others do"),
        (&folder, "blk.0.attn_v.weight", "self_attn.v_proj.weight` [16, 32] is missing"),
        (&folder, "per_layer_token_embd.weight", "embed_tokens_per_layer"),
        (&folder, "blk.2.layer_output_scale.weight", "layer_scalar"),
    ] {
        let file = folder.with_extension("gguf");
        converted::gemma4(folder, &file, Form::default(), &[]);
        crate::support::change_gguf(&file, &|_, tensors| {
            tensors.retain(|(name, _)| name != missing);
        });
        let target = beside_tokenizer(folder, &file).display().to_string();
        fail_with(&["generate", "--target", &target, "--prompt", "x", "--no-draft"], 1, &[told]);
    }
}

/// Files with bytes of the header changed are read or refused, without a panic or memory that no file needs.
#[test]
fn damaged_headers_are_read_or_refused() {
    for (config, convert) in
        [(latent(), converted::deepseek2 as Convert), (gemma4(true), converted::gemma4)]
    {
        let (_dir, folder, file) = folder_of(&config);
        let form = Form { blocks: GgmlDType::Q8_0, ..Form::default() };
        convert(&folder, &file, form, &[]);
        let whole = std::fs::read(&file).expect("a file");
        let header = Header::read(&whole).expect("a header");
        let first = header.tensors.values().map(|tensor| tensor.bytes.start).min();
        let length = first.expect("tensors") as u64;
        let (mut state, mut read) = (1_u64, 0);
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        for _ in 0..150 {
            let mut bytes = whole.clone();
            for _ in 0..=next() % 3 {
                let at = (next() % length) as usize;
                bytes[at] = [0, 1, 0x7F, 0xFF, next() as u8][(next() % 5) as usize];
            }
            if next() % 8 == 0 {
                bytes.truncate((next() % whole.len() as u64) as usize);
            }
            std::fs::write(&file, bytes).expect("written");
            let options = TargetOptions { as_stored: next() % 2 == 0, ..TargetOptions::default() };
            read += usize::from(Target::open_path(&file, &options).is_ok());
        }
        assert!(read > 0 && read < 150, "{read}");
    }
}
