"""Writes the cases `block_dflash`, `block_dflash2` and `block_dspark`: training steps of small random block drafts.

    python tests/cases/blocks.py                 (needs torch and safetensors)
    python tests/cases/blocks.py CASE_FOLDER...  checks this file against other cases of the layout

Expected values are those of the plain f64 implementation below: every block of a row alone, every slot's keys listed,
gradients by autograd. Seeds are chosen so that no choice of a token hangs on rounding.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Smallest gap between two scores of which the larger one is chosen.
CLEAR = 1e-3
CASES = {
    # Tied embeddings, biases, heads wider than H / N, weights in bf16, layers of both kinds as engines take them where
    # nothing is said, a padded row.
    "block_dflash": dict(
        seed=3, rows=3, tokens=17, blocks=4, hidden=24, inner=20, vocabulary=53, padding=6, tied=True, dtype=torch.bfloat16,
        meta=dict(kind="dflash", block_size=5, loss_type="dflash", gamma=2.5, mask_token_id=51, rope_theta=5e5, eps=1e-5,
                  heads=6, kv_heads=2, head_dim=10, attention_bias=True, sliding_window=4, is_causal=None,
                  layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                  target_layer_ids=[0, 4], num_target_layers=7)),
    # Three taps, blocks of three slots, windows whose slots see each other, every head with keys of its own.
    "block_dflash2": dict(
        seed=18, rows=2, tokens=14, blocks=5, hidden=20, inner=28, vocabulary=41, padding=0, tied=False, dtype=torch.float32,
        meta=dict(kind="dflash2", block_size=3, gamma=None, selector_loss_weight=0.7, top_k=7, selector_rank=5,
                  conv_kernel_size=3, conv_group_size=4, selector_divisor="over_hit_weights", mask_token_id=40,
                  rope_theta=1e4, eps=1e-6, heads=4, kv_heads=4, head_dim=6, attention_bias=False, sliding_window=3,
                  is_causal=False, layer_types=["sliding_attention"] * 2, target_layer_ids=[0, 1, 4],
                  num_target_layers=6)),
    # One causal layer with one key-value head, the embeddings among what is read, a confidence that reads no token.
    "block_dspark": dict(
        seed=7, rows=2, tokens=15, blocks=3, hidden=16, inner=24, vocabulary=47, padding=2, tied=False, dtype=torch.float32,
        meta=dict(kind="dspark", block_size=6, gamma=3.0, markov_head_type="rnn", markov_rank=6,
                  loss_weights={"ce": 0.2, "l1": 0.7, "confidence": 0.5}, confidence_head_with_markov=False,
                  mask_token_id=46, rope_theta=1e4, eps=1e-6, heads=3, kv_heads=1, head_dim=8, attention_bias=False,
                  is_causal=True, layer_types=["full_attention"], target_layer_ids=[-1, 0, 2, 5], num_target_layers=7)),
}


def shapes(meta, sizes):
    """Names and shapes of the draft's tensors."""
    h, i, v = sizes["hidden"], sizes["inner"], sizes["vocabulary"]
    n, k, d = (meta[key] for key in ("heads", "kv_heads", "head_dim"))
    all = {"fc.weight": [h, len(meta["target_layer_ids"]) * h], "hidden_norm.weight": [h], "norm.weight": [h]}
    for layer in range(len(meta["layer_types"])):
        p = f"layers.{layer}."
        all |= {p + "input_layernorm.weight": [h], p + "post_attention_layernorm.weight": [h],
                p + "self_attn.q_norm.weight": [d], p + "self_attn.k_norm.weight": [d],
                p + "mlp.gate_proj.weight": [i, h], p + "mlp.up_proj.weight": [i, h], p + "mlp.down_proj.weight": [h, i]}
        for name, out, inputs in [("q", n * d, h), ("k", k * d, h), ("v", k * d, h), ("o", h, n * d)]:
            all[p + f"self_attn.{name}_proj.weight"] = [out, inputs]
            if meta["attention_bias"]:
                all[p + f"self_attn.{name}_proj.bias"] = [out]
        if meta.get("conv_kernel_size"):
            taps, groups = meta["conv_kernel_size"], h // meta["conv_group_size"]
            for module in ("attention_conv", "mlp_conv"):
                all[p + module + ".base_kernel"] = [2, taps, h]
                all[p + module + ".kernel_projection.weight"] = [2 * taps * groups, h]
    if r := meta.get("selector_rank"):
        s = "candidate_selector."
        all |= {s + "predecessor_codebook": [v, r], s + "successor_codebook": [v, r], s + "hidden_projection.weight": [r, h]}
    if r := meta.get("markov_rank"):
        m = "markov_head."
        all |= {m + "markov_w1.weight": [v, r], m + "markov_w2.weight": [v, r]}
        if meta["markov_head_type"] == "gated":
            all |= {m + "gate_proj.weight": [r, h + r], m + "gate_proj.bias": [r]}
        if meta["markov_head_type"] == "rnn":
            all |= {m + "joint_proj.weight": [3 * r, 2 * r + h], m + "joint_proj.bias": [3 * r]}
        width = h + (r if meta["confidence_head_with_markov"] else 0)
        all |= {"confidence_head.proj.weight": [1, width], "confidence_head.proj.bias": [1]}
    return all


