"""Facts: what a workload keeps for backward, how much it computes, how high it peaks, without a clock.

:mod:`tensoropt.profiling.fact_finding` finds them; the store and saved explorations keep them as records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class CallMemory(NamedTuple):
    """Bytes of one call of the forward.

    Attributes:
        kept_bytes: what it and those before it made of the workload's ``kept_bytes``.
        peak_bytes: the most alive while it runs, all that was made inside included.
        reads_parameter: whether it reads one, which is gathered then.
    """

    kept_bytes: int
    peak_bytes: int
    reads_parameter: bool


class CallWork(NamedTuple):
    """What one call of the forward takes of a device.

    Attributes:
        forward_flops: multiply-adds counted as two.
        traffic_bytes: operands read and results written by the operators that it is made of, views left out.
        outer_bytes: the same of the call itself, were it one kernel.
    """

    forward_flops: float
    traffic_bytes: int
    outer_bytes: int


class BackwardRun(NamedTuple):
    """Nodes of autograd's that run while the same gathered parameters may be there.

    Attributes:
        reads: the parameters that they read.
        made: those whose gradients were made before.
        peak_bytes: the most alive meanwhile, above ``kept_bytes``.
        own_peak_bytes: the same where the incoming gradients are somebody else's, who counts them.
    """

    reads: tuple[str, ...]
    made: tuple[str, ...]
    peak_bytes: int
    own_peak_bytes: int


@dataclass(frozen=True)
class Facts:
    """Facts of one workload, bytes and FLOP of one rank and one micro-batch.

    Attributes:
        kept_bytes: made inside and kept for backward.
        reads_kept: reads that backward needs.
        free_kept: inputs of the model, constants and buffers that backward needs, as they are.
        lies_in_free: result that is a view of one of these -> which.
        writes_kept: results whose storage is among ``kept_bytes`` already.
        parameters_kept: parameter -> how many saved tensors lie in it (each is a gather under ZeRO).
        forward_flops, backward_flops: multiply-adds counted as two.
        traffic_bytes: operands read and results written, forward, views left out.
        forward_peak_bytes, backward_peak_bytes: the most that is alive of what was made inside, above
            ``kept_bytes``. Backward counts the incoming gradients, which go as they are used up, and not
            the gradients of parameters once they are added to their buckets.
        forward_parameters_peak_bytes, backward_parameters_peak_bytes: the same while a call, or a node of
            autograd's, that reads a parameter runs; gathered parameters are there only then.
        handed_peak_bytes, handed_parameters_peak_bytes: of backward where the incoming gradients are
            somebody else's too, who counts them.
        backward_runs: the parts of backward in which gathered parameters may be there.
        calls: memory per call of the forward.
        work_of_calls: FLOP and traffic per call of the forward; empty where nobody asked.
        lies_in: result that is a view -> the read, or the earlier result, in whose storage it lies.
        extents: result -> bytes of its storage where these are not its own: the larger one of which it is
            a view, 0 for a view of a parameter, an input or a constant.
        hands_on: read -> the result in whose gradient its own gradient lies (a sum hands it to every
            operand, a concatenation slices of it), or the earlier read with whose gradient it shares a
            storage.
        gradient_extents: read -> bytes of its gradient's storage where these are not its own.
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
    handed_peak_bytes: int = 0
    handed_parameters_peak_bytes: int = 0
    backward_runs: tuple[BackwardRun, ...] = ()
    calls: tuple[CallMemory, ...] = ()
    work_of_calls: tuple[CallWork, ...] = ()
    lies_in: Mapping[str, str] = field(default_factory=dict)
    extents: Mapping[str, int] = field(default_factory=dict)
    hands_on: Mapping[str, str] = field(default_factory=dict)
    gradient_extents: Mapping[str, int] = field(default_factory=dict)
    free_kept: tuple[str, ...] = ()
    lies_in_free: Mapping[str, str] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """Plain data, read back by :meth:`from_record`."""
        # Field names are keys of stored records: a field that is renamed needs a new costs.source.FACTS.
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Facts:
        """The facts of a record, also of one that was JSON meanwhile, where tuples became lists."""
        data = dict(record)
        data["reads_kept"], data["writes_kept"] = tuple(data["reads_kept"]), tuple(data["writes_kept"])
        # Explorations that were saved before this was known lack it.
        data["free_kept"] = tuple(data.get("free_kept", ()))
        data["calls"] = tuple(CallMemory(kept, peak, bool(reads)) for kept, peak, reads in data["calls"])
        # Explorations that were saved before this was known lack it.
        data["work_of_calls"] = tuple(CallWork(*each) for each in data.get("work_of_calls", ()))
        data["backward_runs"] = tuple(
            BackwardRun(tuple(reads), tuple(made), most, own)
            for reads, made, most, own in data["backward_runs"]
        )
        return cls(**data)
