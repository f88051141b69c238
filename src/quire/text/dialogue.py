"""`Dialogue`: a conversation becomes a prompt, the constraint of its answer, and a reader of the answer.

The one place that knows what a model's chat template can do, for the server, `LLM.chat` and the command line alike:

    messages, tools → one form (`messages.py`) → the form that the template reads, found by rendering probes
    (`template_probe.py`) → text (`chat_template.py`) → token ids, with special tokens of the template only
    (`RenderedChat`); answers are read by `reply.py`, in the format that the template writes calls in.

Must not know: HTTP, the engine, sampling parameters beyond the constraint. Next to read: `messages.py`, `reply.py`.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import ChatTemplateError, ModelFileError
from quire.structured_outputs import ReasoningSpan, StructuredOutputsParams
from quire.text.chat_template import RenderedChat, compile_chat_template, plain
from quire.text.messages import Described, Message, adapt, normalise
from quire.text.reasoning import ReasoningFormat, find_reasoning
from quire.text.reply import ReplyReader
from quire.text.template_probe import ARGUMENT, PROBE_ARGUMENTS, TOOL_NAME, VALUE, TemplateTraits, probe
from quire.text.tokenizer import Tokenizer
from quire.text.tool_calls.formats import GENERIC, choose_format, has_special_marker, write_calls
from quire.text.tool_calls.parser import CallReading, ToolCallFormat
from quire.text.tool_calls.schemas import ToolSchemas, tool_choice_schema, tools_system_prompt

TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "chat_template"}
)
"""Names that no variable of a template may have."""
_END_MARK = "\ue000end of the final message\ue001 "
"""Put after the final message to find it in the rendered text; the space shows whether the template trims."""
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DialogueOptions:
    """Choices of one request.

    Fields:
        tool_choice: "auto", "none", "required" or `{"type": "function", "function": {"name": …}}`.
        parallel_tool_calls: False keeps the first call only.
        add_generation_prompt: the prompt ends with the beginning of the assistant's turn.
        continue_final_message: the answer continues the last message instead.
        reasoning_effort: reaches the template as `reasoning_effort`; "none" turns reasoning off.
        enables_reasoning: turns reasoning on or off, as `enable_thinking` and `thinking`; None: the effort does.
        reasoning_budget: most tokens of reasoning, after which its end is forced; None: no limit.
        separates_reasoning: False leaves reasoning within the content.
        includes_reasoning: False drops it from the answer.
        constraint: of the answer, beginning after the reasoning. Demanded calls replace it.
        chat_template: Jinja2 source, or the name of one of the model's templates.
        variables: further variables of the template.
        add_special_tokens: add BOS and EOS, which the template writes itself as a rule.
    """

    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    enables_reasoning: bool | None = None
    reasoning_budget: int | None = None
    separates_reasoning: bool = True
    includes_reasoning: bool = True
    constraint: StructuredOutputsParams | None = None
    chat_template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """A prompt and what its answers may be.

    Fields:
        text, token_ids: the rendered conversation.
        constraint: what the answer must follow; None if it is free.
        keeps_special_tokens: markers of reasoning or calls are special tokens, which the answer's text must keep.
    """

    text: str
    token_ids: list[int]
    constraint: StructuredOutputsParams | None
    keeps_special_tokens: bool
    reasoning: ReasoningFormat | None
    calls: CallReading | None
    includes_reasoning: bool = True

    def reply_reader(self) -> ReplyReader | None:
        """Return a reader of one answer; None if its text is all content."""
        if self.reasoning is None and self.calls is None:
            return None
        return ReplyReader(self.reasoning, self.calls, keeps_reasoning=self.includes_reasoning)


class Dialogue:
    """Prepares the conversations of one model. Thread-safe."""

    def __init__(self, templates: Mapping[str, str], tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        """`templates`: the model's, by name. `chat_template`: the operator's choice, source or name; None: as the model
        says. Raises: ChatTemplateError for a name that there is not."""
        self._templates, self._tokenizer, self._chosen = templates, tokenizer, chat_template
        if chat_template is not None:
            self.source()

    @property
    def has_template(self) -> bool:
        """True if conversations can be rendered without a template of the request's own."""
        return bool(self._templates) or self._chosen is not None

    def message_ids(self, text: str) -> list[int]:
        """Return the tokens of a conversation of one user's message; of the text alone if there is no template.

        Raises: ChatTemplateError, PromptError.
        """
        if not self.has_template:
            return self._tokenizer.encode(text)
        return self.prepare([{"role": "user", "content": text}]).token_ids

    def check_templates(self) -> None:
        """Compile the templates that requests may use. Raises: ModelFileError naming one that does not parse."""
        if self._chosen is not None:
            return
        for name, source in self._templates.items():
            try:
                compile_chat_template(source)
            except ChatTemplateError as error:
                raise ModelFileError(
                    f"the model's chat template '{name}' cannot be used: {error.message}; choose another with "
                    "--chat-template FILE, or correct it in the model's files"
                ) from None

    def source(self, chat_template: str | None = None, *, has_tools: bool = False) -> str:
        """Return the Jinja2 source for a request: the named one, `tool_use` if there are tools, else the default.

        So does Transformers; a model's only template is its default here. Raises: ChatTemplateError.
        """
        chosen, templates = chat_template or self._chosen, self._templates
        if chosen is not None:
            if chosen not in templates and "{" not in chosen and "\n" not in chosen:
                names = f"one of its templates ({', '.join(templates)}), " if templates else ""
                raise ChatTemplateError(
                    f"the model has no chat template named {chosen!r}: give {names}a Jinja template or its file"
                )
            return templates.get(chosen, chosen)
        name = "tool_use" if has_tools and "tool_use" in templates else "default"
        if name in templates:
            return templates[name]
        if len(templates) == 1:
            return next(iter(templates.values()))
        if templates:
            raise ChatTemplateError(
                f"the model has no default chat template; choose one with chat_template=, of {', '.join(templates)}"
            )
        raise ChatTemplateError(
            "the model has no chat template; pass one with chat_template=, or send a prompt instead of messages"
        )

    def traits(self, source: str) -> TemplateTraits:
        """Return the properties of a template. Raises: ChatTemplateError if it does not parse."""
        return probe(source, self._tokenizer.template_variables)

    def prepare(
        self,
        messages: Any,
        tools: Tools | None = None,
        options: DialogueOptions | None = None,
        *,
        encode: Callable[[RenderedChat], list[int]] | None = None,
    ) -> PreparedPrompt:
        """Return the prompt of a conversation. `encode`: replaces the tokenizer's.

        Raises: ChatTemplateError, PromptError, InvalidParameterError.
        """
        options = options or DialogueOptions()
        tools = None if options.tool_choice == "none" else tools
        source = self.source(options.chat_template, has_tools=tools is not None)
        traits = self.traits(source)
        form = self.call_format(source, traits)
        calls = _calls(form, tools, options) if tools else None
        chat = self._render(source, traits, form, messages, tools, options)
        add = options.add_special_tokens
        token_ids = self._tokenizer.encode_chat(chat, add_special_tokens=add) if encode is None else encode(chat)
        reasoning = None
        if options.separates_reasoning and not options.continue_final_message:
            reasoning = find_reasoning(source, chat.text, self._tokenizer)
        return PreparedPrompt(
            text=chat.text,
            token_ids=token_ids,
            constraint=_constraint(options, calls, reasoning, traits),
            keeps_special_tokens=bool(
                (calls is not None and has_special_marker(calls.format, self._tokenizer))
                or (reasoning is not None and reasoning.has_special_marker)
            ),
            reasoning=reasoning,
            calls=calls,
            includes_reasoning=options.includes_reasoning,
        )

    def call_format(self, source: str, traits: TemplateTraits) -> ToolCallFormat:
        """Return the format in which the model of a template with these properties writes calls."""
        return _call_format(source, traits.written_call, self._tokenizer.special_tokens)

    def _render(
        self,
        source: str,
        traits: TemplateTraits,
        form: ToolCallFormat,
        messages: Any,
        tools: Tools | None,
        options: DialogueOptions,
    ) -> RenderedChat:
        template, normal = compile_chat_template(source), normalise(messages)
        given = plain(tools, "tools")
        values = {name: plain(value, name) for name, value in {**_effort(options), **options.variables}.items()}
        adds = options.add_generation_prompt and not options.continue_final_message

        def render(marked: Callable[[Any], Any]) -> str:
            # Special tokens in a client's text are marked before any text of ours is added.
            shown = marked(given)
            describes = bool(shown) and traits.tools is None
            described = Described(
                bool(shown),
                tools_system_prompt(shown, _example(traits, form)) if describes else "",
                lambda calls: write_calls(form, [call["function"] for call in calls]),
            )
            chat = adapt(marked(normal), traits, described)
            final_text = _mark_final_message(chat) if options.continue_final_message else ""
            variables = {**self._tokenizer.template_variables, **marked(values)}

            def write(tools: Any) -> str:
                offered = {**variables, **_tools_variable(tools, traits)}
                return template.render(chat, add_generation_prompt=adds, variables=offered)

            try:
                text = write(shown)
            except ChatTemplateError:  # some read keys that a tool need not have
                if not shown:
                    raise
                text = write(_completed(shown))
            return _cut_after_final_message(text, final_text) if options.continue_final_message else text

        return self._tokenizer.marks.render(render)


