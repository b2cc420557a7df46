"""A plan: a strategy written down with all that is needed to run it again.

The fields of a plan must agree among themselves, which an edit by hand easily breaks. The declarations of
single fields check their types; :func:`check_plan` checks what several fields say together, before a model is
loaded. Whether a plan fits its model is checked where the two meet.

A plan keeps the call that it was made for, as data: shapes and dtypes in place of tensors, numbers as they
are. With it a plan can be applied to a model object without an example call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from tensoropt.cluster import Cluster
from tensoropt.errors import PlanError, TensorOptError
from tensoropt.files import write_text
from tensoropt.plan.figures import worded
from tensoropt.plan.kinds import PIPELINED, PLACED, SHARDED, STAGE_AXIS, PlanKind, kind_on
from tensoropt.profiling.optimizers import kind_of
from tensoropt.question.model_source import OnnxOptions
from tensoropt.units import counted, counted_if_any


def check_plan(plan: Plan) -> None:
    """Refuse a plan that contradicts itself.

    Raises:
        PlanError: names the fields that do not agree, their values, and the remedy.
    """
    _check_mesh(plan)
    _check_cluster(plan)
    for name, operator in plan.operators.items():
        _check_axes(name, operator.axes, plan.axes)
        _check_place(plan, f"operator {name}", device=operator.device, order=operator.order)
    for name, parameter in plan.parameters.items():
        _check_place(plan, f"parameter {name}", device=parameter.device)
        if parameter.device is None and len(parameter.stored) != 1 + len(plan.axes):
            raise PlanError(
                f"parameter {name} is stored as {list(parameter.stored)}, but has one placement for the "
                f"micro-batches and one for each mesh axis ({_listed(plan.axes)})"
            )
        if parameter.device is not None and parameter.device >= plan.devices:
            raise PlanError(
                f"parameter {name} lies on device {parameter.device}, but the plan has {plan.devices} "
                "devices, counted from 0"
            )
    _check_figures(plan)


def _check_mesh(plan: Plan) -> None:
    mesh, kind = plan.mesh, plan.kind
    if any(size < 1 for size in mesh.shape):
        raise PlanError(f"the mesh {list(mesh.shape)} has an axis below 1; give sizes of at least 1")
    if len(mesh.names) != len(mesh.shape) or len(set(mesh.names)) != len(mesh.names):
        raise PlanError(
            f"the mesh {list(mesh.shape)} needs {len(mesh.shape)} different names of axes, and has "
            f"{list(mesh.names)}"
        )
    if not kind.lies_on(mesh.names, placed=mesh.placed):
        begins = "".join(f" and begins with the axis {axis}" for axis in kind.first_axes)
        raise PlanError(
            f"the mesh has 'placed' {mesh.placed} and the axes {_listed(mesh.names)}, but 'stages' says that "
            f"this is a {kind.name}, whose mesh has 'placed' {kind.placed}{begins}; make both agree"
        )


def _check_cluster(plan: Plan) -> None:
    if "kinds" not in plan.cluster:
        return
    try:
        cluster = Cluster.from_dict(plan.cluster)
    except TensorOptError as error:
        raise PlanError(f"the plan's cluster cannot be read: {error}") from error
    except (AttributeError, ValueError) as error:  # fields of a wrong kind, deep inside
        raise PlanError(f"the plan's cluster is not a saved one ({error}); choose the plan again") from error
    if cluster.device_count != plan.devices:
        raise PlanError(
            f"the plan's mesh {plan.mesh.label} has {plan.devices} devices, and its cluster {cluster.name} "
            f"{cluster.device_count}; explore on as many devices as are meant, for example --cluster "
            f"{cluster.name}[{plan.devices}]"
        )


def _check_axes(name: str, given: Mapping[str, str], axes: tuple[str, ...]) -> None:
    for axis in given:
        if axis not in axes:
            raise PlanError(
                f"operator {name} has the axis '{axis}', which the mesh has not; it has {_listed(axes)}"
            )
    for axis in axes:
        if axis not in given:
            raise PlanError(
                f"operator {name} says nothing of the mesh axis '{axis}'; write which of its dims that "
                "splits, or none"
            )


def _check_place(plan: Plan, what: str, **numbers: int | None) -> None:
    if {number is not None for number in numbers.values()} != {plan.kind.placed}:
        given = " and ".join(f"{name} {number}" for name, number in numbers.items())
        raise PlanError(
            f"{what} has {given} in a {plan.kind.name}; say where operators and parameters lie in a placed "
            "plan, and in no other"
        )


def _check_figures(plan: Plan) -> None:
    for name, value in plan.predicted:
        # A gap may be without bound, and everything else is measured in bytes or seconds.
        figures = value.values() if isinstance(value, Mapping) else (value,)
        wrong = [x for x in figures if isinstance(x, int | float) and not (isfinite(x) and x >= 0)]
        if wrong and name != "gap":
            raise PlanError(f"the predicted {name} is {wrong[0]}, but figures are finite and not below 0")


def _listed(axes: tuple[str, ...]) -> str:
    return ", ".join(axes) or "no axes"


_TENSOR = "tensor"


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the call as ``{"args": [...], "kwargs": {...}}``; None if JSON cannot hold an argument."""
    try:
        return {"args": [_describe(a) for a in args], "kwargs": {k: _describe(v) for k, v in kwargs.items()}}
    except TypeError:
        return None


