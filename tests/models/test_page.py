"""`docs/models.md` is current, and every model file is planned."""

from tests.models.page import main, render


def test_page_of_models_is_current() -> None:
    assert main(["--check"]) == 0, "run: python -m tests.models.page"


def test_every_model_file_is_planned() -> None:
    assert "| no |" not in render()
