"""`--lang`: the language of the fixed sentences of `tour`, `explain` and `view`. JSON is English in any language.

Next to read: `../insight/chinese.py`.
"""

import os
from collections.abc import Callable

import click

from quire.cli.command import option

LANGUAGES = ("en", "zh")
VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first that is set counts, as for other programs."""


def _chosen(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Callable[[str], str]:
    if value is None:
        value = next((found for name in VARIABLES if (found := os.environ.get(name))), "")
    if not value.lower().startswith("zh"):
        return str
    from quire.insight.chinese import to_chinese

    return to_chinese


lang_option = option(
    "--lang", "translate", type=click.Choice(LANGUAGES), callback=_chosen,
    help="language of fixed sentences  [zh if LANG begins so, else en]",
)  # fmt: skip
"""Passes `translate`: a text to the same text in the chosen language."""


def is_english(translate: Callable[[str], str]) -> bool:
    """Return whether `translate` leaves texts as they are."""
    return translate is str
