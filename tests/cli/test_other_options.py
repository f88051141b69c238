"""Options of other engines are told their names here, by verbs that have them."""

import pytest

from quire.cli.main import VERBS, cli
from quire.cli.other_options import OTHER_OPTIONS
from tests.cli.command_line import call


@pytest.mark.parametrize(
    ("verb", "option", "message"),
    [
        ("serve", "--ctx-size", "No such option '--ctx-size': --max-model-len is the context length here"),
        ("serve", "--api-key", "set QUIRE_API_KEY, or use --api-key-file"),
        ("chat", "--api-key", "which others can read: set QUIRE_API_KEY (see"),
        ("chat", "--temp", "--temperature is its whole name"),
        ("serve", "--disable-log-requests", "--quiet leaves the lines of requests out"),
        ("ps", "--ctx-size", "No such option '--ctx-size' (see"),
    ],
)
def test_the_name_here_is_told_where_the_verb_has_it(verb: str, option: str, message: str) -> None:
    result = call(verb, option, "1")
    assert result.exit_code == 2
    assert message in result.stderr


def test_none_of_them_is_an_option_of_the_verbs_that_serve_and_run() -> None:
    with cli.make_context("quire", ["version"]) as context:
        for verb in VERBS:
            command = cli.get_command(context, verb)
            assert command is not None
            names = {name for parameter in command.params for name in parameter.opts}
            if verb in ("serve", "run"):
                assert not names & set(OTHER_OPTIONS)
