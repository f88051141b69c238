"""The interactive chat of `quire run` and `quire chat`: reads lines, keeps the history, prints answers, saves chats.

The answerer is the engine of this process (in `run.py`) or a server (in `chat_client.py`). Each turn sends the
whole conversation again; the prefix cache holds the part that was sent before. Ctrl-C stops the answer; twice at the
prompt, or Ctrl-D, leaves, and Ctrl-C asks first if the chat is not saved. Next to read: `run.py`.
"""

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from quire.cli.command import option
from quire.cli.options import parse_sampling_value
from quire.cli.terminal import Output, format_seconds
from quire.errors import ConfigError, QuireError, nearest
from quire.files import make_directory, read_own, replace_file
from quire.sampling_params import SamplingParams

Message = dict[str, Any]

COMMANDS = {
    "/help": "show this",
    "/clear": "forget the conversation (the system message stays)",
    "/set": "list sampling values, or change one: /set temperature 0.7; /set temperature default",
    "/system": "show or change the system message; it begins a new conversation",
    "/save": "save the conversation under a name, and its further answers too: /save holiday",
    "/load": "go on with a saved conversation, or list all",
    "/stats": "statistics of the last answer and of the cache",
    "/exit": "leave (also /bye, Ctrl-D)",
}
MULTILINE = '"""'
PROMPT, CONTINUATION = ">>> ", "... "
DEFAULT_MAX_TOKENS = 512
"""Limit of an answer in `run` and `chat` if neither the user nor the model's generation config sets one."""


@dataclass(frozen=True)
class Reply:
    """An answer, cut short if interrupted. `message`: of the history. `statistics` is a line to print."""

    message: Message
    statistics: str
    total_s: float
    interrupted: bool


