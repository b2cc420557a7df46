"""Which operators have a kernel for which type of device."""

from __future__ import annotations

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


@torch.library.custom_op("tensoropt_tests::on_cpus", mutates_args=(), device_types="cpu")
def on_cpus(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("tensoropt_tests::anywhere", mutates_args=())
def anywhere(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


HAVE = {
    "aten.linear.default": (True, True),
    "aten.add.Tensor": (True, True),
    "aten.histogram.bin_ct": (True, False),
    "tensoropt_tests.on_cpus.default": (True, False),
    "tensoropt_tests.anywhere.default": (True, True),
    "expert_kernels.experts": (True, True),
    "nobody.knows.default": (None, None),
}


def test_operators_have_kernels_on_cpus_and_gpus() -> None:
    """Those in Python say themselves, and our own kernels call operators for any device."""
    assert {target: (has_kernel(target, "cpu"), has_kernel(target, "cuda")) for target in HAVE} == HAVE
