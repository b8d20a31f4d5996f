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
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.eagle3 import Eagle3DraftModel

folder, record = sys.argv[1:]
want = load_file(record)
stored = load_file(f"{folder}/model.safetensors")


def load():
    """The library's model of the folder, with every stored tensor in it."""
    with tempfile.TemporaryDirectory() as work:
        # Without the verifier's name nothing is looked up there.
        copy = pathlib.Path(shutil.copytree(folder, pathlib.Path(work) / "draft"))
        value = json.loads((copy / "config.json").read_text())
        value["speculators_config"]["verifier"]["name_or_path"] = None
        (copy / "config.json").write_text(json.dumps(value))
        config = SpeculatorModelConfig.from_pretrained(copy)
        config.transformer_layer_config._attn_implementation = "eager"
        model = SpeculatorModel.from_pretrained(copy, config=config, dtype=torch.float32).eval()
    loaded = model.state_dict()
    missing = [name for name in stored if name not in loaded]
    assert not missing, f"left out: {missing}"
    for name, tensor in stored.items():
        assert torch.equal(loaded[name].float(), tensor.float()), name
    return model


def eagle3(model):
    """Logits of the first steps, by the names of the record."""
    captured = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: captured.append(out[0].detach()))
    ids = want["input_ids"][None]
    # A row reads the token after its own; the library is handed tokens that are shifted already.
    shifted = torch.cat([ids[:, 1:], ids.new_zeros(1, 1)], dim=1)
    with torch.no_grad():
        model(hidden_states=want["aux"][None], input_ids=shifted, document_ids=torch.zeros_like(ids), ttt_steps=3)
    assert len(captured) == 3, len(captured)
    return {f"logits.{step}": logits for step, logits in enumerate(captured)}


def block(model):
    """States, logits and heads of the recorded blocks, by the names of the record."""
    with torch.no_grad():
        # The target's frozen tensors, which no folder holds.
        model.embed_tokens.weight.copy_(want["embed_tokens"])
        if "lm_head" in want:
            for head in (model.lm_head, model.verifier_lm_head):
                head.weight.copy_(want["lm_head"])
    found = {}

    def keep(name, add=False):
        def hook(_module, _inputs, out):
            rows = out.detach().reshape(-1, out.shape[-1]) if name != "confidence" else out.detach().reshape(-1)
            found[name] = found[name] + rows if add else rows
        return hook

    model.norm.register_forward_hook(keep("states"))
    model.lm_head.register_forward_hook(keep("logits"))
    if getattr(model, "confidence_head", None) is not None:
        model.confidence_head.register_forward_hook(keep("confidence"))
    if getattr(model, "markov_head", None) is not None:
        model.markov_head.markov_w2.register_forward_hook(keep("logits", add=True))
    if hasattr(model, "candidate_selector"):
        selector, candidates = model.candidate_selector, want["candidates"][None]
        score = selector.score_candidates

        def scored(unary, hidden, before, trained):
            # Training may put the gold token among the candidates: score those of the record.
            found["scores"] = score(unary, hidden, before, candidates)[0].detach()
            return score(unary, hidden, before, trained)
        selector.score_candidates = scored
    ids, anchors = want["input_ids"][None], want["anchors"]
    chosen = torch.zeros_like(ids, dtype=torch.float32)
    # Anchors are drawn among the learned tokens: these are all of them.
    chosen[0, anchors] = 1
    last = torch.zeros(1, ids.shape[1], want["states"].shape[1])
    # Its fused losses need a GPU; no loss is compared.
    options, _ = type(model).get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", max_anchors=len(anchors))
    with torch.no_grad():
        model(hidden_states=want["aux"][None], input_ids=ids, loss_mask=chosen, verifier_last_hidden_states=last,
              document_ids=torch.zeros_like(ids), **options)
    return found


# The verifier's own head and norm serve training; this check needs no target.
Eagle3DraftModel.load_verifier_weights = lambda self: None
model = load()
found = block(model) if "anchors" in want else eagle3(model)
wanted = [name for name in want if name.split(".")[0] in ("states", "logits", "confidence", "scores")]
assert sorted(found) == sorted(wanted), (sorted(found), sorted(wanted))
worst = 0.0
for name in wanted:
    worst = max(worst, ((found[name] - want[name]).abs().max() / want[name].abs().max()).item())
assert worst < 1e-4, f"outputs differ by {worst:.1e}"
kind = json.loads(pathlib.Path(f"{folder}/config.json").read_text())["speculators_model_type"]
print(f"speculators {kind}: {len(stored)} tensors, {', '.join(wanted)} on a real text of {want['input_ids'].shape[0]} tokens, "
      f"largest relative difference {worst:.1e}")
