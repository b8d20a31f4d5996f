"""Trains a block draft with a head of its own over some tokens in the speculators library, which writes the folder.

Usage: speculators_draft.py METHOD TARGET_FOLDER TEXTS.jsonl SIZE STEPS OUTPUT

METHOD is dflash or dspark. The draft, its loss, its choice of tokens, its mask token and its files are the library's. The optimizer is
PyTorch's AdamW. The head learns too, which the library leaves as the target's rows: a reader that takes those instead would show.
A step takes all anchors of one text. The last line says how often the last round of texts was guessed.
"""
import collections
import json
import pathlib
import sys

import torch
from speculators import SpeculatorModel
from speculators.train.cli import create_transformer_layer_config
from speculators.train.utils import resolve_mask_token_id
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import AutoModelForCausalLM, AutoTokenizer

method, target, texts, size, steps, output = sys.argv[1:]
size, steps = int(size), int(steps)
# Outputs of the target's layers 8, 15 and 22: the library counts the embeddings as 0.
LAYERS = [9, 16, 23]
SLOTS = {"dflash": 5, "dspark": 4}[method]
WARMUP = 10


def features(model, ids):
    """What a step is given of a text: taps side by side, and the last state before the final norm."""
    last = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0]))
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    hook.remove()
    return {
        "hidden_states": torch.cat([states[layer] for layer in LAYERS], dim=-1),
        "input_ids": ids,
        "loss_mask": torch.ones(ids.shape),
        "verifier_last_hidden_states": last[0],
        "document_ids": torch.zeros_like(ids),
    }


torch.manual_seed(0)
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(target)
read = [json.loads(line)["text"] for line in pathlib.Path(texts).read_text().splitlines()]
rows = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in read]
model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
taken = [features(model, ids) for ids in rows]
counts = collections.Counter(token for ids in rows for token in ids[0].tolist())
d2t, t2d = build_vocab_mappings_from_distribution(counts, size, model.config.vocab_size)
layer = create_transformer_layer_config(target, 1, "qwen3", None, 2048, [0])
draft = SpeculatorModel.registry[method].from_training_args(
    layer, t2d=t2d, d2t=d2t, verifier_name_or_path=target, draft_vocab_size=size, block_size=SLOTS, target_layer_ids=LAYERS,
    mask_token_id=resolve_mask_token_id(target, layer.vocab_size), draft_attn_impl="eager", markov_rank=64,
)
# Its fused losses need a GPU.
options, _ = type(draft).get_trainer_kwargs(
    loss_fn="kl_div", loss_implementation="eager", max_anchors=max(ids.shape[1] for ids in rows)
)
draft.lm_head.weight.requires_grad_(True)
learned = [tensor for tensor in draft.parameters() if tensor.requires_grad]
optimizer = torch.optim.AdamW(learned, lr=2e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARMUP, (steps - step) / steps))
guessed = []
for step in range(steps):
    _, loss, metrics = draft(**taken[step % len(taken)], **options)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(learned, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    guessed.append((metrics["full_acc_sum"] / metrics["full_acc_total"]).item())
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}, guessed {guessed[-1]:.3f}", file=sys.stderr)
draft.save_pretrained(output)
share = sum(guessed[-len(rows):]) / len(rows)
assert share > 0.5, f"the draft guesses {share:.3f} of its own texts: nothing would be compared"
print(f"speculators {method}: trained for {steps} steps over {size} of {model.config.vocab_size} tokens, guesses {share:.3f}")
