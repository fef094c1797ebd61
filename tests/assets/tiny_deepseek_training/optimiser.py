"""Muon for the matrices, Adam for everything else."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.assets.tiny_deepseek_training.network import Network

MUON_LEARNING_RATE = 0.015
MOMENTUM = 0.95
WEIGHT_DECAY = 0.02
EMBEDDING_LEARNING_RATE = 6e-3
HEAD_LEARNING_RATE = 3e-3
VECTOR_LEARNING_RATE = 2e-3


def orthogonalised(
    update: Tensor,  # [N, rows, columns]
) -> Tensor:
    """Each matrix with its singular values brought near 1, by five Newton-Schulz steps (Jordan et al., Muon, 2024)."""
    x = update.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


class Optimiser:
    def __init__(self, network: Network):
        embedding, head = network.model.embed_tokens.weight, network.lm_head.weight
        rest = [parameter for parameter in network.parameters() if parameter is not embedding and parameter is not head]
        routers = {id(router.weight) for router in network.routers}
        vectors = [parameter for parameter in rest if parameter.dim() == 1 or id(parameter) in routers]
        matrices = [parameter for parameter in rest if parameter.dim() > 1 and id(parameter) not in routers]
        self._momenta: list[tuple[list[torch.nn.Parameter], Tensor]] = []
        for size in dict.fromkeys(parameter.shape[-2:] for parameter in matrices):
            same = [parameter for parameter in matrices if parameter.shape[-2:] == size]
            self._momenta.append((same, torch.zeros_like(_stacked(same))))
        self._adam = torch.optim.AdamW(
            [
                {"params": [embedding], "lr": EMBEDDING_LEARNING_RATE},
                {"params": [head], "lr": HEAD_LEARNING_RATE},
                {"params": vectors, "lr": VECTOR_LEARNING_RATE},
            ],
            betas=(0.9, 0.97),
            weight_decay=0.0,
            fused=True,
        )
        self._adam_rates = [group["lr"] for group in self._adam.param_groups]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with every learning rate times `scale`; gradients are cleared."""
        for group, rate in zip(self._adam.param_groups, self._adam_rates, strict=True):
            group["lr"] = rate * scale
        self._adam.step()
        for parameters, momentum in self._momenta:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            gradient = _stacked(gradients)
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalised(gradient.lerp(momentum, MOMENTUM))
            rows, columns = update.shape[-2:]
            rate = MUON_LEARNING_RATE * scale * max(1.0, rows / columns) ** 0.5
            counts = [parameter.numel() // (rows * columns) for parameter in parameters]
            for parameter, part in zip(parameters, update.split(counts), strict=True):
                parameter.mul_(1 - rate * WEIGHT_DECAY).sub_(part.view_as(parameter), alpha=rate)
        self._adam.zero_grad(set_to_none=True)
        for parameters, _ in self._momenta:
            for parameter in parameters:
                parameter.grad = None

    def state(self) -> dict[str, Any]:
        return {"adam": self._adam.state_dict(), "momenta": [momentum for _, momentum in self._momenta]}

    def load_state(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        for (_, momentum), saved in zip(self._momenta, state["momenta"], strict=True):
            momentum.copy_(saved)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Matrices and stacks of matrices of one size, as one stack [N, rows, columns]."""
    return torch.cat([tensor.reshape(-1, *tensor.shape[-2:]) for tensor in tensors])
