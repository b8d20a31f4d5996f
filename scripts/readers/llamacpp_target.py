"""Greedy tokens of GGUF targets in llama.cpp.

Usage: llamacpp_target.py CASE_FOLDER...

A line of JSON for each case: {"case": NAME, "tokens": {PROMPT: [TOKEN]}} or {"case": NAME, "refused": TEXT}.

The files of forward cases carry no tokenizer. llama.cpp has a word for that (`tokenizer.ggml.model` = `no_vocab`), which its library
reads and its server does not: that one wants a text for every token. So a copy of the file names its tokens, by the vocabulary of a kind
that knows no token which ends a text. Quantised blocks are widened: beside them llama.cpp rounds activations to 8 bits.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from gguf_widened import widened


def generate(model, prompts):
    """Prints the greedy tokens of every prompt."""
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = model
    params.n_ctx = 512
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.sampling.temp = 0.0
    params.warmup = False
    params.fit_params = False
    params.cache_type_k = llama.ggml_type.GGML_TYPE_F32
    params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    server = llama.Server(params)
    for prompt in prompts:
        request = {
            "prompt": prompt["ids"], "n_predict": len(prompt["greedy_ids"]), "temperature": 0.0, "top_k": 1, "stream": False,
            "cache_prompt": False, "samplers": ["top_k"],
        }
        answer = server.handle_completions(request)
        answer = answer if not isinstance(answer, (str, bytes)) else json.loads(answer)
        text = answer.get("content") or answer["choices"][0]["text"]
        tokens = [int(token) for token in text.split("t")[1:]]
        print(json.dumps({"name": prompt["name"], "tokens": tokens}), flush=True)


def tokens_of(folder):
    """What a case's file gives."""
    prompts = json.loads((folder / "prompts.json").read_text())
    with tempfile.TemporaryDirectory() as work:
        model = os.path.join(work, "model.gguf")
        widened(next((folder / "target").glob("*.gguf")), model)
        # In a process of its own: an assertion of the library ends it.
        call = [sys.executable, __file__, "--generate", model, str(folder)]
        done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {line["name"]: line["tokens"] for line in lines}
    if len(found) == len(prompts):
        return {"tokens": found}
    said = [line for line in done.stderr.splitlines() if " E " in line or "ASSERT" in line]
    return {"refused": said[0].split(" E ")[-1].strip() if said else f"exit {done.returncode}"}


if sys.argv[1] == "--generate":
    generate(sys.argv[2], json.loads((pathlib.Path(sys.argv[3]) / "prompts.json").read_text()))
else:
    for case in map(pathlib.Path, sys.argv[1:]):
        print(json.dumps({"case": case.name, **tokens_of(case)}), flush=True)
