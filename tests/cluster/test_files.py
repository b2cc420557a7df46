"""Names and files: what they give, and that every wrong one says what and how to mend it."""

from __future__ import annotations

import json
import os
import threading
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.cluster import available_cores, list_clusters, list_devices, load_cluster, pin_rank, rank_cores
from tensoropt.cluster.catalog import _preset, device_kind, link
from tensoropt.cluster.files import cluster_from
from tensoropt.errors import ClusterError

FULL_EXAMPLE = """
devices: [{kind: H100-80GB, count: 8}]
nodes: 4
links: {intra_node: NVLink4, inter_node: IB-400G}
"""


def load(tmp_path, text, name="cluster.yaml"):
    file = tmp_path / name
    file.write_text(text)
    return load_cluster(file)


def test_a_file_that_says_everything(tmp_path):
    cluster = load(tmp_path, FULL_EXAMPLE)
    assert (cluster.name, cluster.device_count) == ("cluster", 32)
    assert [(level.name, level.size, level.link.name) for level in cluster.levels] == [
        ("node", 4, "IB-400G"),
        ("gpu", 8, "NVLink4"),
    ]
    assert cluster.levels[0].link_count == 1


def test_figures_of_ones_own(tmp_path):
    cluster = load(
        tmp_path,
        """
        name: ours
        devices:
          - kind: {name: Chip, type: cuda, memory: 10GiB, memory_bandwidth: 1TB/s, flops: {float32: 1e13}}
            count: 2
            price_per_hour: 0.5
          - kind: {base: H100-80GB, name: H100-half, memory: 40GiB}
        links: {intra_node: {alpha: 5us, beta: 100Gbit/s}}
        """,
    )
    assert cluster.name == "ours"
    assert [kind.name for kind in cluster.devices] == ["Chip", "Chip", "H100-half"]
    assert (cluster.devices[0].flops["float32"], cluster.devices[0].price_per_hour) == (1e13, 0.5)
    assert cluster.devices[2].memory_bytes == 40 * 2**30
    assert cluster.link(0, 2).latency_s == pytest.approx(5e-6)
    assert cluster.link(0, 2).bandwidth_bytes_per_s == 12.5e9


CHIP = """
devices:
  - count: 2
    kind: {{name: Chip, type: cuda, memory: {memory}, memory_bandwidth: {wide}, flops: {{float32: {flops}}}}}
links: {{intra_node: {{latency: {latency}, bandwidth: {bandwidth}}}}}
"""
GOOD = {"memory": "80GiB", "wide": "2TB/s", "flops": "60TFLOPS", "latency": "5us", "bandwidth": "25GB/s"}


def chips(tmp_path, **figures):
    return load(tmp_path, CHIP.format(**(GOOD | figures)))


def test_units_as_people_write_them(tmp_path):
    kind = chips(tmp_path, memory="80G", wide="2 TB/s", flops="60 TFLOP/s", latency="5\u03bcs").devices[0]
    assert (kind.memory_bytes, kind.memory_bandwidth, kind.flops["float32"]) == (80e9, 2e12, 60e12)
    link = chips(tmp_path, latency="1.5 us", bandwidth="200 Gbit/s").levels[0].link
    assert (link.latency_s, link.bandwidth_bytes_per_s) == pytest.approx((1.5e-6, 25e9))


def test_numbers_in_base_units_are_taken(tmp_path):
    figures = {"memory": 85899345920, "wide": "2e12", "flops": "60e12", "latency": "5e-6", "bandwidth": 25e9}
    assert chips(tmp_path, **figures).devices == chips(tmp_path).devices
    assert chips(tmp_path, latency=0).levels[0].link.latency_s == 0


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
def test_figures_that_cannot_be_meant_are_refused(tmp_path, figures, message):
    with pytest.raises(ClusterError, match=message):
        chips(tmp_path, **figures)


def test_memory_beside_a_kind_is_read_alike(tmp_path):
    text = "devices: [{{kind: A100-80GB, count: 2, memory: {}}}]\nlinks: {{intra_node: NVLink3}}\n"
    assert load(tmp_path, text.format("40G")).devices[0].memory_bytes == 40e9
    with pytest.raises(ClusterError, match=r"devices\[0\] is 40, .*40GB"):
        load(tmp_path, text.format(40))


