"""Fake tensors lie in as much memory as the results of real kernels."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensoropt.ops.quantised import QuantisedProduct, WeightBytes, quantised
from tensoropt.profiling.fact_finding import KernelStorages, _Probe
from tests.models import Call

FOLDED = (
    lambda m, x: functional.fold(functional.unfold(x * m.w, 3, padding=1), (12, 16), 3, padding=1),
    (torch.randn(4, 8, 12, 16),),
    {"w": (16,)},
)


def _in_bytes(scheme: str) -> Any:
    """The kernel of a layer of bytes; the layer itself is one operator, of which a fake one makes nothing."""
    stored = [part for part in quantised(torch.randn(12, 768), scheme) if part is not None]

    def product(m: Any, x: torch.Tensor, *parts: torch.Tensor) -> Any:
        return QuantisedProduct.apply(x * m.w, *WeightBytes(*parts), None, scheme)

    return product, (torch.randn(4, 768), *stored), {"w": (768,)}


OTHERS = {"folded": FOLDED, "int8": _in_bytes("int8"), "nf4-double": _in_bytes("nf4-double")}


class Storages(TorchDispatchMode):
    """Bytes of the storages of all results, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if func.namespace == "aten" and func is not torch.ops.aten.detach.default:
            self.found.append((str(func), sizes))
        return result


def storages(call: Any, *, fake: bool) -> list[tuple[str, list[int]]]:
    function, args, parameters = call
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if fake:
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(KernelStorages())
            args = tuple(mode.from_tensor(value) for value in args)
        model, watch = Call(function, **parameters), Storages()
        with watch:
            model(*args).square().sum().backward()
    return watch.found


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_storages_are_those_of_real_kernels(call: Any) -> None:
    assert storages(call, fake=True) == storages(call, fake=False)


def test_a_storage_in_the_place_of_one_that_is_gone_is_another():
    probe = _Probe.__new__(_Probe)
    first, second = object(), object()
    call = SimpleNamespace(function="aten.add.Tensor", args=(), kwargs={})
    probe.work = SimpleNamespace(calls=[(call, ())] * 3)
    probe.parameters, probe.calls, probe.made_by = set(), [], {}
    probe.tensors, probe.sizes, probe.work_of_calls = {}, {}, []
    probe.live = SimpleNamespace(storages={7: first}, peak=0, flops=0, traffic=0)
    probe.peaks = SimpleNamespace(book=lambda _: None)
    probe._after_call(0)
    probe._after_call(1)
    assert probe._made_at(7) == 0
    probe.live.storages = {7: second}
    probe._after_call(2)
    assert probe._made_at(7) == 2
    assert probe._made_at(8) == 0


@pytest.mark.parametrize(
    ("steps", "batch", "inputs", "hidden", "off"),
    [(24, 6, 16, 32, 0.0), (16, 1, 64, 64, 0.0), (40, 3, 70, 50, 0.0), (48, 30, 70, 50, 0.02)],
)
def test_recurrent_layers_keep_their_real_workspace(
    steps: int, batch: int, inputs: int, hidden: int, off: float
):
    """The fake kernel makes an empty one, where the real one is most of what the layer keeps. Where it is
    small, whole pages count: one sample of 16 steps keeps a third more than its share of eight."""
    gates = 4 * hidden
    weights = [torch.zeros(s) for s in ((gates, inputs), (gates, hidden), (gates,), (gates,))]
    call = (torch.zeros(steps, batch, inputs), *weights, *torch.zeros(2, 1, batch, hidden))
    settings = (False, (), 2, hidden, 1, True, False, False, True)
    real = torch.ops.aten.mkldnn_rnn_layer(*call, *settings)[3].untyped_storage().nbytes()
    with FakeTensorMode(allow_non_fake_inputs=True), KernelStorages():
        fake = torch.ops.aten.mkldnn_rnn_layer(*call, *settings)[3].untyped_storage().nbytes()
        with torch.no_grad():
            assert torch.ops.aten.mkldnn_rnn_layer(*call, *settings)[3].untyped_storage().nbytes() == 0
    assert fake == pytest.approx(real, rel=off)
