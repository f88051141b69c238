"""Structured output in requests: OpenAI's `response_format` and vLLM's `structured_outputs`.

Both become `StructuredOutputsParams`, which checks them. Next to read: `quire/structured_outputs.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.errors import InvalidParameterError
from quire.server.protocol.base import AlwaysFalse, Body, FieldError
from quire.structured_outputs import MAX_CHOICES, MAX_TEXT_BYTES, StructuredOutputsParams

ConstraintText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_BYTES)]
SchemaName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
SchemaDescription = Annotated[str, Field(max_length=1024)]


class JsonSchema(Body):
    """A schema with a name, which has no effect. Schemas are always enforced strictly."""

    name: SchemaName
    description: SchemaDescription | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Free text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's field: exactly one of the first five."""

    json_: (
        Annotated[
            Annotated[ConstraintText, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
            Discriminator(lambda value: "<text>" if isinstance(value, str) else "<object>"),
        ]
        | None
    ) = Field(None, alias="json")
    json_object: bool | None = None
    regex: ConstraintText | None = None
    choice: Annotated[list[ConstraintText], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: ConstraintText | None = None
    disable_any_whitespace: bool | None = False
    disable_additional_properties: AlwaysFalse | None = False
    """Must be false: the schema itself says whether an object may have other properties."""
    whitespace_pattern: ConstraintText | None = None
    structural_tag: None = None


def check_formats(response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None) -> None:
    """Raises: FieldError for a format without its schema, and for both fields at once."""
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


def structured_outputs_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """Return the sampler's constraint; None for free text. Raises: InvalidParameterError."""
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
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Rename parameters in errors to the fields that the client sent.

    `names` maps the engine's name to the field. The name of an object stands for all of its fields.
    Raises: InvalidParameterError.
    """
    try:
        yield
    except InvalidParameterError as error:
        name = names.get(error.field) or names.get(error.field.partition(".")[0])
        if name is None:
            raise
        raise InvalidParameterError(name, error.value, error.limit) from None


def schema_field(response_format: ResponseFormat | None) -> dict[str, str]:
    """Return names for `renaming`: a schema sent as `response_format` keeps that name in errors."""
    has_schema = response_format is not None and response_format.json_schema is not None
    return {"structured_outputs": "response_format.json_schema.schema"} if has_schema else {}
