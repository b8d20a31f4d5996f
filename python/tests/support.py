"""Paths and a small run that tests share."""

import functools
import pathlib
import shutil
import tempfile

import longdraft

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "assets/target/demonstration.gguf")
CORPUS = ROOT / "assets/corpus/books-excerpt.jsonl"
QUESTIONS = str(ROOT / "assets/corpus/gsm8k-test-20.jsonl")


def configuration(output, **train):
    """A run of some seconds on the target that the program carries."""
    return {
        "target": TARGET,
        "output": str(output),
        "draft": {"init": "last_layer", "final_norm": "none", "gamma": 3},
        "data": {
            "train": [{"path": str(CORPUS)}],
            "row_tokens": 128,
            "held_out_rows": 1,
            "anchor": {"enabled": False},
        },
        "schedule": {"learning_rate": 1e-2},
        "train": {"steps": 4, "rows_per_step": 1, **train},
    }


@functools.lru_cache(None)
def target():
    return longdraft.Target.open(TARGET)


class Folder:
    """A folder for a test class."""

    def __init__(self):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="longdraft-python-"))

    def remove(self):
        shutil.rmtree(self.path, ignore_errors=True)
