"""Models whose gradients a trace of their forward does not show."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

BATCH, WIDTH, CLASSES = 8, 16, 4


def _inputs():
    return torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))


class Middle(nn.Module):
    """Two layers and a head, with something between the layers."""

    def __init__(self, middle=None):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        if middle is not None:
            self.middle = middle

    def forward(self, x, y):
        h = self.middle(torch.tanh(self.first(x)))
        return F.cross_entropy(self.head(torch.tanh(self.second(h))), y)


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


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def build_straight_through():
    """A frontier; the rounding is one operator with its own backward, twice with different steps."""
    return Middle(Calls(lambda x: round_to(round_to(x, 8), 4.0))), _inputs()


def build_reversal():
    """A frontier; the gradient that enters the first layer is reversed."""
    return Middle(Calls(lambda x: Reverse.apply(x, 0.5) + Reverse.apply(x))), _inputs()


def build_clipped():
    """A frontier; a backward that looks at all of its gradient is not split."""
    return Middle(Calls(lambda x: Clip.apply(x, 1e-3))), _inputs()


class Quantised(nn.Module):
    """A linear layer whose weight and input are quantised."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.step, self.input_step = nn.Parameter(torch.tensor(0.05)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        weight = LearnedStep.apply(self.weight, self.step, -8, 7)
        return F.linear(LearnedStep.apply(x, self.input_step, -8, 7), weight)


class QuantisedNet(nn.Module):
    """Two quantised layers, their weights' gradients clipped."""

    def __init__(self, clip):
        super().__init__()
        self.first, self.second = Quantised(WIDTH, WIDTH), Quantised(WIDTH, WIDTH)
        self.head = nn.Parameter(torch.randn(CLASSES, WIDTH) / 4)
        self.clip = clip

    def forward(self, x, y):
        h = x + torch.tanh(self.first(x))
        h = h + torch.tanh(self.second(h))
        head = Clip.apply(self.head, 1e-2) if self.clip else self.head
        return F.cross_entropy(F.linear(h, head), y)


def build_quantised():
    """A frontier; learned steps get the gradients that the function gives them."""
    return QuantisedNet(False), _inputs()


def build_clipped_weight():
    """A frontier; the gradient of a weight is clipped once for the whole batch, not once per part of it."""
    return QuantisedNet(True), _inputs()


class Codebook(nn.Module):
    """A vector-quantised middle (van den Oord et al., arXiv 1711.00937)."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(6, 2 * WIDTH) / 2)

    def forward(self, x):
        rows, chosen = Nearest.apply(x, self.codes)
        return rows + 0.01 * chosen.unsqueeze(-1)


def build_codebook():
    """A frontier; two results, one of them whole numbers."""
    return Middle(Codebook()), _inputs()


class Narrow(nn.Module):
    """Rounding inside a bfloat16 region."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return Round.apply(x.bfloat16(), 16).float()


def build_narrow():
    """A frontier; the function sees bfloat16."""
    return Middle(Narrow()), _inputs()