def _calls(form: ToolCallFormat, tools: Tools, options: DialogueOptions) -> CallReading:
    """Return how calls are read. A demanded call is nothing but JSON. Raises: InvalidParameterError."""
    schema = tool_choice_schema(tools, options.tool_choice, parallel_tool_calls=options.parallel_tool_calls)
    return CallReading(
        format=form if schema is None else GENERIC,
        schemas=ToolSchemas(tools),
        schema=schema,
        is_named=isinstance(options.tool_choice, Mapping),
        is_parallel=options.parallel_tool_calls,
    )


@functools.lru_cache(maxsize=32)
def _call_format(source: str, written_call: str, special_tokens: frozenset[str]) -> ToolCallFormat:
    return choose_format(
        source, written=written_call, name=TOOL_NAME, arguments=PROBE_ARGUMENTS, special_tokens=special_tokens
    )


def _effort(options: DialogueOptions) -> dict[str, Any]:
    """Return the choices about reasoning under the names that templates read."""
    effort, enabled = options.reasoning_effort, options.enables_reasoning
    if enabled is None and effort is not None:
        enabled = effort != "none"
    if options.reasoning_budget == 0:
        enabled = False
    switches = {} if enabled is None else {"enable_thinking": enabled, "thinking": enabled}
    return switches if effort is None else {"reasoning_effort": effort, **switches}


