"""What the requests of several routes share: sampling fields with vLLM's names, under OpenAI's limits.

A field that is not listed is an error that names the nearest one: a misspelt `max_token` must not pass silently.
Ranges are checked here so that the API's description shows them; what needs the model is checked by the engine's
`InputProcessor`. Next to read: `chat.py`.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from quire.sampling_params import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_COMPLETIONS = 128
MAX_LOGIT_BIASES = 1024
MAX_INTEGER = 2**31 - 1

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INTEGER)]


class Body(BaseModel):
    """A JSON object with known fields only; numbers are not read out of strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream brings beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Taken for compatibility: nothing is ever padded."""


class SamplingFields(Body):
    """How tokens are chosen; unset values are the model's recommendation, then `SamplingParams`' defaults."""

    n: int = Field(1, ge=1, le=MAX_COMPLETIONS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INTEGER)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=1000)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_LOGIT_BIASES)
    bad_words: list[StopString] | None = Field(None, max_length=128)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_LOGIT_BIASES)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INTEGER)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    priority: int = Field(0, ge=-MAX_INTEGER, le=MAX_INTEGER)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\w.:-]+$")
    user: str | None = Field(None, max_length=512)
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    def sampling_values(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the client set."""
        chosen = {name: getattr(self, name) for name in SHARED_NAMES if getattr(self, name) is not None}
        chosen["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        return chosen


SHARED_NAMES = tuple(name for name in SamplingFields.model_fields if name in SamplingParams.__dataclass_fields__)


def known_names() -> set[str]:
    """Names of all fields of all requests, for suggestions."""
    found: set[str] = set()
    waiting = list(Body.__subclasses__())
    while waiting:
        kind = waiting.pop()
        found |= set(kind.model_fields)
        waiting += kind.__subclasses__()
    return found
