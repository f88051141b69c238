"""instructor: a model class as the answer in its modes, streamed in parts, as a list, and asked again after an error."""

import json
import sys
from collections.abc import Iterable
from typing import Any

import instructor
import openai
from pydantic import BaseModel, field_validator


class City(BaseModel):
    """A city."""

    city: str
    zip: str | None = None


class Checked(BaseModel):
    """A city that must not be Rome."""

    city: str

    @field_validator("city")
    @classmethod
    def _check(cls, value: str) -> str:
        if value == "Rome":
            raise ValueError("Rome is taken")
        return value


def main(url: str, model: str) -> list[Any]:
    """Return what each mode finds."""
    found: list[Any] = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON,
                 instructor.Mode.TOOLS_STRICT, instructor.Mode.RESPONSES_TOOLS):  # fmt: skip
        client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0), mode=mode)
        asked: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": f"FORM {mode.value}"}]}
        for name, ask in {
            "whole": lambda: client.chat.completions.create(**asked, response_model=City, max_retries=0).city,
            "partial": lambda: [part.city for part in client.chat.completions.create_partial(**asked, response_model=City)][-1],
            "list": lambda: [item.city for item in client.chat.completions.create(**asked, response_model=Iterable[City])],
            "again": lambda: client.chat.completions.create(**asked, response_model=Checked, max_retries=2).city,
        }.items():
            try:
                found.append((mode.value, name, ask()))
            except Exception as e:
                found.append((mode.value, name, repr(e)[:600]))
    return found


print(json.dumps(main(**json.loads(sys.argv[1]))))
