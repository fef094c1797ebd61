"""transformers' `generate` in bf16, prompts padded on the left; `lookup` is its prompt lookup, a prompt at a time."""

import argparse

import torch
import transformers
from protocol import Generate, Prompts, serve

NUM_LOOKUP_TOKENS = 10


def load(options: argparse.Namespace) -> tuple[str, Generate]:
    torch.set_num_threads(options.num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    pad = model.config.eos_token_id
    pad = pad[0] if isinstance(pad, list) else pad

    def continue_batch(prompts: Prompts, num_new_tokens: int, **how: int) -> list[list[int]]:
        width = max(map(len, prompts))
        token_ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = model.generate(
            input_ids=token_ids,
            attention_mask=mask,
            max_new_tokens=num_new_tokens,
            min_new_tokens=num_new_tokens,
            do_sample=False,
            pad_token_id=pad,
            **how,
        )
        return output[:, width:].tolist()

    def generate(prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        if options.method == "plain":
            return continue_batch(prompts, num_new_tokens)
        how = {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS}
        return [continue_batch([prompt], num_new_tokens, **how)[0] for prompt in prompts]

    return f"transformers {transformers.__version__}, torch {torch.__version__}", generate


if __name__ == "__main__":
    serve(load, ("plain", "lookup"))
