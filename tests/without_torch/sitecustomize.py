"""Makes every import of torch an error; Python imports this file at start from PYTHONPATH."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
