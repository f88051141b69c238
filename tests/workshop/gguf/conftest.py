"""One thread for torch, as in tests/models."""

from tests.models.conftest import one_thread

__all__ = ["one_thread"]
