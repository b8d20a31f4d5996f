"""Serves a target with an exported GGUF draft in llama.cpp and compares greedy output with and without it.

Usage: llamacpp_export.py TARGET.gguf DRAFT.gguf [DRAFT_LEN]
The last line is JSON: tokens drafted and accepted, as the engine counts them.
"""
import json
import sys

import xllamacpp as llama

target, draft = sys.argv[1:3]
draft_len = int(sys.argv[3]) if len(sys.argv) > 3 else 4
PROMPT = "<|im_start|>user\nTom has 3 boxes with 12 apples each. How many apples does he have?<|im_end|>\n<|im_start|>assistant\n"


def generate(with_draft):
    params = llama.CommonParams()
    params.model.path = target
    params.n_ctx = 512
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.sampling.temp = 0.0
    params.warmup = False
    params.fit_params = False
    if with_draft:
        params.speculative.draft.mparams.path = draft
        params.speculative.draft.n_max = draft_len
        params.speculative.draft.n_min = draft_len
        params.speculative.draft.p_min = 0.0
        params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
    server = llama.Server(params)
    answers = []
    request = {"prompt": PROMPT, "n_predict": 48, "temperature": 0.0, "top_k": 1, "stream": False}
    answers.append(server.handle_completions(request))
    return answers[-1] if not isinstance(answers[-1], (str, bytes)) else json.loads(answers[-1])


def text(answer):
    return answer.get("content") or answer["choices"][0]["text"]


plain, drafted = generate(False), generate(True)
assert text(plain) == text(drafted), (text(plain), text(drafted))
timings = drafted["timings"]
assert timings.get("draft_n", 0) > 0, f"llama.cpp drafted nothing: {timings}"
print(json.dumps({"text": text(drafted), "drafted": timings["draft_n"], "accepted": timings["draft_n_accepted"]}))
