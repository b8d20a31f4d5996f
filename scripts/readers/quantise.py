"""Quantises every matrix of a GGUF file to one type, with llama.cpp's quantiser.

Usage: quantise.py SOURCE.gguf TYPE OUT.gguf [PART]

With PART only matrices whose names contain it; the others become Q8_0.

Types of 256 values a block need rows of whole blocks. A model whose width is no multiple of 256 gets more query heads and
a wider residual stream, both zero, so that it computes the same: norms are rescaled for the larger count. Norms, biases
and routers stay f32. Needs gguf, numpy and xllamacpp (PyPI).
"""
import ctypes
import sys

import gguf
import numpy as np
import xllamacpp
from gguf.quants import dequantize

LONG_BLOCK = 256


def quantiser():
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    call = library.ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    return call


def quantised(call, values, kind):
    """Bytes `[rows, bytes of a row]` of `values`, `[..., columns]`."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns = values.shape[-1]
    assert columns % block == 0, f"rows of {columns} are no whole blocks of {kind.name}"
    values = np.ascontiguousarray(values, dtype=np.float32)
    rows = values.size // columns
    out = np.zeros((rows, columns // block * size), dtype=np.uint8)
    written = call(kind.value, values.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    assert written == out.nbytes, (written, out.nbytes)
    return out.reshape(*values.shape[:-1], -1)


class Padding:
    """How heads and widths grow; every original head keeps its key-value head."""

    def __init__(self, field, architecture, pad):
        number = lambda key: int(field(f"{architecture}.{key}"))
        self.heads, self.groups = number("attention.head_count"), number("attention.head_count_kv")
        self.width = number("embedding_length")
        self.head_dim = self.width // self.heads
        self.each = self.heads // self.groups
        self.grown = self.each
        while pad and self.groups * self.grown * self.head_dim % LONG_BLOCK:
            self.grown += 1
        self.new_heads = self.groups * self.grown
        self.new_width = self.new_heads * self.head_dim
        assert not pad or number("feed_forward_length") % LONG_BLOCK == 0

    def of_heads(self, values, axis):
        """Zeros after the heads of every key-value head."""
        values = np.moveaxis(values, axis, 0)
        rest = values.shape[1:]
        out = np.zeros((self.groups, self.grown, self.head_dim, *rest), dtype=np.float32)
        out[:, : self.each] = values.reshape(self.groups, self.each, self.head_dim, *rest)
        return np.moveaxis(out.reshape(-1, *rest), 0, axis)

    def of_width(self, values, axis):
        """Zeros after the residual stream's values."""
        widths = [(0, 0)] * values.ndim
        widths[axis] = (0, self.new_width - self.width)
        return np.pad(values, widths)

    def tensor(self, name, values):
        part = name.split(".")[-2]
        if part.endswith("norm"):
            return self.of_width(values * np.sqrt(np.float32(self.width / self.new_width)), 0)
        if part == "attn_q":
            values = self.of_heads(values, 0)
        elif part == "attn_output":
            return self.of_width(self.of_heads(values, 1), 0)
        elif part == "ffn_down":
            return self.of_width(values, 0)
        return self.of_width(values, 1) if values.ndim > 1 else values


def main():
    source, kind, out, part = (*sys.argv[1:], "")[:4]
    kind = gguf.GGMLQuantizationType[kind]
    reader = gguf.GGUFReader(source)
    field = lambda key: reader.fields[key].contents()
    architecture = field("general.architecture")
    shapes = [tensor.shape for tensor in reader.tensors if len(tensor.shape) > 1 and part in tensor.name]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    padding = Padding(field, architecture, any(shape[0] % block for shape in shapes))
    writer = gguf.GGUFWriter(out, architecture)
    changed = {
        f"{architecture}.embedding_length": padding.new_width,
        f"{architecture}.attention.head_count": padding.new_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(
            field(f"{architecture}.attention.layer_norm_rms_epsilon") * padding.width / padding.new_width
        ),
    }
    for key, value in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kinds = value.types
        writer.add_key_value(key, changed.get(key, value.contents()), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    call = quantiser()
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = padding.tensor(tensor.name, values) if padding.new_width != padding.width else values
        if values.ndim > 1 and "gate_inp" not in tensor.name:
            of = kind if part in tensor.name else gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, quantised(call, values, of), raw_dtype=of)
        else:
            writer.add_tensor(tensor.name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
