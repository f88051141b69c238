"""The table of verbs: those of Quire, and those that other packages bring by entry points of the group `quire.verbs`.

An entry point names such a table, with plain tuples as rows, in a module that imports nothing. Next to read: `main.py`.
"""

import functools
import glob
import importlib
import os
import sys
from typing import NamedTuple

import click

from quire.errors import InstallationError


class Verb(NamedTuple):
    """The module of a verb, and its line in the top-level help."""

    section: str
    module: str
    summary: str


SECTIONS = ("Use", "Models", "See inside", "Learn", "Measure", "Operate")
"""Sections of the top-level help in their order; those of other packages' own come last."""

OWN: dict[str, Verb] = {
    "run": Verb("Use", "quire.cli.run", "Answer one prompt, or chat."),
    "chat": Verb("Use", "quire.cli.chat_client", "Chat with a server."),
    "serve": Verb("Use", "quire.cli.serve", "Serve a model over HTTP with OpenAI's API."),
    "batch": Verb("Use", "quire.cli.batch", "Answer a file of requests."),
    "pull": Verb("Models", "quire.cli.models", "Fetch a model into the cache."),
    "ls": Verb("Models", "quire.cli.models", "List cached models."),
    "show": Verb("Models", "quire.cli.show", "Describe a model: architecture, sizes, tensors, tokenizer."),
    "rm": Verb("Models", "quire.cli.models", "Remove a model from the cache."),
    "tokenize": Verb("Models", "quire.cli.tokenize", "Show how text becomes tokens."),
    "explain": Verb("See inside", "quire.cli.explain", "Explain a model's size, memory, work and time."),
    "trace": Verb("See inside", "quire.cli.trace", "Record what the engine does; make a timeline of a recording."),
    "view": Verb("See inside", "quire.cli.view", "Draw one step: mask, blocks, time, instructions."),
    "top": Verb("Measure", "quire.cli.top", "Watch a server."),
    "ps": Verb("Operate", "quire.cli.ps", "List the servers of this machine."),
    "cache ls": Verb("Operate", "quire.cli.cache", "List the KV blocks that --kv-disk keeps."),
    "cache verify": Verb("Operate", "quire.cli.cache", "Find damaged KV blocks."),
    "cache clear": Verb("Operate", "quire.cli.cache", "Delete KV blocks."),
    "doctor": Verb("Operate", "quire.cli.doctor", "Check this machine and installation."),
    "completion": Verb("Operate", "quire.cli.version", "Print the completion script of a shell."),
    "version": Verb("Operate", "quire.cli.version", "Print the version."),
}
"""Each verb `x` is the Click command `x_command` of its module; one of two words `x y` is `x_y_command`."""
GROUP = "quire.verbs"
"""The group of the entry points."""
_REMEDY = "install its package again, or remove it"


def all_verbs() -> dict[str, Verb]:
    """Return the verbs of Quire and of installed packages, section by section. A name that Quire has is Quire's."""
    verbs = {**OWN, **_plugged()[0], **OWN}
    sections = list(dict.fromkeys((*SECTIONS, *(verb.section for verb in verbs.values()))))
    return dict(sorted(verbs.items(), key=lambda item: sections.index(item[1].section)))


def broken_tables() -> list[str]:
    """Return a line for each table of an installed package that cannot be imported."""
    return _plugged()[1]


def load(name: str) -> click.Command:
    """Import a verb's module and return its command. Raises: InstallationError for a package that does not work."""
    verb = OWN[name] if name in OWN else all_verbs()[name]
    try:
        command = getattr(importlib.import_module(verb.module), f"{name.replace(' ', '_')}_command")
    except (ImportError, AttributeError, SyntaxError) as error:
        if name in OWN or getattr(error, "name", None) == "quire._native":
            raise
        raise InstallationError(f"'{name}' cannot be imported from {verb.module}: {error}; {_REMEDY}") from error
    assert isinstance(command, click.Command)
    return command


@functools.cache
def _plugged() -> tuple[dict[str, Verb], list[str]]:
    """Import the tables of installed packages. Returns: their verbs, and a line for each that cannot be imported."""
    verbs: dict[str, Verb] = {}
    broken = []
    for point, place in _entry_points().items():
        module, _, attribute = place.partition(":")
        try:
            table = getattr(importlib.import_module(module), attribute)
            verbs = {**verbs, **{name: Verb(*row) for name, row in table.items()}, **verbs}
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            broken.append(f"the verbs of '{point}' cannot be imported from {place}: {reason}; {_REMEDY}")
    return verbs, broken


def _entry_points() -> dict[str, str]:
    """Return name and place of each entry point of the group, the first of a name on Python's path.

    `importlib.metadata` finds the same ones in 25 ms, ten times as long.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        for path in glob.iglob(os.path.join(glob.escape(folder or os.curdir), "*.dist-info", "entry_points.txt")):
            with open(path, encoding="utf-8") as file:
                section = file.read().partition(f"[{GROUP}]\n")[2].partition("\n[")[0]
            for line in filter(None, section.splitlines()):
                name, _, place = line.partition("=")
                found.setdefault(name.strip(), place.strip())
    return found
