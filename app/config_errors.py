"""What a configuration that is refused says: one line that names each field, its value and the remedy."""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError


def starts_with_field(message: str) -> bool:
    """Our own messages begin with the field, its value and the remedy: `block_size is 0: …`."""
    return re.match(r"[a-z_]+(\.[a-z_]+)* is ", message) is not None


def describe(error: ValidationError, model: type[BaseModel], value: Any, root: str) -> str:
    """Pydantic's report as one line: each wrong field with its path from `root`, its value and the remedy."""
    messages: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        path, message = root, detail["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        keys = list(_yaml_keys(value, detail["loc"]))
        if detail["type"].startswith("union_tag"):
            keys.append("method")
            message = f"use one of {detail['ctx']['expected_tags']}" if "expected_tags" in detail["ctx"] else "missing"
        elif detail["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(keys[-1]), sorted(_field_names(model)), n=1)
            message = "unknown field" + (f"; did you mean {near[0]}?" if near else "")
        elif detail["type"] == "missing":
            message = "missing"
        for key in keys:
            path += f"[{key}]" if isinstance(key, int) else f".{key}"
        if starts_with_field(message):
            path, message = f"{path}.{message}".split(" ", 1)
        elif isinstance(given := _at(value, keys), str | int | float | bool):
            path = f"{path} is {given!r}"
        messages.setdefault(path, []).append(message)
    return "; ".join(_sentence(path, list(dict.fromkeys(alternatives))) for path, alternatives in messages.items())


def _sentence(path: str, alternatives: list[str]) -> str:
    message = ", or ".join(alternatives)
    return f"{path} {message}" if message.startswith("is ") else f"{path}: {message}"


def _yaml_keys(value: Any, location: tuple[int | str, ...]) -> Iterator[int | str]:
    """Of pydantic's location the parts that the file has: neither tags nor members of a union."""
    for part in location:
        if not isinstance(value, Mapping | list):
            return
        if isinstance(value, Mapping) and value.get("method") == part:
            continue
        yield part
        value = _at(value, [part])


def _at(value: Any, keys: list[int | str]) -> Any:
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _field_names(model: type[BaseModel]) -> set[str]:
    schema = model.model_json_schema()
    return {name for part in (schema, *schema.get("$defs", {}).values()) for name in part.get("properties", {})}
