"""What each verb of the command line calls, and how it words the answer."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tensoropt.console import Progress, columns
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.units import format_bytes, format_seconds, parse_bytes, parse_seconds

Answer = tuple[dict[str, Any], str, int]
RANDOM_CLUSTER = "local:2"
"""Where ``verify --random`` runs unless told: the fewest ranks that can split anything, on any machine."""


def explore(options: argparse.Namespace, progress: Progress) -> Answer:
    if options.devices:
        return profiled(options, progress)
    memory_bytes = parse_bytes(options.memory) if options.memory else None
    folder, found = explored(options, progress, memory_bytes)
    from tensoropt.plan.table import frontier_text, points_data, summary_lines

    data = {
        "out": str(folder),
        "files": ["exploration.json", "points.npz", "frontier.csv"],
        "model": found.model.model_dump(mode="json"),
        "settings": dict(found.settings),
        "points": points_data(found),
        "report": dict(found.report),
    }
    text = "\n".join(
        [
            frontier_text(found),
            "",
            *summary_lines(found),
            f"saved: {folder}/frontier.csv and all that `tensoropt choose {folder} --memory ...` needs",
        ]
    )
    return data, text, 0


def profiled(options: argparse.Namespace, progress: Progress) -> Answer:
    """Profiling mode: the same question on several numbers of devices."""
    from tensoropt.cluster import load_cluster

    sizes = part_sizes(options.devices, load_cluster(options.cluster))
    folder = writable_folder(options.out)
    memory_bytes = parse_bytes(options.memory) if options.memory else None
    found, refused = [], []
    for number, size in enumerate(sizes):
        progress("devices", number, len(sizes), str(size))
        part = argparse.Namespace(**vars(options))
        part.cluster, part.out = f"{options.cluster}[{size}]", str(folder / f"{size}-devices")
        try:
            found.append(explored(part, progress, memory_bytes)[1])
        except InfeasibleError as error:
            refused.append(f"{size} devices: {error}")
    progress("devices", len(sizes), len(sizes), "")
    if not found:
        raise InfeasibleError("; ".join(refused))
    data, text = profile_answer(found)
    data = {"out": str(folder), "refused": refused, **data}
    return data, "\n".join([text, *refused, f"saved: {folder}/N-devices, one exploration each"]), 0


def part_sizes(text: str, cluster: Any) -> tuple[int, ...]:
    """``auto`` or ``1,2,4`` as numbers of devices that are parts of a cluster."""
    if text == "auto":
        return tuple(cluster.part_sizes)
    try:
        wanted = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise TensorOptError(f"--devices '{text}' is neither auto nor a list such as 1,2,4") from None
    return tuple(cluster.subset(size).device_count for size in wanted)


def profile_answer(family: Sequence[Any]) -> tuple[dict[str, Any], str]:
    """Devices × memory → time, as data and as a table."""
    from dataclasses import asdict

    from tensoropt.plan.family import profile

    found = profile(family)
    rows = [["devices", "kind", *(f"<= {format_bytes(b)}" for b in found.budgets_bytes)]]
    for row in found.rows:
        cells = ("-" if cell is None else format_seconds(cell.time_s) for cell in row.cells)
        rows.append([str(row.devices), row.kind, *cells])
    return {"profile": asdict(found)}, columns(rows, left=(1,))


def explored(
    options: argparse.Namespace, progress: Progress, memory_bytes: float | None, **more: Any
) -> tuple[Path | None, Any]:
    """(the folder of ``--out`` if there is one, the exploration, saved there)."""
    counts = micro_batch_option(options.micro_batches)
    from tensoropt.plan.constraints import constraints_of

    constraints = constraints_of(options.constraints)
    from tensoropt.cluster import load_cluster

    cluster = load_cluster(options.cluster)
    folder = writable_folder(options.out) if options.out else None
    from tensoropt import api
    from tensoropt.costs.source import is_local
    from tensoropt.plan.problem import Settings

    settings = Settings(
        options.mode,
        options.optimizer,
        counts,
        memory_bytes,
        options.epsilon,
        options.max_points,
        options.dtype,
        options.recompute,
        constraints,
        options.measure,
    )
    progress.note(defaults_line(options, cluster, settings))
    loaded = build_model(options, on_meta=not is_local(cluster))
    found = api.explore(
        loaded.model,
        loaded.args,
        loaded.kwargs,
        cluster=cluster,
        mode=settings.mode,
        optimizer=settings.optimizer,
        micro_batches=counts,
        memory_bytes=memory_bytes,
        epsilon=settings.epsilon,
        max_points=settings.max_points,
        dtype=settings.dtype,
        recompute=settings.recompute,
        constraints=constraints,
        measure=options.measure,
        source=options.model,
        seed=options.seed,
        progress=progress,
        **more,
    )
    found = with_origin(found, options, loaded.notes)
    if folder is not None:
        found.save(folder)
    return folder, found


def build_model(options: argparse.Namespace, *, on_meta: bool) -> Any:
    """The model; without memory for its weights where they are not needed and its code allows it."""
    from tensoropt.plan import load_model
    from tensoropt.plan.source import ModelSourceError

    if options.batch is not None and not options.model.startswith("zoo:"):
        raise TensorOptError("--batch is for models of the zoo; other models bring their own example inputs")
    onnx = onnx_options(options, training=getattr(options, "mode", "train") == "train")
    if on_meta:
        try:
            return load_model(options.model, device="meta", seed=options.seed, batch=options.batch, onnx=onnx)
        except ModelSourceError:
            pass  # some code needs values; it either builds on the CPU or says there what is wrong
    return load_model(options.model, device="cpu", seed=options.seed, batch=options.batch, onnx=onnx)


def onnx_options(options: argparse.Namespace, *, training: bool) -> Any:
    """What ``--dim``, ``--output`` and ``--loss`` say of an ONNX file; None where nothing is said."""
    from tensoropt.plan.source import OnnxOptions, is_onnx

    source = getattr(options, "model", None) or options.target
    if not is_onnx(source) and not (options.dim or options.output or options.loss):
        return None
    if options.loss is not None and not training:
        raise TensorOptError("--loss is for training; leave it out with --mode inference")
    dims: dict[str, int] = {}
    for text in options.dim:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise TensorOptError(f"--dim '{text}' is not NAME=SIZE, for example --dim batch=8")
        dims[name] = int(size)
    return OnnxOptions.of(dims, options.output, (options.loss or "auto") if training else None)


def micro_batch_option(text: str) -> str | tuple[int, ...]:
    """``auto`` or ``1,2,4``."""
    if text == "auto":
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TensorOptError(f"--micro-batches '{text}' is neither auto nor a list such as 1,2,4") from None


def writable_folder(path: str) -> Path:
    """The folder, made if need be; refused before hours are spent, not after."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe"):
            pass
    except OSError as error:
        raise TensorOptError(
            f"cannot write into {folder} ({error.strerror or error}); choose another --out"
        ) from error
    return folder


