"""Models whose plan itself decides what runs when, so that a compiler is kept out."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, TypeVar

import torch

from tensoropt.engine.engine import Engine
from tensoropt.engine.parallel_model import ParallelModel

E = TypeVar("E", bound=Engine)


class UncompiledModel(ParallelModel[E]):
    """A user's model whose plan orders more than a compiler would keep.

    Attributes:
        uncompiled: the reason, for people.
    """

    uncompiled: ClassVar[str]

    def install(self, *, compare_ranks: bool = True) -> None:
        super().install(compare_ranks=compare_ranks)
        # A compiler would reorder what the plan orders, so it is kept out; the script gets a warning, once.
        self._compiled = self._told = False
        self._run = torch.compiler.disable(self._uncompiled, reason=self._words)
        self.model.register_state_dict_pre_hook(lambda *_: self.engine.sync_buffers())

    @property
    def _words(self) -> str:
        rest = "which a compiler would undo; the model runs as it is, so leave torch.compile out"
        return f"{self.uncompiled}, {rest}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Checked outside of the part that the compiler leaves alone, in which it is always False.
        self._compiled = torch.compiler.is_compiling()
        return self._run(*args, **kwargs)

    def _uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled and not self._told:
            self._told = True
            warnings.warn(f"torch.compile changes nothing here: {self._words}", stacklevel=2)
        return super().forward(*args, **kwargs)
