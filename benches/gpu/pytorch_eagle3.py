"""One training step of an EAGLE-3 draft from given features, as a PyTorch user writes it today; beside `longdraft bench eagle3`.

    python pytorch_eagle3.py --shape llama3.1-8b --tokens 4096,16384,32768 --attention flex --compile
    python pytorch_eagle3.py --shape tiny --tokens 64 --device cpu

Seven test-time steps. At step i a row sees the keys of step 0 up to its own token and its own key of every step since: --attention
flex says so with a block mask over the keys of all steps side by side, `explicit` materialises the scores of step 0 and adds a column
for each step since (at 32k tokens that is 137 GB). Prints one JSON line for each case.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from common import Place, Sizes, add_arguments, chunked, gated_mlp, measure, rms, rope, rope_table

STEPS, DECAY = 7, 0.8


def sees(tokens):
    """Whether query q sees key k, keys of all steps side by side: the causal prefix of step 0, its own column of the others."""
    return lambda _b, _h, q, k: torch.where(k < tokens, k <= q, k % tokens == q)


def explicit(q, keys, values):
    """Scores of step 0, with a column for each step since. `q`: `[T, N, D]`, lists of `[T, K, D]`."""
    tokens, heads, width = q.shape
    repeat = lambda x: x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)
    q, keys, values = q.transpose(0, 1), [repeat(k) for k in keys], [repeat(v) for v in values]
    place = torch.arange(tokens, device=q.device)
    scores = (q @ keys[0].transpose(1, 2) / width**0.5).masked_fill(place[:, None] < place[None, :], float("-inf"))
    own = [(q * k).sum(-1, keepdim=True) / width**0.5 for k in keys[1:]]
    distribution = torch.softmax(torch.cat([scores, *own], -1).float(), -1).to(q.dtype)
    out = distribution[..., :tokens] @ values[0]
    for step, v in enumerate(values[1:]):
        out = out + distribution[..., tokens + step, None] * v
    return out.transpose(0, 1)


class Flex:
    """The same by flex_attention, which needs all keys side by side."""

    def __init__(self, tokens, device, cuda):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        # Uncompiled it holds all scores: only to compare with. Compiled for any length, not anew for every step.
        self.run = torch.compile(flex_attention, dynamic=True) if cuda else flex_attention
        self.blocks = [create_block_mask(sees(tokens), None, None, tokens, (step + 1) * tokens, device=device, _compile=cuda)
                       for step in range(STEPS)]

    def __call__(self, q, keys, values):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, torch.cat(keys), torch.cat(values)))
        return self.run(q, k, v, block_mask=self.blocks[len(keys) - 1], enable_gqa=True)[0].transpose(0, 1)


def padded(x):
    """Zeros after the last row, so that what stands some tokens later is a view."""
    return torch.cat((x, x.new_zeros(STEPS, *x.shape[1:])))


class Step:
    """Models, optimizer and the arithmetic of one case."""

    def __init__(self, arguments, sizes, place, tables, tokens):
        torch.manual_seed(arguments.seed + 1)
        self.sizes, self.place, self.tokens, self.tables = sizes, place, tokens, tables
        self.way, self.chunk = arguments.attention, arguments.chunk_rows
        self.attend = Flex(tokens, place.device, place.cuda) if self.way == "flex" else explicit
        hidden, query, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        make = place.trained
        self.weights = {"fc": make(hidden, 3 * hidden), "q": make(query, 2 * hidden), "k": make(kv, 2 * hidden),
                        "v": make(kv, 2 * hidden), "o": make(hidden, query), "gate": make(sizes.ffn, hidden),
                        "up": make(sizes.ffn, hidden), "down": make(hidden, sizes.ffn), "head": make(arguments.draft_vocab, hidden)}
        for name in ("n_in", "n_state", "n_post", "n_out"):
            self.weights[name] = torch.nn.Parameter(place.ones(hidden))
        self.optimizer = place.adamw(list(self.weights.values()), 1e-4, weight_decay=0.0)
        compiled = (lambda f: torch.compile(f, dynamic=False)) if arguments.compile else (lambda f: f)
        self.project, self.finish = compiled(self.project), compiled(self.finish)
        self.loss_of, self.teacher_distribution = compiled(self.loss_of), compiled(self.teacher_distribution)

    def prepare(self):
        states = lambda layers: torch.randn(self.tokens, layers * self.sizes.hidden, device=self.place.device)
        return torch.randint(0, self.sizes.vocab, (self.tokens,), device=self.place.device), states(3), states(1)

    def project(self, embedded, state, table):
        """Rotated queries and keys, and values, of one step."""
        w, heads = self.weights, lambda x, weight: F.linear(x, weight).view(x.shape[0], -1, self.sizes.head_dim)
        u = torch.cat((rms(embedded, w["n_in"]), rms(state, w["n_state"])), -1)
        v = heads(u, w["v"])
        return rope(heads(u, w["q"]), table).to(v.dtype), rope(heads(u, w["k"]), table).to(v.dtype), v

    def finish(self, state, attended):
        w = self.weights
        state = state + F.linear(attended.flatten(1), w["o"])
        return state + gated_mlp(rms(state, w["n_post"]), w)

    def teacher_distribution(self, final):
        """The target's distribution over the draft's tokens, and whether its most likely token is one of them."""
        head, kept = self.tables["head"], self.weights["head"].shape[0]
        logits = F.linear(final.to(head.dtype), head).float()
        return torch.softmax(logits[:, :kept], -1), logits.argmax(-1) < kept

    def teacher(self, final):
        with torch.no_grad():
            distribution, known = zip(*[self.teacher_distribution(rows) for rows in final.split(self.chunk)])
            return torch.cat(distribution), torch.cat(known)

    def loss_of(self, state, distribution, learned):
        """Summed loss of some rows of a step against the target's distribution."""
        logits = F.linear(rms(state, self.weights["n_out"]), self.weights["head"]).float()
        return (F.cross_entropy(logits, distribution, reduction="none") * learned).sum()

    def forward(self, ids, aux, final):
        distribution, self.known = self.teacher(final)
        state, keys, values, total = F.linear(aux, self.weights["fc"]).float(), [], [], 0.0
        ids, distribution, learned = padded(ids), padded(distribution), padded(self.place.ones(self.tokens))
        places = torch.arange(self.tokens, device=self.place.device)
        for step in range(STEPS):
            later = slice(step, step + self.tokens)
            embedded = self.tables["embedding"][ids[later]].float()
            q, k, v = self.project(embedded, state, rope_table(places + step, self.sizes))
            keys.append(k)
            values.append(v)
            state = self.finish(state, self.attend(q, keys, values))
            loss = chunked(self.loss_of, self.chunk, state, distribution[later], learned[later])
            total = total + DECAY**step * loss / self.tokens
        return total

    def __call__(self, ids, aux, final):
        with self.place.autocast():
            total = self.forward(ids, aux, final)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total.detach()


