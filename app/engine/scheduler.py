"""Order of work: which sequences compute how many tokens in the next step, and what its result means for them."""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable

from app.engine.block_manager import BlockManager
from app.engine.outputs import SequenceDelta, SpeculationStats
from app.engine.plan import ScheduledSequence, SequenceResult, StepPlan, StepResult
from app.engine.scheduler_limits import SchedulerLimits
from app.engine.sequence import Sequence, SequenceStatus

NO_TOKEN_ERROR = "the step returned no token for this sequence"


class Scheduler:
    """Continuous batching under a token budget, first come first served.

    Any number of plans may be out, carried out in their order, and results come back in that order; `add` and
    `abort` may come at any time. Every running sequence gets at least one row of every step, and the oldest always
    its blocks: where the pool is short, the one admitted last gives way, keeps its tokens and goes back to the front
    of the queue, to be computed again. So the oldest advances in every step and nobody waits for ever.

    Behind a plan that will emit tokens a sequence is planned as one more token and drafts, with blocks and context
    for all that may have been accepted by then; the worker, which knows its tokens, starts where they end. One that
    is certain to end is left out, and nobody gives way before all results are in. One that turns out to have ended
    is computed once too often: its tokens are dropped, and the blocks that the plan still writes to are free at
    once, since whoever gets them writes to them in a later plan. What the prefix cache knows of them lies before the
    first token that the plan computes.

    Microbatches take turns: a sequence is in one plan at a time, so that its tokens are known when it is planned again.

    `num_draft_tokens` says how many drafts a sequence shall have; the scheduler only ever grants fewer.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        block_manager: BlockManager,
        num_draft_tokens: Callable[[Sequence], int],
    ) -> None:
        self.limits = limits
        self.block_manager = block_manager
        self._num_draft_tokens = num_draft_tokens
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._free_slots = list(range(limits.max_num_seqs))  # a heap: low slots first
        self._released_slots: list[int] = []  # given up since the last plan; the next one says so first
        self._finished_slots: list[int] = []  # those of them whose sequences have ended
        self._step_ids = itertools.count()
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()

        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self.num_prefix_queried_tokens = 0
        self.speculation_stats = SpeculationStats()  # of all sequences so far
        self.num_refused_drafts = dict.fromkeys(("request", "budget", "context", "kv"), 0)  # by what came first

    @property
    def has_work(self) -> bool:
        """Something to plan, or results that are due."""
        return bool(self._running or self._waiting or self._in_flight)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens of the sequences in the queue."""
        return sum(sequence.num_tokens for sequence in self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises ValueError for a prompt that leaves no room for one token in the context or in the KV pool.
        """
        assert sequence.status is SequenceStatus.WAITING
        num_needed, pool = sequence.num_prompt_tokens + 1, self.block_manager.num_tokens
        if num_needed < 2:
            raise ValueError("the prompt has no tokens: send at least one")
        for name, num_held in (("context", self.limits.max_model_len), ("KV pool", pool)):
            if num_needed > num_held:
                raise ValueError(
                    f"the prompt has {sequence.num_prompt_tokens} tokens and needs room for one more, "
                    f"but the {name} holds {num_held} tokens: shorten the prompt"
                )
        # A pool smaller than the context ends runs at its edge, as the context would.
        sequence.scanner.max_num_tokens = min(sequence.max_num_tokens, self.limits.max_model_len, pool)
        self._waiting[sequence] = None

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence, frees its blocks at once and its slot in the next plan; it gets no delta any more."""
        if not sequence.is_finished:
            self._end(sequence)
            sequence.finish_reason = "abort"

    def schedule(self, num_microbatches: int | None = None) -> StepPlan | None:
        """The next step; None without work, and where the results that are due must come first."""
        if num_microbatches is not None and len(self._in_flight) >= num_microbatches:
            return None
        running = self._grow_running(num_microbatches)
        if running is None:
            return None
        may_admit = bool(self._waiting and self._free_slots)
        decoding = [s for s in running if s.is_decoding]
        prefilling = [s for s in running if not s.is_decoding]
        batch: list[ScheduledSequence] = []
        spare_rows = self.limits.max_num_batched_tokens - len(running)  # beside one row for each
        draft_rows = spare_rows - may_admit  # drafts leave room for the next prompt to come in
        for index, sequence in enumerate(decoding):
            share = -(-draft_rows // (len(decoding) - index))
            batch.append(self._schedule(sequence, 1 + share))
            spare_rows -= batch[-1].num_draft_tokens
            draft_rows -= batch[-1].num_draft_tokens
        for sequence in prefilling:
            batch.append(self._schedule_prompt(sequence, 1 + spare_rows))
            spare_rows -= batch[-1].num_new_tokens - 1
        admitted = self._admit(batch, spare_rows) if may_admit else []
        if not batch:
            return None

        admissions = [sequence.admission() for sequence in admitted]
        plan = StepPlan(next(self._step_ids), batch, admissions, self._released_slots, self._finished_slots)
        self._released_slots, self._finished_slots = [], []
        self._in_flight.append((plan, decoding + prefilling + admitted))
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        """Takes the result of the oldest plan; what it added to the sequences that emitted or ended."""
        assert self._in_flight, "no plan is out"
        expected, sequences = self._in_flight.popleft()
        assert plan is expected, "the result of an older plan is due"
        assert result.step_id == plan.step_id
        self.block_manager.withdraw(result.blind_block_ids)
        deltas = []
        for sequence, scheduled, outcome in zip(sequences, plan.scheduled, result.sequences, strict=True):
            assert outcome.slot == scheduled.slot
            if not sequence.is_finished:  # by an abort, or a result that came when the plan was out
                delta = self._advance(sequence, scheduled, outcome)
                if delta is not None:
                    deltas.append(delta)
        return deltas

    def _step_tokens(self, sequence: Sequence, num_rows: int) -> tuple[int, int]:
        """How many known tokens and drafts a sequence may hold in a step that gives it so many rows.

        The one place that decides it, for waiting, running and resumed sequences. Drafts stand only behind
        the last known token, and one more token, the target's, always has room behind them.
        """
        num_known = sequence.num_unplanned_tokens
        if not sequence.is_decoding:
            return min(num_rows, num_known), 0
        num_drafts = self._num_draft_tokens(sequence)
        num_asked = sequence.sampling_params.num_speculative_tokens
        num_left_by_length = sequence.max_num_tokens - sequence.least_num_tokens - 1
        num_left_by_context = self.limits.max_model_len - sequence.most_num_tokens - 1
        for reason, limit in (
            ("request", num_drafts if num_asked is None else num_asked),
            ("budget", num_rows - num_known),
            ("context", min(num_left_by_length, num_left_by_context)),
            ("kv", self.block_manager.room(sequence) - sequence.most_num_tokens),
        ):
            num_granted = min(num_drafts, max(limit, 0))
            self.num_refused_drafts[reason] += num_drafts - num_granted
            num_drafts = num_granted
        return num_known, num_drafts

    def _schedule(self, sequence: Sequence, num_rows: int) -> ScheduledSequence:
        num_new_tokens, num_drafts = self._step_tokens(sequence, num_rows)
        assert num_new_tokens >= 1
        assert sequence.slot is not None
        if num_drafts:
            has_blocks = self.block_manager.append(sequence, sequence.most_num_tokens + num_drafts)
            assert has_blocks
        new_block_ids = sequence.block_ids[sequence.num_sent_blocks :]
        sequence.num_sent_blocks = len(sequence.block_ids)
        scheduled = ScheduledSequence(sequence.slot, num_new_tokens, num_drafts, new_block_ids)
        sequence.put_in_flight(scheduled)
        return scheduled

    def _schedule_prompt(self, sequence: Sequence, num_rows: int) -> ScheduledSequence:
        """Without drafts: they would take rows from other prompts, and their drafter's time from the first token."""
        return self._schedule(sequence, min(num_rows, sequence.num_unplanned_tokens))

    def _grow_running(self, num_microbatches: int | None) -> list[Sequence] | None:
        """Running sequences to plan for, with blocks for all tokens they may have by then.

        From the oldest on; the youngest give way. While results are due nobody does, and None says that they must
        come first: to leave out who lacks a block would cut the batch into parts that take turns.
        """
        for sequence in self._plannable(num_microbatches):
            while sequence in self._running and not self.block_manager.append(sequence, sequence.most_num_tokens):
                if self._in_flight:
                    return None
                self._preempt(next(reversed(self._running)))
        return self._plannable(num_microbatches)

    def _plannable(self, num_microbatches: int | None) -> list[Sequence]:
        """Running sequences that the results due can not end for their length, nor bring to the context's edge."""
        if num_microbatches is not None:
            idle = [sequence for sequence in self._running if not sequence.num_in_flight_tokens]
            return idle[: -(-len(self._running) // num_microbatches)]
        return [
            sequence
            for sequence in self._running
            if sequence.least_num_tokens < sequence.max_num_tokens
            and sequence.most_num_tokens < self.limits.max_model_len
        ]

    def _preempt(self, sequence: Sequence) -> None:
        assert not self._in_flight, "its tokens are not known"
        del self._running[sequence]
        self._give_up_slot(sequence)
        sequence.status = SequenceStatus.WAITING
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = [None]  # they are computed again
        self._waiting[sequence] = None
        self._waiting.move_to_end(sequence, last=False)
        self.num_preemptions += 1

    def _admit(self, batch: list[ScheduledSequence], spare_rows: int) -> list[Sequence]:
        """Takes sequences from the queue while rows, slots and blocks last, and appends their shares to `batch`."""
        admitted = []
        while self._waiting and self._free_slots and spare_rows > 0:
            sequence = next(iter(self._waiting))
            if not self.block_manager.allocate(sequence):
                break
            del self._waiting[sequence]
            self._running[sequence] = None
            sequence.status = SequenceStatus.RUNNING
            sequence.slot = heapq.heappop(self._free_slots)
            sequence.num_sent_blocks = len(sequence.block_ids)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
                self.num_prefix_hit_tokens += sequence.num_computed_tokens
                self.num_prefix_queried_tokens += sequence.num_tokens
            batch.append(self._schedule_prompt(sequence, spare_rows))
            spare_rows -= batch[-1].num_new_tokens
            admitted.append(sequence)
        return admitted

    def _advance(
        self, sequence: Sequence, scheduled: ScheduledSequence, outcome: SequenceResult
    ) -> SequenceDelta | None:
        """Moves a sequence past a step; its delta, where the step emitted tokens or ended it."""
        num_known = sequence.num_tokens
        unfinished_prompt = not sequence.take_from_flight(scheduled)
        if outcome.error is not None or not (outcome.token_ids or unfinished_prompt):
            return self._fail(sequence, outcome.error or NO_TOKEN_ERROR)
        if sequence.prompt_logprobs is not None and outcome.prompt_logprobs:
            sequence.prompt_logprobs.extend(outcome.prompt_logprobs)
        if unfinished_prompt:
            assert not outcome.token_ids, "a token came before the prompt was computed"
            sequence.num_computed_tokens += scheduled.num_new_tokens
            self.block_manager.register_computed(sequence)
            return None

        run = sequence.scanner.scan(outcome.token_ids, outcome.logprobs)
        num_kept = len(run.token_ids)
        sequence.token_ids.extend(run.token_ids)
        # The last emitted token has not been an input yet; what was cut off is nobody's.
        sequence.num_computed_tokens = num_known + min(num_kept, len(outcome.token_ids) - 1)
        self.block_manager.register_computed(sequence)
        # Of drafts planned behind results that were due some may lie behind the end: they were never to be kept.
        num_drafted = min(outcome.num_drafted, sequence.max_num_tokens - num_known - 1)
        for stats in (sequence.stats, self.speculation_stats):
            stats.count(num_drafted, min(outcome.num_accepted, num_kept, num_drafted))
        delta = SequenceDelta(
            sequence.request_id,
            sequence.index,
            run.text,
            run.token_ids,
            run.logprobs,
            prompt_logprobs=sequence.take_prompt_logprobs(),
        )
        if sequence.num_output_tokens == num_kept:
            assert sequence.num_cached_tokens is not None
            delta.num_cached_tokens = sequence.num_cached_tokens
        if run.finish_reason is not None:
            self._end(sequence)
            sequence.finish_reason = delta.finish_reason = run.finish_reason
            delta.stop_reason, delta.stats = run.stop_reason, sequence.stats
        return delta

    def _fail(self, sequence: Sequence, error: str) -> SequenceDelta:
        self._end(sequence)
        sequence.finish_reason = "error"
        return SequenceDelta(
            sequence.request_id,
            sequence.index,
            sequence.scanner.flush(),
            finish_reason="error",
            error=error,
            stats=sequence.stats,
        )

    def _end(self, sequence: Sequence) -> None:
        """Takes a sequence out of its queue, with all that it holds."""
        if sequence.status is SequenceStatus.WAITING:
            del self._waiting[sequence]
        else:
            del self._running[sequence]
            assert sequence.slot is not None
            self._finished_slots.append(sequence.slot)
            self._give_up_slot(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _give_up_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.block_manager.free(sequence)
        self._released_slots.append(sequence.slot)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = None
