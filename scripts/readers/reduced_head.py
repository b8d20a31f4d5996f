"""Gives a block draft in a folder of speculators a head of its own over the most frequent tokens of some texts.

Usage: reduced_head.py FOLDER TARGET_FOLDER TEXTS.jsonl SIZE OUTPUT

The head's rows are the target's, as the speculators library begins with them.
"""
import collections
import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

folder, target, texts, size, output = sys.argv[1:]
folder, output = pathlib.Path(folder), pathlib.Path(output)
config = json.loads((folder / "config.json").read_text())
vocabulary = config["transformer_layer_config"]["vocab_size"]
tokenizer = AutoTokenizer.from_pretrained(target)
counts = collections.Counter()
for line in pathlib.Path(texts).read_text().splitlines():
    counts.update(tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"])
kept = torch.tensor(sorted(sorted(range(vocabulary), key=lambda token: (-counts[token], token))[: int(size)]))
tensors = load_file(folder / "model.safetensors")
weights = load_file(pathlib.Path(target) / "model.safetensors")
head = weights.get("lm_head.weight", weights.get("model.embed_tokens.weight"))
tensors["lm_head.weight"] = head.to(tensors["fc.weight"].dtype)[kept].contiguous()
tensors["d2t"] = kept - torch.arange(len(kept))
tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, kept, True)
if "markov_head.markov_w2.weight" in tensors:
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][kept].contiguous()
config["draft_vocab_size"] = len(kept)
output.mkdir(parents=True)
save_file(tensors, output / "model.safetensors", {"format": "pt"})
(output / "config.json").write_text(json.dumps(config, indent=2))
