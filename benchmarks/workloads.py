"""The prompts and the six workloads that every benchmark runs; or three workloads on prompts that are given.

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
    kind: str  # open or copy; given

    @property
    def name(self) -> str:
        return f"{self.num_streams}-{self.kind}"

    @property
    def num_prompts(self) -> int:
        return max(self.num_streams, NUM_SINGLE_PROMPTS)


WORKLOADS = {w.name: w for w in (Workload(n, kind) for n in (1, 8, 32) for kind in ("open", "copy"))}
QUICK_WORKLOADS = ("1-open", "8-copy")
GIVEN_WORKLOADS = {w.name: w for w in (Workload(n, "given") for n in (1, 8, 32))}
QUICK_GIVEN_WORKLOADS = ("1-given", "8-given")
SHORTER = 4  # prompts that are too few come again, each time without a fourth of what is left


class PromptSet:
    """The prompts for a model of `vocab_size` tokens.

    Ids that a smaller vocabulary lacks are folded into it. With any other tokenizer than SmolLM2's the ids spell other
    texts: times stay meaningful, acceptance does not, and there are no references. For such a model
    prompts can be given.
    """

    def __init__(self, vocab_size: int = PROMPTS_VOCAB_SIZE, given: list[list[int]] | None = None) -> None:
        self.vocab_size = vocab_size
        self._data = json.loads(PROMPTS_FILE.read_text())
        if given is not None:
            self._data["given"] = _enough(given)

    def waves(self, workload: Workload) -> list[list[list[int]]]:
        """Prompts that run at once, wave after wave."""
        prompts = [self._fold(prompt) for prompt in self._data[workload.kind][: workload.num_prompts]]
        return [prompts[i : i + workload.num_streams] for i in range(0, len(prompts), workload.num_streams)]

    def references(self, workload: Workload) -> list[list[int]] | None:
        """Greedy fp32 continuations, in the order of the waves' prompts; None for another vocabulary."""
        if self.vocab_size != PROMPTS_VOCAB_SIZE or workload.kind == "given":
            return None
        return self._data["ref"][workload.kind][: workload.num_prompts]

    @property
    def long_prompts(self) -> list[list[int]]:
        """Prompts of 512 tokens, for the time to the first token."""
        return [self._fold(prompt) for prompt in self._data["long512"]]

    def _fold(self, prompt: list[int]) -> list[int]:
        return [token_id % self.vocab_size for token_id in prompt]


def _enough(prompts: list[list[int]]) -> list[list[int]]:
    """As many as the widest workload has streams."""
    needed, prompts = max(workload.num_prompts for workload in GIVEN_WORKLOADS.values()), list(prompts)
    for prompt in prompts:  # and those that are appended
        if len(prompts) >= needed:
            break
        prompts.append(prompt[: -max(len(prompt) // SHORTER, 1)] or prompt)
    return prompts


def read_prompts(path: Path, vocab_size: int) -> list[list[int]]:
    """`prompt_ids` of a JSON file: token ids, a list for each prompt.

    Raises ValueError for anything else, or ids that the model does not have.
    """
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))["prompt_ids"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--prompts is {path}, which holds no prompt_ids ({error!r}): give a JSON file with them"
        ) from None
    if not prompts or not all(prompt and max(prompt) < vocab_size for prompt in prompts):
        raise ValueError(
            f"--prompts is {path}: every prompt needs token ids, below the model's vocab_size, {vocab_size}"
        )
    return prompts


def select_workloads(names: list[str] | None, quick: bool, given: bool = False) -> list[Workload]:
    """Raises ValueError for a name that is not a workload's."""
    known, few = (GIVEN_WORKLOADS, QUICK_GIVEN_WORKLOADS) if given else (WORKLOADS, QUICK_WORKLOADS)
    chosen = names or (few if quick else known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"--workloads names {', '.join(unknown)}: choose from {', '.join(known)}")
    return [known[name] for name in chosen]


def matching_prefix(token_ids: list[int], reference: list[int]) -> int:
    """Tokens until the two part, or until the shorter one ends."""
    pairs = zip(token_ids, reference, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(token_ids), len(reference)))
