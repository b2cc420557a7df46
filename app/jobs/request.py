"""Conversions from the form of a page to a checked question (what to explore), and back to a form.

The form has few fields, and one for more options in the command line's syntax. These options may not name
files of this machine. A model may be a function in a Python file below the dashboard's start folder, if the
dashboard answers only this machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensoropt.cli.arguments import question_option
from tensoropt.cli.parser import parser
from tensoropt.cluster import list_clusters, load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.question.model_source import default_batch
from tensoropt.question.question import Question
from tensoropt.question.settings import settings_fields
from tensoropt.units import write_counts, write_size
from tensoropt.zoo import list_models, read_name

from .uploads import MOST_DEVICES, Uploads

FIELDS = ("model", "devices", "batch", "sequence", "dtype", "more")
"""The form's fields."""
DTYPES = ("auto", "bfloat16", "float32")
_CLUSTER_FILE, _CONSTRAINTS_FILE = "cluster.json", "asked-constraints.json"
"""Files in a job's folder that its command line names: a cluster without a name, and constraints."""
_LONGEST = 2000
_OWN_FIELDS = ("dtype", "constraints")
OPTIONS = (
    *(setting.flag for setting in settings_fields() if setting.name not in _OWN_FIELDS),
    *(f"no-{setting.flag}" for setting in settings_fields() if isinstance(setting.default, bool)),
    *("seed", "planners", "devices", "also-on", "dim", "output", "loss", "headroom", "lora", "anew"),
)  # fmt: skip
"""Options of ``explore`` that the field "more options" accepts."""
_PYTHON = (
    "with --host a dashboard runs no Python files; explore the function on the command line: "
    "tensoropt explore train.py:build --cluster dgx-h100 --out out/mine"
)


class RequestError(TensorOptError):
    """A form that cannot be submitted.

    Attributes:
        field: the name of the invalid field.
    """

    def __init__(self, field: str, words: str):
        super().__init__(words)
        self.field = field


@dataclass(frozen=True)
class Request:
    """One exploration to run.

    Attributes:
        label: the display name of the model.
        place: the display name of the devices.
        measures: whether this machine's own ranks are timed, so that nothing else should run.
    """

    question: Question
    label: str
    place: str
    measures: bool = False

    @property
    def title(self) -> str:
        """The job's title: the model, the devices, and every setting that differs from its default."""
        question = self.question
        parts = [f"{self.label} on {self.place}"]
        if question.devices:
            parts.append(f"on {write_counts(question.devices)} devices")
        if question.also_on:
            parts.append(f"also on {', '.join(question.also_on)}")
        parts += [f"{name}={size}" for name, size in question.dims.items()]
        parts += [f"up to {tensor}" for tensor in question.outputs]
        batch = question.batch or write_counts(question.batches)
        named = {"batch": batch, "loss": question.loss, "seed": question.seed}
        parts += [f"{name} {value}" for name, value in named.items() if value]
        for setting in settings_fields():
            value = getattr(question.settings, setting.name)
            parts += [setting.in_title(value)] if value != setting.default else []
        parts += [f"memory {write_size(limit)}" for limit in question.limits if limit is not None]
        if question.planners:
            parts.append(f"beside {', '.join(question.planners)}")
        return " · ".join(parts)


def written(question: Question, folder: Path) -> list[str]:
    """Return the command-line arguments that ask a question, with results in ``folder``. A cluster without a
    name, and constraints, are written there as files."""
    cluster, constraints = folder / _CLUSTER_FILE, folder / _CONSTRAINTS_FILE
    if not isinstance(question.cluster, str):
        cluster.write_text(json.dumps(question.cluster, indent=1) + "\n", encoding="utf-8")
    if question.settings.constraints is not None:
        data = question.settings.to_dict()["constraints"]
        constraints.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return question.words(str(folder), str(cluster), str(constraints))


