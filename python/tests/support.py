"""Paths and a small run that tests share."""

import functools
import json
import pathlib
import random
import shutil
import struct
import tempfile

import longdraft

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "assets/target/demonstration.gguf")
CORPUS = ROOT / "assets/corpus/books-excerpt.jsonl"
QUESTIONS = str(ROOT / "assets/corpus/gsm8k-test-20.jsonl")


def configuration(output, **train):
    """A run of some seconds on the target that the program carries."""
    return {
        "target": TARGET,
        "output": str(output),
        "draft": {"init": "last_layer", "final_norm": "none", "gamma": 3},
        "data": {
            "train": [{"path": str(CORPUS)}],
            "row_tokens": 128,
            "held_out_rows": 1,
            "anchor": {"enabled": False},
        },
        "schedule": {"learning_rate": 1e-2},
        "train": {"steps": 4, "rows_per_step": 1, **train},
    }


@functools.lru_cache(None)
def target():
    return longdraft.Target.open(TARGET)


class Folder:
    """A folder for a test class."""

    def __init__(self):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="longdraft-python-"))

    def remove(self):
        shutil.rmtree(self.path, ignore_errors=True)


def write_target_with_block(folder):
    """A tiny GLM-4.5 with random weights and a block for prediction of several tokens; its tokens are bytes."""
    width, inner, heads, shared, size, layers, tokens = 32, 48, 4, 2, 8, 2, 258
    config = {
        "model_type": "glm4_moe", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": shared, "head_dim": size, "vocab_size": tokens,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": layers + 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "bos_token_id": 256, "eos_token_id": 257,
    }
    shapes = {"model.embed_tokens.weight": [tokens, width], "lm_head.weight": [tokens, width], "model.norm.weight": [width]}
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}."
        own = {
            "input_layernorm": [width], "post_attention_layernorm": [width],
            "self_attn.q_proj": [heads * size, width], "self_attn.k_proj": [shared * size, width],
            "self_attn.v_proj": [shared * size, width], "self_attn.o_proj": [width, heads * size],
            "mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner],
        }
        if layer == layers:
            own.update({"eh_proj": [width, 2 * width], "enorm": [width], "hnorm": [width], "shared_head.norm": [width]})
        shapes.update({f"{prefix}{name}.weight": shape for name, shape in own.items()})
    draw = random.Random(7)
    header, data = {}, bytearray()
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = [draw.gauss(0.0, 0.3) + (1.0 if len(shape) == 1 else 0.0) for _ in range(count)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * count]}
        data += struct.pack(f"<{count}f", *values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary.update({"<s>": 256, "</s>": 257})
    special = [
        {"id": vocabulary[name], "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for name in ("<s>", "</s>")
    ]
    tokenizer = {
        "version": "1.0", "added_tokens": special, "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True, "unk_token": "<s>", "fuse_unk": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
