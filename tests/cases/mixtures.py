"""Writes the cases `qwen3_moe`, `qwen2_moe` and `mixtral`: tiny random targets with mixtures of experts.

    python tests/cases/mixtures.py          (needs torch, transformers, safetensors; numpy)

Expected values are those of transformers on the CPU in f32. `max_abs_deviation_from_float64` compares them with the
plain forward pass below, in f64. Seeds are chosen so that no choice of an expert hangs on rounding.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

VOCABULARY = 97
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False, initializer_range=0.3,
             bos_token_id=None, eos_token_id=None)
CASES = {
    # Layer 1 has a plain MLP, heads are wider than H / N, weights of a token's experts sum to one.
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, intermediate_size=48, num_hidden_layers=4, head_dim=16, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    # Experts in every second layer, weights as the router gives them, an expert that all tokens visit.
    "qwen2_moe": Qwen2MoeConfig(
        **SHAPE, intermediate_size=40, num_hidden_layers=4, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=24, norm_topk_prob=False, decoder_sparse_step=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "mixtral": MixtralConfig(
        **SHAPE, intermediate_size=24, num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
}
# Smallest gap between the logits of the last expert chosen and the first one that is not.
CLEAR = 1e-3


def plain_forward(config, w, ids, positions):
    """Logits, last-layer keys and values, hidden states and the smallest routing gap, in f64."""
    w = {name: tensor.double() for name, tensor in w.items()}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    theta = config.rope_parameters["rope_theta"]
    angles = positions[:, None].double() * theta ** (-torch.arange(0, dim, 2).double() / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w[name]

    def rope(x):
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def gated(x, gate, up, down):
        g = x @ w[gate].T
        return (g / (1 + (-g).exp()) * (x @ w[up].T)) @ w[down].T

    x, gap, outputs = w["model.embed_tokens.weight"][ids], float("inf"), []
    visible = torch.ones(len(ids), len(ids)).tril().bool()
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}."
        h = norm(x, p + "input_layernorm.weight")

        def project(which, count):
            y = h @ w[f"{p}self_attn.{which}_proj.weight"].T
            return (y + w.get(f"{p}self_attn.{which}_proj.bias", 0)).view(len(ids), count, dim)

        q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
        if p + "self_attn.q_norm.weight" in w:
            q, k = norm(q, p + "self_attn.q_norm.weight"), norm(k, p + "self_attn.k_norm.weight")
        q, k = rope(q), rope(k)
        out = []
        for head in range(heads):
            key, value = k[:, head * kv_heads // heads], v[:, head * kv_heads // heads]
            scores = (q[:, head] @ key.T / dim**0.5).masked_fill(~visible, -torch.inf)
            out.append(scores.softmax(-1) @ value)
        x = x + torch.cat(out, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        mixtral = config.model_type == "mixtral"
        block = p + ("block_sparse_moe" if mixtral else "mlp")
        names = ["w1", "w3", "w2"] if mixtral else ["gate_proj", "up_proj", "down_proj"]
        if block + ".gate.weight" not in w:
            x = x + gated(h, *(f"{block}.{n}.weight" for n in names))
        else:
            logits = h @ w[block + ".gate.weight"].T
            top, chosen = logits.topk(config.num_experts_per_tok + 1, -1)
            gap = min(gap, (top[:, -2] - top[:, -1]).min().item())
            weights, chosen = logits.softmax(-1), chosen[:, :-1]
            normalise = mixtral or config.norm_topk_prob
            update = torch.zeros_like(x)
            for t in range(len(ids)):
                total = weights[t, chosen[t]].sum() if normalise else 1.0
                for e in chosen[t]:
                    expert = [f"{block}.experts.{e}.{n}.weight" for n in names]
                    update[t] += weights[t, e] / total * gated(h[t : t + 1], *expert)[0]
            if block + ".shared_expert_gate.weight" in w:
                share = (h @ w[block + ".shared_expert_gate.weight"].T).sigmoid()
                update += share * gated(h, *(f"{block}.shared_expert.{n}.weight" for n in names))
            x = x + update
        outputs.append(x)
    final = norm(x, "model.norm.weight")
    return final @ w["lm_head.weight"].T, k, v, outputs, final, gap


def randomise(model, seed):
    """Every tensor random, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.data = 1 + 0.2 * noise if "norm" in name else 0.3 * noise


