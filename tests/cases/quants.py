"""Writes the case `quants`: blocks of every GGUF type that products read.

    python tests/cases/quants.py          (needs gguf, numpy, safetensors)

Values are those of the gguf package; products are of these values with activations of 8 bits, in f64.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from safetensors.numpy import save_file

ROWS, WIDTH = 2, 256
# Where a block's 16-bit floats lie; by the rules of each type.
FLOATS = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82], T.Q3_K: [108],
    T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0], T.IQ4_XS: [0], T.MXFP4: [],
}
LARGE = {T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_XS}


def blocks_of(kind, random):
    """Random bits with scales of a sensible size, `[ROWS, bytes]`."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (ROWS * WIDTH // values, size), dtype=np.uint8)
    for at in FLOATS[kind]:
        scales = random.uniform(-0.1, 0.1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == T.MXFP4:
        blocks[:, 0] = random.integers(0, 8, len(blocks)) + 120
        blocks[0, 0] = 1
    return blocks.reshape(ROWS, -1)


def rounded(x, size):
    """Codes of `size` activations each and their scales."""
    x = x.reshape(-1, size)
    scales = (np.abs(x).max(1) / 127).astype(np.float32)
    return np.rint(x / scales[:, None]).astype(np.int8), scales


def main():
    random = np.random.default_rng(7)
    x = random.normal(size=WIDTH).astype(np.float32)
    codes, scales = rounded(x, 32)
    halves = scales.astype(np.float16)
    large_codes, large_scales = rounded(x, WIDTH)
    tensors = {"Q8_0.codes": codes, "Q8_0.d": halves, "Q8_K.codes": large_codes, "Q8_K.d": large_scales}
    small_x = (codes * halves.astype(np.float64)[:, None]).ravel()
    large_x = (large_codes * large_scales.astype(np.float64)[:, None]).ravel()
    types = {}
    for kind in FLOATS:
        blocks = blocks_of(kind, random)
        values = gguf.quants.dequantize(blocks, kind).astype(np.float32)
        large = kind in LARGE
        tensors[f"{kind.name}.blocks"] = blocks
        tensors[f"{kind.name}.values"] = values
        tensors[f"{kind.name}.dots"] = values.astype(np.float64) @ (large_x if large else small_x)
        types[kind.name] = {"activations": "Q8_K" if large else "Q8_0"}
    folder = Path(__file__).parent / "quants"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "tensors.safetensors")
    meta = {"case": "quants", "kind": "quants", "types": types, "versions": {"gguf": "0.19.0", "numpy": np.__version__}}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


main()
