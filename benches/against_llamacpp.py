"""Plain decoding and prefill beside llama.cpp on the same GGUF files, alternately, equal threads.

Usage: against_llamacpp.py LONGDRAFT TARGET.gguf [TARGET.gguf ...] [--rounds N] [--threads N] [--tokens N] [--text FILE]
                           [--prompt-tokens N] [--dtype TYPE ...] [--python PYTHON] [--bars DECODE PREFILL]

Needs llama-cpp-python (PyPI) in PYTHON (default: this one). It has no wheels: `CMAKE_ARGS=-DGGML_NATIVE=ON pip install
--no-binary llama-cpp-python llama-cpp-python` builds it for this machine. What its build uses of the processor is printed.
Every measurement is a process of its own with a warm-up request; the prompt is TEXT (default: the shipped books excerpt)
cut to 512 tokens. Threads of either program wait for each other: give no more than there are free cores. Prints a line a
round and, for every file, JSON with the medians and the ratios ours : llama.cpp; and for how many tokens the greedy outputs
agree. With --bars it fails where a ratio of the first type is below.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time


def llama(model, prompt, prompt_tokens, tokens, threads):
    """One process's measurement with llama.cpp."""
    import llama_cpp
    import numpy

    def best():
        logits = engine._ctx.get_logits_ith(-1)
        return int(numpy.ctypeslib.as_array(logits, (engine.n_vocab(),)).argmax())

    engine = llama_cpp.Llama(model, n_ctx=2048, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    ids = engine.tokenize(prompt.encode(), add_bos=False, special=True)[:prompt_tokens]
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
        "system": llama_cpp.llama_print_system_info().decode().strip(),
    }))


def compare(args, target):
    """All rounds of one file."""
    rows = {"llama.cpp": []} | {dtype: [] for dtype in args.dtype}
    common = ["--tokens", str(args.tokens), "--threads", str(args.threads), "--text", args.text, "--prompt-tokens", str(args.prompt_tokens)]
    for number in range(args.rounds):
        shell = [args.python, __file__, "llama", target, *common]
        theirs = json.loads(subprocess.run(shell, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        if number == 0:
            print(f"{pathlib.Path(target).name}: {theirs['system']}", flush=True)
        rows["llama.cpp"].append(theirs)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(theirs["prompt"])
            file.flush()
            for dtype in args.dtype:
                shell = [args.longdraft, "generate", "--target", target, "--no-draft", "--dtype", dtype, "--json", "--ignore-eos",
                         "--max-tokens", str(args.tokens), "--threads", str(args.threads), "--prompt-file", file.name]
                line = subprocess.run(shell, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
                ours = json.loads(line)
                same = next((i for i, (a, b) in enumerate(zip(ours["tokens"], theirs["out"])) if a != b), len(theirs["out"]))
                rows[dtype].append({"prefill": theirs["prompt_tokens"] / ours["prefill_seconds"], "decode": ours["decode_tokens_per_second"], "same": same})
        print({name: {key: round(found[-1][key], 1) for key in ("prefill", "decode", "same") if key in found[-1]} for name, found in rows.items()}, flush=True)
    median = {name: {key: statistics.median(row[key] for row in found) for key in ("prefill", "decode")} for name, found in rows.items()}
    result = {"file": pathlib.Path(target).name, "tokens_per_second": median, "ratios": {}, "passes_ms_llamacpp": {
        n: statistics.median(row["passes_ms"][n] for row in rows["llama.cpp"]) for n in ("1", "4", "5", "8")}}
    for dtype in args.dtype:
        for key in ("prefill", "decode"):
            pairs = zip(rows[dtype], rows["llama.cpp"])
            result["ratios"][f"{key}_{dtype}"] = statistics.median(a[key] / b[key] for a, b in pairs)
        result[f"equal_tokens_{dtype}"] = [row["same"] for row in rows[dtype]]
    print(json.dumps(result), flush=True)
    return result["ratios"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("longdraft")
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--text", default=str(pathlib.Path(__file__).parent.parent / "assets/corpus/books-excerpt.jsonl"))
    parser.add_argument("--dtype", nargs="*", default=["stored", "f32"])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--bars", nargs=2, type=float, metavar=("DECODE", "PREFILL"))
    args = parser.parse_args()
    if args.longdraft == "llama":
        text = pathlib.Path(args.text).read_text()
        if args.text.endswith(".jsonl"):
            text = json.loads(text.splitlines()[0])["text"]
        return llama(args.targets[0], text[:6000], args.prompt_tokens, args.tokens, args.threads)
    missed = []
    for target in args.targets:
        ratios = compare(args, target)
        for key, bar in zip(("decode", "prefill"), args.bars or ()):
            ratio = ratios[f"{key}_{args.dtype[0]}"]
            if ratio < bar:
                missed.append(f"{pathlib.Path(target).name}: {key} x {ratio:.2f}, below {bar}")
    sys.exit("\n".join(missed) or 0)


main()
