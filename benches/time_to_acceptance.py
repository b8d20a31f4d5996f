"""Time until drafts are accepted equally often: a published recipe in PyTorch beside this program's default, on the same text.

Usage: time_to_acceptance.py LONGDRAFT TARGET DATA.json --output DIR --python PY --baselines DIR [--methods NAME ...]
                             [--arms recipe|default ...] [--recipe-steps N] [--default-steps N] [--evaluations N] [--documents-per-step N]
                           [--row-tokens N] [--rounds N] [--threads N] [--phase curves|speed|table ...]

DATA.json has the lists `train` and `held_out` of a configuration's `data`, with absolute paths.

The recipe is that of the method's published trainer: the target runs in every step, a row holds one document, rows of a
step are padded to the longest, labels are the text's (GLIDE, DFlash), one delay a step (GLIDE). The default packs rows,
keeps the target's features, distils its distribution, and learns all delays in every step. Both drafts have the same shape.

  curves  Trains both by this program, which computes the published steps number for number, and notes the held-out replayed
          acceptance length every few steps: that of decoding rounds over the text, whatever a mode learns. Numbers do not
          depend on what else the machine does.
  speed   Seconds of a step: the PyTorch programs of `--baselines` at the recipe's padded shape, and our training with the
          target's pass and without, in turns. Wants a quiet machine.
  table   The recipe's best length, when either reached it, and the ratio of the times, the target's passes included.

Phases leave JSON in DIR, so that they can be run apart. Needs PyTorch in PY.
"""
import argparse
import json
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys

# What both drafts of a method are, what the recipe adds and what the default adds.
METHODS = {
    "glide": {
        "draft": {"method": "glide", "gamma": 4},
        "recipe": {"draft": {"compat": "longspec", "soft_weight": 0}, "optimizer": {"dead_params": "decay"}},
        "default": {"draft": {"init": "last_layer", "final_norm": "target", "soft_weight": 0.9}},
        "learning_rate": 4.0e-3,
    },
    "eagle3": {
        "draft": {"method": "eagle3", "ttt_steps": 7, "draft_vocab_size": 8192},
        "recipe": {"draft": {"compat": "specforge"}},
        "default": {},
        "learning_rate": 1.0e-3,
    },
    "dflash": {
        "draft": {"method": "dflash", "layers": 2, "target_layers": [1, 8, 14, 21, 28], "block_size": 8, "tokens_per_block": 8},
        "recipe": {},
        "default": {"draft": {"init": "last_layer", "soft_weight": 0.9}},
        "learning_rate": 2.0e-3,
    },
}
DISTILLED = {"soft_targets": "top_k", "top_k": 64}
# Rows of a timed training, which reads them twice.
TIMED_ROWS = 10


def merged(*parts):
    """Nested tables, later ones over earlier ones."""
    out = {}
    for part in parts:
        for key, value in part.items():
            out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


