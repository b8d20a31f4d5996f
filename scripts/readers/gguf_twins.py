"""Makes GGUF twins of reference cases whose folders have none: DeepSeek-V3 and Gemma 4, as llama.cpp's converter writes them.

Usage: gguf_twins.py CASES_FOLDER OUT_FOLDER

OUT_FOLDER gets NAME_gguf for every such case NAME: the same expected values, and the weights as target/model.gguf. The names are printed.
"""
import json
import math
import pathlib
import shutil
import struct
import sys

import gguf
import numpy

LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "self_attn.o_proj.weight": "attn_output.weight", "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight", "self_attn.q_proj.weight": "attn_q.weight",
}
DEEPSEEK = LAYER | {
    "post_attention_layernorm.weight": "ffn_norm.weight", "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight", "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight", "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight", "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
GEMMA = LAYER | {
    "self_attn.k_proj.weight": "attn_k.weight", "self_attn.v_proj.weight": "attn_v.weight", "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight", "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight", "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight", "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight", "post_per_layer_input_norm.weight": "post_norm.weight", "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight", "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}


def tensors_of(path):
    """Tensors of a safetensors file of f32."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        if entry["dtype"] != "F32":
            raise SystemExit(f"{path}: tensor {name} is {entry['dtype']}, F32 expected")
        found[name] = numpy.frombuffer(data[8 + size + first : 8 + size + last], "<f4").reshape(entry["shape"])
    return found


def renamed(tensors, names):
    """Tensors under their GGUF names; experts that stand one by one as stacks."""
    stacks, found = {}, {}
    for name, tensor in tensors.items():
        if name in OUTER:
            found[OUTER[name]] = tensor
            continue
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        if rest in names:
            found[f"blk.{layer}.{names[rest]}"] = tensor
        elif rest.startswith("mlp.experts."):
            expert, matrix = rest.removeprefix("mlp.experts.").split(".", 1)
            stacks.setdefault((layer, matrix.removesuffix("_proj.weight")), {})[int(expert)] = tensor
        else:
            found[f"blk.{layer}.{rest}"] = tensor
    for (layer, matrix), experts in stacks.items():
        found[f"blk.{layer}.ffn_{matrix}_exps.weight"] = numpy.stack([experts[expert] for expert in sorted(experts)])
    return found


def common(writer, config, rope):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def yarn(writer, rope):
    """YaRN of `deepseek2`, which has no key for `mscale`: a factor on cos and sin, whose square is on scores too, makes up for it."""
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return
    log = 0.1 * math.log(rope["factor"])
    m, stretch = (rope.get(key, 1.0) * log + 1.0 for key in ("mscale", "mscale_all_dim"))
    factor = m / stretch
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * (stretch / factor - 1.0) / log)
    writer.add_rope_scaling_attn_factors(factor)


def deepseek2(writer, config, tensors):
    rope = config.get("rope_parameters") or (config.get("rope_scaling") or {}) | {"rope_theta": config.get("rope_theta", 1e4)}
    common(writer, config, rope)
    plain, turned, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    rank, heads = config["kv_lora_rank"], config["num_attention_heads"]
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(plain + turned)
    writer.add_value_length_mla(value)
    writer.add_kv_lora_rank(rank)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(turned)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_uint32("deepseek2.expert_group_count", config["n_group"])
    writer.add_uint32("deepseek2.expert_group_used_count", config["topk_group"])
    yarn(writer, rope)
    found = renamed(tensors, DEEPSEEK)
    for name in [name for name in found if name.endswith(".self_attn.kv_b_proj.weight")]:
        layer = name.split(".")[1]
        both = found.pop(name).reshape(heads, plain + value, rank)
        found[f"blk.{layer}.attn_k_b.weight"] = both[:, :plain].transpose(0, 2, 1)
        found[f"blk.{layer}.attn_v_b.weight"] = both[:, plain:]
    return found


def gemma4(writer, config, tensors):
    of_full, of_sliding = (config["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    common(writer, config, of_full)
    layers = config["num_hidden_layers"]
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    found = renamed(tensors, GEMMA)
    own = config.get("per_layer_config") or {}
    full = config.get("global_head_dim") or next((own[layer]["head_dim"] for layer in own if "head_dim" in own[layer]), config["head_dim"])
    shared = config.get("num_kv_shared_layers", 0)

    def kv_heads(layer):
        of_full = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") and not slides[layer] else None
        return own.get(str(layer), {}).get("num_key_value_heads") or of_full or config["num_key_value_heads"]

    wide = [config.get("use_double_wide_mlp", False) and layer >= layers - shared for layer in range(layers)]
    writer.add_feed_forward_length([config["intermediate_size"] * (2 if is_wide else 1) for is_wide in wide])
    writer.add_head_count_kv([kv_heads(layer) for layer in range(layers)])
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(of_sliding["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("enable_moe_block"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    turned = int(full * of_full.get("partial_rotary_factor", 0.25) / 2)
    found["rope_freqs.weight"] = numpy.array([1.0] * turned + [1e30] * (full // 2 - turned), "f4")
    return found


WAYS = {"deepseek_v3": ("deepseek2", deepseek2), "gemma4_text": ("gemma4", gemma4)}

cases, out = map(pathlib.Path, sys.argv[1:3])
for case in sorted(path for path in cases.iterdir() if (path / "meta.json").is_file()):
    meta = json.loads((case / "meta.json").read_text())
    twin = f"{case.name}_gguf"
    if meta.get("family") not in WAYS or case.name.endswith("_gguf") or (cases / twin).exists():
        continue
    (out / twin / "target").mkdir(parents=True)
    for name in ("prompts.json", "tensors.safetensors"):
        shutil.copy(case / name, out / twin / name)
    architecture, convert = WAYS[meta["family"]]
    (out / twin / "meta.json").write_text(json.dumps(meta | {"case": twin, "architecture": architecture}))
    writer = gguf.GGUFWriter(out / twin / "target" / "model.gguf", architecture)
    config = json.loads((case / "target" / "config.json").read_text())
    for name, tensor in convert(writer, config, tensors_of(case / "target" / "model.safetensors")).items():
        writer.add_tensor(name, numpy.ascontiguousarray(tensor, "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(twin)
