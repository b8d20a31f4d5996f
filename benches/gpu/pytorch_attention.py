"""Causal attention in bf16 by PyTorch's own kernels: the ceiling that kernels of ours are compared with.

    python pytorch_attention.py
    python pytorch_attention.py --tokens 4096 --backends flash

Sizes and names are those of `longdraft kernel-check --bench`: `attention` is a forward pass of two products, `attention_backward` a
backward pass of five, `attention_training` both. Times come from CUDA events. Prints one JSON line for each case.
"""

import argparse
import gc
import json
import sys
import traceback

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, WIDTH = 32, 8, 128
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def operations(tokens):
    """Of a forward pass: two products over the pairs that a causal mask leaves."""
    return 4 * HEADS * tokens * tokens / 2 * WIDTH


def timed(call, repeats):
    """Median milliseconds of a call."""
    for _ in range(3):
        call()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return sorted(found)[len(found) // 2]


def case(tokens, repeats, device):
    """Milliseconds of a forward and of a backward pass."""
    make = lambda heads: torch.randn(1, heads, tokens, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = make(HEADS), make(KV_HEADS), make(KV_HEADS)
    attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with torch.no_grad():
        forward = timed(attend, repeats)
    out = attend()
    gradient = torch.randn_like(out)
    return forward, timed(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), repeats)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[4096, 32768])
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    worked = True
    for tokens in arguments.tokens:
        for backend in arguments.backends:
            about = {"impl": f"pytorch-{torch.__version__}", "name": "attention", "products": "bf16", "backend": backend,
                     "shape": f"T {tokens}, heads {HEADS}/{KV_HEADS}, D {WIDTH}, causal"}
            try:
                with sdpa_kernel(BACKENDS[backend]):
                    forward, backward = case(tokens, arguments.repeats, arguments.device)
            except Exception as error:  # Whatever it is, the other cases go on.
                traceback.print_exc()
                print(json.dumps({**about, "error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}), flush=True)
                worked = False
            else:
                for name, ms, products in (("attention", forward, 1), ("attention_backward", backward, 2.5),
                                           ("attention_training", forward + backward, 3.5)):
                    rate = products * operations(tokens) / ms / 1e9
                    print(json.dumps({**about, "name": name, "ms": ms, "tflops": rate}), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    sys.exit(0 if worked else 1)


if __name__ == "__main__":
    main()
