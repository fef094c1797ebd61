"""Messages to a prompt, by the checkpoint's own chat template."""

import inspect
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.api.errors import APIError
from app.api.protocol import ChatCompletionRequest, ChatMessage


class ChatTemplate:
    """The tokenizer's chat template. It comes with the checkpoint, and transformers runs it in a sandbox."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._source = "".join(template.values()) if isinstance(template, dict) else template
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {name for name in parameters if name not in ("documents", "kwargs")} | {"messages"}

    def render(self, request: ChatCompletionRequest) -> str:
        """Raises APIError 400 where there is no template, or it refuses the messages."""
        if self._source is None:
            raise APIError(
                400, "This model has no chat template: send its prompt to /v1/completions instead.", param="messages"
            )
        variables = self._variables(request)
        try:
            prompt = self._tokenizer.apply_chat_template(
                [self._variables_of(message) for message in request.messages],
                tokenize=False,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **variables,
            )
        except Exception as error:  # a template may raise anything; its sentence is meant for the client
            message = f"The model's chat template refuses these messages: {error}"
            raise APIError(400, message, param="messages") from error
        assert isinstance(prompt, str)
        return prompt

    def _variables(self, request: ChatCompletionRequest) -> dict[str, Any]:
        taken = self._reserved & request.chat_template_kwargs.keys()
        if taken:
            raise APIError(
                400,
                f"'chat_template_kwargs' names {sorted(taken)[0]!r}: use names that the template alone reads.",
                param="chat_template_kwargs",
            )
        named = {"reasoning_effort": request.reasoning_effort, "verbosity": request.verbosity}
        return {name: value for name, value in named.items() if value is not None} | request.chat_template_kwargs

    def _variables_of(self, message: ChatMessage) -> dict[str, str]:
        # Few templates know developers; to the others their messages are those of the system.
        role = "system" if message.role == "developer" and "developer" not in (self._source or "") else message.role
        variables: dict[str, str] = {"role": role, "content": message.text}
        return variables | {"name": message.name} if message.name is not None else variables
