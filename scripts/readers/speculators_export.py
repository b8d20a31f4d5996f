"""Loads an exported folder with the speculators library and compares its logits with the recorded ones.

Usage: speculators_export.py FOLDER RECORD    (RECORD as `longdraft verify --record` writes it)
"""
import json
import pathlib
import shutil
import sys
import tempfile

import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

folder, record = sys.argv[1:]
# The verifier's own head and norm serve training; this check needs no target.
Eagle3DraftModel.load_verifier_weights = lambda self: None
with tempfile.TemporaryDirectory() as work:
    # Without the verifier's name no layer ids are looked up there.
    copy = pathlib.Path(shutil.copytree(folder, pathlib.Path(work) / "draft"))
    value = json.loads((copy / "config.json").read_text())
    value["speculators_config"]["verifier"]["name_or_path"] = None
    (copy / "config.json").write_text(json.dumps(value))
    config = Eagle3SpeculatorConfig.from_pretrained(copy)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(copy, config=config, dtype=torch.float32).eval()
stored = load_file(f"{folder}/model.safetensors")
loaded = model.state_dict()
missing = [name for name in stored if name not in loaded]
assert not missing, f"left out: {missing}"
for name, tensor in stored.items():
    assert torch.equal(loaded[name].float(), tensor.float()), name

want = load_file(record)
captured = []
model.lm_head.register_forward_hook(lambda _module, _inputs, out: captured.append(out[0].detach()))
ids = want["input_ids"][None]
# A row reads the token after its own; the library is handed tokens that are shifted already.
shifted = torch.cat([ids[:, 1:], ids.new_zeros(1, 1)], dim=1)
with torch.no_grad():
    model(hidden_states=want["aux"][None], input_ids=shifted, document_ids=torch.zeros_like(ids), ttt_steps=3)
assert len(captured) == 3, len(captured)
worst = 0.0
for step, got in enumerate(captured):
    expected = want[f"logits.{step}"]
    worst = max(worst, ((got - expected).abs().max() / expected.abs().max()).item())
assert worst < 1e-4, f"logits differ by {worst:.1e}"
print(f"speculators: {len(stored)} tensors, {len(captured)} steps of {ids.shape[1]} rows on a real text, "
      f"largest relative difference {worst:.1e}")
