"""What each generated part of the READMEs is made of: words and columns, with places in result files.

Papers' figures stand here beside the table that they were read from.
"""

from __future__ import annotations

import argparse
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

from tensoropt.cli.parser import parser
from tensoropt.question.settings import settings_fields
from tests.benchmarks.fidelity.report import PAPER
from tests.benchmarks.papers.authors import ITERATIONS, SEARCHES, SearchSeconds, StepSeconds
from tests.benchmarks.papers.netsplit_report import RATIO_TITLES, ratios
from tests.docs.figures import MISSING, Filled, lookup, newest, result, table
from tests.docs.pages import ROOT
from tests.docs.taken import sentence

DEMO = "demo/*-demo.json"
FITS = "published/*-fits.json"
FIDELITY = "fidelity/*-fidelity.json"
HELD_OUT = "published/*-held-out-sources.json"
MEMORY = "fidelity/*-memory.json"
NETSPLIT = "papers/*-netsplit.json"
SCALE = "papers/*-scale.json"
SEARCH = "search/*-search.json"
STEPS = "execute/*-step.json"

STEP_MODELS = {
    "rows.model=gpt2": "GPT-2", "rows.model=bert": "BERT", "rows.model=vgg16": "VGG16",
    "rows.model=wide-resnet": "WideResNet", "rows.model=rnn": "RNN, unrolled",
    "rows.model=transformer": "Transformer",
}  # fmt: skip
AS_PUBLISHED = {"VGG16": "VGG16", "WideResNet": "WideResNet", "Transformer": "Transformer-S"}
"""Models of TensorOpt's Table 4 by the names they have here."""
SEARCHED = {
    "published.2": "RNN, 8 layers",
    "published.5": "WideResNet, 12 blocks",
    "published.10": "Transformer, 8 layers",
}
"""Frontiers of the search benchmark. TensorOpt's Table 3 has the whole models, on its authors' machine."""
PREDICTED = {f"results.model={key}": key for key in ("VGG16", "WideResNet", "RNN", "Transformer", "GPT-2")}


def theirs(which: int) -> dict[str, str]:
    """Errors that TensorOpt reports on its authors' GPUs (Table 2): of steps, networks or memory."""
    return {model: f"{errors[which]:.2f} %" for model, errors in PAPER.items()}


def published_steps(shown: Callable[[StepSeconds], str]) -> dict[str, str]:
    """What to show of TensorOpt's Table 4, by model."""
    return {name: shown(ITERATIONS[theirs]) for name, theirs in AS_PUBLISHED.items()}


def published_searches(seconds: Callable[[SearchSeconds], float]) -> dict[str, str]:
    """Seconds of TensorOpt's Table 3, by model."""
    found = {name: seconds(SEARCHES[name.partition(",")[0]]) for name in SEARCHED.values()}
    return {name: f"{spent:,.0f}" if spent >= 10 else f"{spent:.2f}" for name, spent in found.items()}


def words(file: str, text: str) -> str:
    """A paragraph with the figures of the newest result called ``file``."""
    return paragraph(Filled(result(newest(file))).format(text))


def paragraph(text: str) -> str:
    return textwrap.fill(text, 110, break_on_hyphens=False)


def rows(
    file: str, first: str, names: Mapping[str, str], columns: Mapping[str, str | Mapping[str, str]]
) -> str:
    """A table of alike parts of a result.

    Args:
        first: title of the first column.
        names: place of each row in the result, and what the row is called.
        columns: titles, and words with places inside a row; of figures that a paper reports, the words by
            the name of the row. Of a row that the newest result lacks, only these are shown.
    """
    data = result(newest(file))

    def cell(place: str, name: str, text: str | Mapping[str, str]) -> str:
        if not isinstance(text, str):
            return text.get(name, "")
        try:
            of = lookup(data, place)
        except KeyError:
            return MISSING
        return Filled(of).format(text)

    found = ([name, *(cell(at, name, text) for text in columns.values())] for at, name in names.items())
    return table([first, *columns], [*found])


def origins(**tables: str) -> str:
    """From which commits and machines the files of these tables were taken."""
    taken = {name.replace("_", " "): result(newest(file)) for name, file in tables.items()}
    return paragraph(sentence(taken))


