"""Models of the Hugging Face hub, through huggingface_hub: its cache, its credentials, its offline mode, its resume.

Fetches only files that Quire reads: configuration, tokenizer, safetensors or one GGUF; never pickles, never code.
Must not know what is in the files. Next to read: `sources.py`.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import DownloadError, ModelError, ModelNotFoundError, UnsupportedModelError
from quire.weights.model_cache import cache_write_error, find_hub_snapshot, hub_cache_directory
from quire.weights.model_files import Progress, ignore_progress, split_parts

DIRECTORY_PATTERNS = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
LIST_TIMEOUT_S = 10
SUBDIRECTORY_PATTERNS = ["[!1]*/*.json", "*/*.safetensors", "*/*.model"]
"""Not fetched: other formats and precisions of the same model; 1_Pooling/config.json is."""
_HUB_ID = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:/([\w./-]+\.gguf)|:(\w[\w.-]*))?(?:@([\w./-]+))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class HubSource:
    """`org/name`, optionally one GGUF file of it or its quantisation, and a revision (branch, tag or commit)."""

    repository: str
    file: str | None = None
    revision: str | None = None
    quantization: str | None = None


def parse_hub_id(name: str) -> HubSource | None:
    """Parse `org/name[/file.gguf | :Q4_K_M][@revision]`; None when it has another form."""
    match = _HUB_ID.fullmatch(name)
    if match is None or any(bad in name for bad in ("..", "--", "//")):
        return None
    repository, file, quantization, revision = match.groups()
    return HubSource(repository, file, revision, quantization)


def is_offline() -> bool:
    """Read HF_HUB_OFFLINE from the environment."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def fetch_from_hub(source: HubSource, *, progress: Progress = ignore_progress, offline: bool = False) -> Path:
    """Fetch the files of a repository that the cache lacks; without a network, use the cache alone.

    Returns: the directory of the snapshot; its name is the commit.
    Raises: ModelNotFoundError, DownloadError or UnsupportedModelError, each with the next step.
    """
    if offline or is_offline():
        return _cached(source, "this is offline mode")
    import huggingface_hub

    try:
        names = _list_files(source)
        if names is None:
            return _cached(source, "the Hugging Face hub cannot be reached")
        snapshot = huggingface_hub.snapshot_download(
            source.repository,
            revision=source.revision,
            cache_dir=hub_cache_directory(),
            allow_patterns=_patterns(source, names),
            ignore_patterns=None if source.file else SUBDIRECTORY_PATTERNS,
            tqdm_class=_progress_bar_class(f"downloading {source.repository}", progress),
        )
    except ModelError:
        raise
    except Exception as error:
        raise _explain(error, source) from error
    return Path(snapshot)


def _cached(source: HubSource, reason: str) -> Path:
    snapshot = find_hub_snapshot(source.repository, source.revision or "main")
    if snapshot is None:
        quantization = f":{source.quantization}" if source.quantization else ""
        wanted = source.repository + quantization + (f"@{source.revision}" if source.revision else "")
        raise DownloadError(
            f"'{wanted}' is not in the cache {hub_cache_directory()}, and {reason}; run `quire pull {wanted}` once "
            "with a network, or pass the path of a local model"
        )
    return snapshot


def _list_files(source: HubSource) -> list[str] | None:
    """The files of the repository; None when the hub cannot be reached or fails.

    Raises: the errors of huggingface_hub for a refusal.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = huggingface_hub.HfApi().model_info(source.repository, revision=source.revision, timeout=LIST_TIMEOUT_S)
    except HfHubHTTPError as error:
        if error.response.status_code >= 500:
            return None
        raise
    except Exception:
        # Which class a failed connection has depends on the HTTP library below huggingface_hub, and on its version.
        return None
    return [sibling.rfilename for sibling in info.siblings or []]


def _patterns(source: HubSource, names: list[str]) -> list[str]:
    """The patterns of the files to fetch from a repository with these files."""
    if source.file is not None:
        return split_parts(source.file)
    models = sorted({split_parts(name)[0] for name in names if name.endswith(".gguf")})
    if source.quantization is not None:
        chosen = choose_quantization(f"'{source.repository}'", source.repository, models, source.quantization)
        return split_parts(chosen)
    if any(re.fullmatch(r"model[^/]*\.safetensors", name) for name in names):
        return DIRECTORY_PATTERNS
    if len(models) == 1:
        return split_parts(models[0])
    if models:
        raise ambiguous(f"'{source.repository}'", f"{source.repository}/FILE", models)
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise UnsupportedModelError(
            f"'{source.repository}' has only PyTorch pickles, which can run code and are never loaded; "
            "look for a copy of the model with safetensors"
        )
    raise ModelNotFoundError(f"'{source.repository}' on the Hugging Face hub holds neither safetensors nor GGUF files")


def choose_quantization(place: str, form: str, models: list[str], quantization: str) -> str:
    """Return the GGUF file that has the quantisation, such as Q4_K_M, in its name; Q4_K is not found in Q4_K_M.

    Raises: ModelNotFoundError that lists what there is if none or several have it.
    """
    part = re.compile(rf"(?<![A-Z0-9]){re.escape(quantization)}(?![A-Z0-9_])", re.IGNORECASE)
    models = [name for name in sorted(models) if not name.rpartition("/")[2].startswith("mmproj")]
    found = [name for name in models if part.search(name.rpartition("/")[2])]
    if len(found) == 1:
        return found[0]
    if found:
        raise ambiguous(f"{place} with {quantization}", f"{form}/FILE", found)
    raise ModelNotFoundError(f"{place} has no GGUF file with {quantization} in its name; it has {_shown(models)}")


def ambiguous(place: str, form: str, models: list[str]) -> ModelNotFoundError:
    """The error for a place with several GGUF files; `form` is the name that chooses one."""
    return ModelNotFoundError(f"{place} has {len(models)} GGUF files; choose one as {form}: {_shown(models)}")


def _shown(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "none"


def _explain(error: Exception, source: HubSource) -> ModelError:
    """An error of huggingface_hub, or of the network below it, as one line with the next step."""
    from huggingface_hub import errors

    name = f"'{source.repository}'"
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"{name} is gated: ask for access at https://huggingface.co/{source.repository}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"the Hugging Face hub has no model {name}, or it is private: check the name, or log in with "
            "`hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(
            f"{name} has no revision '{source.revision}'; branches, tags and commits are accepted"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return DownloadError(f"the Hugging Face hub refused {name}: {_first_line(error)}")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return cache_write_error(error, hub_cache_directory(), "HF_HUB_CACHE")
    return DownloadError(f"could not fetch {name} from the Hugging Face hub: {_first_line(error)}; try again")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def _progress_bar_class(stage: str, progress: Progress) -> type[Any]:
    """A silent progress bar for huggingface_hub that passes byte counts on."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class ProgressBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self.counts_bytes:
                progress(stage, int(self.n), int(self.total) if self.total else None)
            return None

    return ProgressBar
