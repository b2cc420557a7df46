"""The numeric check of a split: an operator run on pieces must give the same outputs and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from tensoropt.sharding.discovery.probes import MEAN, SUM, Probe, Split, backward, is_pytorchs, sample_inputs

MOST_PARTS = 64
"""The most parts into which a loop is split for a check; an assumption."""
SCALES = (1.0, 1e-3, 1e3)
"""Factors for random operands and gradients, to reveal clipping or rounding; an assumption."""
_ROUNDING = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 4e-2,
    torch.float16: 4e-3,
}
"""Tolerated relative errors, far above rounding and far below the error of a wrong split; assumptions."""
_Cut = Sequence[tuple[Split, int]]
"""Loops that are cut together, each with its number of equal parts."""


@dataclass(frozen=True)
class _Whole:
    """The operands and results of one run of an operator that is not split.

    Attributes:
        given: random gradients of the outputs.
        gradients: gradients of the operands that require one, as computed by backward from ``given``.
    """

    values: dict[str, torch.Tensor]
    given: list[torch.Tensor]
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]

    @classmethod
    def of(cls, probe: Probe, seed: int, scale: float) -> _Whole:
        """Run an operator on random operands and gradients that are multiplied by ``scale``."""
        generator, constants = torch.Generator().manual_seed(seed), probe.graph.constants
        for exact in (True, False):  # some calls exist only in the graph's own precision
            drawn = sample_inputs(probe.op, probe.graph, generator, exact=exact)
            values = {
                name: value * scale if value.is_floating_point() and name not in constants else value
                for name, value in drawn.items()
            }
            try:
                made = probe.run(values)
                break
            except (RuntimeError, ValueError, TypeError):
                if not exact:
                    raise
        wide = [torch.complex128 if m.is_complex() else torch.float64 for m in made]
        given = [
            (scale * torch.randn(m.shape, generator=generator, dtype=dtype)).to(m.dtype)
            for m, dtype in zip(made, wide, strict=True)
        ]
        return cls(values, given, *backward(probe, values, given))

    @property
    def tolerance(self) -> float:
        return max(_ROUNDING.get(v.dtype, 0.0) for v in (*self.values.values(), *self.outputs))


def holds(probe: Probe, splits: Sequence[Split], linear: bool, *, first: int = 0) -> bool:
    """Return whether an operator run on pieces gives the same outputs and gradients as if run whole.

    Args:
        linear: whether to check also that results add up if operands are given as sums.
        first: the number of leading ``splits`` that were checked before; each later split is checked alone
            and together with each split before it.
    """
    tries: list[_Cut] = []
    for number, split in enumerate(splits[first:], first):
        fewest, most = fewest_and_most(probe.size(split))
        tries += [[(split, parts)] for parts in {fewest, most}]
        tries += [
            [(split, fewest), (other, fewest_and_most(probe.size(other))[0])] for other in splits[:number]
        ]
    if not tries and not linear:
        return True
    try:
        for seed in (1, 2):
            for scale in (1.0,) if is_pytorchs(probe.op) else SCALES:
                whole = _Whole.of(probe, seed, scale)
                if linear and not _passes_sums(probe, whole, seed):
                    return False
                if not all(_recombines(probe, whole, cut) for cut in tries):
                    return False
    except Exception:  # the operator's own, on pieces that it cannot handle
        return False
    return True


def _passes_sums(probe: Probe, whole: _Whole, seed: int) -> bool:
    """Return whether an operator is linear, by three runs: ``whole``, and two whose operands add up to
    those of ``whole``. Then the outputs of the two also add up, and all three have equal gradients."""
    generator = torch.Generator().manual_seed(seed)
    noise = {n: torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in whole.values.items()}
    rest = {name: value - noise[name] for name, value in whole.values.items()}
    runs = [backward(probe, values, whole.given) for values in (noise, rest)]
    sums = [a + b for a, b in zip(*(outputs for outputs, _ in runs), strict=True)]
    pairs = [(sums, whole.outputs), *((gradients, whole.gradients) for _, gradients in runs)]
    return all(
        close(found, wanted, whole.tolerance)
        for one, other in pairs
        for found, wanted in zip(one, other, strict=True)
    )


def _recombines(probe: Probe, whole: _Whole, cut: _Cut) -> bool:
    reads = {name: [split.reads[i] for split, _ in cut] for i, name in enumerate(whole.values)}
    writes = [[split.writes[i] for split, _ in cut] for i in range(len(whole.outputs))]
    dims = [[code if code >= 0 else None for code in codes] for codes in writes]
    # As `kernels.divided` does, so that the parts of a mean add up.
    shares = [prod(n for code, (_, n) in zip(codes, cut, strict=True) if code == MEAN) for codes in writes]
    runs: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for at in itertools.product(*(range(parts) for _, parts in cut)):
        values = {name: _piece(value, reads[name], cut, at) for name, value in whole.values.items()}
        given = [_piece(g, of, cut, at) for g, of in zip(whole.given, dims, strict=True)]
        given = [g / share if share > 1 else g for g, share in zip(given, shares, strict=True)]
        outputs, gradients = backward(probe, values, given)
        runs[at] = [*outputs, *gradients]
    learning = [of for name, of in reads.items() if probe.graph.tensors[name].requires_grad]
    # For each result: the dims that are cut, the loops along which parts add up, and the sum's divisor.
    added = [[code in (SUM, MEAN) for code in codes] for codes in writes]
    added += [[dim is None for dim in of] for of in learning]
    wanted = [*whole.outputs, *whole.gradients]
    ways = zip(wanted, [*dims, *learning], added, [*shares, *(1 for _ in learning)], strict=True)
    for place, (result, of, adds, share) in enumerate(ways):
        for at in runs:
            ranges = (range(n) if add else (a,) for a, add, (_, n) in zip(at, adds, cut, strict=True))
            first, *others = (runs[member][place] for member in itertools.product(*ranges))
            total = sum(others, first)
            total = total / share if share > 1 else total
            if not close(total, _piece(result, of, cut, at), whole.tolerance):
                return False
    return True


def _piece(value: torch.Tensor, dims: Sequence[int | None], cut: _Cut, at: Sequence[int]) -> torch.Tensor:
    for dim, (_, parts), index in zip(dims, cut, at, strict=True):
        if dim is not None:
            value = value.chunk(parts, dim)[index]
    # A copy, so that an operator that reads beyond a piece (by strides) does not find the whole.
    return value.clone(memory_format=torch.contiguous_format)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if expected.is_complex():
        # Part by part, because complex numbers may have infinities and NaN in either part.
        return actual.is_complex() and close(_parts(actual), _parts(expected), tolerance)
    if actual.is_complex():
        return False
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    if expected.element_size() == 1:
        actual, expected = actual.float(), expected.float()  # few operators take such types
    finite = expected.nan_to_num(posinf=0.0, neginf=0.0).abs()
    # Cancelled sums are as inexact as their largest summand, so the absolute tolerance grows with the tensor.
    scale = 1.0 + (float(finite.max()) if finite.numel() else 0.0)
    actual = actual.to(expected.dtype)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _parts(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value.resolve_conj())


def fewest_and_most(size: int) -> tuple[int, int]:
    """Return the smallest and the largest number of equal parts into which a check splits a loop."""
    fewest = next(p for p in range(2, size + 1) if size % p == 0)
    return fewest, max((p for p in range(2, min(size, MOST_PARTS) + 1) if size % p == 0), default=fewest)
