"""One small call of each kind of operator: what rules are checked on, and compared with discovery.

Every call reads ``x`` (and what it needs beside) after a product with a parameter, so that gradients reach
its operands; dims divide by 4 and differ, so that a mix-up of dims shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.graph import OperatorGraph
from tensoropt.ops.quantised import QuantisedLinear, quantised
from tests.models import Call

Function = Callable[..., torch.Tensor]
Stored = tuple[int, ...] | nn.Module
CALLS: dict[str, tuple[Function, tuple[torch.Tensor, ...], dict[str, Stored]]] = {}


@cache
def graph_of_call(name: str) -> OperatorGraph:
    torch.manual_seed(0)
    function, args, parameters = CALLS[name]
    return capture(Call(function, **parameters), args, loss=lambda y: y.square().sum()).graph


def call(name: str, function: Function, *args: torch.Tensor, **parameters: Stored) -> None:
    CALLS[name] = (function, args, parameters)


X, Y = torch.randn(4, 8), torch.randn(4, 8)
CUBE, IMAGE = torch.randn(4, 6, 8), torch.randn(4, 8, 12, 16)
SIGNAL, VOLUME = torch.randn(4, 8, 12), torch.randn(4, 8, 4, 6, 4)
INDEX, ROWS = torch.randint(0, 4, (4, 8)), torch.randint(0, 4, (6,))
CLASSES = torch.randint(0, 8, (4,))

# matrix products
call("linear", lambda m, x: F.linear(x, m.w, m.b), CUBE, w=(12, 8), b=(12,))
call("addmm", lambda m, x: torch.addmm(m.b, x, m.w), X, w=(8, 12), b=(12,))
call("addmm-scaled", lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0), X, w=(8, 12), b=(12,))
call("mm", lambda m, x: x @ m.w, X, w=(8, 12))
call("bmm", lambda m, x: torch.bmm(x, m.w), CUBE, w=(4, 8, 12))
call("baddbmm", lambda m, x: torch.baddbmm(m.b, x, m.w), CUBE, w=(4, 8, 12), b=(4, 6, 12))
call("matmul", lambda m, x: torch.matmul(x, m.w), torch.randn(4, 6, 8, 12), w=(6, 12, 16))
call("matrix-vector", lambda m, x: torch.mv(x, m.w), X, w=(8,))
call("dot", lambda m, x: torch.dot(x, m.w).view(1), torch.randn(8), w=(8,))
call("einsum", lambda m, x: torch.einsum("bsd,hde->bhse", x, m.w), CUBE, w=(4, 8, 12))
call("bilinear", lambda m, x, y: F.bilinear(x, y, m.w, m.b), X, torch.randn(4, 12), w=(16, 8, 12), b=(16,))
for scheme in ("int8", "nf4-double"):  # of 4 bits: 12 blocks, in three groups
    call(
        f"linear-{scheme}",
        lambda m, x: m.layer(x * m.w),
        torch.randn(4, 6, 768),
        w=(768,),
        layer=QuantisedLinear(quantised(torch.randn(12, 768), scheme), scheme, nn.Parameter(torch.randn(12))),
    )
# convolutions
call("conv1d", lambda m, x: F.conv1d(x, m.w, m.b, padding=1), SIGNAL, w=(12, 8, 3), b=(12,))
call("conv2d", lambda m, x: F.conv2d(x, m.w, m.b, stride=2), IMAGE, w=(12, 8, 3, 3), b=(12,))
call("conv2d-same", lambda m, x: F.conv2d(x, m.w, padding="same"), IMAGE, w=(12, 8, 3, 3))
call("conv2d-groups", lambda m, x: F.conv2d(x, m.w, m.b, groups=4), IMAGE, w=(16, 2, 3, 3), b=(16,))
call("conv2d-depthwise", lambda m, x: F.conv2d(x, m.w, padding="same", groups=8), IMAGE, w=(8, 1, 3, 3))
call("conv3d", lambda m, x: F.conv3d(x, m.w), VOLUME, w=(12, 8, 3, 3, 3))
call("deconv1d", lambda m, x: F.conv_transpose1d(x, m.w, m.b, stride=2), SIGNAL, w=(8, 12, 3), b=(12,))
call("deconv2d", lambda m, x: F.conv_transpose2d(x, m.w, m.b, 2, 1, 1), IMAGE, w=(8, 12, 3, 3), b=(12,))
call(
    "deconv2d-groups", lambda m, x: F.conv_transpose2d(x, m.w, m.b, groups=4), IMAGE, w=(8, 3, 3, 3), b=(12,)
)
# pooling and resizing
call("max-pool", lambda m, x: F.max_pool2d(x * m.w, 2), IMAGE, w=(16,))
call("avg-pool-1d", lambda m, x: F.avg_pool1d(x * m.w, 2), SIGNAL, w=(12,))
call("adaptive-pool", lambda m, x: F.adaptive_avg_pool2d(x * m.w, (3, 4)), IMAGE, w=(16,))
call(
    "bilinear-resize", lambda m, x: F.interpolate(x * m.w, scale_factor=2.0, mode="bilinear"), IMAGE, w=(16,)
)
call("nearest-resize", lambda m, x: F.interpolate(x * m.w, scale_factor=2.0), IMAGE, w=(16,))
call("bicubic-resize", lambda m, x: F.interpolate(x * m.w, size=(6, 8), mode="bicubic"), IMAGE, w=(16,))
call("linear-resize", lambda m, x: F.interpolate(x * m.w, size=24, mode="linear"), SIGNAL, w=(12,))
call("pixel-shuffle", lambda m, x: F.pixel_shuffle(x * m.w, 2), IMAGE, w=(16,))
call("pixel-unshuffle", lambda m, x: F.pixel_unshuffle(x * m.w, 2), IMAGE, w=(16,))
call("unfold-image", lambda m, x: F.unfold(x * m.w, 3), IMAGE, w=(16,))
call("fold-image", lambda m, x: F.fold(x * m.w, (6, 6), 3), torch.randn(4, 36, 16), w=(16,))
call("unfold", lambda m, x: (x * m.w).unfold(2, 4, 2), SIGNAL, w=(12,))
# norms
call("layer-norm", lambda m, x: F.layer_norm(x * m.s, (8,), m.w, m.b), CUBE, w=(8,), b=(8,), s=(8,))
call("rms-norm", lambda m, x: F.rms_norm(x * m.s, (8,), m.w), CUBE, w=(8,), s=(8,))
call("group-norm", lambda m, x: F.group_norm(x * m.s, 4, m.w, m.b), IMAGE, w=(8,), b=(8,), s=(16,))
call(
    "instance-norm",
    lambda m, x: F.instance_norm(x * m.s, weight=m.w, bias=m.b),
    IMAGE,
    w=(8,),
    b=(8,),
    s=(16,),
)
call(
    "batch-norm-still",
    lambda m, x: F.batch_norm(x * m.s, m.w.detach(), m.w.detach().exp()),
    SIGNAL,
    w=(8,),
    s=(12,),
)
call("softmax", lambda m, x: torch.softmax(x * m.w, -1), CUBE, w=(8,))
call("log-softmax", lambda m, x: torch.log_softmax(x * m.w, 1), CUBE, w=(8,))
call("weight-norm", lambda m, x: x @ torch._weight_norm(m.v, m.g, 0).t(), X, v=(12, 8), g=(12, 1))
# reductions and scans
call("sum", lambda m, x: (x * m.w).sum((0, 2)), CUBE, w=(8,))
call("mean", lambda m, x: (x * m.w).mean(1, keepdim=True), CUBE, w=(8,))
call("variance", lambda m, x: (x * m.w).var(1), CUBE, w=(8,))
call("amax", lambda m, x: (x * m.w).amax(1), CUBE, w=(8,))
call("max-dim", lambda m, x: (x * m.w).max(1).values, CUBE, w=(8,))
call("logsumexp", lambda m, x: (x * m.w).logsumexp(1), CUBE, w=(8,))
call("vector-norm", lambda m, x: torch.linalg.vector_norm(x * m.w, dim=1), CUBE, w=(8,))
call("normalise", lambda m, x: F.normalize(x * m.w, dim=1), CUBE, w=(8,))
call("cumsum", lambda m, x: (x * m.w).cumsum(1), CUBE, w=(8,))
call("cumprod", lambda m, x: (x * m.w).cumprod(1), CUBE, w=(8,))
call("topk", lambda m, x: (x * m.w).topk(2, 1).values, CUBE, w=(8,))
call("sort", lambda m, x: (x * m.w).sort(1).values, CUBE, w=(8,))
call("cosine", lambda m, x, y: F.cosine_similarity(x * m.w, y, -1), CUBE, torch.randn(4, 6, 8), w=(8,))
call("distances", lambda m, x, y: torch.cdist(x * m.w, y), CUBE, torch.randn(4, 12, 8), w=(8,))
# views
call("reshape", lambda m, x: (x * m.w).reshape(4, 48), CUBE, w=(8,))
call("permute", lambda m, x: (x * m.w).permute(2, 0, 1), CUBE, w=(8,))
call("split", lambda m, x: torch.stack((x * m.w).split(4, -1)).prod(0), CUBE, w=(8,))
call("slice", lambda m, x: (x * m.w)[:, 1:5], CUBE, w=(8,))
call("cat", lambda m, x: torch.cat([x * m.w, x], 1), CUBE, w=(8,))
call("stack", lambda m, x: torch.stack([x * m.w, x], 1), CUBE, w=(8,))
call("pad", lambda m, x: F.pad(x * m.w, (1, 2)), CUBE, w=(8,))
call("pad-and-cut", lambda m, x: F.pad(x * m.w, (0, 0, 1, -1)), CUBE, w=(8,))
call("pad-reflecting", lambda m, x: F.pad(x * m.w, (1, 1, 1, 1), mode="reflect"), IMAGE, w=(16,))
call("expand", lambda m, x: (x * m.w).unsqueeze(1).expand(4, 12, 6, 8), CUBE, w=(8,))
call("roll", lambda m, x: torch.roll(x * m.w, 2, 1), CUBE, w=(8,))
call("flip", lambda m, x: torch.flip(x * m.w, (1,)), CUBE, w=(8,))
call("repeat", lambda m, x: (x * m.w).repeat(1, 2, 1), CUBE, w=(8,))
call("histogram", lambda m, x: (x * m.w).sum() * torch.histc(x, 4, -1.0, 1.0), X, w=(8,))
call("histogram-of-all", lambda m, x: (x * m.w).sum() * torch.histc(x, 4), X, w=(8,))
call("repeat-interleaved-flat", lambda m, x: (x * m.w).repeat_interleave(2), CUBE, w=(8,))
call("repeat-interleaved-row", lambda m, x: (x * m.w).repeat_interleave(3), torch.randn(8), w=(8,))
call("repeat-interleaved", lambda m, x: (x * m.w).repeat_interleave(2, 1), CUBE, w=(8,))
call(
    "repeat-interleaved-sized",
    lambda m, x: (x * m.w).repeat_interleave(2, 1, output_size=12),
    CUBE,
    w=(8,),
)
call("gated", lambda m, x: F.glu(x * m.w, -1), CUBE, w=(8,))
call("triangle", lambda m, x: torch.tril(x * m.w), CUBE, w=(8,))
call("diagonal", lambda m, x: torch.diagonal(x * m.w, dim1=1, dim2=2), torch.randn(4, 8, 8), w=(8,))
# lookups
call("embedding", lambda m, i: F.embedding(i, m.w), INDEX, w=(12, 16))
call("gather", lambda m, x, i: (x * m.w).gather(1, i % 8), X, INDEX, w=(8,))
call("index-select", lambda m, x, i: (x * m.w).index_select(0, i), X, ROWS, w=(8,))
call("index", lambda m, x, i: (x * m.w)[:, i], CUBE, ROWS, w=(8,))
call("take-along", lambda m, x, i: torch.take_along_dim(x * m.w, i % 8, 1), X, INDEX, w=(8,))
call("embedding-bag", lambda m, i: F.embedding_bag(i, m.w), INDEX, w=(12, 16))
call("embedding-bag-sum", lambda m, i: F.embedding_bag(i, m.w, mode="sum"), INDEX, w=(12, 16))
call("embedding-bag-max", lambda m, i: F.embedding_bag(i, m.w, mode="max"), INDEX, w=(12, 16))
call(
    "embedding-bag-factors",
    lambda m, i: F.embedding_bag(i, m.w, mode="sum", per_sample_weights=m.f),
    INDEX,
    w=(12, 16),
    f=(4, 8),
)
call("embedding-bag-padding", lambda m, i: F.embedding_bag(i, m.w, padding_idx=2), INDEX, w=(12, 16))
call(
    "embedding-bag-unequal",
    lambda m, i, o: F.embedding_bag(i.view(-1), m.w, o.cumsum(0) - o),
    INDEX,
    torch.tensor([3, 5, 1, 6]),
    w=(12, 16),
)
# element-wise
call("prelu", lambda m, x: F.prelu(x, m.w), IMAGE, w=(8,))
call("prelu-one", lambda m, x: F.prelu(x, m.w), IMAGE, w=(1,))
call("maximum", lambda m, x, y: torch.max(x * m.w, y), X, Y, w=(8,))
call("where", lambda m, x, y: torch.where(x > 0, x * m.w, y), X, Y, w=(8,))
call("addcmul", lambda m, x, y: torch.addcmul(x, y, m.w), X, Y, w=(8,))
call("gumbel", lambda m, x: x * m.w - torch.empty_like(x).exponential_(2.0).log(), X, w=(8,))
# attention
QUERIES = torch.randn(4, 4, 8, 12)
call("attention", lambda m, q: F.scaled_dot_product_attention(q * m.w, q, q), QUERIES, w=(12,))
call(
    "attention-causal",
    lambda m, q: F.scaled_dot_product_attention(q * m.w, q, q, is_causal=True),
    QUERIES,
    w=(12,),
)
call(
    "attention-causal-groups",
    lambda m, q, k: F.scaled_dot_product_attention(q * m.w, k, k * m.w, is_causal=True, enable_gqa=True),
    QUERIES,
    torch.randn(4, 2, 8, 12),
    w=(12,),
)
call(
    "attention-causal-fewer-keys",
    lambda m, q, k: F.scaled_dot_product_attention(q * m.w, k * m.w, k, is_causal=True, scale=0.5),
    QUERIES,
    torch.randn(4, 4, 6, 12),
    w=(12,),
)
call(
    "attention-causal-more-keys",
    lambda m, q, k: F.scaled_dot_product_attention(q * m.w, k * m.w, k, is_causal=True),
    QUERIES,
    torch.randn(4, 4, 11, 12),
    w=(12,),
)
call(
    "attention-causal-three-dims",
    lambda m, q: F.scaled_dot_product_attention(q * m.w, q, q * m.w, is_causal=True),
    QUERIES[0],
    w=(12,),
)
call(
    "attention-masked",
    lambda m, q, mask: F.scaled_dot_product_attention(q * m.w, q, q, attn_mask=mask),
    QUERIES,
    torch.randn(4, 1, 8, 8),
    w=(12,),
)
# losses
TARGET, CHANCE = torch.rand(4, 8), torch.rand(4, 8).log_softmax(-1)


def loss(name: str, function: Function, *targets: torch.Tensor) -> None:
    call(name, lambda m, x, *t: function(x * m.w, *t).view(1), X, *targets, w=(8,))


loss("cross-entropy", F.cross_entropy, CLASSES)
loss("cross-entropy-sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), CLASSES)
loss("cross-entropy-smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), CLASSES)
loss("cross-entropy-weighted", lambda x, t, w: F.cross_entropy(x, t, w), CLASSES, torch.rand(8))
loss("cross-entropy-soft", F.cross_entropy, TARGET)
loss("cross-entropy-soft-weighted", lambda x, t, w: F.cross_entropy(x, t, w), TARGET, torch.rand(8))
for reduction in ("sum", "none"):
    loss(
        f"cross-entropy-weighted-{reduction}",
        lambda x, t, w, r=reduction: F.cross_entropy(x, t, w, reduction=r).square().sum(),
        CLASSES,
        torch.rand(8),
    )
loss(
    "cross-entropy-weighted-smooth",
    lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1, ignore_index=1),
    CLASSES,
    torch.rand(8),
)
call(
    "cross-entropy-image",
    lambda m, x, t, w: F.cross_entropy(x * m.w, t, w, label_smoothing=0.1).view(1),
    IMAGE[:, :, :4, :6],
    torch.randint(0, 8, (4, 4, 6)),
    torch.rand(8),
    w=(6,),
)
loss("nll", lambda x, t: F.nll_loss(x.log_softmax(-1), t), CLASSES)
loss("nll-weighted", lambda x, t, w: F.nll_loss(x.log_softmax(-1), t, w), CLASSES, torch.rand(8))
loss("mse", F.mse_loss, TARGET)
loss("huber", F.huber_loss, TARGET)
loss("bce", F.binary_cross_entropy_with_logits, TARGET)
loss(
    "bce-weighted",
    lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, pos_weight=w),
    TARGET,
    torch.rand(8),
)
loss("kl", lambda x, t: F.kl_div(x, t, reduction="batchmean"), TARGET)
loss("soft-margin", lambda x, t: F.soft_margin_loss(x, t.round() * 2 - 1), TARGET)
loss("poisson", lambda x, t: F.poisson_nll_loss(x, t), TARGET)
loss("hinge", lambda x, t: F.hinge_embedding_loss(x, t.round() * 2 - 1), TARGET)
