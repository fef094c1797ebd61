"""What a Serve file needs of its ranks, and how fast they can be; without weights, without a GPU.

    python -m app.plan serve_configs/quickstart.yaml
    python -m app.plan FILE --device h200 --acceptance 0.85,0.6,0.4

Exits with 1 and the reason where what is configured does not fit.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from app.config import AppConfig
from app.planning.checkpoint_shape import given_config
from app.planning.device import DEVICES, GIB, Device, choose_device
from app.planning.report import format_plan
from app.planning.serve_plan import ServePlan, plan_serving


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m app.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a Serve file")
    parser.add_argument("--device", metavar="NAME", help=f"{', '.join(DEVICES)}; default: the file's, or cpu")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of the device, in place of the table's")
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help="of the device, in place of the table's")
    parser.add_argument(
        "--layer-overhead",
        type=float,
        metavar="US",
        help="microseconds of launches and collectives in each layer of a pass; default: 0, for the floor",
    )
    parser.add_argument(
        "--acceptance", type=_shares, metavar="A,B,...", help="share of each draft that is kept, as the metrics say it"
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="that steps are computed at")
    parser.add_argument("--model-config", type=Path, metavar="FILE", help="config.json, or its folder, of the model")
    parser.add_argument("--draft-config", type=Path, metavar="FILE", help="the same of a draft model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(arguments)


def _shares(text: str) -> list[float]:
    return [float(share) for share in text.split(",")]


def read_args(path: Path) -> dict[str, Any]:
    """The `args` of the file's application.

    Raises ValueError where it has none, or several applications.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(str(error.strerror)) from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    applications = content.get("applications") if isinstance(content, dict) else None
    if not isinstance(applications, list) or len(applications) != 1:
        raise ValueError("not a Serve file with one entry under `applications`")
    args = applications[0].get("args") if isinstance(applications[0], dict) else None
    if not isinstance(args, dict):
        raise ValueError("applications[0].args: missing")
    return args


def make_plan(options: argparse.Namespace) -> ServePlan:
    """Raises ValueError for a wrong file, and for what does not fit."""
    args = read_args(options.file)
    model = str(args.get("model"))
    if options.model_config is not None:
        args = args | {"model": given_config(options.model_config)}
    if options.draft_config is not None:
        speculative = args.get("speculative_config")
        if not isinstance(speculative, dict) or speculative.get("method") != "draft_model":
            raise ValueError("--draft-config is given, and speculative_config.method is not draft_model")
        args = args | {"speculative_config": speculative | {"model": given_config(options.draft_config)}}
    config = AppConfig.model_validate(args)
    accelerator = config.deployment_config.ray_actor_options.accelerator_type
    device = _adjusted(choose_device(options.device, accelerator, config.device), options)
    return plan_serving(config, model, device, options.acceptance, options.context)


def _adjusted(device: Device, options: argparse.Namespace) -> Device:
    if options.memory is not None:
        device = replace(device, memory_bytes=int(options.memory * GIB))
    if options.bandwidth is not None:
        device = replace(device, bandwidth=options.bandwidth * 1e9)
    if options.layer_overhead is not None:
        device = replace(device, layer_overhead_s=options.layer_overhead * 1e-6)
    return device


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        plan = make_plan(options)
    except ValueError as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(plan.as_json(), indent=2) if options.json else format_plan(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
