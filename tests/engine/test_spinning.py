import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("environment", "before", "expected"),
    [
        ({}, "", "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "", "7"),
        ({"OMP_WAIT_POLICY": "passive"}, "", "None"),
        ({}, "import sys; sys.modules['torch'] = sys; ", "None"),
    ],
)
def test_spinning_is_bounded_unless_the_user_chose(environment: dict[str, str], before: str, expected: str) -> None:
    inherited = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = f"{before}import os, quire.engine; print(os.environ.get('GOMP_SPINCOUNT'))"
    result = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == expected
