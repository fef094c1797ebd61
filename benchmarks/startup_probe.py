"""A fresh process that loads an engine, says how far it is, runs a load and reports its peak memory.

`measure_startup` starts it and times its milestones from outside, so that the interpreter's own start counts.
"""

import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_LOAD_PROMPTS = 32
NUM_LOAD_TOKENS = 16


@dataclass(frozen=True)
class Startup:
    """Seconds from the process's start; `peak_rss_bytes` after a prompt of 512 tokens and 32 copy streams."""

    imported_s: float
    loaded_s: float
    first_token_s: float
    peak_rss_bytes: int


def measure_startup(engine_config: dict[str, Any], timeout_s: float = 600.0) -> Startup:
    """Raises RuntimeError with the process's error output where it fails."""
    command = [sys.executable, str(Path(__file__).resolve()), json.dumps(engine_config)]
    start = time.perf_counter()
    milestones: dict[str, float] = {}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            name, _, value = line.strip().partition(" ")
            milestones[name] = float(value) if value else time.perf_counter() - start
        status = process.wait()
        timer.cancel()
        errors.seek(0)
        if status != 0:
            raise RuntimeError(f"the engine did not start (exit status {status}):\n{errors.read()}")
    return Startup(
        milestones["imported"], milestones["loaded"], milestones["first_token"], int(milestones["peak_rss_bytes"])
    )


def main() -> None:
    sys.path.insert(0, str(REPOSITORY))
    from app.engine_config import EngineConfig
    from app.llm_engine import LLMEngine
    from benchmarks.engine_runs import EngineRunner
    from benchmarks.workloads import PromptSet, Workload

    print("imported", flush=True)
    engine = LLMEngine(EngineConfig(**json.loads(sys.argv[1])), progress=False)
    print("loaded", flush=True)
    prompts = PromptSet(engine.loaded.vocab_size)
    runner = EngineRunner(engine)
    runner.run([[[1]]], num_new_tokens=1)
    print("first_token", flush=True)
    runner.first_token_s(prompts.long_prompts[0])
    runner.run(prompts.waves(Workload(NUM_LOAD_PROMPTS, "copy")), NUM_LOAD_TOKENS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("peak_rss_bytes", peak if sys.platform == "darwin" else 1024 * peak, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
