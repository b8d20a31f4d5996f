"""Training, and the target's features for it."""

import json
from dataclasses import dataclass, field
from os import fspath, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from . import _longdraft
from ._html import curve, table
from ._models import Draft, PathOrName

Configuration = Union[PathOrName, Mapping[str, Any]]
Row = Union[str, Mapping[str, Any]]
Changes = Union[Mapping[str, Any], Iterable[str]]


@dataclass(frozen=True)
class Event:
    """Something that happened: `resumed`, `captured`, `measured`, `note`, `warning` or `saved`."""

    kind: str
    #: What it says, where it says something.
    text: str = ""
    #: Rows done, of all.
    done: int = 0
    all: int = 0


@dataclass(frozen=True)
class Step:
    """A step of the optimizer."""

    #: From 1, of all steps.
    step: int
    steps: int
    #: Nats per learned row.
    loss: float
    learning_rate: float
    #: Before clipping.
    grad_norm: float
    tokens_per_second: float
    #: Seconds of this step.
    seconds: float
    #: Tokens since the start of the run.
    tokens: int
    #: Every figure, as `metrics.jsonl` holds it.
    figures: Dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows, measured after a step."""

    step: int
    loss: float
    #: Every figure, as `metrics.jsonl` holds it.
    figures: Dict[str, Any] = field(repr=False)


Heard = Union[Event, Step, HeldOut]
#: Hears of a run; one that returns `False` stops it, with a checkpoint.
Callback = Callable[[Heard], Optional[bool]]


def _heard(record: Dict[str, Any]) -> Heard:
    kind = record.pop("kind")
    if kind == "step":
        names = ("step", "steps", "loss", "learning_rate", "grad_norm", "tokens_per_second", "seconds", "tokens")
        return Step(figures=record, **{name: record[name] for name in names})
    if kind == "evaluated":
        figures = record["figures"]
        return HeldOut(step=record["step"], loss=figures["loss"], figures=figures)
    text = record.get("text") or record.get("path") or (f"after step {record['step']}" if kind == "resumed" else "")
    return Event(kind=kind, text=text, done=record.get("done", 0), all=record.get("all", 0))


@dataclass(frozen=True)
class Run:
    """What training left."""

    #: Run directory.
    output: str
    #: Run directory that holds the draft: of a curriculum that of its last stage.
    last_run: str
    #: Steps that were taken.
    steps: int
    #: Whether it came to its end; the same call goes on otherwise.
    finished: bool
    #: The last figures on held-out rows.
    held_out: Optional[Dict[str, Any]] = field(repr=False)

    @property
    def losses(self) -> List[float]:
        """Loss of every logged step."""
        return [row["loss"] for row in self.log if "loss" in row and "learning_rate" in row]

    @property
    def log(self) -> List[Dict[str, Any]]:
        """Rows of `metrics.jsonl`."""
        path = Path(self.last_run) / "metrics.jsonl"
        if not path.is_file():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]

    @property
    def draft(self) -> Draft:
        """The draft of its newest checkpoint."""
        return Draft.open(self.last_run)

    def _repr_html_(self) -> str:
        losses = self.losses
        rows: List[Tuple[str, object]] = [
            ("run", self.output),
            ("steps", f"{self.steps}{'' if self.finished else ', stopped: the same call goes on'}"),
        ]
        if losses:
            rows.append(("loss", f"{losses[0]:.3f} to {losses[-1]:.3f}"))
        return table("training", rows) + curve(losses)


def _configured(configuration: Configuration) -> Tuple[Optional[str], Optional[str]]:
    """File and text of a configuration; one of them."""
    if isinstance(configuration, Mapping):
        return None, json.dumps(configuration, default=fspath)
    return fspath(configuration), None


def _changes(changes: Changes) -> List[str]:
    if isinstance(changes, Mapping):
        return [f"{key}={json.dumps(value, default=fspath)}" for key, value in changes.items()]
    return list(changes)


def _hear(callbacks: Union[Callback, Sequence[Callback]]) -> Optional[Callable[[str], bool]]:
    called = [callbacks] if callable(callbacks) else list(callbacks)
    if not called:
        return None

    def hear(record: str) -> bool:
        heard = _heard(json.loads(record))
        # All of them hear of it.
        answers = [callback(heard) for callback in called]
        return all(answer is not False for answer in answers)

    return hear


def _write_rows(rows: Iterable[Row], path: Path) -> None:
    """Rows as JSONL; a file that holds them already stays, so that a finished run stays finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        for row in rows:
            record = {"text": row} if isinstance(row, str) else dict(row)
            file.write(json.dumps(record, ensure_ascii=False))
            file.write("\n")
    if path.is_file() and path.read_bytes() == new.read_bytes():
        new.unlink()
    else:
        replace(new, path)


def train(
    configuration: Configuration,
    *,
    changes: Changes = (),
    data: Optional[Iterable[Row]] = None,
    held_out: Optional[Iterable[Row]] = None,
    callbacks: Union[Callback, Sequence[Callback]] = (),
    resume: str = "strict",
) -> Run:
    """Trains a draft from a YAML file or a dict with the same keys, from where an earlier call stopped.

    `changes` sets keys: `{"train.steps": 100}`, or words as the command line takes them. `data` and `held_out` are rows (texts, or dicts of any
    format that `longdraft data inspect` knows, also a data set of `datasets`); they are kept in the run directory. Callbacks hear every
    :class:`Step`, :class:`HeldOut` and :class:`Event` on this thread; one that returns `False` stops the run. Ctrl-C stops it, too, with a
    checkpoint. `resume` is `strict`, `extend` (to a later end) or `force`.
    """
    file, text = _configured(configuration)
    words = _changes(changes)
    given = {"train": data, "held_out": held_out}
    if data is not None or held_out is not None:
        sources = {part: f"{part}.jsonl" for part, rows in given.items() if rows is not None}
        named = [f"data.{part}={json.dumps([{'path': name}])}" for part, name in sources.items()]
        folder = Path(_longdraft.output_of(file, text, [*words, *named])) / "data"
        for part, name in sources.items():
            rows = given[part]
            if rows is not None:
                _write_rows(rows, folder / name)
            words.append(f"data.{part}={json.dumps([{'path': str(folder / name)}])}")
    record = json.loads(_longdraft.train(file, text, words, resume, _hear(callbacks)))
    return Run(**record)


@dataclass(frozen=True)
class Captured:
    """Features in a store."""

    #: Where they lie.
    output: str
    #: Whether all are there; the same call goes on otherwise.
    finished: bool
    tokens: int
    bytes: int
    shards: int


def capture(
    configuration: Configuration,
    *,
    changes: Changes = (),
    also: Sequence[Configuration] = (),
    dry_run: bool = False,
    verify: bool = False,
    records: Optional[PathOrName] = None,
    callbacks: Union[Callback, Sequence[Callback]] = (),
) -> Captured:
    """Writes the target's features to the store that `train.features` names; training then runs without the target's passes.
    `also` are further configurations that train on the same rows: one store serves all."""
    file, text = _configured(configuration)
    others = [_configured(other) for other in also]
    place = None if records is None else fspath(records)
    record = _longdraft.capture(file, text, _changes(changes), others, dry_run, verify, place, _hear(callbacks))
    return Captured(**json.loads(record))
