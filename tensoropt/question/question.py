"""The question that ``explore`` answers, as an object that can be stored, sent, and written as JSON.

A command line or a web form is read into a question, which can also be written as a command line again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from tensoropt.cluster import Cluster
from tensoropt.errors import TensorOptError
from tensoropt.launchers.job import LaunchedJob
from tensoropt.question.compute_dtype import AUTO, with_dtype
from tensoropt.question.model_source import (
    LoadedModel,
    ModelSourceError,
    OnnxOptions,
    default_batch,
    is_onnx,
    load_model,
    with_sequence,
)
from tensoropt.question.settings import Settings, settings_fields
from tensoropt.units import headroom_bytes, read_counts, write_counts, write_size


class Question(BaseModel):
    """A model, the cluster to run it on, and the settings of its exploration.

    Attributes:
        model: as on the command line: ``zoo:NAME``, ``FILE.onnx``, ``path/file.py:function`` and the like.
        cluster: the name of a cluster, or the content of a cluster file.
        batch: the global batch size; None for the model's own.
        batches: global batch sizes to explore one by one; ``auto`` searches for the largest that fits.
        seed: the seed of weights, and of planners that search by chance.
        dims, outputs, loss: options of an ONNX file.
        settings: the settings of the exploration.
        constraints_file: the path of a file with constraints on plans.
        headroom: device memory to keep free: ``5%`` or ``2GiB``.
        planners: published planners to compare with: ``all``, or names.
        planner_options: planners' settings, such as ``netsplit.seconds=600``.
        limits: memory limits of planners in bytes per device; None for all trade-offs that they find.
        devices: device counts to explore one by one; ``auto`` for 1, 2, 4, ... up to all.
        also_on: further clusters by name.
        beside: users' current jobs: ``torchtitan:job.toml`` and the like.
        anew: whether to ignore cached results.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    cluster: str | dict[str, Any]
    batch: int | None = None
    batches: str | tuple[int, ...] = ""
    seed: int = 0
    dims: dict[str, int] = {}
    outputs: tuple[str, ...] = ()
    loss: str | None = None
    settings: Annotated[
        Settings,
        BeforeValidator(lambda given: Settings.from_dict(given) if isinstance(given, Mapping) else given),
        PlainSerializer(lambda settings: settings.to_dict()),
    ] = Field(default_factory=Settings)
    constraints_file: str = ""
    headroom: str = ""
    planners: tuple[str, ...] = ()
    planner_options: tuple[str, ...] = ()
    limits: tuple[float | None, ...] = (None,)
    devices: str | tuple[int, ...] = ""
    also_on: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    anew: bool = False

    @classmethod
    def of(cls, data: object) -> Question:
        """Return the question that :meth:`data` wrote; raise :class:`TensorOptError` if it is invalid."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"])) or "it"
            raise TensorOptError(
                f"the question was not written by this version ({place}: {fault['msg']}); ask it again"
            ) from None

    def data(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @property
    def onnx(self) -> OnnxOptions | None:
        """The options for importing the model's ONNX file; None for other models without such options."""
        return onnx_options(
            self.model, self.dims, self.outputs, self.loss, training=self.settings.mode == "train"
        )

    @property
    def capture_facts(self) -> dict[str, Any]:
        """The values, besides the model's source, on which the captured operator graph depends, by name."""
        chosen = {"batch": self.batch, "seed": self.seed, "onnx": repr(self.onnx)}
        return {**chosen, "mode": self.settings.mode, "dtype": self.settings.dtype}

    def computing_on(self, clusters: Iterable[Cluster]) -> Question:
        """Return the question with dtype ``auto`` replaced by one in which all these clusters can compute."""
        settings = with_dtype(self.settings, self.model, clusters)
        return self if settings is self.settings else self.model_copy(update={"settings": settings})

    def as_run_by(self, jobs: Sequence[LaunchedJob], devices: int) -> tuple[Question, str]:
        """Return the question with the batch size, sequence length and dtype of users' current jobs, as far
        as the question leaves them open and the model allows a choice, and a sentence that lists them.

        Raises:
            JobError: a job cannot run on this many devices.
        """
        model, batch, settings, taken = self.model, self.batch, self.settings, list[str]()
        for job in (job.on(devices) for job in jobs):
            if batch is None and not self.batches:
                with suppress(TensorOptError):
                    default_batch(model)
                    batch = job.batch_on(devices)
                    taken += [f"batch {batch}"] if batch else []
            if job.sequence:
                with suppress(TensorOptError):
                    model = with_sequence(model, job.sequence)
                    taken.append(f"sequence {job.sequence}")
            if job.dtype and settings.dtype == AUTO:
                settings = replace(settings, dtype=job.dtype)
                taken.append(f"dtype {job.dtype}")
        flags = ", ".join(f"--{words.partition(' ')[0]}" for words in taken)
        words = f"{', '.join(taken)}, as in the job: {flags} can change it" if taken else ""
        return self.model_copy(update={"model": model, "batch": batch, "settings": settings}), words

    def at(self, batch: int) -> Question:
        """Return the question for a single batch size instead of several."""
        return self.model_copy(update={"batch": batch, "batches": ""})

    def loaded_model(self, *, on_meta: bool) -> LoadedModel:
        """Build the model; with ``on_meta`` without memory for its weights, if the model's code allows
        that."""
        if on_meta:
            try:
                return load_model(self.model, device="meta", seed=self.seed, batch=self.batch, onnx=self.onnx)
            except ModelSourceError:
                pass  # some code needs values; it builds on the CPU, or fails there with a reason
        return load_model(self.model, device="cpu", seed=self.seed, batch=self.batch, onnx=self.onnx)

    def settings_on(self, cluster: Cluster) -> Settings:
        """Return the settings, with a memory budget that leaves the headroom free on this cluster's
        devices."""
        if not self.headroom:
            return self.settings
        usable = cluster.memory_bytes - headroom_bytes(self.headroom, cluster.memory_bytes)
        return replace(self.settings, memory_bytes=min(self.settings.memory_bytes or usable, usable))

    def in_effect(self, cluster: Cluster, settings: Settings, out: str | None) -> str:
        """Return one line of text with all settings that an exploration uses, defaults included."""
        parts = {
            "model": self.model,
            "batch": self.batch or "the model's own",
            "seed": self.seed,
            "cluster": f"{cluster.name} ({cluster.counts})",
        }
        for setting in settings_fields():
            parts[setting.flag] = setting.text(getattr(settings, setting.name))
        if self.constraints_file:
            parts["constraints"] = self.constraints_file
        parts["out"] = out or "nothing saved"
        return "exploring with " + ", ".join(f"{name} {value}" for name, value in parts.items())

    def words(self, out: str, cluster_file: str = "", constraints_file: str = "") -> list[str]:
        """Return the words of the command line (after ``tensoropt``) that asks this question, without
        defaults.

        Args:
            out: the folder for the result.
            cluster_file, constraints_file: files to name, if the question has the content of a cluster file
                or of constraints.
        """
        cluster = self.cluster if isinstance(self.cluster, str) else cluster_file
        words = ["explore", self.model, "--cluster", cluster]
        batch = write_counts(self.batches) if self.batch is None else str(self.batch)
        words += ["--batch", batch] if batch else []
        words += [word for name, size in self.dims.items() for word in ("--dim", f"{name}={size}")]
        words += [word for tensor in self.outputs for word in ("--output", tensor)]
        words += [] if self.loss is None else ["--loss", self.loss]
        for setting in settings_fields():
            value, text = getattr(self.settings, setting.name), ""
            if setting.name == "constraints":
                text = self.constraints_file or (constraints_file if value is not None else "")
                value = text or None
            words += setting.option(value, text)
        limits = ",".join(write_size(limit) for limit in self.limits if limit is not None)
        named = {
            "memory": limits,
            "headroom": self.headroom,
            "seed": str(self.seed or ""),
            "planners": ",".join(self.planners),
            "devices": write_counts(self.devices),
            "also-on": ",".join(self.also_on),
        }
        words += [word for name, text in named.items() if text for word in (f"--{name}", text)]
        words += [word for job in self.beside for word in ("--beside", job)]
        words += [word for option in self.planner_options for word in ("--planner-option", option)]
        return [*words, *(["--anew"] if self.anew else []), "--out", out]

    def line(self, out: str, cluster_file: str = "") -> str:
        """Return the command line that asks this question, to be copied; arguments are as in
        :meth:`words`."""
        return shlex.join(["tensoropt", *self.words(out, cluster_file)])


