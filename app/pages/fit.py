"""The page *Fit*: will a model fit on some devices, and with which usual strategy? Answered as one types."""

from __future__ import annotations

import json
from typing import Any

import dash_mantine_components as dmc
from dash import html, no_update

from tensoropt.errors import TensorOptError
from tensoropt.estimate.fit import Fit, FitRow
from tensoropt.estimate.known import known_model, known_names
from tensoropt.estimate.strategies import DTYPES, RECOMPUTE
from tensoropt.profiling.optimizers import OPTIMIZERS
from tensoropt.units import format_bytes

from ..context import Context
from ..figures.fit import fit_figure
from ..jobs.fields import RequestError
from ..jobs.uploads import MOST_BYTES, decoded, label_of
from ..views.fit import FORM, device_names, fit_of, search_of
from . import parts
from .wiring import Callbacks

CALLBACKS = Callbacks()
_SLIDERS = (
    ("count", "GPUs", "8", 10),
    ("batch", "Batch, samples of all GPUs in a step", "8", 12),
    ("sequence", "Sequence, tokens", "2048", 17),
)
"""Field, label, value, and the power of two at which its slider ends."""
_ANSWERED = "as answered"
_RECIPES = {_ANSWERED: _ANSWERED, **dict(zip(RECOMPUTE, ("nothing", "attention", "all layers"), strict=True))}
"""What can be computed again in backward, by the recipe's name; first, what the answer says."""


def layout(context: Context) -> Any:
    """Return the page with its form; the answer follows."""
    answer = parts.panel(
        html.P(id="fit-question", className="muted"),
        html.P(id="fit-answer", className="answer", **parts.aria(live="polite")),
        html.Div(id="fit-problem"),
        parts.row(
            html.Span("Computed again in backward:", className="muted small"),
            dmc.SegmentedControl(
                id="fit-recompute", value=_ANSWERED, size="xs",
                data=[{"value": recipe, "label": label} for recipe, label in _RECIPES.items()],
            ),
            names="tight",
        ),
        html.Div(
            parts.plot("fit-graph", 320), role="group",
            **parts.aria(label="Memory of each strategy by kind; the table below has the figures."),
        ),
        parts.scrolled("Strategies", id="fit-table"),
    )  # fmt: skip
    search = [] if context.jobs is None else [dmc.Button("Search all plans", id="fit-search")]
    after = parts.panel(
        parts.row(*search, parts.small("fit-search-said"), names="tight"),
        html.Div(id="fit-command"),
        html.Details([html.Summary("What is assumed"), html.Ul(id="fit-assumed")], open=True),
        title="Next",
    )
    return html.Div(
        [
            html.H1("Will it fit?", className="page-title"),
            parts.hint(
                "Pick a model and GPUs: what the usual ways of training need of each GPU, at once and by "
                "arithmetic. The search then finds better ones, and how long a step takes."
            ),
            *parts.stores("fit-config", "fit-href", "fit-gone"),
            html.Div([_form(), parts.stack(answer, after)], className="explore-columns fit-columns"),
        ]
    )


def _form() -> Any:
    chosen: Any = {"allowDeselect": False}
    return parts.panel(
        dmc.Autocomplete(
            id="fit-model", label="Model", data=list(known_names()), value="llama3-8b", debounce=400,
            description="of the list, or ORGANISATION/MODEL of the Hugging Face Hub",
        ),
        parts.upload(
            "fit-upload", "fit-upload-place", "a config.json", (".json",), MOST_BYTES,
            said="fit-upload-said", remedy="download the model's config.json again",
        ),
        parts.spoken("fit-upload-said"),
        dmc.Select(id="fit-device", label="GPU", data=device_names(), value="24GiB", searchable=True,
                   clearSearchOnFocus=True, **chosen),
        *(_sized(*sized) for sized in _SLIDERS),
        parts.row(
            dmc.Select(id="fit-optimizer", label="Optimizer", data=list(OPTIMIZERS), value="adam", w=130,
                       **chosen),
            dmc.Select(id="fit-dtype", label="Computes in", data=list(DTYPES), value="bfloat16", w=130,
                       **chosen),
            parts.number_field("fit-micro", "Micro-batches", value="1", w=110),
            names="fields",
        ),
        title="Model and GPUs",
    )  # fmt: skip


def _sized(name: str, label: str, value: str, most: int) -> Any:
    """Return a field with a slider of powers of two below it."""
    power = int(value).bit_length() - 1
    slider = dmc.Slider(
        id=f"fit-{name}-slid", min=0, max=most, value=power, step=1, label=None, size="sm",
        thumbLabel=label, updatemode="drag", **parts.aria(label=label),
    )  # fmt: skip
    return html.Div([parts.number_field(f"fit-{name}", label, value=value), slider], className="limit")