def request_from(form: Mapping[str, Any], uploads: Uploads) -> Request:
    """Return the exploration that a filled form requests, after checking every field.

    Raises:
        RequestError: a field is missing or invalid; the error names the field.
    """
    text = {name: str(form.get(name) or "").strip() for name in FIELDS}
    source, label = model_source(text["model"], uploads)
    place = text["devices"]
    cluster = cluster_of(place, uploads)
    more = _options(text["more"])
    words = ["explore", source, "--cluster", "cpu:1", "--out", "out"]  # the form's own values replace these
    words += [w for name in ("batch", "sequence") if text[name] for w in (f"--{name}", text[name])]
    words += ["--dtype", text["dtype"]] if text["dtype"] not in ("", "auto") else []
    for name in ("batch", "sequence"):
        if text[name].startswith("-"):
            raise RequestError(name, f"the {name}: give a whole number")
        if text[name] and source.endswith(".onnx"):
            raise RequestError(name, "give a file's sizes in more options (--dim batch=8); leave this empty")
    try:
        question: Question = question_option(parser().parse_args([*words, *more]))
    except TensorOptError as error:
        field = _field(str(error))
        raise RequestError(field, re.sub(rf"^--{field}:? ", "", str(error))) from None
    _check_divides(question, source)
    _check_planners(question)
    for name in question.also_on:
        cluster_of(name, uploads, field="more")
    local = isinstance(cluster, str) and bool(re.match(r"(local|cpu)\b", cluster))
    return Request(question.model_copy(update={"cluster": cluster}), label, place, local)


def _field(fault: str) -> str:
    """Return the form's field that an error message of the command line is about."""
    return next(
        (name for name in ("batch", "sequence") if f"--{name} " in fault or f"--{name}:" in fault), "more"
    )


def _check_planners(question: Question) -> None:
    from tensoropt.planners.registry import ENTRIES  # imported on use, as it imports all planners

    for name in question.planners:
        if name != "all" and name not in ENTRIES:
            raise RequestError("more", f"unknown planner '{name[:40]}'; use one of {', '.join(ENTRIES)}")


def _check_divides(question: Question, source: str) -> None:
    counts = question.settings.micro_batches
    if isinstance(counts, str) or question.batches:
        return
    batch = question.batch or (default_batch(source) if source.startswith("zoo:") else 0)
    for count in counts:
        if batch % count:
            raise RequestError(
                "more", f"{count} micro-batches do not divide the batch of {batch}; use a divisor"
            )


def model_source(text: str, uploads: Uploads) -> tuple[str, str]:
    """Return a model's source for ``explore``, and its display name.

    Raises:
        RequestError: no model has that name.
    """
    for path, label in reversed(list(uploads.known().values())):
        if label == text:
            return str(path), label
    named = text.removeprefix("zoo:")
    if named.partition("?")[0] in {model.name for model in list_models()}:
        try:
            read_name(named)
        except TensorOptError as error:
            raise RequestError("model", str(error)) from None
        return f"zoo:{named}", named
    if re.fullmatch(
        r"(hf:|[\w-][\w.-]*/|hf:[\w-][\w.-]*/)[\w-][\w.-]*", text, re.ASCII
    ) and not text.endswith(".py"):
        return f"hf:{text.removeprefix('hf:')}", text.removeprefix("hf:")
    if ".py" in text or re.fullmatch(r"[\w.]+:\w+", text):
        return _own_function(text, uploads.own)
    raise RequestError(
        "model",
        "choose a listed model, hf:MODEL or ORGANISATION/MODEL from the Hugging Face Hub, or drop a file",
    )


def _own_function(text: str, folder: Path | None) -> tuple[str, str]:
    """Return the model source for a Python function of this machine, and its display name. As the function
    will be run, its file must be below the dashboard's start folder, and only this user may change it."""
    match = re.fullmatch(r"([^:?]+\.py):(\w+(?:\?.*)?)", text)
    if match is None or folder is None:
        raise RequestError("model", _PYTHON if folder is None else "write file.py:function")
    path = (folder / match.group(1)).resolve()
    if not path.is_relative_to(folder):
        raise RequestError("model", f"only files below {folder}, the dashboard's start folder, may be run")
    if not path.is_file():
        raise RequestError("model", f"there is no file {path} on the dashboard's machine")
    state = path.stat()
    if state.st_mode & stat.S_IWOTH or state.st_uid != os.geteuid():
        raise RequestError("model", f"other users can change {path}; give a file that only you can write")
    return f"{path}:{match.group(2)}", f"{path.relative_to(folder)}:{match.group(2)}"