def test_an_explicit_pair_list_finds_its_levels(tmp_path):
    pairs = [
        {"between": [i, j], "alpha": 1e-5, "beta": 20e9 if i // 2 == j // 2 else 5e9}
        for i in range(4)
        for j in range(i + 1, 4)
    ]
    text = json.dumps({"devices": [{"kind": "L40S", "count": 4}], "links": {"pairs": pairs}})
    cluster = load(tmp_path, text, "pairs.json")
    assert [level.size for level in cluster.levels] == [2, 2]
    assert cluster.link(2, 3).bandwidth_bytes_per_s == 20e9
    assert cluster.link(1, 2).bandwidth_bytes_per_s == 5e9


def test_pairs_of_one_node_repeat(tmp_path):
    node = """
        devices: [{kind: L40S, count: 2}]
        nodes: 2
        links:
          inter_node: Ethernet-25G
          pairs: [{between: [0, 1], link: PCIe3-PIX}]
    """
    cluster = load(tmp_path, node)
    assert (cluster.link(2, 3).name, cluster.link(1, 2).name) == ("PCIe3-PIX", "Ethernet-25G")


def test_a_saved_cluster_is_a_cluster_file(tmp_path):
    cluster = load_cluster("dgx-v100x2")
    assert load(tmp_path, json.dumps(cluster.to_dict()), "saved.json") == cluster
    assert load_cluster(cluster) is cluster


def test_local_names(monkeypatch):
    assert load_cluster("local:3").device_count == 3
    cluster = load_cluster("local:2")
    assert cluster.device_type == "cpu"
    assert cluster.devices[0].name.startswith("CPU-core")
    assert cluster.memory_bytes * 2 <= load_cluster("local:1").memory_bytes + 1
    monkeypatch.setattr("tensoropt.cluster.local.gpu_cluster", lambda: None)
    assert load_cluster("local").device_count == len(available_cores())
    assert load_cluster("local").fingerprint == load_cluster(f"local:{len(available_cores())}").fingerprint


def test_ranks_share_no_core():
    cores = available_cores()
    assert rank_cores(len(cores)) == cores
    assert rank_cores(len(cores) + 1) is None


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling classes are Linux's")
def test_a_pinned_rank_keeps_its_cores_and_pushes_nobody_off_them():
    before = os.sched_getaffinity(0), os.sched_getscheduler(0)
    core = available_cores()[0]
    go_back = pin_rank(core)
    found: list[object] = []
    child = threading.Thread(target=lambda: found.extend((os.sched_getaffinity(0), os.sched_getscheduler(0))))
    child.start()
    child.join()
    go_back()
    assert found == [{core}, os.SCHED_BATCH]
    assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == before


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="scheduling classes are Linux's")
def test_a_class_that_was_given_stays():
    def idle() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        pin_rank(None)()
        found.append(os.sched_getscheduler(0))

    found: list[int] = []
    child = threading.Thread(target=idle)  # a thread's class is its own
    child.start()
    child.join()
    assert found == [os.SCHED_IDLE]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling classes are Linux's")
def test_a_refused_class_is_said(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_setscheduler", Mock(side_effect=PermissionError("not here")))
    pin_rank(None)()
    assert "not here" in caplog.text


@pytest.mark.parametrize("name", [name.replace("xN", "x2") for name in list_clusters()])
def test_every_preset_loads_with_sources(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.source
    assert cluster.device.source
    assert all(level.link.source for level in cluster.levels)
    assert cluster.meshes()[0].size == cluster.device_count


def test_the_catalogue_has_sources_and_links_are_believable():
    assert all(device_kind(name).source for name in list_devices())
    for name in _preset("links"):
        assert link(name).source
        assert 1e-6 < link(name).latency_s < 1e-3


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not valid YAML"),
    ("- a\n- b", "must be a mapping"),
    ("nodes: 2", "needs devices"),
    ("devices: []", "at least one"),
    ("devices: [{count: 2}]", "has no kind"),
    ("devices: [{kind: H100-80GB, count: two}]", "whole number of at least 1"),
    ("devices: [{kind: H100-80GB, count: 1000000000}]", "at most 1000000 devices"),
    ("devices: [{kind: H100-80GB, count: 8}]\nnodes: 1000000000", "nodes is 1000000000, but .* at most"),
    ("devices: [{kind: T4, count: 2000}]\nnodes: 2000", "2000 devices in each is 4000000, .* at most"),
    ("devices: [kind: {name: X, type: gpu, memory: 80GB, memory_bandwidth: 2TB/s, "
     "flops: {float32: 6e13}}]", "type 'gpu'; did you mean 'cuda'"),
    ("devices: [{kind: H100-80G, count: 1}]", "did you mean 'H100-80GB'"),
    ("devices: [{kind: {name: X, type: cuda}}]", "lacks memory"),
    ("devices: [{kind: H100-80GB, number: 2}]", "unknown key 'number'"),
    ("device: [H100-80GB]", "did you mean 'devices'"),
    ("devices: [H100-80GB]\nnodes: 0", "nodes is 0"),
    ("devices: [H100-80GB]\nnodes: [{devices: [L40S]}]", "leave out the separate devices"),
    ("nodes: [{count: 2}]", "has no devices"),
    ("nodes: [{devices: [L40S]}, {devices: [{kind: L40S, count: 2}]}]", "equally many"),
    ("nodes: [{devices: [L40S]}, {devices: [{kind: L40S, memory: 1GiB}]}]", "rename one of them"),
    ("devices: [H100-80GB]\nnodes: 2", "lacks inter_node"),
    ("devices: [{kind: H100-80GB, count: 2}]", "lacks intra_node"),
    ("devices: [L40S, {kind: L40S, memory: 1GiB}]\nlinks: {intra_node: PCIe4}", "name one of them"),
    ("devices: [H100-80GB, L40S]\nlinks: {intra_node: NVLink44}", "did you mean 'NVLink4'"),
    ("devices: [H100-80GB, L40S]\nlinks: {intra_node: {latency: 5us}}", "needs latency and bandwidth"),
    ("devices: [H100-80GB, L40S]\nlinks: {intra_node: {alpha: 1us, beta: -5GB/s}}", "not a bandwidth"),
    ("devices: [H100-80GB, L40S]\nlinks: {intra_node: {alpha: 1us, beta: -5e9}}", "greater than 0"),
    ("devices: [H100-80GB, L40S]\nlinks: {intra_node: {alpha: 1us, latency: 1us, beta: 1}}", "keep one"),
    ("devices: [H100-80GB, L40S]\nlinks: {intra_node: {link: PCIe4, beta: 1}}", "keep either"),
    ("devices: [H100-80GB, L40S]\nlinks: {pairs: []}", "must be a list"),
    ("devices: [H100-80GB, L40S]\nlinks: {pairs: [{link: PCIe4}]}", r"between: \[0, 1\]"),
    ("devices: [H100-80GB, L40S]\nlinks: {pairs: [{between: [0, 2], link: PCIe4}]}", "numbered 0 to 1"),
    ("devices: [T4, T4]\nlinks: {pairs: [{between: [1, 1], link: PCIe4}]}", "two different devices"),
    ("devices: [T4, T4, T4]\nlinks: {pairs: [{between: [0, 1], link: PCIe4}]}",
     r"lacks 2 of 3 pairs: \(0, 2\)"),
    ("devices: [T4, T4]\nlinks: {pairs: [{between: [0, 1], link: PCIe4}, "
     "{between: [1, 0], link: PCIe4}]}", "given twice"),
])  # fmt: skip
def test_wrong_files_say_what_and_how(tmp_path, text, message):
    with pytest.raises(ClusterError, match=message) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "cluster.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "message"), [
    ("cpu:99999999999", "at most 1000000 devices"),
    ("dgx-h100x99999999999", "at most 1000000 devices"),
    ("dgx-h10", "did you mean 'dgx-h100'"),
    ("dgx-h100x0", "unknown cluster"),
    ("netsplit-paperx2", "unknown cluster"),
    ("missing.yaml", "does not exist"),
    ("some/where", "does not exist"),
])  # fmt: skip
def test_wrong_names_say_what_and_how(name, message):
    with pytest.raises(ClusterError, match=message):
        load_cluster(name)


