//! Keys of `config.json`.

use super::*;

#[test]
fn broken_keys_are_caught() {
    let bench = Bench::new();
    let faults = vec![
        fault("architecture", "no model class")
            .by(set("architectures", json!(["LlamaForCausalLM"]))),
        fault("missing-key", "default").by(without("draft_vocab_size")),
        fault("missing-key", "rope_theta").by(without("rope_theta")),
        fault("missing-key", "model_type").by(without("model_type")),
        warning("model-type", "another class").by(set("model_type", json!("qwen3"))),
        warning("aux-hidden-state", "one layer's states alone").by(set("eagle_config", json!({}))),
        fault("aux-hidden-state", "one layer's states alone")
            .by(config(|v| v["eagle_config"]["use_aux_hidden_state"] = false.into())),
        warning("flag-unsupported", "older ones run another network").by(windowed()),
        fault("other-outputs", "computes another network").by(windowed()),
        fault("null", "null").by(set("hidden_act", Value::Null)),
        fault("sizes", "does not divide").by(set("num_key_value_heads", json!(3))),
        fault("sizes", "odd").by(set("head_dim", json!(7))),
        fault("sizes", "more than one layer").by(set("num_hidden_layers", json!(2))),
        fault("sizes", "not a whole number").by(set("hidden_size", json!("32"))),
        fault("sizes", "exceeds").by(set("draft_vocab_size", json!(1000))),
        fault("missing-flag", "disagree on the default").by(without("norm_before_residual")),
        fault("flag", "\"yes\"").by(set("norm_output", json!("yes"))),
        fault("both-norms", "exclude each other").by(config(|v| {
            v["norm_before_fc"] = true.into();
            v["fc_norm"] = true.into();
        })),
        fault("missing-tensor", "fc_norm.0.weight").by(set("fc_norm", true.into())),
        warning("flag-unsupported", "only new versions").by(set("fc_norm", true.into())),
        fault("other-outputs", "computes another network").by(set("norm_output", true.into())),
        fault("other-outputs", "computes another network")
            .by(set("norm_before_residual", true.into())),
        fault("tied", "replaced by the embeddings").by(set("tie_word_embeddings", true.into())),
        fault("no-layers", "default layers").by(without(IDS)),
        fault("layer-shift", "one too high (+1)").by(set(IDS, json!([3, 5, 6]))),
        fault("layer-shift", "one too low (-1)").by(set(IDS, json!([1, 3, 4]))),
        fault("other-layers", "other layers").by(set(IDS, json!([2, 3, 5]))),
        fault("layer-order", "ascending").by(set(IDS, json!([5, 4, 2]))),
        fault("layer-order", "different").by(set(IDS, json!([2, 2, 5]))),
        fault("layer-range", "no such layer").by(set(IDS, json!([2, 4, 9]))),
        fault("last-layer", "after the final norm").by(set(IDS, json!([2, 4, 8]))),
        fault("layer-count", "4 layers").by(set(IDS, json!([2, 4, 5, 6]))),
        fault("misplaced-layers", "this profile does not hold").by(config(|v| {
            v["eagle_config"][IDS] = json!([1, 3, 4]);
        })),
        fault("layers-contradict", "SGLang")
            .by(config(|v| v["eagle_config"][IDS] = json!([2, 4, 5]))),
        fault("rope-spellings", "old readers")
            .by(set("rope_scaling", json!({"rope_type": "linear", "factor": 2.0}))),
        fault("rope-spellings", "old readers").by(config(|v| {
            let yarn = json!({"rope_type": "yarn", "factor": 2, "beta_fast": 32});
            v["rope_scaling"] = yarn.clone();
            v["rope_parameters"] = yarn;
            v["rope_parameters"]["beta_fast"] = 16.into();
        })),
        fault("rope-spellings", "rope_theta").by(set("rope_theta", json!(5e5))),
        warning("rope-target", "the target's").by(config(|v| {
            v["rope_theta"] = json!(5e5);
            v["rope_parameters"]["rope_theta"] = json!(5e5);
        })),
        warning("context", "at most the target's").by(set("max_position_embeddings", json!(4096))),
        warning("eps", "rms_norm_eps").by(set("rms_norm_eps", json!(1e-3))),
        fault("dtype", "bfloat16").by(set("torch_dtype", json!("bfloat16"))),
        fault("special-token", "eos_token_id").by(set("eos_token_id", json!(3))),
        fault("not-the-target", "vocab_size").by(set("vocab_size", json!(300))),
    ];
    expect_caught(&bench, Profile::Vllm, &faults);
}
