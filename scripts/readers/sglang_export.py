"""Loads an exported block draft with the code by which SGLang loads one, on stand-ins for its layers: SGLang runs no such draft on a CPU.

Usage: sglang_export.py WHEEL_FOLDER EXPORT SPECULATORS_EXPORT

WHEEL_FOLDER is an unpacked sglang wheel. Every value of the weight file must reach a parameter, and every parameter must get one. What
SGLang takes from the keys is held against those of the same draft's folder of speculators.
"""
import importlib.abc
import importlib.machinery
import importlib.util
import json
import pathlib
import sys
import types

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

wheel, export, nested = (pathlib.Path(path) for path in sys.argv[1:])
PACKAGES = ["sglang", "sglang.srt", "sglang.srt.models", "sglang.srt.speculative", "sglang.srt.speculative.dspark_components"]
REAL = [
    "sglang.srt.models.dflash",
    "sglang.srt.models.dspark",
    "sglang.srt.speculative.dflash_utils",
    "sglang.srt.speculative.dspark_components.dspark_config",
]


class Nothing:
    """Stands for whatever loading does not need."""

    def __call__(self, *_args, **_kwargs):
        return Nothing()

    def __getattr__(self, _name):
        return Nothing()

    def __bool__(self):
        return False


def parameter(*shape):
    # What is left of it after loading was never given a value.
    return nn.Parameter(torch.full(shape, float("nan")), requires_grad=False)


class Fused(nn.Module):
    """A linear layer whose rows come from tensors of several names."""

    def __init__(self, inputs, rows, bias):
        super().__init__()
        self.places, first = {}, 0
        for shard, count in rows.items():
            self.places[shard] = slice(first, first + count)
            first += count
        self.weight = parameter(first, inputs)
        self.weight.weight_loader = self.load
        if bias:
            self.bias = parameter(first)
            self.bias.weight_loader = self.load

    def load(self, into, loaded, shard=None):
        into.data[self.places[shard]].copy_(loaded)


def norm(size, eps=None):
    module = nn.Module()
    module.weight = parameter(size)
    return module


def load_whole(into, loaded):
    assert into.shape == loaded.shape, (into.shape, loaded.shape)
    into.data.copy_(loaded)


STAND_INS = {
    "AttentionType": types.SimpleNamespace(DECODER="causal", ENCODER_ONLY="whole"),
    "GemmaRMSNorm": norm,
    "MergedColumnParallelLinear": lambda inputs, rows, bias=False, **_: Fused(inputs, dict(enumerate(rows)), bias),
    "QKVParallelLinear": lambda hidden_size, head_size, total_num_heads, total_num_kv_heads, bias=False, **_: Fused(
        hidden_size,
        {"q": head_size * total_num_heads, "k": head_size * total_num_kv_heads, "v": head_size * total_num_kv_heads},
        bias,
    ),
    "RMSNorm": norm,
    "RadixAttention": lambda **_: nn.Module(),
    "RowParallelLinear": lambda inputs, outputs, bias=False, **_: Fused(inputs, {None: outputs}, bias),
    "SiluAndMul": nn.Module,
    "default_weight_loader": load_whole,
    "get_compiler_backend": lambda: "eager",
    "get_parallel": lambda: types.SimpleNamespace(tp_size=1),
    "get_rope": lambda *_, **__: nn.Module(),
    "get_rope_config": lambda config: (config.rope_parameters["rope_theta"], None),
}


class Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """SGLang's own modules where they are asked for, stand-ins for all others of it."""

    def find_spec(self, name, _path=None, _target=None):
        if name.split(".")[0] != "sglang":
            return None
        if name in REAL:
            return importlib.util.spec_from_file_location(name, wheel / (name.replace(".", "/") + ".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__file__ = "(a stand-in)"
        if spec.name not in PACKAGES:
            module.__getattr__ = lambda name: STAND_INS.get(name, Nothing())
        return module

    def exec_module(self, _module):
        pass


sys.meta_path.insert(0, Modules())
from sglang.srt.models import dflash, dspark  # noqa: E402

config = AutoConfig.from_pretrained(export)
classes = {entry.__name__: entry for module in (dflash, dspark) for entry in module.EntryClass}
model = classes[config.architectures[0]](config=config)
for own in model.parameters():
    # Layers of PyTorch's own, too.
    own.requires_grad = False
    own.data.fill_(float("nan"))
tensors = load_file(export / "model.safetensors")
model.load_weights((name, tensor.float()) for name, tensor in tensors.items())
empty = [name for name, own in model.named_parameters() if own.isnan().any()]
assert not empty, f"no value for {empty}"
counts = [sum(tensor.numel() for tensor in all) for all in (model.parameters(), tensors.values())]
assert counts[0] == counts[1], f"{counts[1] - counts[0]} values were ignored"

told = json.loads((nested / "config.json").read_text())
read = model.draft_config
causal = not told["sliding_window_non_causal"]
kinds = [(layer.self_attn.sliding_window_size, layer.self_attn.attn_type) for layer in model.layers]
for (window, seen), kind in zip(kinds, told["transformer_layer_config"]["layer_types"]):
    slides = kind == "sliding_attention"
    assert window == (told["transformer_layer_config"]["sliding_window"] - 1 if slides else -1), kinds
    assert seen == ("causal" if causal and slides else "whole"), kinds
assert read.target_layer_ids == [layer - 1 for layer in told["aux_hidden_state_layer_ids"]], read
assert (read.block_size, read.mask_token_id) == (told["block_size"], told["mask_token_id"]), read
sizes = ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"]
assert [getattr(read, key) for key in sizes] == [told.get(key, 0) for key in sizes], read
# As many tokens as the printed command asks for: the block, and of a chain the known token besides.
line = json.loads((export / "longdraft-manifest.json").read_text())["serve"]["sglang"]
asked = int(line.split("--speculative-num-draft-tokens ")[1].split()[0])
if told["sample_from_anchor"]:
    from sglang.srt.speculative.dspark_components.dspark_config import dspark_gamma_from_num_draft_tokens

    assert model.sample_from_anchor and model.gamma == told["block_size"]
    assert dspark_gamma_from_num_draft_tokens(asked) == model.gamma, line
else:
    assert asked == model.block_size, line
print(f"sglang {type(model).__name__}: {len(tensors)} tensors, every value at its place; layers {read.target_layer_ids}, "
      f"blocks of {read.block_size}, mask token {read.mask_token_id}")
