"""One training step of a GLIDE draft with the target online, as a PyTorch user writes it today; beside `longdraft bench glide`.

    python pytorch_glide.py --shape llama3.1-8b --tokens 32768 --documents 1,8 --soft --compile
    python pytorch_glide.py --shape tiny --tokens 64 --documents 1,3 --device cpu --soft

The target attends by flash attention: SDPA over one document, variable-length attention over several. The draft's window of 512
keys and its cross-attention to keys that are two tokens old use the same kernels where they can (`window_size`, shifted documents),
else flex_attention. --attention chooses: auto, varlen, flex, mask (explicit masks, to compare with; small rows only).
Prints one JSON line for each case.
"""

import argparse
import functools
import inspect
import sys

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from common import Place, Sizes, add_arguments, chunked, gated_mlp, measure, rms, rope, rope_table

try:
    from torch.nn.attention.varlen import varlen_attn
    VARLEN = set(inspect.signature(varlen_attn).parameters)
except ImportError:
    VARLEN = set()

WINDOW, DELAY, SOFT_WEIGHT = 512, 2, 0.9


class Documents:
    """Documents of equal length in one row, the last with what is left over."""

    def __init__(self, tokens, count, device):
        length = tokens // count
        self.count, self.tokens, self.device = count, tokens, device
        bounds = [*range(0, count * length, length), tokens]
        self.lengths = [end - start for start, end in zip(bounds, bounds[1:])]
        self.ids = torch.cat([torch.full((n,), i, device=device) for i, n in enumerate(self.lengths)])
        self.positions = torch.cat([torch.arange(n, device=device) for n in self.lengths])
        self.learned = torch.cat([torch.arange(start, end - 1, device=device) for start, end in zip(bounds, bounds[1:])])
        # Queries that see a key so many tokens before them, and the keys that some query sees.
        late = [torch.arange(start + DELAY, end, device=device) for start, end in zip(bounds, bounds[1:])]
        self.late, self.early = torch.cat(late), torch.cat(late) - DELAY

    def offsets(self, less=0):
        lengths = torch.tensor([0, *(n - less for n in self.lengths)], device=self.device)
        return lengths.cumsum(0).to(torch.int32), max(self.lengths) - less

    def mask(self, window=None, delay=0):
        """Whether query q sees key k, as a function of flex_attention."""
        ids = self.ids

        def sees(_b, _h, q, k):
            inside = (ids[q] == ids[k]) & (k <= q - delay)
            return inside & (q - k <= window) if window else inside

        return sees


class Attention:
    """Attention over `[T, N, D]` queries and `[T, K, D]` keys within documents: `own` of the target, `near` within the draft's
    window, `cross` to keys that are DELAY tokens old."""

    def __init__(self, documents, way, cuda):
        self.documents, self.way = documents, way
        if way == "auto":
            able = cuda and "window_size" in VARLEN
            self.way = "varlen" if able else "flex" if cuda else "mask"
        if self.way == "flex":
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention
            # Uncompiled it holds all scores: only to compare with.
            self.run_flex = torch.compile(flex_attention, dynamic=False) if cuda else flex_attention
            build = functools.partial(create_block_mask, B=None, H=None, Q_LEN=documents.tokens, KV_LEN=documents.tokens,
                                      device=documents.device, _compile=cuda)
            self.blocks = {kind: build(documents.mask(*rule)) for kind, rule in self.rules().items()}
        elif self.way == "mask":
            place = torch.arange(documents.tokens, device=documents.device)
            self.masks = {kind: documents.mask(*rule)(0, 0, place[:, None], place[None, :]) for kind, rule in self.rules().items()}

    @staticmethod
    def rules():
        return {"own": (None, 0), "near": (WINDOW, 0), "cross": (None, DELAY)}

    def __call__(self, kind, q, k, v):
        if kind == "own" and self.documents.count == 1 and self.way != "mask":
            return self.sdpa(q, k, v, is_causal=True)
        if kind == "cross":
            # Queries without a key see nothing and add nothing.
            out = getattr(self, self.way)(kind, q, k, v)
            seen = (self.documents.positions >= DELAY)[:, None, None]
            return torch.where(seen, out, torch.zeros((), device=out.device, dtype=out.dtype))
        return getattr(self, self.way)(kind, q, k, v)

    @staticmethod
    def sdpa(q, k, v, **options):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)[0].transpose(0, 1)

    def mask(self, kind, q, k, v):
        if kind != "cross":
            return self.sdpa(q, k, v, attn_mask=self.masks[kind])
        late, mask = self.documents.late, self.masks[kind]
        return torch.zeros_like(q).index_copy(0, late, self.sdpa(q[late], k, v, attn_mask=mask[late]))

    def flex(self, kind, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return self.run_flex(q, k, v, block_mask=self.blocks[kind], enable_gqa=True)[0].transpose(0, 1)

    def varlen(self, kind, q, k, v):
        documents, options = self.documents, {"window_size": (WINDOW if kind == "near" else -1, 0)}
        if "enable_gqa" in VARLEN:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if kind != "cross":
            offsets, longest = documents.offsets()
            return varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)
        # Query t sees keys up to t - DELAY: plain causal attention of shifted rows.
        offsets, longest = documents.offsets(DELAY)
        late, early = documents.late, documents.early
        out = varlen_attn(q[late], k[early], v[early], offsets, offsets, longest, longest, **options)
        return torch.zeros_like(q).index_copy(0, late, out)