def test_netsplits_runs_are_on_the_first_cards_of_its_server():
    server, runs = load_cluster("netsplit-server"), load_cluster("netsplit-paper")
    fast = {pair for pair, path in server.pairs.items() if path.name == "PCIe3-PIX"}
    assert fast == {(0, 1), (2, 3), (2, 4), (3, 4)}
    assert (len(server.pairs), server.subset(3).pairs) == (10, runs.pairs)
    assert sorted(path.name for path in runs.pairs.values()) == ["PCIe3-NODE", "PCIe3-NODE", "PCIe3-PIX"]


VALID = {
    "devices": [
        {"kind": {"base": "L40S", "name": "X", "flops": {"float32": 1e13}}, "count": 2, "memory": "1GiB"},
        {"kind": "L40S", "price_per_hour": 1.0},
    ],
    "nodes": 2,
    "links": {
        "intra_node": {"alpha": "1us", "beta": "1GB/s"},
        "inter_node": {"link": "IB-400G", "count": 2},
        "pairs": [{"between": [i, j], "link": "PCIe4"} for i, j in ((0, 1), (0, 2), (1, 2))],
    },
}


def _places(value, path=()):
    yield path
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from _places(value[key], (*path, key))


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.floats(),
    st.sampled_from(["", "L40S", "5us", "-1", "nan", "1e400", "5GB/s"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(
        st.sampled_from(["kind", "link", "name", "flops", "base", "count"]), st.integers(0, 2), max_size=2
    ),
)


@given(st.sampled_from(list(_places(VALID))), anything)
def test_whatever_stands_anywhere_is_a_cluster_or_an_error_of_ours(path, value):
    document = json.loads(json.dumps(VALID))
    if not path:
        document = value
    else:
        target = document
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
    try:
        cluster = cluster_from(document, name="x")
    except ClusterError:
        return
    assert cluster.device_count >= 1
    assert cluster.meshes()


def test_nodes_may_have_kinds_of_their_own(tmp_path):
    nodes = "[{count: 2, devices: [{kind: H100-80GB, count: 2}]}, {devices: [{kind: A100-80GB, count: 2}]}]"
    cluster = load(tmp_path, f"nodes: {nodes}\nlinks: {{intra_node: NVLink3, inter_node: IB-200G}}\n")
    assert [device.name for device in cluster.devices] == ["H100-80GB"] * 4 + ["A100-80GB"] * 2
    assert [(level.name, level.size) for level in cluster.levels] == [("node", 3), ("gpu", 2)]
    assert load(tmp_path, json.dumps(cluster.to_dict()), "saved.json") == cluster
