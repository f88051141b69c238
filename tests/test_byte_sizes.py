import pytest

from quire.byte_sizes import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (5, "5 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98_362_432, "93.8 MiB"), (500 * 2**30, "500 GiB"),
        (2**40, "1 TiB"), (5000 * 2**40, "5000 TiB"), (-1536, "-1.5 KiB"), (-500 * 2**20, "-500 MiB"),
    ],
)  # fmt: skip
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
