"""Options every verb has, before and after its name, and how the help is laid out."""

import click
import pytest
from click.testing import CliRunner

from quire.cli.command import GroupedOption, VerbCommand, group_of, output_of
from quire.cli.output import Output


@click.command("verb", cls=VerbCommand, help="Does it.", examples=("quire verb --switch",))
@click.option("--switch/--no-switch", cls=GroupedOption, group="Special", help="turn it")
@click.option("--own", cls=GroupedOption, help="its own")
def verb(switch: bool, own: str | None) -> None:
    output = output_of()
    output.result(f"{output.json} {output.verbosity} {output.color}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "False 0 auto"),
        (["--json"], "True 0 auto"),
        (["-q"], "False -1 auto"),
        (["-vv", "--color", "never"], "False 2 never"),
    ],
)
def test_output_options_set_the_output(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(verb, arguments, obj=Output())
    assert result.stdout.strip() == expected


def test_color_from_the_environment() -> None:
    result = CliRunner().invoke(verb, [], obj=Output(), env={"QUIRE_COLOR": "always"})
    assert result.stdout.strip() == "False 0 always"


def test_help_has_groups_a_short_switch_and_examples() -> None:
    text = CliRunner().invoke(verb, ["--help"]).stdout
    assert "--[no-]switch" in text
    assert text.index("Special:") < text.index("Output:") < text.index("Examples:")
    assert "  quire verb --switch\n" in text


def test_groups() -> None:
    groups = {parameter.name: group_of(parameter) for parameter in verb.params}
    assert groups["switch"] == "Special"
    assert groups["own"] == "Options"
    assert groups["json"] == "Output"
