"""Presets beside what the vendors' data sheets say, written down apart from them."""

import pytest

from tensoropt.cluster import load_cluster
from tensoropt.cluster.catalog import device_kind, kind_by_nvml_name, link, list_devices

# GB, GB/s, and dense TFLOP/s of float32, TF32, float16 and bfloat16 with float32 sums, float8; None where the
# hardware has no such units. Sparse figures of the sheets are halved.
SHEETS = {
    "V100-16GB": (16, 900, 15.7, None, 125, None, None),
    "V100-32GB": (32, 900, 15.7, None, 125, None, None),
    "V100-PCIe-16GB": (16, 900, 14, None, 112, None, None),
    "A100-40GB": (40, 1555, 19.5, 156, 312, 312, None),
    "A100-80GB": (80, 2039, 19.5, 156, 312, 312, None),
    "A100-PCIe-80GB": (80, 1935, 19.5, 156, 312, 312, None),
    "H100-80GB": (80, 3350, 67, 989 / 2, 1979 / 2, 1979 / 2, 3958 / 2),
    "H100-PCIe-80GB": (80, 2000, 51, 756 / 2, 1513 / 2, 1513 / 2, 3026 / 2),
    # Between the sheets of SXM and NVL.
    "H100-96GB-500W": (96, 2400, (67 + 60) / 2, (989 + 835) / 4, *[(1979 + 1671) / 4] * 2, (3958 + 3341) / 4),
    "H20-96GB": (96, 4000, 44, 74, 148, 148, 296),
    "H200-141GB": (141, 4800, 67, 989 / 2, 1979 / 2, 1979 / 2, 3958 / 2),
    "B200-180GB": (180, 8000, 75, 2200 / 2, 4500 / 2, 4500 / 2, 9000 / 2),
    "GB200": (13400 / 72, 8000, 5760 / 72, 180e3 / 144, 360e3 / 144, 360e3 / 144, 720e3 / 144),
    "L40S": (48, 864, 91.6, 366 / 2, 733 / 2, 733 / 2, 1466 / 2),
    "RTX-4090": (24, 1008, 82.6, 82.6, 165.2, 165.2, 330.3),
    "TITAN-RTX": (24, 672, 16.3, None, 130.5, None, None),
    "T4": (16, 320, 8.1, None, 65, None, None),
    "MI300X": (192, 5300, 163.4, 653.7, 1307.4, 1307.4, 2614.9),
}
CAPABILITIES = {  # https://developer.nvidia.com/cuda-gpus
    "V100": "7.0", "A100": "8.0", "H100": "9.0", "H200": "9.0", "B200": "10.0", "L40S": "8.9", "RTX": "8.9",
    "H20": "9.0", "GB200": "10.0", "TITAN": "7.5", "T4": "7.5", "CPU": "", "MI300X": "",
}  # fmt: skip
DTYPES = ("float32", "tf32", "float16", "bfloat16", "float8")
EACH_WAY_GB_PER_S = {  # half of what the vendors' sheets give, which is both ways together
    "NVLink2": 300 / 2, "NVLink3": 600 / 2, "NVLink4": 900 / 2, "NVLink5": 1800 / 2, "xGMI-x1": 128 / 2,
    "PCIe3": 8 * 16 * 128 / 130 / 8, "PCIe4": 16 * 16 * 128 / 130 / 8, "PCIe5": 32 * 16 * 128 / 130 / 8,
    "IB-100G": 100 / 8, "IB-200G": 200 / 8, "IB-400G": 400 / 8,
}  # fmt: skip
# Per node: kind, GPUs, the link between them, InfiniBand cards for computing and Gbit/s of each.
SYSTEMS = {
    "dgx-v100": ("V100-32GB", 8, "NVLink2", 4, 100),
    "dgx-a100": ("A100-80GB", 8, "NVLink3", 8, 200),
    "dgx-a100-40gb": ("A100-40GB", 8, "NVLink3", 8, 200),
    "dgx-h100": ("H100-80GB", 8, "NVLink4", 8, 400),
    "dgx-h200": ("H200-141GB", 8, "NVLink4", 8, 400),
    "dgx-b200": ("B200-180GB", 8, "NVLink5", 8, 400),
    "gb200-nvl72": ("GB200", 72, "NVLink5", 72, 400),
    "hgx-h20": ("H20-96GB", 8, "NVLink4", 8, 400),
    "hgx-h100-96gb-500w": ("H100-96GB-500W", 8, "NVLink4", 8, 400),
    "mi300x-8": ("MI300X", 8, "xGMI-x1", 8, 400),
}


def test_every_gpu_of_the_catalogue_has_a_sheet():
    assert set(SHEETS) == {name for name in list_devices() if device_kind(name).type == "cuda"}


@pytest.mark.parametrize("name", SHEETS)
def test_device_kinds_are_as_their_data_sheets_say(name):
    kind, (memory, bandwidth, *peaks) = device_kind(name), SHEETS[name]
    # GB of the sheets are GiB for most, less what error correction and firmware take.
    assert 0.93 * memory * 1e9 <= kind.memory_bytes <= memory * 2**30
    assert kind.memory_bandwidth == pytest.approx(bandwidth * 1e9)
    for dtype, peak in zip(DTYPES, peaks, strict=True):
        if peak is None:
            assert dtype not in kind.flops
        else:
            assert kind.flops[dtype] == pytest.approx(peak * 1e12, rel=0.015), dtype  # sheets are rounded


@pytest.mark.parametrize("name", EACH_WAY_GB_PER_S)
def test_links_are_as_their_data_sheets_say(name):
    assert link(name).bandwidth_bytes_per_s == pytest.approx(EACH_WAY_GB_PER_S[name] * 1e9, rel=1e-3)


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems_are_as_their_data_sheets_say(name):
    cluster, (kind, count, inside, cards, gigabits) = load_cluster(f"{name}x2"), SYSTEMS[name]
    nodes, gpus = cluster.levels
    assert (cluster.device.name, cluster.device_count, gpus.size) == (kind, 2 * count, count)
    assert (gpus.link.name, nodes.link_count) == (inside, cards)
    assert nodes.link.bandwidth_bytes_per_s == gigabits * 1e9 / 8


@pytest.mark.parametrize(("reported", "name"), [
    ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
    ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
    ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
    ("NVIDIA H100 80GB HBM3", "H100-80GB"),
    ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
    ("NVIDIA H20", "H20-96GB"),
    ("NVIDIA H200", "H200-141GB"),
    ("NVIDIA B200", "B200-180GB"),
    ("NVIDIA GB200", "GB200"),
    ("Tesla V100-SXM2-16GB", "V100-16GB"),
    ("Tesla V100-PCIE-16GB", "V100-PCIe-16GB"),
])  # fmt: skip
def test_names_that_the_driver_reports_find_their_sheet(reported, name):
    assert kind_by_nvml_name(reported).name == name


@pytest.mark.parametrize("name", list_devices())
def test_compute_capabilities(name):
    assert device_kind(name).capability == CAPABILITIES[name.split("-")[0]]
