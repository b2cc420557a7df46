"""Training by torchtitan's trainer under torchrun (``titan_jobs.py WHAT FOLDER PLAN``), or in one process.

Some batches have no targets.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import tests.integrations.titan_on_cpu  # noqa: F401, before torchtitan's own modules

# isort: split
import torch
from torch import nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import tensoropt
from tensoropt.errors import PlanError
from tensoropt.integrations import torchtitan
from tensoropt.integrations.torchtitan import by_plan, explored
from tensoropt.integrations.torchtitan_model import document_mask, explored_spec
from tests.integrations.averages import Average
from tests.integrations.planned import take_part
from tests.integrations.trainer_jobs import pipelined

SOURCE = "tests.integrations.titan_jobs:recipe"
GLOBAL, LENGTH, STEPS = 4, 8, 50


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any):
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


class Texts(BaseDataLoader):
    """A rank's rows of batches with several documents in a row, and unequal numbers of targets."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ):
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.shape = (dp_world_size * local_batch_size, seq_len)
        self.number = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            draws = torch.Generator().manual_seed(self.number)
            tokens = torch.randint(2048, (self.shape[0], self.shape[1] + 1), generator=draws)
            labels = tokens[:, 1:].clone()
            positions = torch.arange(self.shape[1]).repeat(self.shape[0], 1)
            for row in range(self.shape[0]):
                begins = 2 + (row + self.number) % (self.shape[1] - 2)
                positions[row, begins:] -= begins
                labels[row, : (row * 3 + self.number) % self.shape[1]] = IGNORE_INDEX
            if self.number % 5 == 4:
                labels[:] = IGNORE_INDEX
            self.number += 1
            rows = self.rows
            yield {"input": tokens[rows, :-1], "positions": positions[rows]}, labels[rows]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def groups() -> OptimizersContainer.Config:
    """AdamW, which decays all but norms."""
    decayed = {"lr": 1e-3, "weight_decay": 0.1}
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=r"norm", optimizer_name="AdamW", optimizer_kwargs=decayed | {"weight_decay": 0.0}
            ),
            ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=decayed),
        ]
    )


def config(folder: Path = Path("out"), steps: int = STEPS) -> Trainer.Config:
    """Two batches a step; torchtitan's smallest Llama, of one layer."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:1]
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Texts.Config(),
        optimizer=groups(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3),
        training=TrainingConfig(
            local_batch_size=GLOBAL,
            global_batch_size=2 * GLOBAL,
            seq_len=LENGTH,
            steps=steps,
            max_norm=0.5,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        validator=Validator.Config(enable=True, freq=steps // 2, steps=3, dataloader=Texts.Config()),
        debug=DebugConfig(seed=3, enable_structured_logging=False),
        dump_folder=str(folder),
    )


def planned() -> Trainer.Config:
    return by_plan(config())


def recipe() -> tuple[nn.Module, tuple[Any, ...], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    return explored(config())


class Plain(Trainer):
    """torchtitan's trainer of the model that was explored, without a plan: FlexAttention has no backward on a
    CPU, and ``fully_shard`` nothing to do."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        processed = self.validator.post_dataloading_process
        self.validator.post_dataloading_process = lambda *args: _masked(*processed(*args))

    def post_dataloading_process(self, input_dict: Any, labels: Any) -> Any:
        return _masked(*super().post_dataloading_process(input_dict, labels))


def _masked(inputs: torch.Tensor, labels: torch.Tensor, more: dict[str, Any]) -> Any:
    return inputs, labels, more | {"attention_masks": document_mask(more["positions"])}


def made(plan: str | None, configured: Trainer.Config) -> Trainer:
    if plan == "pipeline":  # whose strategy is in no file
        with mock.patch.multiple(torchtitan, load_plan=mock.DEFAULT, parallelize=_in_stages) as patched:
            patched["load_plan"].return_value.compute_dtype = "float32"
            return by_plan(configured, plan).build()
    if plan is not None:
        return by_plan(configured, plan).build()
    spec = explored_spec(configured.model_spec)
    spec.parallelize_fn = lambda model, **_: model
    plain = {field.name: getattr(configured, field.name) for field in fields(configured)}
    return Plain.Config(**plain | {"model_spec": spec}).build()


def _in_stages(model: nn.Module, _: str, **settings: Any) -> nn.Module:
    return tensoropt.parallelize(model, pipelined(SOURCE), (), recipe()[2], **settings)


def history(trainer: Trainer) -> dict[str, list[float]]:
    """Train, and average the parameters; what torchtitan would log, and last the loss of the average."""
    found: dict[str, list[float]] = {"losses": [], "norms": [], "rates": [], "tokens": [], "validated": []}

    def log(step: int, loss: float, largest: float, norm: float, extra_metrics: dict[str, float]) -> None:
        found["losses"].append(loss)
        found["norms"].append(norm)
        found["rates"] += [rate for name, rate in extra_metrics.items() if name.startswith("lr/")]
        found["tokens"].append(extra_metrics["n_tokens_seen"])

    average = Average(trainer.model_parts[0])
    if trainer.config.checkpoint.enable:
        trainer.checkpointer.states["average"] = average
    trainer.optimizers.register_step_post_hook(lambda *_: average.update())
    trainer.metrics_processor.log = log
    trainer.metrics_processor.log_validation = lambda loss, step: found["validated"].append(loss)
    try:
        with mock.patch("time.sleep"):
            trainer.train()
            with average.in_place():
                trainer.validator.validate(trainer.model_parts, trainer.step)
    finally:
        trainer.close()
        gc.enable()  # which its trainer stopped, for each rank to collect at the same step
        torch.autograd.set_multithreading_enabled(True)
    return found


def saving(folder: Path) -> Trainer.Config:
    """A configuration that saves in the middle and at the end."""
    saves = CheckpointManager.Config(enable=True, interval=STEPS // 2, last_save_model_only=False)
    return replace(config(folder), checkpoint=saves)


def trained(folder: Path, plan: str | None) -> dict[str, Any]:
    """Training that is validated and saved; then from the middle again."""
    found: dict[str, Any] = history(made(plan, saving(folder)))
    return found | {"resumed": continued(folder, plan)}


def continued(folder: Path, plan: str | None) -> dict[str, Any]:
    """Training from the middle of what was saved."""
    configured = saving(folder)
    configured.checkpoint.load_step = STEPS // 2
    return history(made(plan, configured))


def briefly_trained(folder: Path, plan: str | None) -> dict[str, Any]:
    return history(made(plan, config(folder, 4)))


def saved_in_stages(folder: Path, plan: str | None) -> dict[str, Any]:
    """What is said of torchtitan's checkpoints under a pipeline."""
    try:
        made(plan, saving(folder))
    except PlanError as error:
        return {"said": str(error)}
    return {"said": ""}


JOBS: dict[str, Callable[[Path, str | None], dict[str, Any]]] = {
    job.__name__: job for job in (trained, continued, briefly_trained, saved_in_stages)
}


def alone(what: str, folder: Path) -> dict[str, Any]:
    """What a job of one process finds without a plan, in this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with mock.patch.dict(os.environ, place | {"MASTER_PORT": str(port)}):
        try:
            return JOBS[what](folder, None)
        finally:
            tensoropt.shutdown()


if __name__ == "__main__":
    take_part(JOBS)