def _describe(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return {_TENSOR: list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    # JSON has no tuples; a model may tell them from lists.
    if isinstance(value, tuple):
        return {"tuple": [_describe(v) for v in value]}
    if isinstance(value, list):
        return [_describe(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {k: _describe(v) for k, v in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(type(value).__name__)


def example_call(data: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of the described shapes, filled with zeros.

    Raises:
        PlanError: the description is damaged.
    """
    try:
        return tuple(_example(a) for a in data["args"]), {k: _example(v) for k, v in data["kwargs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise PlanError(
            f"the plan does not say readably how the model is called ({type(error).__name__}: {error}); "
            "choose the plan again, or pass args=... and kwargs=..."
        ) from error


def _example(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_example(v) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return torch.zeros(value[_TENSOR], dtype=getattr(torch, value["dtype"]))
    if "tuple" in value:
        return tuple(_example(v) for v in value["tuple"])
    return {k: _example(v) for k, v in value["dict"].items()}


_SCHEMA = "tensoropt.plan/4"
_OLD_SCHEMAS = ("tensoropt.plan/1", "tensoropt.plan/2", "tensoropt.plan/3")
"""Of plans that have ``placed`` or ``pipeline`` in place of ``stages``; :func:`load_plan` reads them."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class OnnxInfo(_Strict):
    """The options with which an ONNX file was opened:
    :class:`tensoropt.question.model_source.OnnxOptions`.
    """

    dims: dict[str, int] = {}
    outputs: tuple[str, ...] = ()
    loss: str | None = None

    def options(self) -> OnnxOptions:
        """Return the options as the importer takes them."""
        return OnnxOptions.of(self.dims, self.outputs, self.loss)


def _known_optimizer(name: str) -> str:
    try:
        kind_of(name)
    except TensorOptError as error:
        raise ValueError(str(error)) from None
    return name


class ModelInfo(_Strict):
    """The identity of a model: its source, a fingerprint of its operator graph, and the shapes it is called
    with.

    ``trained`` are the parameters that have a gradient, None if that is not known; ``adapters`` says of which
    kind these are, such as ``LoRA r16``.
    """

    source: str
    fingerprint: str
    mode: Literal["train", "inference"] = "train"
    seed: int = 0
    parameters: int = Field(0, ge=0)
    trained: int | None = None
    adapters: str = ""
    batch: int | None = None
    call: dict[str, Any] | None = None
    onnx: OnnxInfo | None = None


class MeshInfo(_Strict):
    """The sizes and names of the mesh axes, outermost first. If ``placed``, there is no mesh but a row of
    devices. A pipeline is the first axis, named :data:`STAGE_AXIS`.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    placed: bool = False

    @property
    def places(self) -> int:
        """The number of places through which micro-batches pass: 1 but for pipelines."""
        return dict(zip(self.names, self.shape, strict=True)).get(STAGE_AXIS, 1)

    @property
    def label(self) -> str:
        """The mesh in words: ``2x4``, ``1`` for a single device, ``placed on 4``, or ``pp2x4``."""
        words = kind_on(self.names, placed=self.placed).mesh_words
        return words + ("x".join(map(str, self.shape)) or "1")


class OperatorPlan(_Strict):
    """The split of an operator's group: for each mesh axis the loop dim that it splits (``none``,
    ``partial``, ...).

    In a placed plan instead: its device, and its position in that device's forward and backward order.
    """

    axes: dict[str, str]
    micro: str
    members: tuple[str, ...] = ()
    device: int | None = Field(None, ge=0)
    order: int | None = Field(None, ge=0)
    backward_order: int | None = Field(None, ge=0)

    @property
    def position(self) -> str:
        """Its device and its position there in words; "" if it has none of its own."""
        return "" if self.device is None else f"device {self.device}, position {self.order}"


class ParameterPlan(_Strict):
    """The stored placement of a parameter on each axis (micro-batches first): ``S(n)``, ``R`` or ``R/P``. The
    first is ``held`` if a gathered copy serves the whole step, ``held/P`` if the gradient waits with that
    copy, and ``ahead`` if the parameter is gathered while the block before its own computes. In a placed
    plan: the device on which it lies.
    """

    key: str
    stored: tuple[str, ...] = ()
    device: int | None = Field(None, ge=0)


class TransferPlan(_Strict):
    """A tensor, or with ``backward`` its gradient, sent from one device to another."""

    value: str
    source: int = Field(ge=0)
    target: int = Field(ge=0)
    backward: bool = False


_LEFT_OUT = ("once", "gathered_again")


class _Recomputing(_Strict):
    """What runs again in backward.

    ``recomputed`` names repeated blocks whose forward, or a part of it, runs again; ``once`` the operator
    groups of these blocks that run once; ``gathered_again`` the tensors whose gathered copies are gathered
    again instead of kept (:mod:`tensoropt.sharding.gathered_again`). The last two are left out of files where
    there are none.
    """

    @model_serializer(mode="wrap")
    def _without_none(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        return {name: value for name, value in data.items() if name not in _LEFT_OUT or value}


class StagePlan(_Recomputing):
    """The strategy of one stage, as :meth:`tensoropt.sharding.strategy.Strategy.to_data` writes it, without
    its mesh.

    Attributes:
        begins: the operator group with which it begins; "" for the first stage.
    """

    begins: str = ""
    groups: dict[str, tuple[str, ...]]
    hubs: dict[str, tuple[str, ...]]
    stored: dict[str, tuple[str, ...]]
    recomputed: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    gathered_again: tuple[str, ...] = ()


class StagesInfo(_Strict):
    """The stages of a plan that is not one stage on the whole mesh, and their schedule.

    A plan with a schedule is a pipeline: stages of several operators, through which micro-batches pass. One
    without is placed: its stages are devices, which run their operators in the order that ``operators`` says.

    Attributes:
        schedule: the order in which micro-batches pass the stages; "" for a placed plan.
        again: the tensors that stages recompute instead of receiving them.
        stages: in order; the places are the first axis of the plan's mesh, and have as many stages each as
            the schedule gives them. None of a placed plan, whose operators have a device each.
        splits: (loop dim, number of pieces) of the operator groups that are cut into pieces.
        transfers: the transfers of one micro-batch, in the order that all devices follow; in a pipeline they
            follow from the stages.
        peak_bytes: per place of one of its ranks, or per device.
        kinds: per place the names of its kinds of devices; only where places differ in them.
    """

    schedule: str = ""
    again: tuple[str, ...] = ()
    stages: tuple[StagePlan, ...] = ()
    splits: dict[str, tuple[str, int]] = {}
    transfers: tuple[TransferPlan, ...] = ()
    peak_bytes: tuple[float, ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def begins(self) -> tuple[str, ...]:
        """The operator groups with which the stages behind the first begin."""
        return tuple(stage.begins for stage in self.stages[1:])


def plan_kind(stages: StagesInfo | None) -> PlanKind:
    """Return the kind of a plan with these stages."""
    if stages is None:
        return SHARDED
    return PIPELINED if stages.schedule else PLACED


def placing_words(operators: Mapping[str, OperatorPlan], stages: StagesInfo) -> tuple[str, ...]:
    """Return on how many devices single operators lie, and how many are cut for that, in words."""
    devices = {operator.device for operator in operators.values()} - {None}
    return (
        *counted_if_any(len(devices), "device", "placed on {}"),
        *counted_if_any(len(stages.splits), "operator", "{} cut"),
    )


class CollectiveCount(_Strict):
    """A predicted collective: its kind, mesh axes, bytes on one rank, and count per step."""

    kind: str
    axes: tuple[int, ...]
    bytes: int
    count: int


class Predicted(_Strict):
    """The predictions of the cost tables and the simulator, in bytes and seconds of one rank and one step.

    ``memory_bytes`` and ``time_s`` are what the simulator found; ``additive_memory_bytes`` and
    ``additive_time_s`` what the search added up. ``memory`` splits the peak of tensors by kind, ``terms``
    names what a process takes beside them (on GPUs); together they are ``memory_bytes``. ``communication_s``
    is all of it, ``exposed_s`` what is waited for. ``host_s`` is what issuing all of it takes the host, where
    that is not the device.
    """

    memory_bytes: float
    time_s: float
    compute_s: float
    communication_s: float
    additive_memory_bytes: float
    additive_time_s: float | None = None
    exposed_s: float | None = None
    hidden_s: float | None = None
    idle_s: float = 0.0
    host_s: float = 0.0
    memory: dict[str, float] = {}
    terms: dict[str, float] = {}
    sources: dict[str, float] = {}
    collectives: tuple[CollectiveCount, ...] = ()
    exact: bool = True
    gap: float | None = 0.0

    @model_validator(mode="before")
    @classmethod
    def _without_what_went(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if k != "allocator"} if isinstance(data, dict) else data

    @property
    def tensor_bytes(self) -> float:
        """The part of the memory that tensors take, as a tracker of tensors measures it."""
        return self.memory_bytes - sum(self.terms.values())


class Plan(_Recomputing):
    """One plan file; see the field types for shapes and units.

    A plan without ``stages`` is one stage on the whole mesh. One whose stages have a schedule cuts the model
    (:mod:`tensoropt.pipeline`), and says more of each stage there than ``operators`` and ``parameters`` do.
    One whose stages have none puts every operator, or piece of one, on one device
    (:mod:`tensoropt.placement`); its mesh is the row of devices, and its figures are those of the fullest.
    """

    # An alias, since pydantic's BaseModel has a method called schema.
    schema_: Literal["tensoropt.plan/4"] = Field("tensoropt.plan/4", alias="schema")
    planner: str
    model: ModelInfo
    cluster: dict[str, Any]
    mesh: MeshInfo
    micro_batches: int = Field(ge=1)
    optimizer: Annotated[str, AfterValidator(_known_optimizer)]
    operators: dict[str, OperatorPlan]
    hubs: dict[str, tuple[str, ...]]
    parameters: dict[str, ParameterPlan]
    recomputed: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    gathered_again: tuple[str, ...] = ()
    stages: StagesInfo | None = None
    predicted: Predicted
    settings: dict[str, Any] = {}
    versions: dict[str, str] = {}

    @property
    def devices(self) -> int:
        """The number of devices, and so of ranks, that the plan runs on."""
        return prod(self.mesh.shape)

    @property
    def kind(self) -> PlanKind:
        """The kind of the plan, with the words for it."""
        return plan_kind(self.stages)

    @property
    def info(self) -> StagesInfo:
        """The stages and their schedule; an empty list of a plan that is one stage."""
        return self.stages or StagesInfo()

    @property
    def place_of(self) -> dict[str, dict[str, str]]:
        """The stage or device of each operator that has one, as the axis of a configuration; the first of
        several stages."""
        devices = {name: operator.device for name, operator in self.operators.items()}
        places = {name: {"device": str(device)} for name, device in devices.items() if device is not None}
        for number, stage in enumerate(self.info.stages):
            for name in stage.groups:
                places.setdefault(name, {STAGE_AXIS: str(number)})
        return places

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh axes along which operators are split."""
        return self.mesh.names[len(self.kind.first_axes) :]

    @property
    def model_source(self) -> str:
        """The source of the model, as :func:`~tensoropt.question.model_source.load_model` takes it."""
        return self.model.source

    @property
    def seed(self) -> int:
        """The seed of the model's weights."""
        return self.model.seed

    @property
    def compute_dtype(self) -> str:
        """The dtype of computation: ``bfloat16`` for mixed precision; see
        :mod:`tensoropt.capture.precision`.
        """
        return str(self.settings.get("dtype", "float32"))

    def strategy_data(self) -> dict[str, Any]:
        """Return the strategy as :meth:`tensoropt.sharding.strategy.Strategy.from_data` reads it.

        Raises:
            PlanError: no strategy on one mesh says all of the plan.
        """
        if self.stages is not None:
            raise PlanError(
                f"this {self.kind.name} of {self.planner} has no strategy on one mesh, as "
                f"{self.kind.strategies}; give tensoropt.parallelize the plan itself"
            )
        return {
            "mesh": [self.micro_batches, *self.mesh.shape],
            "groups": {
                name: [op.micro, *(op.axes[axis] for axis in self.mesh.names)]
                for name, op in self.operators.items()
            },
            "hubs": {name: list(layout) for name, layout in self.hubs.items()},
            "stored": {name: list(p.stored) for name, p in self.parameters.items()},
            "recomputed": list(self.recomputed),
            **({"once": list(self.once)} if self.once else {}),
            **({"gathered_again": list(self.gathered_again)} if self.gathered_again else {}),
        }

    def strategy(self, graph: Any) -> Any:
        """Return the strategy of this plan for a grouped graph.

        Raises:
            PlanError: the plan is for another model; names the first difference.
        """

        from tensoropt.sharding.strategy import Strategy

        # Before the fingerprint: its errors name the operator that differs, a fingerprint only says that one
        # does.
        strategy = Strategy.from_data(self.strategy_data(), graph)
        self.check_model(graph)
        return strategy

    def check_model(self, graph: Any) -> None:
        """Raise :class:`PlanError` unless the plan was made for this grouped graph's model."""
        found = graph.atoms.graph.fingerprint
        if found != self.model.fingerprint:
            raise PlanError(
                f"the plan was made for {self.model.source} with other shapes, dtypes or code (fingerprint "
                f"{self.model.fingerprint[:12]}, this model has {found[:12]}); explore this model again"
            )

    def to_data(self) -> dict[str, Any]:
        """Return the plan as plain data, as a plan file has it."""
        return self.model_dump(by_alias=True, mode="json")

    def to_json(self) -> str:
        """Return the content of a plan file."""
        return json.dumps(self.to_data(), indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file; an existing file is replaced only once the new one is complete."""
        write_text(path, self.to_json())

    def __repr__(self) -> str:
        step = "{memory_bytes} per device, {time_s} per step: compute {compute_s}, network {communication_s}"
        return (
            f"Plan of {self.model.source or 'a model'} by {self.planner}\n"
            f"  {self.devices} devices of {self.cluster.get('name', 'a cluster')}, {self.mesh.label}; "
            f"{counted(self.micro_batches, 'micro-batch', 'micro-batches')}, {self.optimizer}\n"
            f"  {worded(self.predicted, step)}"
        )

    __str__ = __repr__  # pydantic's own would list every field


def _converted(data: dict[str, Any]) -> dict[str, Any]:
    data = {**data, "schema": _SCHEMA}
    stages = {name: data.pop(name, None) for name in ("placed", "pipeline")}
    given = {name: value for name, value in stages.items() if value is not None}
    if len(given) > 1:
        raise PlanError("a plan is placed or has a pipeline, and this one both; leave out one of them")
    if isinstance(mesh := data.get("mesh"), dict):
        # The first placed plans did not say so of their mesh.
        data["mesh"] = {**mesh, "placed": mesh.get("placed", False) or "placed" in given}
    return {**data, "stages": next(iter(given.values()), None)}


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan of a file, checked.

    Raises:
        PlanError: there is no such file, or it is not a plan; names the first field that is wrong.
    """
    try:
        # Editors on some systems put a mark of the byte order before UTF-8.
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not a plan: it is not UTF-8 text") from error
    except (OSError, ValueError) as error:
        raise PlanError(
            f"cannot read the plan {path}: {getattr(error, 'strerror', None) or error}; give a plan.json"
        ) from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{path} is not a plan: line {error.lineno}: {error.msg}; is the file whole? choose the plan "
            "again"
        ) from error
    # Numbers of thousands of digits, lists in lists in ...
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not a plan: {error}") from error
    schemas = (*_OLD_SCHEMAS, _SCHEMA)
    if not isinstance(data, dict) or data.get("schema") not in schemas:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        known = " or ".join(f"'{schema}'" for schema in schemas)
        raise PlanError(f"{path} is not a plan: its schema is {found!r}, not {known}")
    try:
        plan = Plan.model_validate(data if data["schema"] == _SCHEMA else _converted(data))
        check_plan(plan)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PlanError(f"{path} is not a plan: {where}: {first['msg']}") from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return plan
