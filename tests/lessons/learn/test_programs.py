"""Each program exercise: its solution passes, a plausible wrong program is told in which case it fails."""

from pathlib import Path
from typing import Any

import pytest

from quire_lessons.learn.exercise import Text
from quire_lessons.learn.grading import PROGRAMS, checks, grade

SOLUTIONS = {item.name: item.solution for item in PROGRAMS}


def finding(name: str, source: str, folder: Path) -> Text | None:
    """Return what the check of an exercise finds wrong with a program; None if it passes."""
    path, found = folder / "answer.py", list[dict[str, Any]]()
    path.write_text(source)
    grade(name, str(path), found.append)
    if "passed" in found[-1]:
        return None
    text = found[-1]["wrong"]
    assert isinstance(text, Text)
    assert text.zh != text.en
    return text


def test_every_program_has_a_check() -> None:
    assert {item.name for item in PROGRAMS} == set(checks())


@pytest.mark.parametrize("name", SOLUTIONS)
def test_solution_passes(name: str, tmp_path: Path) -> None:
    assert finding(name, SOLUTIONS[name], tmp_path) is None


@pytest.mark.parametrize("item", PROGRAMS, ids=lambda item: item.name)
def test_unfinished_start_is_no_solution(item: Any, tmp_path: Path) -> None:
    assert item.defines in item.start
    assert finding(item.name, item.start, tmp_path) is not None


def changed(name: str, old: str, new: str) -> str:
    assert old in SOLUTIONS[name]
    return SOLUTIONS[name].replace(old, new)


WRONG: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "mask without the cached prefix": (
        "mask", changed("mask", "num_cached + row", "row"), ("mask(6, 3) [0]", "position 6", "reads position 1"),
    ),
    "mask without causality": (
        "mask", changed("mask", "position <= num_cached + row", "True"), ("mask(0, 5) [0]", "does not read position 1"),
    ),
    "mask without a token's own position": ("mask", changed("mask", "<=", "<"), ("mask(0, 5) [0]", "reads position 0")),
    "mask of the new positions only": (
        "mask", changed("mask", "range(length)", "range(num_new)"), ("mask(6, 3) [0]", "a list of 9 numbers"),
    ),
    "pool with block 0": ("pool", changed("pool", "range(1, num_blocks)", "range(num_blocks)"), ("must be 7; it is"
                                                                                                 " 8",)),
    "pool without counts": (
        "pool", changed("pool", "if self.owners[block_id] == 0", "if True"), ("must be 5; it is 6", "another owner"),
    ),
    "pool that gives a block twice": (
        "pool", changed("pool", "self.free.pop() for", "self.free[-1] for"), ("take(3) gives block 7", "in use"),
    ),
    "pool that loses blocks": (
        "pool", changed("pool", "self.free.append(block_id)", "pass"), ("After release(7) num_free() must be 5; it"
                                                                        " is 4",),
    ),
    "pool that gives a block twice under load": (
        "pool", changed("pool", "self.free.append(block_id)",
        "self.free.append(block_id if len(self.free) < 90 else 1)"),
        ("gives block 1, which is in use",),
    ),
    "order without a number": ("order", "def order(*args):\n    return float('nan')", ("a number; it returns nan",)),
    "order of arrival": (
        "order", changed("order", "prompt_len + 2.5 * arrival", "arrival"), ("wait 52.8 steps", "wanted"),
    ),
    "shortest first without arrival": (
        "order", changed("order", " + 2.5 * arrival", ""), ("300 prompt tokens", "283 steps", "108 requests"),
    ),
    "order by chance": (
        "order", "from random import random\ndef order(*args):\n    return random()", ("at first and then",
        "not change"),
    ),
    "order of words": ("order", "def order(*args):\n    return 'first'", ("order(8, 8, 0.0) must return a number; it"
                                                                          " returns 'first'",)),
    "hash without the parent": ("hash", changed("hash", "(parent, tokens", "(salt, tokens"), ("Case 'moved'",
    "8 tokens")),
    "hash without the salt": ("hash", changed("hash", "[], salt", "[], 0"), ("Case 'salt'", "12 tokens come",
    "0 are right")),
    "hash of sums": (
        "hash", changed("hash", "tokens[start : start + block_size])", "sum(tokens[start : start + block_size]))"),
        ("Case 'exchanged'", "block 0 has the hash"),
    ),
    "hash of a partial block": (
        "hash", changed("hash", "len(tokens) - block_size + 1", "len(tokens)"), ("3 tokens in blocks of 4 have 0"
                                                                                 " full",),
    ),
    "hash by chance": (
        "hash",
        "from random import random\ndef block_hashes(t, b, s):\n    return [random() for _ in range(len(t) // b)]",
        ("Case 'same'", "12 tokens from the cache, with these hashes 0"),
    ),
    "top-p before min-p": (
        "keep", changed("keep", "sum(left), 0.0", "1.0, 0.0"), ("0.8, 0.3", "keeps the tokens [0, 1, 2]",
        "from [0, 1]"),
    ),
    "min-p as an absolute limit": ("keep", changed("keep", "min_p * most", "min_p"), ("1.0, 0.3", "likeliest token")),
    "probabilities not scaled": (
        "keep", changed("keep", "[p / sum(kept) for p in kept]", "kept"), ("token 0 has 0.4, right is 0.4211", "0.95"),
    ),
    "drafts of one token": (
        "propose", changed("propose", "at + length + max_tokens", "at + length + 1"), ("Text 'loop'", "18 steps",
        "11 with"),
    ),
    "too many drafts": (
        "propose", changed("propose", "at + length + max_tokens", "at + length + max_tokens + 1"), ("returns 5",
        "at most 4"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_program_is_told_its_case(case: str, tmp_path: Path) -> None:
    name, source, words = WRONG[case]
    found = finding(name, source, tmp_path)
    assert found is not None
    assert [word for word in words if word not in found.en] == [], found.en


def test_exception_is_told_with_its_line_and_call(tmp_path: Path) -> None:
    found = finding("mask", "def mask(num_cached, num_new):\n    return 1 / num_cached\n", tmp_path)
    assert found is not None
    assert found.en == "mask(0, 5) raises ZeroDivisionError: division by zero in line 2."


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def mask(:\n", "answer.py raises SyntaxError: invalid syntax in line 1."),
        ("other = 1\n", "The program does not define mask."),
        ("raise SystemExit(3)\n", "answer.py raises SystemExit: 3 in line 1."),
        (
            "def mask(num_cached, num_new):\n    return 5\n",
            "mask(0, 5) must have 5 rows, one per new token; it returns 5.",
        ),
    ],
)
def test_program_that_cannot_be_called_is_told_why(source: str, said: str, tmp_path: Path) -> None:
    found = finding("mask", source, tmp_path)
    assert found is not None
    assert found.en == said
