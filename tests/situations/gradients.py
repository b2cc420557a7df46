"""Models whose gradients a trace of their forward does not show."""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.models import Call, situation

BATCH, WIDTH, CLASSES = 8, 16, 4


def _inputs():
    return torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))


class Middle(nn.Module):
    """Two layers and a head, with ``middle``, a function or a module, between the layers."""

    def __init__(self, middle=lambda x: x):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head, self.middle = nn.Linear(WIDTH, CLASSES), middle

    def forward(self, x, y):
        h = self.middle(torch.tanh(self.first(x)))
        return F.cross_entropy(self.head(torch.tanh(self.second(h))), y)


def middle(function, refused=None):
    return situation(lambda: Middle(function), _inputs, refused)


# -- functions with a backward of their own ---------------------------------------------------------


class Round(torch.autograd.Function):
    """Straight through: rounding has the gradient of the identity."""

    @staticmethod
    def forward(ctx, x, steps):
        return torch.round(x * steps) / steps

    @staticmethod
    def backward(ctx, grad):
        return grad, None


round_to = Round.apply


class Reverse(torch.autograd.Function):
    """Hands on its input, and a gradient times a negative number; with ``setup_context``."""

    @staticmethod
    def forward(x, scale=1.0):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


class Clip(torch.autograd.Function):
    """Hands on its input, and a gradient whose norm over everything is limited."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.clamp(ctx.most / (grad.norm() + 1e-12), max=1.0), None


class LearnedStep(torch.autograd.Function):
    """Quantises by a learned step (LSQ, arXiv 1902.08153); both get a gradient, as far as it asks."""

    @staticmethod
    def forward(ctx, x, step, low, high):
        ctx.save_for_backward(x, step)
        ctx.limits = low, high
        return torch.clamp(torch.round(x / step), low, high) * step

    @staticmethod
    def backward(ctx, grad):
        x, step = ctx.saved_tensors
        low, high = ctx.limits
        ratio = x / step
        inside = (ratio >= low) & (ratio <= high)
        of_x = grad * inside if ctx.needs_input_grad[0] else None
        part = torch.where(inside, torch.round(ratio) - ratio, ratio.clamp(low, high))
        of_step = (grad * part).sum().reshape(step.shape) if ctx.needs_input_grad[1] else None
        return of_x, of_step, None, None


class Nearest(torch.autograd.Function):
    """The nearest row of a codebook and its number: two results, of which one has no gradient."""

    @staticmethod
    def forward(ctx, x, codes):
        chosen = torch.cdist(x, codes).argmin(-1)
        ctx.mark_non_differentiable(chosen)
        ctx.save_for_backward(chosen)
        ctx.rows = codes.shape[0]
        return codes[chosen], chosen

    @staticmethod
    def backward(ctx, grad, _):
        (chosen,) = ctx.saved_tensors
        of_codes = torch.zeros(ctx.rows, grad.shape[1], dtype=grad.dtype, device=grad.device)
        return grad, of_codes.index_add(0, chosen, grad)


class Stochastic(torch.autograd.Function):
    """Rounds up or down at random."""

    @staticmethod
    def forward(ctx, x):
        return torch.floor(x + torch.rand_like(x))

    @staticmethod
    def backward(ctx, grad):
        return grad


class Doubled(torch.autograd.Function):
    """Changes what it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Through(torch.autograd.Function):
    """Runs a module that it is given."""

    @staticmethod
    def forward(ctx, x, module):
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# A frontier; the rounding is one operator with its own backward, twice with different steps.
build_straight_through = middle(lambda x: round_to(round_to(x, 8), 4.0))
# A frontier; the gradient that enters the first layer is reversed.
build_reversal = middle(lambda x: Reverse.apply(x, 0.5) + Reverse.apply(x))
# A frontier; a backward that looks at all of its gradient is not split.
build_clipped = middle(lambda x: Clip.apply(x, 1e-3))


class Quantised(nn.Module):
    """A linear layer whose weight and input are quantised."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.step, self.input_step = nn.Parameter(torch.tensor(0.05)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        weight = LearnedStep.apply(self.weight, self.step, -8, 7)
        return F.linear(LearnedStep.apply(x, self.input_step, -8, 7), weight)


def quantised_net(clip):
    """A build function of two quantised layers, whose head's gradient is clipped or not."""

    def forward(m, x, y):
        h = x + torch.tanh(m.first(x))
        h = h + torch.tanh(m.second(h))
        return F.cross_entropy(F.linear(h, Clip.apply(m.head, 1e-2) if clip else m.head), y)

    def make():
        layers = {name: Quantised(WIDTH, WIDTH) for name in ("first", "second")}
        return Call(forward, **layers, head=(CLASSES, WIDTH))

    return situation(make, _inputs)