def cluster_of(text: str, uploads: Uploads, field: str = "devices") -> str | dict[str, Any]:
    """Return the cluster that a text means: a name, or the content of an uploaded file.

    Raises:
        RequestError: no cluster has that name, or it has too many devices.
    """
    for file in reversed(list(uploads.clusters().values())):
        if file.label == text:
            return dict(file.description)
    name = text
    if match := re.fullmatch(r"(\d{1,4})\s*[x×]\s*(\S+)", text):
        name = devices_text(int(match.group(1)), match.group(2))
        if not name:
            raise RequestError(
                field,
                f"'{match.group(2)}' is not a known kind of device; choose one, "
                "as in 8xRTX-4090, or upload a file that describes the devices",
            )
    base = re.sub(r"(x\d{1,4})?(\[\d{1,4}\])?$", "", name)
    # Typed text must never become a file's path.
    if base not in list_clusters() and not re.fullmatch(r"(local|cpu)(:\d{1,3})?", name):
        raise RequestError(field, "choose devices from the list, such as dgx-h100x2, 8xRTX-4090 or cpu:2")
    try:
        count = load_cluster(name).device_count
    except TensorOptError as error:
        raise RequestError(field, str(error)) from None
    if count > MOST_DEVICES:
        raise RequestError(field, f"{count:,} devices; the limit here is {MOST_DEVICES:,}")
    return name


def devices_text(count: int, kind: str) -> str:
    """Return the preset with this many devices of a kind: ``rtx-4090x2``, ``dgx-h100[4]``; "" if none has."""
    for name in list_clusters():
        if name.endswith("xN") or (cluster := load_cluster(name)).device.name.lower() != kind.lower():
            continue
        each = cluster.device_count
        if count <= each:
            return name if count == each else f"{name}[{count}]"
        if count % each == 0 and f"{name}xN" in list_clusters():
            return f"{name}x{count // each}"
    return ""


def _options(text: str) -> list[str]:
    """Return the command-line options in the field "more options", split into words.

    Raises:
        RequestError: the words cannot be parsed, or an option is not allowed on a page.
    """
    if len(text) > _LONGEST or not text.isprintable():
        raise RequestError(
            "more", f"at most {_LONGEST:,} printable characters; use the command line for more"
        )
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise RequestError("more", f"a quote is not closed ({error})") from None
    choices = {setting.flag: setting.choices for setting in settings_fields() if setting.choices}
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if not word.startswith("-") or re.fullmatch(r"-[\d.]+\S*", word):
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in OPTIONS:
            raise RequestError(
                "more", f"'{word[:40]}' is not an option here; use {', '.join(OPTIONS[:8])} ..."
            )
        if name in choices and (value if equals else after) not in choices[name]:
            raise RequestError("more", f"--{name} is one of {', '.join(choices[name])}")
    return words


def form_of(question: Question, uploads: Uploads, named: str = "") -> tuple[dict[str, str], tuple[str, ...]]:
    """Return (texts for the form's fields, options that the form lacks) of a question (what to explore).

    Args:
        named: the name of the question's cluster, if the name alone describes the cluster.

    Raises:
        RequestError: the form cannot express the question.
    """
    model = question.model.removeprefix("zoo:")
    for path, label in uploads.known().values():
        model = label if str(path) == question.model else model
    if model == question.model and not model.startswith("hf:"):
        if ".py:" not in model:
            raise RequestError("model", f"{Path(model).name} is no longer uploaded; upload it again")
        model = _own_function(model, uploads.own)[1]
    named = named or (question.cluster if isinstance(question.cluster, str) else "")
    if not named:
        described = dict(question.cluster) if isinstance(question.cluster, Mapping) else {}
        label = re.sub(r"[^\w.\- ]", "_", str(described.get("name", "")))[:60] or "cluster"
        kept = uploads.keep_description(described, f"{label}.json")
        named = uploads.clusters()[kept].label
    # A sequence length as the last option has its own field.
    name, sequence = model, ""
    if match := re.fullmatch(r"(.+)[?&](?:sequence|steps)=(\d+)", model):
        name, sequence = match.groups()
    settings = replace(question.settings, dtype="auto", constraints=None)
    bare = question.model_copy(
        update={
            "cluster": "x", "batch": None, "batches": "", "settings": settings, "constraints_file": "",
            "beside": (), "planner_options": (),
        }
    )  # fmt: skip
    given = {"--constraints": question.settings.constraints, "--beside": question.beside}
    left_out = tuple(option for option, value in given.items() if value)
    fields = {
        "model": name,
        "devices": named,
        "batch": write_counts(question.batches) if question.batch is None else str(question.batch),
        "sequence": sequence,
        "dtype": question.settings.dtype,
        "more": shlex.join(bare.words("out")[4:-2]),
    }
    return fields, left_out
