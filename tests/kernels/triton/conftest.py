"""These tests need Triton."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
