"""What clients are told of the model."""

from dataclasses import dataclass

from openai.types import Model

from app.api.errors import APIError


class ServedModel(Model):
    """An entry of /v1/models; `max_model_len` with vLLM's name."""

    max_model_len: int


@dataclass(frozen=True)
class ModelCard:
    """One model, under one name or several."""

    served_model_names: tuple[str, ...]  # the first is the one that clients should use
    max_model_len: int
    vocab_size: int
    created: int  # Unix time, s

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ValueError("served_model_names is empty: give at least one")

    def models(self) -> list[ServedModel]:
        return [self.model(name) for name in self.served_model_names]

    def model(self, name: str) -> ServedModel:
        """Raises APIError 404 for a name that is not served."""
        if name not in self.served_model_names:
            served = ", ".join(f"`{served}`" for served in self.served_model_names)
            message = f"The model `{name}` does not exist; this server has {served}."
            raise APIError(404, message, param="model", code="model_not_found")
        return ServedModel(
            id=name, created=self.created, object="model", owned_by="forerun", max_model_len=self.max_model_len
        )