def prompt_record(name, model, weights, config, layers, ids, positions, greedy):
    plain_positions = positions is None
    positions = torch.arange(len(ids)) if plain_positions else positions
    # transformers' own list of hidden states ends with the normed ones.
    hidden = {}

    def keep(layer):
        return lambda _module, _inputs, out: hidden.update({layer: (out[0] if isinstance(out, tuple) else out)[0]})

    hooks = [model.model.layers[layer].register_forward_hook(keep(layer)) for layer in layers]
    with torch.no_grad():
        out = model(ids[None], position_ids=positions[None], use_cache=True)
        final = model.model(ids[None], position_ids=positions[None]).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    cache = out.past_key_values.layers[-1]
    k, v = cache.keys[0].transpose(0, 1), cache.values[0].transpose(0, 1)
    logits = out.logits[0]
    want, want_k, want_v, want_hidden, want_final, gap = plain_forward(config, weights, ids, positions)
    assert gap > CLEAR, (name, gap)
    largest = lambda a, b: (a.double() - b).abs().max().item()
    relative = max(((hidden[l].double() - want_hidden[l]).norm(dim=-1) / want_hidden[l].norm(dim=-1)).max().item()
                   for l in layers)
    deviations = {
        "logits": largest(logits, want), "k_last": largest(k, want_k), "v_last": largest(v, want_v),
        "hidden_rel": relative, "final_norm": largest(final, want_final)}
    if max(deviations.values()) > 1e-4:
        raise ValueError(f"{name}: transformers and the plain forward pass disagree: {deviations}")
    top = logits[-1].topk(20)
    ends = {"first": 0, "last": len(ids) - 1}
    floats = lambda t: [round(x, 7) for x in t.tolist()]
    record = {
        "name": name, "ids": ids.tolist(), "n_tokens": len(ids),
        "top20_ids": top.indices.tolist(), "top20_logits": floats(top.values),
        "logsumexp": logits[-1].double().logsumexp(-1).item(),
        "argmax_per_position": logits.argmax(-1).tolist(),
        "last_layer_kv": {end: {f"{key}_first8_per_head": [floats(head[:8]) for head in tensor[t]]
                                for key, tensor in (("k", k), ("v", v))} for end, t in ends.items()},
        "capture": {str(l): {end: {"l2": hidden[l][t].double().norm().item(), "first8": floats(hidden[l][t][:8])}
                             for end, t in ends.items()} for l in layers},
        "max_abs_deviation_from_float64": deviations,
    }
    if not plain_positions:
        record["position_ids"] = positions.tolist()
    if greedy:
        text, margins = ids.tolist(), []
        for _ in range(greedy):
            logits64, *_, gap = plain_forward(config, weights, torch.tensor(text), torch.arange(len(text)))
            assert gap > CLEAR, (name, gap)
            best = logits64[-1].topk(2)
            text.append(best.indices[0].item())
            margins.append((best.values[0] - best.values[1]).item())
        assert min(margins) > 0.01, (name, min(margins))
        record |= {"greedy_ids": text[len(ids):], "greedy_margin": [round(m, 6) for m in margins]}
    tensors = {"last_layer_k": k, "last_layer_v": v, "final_norm": final, "logits_last": out.logits[0, -1]}
    tensors |= {f"hidden_after_layer_{l}": hidden[l] for l in layers}
    return record, {f"{name}.{what}": tensor.clone().contiguous() for what, tensor in tensors.items()}


def write_case(name, config, seed):
    folder = Path(__file__).parent / name
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, seed)
    model.save_pretrained(folder / "target")
    (folder / "target/generation_config.json").unlink(missing_ok=True)
    weights = load_file(folder / "target/model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    text = lambda n: torch.randint(VOCABULARY, (n,), generator=generator)
    layers = [0, 1, config.num_hidden_layers - 1]
    jump = torch.cat([torch.arange(5), torch.arange(100, 109)])
    records, tensors = [], {}
    for prompt, ids, positions, greedy in [
        ("whole", text(20), None, 24), ("one", text(1), None, 24), ("jump", text(14), jump, 0)]:
        record, some = prompt_record(prompt, model, weights, config, layers, ids, positions, greedy)
        records.append(record)
        tensors |= some if prompt == "whole" else {}
    save_file(tensors, folder / "tensors.safetensors")
    (folder / "prompts.json").write_text(json.dumps(records, indent=1) + "\n")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    meta = {"kind": "forward", "case": name, "seed": seed, "capture_layers": layers, "dtype": "float32",
            "versions": versions}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def main():
    for name, config in CASES.items():
        for seed in range(1, 1000):
            try:
                write_case(name, config, seed)
                print(name, "seed", seed)
                break
            except AssertionError as unclear:
                print(name, "seed", seed, "is unclear:", unclear)


main()
