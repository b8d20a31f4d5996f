"""Drafts for serving engines, and what is wrong with them."""

import json
import re
from dataclasses import dataclass
from os import fspath
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from . import _longdraft
from ._html import table
from ._models import Draft, PathOrName


@dataclass(frozen=True)
class Export:
    """A folder that an engine reads."""

    profile: str
    output: str
    tensors: int
    files: List[str]
    warnings: List[str]
    #: Commands that serve it, by engine.
    serve: Dict[str, str]


def _in_folder(command: str, folder: str) -> str:
    return re.sub(r"(?<![\w./-])DIR(?![\w-])", lambda _: folder, command)


def export(
    draft: Union[Draft, PathOrName],
    to: Union[str, Sequence[str]],
    output: PathOrName,
    *,
    target: Optional[PathOrName] = None,
    target_name: Optional[str] = None,
    dtype: Optional[str] = None,
    no_embed: bool = False,
    draft_len: Optional[int] = None,
    strict: bool = False,
) -> List[Export]:
    """Writes a draft for engines (`vllm`, `sglang`, `llamacpp`, `hf`, ...); several go to folders of their names below `output`."""
    opened = draft if isinstance(draft, Draft) else Draft.open(draft)
    exporting = {
        "target": None if target is None else fspath(target),
        "target_name": target_name,
        "dtype": dtype,
        "no_embed": no_embed,
        "draft_len": draft_len,
        "strict": strict,
    }
    names = [to] if isinstance(to, str) else list(to)
    folders = json.loads(_longdraft.export(opened._inner, names, fspath(output), exporting))
    return [
        Export(
            **{
                **folder,
                "serve": {engine: _in_folder(command, folder["output"]) for engine, command in folder["serve"]},
            }
        )
        for folder in folders
    ]


@dataclass(frozen=True)
class Problem:
    """A finding about an export."""

    #: Stable short name.
    code: str
    #: `error`, `warning` or `note`.
    severity: str
    #: File, with key or tensor.
    place: str
    found: str
    expected: str
    #: What engines do with it: engine, effect, words.
    effects: List[Tuple[str, str, str]]
    #: The way out.
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity}[{self.code}]: {self.place}: {self.found}"


@dataclass(frozen=True)
class Verdict:
    """What an engine does with the whole folder: `works`, `ignores`, `garbage` or `rejects`."""

    engine: str
    effect: str
    #: Codes of the findings that decide it.
    because: List[str]


@dataclass(frozen=True)
class Report:
    """What was found out about an exported folder."""

    folder: str
    profile: str
    #: Whether it may be served.
    clean: bool
    #: Errors first.
    problems: List[Problem]
    verdicts: List[Verdict]
    #: tau with the checkpoint and with the export, where both decoded.
    tau: Optional[Tuple[float, float]] = None

    def __bool__(self) -> bool:
        return self.clean

    @classmethod
    def _of(cls, record: Dict[str, Any]) -> "Report":
        report = record["report"]
        return cls(
            folder=record["folder"],
            profile=report["profile"],
            clean=record["clean"],
            problems=[
                Problem(**{**problem, "effects": [tuple(effect) for effect in problem["effects"]]})
                for problem in report["problems"]
            ],
            verdicts=[Verdict(**verdict) for verdict in report["verdicts"]],
            tau=tuple(record["tau"]) if record["tau"] else None,
        )

    def _repr_html_(self) -> str:
        rows = [(verdict.engine, verdict.effect) for verdict in self.verdicts]
        rows += [(problem.severity, f"{problem.place}: {problem.found}. {problem.remedy}") for problem in self.problems]
        return table(f"{self.folder} as {self.profile}: {'clean' if self.clean else 'may not be served'}", rows)


def verify(
    folder: PathOrName,
    *,
    target: Optional[PathOrName] = None,
    checkpoint: Optional[PathOrName] = None,
    profile: Optional[str] = None,
    decode: Optional[int] = None,
    strict: bool = False,
) -> List[Report]:
    """Checks an exported folder, or those in a folder, without any engine: a report for each."""
    verifying = {
        "profile": profile,
        "target": None if target is None else fspath(target),
        "checkpoint": None if checkpoint is None else fspath(checkpoint),
        "decode": decode,
        "strict": strict,
    }
    return [Report._of(record) for record in json.loads(_longdraft.verify(fspath(folder), verifying))]
