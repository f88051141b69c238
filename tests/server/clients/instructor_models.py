"""instructor: a class as the form of an answer, in its modes."""

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


MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON,
         instructor.Mode.RESPONSES_TOOLS]  # fmt: skip


def main(url: str, model: str) -> dict[str, Any]:
    """Return what each mode finds: whole, streamed in parts, as a list, and after a second try."""
    found = {}
    for mode in MODES:
        client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0), mode=mode)
        create, stream = client.chat.completions.create, client.chat.completions.create_partial
        asked: Any = {"model": model, "messages": [{"role": "user", "content": "Which city?"}]}
        several = {**asked, "messages": [{"role": "user", "content": "Which cities?"}]}
        found[mode.value] = [
            create(**asked, response_model=City, max_retries=0).city,
            [part.city for part in stream(**asked, response_model=City)][-1],
            [item.city for item in create(**several, response_model=Iterable[City], max_retries=0)],
            create(**asked, response_model=Checked, max_retries=1).city,
        ]
    return found


print(json.dumps(main(**json.loads(sys.argv[1]))))
