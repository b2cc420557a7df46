"""Settings of PyTorch that decide which kernels run: as they are, as keys name them, and on ranks."""

import pytest
import torch

from tensoropt.costs.compute import measurement_prefix
from tensoropt.ranks.kernel_settings import KernelSettings

OTHERS = KernelSettings(
    matmul="tf32", convolution="ieee", bf16_reduction=False, benchmark=True, cudnn_deterministic=True,
    deterministic=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def own():
    before = KernelSettings.now()
    yield
    before.apply()


def test_pytorchs_own_are_the_defaults():
    assert KernelSettings.now() == KernelSettings()
    assert KernelSettings().words == ""


@pytest.mark.parametrize(
    "settings",
    [OTHERS, KernelSettings(matmul="tf32"), KernelSettings(recurrent="ieee", fp16_reduction=False)],
)
def test_what_is_applied_is_found(settings):
    settings.apply()
    assert KernelSettings.now() == settings
    KernelSettings().apply()
    assert KernelSettings.now() == KernelSettings()


def test_a_level_of_pytorch_is_understood_and_stays_readable():
    torch.set_float32_matmul_precision("high")
    found = KernelSettings.now()
    assert found.matmul == "tf32"
    KernelSettings().apply()
    found.apply()
    assert torch.get_float32_matmul_precision() == "high"


def test_each_type_of_device_has_its_own():
    assert OTHERS.of("cpu") == KernelSettings(deterministic=True)
    assert OTHERS.of("cuda") == OTHERS
    assert OTHERS.of("cpu").words == "deterministic=True"


def test_measurements_under_other_settings_have_other_keys():
    for device in (None, "H100-80GB"):
        usual = measurement_prefix(2, 1, True, device)
        assert measurement_prefix(2, 1, True, device, KernelSettings()) == usual
        assert measurement_prefix(2, 1, True, device, OTHERS) != usual
    # What is of GPUs only does not part CPU ranks from what they have measured before.
    of_gpus = KernelSettings(benchmark=True)
    assert measurement_prefix(2, 1, True, None, of_gpus) == measurement_prefix(2, 1, True)


def settings_of_rank(rank, world_size):
    return KernelSettings.now()


def test_ranks_take_over_those_of_the_process_that_asks(ranks):
    assert ranks.run(settings_of_rank) == [KernelSettings()] * 2
    OTHERS.apply()
    assert ranks.run(settings_of_rank) == [OTHERS] * 2
    KernelSettings().apply()
    assert ranks.run(settings_of_rank) == [KernelSettings()] * 2
