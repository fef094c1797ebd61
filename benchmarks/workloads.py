"""The prompts and the six workloads that every benchmark runs.

`prompts.json` holds token ids of SmolLM2-135M-Instruct's tokenizer, so that every engine gets the same input:
32 `open` chat prompts of 56 to 72 tokens that ask for long essays and stories; 32 `copy` prompts that ask for a
passage word for word, where lookup has everything to find; 8 `long512` prompts of exactly 512 tokens; `eos`; and
`ref`, the greedy continuations of the open and copy prompts by transformers in fp32, up to 128 tokens, without EOS.
"""

import json
from dataclasses import dataclass
from pathlib import Path

PROMPTS_FILE = Path(__file__).with_name("prompts.json")
PROMPTS_VOCAB_SIZE = 49152
NUM_NEW_TOKENS = 128
NUM_SINGLE_PROMPTS = 4  # a single stream is measured on so many prompts, one after another


@dataclass(frozen=True)
class Workload:
    """So many streams at once, over prompts of one kind."""

    num_streams: int
    kind: str  # open or copy

    @property
    def name(self) -> str:
        return f"{self.num_streams}-{self.kind}"

    @property
    def num_prompts(self) -> int:
        return max(self.num_streams, NUM_SINGLE_PROMPTS)


WORKLOADS = {w.name: w for w in (Workload(n, kind) for n in (1, 8, 32) for kind in ("open", "copy"))}
QUICK_WORKLOADS = ("1-open", "8-copy")


class PromptSet:
    """The prompts for a model of `vocab_size` tokens.

    Ids that a smaller vocabulary lacks are folded into it. With any other tokenizer than SmolLM2's the ids spell other
    texts: times stay meaningful, acceptance does not, and there are no references.
    """

    def __init__(self, vocab_size: int = PROMPTS_VOCAB_SIZE) -> None:
        self.vocab_size = vocab_size
        self._data = json.loads(PROMPTS_FILE.read_text())

    def waves(self, workload: Workload) -> list[list[list[int]]]:
        """Prompts that run at once, wave after wave."""
        prompts = [self._fold(prompt) for prompt in self._data[workload.kind][: workload.num_prompts]]
        return [prompts[i : i + workload.num_streams] for i in range(0, len(prompts), workload.num_streams)]

    def references(self, workload: Workload) -> list[list[int]] | None:
        """Greedy fp32 continuations, in the order of the waves' prompts; None for another vocabulary."""
        if self.vocab_size != PROMPTS_VOCAB_SIZE:
            return None
        return self._data["ref"][workload.kind][: workload.num_prompts]

    @property
    def long_prompts(self) -> list[list[int]]:
        """Prompts of 512 tokens, for the time to the first token."""
        return [self._fold(prompt) for prompt in self._data["long512"]]

    def _fold(self, prompt: list[int]) -> list[int]:
        return [token_id % self.vocab_size for token_id in prompt]


def select_workloads(names: list[str] | None, quick: bool) -> list[Workload]:
    """Raises ValueError for a name that is not a workload's."""
    chosen = names or (QUICK_WORKLOADS if quick else WORKLOADS)
    unknown = [name for name in chosen if name not in WORKLOADS]
    if unknown:
        raise ValueError(f"--workloads names {', '.join(unknown)}: choose from {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in chosen]


def matching_prefix(token_ids: list[int], reference: list[int]) -> int:
    """Tokens until the two part, or until the shorter one ends."""
    pairs = zip(token_ids, reference, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(token_ids), len(reference)))
