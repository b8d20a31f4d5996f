"""Plain decoding and prefill beside llama.cpp on the same GGUF file, alternately, equal threads.

Usage: against_llamacpp.py LONGDRAFT TARGET.gguf [--rounds N] [--threads N] [--tokens N] [--text FILE]

Needs llama-cpp-python (PyPI). Every measurement is a process of its own with a warm-up request; the prompt is TEXT
(default: the shipped books excerpt) cut to 512 tokens. Prints a line a round and, last, JSON with the medians and
the ratios ours : llama.cpp; and for how many tokens the greedy outputs agree.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

PROMPT_TOKENS = 512


def llama(model, prompt, tokens, threads):
    """One process's measurement with llama.cpp."""
    import llama_cpp
    import numpy

    def best():
        logits = engine._ctx.get_logits_ith(-1)
        return int(numpy.ctypeslib.as_array(logits, (engine.n_vocab(),)).argmax())

    engine = llama_cpp.Llama(model, n_ctx=2048, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    ids = engine.tokenize(prompt.encode(), add_bos=False, special=True)[:PROMPT_TOKENS]
    engine.eval(ids[:8])
    engine.reset()
    engine._ctx.kv_cache_clear()
    started = time.perf_counter()
    engine.eval(ids)
    prefill = time.perf_counter() - started
    out = [best()]
    started = time.perf_counter()
    while len(out) < tokens:
        engine.eval(out[-1:])
        out.append(best())
    seconds = time.perf_counter() - started
    passes = {}
    for rows in (1, 4, 5, 8):
        times = []
        for _ in range(9):
            kept = engine.n_tokens
            started = time.perf_counter()
            engine.eval(out[:rows])
            times.append(time.perf_counter() - started)
            engine._ctx.kv_cache_seq_rm(-1, kept, -1)
            engine.n_tokens = kept
        passes[rows] = 1e3 * statistics.median(times)
    print(json.dumps({
        "prompt": engine.detokenize(ids, special=True).decode(errors="ignore"), "prompt_tokens": len(ids), "out": out,
        "prefill": len(ids) / prefill, "decode": (len(out) - 1) / seconds, "passes_ms": passes,
    }))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("longdraft")
    parser.add_argument("target")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--text", default=str(pathlib.Path(__file__).parent.parent / "assets/corpus/books-excerpt.jsonl"))
    parser.add_argument("--dtype", nargs="*", default=["stored", "f32"])
    args = parser.parse_args()
    text = pathlib.Path(args.text).read_text()
    if args.text.endswith(".jsonl"):
        text = json.loads(text.splitlines()[0])["text"]
    text = text[:6000]
    if args.longdraft == "llama":
        return llama(args.target, text, args.tokens, args.threads)
    rows = {"llama.cpp": []} | {dtype: [] for dtype in args.dtype}
    for _ in range(args.rounds):
        shell = [sys.executable, __file__, "llama", args.target, "--tokens", str(args.tokens), "--threads", str(args.threads), "--text", args.text]
        theirs = json.loads(subprocess.run(shell, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        rows["llama.cpp"].append(theirs)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(theirs["prompt"])
            file.flush()
            for dtype in args.dtype:
                shell = [args.longdraft, "generate", "--target", args.target, "--no-draft", "--dtype", dtype, "--json", "--ignore-eos",
                         "--max-tokens", str(args.tokens), "--threads", str(args.threads), "--prompt-file", file.name]
                line = subprocess.run(shell, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
                ours = json.loads(line)
                same = next((i for i, (a, b) in enumerate(zip(ours["tokens"], theirs["out"])) if a != b), len(theirs["out"]))
                rows[dtype].append({"prefill": theirs["prompt_tokens"] / ours["prefill_seconds"], "decode": ours["decode_tokens_per_second"], "same": same})
        print({name: {key: round(found[-1][key], 1) for key in ("prefill", "decode", "same") if key in found[-1]} for name, found in rows.items()}, flush=True)
    median = {name: {key: statistics.median(row[key] for row in found) for key in ("prefill", "decode")} for name, found in rows.items()}
    result = {"tokens_per_second": median, "ratios": {}, "passes_ms_llamacpp": {
        n: statistics.median(row["passes_ms"][n] for row in rows["llama.cpp"]) for n in ("1", "4", "5", "8")}}
    for dtype in args.dtype:
        for key in ("prefill", "decode"):
            pairs = zip(rows[dtype], rows["llama.cpp"])
            result["ratios"][f"{key}_{dtype}"] = statistics.median(a[key] / b[key] for a, b in pairs)
        result[f"equal_tokens_{dtype}"] = [row["same"] for row in rows[dtype]]
    print(json.dumps(result))


main()
