//! Cases of targets of every family.

use super::*;

/// Cases of target families that the loader knows.
const FAMILIES: [&str; 36] = [
    "deepseek_v3",
    "gemma4",
    "gemma4_moe",
    "lfm2",
    "qwen3_5",
    "qwen3_5_gguf",
    "qwen3_5_moe",
    "qwen3_5_nested",
    "qwen3_next",
    "qwen3_next_moe",
    "qwen3_next_moe_gguf",
    "gemma2",
    "gemma3",
    "gemma3_old_keys",
    "gemma3_old_keys_gguf",
    "ministral3",
    "mistral_window",
    "mixtral_window",
    "qwen2_window",
    "smollm3",
    "smollm3_gguf",
    "granite",
    "granite_gguf",
    "olmo2",
    "olmo3",
    "olmo3_gguf",
    "phi3_longrope",
    "phi3_longrope_gguf",
    "phi3_window",
    "glm4",
    "glm4_gguf",
    "glm4_moe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "gpt_oss_mxfp4_gguf",
    "llama4",
];

#[test]
fn targets_of_every_family_pass_with_fused_and_with_composed_ops() {
    for family in FAMILIES {
        let Some(folder) = shared(&format!("golden/targets/{family}")) else { return };
        for ops in ["fused", "composed"] {
            let case = json_lines(&all_pass(&folder, 1, &["--ops", ops])).swap_remove(0);
            let checks = case["checks"].as_array().expect("checks");
            let count = |part: &str| {
                let named =
                    |check: &&Value| check["name"].as_str().is_some_and(|n| n.contains(part));
                checks.iter().filter(named).count()
            };
            let prompts = count("log-sum-exp");
            assert!(prompts >= 3, "{family}");
            for what in ["logits_at", "last_layer_k", "greedy, 16 tokens", "hidden_after_layer_2"] {
                assert_eq!(count(what), prompts, "{family}: {what}");
            }
            // Two prompts are longer than the cut; a layer's convolution, and its matrix where it has one.
            let recurrent = ["lfm2", "qwen3_5", "qwen3_next"];
            let states = recurrent.iter().any(|name| family.starts_with(name));
            assert_eq!(count("conv_state_layer_0_at_37"), if states { 2 } else { 0 }, "{family}");
            assert_eq!(
                count("recurrent_state_layer_0") > 0,
                states && family != "lfm2",
                "{family}"
            );
        }
    }
}

#[test]
fn a_case_of_another_window_scale_or_cap_fails() {
    for (case, key, value) in [
        ("mistral", "sliding_window", Value::from(21)),
        ("gemma2", "attn_logit_softcapping", 5.0.into()),
        ("gemma2", "final_logit_softcapping", Value::Null),
        ("gemma2", "query_pre_attn_scalar", 16.into()),
        ("gemma3", "sliding_window_pattern", 2.into()),
        ("gemma3", "rope_local_base_freq", 1e6.into()),
        ("gemma3", "rope_scaling", Value::Null),
    ] {
        let folder = copy_case_with_target(case);
        change_json(folder.path().join("target/config.json"), |config| config[key] = value);
        reported(folder.path(), 1);
    }
}

/// A copy of a forward case and of its weights.
fn copy_case_with_target(name: &str) -> tempfile::TempDir {
    let case = copy_case(name);
    copy_files(cases().join(name).join("target"), case.path().join("target"));
    case
}
