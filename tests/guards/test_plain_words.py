"""The rules of CONTRIBUTING.md, "Plain words", for docstrings, comments, help texts and pages."""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPENING = re.compile(r"(What|Whether|Who|Whoever|How|Where|So|One|Until|Nobody|To be|All that|The one)\b")
QUOTED_OPENING = re.compile(rf"[\"'][\\\s]*{OPENING.pattern}")
WORDS = re.compile(
    r"\b(who|whoever|nobody|somebody|anybody|everybody|so many|all that|the one that|in vain|seats?|a stranger)\b",
    re.IGNORECASE,
)
CPP_COMMENT = re.compile(r"//(.*)$")
MARKDOWN_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def listed(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


PYTHON_FILES = listed("src/*.py", "tests/*.py", "benchmarks/*.py", "examples/*.py")
CPP_FILES = listed("native/*.h", "native/*.cpp")
PAGES = [path for path in listed("*.md") if "results" not in path.parts]


def docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and text of each docstring, those of attributes included."""
    found = []
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    found.append((statement.lineno, text.strip()))
    return found


def help_texts(tree: ast.AST) -> list[tuple[int, str]]:
    """The texts that users see: every string constant of a call's `help=` and of `option(default, text)`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            values = [keyword.value for keyword in node.keywords if keyword.arg in ("help", "text", "epilog")]
            if isinstance(node.func, ast.Name) and node.func.id == "option":
                values += node.args[1:2]
            found += [
                (part.lineno, part.value)
                for value in values
                for part in ast.walk(value)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
    return found


def comments(source: str) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def riddles(path: Path, texts: list[tuple[int, str]], openings: list[tuple[int, str]]) -> list[str]:
    name = path.relative_to(ROOT)
    found = [
        f"{name}:{line}: opens with {m[0]!r}: {text[:60]}" for line, text in openings if (m := OPENING.match(text))
    ]
    for line, text in texts:
        plain = re.sub(r"`[^`]*`", "", text)
        found += [f"{name}:{line}: says {match[0]!r}" for match in WORDS.finditer(plain)]
    return found


def test_python_says_it_plainly() -> None:
    found = []
    for path in PYTHON_FILES:
        if path == Path(__file__):
            continue
        source = path.read_text()
        is_test = "tests" in path.relative_to(ROOT).parts
        has_words, has_openings = WORDS.search(source), not is_test and QUOTED_OPENING.search(source)
        if not has_words and not has_openings:
            continue  # parsing all files takes 5 s
        tree = ast.parse(source)
        texts = docstrings(tree)
        said = texts + help_texts(tree) + comments(source) if has_words else []
        found += riddles(path, said, [] if is_test else texts)
    assert not found, "\n".join(found)


def test_cpp_comments_say_it_plainly() -> None:
    found = []
    for path in CPP_FILES:
        lines = enumerate(path.read_text().splitlines(), 1)
        found += riddles(path, [(n, m[1]) for n, line in lines if (m := CPP_COMMENT.search(line))], [])
    assert not found, "\n".join(found)


def test_pages_say_it_plainly() -> None:
    found = []
    for path in PAGES:
        text = MARKDOWN_CODE.sub(lambda match: "\n" * match[0].count("\n"), path.read_text())
        found += riddles(path, list(enumerate(text.splitlines(), 1)), [])
    assert not found, "\n".join(found)
