"""Slow, obvious twins of the fast code, and exhaustive search on tiny graphs."""

from __future__ import annotations

import heapq
import itertools
import math
from functools import cache
from typing import NamedTuple

import numpy as np


def reduce(points):
    """Points that no other one beats, memory ascending; duplicates once."""
    kept, best = [], math.inf
    for m, t in sorted({(m, t) for m, t in points if math.isfinite(m) and math.isfinite(t)}):
        if t < best:
            kept.append((m, t))
            best = t
    return kept


def product(left, right):
    return reduce((a[0] + b[0], a[1] + b[1]) for a in left for b in right)


def union(frontiers):
    return reduce(p for f in frontiers for p in f)


def exhaustive(nodes, edges):
    """Frontier over all strategies.

    ``nodes``: {name: list of lists of (memory, time)}; ``edges``: list of (source, target, f) where f(i, j)
    is a list of (memory, time) options.
    """
    names = list(nodes)
    found, products = [], cache(product)
    for choice in itertools.product(*(range(len(nodes[n])) for n in names)):
        chosen = dict(zip(names, choice, strict=True))
        front = ((0.0, 0.0),)
        for factor in [nodes[n][chosen[n]] for n in names] + [f(chosen[a], chosen[b]) for a, b, f in edges]:
            front = tuple(products(front, tuple(tuple(p) for p in factor)))
        found.extend(front)
        if len(found) > 2000:
            found = reduce(found)
    return reduce(found)


def lower_bound(frontier, memory):
    """Least time of a frontier within ``memory``; inf when nothing fits."""
    return min((t for m, t in frontier if m <= memory), default=np.inf)


def descending(limit):
    """A limit as the kernels take it: breakpoints ascending, one time each, never ascending."""
    steps, least = [], np.inf
    for m in sorted({m for m, _ in limit}):
        least = min([least, *(t for x, t in limit if x == m)])
        steps.append((m, least))
    return steps


def union_of_products(pairs, limit):
    """Union of products without the points above the step function ``limit``."""
    points = []
    for left, right in pairs:
        for m, t in product(left, right):
            below = [y for x, y in limit if x <= m]
            if not below or t <= below[-1]:
                points.append((m, t))
    return reduce(points)


def lower_hull(front):
    """Indices of the points that lie on no line between two others, nor above one."""

    def below(a, i, b):
        (am, at), (im, it), (bm, bt) = front[a], front[i], front[b]
        return (it - at) * (bm - am) < (bt - at) * (im - am)

    n = len(front)
    inner = [i for i in range(1, n - 1) if all(below(a, i, b) for a in range(i) for b in range(i + 1, n))]
    return [0, *inner, n - 1]


def thin(front, wanted):
    """Both ends, and of each of ``wanted - 2`` stretches of equal length the point nearest the hull."""
    n = len(front)
    if n <= wanted or wanted < 2:
        return list(range(n))
    hull, cells = lower_hull(front), wanted - 2
    width, height = front[-1][0] - front[0][0], front[0][1] - front[-1][1]
    stretches = {}
    for i in range(1, n - 1) if cells else ():
        a, b = next((a, b) for a, b in itertools.pairwise(hull) if a < i <= b)
        slope = (front[b][1] - front[a][1]) / (front[b][0] - front[a][0])
        above = (front[i][1] - front[a][1] - slope * (front[i][0] - front[a][0])) / height
        away = above / (1.0 - slope * width / height)
        along = ((front[i][0] - front[0][0]) / width + (front[0][1] - front[i][1]) / height) * 0.5
        stretches.setdefault(min(int(along * cells), cells - 1), []).append((away, i))
    return [0, *(min(found)[1] for _, found in sorted(stretches.items())), n - 1]


def scalar_values(nodes, edges, weight_m, weight_t):
    """Least weighted cost over all strategies, and per operator and configuration over those that use it."""
    names = list(nodes)
    best, through = np.inf, {(n, k): np.inf for n in names for k in range(len(nodes[n]))}
    for choice in itertools.product(*(range(len(nodes[n])) for n in names)):
        chosen = dict(zip(names, choice, strict=True))
        total = 0.0
        for factor in [nodes[n][chosen[n]] for n in names] + [f(chosen[a], chosen[b]) for a, b, f in edges]:
            total += min(
                (weight_m * m + weight_t * t for m, t in factor if np.isfinite(m + t)), default=np.inf
            )
        best = min(best, total)
        for n in names:
            through[n, chosen[n]] = min(through[n, chosen[n]], total)
    return best, through


