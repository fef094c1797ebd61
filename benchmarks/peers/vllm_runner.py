"""vLLM's offline interface on its CPU build. `suffix` remembers no earlier requests, `suffix_memory` does."""

import argparse
import os
import sys
from pathlib import Path

from protocol import Generate, Prompts, serve

PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
METHODS = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    "suffix_memory": {"method": "suffix"},
}


def load(options: argparse.Namespace) -> tuple[str, Generate]:
    import vllm

    speculative = METHODS[options.method]
    engine = vllm.LLM(
        options.model,
        dtype="bfloat16",
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=False,
        **({"speculative_config": speculative} if speculative else {}),
    )

    def generate(prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return f"vllm {vllm.__version__}", generate


def start_over_with_its_libraries() -> None:
    """Its manual asks for an allocator and Intel's OpenMP before everything else; where they are, they are used.

    Without workqueue, numba's threads (of its n-gram lookup) and OpenMP's take the cores from one another.
    """
    if "NUMBA_THREADING_LAYER" in os.environ:
        return
    folders = [Path(sys.prefix), Path("/usr/lib/x86_64-linux-gnu")]
    found = [next((str(path) for folder in folders for path in folder.rglob(name)), None) for name in PRELOADED]
    threads = sys.argv[sys.argv.index("--num-threads") + 1]
    os.environ |= {
        "NUMBA_THREADING_LAYER": "workqueue",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(threads) - 1}",
        "LD_PRELOAD": ":".join(filter(None, found)),
    }
    os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    start_over_with_its_libraries()
    serve(load, tuple(METHODS))
