"""Tests mirror the source; the repository holds no machine paths; every public name exists."""

import re
import subprocess
from pathlib import Path

import quire

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "quire"
# Their behaviour is tested through the file named.
COVERED_ELSEWHERE = {
    "sampling/rows.py": "sampling/test_sampler.py",  # a protocol: its two implementations
    "sampling/torch_rows.py": "sampling/test_sampler.py",
    "cli/serve.py": "server/test_run.py",  # the life of a real server
    "server/supervisor.py": "server/test_run.py",
}


def test_every_source_file_has_its_test_file() -> None:
    missing = []
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        if path.name.startswith("__") or relative.parts[0] in ("kernels", "models"):
            continue  # kernels and models are found and tested by folder: tests/kernels, tests/models
        mirror = ROOT / "tests" / relative.parent / f"test_{relative.name}"
        covered = COVERED_ELSEWHERE.get(str(relative))
        if not mirror.exists() and not (covered and (ROOT / "tests" / covered).exists()):
            missing.append(str(relative))
    assert missing == []


def test_public_names_resolve() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None


def test_no_machine_paths() -> None:
    pattern = re.compile(r"/(?:ho" r"me|ro" r"ot|wo" r"rk|Us" r"ers)/[a-z]|/tm" r"p/[a-z]")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    found = []
    for name in listed:
        path = ROOT / name
        if not path.is_file() or path.suffix in (".png", ".gguf", ".safetensors"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    assert found == []
