"""Compares peers' greedy tokens with ours, a line a case; exit 1 on a difference that is not explained.

Usage: compare_targets.py CASES_FOLDER PARITY.jsonl LLAMACPP.jsonl TRANSFORMERS.jsonl CHANGED.jsonl VLLM.jsonl

Ours are those of the case (`greedy_ids`), because `longdraft parity` reproduced every one of them: PARITY.jsonl says which cases passed.
Where llama.cpp computes something else by design, the line says what, and what it computes is still held to a second peer:
- a Phi-3 with two sets of rotary factors: llama.cpp chooses by the room of its context, not by the length of a text. Prompts beyond the
  original context are compared.
- gpt-oss: llama.cpp rounds the range of YaRN to whole dimensions, which these models do not. Its tokens are compared with those of
  transformers told to round (CHANGED.jsonl).
- Qwen3.5: llama.cpp wants keys as wide as values. Its tokens are compared with those of transformers on widened weights (CHANGED.jsonl).
VLLM.jsonl is empty where vLLM was not asked.
"""
import json
import pathlib
import sys


# What llama.cpp does by design, and what transformers computes for the comparison then.
CHANGED = {
    "gpt_oss": ("rounds the range of YaRN", "once transformers rounds the range of YaRN too, as llama.cpp does"),
    "qwen3_5_text": ("wants keys as wide as values", "once zeros make keys as wide as values in both, as llama.cpp wants them"),
}


def read(path):
    """The lines of a peer by case."""
    lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


def differences(found, wanted):
    """Prompts whose tokens differ, with both."""
    return [f"{name}: {found.get(name)} there, {tokens} here" for name, tokens in wanted.items() if found.get(name) != tokens]


def original_context(folder):
    """Tokens of the original context, where factors of a longer one stand beside it."""
    path = folder.parent / folder.name.removesuffix("_gguf") / "target" / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or 0


def verdict(folder, peers, changed):
    """A line about a case and whether it is well."""
    meta = json.loads((folder / "meta.json").read_text())
    prompts = json.loads((folder / "prompts.json").read_text())
    wanted = {prompt["name"]: prompt["greedy_ids"] for prompt in prompts}
    is_gguf = any((folder / "target").glob("*.gguf"))
    peer, answer = ("llama.cpp", peers[0]) if is_gguf else ("transformers", peers[1])
    answer = answer.get(folder.name)
    if answer is None:
        return f"{peer} was not asked", False
    if "refused" in answer:
        # A peer that does not load a file says nothing about ours.
        return f"{peer} refuses the file: {answer['refused']}", True
    found, note = answer["tokens"], ""
    family = meta["family"]
    if is_gguf and family == "phi3" and original_context(folder):
        limit = original_context(folder)
        wanted = {prompt["name"]: prompt["greedy_ids"] for prompt in prompts if len(prompt["ids"]) > limit}
        note = f" on prompts beyond {limit} tokens: it chooses rotary factors by the room of its context"
    if is_gguf and family in CHANGED:
        why, how = CHANGED[family]
        other = changed.get(folder.name.removesuffix("_gguf"), {})
        if "tokens" not in other:
            return f"llama.cpp {why}, and nothing to compare with: {other.get('refused', 'not asked')}", False
        wanted, note = other["tokens"], f" {how}"
    differing = differences(found, wanted)
    if differing:
        return f"{peer} DIFFERS{note}: {'; '.join(differing)}", False
    if not wanted:
        return f"{peer}: no prompt to compare", False
    return f"{peer} agrees on {sum(map(len, wanted.values()))} greedy tokens of {len(wanted)} prompts{note}", True


def second(folder, answer):
    """What vLLM says of a folder, and whether it is well."""
    if answer is None:
        return "", True
    if "refused" in answer:
        return f"; vLLM refuses it: {answer['refused']}", True
    wanted = {prompt["name"]: prompt["greedy_ids"] for prompt in json.loads((folder / "prompts.json").read_text())}
    differing = differences(answer["tokens"], wanted)
    return (f"; vLLM DIFFERS: {'; '.join(differing)}", False) if differing else ("; vLLM agrees", True)


root = pathlib.Path(sys.argv[1])
passed, llamacpp, transformers, changed, vllm = map(read, sys.argv[2:7])
bad = 0
for folder in sorted(path for path in root.iterdir() if (path / "prompts.json").is_file()):
    line, well = verdict(folder, (llamacpp, transformers), changed)
    if not passed.get(folder.name, {}).get("passed"):
        line, well = f"parity FAILS, and {line}", False
    more, also_well = second(folder, vllm.get(folder.name))
    line, well = line + more, well and also_well
    bad += not well
    print(f"{folder.name:24} {line}")
print(f"{bad} cases differ" if bad else "no case differs")
sys.exit(bad > 0)
