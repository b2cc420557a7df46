"""The scalar problem min(weight_t * time + weight_m * memory), solved exactly for many weights at once.

One pass up the program gives the least weighted cost of every table entry, and one pass down the least cost
of everything *outside* an entry (the two messages of min-sum belief propagation on a junction tree; Aji and
McEliece 2000). Their sum bounds every strategy through that entry from below. The strategies that result are
the vertices of the lower convex hull of the frontier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from tensoropt.search.program import Program
from tensoropt.types import Floats, Indices


@dataclass(frozen=True, eq=False, slots=True)
class Flat:
    """A program as flat arrays for kernels.

    ``meta`` (steps, 7): the first entry of the out, left and right table, the counts of o and k, and the
    starts of the index arrays of o and of k. ``leaf_*``: all leaf tables concatenated. ``tree`` (logical, 4):
    the first entry of the table, the step or -1, the left and right logical node.
    """

    meta: Indices
    left_out: Indices
    left_k: Indices
    right_out: Indices
    right_k: Indices
    leaf_offsets: Indices
    leaf_memory: Floats
    leaf_time: Floats
    tree: Indices
    entries: int


def flatten(program: Program) -> Flat:
    """Concatenate the index arrays of all steps and the points of all leaves."""
    rows, at_out, at_k = [], 0, 0
    for n, step in enumerate(program.steps):
        out = program.base[program.leaves + n]
        sides = program.base[step.left], program.base[step.right]
        rows.append((out, *sides, len(step.left_out), len(step.left_k), at_out, at_k))
        at_out += len(step.left_out)
        at_k += len(step.left_k)
    memory, time, offsets, points = [], [], [np.zeros(1, np.int64)], 0
    for leaf in program.reduced.leaves:
        memory.append(leaf.memory)
        time.append(leaf.time)
        offsets.append(leaf.offsets[1:] + points)
        points += len(leaf.memory)
    # The last leaf is the empty product, whose single point costs nothing.
    offsets.append(np.array([points + 1]))
    tree = np.full((len(program.logical), 4), -1, np.int64)
    for i, node in enumerate(program.logical):
        step_index = node.table - program.leaves
        tree[i] = program.base[node.table], max(step_index, -1), node.left, node.right

    def joined(name: str) -> Indices:
        return np.concatenate([np.zeros(0, np.int64), *(getattr(s, name) for s in program.steps)])

    return Flat(
        np.array(rows, np.int64).reshape(-1, 7),
        joined("left_out"),
        joined("left_k"),
        joined("right_out"),
        joined("right_k"),
        np.concatenate(offsets).astype(np.int64),
        np.concatenate([*memory, np.zeros(1)]),
        np.concatenate([*time, np.zeros(1)]),
        tree,
        program.entries,
    )


@njit(cache=True, nogil=True)
def leaf_values(leaf_offsets, leaf_m, leaf_t, wm, wt, entries):
    """(entries, W) the least weighted cost of every entry of the leaves; inf if impossible, and for all other
    entries."""
    count = wm.shape[0]
    value = np.full((entries, count), np.inf)
    for e in range(leaf_offsets.shape[0] - 1):
        for p in range(leaf_offsets[e], leaf_offsets[e + 1]):
            for w in range(count):
                x = wm[w] * leaf_m[p] + wt[w] * leaf_t[p]
                if x < value[e, w]:
                    value[e, w] = x
    return value


@njit(cache=True, nogil=True)
def pass_up(meta, left_out, left_k, right_out, right_k, value):
    """Fill ``value`` (entries, W), which already holds the leaves, with the least cost of every other
    entry."""
    count = value.shape[1]
    for s in range(meta.shape[0]):
        out, left, right, n_out, n_k, at_out, at_k = meta[s]
        for o in range(n_out):
            row = value[out + o]
            for k in range(n_k):
                a = value[left + left_out[at_out + o] + left_k[at_k + k]]
                b = value[right + right_out[at_out + o] + right_k[at_k + k]]
                for w in range(count):
                    x = a[w] + b[w]
                    row[w] = x if x < row[w] else row[w]


@njit(cache=True, nogil=True)
def pass_down(meta, left_out, left_k, right_out, right_k, value, outside, first, last):
    """Fill columns ``first:last`` of ``outside`` (entries, W), which is 0 at the root and inf elsewhere, with
    the least weighted cost of everything outside an entry.

    A table that is used several times (identical layers) gets the least over its uses.
    """
    # Backwards: all uses of a table come after it, so its row is final when its own turn comes.
    for s in range(meta.shape[0] - 1, -1, -1):
        out, left, right, n_out, n_k, at_out, at_k = meta[s]
        for o in range(n_out):
            above = outside[out + o]
            # Anything impossible under one weight is impossible under all.
            if value[out + o, first] == np.inf or above[first] == np.inf:
                continue
            for k in range(n_k):
                i = left + left_out[at_out + o] + left_k[at_k + k]
                j = right + right_out[at_out + o] + right_k[at_k + k]
                a, b, oa, ob = value[i], value[j], outside[i], outside[j]
                if a[first] == np.inf or b[first] == np.inf:
                    continue
                for w in range(first, last):
                    x = above[w] + b[w]
                    oa[w] = x if x < oa[w] else oa[w]
                    y = above[w] + a[w]
                    ob[w] = y if y < ob[w] else ob[w]
    return outside


@njit(cache=True, nogil=True)
def descend(
    meta, left_out, left_k, right_out, right_k, leaf_offsets, leaf_m, leaf_t, tree, root, value, wm, wt
):
    """Find a strategy with the least weighted cost for every weight, by descending the tree of factors.

    Returns memory (W,), time (W,) and, per logical node, entry (logical, W) and choice (logical, W): the k of
    the step, or the point of the leaf. Of equal choices the first is used.
    """
    count = value.shape[1]
    nodes = tree.shape[0]
    memory = np.zeros(count)
    time = np.zeros(count)
    entry = np.zeros((nodes, count), np.int64)
    choice = np.full((nodes, count), -1, np.int32)
    stack = np.empty(nodes + 1, np.int64)
    for w in range(count):
        stack[0] = root
        depth = 1
        while depth > 0:
            depth -= 1
            node = stack[depth]
            base, s, left_node, right_node = tree[node]
            e = entry[node, w]
            if s < 0:
                best = np.inf
                pick = -1
                for p in range(leaf_offsets[base + e], leaf_offsets[base + e + 1]):
                    x = wm[w] * leaf_m[p] + wt[w] * leaf_t[p]
                    if x < best:
                        best = x
                        pick = p
                choice[node, w] = pick - leaf_offsets[base + e]
                memory[w] += leaf_m[pick]
                time[w] += leaf_t[pick]
                continue
            # The best k is recomputed instead of being kept from the pass up: a strategy needs one entry per
            # node, whereas a pass would have to keep all of them.
            _, left, right, _, n_k, at_out, at_k = meta[s]
            i = left_out[at_out + e]
            j = right_out[at_out + e]
            best = np.inf
            pick = 0
            for k in range(n_k):
                x = value[left + i + left_k[at_k + k], w] + value[right + j + right_k[at_k + k], w]
                if x < best:
                    best = x
                    pick = k
            choice[node, w] = pick
            entry[left_node, w] = i + left_k[at_k + pick]
            entry[right_node, w] = j + right_k[at_k + pick]
            stack[depth] = left_node
            stack[depth + 1] = right_node
            depth += 2
    return memory, time, entry, choice
