"""Figures in cluster files: units as people write them, and what cannot be meant as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensoropt import ClusterError, load_cluster
from tensoropt.cluster.hardware import DeviceKind

FILE = """
devices:
  - count: 2
    kind: {{name: Chip, type: cuda, memory: {memory}, memory_bandwidth: {wide}, flops: {{float32: {flops}}}}}
links: {{intra_node: {{latency: {latency}, bandwidth: {bandwidth}}}}}
"""
GOOD = {"memory": "80GiB", "wide": "2TB/s", "flops": "60TFLOPS", "latency": "5us", "bandwidth": "25GB/s"}


def load(tmp_path: Path, **figures: object):
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.format(**(GOOD | figures)), encoding="utf-8")
    return load_cluster(file)


def test_units_as_people_write_them(tmp_path):
    kind = load(tmp_path, memory="80G", wide="2 TB/s", flops="60 TFLOP/s", latency="5\u03bcs").devices[0]
    assert (kind.memory_bytes, kind.memory_bandwidth, kind.flops["float32"]) == (80e9, 2e12, 60e12)
    link = load(tmp_path, latency="1.5 us", bandwidth="200 Gbit/s").levels[0].link
    assert (link.latency_s, link.bandwidth_bytes_per_s) == pytest.approx((1.5e-6, 25e9))


def test_numbers_in_base_units_are_taken(tmp_path):
    figures = {"memory": 85899345920, "wide": "2e12", "flops": "60e12", "latency": "5e-6", "bandwidth": 25e9}
    assert load(tmp_path, **figures).devices == load(tmp_path).devices
    assert load(tmp_path, latency=0).levels[0].link.latency_s == 0


@pytest.mark.parametrize(("figures", "message"), [
    ({"memory": 80}, r"memory of .*'Chip' is 80, which without a unit is 80 bytes; .*for example 80GB"),
    ({"memory": "'80'"}, "for example 80GB"),
    ({"wide": 2000}, r"memory bandwidth .* is 2000, .*for example 2000GB/s"),
    ({"flops": 60}, r"float32 FLOP/s .* is 60, .*for example 60TFLOP/s"),
    ({"latency": 5}, r"latency of .* is 5, which without a unit is 5 seconds; .*for example 5us"),
    ({"bandwidth": 25}, r"bandwidth of .* is 25, .*for example 25GB/s"),
    ({"flops": "60GB"}, r"'60GB' is not a number of FLOP/s"),
    ({"bandwidth": "16GT/s"}, r"'16GT/s' is not a bandwidth"),
    ({"memory": "yes"}, "which is not a number; correct the value"),
    ({"memory": -1}, "greater than 0"),
    ({"flops": ".nan"}, "must be finite"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(tmp_path, figures, message):
    with pytest.raises(ClusterError, match=message):
        load(tmp_path, **figures)


def test_memory_beside_a_kind_is_read_alike(tmp_path):
    text = "devices: [{{kind: A100-80GB, count: 2, memory: {}}}]\nlinks: {{intra_node: NVLink3}}\n"
    file = tmp_path / "cluster.yaml"
    file.write_text(text.format("40G"), encoding="utf-8")
    assert load_cluster(file).devices[0].memory_bytes == 40e9
    file.write_text(text.format(40), encoding="utf-8")
    with pytest.raises(ClusterError, match=r"devices\[0\] is 40, .*40GB"):
        load_cluster(file)


def test_what_programs_and_older_files_say_is_taken():
    """Saved explorations hold figures in base units, whatever these are."""
    flops = {"float32": 10.0}
    kind = DeviceKind(name="toy", type="cpu", memory_bytes=1000, flops=flops, memory_bandwidth=1.0)
    assert kind.memory_bytes == 1000
