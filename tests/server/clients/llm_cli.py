"""The command `llm`: a prompt whole and streamed, a tool, `-c` and `chat` as continuations, and a schema."""

import json
import os
import sys
import tempfile
from pathlib import Path

from click.testing import CliRunner

WEATHER = "def weather(city: str) -> str:\n    'Weather of a city'\n    return 'sunny in ' + city\n"


def main(url: str, model: str) -> list[list[str]]:
    """Return the output of each command, over chat and over responses."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        entry = {"model_name": model, "api_base": url + "/v1", "supports_tools": True, "supports_schema": True}
        models = [{"model_id": "chat", **entry}, {"model_id": "responses", "responses": True, **entry}]
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps(models))
        from llm.cli import cli

        def llm(*arguments: str, lines: str = "") -> str:
            done = CliRunner().invoke(cli, arguments, input=lines, env={"LLM_USER_PATH": folder})
            return done.stdout.strip() if done.exit_code == 0 else f"{done.output}: {done.exception!r}"

        return [
            [
                llm("-m", name, "hi", "--no-stream"),
                llm("-m", name, "-s", "Be brief.", "-o", "temperature", "0", "hi"),
                llm("-m", name, "--functions", WEATHER, "How is Rome?"),
                llm("-c", "--functions", WEATHER, "And now?"),
                llm("chat", "-c", "--functions", WEATHER, lines="Once more?\nexit\n"),
                llm("-m", name, "--schema", "city, days int", "FORM"),
            ]
            for name in ("chat", "responses")
        ]


print(json.dumps(main(**json.loads(sys.argv[1]))))
