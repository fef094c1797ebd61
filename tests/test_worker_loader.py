"""What a configuration asks for and one worker cannot give is refused before anything is read."""

import pytest

from app.engine_config import EngineConfig
from app.worker_loader import load_worker


def test_several_ranks_are_refused_before_the_checkpoint_is_looked_for():
    config = EngineConfig(model="./nowhere", tensor_parallel_size=2, expert_parallel=True)
    with pytest.raises(ValueError, match=r"^tensor_parallel_size is 2, .* has one rank: use 1, or serve it"):
        load_worker(config, progress=False)


def test_one_rank_goes_on_to_the_checkpoint():
    with pytest.raises(ValueError, match=r"^model \./nowhere is neither"):
        load_worker(EngineConfig(model="./nowhere"), progress=False)