class Block(nn.Module):
    """A residual block with rounded activations."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(Round.apply(torch.relu(self.up(x)), 16.0))


class Stack(nn.Module):
    """Blocks that are alike, then a head."""

    def __init__(self, blocks, run=None):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.run = run or (lambda block, x: block(x))

    def forward(self, x, y):
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return F.cross_entropy(self.head(x), y)


def build_rounded_blocks():
    """A frontier; the function is in each of several blocks, which may be recomputed."""
    return Stack([Block(WIDTH) for _ in range(4)]), _inputs()


def build_random_function():
    """Refused: every device, and every recomputation, would round otherwise."""
    return Middle(Calls(Stochastic.apply)), _inputs()


build_random_function.refused = r"Stochastic \(.*gradients\.py:\d+.*draws random numbers"


def build_changing_function():
    """Refused: it changes what it is given."""
    return Middle(Calls(lambda x: Doubled.apply(x * 1.0))), _inputs()


build_changing_function.refused = r"Doubled \(.*gradients\.py:\d+.*changes a tensor"


def build_module_in_function():
    """Refused: the parameters that its module reads would be constants."""
    inner = nn.Linear(2 * WIDTH, 2 * WIDTH)
    return Middle(Calls(lambda x: Through.apply(x, inner))), _inputs()


build_module_in_function.refused = r"Through \(.*given a Linear, which a plan cannot name"


# -- hooks ------------------------------------------------------------------------------------------


def _scaled(grad):
    return grad * 0.25


def _hooked(x):
    if x.requires_grad:
        x.register_hook(_scaled)
    return x


def build_tensor_hook():
    """Refused: the hook would be lost."""
    return Middle(Calls(_hooked)), _inputs()


build_tensor_hook.refused = r"backward runs the hook _scaled \(.*gradients\.py:\d+"


def build_parameter_hook():
    """Refused: the hook would be lost."""
    model = Middle(nn.Identity())
    model.first.weight.register_hook(_scaled)
    return model, _inputs()


build_parameter_hook.refused = r"first\.weight has the hook _scaled \(.*gradients\.py:\d+"


def build_after_accumulation():
    """Refused: the hook would be lost."""
    model = Middle(nn.Identity())
    model.head.bias.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    return model, _inputs()


build_after_accumulation.refused = r"head\.bias has the hook"


def build_module_hook():
    """Refused: the hook would be lost."""
    model = Middle(nn.Identity())
    model.second.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.1,))
    return model, _inputs()


build_module_hook.refused = r"second has the hook"


def build_module_pre_hook():
    """Refused: the hook would be lost."""
    model = Middle(nn.Identity())
    model.second.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 0.1,))
    return model, _inputs()


build_module_pre_hook.refused = r"second has the hook"


def build_forward_hooks():
    """A frontier; hooks of forward, weight norm and spectral norm are traced."""
    model = Middle(nn.Identity())
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


def build_reentrant():
    """A frontier; reentrant checkpoints, whose gradients are kept."""
    return Stack(
        [Block(WIDTH) for _ in range(3)], lambda b, x: checkpoint(b, x, use_reentrant=True)
    ), _inputs()


class Idle(Stack):
    """The same without a stem: nothing that the checkpoints are given has a gradient."""

    def __init__(self):
        super().__init__([Block(WIDTH) for _ in range(2)])
        self.stem = nn.Identity()
        self.run = lambda block, x: checkpoint(block, x, use_reentrant=True)


def build_idle_reentrant():
    """A frontier; only the head is trained, as in the model, and a note says so."""
    return Idle(), _inputs()


def build_not_reentrant():
    """A frontier; checkpoints that are not reentrant."""
    return Stack(
        [Block(WIDTH) for _ in range(3)], lambda b, x: checkpoint(b, x, use_reentrant=False)
    ), _inputs()


class Sequence(nn.Module):
    """Layers run by ``checkpoint_sequential``."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, y):
        x = checkpoint_sequential(self.layers, 2, self.stem(x), use_reentrant=True)
        return F.cross_entropy(self.head(x), y)


def build_checkpointed_sequence():
    """A frontier; all layers are trained."""
    return Sequence(), _inputs()


# -- regions without gradients ----------------------------------------------------------------------


class Teacher(nn.Module):
    """A student that follows a teacher, whose context is given."""

    def __init__(self, context):
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.context = context

    def forward(self, x):
        with self.context():
            wanted = torch.tanh(self.teacher(x))
        return F.mse_loss(torch.tanh(self.student(x)), wanted.clone())


def build_inference_teacher():
    """A frontier; the teacher under ``inference_mode`` gets no gradient."""
    return Teacher(torch.inference_mode), (torch.randn(BATCH, WIDTH),)


class Decorated(Teacher):
    """The same by a decorator."""

    @torch.inference_mode()
    def wanted(self, x):
        return torch.tanh(self.teacher(x))

    def forward(self, x):
        return F.mse_loss(torch.tanh(self.student(x)), self.wanted(x).clone())


def build_decorated_teacher():
    """A frontier; the same by a decorator."""
    return Decorated(None), (torch.randn(BATCH, WIDTH),)


