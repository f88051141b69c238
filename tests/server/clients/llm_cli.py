"""The command `llm`: a prompt whole and streamed, a tool, `-c` and `chat` as continuations, and a schema."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WEATHER = "def weather(city: str) -> str:\n    'Weather of a city'\n    return 'sunny in ' + city\n"


def main(url: str, model: str) -> list[str]:
    """Return the output of each command."""
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_name": model, "api_base": url + "/v1", "supports_tools": True, "supports_schema": True}
        models = [{"model_id": "chat", **entry}, {"model_id": "responses", "responses": True, **entry}]
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps(models))

        def llm(*arguments: str, lines: str = "") -> str:
            command = [sys.executable, "-m", "llm", *arguments]
            settings = {**os.environ, "LLM_USER_PATH": folder}
            done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, env=settings)
            return done.stdout.strip() if done.returncode == 0 else f"{done.stdout}\n{done.stderr}"

        found = []
        for name in ("chat", "responses"):
            found += [
                llm("-m", name, "hi", "--no-stream"),
                llm("-m", name, "--functions", WEATHER, "How is Rome?"),
                llm("-c", "--functions", WEATHER, "And now?"),
                llm("chat", "-c", "--functions", WEATHER, lines="Once more?\nexit\n"),
                llm("-m", name, "--schema", "city, days int", "FORM"),
                llm("-m", name, "-s", "Be brief.", "-o", "temperature", "0", "hi"),
            ]
        return found


print(json.dumps(main(**json.loads(sys.argv[1]))))
