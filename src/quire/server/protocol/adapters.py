"""Bodies of the routes that load and unload adapters. Next to read: `../routes/adapters.py`."""

from typing import Literal

from quire.server.protocol.answers import Answer
from quire.server.protocol.fields import Body


class LoadAdapterRequest(Body):
    """An adapter to load."""

    lora_name: str
    """The name by which requests choose it, as their `model`."""
    lora_path: str
    """PEFT's directory, or a GGUF file, on the server's machine."""
    model: str | None = None
    """The model to adapt, of several; unset: the first."""


class UnloadAdapterRequest(Body):
    """An adapter to forget."""

    lora_name: str
    """Its name."""


class AdapterAnswer(Answer):
    """The result for an adapter."""

    lora_name: str
    status: Literal["loaded", "unloaded"]
