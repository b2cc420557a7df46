"""What cannot be captured or trained, with a refusal that names the model's line and what to do instead."""

from __future__ import annotations

import torch
from torch import nn

from tests.situations.guarded import labelled, of, rows

F = nn.functional


def tokens():
    return (torch.randint(1, 16, (4, 6)),)


# -- sparse gradients -------------------------------------------------------------------------------


def _embed(net, ids):
    return net.b(net.e(ids).mean(1)).square().mean()


build_sparse_embedding = of(
    _embed, tokens, r"sparse gradient.*`?e`?.*sparse=False", e=lambda: nn.Embedding(16, 16, sparse=True)
)


def _to_sparse(net, x):
    return net.b(net.a(torch.sparse.mm(x.relu().to_sparse(), torch.eye(8)))).square().mean()


build_sparse_tensor = of(_to_sparse, rows, r"untrainable\.py:\d+ .*sparse")


# -- recurrent, losses ------------------------------------------------------------------------------


def _packed(net, x, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    y, _ = net.r(packed)
    y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
    return net.b(y).square().mean()


build_packed = of(
    _packed,
    lambda: (torch.randn(4, 6, 8), torch.tensor([6, 4, 2, 6])),
    r"untrainable\.py:\d+ .*packed.*mask",
    r=lambda: nn.LSTM(8, 16, batch_first=True),
)


def _ctc(net, x):
    scores = net.b(torch.relu(net.a(x))).log_softmax(-1)
    return F.ctc_loss(scores, torch.ones(4, 2, dtype=torch.long), (6,) * 4, (2,) * 4)


build_ctc = of(_ctc, lambda: (torch.randn(6, 4, 8),), r"untrainable\.py:\d+ .*CTC")


# -- higher-order operators -------------------------------------------------------------------------


def _cond(net, x):
    return torch.cond(x.sum() > 0, lambda v: net.a(v), lambda v: net.a(-v), (x,)).square().mean()


build_cond = of(_cond, rows, r"untrainable\.py:\d+ .*torch\.cond.*torch\.where")


def _associative(net, x):
    from torch._higher_order_ops.associative_scan import associative_scan

    return net.b(associative_scan(lambda u, v: u * v, net.a(x), 0, combine_mode="generic")).square().mean()


build_associative_scan = of(_associative)


def _while(net, x):
    from torch._higher_order_ops.while_loop import while_loop

    _, out = while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, torch.tanh(v)), (torch.tensor(0), net.a(x)))
    return net.b(out).square().mean()


build_while_loop = of(_while, rows, r"untrainable\.py:\d+ .*while_loop.*loop")


def _map(net, x):
    from torch._higher_order_ops.map import map as each

    return net.b(each(lambda row: torch.tanh(row), net.a(x))).square().mean()


build_map = of(_map, rows, r"untrainable\.py:\d+ .*map.*batch")


def _flex(net, x):
    from torch.nn.attention.flex_attention import flex_attention

    q = net.a(x).view(2, 16, 4, 4).transpose(1, 2)
    return net.b(flex_attention(q, q, q).transpose(1, 2).flatten(2)).square().mean()


build_flex = of(
    _flex, lambda: (torch.randn(2, 16, 8),), r"untrainable\.py:\d+ .*flex_attention.*scaled_dot_product"
)


# -- gradients inside forward -----------------------------------------------------------------------


def _penalty(net, x):
    x = x.detach().requires_grad_()
    y = net.b(torch.tanh(net.a(x))).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


build_gradient_penalty = of(_penalty, rows, r"untrainable\.py:\d+ .*gradient.*outside")


def _jacobian(net, x):
    from torch.func import jacrev, vmap

    jacobian = vmap(jacrev(lambda row: torch.tanh(net.a(row))))(x)
    return jacobian.square().mean() + net.b(net.a(x)).square().mean()


build_jacobian = of(_jacobian, rows, r"untrainable\.py:\d+ .*gradient.*outside")


# -- values and shapes that depend on values --------------------------------------------------------


build_boolean_index = of(
    lambda net, x: net.b(net.a(x)[x.sum(1) > 0]).square().mean(),
    rows,
    r"untrainable\.py:\d+ .*boolean indexing",
)


build_item = of(
    lambda net, x: net.b(net.a(x)).square().mean() * x.abs().max().item(),
    rows,
    r"untrainable\.py:\d+ .*\.item\(\)",
)


build_numpy = of(
    lambda net, x: net.b(net.a(x + torch.from_numpy(x.numpy() * 2))).square().mean(),
    rows,
    r"untrainable\.py:\d+ .*numpy",
)


