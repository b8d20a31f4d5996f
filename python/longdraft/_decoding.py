"""Sessions, and their answers while and after they are written."""

import json
from dataclasses import dataclass, field
from os import fspath
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Optional, TypedDict, Union, overload

from . import _longdraft
from ._errors import Error
from ._html import table
from ._models import Draft, Message, PathOrName, Target, _draft, _messages, _variables

if TYPE_CHECKING:
    from typing import Literal

    from typing_extensions import Unpack


class AnswerOptions(TypedDict, total=False):
    """What may be asked of an answer."""

    #: Most tokens (256).
    max_tokens: int
    #: 0, the default: the most likely token always.
    temperature: float
    #: Keep only so many of the most likely tokens.
    top_k: Optional[int]
    #: Keep the most likely tokens until their mass reaches this (1).
    top_p: float
    #: Keep tokens at least this likely, relative to the most likely one (0).
    min_p: float
    #: Key of all random draws (0).
    seed: int
    #: Texts that end the answer, left out of it.
    stop: Union[str, Iterable[str]]
    #: Tokens that end it, written out or their ids.
    stop_tokens: Iterable[Union[str, int]]
    #: Go on after tokens that end a text.
    ignore_eos: bool
    #: Variables of the chat template for this turn of `chat`; they win over those of the session.
    chat_template_kwargs: Dict[str, Any]


class Piece(str):
    """Text of an answer as it becomes certain."""

    #: What proposed it: `draft` or `lookup`; nothing where it is the target's own.
    proposed_by: Optional[str]

    def __new__(cls, text: str, proposed_by: Optional[str] = None) -> "Piece":
        piece = super().__new__(cls, text)
        piece.proposed_by = proposed_by
        return piece


@dataclass(frozen=True)
class Answer:
    """An answer that is complete."""

    #: Its text, without what ended it.
    text: str
    #: Its tokens, a stop token included.
    tokens: List[int]
    #: `stop`, `length` or `interrupted`.
    finish: str
    #: Tokens of the prompt.
    prompt_tokens: int
    #: Tokens per pass of the target, its own included.
    tau: float
    #: Tokens after the first, per second after the first.
    tokens_per_second: float
    #: Every figure, as `longdraft generate --json` gives it.
    figures: Dict[str, Any] = field(repr=False)

    @classmethod
    def _of(cls, record: str) -> "Answer":
        figures = json.loads(record)
        return cls(
            text=figures["text"],
            tokens=figures["tokens"],
            finish=figures["finish"],
            prompt_tokens=figures["prompt_tokens"],
            tau=figures["tau"],
            tokens_per_second=figures["decode_tokens_per_second"],
            figures=figures,
        )

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        rows = [
            ("text", self.text),
            ("tokens", f"{len(self.tokens)} after a prompt of {self.prompt_tokens}, ended by {self.finish}"),
            ("tau", f"{self.tau:.3f} tokens per target pass"),
            ("speed", f"{self.tokens_per_second:.1f} tok/s"),
        ]
        return table("answer", rows)


class Stream(Iterator[Piece]):
    """An answer while it is written: iterate over its pieces, then ask for the whole :attr:`answer`."""

    def __init__(self, inner: "_longdraft.Stream") -> None:
        self._inner = inner
        self._answer: Optional[Answer] = None
        self._is_over = False

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        piece = None if self._is_over else self._inner.next_piece()
        if piece is None:
            # What could not be written is told here.
            if not self._is_over:
                self._is_over = True
                self._answer = Answer._of(self._inner.answer())
            raise StopIteration
        return Piece(*piece)

    def cancel(self) -> None:
        """Ends the answer after the round that is under way; what is written stays."""
        self._inner.cancel()

    @property
    def answer(self) -> Answer:
        """The whole answer; waits for its end."""
        for _ in self:
            pass
        if self._answer is None:
            raise Error("the answer could not be written")
        return self._answer


