"""The interactive chat of `quire run` and `quire chat`: reads lines, keeps the history, has an answerer answer.

The answerer is the engine of this process (in `session.py`) or a server (in `chat_client_answers.py`).
Each turn sends the whole conversation again; the prefix cache makes the part already seen cheap.
Ctrl-C stops the answer; twice at the prompt, or Ctrl-D, leaves. Next to read: `session.py`.
"""

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import click

from quire.cli.options import parse_sampling_value
from quire.cli.output import Output
from quire.errors import QuireError, nearest
from quire.sampling_params import SamplingParams

Message = dict[str, Any]

COMMANDS = {
    "/help": "show this",
    "/clear": "forget the conversation (the system message stays)",
    "/set": "show or change sampling: /set temperature 0.7; /set temperature default",
    "/system": "show or change the system message; it begins a new conversation",
    "/stats": "statistics of the last answer and of the cache",
    "/exit": "leave (also /bye, Ctrl-D)",
}
MULTILINE = '"""'
PROMPT, CONTINUATION = ">>> ", "... "


@dataclass(frozen=True)
class Reply:
    """One answer, as far as it came. `statistics` is a line for people."""

    text: str
    statistics: str
    total_s: float
    interrupted: bool


class Answerer(Protocol):
    """Whoever computes the answers."""

    def check(self, chosen: Mapping[str, Any]) -> None:
        """Raises: InvalidParameterError for sampling values that cannot be."""

    def answer(
        self, messages: Sequence[Message], chosen: Mapping[str, Any], on_text: Callable[[str], None] | None
    ) -> Reply:
        """Answer a conversation; `on_text` gets the text piece by piece. The first Ctrl-C stops it.

        Raises: QuireError if there is no answer.
        """


class Chat:
    """One conversation."""

    def __init__(
        self,
        answerer: Answerer,
        output: Output,
        chosen: dict[str, Any],
        *,
        system: str | None = None,
        read_line: Callable[[str], str] = input,
    ) -> None:
        self._answerer = answerer
        self._output = output
        self._chosen = dict(chosen)
        self._system = system
        self._read_line = read_line
        self._turns: list[Message] = []
        self._last: Reply | None = None

    def loop(self) -> None:
        """Read and answer until the user leaves. Raises: KeyboardInterrupt on a second Ctrl-C in a row."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - line editing and history in input()
        self._output.note("Type a message. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        was_interrupted = False
        while True:
            try:
                text = self._read_message()
            except EOFError:
                return
            except KeyboardInterrupt:
                if was_interrupted:
                    raise
                was_interrupted = True
                self._output.note("\nCtrl-C again, or /exit, leaves.")
                continue
            was_interrupted = False
            if text.strip() in ("/exit", "/bye", "/quit"):
                return
            if not text.strip():
                continue
            try:
                if text.startswith("/") and "\n" not in text:
                    self._command(text)
                else:
                    was_interrupted = self._answer(text)
            except QuireError as error:
                self._output.note(f"error[{error.code}]: {error.message}", style="red")
            except (click.BadParameter, ValueError) as error:
                message = error.format_message() if isinstance(error, click.ClickException) else str(error)
                self._output.note(f"error[usage]: {message}", style="red")

    def _read_message(self) -> str:
        line = self._read_line(PROMPT)
        if not line.lstrip().startswith(MULTILINE):
            return line
        lines = [line.lstrip()[len(MULTILINE) :]]
        while not lines[-1].rstrip().endswith(MULTILINE):
            lines.append(self._read_line(CONTINUATION))
        lines[-1] = lines[-1].rstrip()[: -len(MULTILINE)]
        return "\n".join(lines).strip("\n")

    def _answer(self, text: str) -> bool:
        """Answer and remember the turn. Returns: whether the user stopped it, so that one more Ctrl-C leaves."""
        messages = [{"role": "system", "content": self._system}] if self._system else []
        user = {"role": "user", "content": text}
        # A chat shows one answer; --n is for one-shot runs.
        reply = self._answerer.answer([*messages, *self._turns, user], self._chosen | {"n": 1}, self._output.stream)
        self._output.result()
        # Only a turn that was answered, if only in part, becomes history.
        self._turns += [user, {"role": "assistant", "content": reply.text}]
        self._last = reply
        self._output.note(reply.statistics)
        return reply.interrupted

    def _command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        actions = {
            "/help": self._help, "/clear": self._clear, "/set": self._set, "/system": self._set_system,
            "/stats": self._stats,
        }  # fmt: skip
        if name not in actions:
            raise ValueError(f"no such command '{name}'{nearest(name, COMMANDS)}; /help lists them")
        actions[name](rest.strip())

    def _help(self, rest: str) -> None:
        for name, text in COMMANDS.items():
            self._output.note(f"  {name:<8} {text}")
        self._output.note(f"  {MULTILINE:<8} begins and ends a message of several lines")

    def _clear(self, rest: str) -> None:
        self._turns.clear()
        self._output.note("The conversation is forgotten.")

    def _set_system(self, rest: str) -> None:
        if rest:
            self._system = rest
            self._turns.clear()
        self._output.note(f"system: {self._system or '(the template decides)'}")

    def _set(self, rest: str) -> None:
        if not rest:
            for name, value in self._chosen.items():
                self._output.note(f"  {name} = {value}")
            if not self._chosen:
                self._output.note("All sampling values are the model's; /set temperature 0.7 changes one.")
            return
        name, *words = shlex.split(rest)
        name = name.replace("-", "_")
        known = [item.name for item in fields(SamplingParams)]
        if name not in known:
            raise ValueError(f"no sampling value '{name}'{nearest(name, known)}")
        if not words:
            raise ValueError(f"/set {name} needs a value, or 'default'")
        changed = {key: value for key, value in self._chosen.items() if key != name}
        if words != ["default"]:
            changed[name] = parse_sampling_value(name, " ".join(words))
        self._answerer.check(changed)
        self._chosen = changed
        self._output.note(f"{name} = {changed.get(name, 'default')}")

    def _stats(self, rest: str) -> None:
        if self._last is None:
            self._output.note("No answer yet.")
            return
        self._output.note(self._last.statistics)
        self._output.note(f"turns: {len(self._turns) // 2} · {self._last.total_s:.2f} s for the last answer")
