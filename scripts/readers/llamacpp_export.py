"""Serves a target with an exported GGUF draft in llama.cpp and compares greedy output with and without it.

Usage: llamacpp_export.py TARGET.gguf DRAFT.gguf [DRAFT_LEN [TYPE [LONGDRAFT [TOKENS]]]]

TYPE is llama.cpp's name of the method (`--spec-type`, default draft-eagle3). With our binary LONGDRAFT the same prompt is decoded with
the draft there, too, and its counts stand beside the engine's: products of quantised weights have another precision, so that they are
near each other and not equal.

The last line is JSON: tokens drafted and accepted, as the engine counts them.
"""
import json
import subprocess
import sys

import xllamacpp as llama

target, draft = sys.argv[1:3]
draft_len = int(sys.argv[3]) if len(sys.argv) > 3 else 4
kind = sys.argv[4] if len(sys.argv) > 4 else "draft-eagle3"
binary = sys.argv[5] if len(sys.argv) > 5 else None
tokens = int(sys.argv[6]) if len(sys.argv) > 6 else 48
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
        name = f"COMMON_SPECULATIVE_TYPE_{kind.replace('-', '_').upper()}"
        params.speculative.types = [getattr(llama.common_speculative_type, name)]
    server = llama.Server(params)
    answers = []
    request = {"prompt": PROMPT, "n_predict": tokens, "temperature": 0.0, "top_k": 1, "stream": False}
    answers.append(server.handle_completions(request))
    return answers[-1] if not isinstance(answers[-1], (str, bytes)) else json.loads(answers[-1])


def text(answer):
    return answer.get("content") or answer["choices"][0]["text"]


def ours():
    """Tokens drafted and accepted by our own decoding of the prompt."""
    arguments = ["generate", "--target", target, "--draft", draft, "--prompt", PROMPT, "--max-tokens", str(tokens)]
    arguments += ["--draft-len", str(draft_len), "--pace", "fixed", "--device", "cpu", "--threads", "1", "--json"]
    done = subprocess.run([binary, *arguments], capture_output=True, text=True, check=True)
    record = json.loads(done.stdout.strip().splitlines()[-1])
    accepted, left = 0, record["rounds"] - record["plain_rounds"]
    for rate in record["conditional_acceptance"]:
        left = round(left * rate)
        accepted += left
    return {"text": record["text"], "drafted": draft_len * (record["rounds"] - record["plain_rounds"]), "accepted": accepted}


plain, drafted = generate(False), generate(True)
assert text(plain) == text(drafted), (text(plain), text(drafted))
timings = drafted["timings"]
assert timings.get("draft_n", 0) > 0, f"llama.cpp drafted nothing: {timings}"
result = {"text": text(drafted), "drafted": timings["draft_n"], "accepted": timings["draft_n_accepted"]}
if binary:
    own = ours()
    result["ours"] = own
    rates = [found["accepted"] / found["drafted"] for found in (result, own)]
    assert own["accepted"] > 0, "the draft never guessed right: nothing was compared"
    assert abs(rates[0] - rates[1]) < 0.1, f"acceptance of {rates[0]:.3f} there and {rates[1]:.3f} here"
print(json.dumps(result))
