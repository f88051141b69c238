from collections.abc import Iterator

import pytest

from quire import _native


@pytest.fixture
def chosen_isa() -> Iterator[None]:
    """Let a test choose instruction sets: the one before is used again after it."""
    before = _native.isa()
    yield
    _native.set_isa(before)
