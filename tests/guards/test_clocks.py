"""The wall clock, which people and NTP set, tells dates and nothing else: durations and deadlines are monotonic."""

import ast

from tests.guards.sources import SOURCE, nodes, python_files

DATES = {
    "quire/server/generation.py": "`created` of an answer",
    "quire/server/routes/page.py": "when the machine was measured",
    "quire/server/logs.py": "the time of a log line",
    "quire/server/tracing.py": "where the monotonic clock lies in time, for spans; read once",
    "quire/text/template_sandbox.py": "`strftime_now` of chat templates",
    "quire/runtime/block_files.py": "when a file was used, which its file system keeps",
    "quire/runtime/shared_file.py": "when a file was used or changed, which its file system keeps",
    "quire/cli/cache.py": "how long ago a file of packed weights was used",
    "quire/cli/top.py": "since when a server runs, beside its start in the process table",
}
"""File → the date it tells."""


def wall_clock_files() -> set[str]:
    found = set()
    for path in python_files():
        for node in nodes(path):
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            is_import = isinstance(node, ast.ImportFrom) and node.module == "time" and names & {"time", "time_ns"}
            is_call = isinstance(node, ast.Attribute) and (
                (node.attr in ("time", "time_ns", "localtime", "gmtime") and ast.unparse(node.value) == "time")
                or node.attr in ("utcnow", "today", "fromtimestamp")
                or (node.attr == "now" and ast.unparse(node.value).endswith("datetime"))
            )
            if is_import or is_call:
                found.add(path.relative_to(SOURCE).as_posix())
    return found


def test_only_dates_are_read_from_the_wall_clock() -> None:
    assert wall_clock_files() == set(DATES)
