"""Targets and drafts."""

import json
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from . import _longdraft
from ._errors import refused

if TYPE_CHECKING:
    import numpy

PathOrName = Union[str, "PathLike[str]"]
Message = Mapping[str, str]


def _messages(messages: Iterable[Message]) -> List[Tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _variables(variables: Optional[Dict[str, Any]]) -> Optional[str]:
    """Variables of a chat template as the command line reads them."""
    return None if variables is None else json.dumps(variables)


class Target:
    """A target that is open: weights and tokenizer. Sessions and threads share one."""

    def __init__(self, inner: "_longdraft.Target") -> None:
        self._inner = inner

    @classmethod
    def open(cls, name: PathOrName, *, dtype: str = "stored", cache: str = "auto", device: str = "auto") -> "Target":
        """Opens a Hugging Face folder, a GGUF file, or a hub model `org/name`.

        `dtype` holds the weights as `stored`, `f32`, `bf16` or `f16`; `cache` keys and values as `auto`, `f32`, `f16` or `q8`; `device` is
        `auto`, `cpu`, `cuda:0` or `metal:0`.
        """
        return cls(_longdraft.Target.open(fspath(name), dtype, cache, device))

    @property
    def name(self) -> str:
        """As it was opened by."""
        return self._inner.name

    @property
    def fingerprint(self) -> str:
        """A hash of its configuration and some of its weights."""
        return self._inner.fingerprint

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self._inner.layers

    @property
    def hidden_size(self) -> int:
        """Width of hidden states, `H`."""
        return self._inner.hidden_size

    @property
    def vocabulary(self) -> int:
        """Number of tokens, `V`."""
        return self._inner.vocabulary

    @property
    def context(self) -> int:
        """Tokens that a text may have."""
        return self._inner.context

    def encode(self, text: str) -> List[int]:
        """Ids of a text to continue, `[T]`."""
        return self._inner.encode(text)

    def encode_chat(self, messages: Iterable[Message], *, chat_template_kwargs: Optional[Dict[str, Any]] = None) -> List[int]:
        """Ids of a conversation up to where the answer begins, `[T]`.

        `chat_template_kwargs` are variables of the chat template, such as `{"enable_thinking": False}`.
        """
        return self._inner.encode_chat(_messages(messages), _variables(chat_template_kwargs))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._inner.decode([int(one) for one in ids])

    def features(self, text_or_ids: Union[str, Iterable[int]], layers: Sequence[int]) -> "numpy.ndarray":
        """Hidden states after some layers (from 0), side by side: a numpy array `[T, L*H]` of float32.

        They are what a draft reads when it decodes: factors of products are never rounded, whatever :func:`capture` does by the key
        `products`. The array goes to torch without a copy: `torch.from_dlpack(features)`.
        """
        try:
            import numpy
        except ImportError:
            raise refused("features are numpy arrays, and numpy is not installed", "pip install numpy") from None
        ids = self.encode(text_or_ids) if isinstance(text_or_ids, str) else [int(one) for one in text_or_ids]
        values = self._inner.features(ids, list(layers))
        return numpy.frombuffer(values, dtype=numpy.float32).reshape(len(ids), -1)

    def __repr__(self) -> str:
        return f"Target({self.name!r}, {self.layers} layers, width {self.hidden_size}, {self.vocabulary} tokens)"


class Draft:
    """A draft on disk: a run, a checkpoint, a draft folder or file. Sessions of one target share its weights."""

    def __init__(self, inner: "_longdraft.Draft") -> None:
        self._inner = inner

    @classmethod
    def open(cls, path: PathOrName) -> "Draft":
        """Finds a draft; of a run the newest checkpoint, of a curriculum that of its last stage."""
        return cls(_longdraft.Draft.open(fspath(path)))

    @property
    def place(self) -> str:
        """Where its weights lie."""
        return fspath(self._inner.place)

    @property
    def target(self) -> Optional[str]:
        """The target that its run was trained for, if that is known."""
        return self._inner.target

    @property
    def provenance(self) -> Dict[str, Any]:
        """Where it comes from: run, steps, tokens, data."""
        known: Dict[str, Any] = json.loads(self._inner.provenance())
        return known

    def __repr__(self) -> str:
        return f"Draft({self.place!r})"


def _draft(draft: Union[Draft, PathOrName, None]) -> Optional["_longdraft.Draft"]:
    if draft is None:
        return None
    return (draft if isinstance(draft, Draft) else Draft.open(draft))._inner