class Session:
    """Answers prompts one after another, on a thread of its own; several sessions may work at once.

    `draft` is a :class:`Draft` or the path of one; without it the target decodes plainly. With `mtp=True` the target's own block for
    prediction of several tokens drafts in its place, where its files hold one. `lookup` (`merge` or `switch`) also proposes what stood
    earlier in the text. `tree` takes `static`, `dynamic` or `sampled:3,2,1` in place of a chain of `draft_len` tokens. With
    `pace="measured"` as much is drafted as pays; `fixed` always drafts the whole layout. `chat_template_kwargs` are variables of the
    chat template for every turn, such as `{"enable_thinking": False}`.
    """

    def __init__(
        self,
        target: Target,
        draft: Union[Draft, PathOrName, None] = None,
        *,
        mtp: bool = False,
        draft_len: int = 4,
        tree: Optional[str] = None,
        lookup: Optional[str] = None,
        datastore: Iterable[PathOrName] = (),
        confidence_threshold: float = 0.0,
        verify: str = "ratio",
        draft_vocab: Optional[PathOrName] = None,
        draft_vocab_size: Optional[int] = None,
        pace: str = "measured",
        chat_template_kwargs: Optional[Dict[str, Any]] = None,
    ) -> None:
        drafting = _drafting(
            mtp, draft_len, tree, lookup, datastore, confidence_threshold, verify, draft_vocab, draft_vocab_size, pace, chat_template_kwargs
        )
        self.target = target
        self._inner = _longdraft.Session(target._inner, _draft(draft), drafting)

    @property
    def drafter(self) -> str:
        """What drafts: a method, `mtp`, `lookup`, one of these with lookup, or `none`."""
        return self._inner.drafter

    @property
    def messages(self) -> List[Dict[str, str]]:
        """What was said; set it to begin anew, for example with a system prompt."""
        return [{"role": role, "content": content} for role, content in self._inner.messages()]

    @messages.setter
    def messages(self, messages: Iterable[Message]) -> None:
        self._inner.restart(_messages(messages))

    @overload
    def generate(self, prompt: str, *, stream: "Literal[True]", **options: "Unpack[AnswerOptions]") -> Stream: ...

    @overload
    def generate(self, prompt: str, *, stream: "Literal[False]" = False, **options: "Unpack[AnswerOptions]") -> Answer: ...

    def generate(self, prompt: str, *, stream: bool = False, **options: "Unpack[AnswerOptions]") -> Union[Answer, Stream]:
        """Continues a text: the whole answer, or with `stream=True` its pieces as they become certain.

        Options are those of :class:`AnswerOptions`, `max_tokens` and `temperature` among them. Ctrl-C ends the answer.
        """
        return self._ask(prompt, False, stream, options)

    @overload
    def chat(self, text: str, *, stream: "Literal[True]", **options: "Unpack[AnswerOptions]") -> Stream: ...

    @overload
    def chat(self, text: str, *, stream: "Literal[False]" = False, **options: "Unpack[AnswerOptions]") -> Answer: ...

    def chat(self, text: str, *, stream: bool = False, **options: "Unpack[AnswerOptions]") -> Union[Answer, Stream]:
        """Answers a user's turn through the target's chat template; both become part of :attr:`messages`.

        Takes the options of :meth:`generate`.
        """
        return self._ask(text, True, stream, options)

    def _ask(self, text: str, chat: bool, stream: bool, options: "AnswerOptions") -> Union[Answer, Stream]:
        asked = Stream(self._inner.stream(text, chat, _asked(**options)))
        return asked if stream else asked.answer

    def __repr__(self) -> str:
        return f"Session({self.target!r}, drafter {self.drafter!r})"


def _drafting(
    mtp: bool,
    draft_len: int,
    tree: Optional[str],
    lookup: Optional[str],
    datastore: Iterable[PathOrName],
    confidence_threshold: float,
    verify: str,
    draft_vocab: Optional[PathOrName],
    draft_vocab_size: Optional[int],
    pace: str,
    chat_template_kwargs: Optional[Dict[str, Any]],
) -> Dict[str, Any]:
    return {
        "mtp": mtp,
        "draft_len": draft_len,
        "tree": tree,
        "lookup": lookup,
        "datastore": [fspath(path) for path in datastore],
        "confidence_threshold": confidence_threshold,
        "verify": verify,
        "draft_vocab": None if draft_vocab is None else fspath(draft_vocab),
        "draft_vocab_size": draft_vocab_size,
        "pace": pace,
        "chat_template_kwargs": _variables(chat_template_kwargs),
    }


def _asked(
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_k: Optional[int] = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: Union[str, Iterable[str]] = (),
    stop_tokens: Iterable[Union[str, int]] = (),
    ignore_eos: bool = False,
    chat_template_kwargs: Optional[Dict[str, Any]] = None,
) -> Dict[str, Any]:
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": [stop] if isinstance(stop, str) else list(stop),
        "stop_tokens": [str(token) for token in stop_tokens],
        "ignore_eos": ignore_eos,
        "chat_template_kwargs": _variables(chat_template_kwargs),
    }
