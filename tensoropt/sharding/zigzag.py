"""Zig-zag order of sequences, which gives all ranks equal work in causal attention.

``n`` ranks cut a sequence into ``2n`` chunks; rank ``r`` has the chunks ``r`` and ``2n - 1 - r`` (Llama 3,
arXiv 2407.21783, section 3.3.2; Zhu, ring-flash-attention's ``zigzag``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from tensoropt.ops.calls import OperatorShard
from tensoropt.ops.families.routed_experts import EXPERTS
from tensoropt.ops.index_space import NONE, AtomGraph
from tensoropt.ops.localise import localise
from tensoropt.ops.registry import spec_of
from tensoropt.ops.ring_attention import BLOCKS_FORM, RING_FORM
from tensoropt.sharding.same_atoms import Atom, atoms_of_loops, same_atoms

_ORDERLESS_KERNELS = frozenset(
    {
        BLOCKS_FORM, "kernels.dropout", "kernels.random", "kernels.bernoulli", "kernels.mean_as_sum",
        "kernels.divided", "kernels.sync_batch_norm", "loss_kernels.cross_entropy", "loss_kernels.nll_loss",
        EXPERTS, RING_FORM,
    }
)  # fmt: skip
"""Kernels that accept shards of elements that are not adjacent; losses do so except along classes."""


def with_zigzag(atoms: AtomGraph) -> AtomGraph:
    """Return the graph with those atoms (factors of dims) marked that may be cut in zig-zag order.

    These are the sequences of causal attention; none if an operator needs contiguous shards of them.
    """
    return replace(atoms, zigzag=_atoms_of_sequences(atoms))


def contiguous_note(atoms: AtomGraph, mesh: Sequence[int]) -> tuple[str, ...]:
    """Return a note on why sequences of causal attention are not cut in zig-zag order, or nothing.

    Args:
        mesh: the number of micro-batches, then the size of each mesh axis.
    """
    axes = [size for size in mesh[1:] if size > 1]
    lengths = {
        dim.size
        for space in atoms.spaces.values()
        for dim in space.dims
        if dim.growing and dim.splittable and (dim.small_parts or any(dim.size % n == 0 for n in axes))
    }
    if not lengths or atoms.may_zigzag(mesh):
        return ()
    sequences = f"sequences of {', '.join(map(str, sorted(lengths)))}"
    why = f"they do not divide into {2 * prod(axes)} chunks, two per device"
    if not atoms.zigzag:
        why = "a parameter or an operator needs contiguous parts of them"
    return (
        f"mesh {'x'.join(map(str, axes))}: {sequences} are not cut in zig-zag order, as {why}; if causal "
        "attention splits its queries, costs are those of the rank with the last queries, the busiest",
    )


def _atoms_of_sequences(atoms: AtomGraph) -> frozenset[Atom]:
    loops = [
        (space.dims[n], of) for space in atoms.spaces.values() for n, of in atoms_of_loops(space).items()
    ]
    growing = {atom for dim, of in loops if dim.growing and dim.splittable for atom in of}
    if not growing:
        return frozenset()
    same = same_atoms([*(of for _, of in loops), *_aligned(atoms)])
    roots = {same[atom] for atom in growing}
    found = frozenset(atom for atom in same if same[atom] in roots)
    return frozenset() if _ordered(atoms, found) else found


def _aligned(atoms: AtomGraph) -> Iterator[list[Atom]]:
    """Yield, for each loop that must cut several dims at the same positions, the atoms of these dims."""
    for space in atoms.spaces.values():
        of_loops = atoms_of_loops(space)
        for dim in space.dims:
            if dim.aligned:
                yield [atom for loop in dim.along for atom in of_loops.get(loop, ())]


def _ordered(atoms: AtomGraph, found: frozenset[Atom]) -> bool:
    graph = atoms.graph
    if any(graph.tensors[name].kind == "parameter" for name, _ in found):
        return True
    batch = {
        (name, i) for name in graph.inputs if atoms.atoms[name] for i in range(len(atoms.atoms[name][0]))
    }
    if not found.isdisjoint(batch):
        return True
    for op in graph.operators:
        space = atoms.spaces[op.name]
        if spec_of(op.target).localiser is None:
            continue
        for loop, of in atoms_of_loops(space).items():
            dim = space.dims[loop]
            if dim.splittable and not found.isdisjoint(of):
                call = localise(OperatorShard(op, atoms, (NONE, loop), (1, 2)))
                if call.is_kernel and (
                    call.function not in _ORDERLESS_KERNELS or dim.name.startswith("class")
                ):
                    return True
    return False
