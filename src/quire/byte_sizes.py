"""Sizes in bytes as people read them, the same in errors, decisions and the command line's tables.

Next to read: `resolve.py`.
"""


def format_bytes(num_bytes: int) -> str:
    """1536 → "1.5 KiB"; three significant digits."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.3g} {unit}"
