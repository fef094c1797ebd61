"""Makes a checkpoint of another's first layers: a draft model that costs much for what it knows.

python benchmarks/first_layers.py .cache/models/SmolLM2-135M-Instruct 6 .cache/models/SmolLM2-135M-first6
"""

import argparse
import json
import re
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

LAYER = re.compile(r"model\.layers\.(\d+)\.")
WEIGHTS = "model.safetensors"


def keep_first_layers(model: Path, num_layers: int, out: Path) -> None:
    """Writes `out`: the first layers of `model` with its embedding, last norm, head and tokenizer."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if not 1 <= num_layers <= config["num_hidden_layers"]:
        raise ValueError(f"num_layers is {num_layers}, and the model has {config['num_hidden_layers']}: use 1 to that")
    out.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.name not in ("config.json", WEIGHTS):
            shutil.copy(path, out / path.name)
    with safe_open(model / WEIGHTS, "pt") as weights:
        names = [name for name in weights.keys() if _is_kept(name, num_layers)]  # noqa: SIM118 - it is no mapping
        save_file({name: weights.get_tensor(name) for name in names}, out / WEIGHTS, metadata={"format": "pt"})
    config = {**config, "num_hidden_layers": num_layers}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _is_kept(name: str, num_layers: int) -> bool:
    match = LAYER.match(name)
    return match is None or int(match[1]) < num_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with one model.safetensors")
    parser.add_argument("num_layers", type=int)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    keep_first_layers(options.model, options.num_layers, options.out)
    print(f"{options.out} written")


if __name__ == "__main__":
    main()
