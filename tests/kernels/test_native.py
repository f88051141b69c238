"""The C++ extension chooses an instruction set that this processor has and that passes its self-test."""

import os
import subprocess
import sys

import pytest

from quire import _native
from tests.kernels.native import packed_weights

pytestmark = pytest.mark.usefixtures("chosen_isa")

ISAS = [isa for isa in packed_weights.ISAS if isa != "amx_emulated"]
"""Those of this machine that may be chosen, the best last."""


def choice(requested: str, distrusted: list[str]) -> tuple[str, bool, list[str]]:
    """Return the set that is chosen, whether the requested one is missing, and the sets that failed their self-test."""
    chosen, missing, notes = _native.choose_isa(requested, distrusted)
    return chosen, missing, [note.split()[0] for note in notes if "self-test failed" in note]


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks mmx"):
        _native.set_isa("mmx")


@pytest.mark.parametrize("requested", ["", *ISAS])
def test_next_lower_set_is_used_after_a_failed_self_test(requested: str) -> None:
    best = requested or ISAS[-1]
    assert choice(requested, []) == (best, False, [])
    lower = ISAS[ISAS.index(best) - 1] if best != "scalar" else best
    assert choice(requested, [best]) == (lower, False, [best] if best != "scalar" else [])
    chosen, _, failed = choice(requested, ISAS)
    assert chosen == "scalar", "it needs no trust"
    assert len(failed) == ISAS.index(best)


@pytest.mark.parametrize("isa", packed_weights.ALL_ISAS)
def test_every_set_passes_its_self_test(isa: str) -> None:
    if _native.isa_supported(isa):
        assert _native.self_test(isa) == ""
    else:
        pytest.skip(f"this processor or this build lacks {isa}")


def test_unknown_sets_are_missing_and_the_best_is_used() -> None:
    assert choice("mmx", []) == (ISAS[-1], True, [])
    assert all("this build lacks it" in note for note in _native.isa_notes())


@pytest.mark.parametrize(("wanted", "expected"), [("scalar", "scalar False"), ("mmx", None)])
def test_environment_chooses_and_falls_back(wanted: str, expected: str | None) -> None:
    code = "from quire import _native; print(_native.isa(), _native.requested_isa_missing)"
    environment = {**os.environ, "QUIRE_ISA": wanted}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == (expected or f"{ISAS[-1]} True")


def test_set_that_the_build_lacks_is_named_and_replaced() -> None:
    _, _, notes = _native.choose_isa("", [])
    lacking = [note.split()[0] for note in notes if "this build lacks it" in note]
    assert lacking[:1] == ([_native.unbuilt_isa] if _native.unbuilt_isa else [])
    assert not any(map(_native.isa_supported, lacking))
    for isa in lacking:
        assert _native.choose_isa(isa, [])[:2] == (ISAS[-1], True)
