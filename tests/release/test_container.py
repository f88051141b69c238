"""deploy/Dockerfile, and the script that performs its steps without Docker. `make container-check` runs that script."""

import re
from pathlib import Path

import pytest

from tests.release.scripts import ROOT, load_script

TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
DOCKERFILE, CHECK = load_script("release/dockerfile.py"), load_script("release/check_container.py")
EXAMPLE = r"""
# a comment
FROM base AS first
RUN a \
    # a comment among continued lines
    && b
COPY one two* /there/

FROM base
ENV A=1 \
    B=2
COPY --from=first /there /here
USER 7
HEALTHCHECK --interval=1s \
    CMD ["ask", "it"]
ENTRYPOINT ["serve"]
"""


def test_stages_have_their_steps_in_order_and_the_settings_of_their_containers() -> None:
    first, last = DOCKERFILE.read_stages(EXAMPLE)
    assert (first.base, first.name, last.name) == ("base", "first", "")
    assert first.steps == [("RUN", "a && b"), ("COPY", "one two* /there/")]
    assert last.steps == [("COPY", "--from=first /there /here")]
    assert last.environment == {"A": "1", "B": "2"}
    assert (last.user, last.healthcheck, last.entrypoint) == ("7", ["ask", "it"], ["serve"])


def test_instruction_that_the_check_would_pass_over_is_refused() -> None:
    with pytest.raises(SystemExit, match="does not know the instruction ADD"):
        DOCKERFILE.read_stages("FROM base\nADD a b\n")


def test_image_is_made_of_wheels_and_nothing_is_compiled() -> None:
    build, image = DOCKERFILE.read_stages(TEXT)
    assert {build.base, image.base} == {CHECK.BASE}
    commands = " ".join(rest for word, rest in (*build.steps, *image.steps) if word == "RUN")
    assert "--only-binary=:all:" in commands
    assert not re.search(r"\b(g\+\+|gcc|clang|make|cmake)\b", commands)
    assert [rest for word, rest in image.steps if word == "COPY"] == ["--from=build /opt/quire /opt/quire"]


def test_image_runs_as_a_user_with_its_models_in_a_volume() -> None:
    image = DOCKERFILE.read_stages(TEXT)[-1]
    assert image.user == "10001"
    assert image.settings["VOLUME"] == image.workdir == image.environment["HF_HOME"] == "/models"
    assert image.environment["QUIRE_CACHE_DIR"].startswith("/models/")
    assert image.settings["STOPSIGNAL"] == "SIGTERM"
    assert "QUIRE_API_KEY" not in image.environment


def test_wheel_of_the_image_is_one_that_make_wheel_builds() -> None:
    """Debian's Python decides which."""
    build = DOCKERFILE.read_stages(TEXT)[0]
    pattern = next(word for step, rest in build.steps if step == "COPY" for word in rest.split() if "quire-" in word)
    tag = re.search(r"-(cp\d+)-", pattern)
    assert tag is not None
    suite = build.base.removeprefix("debian:").removesuffix("-slim")
    assert load_script("release/check_wheels.py").SUITES[tag[1]] == suite
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert Path(pattern).parts[0] not in ignored


def test_copy_takes_files_by_pattern_and_whole_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECK, "ROOTS", tmp_path / "roots")
    context, root = tmp_path / "context", tmp_path / "roots" / "container-last"
    (context / "dist").mkdir(parents=True)
    for name in ("a-1.whl", "a-2.whl", "b.txt"):
        (context / "dist" / name).write_text(name)
    CHECK.copy(["dist/a-*.whl", "/wheels/"], root, context)
    assert sorted(path.name for path in (root / "wheels").iterdir()) == ["a-1.whl", "a-2.whl"]
    with pytest.raises(SystemExit, match=r"COPY dist/c-\*: no such file"):
        CHECK.copy(["dist/c-*", "/wheels/"], root, context)
    other = tmp_path / "roots" / "container-build"
    (other / "opt" / "quire" / "bin").mkdir(parents=True)
    CHECK.copy(["--from=build", "/opt/quire", "/opt/quire"], root, context)
    assert (root / "opt" / "quire" / "bin").is_dir()


def test_image_that_is_large_or_has_a_compiler_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "usr" / "bin").mkdir(parents=True)
    (tmp_path / "data").write_bytes(bytes(1000))
    (tmp_path / "same").hardlink_to(tmp_path / "data")
    monkeypatch.setattr(CHECK, "MAX_BYTES", 1000)
    CHECK.check_files(tmp_path)
    (tmp_path / "usr" / "bin" / "g++").touch()
    with pytest.raises(SystemExit, match=r"the image has g\+\+"):
        CHECK.check_files(tmp_path)
    monkeypatch.setattr(CHECK, "MAX_BYTES", 999)
    with pytest.raises(SystemExit, match="that is more than"):
        CHECK.check_files(tmp_path)