Ask = Callable[[Sequence[Message], Mapping[str, Any], Callable[[str], None]], Reply]
"""Answers a conversation with chosen sampling values; the callback gets the content piece by piece. The first Ctrl-C
stops the answer. Raises: QuireError."""
Values = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Returns every sampling value by name, given the chosen ones. Raises: InvalidParameterError."""


def statistics_line(
    reason: str,
    num_prompt: int,
    num_cached: int,
    num_new: int,
    first_s: float | None,
    tokens_per_s: float | None,
    max_model_len: int | None,
    num_used: int | None = None,
) -> str:
    """Return `[stop] prompt 36 tok (16 cached) · 58 new · TTFT 21 ms · 61.2 tok/s · ctx 94/2048 (5%)`.

    `num_used`: tokens of the context, unless prompt and new ones.
    """
    cached = f" ({num_cached} cached)" if num_cached else ""
    parts = [f"[{reason}] prompt {num_prompt} tok{cached}", f"{num_new} new"]
    if first_s is not None:
        parts.append(f"TTFT {format_seconds(first_s)}")
    if tokens_per_s is not None:
        parts.append(f"{tokens_per_s:.1f} tok/s")
    if max_model_len is not None:
        used = num_prompt + num_new if num_used is None else num_used
        parts.append(f"ctx {used}/{max_model_len} ({100 * used / max_model_len:.0f}%)")
    return " · ".join(parts)


continue_option = option(
    "--continue", "continues", is_flag=True, help="go on with the chat that was saved last (/save)"
)


def chat_to_continue(*, has_more: bool) -> str:
    """Return the name of the chat that was saved last. `has_more`: a prompt or a system message was given, too.

    Raises: click.UsageError.
    """
    if has_more:
        raise click.UsageError("--continue goes on with a saved chat: leave the prompt and --system out")
    if not (names := saved_names()):
        raise click.UsageError("no chat is saved yet: /save NAME in a chat saves it")
    return names[0]


class Chat:
    """A conversation with its history and settings. `ask` and `values` are those of an engine or a server."""

    def __init__(
        self,
        ask: Ask,
        values: Values,
        output: Output,
        chosen: dict[str, Any],
        *,
        system: str | None = None,
        saved_name: str | None = None,
        read_line: Callable[[str], str] = input,
    ) -> None:
        """`saved_name`: of a saved chat to go on with. Raises: ConfigError if it cannot be read."""
        self._ask, self._values = ask, values
        self._output = output
        self._chosen = dict(chosen)
        self._system = system
        self._read_line = read_line
        self._turns: list[Message] = []
        self._last: Reply | None = None
        self._saved_name: str | None = None
        if saved_name is not None:
            self._load(saved_name)

    @property
    def _messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self._system}] if self._system else []), *self._turns]

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
                if was_interrupted and self._may_leave():
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

    def _may_leave(self) -> bool:
        """Ask before a conversation that is not saved is lost; another Ctrl-C is a yes."""
        if not self._turns or self._saved_name is not None:
            return True
        try:
            answer = self._read_line("\nThis chat is not saved (/save NAME does). Leave it? [y/N] ")
        except (EOFError, KeyboardInterrupt):
            return True
        return answer.strip().lower() in ("y", "yes")

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
        """Answer and remember the turn. Returns: True if the user stopped it; one more Ctrl-C leaves then."""
        user = {"role": "user", "content": text}
        # A chat shows one answer; --n is for one-shot runs.
        with self._output.answer() as on_text:
            reply = self._ask([*self._messages, user], self._chosen | {"n": 1}, on_text)
        self._output.result()
        # A turn without any answer is not history.
        self._turns += [user, reply.message]
        self._last = reply
        if self._saved_name is not None:
            save_chat(self._saved_name, self._messages)
        self._output.note(reply.statistics)
        return reply.interrupted

    def _command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        actions = {
            "/help": self._help,
            "/clear": self._clear,
            "/set": self._set,
            "/system": self._set_system,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
        }
        if name not in actions:
            raise ValueError(f"no such command '{name}'{nearest(name, COMMANDS)}; /help lists them")
        actions[name](rest.strip())

    def _help(self, rest: str) -> None:
        for name, text in COMMANDS.items():
            self._output.note(f"  {name:<8} {text}")
        self._output.note(f"  {MULTILINE:<8} begins and ends a message of several lines")

    def _clear(self, rest: str) -> None:
        self._begin_anew()
        self._output.note("The conversation is forgotten.")

    def _begin_anew(self) -> None:
        self._turns.clear()
        self._saved_name = None  # the file keeps the old conversation

    def _save(self, rest: str) -> None:
        name = rest or self._saved_name
        if not name:
            raise ValueError("/save needs a name")
        path = save_chat(name, self._messages)
        self._saved_name = name
        self._output.note(f"saved as {path}; further answers are saved, too")

    def _load(self, rest: str) -> None:
        if not rest:
            self._output.note(f"saved: {', '.join(saved_names()) or 'none'}")
            return
        messages = load_chat(rest)
        has_system = bool(messages) and messages[0]["role"] == "system"
        self._system = messages[0]["content"] if has_system else None
        self._turns = messages[has_system:]
        self._saved_name = rest
        self._output.note(f"{rest}: {len(self._turns)} messages; further answers are saved, too")

    def _set_system(self, rest: str) -> None:
        if rest:
            self._system = rest
            self._begin_anew()
        self._output.note(f"system: {self._system or '(the template decides)'}")

    def _set(self, rest: str) -> None:
        if not rest:
            for name, value in self._values(self._chosen).items():
                mark = "  (chosen)" if name in self._chosen else ""
                self._output.note(f"  {name} = {value}{mark}")
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
        self._values(changed)  # raises for a bad value
        self._chosen = changed
        self._output.note(f"{name} = {changed.get(name, 'default')}")

    def _stats(self, rest: str) -> None:
        if self._last is None:
            self._output.note("No answer yet.")
            return
        self._output.note(self._last.statistics)
        self._output.note(f"turns: {len(self._turns) // 2} · {self._last.total_s:.2f} s for the last answer")


# --- Saved chats: one JSON file each, a list of messages, which only this user may read -----------
# `XDG_DATA_HOME` moves their directory.

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", re.ASCII)


def chats_directory() -> Path:
    """Return the directory of the files, which may not exist yet."""
    import platformdirs

    return Path(platformdirs.user_data_dir("quire", appauthor=False)) / "chats"


def saved_names() -> list[str]:
    """Return the names of all saved chats, the newest first."""
    with contextlib.suppress(OSError):
        files = sorted(chats_directory().glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        return [path.stem for path in files]
    return []


def save_chat(name: str, messages: Sequence[dict[str, Any]]) -> Path:
    """Write a chat in place of one with the same name. Returns: its file. Raises: ConfigError."""
    path = _path(name)
    try:
        make_directory(path.parent)
        replace_file(path, [json.dumps(list(messages), ensure_ascii=False, indent=1).encode()])
    except OSError as error:
        raise ConfigError(f"the chat cannot be saved as {path}: {error.strerror}") from error
    return path


def load_chat(name: str) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raises: ConfigError if there is none, or its file holds no list of messages."""
    path = _path(name)
    try:
        messages = json.loads(read_own(path))
    except FileNotFoundError:
        known = saved_names()
        saved = f"saved are {', '.join(known)}" if known else "none is saved; /save NAME saves one"
        raise ConfigError(f"there is no saved chat '{name}'{nearest(name, known)}; {saved}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ConfigError(f"{path} is not a list of messages such as {{'role': 'user', 'content': 'hi'}}")
    return messages


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"'{name}' cannot name a chat: use letters, digits, '-', '_' and '.'")
    return chats_directory() / f"{name}.json"


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str if not message.get("tool_calls") else str | None)
    )
