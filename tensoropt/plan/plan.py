"""A plan: a strategy written down with all that is needed to run it again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from tensoropt.errors import PlanError
from tensoropt.files import write_text
from tensoropt.plan.facts_table import Shown, described, facts_text
from tensoropt.plan.model_source import OnnxOptions
from tensoropt.plan.plan_checks import STAGE_AXIS as STAGE_AXIS
from tensoropt.plan.plan_checks import check_plan, no_constant, pairs_once

SCHEMA = "tensoropt.plan/1"
PIPELINED_SCHEMA = "tensoropt.plan/2"
"""Of plans with a pipeline, which earlier versions cannot run; others stay readable by them."""
PLACED_MICRO_SCHEMA = "tensoropt.plan/3"
"""Of placed plans of several micro-batches, which earlier versions would run as one batch."""
SCHEMAS = (SCHEMA, PIPELINED_SCHEMA, PLACED_MICRO_SCHEMA)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class OnnxInfo(_Strict):
    """How an ONNX file was opened: :class:`tensoropt.plan.model_source.OnnxOptions`."""

    dims: dict[str, int] = {}
    outputs: tuple[str, ...] = ()
    loss: str | None = None

    def options(self) -> OnnxOptions:
        """The same as the importer takes it."""
        return OnnxOptions.of(self.dims, self.outputs, self.loss)


class ModelInfo(_Strict):
    """Which model: where it comes from, a fingerprint of its operator graph, and the shapes it is called
    with (:mod:`tensoropt.plan.call`)."""

    source: str
    fingerprint: str
    mode: Literal["train", "inference"] = "train"
    seed: int = 0
    parameters: int = Field(0, ge=0)
    batch: int | None = None
    call: dict[str, Any] | None = None
    onnx: OnnxInfo | None = None


class MeshInfo(_Strict):
    """Sizes and names of the mesh axes, outermost first; ``placed``: no mesh, but devices in a row. A
    pipeline is the first axis, called :data:`STAGE_AXIS`."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    placed: bool = False

    @property
    def label(self) -> str:
        """``2x4``, ``1`` for a single device, ``placed on 4``, or ``pp2x4``."""
        sizes = "x".join(map(str, self.shape)) or "1"
        if self.names[:1] == (STAGE_AXIS,):
            return f"pp{sizes}"
        return f"placed on {sizes}" if self.placed else sizes


class OperatorPlan(_Strict):
    """What an operator's group does: per mesh axis the loop dim it splits (``none``, ``partial``, ...).

    In a placed plan instead: its device, and its position in that device's forward and backward order.
    """

    axes: dict[str, str]
    micro: str
    members: tuple[str, ...] = ()
    device: int | None = Field(None, ge=0)
    order: int | None = Field(None, ge=0)
    backward_order: int | None = Field(None, ge=0)


class ParameterPlan(_Strict):
    """Stored placement of a parameter, per axis (micro-batches first): ``S(n)``, ``R`` or ``R/P``; the first
    is ``held`` where a gathered copy serves the whole step, ``held/P`` where its gradient waits beside it,
    ``ahead`` where it is gathered while the block before its own computes; in
    a placed plan the device it lies on."""

    key: str
    stored: tuple[str, ...] = ()
    device: int | None = Field(None, ge=0)


class TransferPlan(_Strict):
    """A tensor, or with ``backward`` its gradient, sent from one device to another."""

    value: str
    source: int = Field(ge=0)
    target: int = Field(ge=0)
    backward: bool = False


class PlacedInfo(_Strict):
    """What a placed plan says beside its operators' devices.

    Attributes:
        splits: group -> (loop dim, number of pieces).
        transfers: of one micro-batch, in the one order in which all devices take part in them.
        peak_bytes: per device.
    """

    splits: dict[str, tuple[str, int]] = {}
    transfers: tuple[TransferPlan, ...] = ()
    peak_bytes: tuple[float, ...] = ()


