"""The tests that SECURITY.md names exist; nothing in the packages turns bytes into code."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "marshal",
    "shelve",
    "cloudpickle",
    "joblib",
    "yaml",
    "xmlrpc",
    "multiprocessing.managers",
}
CALLS = {"eval", "exec", "__import__", "torch.load", "os.system", "os.popen", "pickle.loads", "numpy.load", "np.load"}


WORDS = re.compile(rf"\b({'|'.join(name.rsplit('.', 1)[-1] for name in (*MODULES, *CALLS, '.shell'))})\b")
"""One of these is in every source with an offence; to parse them all takes 2 s."""


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)) if WORDS.search(source) else ():
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            called = name_of(node.func)
            found += [called] if called in CALLS else []
            found += ["shell=True" for keyword in node.keywords if keyword.arg == "shell"]
    return found


def test_named_tests_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", TEXT))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_row_names_a_test() -> None:
    rows = [
        line
        for line in TEXT.splitlines()
        if line.startswith("| ") and not line.startswith(("| what", "| ---", "| class"))
    ]
    assert len(rows) > 15
    assert [row for row in rows if "`tests/" not in row] == []


def test_no_source_turns_bytes_into_code() -> None:
    found = {path.name: calls for path in SOURCES if (calls := offences(path.read_text()))}
    # `quire learn check FILE` runs the user's own file, as `python FILE` does.
    assert found == {"exercise.py": ["exec"]}


def test_server_imports_no_http_client() -> None:
    banned = {"requests", "httpx", "aiohttp", "urllib.request", "http.client", "ftplib", "smtplib"}
    for path in (ROOT / "src" / "quire" / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not banned & set(names), path
