"""One choice of a request, from its arrival to its end."""

import enum
import hashlib
import secrets
import time
from collections.abc import Collection
from collections.abc import Sequence as Sequences

from app.engine.outputs import FinishReason, SpeculationStats
from app.engine.plan import AdmittedSequence, ScheduledSequence, TokenLogprobs
from app.engine.run_scanner import RunScanner, ending_token_ids
from app.engine.sampling_params import SamplingParams

MAX_UINT64 = 2**64 - 1


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """A prompt and one continuation of it, as the scheduler sees them.

    From `Scheduler.add` to the end `0 <= num_computed_tokens < num_tokens <= max_num_tokens` holds, and
    `block_ids` cover the computed tokens. A slot is held exactly while RUNNING, blocks only then. The
    `Scheduler` is the only writer; `block_ids`, `block_digests` and `num_published_blocks` are the
    `BlockManager`'s.

    Tokens are what results have told. What plans that are out will have made of them is known for a prompt's chunks;
    of steps that emit there is only a least and a most.
    """

    def __init__(
        self,
        *,
        request_id: str,
        index: int,
        prompt_token_ids: Sequences[int],
        sampling_params: SamplingParams,
        eos_token_ids: Collection[int],
        scanner: RunScanner,
        owner: int = 0,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.token_ids = list(prompt_token_ids)  # prompt, then output
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling_params = sampling_params
        self.seed = derive_seed(sampling_params.seed, index)
        self.stop_token_ids = tuple(sorted(ending_token_ids(sampling_params, eos_token_ids)))
        self.scanner = scanner
        self.owner = owner
        self.arrival_time = time.monotonic()  # seconds

        self.status = SequenceStatus.WAITING
        self.slot: int | None = None
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0  # to be computed by plans that are out, drafts aside
        self.num_due_steps = 0  # of those plans the ones that emit: one token at least
        self.num_due_drafts = 0  # and so many more, all together, at most
        self.num_cached_tokens: int | None = None  # found in the prefix cache at the first admission
        self.block_ids: list[int] = []
        self.num_sent_blocks = 0  # those of `block_ids` that the worker knows
        self.block_digests: list[bytes] = []  # of the full blocks of known tokens, as far as anyone asked
        self.num_published_blocks = 0  # those of `block_ids` that the prefix cache has seen

        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # until they are delivered
        if sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token follows nothing
        self.finish_reason: FinishReason | None = None
        self.stats = SpeculationStats()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def least_num_tokens(self) -> int:
        """Once the results that are due have come, if it goes on by then."""
        return len(self.token_ids) + self.num_due_steps

    @property
    def most_num_tokens(self) -> int:
        return len(self.token_ids) + self.num_due_steps + self.num_due_drafts

    @property
    def num_unplanned_tokens(self) -> int:
        """Tokens that the next plan can compute: known ones, or the last that the plans before it emit."""
        if self.num_due_steps:
            return 1
        return len(self.token_ids) - self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the token that it emitted last is still to be planned."""
        has_output = self.num_due_steps > 0 or len(self.token_ids) > self.num_prompt_tokens
        return has_output and self.num_unplanned_tokens == 1

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output together: the context, or less where the request's max_tokens ends it earlier."""
        return self.scanner.max_num_tokens

    @property
    def is_seeded(self) -> bool:
        return self.sampling_params.seed is not None

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def put_in_flight(self, scheduled: ScheduledSequence) -> None:
        """Takes its share of a plan that goes out into account."""
        emits = scheduled.num_new_tokens == self.num_unplanned_tokens
        self.num_in_flight_tokens += scheduled.num_new_tokens
        if emits:
            self.num_due_steps += 1
            self.num_due_drafts += scheduled.num_draft_tokens

    def take_from_flight(self, scheduled: ScheduledSequence) -> bool:
        """The same when its result has come, before anything is made of it; whether it was to emit."""
        emits = self.num_computed_tokens + scheduled.num_new_tokens == self.num_tokens
        self.num_in_flight_tokens -= scheduled.num_new_tokens
        if emits:
            self.num_due_steps -= 1
            self.num_due_drafts -= scheduled.num_draft_tokens
        return emits

    def admission(self) -> AdmittedSequence:
        """What the worker is told when the sequence takes its slot."""
        assert self.slot is not None
        return AdmittedSequence(
            slot=self.slot,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=list(self.block_ids),
            sampling_params=self.sampling_params,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            owner=self.owner,
        )

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """The whole prompt's, where asked, once."""
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        assert prompt_logprobs is None or len(prompt_logprobs) == self.num_prompt_tokens
        return prompt_logprobs

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}/{self.index}, {self.status.name}, {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} output tokens, {self.num_computed_tokens} computed, slot {self.slot})"
        )


def derive_seed(seed: int | None, index: int) -> int:
    """Seed of choice `index`, in uint64: fresh entropy without `seed`; else `seed` itself for the first choice."""
    if seed is None:
        return secrets.randbits(64)
    seed &= MAX_UINT64
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
