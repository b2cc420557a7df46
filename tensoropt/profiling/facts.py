"""Facts: what a workload saves for backward, its FLOP, and its memory peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from torch.utils.flop_counter import flop_registry

from tensoropt.ops import registry


def flops_of(operator: Any) -> Any:
    """Return an operator's FLOP counter, with ``out_val`` as the last argument; None if not counted."""
    return registry.flops_of(operator._schema.name) or flop_registry.get(operator._overloadpacket)


class CallMemory(NamedTuple):
    """The bytes of one call of forward.

    Attributes:
        kept_bytes: the part of the workload's ``kept_bytes`` made so far.
        peak_bytes: the peak while it runs, of everything made inside.
        reads_parameter: whether it reads a parameter.
    """

    kept_bytes: int
    peak_bytes: int
    reads_parameter: bool


class CallWork(NamedTuple):
    """The work of one call of forward on a device.

    Attributes:
        forward_flops: multiply-adds counted as two.
        traffic_bytes: read and written by its operators, without views.
        outer_bytes: the traffic if the call were one kernel.
    """

    forward_flops: float
    traffic_bytes: int
    outer_bytes: int


class BackwardRun(NamedTuple):
    """Autograd nodes that run while the same gathered parameters may be alive.

    Attributes:
        reads: the parameters that they read.
        made: parameters with gradients made before.
        peak_bytes: the peak above ``kept_bytes``; negative if much of these is freed before.
        begin_bytes: the bytes above ``kept_bytes`` at its beginning.
    """

    reads: tuple[str, ...]
    made: tuple[str, ...]
    peak_bytes: int
    begin_bytes: int = 0


class SplitFacts(NamedTuple):
    """A workload's memory in a split backward, in bytes of one rank and micro-batch.

    Attributes:
        inputs_bytes: the peak while gradients of reads are made, above ``kept_bytes``.
        waiting_bytes: gradients of results needed for those of parameters.
        released_bytes: the part of ``kept_bytes`` needed only after the last operator with a parameter.
        weights_bytes: the peak while parameters' gradients are made, above saved and waiting bytes.
    """

    inputs_bytes: int = 0
    waiting_bytes: int = 0
    released_bytes: int = 0
    weights_bytes: int = 0


@dataclass(frozen=True)
class Facts:
    """The facts of one workload: bytes and FLOP of one rank and one micro-batch.

    Attributes:
        kept_bytes: made inside and saved for backward.
        reads_kept: reads that backward needs.
        free_kept: inputs, constants and buffers that backward needs unchanged.
        lies_in_free: result that is a view of one of these -> that tensor.
        writes_kept: results whose storage is part of ``kept_bytes``.
        parameters_kept: parameter -> saved tensors in its storage (each a gather under ZeRO).
        forward_flops, backward_flops: multiply-adds counted as two.
        traffic_bytes: read and written in forward, without views.
        forward_peak_bytes, backward_peak_bytes: the peaks of what was made inside, above ``kept_bytes``; with
            incoming gradients, without parameters' gradients already in buckets.
        forward_parameters_peak_bytes, backward_parameters_peak_bytes: the same while a parameter is read.
        backward_runs: the parts of backward in which gathered parameters may be alive.
        calls: the memory of each call of forward.
        work_of_calls: FLOP and traffic of each call of forward; empty in older records.
        lies_in: result that is a view -> the read or earlier result whose storage it shares.
        extents: result -> bytes of its storage if they differ: of a larger tensor, or 0 for views of stored
            data.
        gradient_extents: read -> bytes of its gradient's storage if they differ.
        same_gradients: reads whose gradients are one tensor, as those of a sum without broadcasting.
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
    backward_parameters_peak_bytes: int
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
        """Return the facts of a record, also after JSON, with lists for tuples."""
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
