"""The common start of a job's ranks: the same weights, the same model, the same plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from tensoropt.engine.agreement import content_hash, first_differing, gathered, text_hash
from tensoropt.errors import PlanError
from tensoropt.execute.resolve import Prepared
from tensoropt.execute.weights import WeightSource

FACTS = ("model", "plan", "seed", "sync_weights")
"""What ranks compare before their weights."""


def made_alike(
    prepared: Prepared,
    prepare: Callable[[], Prepared],
    weights: WeightSource,
    device: torch.device,
    seed: int,
    *,
    sync: bool,
) -> Prepared:
    """Return the model of this rank, with the weights that every rank has; all ranks of a job must call it.

    Weights from files or from a function are the same on every rank, and are not read for this.

    Args:
        prepare: captures the model anew.
        sync: whether to give all ranks rank 0's weights if they differ.

    Raises:
        PlanError: ranks have different weights, another model or another plan than rank 0.
    """
    own = weights.own()
    plan = json.dumps(prepared.executable.to_dict(), sort_keys=True, default=str)
    _compare_facts([_tensors_of(weights.model), plan, str(seed), str(sync)], device)
    differing = first_differing(_hashes(own.items()), device)
    if differing is not None and not sync:
        name, rank = differing
        kind = "buffer" if name in weights.buffers() else "parameter"
        raise PlanError(
            f"rank {rank} has other weights than rank 0, in the {kind} {name} first; call torch.manual_seed "
            "with one seed on all ranks before the model is built, or pass sync_weights=True for rank 0's, "
            "or checkpoint= or init_weights="
        )
    if differing is not None:
        _send(own, device)
        # Buffers are folded into constants of the graph: with rank 0's buffers these change.
        prepared = prepare()
    constants = prepared.captured.graph.constants
    differing = first_differing(_hashes(constants.items()), device)
    if differing is not None:
        raise PlanError(
            f"rank {differing[1]} has another value than rank 0 in {differing[0]}, a constant of the model: "
            "a tensor that its code draws or keeps as a plain attribute; call torch.manual_seed with one "
            "seed on all ranks before the model is built, or make it a buffer and pass sync_weights=True"
        )
    return prepared


def tell_of_refusal(model: nn.Module, device: torch.device) -> None:
    """Tell the other ranks that this one refuses its model, plan or weights: they would wait for it in
    :func:`made_alike`. The caller raises this rank's error.

    Raises:
        PlanError: ranks have different models, which is the more informative error.
    """
    _compare_facts([_tensors_of(model)], device)


def _tensors_of(model: nn.Module) -> str:
    """Return the names, shapes and types of a model's parameters and buffers."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return json.dumps([[name, *map(str, (value.shape, value.dtype))] for name, value in tensors])


def _compare_facts(texts: Sequence[str], device: torch.device) -> None:
    """Refuse ranks that do not even have the same tensors to compare.

    Args:
        texts: the texts for :data:`FACTS`; only the model's on a rank that refuses it.
    """
    hashes = [text_hash(text) for text in texts] + [0] * (len(FACTS) - len(texts))
    refuses = len(texts) < len(FACTS)
    rows = gathered(torch.tensor([refuses, *hashes], dtype=torch.int64, device=device)).tolist()
    refused = [rank for rank, row in enumerate(rows) if row[0]]
    # A rank that refuses has nothing else to compare.
    for column, what in enumerate(FACTS[:1] if refused else FACTS, start=1):
        for rank, row in enumerate(rows):
            if row[column] != rows[0][column]:
                raise PlanError(
                    f"rank {rank} has another {what} than rank 0; every rank builds the same model and calls "
                    "parallelize with the same arguments"
                )
    if refused and not refuses:
        raise PlanError(f"rank {refused[0]} refused its model, plan or weights, and says why itself")


def _hashes(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: content_hash(value) for name, value in tensors}


@torch.no_grad()
def _send(own: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Write rank 0's values into those of all ranks; no more than one additional value is on the device at a
    time."""
    for value in own.values():
        # Collectives take contiguous tensors on the job's device.
        sent = value.detach().to(device).contiguous()
        dist.broadcast(sent, 0)
        if sent.data_ptr() != value.data_ptr():
            value.copy_(sent)
