"""Bodies and answers of the routes that judge texts: `/v1/score`, `/v1/rerank` and `/classify`.

Fields are those of vLLM and, for `/v1/rerank`, of Jina and Cohere. Next to read: `routes/scores.py`.
"""

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from quire.server.protocol.answers import Answer
from quire.server.protocol.fields import (
    MAX_INTEGER,
    MAX_PROMPTS,
    Body,
    Prompts,
    Text,
)
from quire.server.protocol.prompts import EmbeddingUsage, PooledFields

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class PairFields(PooledFields):
    """Fields of routes that compare texts: limits that cut off the ends of documents."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INTEGER)
    """Tokens of a pair, or of each text where a model scores by embeddings. -1: as many as the model takes."""
    max_tokens_per_doc: int | None = Field(None, ge=1, le=MAX_INTEGER)
    """Tokens of a document, Cohere's name."""


class ScoreRequest(PairFields):
    """A query with all documents, or each query with its own. `text_1` and `text_2` are vLLM's older names."""

    queries: Text | Texts = Field(validation_alias=AliasChoices("queries", "text_1"))
    documents: Text | Texts = Field(validation_alias=AliasChoices("documents", "text_2"))


class Document(Body):
    """A document as an object."""

    text: Text


class RerankRequest(PairFields):
    """Documents to sort by a query. `top_n` unset: all of them."""

    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    top_n: int | None = Field(None, ge=0, le=MAX_INTEGER)
    """0 means all, as for vLLM."""
    return_documents: bool | None = True


class ClassifyRequest(PooledFields):
    """Texts, or lists of token ids."""

    input: Prompts


class Score(Answer):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Answer):
    """The scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(Answer):
    """A document of the request."""

    text: str


class Ranked(Answer):
    """A document's score and its index in the request."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankAnswer(Answer):
    """The best documents first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class Classified(Answer):
    """The likeliest label, and the probability of each."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Answer):
    """An entry per input, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage
