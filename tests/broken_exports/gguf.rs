//! GGUF files.

use candle_core::quantized::gguf_file::Value as GgufValue;

use super::*;

/// Rewrites the GGUF file's keys and tensors.
fn gguf_file(
    change: impl Fn(&mut Vec<(String, GgufValue)>, &mut Tensors) + 'static,
) -> impl Fn(&Path) {
    move |folder| support::change_gguf(&folder.join("draft-f32.gguf"), &change)
}

fn gguf_key(key: &'static str, value: GgufValue) -> impl Fn(&Path) {
    gguf_file(move |keys, _| {
        keys.retain(|(known, _)| known != key);
        keys.push((key.to_owned(), value.clone()));
    })
}

fn gguf_without_key(key: &'static str) -> impl Fn(&Path) {
    gguf_file(move |keys, _| keys.retain(|(known, _)| known != key))
}

fn gguf_without_tensor(name: &'static str) -> impl Fn(&Path) {
    gguf_file(move |_, tensors| tensors.retain(|(known, _)| known != name))
}

fn gguf_layers(ids: &'static [i32]) -> impl Fn(&Path) {
    gguf_file(move |keys, _| {
        for (key, value) in keys.iter_mut() {
            if key.ends_with("_layers") {
                *value = GgufValue::Array(ids.iter().copied().map(GgufValue::I32).collect());
            }
        }
    })
}

#[test]
fn broken_gguf_files_are_caught() {
    let bench = Bench::new();
    let gguf_bytes = |change: fn(&mut Vec<u8>)| {
        move |folder: &Path| {
            let path = folder.join("draft-f32.gguf");
            let mut all = std::fs::read(&path).expect("read");
            change(&mut all);
            std::fs::write(&path, all).expect("write");
        }
    };
    let change = |name: &'static str, change: fn(&Tensor) -> Tensor| {
        gguf_file(move |_, tensors| {
            let entry = tensors.iter_mut().find(|(known, _)| known == name).expect("tensor");
            entry.1 = change(&entry.1).contiguous().expect("contiguous");
        })
    };
    let faults = vec![
        fault("gguf", "GGUF files").by(removed("draft-f32.gguf")),
        fault("gguf", "cut off").by(gguf_bytes(|all| all.truncate(all.len() - 400))),
        fault("gguf", "not GGUF").by(gguf_bytes(|all| all[0] = b'X')),
        fault("gguf", "the file is cut off")
            .by(gguf_bytes(|all| all[8..16].copy_from_slice(&u64::MAX.to_le_bytes()))),
        fault("architecture", "another model")
            .by(gguf_key("general.architecture", GgufValue::String("llama".into()))),
        fault("missing-key", "key not found").by(gguf_without_key("eagle3.feed_forward_length")),
        fault("missing-key", "tokenizer.ggml.tokens").by(gguf_without_key("tokenizer.ggml.tokens")),
        fault("missing-key", "rope.freq_base").by(gguf_without_key("eagle3.rope.freq_base")),
        warning("rope-target", "rope.freq_base")
            .by(gguf_key("eagle3.rope.freq_base", GgufValue::F32(5e5))),
        fault("special-token", "eos_token_id")
            .by(gguf_key("tokenizer.ggml.eos_token_id", GgufValue::U32(3))),
        fault("layer-shift", "one too low (-1)").by(gguf_layers(&[1, 3, 4])),
        fault("layer-shift", "one too high (+1)").by(gguf_layers(&[3, 5, 6])),
        fault("layer-count", "loading ends").by(gguf_layers(&[2, 4])),
        fault("layers-contradict", "old versions").by(gguf_key(
            "eagle3.extract_layers",
            GgufValue::Array([1, 3, 4].map(GgufValue::I32).to_vec()),
        )),
        fault("missing-tensor", "tensor not found")
            .by(gguf_without_tensor("blk.0.attn_norm_2.weight")),
        // The target has neither for a draft of fewer tokens, or of another width.
        fault("missing-tensor", "`output.weight`").by(gguf_without_tensor("output.weight")),
        fault("missing-tensor", "`token_embd.weight`").by(|folder| {
            gguf_key("eagle3.target_hidden_size", GgufValue::U32(16))(folder);
            gguf_without_tensor("token_embd.weight")(folder);
        }),
        fault("unexpected-tensor", "loading ends").by(gguf_file(|_, t| {
            let norm = t.iter().find(|(n, _)| n == "output_norm.weight").expect("norm").1.clone();
            t.push(("blk.0.attn_q.bias".into(), norm));
        })),
        fault("offset-d2t", "offsets where absolute ids are expected").by(change("d2t", |t| {
            let ids: Vec<i64> = t.to_vec1().expect("ids");
            let offsets: Vec<i64> = ids.iter().zip(0..).map(|(id, i)| (id - i) / 4).collect();
            Tensor::from_vec(offsets, ids.len(), &Device::Cpu).expect("tensor")
        })),
        fault("no-map", "the head has 60 rows").by(gguf_without_tensor("d2t")),
        fault("weight-type", "norms are not rounded")
            .by(change("output_norm.weight", |t| t.to_dtype(DType::F16).expect("half"))),
        fault("shape", "[96, 32]").by(change("fc.weight", transposed)),
        fault("not-finite", "not finite")
            .by(change("blk.0.ffn_up.weight", |t| scaled(t, f64::INFINITY))),
        // q stored half-split, as a folder has it.
        fault("other-outputs", "permuted").by(change("blk.0.attn_q.weight", |t| {
            let order: Vec<u32> =
                (0..32).map(|row| row / 8 * 8 + row % 8 / 4 + row % 4 * 2).collect();
            t.index_select(&Tensor::from_vec(order, 32, &Device::Cpu).expect("order"), 0)
                .expect("rows")
        })),
    ];
    expect_caught(&bench, Profile::Llamacpp, &faults);
}