build_one_hot_open = of(
    lambda net, x, y: (net.b(net.a(x)) * F.one_hot(y)).square().mean(),
    labelled,
    r"untrainable\.py:\d+ .*num_classes",
)


# -- containers of another kind ---------------------------------------------------------------------


def _nested(net, x):
    both = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)
    return net.b(net.a(both)).values().square().mean()


build_nested_tensor = of(_nested, rows, r"untrainable\.py:\d+ .*nested.*pad")


build_nested_input = of(
    lambda net, x: net.b(net.a(x)).values().square().mean(),
    lambda: (torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged),),
    r"input.*nested.*pad",
)


def _quantised(net, x):
    q = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    return net.b(net.a(q.dequantize())).square().mean()


build_quantised = of(_quantised, rows, r"untrainable\.py:\d+ .*quanti[sz]ed.*fake_quantize")


def _compiled(net, x):
    return net.b(torch.compile(lambda v: torch.tanh(net.a(v)) * 2, backend="eager")(x)).square().mean()


build_compiled_inside = of(_compiled, rows)

build_compiled_layer = of(
    lambda net, x: net.b(net.c(x)).square().mean(), rows, c=lambda: torch.compile(nn.Linear(8, 16))
)


def build_compiled_model():
    """A model that was given to torch.compile before."""
    model, inputs = build_plain()
    return torch.compile(model), inputs


def build_scripted_model():
    """A scripted model has no Python code to follow."""
    model, inputs = build_plain()
    return torch.jit.trace(model, inputs), inputs


build_scripted_model.refused = r"torch\.jit.*the module itself"


@torch.jit.script
def _fused(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


build_scripted_function = of(lambda net, x: net.b(_fused(net.a(x))).square().mean(), rows)

# -- models that are wrapped already ----------------------------------------------------------------


# A frontier.
build_plain = of(lambda net, x: net.b(torch.relu(net.a(x))).square().mean())


# -- parameters that come or change in forward ------------------------------------------------------

build_wrapped_inside = of(
    lambda net, x: net.b(net.c(x)).square().mean(),
    rows,
    r"`c`.*DataParallel.*\.module",
    c=lambda: nn.DataParallel(nn.Linear(8, 16)),
)


build_lazy = of(
    lambda net, x: net.b(net.c(x)).square().mean(), rows, r"`c\.weight`.*once", c=lambda: nn.LazyLinear(16)
)


build_layer_in_forward = of(
    lambda net, x: net.b(net.a(x) + nn.Linear(8, 16)(x)).square().mean(),
    rows,
    r"untrainable\.py:\d+ .*parameter.*__init__",
)


def _generator(net, x):
    noise = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    return net.b(net.a(x + noise)).square().mean()


build_generator = of(_generator, rows, r"without generator=")


# -- what fails after the capture only --------------------------------------------------------------


@torch.library.custom_op("situations::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@_doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


build_operator_without_backward = of(
    lambda net, x: net.b(_doubled(net.a(x))).square().mean(),
    rows,
    r"situations\.doubled.*untrainable\.py:\d+.*no autograd formula.*register_autograd",
)


def _complex_select(net, x):
    spectrum = torch.fft.rfft(net.a(x))
    out = torch.zeros_like(spectrum)
    out[:, 1] = spectrum[:, 2]
    out[torch.arange(8), torch.arange(8)] = spectrum[:, 4]
    return net.b(torch.fft.irfft(out, n=16)).square().mean()


build_complex_select = of(_complex_select, rows)

# -- what a person got wrong ------------------------------------------------------------------------


def _all_reduced(net, x):
    y = net.a(x)
    torch.distributed.all_reduce(y)
    return net.b(y).mean()


build_distributed = of(_all_reduced, rows, r"untrainable\.py:\d+ .*other processes.*leave that out")
build_on_gpu = of(lambda net, x: net.b(net.a(x).cuda()).mean(), rows, r"GPU by name.*x\.device")
build_list_of_tensors = of(
    lambda net, x: net.b(net.a(x * torch.tensor([x[0, 0], x[0, 1]]).sum())).mean(), rows, r"torch\.stack"
)


def build_other_type():
    """Doubles in a model, floats as its inputs."""
    model, inputs = build_plain()
    return model.double(), inputs


build_other_type.refused = r"float32 and float64 at .*untrainable\.py:\d+.*one type"


build_complex_loss = of(lambda net, x: torch.fft.fft(net.b(net.a(x))).sum(), rows, r"complex number.*\.abs")


build_misleading_error = of(
    lambda net, x: _raise(NotImplementedError("compiled for CUDA, and the sparse pattern needs numpy")),
    rows,
    r"own code raises NotImplementedError at .*compiled for CUDA, and the sparse pattern needs numpy;",
)


def _raise(error: Exception):
    raise error
