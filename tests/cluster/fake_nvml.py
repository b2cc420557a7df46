"""A stand-in for the pynvml module that replays what ``nvidia-smi topo -m`` shows of known boxes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

ANCESTORS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


class NVMLError(Exception):
    pass


@dataclass
class FakeNvml:
    """``topology[i][j]`` is ``NVn``, ``PIX``, ``PXB``, ``PHB``, ``NODE``, ``SYS`` or ``X``."""

    name: str
    memory_bytes: int
    topology: list[list[str]]
    nvlink_version: int = 0
    switch: bool = False
    pcie_generation: int = 3
    usable: bool = True
    names: dict[int, str] = field(default_factory=dict)
    """Of the cards that are not called like the others."""
    partitioned: tuple[int, ...] = ()
    """The cards with MIG instances."""
    wires: list[list[int]] = field(init=False)
    NVMLError = NVMLError
    nvmlShutdown = staticmethod(lambda: None)  # noqa: N815
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)  # noqa: N815
    nvmlDeviceGetMaxPcieLinkWidth = staticmethod(lambda handle: 16)  # noqa: N815
    nvmlDeviceGetMemoryBusWidth = staticmethod(lambda handle: 384)  # noqa: N815
    nvmlDeviceGetNumGpuCores = staticmethod(lambda handle: 1000)  # noqa: N815

    def __post_init__(self) -> None:
        # Per device, the other end of each NVLink (-1: a switch).
        self.wires = []
        for row in self.topology:
            links = [(j, int(cell[2:])) for j, cell in enumerate(row) if cell.startswith("NV")]
            if self.switch:
                self.wires.append([-1] * links[0][1])
            else:
                self.wires.append([j for j, count in links for _ in range(count)])

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.usable:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.topology)

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return self.names.get(handle, self.name).encode()  # older versions of the module return bytes

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}abc"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self.memory_bytes)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if "H100" not in self.name and "A100" not in self.name:
            raise NVMLError("Not Supported")
        return [int(handle in self.partitioned)] * 2

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{handle + 6:02X}:00.0".encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:  # noqa: N802
        # NVML's answer is about PCIe only; where the table shows an NVLink it does not matter here.
        return ANCESTORS.get(self.topology[first][second], 50)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return self.pcie_generation

    def _wire(self, handle: int, index: int) -> int:
        if index >= len(self.wires[handle]):
            raise NVMLError("Invalid Argument")
        return self.wires[handle][index]

    def nvmlDeviceGetNvLinkState(self, handle: int, index: int) -> int:  # noqa: N802
        self._wire(handle, index)
        return 1

    def nvmlDeviceGetNvLinkVersion(self, handle: int, index: int) -> int:  # noqa: N802
        return self.nvlink_version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, index: int) -> int:  # noqa: N802
        return 2 if self._wire(handle, index) < 0 else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, index: int) -> SimpleNamespace:  # noqa: N802
        # NVLink calls pad the domain to four digits, the device call to eight.
        return SimpleNamespace(busId=f"0000:{self._wire(handle, index) + 6:02x}:00.0")

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802
        return {1: 1500, 2: 7000}[clock]


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def dgx_v100() -> FakeNvml:
    return FakeNvml(
        name="Tesla V100-SXM2-32GB",
        memory_bytes=34089730048,
        nvlink_version=2,
        topology=table("""
            X   NV1 NV1 NV2 NV2 SYS SYS SYS
            NV1 X   NV2 NV1 SYS NV2 SYS SYS
            NV1 NV2 X   NV2 SYS SYS NV1 SYS
            NV2 NV1 NV2 X   SYS SYS SYS NV1
            NV2 SYS SYS SYS X   NV1 NV1 NV2
            SYS NV2 SYS SYS NV1 X   NV2 NV1
            SYS SYS NV1 SYS NV1 NV2 X   NV2
            SYS SYS SYS NV1 NV2 NV1 NV2 X
        """),
    )


def _switched(name: str, memory_bytes: int, links: int, version: int) -> FakeNvml:
    rows = [["X" if i == j else f"NV{links}" for j in range(8)] for i in range(8)]
    return FakeNvml(name=name, memory_bytes=memory_bytes, topology=rows, nvlink_version=version, switch=True)


def dgx_a100() -> FakeNvml:
    return _switched("NVIDIA A100-SXM4-80GB", 85899345920, 12, 3)


def dgx_h100() -> FakeNvml:
    return _switched("NVIDIA H100 80GB HBM3", 85520809984, 18, 4)


def titan_box() -> FakeNvml:
    """NetSplit, table 6-2: a PIX pair and NODE paths."""
    return FakeNvml(
        name="TITAN RTX",
        memory_bytes=25396838400,
        topology=table("""
            X    PIX  NODE
            PIX  X    NODE
            NODE NODE X
        """),
    )
