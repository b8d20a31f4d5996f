"""Serves a target with an exported draft in vLLM on a CPU, and compares it with our own decoding.

Usage: vllm_export.py rows TARGET_FOLDER LONGDRAFT
       vllm_export.py compare TARGET_FOLDER LONGDRAFT EXPORT [DRAFT_LEN [METHOD]]

`rows` prints the prompts with the target's greedy answers, a JSON object a line: a draft that learned them by heart
proposes what is accepted, at every position of a chain. `compare` serves such a draft.

Both programs decode the same prompts greedily in 32 bits, one at a time, with a chain of DRAFT_LEN tokens (default 4) in every
round. METHOD is vLLM's name of the draft's method (default eagle3). Held against each other, prompt by prompt: the tokens, the
rounds, and in how many rounds each position of the chain was accepted.

Selectors and chains are served by vLLM's newer runner alone. Its kernels are written in Triton, whose interpreter runs them without a
GPU, slowly: half as many tokens are decoded then.

Tokens must be equal. Sums run in another order in the two programs, so that two tokens of nearly the same weight may
change places. A prompt that differs is compared up to there by its tokens alone, and at most one may differ. Counts may
differ by one a prompt and position: the limit of tokens cuts our last draft, and vLLM counts what it accepts beyond it.

The last line is JSON: counts of both by position, summed over the prompts.
"""
import json
import os
import pathlib
import subprocess
import sys
import types

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

PROMPTS = [
    "Tom has 3 boxes with 12 apples each. How many apples does he have?",
    "A train travels 60 miles in 2 hours. How far does it travel in 5 hours?",
    "Anna had 20 cookies. She gave 5 to each of her 3 friends. How many are left?",
    "Write one sentence about the sea.",
]
mode, target, binary = sys.argv[1:4]
TOKENS = 64


def needs_newer_runner(folder):
    """Whether a draft has a selector or a chain."""
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    names = [config.get("speculators_model_type"), *config["architectures"]]
    return any(name in ("dflash2", "dspark", "DFlash2DraftModel", "Qwen3DSparkModel") for name in names)


def interpret_kernels():
    """Has vLLM find a Triton that runs here: its interpreter, under the name of a device."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import torch
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Interpreter:
        @staticmethod
        def is_active():
            return True

        def get_current_target(self):
            return GPUTarget("cpu", 0, 1)

        def get_current_device(self):
            return 0

        def get_active_torch_device(self):
            return torch.device("cpu")

    backends["cpu"] = types.SimpleNamespace(compiler=None, driver=Interpreter)
    driver.set_active(Interpreter())


def turn(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def generate(prompt, *arguments):
    common = ["--target", target, "--dtype", "f32", "--device", "cpu", "--threads", "1", "--prompt", prompt]
    common += ["--max-tokens", str(TOKENS), "--ignore-eos"]
    done = subprocess.run([binary, "generate", *common, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


if mode == "rows":
    for text in PROMPTS:
        print(json.dumps({"text": turn(text) + generate(turn(text), "--no-draft").rstrip("\n")}))
    sys.exit()
export = sys.argv[4]
length = int(sys.argv[5]) if len(sys.argv) > 5 else 4
method = sys.argv[6] if len(sys.argv) > 6 else "eagle3"
newer = needs_newer_runner(export)
if newer:
    TOKENS //= 2


def ours(prompt):
    """Tokens, rounds, rounds by position of the chain that accepted it."""
    drafted = generate(prompt, "--draft", export, "--draft-len", str(length), "--pace", "fixed", "--json")
    record = json.loads(drafted.strip().splitlines()[-1])
    counts = [round(share * record["rounds"]) for share in record["accepted_share"]]
    return record["tokens"], record["rounds"], counts + [0] * (length - len(counts))


def counters(engine):
    found = {"rounds": 0, "positions": [0] * length}
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["rounds"] = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["positions"] = list(metric.values)
    return found


own = [ours(turn(text)) for text in PROMPTS]
if newer:
    interpret_kernels()
from vllm import LLM, SamplingParams  # noqa: E402

draft = {"method": method, "model": export, "num_speculative_tokens": length}
engine = LLM(target, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=1, speculative_config=draft,
             disable_log_stats=False, enable_prefix_caching=False)
sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
differing, total_own, total_theirs, rounds = 0, [0] * length, [0] * length, [0, 0]
for text, (tokens, own_rounds, own_counts) in zip(PROMPTS, own):
    before = counters(engine)
    answer = engine.generate([turn(text)], sampling, use_tqdm=False)[0]
    after = counters(engine)
    theirs = [b - a for a, b in zip(before["positions"], after["positions"])]
    their_rounds = after["rounds"] - before["rounds"]
    their_tokens = list(answer.outputs[0].token_ids)
    print(json.dumps({"prompt": text, "equal": tokens == their_tokens, "rounds": [own_rounds, their_rounds],
                      "accepted": [own_counts, theirs]}))
    if tokens != their_tokens:
        differing += 1
        continue
    assert abs(own_rounds - their_rounds) <= 1, (text, own_rounds, their_rounds)
    assert all(abs(a - b) <= 1 for a, b in zip(own_counts, theirs)), (text, own_counts, theirs)
    total_own = [a + b for a, b in zip(total_own, own_counts)]
    total_theirs = [a + b for a, b in zip(total_theirs, theirs)]
    rounds = [rounds[0] + own_rounds, rounds[1] + their_rounds]
assert differing <= 1, f"{differing} of {len(PROMPTS)} prompts came to other tokens"
assert total_own[0] > 0, "the draft never guessed right: nothing was compared"
print(json.dumps({"prompts": len(PROMPTS) - differing, "rounds": rounds, "accepted": [total_own, total_theirs]}))
