"""Random strategies that draw every choice together, on ranks of this machine and on fake ones.

    python -m tests.verify.sweep --seeds 0:200 [--models causal,llama] [--ranks 2,3,4,5] [--fake]

Each seed is a model, the sizes of its inputs, a number of ranks, a mesh, micro-batches, and a strategy or a
pipeline. On fake ranks the memory of a step has to be within 3 % of its prediction, and what ranks send as
predicted, in order; on real ranks loss, gradients and parameters those of the unsplit model, too.
"""

import argparse
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tensoropt import Settings, TensorOptError
from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs.source import CostSource, real_shape
from tensoropt.engine.models import CapturedModel, ModelSpec, load_model
from tensoropt.ops.families.routed_experts import EXPERTS
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.pool import RankPool
from tensoropt.session.refining import MAX_AXES
from tensoropt.sharding.configurations import MicroBatchRefused
from tensoropt.sharding.strategy import ParallelStrategy
from tensoropt.verify.answer import entry_of
from tensoropt.verify.fake_ranks import check_on_fake_ranks
from tensoropt.verify.findings import RunFindings
from tensoropt.verify.predict import Prediction, predict
from tensoropt.verify.random_strategies import (
    draw_pipelines,
    micro_strategies,
    pipeline_degrees,
    random_following,
    random_strategy,
)
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.real_ranks import verify_strategies
from tests.verify.sweep_models import DECODERS

WITHIN = 0.03
"""What moves a decision (CONTRIBUTING.md)."""
PIPELINED, FOLLOWING, RECOMPUTED = 0.2, 0.6, 0.4
"""How often a strategy is a pipeline, has a theme, and recomputes a block."""

TINY = (
    "llama", "qwen2", "mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt2_dropout", "albert",
    "falcon", "t5", "vit", "gpt_neox", "opt", "phi", "gemma2", "qwen3", "cohere", "stablelm", "olmo2",
    "olmoe", "starcoder2", "modernbert", "whisper", "mistral", "gptj", "bert_mask", "resnet", "convnext",
    "qwen3_moe", "olmo", "granite", "glm4", "smollm3", "gemma2_window", "gemma3", "gpt_oss", "mistral_window",
    "vgg", "encoder_layer", "multihead_attention", "lstm",
)  # fmt: skip
NAMES = (*DECODERS, *TINY)
FIXED = ("t5", "vit", "resnet", "convnext", "vgg", "encoder_layer", "multihead_attention", "lstm", "whisper")
"""Models whose inputs have one size."""
LONGEST = {"gpt2_dropout": 12}
"""The most positions of models that have a table of fewer than the others."""
ALIKE = 4
"""So many seeds have one model, captured once, on so many ranks."""
SIZES = ((4, 8), (3, 12), (1, 24), (5, 10), (2, 15), (6, 20), (1, 30), (8, 12))
"""Samples and positions: with equal parts on some numbers of ranks, with and without two chunks for each."""


@dataclass(frozen=True)
class Case:
    """What a seed says, and what became of it."""

    seed: int
    source: str
    batch: int
    ranks: int
    strategy: ParallelStrategy | None = None
    mesh: Mesh | None = None
    optimizer: str = "adam"
    faults: tuple[str, ...] = ()
    memory: float = 0.0

    def line(self) -> str:
        mesh = self.strategy.mesh_text if self.strategy else ""
        said = "; ".join(self.faults) or "ok"
        name = self.source.partition(":")[2]
        return f"{self.seed:5d} {name:32s} x{self.batch} {self.ranks} {mesh:10s} {self.memory:+7.2%}  {said}"


def sources(names: Sequence[str], rng: random.Random) -> tuple[str, int]:
    """A model and the sizes of its inputs."""
    name = rng.choice(names)
    batch, sequence = rng.choice(SIZES)
    sequence = min(sequence, LONGEST.get(name, sequence))
    where = f"tests.verify.sweep_models:{name}"
    return where if name in FIXED else f"{where}?sequence={sequence}", batch


def drawn(case: Case, loaded: CapturedModel) -> Case:
    """The case with a strategy."""
    rng, cluster = random.Random(case.seed), load_cluster(f"cpu:{case.ranks}")
    # SGD keeps nothing, so that the peak is rarely the optimizer's.
    case = replace(case, optimizer=rng.choice(("sgd", "adam")))
    counts = (1, 2, 4)
    try:
        micro_strategies(loaded.graph, 2)
        size = min(
            (loaded.graph.atoms.graph.tensors[n].shape or (1,))[0] for n in loaded.graph.atoms.graph.inputs
        )
        counts = tuple(c for c in counts if size % c == 0)
    except MicroBatchRefused:
        counts = (1,)
    degrees = pipeline_degrees(loaded.graph, cluster)
    if degrees and len(counts) > 1 and rng.random() < PIPELINED:
        try:
            ((pipeline, mesh),) = draw_pipelines(loaded, cluster, degrees, counts, 1, case.seed, RECOMPUTED)
            return replace(case, strategy=pipeline, mesh=mesh)
        except TensorOptError:
            pass
    mesh, count = rng.choice(cluster.meshes(MAX_AXES)), rng.choice(counts)
    shape, micro = (count, *real_shape(mesh)), micro_strategies(loaded.graph, count)
    given = random_following(loaded.graph, shape, micro, rng) if rng.random() < FOLLOWING else None
    strategy = random_strategy(loaded.graph, shape, micro, rng, RECOMPUTED, given)
    return replace(case, strategy=strategy, mesh=mesh)


