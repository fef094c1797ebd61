"""The engine: requests in, tokens out, one speculative step at a time; also the offline interface."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from app.config_errors import describe
from app.engine.block_manager import BlockManager
from app.engine.output_collector import OutputCollector
from app.engine.outputs import GenerationRequest, RequestOutput, SequenceDelta
from app.engine.plan import StepPlan, StepTimings
from app.engine.progress_bar import ProgressBar
from app.engine.run_scanner import RunScanner
from app.engine.sampling_params import SamplingParams
from app.engine.scheduler import Scheduler
from app.engine.scheduler_limits import SchedulerLimits
from app.engine.sequence import Sequence
from app.engine_config import EngineConfig
from app.executor import Executor, LocalExecutor, PendingStep
from app.speculative.acceptance_watch import AcceptanceWatch
from app.speculative.draft_length import FixedDraftLength
from app.worker_loader import LoadedModel, load_worker

logger = logging.getLogger(__name__)

Prompt = str | list[int]


@dataclass
class EngineTotals:
    """What an engine has done since it started."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_drafter_faults: int = 0
    schedule_s: float = 0.0
    propose_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    update_s: float = 0.0

    def count_step(self, timings: StepTimings, schedule_s: float, update_s: float) -> None:
        self.num_steps += 1
        self.schedule_s += schedule_s
        self.propose_s += timings.propose_s
        self.forward_s += timings.forward_s
        self.verify_s += timings.verify_s
        self.commit_s += timings.commit_s
        self.update_s += update_s


