"""A scheduler over a scripted worker, and the target and drafters that it plays."""

from collections import defaultdict, deque
from collections.abc import Callable

from app.engine.block_manager import BlockManager
from app.engine.outputs import SequenceDelta
from app.engine.plan import StepPlan, StepResult
from app.engine.run_scanner import RunScanner
from app.engine.sampling_params import SamplingParams
from app.engine.scheduler import Scheduler
from app.engine.scheduler_limits import SchedulerLimits
from app.engine.sequence import Sequence
from tests.helpers.scripted_worker import ScriptedWorker

EOS = 0
VOCAB_SIZE = 50
MAX_TOKENS = 24


def next_token(history: list[int]) -> int:
    """The target: depends on the last three tokens and the length, and never says EOS."""
    return 1 + (sum(history[-3:]) * 31 + len(history) * 7) % (VOCAB_SIZE - 1)


def continuation(history: list[int], num: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(num):
        tokens.append(next_token(history + tokens))
    return tokens


def uneven_drafts(history: list[int], num: int) -> list[int]:
    """None, some or all of the drafts asked for, the first few of them right."""
    drafts = continuation(history, [num, num, 0, num // 2][len(history) % 4])
    num_right = len(history) * 5 % 7
    return drafts[:num_right] + [(token + 1) % VOCAB_SIZE for token in drafts[num_right:]]


def no_drafts(history: list[int], num: int) -> list[int]:
    return []


class ScriptedEngine:
    """A scheduler and a scripted worker in a loop; checks what must hold after every step."""

    def __init__(
        self,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        num_blocks: int = 200,
        block_size: int = 4,
        k: int = 0,
        caching: bool = True,
        target: Callable[[list[int]], int] = next_token,
        draft: Callable[[list[int], int], list[int]] = continuation,
        max_in_flight: int = 1,
        num_microbatches: int | None = None,
    ) -> None:
        self.k = k
        self.max_in_flight = max_in_flight
        self.num_microbatches = num_microbatches
        self.in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self.block_manager = BlockManager(num_blocks, block_size, caching)
        limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_model_len)
        self.scheduler = Scheduler(limits, self.block_manager, lambda sequence: self.k)
        self.worker = ScriptedWorker(max_num_seqs, max_model_len, block_size, target, draft, max_num_batched_tokens)
        self.sequences: list[Sequence] = []
        self.plans: list[StepPlan] = []
        self.deltas: dict[Sequence, list[SequenceDelta]] = defaultdict(list)

    def add(self, prompt: list[int], index: int = 0, **params) -> Sequence:
        sampling_params = SamplingParams(**{"max_tokens": MAX_TOKENS, **params})
        max_model_len = self.scheduler.limits.max_model_len
        sequence = Sequence(
            request_id=str(len(self.sequences)),
            index=index,
            prompt_token_ids=prompt,
            sampling_params=sampling_params,
            eos_token_ids=(EOS,),
            scanner=RunScanner(None, sampling_params, (EOS,), prompt, max_model_len),
        )
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.num_microbatches)
        if plan is not None:
            self.plans.append(plan)
            by_slot = {s.slot: s for s in self.sequences if s.slot is not None}
            self.in_flight.append((plan, [by_slot[scheduled.slot] for scheduled in plan.scheduled]))
            self.check()
        return plan

    def fill(self) -> None:
        """Plans until `max_in_flight` plans are out, or nothing is to be added."""
        while len(self.in_flight) < self.max_in_flight and self.plan() is not None:
            pass

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        assert self.in_flight.popleft()[0] is plan
        deltas = self.scheduler.update(plan, result)
        for delta in deltas:
            self.deltas[self.sequences[int(delta.request_id)]].append(delta)
        self.check()
        return deltas

    def take(self) -> list[SequenceDelta]:
        """Carries out the oldest plan, if any is out."""
        if not self.in_flight:
            return []
        plan, _ = self.in_flight[0]
        return self.update(plan, self.worker.step(plan))

    def step(self) -> list[SequenceDelta]:
        self.fill()
        return self.take()

    def run(self, max_steps: int = 5000) -> None:
        """To the end; the worker's slots are all free or about to be."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            progress = [(s.num_computed_tokens, s.status) for s in self.sequences]
            self.fill()
            assert self.in_flight, "nothing is planned, and nothing is due"
            is_stale = all(s.is_finished for s in self.in_flight[0][1])
            preempted = self.scheduler.num_preemptions
            self.take()
            assert (
                is_stale
                or preempted != self.scheduler.num_preemptions
                or progress != [(s.num_computed_tokens, s.status) for s in self.sequences]
            ), "a step without progress"
        assert not self.scheduler.has_work
        assert not self.in_flight
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert self.block_manager.num_free == self.block_manager.num_blocks

    def check(self) -> None:
        manager = self.block_manager
        assert manager.num_free + manager.num_used == manager.num_blocks
        assert manager.num_used == len({block for s in self.sequences for block in s.block_ids})
        for sequence in self.sequences:
            assert (sequence.slot is not None) == (sequence.status.name == "RUNNING")
            if not sequence.is_finished:
                assert 0 <= sequence.num_computed_tokens < sequence.num_tokens <= sequence.max_num_tokens
                self._check_in_flight(sequence)
            else:
                assert sequence.block_ids == []
        arrivals = [s.status.name for s in self.sequences if not s.is_finished]
        assert arrivals == sorted(arrivals), "RUNNING before WAITING: first come, first served"

    def _check_in_flight(self, sequence: Sequence) -> None:
        """What is counted is what is out, and has its blocks and its context if all of it is accepted."""
        shares = [
            scheduled
            for plan, sequences in self.in_flight
            for scheduled, own in zip(plan.scheduled, sequences, strict=True)
            if own is sequence
        ]
        assert sequence.num_in_flight_tokens == sum(scheduled.num_new_tokens for scheduled in shares)
        assert sequence.num_due_drafts == sum(scheduled.num_draft_tokens for scheduled in shares)
        assert sequence.num_due_steps <= len(shares)
        assert sequence.num_unplanned_tokens >= 1
        assert sequence.most_num_tokens <= self.scheduler.limits.max_model_len
        if shares:
            assert sequence.most_num_tokens - 1 <= len(sequence.block_ids) * self.block_manager.block_size

    def output(self, sequence: Sequence) -> list[int]:
        """The ids that were delivered."""
        return [token_id for delta in self.deltas[sequence] for token_id in delta.token_ids]
