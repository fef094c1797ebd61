"""OpenVINO GenAI's pipeline with continuous batching; `lookup` is its prompt lookup."""

import argparse

import numpy as np
import openvino
import openvino_genai
from protocol import Generate, Prompts, serve

LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}
CACHE_GB = 2


def load(options: argparse.Namespace) -> tuple[str, Generate]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.max_num_batched_tokens = 4096
    scheduler.enable_prefix_caching = False
    looks_up = options.method == "lookup"
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": options.num_threads}
    if looks_up:
        properties["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(options.model, "CPU", scheduler_config=scheduler, **properties)
    end = pipeline.get_tokenizer().get_eos_token_id()

    def generate(prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_new_tokens
        config.ignore_eos, config.eos_token_id = True, end
        config.do_sample = config.apply_chat_template = False
        for name, value in LOOKUP.items() if looks_up else ():
            setattr(config, name, value)
        width = max(map(len, prompts))
        token_ids = np.full((len(prompts), width), end, dtype=np.int64)
        mask = np.zeros_like(token_ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            token_ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(token_ids), openvino.Tensor(mask))
        return [list(map(int, output)) for output in pipeline.generate(inputs, config).tokens]

    return f"openvino-genai {openvino_genai.__version__}", generate


if __name__ == "__main__":
    serve(load, ("plain", "lookup"))
