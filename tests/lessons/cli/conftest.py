"""The environment of tests/cli."""

from tests.cli.conftest import plain_environment

__all__ = ["plain_environment"]
