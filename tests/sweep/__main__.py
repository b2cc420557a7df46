"""Samples of all of PyTorch's operators.

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
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tensoropt.ops.registry import spec_of
from tests.benchmarks.program import table
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
    "aten.adaptive_avg_pool3d.default": "only where one position is left",
    "aten.avg_pool2d.default": "only along dims whose windows are one element",
    "aten.cdist.default": "only of orders that are sums",
    "aten.conv3d.padding": "only along dims whose windows are one element",
    "aten.diff.default": "only of order 0, which changes nothing",
    "aten.embedding_bag.padding_idx": "only for some values of the bags' bounds",
    "aten.flip.default": "only of no dim at all",
    "aten.linalg_vector_norm.default": "only of orders that are sums",
    "aten.roll.default": "only along dims that are rolled by 0",
    "aten.take_along_dim.default": "only where the other operand is broadcast along the dim",
}
"""Why rules do not offer what discovery finds."""
Key = tuple[str, str, int]


def keys_of(info: Any) -> Iterator[tuple[torch.dtype, int]]:
    """The precisions in which an operator has samples, and how many are taken of each."""
    usual = torch.float32 in info.dtypes or not info.dtypes
    others = max(info.dtypes, key=lambda dtype: (dtype == torch.int64, str(dtype)), default=None)
    yield torch.float32 if usual else others, MOST_SAMPLES
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
    packets = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name[:6] == "aten::"
    }
    found = (getattr(torch.ops.aten, name) for name in packets)
    overloads = (getattr(packet, name) for packet in found for name in packet.overloads())
    return {str(op) for op in overloads if torch.Tag.core in op.tags}


def kind_of(message: str) -> str:
    """A message without what differs from case to case."""
    message = message.removeprefix("CaptureError: ")
    place = r"(?:the model|Around|Together) at \S+ \(.*?\)(?: (?=[a-z]+s[ ,])|: )"
    message = re.sub(place, "the model ", message, count=1)
    message = re.sub(r"`[^`]*`|'[^']*'|\([^)]*\)|held\.\w+", "…", message)
    return re.split(r"[;:] |, which", re.sub(r"\d+", "n", message))[0][:110]


def page() -> str:
    """The sweep in Markdown."""
    records, loops, kept = known_records(), Counter(), defaultdict(set)
    missing, refused, left_out = dict[str, str](), defaultdict(list), defaultdict(list)
    for key, record in records.items():
        loops.update({target: found for target, (_, found) in record["targets"].items()})
        for target, why in record["missing"].items():
            if not why.startswith("discovery splits"):
                kept[target].add(kind_of(why))
            elif target not in missing:
                missing[target] = LEFT_OUT.get(target, f"not looked at yet: {why}")
        if record["refused"]:
            refused[kind_of(record["refused"])].append(key[0])
    whole = {target for target, found in loops.items() if not found}
    ruled = {target for target in loops if spec_of(target).rule is not None}
    for target in sorted(whole):
        left_out["; ".join(sorted(kept[target])) or "has a rule that offers none"].append(target)
    incorrect = sum(len(record["incorrect"]) for record in records.values())
    unrun = {call.split("(")[0] for record in records.values() for call in record.get("unrun", ())}
    lines = [
        f"{len(records)} samples of {len({key[0] for key in records})} of PyTorch's operators became "
        f"{len(loops)} overloads: {len(ruled)} have a rule, {len(loops.keys() - ruled - whole)} are split by "
        f"discovery, {len(whole)} are offered no split in any sample. Incorrect: {incorrect}. Of an operator "
        f"at most {MOST_SAMPLES} samples are run, and {MOST_NARROW} in bfloat16.",
        "",
        f"Memory is not compared in calls that do not run on random operands, some of: {names(unrun, 100)}.",
        "",
        *table(["offered no split", "operators"], ([why, names(of)] for why, of in sorted(left_out.items()))),
        "",
        *table(
            ["missing: a split that discovery finds and the rule does not offer", "operators"],
            ([why, names([target])] for target, why in sorted(missing.items())),
        ),
        "",
        *table(
            ["refused", "samples", "of"],
            (
                [why, len(of), names(set(of))]
                for why, of in sorted(refused.items(), key=lambda item: -len(item[1]))
            ),
        ),
        "",
        *(f"Left out: `{name}`, {why}." for name, why in SKIPPED.items()),
        "",
        f"No sample contains these core operators: {names(core_operators() - loops.keys(), 1000)}.",
    ]
    return "\n".join(lines)


def names(targets: Iterable[str], most: int = 12) -> str:
    shown = [f"`{t.removeprefix('aten.').removesuffix('.default')}`" for t in sorted(targets)]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def chosen() -> list[Key]:
    """Samples that have most rules and operators between them, split in most ways, for their calls."""
    records = known_records().items()
    left = {key: one["targets"] for key, one in records if key[1] != "bfloat16" and key[0] not in NOT_QUICK}
    rules = {t: spec_of(t).rule for found in left.values() for t in found}
    alike = Counter(rules.values())
    worth = {t: 1 if rule is None else 7 + 20 / alike[rule] for t, rule in rules.items()}
    taken = list[Key]()
    for _ in range(QUICK):
        gain = {
            key: sum(worth[t] * (1 + min(loops / calls, 3)) for t, (calls, loops) in found.items())
            / (4 + sum(calls for calls, _ in found.values()))
            for key, found in left.items()
        }
        taken.append(max(left, key=lambda key: (gain[key], key)))
        worth |= dict.fromkeys(left.pop(taken[-1]), 0)
    return sorted(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default=".*", help="run only operators whose names match")
    written = "write the table into the README, and which samples `make test` has"
    parser.add_argument("--write", action="store_true", help=written)
    arguments = parser.parse_args()
    if arguments.write:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{page()}\n{END}{rest.split(END)[1]}")
        CHOSEN.write_text(json.dumps(chosen()).replace("], ", "],\n") + "\n")
    else:
        sweep(arguments.names)


if __name__ == "__main__":
    main()
