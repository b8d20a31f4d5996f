//! What only one profile has.

use super::*;

#[test]
fn faults_of_the_other_folders_are_caught() {
    let bench = Bench::new();
    expect_caught(
        &bench,
        Profile::Sglang,
        &[
            fault("architecture", "alone")
                .by(set("architectures", json!(["Eagle3LlamaForCausalLM"]))),
            fault("layer-shift", "SGLang hands out")
                .by(config(|v| v["eagle_config"][IDS] = json!([2, 4, 5]))),
            fault("no-layers", "without a message").by(set("eagle_config", json!({}))),
            fault("missing-tensor", "random initial value, without a word")
                .by(rename("hidden_norm", "hiden_norm")),
            fault("unexpected-tensor", "ignored without a word")
                .by(rename("hidden_norm", "hiden_norm")),
            fault("flag-unsupported", "another network, without a message")
                .by(set("norm_before_residual", true.into())),
            fault("missing-key", "taken from the target").by(without("draft_vocab_size")),
            fault("flag-unsupported", "another network, without a message").by(windowed()),
        ],
    );
    expect_caught(
        &bench,
        Profile::Speculators,
        &[
            fault("speculators", "no such class")
                .by(set("speculators_model_type", json!("eagle9"))),
            fault("speculators", "the default method")
                .by(config(|v| v["speculators_config"]["default_proposal_method"] = json!("tree"))),
            fault("speculators", "verifier")
                .by(config(|v| v["speculators_config"]["verifier"]["name_or_path"] = json!(""))),
            fault("speculators", "read as Qwen3's")
                .by(without("/transformer_layer_config/model_type")),
            fault("speculators", "own default").by(without("/transformer_layer_config/head_dim")),
            fault("speculators", "verifier.architectures`: missing")
                .by(without("/speculators_config/verifier/architectures")),
            fault("missing-key", "speculators_version").by(without("speculators_version")),
            fault("unexpected-tensor", "dropped").by(rename("layers.0.mlp", "midlayer.mlp")),
        ],
    );
    expect_caught(
        &bench,
        Profile::Hf,
        &[
            fault("layers-contradict", "vLLM sees").by(set(IDS, json!([1, 3, 4]))),
            fault("no-layers", "missing").by(without(IDS)),
        ],
    );
    expect_caught(
        &bench,
        Profile::Longspec,
        &[
            fault("missing-tensor", "strict").by(dropped("cross_attn.k_proj.bias")),
            fault("unexpected-tensor", "final_layernorm")
                .by(copied("input_layernorm.weight", "final_layernorm.weight")),
            fault("missing-key", "model_max_length").by(without("model_max_length")),
            fault("missing-key", "num_key_value_heads")
                .by(set("num_key_value_heads", json!(u64::MAX))),
            fault("shape", "transposed").by(tensor("mlp.up_proj.weight", transposed)),
            fault("architecture", "no model class")
                .by(set("architectures", json!(["Qwen3GlideDecoderLayer"]))),
            fault("head-dim", "computes it so").by(set("head_dim", json!(16))),
            fault("pth", "weights_only").by(written("draft_model_weights.pth", "PK")),
            fault("pth", "another one").by(tensor("mlp.up_proj.weight", |t| scaled(t, 2.0))),
            fault("other-outputs", "another network")
                .by(tensor("self_attn.o_proj.weight", transposed)),
        ],
    );
}

#[test]
fn what_readers_do_not_know_is_not_written() {
    let refused = |bench: &Bench, profile, reason: &str| {
        let text = bench.try_export(profile).expect_err("refused").to_string();
        assert!(text.contains(reason), "{reason} not in {text}");
    };
    let qwen3 = Bench::of("qwen3", json!({}));
    refused(&qwen3, Profile::Longspec, "of a Llama or a Qwen2");
    Bench::of("qwen2", json!({})).export(Profile::Longspec);
    let yarn = |more: Value| {
        let mut scaling = json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128
        });
        more.as_object().into_iter().flatten().for_each(|(k, v)| scaling[k] = v.clone());
        Bench::of("llama", json!({ "rope_scaling": scaling }))
    };
    for more in [json!({"attention_factor": 1.25}), json!({"truncate": false})] {
        let bench = yarn(more);
        refused(&bench, Profile::Llamacpp, "yarn's usual rule alone");
        bench.export(Profile::Vllm);
    }
    let usual = yarn(json!({}));
    let report = usual.check(&usual.export(Profile::Llamacpp));
    assert!(report.is_clean(true), "{report}");
}

#[test]
fn a_head_that_is_the_targets_is_written() {
    let bench = Bench::new();
    let target = &bench.target.target;
    let ends = target.hold_ends().expect("ends");
    let sizes = Eagle3Config::for_target(target.config(), VOCABULARY).expect("config");
    let map = VocabularyMap::identity(VOCABULARY);
    let whole = Eagle3Draft::initialise(&sizes, map, ends.embedding_matrix(), 3).expect("draft");
    let folder = bench.folder.path().join("draft");
    std::fs::create_dir(&folder).expect("folder");
    whole.save(&folder, target.fingerprint()).expect("saved");
    change_tensors(folder.join("draft_model_weights.safetensors"), |all| {
        all.retain(|(name, _)| name != "lm_head.weight");
    });
    let draft = Eagle3Draft::open(&folder, target).expect("draft");
    let place = bench.folder.path().join("export");
    export(&draft, &bench.target, &options(Profile::Vllm), &place).expect("export");
    let written = read_tensors(place.join("model.safetensors"));
    let (_, head) = written.iter().find(|(name, _)| name == "lm_head.weight").expect("a head");
    let values = |head: &Tensor| {
        head.to_dtype(DType::F32)
            .and_then(|head| head.flatten_all()?.to_vec1::<f32>())
            .expect("values")
    };
    assert_eq!(values(head), values(&ends.head_matrix().to_dense().expect("values")));
}
