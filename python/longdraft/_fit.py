"""From a model to a faster model, with one call."""

import json
import signal
import subprocess
import sys
from os import PathLike, fspath
from typing import Any, Dict, List

from ._errors import Error
from ._models import PathOrName


def _words(options: Dict[str, Any]) -> List[str]:
    """Keyword arguments as the command's options: `None` and `False` leave one out."""
    words = []
    for name, value in options.items():
        # `for_`, since `for` is a word of Python's.
        option = f"--{name.rstrip('_').replace('_', '-')}"
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is True:
                words.append(option)
            elif one is not None and one is not False:
                words += [option, _word(one)]
    return words


def _word(value: Any) -> str:
    """A value as the command reads it."""
    if isinstance(value, PathLike):
        return fspath(value)
    return json.dumps(value) if isinstance(value, dict) else str(value)


def fit(model: PathOrName, **options: Any) -> Dict[str, Any]:
    """Measures this machine, has the target answer prompts, trains a draft within the time and proves it.

    Takes the options of `longdraft fit` by name: `fit("model.gguf", time="2h", prompts="mine.jsonl", for_="vllm")`. It runs the command in a process of its
    own, whose progress goes to stderr; Ctrl-C saves, and the same call goes on. Returns the command's result.
    """
    command = [sys.executable, "-m", "longdraft", "fit", fspath(model), *_words(options), "--json"]
    # In a group of its own, so that Ctrl-C at a terminal reaches it once.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, _ = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    lines = said.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else {}
    except json.JSONDecodeError:
        result = {}
    if process.returncode == 0:
        return result
    failed = result.get("error") or {"message": f"`fit` ended with {process.returncode}", "code": process.returncode}
    error = Error(failed["message"])
    error.help, error.problems, error.code = failed.get("hint"), failed.get("problems", []), failed["code"]
    raise error