for _name, *_ in _SLIDERS:
    _both = f"fit-{_name}.value fit-{_name}-slid.value"
    CALLBACKS.in_browser("tensoropt.power", sets=_both, when=_both)


def _asked(form: list[Any], config: Any) -> Fit:
    """Return the answer to the form; of the uploaded config, as long as its name stands for the model."""
    uploaded = isinstance(config, dict) and config.get("_name_or_path") == form[0]
    return fit_of(dict(zip(FORM, form, strict=True)), config if uploaded else None)


_ANSWER = (
    "fit-question.children fit-answer.children fit-problem.children fit-table.children fit-graph.figure "
    "fit-assumed.children fit-command.children fit-sequence.disabled"
)


@CALLBACKS.answer(
    sets=_ANSWER,
    when=[*(f"fit-{name}.value" for name in FORM), "fit-recompute.value", "fit-config.data", "scheme.data"],
    at_start=True,
)
def _answer(context: Context, *values: Any) -> Any:
    *form, recompute, config, scheme = values
    try:
        found = _asked(form, config)
    except TensorOptError as error:
        return (no_update, None, parts.note(str(error), "error"), *[no_update] * 5)
    if recompute == _ANSWERED:
        recompute = found.shown.strategy.recompute
    rows = [row for row in found.rows if row.strategy.recompute == recompute]
    drawn = fit_figure(found, rows, str(scheme))
    return (
        f"{found.question}.", found.sentence(), None, table(found, rows), drawn,
        [html.Li(said) for said in found.assumptions()],
        parts.copyable(found.fit_command(), "the command", "fit-command-text"), not found.step.sequence,
    )  # fmt: skip


def table(found: Fit, rows: list[FitRow]) -> Any:
    """Return the rows of one recipe: what each needs, whether it fits, and the largest sizes that would."""
    titles = ["strategy", "needs", "", "largest batch", *["longest sequence"] * bool(found.step.sequence)]
    cells = []
    for row in rows:
        largest = [row.largest_batch, *([row.largest_sequence] if found.step.sequence else [])]
        verdict = html.Span(
            row.verdict, className="" if row.refusal else f"verdict {'fits' if row.fits else 'over'}"
        )
        needs = "—" if row.refusal else format_bytes(row.memory_bytes)
        cells.append([
            row.strategy.title, needs, verdict, *("—" if size is None else f"{size:,}" for size in largest)
        ])  # fmt: skip
    return parts.plain_table(titles, cells, numbers=(1, 3, 4))


@CALLBACKS.answer(
    sets="fit-config.data fit-model.value fit-upload-said.children", when="fit-upload.contents",
    given="fit-upload.filename",
)  # fmt: skip
def _upload(context: Context, contents: Any, name: Any) -> Any:
    """Keep an uploaded config in the browser, if it is one whose model can be estimated."""
    if contents is None:
        return no_update, no_update, no_update
    label = label_of(name)
    try:
        data = json.loads(decoded(contents, label, MOST_BYTES, "download the model's config.json again"))
        known = known_model(data if not isinstance(data, dict) else {**data, "_name_or_path": label})
    except (TensorOptError, ValueError, RecursionError) as error:
        why = error if isinstance(error, TensorOptError) else "it is no JSON"
        return no_update, no_update, parts.note(f"'{label}': {why}", "error")
    words = f"{label} is here: a model of {known.parameters / 1e9:.3g} billion parameters."
    return {**data, "_name_or_path": label}, label, parts.note(words)


@CALLBACKS.answer(
    jobs=True, sets="fit-asked.data fit-href.data fit-search-said.children", when="fit-search.n_clicks",
    given=[*(f"fit-{name}.value" for name in FORM), "fit-config.data"],
)  # fmt: skip
def _search(context: Context, clicks: Any, *values: Any) -> Any:
    """Fill the form of the Explore page with the same step, and go there."""
    *form, config = values
    try:
        found = _asked(form, config)
        if not found.search_source:
            raise RequestError(
                "The search needs a kind of GPU, whose speed is known, instead of GiB"
                if found.model.source
                else "The search opens this model as a Python function, on the command line"
            )
        asked = search_of(found)
    except TensorOptError as error:
        return no_update, no_update, parts.note(str(error), "warn")
    return {"question": asked.data(), "click": clicks}, "/explore", None


CALLBACKS.in_browser("tensoropt.follow", sets="fit-gone.data", when="fit-href.data")
