"""The sharding configurations that a user's constraints allow on each mesh and micro-batch count."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from math import prod

import networkx as nx

from tensoropt.cluster import Cluster, Mesh, list_devices
from tensoropt.errors import suggest
from tensoropt.graph import Operator, Tensor
from tensoropt.ops.layouts import REPLICATE, Layout
from tensoropt.sharding.configurations import UNEVEN_LEAST, AxisSizes, Configuration, enumerate_configurations
from tensoropt.sharding.constraints import (
    BATCH,
    Axes,
    ConstraintError,
    Constraints,
    DevicePin,
    LackingDevicesError,
    Matched,
    Pin,
    StoredPin,
    Together,
    accepts,
    common_words,
    label_of,
    stored_as,
)
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph
from tensoropt.sharding.reshard.steps import forward_placements, resharding_steps
from tensoropt.sharding.storage import Gather, Reduce, Storage, stored_layout
from tensoropt.sharding.strategy import replicated_axes


def _sharded_layout(
    atoms: tuple[int, ...], mesh: tuple[int, ...], whole: Layout, axes: tuple[int, ...]
) -> Layout | None:
    """Return the layout that shards a parameter stored as ``whole`` along ``axes``, or None.

    Shard the first factor of a dim (atom) that divides evenly and that one all-gather restores. If there is
    none, shard the first that one axis cuts unevenly, with padding.
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
    """Return the ways to store a group's parameters, each a tuple of layouts. The first one stores them in
    the layouts in which they are used."""
    as_used = tuple(stored_layout(t, use) for t, use in zip(tensors, uses, strict=True))
    found = {as_used: None}
    # One set of axes for all parameters of a group: a separate set for each of them would give exponentially
    # many options.
    for axes in _axis_sets(mesh):
        layouts = []
        for sizes, whole in zip(atoms, as_used, strict=True):
            free = tuple(a for a in axes if a in replicated_axes(whole))
            layout = _sharded_layout(sizes, mesh, whole, free) if free else None
            layouts.append(layout if layout is not None else whole)
        # Sets that shard nothing more give the same tuple; the dict drops duplicates and keeps the order.
        found.setdefault(tuple(layouts))
    return tuple(found)


def unsharded_options(
    tensors: tuple[Tensor, ...], options: tuple[tuple[Layout, ...], ...], mesh: tuple[int, ...]
) -> tuple[tuple[Layout, ...], ...]:
    """Return the sharded options as ZeRO-2 (gathered once per step) and, with micro-batches, as ZeRO-1."""
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
    """Return the sharded options of ``options``, with the parameters prefetched for each use."""
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


Labels = tuple[str, ...]
_Constraint = Pin | StoredPin | Together


@dataclass(frozen=True)
class Restriction:
    """The configurations that are allowed on one mesh.

    Attributes:
        kept: constrained group -> indices of the allowed configurations in
            :func:`~tensoropt.sharding.configurations.enumerate_configurations`.
        stored: constrained parameter -> mesh axis (micro-batches are axis 0) -> allowed placements.
        together: sets of groups that must split the same dims.
        words: group in one of these sets -> its own name for the dim that all split, if names differ.
        combined: group -> indices of the strategies that mesh axes may use; by default all.
        outer: group -> indices of the strategies for all mesh axes but the last; by default ``combined``.
        again: group of a constrained block -> whether it is recomputed.
        gathered_again: group -> whether backward gathers its inputs again.
    """

    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stored: Mapping[str, Mapping[int, tuple[str, ...]]] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    combined: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    outer: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    again: Mapping[str, bool] = field(default_factory=dict)
    gathered_again: Mapping[str, bool] = field(default_factory=dict)

    def stores(self, parameter: str, layout: Layout) -> bool:
        # Every axis has alternatives, one of which has to be met; all axes have to be met.
        allowed = self.stored.get(parameter, {})
        return all(any(stored_as(layout[a], w) for w in wanted) for a, wanted in allowed.items())

    def about(self, group: Group) -> object:
        """Return a cache key, equal for isomorphic groups that are restricted alike."""
        stored = [sorted(self.stored.get(n, {}).items()) for n in group.parameters]
        # None for groups without storage pins, so that they share a template with groups that no constraint
        # names.
        about = self.kept.get(group.name), self.combined.get(group.name), stored if any(stored) else None
        pinned = self.again.get(group.name), self.gathered_again.get(group.name), self.outer.get(group.name)
        return about if pinned == (None, None, None) else (*about, *pinned)


