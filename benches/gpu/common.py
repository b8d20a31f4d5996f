"""What both PyTorch programs share: shapes, the arithmetic of a Llama layer, the clock.

Precision is that of longdraft's bf16 mode: the frozen target is held in bf16; trained weights and AdamW's state are f32, products of
the draft run in bf16 (autocast), norms, softmax and losses in f32.
"""

import gc
import json
import resource
import time
import traceback
from contextlib import nullcontext

import torch
import torch.nn.functional as F

# Width, inner width, layers, query heads, key-value heads, vocabulary, RoPE base, tied head, draft vocabulary.
SHAPES = {
    "tiny": dict(hidden=64, ffn=128, layers=8, heads=4, kv_heads=2, vocab=512, theta=1e4, tied=False, draft_vocab=128),
    "smollm2-135m": dict(hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, vocab=49152, theta=1e5, tied=True,
                         draft_vocab=8192),
    "llama3.1-8b": dict(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256, theta=5e5, tied=False,
                        draft_vocab=32000),
}
EPS = 1e-5


def add_arguments(parser):
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="layers of the target in place of the shape's")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[1024])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--warm-ups", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="compile block by block")
    parser.add_argument("--seed", type=int, default=0)


class Sizes:
    """A shape's numbers as attributes, `head_dim` beside them."""

    def __init__(self, arguments):
        self.__dict__.update(SHAPES[arguments.shape])
        self.layers = arguments.layers or self.layers
        self.head_dim = self.hidden // self.heads


class Place:
    def __init__(self, arguments):
        self.device = torch.device(arguments.device)
        self.cuda = self.device.type == "cuda"
        # As longdraft's `precision: auto`.
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        torch.manual_seed(arguments.seed)
        torch.backends.cuda.matmul.allow_tf32 = False

    def frozen(self, *shape, deviation=0.02):
        return torch.randn(*shape, device=self.device, dtype=self.dtype) * deviation

    def trained(self, *shape, deviation=0.02):
        return torch.nn.Parameter(torch.randn(*shape, device=self.device) * deviation)

    def ones(self, *shape):
        return torch.ones(*shape, device=self.device)

    def autocast(self):
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.cuda else nullcontext()

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def adamw(self, parameters, rate, **options):
        return torch.optim.AdamW(parameters, lr=rate, fused=True, **options)


def rms(x, weight):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rope_table(positions, sizes):
    """Cosine and sine of positions, `[T, D]` each, f32."""
    steps = torch.arange(0, sizes.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = torch.outer(positions.float(), sizes.theta ** (-steps / sizes.head_dim))
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def rope(x, table):
    """`x`: `[T, N, D]`."""
    cosine, sine = (part[:, None, :].to(x.dtype) for part in table)
    half = x.shape[-1] // 2
    return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine


def gated_mlp(x, weights):
    return F.linear(F.silu(F.linear(x, weights["gate"])) * F.linear(x, weights["up"]), weights["down"])


def chunked(function, rows, *tensors):
    """Sum of `function` over chunks of rows, whose logits are computed again in the backward pass and never lie side by side."""
    total = 0.0
    for start in range(0, tensors[0].shape[0], rows):
        pieces = [tensor[start:start + rows] for tensor in tensors]
        total = total + torch.utils.checkpoint.checkpoint(function, *pieces, use_reentrant=False)
    return total


def measure(place, arguments, about, build, tokens):
    """Times steps as longdraft does and prints one line; an error is a line as well. `build` makes a step with `prepare`. Returns
    whether it worked."""
    seconds, loss, way = [], None, {}
    try:
        if place.cuda:
            torch.cuda.reset_peak_memory_stats()
        step = build()
        way = {"attention": step.way}
        for index in range(arguments.warm_ups + arguments.steps):
            given = step.prepare()
            place.synchronize()
            start = time.perf_counter()
            loss = step(*given)
            place.synchronize()
            if index >= arguments.warm_ups:
                seconds.append(time.perf_counter() - start)
        median = sorted(seconds)[len(seconds) // 2]
        figures = {"warm_ups": arguments.warm_ups, "seconds": seconds, "median_s": median, "least_s": min(seconds),
                   "tokens_per_s": tokens / median,
                   "peak_device_mib": torch.cuda.max_memory_allocated() >> 20 if place.cuda else None,
                   "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "loss": float(loss)}
    except Exception as error:  # Whatever it is, the other cases go on.
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    print(json.dumps({"impl": f"pytorch-{torch.__version__}", "device": place.device.type,
                      "dtype": str(place.dtype).removeprefix("torch."), "compile": arguments.compile, "tokens": tokens, **about,
                      **way, **figures}), flush=True)
    step = None
    if place.cuda:
        gc.collect()
        torch.cuda.empty_cache()
    return "error" not in figures