def _tools_variable(tools: Any, traits: TemplateTraits) -> dict[str, Any]:
    if traits.tools is None or (tools is None and not traits.needs_tools):
        return {}
    tools = tools or []
    if traits.tools_as == "objects":
        return {traits.tools: tools}
    texts = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    return {traits.tools: texts if traits.tools_as == "texts" else f"[{', '.join(texts)}]"}


def _completed(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools whose functions and parameters have a description, and whose schemas have properties."""
    found = []
    for tool in tools:
        function = {"description": "", **tool["function"]}
        schema = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
        named = {
            name: {"type": "string", "description": "", **value} if isinstance(value, dict) else value
            for name, value in schema["properties"].items()
        }
        found.append({**tool, "function": {**function, "parameters": {"required": [], **schema, "properties": named}}})
    return found


def _example(traits: TemplateTraits, form: ToolCallFormat) -> str:
    """Return a call as the template writes it, to describe tools; "" if nothing tells how."""
    written = traits.written_call.strip()
    if not written and form is not GENERIC:
        written = write_calls(form, [{"name": TOOL_NAME, "arguments": PROBE_ARGUMENTS}])
    return written.replace(TOOL_NAME, "<name>").replace(ARGUMENT, "<argument>").replace(VALUE, "<value>")


def _constraint(
    options: DialogueOptions, calls: CallReading | None, reasoning: ReasoningFormat | None, traits: TemplateTraits
) -> StructuredOutputsParams | None:
    """Return what an answer must follow, beginning after its reasoning."""
    found = options.constraint
    if calls is not None and calls.schema is not None:
        found = StructuredOutputsParams(json=calls.schema)
    if reasoning is None or (found is None and options.reasoning_budget is None):
        return found
    end, opening = reasoning.end, "".join(reasoning.openings)
    # The template's own words up to the marker, and the blanks behind it.
    words, has_end, behind = (traits.closes_reasoning or f"\n{end}\n\n").partition(end)
    closing = words + end + behind[: len(behind) - len(behind.lstrip())] if has_end else end
    if reasoning.is_harmony:
        closing = end if found is not None else end + reasoning.openings[0]
    span = ReasoningSpan(
        start=reasoning.start,
        end=end,
        is_open=reasoning.is_open,
        budget=options.reasoning_budget,
        closing=closing,
        opening=opening if found is not None else "",
    )
    return StructuredOutputsParams(reasoning=span) if found is None else replace(found, reasoning=span)


# --- Continuing the final message -------------------------------------------------------------


def _mark_final_message(chat: list[Message]) -> str:
    """Mark the end of the last message's text and return that text. Mutates: `chat`."""
    message = chat[-1]
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return content
    if isinstance(content, list | tuple) and content:
        part = content[-1]
        text: str = part["text"]
        part["text"] = text + _END_MARK
        return text
    raise ChatTemplateError("continue_final_message needs text in the last message, which has none")


def _cut_after_final_message(text: str, final_text: str) -> str:
    mark = _END_MARK.strip()
    end = text.rfind(mark)
    if end < 0 or final_text.strip() not in text[:end]:
        raise ChatTemplateError(
            "continue_final_message needs the last message in the prompt, but the chat template changes or drops it; "
            "end the conversation with text that the template keeps"
        )
    was_trimmed = not text.startswith(_END_MARK, end)
    return text[:end].rstrip() if was_trimmed else text[:end]
