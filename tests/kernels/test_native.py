"""The C++ extension: every instruction set this processor has gives the same bits."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from quire import _native
from quire.kernels.rms_norm import native, reference

ALL_ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
ISAS = [isa for isa in ALL_ISAS if _native.isa_supported(isa)]


@pytest.fixture(autouse=True)
def chosen_isa() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.set_isa(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 15), (5, 16), (7, 67), (33, 576)])
def test_instruction_sets_agree_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    x, weight = torch.randn(shape, generator=generator).to(dtype), torch.randn(shape[1], generator=generator).to(dtype)
    results = []
    for isa in ISAS:
        _native.set_isa(isa)
        assert _native.isa() == isa
        results.append(native.rms_norm(x, weight, 1e-5))
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_a_number_stays_one_in_its_own_row(dtype: torch.dtype) -> None:
    x = torch.ones(3, 40, dtype=dtype)
    x[1, 7] = torch.nan
    found = native.rms_norm(x, torch.ones(40, dtype=dtype), 0.0)
    assert found[1].isnan().all()
    assert (found[[0, 2]] == 1).all()


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks mmx"):
        _native.set_isa("mmx")


@pytest.mark.parametrize("requested", ["", *ISAS])
def test_the_next_lower_set_is_used_after_a_failed_self_test(requested: str) -> None:
    best = requested or ISAS[-1]
    assert _native.choose_isa(requested, []) == (best, False, [])
    lower = ISAS[ISAS.index(best) - 1] if best != "scalar" else best
    chosen, missing, notes = _native.choose_isa(requested, [best])
    assert (chosen, missing) == (lower, False)
    assert [note.split()[0] for note in notes] == ([best] if best != "scalar" else [])
    chosen, _, notes = _native.choose_isa(requested, ISAS)
    assert chosen == "scalar", "it needs no trust"
    assert len(notes) == ISAS.index(best)


@pytest.mark.parametrize("isa", [*ALL_ISAS, "amx_emulated"])
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
