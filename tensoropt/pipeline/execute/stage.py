"""One pipeline stage on one rank: a sharded engine that a schedule of PyTorch runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from tensoropt.engine import runtime
from tensoropt.engine.engine import TargetCounts
from tensoropt.engine.gathering import CallAhead, UnshardedParameters
from tensoropt.engine.gradients import Gradients, Pending
from tensoropt.engine.parameters import LocalParameters, ParameterShards, gathers_state
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.ops.layouts import local_shape
from tensoropt.pipeline.stages import Stage, arriving_group, departing_group
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.profiling.fact_finding import add_weight_gradients
from tensoropt.sharding.reshard.redistribute import AT_THE_USE, Ahead
from tensoropt.sharding.strategy import Strategy


class TrailingGradients:
    """Gradients of a rank's latest backward, reduce-scattered while the rank goes on computing."""

    def __init__(self) -> None:
        self._calls: list[tuple[CallAhead, Gradients, bool]] = []

    def add(self, call: CallAhead, gradients: Gradients, *, last: bool) -> None:
        """Add a finished backward's gradients. ``last``: whether no later micro-batch adds to them."""
        self._calls.append((call, gradients, last))

    def take_in(self) -> None:
        while self._calls:
            call, gradients, last = self._calls.pop(0)
            with nullcontext() if last else gradients.of_earlier():
                call.finish()


