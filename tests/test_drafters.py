"""What a drafter must share with its target, what it needs of the pool, and how it is loaded."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from app.engine.plan import AdmittedSequence, ScheduledSequence, StepPlan
from app.engine.sampling_params import SamplingParams
from app.engine.sequence_state import SequenceState
from app.speculative.config import DraftModelConfig, MTPConfig, NgramConfig
from app.speculative.draft_model import check_same_vocabulary
from app.speculative.drafter_kv import DrafterKV
from app.speculative.loaded_proposer import LoadedProposer, TargetContext
from app.speculative.registry import load_proposer
from models import parallel
from models.loader import load_model
from models.tokenizer import load_tokenizer
from tests.helpers.paged_runner import PagedRunner

CPU = torch.device("cpu")


def make_tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    )


def test_vocabularies_are_compared_id_by_id():
    """E10: the first differing id is named, with what it is on both sides."""
    tokens = [f"t{i}" for i in range(20)]
    target = make_tokenizer(tokens)
    check_same_vocabulary(target, make_tokenizer(tokens))
    swapped = [*tokens[:5], "t9", *tokens[6:9], "t5", *tokens[10:]]
    with pytest.raises(ValueError, match="token 5 is 't9' to the draft model and 't5' to the target"):
        check_same_vocabulary(target, make_tokenizer(swapped))
    with pytest.raises(ValueError, match="token 20 is 'more' to the draft model and nothing to the target"):
        check_same_vocabulary(target, make_tokenizer([*tokens, "more"]))
    with pytest.raises(ValueError, match="token 18 is nothing to the draft model and 't18' to the target"):
        check_same_vocabulary(target, make_tokenizer(tokens[:18]))


def target_context(folder, max_model_len=128) -> TargetContext:
    model = load_model(folder, torch.float32, CPU, progress=False)
    return TargetContext(
        folder, model, model.config, load_tokenizer(folder), max_model_len, torch.float32, CPU, progress=False
    )


def test_a_draft_model_of_another_vocabulary_is_refused_before_its_weights_are_read(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint("llama")
    other = tmp_path / "draft"
    make_tokenizer(["<unk>", "a", "b"]).save_pretrained(other)
    (other / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"speculative_config\.model: token 0 is '<unk>'"):
        load_proposer(DraftModelConfig(method="draft_model", model=str(other)), target_context(folder))


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_the_first_warns_of_modules_that_are_used_again(rank, tiny_checkpoint, caplog):
    folder = tiny_checkpoint("deepseek_v3", num_nextn_predict_layers=1)
    with parallel.tensor_parallel_group(parallel.TensorParallelGroup(rank, 2)):
        load_proposer(MTPConfig(method="mtp", num_speculative_tokens=3), target_context(folder))
    assert ("3 drafts of 1 MTP module(s)" in caplog.text) == (rank == 0)


def load(config, target: TargetContext) -> LoadedProposer:
    loaded = load_proposer(config, target)
    assert loaded is not None
    return loaded


def test_a_loaded_proposer_says_what_kv_it_needs(tiny_checkpoint):
    target = target_context(tiny_checkpoint("llama"))
    drafter = DraftModelConfig(method="draft_model", model=str(tiny_checkpoint("llama", num_hidden_layers=1)))
    lookup, draft_model = load(NgramConfig(method="ngram"), target), load(drafter, target)
    assert (len(lookup.kv_specs), lookup.soft_drafts) == (0, False)
    assert (len(draft_model.kv_specs), draft_model.soft_drafts) == (1, True)
    assert load_proposer(None, target) is None


def test_a_drafter_runs_past_the_positions_that_its_checkpoint_states(tiny_checkpoint):
    """D10: 32 positions stated, 128 served; its logits are those of the same weights with 128 stated."""
    target, tokens = target_context(tiny_checkpoint("llama"), max_model_len=128), np.arange(3, 123).tolist()
    logits = []
    for num_positions in (32, 128):
        folder = tiny_checkpoint("llama3", max_position_embeddings=num_positions)
        drafter = load(DraftModelConfig(method="draft_model", model=str(folder)), target).drafter
        logits.append(PagedRunner(drafter, num_blocks=40, block_size=4).step({0: tokens})[0])
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()


def test_blocks_handed_out_anew_are_whole_no_longer():
    state = SequenceState(2, 32, block_size=4)
    kv = DrafterKV(state, num_blocks=8)

    def step(**fields) -> None:
        plan = StepPlan(0, **{"scheduled": [], **fields})
        state.apply(plan)
        kv.apply(plan)

    def admitted(num_cached: int, blocks: list[int], slot: int = 0) -> AdmittedSequence:
        return AdmittedSequence(slot, list(range(13)), 13, num_cached, blocks, SamplingParams(), 0, ())

    step(admitted=[admitted(0, [3, 5, 6, 7])])
    kv.extend(np.array([0]), np.array([9]))
    step(admitted=[admitted(12, [3, 5, 6, 2], slot=1)])
    assert kv.num_computed_tokens.tolist() == [9, 8]  # of block 6 only a token is there
    kv.extend(np.array([0]), np.array([4]))
    step(released_slots=[0, 1], admitted=[admitted(4, [3, 5, 1, 2])])  # block 5 for other tokens
    step(released_slots=[0], admitted=[admitted(8, [3, 5, 6, 2])])
    assert kv.num_computed_tokens[0] == 4
    step(released_slots=[0], admitted=[admitted(12, [3, 6, 1, 4])])
    assert kv.num_computed_tokens[0] == 4  # block 6 had been handed out as well
    kv.extend(np.array([0]), np.array([4]))
    step(scheduled=[ScheduledSequence(0, 1, 0, [3])])
    step(released_slots=[0], admitted=[admitted(12, [6, 3, 1, 7])])
    assert kv.num_computed_tokens[0] == 4  # block 6 was computed again, block 3 extended a sequence
    kv.reset()
    step(released_slots=[0], admitted=[admitted(12, [6, 5, 1, 7])])
    assert kv.num_computed_tokens[0] == 0
