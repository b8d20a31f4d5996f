"""Copies of GGUF files in 32 bits, for programs that round activations beside quantised blocks."""
import gguf
from gguf.quants import dequantize


def widened(source, copy):
    """Copies a GGUF file, widens its blocks, and names its tokens where it does not."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(copy, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        of_list = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=of_list)
    if "tokenizer.ggml.model" not in reader.fields:
        size = next(tensor.shape[-1] for tensor in reader.tensors if tensor.name == "token_embd.weight")
        writer.add_string("tokenizer.ggml.model", "rwkv")
        writer.add_array("tokenizer.ggml.tokens", [f"t{token}" for token in range(size)])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32")
        writer.add_tensor(tensor.name, values.reshape(tensor.shape.tolist()[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
