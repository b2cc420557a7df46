"""Stages whose devices each take a share of the batch, as in pipelines without sharded parameters."""

from __future__ import annotations

from functools import partial

from tensoropt.cluster import Mesh
from tensoropt.planners.sharded.common.restricted import following_the_batch, in_a_form, whole
from tensoropt.planners.tables import Scheme


def flat(mesh: Mesh) -> bool:
    """Return whether a stage's mesh has at most one axis."""
    return len(mesh.shape) <= 2


def data_parallel(*, recomputing: bool = False) -> Scheme:
    """Return the scheme that splits every group of a stage along its batch dim only, with whole parameters,
    and recomputes all blocks in backward or none."""
    allowed = following_the_batch(lambda tables, group: str(tables.micro[group].label), whole)
    return partial(in_a_form, allowed, recomputing)
