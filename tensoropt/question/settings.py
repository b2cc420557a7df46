"""The settings of an exploration, with their descriptions.

Each setting is described once, at its field of :class:`Settings`. The command line's flag, the lists of
settings and assumptions, the README's table and the saved JSON are made from these descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as model

from tensoropt import units
from tensoropt.errors import TensorOptError
from tensoropt.profiling.optimizers import OPTIMIZERS, kind_of, short_optimizer, with_kind

if TYPE_CHECKING:
    from tensoropt.sharding.constraints import Constraints

    ComputeDtype = str
    Constrained = Constraints | None
else:
    ComputeDtype = Literal["auto", "float32", "bfloat16"]
    Constrained = Any


@dataclass(frozen=True)
class Setting:
    """The description of a setting: its name and meaning, and how its values are read and written.

    *Assumptions* are the settings that the dashboard lists beside a result.

    Attributes:
        help: the meaning in a few words.
        label: the name among the assumptions.
        group: the section in ``--help``.
        flag: the command-line name; by default that of the field.
        metavar: the placeholder for a value in ``--help``.
        none: the word for None.
        title: the format of a value in titles; by default the value follows the flag.
        words: formats a value among the assumptions; None for the same format as elsewhere.
        assumed: whether the assumptions list the setting even at its default.
        of_step: whether the setting changes what a step computes, so that explorations with different values
            cannot be compared.
        read: parses a value.
        write: formats a value so that ``read`` gives it again.
        choices: the possible values; by default those of the field.
        others: the placeholder for values that only the command line and Python accept.
        name, default: the name and default value of the field, filled in by :func:`settings_fields`.
    """

    help: str
    label: str
    group: str
    flag: str = ""
    metavar: str = ""
    none: str = ""
    title: str = ""
    words: Callable[[Any], str] | None = None
    assumed: bool = False
    of_step: bool = False
    read: Callable[[str], Any] = str
    write: Callable[[Any], str] = str
    name: str = ""
    default: Any = None
    choices: tuple[str, ...] = ()
    others: str = ""

    @property
    def key(self) -> str:
        """The name of the setting's attribute among parsed command-line options."""
        return self.flag.replace("-", "_")

    def text(self, value: Any) -> str:
        """Return a value as text for a sentence."""
        if value is None:
            return self.none
        return ("no", "yes")[value] if isinstance(value, bool) else self.write(value)

    def row(self, value: Any) -> str:
        """Return a value as text for the list of assumptions."""
        return self.text(value) if self.words is None or value is None else self.words(value)

    def notable(self, value: Any) -> str:
        """Return a value as text if it should be mentioned: not the default, or always listed; else ""."""
        return "" if value is None or (value == self.default and not self.assumed) else self.text(value)

    def in_title(self, value: Any) -> str:
        """Return a value as text for a title."""
        return (self.title or f"{self.flag} {{}}").format(self.text(value))

    def option(self, value: Any, text: str = "") -> list[str]:
        """Return the command-line words that set a value; empty for the default.

        Args:
            text: the text to write instead of the value, such as the name of its file.
        """
        if value == self.default:
            return []
        if isinstance(value, bool):
            return [f"--{self.flag}" if value else f"--no-{self.flag}"]
        return [f"--{self.flag}", text or self.write(value)]


# -- how values read among assumptions ------------------------------------------------------------------


def _count_words(value: str | Sequence[int]) -> str:
    if value == "auto":
        return "1, 2, 4, 8 where they divide the batch"
    return units.write_counts(value).replace(",", ", ")


def _recompute_words(value: str) -> str:
    return "repeated blocks may run again in backward" if value == "auto" else value


# -- rules ----------------------------------------------------------------------------------------------


def _gap(value: float) -> float:
    if not 0 <= value < 1:
        raise TensorOptError(f"epsilon {value} is not between 0 and 1; 0.001 means 0.1 %")
    return value


def _enough(value: int | None) -> int | None:
    if value is not None and value < 2:
        raise TensorOptError(f"max_points {value} leaves no frontier; use at least 2")
    return value


def _imbalance(value: float) -> float:
    if not 1 <= value < float("inf"):
        raise TensorOptError(
            f"expert_imbalance {value} is not at least 1; 1.2 says that the busiest rank computes a fifth "
            "more rows of experts than the mean"
        )
    return value


def _counts(value: Any) -> Any:
    if not isinstance(value, str):
        if not isinstance(value, Sequence) or not all(hasattr(m, "__index__") for m in value):
            raise TensorOptError(
                f"micro_batches is 'auto' or a tuple of counts, such as (1, 2), not {value!r}"
            )
        value = tuple(value)
    if not value:
        raise TensorOptError("no micro-batch count to search; use at least one, or 'auto'")
    if not isinstance(value, str) and any(m < 1 for m in value):
        raise TensorOptError(f"micro-batch counts {list(value)} must be at least 1")
    return value


