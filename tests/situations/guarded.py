"""What PyTorch's export refuses or gets wrong, and what is explored all the same."""

import torch
from torch import nn

from tests.models import Call, situation

F = nn.functional


def rows():
    return (torch.randn(8, 8),)


def labelled():
    return torch.randn(8, 8), torch.randint(0, 4, (8,))


def of(forward, inputs=rows, refused=None, **modules):
    """A build function of a model whose step is ``forward(net, *inputs)``."""

    def make():
        held = {name: make() for name, make in modules.items()}
        return Call(forward, a=nn.Linear(8, 16), b=nn.Linear(16, 4), **held)

    return situation(make, inputs, refused)


def _head(net, x):
    return net.b(torch.tanh(net.a(x)))


build_cosine_loss = of(
    lambda net, x, y: F.cosine_embedding_loss(_head(net, x), x[:, :4], y % 2 * 2 - 1), labelled
)


def _masked(net, x):
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    return net.t(x, x, tgt_mask=mask).square().mean()


build_transformer = of(
    _masked,
    lambda: (torch.randn(4, 6, 8),),
    t=lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
)

build_transformer.slow = True


def _contrastive(net, x):
    scores = F.normalize(net.a(x)) @ F.normalize(net.a(x + 1)).T
    return F.cross_entropy(scores, torch.arange(len(scores)))


build_contrastive = of(_contrastive)


def _named(name):
    return of(
        lambda net, x: net.b(net.layers[name](x)).square().mean(),
        layers=lambda: nn.ModuleDict({name: nn.Linear(8, 16)}),
    )


build_quote, build_newline, build_word = map(_named, ('a"b', "a\nb", "None"))
build_keyword, build_backslash = map(_named, ("class", "a\\b'c"))
