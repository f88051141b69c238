"""Reader of a Dockerfile: its stages and their instructions, for `check_container.py`, which performs them."""

import json
import re
import sys
from dataclasses import dataclass, field

METADATA = {"LABEL", "EXPOSE", "VOLUME", "STOPSIGNAL"}
"""Instructions that change no file."""


@dataclass
class Stage:
    """An image to be built. `steps`: the instructions that change files, each with its arguments and the environment.

    `user`, `workdir`, `entrypoint`, `healthcheck` and `settings` are those of a container that runs it.
    """

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)


def read_stages(text: str) -> list[Stage]:
    """Return the stages of a Dockerfile. Raises: SystemExit for an instruction that is not known here."""
    stages: list[Stage] = []
    for word, rest in instructions(text):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name))
            continue
        stage = stages[-1]
        if word in ("RUN", "COPY"):
            stage.steps.append((word, rest))
        elif word == "ENV":
            stage.environment |= dict(re.findall(r"(\w+)=(\S+)", rest))
        elif word == "USER":
            stage.user = rest
        elif word == "WORKDIR":
            stage.workdir = rest
        elif word == "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        elif word == "HEALTHCHECK":
            stage.healthcheck = json.loads(rest.split("CMD ", 1)[1])
        elif word in METADATA:
            stage.settings[word] = rest
        else:
            sys.exit(f"release/dockerfile.py does not know the instruction {word}: teach it, or leave it out")
    return stages


def instructions(text: str) -> list[tuple[str, str]]:
    """Return each instruction's word and its arguments, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]
