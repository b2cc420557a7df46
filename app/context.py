"""The state that every page's callbacks share: explorations, jobs and remembered results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.verified import Verified
from tensoropt.report.detail import detail

from .jobs.manager import JobManager
from .library import Library
from .recent import Recent
from .state import View
from .views.frontier import FrontierData

if TYPE_CHECKING:
    from tensoropt.session.told import ToldJob


@dataclass
class Context:
    """The state handed to every page when its callbacks are registered."""

    library: Library
    jobs: JobManager | None = None
    frontiers: Recent = field(default_factory=Recent)
    details: Recent = field(default_factory=lambda: Recent(size=6))
    told: Recent = field(default_factory=lambda: Recent(size=32))

    @property
    def manager(self) -> JobManager:
        """The jobs of a dashboard that has them."""
        assert self.jobs is not None
        return self.jobs

    def view_from(self, search: Any) -> View:
        """Return the view that an address asks for; without an exploration, that of the first one."""
        view = View.from_query(str(search or ""))
        first = None if view.exploration else next(iter(self.library.entries()), None)
        return replace(view, exploration=first.key) if first else view

    def exploration(self, view: View) -> Exploration | None:
        """Return the view's exploration; None if the view names none."""
        return self.library.load(view.exploration) if view.exploration else None

    def verified(self, view: View) -> tuple[tuple[Verified, ...], str]:
        """Return (what is known about the view's plans that were run, "") or (nothing, why it cannot be
        read)."""
        try:
            return self.library.verified(view.exploration), ""
        except TensorOptError as error:
            return (), str(error)

    def frontier(self, view: View) -> FrontierData | None:
        """Return the view's frontier as arrays; None if the view names no exploration that can be read."""
        try:
            exploration = self.exploration(view)
        except TensorOptError:
            return None
        if exploration is None or not exploration.points:
            return None
        # The exploration is part of the value, so its id cannot be reused while the value is remembered.
        return self.frontiers.get(
            id(exploration),
            lambda: FrontierData.of(exploration, self.library.model_name(exploration.model.source)),
        )

    def detail(self, data: FrontierData, point: int) -> Any:
        """Return everything about one point, made once for all who show it.

        Raises:
            TensorOptError: the exploration does not hold what that needs; the message says so.
        """
        shown = data.exploration
        # The exploration is part of the value here, too.
        return self.details.get((id(shown), point), lambda: (shown, detail(shown, point)))[1]

    def told_job(self, data: FrontierData, point: int, launcher: str) -> ToldJob:
        """Return the nearest job to a point that a launcher can be told; it is priced, which takes up to
        minutes, once for all who ask.

        Raises:
            TensorOptError: there is none; the message says why.
        """
        # Here, as it opens the search's modules, which pages do without.
        from tensoropt.saved import export_job

        shown = data.exploration
        made: tuple[Any, ToldJob] = self.told.get(
            (id(shown), point, launcher),
            lambda: (shown, export_job(shown, launcher, point + 1, nearest=True, progress=False)),
        )
        return made[1]