FREE = Restriction()


def labels_of(configuration: Configuration, words: Mapping[str, str]) -> Labels:
    """Return the dim that each mesh axis splits, to compare groups that must split alike. ``words``: group ->
    its name of the batch dim, which is replaced by a common name."""
    batch = words.get(configuration.group.name)
    dims = (s.label.dim for s in configuration.strategies[1:])
    return tuple(BATCH if dim == batch else dim for dim in dims)


@dataclass(frozen=True)
class Restrictions:
    """The configurations allowed on each mesh with each micro-batch count.

    ``spaces``: (mesh label, micro-batch count) -> what is allowed. A missing pair is not searched; None in
    place of the mapping allows everything.
    """

    spaces: Mapping[tuple[str, int], Restriction] | None = None
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> frozenset[str]:
        return frozenset(name for space in (self.spaces or {}).values() for name in space.kept)


def restrict(
    matched: Matched,
    graph: GroupGraph,
    micro: Mapping[str, AxisStrategy],
    meshes: Sequence[Mesh],
    counts: Sequence[int],
) -> Restrictions:
    """Return what constraints allow on each mesh; ConstraintError if none satisfies the hard constraints."""
    _check_axes(matched.constraints, meshes)
    spaces: dict[tuple[str, int], Restriction] = {}
    told: dict[str, dict[str, None]] = {}
    refused: dict[str, dict[str, None]] = {}
    for mesh in meshes:
        for count in counts:
            narrowing = _Narrowing(matched, graph, micro, mesh, count)
            try:
                spaces[mesh.label, count] = narrowing.apply_all()
            except _ImpossibleError as reason:
                refused.setdefault(str(reason), {}).setdefault(mesh.label)
            for note in narrowing.notes:
                told.setdefault(note, {}).setdefault(mesh.label)
    if not spaces:
        raise ConstraintError(
            "; ".join(f"{reason} (mesh {', '.join(labels)})" for reason, labels in refused.items())
            + "; change a constraint, or mark one 'soft: true'"
        )
    notes = [f"not searched: mesh {', '.join(labels)}: {reason}" for reason, labels in refused.items()]
    notes += [f"given up on mesh {', '.join(labels)}, as it is soft: {n}" for n, labels in told.items()]
    return Restrictions(spaces, (*matched.notes, *notes))


def check_devices(constraints: Constraints, cluster: Cluster) -> tuple[tuple[str, ...], str]:
    """Check constraints on devices for plans in which every device runs every operator.

    Returns:
        Notes on soft constraints given up, and the reason why no sharded plan satisfies the hard ones, or "".

    Raises:
        ConstraintError: there is no such kind of device.
        LackingDevicesError: a hard constraint names a device that the cluster lacks.
    """
    notes, refusals = [], []
    kinds = dict.fromkeys(kind.name for kind in cluster.devices)
    count = cluster.device_count
    for entry in constraints.devices:
        for kind in entry.kinds:
            known = {*list_devices(), *kinds}
            if not any(fnmatchcase(name, kind) for name in known):
                raise ConstraintError(f"{entry}: there is no device kind '{kind}'; {suggest(kind, known)}")
        allowed = entry.allowed(cluster)
        if absent := [str(number) for number in entry.numbers if number >= count]:
            text = f"{entry}: {cluster.name} has devices 0 to {count - 1}, not {', '.join(absent)}"
            if not entry.soft:
                raise LackingDevicesError(
                    f"{text}; name other devices, take another cluster, or mark the constraint 'soft: true'"
                )
            notes.append(f"{'passed over' if allowed else 'given up'}, as it is soft: {text}")
            if not allowed:
                continue
        if lacking := set(range(count)) - set(allowed):
            text = (
                f"{entry}: every device of {cluster.name} runs every operator, and "
                f"{_shown(lacking, entry, cluster)}"
            )
            if entry.soft:
                notes.append(f"given up, as it is soft: {text}")
            else:
                refusals.append(text)
    return tuple(notes), "; ".join(refusals)


def _shown(lacking: set[int], entry: DevicePin, cluster: Cluster) -> str:
    if entry.kinds:
        names = dict.fromkeys(cluster.devices[number].name for number in sorted(lacking))
        return f"the constraint excludes {', '.join(names)}"
    return f"the constraint excludes device {', '.join(map(str, sorted(lacking)))}"


