"""All samples of all of PyTorch's operators.

``python -m tests.sweep`` runs what is not known yet, ``--write`` puts the table into the README of ``ops``.
What is found goes to a file of lines, each sample's when it begins and when it ends: a run that was killed
goes on behind the sample that it was at, which is then a finding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tensoropt.ops.registry import spec_of
from tests.sweep.operators import (
    MOST_SAMPLES,
    SKIPPED,
    Found,
    Seen,
    check_sample,
    name_of,
    operators,
    samples,
)

ROOT = Path(__file__).parents[2]
STATE = ROOT / "out" / "sweep" / "operators.jsonl"
README = ROOT / "tensoropt" / "ops" / "README.md"
ROUNDS = 1, 3, 8, 24, MOST_SAMPLES
"""How many samples of an operator, from its first to its last: what most of them show is known soon."""
MOST_NARROW = 2
"""Of those in bfloat16."""
QUICK = 200
NOT_QUICK = ("nn.functional.conv_transpose3d",)
"""One sample takes as long as forty of others."""
CHOSEN = Path(__file__).with_name("chosen.json")
"""The samples of `make test`."""
LIMIT_S = 120
BEGIN = "<!-- begin sweep: made by `python -m tests.sweep --write` -->"
END = "<!-- end sweep -->"
LEFT_OUT = {
    "aten.adaptive_avg_pool1d.default": "only where one position is left",
    "aten.avg_pool2d.default": "only along dims whose windows are one element",
    "aten.cdist.default": "only of orders that are sums",
    "aten.diff.default": "only of order 0, which changes nothing",
    "aten.flip.default": "only of no dim at all",
    "aten.linalg_vector_norm.default": "only of orders that are sums",
}
"""Why rules do not offer what discovery finds."""
Key = tuple[str, str, int]


def keys_of(info: Any) -> Iterator[tuple[torch.dtype, int]]:
    """The precisions in which an operator has samples, and how many are taken of each."""
    if torch.float32 in info.dtypes or not info.dtypes:
        yield torch.float32, MOST_SAMPLES
    elif info.dtypes:
        yield max(info.dtypes, key=lambda d: (d == torch.int64, str(d))), MOST_SAMPLES
    if torch.bfloat16 in info.dtypes:
        yield torch.bfloat16, MOST_NARROW


def known_records() -> dict[Key, Any]:
    """What was found, by sample; of one that was begun and not ended, that it ended its process."""
    if not STATE.exists():
        return {}
    lines = (json.loads(line) for line in STATE.read_text().splitlines())
    died = asdict(Found(incorrect=["its process died"]))
    return {tuple(line["key"]): line.get("found", died) for line in lines}


def late(*_: object) -> None:
    raise TimeoutError(f"it did not end within {LIMIT_S} s")


def sweep(names: str) -> None:
    """Run what is not known of the operators whose names match."""
    STATE.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, late)
    known, seen = set(known_records()), Seen()
    wanted = [info for info in operators() if re.fullmatch(names, name_of(info))]
    with STATE.open("a") as file:

        def note(key: Key, **found: Any) -> None:
            known.add(key)
            file.write(json.dumps({"key": key, **found}) + "\n")
            file.flush()

        for count, info in itertools.product(ROUNDS, random.Random(0).sample(wanted, len(wanted))):
            for dtype, most in keys_of(info):
                name = str(dtype).removeprefix("torch.")
                had = sum(key[:2] == (name_of(info), name) for key in known)
                if had >= min(count, most):
                    continue  # drawing samples takes a while
                try:
                    drawn = samples(info, dtype, min(count, most))
                except Exception as error:
                    refused = Found(refused=f"PyTorch makes no sample: {error}")
                    note((name_of(info), name, 0), found=asdict(refused))
                    continue
                for number, sample in drawn.items():
                    if (key := (name_of(info), name, number)) in known:
                        continue
                    note(key)
                    signal.alarm(LIMIT_S)
                    found = check_sample(info, sample, number, seen, compare=dtype != torch.bfloat16)
                    signal.alarm(0)
                    note(key, found=asdict(found))
                    for line in found.incorrect:
                        print(*key, line, flush=True)


# -- the table ------------------------------------------------------------------------------------


def core_operators() -> set[str]:
    """The overloads that PyTorch calls core: what any exported program can be brought down to."""
    names = (
        name.split("::")[1].split(".")
        for name in torch._C._dispatch_get_all_op_names()
        if name[:6] == "aten::"
    )
    overloads = [(base, (*rest, "default")[0]) for base, *rest in names]
    found = ((f"aten.{b}.{o}", getattr(getattr(torch.ops.aten, b), o, None)) for b, o in overloads)
    return {name for name, op in found if op is not None and torch.Tag.core in op.tags}


def kind_of(message: str) -> str:
    """A message without what differs from case to case."""
    message = message.removeprefix("CaptureError: ")
    ours = "(?:the model|Around|Together) at"
    place = rf"{ours} \S+ \(.*?\) (?=(branches|calls|makes|counts) )|(?<=follow ){ours} .*?\): "
    message = re.sub(place, "the model ", message)
    message = re.sub(r"`[^`]*`|'[^']*'|\([^)]*\)|held\.\w+", "…", message)
    return re.split(r"[;:] |, which", re.sub(r"\d+", "n", message))[0][:110]


def table() -> str:
    """The sweep in Markdown."""
    records = known_records()
    every = list(records.values())
    of = defaultdict(Counter)
    missing, refused = defaultdict(set), defaultdict(list)
    for key, record in records.items():
        for target, (calls, loops) in record["targets"].items():
            of[target].update(calls=calls, loops=loops, split=loops > 0)
        for target, reason in record["missing"].items():
            missing[target].add(reason)
        if record["refused"]:
            refused[kind_of(record["refused"])].append(key[0])
    whole = {target for target, counts in of.items() if not counts["loops"]}
    ruled = {target for target in of if spec_of(target).rule is not None}
    reasons = defaultdict(list)
    for target in sorted(whole):
        said = {kind_of(r) for r in missing[target] if not r.startswith("discovery splits")}
        reasons["; ".join(sorted(said)) or "has a rule that offers none"].append(target)
    left_out = {
        target: next(r for r in why if r.startswith("discovery splits"))
        for target, why in sorted(missing.items())
        if any(r.startswith("discovery splits") for r in why) and target not in LEFT_OUT
    }
    incorrect = [line for record in every for line in record["incorrect"]]
    unrun = sorted({call.split("(")[0] for record in every for call in record.get("unrun", ())})
    found = len(of) - len(ruled) - len(whole - ruled)
    lines = [
        f"{len(records)} samples of {len({key[0] for key in records})} of PyTorch's operators became "
        f"{len(of)} overloads: {len(ruled)} have a rule, {found} are split by discovery, {len(whole)} are "
        f"offered no split in any sample. Incorrect: {len(incorrect)}.",
        "",
        f"Memory is not compared in calls that do not run on random operands, some of: {names(unrun, 100)}.",
        "",
        "| offered no split | operators |",
        "|---|---|",
        *(f"| {why} | {names(found)} |" for why, found in sorted(reasons.items())),
        "",
        "| missing: a split that discovery finds and the rule does not offer | operators |",
        "|---|---|",
        *(f"| {why} | {names(found)} |" for why, found in grouped(LEFT_OUT, missing)),
        *(f"| not looked at yet: {why} | {names([target])} |" for target, why in left_out.items()),
        "",
        "| refused | samples | of |",
        "|---|---|---|",
        *(
            f"| {why} | {len(found)} | {names(sorted(set(found)))} |"
            for why, found in sorted(refused.items(), key=lambda item: -len(item[1]))
        ),
        "",
        *(f"Left out: `{name}`, {why}." for name, why in SKIPPED.items()),
        "",
        f"No sample contains these core operators: {names(sorted(core_operators() - set(of)), 1000)}.",
    ]
    return "\n".join(lines)


def grouped(reasons: Mapping[str, str], missing: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The operators of each reason, of those for which discovery found a split."""
    found = defaultdict(list)
    for target, why in reasons.items():
        if any(r.startswith("discovery splits") for r in missing[target]):
            found[why].append(target)
    return sorted(found.items())


