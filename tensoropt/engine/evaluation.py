"""Evaluation of a parallelized model: all of its outputs, for calls of any shape.

The plan's graph computes only the loss, for one batch shape. Other calls in eval mode without gradients get
a graph of their own: one for each form (structure of the arguments, and tensor shapes without the rows).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from tensoropt.capture import Capture, WithResults, capture
from tensoropt.engine.calls import CallingConvention
from tensoropt.engine.engine import Engine, TargetCounts
from tensoropt.engine.lowered_call import CallGraph
from tensoropt.engine.other_batches import filled, joined_loss
from tensoropt.engine.runtime import EqualShares, content_hash, gathered, text_hash
from tensoropt.engine.script_values import JobRanks
from tensoropt.errors import CaptureError, PlanError
from tensoropt.graph import OperatorGraph
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.evaluating import results_by_rows, rows_are_apart
from tensoropt.sharding.groups import group_operators
from tensoropt.sharding.strategy import Strategy

_MANY_FORMS = 8
"""The number of captured forms at which a warning advises to pad batches. An assumption."""
_PREFIX = "model."
"""The prefix of the names of parameters and buffers inside :class:`WithResults`."""


class _EvaluatedModel(Protocol):
    """The interface of :class:`~tensoropt.engine.parallel_model.ParallelModel` that evaluation uses."""

    model: nn.Module
    source: OperatorGraph
    names: dict[str, str]
    engine: Engine[Any]
    convention: CallingConvention
    captured: Capture
    device: torch.device
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    together: JobRanks | None

    @property
    def global_rows(self) -> int:
        """The number of rows in a global batch."""

    def parameter_keys(self) -> dict[str, nn.Parameter]: ...

    def plain_copy(self, values: Mapping[str, torch.Tensor]) -> nn.Module: ...


@dataclass(frozen=True)
class _Call:
    """The arguments of one call of the model on this rank, flattened.

    Attributes:
        values: the leaves of the arguments' pytree.
        spec: the structure of that pytree, (args, kwargs).
        tensors: the indices of the leaves that are tensors.
        names: index of a leaf -> its name in the plan's graph.
        divided: the indices of the tensors with a batch dim.
        fits: whether the plan's own graph can compute the call.
    """

    values: list[Any]
    spec: pytree.TreeSpec
    tensors: tuple[int, ...]
    names: Mapping[int, str]
    divided: frozenset[int]
    fits: bool

    @property
    def rows(self) -> int:
        return next((len(self.values[i]) for i in self.tensors if i in self.divided), 0)

    @cached_property
    def form(self) -> str:
        leaves = [
            (tuple(value.shape[i in self.divided :]), str(value.dtype), i in self.divided)
            if isinstance(value, torch.Tensor)
            else repr(value)
            for i, value in enumerate(self.values)
        ]
        return f"{self.spec} {leaves}"

    def described(self, labels: Mapping[str, str]) -> str:
        return ", ".join(f"{labels[self.names[i]]} {tuple(self.values[i].shape)}" for i in self.tensors)

    def example(self, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = list(self.values)
        for i in self.tensors:
            shape = (rows, *values[i].shape[1:]) if i in self.divided else values[i].shape
            values[i] = torch.zeros(shape, dtype=values[i].dtype)
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return args, kwargs

    def piece(self, start: int, rows: int, targets: Mapping[str, int]) -> list[torch.Tensor]:
        return [
            filled(self.values[i], rows, targets.get(self.names[i]), start)
            if i in self.divided
            else self.values[i]
            for i in self.tensors
        ]


class _Form:
    """The lowered graph for all calls with the same argument structure, tensor shapes and number of rows.

    Args:
        loss: a function from the model's output to its loss, if the model does not return the loss.
        everything: whether to compute all outputs instead of the loss alone.

    Attributes:
        results: the structure of the model's output, from which it is rebuilt.
        by_rows: for each result, whether it has a batch dim.
        fills: whether a row affects only its own results and the loss, so that padding rows can be added.
    """

    def __init__(
        self,
        parallel: _EvaluatedModel,
        call: _Call,
        rows: int,
        loss: Callable[[Any], torch.Tensor] | None,
        *,
        everything: bool,
    ):
        engine = parallel.engine
        self.rows, self.device = rows, parallel.device
        subject = WithResults(_on_meta(parallel), loss, parallel.captured.returned, everything=everything)
        args, kwargs = call.example(rows * engine.share.world)
        dtype = engine.source.compute_dtype
        graph = capture(subject, args, kwargs, mode="inference", dtype=dtype, compare=False).graph
        if returned := [str(t.key) for t in graph.parameters if t.name in graph.outputs]:
            raise PlanError(
                f"the model returns its parameter {returned[0].removeprefix(_PREFIX)}, of which ranks have "
                "parts; return what is computed with it, pass outputs='loss' to parallelize, or evaluate the "
                "module that `with tensoropt.whole(model) as plain:` gives"
            )
        self.groups = group_operators(refine_graph(graph))
        inputs = zip(call.tensors, graph.inputs, strict=True)
        divided = frozenset(name for i, name in inputs if i in call.divided)
        by_rows = results_by_rows(self.groups) - ({*graph.inputs} - divided)
        self.results = subject.results
        self.by_rows = [name in by_rows for name in graph.outputs]
        others = (has_rows for i, has_rows in enumerate(self.by_rows) if i != self.results.loss)
        self.fills = rows_are_apart(self.groups) and all(others)
        keys = {name: str(t.key).removeprefix(_PREFIX) for name, t in graph.tensors.items() if t.key}
        self._parallel, self._keys = parallel, keys
        self._planned = {
            t.name: parallel.names[keys[t.name]] for t in graph.parameters if keys[t.name] in parallel.names
        }
        self.lowered = engine.lowered_call(CallGraph(self.groups, self._planned, divided, by_rows))

    @cached_property
    def _targets(self) -> TargetCounts:
        return TargetCounts(self.groups, self.device)

    def _read(self, name: str) -> torch.Tensor:
        dtype = getattr(torch, self.groups.atoms.graph.tensors[name].stored_dtype)
        if name in self._planned:
            return self._parallel.engine.shards.leaves[self._planned[name]].detach().to(dtype)
        path, _, attribute = self._keys[name].rpartition(".")
        # A model shows the engine's buffers. What the loss does not use, every rank has whole.
        value: torch.Tensor = getattr(self._parallel.model.get_submodule(path), attribute)
        return value.detach().to(self.device, dtype)

    def count(self, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs = self.lowered.whole(inputs, self._targets.reads)
        tensors = self.groups.atoms.graph.tensors.values()
        buffers = {tensor.name: self._read(tensor.name) for tensor in tensors if tensor.kind == "buffer"}
        return self._targets.count(inputs, buffers)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.lowered(inputs, self._read)


def _on_meta(parallel: _EvaluatedModel) -> nn.Module:
    values = {
        key: torch.empty(parallel.shapes[key], dtype=parallel.dtypes[key], device="meta")
        for key in parallel.parameter_keys()
    }
    plain = parallel.plain_copy(values)
    for module in plain.modules():
        for name, value in module._parameters.items():
            if value is not None and not value.is_meta:  # the loss does not use it
                module._parameters[name] = nn.Parameter(value.detach().to("meta"), value.requires_grad)
    # The parallelized model's own are called around its forward.
    plain._forward_hooks.clear()
    plain._forward_pre_hooks.clear()
    return plain


class CallEvaluator:
    """Runs a parallelized model's calls in eval mode without gradients.

    Args:
        loss: a function from the model's output to its loss, if the model does not return the loss.
        compare_ranks: whether to compare the inputs of ranks that must pass the same rows.
    """

    def __init__(
        self,
        parallel: _EvaluatedModel,
        loss: Callable[[Any], torch.Tensor] | None,
        *,
        compare_ranks: bool = True,
    ):
        self.parallel, self.loss, self.compare_ranks = parallel, loss, compare_ranks
        # Ranks of other plans may pass zeros for what the plan's own graph does not read there.
        self.alike = isinstance(parallel.engine.strategy, Strategy)
        self.index, self.world = parallel.engine.share.index, parallel.engine.share.world
        # The rows of a rank in one of the plan's micro-batches; of a single row no tensor shows that it has
        # any (`batch_inputs`).
        rows = parallel.global_rows // parallel.engine.strategy.micro_batches // self.world
        self.rows = 2 if rows * self.world == 1 else rows
        self._equal_shares = EqualShares(parallel.device)
        self._forms: dict[tuple[str, int, bool], _Form] = {}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Match a call's arguments with the plan's inputs; PlanError if the model does not take them."""
        convention, device = self.parallel.convention, self.parallel.device
        values, spec = pytree.tree_flatten((args, kwargs))
        # Each leaf a tensor of its own, to know it again; a call may pass one twice.
        values = [v.detach().to(device) if isinstance(v, torch.Tensor) else v for v in values]
        tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        try:
            named = convention.names_in(*pytree.tree_unflatten(values, spec))
        except PlanError as error:
            raise PlanError(
                f"{error}; to generate, or to evaluate with other arguments, use the module that `with "
                "tensoropt.whole(model) as plain:` gives"
            ) from None
        names = {i: named[id(values[i])] for i in tensors}
        divided = frozenset(i for i, name in names.items() if name in convention.batch)
        return _Call(values, spec, tuple(names), names, divided, convention.fits(args, kwargs))

    def __call__(self, call: _Call, *, everything: bool) -> Any:
        """Return the model's output for this rank's rows; a loss in it covers the rows of all ranks.

        Args:
            everything: False if only the loss is wanted.

        Returns:
            None if only the loss is wanted and the caller can get it from the plan's own graph.

        Raises:
            PlanError: the ranks' calls differ, or their numbers of rows differ and cannot be made equal.
            CaptureError: the call cannot be captured.
        """
        rows, fits = self._agreed(call, everything)
        if fits and not everything:
            return None
        self.parallel.engine.sync_buffers()
        form, targets = self._form_for(call, rows, everything)
        size, most = form.rows, max(rows)
        made, counts = [], []
        # A batch without any row is a piece of rows that are filled up.
        for start in range(0, max(most, 1), size) if size else (0,):
            inputs = call.piece(start, size, targets)
            made.append(form(inputs))
            if most > size and form.results.loss is not None:
                counts.append(form.count(inputs))
        results = []
        for number, parts in enumerate(zip(*made, strict=True)):
            if number == form.results.loss:
                results.append(joined_loss(parts, counts))
            elif form.by_rows[number] and size:
                joined = torch.cat(parts)
                results.append(joined[: len(joined) * call.rows // (size * len(parts))])
            else:
                results.append(parts[0])
        return form.results.rebuild(results)

    def _form_for(
        self, call: _Call, rows: Sequence[int], everything: bool
    ) -> tuple[_Form, Mapping[str, int]]:
        """Return the lowered graph for a call. If padding rows are needed, also return, for each input with
        targets, the value that the loss ignores."""
        if not call.divided:
            return self._form(call, 0, everything), {}
        form = self._form(call, self.rows, everything)
        targets = self._ignored(call, form)
        if {*rows} == {self.rows}:
            return form, {}
        if form.fills and not isinstance(targets, str):
            return form, targets
        if len({*rows}) > 1:
            why = targets if isinstance(targets, str) else "results depend on other rows"
            raise PlanError(
                f"ranks evaluate {min(rows)} and {max(rows)} rows, and a smaller batch cannot be filled up, "
                f"because {why}; pass the same number of rows on every rank"
            )
        return self._form(call, rows[0], everything), {}

    def _ignored(self, call: _Call, form: _Form) -> Mapping[str, int] | str:
        if form.results.loss is None:
            return {}
        ignored = self.parallel.convention.ignored()
        if not isinstance(ignored, str) and not ignored.keys() <= {*call.names.values()}:
            return "the call has no targets that its loss could ignore"
        return ignored

    def _form(self, call: _Call, rows: int, everything: bool) -> _Form:
        key = call.form, rows, everything
        if key not in self._forms:
            # A capture makes tensors that outlive Lightning's inference mode.
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    self._forms[key] = _Form(self.parallel, call, rows, self.loss, everything=everything)
            except CaptureError as error:
                raise CaptureError(
                    f"the model cannot be captured for this call in evaluation mode: {error}; pass "
                    "outputs='loss' to parallelize if calls as in training and their loss are enough, or use "
                    "the module that `with tensoropt.whole(model) as plain:` gives"
                ) from error
            if len(self._forms) == _MANY_FORMS:
                warnings.warn(
                    f"this model was evaluated with {_MANY_FORMS} shapes of inputs, and captured again for "
                    "each; pad batches to a few lengths",
                    stacklevel=2,
                )
        return self._forms[key]

    def _agreed(self, call: _Call, everything: bool) -> tuple[list[int], bool]:
        """Return all ranks' row counts, and whether the plan's graph fits; PlanError if calls differ."""
        if self.parallel.together is None:
            return [call.rows], call.fits
        own = [self.index, call.rows, text_hash(call.form), int(call.fits)]
        content = torch.zeros((), dtype=torch.int64, device=self.parallel.device)
        if self.compare_ranks and (self.alike or everything or not call.fits):
            for number, place in enumerate(call.tensors):
                content = content + (2 * number + 1) * content_hash(call.values[place])
        row = torch.cat([torch.tensor(own, device=self.parallel.device), content.view(1)])
        rows = gathered(row).tolist()
        if len({form for _, _, form, _, _ in rows}) > 1:
            said: list[Any] = [None] * len(rows)
            labels = zip(self.parallel.source.inputs, self.parallel.convention.input_names(), strict=True)
            dist.all_gather_object(said, call.described(dict(labels)))
            other = next(rank for rank, found in enumerate(rows) if found[2] != rows[0][2])
            raise PlanError(
                f"rank {other} evaluates {said[other]}, but rank 0 {said[0]}; all ranks must pass the same "
                "arguments, differing in rows only: pad them to one length (a tokenizer does: "
                'padding="max_length", max_length=...)'
            )
        first: dict[int, int] = {}
        for rank, (share, count, _, _, values) in enumerate(rows):
            other = first.setdefault(share, rank)
            if (count, values) != (rows[other][1], rows[other][4]):
                raise PlanError(
                    f"rank {rank} passed another batch than rank {other}, and both have data_rank {share}; "
                    "ranks with the same data_rank must pass the same rows: use tensoropt.sampler"
                )
        counts = [count for _, count, _, _, _ in rows]
        fits = all(fits for _, _, _, fits, _ in rows)
        # The plan's own graph compares what it is given itself.
        if self.compare_ranks and self.alike and self.world > 1 and (everything or not fits):
            divided = [call.values[place] for place in call.tensors if place in call.divided]
            self._equal_shares.look(self.index, divided, [content for *_, content in rows])
        return counts, fits