def _check_axes(constraints: Constraints, meshes: Sequence[Mesh]) -> None:
    names = list(dict.fromkeys(name for mesh in meshes for name in _axis_names(mesh)))
    pins: tuple[Pin | StoredPin, ...] = (*constraints.pins, *constraints.stored)
    for pin in pins:
        for axis in pin.axes:
            if not names:
                raise ConstraintError(f"{pin}: a single device has no mesh axes; leave the pin out")
            if not any(fnmatchcase(name, axis) for name in names):
                raise ConstraintError(f"{pin}: no searched mesh has an axis '{axis}'; {suggest(axis, names)}")


def _axis_names(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name, size in zip(mesh.names, mesh.shape, strict=True) if size > 1)


class _ImpossibleError(Exception):
    """The error for a hard constraint that cannot hold on a mesh."""


@dataclass
class _State:
    """The configurations allowed so far, and the constraints that excluded others."""

    left: dict[str, tuple[int, ...]] = field(default_factory=dict)
    because: dict[str, tuple[_Constraint, ...]] = field(default_factory=dict)
    stored: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    together: nx.Graph = field(default_factory=nx.Graph)
    words: dict[str, str] = field(default_factory=dict)

    def copy(self) -> _State:
        stored = {name: dict(axes) for name, axes in self.stored.items()}
        return _State(dict(self.left), dict(self.because), stored, self.together.copy(), dict(self.words))