def trust() -> str:
    """How far predictions were off, on what: from the newest of each result."""
    jobs, fits = result(newest(HELD_OUT))["held_out"], result(newest(FITS))["memory"]["layouts"]["ok"]
    models = result(newest(FIDELITY))["results"]
    plans = [row for model in models for row in model["rows"]]
    errors = [abs(median(row["time_measured_s"]) / row["time_predicted_s"] - 1) for row in plans]
    pairs = sum(model["tau_pairs"] for model in models)
    in_order = sum(model["tau_pairs"] * (1 + model["tau"]) / 2 for model in models)
    memory = max(model["memory_worst"] for model in models)
    found = [
        [
            "seconds on GPUs, from data sheets",
            f"{jobs['runs']} published jobs, each of a team left out of the fit",
            f"{jobs['median_error']:.1%} in the median, a tenth by {jobs['percentile_90_error']:.0%} or more;"
            f" {jobs['pairs_in_order']} of {jobs['pairs']} pairs in order",
        ],
        ["whether it fits", f"{fits['layouts']} published layouts that ran", f"{fits['right']} right"],
        [
            "seconds on two CPU ranks, measured",
            f"{len(plans)} plans of {len(models)} models",
            f"{median(errors):.0%} in the median; {in_order:.0f} of {pairs} pairs in order",
        ],
        ["bytes of tensors", "the same plans", f"{memory:.1%} at most"],
    ]
    return table(["predicted", "compared with", "off by"], found).replace("%", " %")


def netsplit() -> str:
    """NetSplit over the best of its baselines, here and in the thesis, with two amounts of memory."""
    data = result(newest(NETSPLIT))
    found = [
        [memory, *row]
        for section, memory in (("steps", "24 GiB"), ("tight", "as in the thesis"))
        for row in ratios(data, section)
    ]
    return table(["memory", *RATIO_TITLES], found)


