"""Throughput, MFU, hours and money of points: by hand, linear where they are, unknown with a reason.

What a plan says of the devices it was made for.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt import Exploration, TensorOptError, load_cluster
from tensoropt.exploration.rates import (
    Amount,
    RatesOf,
    StepWork,
    Tariff,
    amount_of,
    device_words,
    for_gpus,
    kinds_of,
    made_for,
    prices_of,
)
from tensoropt.plan.plan import MeshInfo, ModelInfo
from tests.plan.explorations import point, small_exploration, space


def test_it_is_the_cluster_that_was_saved():
    for name, gpus in (("dgx-h100[2]", True), ("local:2", False)):
        cluster = load_cluster(name)
        assert made_for(cluster.to_dict()) == cluster
        assert for_gpus(cluster.to_dict()) is gpus
    assert device_words(load_cluster("dgx-h100[2]")) == "2 x H100-80GB (cuda)"


def test_a_plan_may_not_say():
    assert made_for({}) is None
    assert not for_gpus({"name": "toy"})


IMAGES = {"args": [{"tensor": [8, 3], "dtype": "float32"}], "kwargs": {}}
TOKENS = {
    "input_ids": {"tensor": [8, 128], "dtype": "int64"},
    "labels": {"tensor": [8, 128], "dtype": "int64"},
}


def explored(
    cluster: str = "dgx-h100[2]", *, call: Any = None, flops: Any = None, **changes: Any
) -> Exploration:
    """One point of 0.5 s on two devices."""
    call = {"args": [], "kwargs": TOKENS} if call is None else call
    model = ModelInfo(source="zoo:toy", fingerprint="f" * 64, call=call)
    found = replace(
        small_exploration(), points=(point(1e6, 0.5, 0),), spaces=(space((2,), 1),), model=model,
        cluster=load_cluster(cluster).to_dict(),
    )  # fmt: skip
    report = {**found.report, **({} if flops is None else {"model_flops": flops})}
    return replace(found, report=report, **changes)


def test_figures_by_hand():
    # 8 samples of 128 tokens in 0.5 s; of two H100 with 66.9 TFLOP/s each, a tenth of what 0.5 s would allow.
    found = explored(flops={"float32": 0.1 * 2 * 66.9e12 * 0.5})
    one = RatesOf(found, Tariff(3.0)).of(0)
    assert (one.devices, one.samples_per_s, one.tokens_per_s) == (2, 16.0, 2048.0)
    assert (one.mfu, one.per_hour, one.hours(7200)) == (pytest.approx(0.1), 6.0, 1.0)
    assert (one.device_hours(7200), one.cost(7200)) == (2.0, pytest.approx(6.0))
    assert Amount(1024 * 7200, "tokens").steps(StepWork.of(found)) == 7200


def test_flop_of_several_formats_have_peaks_of_their_own():
    kinds = load_cluster("dgx-h100[2]").devices
    flops = {name: 2 * kinds[0].flops[name] * 0.1 for name in ("float32", "bfloat16")}
    assert RatesOf(explored(flops=flops)).of(0).mfu == pytest.approx(0.4)


def test_the_peak_of_cpu_ranks_is_what_they_were_measured_to_reach():
    found = explored("local:2", flops={"float32": 2 * 150e9 * 0.5 * 0.25, "bfloat16": 2 * 400e9 * 0.5 * 0.5})
    assert RatesOf(found).of(0).mfu is None  # nothing says what this processor reaches in bfloat16
    peaks = {"peak_flops": {"float32": 150e9, "bfloat16": 400e9}}
    assert RatesOf(replace(found, report={**found.report, **peaks})).of(0).mfu == pytest.approx(0.75)


def test_devices_of_two_kinds_add_their_peaks_and_prices_up(tmp_path):
    file = tmp_path / "two.yaml"
    file.write_text(
        "devices: [{kind: H100-80GB, count: 1}, {kind: A100-80GB, count: 1, price_per_hour: 1.5}]\n"
        "links: {intra_node: NVLink3}\n"
    )
    found = explored(str(file), flops={"bfloat16": (989.4e12 + 312e12) * 0.25})
    one = RatesOf(found, Tariff(by_kind={"H100-80GB": 2.5})).of(0)
    assert (one.mfu, one.per_hour) == (pytest.approx(0.5), 4.0)


def test_a_device_without_tensor_cores_computes_tf32_as_float32():
    found = explored("dgx-v100[2]", flops={"tf32": 2 * 15.7e12 * 0.25})
    assert RatesOf(found).of(0).mfu == pytest.approx(0.5)


@pytest.mark.parametrize(("found", "name", "why"), [
    (explored(flops={}), "mfu", "no operator whose FLOP count for MFU"),
    (explored("dgx-v100[2]", flops={"bfloat16": 1e9}), "mfu", "no peak of bfloat16 is known for V100-32GB"),
    (explored(flops={"float32": 1.0}), "per_hour", "no price of a device-hour is known for H100-80GB"),
    (explored(flops={"float32": 1.0}, cluster="dgx-h100[1]"), "mfu", "which of the 1 devices"),
    (replace(explored(flops={"float32": 1.0}), cluster={"name": "toy"}), "mfu", "was not saved"),
    (explored(call={"args": [], "kwargs": {}}), "samples_per_s", "shapes of the model's inputs"),
    (explored(call=IMAGES), "tokens_per_s", "no input of token indices"),
    (explored(call={"args": [{"tensor": [n, 3], "dtype": "float32"} for n in (8, 4)], "kwargs": {}}),
     "samples_per_s", r"no batch size in common \(first sizes 8, 4\)"),
])  # fmt: skip
def test_what_is_unknown_says_why(found, name, why):
    one = RatesOf(found).of(0)
    assert getattr(one, name) is None
    assert re.search(why, one.whys[name])


def test_part_of_a_cluster_of_one_kind_is_known():
    assert RatesOf(explored("dgx-h100[4]", flops={"float32": 1.0})).of(0).mfu is not None


def test_an_amount_of_what_is_unknown_is_refused_with_the_reason():
    work = StepWork.of(explored(call=IMAGES))
    with pytest.raises(TensorOptError, match="tokens of a step are unknown: the model has no input"):
        Amount(10, "tokens").steps(work)
    assert Amount(10, "samples").steps(work) == 10 / 8


@pytest.mark.parametrize(("make", "why"), [
    (lambda: Amount(0), "is 0 steps; give more"),
    (lambda: Amount(math.nan, "tokens"), "is nan tokens; give more"),
    (lambda: Amount(1, "years"), "use one of steps, samples, tokens"),
    (lambda: Tariff(0.0), "price of all devices is 0"),
    (lambda: Tariff(by_kind={"A": math.inf}), "price of A is inf"),
    (lambda: prices_of("H100-80GB="), "'H100-80GB=' is not a price"),
    (lambda: prices_of("2,3"), "two prices for all devices"),
    (lambda: Tariff(by_kind={"H100": 2.0}).check(kinds_of(explored())), "did you mean 'H100-80GB'"),
])  # fmt: skip
def test_nonsense_is_refused(make, why):
    with pytest.raises(TensorOptError, match=why):
        make()


def test_prices_of_kinds_and_of_the_rest():
    assert prices_of(" 2.5, A100-80GB = 1.5 ,") == (2.5, {"A100-80GB": 1.5})
    assert prices_of("") == (None, {})


SIZES = st.floats(min_value=1e-3, max_value=1e15)


@given(SIZES, SIZES, st.floats(min_value=1e-3, max_value=1e3))
def test_hours_and_cost_are_linear_in_the_amount_and_cost_in_the_price(first, second, price):
    found = explored()
    work, one = StepWork.of(found), RatesOf(found, Tariff(price)).of(0)
    dear = RatesOf(found, Tariff(2 * price)).of(0)

    def cost(count: float, at: Any = one) -> float:
        return float(at.cost(Amount(count, "tokens").steps(work)))

    assert cost(first) + cost(second) == pytest.approx(cost(first + second))
    assert cost(3 * first) == pytest.approx(3 * cost(first))
    assert cost(first, dear) == pytest.approx(2 * cost(first))
    # A token is a 128th of a sample, and a sample an 8th of a step.
    for count, unit in ((first, "samples"), (first * 128, "tokens"), (first / 8, "steps")):
        assert Amount(count, unit).steps(work) == pytest.approx(first / 8)
    assert one.device_hours(first) == pytest.approx(2 * one.hours(first))


def test_a_point_on_one_device_pays_for_one():
    found = explored(spaces=(replace(space((2,), 1), mesh=MeshInfo(shape=(), names=())),))
    one = RatesOf(found, Tariff(3.0)).of(0)
    assert (one.devices, one.per_hour) == (1, 3.0)


@pytest.mark.parametrize(("amount", "words"), [
    (Amount(1000), "1,000 steps"), (Amount(3e11, "tokens"), "300B tokens"),
    (Amount(1.5e13, "tokens"), "15T tokens"), (Amount(123_456_789, "samples"), "123.457M samples"),
    (Amount(1, "steps"), "1 step"),
])  # fmt: skip
def test_an_amounts_words_are_read_as_the_amount(amount, words):
    assert amount.words == words
    read = amount_of(words)
    assert (read.unit, read.count) == (amount.unit, pytest.approx(amount.count, rel=1e-5))
