"""Chats of `LLM`, `AsyncLLM` and the command line: from messages to a request, and from its texts to messages.

Next to read: `text/dialogue.py`, which does the work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.engine.llm_engine import LLMEngine
from quire.errors import RequestError
from quire.outputs import ChatCompletionOutput, CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.text.dialogue import TEMPLATE_ARGUMENTS, Dialogue, DialogueOptions, PreparedPrompt

Tools = Sequence[Mapping[str, Any]]


def dialogue_of(engine: LLMEngine) -> Dialogue:
    """Return the dialogue of an engine's model. Raises: PromptError without a tokenizer."""
    tokenizer = engine.get_tokenizer()
    return Dialogue(tokenizer.chat_templates, tokenizer, engine.chat_template)


def chat_options(
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **choices: Any,
) -> DialogueOptions:
    """Return checked options of a chat; `choices`: further fields of `DialogueOptions`. Raises: RequestError."""
    if continue_final_message and add_generation_prompt:
        raise RequestError("continue_final_message=True needs add_generation_prompt=False: one or the other")
    if not isinstance(chat_template, str | None):
        raise RequestError(f"chat_template must be text, got {type(chat_template).__name__}")
    variables = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestError("chat_template_kwargs must be a mapping from names to values")
    for name in sorted(TEMPLATE_ARGUMENTS & set(variables)):
        raise RequestError(f"chat_template_kwargs must not hold '{name}': it is an argument of its own")
    return DialogueOptions(
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
        variables=variables,
        **choices,
    )


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation ready for `generate`, and what reads its answers."""

    prompt: dict[str, Any]
    params: SamplingParams
    prepared: PreparedPrompt

    @classmethod
    def prepare(
        cls, dialogue: Dialogue, messages: Any, tools: Tools | None, options: DialogueOptions, params: SamplingParams
    ) -> "Conversation":
        """Render and tokenise. Raises: ChatTemplateError, PromptError, InvalidParameterError."""
        prepared = dialogue.prepare(messages, tools, replace(options, constraint=params.structured_outputs))
        changes: dict[str, Any] = {"structured_outputs": prepared.constraint}
        if prepared.keeps_special_tokens:
            changes["skip_special_tokens"] = False
        prompt = {"prompt": prepared.text, "prompt_token_ids": prepared.token_ids}
        return cls(prompt, replace(params, **changes), prepared)

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return an output whose completions have messages, as far as they are generated."""
        outputs: list[CompletionOutput] = []
        for item in output.outputs:
            reader = self.prepared.reply_reader()
            message = {"content": item.text}
            if reader is not None:
                message, _ = reader.message(item.text, item.finish_reason, ends=item.finished)
            values = {name: getattr(item, name) for name in item.__dataclass_fields__}
            outputs.append(ChatCompletionOutput(**values, message={"role": "assistant", **message}))
        return replace(output, outputs=outputs)