def names(targets: Sequence[str], most: int = 12) -> str:
    shown = [f"`{t.removeprefix('aten.').removesuffix('.default')}`" for t in targets[:most]]
    return ", ".join(shown) + (f" and {len(targets) - most} more" if len(targets) > most else "")


def is_quick(name: str, dtype: str, _: int) -> bool:
    return dtype != "bfloat16" and name not in NOT_QUICK


def chosen(most: int) -> list[Key]:
    """Samples that have most rules and operators between them, split in most ways, for their calls."""
    left = {key: record["targets"] for key, record in known_records().items() if is_quick(*key)}
    specs = {target: spec_of(target) for found in left.values() for target in found}
    families = {t: (spec.rule, spec.localiser) for t, spec in specs.items() if spec.rule is not None}
    worth = {target: 22 if target in families else 1 for target in specs}
    taken = list[Key]()
    while len(taken) < most:
        gain = {
            key: sum(worth.get(t, 0) * (1 + min(loops / calls, 3)) for t, (calls, loops) in found.items())
            / (4 + sum(calls for calls, _ in found.values()))
            for key, found in left.items()
        }
        taken.append(max(left, key=lambda key: (gain[key], key)))
        for target in left.pop(taken[-1]):
            worth.pop(target, None)
            worth |= {t: 7 for t in worth if t in families and families[t] == families.get(target)}
    return sorted(taken)


def write() -> None:
    """Put the table between its marks in the README, and write down which samples `make test` has."""
    text = README.read_text()
    before, rest = text.split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")
    CHOSEN.write_text(json.dumps(chosen(QUICK)).replace("], ", "],\n") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default=".*", help="run only operators whose names match")
    parser.add_argument("--again", help="forget what was found where a line matches, and run it again")
    parser.add_argument("--write", action="store_true", help="write the table into the README")
    arguments = parser.parse_args()
    if arguments.again:
        lines = STATE.read_text().splitlines(keepends=True)
        STATE.write_text("".join(line for line in lines if not re.search(arguments.again, line)))
    if arguments.write:
        write()
    else:
        sweep(arguments.names)


if __name__ == "__main__":
    main()
