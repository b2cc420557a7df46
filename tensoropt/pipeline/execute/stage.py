"""One stage of a pipeline on one rank: a sharded engine whose micro-batches a schedule runs.

The schedule is PyTorch's: it asks a :class:`~torch.distributed.pipelining.PipelineStage` for forward and
backward of single micro-batches, and for what is sent and received between them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from tensoropt.engine.ahead import CallAhead
from tensoropt.engine.counts import TargetCounts
from tensoropt.engine.gradients import Pending
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.engine.unsharded import UnshardedParameters
from tensoropt.ops.layouts import local_shape
from tensoropt.pipeline.execute.trailing import Trailing
from tensoropt.pipeline.stages import Stage, arriving_group, departing_group
from tensoropt.sharding.reshard.redistribute import AT_THE_USE, Ahead
from tensoropt.sharding.strategy import Strategy


class StageEngine(ShardedEngine):
    """The strategy of one stage on this rank.

    Args:
        part: the stage.
        strategy: of its graph.
        values: the whole model's parameters and buffers by graph name; only the stage's are asked for.
        runtime: where this rank stands in the stage's mesh.
        trailing: gradients that are on their way behind backwards of this place's stages.

    Attributes:
        given: the model's inputs of the call that runs.
        outputs: what the model returns and this stage has made, per micro-batch.
        gradients: of what departs, by place, as received for a micro-batch; each goes with the node that
            takes it.
    """

    def __init__(
        self,
        part: Stage,
        strategy: Strategy,
        values: Mapping[str, torch.Tensor],
        runtime: Runtime,
        trailing: Trailing | None = None,
    ):
        super().__init__(strategy, values, runtime=runtime)
        self.part = part
        self.given: tuple[torch.Tensor, ...] = ()
        self.evaluating = False
        self.outputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self.gradients: dict[int, dict[int, torch.Tensor]] = {}
        # What is gathered ahead of the micro-batches whose backward is still to come.
        self._ahead_of: dict[int, Ahead] = {}
        self._trailing = Trailing() if trailing is None else trailing
        # Unsharded copies that are gathered from the beginning of the step on.
        self._copying: CallAhead | None = None
        self._last = False

    def _make_counts(self) -> TargetCounts | None:
        # Of the whole model, which also knows the targets of a loss that other stages prepare.
        return None

    # -- a step ---------------------------------------------------------------------------------------

    def begin_step(
        self, inputs: Sequence[torch.Tensor], pending: Pending | None, *, evaluating: bool
    ) -> None:
        """Make ready for a call of the model.

        Args:
            pending: of one that is followed by a backward; its gradients wait for the script's.
        """
        self.given, self.evaluating = tuple(inputs), evaluating
        self.outputs.clear()
        self.unsharded.gather()
        # All stages of a place begin here, long before most of them have anything to compute.
        self._copying = CallAhead(self.runtime, {}, {}, self._deliver, [], self.unsharded)
        self._copying.begin_copies(self.unsharded.blocks)
        if pending is not None:
            self.shards.accumulated.occupy(pending)
            self.unsharded.clear()

    def forward_of(self, micro_batch: int, arriving: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What departs of one micro-batch; of the last stage its results."""
        self.runtime.micro_batch = micro_batch
        if self._copying is not None:
            self._copying.arrive()
            self._copying = None
        # Autograd copies what comes to a leaf while somebody else has it. Behind a node of its own, which
        # comes last in backward, the gradient of what arrived waits until nobody has.
        arriving = [value.view_as(value) for value in arriving]
        found = self._micro_batch((*self.given, *arriving), self.evaluating)
        self._ahead_of[micro_batch], self.runtime.ahead = self.runtime.ahead, AT_THE_USE
        results, departing = found[: len(self.source.outputs)], found[len(self.source.outputs) :]
        self.outputs[micro_batch] = tuple(value.detach() for value in results)
        sent = []
        for number, (name, value) in enumerate(zip(self.part.departing, departing, strict=True)):
            # The graph says whether a gradient comes back, which is what the next stage goes by as well.
            learns = self.source.tensors[name].requires_grad
            if learns and value.requires_grad:
                value.register_hook(functools.partial(self._take_gradient, micro_batch, number))
            sent.append(value if learns else value.detach())
        return tuple(sent) or results

    def _take_gradient(self, micro_batch: int, number: int, place: torch.Tensor) -> torch.Tensor:
        """The gradient of something that departed, in the place of what autograd was called with."""
        return self.gradients[micro_batch].pop(number)

    def begin_backward_of(self, micro_batch: int, *, last: bool) -> None:
        """The backward of a micro-batch begins, with ``last`` that of the last one to come."""
        self.runtime.micro_batch = micro_batch
        self.runtime.ahead = self._ahead_of.pop(micro_batch, AT_THE_USE)
        self.shards.accumulated.one_call = True
        self._last = last
        # As in a plan without stages: the only micro-batch has nothing to wait for, and reduces one by one.
        self.unsharded.last = last and self.strategy.micro_batches > 1
        if last:
            self.shards.accumulated.begin_last()

    def end_backward_of(self) -> None:
        """The backward of a micro-batch is over."""
        self._trailing.take_in()
        while self._calls:
            self._calls[0].leave()
            self._trailing.add(self._calls.pop(0), self.shards.accumulated, last=self._last)
        self._waiting = 0
        self.runtime.ahead = AT_THE_USE

    def _copies_to_make(self) -> UnshardedParameters | None:
        return None  # see begin_step()

    def add_up_weights(self) -> None:
        """The gradients of parameters that come now are to be added to what is there, each once it is made.

        PyTorch's way to make them apart would otherwise have those of the first micro-batch all at once.
        """
        self.shards.accumulated.complete()

    def take_in_weights(self) -> None:
        """Take in the gradients of parameters that were made apart from those of what arrived."""
        for name in self.shards.accumulated.views:
            self.shards.accumulated.take_in(name)

    def end_step(self) -> None:
        """All micro-batches are over: reduce what is not reduced yet."""
        self.runtime.micro_batch = 0
        self.given = ()
        self.gradients.clear()
        self._take_buffers()
        self.unsharded.reduce_last(self.shards.accumulated)

    # -- what crosses -----------------------------------------------------------------------------------

    def shown(self, names: Sequence[str], *, arriving: bool) -> tuple[torch.Tensor, ...]:
        """What arrives, or departs, as tensors without data: shapes and types of this rank's parts."""
        found = []
        for name in names:
            group = (arriving_group if arriving else departing_group)(name)
            layout, tensor = self.strategy.configurations[group].layout(name), self.source.tensors[name]
            # What is whole on the micro-batch axis is the same in all of them.
            shape = local_shape(self.strategy.atoms(name), layout, self.strategy.mesh, self.runtime.place)
            found.append(
                torch.empty(
                    shape,
                    dtype=getattr(torch, tensor.dtype),
                    device="meta",
                    requires_grad=tensor.requires_grad,
                )
            )
        return tuple(found)


