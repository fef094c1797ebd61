"""The processes of a replica beside its own: ranks, where there are several, and the draft actor."""

from app.config import AppConfig
from app.drafted_executor import DraftedExecutor
from app.engine.sequence_state import SequenceState
from app.executor import Executor, LocalExecutor
from app.serve.draft_actor import DraftActorClient, received_drafts
from app.serve.gang import boot
from app.worker_loader import LoadedModel, load_worker


def start_executor(config: AppConfig) -> tuple[Executor, LoadedModel]:
    """Starts and loads them; blocks until all are ready.

    The drafter comes first: its weights are on rank 0's device before that sizes the KV pool. Raises what a process
    raised; none is left then.
    """
    if not config.has_draft_actor:
        return boot(config)
    client = DraftActorClient(config)
    try:
        return _start_with_drafts(config, client)
    except BaseException:
        client.shutdown()
        raise


def _start_with_drafts(config: AppConfig, client: DraftActorClient) -> tuple[Executor, LoadedModel]:
    assert config.speculative_config is not None
    drafter = client.describe()
    executor: Executor
    if config.tensor_parallel_size > 1:
        executor, loaded = boot(config, drafter)
    else:
        worker, loaded = load_worker(config, True, remote=received_drafts(config, drafter))
        executor = LocalExecutor(worker)
    client.set_num_blocks(loaded.num_blocks)
    state = SequenceState(config.max_num_seqs, loaded.max_model_len, config.block_size)
    num_microbatches = config.speculative_config.num_microbatches
    return DraftedExecutor(executor, client, state, loaded.controller, num_microbatches), loaded
