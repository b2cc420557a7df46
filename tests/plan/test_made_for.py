"""What a plan says of the devices it was made for."""

from __future__ import annotations

from tensoropt.cluster import load_cluster
from tensoropt.plan.made_for import device_words, for_gpus, made_for


def test_it_is_the_cluster_that_was_saved():
    for name, gpus in (("dgx-h100[2]", True), ("local:2", False)):
        cluster = load_cluster(name)
        assert made_for(cluster.to_dict()) == cluster
        assert for_gpus(cluster.to_dict()) is gpus
    assert device_words(load_cluster("dgx-h100[2]")) == "2 x H100-80GB (cuda)"


def test_a_plan_may_not_say():
    assert made_for({}) is None
    assert not for_gpus({"name": "toy"})
