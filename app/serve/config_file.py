"""A Serve file of ours, checked before Ray starts: Serve itself ignores what it does not know."""

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from app.config import AppConfig, UserConfig
from app.config_errors import describe

BUILDER = "app.main:build"


class ServeFile:
    """The file, the address it serves at, and the configuration of its first application.

    Raises ValueError of one line that names each wrong field by its path.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ValueError(str(error.strerror)) from None
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict):
            raise ValueError("not a Serve file: it is no mapping with `applications`")
        self.schema = _parse_schema(content)
        if not self.schema.applications:
            raise ValueError(f"applications is empty: give one with import_path {BUILDER}")
        self.configs = [_check_application(index, app) for index, app in enumerate(content["applications"])]
        self.host, self.port = self.schema.http_options.host, self.schema.http_options.port
        self.route_prefix = (self.schema.applications[0].route_prefix or "").rstrip("/")


def _parse_schema(content: dict[str, Any]) -> ServeDeploySchema:
    unknown = list(_unknown_keys(content, ServeDeploySchema, ""))
    if unknown:
        raise ValueError("; ".join(unknown))
    try:
        return ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        raise ValueError(describe(error, ServeDeploySchema, content, "").replace("; .", "; ").lstrip(".")) from None


def _check_application(index: int, application: dict[str, Any]) -> AppConfig:
    path = f"applications[{index}]"
    if application["import_path"] != BUILDER:
        raise ValueError(f"{path}.import_path is {application['import_path']!r}: use {BUILDER}")
    args = application.get("args") or {}
    try:
        config = AppConfig.model_validate(args)
    except ValueError as error:
        raise ValueError(f"{path}.{error}".replace("; args", f"; {path}.args")) from None
    if application.get("external_scaler_enabled") and config.deployment_config.num_replicas is None:
        raise ValueError(
            f"{path}.external_scaler_enabled is True, and the replicas scale by themselves: "
            f"give {path}.args.deployment_config.num_replicas, the number to begin with"
        )
    for position, deployment in enumerate(application.get("deployments") or []):
        if deployment.get("user_config") is not None:
            try:
                config.check_user_config(UserConfig.parse(deployment["user_config"]))
            except ValueError as error:
                raise ValueError(f"{path}.deployments[{position}].{error}") from None
    return config


def _unknown_keys(value: Any, annotation: Any, path: str) -> Iterator[str]:
    """Keys that Serve would ignore, each with its path. `args` and `user_config` are open to it, and ours to check."""
    for option in _members(annotation):
        if get_origin(option) is list and isinstance(value, list):
            for index, item in enumerate(value):
                yield from _unknown_keys(item, get_args(option)[0], f"{path}[{index}]")
        elif isinstance(option, type) and issubclass(option, BaseModel) and isinstance(value, dict):
            for key, item in value.items():
                where = f"{path}.{key}" if path else str(key)
                if key in option.model_fields:
                    yield from _unknown_keys(item, option.model_fields[key].annotation, where)
                else:
                    near = difflib.get_close_matches(str(key), option.model_fields, n=1)
                    yield f"{where}: unknown field" + (f"; did you mean {near[0]}?" if near else "")


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def main(arguments: list[str]) -> int:
    for name in arguments:
        try:
            ServeFile(Path(name))
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
