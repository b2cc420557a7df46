"""torchtitan on CPUs, for which it has no device: importing this module before its others gives it one."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from unittest import mock

import torchtitan.tools.utils as devices

CPU = SimpleNamespace(
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    synchronize=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device: {},
)
"""What torchtitan asks of a device."""
devices.device_type, devices.device_module = "cpu", CPU
if importlib.util.find_spec("triton") is None:  # of kernels for experts, which are not run here
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()

# isort: split
import torchtitan.distributed.utils as job  # noqa: E402

job.set_pg_timeouts = lambda **_: None  # its barrier names a GPU, which gloo refuses
