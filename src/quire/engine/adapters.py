"""`Adapters`: the LoRA adapters that requests may choose, by name. Names, paths and digests; workers hold the matrices.

Next to read: `runtime/adapter_pool.py`.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.adapter import Adapter
from quire.config import EngineConfig
from quire.errors import InvalidParameterError, ModelFileError, QuireError, RequestError, nearest, printable
from quire.files import FileState, file_state

if TYPE_CHECKING:
    from quire.runtime.adapter_layout import AdapterLayout

MAX_NAME_LEN = 256


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for one call of `LLM`: a name of the caller's, and PEFT's directory or a GGUF file."""

    lora_name: str
    lora_path: str


@dataclass(frozen=True, slots=True)
class _Loaded:
    """`stamps`: states of the files when they were read."""

    adapter: Adapter
    invocation_token_ids: tuple[int, ...]
    stamps: tuple[FileState, ...]


class Adapters:
    """May be used by several threads."""

    def __init__(self, config: EngineConfig, model_names: Sequence[str] = ()) -> None:
        """Load the adapters of the options. `model_names`: which no adapter may have.

        Raises: as `load`.
        """
        self._config = config
        self._model_names = tuple(model_names)
        self._by_name: dict[str, _Loaded] = {}
        self._layout: AdapterLayout | None = None
        self._lock = threading.Lock()
        for item in config.options.lora:
            name, _, path = item.partition("=")
            self._take(name, path)
        self._most = len(self._by_name) + config.options.max_loaded_loras

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names in the order in which they were loaded."""
        return tuple(self._by_name)

    def load(self, name: str, path: str) -> None:
        """Check an adapter and make its name known; one of this name is replaced for requests that come from now on.

        Raises: RequestError for a name that cannot be or is one too many, or if the engine has no adapters;
        ModelFileError, UnsupportedModelError for files that do not fit the model.
        """
        if name not in self._by_name and len(self._by_name) >= self._most:
            raise RequestError(
                f"{self._most} adapters are loaded, and {self._config.options.max_loaded_loras} may be beside those of "
                "the start: unload one first, or start with more --max-loaded-loras"
            )
        self._take(name, path)

    def _take(self, name: str, path: str) -> None:
        """Check an adapter and make its name known. Raises: as `load`, for any number of names."""
        if not self._config.options.has_adapters:
            raise RequestError("this engine computes no adapters: start it with --enable-lora, or enable_lora=True")
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LEN or not name.isprintable():
            raise InvalidParameterError("lora_name", name, f"1 to {MAX_NAME_LEN} printable characters")
        if name in self._model_names:
            raise InvalidParameterError("lora_name", name, "another name than the model's")
        found = self._read(name, path)
        with self._lock:
            self._by_name[name] = found

    def unload(self, name: str) -> None:
        """Forget a name; requests that run keep their adapter. Raises: RequestError if it is not known."""
        with self._lock:
            if self._by_name.pop(name, None) is None:
                raise RequestError(f"adapter '{printable(str(name))}' is not loaded{nearest(str(name), self.names)}")

    def choose(
        self, chosen: LoRARequest | str | None, prompt_token_ids: list[int], hash_extras: tuple[str, ...]
    ) -> tuple[Adapter | None, tuple[str, ...]]:
        """Return the adapter of a name, or of the files of a `LoRARequest`, which are read if they changed.

        An activated adapter computes from the last place of its invocation tokens in the prompt on; without them the
        request is the base model's. Returns: the adapter, and the request's `hash_extras`.
        Raises: as `load`; RequestError for an unknown name.
        """
        if chosen is None:
            return None, hash_extras
        found = self._of_call(chosen) if isinstance(chosen, LoRARequest) else self._by_name.get(chosen)
        if found is None:
            raise RequestError(f"adapter {chosen!r} is not loaded{nearest(str(chosen), self.names)}")
        start = 0
        if found.invocation_token_ids:
            place = _last_place(prompt_token_ids, found.invocation_token_ids)
            if place is None:
                return None, hash_extras
            start = place
        adapter = found.adapter
        extras = hash_extras if start else (*hash_extras, f"adapter {adapter.digest}")
        return Adapter(adapter.name, adapter.path, adapter.digest, start), extras

    def _of_call(self, chosen: LoRARequest) -> _Loaded:
        known = self._by_name.get(chosen.lora_name)
        path = str(Path(chosen.lora_path).absolute())
        if known is None or known.adapter.path != path or known.stamps != _stamps(Path(path)):
            self._take(chosen.lora_name, chosen.lora_path)
        return self._by_name[chosen.lora_name]

    def _read(self, name: str, path: str) -> _Loaded:
        absolute = Path(path).absolute()
        try:
            return self._checked(name, absolute)
        except QuireError:
            raise
        except Exception as error:  # files of any source: numbers and nesting beyond Python's limits, lost access
            raise ModelFileError(f"{absolute}: cannot be read as an adapter: {type(error).__name__}") from error

    def _checked(self, name: str, absolute: Path) -> _Loaded:
        # Nothing of models and native code is needed where there are no adapters.
        from quire.lazy_torch import on_meta
        from quire.runtime.adapter_layout import AdapterLayout
        from quire.runtime.loader import make_model
        from quire.weights.adapter_files import read_adapter

        config = self._config
        if not (absolute.is_dir() or absolute.is_file()):  # reading a pipe would never end
            raise ModelFileError(f"{absolute}: there is no such adapter; give PEFT's directory or a GGUF file")
        stamps = _stamps(absolute)
        files = read_adapter(absolute, config.model.hf_config)
        if self._layout is None:
            with on_meta():
                model = make_model(config.model.hf_config, max_model_len=config.scheduler.max_model_len)
            self._layout = AdapterLayout(model)
        self._layout.place(files)
        wrong = [token_id for token_id in files.invocation_token_ids if token_id >= config.model.vocab_size]
        if wrong:
            raise ModelFileError(
                f"{absolute}: invocation token {wrong[0]} is not in the vocabulary of {config.model.vocab_size}: the "
                "adapter is of another base model"
            )
        return _Loaded(Adapter(name, str(absolute), files.digest()), files.invocation_token_ids, stamps)


def _stamps(path: Path) -> tuple[FileState, ...]:
    files = sorted(path.glob("adapter_*")) if path.is_dir() else [path]
    return tuple(map(file_state, files))


def _last_place(token_ids: list[int], wanted: tuple[int, ...]) -> int | None:
    """Return the first position of the last occurrence of some tokens."""
    count = len(wanted)
    places = range(len(token_ids) - count, -1, -1)
    return next((place for place in places if tuple(token_ids[place : place + count]) == wanted), None)
