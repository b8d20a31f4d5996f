"""A draft trained on rows of this program, with a look at every step.

    python train.py model.gguf runs/mine rows.jsonl
"""

import json
import sys

import longdraft


def show(event):
    """Prints what happens; returning `False` would stop the run, with a checkpoint."""
    if isinstance(event, longdraft.Step):
        print(f"step {event.step}/{event.steps}: loss {event.loss:.3f}, {event.tokens_per_second:.0f} tok/s")
    elif isinstance(event, longdraft.HeldOut):
        print(f"held-out after step {event.step}: loss {event.loss:.3f}")


def rows(path):
    """Any iterable of rows does: a list, a generator, a data set of `datasets`."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def main(target, output, path, steps="8"):
    configuration = {
        "target": target,
        "output": output,
        "draft": {"init": "last_layer", "final_norm": "none", "gamma": 3},
        "data": {"row_tokens": 128, "held_out_rows": 1, "anchor": {"enabled": False}},
        "schedule": {"learning_rate": 1e-2},
        "train": {"steps": int(steps), "rows_per_step": 1},
    }
    run = longdraft.train(configuration, data=rows(path), callbacks=show)
    print(f"{'done' if run.finished else 'stopped'} after {run.steps} steps: {run.output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
