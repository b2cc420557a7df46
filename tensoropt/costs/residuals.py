"""Residuals: factors that correct the predicted durations of each kind of work, from real steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.store import ProfileStore

NETWORK, REST = "collectives", "all else"
"""The kinds of work besides cost classes; ``REST`` is resharding, copies, additions and the optimizer."""


@dataclass(frozen=True)
class Residuals:
    """Measured over predicted durations in one machine's steps, by kind of work; 1 for other kinds."""

    factors: Mapping[str, float] = field(default_factory=dict)

    def of(self, kind: str) -> float:
        return self.factors.get(kind, 1.0)

    def overheads(self, overheads: Overheads) -> Overheads:
        factor = self.of(REST)
        if factor == 1.0:
            return overheads
        names = {each.name for each in fields(overheads)} - {"of_host"}
        return replace(overheads, **{name: getattr(overheads, name) * factor for name in names})

    def links(self, fits: LinkFits | None) -> LinkFits | None:
        """Return a mesh's link fits with the durations of collectives multiplied by their factor."""
        factor = self.of(NETWORK)
        if fits is None or factor == 1.0:
            return fits
        slower = {key: tuple(fit.slowed(factor) for fit in group) for key, group in fits.collectives.items()}
        return replace(fits, collectives=slower)


NO_RESIDUALS = Residuals()

_KIND, _KEY = "calibration", "residuals-4"


def save_residuals(store: ProfileStore, prefix: str, residuals: Residuals) -> None:
    store.put(f"{prefix}/{_KEY}", asdict(residuals), kind=_KIND)


def load_residuals(store: ProfileStore, prefix: str) -> Residuals:
    """Return the stored residuals of the hardware that ``prefix`` names; :data:`NO_RESIDUALS` if none."""
    record = store.get(f"{prefix}/{_KEY}", kind=_KIND)
    return NO_RESIDUALS if record is None else Residuals(**record)
