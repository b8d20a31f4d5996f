"""Loads an exported folder with the speculators library and compares its logits with the recorded ones.

Usage: speculators_export.py FOLDER RECORD    (RECORD as `longdraft verify --record` writes it)
"""
import sys

import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

folder, record = sys.argv[1:]
config = Eagle3SpeculatorConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"
model, info = Eagle3DraftModel.from_pretrained(folder, config=config, output_loading_info=True, dtype=torch.float32) \
    if False else (Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32), None)
model.eval()
want = load_file(record)
captured = []
model.lm_head.register_forward_hook(lambda _m, _i, out: captured.append(out[0].detach()))
ids = want["input_ids"][None]
# Row t of ours reads token t + 1; the library is handed tokens that are shifted already.
shifted = torch.cat([ids[:, 1:], ids.new_zeros(1, 1)], dim=1)
with torch.no_grad():
    model(hidden_states=want["aux"][None], input_ids=shifted, document_ids=torch.zeros_like(ids), ttt_steps=3)
worst = 0.0
for step, got in enumerate(captured):
    # Behind the text's end both read token 0.
    rows = slice(0, ids.shape[1])
    expected = want[f"logits.{step}"]
    scale = expected.abs().max()
    worst = max(worst, ((got[rows] - expected).abs().max() / scale).item())
assert len(captured) == 3, len(captured)
assert worst < 1e-4, f"logits differ by {worst:.1e}"
print(f"speculators: {len(captured)} steps of {ids.shape[1]} rows, largest relative difference {worst:.1e}")
