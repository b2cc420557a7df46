"""Which operators have a kernel for which type of device."""

from __future__ import annotations

import pytest
import torch

from tensoropt.ops.device_kernels import _cpu_only_of, has_kernel

TABLE = """\
- func: both(Tensor a) -> Tensor
  variants: function
  dispatch:
    CPU, CUDA: both
    MPS: both_mps

- func: structured(Tensor a) -> Tensor
  structured_delegate: structured.out

- func: structured.out(Tensor a, *, Tensor(a!) out) -> Tensor(a!)
  structured: True
  dispatch:
    CPU: structured_cpu

- func: composed(Tensor a) -> Tensor

- func: anywhere(Tensor a) -> Tensor
  dispatch:
    CompositeExplicitAutograd: anywhere
    CPU: anywhere_cpu

- func: alone.of_cpu(Tensor a, # a comment
    Tensor b) -> Tensor
  dispatch:
    CPU: alone
    SparseCPU: alone_sparse
  tags: core
"""


def test_the_table_of_native_functions_says_what_runs_on_cpus_alone() -> None:
    assert _cpu_only_of(TABLE) == {"structured", "structured.out", "alone.of_cpu"}


@pytest.mark.parametrize("target", ["aten.linear.default", "aten.add.Tensor", "aten.convolution.default"])
def test_most_operators_run_on_all_devices(target: str) -> None:
    assert has_kernel(target, "cpu")
    assert has_kernel(target, "cuda")


def test_a_histogram_has_no_kernel_for_gpus() -> None:
    assert has_kernel("aten.histogram.bin_ct", "cpu")
    assert has_kernel("aten.histogram.bin_ct", "cuda") is False


@torch.library.custom_op("tensoropt_tests::on_cpus", mutates_args=(), device_types="cpu")
def on_cpus(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("tensoropt_tests::anywhere", mutates_args=())
def anywhere(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_operators_in_python_say_themselves() -> None:
    assert has_kernel("tensoropt_tests.on_cpus.default", "cpu")
    assert has_kernel("tensoropt_tests.on_cpus.default", "cuda") is False
    assert has_kernel("tensoropt_tests.anywhere.default", "cuda")


def test_our_own_kernels_call_operators_for_any_device() -> None:
    assert has_kernel("expert_kernels.experts", "cuda")


def test_what_is_not_here_is_not_known() -> None:
    assert has_kernel("nobody.knows.default", "cpu") is None
    assert has_kernel("nobody.knows.default", "cuda") is None
