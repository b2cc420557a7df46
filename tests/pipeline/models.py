"""Small models whose stages can be told by heart, and pipelines of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.capture import capture
from tensoropt.evaluation.problem import prepare
from tensoropt.pipeline.stages import Cutter
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.sharding.configurations import Configuration, batch_strategies
from tensoropt.sharding.groups import AxisStrategy, GroupGraph
from tensoropt.sharding.storage import stored_layout
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.random_strategies import micro_strategies
from tests.models import Call

Recipe = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _of_rows(recipe: Callable[[], nn.Module]) -> Callable[[], Recipe]:
    """A model of 16 rows of 24 numbers and as many targets."""

    @wraps(recipe)
    def with_inputs() -> Recipe:
        return recipe(), (torch.randn(16, 24), torch.randn(16, 24)), {}

    return with_inputs


def layers(count: int) -> list[nn.Module]:
    return [nn.Linear(24, 24, bias=False) for _ in range(count)]


@_of_rows
def skip() -> nn.Module:
    """What the first of four layers makes is read by the second, and by the last one."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = m.layers
        h = torch.relu(first(x))
        return F.mse_loss(fourth(torch.relu(third(torch.relu(second(h))))) + h, y)

    return Call(forward, layers=nn.ModuleList(layers(4)))


@_of_rows
def tables() -> nn.Module:
    """Three layers that read what is made of the input, of a parameter, and with random numbers."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask, gains = torch.softmax(x, -1), torch.softmax(m.gains, -1)
        noise = F.dropout(torch.softmax(m.angles, -1), 0.5)
        h = m.first(x) * mask * gains
        h = m.second(h) * mask * noise
        return F.mse_loss(m.third(h) * mask * gains * noise, y)

    model = Call(forward, **dict(zip(("first", "second", "third"), layers(3), strict=True)), gains=24)
    model.register_buffer("angles", torch.rand(24))
    return model


@_of_rows
def tied() -> nn.Module:
    """The last of four layers is the first one."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in (m.first, m.second, m.third, m.first):
            x = torch.relu(layer(x))
        return F.mse_loss(x, y)

    return Call(forward, **dict(zip(("first", "second", "third"), layers(3), strict=True)))


@_of_rows
def sliced() -> nn.Module:
    """The second of five layers has two halves of one parameter."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        upper, lower = m.weight.split(24)
        x = m.first(x)
        x = F.linear(torch.relu(F.linear(x, upper)), lower)
        return F.mse_loss(m.fourth(torch.relu(m.third(x))), y)

    return Call(forward, **dict(zip(("first", "third", "fourth"), layers(3), strict=True)), weight=(48, 24))


def block() -> nn.Module:
    """A norm and two layers beside what enters."""
    held = {"norm": nn.LayerNorm(24), "up": nn.Linear(24, 48), "down": nn.Linear(48, 24)}
    return Call(lambda m, x: x + m.down(torch.relu(m.up(m.norm(x)))), **held)


class Blocks(nn.Module):
    """Equal blocks between a first layer and a last one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 8)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.last(x), y)


@cache
def blocks_of(count: int) -> GroupGraph:
    """The grouped graph of a model of so many equal blocks."""
    captured = capture(Blocks(count), (torch.randn(16, 8), torch.randn(16, 8)), {})
    return prepare(captured).graph


def split_along_the_batch(
    graph: GroupGraph, cuts: Sequence[int], sizes: Sequence[int], schedule: str = "1f1b",
    again: frozenset[str] = frozenset(),
) -> PipelinedStrategy:  # fmt: skip
    """A pipeline whose stages are data parallel on all axes, with whole parameters.

    Args:
        sizes: micro-batches, places, then the axes of a place.
    """
    micro_batches, places, *axes = sizes
    micro, batch = micro_strategies(graph, micro_batches), batch_strategies(graph)
    stages = [
        batch_parallel(stage.graph, (micro_batches, *axes), stage.micro(micro), stage.micro(batch))
        for stage in Cutter(graph).stages(cuts, again)
    ]
    return PipelinedStrategy(graph, tuple(cuts), again, tuple(stages), schedule, places)


def batch_parallel(
    graph: GroupGraph, mesh: tuple[int, ...], micro: Mapping[str, AxisStrategy],
    batch: Mapping[str, AxisStrategy],
) -> Strategy:  # fmt: skip
    """Every group follows the batch on every axis, and what it reads lies as it is made."""
    chosen = {
        g.name: Configuration(g, (micro[g.name], *(batch[g.name] for _ in mesh[1:]))) for g in graph.groups
    }
    tensors = graph.atoms.graph.tensors
    stored = {
        name: stored_layout(tensors[name], chosen[g.name].layout(name))
        for g in graph.groups
        for name in (*g.parameters, *g.shared)
    }
    made = {name: c.layout(name) for c in chosen.values() for op in c.group.operators for name in op.outputs}
    return Strategy(graph, mesh, chosen, {hub: made[hub] for hub in graph.hubs}, stored)


