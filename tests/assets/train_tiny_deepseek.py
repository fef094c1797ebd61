"""Train the tiny DeepSeek-V3 that ships with the repository, and measure what its MTP module accepts.

    python -m tests.assets.train_tiny_deepseek --steps 2020 --threads 1

A run of given steps and threads repeats itself on the same machine with the same versions of Python and torch.
`--minutes` chooses the steps by the clock; the count that it chose is in the folder's README, so that `--steps` can
repeat that run. A run that was stopped goes on from its `--state` file.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from tests.assets.tiny_deepseek_training.checkpoint import read_network, write_checkpoint
from tests.assets.tiny_deepseek_training.corpus import BEGIN, encode, read_corpus, token_id, train_tokenizer
from tests.assets.tiny_deepseek_training.network import Network
from tests.assets.tiny_deepseek_training.objective import AGREEMENT_START, losses
from tests.assets.tiny_deepseek_training.optimiser import Optimiser
from tests.assets.tiny_deepseek_training.report import write_report
from tests.assets.tiny_deepseek_training.shape import Shape

FOLDER = Path(__file__).parent / "tiny-deepseek-v3"
SEED = 20241227
TOKENS_PER_STEP = 1024
WINDOW = 256  # tokens; the last part of the run sees whole contexts
DECAY_SHARE = 0.3  # of the steps, at the end: learning rates fall to zero
WARMUP_STEPS = 40
BALANCE_RATE = 3e-3
SAVE_EVERY_S = 240.0


@dataclass
class Schedule:
    """Constant learning rate, then a linear fall. `num_steps` is known from the start or found out by the clock."""

    num_steps: int | None
    minutes: float | None
    started: float

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.minutes is None):
            raise ValueError("give either --steps or --minutes")

    @property
    def decay_start(self) -> int | None:
        return None if self.num_steps is None else round(self.num_steps * (1 - DECAY_SHARE))

    def observe(self, step: int) -> None:
        """By the clock: the fall begins when its share of the minutes, long windows being dearer, is left."""
        if self.num_steps is None and self.minutes is not None:
            elapsed_minutes = (time.monotonic() - self.started) / 60
            if elapsed_minutes >= self.minutes * (1 - 1.4 * DECAY_SHARE):
                self.num_steps = max(1, round(step / (1 - DECAY_SHARE)))

    def is_over(self, step: int) -> bool:
        return self.num_steps is not None and step >= self.num_steps

    def is_decaying(self, step: int) -> bool:
        return self.decay_start is not None and step >= self.decay_start

    def scale(self, step: int) -> float:
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        if self.num_steps is None or self.decay_start is None or step < self.decay_start:
            return warm
        return warm * (self.num_steps - step) / (self.num_steps - self.decay_start)

    def steps(self, first: int) -> Iterator[int]:
        step = first
        while not self.is_over(step):
            yield step
            step += 1
            self.observe(step)


def windows_of(
    stream: torch.Tensor,  # [tokens]
    count: int,
    length: int,
    begin: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Windows [count, length + 1] from anywhere, each under the mark of a beginning, as a prompt is."""
    starts = torch.randint(0, len(stream) - length, (count,), generator=generator)
    windows = stream[starts[:, None] + torch.arange(length)]
    return torch.cat((torch.full((count, 1), begin), windows), dim=1)


def train(network: Network, stream: torch.Tensor, begin: int, schedule: Schedule, state_path: Path) -> int:
    """Returns the number of steps. State is written while rates are constant, so that a run can go on for longer."""
    optimiser = Optimiser(network)
    generator = torch.Generator().manual_seed(SEED)
    first_step = 0
    if state_path.exists():
        state = torch.load(state_path)
        network.load_state_dict(state["network"])
        optimiser.load_state(state["optimiser"])
        generator.set_state(state["generator"])
        first_step = state["step"]
    saved_at = time.monotonic()
    num_steps = first_step
    with tqdm(schedule.steps(first_step), initial=first_step, unit="step", smoothing=0.05) as bar:
        for step in bar:
            is_decaying = schedule.is_decaying(step)
            if step == schedule.decay_start or (not is_decaying and time.monotonic() - saved_at > SAVE_EVERY_S):
                state = {"network": network.state_dict(), "optimiser": optimiser.state()}
                torch.save({**state, "generator": generator.get_state(), "step": step}, state_path)
                saved_at = time.monotonic()
            length = network.shape.max_position_embeddings - 1 if is_decaying else WINDOW
            windows = windows_of(stream, max(1, TOKENS_PER_STEP // length), length, begin, generator)
            with torch.autocast("cpu", torch.bfloat16):
                one = losses(network, windows, with_agreement=step >= AGREEMENT_START)
            one.total.backward()
            optimiser.step(schedule.scale(step))
            for router in network.routers:
                router.balance(BALANCE_RATE * schedule.scale(step))
            num_steps = step + 1
            if step % 10 == 0:
                bar.total = schedule.num_steps
                bar.set_postfix(main=f"{one.main.item():.3f}", mtp=" ".join(f"{x.item():.3f}" for x in one.mtp))
    return num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="optimiser steps")
    parser.add_argument("--minutes", type=float, help="wall time to fill instead of a number of steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--state", type=Path, default=Path("results/tiny_deepseek.pt"), help="where a run goes on from")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    shape = Shape()
    schedule = Schedule(arguments.steps, arguments.minutes, time.monotonic())

    files = read_corpus()
    training = [file for file in files if not file.is_held_out]
    held_out = [file for file in files if file.is_held_out]
    tokenizer = train_tokenizer(training, shape.vocab_size)
    stream = torch.tensor(encode(training, tokenizer))
    held_out_stream = torch.tensor(encode(held_out, tokenizer))
    begin = token_id(tokenizer, BEGIN)
    print(f"{len(stream):,} training tokens, {len(held_out_stream):,} held out")

    network = Network(shape)
    print(f"{sum(parameter.numel() for parameter in network.parameters()):,} parameters")
    num_steps = train(network, stream, begin, schedule, arguments.state)
    minutes = (time.monotonic() - schedule.started) / 60
    write_checkpoint(arguments.folder, network, tokenizer)

    network = read_network(arguments.folder, shape)
    windows = windows_of(held_out_stream, 64, WINDOW, begin, torch.Generator().manual_seed(SEED))
    command = f"python -m tests.assets.train_tiny_deepseek --steps {num_steps} --threads {arguments.threads}"
    report = write_report(arguments.folder, network, tokenizer, held_out, windows, command, minutes, SEED)
    print(report)


if __name__ == "__main__":
    main()