def layer_weights(make, sizes, cross=False):
    """Matrices of a Llama layer, or of a GLIDE layer with its second attention."""
    hidden, query, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    weights = {"q": make(query, hidden), "k": make(kv, hidden), "v": make(kv, hidden), "o": make(hidden, query),
               "gate": make(sizes.ffn, hidden), "up": make(sizes.ffn, hidden), "down": make(hidden, sizes.ffn)}
    if cross:
        weights |= {"cq": make(query, hidden), "co": make(hidden, query)}
    return weights


def frozen_layer(place, sizes):
    return layer_weights(place.frozen, sizes) | {name: place.ones(sizes.hidden) for name in ("n1", "n2")}


class Step:
    """Models, optimizer and the arithmetic of one case."""

    def __init__(self, arguments, sizes, place, target, documents):
        torch.manual_seed(arguments.seed + 1)
        self.arguments, self.sizes, self.place, self.target, self.documents = arguments, sizes, place, target, documents
        self.attention = Attention(documents, arguments.attention, place.cuda)
        self.way = self.attention.way
        self.table = rope_table(documents.positions, sizes)
        trained = torch.nn.Parameter
        weights = layer_weights(place.trained, sizes, cross=True)
        query, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        for name, width in (("bq", query), ("bk", kv), ("bv", kv), ("bcq", query)):
            weights[name] = trained(torch.zeros(width, device=place.device))
        for name in ("n1", "n2", "n3"):
            weights[name] = trained(place.ones(sizes.hidden))
        self.draft = weights
        self.optimizer = place.adamw(list(weights.values()), 5e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
        compiled = (lambda f: torch.compile(f, dynamic=False)) if arguments.compile else (lambda f: f)
        # Block by block: one graph serves every layer of the target.
        self.block, self.last_keys = compiled(self.block), compiled(self.last_keys)
        self.draft_layer, self.loss_of = compiled(self.draft_layer), compiled(self.loss_of)

    def prepare(self):
        return (torch.randint(0, self.sizes.vocab, (self.documents.tokens,), device=self.place.device),)

    def heads(self, x, weight, bias=None):
        return F.linear(x, weight, bias).view(x.shape[0], -1, self.sizes.head_dim)

    def block(self, x, w):
        table, flat = self.table, lambda x: x.flatten(1)
        h = rms(x, w["n1"]).to(x.dtype)
        q, k, v = (self.heads(h, w[name]) for name in "qkv")
        x = x + F.linear(flat(self.attention("own", rope(q, table), rope(k, table), v)), w["o"])
        return x + gated_mlp(rms(x, w["n2"]).to(x.dtype), w)

    def last_keys(self, x, w):
        h = rms(x, w["n1"]).to(x.dtype)
        return rope(self.heads(h, w["k"]), self.table), self.heads(h, w["v"])

    def target_pass(self, ids):
        """Final states if they are wanted, and the last layer's keys and values."""
        target = self.target
        with torch.no_grad():
            x = target["embedding"][ids]
            for w in target["layers"][:-1]:
                x = self.block(x, w)
            k, v = self.last_keys(x, target["layers"][-1])
            if not self.arguments.soft:
                return None, k, v
            return rms(self.block(x, target["layers"][-1]), target["norm"]).to(x.dtype), k, v

    def draft_layer(self, x, k, v):
        w, table, attention = self.draft, self.table, self.attention
        x = x.float()
        h = rms(x, w["n1"])
        q, own_k = (rope(self.heads(h, w[name], w[f"b{name}"]), table) for name in "qk")
        own_v = self.heads(h, w["v"], w["bv"])
        same = lambda q, k, v: (q.to(v.dtype), k.to(v.dtype), v)
        x = x + F.linear(attention("near", *same(q, own_k, own_v)).flatten(1), w["o"])
        h = rms(x, w["n2"])
        q = rope(self.heads(h, w["cq"], w["bcq"]), table)
        x = x + F.linear(attention("cross", *same(q, k, v)).flatten(1), w["co"])
        return x + gated_mlp(rms(x, w["n3"]), w)

    def loss_of(self, hidden, labels, teacher):
        """Summed loss of some rows; `teacher`: final states of the target, or none."""
        head = self.target["head"]
        logits = F.linear(hidden.to(head.dtype), head).float()
        hard = F.cross_entropy(logits, labels, reduction="sum")
        if not self.arguments.soft:
            return hard
        distribution = torch.softmax(F.linear(teacher, head).float(), -1)
        soft = F.cross_entropy(logits, distribution, reduction="sum")
        return (1 - SOFT_WEIGHT) * hard + SOFT_WEIGHT * soft

    def __call__(self, ids):
        final, k, v = self.target_pass(ids)
        rows, place = self.documents.learned, self.place
        with place.autocast():
            hidden = self.draft_layer(self.target["embedding"][ids], k, v)
        hidden, labels = hidden[rows], ids[rows + 1]
        teacher = final[rows] if self.arguments.soft else labels
        loss = chunked(self.loss_of, self.arguments.chunk_rows, hidden, labels, teacher) / rows.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def varlen_by_hand(q, k, v, q_offsets, _, _longest, _longest_key, window_size, **_options):
    """What varlen_attn computes, document by document: it has no kernels for CPUs."""
    out = []
    for start, end in zip(q_offsets.tolist(), q_offsets.tolist()[1:]):
        place = torch.arange(end - start)
        back = place[:, None] - place[None, :]
        mask = (back >= 0) & ((back <= window_size[0]) if window_size[0] >= 0 else True)
        out.append(Attention.sdpa(q[start:end], k[start:end], v[start:end], attn_mask=mask))
    return torch.cat(out)


def check():
    """All ways of attention give the same on the CPU. Returns the largest difference."""
    worst = 0.0
    for tokens, count in ((1030, 1), (40, 3)):
        documents = Documents(tokens, count, "cpu")
        q, k, v = torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
        ways = [Attention(documents, way, False) for way in ("mask", "flex", "varlen")]
        for kind in Attention.rules():
            with torch.no_grad():
                wanted, *others = [way(kind, q, k, v) for way in ways]
            worst = max(worst, *[(other - wanted).abs().max().item() for other in others])
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--documents", type=lambda text: [int(n) for n in text.split(",")], default=[1])
    parser.add_argument("--soft", action="store_true", help="learn the target's distribution beside the labels")
    parser.add_argument("--attention", choices=("auto", "varlen", "flex", "mask"), default="auto")
    parser.add_argument("--chunk-rows", type=int, default=4096, help="rows whose logits are there at once")
    parser.add_argument("--check", action="store_true", help="compare the ways of attention on the CPU")
    arguments = parser.parse_args()
    if arguments.check:
        globals()["varlen_attn"] = varlen_by_hand
        difference = check()
        print(f"largest difference {difference:.1e}")
        sys.exit(0 if difference < 1e-5 else 1)
    sizes, place = Sizes(arguments), Place(arguments)
    embedding = place.frozen(sizes.vocab, sizes.hidden)
    target = {"embedding": embedding, "head": embedding if sizes.tied else place.frozen(sizes.vocab, sizes.hidden),
              "norm": place.ones(sizes.hidden), "layers": [frozen_layer(place, sizes) for _ in range(sizes.layers)]}
    worked = True
    for tokens in arguments.tokens:
        for count in arguments.documents:
            about = {"case": "glide", "shape": arguments.shape, "layers": sizes.layers, "documents": count, "soft": arguments.soft}
            build = lambda: Step(arguments, sizes, place, target, Documents(tokens, count, place.device))
            worked &= measure(place, arguments, about, build, tokens)
    sys.exit(0 if worked else 1)


if __name__ == "__main__":
    main()
