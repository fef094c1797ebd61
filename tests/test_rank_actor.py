"""A rank on its way into its gang, without Ray."""

import pickle
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from app.config import AppConfig
from app.serve.rank_actor import RankActor, Rendezvous
from tests.helpers.gang_cluster import wait_for
from tests.helpers.rank_processes import leave_process_group

CONFIG = {"model": "some/model", "device": "cpu", "tensor_parallel_size": 2}
JOIN_LIMIT_S = 2.0


def test_a_rank_that_cannot_reach_the_others_says_over_which_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-cable")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    rank = RankActor(0, AppConfig(**CONFIG))
    rendezvous = rank.open_store()
    message = r"rank 0 of 2 at 127\.0\.0\.1 does not hear the others over no-such-cable and lo: .*no-such-cable"
    with pytest.raises(RuntimeError, match=message):
        rank.join(rendezvous, 1, 5)


def test_a_port_that_lets_nobody_in_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        rendezvous = Rendezvous("127.0.0.1", closed.getsockname()[1])
        with pytest.raises(RuntimeError, match=r"rank 1 of 2 at 127\.0\.0\.1 does not hear the others over lo: "):
            RankActor(1, AppConfig(**CONFIG)).join(rendezvous, 1, 1.0)


def load_apart(index: int, work: Path) -> None:
    """Two ranks meet, and the second takes longer to load than both had to meet."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
        rank = RankActor(index, AppConfig(**CONFIG))
        (work / f"started {index}").touch()
        wait_for(lambda: all((work / f"started {other}").exists() for other in range(2)))
        address = work / "rendezvous"
        if index == 0:
            (work / "new").write_bytes(pickle.dumps(rank.open_store()))
            (work / "new").rename(address)
        wait_for(address.exists)
        rank.join(pickle.loads(address.read_bytes()), 2, JOIN_LIMIT_S)
    if index == 1:
        time.sleep(2 * JOIN_LIMIT_S)
    ranks = torch.tensor([index + 1])
    dist.all_reduce(ranks)
    (work / f"sum {index}").write_text(str(int(ranks)))
    wait_for(lambda: all((work / f"sum {other}").exists() for other in range(2)))
    leave_process_group()
    threads = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in threads if "gloo" in name], "one that outlives the interpreter may abort the process"


def test_ranks_may_load_longer_apart_than_they_may_take_to_meet(tmp_path: Path) -> None:
    mp.spawn(load_apart, (tmp_path,), nprocs=2)
    assert [(tmp_path / f"sum {index}").read_text() for index in range(2)] == ["3", "3"]