class _StageModule(nn.Module):
    """What the schedule takes for the stage's module."""

    engine: StageEngine

    def __init__(self, engine: StageEngine):
        super().__init__()
        # Not a submodule, nor one of its attributes: parameters are given by name below.
        object.__setattr__(self, "engine", engine)
        self.micro_batch = 0

    def forward(self, *arriving: torch.Tensor) -> Any:
        found = self.engine.forward_of(self.micro_batch, arriving if self.engine.part.arriving else ())
        return found[0] if not self.engine.part.departing else found

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The leaves that learn; zero-bubble schedules ask for them."""
        leaves: Any = [leaf for leaf in self.engine.shards.leaves.values() if leaf.requires_grad]
        return iter(leaves)


class _Voted:
    """The outcome of a vote in which every stage knows its shapes."""

    def item(self) -> int:
        return 1


class _Messages:
    """The tensors of messages under way, of one direction, by micro-batch.

    Schedules keep messages in variables and lists until they ask for the next, or the step is over, and with
    them what was sent and received. Here each message has a tensor of its own, over the memory of what is
    sent, which is emptied once the message is known to have come: who still has it, has no memory by it.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, list[torch.Tensor]] = {}

    def of(self, micro_batch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """The messages of a micro-batch, from now on with tensors of their own."""
        for op in ops:
            op.tensor = op.tensor.new_empty(0).set_(op.tensor.detach())  # type: ignore[call-overload]
        self._tensors[micro_batch] = [op.tensor for op in ops]
        return ops

    def came(self, *micro_batches: int) -> None:
        """Those of some micro-batches have come."""
        for micro_batch in micro_batches:
            for tensor in self._tensors.pop(micro_batch, ()):
                tensor.set_()  # type: ignore[call-overload]

    def all_came(self) -> None:
        """Those of all micro-batches have come."""
        self.came(*self._tensors)


class RunningStage(PipelineStage):
    """A stage as schedules run it; what is received is there only from then until its backward is over, and
    what is sent until it has surely come.

    Args:
        engine: of the stage on this rank.
        index, count: of the stage, and how many there are.
        group: the ranks at the same place of the stages' meshes, along the pipeline.
        taken: per micro-batch those whose gradients have reached the stage before once this stage has what
            its forward takes.
        waits: whether the schedule waits for a gradient to be sent before it asks for the next to be.
    """

    def __init__(
        self,
        engine: StageEngine,
        index: int,
        count: int,
        group: dist.ProcessGroup,
        taken: Mapping[int, Sequence[int]],
        *,
        waits: bool,
    ):
        self.engine = engine
        self._module = _StageModule(engine)
        self._taken, self._waits = taken, waits
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
        # Of what stands in the place of gradients there is nothing to check; shapes are known beforehand.
        self._runtime_validate = False

    # -- without messages before the first step ------------------------------------------------------------

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> Any:
        # Every stage is told its shapes; nobody has to be asked.
        return _Voted()

    def _warmup_backward_result(self, received_result: Any = None) -> Any:
        return _Voted()

    # -- buffers --------------------------------------------------------------------------------------------

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._let_go(self.args_recv_info)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._let_go(self.grad_recv_info)

    @staticmethod
    def _let_go(infos: Mapping[int, Sequence[Any]]) -> None:
        """PyTorch makes the buffers of all micro-batches beforehand and keeps them for all steps."""
        for of in infos.values():
            for info in of:
                info.buffer = None

    def _make_room(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receipts before a forward, into buffers made now."""
        self._make_room(self.args_recv_info[fwd_chunk_id])
        return self._coming.of(fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receipts before a backward, into buffers made now."""
        if self.has_backward and not self.is_last:
            self._make_room(self.grad_recv_info[bwd_chunk_id])
        return self._coming_back.of(bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        """What autograd is called with in the place of gradients, which it takes from the engine: whoever
        calls it would have them until it is through."""
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        for info in self.grad_recv_info[bwd_chunk_id]:
            info.buffer = None
        self.engine.gradients[bwd_chunk_id] = {n: one for n, one in enumerate(received) if one is not None}
        return tuple(None if one is None else one.new_empty(()).expand(one.shape) for one in received)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Gradients from a stage of the same rank."""
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            self._make_room(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What goes to the next stage."""
        return self._going.of(fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The gradients that go back."""
        if self._waits:
            self._going_back.all_came()
        if self.has_backward and not self.is_first:
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(
                None if gradient is None else gradient.contiguous() for gradient in gradients
            )
        return self._going_back.of(bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def let_messages_go(self) -> None:
        """All was sent and received: nothing of it stays for the optimizer's step and the next forward."""
        for messages in (self._coming, self._going, self._coming_back, self._going_back):
            messages.all_came()

    @staticmethod
    def _empty(values: Iterable[torch.Tensor]) -> None:
        """Leave of tensors their shapes, and their places in autograd's graph, but not their memory."""
        for value in values:
            value.data = value.new_empty(()).expand(value.shape)

    # -- micro-batches ----------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of one micro-batch."""
        self._module.micro_batch = fwd_chunk_id
        self._coming.came(fwd_chunk_id)
        self._going_back.came(*self._taken.get(fwd_chunk_id, ()))
        found = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = None
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        if not self.has_backward:
            # Nobody comes back for it once it was sent.
            self.fwd_cache[fwd_chunk_id] = outputs, []
        elif not self.is_first:
            # Operators that need them have them; the schedule wants their gradients only.
            self._empty(inputs)
        return found

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """The backward of one micro-batch, or with ``full_backward`` unset that of what it was given."""
        if not self.has_backward:
            return
        # Its gradient is here, so that the next stage had what it was made of.
        self._going.came(bwd_chunk_id)
        self._coming_back.came(bwd_chunk_id)
        if not self.is_last:
            # The schedule has these until backward is over, and needs their nodes only.
            self._empty(self.fwd_cache[bwd_chunk_id][0])
        self.engine.begin_backward_of(bwd_chunk_id, last=last_backward and full_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.engine.end_backward_of()
        if not full_backward and not self.is_first:
            # Parameters need nothing but the groups; the rest would keep what came and what went.
            _, groups, _, _ = self.backward_state[bwd_chunk_id]
            self.backward_state[bwd_chunk_id] = (), groups, (), None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """What is left of a micro-batch's backward: the gradients of parameters."""
        if not self.has_backward:
            return
        self.engine.begin_backward_of(bwd_chunk_id, last=last_backward)
        if not self.is_first:
            self.engine.add_up_weights()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        # PyTorch adds these up itself, so that no hook of the leaves sees them; the first stage, which nobody
        # waits for, has a whole backward here.
        if not self.is_first:
            self.engine.take_in_weights()
        self.engine.end_backward_of()
