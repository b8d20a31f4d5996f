"""What a draft brings on some prompts, against plain decoding in the same engine.

    python evaluate.py model.gguf runs/mine prompts.jsonl
"""

import sys

import longdraft


def main(target_name, draft, prompts, field="prompt", limit="4"):
    target = longdraft.Target.open(target_name)
    result = longdraft.evaluate(target, draft, prompts, field=field, limit=int(limit), max_tokens=32, runs=1)
    print(f"{result.prompts} prompts: {result.tau:.2f} tokens per target pass, {result.speed_up:.2f} times as fast")
    for cell in result.cells:
        print(f"  temperature {cell['temperature']:g}: {cell['equal']} of {cell['checked']} outputs are plain decoding's")
    # In a notebook, `result` alone shows this as a table.
    assert result.lossless


if __name__ == "__main__":
    main(*sys.argv[1:])
