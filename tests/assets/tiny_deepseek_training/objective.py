"""The main loss and the MTP losses."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.assets.tiny_deepseek_training.network import Network

MTP_WEIGHT = 0.3  # λ of the report, section 4.2
REUSE_WEIGHTS = (0.15, 0.1)  # the same module fed with its own output, once and twice, as drafting with k > 1 does
AGREEMENT_RATIO = 2.0  # each draft step's weight again, times this, on the distance to the target's own distribution
AGREEMENT_START = 660  # step: before it the target is too poor to agree with
REUSE_SHARE = 4  # re-use is trained, and not measured, on one window in so many


@dataclass(frozen=True)
class Losses:
    total: Tensor
    main: Tensor
    mtp: list[Tensor]  # by draft step


def cross_entropy(
    log_probs: Tensor,  # [B, L, V]
    targets: Tensor,  # [B, L], or distributions [B, L, V]
) -> Tensor:
    if targets.dim() == log_probs.dim():
        return -(targets * log_probs).sum(-1).mean()
    return F.nll_loss(log_probs.flatten(0, 1), targets.flatten())


def losses(
    network: Network,
    windows: Tensor,  # [B, L + 1]
    with_agreement: bool,
) -> Losses:
    """Draft step s reads token p + 1 at the rows p >= s, and its targets are the tokens p + 2.

    The rows of a re-used step attend to each other rather than to the first step's rows: their hidden states are
    close, and one attention mask serves for all. Agreement pulls a draft's distribution to that of the target, which
    acceptance compares it with; the target feels no pull.
    """
    inputs = windows[:, :-1]
    hidden = network.hidden(inputs)
    log_probs = network.lm_head(hidden).float().log_softmax(-1)
    main = cross_entropy(log_probs, windows[:, 1:])
    target = log_probs.detach().exp()
    total, by_step = main, []
    for step, weight in enumerate((MTP_WEIGHT, *REUSE_WEIGHTS)):
        if step == 1 and network.training:
            count = -(-len(windows) // REUSE_SHARE)
            hidden, inputs, windows, target = (x[:count] for x in (hidden, inputs, windows, target))
        hidden = network.draft(hidden[:, :-1], inputs[:, step + 1 :], first_position=step)
        log_probs = network.lm_head(hidden).float().log_softmax(-1)
        loss = cross_entropy(log_probs, windows[:, step + 2 :])
        by_step.append(loss)
        total = total + weight * loss
        if with_agreement:
            total = total + AGREEMENT_RATIO * weight * cross_entropy(log_probs, target[:, step + 1 :])
    return Losses(total, main, by_step)


@torch.no_grad()
def held_out_losses(
    network: Network,
    windows: Tensor,  # [N, L + 1]
) -> list[float]:
    """Main loss, then that of each draft step, in nats a token."""
    network.eval()
    sums = torch.zeros(2 + len(REUSE_WEIGHTS))
    batches = windows.split(8)
    for batch in batches:
        one = losses(network, batch, with_agreement=False)
        sums += torch.stack([one.main, *one.mtp])
    network.train()
    return (sums / len(batches)).tolist()
