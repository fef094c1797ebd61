"""A rank on its way into its gang, without Ray."""

import pytest

from app.config import AppConfig
from app.serve.rank_actor import RankActor


def test_a_rank_that_cannot_reach_the_others_says_over_which_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-cable")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    rank = RankActor(0, AppConfig(model="some/model", device="cpu", tensor_parallel_size=2))
    rendezvous = rank.open_store()
    message = r"rank 0 of 2 at 127\.0\.0\.1 does not hear the others over no-such-cable and lo: .*no-such-cable"
    with pytest.raises(RuntimeError, match=message):
        rank.join(rendezvous, 1, 5, 5)
