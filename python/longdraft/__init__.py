"""Trains draft models for speculative decoding, and decodes losslessly with them.

    import longdraft

    target = longdraft.Target.open("model.gguf")
    draft = longdraft.Draft.open("runs/mine")
    session = longdraft.Session(target, draft)
    for piece in session.generate("Once upon a time", stream=True):
        print(piece, end="", flush=True)

Everything computes in Rust, on every core, while other Python threads run. Errors are `longdraft.Error`, in the words of the command line.
"""

import atexit as _atexit

from ._command import main
from ._decoding import Answer, AnswerOptions, Piece, Session, Stream
from ._errors import Error
from ._evaluation import Evaluation, evaluate
from ._exports import Export, Problem, Report, Verdict, export, verify
from ._fit import fit
from ._longdraft import __version__, set_threads
from ._longdraft import settle as _settle
from ._models import Draft, Target
from ._training import Captured, Event, HeldOut, Run, Step, capture, train

__all__ = [
    "Answer",
    "AnswerOptions",
    "Captured",
    "Draft",
    "Error",
    "Evaluation",
    "Event",
    "Export",
    "HeldOut",
    "Piece",
    "Problem",
    "Report",
    "Run",
    "Session",
    "Step",
    "Stream",
    "Target",
    "Verdict",
    "__version__",
    "capture",
    "evaluate",
    "export",
    "fit",
    "main",
    "set_threads",
    "train",
    "verify",
]

# Work that Ctrl-C left under way saves before the process ends.
_atexit.register(_settle)
