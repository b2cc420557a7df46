"""Optimizers that people bring."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms (NeurIPS 2023, algorithm 2)."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 1e-3):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                first, second = group["betas"]
                moved = state["average"] * first + parameter.grad * (1 - first)
                parameter.add_(moved.sign(), alpha=-group["lr"])
                state["average"].mul_(second).add_(parameter.grad, alpha=1 - second)


class Normed(Lion):
    """A step of the same length for every parameter, as LARS makes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def rmsprop(parameters):
    return torch.optim.RMSprop(parameters, lr=1e-3, foreach=True)


def amsgrad(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, foreach=False, amsgrad=True)


def lion(parameters):
    return Lion(parameters)


def normed(parameters):
    return Normed(parameters)


def adafactor(parameters):
    return torch.optim.Adafactor(parameters)


def muon(parameters):
    return torch.optim.Muon(parameters)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters)


def nothing(parameters):
    return None