def with_origin(exploration: Any, options: argparse.Namespace, notes: tuple[str, ...]) -> Any:
    """The exploration with what its plans need to build the same model, and what its import has to say."""
    from dataclasses import replace

    from tensoropt.plan.plan import OnnxInfo

    onnx = onnx_options(options, training=getattr(options, "mode", "train") == "train")
    if onnx is not None:
        onnx = OnnxInfo(dims=dict(onnx.dims), outputs=onnx.outputs, loss=onnx.loss)
    report = {**exploration.report, "notes": [*notes, *exploration.report["notes"]]}
    model = exploration.model.model_copy(update={"batch": options.batch, "onnx": onnx})
    return replace(exploration, model=model, report=report)


def defaults_line(options: argparse.Namespace, cluster: Any, settings: Any) -> str:
    """Everything in effect, defaults included."""
    micro = (
        settings.micro_batches if isinstance(settings.micro_batches, str) else list(settings.micro_batches)
    )
    parts = {
        "model": options.model,
        "batch": options.batch or "the model's own",
        "seed": options.seed,
        "cluster": f"{cluster.name} ({cluster.device_count} x {cluster.device.name})",
        "mode": settings.mode,
        "optimizer": settings.optimizer,
        "dtype": settings.dtype,
        "recompute": settings.recompute,
        "micro-batches": micro,
        "memory": format_bytes(settings.memory_bytes) if settings.memory_bytes else "no limit",
        "epsilon": settings.epsilon,
        "max-points": settings.max_points or "no limit",
        "constraints": options.constraints or "none",
        "out": options.out or "nothing saved",
    }
    return "exploring with " + ", ".join(f"{k} {v}" for k, v in parts.items())


