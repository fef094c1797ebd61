"""Greedy continuation and greedy speculation on held-out prompts, by full recomputation."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.assets.tiny_deepseek_training.network import Network


@dataclass(frozen=True)
class Continuation:
    prompt_ids: list[int]
    output_ids: list[int]
    smallest_margin: float  # between the best and the second logit, over the output: how far from a tie


@dataclass
class Acceptance:
    """Counts over verifications of k drafts each."""

    num_verifications: int
    accepted_at: list[int]  # verifications that accepted at least i + 1 drafts

    @property
    def rates(self) -> list[float]:
        return [count / self.num_verifications for count in self.accepted_at]

    @property
    def mean_length(self) -> float:
        """Tokens emitted a verification, the target's own one included."""
        return 1 + sum(self.rates)


@torch.no_grad()
def continue_greedily(
    network: Network,
    prompts: Tensor,  # [N, P]
    num_tokens: int,
) -> Iterator[Continuation]:
    """The end of a text does not stop a continuation: counts stay equal over prompts."""
    sequences = prompts
    margins = []
    for _ in range(num_tokens):
        logits = network.lm_head(network.hidden(sequences)[:, -1])
        best = logits.topk(2).values
        margins.append(best[:, 0] - best[:, 1])
        sequences = torch.cat((sequences, logits.argmax(-1, keepdim=True)), dim=1)
    smallest = torch.stack(margins).amin(0)
    for sequence, margin in zip(sequences.tolist(), smallest.tolist(), strict=True):
        yield Continuation(sequence[: prompts.shape[1]], sequence[prompts.shape[1] :], margin)


@torch.no_grad()
def draft(
    network: Network,
    hidden: Tensor,  # [p + 1, H]: the target's, of positions 0 .. p
    token_ids: list[int],  # 0 .. p + 1: the last one is known and not yet seen by the target
    k: int,
) -> list[int]:
    """k tokens after `token_ids` by the one module: each step's last row gives the hidden state of the next step."""
    rows = hidden
    next_ids = token_ids[1:]
    drafts: list[int] = []
    for _ in range(k):
        out = network.draft(rows.unsqueeze(0), torch.tensor([next_ids + drafts]), first_position=0)[0, -1]
        drafts.append(int(network.lm_head(out).argmax()))
        rows = torch.cat((rows, out.unsqueeze(0)))
    return drafts


@torch.no_grad()
def greedy_acceptance(network: Network, continuations: list[Continuation], k: int) -> Acceptance:
    """What speculation would accept while it emits exactly these continuations."""
    acceptance = Acceptance(0, [0] * k)
    for one in continuations:
        tokens = one.prompt_ids + one.output_ids
        hidden = network.hidden(torch.tensor([tokens]))[0]
        known = len(one.prompt_ids) + 1  # the prompt's own step emits the first token
        while known + k < len(tokens):
            drafts = draft(network, hidden[: known - 1], tokens[:known], k)
            truth = tokens[known : known + k]
            accepted = next((i for i in range(k) if drafts[i] != truth[i]), k)
            acceptance.num_verifications += 1
            for i in range(accepted):
                acceptance.accepted_at[i] += 1
            known += accepted + 1
    return acceptance


@torch.no_grad()
def forced_agreement(
    network: Network,
    windows: Tensor,  # [N, L]
) -> float:
    """How often the first draft is the target's greedy choice, along true text rather than along greedy output."""
    hits = []
    for window in windows.split(8):
        hidden = network.hidden(window)
        drafted = network.lm_head(network.draft(hidden[:, :-1], window[:, 1:], first_position=0)).argmax(-1)
        hits.append(drafted == network.lm_head(hidden[:, 1:]).argmax(-1))
    return torch.cat(hits).float().mean().item()
