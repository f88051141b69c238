"""Request and answer of `/v1/embeddings`.

Next to read: `routes/embeddings.py`.
"""

from typing import Literal

from pydantic import Field

from quire.server.protocol.answers import Answer
from quire.server.protocol.fields import (
    MAX_INTEGER,
    IgnoredFields,
    ModelName,
    Prompts,
    RequestId,
    TruncationSide,
    prompt_list,
)


class EmbeddingRequest(IgnoredFields):
    """OpenAI's fields and a few of vLLM's."""

    model: ModelName | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1, le=MAX_INTEGER)
    """Length of each vector, at most the model's width: its first numbers, normalised again if `normalize` is true."""
    add_special_tokens: bool | None = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INTEGER)
    truncation_side: TruncationSide | None = None
    """Side on which tokens are cut off. Unset: "right", so that the beginning of a text is kept."""
    normalize: bool | None = True
    use_activation: bool | None = True
    """vLLM's later name of `normalize`; false in either disables normalisation."""
    priority: int | None = Field(0, ge=-MAX_INTEGER, le=MAX_INTEGER)
    request_id: RequestId | None = None
    """Without effect: these answers have no id."""

    @property
    def is_normalized(self) -> bool:
        """Return whether vectors are normalised to length 1."""
        return self.normalize is not False and self.use_activation is not False

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """Return the inputs, always as a list."""
        return prompt_list(self.input)


class Embedding(Answer):
    """The vector of an input: numbers, or base64 of little-endian fp32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    """OpenAI's token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answer):
    """The whole answer, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
