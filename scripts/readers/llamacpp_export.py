"""Serves a target with an exported GGUF draft in llama.cpp and compares greedy output with and without it.

Usage: llamacpp_export.py TARGET.gguf DRAFT.gguf [DRAFT_LEN [TYPE [LONGDRAFT]]]

TYPE is llama.cpp's name of the method (`--spec-type`, default draft-eagle3). With our binary LONGDRAFT both programs decode prompts with
the draft in 32 bits, too, and their rounds and accepted tokens by position are held against each other. Beside quantised blocks both
round activations to 8 bits, each in its own way: answers part there, and counts over unlike answers say nothing about a draft.

Tokens must be equal. Sums run in another order in the two programs, so that two tokens of nearly the same weight may change places: one
prompt may differ, and is left out. For the others the counts must be equal to the last one: at the limit of tokens both programs cut
their last draft alike, and a wrong mask token is seen in a single proposal of these. DRAFT_LEN must be all that the draft proposes in a
pass: llama.cpp runs no more slots than it takes.

The last line is JSON: tokens drafted and accepted beside the target as it is, as the engine counts them, and counts of both programs in
32 bits by position, ours first, summed over the prompts.
"""
import json
import os
import subprocess
import sys
import tempfile

import xllamacpp as llama

from gguf_widened import widened

target, draft = sys.argv[1:3]
draft_len = int(sys.argv[3]) if len(sys.argv) > 3 else 4
kind = sys.argv[4] if len(sys.argv) > 4 else "draft-eagle3"
binary = sys.argv[5] if len(sys.argv) > 5 else None
TOKENS = 48
# A draft that learned answers by heart knows the first two.
PROMPTS = [
    "Tom has 3 boxes with 12 apples each. How many apples does he have?",
    "A train travels 60 miles in 2 hours. How far does it travel in 5 hours?",
    "Lea has 4 bags with 6 apples each. How many apples does she have?",
    "A car travels 90 miles in 3 hours. How far does it travel in 4 hours?",
]


def turn(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def server(model, with_draft, wide=False):
    params = llama.CommonParams()
    params.model.path = model
    params.n_ctx = 512
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.sampling.temp = 0.0
    params.warmup = False
    params.fit_params = False
    if wide:
        params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    if with_draft:
        of_draft = params.speculative.draft
        of_draft.mparams.path = draft
        of_draft.n_max = draft_len
        of_draft.n_min = 0
        of_draft.p_min = 0.0
        if wide:
            of_draft.cache_type_k = of_draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        name = f"COMMON_SPECULATIVE_TYPE_{kind.replace('-', '_').upper()}"
        params.speculative.types = [getattr(llama.common_speculative_type, name)]
    return llama.Server(params)


def generate(engine, prompt):
    """An answer's text, and the counters after each of its tokens."""
    parts = []
    request = {"prompt": turn(prompt), "n_predict": TOKENS, "temperature": 0.0, "top_k": 1, "stream": True, "timings_per_token": True,
               "cache_prompt": False}
    engine.handle_completions(request, lambda part: parts.append(part if isinstance(part, dict) else json.loads(part)))
    counters = [(part["timings"].get("draft_n", 0), part["timings"].get("draft_n_accepted", 0)) for part in parts]
    return "".join(part["choices"][0]["text"] for part in parts), counters


def theirs(engine, prompt):
    """Text, rounds with a draft, and in how many of them each position was accepted."""
    text, counters = generate(engine, prompt)
    steps = [(new[0] - old[0], new[1] - old[1]) for old, new in zip([(0, 0), *counters], counters)]
    accepted = [taken for drafted, taken in steps if drafted > 0]
    return text, len(accepted), [sum(taken > position for taken in accepted) for position in range(draft_len)]


def ours(prompt):
    """The same of our own decoding."""
    arguments = ["generate", "--target", target, "--draft", draft, "--prompt", turn(prompt), "--max-tokens", str(TOKENS), "--dtype", "f32"]
    arguments += ["--draft-len", str(draft_len), "--pace", "fixed", "--device", "cpu", "--threads", "1", "--json"]
    done = subprocess.run([binary, *arguments], capture_output=True, text=True, check=True)
    record = json.loads(done.stdout.strip().splitlines()[-1])
    counts = [round(share * record["rounds"]) for share in record["accepted_share"]]
    return record["text"], record["rounds"] - record["plain_rounds"], counts + [0] * (draft_len - len(counts))


def compare():
    """Counts of both programs in 32 bits, ours first."""
    own = [ours(prompt) for prompt in PROMPTS]
    with tempfile.TemporaryDirectory() as work:
        copy = os.path.join(work, "target.gguf")
        widened(target, copy)
        engine = server(copy, True, wide=True)
        found = [theirs(engine, prompt) for prompt in PROMPTS]
    equal = [(one, other) for one, other in zip(own, found) if one[0] == other[0]]
    for prompt, one, other in zip(PROMPTS, own, found):
        print(json.dumps({"prompt": prompt, "equal": one[0] == other[0], "rounds": [one[1], other[1]], "accepted": [one[2], other[2]]}))
    assert len(equal) >= len(PROMPTS) - 1, f"{len(PROMPTS) - len(equal)} of {len(PROMPTS)} prompts came to other tokens"
    for one, other in equal:
        assert one == other, f"rounds and accepted by position {one[1:]} here and {other[1:]} there: {one[0]!r}"
    sums = [[sum(position) for position in zip(*(pair[side][2] for pair in equal))] for side in (0, 1)]
    assert sums[0][0] > 0, "the draft never guessed right: nothing was compared"
    return {"prompts": len(equal), "rounds": [sum(pair[side][1] for pair in equal) for side in (0, 1)], "accepted": sums}


plain, drafted = (generate(server(target, with_draft), PROMPTS[0]) for with_draft in (False, True))
assert plain[0] == drafted[0], (plain[0], drafted[0])
proposed, accepted = drafted[1][-1]
assert proposed > 0, "llama.cpp drafted nothing"
result = {"text": drafted[0], "drafted": proposed, "accepted": accepted}
if binary:
    result["in 32 bits"] = compare()
print(json.dumps(result))
