"""llama.cpp by the C API that llama-cpp-python carries: all prompts in one context, a sequence each.

Its high-level interface answers one prompt at a time; a server batches, so this does.
"""

import argparse
import ctypes

import llama_cpp
import numpy as np
from protocol import Generate, Prompts, serve

PROMPT_ROWS = 2048  # of one call, at most


class Batch:
    """A llama_batch that is filled row by row."""

    def __init__(self, num_rows: int) -> None:
        self.batch = llama_cpp.llama_batch_init(num_rows, 0, 1)
        self.clear()

    def clear(self) -> None:
        self.batch.n_tokens = 0

    def add(self, token_id: int, position: int, sequence: int, wants_logits: bool) -> int:
        row = self.batch.n_tokens
        self.batch.token[row], self.batch.pos[row] = token_id, position
        self.batch.n_seq_id[row], self.batch.seq_id[row][0] = 1, sequence
        self.batch.logits[row] = wants_logits
        self.batch.n_tokens = row + 1
        return row


def load(options: argparse.Namespace) -> tuple[str, Generate]:
    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(options.model.encode(), llama_cpp.llama_model_default_params())
    assert model, f"llama.cpp does not load {options.model}"
    vocab = llama_cpp.llama_model_get_vocab(model)
    vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
    ends = [token for token in range(vocab_size) if llama_cpp.llama_vocab_is_eog(vocab, token)]
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = options.max_num_seqs
    params.n_ctx = options.max_num_seqs * options.max_model_len
    params.n_batch = PROMPT_ROWS
    params.n_threads = params.n_threads_batch = options.num_threads
    context = llama_cpp.llama_init_from_model(model, params)
    assert context, "llama.cpp has no room for its context"
    batch = Batch(PROMPT_ROWS)

    def decode(wanted: dict[int, int]) -> dict[int, int]:
        """Runs the batch; the best token of each sequence by its row, ends of text left out."""
        assert llama_cpp.llama_decode(context, batch.batch) == 0
        best = {}
        for sequence, row in wanted.items():
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), shape=(vocab_size,))
            logits[ends] = -np.inf
            best[sequence] = int(logits.argmax())
        batch.clear()
        return best

    def generate(prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        wanted: dict[int, int] = {}
        for sequence, prompt in enumerate(prompts):
            for position, token_id in enumerate(prompt):
                is_last = position == len(prompt) - 1
                row = batch.add(token_id, position, sequence, is_last)
                if is_last:
                    wanted[sequence] = row
                if batch.batch.n_tokens == PROMPT_ROWS or (is_last and sequence == len(prompts) - 1):
                    for done, best in decode(wanted).items():
                        outputs[done].append(best)
                    wanted = {}
        for step in range(num_new_tokens - 1):
            rows = {s: batch.add(outputs[s][-1], len(p) + step, s, True) for s, p in enumerate(prompts)}
            for sequence, best in decode(rows).items():
                outputs[sequence].append(best)
        return outputs

    generate.log_callback = quiet  # must live as long as the library may call it
    return f"llama-cpp-python {llama_cpp.__version__}", generate


if __name__ == "__main__":
    serve(load)