class LLMEngine:
    """Schedules requests over one executor. Not thread-safe: one thread adds, steps and aborts.

    >>> engine = LLMEngine(EngineConfig(model="folder"))
    >>> engine.generate("Hello", SamplingParams(max_tokens=8))[0].outputs[0].text

    Raises ValueError for a configuration that cannot be honoured.
    """

    def __init__(self, config: EngineConfig | None = None, *, progress: bool = True, **fields: Any) -> None:
        if config is None or fields:
            config = _config({} if config is None else config.model_dump(exclude_unset=True), fields)
        self.config = config
        worker, self.loaded = load_worker(config, progress)
        self._start(LocalExecutor(worker), self.loaded)

    @classmethod
    def from_executor(cls, config: EngineConfig, executor: Executor, loaded: LoadedModel) -> "LLMEngine":
        """An engine over an executor that has been built already."""
        engine = cls.__new__(cls)
        engine.config, engine.loaded = config, loaded
        engine._start(executor, loaded)
        return engine

    def _start(self, executor: Executor, loaded: LoadedModel) -> None:
        speculative = self.config.speculative_config
        self.executor = executor
        self.tokenizer = loaded.tokenizer
        self.draft_length = FixedDraftLength(speculative.draft_limit if speculative else 0)
        self.block_manager = BlockManager(
            loaded.num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            num_lookahead_tokens=loaded.num_lookahead_tokens,
        )
        self.scheduler = Scheduler(
            SchedulerLimits(self.config.max_num_seqs, self.config.max_num_batched_tokens, loaded.max_model_len),
            self.block_manager,
            self.draft_length,
        )
        self.totals = EngineTotals()
        self._acceptance_watch = AcceptanceWatch()
        self._requests: dict[str, list[Sequence]] = {}
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._request_numbers = itertools.count()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def max_model_len(self) -> int:
        return self.loaded.max_model_len

    def add_request(self, request: GenerationRequest) -> None:
        """Queues a request's `n` sequences.

        Raises ValueError for a prompt that is empty, too long or out of the vocabulary, and for sampling
        parameters that the model cannot honour.
        """
        self._check(request)
        loaded, prompt, params = self.loaded, request.prompt_token_ids, request.sampling_params
        sequences = [
            Sequence(
                request_id=request.request_id,
                index=index,
                prompt_token_ids=prompt,
                sampling_params=params,
                eos_token_ids=loaded.eos_token_ids,
                scanner=RunScanner(loaded.tokenizer, params, loaded.eos_token_ids, prompt, loaded.max_model_len),
                owner=request.owner,
            )
            for index in range(request.n)
        ]
        for sequence in sequences:
            self.scheduler.add(sequence)
        self._requests[request.request_id] = sequences
        self.totals.num_prompt_tokens += len(prompt)

    def abort_request(self, request_id: str) -> bool:
        """Ends a request at once and frees its blocks; False where it has ended already."""
        sequences = self._requests.pop(request_id, [])
        for sequence in sequences:
            self.scheduler.abort(sequence)
        self.totals.num_aborted += bool(sequences)
        return bool(sequences)

    def step(self) -> list[SequenceDelta]:
        """One speculative step of everything that is scheduled; what it added to each sequence.

        Further plans are on their way, up to the executor's `max_in_flight`, before the oldest one's result is taken.
        """
        start = time.perf_counter()
        while len(self._in_flight) < self.executor.max_in_flight:
            plan = self.scheduler.schedule(self.executor.num_microbatches)
            if plan is None:
                break
            self._in_flight.append((plan, self.executor.submit(plan)))
        if not self._in_flight:
            return []
        scheduled = time.perf_counter()
        plan, pending_step = self._in_flight.popleft()
        result = pending_step()
        executed = time.perf_counter()
        deltas = self.scheduler.update(plan, result)
        for delta in deltas:
            self._account(delta)
        self._acceptance_watch.observe(self.scheduler.speculation_stats)
        self.totals.num_drafter_faults += result.drafter_fault is not None
        self.totals.count_step(result.timings, scheduled - start, time.perf_counter() - executed)
        return deltas

    def generate(
        self,
        prompts: Prompt | Sequences[Prompt],
        sampling_params: SamplingParams | Sequences[SamplingParams] | None = None,
        n: int = 1,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt (text or token ids); outputs in the order of the prompts."""
        requests = self._offline_requests(prompts, sampling_params, n)
        collectors = {request.request_id: OutputCollector(request) for request in requests}
        try:
            for request in requests:
                self.add_request(request)
            with ProgressBar(len(requests), enabled=use_tqdm) as progress:
                while any(not collector.finished for collector in collectors.values()):
                    deltas = self.step()
                    for delta in deltas:
                        collectors[delta.request_id].add(delta)
                    progress.advance(deltas, lambda request_id: collectors[request_id].finished)
        except BaseException:
            for request_id in collectors:
                self.abort_request(request_id)
            raise
        return [collector.output() for collector in collectors.values()]

    def stats(self) -> dict[str, float | int | list[int]]:
        """Totals, queue lengths, KV usage and speculation, flat: what a metrics page shows."""
        scheduler, speculation = self.scheduler, self.scheduler.speculation_stats
        return {
            **vars(self.totals),
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "num_waiting_tokens": scheduler.num_waiting_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "num_blocks": self.block_manager.num_blocks,
            "num_free_blocks": self.block_manager.num_free,
            "kv_usage": self.block_manager.usage,
            "num_prefix_hit_tokens": scheduler.num_prefix_hit_tokens,
            "num_prefix_queried_tokens": scheduler.num_prefix_queried_tokens,
            "num_speculative_tokens": self.draft_length.num_speculative_tokens,
            "num_drafted": speculation.num_drafted,
            "num_accepted": speculation.num_accepted,
            "num_verifications": speculation.num_steps,
            "accepted_per_position": list(speculation.accepted_per_position),
            "drafted_per_position": list(speculation.drafted_per_position),
            "acceptance_rate": speculation.acceptance_rate,
            "mean_acceptance_length": speculation.mean_acceptance_length,
            **{f"num_refused_{reason}": num for reason, num in scheduler.num_refused_drafts.items()},
            **self.executor.stats(),
        }

    def set_num_speculative_tokens(self, num: int) -> None:
        """Changes the drafts a sequence and step, at most, from the next step on; 0 turns drafting off.

        Raises ValueError above the number that the engine was built for.
        """
        speculative = self.config.speculative_config
        limit = speculative.draft_limit if speculative else 0
        if not 0 <= num <= limit:
            raise ValueError(f"num_speculative_tokens is {num}: use 0 to {limit}, the number of speculative_config")
        self.draft_length.num_speculative_tokens = num

    def shutdown(self) -> None:
        """Aborts what is open, drops the plans that are out and lets the executor go."""
        for request_id in list(self._requests):
            self.abort_request(request_id)
        self._in_flight.clear()
        self.executor.shutdown()

    def _account(self, delta: SequenceDelta) -> None:
        self.totals.num_generated_tokens += len(delta.token_ids)
        if not delta.finished:
            return
        self.totals.num_finished += 1
        self.totals.num_failed += delta.finish_reason == "error"
        sequences = self._requests.get(delta.request_id)
        if sequences is not None and all(sequence.is_finished for sequence in sequences):
            del self._requests[delta.request_id]

    def _check(self, request: GenerationRequest) -> None:
        prompt, loaded = request.prompt_token_ids, self.loaded
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is in use: choose another")
        if request.n < 1:
            raise ValueError(f"n is {request.n}: use 1 or more")
        if not prompt:
            raise ValueError("the prompt has no tokens: send at least one")
        if len(prompt) + 1 > loaded.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, and the model's context holds {loaded.max_model_len}, "
                "the answer included: shorten it"
            )
        if not 0 <= min(prompt) <= max(prompt) < loaded.vocab_size:
            raise ValueError(f"the prompt has token ids outside the model's vocabulary, 0 to {loaded.vocab_size - 1}")
        request.sampling_params.check_token_ids(loaded.vocab_size)

    def _offline_requests(
        self,
        prompts: Prompt | Sequences[Prompt],
        sampling_params: SamplingParams | Sequences[SamplingParams] | None,
        n: int,
    ) -> list[GenerationRequest]:
        token_ids = self._tokenized(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(token_ids)
        if len(sampling_params) != len(token_ids):
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {len(token_ids)} prompts: give one, or one each"
            )
        return [
            GenerationRequest(f"offline-{next(self._request_numbers)}", prompt, params, n)
            for prompt, params in zip(token_ids, sampling_params, strict=True)
        ]

    def _tokenized(self, prompts: Prompt | Sequences[Prompt]) -> list[list[int]]:
        """One prompt or several, text or token ids each."""
        if isinstance(prompts, str):
            return [self.tokenizer.encode(prompts)]
        if prompts and all(isinstance(item, int) for item in prompts):
            return [cast(list[int], list(prompts))]
        return [
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in cast(Sequences[Prompt], prompts)
        ]


def _config(fields: dict[str, Any], overrides: dict[str, Any]) -> EngineConfig:
    given = fields | overrides
    try:
        return EngineConfig(**given)
    except ValidationError as error:
        raise ValueError(describe(error, EngineConfig, given, "EngineConfig")) from error
