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


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks mmx"):
        _native.set_isa("mmx")


@pytest.mark.parametrize("requested", ["", *ISAS])
def test_next_lower_set_is_used_after_a_failed_self_test(requested: str) -> None:
    best = requested or ISAS[-1]
    assert _native.choose_isa(requested, []) == (best, False, [])
    lower = ISAS[ISAS.index(best) - 1] if best != "scalar" else best
    chosen, missing, notes = _native.choose_isa(requested, [best])
    assert (chosen, missing) == (lower, False)
    assert [note.split()[0] for note in notes] == ([best] if best != "scalar" else [])
    chosen, _, notes = _native.choose_isa(requested, ISAS)
    assert chosen == "scalar", "it needs no trust"
    assert len(notes) == ISAS.index(best)


@pytest.mark.parametrize("isa", packed_weights.ALL_ISAS)
def test_every_set_passes_its_self_test(isa: str) -> None:
    if _native.isa_supported(isa):
        assert _native.self_test(isa) == ""
    else:
        pytest.skip(f"this processor lacks {isa}")


def test_unknown_sets_are_missing_and_the_best_is_used() -> None:
    assert _native.choose_isa("mmx", []) == (ISAS[-1], True, [])
    assert _native.isa_notes() == []


@pytest.mark.parametrize(("wanted", "expected"), [("scalar", "scalar False"), ("mmx", None)])
def test_environment_chooses_and_falls_back(wanted: str, expected: str | None) -> None:
    code = "from quire import _native; print(_native.isa(), _native.requested_isa_missing)"
    environment = {**os.environ, "QUIRE_ISA": wanted}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == (expected or f"{ISAS[-1]} True")
