"""Writes a GGUF target of Qwen2.5-1.5B's shape with random blocks, mixed as Q4_K_M is: for speed only.

Usage: random_qwen.py TOKENIZER.gguf OUT.gguf

The tokenizer is that of TOKENIZER.gguf, a Qwen2 file with as many tokens. Codes are uniform and scales constant, so that weights
have a mean of 0 and a deviation of 0.02. Needs gguf and numpy (PyPI).
"""
import sys

import gguf
import numpy as np

LAYERS, HIDDEN, FFN, HEADS, GROUPS, VOCABULARY = 28, 1536, 8960, 12, 2, 151_936
DEVIATION = 0.02
Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K

random = np.random.default_rng(1)


def f16(value):
    return np.frombuffer(np.float16(value).tobytes(), dtype=np.uint8)


def blocks(kind, outputs, inputs):
    """Random blocks `[outputs, bytes of a row]`."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    out = random.integers(0, 256, (outputs * inputs // values, size), dtype=np.uint8)
    if kind == Q4_K:
        # d · 32 · code − dmin · 32, codes of 0 to 15: six bits of every scale and minimum are 32.
        d = DEVIATION / 32 / 4.61
        out[:, 0:2], out[:, 2:4] = f16(d), f16(7.5 * d)
        out[:, 4:12], out[:, 12:16] = 32 | 2 << 6, 0
    else:
        # d · 16 · (code − 32), codes of 0 to 63.
        out[:, 192:208] = 16
        out[:, 208:210] = f16(DEVIATION / 16 / 18.5)
    return out.reshape(outputs, -1)


def more_bits(layer):
    """Layers whose values and down projections have six bits."""
    first = LAYERS // 8
    return layer < first or layer >= 7 * LAYERS // 8 or (layer - first) % 3 == 2


def main():
    tokenizer, out = sys.argv[1:]
    reader = gguf.GGUFReader(tokenizer)
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == VOCABULARY
    writer = gguf.GGUFWriter(out, "qwen2")
    writer.add_block_count(LAYERS)
    writer.add_context_length(32768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    for key, value in reader.fields.items():
        if key.startswith("tokenizer."):
            kinds = value.types
            writer.add_key_value(key, value.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)

    def matrix(name, kind, outputs, inputs):
        writer.add_tensor(f"{name}.weight", blocks(kind, outputs, inputs), raw_dtype=kind)

    def vector(name, values):
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))

    groups = HIDDEN // HEADS * GROUPS
    matrix("token_embd", Q6_K, VOCABULARY, HIDDEN)
    vector("output_norm.weight", np.ones(HIDDEN))
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        larger = Q6_K if more_bits(layer) else Q4_K
        vector(at + "attn_norm.weight", np.ones(HIDDEN))
        vector(at + "ffn_norm.weight", np.ones(HIDDEN))
        for name, kind, rows in [("q", Q4_K, HIDDEN), ("k", Q4_K, groups), ("v", larger, groups)]:
            matrix(f"{at}attn_{name}", kind, rows, HIDDEN)
            vector(f"{at}attn_{name}.bias", np.zeros(rows))
        matrix(at + "attn_output", Q4_K, HIDDEN, HIDDEN)
        matrix(at + "ffn_gate", Q4_K, FFN, HIDDEN)
        matrix(at + "ffn_up", Q4_K, FFN, HIDDEN)
        matrix(at + "ffn_down", larger, HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
