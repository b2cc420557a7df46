"""The state shared by all pages' callbacks: explorations, jobs and caches."""

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
    """The explorations, jobs and caches that callbacks of all pages share."""

    library: Library
    jobs: JobManager | None = None
    frontiers: Recent = field(default_factory=Recent)
    details: Recent = field(default_factory=lambda: Recent(size=6))
    told: Recent = field(default_factory=lambda: Recent(size=32))

    @property
    def manager(self) -> JobManager:
        """The job manager, for dashboards that have one."""
        assert self.jobs is not None
        return self.jobs

    def view_from(self, search: Any) -> View:
        """Return the page state (view) in an address's query; with the first exploration if it names none."""
        view = View.from_query(str(search or ""))
        first = None if view.exploration else next(iter(self.library.entries()), None)
        return replace(view, exploration=first.key) if first else view

    def exploration(self, view: View) -> Exploration | None:
        """Return the exploration that a page state (view) names; None if it names none."""
        return self.library.load(view.exploration) if view.exploration else None

    def verified(self, view: View) -> tuple[tuple[Verified, ...], str]:
        """Return (results of running the exploration's plans, "") or ((), why they cannot be read)."""
        try:
            return self.library.verified(view.exploration), ""
        except TensorOptError as error:
            return (), str(error)

    def frontier(self, view: View) -> FrontierData | None:
        """Return the plans that a page state (view) shows; None if its exploration is missing, unreadable or
        without points."""
        try:
            exploration = self.exploration(view)
        except TensorOptError:
            return None
        if exploration is None or not exploration.points:
            return None
        # The value contains the exploration, so its id cannot be reused while the value is cached.
        return self.frontiers.get(
            id(exploration),
            lambda: FrontierData.of(exploration, self.library.model_name(exploration.model.source)),
        )

    def detail(self, data: FrontierData, point: int) -> Any:
        """Return the simulated details of a point, such as costs by operator; they are cached.

        Raises:
            TensorOptError: the exploration lacks data that details need; the error names them.
        """
        shown = data.exploration
        # Here, too, the value contains the exploration.
        return self.details.get((id(shown), point), lambda: (shown, detail(shown, point)))[1]

    def told_job(self, data: FrontierData, point: int, launcher: str) -> ToldJob:
        """Return the launcher's job (a plan that its config can express) closest to a point, with its cost;
        cached, as it may take minutes.

        Raises:
            TensorOptError: there is no such job, or the operator graph was not saved.
        """
        # Imported on use: it imports the search, which pages do not need.
        from tensoropt.saved import export_job

        shown = data.exploration
        made: tuple[Any, ToldJob] = self.told.get(
            (id(shown), point, launcher),
            lambda: (shown, export_job(shown, launcher, point + 1, nearest=True, progress=False)),
        )
        return made[1]
