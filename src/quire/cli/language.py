"""`--lang`: the language of the fixed sentences of `tour`, `explain`, `view` and `learn`. JSON is always English.

Next to read: `../insight/chinese.py`.
"""

import os
from collections.abc import Callable

import click

from quire.cli.command import option

LANGUAGES = ("en", "zh")
VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first that is set counts, as for other programs."""


def language_of(chosen: str | None) -> str:
    """Return the language to speak: the chosen one, else that of the environment, as the C library reads it."""
    if chosen is not None:
        return chosen
    found = next((value for name in VARIABLES if (value := os.environ.get(name))), "")
    return "zh" if found.lower().startswith("zh") else "en"


def _chosen(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Callable[[str], str]:
    if language_of(value) == "en":
        return str
    from quire.insight.chinese import to_chinese

    return to_chinese


lang_option = option(
    "--lang",
    "translate",
    type=click.Choice(LANGUAGES),
    callback=_chosen,
    help="language of fixed sentences  [zh if LANG begins so, else en]",
)
"""Passes `translate`: a text to the same text in the chosen language."""


def is_english(translate: Callable[[str], str]) -> bool:
    """Return whether `translate` leaves texts as they are."""
    return translate is str