class StagedParameters(LocalParameters):
    """A rank's shards of a pipelined plan's parameters, from all stages that the rank computes."""

    def __init__(self, strategy: PipelinedStrategy, stages: Sequence[ParameterShards]):
        self.strategy = strategy
        self.leaves = {name: leaf for stage in stages for name, leaf in stage.leaves.items()}
        self.buckets = [stage.accumulated for stage in stages]
        self._stage_of = {name: stage for stage in stages for name in stage.leaves}

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self._stage_of[name].shard(name, value)

    def copies(self, name: str) -> int:
        """Return the number of ranks with the same shard, over all stages that use the parameter."""
        stage = self._stage_of.get(name)
        return 1 if stage is None else len(self.strategy.holders(name)) * stage.copies(name)

    def shard_index(self, name: str) -> tuple[int, ...]:
        return self._stage_of[name].shard_index(name)

    def replica_axes(self, name: str) -> tuple[int, ...]:
        """Return the axes of the job's mesh along which a parameter is replicated."""
        # After the micro-batch axis, the job's mesh has a pipeline axis, which a stage's mesh lacks.
        return tuple(axis + 1 for axis in self._stage_of[name].replica_axes(name))

    @property
    def gathers_state(self) -> bool:
        """Whether collecting a state dict takes collectives, for parameters or buffers."""
        return bool(self.strategy.graph.atoms.graph.mutations) or gathers_state(*self.strategy.stages)

    def in_own_shape(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard as a DTensor over the stage's ranks, in the parameter's own shape."""
        stage, part = self._stage_of[name], value.detach()
        if stage.runtime.device_mesh is None:
            return part.reshape(stage.strategy.tensor(name).shape)
        # A fused projection that is split by heads is gathered: its shards are not slices of the flat shape.
        return stage.in_own_shape(name, stage.distributed(name, part))


class TiedParameters:
    """Parameters that several stages use: copies in each stage, whose gradients are summed once per step.

    Megatron-LM does the same for an embedding tied to the head (Narayanan et al., SC 2021).
    """

    def __init__(self, strategy: PipelinedStrategy, runtime: Runtime):
        self.groups: dict[str, dist.ProcessGroup] = {}
        inner = strategy.devices_per_place
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name in strategy.tied:
            if not strategy.graph.atoms.graph.tensors[name].requires_grad:
                continue
            places = tuple(sorted(strategy.place_of(stage) for stage in strategy.holders(name)))
            # All ranks create all process groups, in the same order.
            for offset in range(inner):
                ranks = tuple(place * inner + offset for place in places)
                if ranks not in made:
                    everyone = len(ranks) == strategy.devices
                    made[ranks] = dist.group.WORLD if everyone else dist.new_group(list(ranks))
                if runtime.rank in ranks:
                    group = made[ranks]
                    assert group is not None
                    self.groups[name] = group

    @torch.no_grad()
    def add_up(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sum the gradients of tied parameters over the stages that use them."""
        for name, group in self.groups.items():
            dist.all_reduce(gradients[name], group=group)


class StageEngine(ShardedEngine):
    """The engine of one stage on this rank.

    Args:
        values: parameters and buffers by graph name; only the stage's own are read.
        trailing: the rank's gradients that are being reduce-scattered, shared by all of its stages.

    Attributes:
        given: the model's inputs in the current call.
        outputs: micro-batch -> the model's results that this stage computes.
        gradients: micro-batch -> index of a tensor sent on -> its gradient, until autograd takes it.
    """

    def __init__(
        self,
        part: Stage,
        strategy: Strategy,
        values: Mapping[str, torch.Tensor],
        runtime: Runtime,
        trailing: TrailingGradients | None = None,
    ):
        super().__init__(strategy, values, runtime=runtime)
        self.part = part
        self.given: tuple[torch.Tensor, ...] = ()
        self.evaluating = False
        self.outputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self.gradients: dict[int, dict[int, torch.Tensor]] = {}
        # The calls with gathered parameters, for the micro-batches whose backward is still to come.
        self._ahead_of: dict[int, Ahead] = {}
        self._trailing = TrailingGradients() if trailing is None else trailing
        # Unsharded copies, gathered from the beginning of the step on.
        self._copying: CallAhead | None = None
        self._last = False

    def _make_counts(self) -> TargetCounts | None:
        # The pipeline's engine counts for the whole model, also the targets that other stages prepare.
        return None

    # -- a step ---------------------------------------------------------------------------------------

    def begin_step(
        self, inputs: Sequence[torch.Tensor], pending: Pending | None, *, evaluating: bool
    ) -> None:
        """Prepare for a call of the model. ``pending``: the step, if its backward follows; otherwise None."""
        self.given, self.evaluating = tuple(inputs), evaluating
        self.outputs.clear()
        self.unsharded.gather()
        # All stages of a rank begin here, long before most of them have anything to compute.
        self._copying = CallAhead(self.runtime, {}, {}, self._deliver, [], self.unsharded)
        self._copying.begin_copies(self.unsharded.blocks)
        if pending is not None:
            self.shards.accumulated.occupy(pending)
            self.unsharded.clear()

    def forward_of(self, micro_batch: int, arriving: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run one micro-batch's forward; return the tensors to send on, or the last stage's results."""
        self.runtime.micro_batch = micro_batch
        if self._copying is not None:
            self._copying.arrive()
            self._copying = None
        # Autograd copies a gradient that reaches a leaf while something else refers to it. Each arriving
        # tensor gets a node of its own, which comes last in backward, so that its gradient waits until
        # nothing refers to it.
        arriving = [value.view_as(value) for value in arriving]
        all_results = self._micro_batch((*self.given, *arriving), self.evaluating)
        ahead, self.runtime.ahead = self.runtime.ahead, AT_THE_USE
        if self.part.has_backward:
            self._ahead_of[micro_batch] = ahead
        results, departing = all_results[: len(self.source.outputs)], all_results[len(self.source.outputs) :]
        self.outputs[micro_batch] = tuple(value.detach() for value in results)
        sent = []
        for number, (name, value) in enumerate(zip(self.part.departing, departing, strict=True)):
            # The graph says whether a gradient comes back; the next stage relies on it as well.
            learns = self.source.tensors[name].requires_grad
            if learns and value.requires_grad:
                value.register_hook(functools.partial(self._take_gradient, micro_batch, number))
            sent.append(value if learns else value.detach())
        return tuple(sent) or results

    def _take_gradient(self, micro_batch: int, number: int, place: torch.Tensor) -> torch.Tensor:
        return self.gradients[micro_batch].pop(number)

    def begin_backward_of(self, micro_batch: int, *, last: bool) -> None:
        """Prepare for one micro-batch's backward. ``last``: whether it is the step's last one."""
        self.runtime.micro_batch = micro_batch
        self.runtime.ahead = self._ahead_of.pop(micro_batch, AT_THE_USE)
        self.shards.accumulated.one_call = True
        self._last = last
        # As in a plan without stages: a single micro-batch has nothing to wait for, and reduces gradients one
        # by one.
        self.unsharded.last = last and self.strategy.micro_batches > 1
        if last:
            self.shards.accumulated.begin_last()

    def end_backward_of(self) -> None:
        self._trailing.take_in()
        while self._calls:
            self._calls[0].leave()
            self._trailing.add(self._calls.pop(0), self.shards.accumulated, last=self._last)
        self._waiting = 0
        self.runtime.ahead = AT_THE_USE

    def _copies_to_make(self) -> UnshardedParameters | None:
        return None  # see begin_step()

    def end_step(self) -> None:
        """Reduce the remaining gradients after all micro-batches."""
        self.runtime.micro_batch = 0
        self.given = ()
        self.gradients.clear()
        self._take_buffers()
        self.unsharded.reduce_last(self.shards.accumulated)

    # -- what crosses -----------------------------------------------------------------------------------

    def shown(self, names: Sequence[str], *, arriving: bool) -> tuple[torch.Tensor, ...]:
        """Return meta tensors with the local shapes and dtypes of arriving or departing tensors."""
        examples = []
        for name in names:
            group = (arriving_group if arriving else departing_group)(name)
            layout, tensor = self.strategy.configurations[group].layout(name), self.source.tensors[name]
            # A tensor that is whole on the micro-batch axis is the same in all micro-batches.
            shape = local_shape(self.strategy.atoms(name), layout, self.strategy.mesh, self.runtime.place)
            examples.append(
                torch.empty(
                    shape,
                    dtype=getattr(torch, tensor.dtype),
                    device="meta",
                    requires_grad=tensor.requires_grad,
                )
            )
        return tuple(examples)


class _StageModule(nn.Module):
    """The module that PyTorch's schedule calls: it calls a stage's engine and lists trained parameters."""

    engine: StageEngine

    def __init__(self, engine: StageEngine):
        super().__init__()
        # Neither a submodule nor a registered attribute: ``parameters`` below yields the parameters.
        object.__setattr__(self, "engine", engine)
        self.micro_batch = 0

    def forward(self, *arriving: torch.Tensor) -> Any:
        results = self.engine.forward_of(self.micro_batch, arriving if self.engine.part.arriving else ())
        return results[0] if not self.engine.part.departing else results

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        leaves: Any = [leaf for leaf in self.engine.shards.leaves.values() if leaf.requires_grad]
        return iter(leaves)


class _Voted:
    """The result of the vote in which PyTorch asks whether stages know their shapes: they always do."""

    def item(self) -> int:
        return 1


class _Messages:
    """The tensors of messages in flight in one direction, by micro-batch.

    Schedules keep references to sent and received tensors until the step ends. Each message therefore uses a
    second tensor on the same memory, which gives the memory up once the message is complete. Messages through
    host memory (:func:`tensoropt.engine.runtime.through_host`) use copies in host memory.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}

    def of(self, micro_batch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        messages: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for op in ops:
            own: torch.Tensor = op.tensor.detach()
            buffer: torch.Tensor | None = None
            if runtime.through_host(own.device):
                buffer = own if op.op is dist.irecv else None
                op.tensor = (
                    own.to("cpu", copy=True) if buffer is None else torch.empty_like(own, device="cpu")
                )
            else:
                op.tensor = own.new_empty(0).set_(own)  # type: ignore[call-overload]
            messages.append((op.tensor, buffer))
        self._tensors[micro_batch] = messages
        return ops

    def came(self, *micro_batches: int) -> None:
        for micro_batch in micro_batches:
            for tensor, buffer in self._tensors.pop(micro_batch, ()):
                if buffer is not None:
                    buffer.copy_(tensor)
                tensor.set_()  # type: ignore[call-overload]

    def all_came(self) -> None:
        self.came(*self._tensors)


def _contiguous(gradients: Iterable[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    made: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is None or gradient.is_contiguous():
            made.append(gradient)
            continue
        # Fake tensors have no addresses, so the storage itself is compared.
        storage, start = gradient.untyped_storage()._cdata, gradient.storage_offset()
        view = storage, start, gradient.shape, gradient.stride()
        if view not in copies:
            copies[view] = gradient.contiguous()
        made.append(copies[view])
    return tuple(made)


class RunningStage(PipelineStage):
    """A stage that frees received tensors in their backward, and sent tensors once they are surely received.

    Args:
        engine: the engine of the stage on this rank.
        index, count: the stage's number, and the number of stages.
        group: the process group of the ranks at the same position in each device group.
        taken: micro-batch of a forward -> the micro-batches whose gradients the previous stage has surely
            received by then (:func:`tensoropt.pipeline.receipts.taken_back`).
        taken_on: in a stage without backward, (kind of action, micro-batch) -> the micro-batches whose
            activations the next stage has surely received by then
            (:func:`tensoropt.pipeline.receipts.taken_on`).
        waits: whether the schedule waits for each sent gradient before it sends the next one.
    """

    def __init__(
        self,
        engine: StageEngine,
        index: int,
        count: int,
        group: dist.ProcessGroup,
        taken: Mapping[int, Sequence[int]],
        taken_on: Mapping[tuple[str, int], Sequence[int]],
        *,
        waits: bool,
    ):
        self.engine = engine
        self._module = _StageModule(engine)
        self._taken, self._taken_on, self._waits = taken, taken_on, waits
        self._coming, self._going = _Messages(), _Messages()
        self._coming_back, self._going_back = _Messages(), _Messages()
        part = engine.part
        first = (torch.empty(1, device="meta"),)  # schedules want an argument of the first stage
        super().__init__(
            self._module,
            index,
            count,
            engine.runtime.device,
            input_args=engine.shown(part.arriving, arriving=True) or first,
            output_args=engine.shown(part.departing, arriving=False) or first,
            group=group,
        )
        # The stand-ins for gradients need no check; shapes are known beforehand.
        self._runtime_validate = False

    @property
    def has_backward(self) -> bool:
        """Whether the stage runs a backward in this call."""
        return self._has_backward and self.engine.part.has_backward

    @has_backward.setter
    def has_backward(self, has_backward: bool) -> None:
        self._has_backward = has_backward

    # -- without messages before the first step ------------------------------------------------------------

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> Any:
        # Every stage knows its shapes; no exchange is needed.
        return _Voted()

    def _warmup_backward_result(self, received_result: Any = None) -> Any:
        return _Voted()

    # -- buffers --------------------------------------------------------------------------------------------

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._drop_buffers(self.args_recv_info)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._drop_buffers(self.grad_recv_info)

    @staticmethod
    def _drop_buffers(infos: Mapping[int, Sequence[Any]]) -> None:
        """Free the receive buffers that PyTorch allocates for all micro-batches ahead of time."""
        for chunk_infos in infos.values():
            for info in chunk_infos:
                info.buffer = None

    def _make_room(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive operations before a forward, which write into new buffers."""
        self._make_room(self.args_recv_info[fwd_chunk_id])
        return self._coming.of(fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive operations before a backward, which write into new buffers."""
        if self.has_backward and not self.is_last:
            self._make_room(self.grad_recv_info[bwd_chunk_id])
        return self._coming_back.of(bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        """Return placeholders for received gradients: PyTorch would keep the gradients themselves alive."""
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        for info in self.grad_recv_info[bwd_chunk_id]:
            info.buffer = None
        self.engine.gradients[bwd_chunk_id] = {
            n: gradient for n, gradient in enumerate(received) if gradient is not None
        }
        return tuple(
            None if gradient is None else gradient.new_empty(()).expand(gradient.shape)
            for gradient in received
        )

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the activations that another stage on the same rank passes on."""
        super().set_local_fwd_input(prev_stage_outputs, mb_index)
        if not self.engine.part.returns_gradients:
            self._empty(prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients for the previous stage on the same rank; empty without a backward."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients that another stage on the same rank passes back."""
        if not self.has_backward:
            return
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            self._make_room(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send a micro-batch's activations to the next stage."""
        if not self.has_backward:
            self._release_sent("F", fwd_chunk_id)
        return self._going.of(fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def _release_sent(self, kind: str, micro_batch: int) -> None:
        for sent in self._taken_on.get((kind, micro_batch), ()):
            outputs, _ = self.fwd_cache.pop(sent)
            self._empty(outputs)
            self._going.came(sent)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send a micro-batch's gradients to the previous stage."""
        if self._waits:
            self._going_back.all_came()
        if self.has_backward and not self.is_first:
            self.bwd_cache[bwd_chunk_id] = _contiguous(self.bwd_cache[bwd_chunk_id])
        return self._going_back.of(bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def release_messages(self) -> None:
        """Release the memory of all messages before the optimizer's step."""
        for messages in (self._coming, self._going, self._coming_back, self._going_back):
            messages.all_came()
        self.fwd_cache.clear()

    @staticmethod
    def _empty(values: Iterable[torch.Tensor]) -> None:
        """Free the memory of tensors, but keep their shapes and autograd nodes."""
        for value in values:
            value.data = value.new_empty(()).expand(value.shape)

    # -- micro-batches ----------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._module.micro_batch = fwd_chunk_id
        self._coming.came(fwd_chunk_id)
        self._going_back.came(*self._taken.get(fwd_chunk_id, ()))
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = None
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        if not self.has_backward:
            # Nothing needs the outputs once they have been sent (_release_sent).
            self.fwd_cache[fwd_chunk_id] = outputs, []
        elif not self.is_first:
            # Operators that need the inputs hold them; the schedule only needs their gradients.
            self._empty(inputs)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a micro-batch's backward; unless ``full_backward``, only for gradients of arriving tensors."""
        if not self.has_backward:
            self._release_sent("B", bwd_chunk_id)
            return
        # Its gradient is here, so the next stage has received the tensor that it belongs to.
        self._going.came(bwd_chunk_id)
        self._coming_back.came(bwd_chunk_id)
        if not self.is_last:
            # The schedule holds the outputs until backward is over, but only needs their autograd nodes.
            self._empty(self.fwd_cache[bwd_chunk_id][0])
        arrived = self.fwd_cache[bwd_chunk_id][1]
        self.engine.begin_backward_of(bwd_chunk_id, last=last_backward and full_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.engine.end_backward_of()
        if not full_backward and self.engine.part.returns_gradients:
            # The graph holds the arrived tensors for the gradients of parameters; their own gradients are
            # sent.
            for value in arrived:
                value.grad = None
            # The gradients of parameters need only the groups; the rest would keep messages in memory.
            _, groups, _, _ = self.backward_state[bwd_chunk_id]
            self.backward_state[bwd_chunk_id] = (), groups, (), None

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run the backward that ``backward_type`` names: ``full``, only ``input`` or only ``weight``."""
        if backward_type == "weight":
            add_weight_gradients(bwd_kwargs["param_groups"])
            return (), None
        if backward_type == "input" and not self.engine.part.returns_gradients:
            # No stage waits for gradients, so all are computed in the second part. The schedule detaches a
            # loss in place, but not another view of it.
            outputs = bwd_kwargs["stage_output"]
            bwd_kwargs["stage_output"] = tuple(value.view_as(value) for value in outputs)
            return (None,) * len(bwd_kwargs["input_values"]), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second part of a split backward, or all of it if the stage returns no gradients."""
        if not self.has_backward:
            return
        self.engine.begin_backward_of(bwd_chunk_id, last=last_backward)
        if self.engine.part.returns_gradients:
            accumulated = self.engine.shards.accumulated
            # Gradients are added up as they are computed; PyTorch would keep the first micro-batch's.
            accumulated.complete()
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            # PyTorch sums these itself, so no hook of the leaves sees them.
            for name in accumulated.views:
                accumulated.take_in(name)
        else:
            del self.dw_runner[bwd_chunk_id]
            inputs, _, outputs, gradients = self.backward_state.pop(bwd_chunk_id)
            whole = {
                # PyTorch takes a loss, which has no gradient, only by itself.
                "stage_output": outputs[0] if self.is_last else outputs,
                "output_grads": gradients,
                "input_values": inputs,
            }
            self.backward_maybe_with_nosync("full", whole, last_backward=last_backward)
        self.engine.end_backward_of()
