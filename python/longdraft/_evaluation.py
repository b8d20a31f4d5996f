"""What is measured of drafting."""

import json
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Union

from . import _longdraft
from ._decoding import _drafting
from ._html import table
from ._models import Draft, PathOrName, Target, _draft


@dataclass(frozen=True)
class Evaluation:
    """Drafting measured on prompts, against plain decoding in the same engine."""

    #: Tokens per pass of the target, its own included.
    tau: float
    #: Time of plain decoding over that of decoding with drafts.
    speed_up: float
    #: Whether all outputs that had to be equal were; weights of 16 bits may part at near-ties.
    lossless: bool
    #: Prompts.
    prompts: int
    #: Tokens a second with drafting, and without.
    tokens_per_second: float
    plain_tokens_per_second: float
    #: Everything, as `decode.json` holds it; a cell for every temperature.
    record: Dict[str, Any] = field(repr=False)

    @property
    def cells(self) -> List[Dict[str, Any]]:
        """Figures of every temperature."""
        cells: List[Dict[str, Any]] = self.record["cells"]
        return cells

    def _repr_html_(self) -> str:
        rows = []
        for cell in self.cells:
            figures = cell["figures"]
            low, high = figures["tau_interval"]
            slow, fast = figures["speed_up_interval"]
            rows.append(
                (
                    f"temperature {cell['temperature']:g}",
                    f"tau {figures['tau_incl_bonus']:.3f} [{low:.3f}, {high:.3f}], "
                    f"{figures['speed_up']:.2f} [{slow:.2f}, {fast:.2f}] times as fast, {cell['equal']} of {cell['checked']} outputs equal",
                )
            )
        return table(f"{self.cells[0]['drafter']} on {self.prompts} prompts", rows)


def _row(prompt: Union[str, Mapping[str, Any]], field: str) -> Dict[str, Any]:
    """What is read of a prompt."""
    if isinstance(prompt, str):
        return {field: prompt}
    also = {key: prompt[key] for key in ("category", "chat_template_kwargs") if key in prompt}
    return {**also, field: prompt[field]}


def evaluate(
    target: Target,
    draft: Union[Draft, PathOrName, None],
    prompts: Union[PathOrName, Iterable[Union[str, Mapping[str, Any]]]],
    *,
    max_tokens: int = 128,
    temperatures: Sequence[float] = (0.0,),
    top_k: Optional[int] = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    runs: int = 3,
    limit: Optional[int] = None,
    field: str = "prompt",
    chat: bool = False,
    output: Optional[PathOrName] = None,
    mtp: bool = False,
    draft_len: int = 4,
    tree: Optional[str] = None,
    lookup: Optional[str] = None,
    datastore: Iterable[PathOrName] = (),
    confidence_threshold: float = 0.0,
    verify: str = "ratio",
    draft_vocab: Optional[PathOrName] = None,
    draft_vocab_size: Optional[int] = None,
    pace: str = "fixed",
    chat_template_kwargs: Optional[Dict[str, Any]] = None,
) -> Evaluation:
    """Decodes prompts plainly and with drafting, and compares outputs and times.

    `prompts` is a JSONL file, a published set by name (`mt-bench`, `gsm8k`, ...), or an iterable of texts or of rows that hold one in `field`.
    With `chat=True` texts are a user's turn, and `chat_template_kwargs` variables of the chat template; those of a row win. With `output`,
    figures lie in that folder, where `longdraft report` finds them, and a call that was stopped is gone on with.
    """
    named, rows = None, []
    if isinstance(prompts, (str, PathLike)):
        named = fspath(prompts)
    else:
        rows = [_row(prompt, field) for prompt in prompts]
    drafting = _drafting(
        mtp, draft_len, tree, lookup, datastore, confidence_threshold, verify, draft_vocab, draft_vocab_size, pace, chat_template_kwargs
    )
    measuring = {
        "max_tokens": max_tokens,
        "temperatures": list(temperatures),
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "runs": runs,
        "limit": limit,
        "field": field,
        "chat": chat,
        "output": None if output is None else fspath(output),
    }
    record = json.loads(_longdraft.evaluate(target._inner, _draft(draft), (named, json.dumps(rows)), drafting, measuring))
    return Evaluation(
        tau=record["tau"],
        speed_up=record["speed_up"],
        lossless=record["lossless"],
        prompts=record["prompts"],
        tokens_per_second=record["speculative_tokens_per_second"],
        plain_tokens_per_second=record["plain_tokens_per_second"],
        record=record["record"],
    )
