"""Greedy tokens of Hugging Face targets in transformers, through its incremental cache.

Usage: transformers_target.py [--set KEY=JSON] [--wide-keys] CASE_FOLDER...

A line of JSON for each case: {"case": NAME, "tokens": {PROMPT: [TOKEN]}} or {"case": NAME, "refused": TEXT}. `--set` changes a value of the
configurations, dotted where it lies deeper. `--wide-keys` makes keys of gated delta nets as wide as their values. No code of a folder is run.
"""
import json
import pathlib
import sys

import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from wide_keys import with_wide_keys


def change(config, key, value):
    """Sets a value of a configuration."""
    *path, last = key.split(".")
    for part in path:
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    if isinstance(config, dict):
        config[last] = value
    else:
        setattr(config, last, value)


def greedy(model, ids, length):
    """Tokens through the incremental cache."""
    out = model(input_ids=torch.tensor([ids]), use_cache=True)
    tokens = []
    while True:
        tokens.append(int(out.logits[0, -1].argmax()))
        if len(tokens) == length:
            return tokens
        out = model(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True)


def widened(folder, config):
    """A case's weights with wide keys, and so the configuration."""
    key, config.linear_key_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
    state = load_file(folder / "target" / "model.safetensors")
    for name, values in state.items():
        if name.endswith(("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")):
            state[name] = with_wide_keys(values, config.linear_num_key_heads, key, config.linear_value_head_dim)
    return {name: torch.from_numpy(values) for name, values in state.items()}


def tokens_of(folder, changes, wide):
    """What a case's folder gives."""
    prompts = json.loads((folder / "prompts.json").read_text())
    try:
        config = AutoConfig.from_pretrained(folder / "target")
        for key, value in changes:
            change(config, key, value)
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        if wide:
            state = widened(folder, config)
            model = AutoModelForCausalLM.from_config(config, **options)
            model.load_state_dict(state)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder / "target", config=config, **options)
        # Experts that were MXFP4 blocks come out in bf16, which holds them exactly.
        model = model.float().eval()
        with torch.no_grad():
            return {"tokens": {prompt["name"]: greedy(model, prompt["ids"], len(prompt["greedy_ids"])) for prompt in prompts}}
    except (ImportError, KeyError, ValueError, RuntimeError, AttributeError) as error:
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


torch.set_num_threads(1)
arguments, changes = sys.argv[1:], []
while arguments[:1] == ["--set"]:
    key, value = arguments[1].split("=", 1)
    changes.append((key, json.loads(value)))
    arguments = arguments[2:]
wide = arguments[:1] == ["--wide-keys"]
for case in map(pathlib.Path, arguments[wide:]):
    print(json.dumps({"case": case.name, **tokens_of(case, changes, wide)}), flush=True)
