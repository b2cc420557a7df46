"""The places where strategies are checked: on CPU ranks, on GPUs, or on fake ranks if neither suffices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tensoropt.cluster import available_cores
from tensoropt.errors import TensorOptError
from tensoropt.plan.made_for import made_for
from tensoropt.ranks.local_hardware import local_gpus, why_no_gpu
from tensoropt.ranks.pool import RankPool

Wanted = Literal["auto", "ranks", "share-gpu", "fake"]
Kind = Literal["cpu", "cuda", "fake"]


@dataclass(frozen=True)
class Place:
    """A place to check strategies, with words on what that means for the result.

    Attributes:
        shared: whether all ranks are on one GPU, so that the time of a step means nothing.
    """

    kind: Kind
    text: str
    shared: bool = False

    @property
    def backend(self) -> str:
        """The communication backend of ranks."""
        return "nccl" if self.kind == "cuda" and not self.shared else "gloo"

    def pool(self, ranks: int, timeout_s: float) -> RankPool:
        """Return ranks of this kind, which is not fake; they are not started yet."""
        assert self.kind != "fake"
        return RankPool(ranks, timeout_s=timeout_s, backend=self.backend, share_gpu=self.shared)

    @property
    def device(self) -> str:
        """The device on which ranks hold the model; fake ranks need no data."""
        return "meta" if self.kind == "fake" else self.kind


def place_for(devices: int, device_type: str, name: str, wanted: Wanted = "auto") -> Place:
    """Return the place to check strategies for ``devices`` of a cluster.

    Args:
        device_type: the cluster's, ``cpu`` or ``cuda``.
        name: the cluster's name, for the text.
        wanted: ``ranks`` for CPU ranks of this machine whatever the cluster is, ``share-gpu`` for ranks that
            all use its first GPU, ``fake`` for fake ranks.

    Raises:
        TensorOptError: ``ranks`` with more devices than this machine could pretend to have, or no GPU to
            share.
    """
    if wanted == "fake":
        return Place("fake", "checked on fake ranks, as asked: nothing was computed, sent or timed")
    if wanted == "ranks":
        check_room(devices)
        return Place("cpu", f"run on {devices} CPU ranks of this machine")
    if wanted == "share-gpu":
        if reason := why_no_gpu():
            raise TensorOptError(f"ranks have no GPU to share: {reason}, or give --ranks for CPU ranks")
        check_room(devices)
        return Place(
            "cuda",
            f"run on {devices} ranks that share the first GPU and talk through the host (gloo): its kernels "
            "computed the numbers, and steps were not timed, as their times would mean nothing",
            shared=True,
        )
    if device_type == "cuda":
        found = len(local_gpus())
        if found >= devices:
            return Place("cuda", f"run on {devices} GPUs of this machine")
        missing = f"{devices} GPUs of {name} are not here" + (f" ({found} are)" if found else "")
    elif devices <= most_ranks():
        return Place("cpu", f"run on {devices} CPU ranks of this machine")
    else:
        missing = f"{devices} ranks are too many for the {len(available_cores())} cores here"
    return Place(
        "fake",
        f"{missing}, so this was checked on fake ranks: nothing was computed, sent or timed"
        + ("; --ranks runs it on CPU ranks instead" if devices <= most_ranks() else ""),
    )


def cluster_of(data: Mapping[str, Any]) -> tuple[str, str]:
    """Return (device type, name) of a plan's cluster; CPU ranks if the plan does not say."""
    cluster = made_for(data)
    return ("cpu", "an unknown cluster") if cluster is None else (cluster.device_type, cluster.name)


def most_ranks() -> int:
    """Return the most processes that this machine may run at once.

    Ranks that share a core are slow but right. Both numbers are assumptions.
    """
    return max(16, 2 * len(available_cores()))


def check_room(devices: int) -> None:
    """Refuse clusters whose ranks this machine could only pretend to run."""
    if devices > most_ranks():
        cores = len(available_cores())
        raise TensorOptError(
            f"one process per device: {devices} are too many for {cores} cores; use fake ranks (--fake), "
            f"or a plan for at most {most_ranks()} devices, for example --cluster cpu:{cores}"
        )
