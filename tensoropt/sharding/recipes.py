"""Recipes for recomputation: which operators of a repeated block run again in backward, by common names.

==============================  ==========================================================================
recipe                          what runs again
==============================  ==========================================================================
``full``                        everything (Chen et al., arXiv 1604.06174)
``attention core``              attention without its projections: products of activations, the softmax
                                and what lies between (Megatron-LM's selective recomputation; Korthikanti
                                et al., arXiv 2205.05198, section 5)
``products``                    all but products and attention (torchtitan's selective recomputation by
                                operator)
``products/2``                  the same, and every second product (torchtitan's default)
``attention products``          all but attention and its projections
``query, key, value products``  all but the products before attention
``norms and activations``       norms and activation functions that no product feeds directly
==============================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from tensoropt.ops.calls import CostClass
from tensoropt.ops.registry import cost_class_of
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.regions import Region, fitting_once

_PRODUCTS = frozenset((CostClass.MATRIX, CostClass.CONVOLUTION, CostClass.RECURRENT))
_SOFTMAX = ("softmax", "_softmax")


class _Does(Enum):
    """The kinds of groups that recipes distinguish."""

    PRODUCT = "a product with parameters"
    CORE = "attention itself"
    SUM = "a sum, or a move of data"
    FUNCTION = "a norm or another function of single elements"


class _Member(NamedTuple):
    name: str
    does: _Does


_Recipe = Callable[[Sequence[_Member]], Sequence[str]]
"""Maps the groups of a block to the names of those that are not recomputed."""


def _products(block: Sequence[_Member]) -> list[str]:
    return _named(block, lambda member: member.does in (_Does.PRODUCT, _Does.CORE))


def _every_second_product(block: Sequence[_Member]) -> list[str]:
    products = [member for member in block if member.does is _Does.PRODUCT]
    again = set(products[1::2])
    return _named(block, lambda member: member.does in (_Does.PRODUCT, _Does.CORE) and member not in again)


def _attention_products(block: Sequence[_Member]) -> list[str]:
    last = max((i for i, member in enumerate(block) if member.does is _Does.CORE), default=-1)
    behind = [i for i, member in enumerate(block) if i > last and member.does is _Does.PRODUCT]
    end = behind[0] if behind and last >= 0 else last
    return _products(block[: end + 1])


def _products_before_attention(block: Sequence[_Member]) -> list[str]:
    first = next((i for i, member in enumerate(block) if member.does is _Does.CORE), 0)
    return _products(block[:first])


def _named(block: Sequence[_Member], wanted: Callable[[_Member], bool]) -> list[str]:
    return [member.name for member in block if wanted(member)]


_LIGHT = "norms and activations"
"""The recipe that recomputes no product; also the name for recomputing only a part of the same groups."""
FULL, NOTHING, GATHERED_INPUTS = "full", "none", "gathered inputs"
RECIPES: Mapping[str, _Recipe] = {
    FULL: lambda block: [],
    "attention core": lambda block: _named(block, lambda member: member.does is not _Does.CORE),
    "products": _products,
    "products/2": _every_second_product,
    "attention products": _attention_products,
    "query, key, value products": _products_before_attention,
    _LIGHT: lambda block: _named(block, lambda member: member.does is not _Does.FUNCTION),
}


def groups_run_once(graph: GroupGraph, region: Region, recipe: str) -> frozenset[str] | None:
    """Return the groups that a recipe does not recompute; None if the recipe changes nothing for the block,
    or is another name for ``full``."""
    once = fitting_once(graph, region, RECIPES[recipe](_members(graph, region)))
    if len(once) == len(region.groups) or (not once and recipe != FULL):
        return None
    return once


def recipes_of(graph: GroupGraph, region: Region) -> dict[str, frozenset[str]]:
    """Return recipe -> the groups that it does not recompute, for each that applies to the block."""
    found = {recipe: groups_run_once(graph, region, recipe) for recipe in RECIPES}
    return {recipe: once for recipe, once in found.items() if once is not None}


def recipe_name(graph: GroupGraph, region: Region, once: Collection[str]) -> str | None:
    """Return the recipe that recomputes all groups of a block except ``once``; None if no recipe does.

    ``norms and activations`` also names the recomputation of only a part of that recipe's groups.
    """
    # Plans may or may not list the groups of ``rest``, whose recomputation nobody needs.
    kept = {name for name in region.groups if name in once or name in region.rest}
    if kept == set(region.rest):
        return FULL
    found = {recipe: own.union(region.rest) for recipe, own in recipes_of(graph, region).items()}
    exact = next((recipe for recipe, own in found.items() if own == kept), None)
    return _LIGHT if exact is None and _LIGHT in found and found[_LIGHT] < kept else exact


def _members(graph: GroupGraph, region: Region) -> list[_Member]:
    groups = [graph.group_of[name] for name in region.groups]
    does = [_does(graph, group) for group in groups]
    # Scaling, masks and dropout between the two products of attention belong to it.
    core: list[int] = []
    for i, group in enumerate([*groups, None]):
        if group is not None and not (group.parameters or group.shared):
            core += [i] if does[i] is _Does.CORE else []
        elif core:
            span = range(core[0], core[-1] + 1)
            attends = any(_attends(groups[inside]) for inside in span)
            for inside in span if attends else core:
                does[inside] = _Does.CORE if attends else _Does.PRODUCT
            core = []
    return [_Member(group.name, what) for group, what in zip(groups, does, strict=True)]


def _does(graph: GroupGraph, group: Group) -> _Does:
    classes = {cost_class_of(op.target) for op in group.operators}
    if CostClass.ATTENTION in classes:
        return _Does.CORE
    if classes & _PRODUCTS:
        return _Does.PRODUCT if group.parameters or group.shared else _Does.CORE
    linear = all(graph.atoms.spaces[op.name].linear for op in group.operators)
    return _Does.SUM if linear else _Does.FUNCTION


def _attends(group: Group) -> bool:
    classes = {cost_class_of(op.target) for op in group.operators}
    named = {name for op in group.operators for name in op.target.split(".")[1:2]}
    return CostClass.ATTENTION in classes or not named.isdisjoint(_SOFTMAX)
