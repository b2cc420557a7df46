"""Storage of parameters between steps: the storage options of a configuration and what they cost.

A parameter that is used whole on some axes can be stored whole there (data parallelism: gradients all-reduced
once per step) or sharded (ZeRO). A sharded parameter is gathered before forward and a second time before
backward, and its gradient is reduce-scattered (stage 3), either at the use or while the preceding and
following blocks compute; or it stays gathered over the step, with the gradient reduce-scattered in every
micro-batch (stage 2) or once (stage 1). Each choice is an *option*: no neighbour sees it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod

from tensoropt.graph import Tensor
from tensoropt.ops.layouts import REPLICATE, Layout
from tensoropt.sharding.configurations import UNEVEN_LEAST
from tensoropt.sharding.reshard.steps import forward_placements, resharding_steps
from tensoropt.sharding.storage import Gather, Reduce, Storage, stored_layout
from tensoropt.sharding.strategy import replicated_axes


def sharded_layout(
    atoms: tuple[int, ...], mesh: tuple[int, ...], whole: Layout, axes: tuple[int, ...]
) -> Layout | None:
    """The stored layout that shards ``axes`` of a parameter that is otherwise stored as ``whole``.

    It shards the first atom that divides evenly and that one all-gather restores; otherwise the first that
    one axis cuts into uneven shards, which are sent with padding; None if there is no such atom (the
    parameter is too small or too irregular and stays whole).
    """
    uneven = None
    for atom, size in enumerate(atoms):
        layout = tuple(atom if a in axes else code for a, code in enumerate(whole))
        cutting = [mesh[a] for a, code in enumerate(layout) if code == atom and mesh[a] > 1]
        even = size % prod(cutting) == 0
        if not even and (uneven is not None or len(cutting) > 1 or size < UNEVEN_LEAST * cutting[0]):
            continue
        steps = resharding_steps(atoms, mesh, forward_placements(layout), forward_placements(whole))
        if [step.kind for step in steps] == ["all_gather"]:
            if even:
                return layout
            uneven = layout
    return uneven


def storage_options(
    tensors: tuple[Tensor, ...],
    atoms: tuple[tuple[int, ...], ...],
    uses: tuple[Layout, ...],
    mesh: tuple[int, ...],
) -> tuple[tuple[Layout, ...], ...]:
    """The stored layouts of a group's parameters, one tuple per option; the first option stores them as they
    are used."""
    as_used = tuple(stored_layout(t, use) for t, use in zip(tensors, uses, strict=True))
    found = {as_used: None}
    # One set of axes for all parameters of a group: a separate set for each of them would give exponentially
    # many options.
    for axes in _axis_sets(mesh):
        layouts = []
        for sizes, whole in zip(atoms, as_used, strict=True):
            free = tuple(a for a in axes if a in replicated_axes(whole))
            layout = sharded_layout(sizes, mesh, whole, free) if free else None
            layouts.append(layout if layout is not None else whole)
        # Sets that shard nothing more give the same tuple; the dict drops duplicates and keeps the order.
        found.setdefault(tuple(layouts))
    return tuple(found)


def unsharded_options(
    tensors: tuple[Tensor, ...], options: tuple[tuple[Layout, ...], ...], mesh: tuple[int, ...]
) -> tuple[tuple[Layout, ...], ...]:
    """The sharded storage options, gathered once per step.

    With one micro-batch, a gradient that waits for the last one costs memory and saves nothing, so it is not
    an option.
    """
    as_used, *sharded = options
    found: dict[tuple[Layout, ...], None] = {}
    each, last = Reduce.EACH_MICRO_BATCH, Reduce.LAST_MICRO_BATCH
    # ZeRO stage 2 comes before stage 1, which needs several micro-batches to save anything.
    for reduce in (each, last) if mesh[0] > 1 else (each,):
        for layouts in sharded:
            chosen = tuple(
                Storage(layout, Gather.ONCE, reduce).stored
                if layout != whole and tensor.requires_grad
                else layout
                for tensor, layout, whole in zip(tensors, layouts, as_used, strict=True)
            )
            if chosen != layouts:
                found[chosen] = None
    return tuple(found)


def ahead_options(options: tuple[tuple[Layout, ...], ...]) -> tuple[tuple[Layout, ...], ...]:
    """The sharded storage options, gathered ahead of each use."""
    as_used, *sharded = options
    return tuple(
        tuple(
            Storage((REPLICATE, *layout[1:]), Gather.AHEAD).stored if layout != whole else layout
            for layout, whole in zip(layouts, as_used, strict=True)
        )
        for layouts in sharded
    )


def _axis_sets(mesh: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    # From all axes down to single ones: the option that shards most comes first.
    axes = [a for a in range(1, len(mesh)) if mesh[a] > 1]
    for count in range(len(axes), 0, -1):
        yield from itertools.combinations(axes, count)
