"""What cannot be captured or trained, with a refusal that names the model's line and what to do instead."""

from __future__ import annotations

import torch
from torch import nn

F = nn.functional


def of(forward, inputs, refused=None, **modules):
    """A build function of a model whose step is ``forward(net, *inputs)``."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
            for name, make in modules.items():
                setattr(self, name, make())

        def forward(self, *args):
            return forward(self, *args)

    def build():
        return Net(), inputs()

    if refused is not None:
        build.refused = refused
    return build


def rows():
    return (torch.randn(8, 8),)


def tokens():
    return (torch.randint(1, 16, (4, 6)),)


def labelled():
    return torch.randn(8, 8), torch.randint(0, 4, (8,))


# -- sparse gradients -------------------------------------------------------------------------------


def _embed(net, ids):
    return net.b(net.e(ids).mean(1)).square().mean()


build_sparse_embedding = of(
    _embed, tokens, r"sparse gradient.*`?e`?.*sparse=False", e=lambda: nn.Embedding(16, 16, sparse=True)
)


def _bag(net, ids):
    return net.b(net.e(ids)).square().mean()


build_sparse_bag = of(
    _bag, tokens, r"sparse gradient.*sparse=False", e=lambda: nn.EmbeddingBag(16, 16, sparse=True)
)


def _functional_sparse(net, ids):
    return net.b(F.embedding(ids, net.a.weight.T.repeat(2, 1), sparse=True).mean(1)).square().mean()


build_sparse_functional = of(_functional_sparse, tokens, r"sparse gradient.*sparse=False")


def _to_sparse(net, x):
    return net.b(net.a(torch.sparse.mm(x.relu().to_sparse(), torch.eye(8)))).square().mean()


build_sparse_tensor = of(_to_sparse, rows, r"untrainable\.py:\d+ .*sparse")


def _sparse_constant(net, x):
    adjacency = torch.eye(8).to_sparse()
    return net.b(net.a(torch.sparse.mm(adjacency, x))).square().mean()


build_sparse_constant = of(_sparse_constant, rows, r"untrainable\.py:\d+ .*sparse")


def sparse_input():
    return (torch.eye(8).to_sparse(),)


def _sparse_argument(net, x):
    return net.b(net.a(torch.sparse.mm(x, torch.ones(8, 8)))).square().mean()


build_sparse_input = of(_sparse_argument, sparse_input, r"input.*sparse.*to_dense")

# -- recurrent, losses ------------------------------------------------------------------------------


def _packed(net, x, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    y, _ = net.r(packed)
    y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
    return net.b(y).square().mean()


def padded():
    return torch.randn(4, 6, 8), torch.tensor([6, 4, 2, 6])


build_packed = of(
    _packed, padded, r"untrainable\.py:\d+ .*packed.*mask", r=lambda: nn.LSTM(8, 16, batch_first=True)
)


def _pack_sequence(net, x):
    packed = nn.utils.rnn.pack_sequence([x[0, :5], x[1, :3]])
    return net.b(net.r(packed)[0].data).square().mean()


build_pack_sequence = of(
    _pack_sequence,
    lambda: (torch.randn(4, 6, 8),),
    r"untrainable\.py:\d+ .*packed.*mask",
    r=lambda: nn.GRU(8, 16, batch_first=True),
)


def _ctc(net, x):
    scores = net.b(torch.relu(net.a(x))).log_softmax(-1)
    return F.ctc_loss(scores, torch.ones(4, 2, dtype=torch.long), (6,) * 4, (2,) * 4)


build_ctc = of(_ctc, lambda: (torch.randn(6, 4, 8),), r"untrainable\.py:\d+ .*CTC")


def _ctc_tensors(net, x, targets, lengths):
    scores = net.b(torch.relu(net.a(x))).log_softmax(-1)
    return F.ctc_loss(scores, targets, lengths, lengths // 3)


build_ctc_tensors = of(
    _ctc_tensors,
    lambda: (torch.randn(6, 4, 8), torch.ones(4, 2, dtype=torch.long), torch.full((4,), 6)),
    r"untrainable\.py:\d+ .*CTC",
)


def _adaptive(net, x, y):
    return net.head(net.a(x), y).loss


build_adaptive = of(
    _adaptive,
    labelled,
    r"untrainable\.py:\d+ .*adaptive softmax.*cross_entropy",
    head=lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 8, [2, 5]),
)


def _cumulative(net, x):
    return net.b(net.n(net.a(x))).square().mean()


build_cumulative = of(
    _cumulative, rows, r"momentum=None.*momentum=0\.1", n=lambda: nn.BatchNorm1d(16, momentum=None)
)

# -- higher-order operators -------------------------------------------------------------------------


def _cond(net, x):
    return torch.cond(x.sum() > 0, lambda v: net.a(v), lambda v: net.a(-v), (x,)).square().mean()


build_cond = of(_cond, rows, r"untrainable\.py:\d+ .*torch\.cond.*torch\.where")


def _nested_cond(net, x):
    def outer(v):
        return torch.cond(v.mean() > 1, lambda u: net.a(u), lambda u: net.a(u) * 2, (v,))

    return torch.cond(x.sum() > 0, outer, lambda v: net.a(-v), (x,)).square().mean()


build_nested_cond = of(_nested_cond, rows, r"untrainable\.py:\d+ .*torch\.cond.*torch\.where")


def _scan(net, x):
    from torch._higher_order_ops.scan import scan

    def step(carry, row):
        carry = torch.tanh(net.c(carry) + row)
        return carry, carry.clone()

    _, out = scan(step, torch.zeros(x.shape[1], 8), x)
    return net.b(net.a(out)).square().mean()


build_scan = of(
    _scan, lambda: (torch.randn(5, 4, 8),), r"untrainable\.py:\d+ .*scan.*loop", c=lambda: nn.Linear(8, 8)
)


def _associative(net, x):
    from torch._higher_order_ops.associative_scan import associative_scan

    return net.b(associative_scan(lambda u, v: u * v, net.a(x), 0, combine_mode="generic")).square().mean()


build_associative_scan = of(_associative, rows)


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


def _flex_mask(net, x):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu")
    q = net.a(x).view(2, 16, 4, 4).transpose(1, 2)
    return net.b(flex_attention(q, q, q, block_mask=mask).transpose(1, 2).flatten(2)).square().mean()


build_flex_mask = of(
    _flex_mask, lambda: (torch.randn(2, 16, 8),), r"untrainable\.py:\d+ .*flex_attention.*scaled_dot_product"
)

# -- gradients inside forward -----------------------------------------------------------------------


def _penalty(net, x):
    x = x.detach().requires_grad_()
    y = net.b(torch.tanh(net.a(x))).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


build_gradient_penalty = of(_penalty, rows, r"untrainable\.py:\d+ .*gradient.*outside")


def _backward_inside(net, x):
    net.a(x).square().mean().backward()
    return net.b(net.a(x)).square().mean()


build_backward_inside = of(_backward_inside, rows, r"untrainable\.py:\d+ .*gradient.*outside")


def _jacobian(net, x):
    from torch.func import jacrev, vmap

    jacobian = vmap(jacrev(lambda row: torch.tanh(net.a(row))))(x)
    return jacobian.square().mean() + net.b(net.a(x)).square().mean()


build_jacobian = of(_jacobian, rows, r"untrainable\.py:\d+ .*gradient.*outside")


def _func_grad(net, x):
    from torch.func import functional_call, grad

    weights = dict(net.a.named_parameters())
    slopes = grad(lambda w: functional_call(net.a, w, (x,)).square().mean())(weights)
    inner = {name: w - 0.1 * slopes[name] for name, w in weights.items()}
    return net.b(functional_call(net.a, inner, (x,))).square().mean()


build_inner_step = of(_func_grad, rows, r"untrainable\.py:\d+ .*gradient.*outside")


def _functional_jacobian(net, x):
    j = torch.autograd.functional.jacobian(lambda v: net.a(v).sum(0), x, create_graph=True)
    return j.square().mean() + net.b(net.a(x)).square().mean()


build_functional_jacobian = of(_functional_jacobian, rows, r"untrainable\.py:\d+ .*gradient.*outside")

# -- values and shapes that depend on values --------------------------------------------------------


def _mask_index(net, x):
    h = net.a(x)
    return net.b(h[h.sum(1) > 0]).square().mean()


build_boolean_index = of(_mask_index, rows, r"untrainable\.py:\d+ .*torch\.where")


def _nonzero(net, x):
    kept = (x[:, 0] > 0).nonzero().squeeze(1)
    return net.b(net.a(x[kept])).square().mean()


build_nonzero = of(_nonzero, rows, r"untrainable\.py:\d+ .*(torch\.where|mask)")


def _unique(net, ids):
    return net.b(net.e(torch.unique(ids))).square().mean()


build_unique = of(_unique, tokens, r"untrainable\.py:\d+ .*(fixed|mask)", e=lambda: nn.Embedding(16, 16))


def _masked_select(net, x):
    return torch.masked_select(net.b(net.a(x)), x[:, :4] > 0).square().mean()


build_masked_select = of(_masked_select, rows, r"untrainable\.py:\d+ .*(torch\.where|mask)")


def _item(net, x):
    return net.b(net.a(x)).square().mean() * x.abs().max().item()


build_item = of(_item, rows, r"untrainable\.py:\d+ .*\.item\(\)")


def _tolist(net, x, lengths):
    h = net.a(x)
    return torch.stack([net.b(h[i, :n]).mean() for i, n in enumerate(lengths.tolist())]).square().mean()


build_tolist = of(_tolist, padded, r"untrainable\.py:\d+ .*(value|\.tolist\(\))")


def _numpy(net, x):
    scale = torch.from_numpy(x.numpy() * 2)
    return net.b(net.a(x + scale)).square().mean()


build_numpy = of(_numpy, rows, r"untrainable\.py:\d+ .*numpy")


def _numpy_detached(net, x):
    h = net.a(x)
    return net.b(h + float(h.detach().cpu().numpy().mean())).square().mean()


build_numpy_mean = of(_numpy_detached, rows, r"untrainable\.py:\d+ .*(numpy|value)")


def _repeat_by_values(net, x, lengths):
    return net.b(net.a(x[:, 0].repeat_interleave(lengths, 0))).square().mean()


build_repeat_by_values = of(_repeat_by_values, padded, r"untrainable\.py:\d+ .*(fixed|mask)")


def _range_by_value(net, x, y):
    return net.b(net.a(x)).square().mean() + torch.arange(y.max()).float().mean()


build_range_by_value = of(_range_by_value, labelled, r"untrainable\.py:\d+ .*(value|fixed|mask)")


def _one_hot(net, x, y):
    return (net.b(net.a(x)) * F.one_hot(y)).square().mean()


build_one_hot_open = of(_one_hot, labelled, r"untrainable\.py:\d+ .*num_classes")


def _bincount(net, x, y):
    counts = torch.bincount(y, minlength=4)
    return (net.b(net.a(x)) * counts).square().mean()


build_bincount = of(_bincount, labelled, r"untrainable\.py:\d+ .*(fixed|one_hot|mask)")


def _python_sort(net, x):
    order = sorted(range(8), key=lambda i: float(x[i, 0]))
    return net.b(net.a(x[order])).square().mean()


build_python_sort = of(_python_sort, rows, r"untrainable\.py:\d+ .*(value|\.item)")


def _while_value(net, x):
    h = net.a(x)
    while h.abs().max() > 1:
        h = h / 2
    return net.b(h).square().mean()


build_while_value = of(_while_value, rows, r"untrainable\.py:\d+ .*torch\.where")

# -- containers of another kind ---------------------------------------------------------------------


def _nested(net, x):
    both = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)
    return net.b(net.a(both)).values().square().mean()


build_nested_tensor = of(_nested, rows, r"untrainable\.py:\d+ .*nested.*pad")


def nested_input():
    return (torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged),)


def _nested_argument(net, x):
    return net.b(net.a(x)).values().square().mean()


build_nested_input = of(_nested_argument, nested_input, r"input.*nested.*pad")


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


def _scripted(net, x):
    return net.b(net.c(x)).square().mean()


build_scripted_layer = of(
    _scripted, rows, r"torch\.jit.*`?c`?.*the module itself", c=lambda: torch.jit.script(nn.Linear(8, 16))
)


@torch.jit.script
def _fused(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


build_scripted_function = of(lambda net, x: net.b(_fused(net.a(x))).square().mean(), rows)

# -- models that are wrapped already ----------------------------------------------------------------


def build_plain():
    """A frontier."""
    return of(lambda net, x: net.b(torch.relu(net.a(x))).square().mean(), rows)()


def build_data_parallel():
    """DataParallel is a way of spreading the model, as what is searched for."""
    model, inputs = build_plain()
    return nn.DataParallel(model), inputs


build_data_parallel.refused = r"DataParallel.*\.module"


def build_wrapped_inside():
    """The same around a part of the model."""
    return of(
        lambda net, x: net.b(net.c(x)).square().mean(), rows, c=lambda: nn.DataParallel(nn.Linear(8, 16))
    )()


build_wrapped_inside.refused = r"`c`.*DataParallel.*\.module"

# -- parameters that come or change in forward ------------------------------------------------------

build_lazy = of(
    lambda net, x: net.b(net.c(x)).square().mean(), rows, r"`c\.weight`.*once", c=lambda: nn.LazyLinear(16)
)


def _made(net, x):
    if not hasattr(net, "late"):
        net.late = nn.Parameter(torch.ones(16))
    return net.b(net.a(x) * net.late).square().mean()


build_made_in_forward = of(_made, rows, r"(untrainable\.py:\d+ .*)?parameter.*__init__")


def _module_made(net, x):
    layer = nn.Linear(8, 16)
    return net.b(net.a(x) + layer(x)).square().mean()


build_layer_in_forward = of(_module_made, rows, r"untrainable\.py:\d+ .*parameter.*__init__")


def _generator(net, x):
    noise = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    return net.b(net.a(x + noise)).square().mean()


build_generator = of(_generator, rows, r"without generator=")


def _seeded(net, x):
    torch.manual_seed(3)
    return net.b(net.a(x + torch.randn(8, 8))).square().mean()


build_seeded = of(_seeded, rows)


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


def _complex_slice(net, x):
    spectrum = torch.fft.rfft(net.a(x))
    out = torch.zeros_like(spectrum)
    out[..., :3] = spectrum[..., :3] * 2
    return net.b(torch.fft.irfft(out, n=16)).square().mean()


build_complex_slice = of(_complex_slice, rows)


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


def build_indices_as_features():
    """Whole numbers where features are due."""
    return build_plain()[0], (torch.randint(0, 3, (8, 8)),)


build_indices_as_features.refused = r"int64 and float32 at .*one type"
build_complex_loss = of(lambda net, x: torch.fft.fft(net.b(net.a(x))).sum(), rows, r"complex number.*\.abs")


def _own_trouble(net, x):
    raise ValueError("rows have to be sorted")


build_own_error = of(_own_trouble, rows, r"own code raises ValueError at .*rows have to be sorted")
build_misleading_error = of(
    lambda net, x: _raise(NotImplementedError("compiled for CUDA, and the sparse pattern needs numpy")),
    rows,
    r"own code raises NotImplementedError at .*compiled for CUDA, and the sparse pattern needs numpy;",
)


def _raise(error: Exception):
    raise error


def build_norm_of_other_rank():
    """A norm of vectors that gets pictures."""
    return Scalar(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm1d(4))), (torch.randn(4, 3, 8, 8),)


build_norm_of_other_rank.refused = r"expected 2D or 3D input \(got 4D input\).*example inputs.*shapes"


class Scalar(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).square().mean()


class Box:
    def __init__(self, rows):
        self.rows = rows


build_own_class = of(
    lambda net, box: net.b(net.a(box.rows)).mean(), lambda: (Box(*rows()),), r"of the class \S*Box.*dict"
)


def build_empty_batch():
    """A batch of no samples, as the last one of a loader may be."""
    return build_plain()[0], (torch.randn(0, 8),)


build_empty_batch.refused = r"input `args\[0\]` of shape \(0, 8\) is empty"