class Draft:
    """The network of section 2 of the block drafts' rules, a block at a time."""

    def __init__(self, meta, w):
        self.meta, self.w = meta, w

    def norm(self, x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.meta["eps"]).sqrt() * self.w[name + ".weight"]

    def project(self, x, name):
        out = x @ self.w[name + ".weight"].T
        return out + self.w[name + ".bias"] if name + ".bias" in self.w else out

    def heads(self, x, name, count, positions):
        d = self.meta["head_dim"]
        x = self.project(x, name).reshape(-1, count, d)
        if positions is None:
            return x
        x = self.norm(x, name.replace("_proj", "_norm"))
        angles = positions[:, None].double() * self.meta["rope_theta"] ** (-torch.arange(0, d, 2).double() / d)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., : d // 2], x[..., d // 2:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def sees(self, layer, anchor, slot, key, in_block):
        """Whether a slot sees a key: a token of the context, or a slot of its block."""
        slides = self.meta["layer_types"][layer] == "sliding_attention"
        causal = self.meta.get("is_causal")
        causal = slides if causal is None else causal
        reach = self.meta["sliding_window"] - 1 if slides else 10 ** 9
        if in_block:
            return key >= slot - reach and (key <= slot or not causal)
        return key < anchor and key >= anchor + slot - reach

    def attention(self, layer, z, context, anchor, positions):
        n, k, d = (self.meta[key] for key in ("heads", "kv_heads", "head_dim"))
        p = f"layers.{layer}.self_attn."
        q = self.heads(z, p + "q_proj", n, positions)
        own = (self.heads(z, p + "k_proj", k, positions), self.heads(z, p + "v_proj", k, None))
        before = torch.arange(len(context))
        given = (self.heads(context, p + "k_proj", k, before), self.heads(context, p + "v_proj", k, None))
        rows = []
        for slot in range(len(z)):
            tokens = [t for t in range(len(context)) if self.sees(layer, anchor, slot, t, False)]
            slots = [s for s in range(len(z)) if self.sees(layer, anchor, slot, s, True)]
            keys, values = (torch.cat([given[i][tokens], own[i][slots]]).repeat_interleave(n // k, 1) for i in (0, 1))
            weights = (torch.einsum("nd,tnd->nt", q[slot], keys) / d ** 0.5).softmax(-1)
            rows.append(torch.einsum("nt,tnd->nd", weights, values).reshape(-1))
        return self.project(torch.stack(rows), p + "o_proj")

    def convolved(self, layer, module, z, sublayer):
        """A sublayer between its convolutions, or alone."""
        name = f"layers.{layer}.{module}"
        if name + ".base_kernel" not in self.w:
            return sublayer(z)
        taps, size = self.meta["conv_kernel_size"], self.meta["conv_group_size"]
        delta = self.project(z, name + ".kernel_projection").reshape(len(z), 2, taps, -1).repeat_interleave(size, -1)

        def conv(y, side):
            rows = []
            for j in range(len(y)):
                kernel = self.w[name + ".base_kernel"][side] + delta[j, side]
                rows.append(sum(kernel[t] * y[j - t] for t in range(taps) if j >= t))
            return torch.stack(rows)

        return conv(sublayer(conv(z, 0)), 1)

    def block(self, embed, features, token, anchor):
        """The slots' states after the final norm, [G, H]."""
        size = self.meta["block_size"]
        context = self.norm(self.project(features, "fc"), "hidden_norm")
        x = embed[[token] + [self.meta["mask_token_id"]] * (size - 1)]
        positions = anchor + torch.arange(size)
        for layer in range(len(self.meta["layer_types"])):
            z = self.norm(x, f"layers.{layer}.input_layernorm")
            x = x + self.convolved(layer, "attention_conv", z,
                                   lambda z: self.attention(layer, z, context, anchor, positions))
            z = self.norm(x, f"layers.{layer}.post_attention_layernorm")
            mlp = f"layers.{layer}.mlp."

            def gated(z):
                gate = self.project(z, mlp + "gate_proj")
                return self.project(gate / (1 + (-gate).exp()) * self.project(z, mlp + "up_proj"), mlp + "down_proj")

            x = x + self.convolved(layer, "mlp_conv", z, gated)
        return self.norm(x, "norm")

    def chain(self, states, before):
        """What the slots' logits gain, and the confidence's logits."""
        kind, w = self.meta["markov_head_type"], self.w
        state, gains, confidence = torch.zeros(self.meta["markov_rank"]).double(), [], []
        for h, token in zip(states, before):
            e = w["markov_head.markov_w1.weight"][token]
            if kind == "gated":
                e_mixed = self.project(torch.cat([h, e]), "markov_head.gate_proj").sigmoid() * e
            elif kind == "rnn":
                gate, cell, out = self.project(torch.cat([state, e, h]), "markov_head.joint_proj").chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * cell.tanh()
                e_mixed = out.tanh()
            else:
                e_mixed = e
            gains.append(w["markov_head.markov_w2.weight"] @ e_mixed)
            read = torch.cat([h, e]) if self.meta["confidence_head_with_markov"] else h
            confidence.append(self.project(read, "confidence_head.proj")[0])
        return torch.stack(gains), torch.stack(confidence)


class Step:
    """One step over all rows: outputs, loss and gradients."""

    def __init__(self, meta, tensors):
        self.meta, self.out, self.gap = meta, {}, float("inf")
        wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        self.w = {name[2:]: t.requires_grad_() for name, t in wide.items() if name.startswith("w.")}
        self.draft, self.given = Draft(meta, self.w), wide
        self.embed = wide["in.embed"]
        self.head = wide.get("in.head", self.embed)

    def run(self):
        ids, anchors, keep = (self.given["in." + name] for name in ("input_ids", "anchors", "keep"))
        rows, blocks = anchors.shape
        size, width = self.meta["block_size"], self.embed.shape[1]
        self.hidden = torch.zeros(rows, blocks * size, width).double()
        self.blocks = []
        for row in range(rows):
            for block in range(blocks):
                if not keep[row, block]:
                    continue
                anchor = int(anchors[row, block])
                states = self.draft.block(self.embed, self.given["in.features"][row], int(ids[row, anchor]), anchor)
                self.hidden[row, block * size:(block + 1) * size] = states.detach()
                self.blocks.append((row, block, anchor, states))
        self.out["out.hidden"] = self.hidden
        loss = {"dflash": self.plain, "dflash2": self.selected, "dspark": self.chained}[self.meta["kind"]]()
        loss.backward()
        self.out["out.loss"] = loss.detach().reshape(1)
        grads = {"grad." + name: t.grad if t.grad is not None else torch.zeros_like(t) for name, t in self.w.items()}
        self.norm = float(torch.stack([g.pow(2).sum() for g in grads.values()]).sum().sqrt())
        self.loss = float(loss.detach())
        return self.out | grads

    def learned(self, row, place):
        mask = self.given["in.loss_mask"][row]
        return place < len(mask) and bool(mask[place] > 0)

    def slots(self):
        """Learned slots of all blocks: state, label, the token before it, slot."""
        for row, block, anchor, states in self.blocks:
            ids = self.given["in.input_ids"][row]
            for k in range(1, self.meta["block_size"]):
                if self.learned(row, anchor + k):
                    yield (row, block, anchor), states[k], int(ids[anchor + k]), int(ids[anchor + k - 1]), k

    def decay(self, k):
        gamma = self.meta.get("gamma")
        return 1.0 if gamma is None else float(torch.tensor(-k / gamma).double().exp())

    def weights(self, slots):
        """What every learned slot weighs, and the divisor."""
        kind = self.meta.get("loss_type", "dflash")
        if kind == "dflash":
            weights = [self.decay(slot[4] - 1) for slot in slots]
            return weights, sum(weights)
        alpha, weights = self.meta["alpha"], []
        for place in dict.fromkeys(slot[0] for slot in slots):
            own = [slot for slot in slots if slot[0] == place]
            chances = [float((self.head @ s[1]).softmax(-1)[s[2]].detach()) for s in own]
            smooth = [(1 - alpha) * chance + alpha for chance in chances]
            reached = [float(torch.tensor(smooth[:i + 1]).double().prod()) for i in range(len(own))]
            for i in range(len(own)):
                rest = sum(reached[i:])
                weights.append({"dpace": rest, "dpace-cumulative-confidence-only": reached[i],
                                "dpace-continuation-value-only": rest / reached[i]}[kind])
        return weights, len(self.given["in.anchors"]) if self.meta["divisor"] == "rows" else sum(weights)

    def base(self):
        slots = list(self.slots())
        weights, divisor = self.weights(slots)
        logits = [self.head @ slot[1] for slot in slots]
        losses = [z.logsumexp(-1) - z[slot[2]] for z, slot in zip(logits, slots)]
        return slots, weights, divisor, logits, sum(w * l for w, l in zip(weights, losses)) / divisor

    def plain(self):
        slots, _, _, logits, loss = self.base()
        right = sum(int(z.argmax()) == slot[2] for z, slot in zip(logits, slots))
        self.out["out.metric.acc"] = torch.tensor([[float(right)], [float(len(slots))]])
        return loss

    def scores(self, state, before):
        """A slot's candidates, and their scores after a token."""
        s = "candidate_selector."
        logits = self.head @ state
        top = logits.topk(self.meta["top_k"] + 1)
        self.gap = min(self.gap, float((top.values[-2] - top.values[-1]).detach()))
        ids = top.indices[:-1]
        query = self.w[s + "predecessor_codebook"][before] * self.draft.project(state, s + "hidden_projection")
        return ids, logits[ids] + self.w[s + "successor_codebook"][ids] @ query

    def selected(self):
        slots, weights, divisor, _, base = self.base()
        total, hit_weight, hits = torch.zeros(()).double(), 0.0, 0
        for slot, weight in zip(slots, weights):
            ids, scores = self.scores(slot[1], slot[3])
            place = (ids == slot[2]).nonzero()
            if len(place):
                total = total + weight * (scores.logsumexp(-1) - scores[place[0, 0]])
                hit_weight, hits = hit_weight + weight, hits + 1
        over_hits = self.meta["selector_divisor"] == "over_hit_weights"
        selector = total / (hit_weight if over_hits else divisor)
        self.walk()
        self.out |= {"out.base_loss": base.detach().reshape(1), "out.selector_loss": selector.detach().reshape(1),
                     "out.recall": torch.tensor([float(hits), float(len(slots))])}
        return base + self.meta["selector_loss_weight"] * selector

    def walk(self):
        """Candidates, scores after the text's tokens, and greedy choices, of every slot within its row."""
        (rows, blocks), size, top = self.given["in.anchors"].shape, self.meta["block_size"], self.meta["top_k"]
        candidates = torch.zeros(rows, blocks, size, top, dtype=torch.int64)
        scores, walk = torch.zeros(rows, blocks, size, top).double(), torch.zeros(rows, blocks, size - 1, dtype=torch.int64)
        for row, block, anchor, states in self.blocks:
            ids, chosen = self.given["in.input_ids"][row], int(self.given["in.input_ids"][row][anchor])
            for k in range(1, min(size, len(ids) - anchor)):
                own, given = self.scores(states[k], int(ids[anchor + k - 1]))
                candidates[row, block, k], scores[row, block, k] = own, given.detach()
                after = self.scores(states[k], chosen)[1].topk(2)
                self.gap = min(self.gap, float((after.values[0] - after.values[1]).detach()))
                chosen = int(own[after.indices[0]])
                walk[row, block, k - 1] = chosen
        self.out |= {"out.candidates": candidates, "out.scores": scores, "out.walk": walk}

    def chained(self):
        weight, total, divisor = self.meta["loss_weights"], 0.0, 0.0
        right, count = 0, 0
        for row, _, anchor, states in self.blocks:
            ids, size = self.given["in.input_ids"][row], self.meta["block_size"]
            # What follows a token that is not learned is not learned.
            slots = next((k for k in range(size) if not self.learned(row, anchor + 1 + k)), size)
            before = [int(ids[min(anchor + k, len(ids) - 1)]) for k in range(size)]
            gains, confidence = self.draft.chain(states, before)
            for k in range(slots):
                z = self.head @ states[k] + gains[k]
                label, teacher = int(ids[anchor + 1 + k]), self.given["in.last_hidden"][row][anchor + k]
                q, p = z.softmax(-1), (self.head @ teacher).softmax(-1)
                apart = (q - p).abs().sum()
                alpha = (1 - apart / 2).detach()
                c = confidence[k].sigmoid()
                bce = -(alpha * c.log() + (1 - alpha) * (1 - c).log())
                w = self.decay(k)
                total = total + w * (weight["ce"] * -q[label].log() + weight["l1"] * apart + weight["confidence"] * bce)
                divisor += w
                right, count = right + int(int(z.argmax()) == label), count + 1
        self.out["out.metric.acc"] = torch.tensor([[float(right)], [float(count)]])
        return total / divisor


def random_inputs(case):
    """A case's inputs and weights."""
    meta, g = case["meta"], torch.Generator().manual_seed(case["seed"])
    rows, tokens, blocks, h, v = (case[key] for key in ("rows", "tokens", "blocks", "hidden", "vocabulary"))
    noise = lambda *shape: torch.randn(*shape, generator=g)
    ids = torch.randint(0, meta["mask_token_id"], (rows, tokens), generator=g)
    mask = (torch.rand(rows, tokens, generator=g) < 0.8).float()
    if case["padding"]:
        ids[-1, -case["padding"]:], mask[-1, -case["padding"]:] = 0, 0.0
    anchors, keep = torch.zeros(rows, blocks, dtype=torch.int64), torch.zeros(rows, blocks, dtype=torch.uint8)
    for row in range(rows):
        places = [t for t in range(tokens - 1) if mask[row, t] and mask[row, t + 1]]
        chosen = sorted(places[i] for i in torch.randperm(len(places), generator=g)[:blocks - row % 2])
        anchors[row, :len(chosen)], keep[row, :len(chosen)] = torch.tensor(chosen), 1
    tensors = {"in.input_ids": ids, "in.loss_mask": mask, "in.anchors": anchors, "in.keep": keep,
               "in.features": noise(rows, tokens, len(meta["target_layer_ids"]) * h),
               "in.last_hidden": noise(rows, tokens, h), "in.embed": noise(v, h)}
    if not case["tied"]:
        tensors["in.head"] = noise(v, h) * 0.6
    for name, shape in shapes(meta, case).items():
        scale = 0.1 if len(shape) == 1 or "kernel" in name else 0.25
        value = noise(*shape) * scale
        if "norm" in name:
            value = value + 1
        if name.endswith("base_kernel"):
            value[:, 0] += 1
        tensors["w." + name] = value.to(case["dtype"])
    return tensors


def check(folder):
    """Compares a case's expected values with those of this file."""
    meta, tensors = json.loads((folder / "meta.json").read_text()), load_file(folder / "case.safetensors")
    step = Step(meta, tensors)
    own, worst = step.run(), 0.0
    kept = tensors["in.keep"].bool().repeat_interleave(meta["block_size"], 1)
    for name, value in own.items():
        if name not in tensors:
            continue
        want = tensors[name].double()
        value, want = (value[kept], want[kept]) if name == "out.hidden" else (value, want)
        if name in ("out.candidates", "out.scores", "out.walk"):
            continue
        worst = max(worst, float((value - want).abs().max() / max(float(want.abs().max()), 1e-12)))
    for found, want in ((step.loss, meta["loss"]), (step.norm, meta["grad_norm"])):
        worst = max(worst, abs(found - want) / abs(want))
    print(f"{folder.name}: {worst:.1e}")


def main():
    torch.set_num_threads(1)
    if sys.argv[1:]:
        for folder in sys.argv[1:]:
            check(Path(folder))
        return
    for name, case in CASES.items():
        tensors = random_inputs(case)
        step = Step(case["meta"], tensors)
        own = step.run()
        assert step.gap > CLEAR, f"{name}: a choice hangs on {step.gap}"
        own = {key: value.float() if value.is_floating_point() else value for key, value in own.items()}
        folder = Path(__file__).parent / name
        folder.mkdir(exist_ok=True)
        stored = {key: value.detach().contiguous() for key, value in (tensors | own).items()}
        save_file(stored, folder / "case.safetensors")
        meta = {"case": name, **case["meta"], "loss": step.loss, "grad_norm": step.norm}
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        print(f"{name}: loss {step.loss:.6f}, gradient {step.norm:.6f}, gap {step.gap:.2e}")


main()