def _constraints(value: Any) -> Any:
    if value is None:
        return None
    from tensoropt.question.constraints import constraints_of  # only if there are any, as it imports PyTorch

    return constraints_of(value)


_STEP = "what a step does"
_SEARCH = "what is searched"
_COSTS = "where costs come from"


def _refused_in_words(of: type) -> type:
    """Make a class raise errors of one sentence (:func:`_refusal`) instead of pydantic's."""
    checked: Any = of.__init__  # type: ignore[misc]

    def initialise(self: Any, *values: Any, **chosen: Any) -> None:
        # Not a validator, whose errors pydantic would wrap again.
        try:
            checked(self, *values, **chosen)
        except ValidationError as error:
            raise _refusal(error) from None

    of.__init__ = wraps(checked)(initialise)  # type: ignore[misc]
    return of


@_refused_in_words
@model(frozen=True, config=ConfigDict(extra="forbid"))
class Settings:
    """The settings of an exploration, with the same defaults as on the command line.

    Raises:
        TensorOptError: a value is invalid; the message names valid ones.
        ConstraintError: constraints cannot be read.
    """

    mode: Annotated[
        Literal["train", "inference"],
        Setting(
            "inference: the forward pass alone", "Mode", _STEP, title="{}", assumed=True, of_step=True,
        ),
    ] = "train"  # fmt: skip
    optimizer: Annotated[
        str,
        AfterValidator(with_kind),
        Setting(
            "adam_fused: one kernel, without temporary tensors; module.py:make: a function that returns any "
            "elementwise torch.optim.Optimizer, given the parameters", "Optimizer", _STEP,
            title="{}", assumed=True, of_step=True, choices=tuple(OPTIMIZERS), others="module.py:make",
            write=short_optimizer,
        ),
    ] = "adam"  # fmt: skip
    micro_batches: Annotated[
        str | Sequence[int],
        BeforeValidator(_counts),
        Setting(
            "counts to search; auto: 1,2,4,8 if they divide the batch; a pipeline of P stages has P times "
            "as many", "Micro-batches", _STEP, metavar="auto|1,2,4", title="{} micro-batches",
            words=_count_words, assumed=True, read=units.read_counts, write=units.write_counts,
        ),
    ] = "auto"  # fmt: skip
    memory_bytes: Annotated[
        int | float | None,
        Setting(
            "fail if no plan fits this much per device", "Fail unless it fits", _SEARCH, flag="memory",
            metavar="24GiB", none="no limit", read=units.read_size, write=units.write_size,
        ),
    ] = None  # fmt: skip
    epsilon: Annotated[
        int | float,
        AfterValidator(_gap),
        Setting(
            "allowed gap of the frontier, 0 for exact", "Allowed gap", _SEARCH, metavar="E", title="gap {}",
            words=units.share_words, assumed=True, read=units.read_number, write="{:g}".format,
        ),
    ] = 1e-3  # fmt: skip
    max_points: Annotated[
        int | None,
        AfterValidator(_enough),
        Setting(
            "keep at most N points per frontier while searching", "Points kept", _SEARCH, metavar="N",
            none="no limit", title="{} points kept", read=units.read_whole,
        ),
    ] = None  # fmt: skip
    method: Annotated[
        Literal["auto", "ldp", "elimination"],
        Setting(
            "search of sharded strategies: auto: pruned by bounds; ldp, elimination: FT-LDP and "
            "FT-Elimination as published, unpruned and slower; the frontier is the same unless operators "
            "had to be fixed by a heuristic (a note says so)",
            "Method", _SEARCH,
        ),
    ] = "auto"  # fmt: skip
    dtype: Annotated[
        ComputeDtype,
        Setting(
            "compute dtype; auto: bfloat16 for language models of the zoo on GPUs that support it, else "
            "float32; float32: the model's own dtypes; bfloat16: mixed precision with float32 master weights",
            "Computes in", _STEP, title="{}", assumed=True, of_step=True,
        ),
    ] = "auto"  # fmt: skip
    recompute: Annotated[
        Literal["auto", "never"],
        Setting(
            "whether repeated blocks may be computed again in backward", "Recompute", _STEP,
            words=_recompute_words, assumed=True,
        ),
    ] = "auto"  # fmt: skip
    overlap: Annotated[
        Literal["default", "none"],
        Setting(
            "none: no communication overlaps computation, for comparison; on CPU ranks none ever does",
            "Overlap", _STEP,
        ),
    ] = "default"  # fmt: skip
    constraints: Annotated[
        Constrained,
        BeforeValidator(_constraints),
        Setting(
            "YAML or JSON: pinned operators and parameters, groups to keep together, devices",
            "Constraints", _SEARCH, metavar="FILE", none="none", title="with constraints",
            write=lambda _: "given",
        ),
    ] = None  # fmt: skip
    measure: Annotated[
        Literal["all", "never"],
        Setting(
            "never: use the profile store and fits to it instead of timing", "Time on this machine",
            _COSTS,
        ),
    ] = "all"  # fmt: skip
    process_memory: Annotated[
        bool,
        Setting(
            "add the memory of a GPU process beside tensors: estimates, never compared with a real GPU; none "
            "on CPU ranks", "Process memory", _COSTS,
        ),
    ] = True  # fmt: skip
    pipelines: Annotated[
        Literal["auto", "always", "never"],
        Setting(
            "heuristic search of pipelines: auto: on clusters of several nodes or device kinds; always: on "
            "any cluster", "Pipelines", _SEARCH,
        ),
    ] = "auto"  # fmt: skip
    placements: Annotated[
        Literal["auto", "always", "never"],
        Setting(
            "plans that run each operator on one device, by planners: auto: if they may be the answer; "
            "always: for any model and cluster", "Placements", _SEARCH,
        ),
    ] = "auto"  # fmt: skip
    expert_imbalance: Annotated[
        int | float,
        AfterValidator(_imbalance),
        Setting(
            "expert rows of the busiest rank over the mean, up to all rows; an assumption, as the router's "
            "choices are unknown",
            "Expert imbalance", _STEP, metavar="F", read=units.read_number, write="{:g}".format, of_step=True,
        ),
    ] = 1.0  # fmt: skip
    first: Annotated[
        bool,
        Setting(
            "simulate only the usual strategies (DDP, ZeRO, FSDP, tensor parallelism, each with and without "
            "recomputation and micro-batches), without a search: the answer of the first seconds",
            "Usual strategies only", _SEARCH, title="usual strategies only",
        ),
    ] = False  # fmt: skip

    @property
    def allows_gap(self) -> bool:
        """Whether the search may leave out strategies that improve on others by less than ``epsilon``."""
        return self.epsilon > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data, as plans and explorations store them."""
        micro = self.micro_batches if isinstance(self.micro_batches, str) else list(self.micro_batches)
        constraints = dict(self.constraints.data) if self.constraints else None
        return {**vars(self), "micro_batches": micro, "constraints": constraints}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """Return the settings that :meth:`to_dict` wrote.

        Raises:
            TensorOptError: this version does not know one of the settings.
        """
        try:
            kind_of(data.get("optimizer", "adam"))  # checks the name without running user code
            # What does not say counts only tensors.
            tensors = {"process_memory": False}
            return cls(**{**tensors, **data, "constraints": data.get("constraints") or None})
        except TypeError as error:
            raise TensorOptError(f"{error}: this was made by another version; explore again") from None


def settings_fields() -> Iterator[Setting]:
    """Yield the description of each setting, in the order of the model's fields."""
    for name, field in Settings.__pydantic_fields__.items():  # type: ignore[attr-defined]
        said = next(one for one in field.metadata if isinstance(one, Setting))
        literal = get_origin(field.annotation) is Literal
        choices = get_args(field.annotation) if literal else said.choices
        flag = said.flag or name.replace("_", "-")
        yield replace(said, name=name, flag=flag, default=field.default, choices=choices)


def _refusal(error: ValidationError) -> Exception:
    fault = error.errors()[0]
    name, value = str(fault["loc"][0]), fault["input"]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, TensorOptError):
        return cause
    if fault["type"] == "unexpected_keyword_argument":
        return TypeError(
            f"'{name}' is not a setting; there are {', '.join(one.name for one in settings_fields())}"
        )
    if fault["type"] == "literal_error":
        choices = next(setting.choices for setting in settings_fields() if setting.name == name)
        few = len(choices) <= 3
        listed = f"{', '.join(choices[:-1])} or {choices[-1]}" if few else ", ".join(choices)
        return TensorOptError(f"unknown {name} '{value}'; use {listed}")
    if fault["type"] == "string_type":
        default = next(setting.default for setting in settings_fields() if setting.name == name)
        return TensorOptError(f"{name} must be a text, such as {default!r}; got {value!r}")
    return TensorOptError(f"{name} {value!r} is not valid: {fault['msg']}")
