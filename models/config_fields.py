"""Typed access to a JSON configuration: every mistake is a ValueError that names file, field and value."""

import json
from pathlib import Path

JsonObject = dict[str, object]


class ConfigFields:
    """The fields of one JSON object. A field that is null counts as absent, except for `nullable_integer`."""

    def __init__(self, values: JsonObject, source: str) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._nulls = values.keys() - self._values.keys()
        self.source = source  # what errors call the object: its file, and its field within it

    @classmethod
    def read(cls, path: Path) -> "ConfigFields":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds {type(values).__name__}, not an object")
        return cls(values, str(path))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def filled(self, **missing: object) -> "ConfigFields":
        """The same fields, with `missing` where they are absent."""
        return ConfigFields(dict.fromkeys(self._nulls) | missing | self._values, self.source)

    def names(self) -> set[str]:
        return set(self._values)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; without a default the field is required."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "a positive integer is needed")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """An integer of 0 or more; without a default the field is required."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(name, "an integer of 0 or more is needed")
        return value

    def integers(self, name: str) -> list[int]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(type(item) is int and item > 0 for item in value):
            raise self.error(name, "a list of positive integers is needed")
        return value

    def nullable_integer(self, name: str) -> int | None:
        """A positive integer or null, but stated: for fields that transformers does not read as null when absent."""
        return None if name in self._nulls else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; without a default the field is required."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, "a positive number is needed")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false is needed")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string is needed")
        return value

    def texts(self, name: str) -> list[str]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "a list of strings is needed")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of them, or none where the field is absent."""
        value = self._values.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise self.error(name, "a token id or a list of them is needed")
        return tuple(ids)

    def section(self, name: str) -> "ConfigFields":
        """A nested object, without fields where it is absent."""
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object is needed")
        return ConfigFields(value, f"{self.source}, {name}")

    def require(self, name: str, expected: object, default: object) -> None:
        """Refuses any value but the one that the code assumes."""
        if self._get(name, default) != expected:
            raise self.error(name, f"only {json.dumps(expected)} is implemented")

    def error(self, name: str, remedy: str) -> ValueError:
        value = json.dumps(self._values[name]) if name in self._values else "missing"
        return ValueError(f"{self.source}: {name} is {value}; {remedy}")

    def _get(self, name: str, default: object) -> object:
        return self._values.get(name, default)