def masked() -> Recipe:
    """Layers of which each masks its result: one of the mask's tensors is made of another one."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask, h = y != 0, x
        for layer in m.layers:
            h = h + layer(h) * mask.unsqueeze(-1)
        return F.mse_loss(h.mean(-1), y)

    return Call(forward, layers=nn.ModuleList(layers(4))), (torch.randn(16, 6, 24), torch.randn(16, 6)), {}


def deep() -> Recipe:
    return Blocks(6), (torch.randn(64, 8), torch.randn(64, 8)), {}


def encoder_decoder(dropout: float = 0.0) -> Recipe:
    """What the encoder makes goes on to all layers of the decoder; both read one table, drawn numbers lie
    between."""

    def forward(m: Any, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made, h = m.table(a), m.table(b)
        for layer in m.encoder:
            made = layer(made)
        for layer in m.decoder:
            h = layer(h, made)
        return F.cross_entropy(F.linear(h, m.table.weight).flatten(0, 1), y.flatten())

    settings: Any = {"dropout": dropout, "batch_first": True}
    encoder = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, **settings) for _ in range(2))
    decoder = nn.ModuleList(nn.TransformerDecoderLayer(32, 4, 64, **settings) for _ in range(2))
    sentences = tuple(torch.randint(0, 40, (8, length)) for length in (12, 10, 10))
    return Call(forward, table=nn.Embedding(40, 32), encoder=encoder, decoder=decoder), sentences, {}


def encoder_decoder_dropout() -> Recipe:
    return encoder_decoder(0.3)


def thrice() -> Recipe:
    """Five layers of which three are one, and a skip from the first to the last."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = h = torch.tanh(m.a(x))
        for layer in (m.b, m.a, m.c, m.a):
            h = torch.tanh(layer(h))
        return F.cross_entropy(m.head(h + first), y)

    held = {name: nn.Linear(32, 32) for name in "abc"}
    model = Call(forward, **held, head=nn.Linear(32, 40))
    return model, (torch.randn(64, 32), torch.randint(0, 40, (64,))), {}


def turned() -> Recipe:
    """A sum of two layers, transposed before the next one, so that their gradient is not contiguous."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turned = (m.a(x) + m.b(x)).transpose(1, 2)
        return F.cross_entropy(m.head(turned).mean(dim=1), y)

    model = Call(forward, a=nn.Linear(32, 48), b=nn.Linear(32, 48), head=nn.Linear(16, 40))
    return model, (torch.randn(64, 16, 32), torch.randint(0, 40, (64,))), {}


def frozen() -> Recipe:
    """The first layer and three of six blocks, and the second of the others."""
    model, *rest = deep()
    for module in (model.first, *model.blocks[:3], model.blocks[4]):
        module.requires_grad_(False)
    return model, *rest


def frozen_but_the_last() -> Recipe:
    """All but the last layer."""
    model, *rest = deep()
    model.requires_grad_(False)
    model.last.requires_grad_(True)
    return model, *rest


def frozen_encoder() -> Recipe:
    """The encoder and the table are not trained: what the encoder makes goes on without a gradient."""
    model, *rest = encoder_decoder()
    for module in (model.table, model.encoder):
        module.requires_grad_(False)
    return model, *rest


def adapted() -> Recipe:
    """A frozen embedding, frozen blocks with adapters of low rank in the last two, a frozen head."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = m.table(x)
        for block in m.blocks[:3]:
            h = block(h)
        for block, down, up in zip(m.blocks[3:], m.down, m.up, strict=True):
            h = block(h) + up(down(h))
        return F.cross_entropy(m.head(h).flatten(0, 1), y.flatten())

    blocks = nn.ModuleList(block() for _ in range(5))
    frozen = nn.ModuleDict({"table": nn.Embedding(40, 24), "blocks": blocks, "head": nn.Linear(24, 40)})
    frozen.requires_grad_(False)
    down, up = (
        nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(2)) for sizes in ((24, 2), (2, 24))
    )
    x, y = (torch.randint(0, 40, (16, 6)) for _ in range(2))
    return Call(forward, **frozen, down=down, up=up), (x, y), {}
