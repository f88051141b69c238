"""The environment and the engine without a model of tests/cli."""

from tests.cli.conftest import engines, plain_environment

__all__ = ["engines", "plain_environment"]
