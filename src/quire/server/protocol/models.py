"""`/v1/models`: what the server has. There is one model.

Next to read: `routes/models.py`.
"""

from typing import Literal

from quire.server.protocol.answers import Answer


class ModelCard(Answer):
    """One model, under the name that requests call it by. `created` is when the server started."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(Answer):
    """The server's version."""

    version: str


class StatusAnswer(Answer):
    """The answer of a probe."""

    status: str
