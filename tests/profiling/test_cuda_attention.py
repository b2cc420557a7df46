"""What GPUs' attention kernels keep, asked without a GPU: by hand, and as PyTorch itself runs them on fake
CUDA tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tensoropt.graph import Ref
from tensoropt.ops.calls import LocalCall
from tensoropt.profiling.cuda_kernels import _attention_kernel, capability_of, has_attention
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.workload import TensorSpec, Workload
from tests.profiling.test_facts import linear

V100, A100, L40S, H100 = (7, 0), (8, 0), (8, 9), (9, 0)


def attention(
    dtype: str,
    *,
    heads: tuple[int, int] = (4, 4),
    size: tuple[int, int] = (40, 32),
    mask: str = "",
    dropout: float = 0.0,
) -> Workload:
    """Attention of a batch of two; ``heads``: of queries and keys, ``size``: of sequence and heads."""
    own, keys = (TensorSpec((2, h, *size), dtype, True) for h in heads)
    inputs = [("q", own, "read"), ("k", keys, "read"), ("v", keys, "read")]
    if mask:
        inputs.append(("m", TensorSpec((2, 1, size[0], size[0]), mask, False), "read"))
    args = (Ref("q"), Ref("k"), Ref("v"), Ref("m") if mask else None, dropout, not mask)
    kwargs = {"enable_gqa": True} if heads[0] != heads[1] else {}
    call = LocalCall("aten.scaled_dot_product_attention.default", args, kwargs)
    return Workload(tuple(inputs), ((call, ("y",)),), None, ("y",), {})


def chosen(capability: tuple[int, int], dtype: torch.dtype, head: int = 64, **more: Any) -> str:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, more.get("length", 128), head, dtype=dtype) for _ in range(3))
        keys = more.get("keys", 4)
        k, v = k[:, :keys], v[:, :keys]
        mask = torch.empty(128, 128, dtype=dtype) if more.get("mask") else None
        for t in (q, k, v):
            t.requires_grad_(more.get("trained", True))
        gqa = more.get("gqa", False)
        return _attention_kernel(capability, q, k, v, mask, more.get("dropout", 0.0), True, gqa)


def test_the_kernel_follows_device_dtype_mask_and_shape():
    half, whole = torch.bfloat16, torch.float32
    assert [chosen(c, whole) for c in (V100, A100, L40S, H100)] == ["efficient"] * 4
    assert [chosen(c, half) for c in (V100, A100, L40S, H100)] == ["math", "flash", "flash", "cudnn"]
    assert chosen(V100, torch.float16) == "efficient"
    assert chosen(A100, torch.float64) == "math"
    # A mask is not for flash; cuDNN takes one.
    assert [chosen(c, half, mask=True) for c in (A100, H100)] == ["efficient", "cudnn"]
    # cuDNN wants heads of up to 128, by eights, and dropout in sixteenths.
    assert [chosen(H100, half, head) for head in (60, 128, 136)] == ["flash", "cudnn", "flash"]
    assert [chosen(H100, half, dropout=p) for p in (0.1, 0.125)] == ["flash", "cudnn"]
    assert [chosen(A100, half, head) for head in (256, 264)] == ["flash", "efficient"]
    # Consumer cards train no heads of more than 192 with flash.
    assert [chosen(L40S, half, 200, trained=t) for t in (True, False)] == ["efficient", "flash"]
    assert [chosen(L40S, half, 256, dropout=p) for p in (0.0, 0.1)] == ["flash", "efficient"]
    # The efficient kernel wants 128 bits of a head.
    assert [chosen(A100, whole, head) for head in (60, 62)] == ["efficient", "math"]


def test_groups_of_heads_are_for_flash_and_cudnn_and_broadcast_ones_for_neither():
    half, whole = torch.bfloat16, torch.float32
    assert [chosen(A100, d, keys=2, gqa=True) for d in (whole, half)] == ["math", "flash"]
    assert [chosen(H100, d, keys=2, gqa=True) for d in (whole, half)] == ["math", "cudnn"]
    assert [chosen(H100, half, keys=keys, gqa=True) for keys in (1, 3)] == ["cudnn", "math"]
    # One head of keys for all queries, without the flag, is broadcast by the math form only.
    assert [chosen(c, d, keys=1) for c in (A100, H100) for d in (whole, half)] == ["math"] * 4
    # As many heads as of queries are no groups.
    assert [chosen(c, whole, gqa=True) for c in (A100, H100)] == ["efficient"] * 2


def test_what_a_kernel_keeps_by_hand():
    rows, elements = 2 * 4 * 40, 2 * 4 * 40 * 32
    # The result, a float per row, and what random numbers begin with.
    assert find_facts(attention("bfloat16"), True, A100).kept_bytes == 2 * elements + 4 * rows + 3 * 8
    assert find_facts(attention("bfloat16"), True, H100).kept_bytes == 2 * elements + 4 * rows + 2 * 8
    # The efficient kernel's rows come in thirty-twos, and it keeps a mask that it has to make.
    padded = 2 * 4 * 64 * 4 + 2 * 8
    assert find_facts(attention("float32"), True, A100).kept_bytes == 4 * elements + padded
    masked = find_facts(attention("float32", mask="bool"), True, A100)
    assert masked.kept_bytes == 4 * elements + padded + 2 * 40 * 40 * 4
    # In inference nothing is kept, and no row's figure is made but by flash.
    assert find_facts(attention("float32"), False, A100).forward_peak_bytes == 4 * elements + 2 * 8


def test_kernels_skip_what_a_causal_mask_hides():
    size = (64, 32)
    full = 2 * 2 * (2 * 4) * 64 * 64 * 32  # two products of 2 * 4 heads
    for capability in (A100, H100):
        facts = find_facts(attention("bfloat16", size=size), capability=capability)
        assert facts.forward_flops == full * 65 / 128  # the diagonal and what is below
        # Backward makes the scores anew: five products.
        assert facts.backward_flops == 2.5 * facts.forward_flops
    assert find_facts(attention("float32", size=size), capability=A100).forward_flops == full * 65 / 128
    assert find_facts(attention("bfloat16", size=size)).forward_flops == full * 65 / 128
    assert (
        find_facts(attention("bfloat16", size=size, mask="bfloat16"), capability=H100).forward_flops == full
    )


def test_dropout_costs_a_fused_kernel_nothing():
    for dtype in ("float32", "bfloat16"):
        without, dropped = (find_facts(attention(dtype, dropout=p), True, A100) for p in (0.0, 0.1))
        assert without == dropped
    # In the math form every weight is kept, several times.
    assert find_facts(attention("float32", dropout=0.1), True).kept_bytes > 3 * 2 * 4 * 40 * 40 * 4


def test_only_attention_depends_on_the_capability():
    assert find_facts(linear(8, 16, 16), True, H100) == find_facts(linear(8, 16, 16))
    assert has_attention(attention("float32"))
    assert not has_attention(linear(8, 16, 16))
    assert [capability_of(text) for text in ("9.0", "12.1", "")] == [(9, 0), (12, 1), (8, 0)]


PROGRAM = """
import os, sys
from pathlib import Path
from tests.fake_cuda.library import load
load(Path(sys.argv[1]))
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tensoropt.profiling.cuda_kernels import _attention_kernel
from tensoropt.profiling.fact_finding import _Probe, find_facts
from tensoropt.profiling.workload import random_tensor
from tests.profiling.test_cuda_attention import A100, CASES, H100, V100, attention
NUMBERS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}
seen = set()
for capability in (V100, A100, H100):
    for case in CASES:
        work = attention(**case)
        with FakeTensorMode():
            tensors = {n: random_tensor(spec, torch.device("cuda")) for n, spec, _ in work.inputs}
            args = work.calls[0][0].args
            kernel = _attention_kernel(
                capability, *(tensors[n] for n in "qkv"), tensors.get("m"), *args[4:],
                **work.calls[0][0].kwargs,
            )
            os.environ["FAKE_CUDA_ATTENTION"] = str(NUMBERS[kernel])
            there = _Probe(work, tensors, True).observe()
        assert all(t.device.type == "cuda" for t in tensors.values())
        assert there == find_facts(work, True, capability), (capability, case, kernel)
        seen.add(kernel)
assert seen == set(NUMBERS), seen
"""
CASES: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "size": (40, 20)},
    {"dtype": "float32", "size": (129, 64)},
    {"dtype": "float32", "mask": "bool"},
    {"dtype": "float32", "mask": "float32", "size": (41, 32)},
    {"dtype": "bfloat16", "mask": "bool", "size": (41, 32)},
    {"dtype": "bfloat16", "mask": "bfloat16"},
    {"dtype": "bfloat16", "heads": (4, 2)},
    {"dtype": "float32", "heads": (4, 2)},
    {"dtype": "float32", "dropout": 0.1},
    {"dtype": "float16", "dropout": 0.125},
)


@pytest.mark.slow
def test_as_pytorch_runs_attention_on_fake_cuda_tensors(fake_cuda_library):
    # In a process of its own: the devices have to be there before PyTorch is imported, and stay.
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(fake_cuda_library)],
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