def difference(got, want):
    """Largest difference, relative to the largest finite one wanted; inf where just one is none."""
    found, size = 0.0, max((abs(w) for w in want if np.isfinite(w)), default=0.0)
    for g, w in zip(got, want, strict=True):
        if np.isfinite(g) and np.isfinite(w):
            found = max(found, abs(g - w) / max(size, 1e-30))
        elif not (g == w or (np.isnan(g) and np.isnan(w))):
            return np.inf
    return found


def dequantised(stored, scheme, block=64):
    """The matrix that bytes stand for, number by number."""
    tables = {
        "nf4": [
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
            0.7229568362236023, 1.0,
        ],
        "fp4": [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4],
    }  # fmt: skip
    tables["fp4"] += [-value for value in tables["fp4"]]
    codes, scales = stored.codes.tolist(), stored.scales.tolist()
    if scheme == "int8":
        return [[code * scales[row] for code in line] for row, line in enumerate(codes)]
    table, made = tables[scheme.partition("-")[0]], []
    for row, line in enumerate(codes):
        made.append([])
        for column in range(2 * len(line)):
            byte, place = line[column // 2], column // block
            scale = scales[row][place]
            if stored.nested is not None:
                groups = stored.nested[row].tolist()
                of_group = groups[place * len(groups) // len(scales[row])]
                scale = dynamic_number(scale) * of_group + float(stored.offset)
            made[-1].append(table[byte % 16 if column % 2 else byte // 16] * scale)
    return made


def dynamic_number(byte):
    """One of 256 numbers: seven decades, of which each has twice as many as the one below."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        for i in range(2**decade):
            size = 10.0 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / 2**decade)
            numbers += [size, -size]
    return sorted(numbers)[byte]


class Task(NamedTuple):
    """Work on resources after other tasks; ``ends``: the devices that a message slows down."""

    name: str
    duration_s: float
    resources: tuple = ()
    after: tuple = ()
    ends: tuple = ()


class Schedule(NamedTuple):
    tasks: list
    starts: list
    ends: list
    order: list

    @property
    def total_s(self):
        return max(self.ends, default=0.0)

    def spans(self):
        return {t.name: span for t, *span in zip(self.tasks, self.starts, self.ends, strict=True)}


def schedule(tasks, slower=0.0):
    """Tasks in time, one after another; those that wait for each other are not in the order."""
    waiting = [len(task.after) for task in tasks]
    ready = [(0.0, i) for i, count in enumerate(waiting) if not count]
    earliest, starts, ends, order = [0.0] * len(tasks), [0.0] * len(tasks), [0.0] * len(tasks), []
    free, flying = {}, {}  # until when a resource is taken; a device's seconds of messages, and since when

    def left(device, now):
        rest, since = flying.get(device, (0.0, 0.0))
        return max(rest - max(now - since, 0.0), 0.0), max(now, since)

    while ready:
        start, i = heapq.heappop(ready)
        task, seconds = tasks[i], tasks[i].duration_s
        start = max([start, *(free.get(resource, 0.0) for resource in task.resources)])
        for device in task.ends if slower else ():
            rest, since = left(device, start)
            flying[device] = rest + 0.5 * seconds, since
        if slower and not task.ends and task.resources:
            rest, _ = left(task.resources[0], start)
            if seconds > 0.0 and rest > 0.0:
                lost = slower / (1.0 + slower) if slower < math.inf else 1.0
                seconds += min(rest * lost, seconds * slower)
            flying[task.resources[0]] = max(rest - seconds, 0.0), start + seconds
        starts[i], ends[i] = start, start + seconds
        order.append(i)
        free |= dict.fromkeys(task.resources, ends[i])
        for j, other in enumerate(tasks):
            if i in other.after:
                earliest[j] = max(earliest[j], ends[i])
                waiting[j] -= other.after.count(i)
                if not waiting[j]:
                    heapq.heappush(ready, (earliest[j], j))
    return Schedule(tasks, starts, ends, order)