# A frontier; learned steps get the gradients that the function gives them.
build_quantised = quantised_net(False)
# A frontier; the gradient of a weight is clipped once for the whole batch, not once per part of it.
build_clipped_weight = quantised_net(True)


def _codebook(m, x):
    rows, chosen = Nearest.apply(x, m.codes / 2)
    return rows + 0.01 * chosen.unsqueeze(-1)


def _narrow(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Round.apply(x.bfloat16(), 16).float()


# A frontier of a vector-quantised middle (arXiv 1711.00937); two results, one of them whole numbers.
build_codebook = situation(lambda: Middle(Call(_codebook, codes=(6, 2 * WIDTH))), _inputs)
# A frontier; the function sees bfloat16.
build_narrow = middle(_narrow)


class Block(nn.Module):
    """A residual block with rounded activations."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(Round.apply(torch.relu(self.up(x)), 16.0))


def stack(count, run=lambda block, x: block(x), stem=True):
    """A build function of a stem, of blocks that are alike, each called by ``run``, and of a head."""

    def forward(m, x, y):
        x = m.stem(x)
        for block in m.blocks:
            x = run(block, x)
        return F.cross_entropy(m.head(x), y)

    def make():
        blocks = nn.ModuleList(Block(WIDTH) for _ in range(count))
        first = nn.Linear(WIDTH, WIDTH) if stem else nn.Identity()
        return Call(forward, stem=first, blocks=blocks, head=nn.Linear(WIDTH, CLASSES))

    return situation(make, _inputs)


# A frontier; the function is in each of several blocks, which may be recomputed.
build_rounded_blocks = stack(4)


# Refused: every device, and every recomputation, would round otherwise.
build_random_function = middle(Stochastic.apply, r"Stochastic \(.*gradients\.py:\d+.*draws random numbers")
# Refused: it changes what it is given.
build_changing_function = middle(
    lambda x: Doubled.apply(x * 1.0), r"Doubled \(.*gradients\.py:\d+.*changes a tensor"
)
# Refused: the parameters that its module reads would be constants.
build_module_in_function = middle(
    lambda x: Through.apply(x, nn.Identity()), r"Through \(.*given an? Identity, which a plan cannot store"
)


# -- hooks ------------------------------------------------------------------------------------------


def _scaled(grad):
    return grad * 0.25


def _hooked(x):
    if x.requires_grad:
        x.register_hook(_scaled)
    return x


def _hook_on_node(x):
    x = x * 1
    if x.grad_fn is not None:
        x.grad_fn.register_hook(lambda inner, outer: tuple(g * 0.5 for g in inner))
    return x


def _pre_hook_on_node(x):
    x = torch.tanh(x)
    node = torch.autograd.graph.get_gradient_edge(x).node
    node.register_prehook(lambda outer: tuple(g * 0.5 for g in outer))
    return x


def _saved(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return torch.tanh(x)


def _module_hook_inside(x):
    layer = nn.Identity()
    layer.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.1,))
    return layer(x)


# Refused: the hooks would be lost, and what one of them rounds would be exact.
RUNS = r"backward runs the hook {} \(.*gradients\.py:\d+"
build_tensor_hook = middle(_hooked, RUNS.format("_scaled"))
build_hook_on_node = middle(_hook_on_node, RUNS.format(r"_hook_on_node\.<lambda>"))
build_pre_hook_on_node = middle(_pre_hook_on_node, RUNS.format(r"_pre_hook_on_node\.<lambda>"))
build_module_hook_inside = middle(_module_hook_inside, RUNS.format(r"_module_hook_inside\.<lambda>"))
build_saved_tensor_hook = middle(_saved, RUNS.format(r"_saved\.<lambda>"))


def hooked(hook, refused):
    """A build function of a model that has hooks before it is captured, given by ``hook(model)``."""

    def make():
        model = Middle()
        hook(model)
        return model

    return situation(make, _inputs, refused)


build_parameter_hook = hooked(
    lambda m: m.first.weight.register_hook(_scaled),
    r"first\.weight has the hook _scaled \(.*gradients\.py:\d+",
)
build_after_accumulation = hooked(
    lambda m: m.head.bias.register_post_accumulate_grad_hook(_scaled), r"head\.bias has the hook"
)
build_module_pre_hook = hooked(
    lambda m: m.second.register_full_backward_pre_hook(_scaled), r"second has the hook"
)


def build_forward_hooks():
    """A frontier; hooks of forward, weight norm and spectral norm are traced."""
    model = Middle()
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.second.register_forward_hook(lambda module, args, out: out.clamp(-0.5, 0.5))
    nn.utils.parametrizations.weight_norm(model.head)
    nn.utils.parametrizations.orthogonal(model.second, orthogonal_map="cayley")
    return model, _inputs()


# -- modes ------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A convolution net with batch norms and a dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, CLASSES)

    def forward(self, x, y):
        x = self.norm(self.first(x)).relu()
        x = self.last(self.second(x)).relu()
        return F.cross_entropy(self.head(self.drop(x.mean((2, 3)))), y)


def _images():
    return torch.randn(BATCH, 3, 8, 8), torch.randint(0, CLASSES, (BATCH,))


def build_held_norm():
    """A frontier; one norm and the dropout evaluate, the other norm trains."""
    model = Normed()
    model.norm.running_mean.normal_()
    model.norm.eval()
    model.drop.eval()
    return model, _images()


# -- checkpoints ------------------------------------------------------------------------------------


# Frontiers; checkpoints of both kinds, whose gradients are kept.
build_reentrant = stack(3, lambda b, x: checkpoint(b, x, use_reentrant=True))
build_not_reentrant = stack(3, lambda b, x: checkpoint(b, x, use_reentrant=False))


# Without a stem nothing that they are given has a gradient: only the head is trained, and a note says so.
build_idle_reentrant = stack(2, lambda b, x: checkpoint(b, x, use_reentrant=True), stem=False)


def _sequence(m, x, y):
    x = checkpoint_sequential(m.layers, 2, m.stem(x), use_reentrant=True)
    return F.cross_entropy(m.head(x), y)


def _layers():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    return Call(_sequence, stem=nn.Linear(WIDTH, WIDTH), layers=layers, head=nn.Linear(WIDTH, CLASSES))


# A frontier; all layers are trained.
build_checkpointed_sequence = situation(_layers, _inputs)


# -- regions without gradients ----------------------------------------------------------------------


def taught(wanted):
    """A build function of a student that follows what ``wanted(teacher, x)`` gives."""

    def forward(m, x):
        return F.mse_loss(torch.tanh(m.student(x)), wanted(m.teacher, x).clone())

    def make():
        return Call(forward, student=nn.Linear(WIDTH, WIDTH), teacher=nn.Linear(WIDTH, WIDTH))

    return situation(make, lambda: (torch.randn(BATCH, WIDTH),))


def _in_context(teacher, x):
    with torch.inference_mode():
        return torch.tanh(teacher(x))


# Frontiers; the teacher gets no gradient, by a context or by a decorator.
build_inference_teacher = taught(_in_context)


build_decorated_teacher = taught(torch.inference_mode()(lambda teacher, x: torch.tanh(teacher(x))))


# -- losses -----------------------------------------------------------------------------------------


def losses(shape):
    """Two heads, each with a loss, which ``shape`` puts together."""

    def forward(m, x, y):
        h = torch.tanh(m.body(x))
        return shape(F.cross_entropy(m.one(h), y), m.two(h).square().mean())

    return Call(forward, body=nn.Linear(WIDTH, WIDTH), one=nn.Linear(WIDTH, CLASSES), two=nn.Linear(WIDTH, 2))


def build_summed_losses():
    """A frontier; the model file says how its losses add up."""
    return losses(lambda a, b: {"classes": a, "boxes": b}), _inputs(), {}, lambda out: sum(out.values())


# A frontier; ``loss`` is trained, and a note names what is left out.
build_named_loss = situation(lambda: losses(lambda a, b: {"loss": a, "auxiliary": b}), _inputs)


# -- random numbers of Python's ---------------------------------------------------------------------


def _dropped(m, x, y):
    for layer in m.layers:
        if not m.training or random.random() < 0.5:
            x = x + torch.tanh(layer(x))
    return F.cross_entropy(m.head(x), y)


def build_python_random():
    """A frontier of one draw, with a note: whole layers are dropped by Python's ``random``."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
    return Call(_dropped, layers=layers, head=nn.Linear(WIDTH, CLASSES)), _inputs()