def onnx_options(
    source: str, dims: Mapping[str, int], outputs: Sequence[str], loss: str | None, *, training: bool
) -> OnnxOptions | None:
    """Return the options for importing an ONNX file; None if the source is another and there are no options.

    Raises:
        TensorOptError: a loss is given for inference.
    """
    if not is_onnx(source) and not (dims or outputs or loss):
        return None
    if loss is not None and not training:
        raise TensorOptError("--loss is for training; leave it out with --mode inference")
    return OnnxOptions.of(dims, outputs, (loss or "auto") if training else None)


def read_batches(text: str) -> dict[str, Any]:
    """Return the fields of :class:`Question` for a batch option such as ``8``, ``8,16,32`` or ``auto``.

    Raises:
        TensorOptError: the text is none of these, or a batch size is below 1.
    """
    try:
        # A single batch may have more digits than read_counts takes.
        read = (int(text),) if re.fullmatch(r"\s*[0-9]+\s*", text) else read_counts(text)
    except TensorOptError:
        raise TensorOptError(
            f"'{text[:40]}' is neither a number, nor a list such as 8,16,32, nor auto"
        ) from None
    if isinstance(read, str):
        return {"batches": read}
    if min(read) < 1:
        raise TensorOptError(f"'{text[:40]}' has a batch of {min(read)}; give at least 1")
    batches = tuple(dict.fromkeys(read))
    return {"batch": batches[0]} if len(batches) == 1 else {"batches": batches}
