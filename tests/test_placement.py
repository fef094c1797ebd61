"""Bundles of ranks: what each asks for, whether nodes can hold them, and in which order ranks take them."""

import pytest

from app.config import AppConfig
from app.main import build
from app.serve.host_interface import interface_of
from app.serve.placement import (
    check_placeable,
    draft_actor_options,
    first_rank_options,
    missing,
    order_of_ranks,
    rank_bundles,
    rank_options,
)

CPU, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}
LAPTOP = {"CPU": 2.0, "memory": 8e9, "node:10.0.0.1": 1.0, "object_store_memory": 4e9}
GPU_NODE = {"CPU": 64.0, "GPU": 8.0, "memory": 1e12}


def config(size: int, **deployment) -> AppConfig:
    return AppConfig(model="some/model", tensor_parallel_size=size, deployment_config=deployment)


def test_every_rank_has_a_bundle():
    assert rank_bundles(config(3), has_gpus=False) == [{"CPU": 1.0}] * 3
    options = {"num_cpus": 4, "num_gpus": 0.5, "memory": 1 << 30, "resources": {"fast_net": 1}}
    asked = config(2, ray_actor_options=options)
    assert (
        rank_bundles(asked, has_gpus=True) == [{"CPU": 4.0, "GPU": 0.5, "memory": float(1 << 30), "fast_net": 1.0}] * 2
    )
    assert rank_options(config(2), has_gpus=True) == {"num_cpus": 1, "num_gpus": 1}


def test_a_kind_of_accelerator_is_part_of_the_bundle():
    (bundle,) = rank_bundles(config(1, ray_actor_options={"accelerator_type": "H200"}), has_gpus=True)
    assert bundle == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H200": 0.001}


def test_bundles_that_are_given_are_taken():
    given = [{"CPU": 8, "GPU": 1}, {"CPU": 2, "GPU": 1}]
    assert rank_bundles(config(2, placement_group_bundles=given), has_gpus=True) == given


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        ({"placement_group_bundles": [CPU]}, "placement_group_bundles is 1 bundles long, and tensor_parallel_size 2"),
        ({"placement_group_bundles": [CPU, GPU]}, "GPUs for some ranks and none for others"),
        ({"placement_group_strategy": "ANYWHERE"}, "placement_group_strategy"),
    ],
)
def test_bundles_that_do_not_fit_the_ranks_are_refused(deployment, message):
    with pytest.raises(ValueError, match=message):
        config(2, **deployment)


def test_a_bundle_without_a_placement_group_is_refused():
    with pytest.raises(
        ValueError, match=r"placement_group_bundles is .*one rank without a draft actor has no placement"
    ):
        config(1, placement_group_bundles=[CPU])
    assert drafting(1, placement_group_bundles=[{"CPU": 2.0}]) is not None


@pytest.mark.parametrize(
    ("bundles", "options", "message"),
    [
        (
            [CPU, CPU],
            {"num_cpus": 2},
            r"bundles\[0\] is 1 CPU, and a rank asks for 2 CPU: raise the first, or lower ray_",
        ),
        ([{"CPU": 2.0}, CPU], {"num_cpus": 2}, r"bundles\[1\] is 1 CPU, and a rank asks for 2 CPU"),
        ([GPU, GPU], {"num_gpus": 2}, r"bundles\[0\] is 1 CPU, 1 GPU, and a rank asks for 1 CPU, 2 GPU"),
        ([CPU, CPU], {"resources": {"fast_net": 1}}, r"a rank asks for 1 CPU, 1 fast_net"),
    ],
)
def test_a_bundle_that_is_too_small_for_its_rank_is_refused(bundles, options, message):
    with pytest.raises(ValueError, match=message):
        rank_bundles(config(2, placement_group_bundles=bundles, ray_actor_options=options), has_gpus=True)


@pytest.mark.parametrize(
    ("bundles", "strategy", "nodes"),
    [
        ([CPU] * 2, "PACK", [LAPTOP]),
        ([CPU] * 2, "STRICT_PACK", [LAPTOP]),
        ([CPU] * 2, "STRICT_SPREAD", [LAPTOP, LAPTOP]),
        ([GPU] * 16, "PACK", [GPU_NODE, GPU_NODE, LAPTOP]),
        ([GPU] * 8, "STRICT_PACK", [LAPTOP, GPU_NODE]),
        ([CPU] * 4, "SPREAD", [LAPTOP, LAPTOP]),
        ([CPU, {"CPU": 4.0}], "PACK", [{"CPU": 4.0}, {"CPU": 1.0}]),
        ([CPU, {"CPU": 4.0}], "STRICT_SPREAD", [{"CPU": 4.0}, {"CPU": 1.0}]),
        ([CPU, GPU], "STRICT_SPREAD", [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 8.0}]),
    ],
)
def test_bundles_that_fit_lack_nothing(bundles, strategy, nodes):
    assert missing(bundles, strategy, nodes) == ""


