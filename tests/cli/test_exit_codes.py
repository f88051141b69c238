"""Every code has a meaning, and every error of the tree a documented code."""

from quire.cli.exit_codes import MEANINGS, ExitCode
from quire.errors import QuireError


def all_errors(error: type[QuireError]) -> list[type[QuireError]]:
    return [error, *(found for child in error.__subclasses__() for found in all_errors(child))]


def test_every_code_is_explained() -> None:
    assert list(MEANINGS) == list(ExitCode)
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 5, 6, 130, 143]


def test_every_error_has_a_documented_exit_code() -> None:
    assert {error.exit_code for error in all_errors(QuireError)} <= {int(code) for code in ExitCode}
