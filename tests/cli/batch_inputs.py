"""Files of a batch, for its tests."""

import json
from pathlib import Path
from typing import Any

URL = "/v1/chat/completions"


def request(custom_id: Any, **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"messages": []}, **fields}


def write_lines(path: Path, *lines: Any) -> Path:
    """Write a line for each value: JSON, or a string as it is."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    lines = read_lines(path)
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found
