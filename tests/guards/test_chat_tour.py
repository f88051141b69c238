"""One streamed chat through the HTTP process: the files that it enters, as `test_tour.py` has those of a step."""

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType

from tests.server.served import serving

PACKAGE = Path(__file__).parents[2] / "src" / "quire"
MAX_FILES = 49
"""It may only become smaller."""
THREADS = ("MainThread", "quire-text")
"""Those of the event loop and of preparation."""


async def files_of_a_chat() -> list[str]:
    """Return the package's files that a streamed chat of four tokens enters, in order; not those of the engine."""
    entered: dict[str, None] = {}
    is_noting = False

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if (
            is_noting
            and event == "call"
            and PACKAGE in path.parents
            and threading.current_thread().name.startswith(THREADS)
        ):
            entered[str(path.relative_to(PACKAGE))] = None

    async with serving() as served:
        threading.setprofile(note)  # of threads that start from now on: those of the front end, not the engine's
        sys.setprofile(note)
        try:
            await served.chat(stream=True)  # what is made once is made
            await served.until_idle()
            is_noting = True
            answer = await served.chat(stream=True)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        assert answer.status == 200
    return list(entered)


def test_streamed_chat_enters_few_files() -> None:
    files = asyncio.run(files_of_a_chat())
    print(f"a streamed chat enters {len(files)} files of the HTTP process:", *files, sep="\n  ")
    assert len(files) <= MAX_FILES, files
