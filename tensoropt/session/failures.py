"""Failures because of the explored model, turned into refusals that name the stage, the operator and the
line.

PyTorch raises errors of its own for operators that it cannot run in some way (on fake tensors, in pieces,
without storage). A person needs to know which part of the model that was; our own errors stay as they are.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tensoropt.capture.lines import frames_of
from tensoropt.capture.unsupported import of_error
from tensoropt.errors import TensorOptError, UnsupportedError
from tensoropt.graph import Operator, OperatorGraph
from tensoropt.ops.calls import LocalCall
from tensoropt.profiling.workload import Workload

_PACKAGE = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_STAGES = {
    "capture": "capturing the model",
    "discovery": "finding how its operators split",
    "sharding": "finding how its operators split",
    "profiling": "finding what its operators keep and take",
    "costs": "pricing its operators",
    "simulate": "simulating its step",
}
_REASON = 200
"""The most characters of an error's first line that are shown."""


@contextlib.contextmanager
def failures_named(model: str, graph: OperatorGraph | None = None) -> Iterator[None]:
    """Turn PyTorch's refusals inside the block into errors that a person can act on.

    Args:
        model: the model's name.
        graph: the model's operators, if they are known; they have the lines of the model.

    Raises:
        UnsupportedError: names the stage, the operator and the model's own line.
    """
    try:
        yield
    except (TensorOptError, OSError, MemoryError):
        raise
    except Exception as error:
        if not is_pytorchs(error):
            raise
        raise UnsupportedError(described(model, graph, error)) from error


def is_pytorchs(error: Exception) -> bool:
    """Return whether PyTorch refuses something, rather than our own code being wrong."""
    innermost = next(frames_of(error), None)
    if innermost is None:
        return False
    filename = Path(innermost.f_code.co_filename)
    # Kernels raise from the line that calls them, whatever that line is; no `raise` stands there.
    return filename.is_relative_to(_TORCH) or (isinstance(error, RuntimeError) and not _raised(error))


def _raised(error: BaseException) -> bool:
    """Return whether a Python statement raised the error, rather than a C function that it calls."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def described(model: str, graph: OperatorGraph | None, error: BaseException) -> str:
    """Return one sentence on a failure: doing what, where, why, and what to do."""
    operator = _operator(error, graph)
    at = f" at {operator.target}" if operator is not None else ""
    if operator is not None and operator.module:
        at += f" of `{operator.module}`"
    if operator is not None and operator.source:
        at += f" ({operator.source})"
    kind = of_error(error)
    known = f"the model {kind.what}; {kind.remedy}" if kind is not None else ""
    unknown = "write that part with other PyTorch calls, or report it with what --debug prints"
    return f"{model} is not supported: {_stage(error)} failed{at}: {_reason(error)}; {known or unknown}"


def _stage(error: BaseException) -> str:
    for frame in frames_of(error):
        filename = Path(frame.f_code.co_filename)
        if filename.is_relative_to(_PACKAGE):
            folders = filename.relative_to(_PACKAGE).parts[:-1]
            found = next((_STAGES[folder] for folder in reversed(folders) if folder in _STAGES), None)
            if found is not None:
                return found
    return "exploring it"


def _operator(error: BaseException, graph: OperatorGraph | None) -> Operator | None:
    """Return the operator that the innermost of our functions was handling."""
    operators = graph.operators if graph is not None else ()
    makers = {name: op for op in operators for name in op.outputs}
    by_name = {op.name: op for op in operators}
    for frame in frames_of(error):
        for value in _values(frame.f_locals):
            if isinstance(value, Operator):
                return by_name.get(value.name, value)
            if isinstance(value, LocalCall) and value.name in by_name:
                return by_name[value.name]
            if isinstance(value, Workload):
                made = [value.names.get(name, name) for _, names in value.calls for name in names]
                found = [makers[name] for name in made if name in makers]
                # In backward no function handles an operator; the error may name one.
                named = [op for op in found if op.target.split(".")[1] in str(error)]
                if found:
                    return (named or found)[0]
    return None


def _values(names: dict[str, Any]) -> list[Any]:
    return [names[name] for name in ("op", "operator", "call", "probe", "work") if name in names]


def _reason(error: BaseException) -> str:
    """Return the first sentence of a PyTorch error, without its advice to developers of PyTorch."""
    text = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
    first = text.split(". ")[0]
    return first if len(first) <= _REASON else first[:_REASON].rsplit(" ", 1)[0] + " ..."