def check():
    """Both ways of attention give the same on the CPU. Returns the largest difference."""
    tokens, worst = 40, 0.0
    flex = Flex(tokens, "cpu", False)
    keys, values = [], []
    for _ in range(STEPS):
        q = torch.randn(tokens, 4, 16)
        keys.append(torch.randn(tokens, 2, 16))
        values.append(torch.randn(tokens, 2, 16))
        with torch.no_grad():
            worst = max(worst, (flex(q, keys, values) - explicit(q, keys, values)).abs().max().item())
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--attention", choices=("flex", "explicit"), help="default: flex on a GPU, which has a backward pass for it")
    parser.add_argument("--draft-vocab", type=int, help="tokens that the draft proposes, in place of the shape's")
    parser.add_argument("--chunk-rows", type=int, default=8192, help="rows whose logits are there at once")
    parser.add_argument("--check", action="store_true", help="compare the ways of attention on the CPU")
    arguments = parser.parse_args()
    if arguments.check:
        difference = check()
        print(f"largest difference {difference:.1e}")
        sys.exit(0 if difference < 1e-5 else 1)
    sizes, place = Sizes(arguments), Place(arguments)
    arguments.attention = arguments.attention or ("flex" if place.cuda else "explicit")
    arguments.draft_vocab = arguments.draft_vocab or sizes.draft_vocab
    embedding = place.frozen(sizes.vocab, sizes.hidden)
    tables = {"embedding": embedding, "head": embedding if sizes.tied else place.frozen(sizes.vocab, sizes.hidden)}
    about = {"case": "eagle3", "shape": arguments.shape, "layers": sizes.layers, "online": False,
             "draft_vocab_size": arguments.draft_vocab}
    worked = True
    for tokens in arguments.tokens:
        worked &= measure(place, arguments, about, lambda: Step(arguments, sizes, place, tables, tokens), tokens)
    sys.exit(0 if worked else 1)


if __name__ == "__main__":
    main()
