"""The main loss and the MTP losses."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.assets.tiny_deepseek_training.network import Network

MTP_WEIGHT = 0.3  # λ of the report, section 4.2
REUSE_WEIGHTS = (0.15, 0.1)  # the same module fed with its own output, once and twice, as drafting with k > 1 does
REUSE_SHARE = 4  # re-use is trained on one window in so many


@dataclass(frozen=True)
class Losses:
    total: Tensor
    main: Tensor
    mtp: list[Tensor]  # by draft step


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def losses(
    network: Network,
    windows: Tensor,  # [B, L + 1]
) -> Losses:
    """Draft step s reads token p + 1 at the rows p >= s, and its targets are the tokens p + 2.

    The rows of a re-used step attend to each other rather than to the first step's rows: their hidden states are
    close, and one attention mask serves for all.
    """
    inputs = windows[:, :-1]
    hidden = network.hidden(inputs)
    main = cross_entropy(network.lm_head(hidden), windows[:, 1:])
    total, by_step = main, []
    for step, weight in enumerate((MTP_WEIGHT, *REUSE_WEIGHTS)):
        if step == 1:
            hidden, inputs, windows = (x[: -(-len(windows) // REUSE_SHARE)] for x in (hidden, inputs, windows))
        hidden = network.draft(hidden[:, :-1], inputs[:, step + 1 :], first_position=step)
        loss = cross_entropy(network.lm_head(hidden), windows[:, step + 2 :])
        by_step.append(loss)
        total = total + weight * loss
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
        one = losses(network, batch)
        sums += torch.stack([one.main, *one.mtp])
    network.train()
    return (sums / len(batches)).tolist()
