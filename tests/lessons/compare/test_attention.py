"""KV cache of MHA, GQA, MQA, MLA and windows: known sizes, and times of the real kernel."""

import pytest

from quire.errors import ConfigError
from quire_lessons.compare import run
from quire_lessons.compare.results import RunSettings


def test_fake_model_has_no_kernels_to_measure() -> None:
    with pytest.raises(ConfigError, match="fake"):
        run("attention", RunSettings(model="fake"))
