"""Training by every integration under a plan, beside the same in one process."""

import importlib
import sys
from functools import cache
from typing import Any

import pytest

from tensoropt.errors import MissingExtraError
from tests.integrations.planned import KINDS, close, ran_by

OTHER_KINDS = [*KINDS[1:], "placed"]


def module(name: str) -> Any:
    if name == "sft":
        pytest.importorskip("trl", reason="the extra trl is not installed")
    return importlib.import_module(f"tests.integrations.{name}_jobs")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a job finds in this one process, without a plan; each is run once."""
    return cache(lambda name, what: getattr(module(name), what)(tmp_path_factory.mktemp(what), None))


def rows(table: dict[str, dict[str, list[str]]]) -> list[tuple[str, str, str]]:
    return [(n, what, kind) for n, jobs in table.items() for what, kinds in jobs.items() for kind in kinds]


@pytest.mark.parametrize(("name", "what"), [
    ("trainer", "briefly_trained"), ("trainer", "weighted"), ("lightning", "briefly_fitted"),
    ("accelerate", "briefly_trained"), ("accelerate", "sampled"), ("accelerate", "measured"),
])  # fmt: skip
def test_trains_as_one_process_does(name, what, ranks, alone, tmp_path):
    close(ran_by(module(name), what, tmp_path, "data", ranks), alone(name, what))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "what"),
    [*((name, "trained") for name in ("trainer", "sft", "accelerate")), ("lightning", "fitted")],
)
def test_trains_and_continues_as_one_process_does(name, what, kind, ranks, alone, tmp_path):
    """Losses, norms, rates and evaluations of about 50 steps, saved models, and a run from the middle
    again; of a loop with accelerate also an average of the parameters."""
    close(ran_by(module(name), what, tmp_path, kind, ranks), alone(name, what))


BOTH = ["data", "tensor"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "kind"),
    rows(
        {
            "trainer": {"lengthened": ["data", "pipeline"], "moved": BOTH, "tuned": BOTH, "streamed": BOTH},
            "sft": {"briefly_trained": ["data"], "packed": BOTH},
            "lightning": {"fitted_on_nodes": BOTH},
            "accelerate": {"sampled": KINDS[1:]},
        }
    ),
)
def test_other_data_and_places(name, what, kind, ranks, alone, tmp_path):
    """Texts that are padded or cut, data without a length, orders of all kinds, adapters, several nodes, and
    another plan from the middle on."""
    found = ran_by(module(name), what, tmp_path, kind, ranks)
    if "best" in found:
        assert found["best"] == pytest.approx(found["of"], rel=1e-5)
    close(found, alone(name, what))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "kind"),
    rows(
        {
            "trainer": {"measured": ["data", *OTHER_KINDS]},
            "lightning": {"measured": ["data", *OTHER_KINDS]},
            "accelerate": {"measured": OTHER_KINDS},
        }
    ),
)
def test_metrics_and_predictions(name, what, kind, ranks, alone, tmp_path):
    """By batches of another size, in the order of the data, with and without labels."""
    close(ran_by(module(name), what, tmp_path, kind, ranks), alone(name, what))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "what"), [
    *((name, "briefly_trained") for name in ("trainer", "sft", "accelerate")),
    ("lightning", "briefly_fitted"),
])  # fmt: skip
def test_trains_under_torchrun(name, what, alone, tmp_path):
    close(ran_by(module(name), what, tmp_path, "tensor", None), alone(name, what))


@pytest.mark.parametrize(("name", "package", "extra"), [
    ("transformers", "accelerate", "trainer"),
    ("lightning", "lightning", "lightning"),
    ("trl", "trl", "trl"),
])  # fmt: skip
def test_the_extra_is_named_where_it_is_missing(name, package, extra, monkeypatch):
    monkeypatch.delitem(sys.modules, f"tensoropt.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    with pytest.raises(
        MissingExtraError, match=rf"package {package}, which.*pip install 'tensoropt\[{extra}\]'"
    ):
        importlib.import_module(f"tensoropt.integrations.{name}")
