"""Plans (a strategy with everything needed to run it) and plan files.

Types of fields check single values. :func:`check_plan` then checks, without the model, that fields agree with
each other; editing by hand easily breaks that. Whether a plan fits a model is checked when both are
known. A plan also stores the shapes and dtypes of an example call, so that a model object can be split by a
plan without example inputs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tensoropt.cluster import Cluster
from tensoropt.errors import PlanError, TensorOptError
from tensoropt.files import write_text
from tensoropt.plan.figures import worded
from tensoropt.plan.kinds import PIPELINED, PLACED, SHARDED, STAGE_AXIS, PlanKind, kind_on
from tensoropt.profiling.optimizers import kind_of
from tensoropt.question.model_source import OnnxOptions
from tensoropt.units import counted


def check_plan(plan: Plan) -> None:
    """Raise an error if fields of a plan contradict each other.

    Raises:
        PlanError: names the contradicting fields, their values, and the remedy.
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
                f"parameter {name} is stored as {list(parameter.stored)}, but needs one placement for the "
                f"micro-batches and one for each mesh axis ({_listed(plan.axes)})"
            )
        if parameter.device is not None and parameter.device >= plan.devices:
            raise PlanError(
                f"parameter {name} lies on device {parameter.device}, but the plan has {plan.devices} "
                "devices, counted from 0"
            )


