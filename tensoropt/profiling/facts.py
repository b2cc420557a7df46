"""The facts of a workload (one rank's work for one group): saved tensors, FLOP, traffic, memory peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from torch.utils.flop_counter import flop_registry

from tensoropt.ops import registry


def flops_of(operator: Any) -> Any:
    """Return the function that counts an operator's FLOP, given its arguments and ``out_val``, or None."""
    return registry.flops_of(operator._schema.name) or flop_registry.get(operator._overloadpacket)


class CallMemory(NamedTuple):
    """The memory of one call of forward, in bytes.

    Attributes:
        kept_bytes: the size of what the workload has saved for backward up to the end of this call.
        peak_bytes: the peak, while the call runs, of all tensors made inside the workload.
        reads_parameter: whether the call reads a parameter.
    """

    kept_bytes: int
    peak_bytes: int
    reads_parameter: bool


class CallWork(NamedTuple):
    """The FLOP and memory traffic of one call of forward on a device.

    Attributes:
        forward_flops: the FLOP, a multiply-add counted as two.
        traffic_bytes: the bytes read and written by its operators, without views.
        outer_bytes: the bytes read and written if the call were one kernel.
    """

    forward_flops: float
    traffic_bytes: int
    outer_bytes: int


class BackwardRun(NamedTuple):
    """A part of backward in which the same gathered (unsharded) parameters may be in memory.

    Attributes:
        reads: the parameters that its autograd nodes read.
        made: the parameters whose gradients were made earlier.
        peak_bytes: the peak of memory above the workload's ``kept_bytes``; negative if most saved tensors are
            freed before.
        begin_bytes: the memory above ``kept_bytes`` at the beginning of the part.
    """

    reads: tuple[str, ...]
    made: tuple[str, ...]
    peak_bytes: int
    begin_bytes: int = 0


class SplitFacts(NamedTuple):
    """The memory in bytes of a workload whose backward makes gradients of inputs first, of parameters later.

    Attributes:
        inputs_bytes: the peak while gradients of inputs are made, above ``kept_bytes``.
        waiting_bytes: the size of what is stored until the parameters' gradients are made.
        released_bytes: the part of ``kept_bytes`` that is freed by the time the gradients of inputs are made,
            if no later workload keeps the autograd graph alive.
        weights_bytes: the peak while parameters' gradients are made, above ``kept_bytes`` and
            ``waiting_bytes``.
    """

    inputs_bytes: int = 0
    waiting_bytes: int = 0
    released_bytes: int = 0
    weights_bytes: int = 0


@dataclass(frozen=True)
class Facts:
    """The facts of one workload: sizes in bytes, and FLOP, of one rank and one micro-batch.

    Attributes:
        kept_bytes: the size of the tensors made inside the workload that autograd saves for backward.
        reads_kept: the activations read from other groups that backward needs.
        free_kept: the model inputs, constants and buffers that backward needs unchanged.
        lies_in_free: result that is a view of a model input, constant or buffer -> that tensor.
        writes_kept: results whose storage is part of ``kept_bytes``.
        parameters_kept: parameter -> number of saved tensors in its storage (each a gather under ZeRO).
        forward_flops, backward_flops: the FLOP, a multiply-add counted as two.
        traffic_bytes: the bytes read and written in forward, without views.
        forward_peak_bytes, backward_peak_bytes: the peaks of tensors made inside, above ``kept_bytes``, with
            incoming gradients, but without the parameters' gradients that are already in buckets.
        forward_parameters_peak_bytes: the peak of forward, only over the time in which a parameter is read.
        backward_runs: the parts of backward in which gathered parameters may be alive.
        calls: the memory of each call of forward.
        work_of_calls: the FLOP and traffic of each call of forward; empty in older records.
        lies_in: result that is a view -> the input or earlier result whose storage it shares.
        extents: result -> size of its storage in bytes, if that is not the result's own size: larger if a
            larger tensor is behind it, 0 for views of parameters and constants.
        gradient_extents: input -> size of its gradient's storage in bytes, if that is not the input's size.
        same_gradients: sets of inputs whose gradients are one tensor, as those of a sum without broadcasting.
    """

    kept_bytes: int
    reads_kept: tuple[str, ...]
    writes_kept: tuple[str, ...]
    parameters_kept: Mapping[str, int]
    forward_flops: float
    backward_flops: float
    traffic_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward_parameters_peak_bytes: int
    backward_runs: tuple[BackwardRun, ...] = ()
    calls: tuple[CallMemory, ...] = ()
    work_of_calls: tuple[CallWork, ...] = ()
    lies_in: Mapping[str, str] = field(default_factory=dict)
    extents: Mapping[str, int] = field(default_factory=dict)
    gradient_extents: Mapping[str, int] = field(default_factory=dict)
    same_gradients: tuple[tuple[str, ...], ...] = ()
    free_kept: tuple[str, ...] = ()
    lies_in_free: Mapping[str, str] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        # Field names are keys of stored records: renaming a field requires a new costs.timings.FACTS.
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Facts:
        """Return the facts of a stored record; a record read from JSON has lists in place of tuples."""
        # Records that were stored earlier have more fields.
        data = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        data["reads_kept"], data["writes_kept"] = tuple(data["reads_kept"]), tuple(data["writes_kept"])
        # Explorations that were saved before this field existed lack it.
        data["free_kept"] = tuple(data.get("free_kept", ()))
        data["same_gradients"] = tuple(map(tuple, data.get("same_gradients", ())))
        data["calls"] = tuple(CallMemory(kept, peak, bool(reads)) for kept, peak, reads in data["calls"])
        # Explorations that were saved before this field existed lack it.
        data["work_of_calls"] = tuple(CallWork(*each) for each in data.get("work_of_calls", ()))
        data["backward_runs"] = tuple(
            # Stored earlier: each size also without the gradients that come in.
            BackwardRun(tuple(reads), tuple(made), *(sizes if len(sizes) == 2 else sizes[::2]))
            for reads, made, *sizes in data["backward_runs"]
        )
        return cls(**data)
