"""Text of a model cannot freeze the page's tab: its renderers take time in proportion to the text.

They run in Playwright's Node.js, which has a limit here: each of these texts took minutes, or memory without end.
"""

import json
import subprocess
from pathlib import Path

import pytest
from playwright._impl._driver import compute_driver_executable

from tests.processes import LIMIT_S

PAGE = Path(__file__).parents[2] / "src" / "quire" / "page"
MANY = 200_000
DRAW = """
import { readFileSync } from "node:fs";
import { Markdown } from "./markdown.js";
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
  console.log(Markdown({ text }).props.dangerouslySetInnerHTML.__html.length);
}
"""
MATH = """
import { readFileSync } from "node:fs";
import { mathml } from "./math.js";
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map((tex) => mathml(tex, false))));
"""
AS_JSON = """
import { readFileSync } from "node:fs";
import { asJson } from "./answers.js";
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(asJson)));
"""


def run_node(folder: Path, program: str, texts: list[str]) -> str:
    """Run a module beside those of the page, with texts as its input. Raises: TimeoutExpired."""
    node = compute_driver_executable()[0]
    (folder / "package.json").write_text('{"type": "module"}')
    for item in PAGE.iterdir():
        if not (folder / item.name).exists():
            (folder / item.name).symlink_to(item)
    (folder / "program.js").write_text(program)
    command = [node, "--preserve-symlinks", "--preserve-symlinks-main", str(folder / "program.js")]
    done = subprocess.run(
        command, input=json.dumps(texts), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "\\(" * MANY, "\\( x " * MANY, "\\[" * MANY, "\\[\n" * MANY, "\\[\n\n" * MANY, "\\[x\n\n" * MANY + "\\]",
        "\\\\$a" * MANY + " $", "\\\\$$a" * MANY, "\\[a\n" * MANY + "\\] x", "\\[a\n" * MANY + "\n\\]",
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_beginnings_of_formulas_without_ends_are_searched_once(tmp_path: Path, text: str) -> None:
    assert int(run_node(tmp_path, DRAW, [text])) > len(text) / 4


def test_other_marks_by_the_thousand_take_no_longer(tmp_path: Path) -> None:
    marks = [
        "$", "$ ", "$a ", "$$a ", "$x\\$", "$1 ", "**", "**a ", "*a_ ", "~~a ", "[", "[a](", "[a](<b", "![", "[]",
        "[a]: b\n", "`", "` ", "`a", "> ", ">", "- ", "- a\n", "1. a\n", "* ", "|", "|\n", "a|b\n-|-\n", "&", "&amp;",
        "&#", "<a ", "<!--", "<http:", "```\n", "# a\n", "#", "a\n=\n", "\t", "\n", "\\", "\\a", "a\\\n",
        '"a ', "$`", "- \\[x\n", "> \\[x\n",
    ]  # fmt: skip
    nested = ["".join("  " * at + "- a\n" for at in range(300)), "| a | b |\n|-|-|\n" + "| c | d |\n" * 20_000]
    texts = [*(mark * 20_000 for mark in marks), *nested]
    assert len(run_node(tmp_path, DRAW, texts).split()) == len(texts)


def test_formula_keeps_its_parts(tmp_path: Path) -> None:
    """Words in braces with their spaces, first digits as arguments, distances of line breaks."""
    text, digits, distance = json.loads(
        run_node(
            tmp_path,
            MATH,
            ["x \\text{ if a } y", "\\frac123", "\\begin{matrix} 1 \\\\[2pt] 2 \\\\ [a] \\end{matrix}"],
        )
    )
    assert "<mtext>\u00a0if a\u00a0</mtext>" in text
    assert digits == "<math><mrow><mfrac><mn>1</mn><mn>2</mn></mfrac><mn>3</mn></mrow></math>"
    assert distance.count("<mtr>") == 3
    assert "pt" not in distance
    assert "<mi>a</mi>" in distance


def test_json_that_is_nested_deeper_than_lines_can_show_stays_text(tmp_path: Path) -> None:
    deep = "[" * 2000 + "]" * 2000
    found = json.loads(run_node(tmp_path, AS_JSON, ['{"a": [1]}', "[" + ",".join([deep] * 2000) + "]", "a"]))
    assert found == ['{\n  "a": [\n    1\n  ]\n}', None, None]