def _check_mesh(plan: Plan) -> None:
    mesh, kind = plan.mesh, plan.kind
    if any(size < 1 for size in mesh.shape):
        raise PlanError(f"the mesh {list(mesh.shape)} has an axis of size below 1; give sizes of at least 1")
    if len(mesh.names) != len(mesh.shape) or len(set(mesh.names)) != len(mesh.names):
        raise PlanError(
            f"the mesh {list(mesh.shape)} needs {len(mesh.shape)} distinct axis names, but has "
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
    except (AttributeError, ValueError) as error:  # fields of a wrong type, deep inside
        raise PlanError(f"the plan's cluster is damaged ({error}); choose the plan again") from error
    if cluster.device_count != plan.devices:
        raise PlanError(
            f"the plan's mesh {plan.mesh.label} has {plan.devices} devices, but its cluster {cluster.name} "
            f"has {cluster.device_count}; explore on the intended number of devices, for example --cluster "
            f"{cluster.name}[{plan.devices}]"
        )


def _check_axes(name: str, given: Mapping[str, str], axes: tuple[str, ...]) -> None:
    for axis in given:
        if axis not in axes:
            raise PlanError(
                f"operator {name} has the axis '{axis}', which the mesh does not have; it has {_listed(axes)}"
            )
    for axis in axes:
        if axis not in given:
            raise PlanError(
                f"operator {name} has no entry for the mesh axis '{axis}'; write the dim that it "
                "splits, or none"
            )


def _check_place(plan: Plan, what: str, **numbers: int | None) -> None:
    if {number is not None for number in numbers.values()} != {plan.kind.placed}:
        given = " and ".join(f"{name} {number}" for name, number in numbers.items())
        raise PlanError(
            f"{what} has {given} in a {plan.kind.name}; operators and parameters have a device in "
            "placed plans and in no others"
        )


def _listed(axes: tuple[str, ...]) -> str:
    return ", ".join(axes) or "no axes"


_TENSOR = "tensor"


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a call's arguments as data, with shape and dtype for tensors; None if JSON cannot hold them."""
    try:
        return {"args": [_describe(a) for a in args], "kwargs": {k: _describe(v) for k, v in kwargs.items()}}
    except TypeError:
        return None


def _describe(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return {_TENSOR: list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    # JSON has no tuples, but a model may distinguish them from lists.
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
    """Return (args, kwargs) of a call that :func:`describe_call` wrote, with tensors of zeros.

    Raises:
        PlanError: the data is damaged.
    """
    try:
        return tuple(_example(a) for a in data["args"]), {k: _example(v) for k, v in data["kwargs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise PlanError(
            f"the plan's example call cannot be read ({type(error).__name__}: {error}); "
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


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class OnnxInfo(_Strict):
    """The options with which an ONNX file was read: :class:`tensoropt.question.model_source.OnnxOptions`."""

    dims: dict[str, int] = {}
    outputs: tuple[str, ...] = ()
    loss: str | None = None

    def options(self) -> OnnxOptions:
        return OnnxOptions.of(self.dims, self.outputs, self.loss)


def _known_optimizer(name: str) -> str:
    try:
        kind_of(name)
    except TensorOptError as error:
        raise ValueError(str(error)) from None
    return name


class ModelInfo(_Strict):
    """The identity of a model: its source, its operator graph's fingerprint, and its inputs' shapes.

    Attributes:
        parameters, trained: number of parameter elements, and of those that are trained; None if unknown.
        adapters: the kind of trained adapters, such as ``LoRA r16``; "" without any.
        call: shapes and dtypes of the example inputs, as :func:`describe_call` writes them.
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
    """The sizes and names of the mesh axes, outermost first.

    The first axis of a pipeline, :data:`STAGE_AXIS`, numbers its pipeline ranks. ``placed`` is whether the
    mesh is that of a placed plan: a row of devices, each of which runs operators or pieces of them.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    placed: bool = False

    @property
    def places(self) -> int:
        """The number of pipeline ranks; 1 without a pipeline."""
        return dict(zip(self.names, self.shape, strict=True)).get(STAGE_AXIS, 1)

    @property
    def label(self) -> str:
        """The mesh in words: ``2x4``, ``1`` for a single device, ``placed on 4``, or ``pp2x4``."""
        words = kind_on(self.names, placed=self.placed).mesh_words
        return words + ("x".join(map(str, self.shape)) or "1")


class OperatorPlan(_Strict):
    """How a group of operators is split, or in a placed plan on which device it runs.

    ``axes`` has the loop dim that each mesh axis splits, or ``none``, ``partial``, ...; ``micro`` the one
    that micro-batches split. In a placed plan, ``order`` and ``backward_order`` count from 0 the operators
    that the device runs before this one in forward and in backward.
    """

    axes: dict[str, str]
    micro: str
    members: tuple[str, ...] = ()
    device: int | None = Field(None, ge=0)
    order: int | None = Field(None, ge=0)
    backward_order: int | None = Field(None, ge=0)

    @property
    def position(self) -> str:
        """The operator's device and position in words; "" if it has none."""
        return "" if self.device is None else f"device {self.device}, position {self.order}"


class ParameterPlan(_Strict):
    """How a parameter is stored; in a placed plan, on which device.

    The first entry of ``stored`` is for micro-batches: ``held`` if the parameter is gathered once per step,
    ``held/P`` if its gradient is also reduced once, ``ahead`` if it is gathered while the previous block
    computes. The others are its placement on each mesh axis: ``S(n)`` (split along dim n), ``R`` (whole), or
    ``R/P`` (whole, with gradients that are partial sums).
    """

    key: str
    stored: tuple[str, ...] = ()
    device: int | None = Field(None, ge=0)


class TransferPlan(_Strict):
    """A tensor (or its gradient, if ``backward``) that device ``source`` sends to device ``target``."""

    value: str
    source: int = Field(ge=0)
    target: int = Field(ge=0)
    backward: bool = False


class StagePlan(_Strict):
    """The strategy of one stage, as :meth:`tensoropt.sharding.strategy.Strategy.to_data` writes it, without
    mesh.

    Attributes:
        begins: the name of the stage's first operator group; "" for the first stage.
        recomputed: the names of repeated blocks that run again in backward, wholly or in part.
        once: the names of operator groups in these blocks that do not run again.
        gathered_again: the names of tensors whose gathered copies are freed after use and gathered again in
            backward (:mod:`tensoropt.sharding.gathered_again`).
    """

    begins: str = ""
    groups: dict[str, tuple[str, ...]]
    hubs: dict[str, tuple[str, ...]]
    stored: dict[str, tuple[str, ...]]
    recomputed: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    gathered_again: tuple[str, ...] = ()


class StagesInfo(_Strict):
    """The stages of a pipeline with their schedule, or the pieces and transfers of a placed plan.

    In a pipeline, micro-batches pass through stages of several operators. In a placed plan, each device runs
    its operators in the order that their :class:`OperatorPlan` gives.

    Attributes:
        schedule: the name of the order in which micro-batches pass the stages; "" for a placed plan.
        again: the names of tensors that stages recompute instead of receiving them.
        stages: all stages in order, as many for each pipeline rank (first mesh axis) as the schedule gives;
            empty for a placed plan.
        splits: (loop dim, number of pieces) of operator groups that are cut into pieces.
        transfers: the transfers of one micro-batch in a placed plan, in an order common to all devices; a
            pipeline's follow from its stages.
        peak_bytes: peak memory in bytes of each device, or of one device of each pipeline rank.
        kinds: the device kinds of each pipeline rank, if they differ.
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
        """The first operator group of each stage but the first."""
        return tuple(stage.begins for stage in self.stages[1:])


def plan_kind(stages: StagesInfo | None) -> PlanKind:
    """Return the kind (sharded, pipeline or placed) of a plan with these stages."""
    if stages is None:
        return SHARDED
    return PIPELINED if stages.schedule else PLACED


class CollectiveCount(_Strict):
    """A predicted collective: its kind, mesh axes, size on one rank in bytes, and count per step."""

    kind: str
    axes: tuple[int, ...]
    bytes: int
    count: int


class Predicted(_Strict):
    """The predictions for one rank and one step, in bytes and seconds.

    ``memory_bytes`` and ``time_s`` are simulated. ``additive_memory_bytes`` and ``additive_time_s`` are the
    sums of costs by which the search ranked the plan. ``memory`` is the peak of tensors by kind, ``terms``
    the other memory of a GPU process; together they are ``memory_bytes``. ``communication_s`` is all
    communication, ``exposed_s`` the part for which the device waits. ``host_s`` is the host's time to issue
    the step; 0 if the host itself computes.
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

    @property
    def tensor_bytes(self) -> float:
        """The predicted memory of tensors alone, without the rest of the process, in bytes."""
        return self.memory_bytes - sum(self.terms.values())


class Plan(_Strict):
    """The content of a plan file.

    A plan without ``stages`` is sharded: one stage on the whole mesh. If ``stages`` has a schedule, the plan
    is a pipeline (:mod:`tensoropt.pipeline`), described in more detail there than in ``operators`` and
    ``parameters``. Otherwise each operator, or piece of one, runs on one device (:mod:`tensoropt.placement`):
    the mesh is the row of devices, memory is that of the fullest device, and times are those of the busiest.
    Recomputation is given as in :class:`StagePlan`.
    """

    # An alias, since pydantic's BaseModel has a method named schema.
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
        return prod(self.mesh.shape)

    @property
    def kind(self) -> PlanKind:
        """The plan's kind (sharded, pipeline or placed), with the words for it."""
        return plan_kind(self.stages)

    @property
    def info(self) -> StagesInfo:
        """The stages and schedule; an empty object for a plan of one stage."""
        return self.stages or StagesInfo()

    @property
    def place_of(self) -> dict[str, dict[str, str]]:
        """The number of each operator's stage (the first, if several) or device, as ``{"stage": "2"}``."""
        devices = {name: operator.device for name, operator in self.operators.items()}
        places = {name: {"device": str(device)} for name, device in devices.items() if device is not None}
        for number, stage in enumerate(self.info.stages):
            for name in stage.groups:
                places.setdefault(name, {STAGE_AXIS: str(number)})
        return places

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh axes that can split operators (in a pipeline, all but the first)."""
        return self.mesh.names[len(self.kind.first_axes) :]

    @property
    def compute_dtype(self) -> str:
        """The dtype of computation; bfloat16 is mixed precision (:mod:`tensoropt.capture.precision`)."""
        return str(self.settings.get("dtype", "float32"))

    def strategy_data(self) -> dict[str, Any]:
        """Return the strategy in the form that :meth:`tensoropt.sharding.strategy.Strategy.from_data` reads.

        Raises:
            PlanError: the plan is a pipeline or a placed plan.
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
            "once": list(self.once),
            "gathered_again": list(self.gathered_again),
        }

    def strategy(self, graph: Any) -> Any:
        """Return the plan's strategy for a model's graph of operator groups.

        Raises:
            PlanError: the plan was made for another model; the message names the first difference.
        """

        from tensoropt.sharding.strategy import Strategy

        # Before the fingerprint, whose error cannot name the operator that differs.
        strategy = Strategy.from_data(self.strategy_data(), graph)
        self.check_model(graph)
        return strategy

    def check_model(self, graph: Any) -> None:
        """Raise :class:`PlanError` unless the plan was made for the model of this group graph."""
        found = graph.atoms.graph.fingerprint
        if found != self.model.fingerprint:
            raise PlanError(
                f"the plan was made for {self.model.source} with other shapes, dtypes or code (fingerprint "
                f"{self.model.fingerprint[:12]}, this model has {found[:12]}); explore this model again"
            )

    def to_data(self) -> dict[str, Any]:
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


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in a file, after checking that its fields agree with each other.

    Raises:
        PlanError: there is no such file, or it is not a plan; the message names the first invalid field.
    """
    try:
        # Some editors write a byte-order mark before UTF-8.
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
            f"{path} is not a plan: line {error.lineno}: {error.msg}; the file may be incomplete: choose the "
            "plan again"
        ) from error
    # Numbers with thousands of digits, deeply nested lists, ...
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not a plan: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != _SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise PlanError(
            f"{path} is not a plan: its schema is {found!r}, not '{_SCHEMA}'; choose the plan again"
        )
    try:
        plan = Plan.model_validate(data)
        check_plan(plan)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PlanError(
            f"{path} is not a plan: {where}: {first['msg']}; if an earlier version wrote it, choose the "
            "point again"
        ) from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return plan
