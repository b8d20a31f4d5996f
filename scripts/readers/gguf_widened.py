"""Copies of GGUF files in 32 bits, for programs that round activations beside quantised blocks."""
import gguf
from gguf.quants import dequantize

from wide_keys import with_wide_keys


class DeltaNets:
    """The gated delta nets of a `qwen35` file, as llama.cpp wants them."""

    def __init__(self, reader):
        def key(name):
            return reader.get_field(f"qwen35.{name}").contents()

        self.heads, self.key = key("ssm.group_count"), key("ssm.state_size")
        self.value = key("ssm.inner_size") // key("ssm.time_step_rank")
        # llama.cpp refuses sections wider than a head. A text has the same position in the first three; the fourth must get no pair.
        pairs = key("rope.dimension_count") // 2
        sections = [(pairs + 2 - section) // 3 for section in range(3)] + [0]
        self.keys = {"qwen35.ssm.state_size": self.value, "qwen35.rope.dimension_sections": sections}

    def wide(self, name, values):
        of_heads = name.endswith(("attn_qkv.weight", "ssm_conv1d.weight"))
        return with_wide_keys(values, self.heads, self.key, self.value) if of_heads else values


def widened(source, copy):
    """Copies a GGUF file, widens its blocks and narrow keys, and names its tokens where it does not."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    nets = DeltaNets(reader) if architecture == "qwen35" else None
    writer = gguf.GGUFWriter(copy, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        of_list = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = nets.keys.get(name, field.contents()) if nets else field.contents()
        writer.add_key_value(name, value, kind, sub_type=of_list)
    if "tokenizer.ggml.model" not in reader.fields:
        size = next(tensor.shape[-1] for tensor in reader.tensors if tensor.name == "token_embd.weight")
        writer.add_string("tokenizer.ggml.model", "rwkv")
        writer.add_array("tokenizer.ggml.tokens", [f"t{token}" for token in range(size)])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32").reshape(tensor.shape.tolist()[::-1])
        writer.add_tensor(tensor.name, nets.wide(tensor.name, values) if nets else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
