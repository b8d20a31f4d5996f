"""Greedy tokens of Hugging Face targets in vLLM on a CPU.

Usage: vllm_target.py CASE_FOLDER...

A line of JSON for each case: {"case": NAME, "tokens": {PROMPT: [TOKEN]}} or {"case": NAME, "refused": TEXT}. The folders carry no tokenizer: prompts
and answers are token ids.
"""
import json
import os
import pathlib
import subprocess
import sys

SETTINGS = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def generate(folder):
    """Prints the greedy tokens of every prompt of a case."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = json.loads((folder / "prompts.json").read_text())
    longest = max(len(prompt["ids"]) + len(prompt["greedy_ids"]) for prompt in prompts)
    engine = LLM(
        str(folder / "target"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=longest + 1, max_num_seqs=1,
        enable_prefix_caching=False,
    )
    for prompt in prompts:
        sampling = SamplingParams(temperature=0.0, max_tokens=len(prompt["greedy_ids"]), ignore_eos=True, detokenize=False)
        answer = engine.generate(TokensPrompt(prompt_token_ids=prompt["ids"]), sampling, use_tqdm=False)
        print(json.dumps({"name": prompt["name"], "tokens": list(answer[0].outputs[0].token_ids)}), flush=True)


def tokens_of(folder):
    """What a case's folder gives. Every case has a process of its own: an engine leaves its memory to the end."""
    call = [sys.executable, "-W", "ignore", __file__, "--generate", str(folder)]
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=600, env=SETTINGS | os.environ)
    except subprocess.TimeoutExpired:
        return {"refused": "no answer within ten minutes"}
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    prompts = json.loads((folder / "prompts.json").read_text())
    if len(lines) == len(prompts):
        return {"tokens": {line["name"]: line["tokens"] for line in lines}}
    said = [line.strip() for line in done.stderr.splitlines() if "Error" in line or "not supported" in line]
    return {"refused": said[-1][-200:] if said else f"exit {done.returncode}"}


if sys.argv[1] == "--generate":
    generate(pathlib.Path(sys.argv[2]))
else:
    for case in map(pathlib.Path, sys.argv[1:]):
        print(json.dumps({"case": case.name, **tokens_of(case)}), flush=True)
