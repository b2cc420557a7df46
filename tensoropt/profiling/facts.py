"""Facts: what a workload keeps for backward, how much it computes, and its memory peaks, without a clock.

:mod:`tensoropt.profiling.fact_finding` determines them; the store and saved explorations keep them as
records. The FLOP of operators are PyTorch's counts, and our own where PyTorch has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch.utils.flop_counter import flop_registry

from tensoropt.ops import registry


def flops_of(operator: Any) -> Any:
    """Return the function that counts an operator's FLOP, called with its arguments and ``out_val``; None if
    its FLOP are not counted."""
    return registry.flops_of(operator._schema.name) or flop_registry.get(operator._overloadpacket)


class CallMemory(NamedTuple):
    """The bytes of one call of the forward.

    Attributes:
        kept_bytes: the part of the workload's ``kept_bytes`` made by this call and those before it.
        peak_bytes: the peak while it runs, including everything that was made inside.
        reads_parameter: whether it reads a parameter, which is gathered at that time.
    """

    kept_bytes: int
    peak_bytes: int
    reads_parameter: bool


class CallWork(NamedTuple):
    """The work of one call of the forward on a device.

    Attributes:
        forward_flops: multiply-adds counted as two.
        traffic_bytes: operands read and results written by the operators that it consists of, without views.
        outer_bytes: the same for the call itself, as one kernel.
    """

    forward_flops: float
    traffic_bytes: int
    outer_bytes: int


class BackwardRun(NamedTuple):
    """Autograd nodes that run while the same gathered parameters may be alive.

    Attributes:
        reads: the parameters that they read.
        made: the parameters whose gradients were made before.
        peak_bytes: the peak during the run, above ``kept_bytes``; less than 0 if much of these has been
            released before.
        own_peak_bytes: the same if the incoming gradients belong to another owner, which counts them.
        begin_bytes, own_begin_bytes: the same when it begins: as the last of ``reads`` is gathered.
    """

    reads: tuple[str, ...]
    made: tuple[str, ...]
    peak_bytes: int
    own_peak_bytes: int
    begin_bytes: int = 0
    own_begin_bytes: int = 0


class SplitFacts(NamedTuple):
    """The memory of one workload whose backward is taken apart: first the gradients of what it reads, later
    those of its parameters; bytes of one rank and one micro-batch.

    Attributes:
        inputs_bytes: the most that is alive while the gradients of reads are made, above ``kept_bytes``, none
            of which is released meanwhile.
        own_inputs_bytes: the same if the incoming gradients belong to another owner, which counts them.
        waiting_bytes: the gradients of results that wait for those of parameters to be made from them.
        waiting_results: the results whose incoming gradients are among these.
        released_bytes: the part of ``kept_bytes`` that only operators behind the last one with a parameter
            need; it is released if no later workload has any.
        weights_bytes: the most that is alive while the gradients of parameters are made, above what is kept
            and waits.
        used_bytes: the part of ``kept_bytes`` that is released as these gradients are made.
        reads_used: the kept reads that are released then, as far as this workload is concerned.
    """

    inputs_bytes: int = 0
    own_inputs_bytes: int = 0
    waiting_bytes: int = 0
    waiting_results: tuple[str, ...] = ()
    released_bytes: int = 0
    weights_bytes: int = 0
    used_bytes: int = 0
    reads_used: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The facts of one workload: bytes and FLOP of one rank and one micro-batch.

    Attributes:
        kept_bytes: bytes made inside and kept for backward.
        reads_kept: reads that backward needs.
        free_kept: inputs of the model, constants and buffers that backward needs, unchanged.
        lies_in_free: result that is a view of one of these -> that tensor.
        writes_kept: results whose storage is already part of ``kept_bytes``.
        parameters_kept: parameter -> the number of saved tensors in its storage (each is a gather under
            ZeRO).
        forward_flops, backward_flops: multiply-adds counted as two.
        traffic_bytes: operands read and results written in forward, without views.
        forward_peak_bytes, backward_peak_bytes: the most that is alive of what was made inside, above
            ``kept_bytes``. Backward counts the incoming gradients, which are freed as they are used up, and
            not the gradients of parameters once they have been added to their buckets.
        forward_parameters_peak_bytes, backward_parameters_peak_bytes: the same while a call, or an autograd
            node, that reads a parameter runs; gathered parameters are alive only then.
        handed_peak_bytes, handed_parameters_peak_bytes: those of backward if the incoming gradients also
            belong to another owner, which counts them.
        backward_runs: the parts of backward in which gathered parameters may be alive.
        calls: the memory of each call of the forward.
        work_of_calls: FLOP and traffic of each call of the forward; empty if they were not requested.
        lies_in: result that is a view -> the read, or the earlier result, whose storage it shares.
        extents: result -> bytes of its storage if they are not its own: those of the larger tensor of which
            it is a view, 0 for a view of a parameter, an input or a constant.
        hands_on: read -> the result in whose gradient its own gradient lies (a sum passes it to every
            operand, a concatenation passes slices of it), or the earlier read with whose gradient it shares a
            storage.
        gradient_extents: read -> bytes of its gradient's storage if they are not its own.
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
        """Return plain data, which :meth:`from_record` reads back."""
        # Field names are keys of stored records: renaming a field requires a new costs.timings.FACTS.
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Facts:
        """Return the facts of a record, even of one that has been through JSON, which turns tuples into
        lists."""
        data = dict(record)
        data["reads_kept"], data["writes_kept"] = tuple(data["reads_kept"]), tuple(data["writes_kept"])
        # Explorations that were saved before this field existed lack it.
        data["free_kept"] = tuple(data.get("free_kept", ()))
        data["calls"] = tuple(CallMemory(kept, peak, bool(reads)) for kept, peak, reads in data["calls"])
        # Explorations that were saved before this field existed lack it.
        data["work_of_calls"] = tuple(CallWork(*each) for each in data.get("work_of_calls", ()))
        data["backward_runs"] = tuple(
            BackwardRun(tuple(reads), tuple(made), *sizes) for reads, made, *sizes in data["backward_runs"]
        )
        return cls(**data)