@dataclass(eq=False, repr=False)
class _Narrowing:
    """Narrows the configurations of one mesh: by hard constraints first, then by soft ones."""

    matched: Matched
    graph: GroupGraph
    micro: Mapping[str, AxisStrategy]
    mesh: Mesh
    count: int

    def __post_init__(self) -> None:
        self.names = _axis_names(self.mesh)
        self.sizes: AxisSizes = (self.count, *(size for size in self.mesh.shape if size > 1))
        self.found: dict[str, tuple[Configuration, ...]] = {}
        self.state = _State()
        self.notes: list[str] = []

    def apply_all(self) -> Restriction:
        """Return what all constraints allow on this mesh; raise _ImpossibleError if nothing."""
        entries: list[tuple[_Constraint, Callable[[], None]]] = []
        entries += ((pin, partial(self._pin, pin, operators)) for pin, operators in self.matched.pins)
        entries += ((pin, partial(self._store, pin, parameters)) for pin, parameters in self.matched.stored)
        entries += ((entry, partial(self._join, groups)) for entry, groups in self.matched.together)
        for entry, narrow in sorted(entries, key=lambda each: each[0].soft):
            self._try(entry, narrow)
        together = tuple(tuple(sorted(c)) for c in nx.connected_components(self.state.together))
        return Restriction(
            self.state.left,
            self.state.stored,
            together,
            self.state.words,
            again=self.matched.again,
            gathered_again=self.matched.gathered_again,
        )

    def _try(self, entry: _Constraint, narrow: Callable[[], None]) -> None:
        # A constraint narrows several groups before it may fail, so the state is restored as a whole.
        before = self.state.copy()
        try:
            narrow()
            self._agree(entry)
            self._shared_can_be_stored(entry)
        except _ImpossibleError as reason:
            if not entry.soft:
                raise
            self.state = before
            self.notes.append(str(reason))

    # -- one constraint ---------------------------------------------------------------------------

    def _pin(self, pin: Pin, operators: Sequence[Operator]) -> None:
        wanted = self._wanted(pin, pin.axes)
        for op in operators:
            # ``op`` is bound as a default, because a closure would see the last operator of the loop.
            def holds(configuration: Configuration, op: Operator = op) -> bool:
                # A group splits by its anchor's dims; each member operator is asked for the label under which
                # it sees that split.
                labels = [label_of(self.graph, op, s) for s in configuration.strategies]
                return all(any(accepts(labels[a], w) for w in words) for a, words in wanted)

            self._narrow(self.graph.group_of[op.name], pin, holds)

    def _store(self, pin: StoredPin, parameters: Sequence[str]) -> None:
        wanted = self._wanted(pin, pin.axes)
        for name in parameters:
            self.state.stored.setdefault(name, {}).update(wanted)
        for group in self.graph.groups:
            if not set(group.parameters).isdisjoint(parameters):
                self._narrow(group, pin, partial(self._can_be_stored, group))

    def _join(self, groups: Sequence[str]) -> None:
        nx.add_path(self.state.together, groups)

    def _wanted(self, pin: _Constraint, axes: Axes) -> list[tuple[int, tuple[str, ...]]]:
        wanted = []
        for pattern, words in axes.items():
            # Axis 0 is the micro-batch axis, which no constraint names.
            matching = [i for i, name in enumerate(self.names, 1) if fnmatchcase(name, pattern)]
            if not matching:
                raise _ImpossibleError(f"{pin}: the mesh has no axis '{pattern}'")
            wanted += [(i, words) for i in matching]
        return wanted

    # -- what is left -----------------------------------------------------------------------------

    def _configurations(self, group: str) -> tuple[Configuration, ...]:
        if group not in self.found:
            self.found[group] = enumerate_configurations(
                self.graph.atoms, self.graph.group_of[group], self.sizes, self.micro[group]
            )
        return self.found[group]

    def _left(self, group: str) -> tuple[int, ...]:
        return self.state.left.get(group, tuple(range(len(self._configurations(group)))))

    def _narrow(self, group: Group, entry: _Constraint, holds: Callable[[Configuration], bool]) -> None:
        configurations = self._configurations(group.name)
        left = tuple(i for i in self._left(group.name) if holds(configurations[i]))
        if not left:
            others = self.state.because.get(group.name, ())
            # The entry could hold by itself, so it contradicts earlier constraints; the message names them.
            if others and any(map(holds, configurations)):
                raise _ImpossibleError(f"{entry} contradicts {_all(others)} for operator {group.name}")
            dims = self.graph.atoms.spaces[group.name].dims
            sizes = ", ".join(f"{dim.name} {dim.size}" for dim in dims)
            raise _ImpossibleError(f"{entry} cannot hold for {group.name}, whose dims have the sizes {sizes}")
        self.state.left[group.name] = left
        self.state.because[group.name] = (*self.state.because.get(group.name, ()), entry)

    def _agree(self, entry: _Constraint) -> None:
        for members in nx.connected_components(self.state.together):
            names = sorted(members)
            words = common_words([self.graph.group_of[n] for n in names], self.matched.batch) or {}
            self.state.words.update(words)
            sets = {n: {labels_of(self._configurations(n)[i], words) for i in self._left(n)} for n in names}
            common = set.intersection(*sets.values())
            if not common:
                others = [c for n in names for c in self.state.because.get(n, ()) if c is not entry]
                why = f" given {_all(others)}" if others else ", as their sizes divide differently"
                raise _ImpossibleError(f"{entry}: {', '.join(names)} cannot be split alike{why}")
            for name in names:
                configurations = self._configurations(name)
                self.state.left[name] = tuple(
                    i for i in self._left(name) if labels_of(configurations[i], words) in common
                )
                if entry not in self.state.because.get(name, ()):
                    self.state.because[name] = (*self.state.because.get(name, ()), entry)

    def _can_be_stored(self, group: Group, configuration: Configuration) -> bool:
        return any(
            all(self._stores(n, layout) for n, layout in zip(group.parameters, option, strict=True))
            for option in self._storage_options(group.parameters, configuration)
        )

    def _shared_can_be_stored(self, entry: _Constraint) -> None:
        for name in set(self.graph.shared) & set(self.state.stored):
            users = [g for g in self.graph.groups if name in g.shared]
            uses = (self._configurations(g.name)[i] for g in users for i in self._left(g.name))
            options = (option for use in uses for option in self._storage_options((name,), use))
            if not any(self._stores(name, stored) for (stored,) in options):
                raise _ImpossibleError(
                    f"{entry}: {name} cannot be stored this way, however the operators that use it are split"
                )

    def _storage_options(self, names: tuple[str, ...], use: Configuration) -> tuple[tuple[Layout, ...], ...]:
        atoms = self.graph.atoms
        tensors = tuple(atoms.graph.tensors[n] for n in names)
        sizes = tuple(atoms.atom_sizes(n) for n in names)
        return storage_options(tensors, sizes, tuple(use.layout(n) for n in names), self.sizes)

    def _stores(self, name: str, stored: Layout) -> bool:
        return Restriction(stored=self.state.stored).stores(name, stored)


def _all(constraints: Iterable[_Constraint]) -> str:
    return " and ".join(dict.fromkeys(map(str, constraints)))
