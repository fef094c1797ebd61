"""Figures of the trained checkpoint: README.md and heldout.json of its folder."""

import json
import platform
import random
import textwrap
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.assets.tiny_deepseek_training.corpus import ASSISTANT, BEGIN, HELD_OUT_SHARE, USER, SourceFile, token_id
from tests.assets.tiny_deepseek_training.evaluation import (
    Acceptance,
    Continuation,
    continue_greedily,
    forced_agreement,
    greedy_acceptance,
)
from tests.assets.tiny_deepseek_training.network import Network
from tests.assets.tiny_deepseek_training.objective import (
    AGREEMENT_RATIO,
    AGREEMENT_START,
    MTP_WEIGHT,
    REUSE_WEIGHTS,
    held_out_losses,
)

NUM_PROMPTS = 24
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 96
NUM_DRAFTS = 3
NUM_GOLDEN = 8
GOLDEN_MARGIN = 5e-3  # logits: no golden continuation comes nearer to a tie, so that any order of fp32 sums repeats it


def held_out_prompts(files: list[SourceFile], tokenizer: Tokenizer, seed: int) -> Tensor:
    """[NUM_PROMPTS, PROMPT_TOKENS]: each from the beginning of a line of a held-out file."""
    begin = token_id(tokenizer, BEGIN)
    draw = random.Random(seed)
    long_files = [file for file in files if len(file.text) > 8 * PROMPT_TOKENS]
    prompts: list[list[int]] = []
    while len(prompts) < NUM_PROMPTS:
        lines = draw.choice(long_files).text.splitlines(keepends=True)
        text = "".join(lines[draw.randrange(len(lines)) :])[: 8 * PROMPT_TOKENS]
        token_ids = [begin, *tokenizer.encode(text, add_special_tokens=False).ids][:PROMPT_TOKENS]
        if len(token_ids) == PROMPT_TOKENS and token_ids not in prompts:
            prompts.append(token_ids)
    return torch.tensor(prompts)


def write_report(
    folder: Path,
    network: Network,
    tokenizer: Tokenizer,
    files: list[SourceFile],
    windows: Tensor,  # [N, L + 1]: held-out text
    command: str,
    minutes: float,
    seed: int,
) -> str:
    """Measures `network` as it was written, in fp32. `files` are the held-out ones. Returns the README's text."""
    continuations = list(continue_greedily(network, held_out_prompts(files, tokenizer, seed), OUTPUT_TOKENS))
    acceptance = greedy_acceptance(network, continuations, NUM_DRAFTS)
    golden = [one for one in continuations if one.smallest_margin >= GOLDEN_MARGIN][:NUM_GOLDEN]
    assert len(golden) >= 2, "too few continuations stay clear of ties: draw more prompts"
    main_loss, *mtp_losses = held_out_losses(network, windows)
    bytes_per_token = sum(len(file.text.encode()) for file in files) / sum(
        len(tokenizer.encode(file.text, add_special_tokens=False).ids) for file in files
    )
    figures = {
        "held_out_loss": round(main_loss, 4),
        "held_out_mtp_losses": [round(loss, 4) for loss in mtp_losses],
        "bytes_per_token": round(bytes_per_token, 3),
        "num_drafts": NUM_DRAFTS,
        "num_verifications": acceptance.num_verifications,
        "accepted_at": acceptance.accepted_at,
        "acceptance_rates": [round(rate, 4) for rate in acceptance.rates],
        "mean_acceptance_length": round(acceptance.mean_length, 4),
        "agreement_on_true_text": round(forced_agreement(network, windows[:, :-1]), 4),
    }
    content = {
        "figures": figures,
        "golden": [asdict(one) for one in golden],
        "prompt_ids": [one.prompt_ids for one in continuations],
    }
    (folder / "heldout.json").write_text(_json_lines(content), encoding="utf-8")
    readme = _readme(folder, network, figures, acceptance, continuations, tokenizer, command, minutes)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return readme


def _json_lines(content: dict) -> str:
    """JSON with one entry a line: token ids do not take a line each."""
    golden = ",\n    ".join(json.dumps(one) for one in content["golden"])
    prompts = ",\n    ".join(json.dumps(one) for one in content["prompt_ids"])
    figures = json.dumps(content["figures"])
    return (
        f'{{\n  "figures": {figures},\n  "golden": [\n    {golden}\n  ],\n  "prompt_ids": [\n    {prompts}\n  ]\n}}\n'
    )


def _readme(
    folder: Path,
    network: Network,
    figures: dict,
    acceptance: Acceptance,
    continuations: list[Continuation],
    tokenizer: Tokenizer,
    command: str,
    minutes: float,
) -> str:
    shape = network.shape
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    size_mb = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    rates = ", ".join(f"{rate:.3f}" for rate in acceptance.rates)
    main_bits = figures["held_out_loss"] / 0.6931472 / figures["bytes_per_token"]
    mtp_losses = ", ".join(f"{loss:.3f}" for loss in figures["held_out_mtp_losses"])
    made = textwrap.fill(
        f"Python {platform.python_version()} and torch {torch.__version__.split('+')[0]}; {minutes:.0f} minutes on one "
        "core shared with other work. The text is the standard library of that Python, its tests and generated files "
        "left out: sources, then the docstrings as questions and answers in the chat format "
        f'("{USER}What is the module json?{ASSISTANT}..."). One file in {HELD_OUT_SHARE}, by the checksum of its name, '
        f"is held out. The loss is that of the next token plus {MTP_WEIGHT} × that of the MTP module, plus those of "
        f"the module fed with its own output once and twice, weighted {REUSE_WEIGHTS[0]} and {REUSE_WEIGHTS[1]}. From "
        f"step {AGREEMENT_START} on, each draft is also pulled to the target's own distribution, {AGREEMENT_RATIO:g} "
        f"times as strongly. Windows have 256 tokens, then {shape.max_position_embeddings} while rates fall.",
        width=120,
    )
    sample = tokenizer.decode(continuations[0].prompt_ids + continuations[0].output_ids)
    return f"""# A tiny DeepSeek-V3 with a multi-token prediction module

DeepSeek-V3's architecture in miniature: {num_parameters:,} parameters, {size_mb:.1f} MB in bf16. Multi-head latent
attention with low-rank queries, a router with {shape.n_group} groups ({shape.topk_group} kept) over
{shape.n_routed_experts} experts ({shape.num_experts_per_tok} a token) and a bias against imbalance, a shared expert, a
dense first layer, and one MTP module as layer {shape.num_hidden_layers} with copies of the embedding and the head.
Tensor names are those of DeepSeek's release. It knows Python's standard library, a little; it is here to draft, verify
and accept for real on any machine, not to be right.

## How it was made

```
{command}
```

{made}

## What it does on held-out files

| | |
|---|---|
| next-token loss | {figures["held_out_loss"]:.3f} nats a token (about {main_bits:.2f} bits a byte) |
| MTP loss, draft 1, 2, 3 | {mtp_losses} |
| first draft equals the target's choice, along true text | {figures["agreement_on_true_text"]:.3f} |
| greedy, k = {NUM_DRAFTS}: drafts accepted by position | {rates} |
| greedy, k = {NUM_DRAFTS}: mean acceptance length | {acceptance.mean_length:.3f} tokens a verification |

Acceptance is over {len(continuations)} prompts of {PROMPT_TOKENS} tokens continued by {OUTPUT_TOKENS},
{acceptance.num_verifications} verifications, each a full recomputation in fp32. `heldout.json` holds the prompts, and
golden continuations that stay clear of ties. One of the prompts with its continuation:

```
{sample}
```
"""