def compared(case: Case, predicted: Prediction, found: RunFindings) -> Case:
    """The case with what differs between prediction and findings."""
    assert case.strategy is not None
    entry, faults, error = entry_of(case.strategy, predicted, found), list(case.faults), case.memory
    if found.error:
        faults.append(found.error)
    elif found.numerics_ok is False:
        faults.append(
            f"numbers: {found.differences} {found.worst_gradient} {found.worst_parameter} "
            f"replicas agree: {found.replicas_agree}"
        )
    if peaks := found.memory_tracked_of_ranks:
        # Each stage of a pipeline beside the fullest of its ranks, as a share of the fullest stage: that one
        # decides whether a plan fits. An activation of some kB is much of a stage that is nearly empty.
        wanted = predicted.of_places or (predicted.memory_bytes,)
        alike = len(peaks) // len(wanted)
        tracked = [max(peaks[i : i + alike]) for i in range(0, len(peaks), alike)]
        error = max((a - b for a, b in zip(wanted, tracked, strict=True)), key=abs) / max(tracked)
        if abs(error) > WITHIN:
            faults.append(f"memory: {[round(size) for size in wanted]} predicted, {tracked} tracked")
    faults += entry["collectives_unlike"] + entry["order_unlike"]
    return replace(case, faults=tuple(faults), memory=error)


@dataclass
class Sweep:
    """Where cases run: fake ranks, and real ones by their number."""

    real: bool
    store: ProfileStore
    pool: RankPool | None = None

    def check(self, case: Case) -> Case:
        """The case with its faults."""
        spec = ModelSpec(case.source, 0, settings=(("batch", case.batch),))
        try:
            loaded = load_model(spec)
            case = drawn(case, loaded)
            assert case.strategy is not None
            predicted = self.predicted(case)
            # The rows of experts are the router's choice, which fake ranks do not have.
            routed = any(op.target == EXPERTS for op in loaded.captured.graph.operators)
            if self.real:
                options = CheckOptions(optimizer=case.optimizer, memory=not routed, timed_steps=0)
                data, pool = [case.strategy.to_data()], self.ranks(case.ranks)
                case = compared(case, predicted, *verify_strategies(spec, data, pool=pool, options=options))
            if not self.real or routed:
                case = compared(case, predicted, check_on_fake_ranks(loaded, case.strategy, case.optimizer))
        except Exception:
            case = replace(case, faults=(*case.faults, traceback.format_exc()))
        return case

    def ranks(self, count: int) -> RankPool:
        """Ranks, of which only so many are kept."""
        if self.pool is None or self.pool.world_size != count:
            self.close()
            self.pool = RankPool(count, timeout_s=120.0, start_timeout_s=300.0)
        return self.pool

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def predicted(self, case: Case) -> Prediction:
        costs = CostSource(load_cluster(f"cpu:{case.ranks}"), self.store, Settings(optimizer=case.optimizer))
        ((_, prediction),) = predict([(case.strategy, case.mesh)], costs)
        return prediction


@contextmanager
def sweeping(real: bool) -> Iterator[Sweep]:
    with ProfileStore() as store:
        sweep = Sweep(real, store)
        try:
            yield sweep
        finally:
            sweep.close()


def cases(seeds: Sequence[int], names: Sequence[str], ranks: Sequence[int]) -> list[Case]:
    """What the seeds say, those of one model together."""
    found = []
    for seed in seeds:
        rng = random.Random(f"case {seed // ALIKE}")
        found.append(Case(seed, *sources(names, rng), rng.choice(ranks)))
    return sorted(found, key=lambda case: (case.ranks, case.source, case.batch))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:10")
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--ranks", default="2,3,4,5")
    parser.add_argument("--fake", action="store_true")
    arguments = parser.parse_args()
    begin, _, end = arguments.seeds.partition(":")
    seeds = range(int(begin), int(end or int(begin) + 1))
    wanted = cases(seeds, arguments.models.split(","), [int(n) for n in arguments.ranks.split(",")])
    start, bad = time.perf_counter(), 0
    with sweeping(not arguments.fake) as sweep:
        for case in wanted:
            found = sweep.check(case)
            bad += bool(found.faults)
            print(found.line(), flush=True)
    print(f"{len(wanted)} strategies, {bad} with faults, {time.perf_counter() - start:.0f} s")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