def layers() -> str:
    """The layers of pyproject.toml, the dashboard above them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    [found] = [contract["layers"] for contract in contracts if contract["id"] == "layers"]
    return "\n".join(["```text", "tensoropt_app", *found, "```"])


def settings() -> str:
    """A row for each setting, as it stands at its field."""
    found = [["verbs", "option", "default", "what it says"], ["---"] * 4]
    for setting in settings_fields():
        choices = [*setting.choices, *filter(None, [setting.others])]
        values = f"{', '.join(choices)}. " if choices else ""
        off = f", `--no-{setting.flag}`" * (setting.default is True)
        said = setting.text(setting.default), f"{values}{setting.help}"
        found.append(["`explore`", f"`--{setting.flag}`{off}", *said])
    return "\n".join(f"| {' | '.join(row)} |" for row in found)


def verbs() -> str:
    """A row for each argument of each verb, as ``--help`` has it; settings have a table of their own."""
    of_settings = {f"--{no}{setting.flag}" for setting in settings_fields() for no in ("", "no-")}
    found = [["verb", "argument", "what it says"], ["---"] * 3]
    [action] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    for name, verb in action.choices.items():
        left_out = {"--json", "--debug", "--help", *(of_settings if name == "explore" else ())}
        for one in verb._actions:
            options = [o for o in one.option_strings if o.startswith("--")]
            if left_out.isdisjoint(options):
                value = one.metavar or ("" if one.nargs == 0 else "|".join(one.choices or ()))
                said = " ".join(filter(None, [*options, str(value)])) or one.dest
                words = str(one.help or "one of these") % {"default": one.default}
                found.append([f"`{name}`", f"`{said}`".replace("|", " or "), words.replace("|", " or ")])
    return "\n".join(f"| {' | '.join(row)} |" for row in found)


PARTS: dict[str, Callable[[], str]] = {
    # README.md
    "frontier-caption": partial(words, DEMO,
        "*All {points:d} points that `make demo` found for a GPT-2-style model of {parameters_m:.1f} million"
        " parameters on two CPU ranks. The leanest plan, run, used {runs.leanest.memory_tracked_bytes:.1MiB}"
        " and {runs.leanest.time_measured_s:.2f} s per step, the fastest"
        " {runs.fastest.memory_tracked_bytes:.0MiB} and {runs.fastest.time_measured_s:.2f} s.*"),
    "trust": trust,
    # tests/benchmarks/README.md
    "origins": partial(
        origins, the_demo_plans=DEMO, the_search=SEARCH, the_executed_steps=STEPS,
        the_predictions_along_frontiers=FIDELITY, **{"Llama-3-405B_on_paper": SCALE},
    ),
    "demo-load": partial(words, DEMO,
        "The machine had a load of {machine.load_at_start:.0f} when the demo began; on two cores, times are"
        " good below one."),
    "demo-plans": partial(rows, DEMO, "plan", {"runs.leanest": "leanest", "runs.fastest": "fastest"}, {
        "memory predicted": "{memory_predicted_bytes:.1MiB}",
        "tracked": "{memory_tracked_bytes:.1MiB}",
        "step predicted": "{time_predicted_s:.0ms}",
        "measured": "{time_measured_s:.0ms}",
    }),
    "search-times": partial(rows, SEARCH, "frontier", SEARCHED, {
        "ours": "{ours_s:.2f}",
        "ours, one thread": "{ours_one_thread_s:.2f}",
        "FT-LDP, our kernels": "{kernels_ldp_s:.2f}",
        "FT-LDP, numpy": "{ldp_s:.2f}",
        "FT-Elimination, branches first": "{elimination_s:.2f}",
        "nodes first": "{elimination_node_first_s:.2f}",
        "paper: FT-LDP": published_searches(lambda seconds: seconds.ldp),
        "without threads": published_searches(lambda seconds: seconds.ldp_one_thread),
        "paper: FT-Elimination": published_searches(lambda seconds: seconds.elimination),
    }),
    "executed-steps": partial(rows, STEPS, "model at laptop size", STEP_MODELS, {
        "plan": "{seconds.plan:.0ms}",
        "our data parallel": "{seconds.data parallel:?.0ms}",
        "DDP": "{seconds.ddp:.0ms}",
        "FSDP2": "{seconds.fsdp2:.0ms}",
        "plan / DDP": "{against_ddp:.2f}",
        "one rank": "{one_rank_ratio:.2f}",
        "paper: plan": published_steps(lambda s: f"{s.plan:.2f} s"),
        "its data parallel": published_steps(lambda s: f"{s.data_parallel:.2f} s"),
        "Horovod": published_steps(lambda s: f"{s.horovod:.2f} s"),
        "plan / Horovod": published_steps(lambda s: f"{s.plan / s.horovod:.2f}"),
    }),
    "fidelity-times": partial(rows, FIDELITY, "model at laptop size", PREDICTED, {
        "paper: step": theirs(0),
        "step": "{time_error:.1%} ({time_worst:.1%})",
        "same plan twice": "{noise:.1%}",
        "paper: network": theirs(1),
        "network": "{network_error:.1%} ({network_worst:.1%})",
    }),
    "fidelity-order": partial(rows, FIDELITY, "model at laptop size", PREDICTED, {
        "paper: memory": theirs(2),
        "memory": "{memory_error:.2%} ({memory_worst:.2%})",
        "order, told apart": "{tau:.2f} of {tau_pairs:d}",
        "order, all pairs": "{tau_all:.2f} of {tau_all_pairs:d}",
    }),
    "scale": partial(rows, SCALE, "GPUs", {f"rows.key={n}": f"{n:,}" for n in (64, 256, 1024, 16384)}, {
        "state per GPU": "{state_bytes:.1GiB}",
        "leanest plan": "{frontier.0.0:.0GiB}",
        "plans that fit 80 GiB": "{points_that_fit:d} of {points:d}",
        "fastest": "{chosen.memory_bytes:.0GiB}, {chosen.time_s:.0f} s",
        "searched in": "{cpu_s:.0f} s, {peak_mib:.0f} MiB",
    }),
    "scale-waits": partial(words, SCALE,
        "At 16,384 GPUs {rows.key=16384.chosen.exposed_s:.0f} s of the step are waits, where Meta's job,"
        " with 16 stages and gathers fetched ahead, takes 6.2 s (Llama 3 paper, Table 4, 400 TFLOP/s per"
        " GPU)."),
    "netsplit": netsplit,
    # tensoropt/README.md
    "layers": layers,
    # tensoropt/cli/README.md
    "settings": settings,
    "verbs": verbs,
    # tensoropt/costs/README.md
    "memory-on-fake-ranks": partial(rows, MEMORY, "random plans of", {
        "results.model=all": "all eight models",
        "results.model=gpt2-tiny": "GPT-2",
        "results.model=rnn-lm-tiny": "RNN, unrolled",
    }, {
        "plans": "{plans:d}",
        "median error": "{error:.3%}",
        "worst": "{worst:.2%}",
        "PyTorch's tracker apart, most": "{torch_apart_most:.2%}",
    }),
    "memory-on-real-ranks": partial(words, FIDELITY,
        "On real ranks the worst of ten plans is {results.model=VGG16.memory_worst:.2%} off for VGG16,"
        " {results.model=WideResNet.memory_worst:.2%} for the WideResNet,"
        " {results.model=RNN.memory_worst:.2%} for the RNN,"
        " {results.model=Transformer.memory_worst:.2%} for the Transformer and"
        " {results.model=GPT-2.memory_worst:.2%} for GPT-2."),
}  # fmt: skip
