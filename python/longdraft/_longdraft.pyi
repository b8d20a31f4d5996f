"""What the typed interface calls; JSON where a text stands for figures."""

from os import PathLike
from typing import Any, Callable, Dict, List, Optional, Tuple, Union, final

_Path = Union[str, "PathLike[str]"]
_Hear = Optional[Callable[[str], Optional[bool]]]

__version__: str

class Error(Exception):
    """Something could not be done, in the words of the command line."""

    #: The way out, where one is known.
    help: Optional[str]
    #: Every problem of a configuration, each with its file and line.
    problems: List[str]
    #: The exit code that a command would have.
    code: int

@final
class Target:
    name: str
    fingerprint: str
    layers: int
    hidden_size: int
    vocabulary: int
    context: int
    @staticmethod
    def open(name: str, dtype: str, cache: str, device: str) -> "Target": ...
    def encode(self, text: str) -> List[int]: ...
    def encode_chat(self, messages: List[Tuple[str, str]], chat_template_kwargs: Optional[str]) -> List[int]: ...
    def decode(self, ids: List[int]) -> str: ...
    def features(self, ids: List[int], layers: List[int]) -> bytearray: ...

@final
class Draft:
    place: "PathLike[str]"
    target: Optional[str]
    @staticmethod
    def open(path: _Path) -> "Draft": ...
    def provenance(self) -> str: ...

@final
class Session:
    drafter: str
    def __init__(self, target: Target, draft: Optional[Draft], drafting: Dict[str, Any]) -> None: ...
    def stream(self, text: str, chat: bool, asked: Dict[str, Any]) -> "Stream": ...
    def messages(self) -> List[Tuple[str, str]]: ...
    def restart(self, messages: List[Tuple[str, str]]) -> None: ...

@final
class Stream:
    def next_piece(self) -> Optional[Tuple[str, Optional[str]]]: ...
    def cancel(self) -> None: ...
    def answer(self) -> str: ...

def evaluate(
    target: Target,
    draft: Optional[Draft],
    prompts: Tuple[Optional[str], str],
    drafting: Dict[str, Any],
    evaluating: Dict[str, Any],
) -> str: ...
def train(file: Optional[_Path], text: Optional[str], changes: List[str], resume: str, hear: _Hear) -> str: ...
def capture(
    file: Optional[_Path],
    text: Optional[str],
    changes: List[str],
    also: List[Tuple[Optional[_Path], Optional[str]]],
    dry_run: bool,
    verify: bool,
    records: Optional[_Path],
    hear: _Hear,
) -> str: ...
def output_of(file: Optional[_Path], text: Optional[str], changes: List[str]) -> "PathLike[str]": ...
def export(draft: Draft, to: List[str], output: _Path, exporting: Dict[str, Any]) -> str: ...
def verify(folder: _Path, verifying: Dict[str, Any]) -> str: ...
def main(words: List[str]) -> int: ...
def set_threads(threads: int) -> None:
    """Threads that everything computes on; before the first work. Without it, one for every core."""
def settle() -> None: ...
