"""The form that an answer must have: OpenAI's `response_format` and vLLM's `structured_outputs`.

Both become `StructuredOutputsParams`, which checks them. Next to read: `quire/structured_outputs.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.errors import InvalidParameterError
from quire.server.protocol.base import Body, FieldError
from quire.structured_outputs import MAX_CHOICES, MAX_TEXT_BYTES, StructuredOutputsParams


def _text_or_object(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<object>"


FormText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_BYTES)]


class JsonSchema(Body):
    """A schema with a name, which is for people. Schemas are always followed strictly."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
    description: Annotated[str, Field(max_length=1024)] | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Free text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's: exactly one of the first five fields."""

    json_: (
        Annotated[Annotated[FormText, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
                  Discriminator(_text_or_object)] | None
    ) = Field(None, alias="json")  # fmt: skip
    json_object: bool | None = None
    regex: FormText | None = None
    choice: Annotated[list[FormText], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: FormText | None = None
    disable_any_whitespace: bool | None = False
    disable_additional_properties: Literal[False] | None = False
    """A schema says itself whether an object may have other properties."""
    whitespace_pattern: FormText | None = None
    structural_tag: None = None


def check_forms(response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None) -> None:
    """Raises: FieldError for a format without its schema, and for two forms at once."""
    if response_format is None:
        return
    has_schema = response_format.json_schema is not None
    if has_schema != (response_format.type == "json_schema"):
        raise FieldError(
            "response_format.json_schema",
            "response_format.json_schema goes with the type json_schema, and with no other",
        )
    if structured_outputs is not None and response_format.type != "text":
        raise FieldError("structured_outputs", "response_format and structured_outputs exclude each other")


def form_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """What the sampler must obey; None for free text. Raises: InvalidParameterError."""
    if structured_outputs is not None:
        given = structured_outputs.model_dump(
            by_alias=True, exclude_none=True, exclude={"disable_additional_properties"}
        )
        if given.get("json_object") is False:
            del given["json_object"]
        return StructuredOutputsParams(**given)
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=response_format.json_schema.schema_)


@contextmanager
def renaming(names: dict[str, str]) -> Iterator[None]:
    """Errors about parameters name the fields that clients sent. `names`: engine's name → field. A name of
    `structured_outputs` stands for all of its parts. Raises: InvalidParameterError."""
    try:
        yield
    except InvalidParameterError as error:
        name = names.get(error.field) or names.get(error.field.partition(".")[0])
        if name is None:
            raise
        raise InvalidParameterError(name, error.value, error.limit) from None


def schema_field(response_format: ResponseFormat | None) -> dict[str, str]:
    """Names for `renaming`: a schema that came as `response_format` is called by that name."""
    has_schema = response_format is not None and response_format.json_schema is not None
    return {"structured_outputs": "response_format.json_schema.schema"} if has_schema else {}