@pytest.mark.parametrize(
    ("bundles", "strategy", "nodes", "words"),
    [
        ([CPU] * 3, "PACK", [LAPTOP], "3 bundles of 1 CPU are needed, and 1 node with 2 CPU, 8e+09 memory hold 2"),
        ([GPU], "PACK", [LAPTOP], "1 bundle of 1 CPU, 1 GPU is needed"),
        ([CPU] * 2, "STRICT_SPREAD", [LAPTOP], "each on a node of its own are needed, and 1 node"),
        ([GPU] * 16, "STRICT_PACK", [GPU_NODE, GPU_NODE], "1 bundle of 16 CPU, 16 GPU on one node is needed"),
        ([CPU], "PACK", [], "0 nodes with nothing hold 0"),
    ],
)
def test_what_is_missing_is_said(bundles, strategy, nodes, words):
    assert words in missing(bundles, strategy, nodes)
    with pytest.raises(ValueError, match=r"the cluster can not hold .*wait_for_nodes"):
        check_placeable(bundles, strategy, nodes)


def test_every_replica_needs_its_bundles():
    assert missing([CPU] * 2, "STRICT_SPREAD", [LAPTOP] * 2, num_replicas=2) == ""
    short = missing([CPU] * 2, "PACK", [LAPTOP] * 2, num_replicas=3)
    assert short.startswith("3 x 2 bundles of 1 CPU are needed, and 2 nodes with ")
    assert short.endswith("hold 4")
    check_placeable([CPU] * 2, "PACK", [LAPTOP] * 2, 2)
    with pytest.raises(
        ValueError, match=r"asks for 3 replicas, and the cluster can not hold them: 3 x 2 .*; lower num"
    ):
        check_placeable([CPU] * 2, "PACK", [LAPTOP] * 2, 3)


@pytest.mark.parametrize(
    ("deployment", "num"),
    [
        ({"num_replicas": 3}, 3),
        ({"autoscaling_config": {"min_replicas": 2}}, 2),
        ({"autoscaling_config": {"min_replicas": 0}}, 1),
    ],
)
def test_building_counts_the_replicas_that_there_are_to_be(monkeypatch, deployment, num):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0 * num}}])
    assert build(config(2, **deployment)) is not None
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0 * num - 1}}])
    with pytest.raises(ValueError, match="the cluster can not hold"):
        build(config(2, **deployment))
    assert build(config(2, wait_for_nodes=True, **deployment)) is not None


def test_ranks_begin_on_the_replicas_own_node_and_neighbours_share_one():
    assert order_of_ranks(["b", "a", "b", "c", "a"], first_node="a") == [1, 4, 0, 2, 3]
    assert order_of_ranks(["a", "a"], first_node="a") == [0, 1]


def test_an_address_is_found_on_its_interface():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"no network interface of this machine bears the address 203\.0\.113\.9"):
        interface_of("203.0.113.9")


def drafting(size: int, method: str = "draft_model", **deployment) -> AppConfig:
    speculative = {"method": method, "placement": "actor", **({"model": "a/b"} if method == "draft_model" else {})}
    fields = {"tensor_parallel_size": size, "speculative_config": speculative, "deployment_config": deployment}
    return AppConfig.model_validate({"model": "some/model", **fields})


def test_a_draft_actor_shares_the_bundle_and_the_gpu_of_rank_0():
    assert rank_bundles(drafting(2), has_gpus=True) == [{"CPU": 2.0, "GPU": 1.0}, GPU]
    assert draft_actor_options(drafting(2), has_gpus=True) == {"num_cpus": 1, "num_gpus": 0.1}
    assert first_rank_options(drafting(2), has_gpus=True) == {"num_cpus": 1, "num_gpus": 0.9}
    assert rank_bundles(drafting(1), has_gpus=False) == [{"CPU": 2.0}]
    shares = {"draft_actor_options": {"num_cpus": 3, "num_gpus": 0.25}}
    assert rank_bundles(drafting(1, **shares), has_gpus=True) == [{"CPU": 4.0, "GPU": 1.0}]
    assert first_rank_options(drafting(1, **shares), has_gpus=True)["num_gpus"] == 0.75


def test_lookups_need_no_gpu_and_no_core():
    assert draft_actor_options(drafting(2, "ngram"), has_gpus=True) == {"num_cpus": 0, "num_gpus": 0}
    assert first_rank_options(drafting(2, "ngram"), has_gpus=True) == rank_options(config(2), has_gpus=True)
    assert rank_bundles(drafting(2, "ngram"), has_gpus=True) == [GPU, GPU]


def test_a_draft_actor_without_room_is_refused():
    with pytest.raises(ValueError, match="rank 0 and its draft actor ask for 2 CPU"):
        rank_bundles(drafting(2, placement_group_bundles=[CPU, CPU]), has_gpus=False)
    shares = {"draft_actor_options": {"num_gpus": 0.5}, "ray_actor_options": {"num_gpus": 0.5}}
    with pytest.raises(ValueError, match=r"rank 0 has 0\.5 GPU to share"):
        first_rank_options(drafting(1, **shares), has_gpus=True)
