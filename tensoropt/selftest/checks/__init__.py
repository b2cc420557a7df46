"""The checks of the self-test, in their order, with the seconds that each may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensoropt.errors import TensorOptError


@dataclass(frozen=True)
class Check:
    """A check: a function of a module that is imported in a process of its own.

    Attributes:
        name: the name that ``--only`` takes.
        what: what it shows, in words.
        function: ``module:function``; takes a :class:`~tensoropt.selftest.outcome.CheckContext` and returns
            an :class:`~tensoropt.selftest.outcome.Outcome`.
        expected_s: seconds by device, from the start of Python to the end; measured on two cores for the CPU
            and on an H200 with 16 cores for a GPU, save where README.md says that it is an assumption.
    """

    name: str
    what: str
    function: str
    expected_s: Mapping[str, float]


def _check(name: str, what: str, function: str, cpu: float, cuda: float) -> Check:
    return Check(name, what, f"tensoropt.selftest.checks.{function}", {"cpu": cpu, "cuda": cuda})


_IN_ORDER = (
    _check("numerics", "the lowered graph computes what the module does", "numerics:run", 20, 25),
    _check("dropout", "dropout draws the same bits everywhere", "dropout:run", 8, 15),
    _check("checkpoint", "training goes on from a checkpoint", "checkpoint:run", 15, 15),
    _check("two-ranks", "split plans are right with two ranks on one device", "shared_device:run", 80, 85),
    _check("facts", "what operators keep is what fake tensors say", "facts:run", 45, 30),
    _check("memory", "a step's memory is what is predicted and tracked", "memory:run", 20, 35),
    _check("fake-cuda", "programs for GPUs run on fake CUDA devices", "fake_devices:run", 60, 5),
    _check("clock", "the clock agrees with the profiler", "clock:run", 15, 10),
    _check("overhead", "the lowered graph's step takes no longer than the module's", "overhead:run", 40, 55),
    _check("steps", "a step takes what is predicted", "step_time:run", 90, 150),
    _check("streams", "streams run beside each other, and are right", "streams:run", 8, 20),
    _check("compiled", "the same as overhead under torch.compile", "overhead:run_compiled", 100, 60),
)
CHECKS: dict[str, Check] = {check.name: check for check in _IN_ORDER}


def checks_of(names: list[str] | tuple[str, ...] | None) -> list[Check]:
    """Return the checks with these names, in their own order; all of them for None.

    Raises:
        TensorOptError: there is no check with one of the names.
    """
    unknown = [name for name in names or () if name not in CHECKS]
    if unknown:
        raise TensorOptError(
            f"there is no check called {', '.join(unknown)}; the checks are {', '.join(CHECKS)}"
        )
    return [check for check in _IN_ORDER if not names or check.name in names]
