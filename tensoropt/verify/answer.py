"""The report of ``verify``: predictions beside measurements, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensoropt.sharding.strategy import ParallelStrategy
from tensoropt.verify import recorder
from tensoropt.verify.findings import Differences, RunFindings, within_tolerance
from tensoropt.verify.onnx_file import FileFindings
from tensoropt.verify.predict import Place, Prediction
from tensoropt.verify.reference import ModuleFindings

_MOST_MEMORY = 1.03
"""The largest allowed ratio of tracked to predicted memory. Correct predictions are off by at most 2.3 %."""
_UNCOUNTED_BYTES = 4096
"""The additional memory allowed for scalars (losses, step counters), of which up to 2,652 bytes were seen."""


def answer_of(
    strategies: Sequence[ParallelStrategy],
    predictions: Sequence[Prediction],
    findings: Sequence[RunFindings],
    place: Place,
    module: ModuleFindings | None,
    file: FileFindings | None = None,
    device_type: str = "cpu",
) -> dict[str, Any]:
    """Return the report of predicted and checked strategies, as plain data with fixed keys.

    Args:
        device_type: the device type of the predictions.
        module: the comparison of the captured graph with its PyTorch module, if made.
        file: the comparison of an ONNX file with its import, if any.

    Returns:
        ``ok``; ``checked_on`` in words; ``plans``, a list of :func:`entry_of`; ``module``; and ``file``.
    """
    plans = [
        entry_of(strategy, predicted, found, compares_memory=place.keeps_as_predicted(strategy, device_type))
        for strategy, predicted, found in zip(strategies, predictions, findings, strict=True)
    ]
    faithful = module is None or module.ok
    return {
        "ok": faithful and (file is None or file.ok) and all(p["ok"] for p in plans),
        "checked_on": place.text,
        "plans": plans,
        "module": None if module is None else _module_data(module),
        "file": None if file is None else {"difference": file.difference, "ok": file.ok, "why": file.why},
    }


def entry_of(
    strategy: ParallelStrategy, predicted: Prediction, findings: RunFindings, *, compares_memory: bool = True
) -> dict[str, Any]:
    """Return the report of one strategy; None stands for what was not checked.

    Its ``ok`` follows the rules of :mod:`tensoropt.verify`.

    Args:
        compares_memory: whether the checked ranks' kernels save the same tensors as the predicted devices'.
    """
    issued = _shown(findings.collectives_issued)
    expected = predicted.collectives
    if predicted.of_ranks:
        issued = _together(map(_shown, findings.collectives_of_ranks))
        expected = _together(predicted.of_ranks[rank] for rank in findings.ranks_checked)
    # A failed strategy did not issue all collectives; its error says more than a list of missing ones.
    unlike = [] if findings.error else _unlike(strategy, predicted, findings)
    order_unlike = findings.ranks_unlike
    compares_memory = compares_memory and not findings.error and bool(findings.memory_tracked_of_ranks)
    memory_unlike = _memory_unlike(strategy, predicted, findings) if compares_memory else None
    wrong = findings.error or unlike or order_unlike or memory_unlike
    return {
        # None passes: fake ranks compute no numbers.
        "ok": findings.numerics_ok is not False and not wrong,
        "mesh": strategy.mesh_text,
        "micro_batches": strategy.micro_batches,
        "schedule": strategy.schedule or None,
        "loss_difference": findings.differences.loss,
        "gradient_difference": findings.differences.gradient,
        "worst_gradient": findings.worst_gradient,
        "parameter_difference": findings.differences.parameter,
        "worst_parameter": findings.worst_parameter,
        "buffer_difference": findings.differences.buffer,
        "not_finite": dict(findings.not_finite),
        "replicas_agree": findings.replicas_agree,
        "replica_difference": findings.replica_difference,
        "unsplit_on": findings.unsplit_on,
        "compared_in": findings.compared_in,
        "narrow": None if findings.narrow is None else _differences_data(findings.narrow),
        "ranks_checked": findings.ranks_checked,
        "memory_tracked_bytes": findings.memory_tracked_bytes,
        "memory_allocated_bytes": findings.memory_tracked.get("allocated"),
        "memory_reserved_bytes": findings.memory_tracked.get("reserved"),
        "memory_tracked": dict(findings.memory_tracked),
        "memory_tracked_of_ranks": findings.memory_tracked_of_ranks,
        "time_measured_s": findings.time_measured_s,
        "error": findings.error,
        "collectives_predicted": expected,
        "collectives_issued": issued,
        "collectives_unlike": unlike,
        "collectives_in_order": None if findings.error else not order_unlike,
        "order_unlike": order_unlike,
        "memory_unlike": memory_unlike,
        "memory_predicted_bytes": round(predicted.memory_bytes),
        "memory_predicted_of_places": [round(size) for size in predicted.of_places],
        "time_predicted_s": predicted.time_s,
    }


def _shown(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "axes": recorder.shown_axes(row)} for row in rows]


def _together(of_ranks: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    return recorder.rows_of(recorder.counted(row for rows in of_ranks for row in rows))


def _unlike(strategy: ParallelStrategy, predicted: Prediction, findings: RunFindings) -> list[str]:
    """Return differences between predicted and issued collectives, for one rank in each device group."""
    lines: dict[int, list[str]] = {}
    # Bytes that depend on values are compared on fake ranks only, which send the expected number.
    shown = recorder.without_values if findings.numerics_ok is not None else list
    size = _ranks_of_a_place(strategy, predicted)
    for rank, rows in zip(findings.ranks_checked, findings.collectives_of_ranks, strict=True):
        # The first rank of each device group has the largest shards, for which collectives are predicted.
        # On other ranks collectives of uneven shards are smaller.
        compare = recorder.compare_smaller if rank % size else recorder.compare_collectives
        if not lines.get(rank // size):
            differences = compare(shown(predicted.sent_by(rank)), shown(_shown(rows)))
            lines[rank // size] = [f"rank {rank}: {line}" for line in differences]
    return [line for of_place in lines.values() for line in of_place]


def _ranks_of_a_place(strategy: ParallelStrategy, predicted: Prediction) -> int:
    return strategy.devices // max(len(predicted.of_places), 1)


def _memory_unlike(strategy: ParallelStrategy, predicted: Prediction, findings: RunFindings) -> list[str]:
    lines: dict[int, str] = {}
    expected, size = predicted.of_places or (predicted.memory_bytes,), _ranks_of_a_place(strategy, predicted)
    for rank, tracked in zip(findings.ranks_checked, findings.memory_tracked_of_ranks, strict=True):
        allowed = _MOST_MEMORY * expected[rank // size] + _UNCOUNTED_BYTES
        if tracked > allowed:
            lines.setdefault(
                rank // size,
                f"rank {rank} held {tracked} bytes in tensors, over 3 % more than the predicted "
                f"{expected[rank // size]:.0f}; plan with the larger figure, and report the model (one "
                "cause: an operator that saves more than its fake kernel does)",
            )
    return list(lines.values())


def _differences_data(differences: Differences) -> dict[str, float | None]:
    return {f"{kind}_difference": value for kind, value in differences.by_kind.items()}


def _module_data(module: ModuleFindings) -> dict[str, Any]:
    return {
        "loss_difference": module.differences.loss,
        "gradient_difference": module.differences.gradient,
        "buffer_difference": module.differences.buffer,
        "ok": module.ok,
        "worst_gradient": module.worst_gradient,
        "worst_buffer": module.worst_buffer,
        "buffers_ok": within_tolerance(
            Differences(buffer=module.differences.buffer), rounding=module.rounding
        ),
        "compared_in": module.compared_in,
        "not_finite": dict(module.not_finite),
    }