class Detached(nn.Module):
    """Its loss is cut off from its parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, y):
        return F.cross_entropy(self.layer(x).detach(), y)


def build_detached():
    """Refused: nothing would be trained."""
    return Detached(), _inputs()


build_detached.refused = r"depends on no trained parameter.*detach"


# -- losses -----------------------------------------------------------------------------------------


class Losses(nn.Module):
    """Two heads, each with a loss; ``shape`` puts them together."""

    def __init__(self, shape):
        super().__init__()
        self.body, self.one, self.two = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
            nn.Linear(WIDTH, 2),
        )
        self.shape = shape

    def forward(self, x, y):
        h = torch.tanh(self.body(x))
        return self.shape(F.cross_entropy(self.one(h), y), self.two(h).square().mean())


@dataclass
class Output:
    """Two losses by name."""

    classes: torch.Tensor
    boxes: torch.Tensor


def build_losses_in_a_dict():
    """Refused: which of them is trained is not said."""
    return Losses(lambda a, b: {"classes": a, "boxes": b, "nothing": None}), _inputs()


def build_losses_in_a_tuple():
    """Refused: which of them is trained is not said."""
    return Losses(lambda a, b: (a, b)), _inputs()


def build_losses_in_a_dataclass():
    """Refused: which of them is trained is not said."""
    return Losses(Output), _inputs()


build_losses_in_a_dict.refused = (
    r"2 losses \(out\['classes'\], out\['boxes'\]\).*loss=lambda out: out\['classes'\]"
)
build_losses_in_a_tuple.refused = r"2 losses \(out\[0\], out\[1\]\)"
build_losses_in_a_dataclass.refused = r"2 losses \(out\.classes, out\.boxes\).*out\.classes \+ out\.boxes"


def build_summed_losses():
    """A frontier; the model file says how its losses add up."""
    model = Losses(lambda a, b: {"classes": a, "boxes": b})
    return model, _inputs(), {}, lambda out: sum(out.values())


def build_named_loss():
    """A frontier; ``loss`` is trained, and a note names what is left out."""
    return Losses(lambda a, b: {"loss": a, "auxiliary": b}), _inputs()


# -- random numbers of Python's ---------------------------------------------------------------------


class Dropped(nn.Module):
    """Whole layers are dropped by Python's ``random``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, y):
        for layer in self.layers:
            if not self.training or random.random() < 0.5:
                x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), y)


def build_python_random():
    """A frontier of one draw, with a note."""
    return Dropped(), _inputs()


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


def _hook_on_inner_node(x):
    x = torch.tanh(x * 2)
    x.grad_fn.next_functions[0][0].register_hook(lambda inner, outer: None)
    return x


def _rounded(value):
    return value.to(torch.bfloat16)


def _saved(x):
    with torch.autograd.graph.saved_tensors_hooks(_rounded, lambda value: value.float()):
        return torch.tanh(x)


def _module_hook_inside(layer):
    def forward(x):
        layer.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.1,))
        return layer(x)

    return forward


def build_hook_on_node():
    """Refused: the hook would be lost."""
    return Middle(Calls(_hook_on_node)), _inputs()


def build_pre_hook_on_node():
    """Refused: the hook would be lost."""
    return Middle(Calls(_pre_hook_on_node)), _inputs()


def build_hook_on_inner_node():
    """Refused: the hook would be lost."""
    return Middle(Calls(_hook_on_inner_node)), _inputs()


def build_saved_tensor_hook():
    """Refused: what it rounds would be exact."""
    return Middle(Calls(_saved)), _inputs()


def build_module_hook_inside():
    """Refused: the hook would be lost."""
    return Middle(Calls(_module_hook_inside(nn.Identity()))), _inputs()


def build_kept_on_the_host():
    """A frontier: what is kept where changes no value, and the plan says what is kept."""

    def forward(x):
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(x) if x.grad_fn is None or x.grad_fn.name() else x

    return Middle(Calls(forward)), _inputs()


for _build in (
    build_hook_on_node,
    build_pre_hook_on_node,
    build_hook_on_inner_node,
    build_module_hook_inside,
):
    _build.refused = r"backward runs the hook .*<lambda> \(.*gradients\.py:\d+"
build_saved_tensor_hook.refused = r"backward runs the hook _saved\.<lambda> \(.*gradients\.py:\d+"