class StagePlan(_Strict):
    """The strategy of one stage, as :func:`tensoropt.sharding.serialise.strategy_to_dict` writes it, without
    its mesh.

    Attributes:
        begins: the operator group with which it begins; "" of the first.
    """

    begins: str = ""
    groups: dict[str, tuple[str, ...]]
    hubs: dict[str, tuple[str, ...]]
    stored: dict[str, tuple[str, ...]]
    recomputed: tuple[str, ...] = ()


class PipelineInfo(_Strict):
    """What a plan with a pipeline says beside its operators.

    Attributes:
        schedule: the order in which micro-batches pass the stages.
        again: tensors that stages make for themselves instead of receiving them.
        stages: in order; the parts of the devices are the first axis of the plan's mesh, and have as many
            stages each as the schedule gives them.
        peak_bytes: per part, of one of its ranks.
        kinds: per part the names of its kinds of devices; only where parts differ in them.
    """

    schedule: str
    again: tuple[str, ...] = ()
    stages: tuple[StagePlan, ...]
    peak_bytes: tuple[float, ...] = ()
    kinds: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_empty_kinds(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Left out where there are none, so that versions that know none of them read such plans.
        data: dict[str, Any] = write(self)
        return data if self.kinds else {name: value for name, value in data.items() if name != "kinds"}


class CollectiveCount(_Strict):
    """A predicted collective: kind, mesh axes, bytes on one rank, how often per step."""

    kind: str
    axes: tuple[int, ...]
    bytes: int
    count: int


class Predicted(_Strict):
    """What the cost tables and the simulator say. Bytes and seconds of one rank and one step.

    ``memory_bytes`` and ``time_s`` are what the simulator found; ``additive_memory_bytes`` and
    ``additive_time_s`` what the search added up. ``memory`` splits the peak of tensors by kind, ``terms``
    names what a process takes beside them (on GPUs); together they are ``memory_bytes``. ``allocator`` holds
    peaks of PyTorch's allocator where these are counted (:mod:`tensoropt.simulate.allocations`).
    ``communication_s`` is all of it, ``exposed_s`` what is waited for. ``host_s`` is what issuing all of it
    takes the host, where that is not the device.
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
    allocator: dict[str, float] = {}
    sources: dict[str, float] = {}
    collectives: tuple[CollectiveCount, ...] = ()
    exact: bool = True
    gap: float | None = 0.0

    @property
    def tensor_bytes(self) -> float:
        """Of the memory what tensors take, as a tracker of tensors sees it."""
        return self.memory_bytes - sum(self.terms.values())


class Plan(Shown, _Strict):
    """One plan file; see the field types for shapes and units.

    ``recomputed`` names repeated blocks whose forward runs again in backward. A plan with ``placed`` puts
    every operator, or piece of one, on one device (:mod:`tensoropt.placement`); its mesh is the row of
    devices, and its figures are those of the fullest device. One with ``pipeline`` cuts the model into stages
    (:mod:`tensoropt.pipeline`), of which it says more there than ``operators`` and ``parameters`` do.
    """

    # An alias, since pydantic's BaseModel has a method called schema.
    schema_: Literal["tensoropt.plan/1", "tensoropt.plan/2", "tensoropt.plan/3"] = Field(
        "tensoropt.plan/1", alias="schema"
    )
    planner: str
    model: ModelInfo
    cluster: dict[str, Any]
    mesh: MeshInfo
    micro_batches: int = Field(ge=1)
    optimizer: Literal["sgd", "momentum", "adam", "adam_fused"]
    operators: dict[str, OperatorPlan]
    hubs: dict[str, tuple[str, ...]]
    parameters: dict[str, ParameterPlan]
    recomputed: tuple[str, ...] = ()
    placed: PlacedInfo | None = None
    pipeline: PipelineInfo | None = None
    predicted: Predicted
    settings: dict[str, Any] = {}
    versions: dict[str, str] = {}

    @property
    def devices(self) -> int:
        """How many devices, and so ranks, the plan runs on."""
        count = 1
        for size in self.mesh.shape:
            count *= size
        return count

    @property
    def model_source(self) -> str:
        """Where the model comes from, as :func:`~tensoropt.plan.model_source.load_model` takes it."""
        return self.model.source

    @property
    def seed(self) -> int:
        """The seed of the model's weights."""
        return self.model.seed

    @property
    def compute_dtype(self) -> str:
        """``bfloat16`` for mixed precision; see :mod:`tensoropt.capture.precision`."""
        return str(self.settings.get("dtype", "float32"))

    def strategy_data(self) -> dict[str, Any]:
        """The strategy as :func:`tensoropt.sharding.serialise.strategy_from_dict` reads it.

        Raises:
            PlanError: the plan is placed or has a pipeline, and no one strategy on a mesh.
        """
        self._check_sharded()
        return {
            "mesh": [self.micro_batches, *self.mesh.shape],
            "groups": {
                name: [op.micro, *(op.axes[axis] for axis in self.mesh.names)]
                for name, op in self.operators.items()
            },
            "hubs": {name: list(layout) for name, layout in self.hubs.items()},
            "stored": {name: list(p.stored) for name, p in self.parameters.items()},
            "recomputed": list(self.recomputed),
        }

    def strategy(self, graph: Any) -> Any:
        """The strategy of this plan for a grouped graph.

        Raises:
            PlanError: the plan is for another model; names the first difference.
        """
        from tensoropt.sharding.serialise import strategy_from_dict

        # Before the fingerprint: its errors name the operator that differs, a fingerprint only says that one
        # does.
        strategy = strategy_from_dict(self.strategy_data(), graph)
        self.check_model(graph)
        return strategy

    def _check_sharded(self) -> None:
        if self.pipeline is not None:
            raise PlanError(
                f"this plan of {self.planner} cuts the model into stages, each of which has a strategy of "
                "its own"
            )
        if self.placed is not None:
            raise PlanError(
                f"this is a placed plan of {self.planner}: its operators lie on one device each, so that it "
                "has no strategy on a mesh"
            )

    def check_model(self, graph: Any) -> None:
        """Raise :class:`PlanError` unless the plan was made for this grouped graph's model."""
        found = graph.atoms.graph.fingerprint
        if found != self.model.fingerprint:
            raise PlanError(
                f"the plan was made for {self.model.source} with other shapes, dtypes or code (fingerprint "
                f"{self.model.fingerprint[:12]}, this model has {found[:12]}); explore this model again"
            )

    def to_data(self) -> dict[str, Any]:
        """The plan as plain data, as a plan file has it."""
        # Without the field where there is no pipeline, so that earlier versions read such plans.
        left_out = {"pipeline"} if self.pipeline is None else set()
        return self.model_dump(by_alias=True, mode="json", exclude=left_out)

    def to_json(self) -> str:
        """The content of a plan file."""
        return json.dumps(self.to_data(), indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan; an existing file is replaced only when the new one is whole."""
        write_text(path, self.to_json())

    def __repr__(self) -> str:
        return facts_text(*described(self))

    __str__ = __repr__  # pydantic's own would list every field


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan of a file, checked.

    Raises:
        PlanError: there is no such file, or it is not a plan; names the first field that is wrong.
    """
    try:
        # Editors on some systems put a mark of the byte order before UTF-8.
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else None
        if why is not None:
            raise PlanError(f"{path} is not a plan: {why}") from error
        raise PlanError(
            f"cannot read the plan {path}: {getattr(error, 'strerror', None) or error}; give a plan.json"
        ) from error
    try:
        data = json.loads(text, object_pairs_hook=pairs_once, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{path} is not a plan: line {error.lineno}: {error.msg}; is the file whole? choose the plan "
            "again"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists in lists in ...
        raise PlanError(f"{path} is not a plan: {error}") from error
    except PlanError as error:
        raise PlanError(f"{path} is not a plan: {error}") from error
    if not isinstance(data, dict) or data.get("schema") not in SCHEMAS:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        known = " or ".join(f"'{schema}'" for schema in SCHEMAS)
        raise PlanError(f"{path} is not a plan: its schema is {found!r}, not {known}")
    try:
        plan = Plan.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PlanError(f"{path} is not a plan: {where}: {first['msg']}") from error
    try:
        check_plan(plan)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return plan