def compare(options: argparse.Namespace, progress: Progress) -> Answer:
    limits = [parse_bytes(part) for part in options.memory.split(",")] if options.memory else [None]
    from tensoropt.planners.compare import asked

    asked(options.planners)  # an unknown name is refused before anything is computed
    folder, found = explored(options, progress, None, planners=options.planners, limits=limits)
    from tensoropt.plan.export import write_comparison_csv
    from tensoropt.plan.table import comparison_text

    written = []
    if folder is not None:
        write_comparison_csv(found, folder / "comparison.csv")
        written.append(f"saved: {folder} (exploration, frontier.csv, comparison.csv)")
    if options.csv:
        write_comparison_csv(found, options.csv)
        written.append(f"saved: {options.csv}")
    data = {"comparison": [dict(row) for row in found.comparison], "points": len(found.points)}
    return data, "\n".join([comparison_text(found), *written]), 0


def choose(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.plan.table import point_lines, points_data, run_line

    memory = parse_bytes(options.memory) if options.memory is not None else None
    time_s = parse_seconds(options.time) if options.time is not None else None
    if options.profile:
        from tensoropt.plan.family import load_family

        return *profile_answer(load_family(options.dir)), 0
    found = chosen_exploration(options, memory, time_s)
    index = found.index(memory_bytes=memory, time_s=time_s, knee_point=options.knee)
    plan = found.plan(index)
    lines = point_lines(found, index)
    if options.out:
        plan.save(options.out)
        lines.append(f"saved: {options.out}; run it: {run_line(plan.devices, options.out)}")
    else:
        lines.append("not saved; give --out plan.json to keep it")
    data = {
        **points_data(found, [index])[0],
        "out": options.out,
        "plan": plan.model_dump(by_alias=True, mode="json"),
    }
    return data, "\n".join(lines), 0


def chosen_exploration(options: argparse.Namespace, memory: float | None, time_s: float | None) -> Any:
    """The exploration of a folder, or of a family in it the one that ``--devices`` means."""
    from tensoropt.plan import load_exploration
    from tensoropt.plan.family import fewest_devices, folders_in, load_family, member

    if options.devices is None:
        inside = list(folders_in(options.dir))
        if len(inside) > 1:
            raise TensorOptError(
                f"{options.dir} holds {len(inside)} explorations; add --devices auto for the fewest devices "
                "that will do, --devices N, or --profile for a table of all"
            )
        return load_exploration(inside[0] if inside else options.dir)
    family = load_family(options.dir)
    if options.devices == "auto":
        return family[-1] if options.knee else fewest_devices(family, memory, time_s)
    if not options.devices.isdecimal():
        raise TensorOptError(f"--devices '{options.devices}' is neither auto nor a number")
    return member(family, int(options.devices))


def show(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.plan import load_exploration
    from tensoropt.plan.detail import detail
    from tensoropt.plan.explain import detail_lines
    from tensoropt.plan.table import point_lines
    from tensoropt.plan.trace import write_trace

    memory = parse_bytes(options.memory) if options.memory is not None else None
    time_s = parse_seconds(options.time) if options.time is not None else None
    if options.top < 1:
        raise TensorOptError(f"--top {options.top} lists nothing; give at least 1")
    found = load_exploration(options.dir)
    index = options.point
    if index is None:
        index = found.index(memory_bytes=memory, time_s=time_s, knee_point=options.knee)
    told = detail(found, index)
    lines = [*point_lines(found, index), "", *detail_lines(told, options.top)]
    if options.trace:
        write_trace(told.trace(), options.trace)
        lines.append(
            f"trace written to {options.trace}; open it at https://ui.perfetto.dev or chrome://tracing"
        )
    return {**told.to_dict(), "headline": told.headline(), "trace": options.trace}, "\n".join(lines), 0


def recost(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.plan import load_exploration

    before = load_exploration(options.dir)
    folder = writable_folder(options.out)
    from tensoropt import api
    from tensoropt.plan.explain import recosted_lines
    from tensoropt.plan.table import comparison_text, frontier_text, points_data, summary_lines

    found, again = api.recost(
        before, cluster=options.cluster, progress=progress, planners=options.planners or ()
    )
    found.save(folder)
    data = {
        "out": str(folder),
        "points": points_data(found),
        "report": dict(found.report),
        "same_strategies": [vars(point) for point in again],
    }
    text = "\n".join(
        [frontier_text(found), "", *summary_lines(found), *recosted_lines(before, found, again),
         *([comparison_text(found)] if found.comparison else []), f"saved: {folder}"]
    )  # fmt: skip
    return data, text, 0


def export(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.plan import load_exploration
    from tensoropt.plan.export import write_frontier_csv, write_strategies_csv

    found = load_exploration(options.dir)
    write_frontier_csv(found, options.csv)
    lines = [f"{len(found.points)} points written to {options.csv}"]
    if options.strategies:
        write_strategies_csv(found, options.strategies)
        lines.append(f"their strategies written to {options.strategies}")
    data = {"points": len(found.points), "csv": options.csv, "strategies": options.strategies}
    return data, "\n".join(lines), 0


def verify(options: argparse.Namespace, progress: Progress) -> Answer:
    if options.random is None:
        given = (options.cluster, options.batch, options.dtype, options.loss)
        if any(one is not None for one in given) or options.dim or options.output or options.placed:
            raise TensorOptError(
                "--cluster, --batch, --dtype, --dim, --output, --loss and --placed belong to --random N; a "
                "plan names its own"
            )
        if ":" in options.target and not Path(options.target).exists():
            raise TensorOptError(f"there is no plan file {options.target}; to verify a model add --random 20")
        from tensoropt.plan import load_plan

        plan = load_plan(options.target)
        from tensoropt import verify as check

        data = check.verify_plan(plan, where=options.where, progress=progress)
        if options.save:
            from tensoropt.plan.verified import save_verified

            save_verified(options.save, plan, data)
    else:
        if options.save:
            raise TensorOptError("--save is for a plan; random strategies are not points of an exploration")
        from tensoropt import verify as check

        cluster = options.cluster or RANDOM_CLUSTER
        what = "placements" if options.placed else "strategies"
        progress.note(
            f"verifying {options.random} random {what} of {options.target} on cluster {cluster}"
            + ("" if options.cluster else " (the default; another: --cluster)")
        )
        data = check.verify_random(
            options.target,
            cluster,
            options.random,
            seed=options.seed,
            batch=options.batch,
            dtype=options.dtype or "float32",
            onnx=onnx_options(options, training=True),
            where=options.where,
            placed=options.placed,
            progress=progress,
        )
        data["cluster"] = cluster
    return data, verify_text(data), 0 if data["ok"] else 1


def verify_text(data: dict[str, Any]) -> str:
    """Predicted beside measured, one row per plan, and what went wrong; a dash for what was not looked at."""
    rows = [
        ["", "mesh", "micro", "loss diff.", "gradient diff.", "replicas", "collectives", "memory pred.",
         "tracked", "time pred.", "measured", "verdict"]
    ]  # fmt: skip
    remarks = []
    for i, p in enumerate(data["plans"]):
        predicted, issued = (sum(c["count"] for c in p[f"collectives_{k}"]) for k in ("predicted", "issued"))
        agree = {True: "agree", False: "DIFFER", None: "-"}[p["replicas_agree"]]
        rows.append(
            [
                str(i), p["mesh"], str(p["micro_batches"]), _difference(p["loss_difference"]),
                _difference(p["gradient_difference"]), agree,
                f"{predicted} = {issued}" if not p["collectives_unlike"] else f"{predicted} != {issued}",
                format_bytes(p["memory_predicted_bytes"]), format_bytes(p["memory_tracked_bytes"]),
                format_seconds(p["time_predicted_s"]),
                "-" if p["time_measured_s"] is None else format_seconds(p["time_measured_s"]),
                "ok" if p["ok"] else "FAILED",
            ]
        )  # fmt: skip
        remarks += [f"plan {i}: {line}" for line in _remarks(p)]
    if data["module"] is not None:
        remarks.append(
            f"unsplit graph against the model itself: loss differs by "
            f"{_difference(data['module']['loss_difference'])}, gradients by "
            f"{_difference(data['module']['gradient_difference'])}"
        )
    elif all(p["compared_in"] is not None for p in data["plans"]):
        remarks.append(
            "the unsplit graph is not compared with the model itself: its dropout draws other numbers"
        )
    passed = sum(p["ok"] for p in data["plans"])
    return "\n".join(
        [columns(rows), *remarks, data["checked_on"], f"{passed} of {len(data['plans'])} plans ok"]
    )


def _difference(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _remarks(plan: dict[str, Any]) -> list[str]:
    """What went wrong in one plan, and how it was looked at where that is not as usual."""
    lines = [*([plan["error"]] if plan["error"] else []), *plan["collectives_unlike"]]
    if not plan["ok"] and not lines:
        lines.append(
            f"differs most in the gradient of {plan['worst_gradient']} ({plan['gradient_difference']:.1e}), "
            f"after the optimizer's steps in {plan['worst_parameter']} ({plan['parameter_difference']:.1e})"
        )
    if plan["float32"]:
        worst = max(v for v in plan["float32"].values() if v is not None)
        lines.append(
            f"compared in float64; in float32 rounding crossed a kink (as ReLU's) and made {worst:.1e}"
        )
    if plan["compared_in"] is None and plan["ranks_checked"]:
        lines.append(f"fake ranks looked at: {', '.join(map(str, plan['ranks_checked']))}")
    return lines


def listing(options: argparse.Namespace, progress: Progress) -> Answer:
    data: list[dict[str, Any]]
    rows: list[list[str]]
    left: tuple[int, ...]
    if options.what == "models":
        data, rows, left = _models()
    elif options.what == "clusters":
        data, rows, left = _clusters()
    else:
        from tensoropt.planners import PLANNERS

        data = [{"name": name, "description": text} for name, text in PLANNERS.items()]
        rows, left = [["name", "what it does"], *([d["name"], d["description"]] for d in data)], (0, 1)
    return {options.what: data}, columns(rows, left=left), 0


def _models() -> tuple[list[dict[str, Any]], list[list[str]], tuple[int, ...]]:
    """Every model with the figures of one training step at its batch, where they are known."""
    from dataclasses import asdict

    from tensoropt.zoo import list_models
    from tensoropt.zoo.figures import Figures, figures

    known = figures()
    data: list[dict[str, Any]] = []
    rows = [["name", "size", "batch", "parameters", "operators", "groups", "treewidth", "GFLOPs",
             "with a rule", "what it is"]]  # fmt: skip
    for e in list_models():
        of = known.get(e.name)
        data.append(
            {**(asdict(of) if of else dict.fromkeys(Figures.__dataclass_fields__)),
             "name": f"zoo:{e.name}", "size": e.size, "batch": e.batch, "description": e.description,
             "paper": e.paper, "requires": e.requires}
        )  # fmt: skip
        cells = (
            [f"{of.parameters / 1e6:,.2f} M", str(of.operators), str(of.groups), f"<= {of.treewidth}",
             f"{of.flop / 1e9:,.4g}", f"{100 * of.rule_share:.1f} %"]
            if of
            else ["-"] * 6
        )  # fmt: skip
        rows.append([f"zoo:{e.name}", e.size, str(e.batch), *cells, e.description])
    return data, rows, (0, 1, 9)


def _clusters() -> tuple[list[dict[str, Any]], list[list[str]], tuple[int, ...]]:
    from tensoropt.cluster import list_clusters, load_cluster

    data: list[dict[str, Any]] = []
    for name in ("local", "local:N", *list_clusters()):
        one = load_cluster(name.replace(":N", ":2").removesuffix("xN"))
        open_ended = name.endswith("N")
        data.append(
            {
                "name": name,
                "devices": None if open_ended else one.device_count,
                "device": one.device.name,
                "memory_bytes": None if name == "local:N" else one.memory_bytes,
                "source": {"local:N": "N CPU ranks of this machine"}.get(name, one.source),
            }
        )
    rows = [["name", "devices", "kind", "memory each", "source"]]
    for d in data:
        devices = str(d["devices"]) if d["devices"] else ("N" if d["name"] == "local:N" else "N nodes")
        memory = format_bytes(d["memory_bytes"]) if d["memory_bytes"] else "a share"
        rows.append([d["name"], devices, d["device"], memory, d["source"]])
    return data, rows, (0, 2, 4)


def profiles(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.costs.roofline import fit_errors
    from tensoropt.costs.store import KINDS, ProfileStore
    from tensoropt.plan.table import fit_lines

    with ProfileStore() as store:
        lines, data = [], {"path": str(store.path)}
        if options.export:
            lines.append(f"{store.export_file(options.export)} records written to {options.export}")
        if options.import_:
            lines.append(f"{store.import_file(options.import_)} records added from {options.import_}")
        counts = {kind: store.count(kind) for kind in KINDS}
        fits = fit_errors(store.items("compute"))
    lines.append(f"{store.path}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    for (device, mode), errors in fits.items():
        lines += [f"{device}, {mode}:", *fit_lines(errors)]
    fit = [{"device_type": d, "mode": m, "errors": errors} for (d, m), errors in fits.items()]
    return data | {"records": counts, "fit": fit}, "\n".join(lines), 0


def measure_links(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.cluster import load_cluster

    cluster = load_cluster(options.cluster)
    from tensoropt import api
    from tensoropt.costs.links import measure_links as measure
    from tensoropt.costs.pool import RankPool
    from tensoropt.costs.source import is_local
    from tensoropt.costs.store import ProfileStore

    if not is_local(cluster):
        raise TensorOptError(
            f"{cluster.name} is not this machine's CPU ranks, so its links cannot be timed here; use local:N"
        )
    meshes = cluster.meshes(api.MAX_AXES)
    if cluster.device_count < 2:
        raise TensorOptError("a single device has no links; give at least local:2")
    data, texts = [], []
    with ProfileStore() as store, RankPool(cluster.device_count) as pool:
        for mesh in meshes:
            fits = measure(
                cluster,
                mesh,
                pool,
                store,
                functional=False,
                refresh=options.refresh,
                progress=partial(progress, f"links {mesh.label}"),
            )
            data.append(links_data(mesh.label, fits))
            texts.append(f"mesh {mesh.label}\n{fits.table()}")
    return {"cluster": cluster.name, "meshes": data}, "\n\n".join(texts), 0


def links_data(mesh: str, fits: Any) -> dict[str, Any]:
    """The fits of one mesh as plain data."""
    return {
        "mesh": mesh,
        "collectives": [
            {"kind": kind, "axes": list(axes), "groups": [fit.to_dict() for fit in group]}
            for (kind, axes), group in fits.collectives.items()
        ],
        "pairs": [{"between": list(pair), **fit.to_dict()} for pair, fit in fits.pairs.items()],
        "failed": dict(fits.failed),
    }


def dashboard(options: argparse.Namespace, progress: Progress) -> Answer:
    """Serve until interrupted. The dashboard lies above this package, so it is found by its name."""
    try:
        app = importlib.import_module("tensoropt_app")
        serve = app.serve
    except ModuleNotFoundError as error:
        raise TensorOptError(
            f"the dashboard needs '{error.name}', which is not installed; pip install 'tensoropt[app]'"
        ) from error
    address = serve(
        Path(options.dir) if options.dir else None, host=options.host, port=options.port, say=progress.note
    )
    return {"address": address}, "", 0


def demo(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.demo import run_demo

    if options.steps < 1:
        raise TensorOptError(f"--steps {options.steps} runs nothing; give at least 1")
    folder = writable_folder(options.out)

    def say(text: str) -> None:
        progress.close()
        if not options.json:
            print(text, flush=True)

    return run_demo(options.model, options.cluster, folder, steps=options.steps, progress=progress, say=say)


VERBS: dict[str, Callable[[argparse.Namespace, Progress], Answer]] = {
    "explore": explore,
    "compare": compare,
    "choose": choose,
    "show": show,
    "recost": recost,
    "export": export,
    "verify": verify,
    "list": listing,
    "measure-links": measure_links,
    "profiles": profiles,
    "dashboard": dashboard,
    "demo": demo,
}
