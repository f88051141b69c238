"""Check that `uvx quire run` and `pipx install quire` work, for `make wheel-check`, from an index on this machine.

The index has the wheels that the arguments name, as PyPI would have them. It serves one project: everything that Quire
needs comes from the index that pip uses. Both installers get folders of their own.
"""

import argparse
import functools
import http.server
import os
import subprocess
import sys
import tempfile
import threading
import venv
from html import escape
from pathlib import Path

PROMPT = "Why is the sky blue?"
RUN = ("run", "--temperature", "0", "--max-tokens", "24", PROMPT)
TOOLS = ("uv", "pipx")


def main() -> None:
    """Serve the wheels, install each way, and ask the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that Quire is installed for")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-installers-") as folder:
        check(arguments.wheels, arguments.python, Path(folder))


def check(wheels: list[Path], python: str, folder: Path) -> None:
    """Run both installers in `folder`. Raises: SystemExit with what failed."""
    tools = folder / "tools"
    venv.create(tools, with_pip=True)
    run([str(tools / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *TOOLS], dict(os.environ))
    url = serve(make_index(wheels, folder / "index"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIPX_", "PYTHON"))}
    environment |= {
        # uv asks the named index first, and looks for a project no further than where it finds it.
        "UV_INDEX": url, "UV_CACHE_DIR": str(folder / "uv"), "UV_PYTHON_DOWNLOADS": "never",
        "UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1",
        "PIP_EXTRA_INDEX_URL": f"{url} {os.environ.get('PIP_EXTRA_INDEX_URL', '')}".strip(),
        "PIPX_HOME": str(folder / "pipx"), "PIPX_BIN_DIR": str(folder / "bin"), "PIPX_DEFAULT_BACKEND": "pip",
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    expect_answer("uvx quire run", run(["uvx", "--python", python, "quire", *RUN], environment))
    # pip has no order of indexes: without the version a newer one of PyPI would be taken.
    version = wheels[0].name.split("-")[1]
    run(["pipx", "install", "--python", python, f"quire=={version}"], environment)
    expect_answer("pipx install quire; quire run", run([str(folder / "bin" / "quire"), *RUN], environment))


def make_index(wheels: list[Path], folder: Path) -> Path:
    """Write the pages of a simple index that has one project, and link its wheels."""
    project = folder / "quire"
    project.mkdir(parents=True)
    for wheel in wheels:
        (project / wheel.name).symlink_to(wheel.resolve())
    links = "".join(
        f'<a href="{escape(wheel.name)}" data-requires-python="&gt;=3.11">{wheel.name}</a>\n' for wheel in wheels
    )
    (project / "index.html").write_text(f"<!doctype html>\n{links}")
    (folder / "index.html").write_text('<!doctype html>\n<a href="quire/">quire</a>\n')
    return folder


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, without a log."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing."""


def serve(folder: Path) -> str:
    """Serve the files of `folder` on this machine until the program ends; return the address."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def expect_answer(way: str, answer: str) -> None:
    """Print the answer. Raises: SystemExit if it is about something else."""
    if "light" not in answer:
        sys.exit(f"{way}: an answer about something else: {answer!r}")
    print(f"{way}: {answer}", flush=True)


def run(command: list[str], environment: dict[str, str]) -> str:
    """Run `command`; return what it prints. Raises: SystemExit if it fails."""
    result = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)[:100]} ended with {result.returncode}: {result.stdout}")
    return result.stdout.strip()


if __name__ == "__main__":
    main()