class Bench:
    def __init__(self, options):
        self.options = options
        self.folder = pathlib.Path(options.output).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)

    def longdraft(self, *arguments):
        command = [self.options.longdraft, "--threads", str(self.options.threads), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        return done

    def configuration(self, method, arm, limit_tokens=None, **train):
        """The file of one training, and its run directory; `limit_tokens` for each text."""
        table, run = METHODS[method], self.folder / f"{method}-{arm}"
        common = {
            "target": self.options.target, "precision": "stored", "draft": table["draft"],
            "schedule": {"kind": "warmup_cosine", "warmup_ratio": 0.05, "learning_rate": table["learning_rate"]},
            "train": {"save_every": 10**6, "seed": 1, **train},
        }
        if arm == "recipe":
            own = {"train": {"features": "online", "rows_per_step": self.options.documents_per_step}}
            rows = {"packing": "none", "overlong": "truncate"}
        else:
            own = {"train": {"features": "memory", "rows_per_step": 1}, "teacher": DISTILLED}
            rows = {}
        rows = {"row_tokens": self.options.row_tokens, "anchor": {"enabled": False}, **rows}
        data = json.loads(pathlib.Path(self.options.data).read_text())
        if limit_tokens:
            data = {"train": [{**source, "limit_tokens": limit_tokens} for source in data["train"]], "held_out_rows": 0}
            run = self.folder / "speed"
        rest = merged(common, table[arm], own, {"data": {**data, **rows}, "output": str(run)})
        text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in rest.items())
        file = run.with_suffix(".yaml")
        file.write_text(text)
        return file, run

    def write(self, name, value):
        (self.folder / name).write_text(json.dumps(value, indent=1) + "\n")

    def read(self, name):
        file = self.folder / name
        return json.loads(file.read_text()) if file.is_file() else None

    def curves(self, method):
        for arm in self.options.arms:
            steps = self.options.recipe_steps if arm == "recipe" else self.options.default_steps
            file, run = self.configuration(method, arm, steps=steps, evaluate_every=max(1, steps // self.options.evaluations))
            shutil.rmtree(run, ignore_errors=True)
            done = self.longdraft("train", file)
            rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            curve = [(row["step"], row["held_out"]["replayed_acceptance_length"]) for row in rows if "held_out" in row]
            taken = steps_of(run)
            tokens = taken[-1]["tokens"] / taken[-1]["step"]
            self.write(f"{method}-{arm}.json", {"curve": curve, "tokens_per_step": tokens, "rows": rows_of(done.stderr)})
            print(method, arm, " ".join(f"{step}: {length:.3f}" for step, length in curve), flush=True)

    def padded(self):
        """Padded tokens for every real one, with rows padded to the longest of a step's documents."""
        lengths = []
        for source in json.loads(pathlib.Path(self.options.data).read_text())["train"]:
            for line in pathlib.Path(source["path"]).read_text().splitlines():
                lengths.append(len("".join(strings(json.loads(line)))))
        # Characters stand for tokens: four of them are one in this text.
        lengths = [min(length, 4 * self.options.row_tokens) for length in lengths]
        random.Random(1).shuffle(lengths)
        size = self.options.documents_per_step
        steps = [lengths[at:at + size] for at in range(0, len(lengths) - size + 1, size)]
        return sum(size * max(step) for step in steps) / sum(map(sum, steps))

    def pytorch(self, program, *flags):
        """Padded tokens a second of a PyTorch program."""
        command = [self.options.python, f"{self.options.baselines}/{program}", "--threads", str(self.options.threads), *map(str, flags)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_s"]

    def recipe_seconds(self, method, tokens):
        """Seconds of a published step whose padded rows hold `tokens` tokens in all. Where a program takes one row alone, it
        is given all tokens as one row or as rows one by one, whichever is faster."""
        size = self.options.documents_per_step
        row = max(64, round(tokens / size / 16) * 16)
        batch = ("--seq", row, "--batch", size)
        if method == "glide":
            return size * row / self.pytorch("pytorch_glide.py", *batch)
        if method == "dflash":
            return size * row / self.pytorch("pytorch_dflash.py", *batch, "--head", "fused", "--online", "--anchors", max(1, row // 8))
        # That program is given the target's features, so its pass is added: what GLIDE's step takes with it and without.
        own = max(self.pytorch("pytorch_eagle3.py", "--seq", shape) for shape in (row, size * row))
        target = 1 / self.pytorch("pytorch_glide.py", *batch) - 1 / self.pytorch("pytorch_glide.py", *batch, "--cached")
        return size * row * (1 / own + target)

    def default_seconds(self, method):
        """Seconds of a training step in which the target runs over the row, too, and of one whose features are there."""
        texts = len(json.loads(pathlib.Path(self.options.data).read_text())["train"])
        limit = TIMED_ROWS * self.options.row_tokens // texts
        file, run = self.configuration(method, "default", limit, steps=2 * TIMED_ROWS, evaluate_every=0)
        shutil.rmtree(run, ignore_errors=True)
        self.longdraft("train", file)
        epochs, before = ([], []), 0
        for row in steps_of(run):
            epochs[min(row["epoch"], 1)].append((row["tokens"] - before) / row["tokens_per_second"])
            before = row["tokens"]
        # The first steps warm up.
        return statistics.median(epochs[0][2:]), statistics.median(epochs[1])

    def speed(self, method):
        padded, rounds = self.padded(), []
        tokens = self.read(f"{method}-recipe.json")["tokens_per_step"] * padded
        for turn in range(self.options.rounds):
            measured = [None, None]
            for side in ((0, 1) if turn % 2 == 0 else (1, 0)):
                measured[side] = self.recipe_seconds(method, tokens) if side == 0 else self.default_seconds(method)
            with_target, alone = measured[1]
            rounds.append({"recipe_step": measured[0], "first_step": with_target, "later_step": alone})
            print(method, rounds[-1], flush=True)
        self.write(f"{method}-speed.json", {"padded": padded, "rounds": rounds})

    def table(self, method):
        recipe, default, speed = (self.read(f"{method}-{part}.json") for part in ("recipe", "default", "speed"))
        if None in (recipe, default, speed):
            return None
        step, length = max(recipe["curve"], key=lambda point: (point[1], -point[0]))
        reached = crossing(default["curve"], length)
        # The target runs over a row when the draft first learns from it.
        first = min(reached or 0, default["rows"])
        out = {
            "method": method, "length": length, "recipe_steps": step, "default_steps": reached,
            "default_best": max(value for _, value in default["curve"]), "padded": speed["padded"], "ratios": [],
        }
        for turn in speed["rounds"]:
            ours = turn["first_step"] * first + turn["later_step"] * (reached - first) if reached else None
            out["ratios"].append(None if ours is None else turn["recipe_step"] * step / ours)
            out["recipe_seconds"], out["default_seconds"] = turn["recipe_step"] * step, ours
        return out


def rows_of(messages):
    """The rows that a training says it has."""
    return int(re.search(r"tokens in (\d+) row", messages).group(1))


def steps_of(run):
    """The steps that a training run noted."""
    taken = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in taken if "loss" in row]


def strings(value):
    """All texts in a row of data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def crossing(curve, length):
    """The step at which a curve of (step, length) first reaches a length, between two points on their line; None if it never does."""
    before = (0, 1.0)
    for step, value in curve:
        if value >= length:
            share = (length - before[1]) / (value - before[1]) if value > before[1] else 1
            return before[0] + share * (step - before[0])
        before = (step, value)
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("longdraft")
    parser.add_argument("target")
    parser.add_argument("data")
    parser.add_argument("--output", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--baselines", default="../shared/bench")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--phase", nargs="+", choices=("curves", "speed", "table"), default=["curves", "speed", "table"])
    parser.add_argument("--arms", nargs="+", choices=("recipe", "default"), default=["recipe", "default"])
    parser.add_argument("--recipe-steps", type=int, default=400)
    parser.add_argument("--default-steps", type=int, default=300)
    parser.add_argument("--evaluations", type=int, default=10)
    parser.add_argument("--documents-per-step", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    bench = Bench(parser.parse_args())
    for phase in bench.options.phase:
        for method in bench.options.methods:
            result = getattr(bench, phase)(method)
            if result is not None:
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
