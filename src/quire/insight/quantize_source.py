"""`open_source`: a model that is to be quantised, GGUF or Hugging Face, with everything its GGUF file needs.

Next to read: `../weights/quantize_source.py`, `../text/gguf_export.py`.
"""

from quire.errors import UnsupportedModelError
from quire.models.registry import ModelRegistry
from quire.text.gguf_export import describe_tokenizer
from quire.weights.checkpoint import open_checkpoint
from quire.weights.gguf_export import completed, describe_config, name_tensors
from quire.weights.gguf_file import read_gguf
from quire.weights.quantize import Source
from quire.weights.quantize_source import from_gguf, from_tensors, read_back
from quire.weights.sources import ModelFiles


def open_source(files: ModelFiles) -> Source:
    """Open a GGUF file of any architecture, or a directory of one that GGUF can say completely.

    Raises: ModelFileError; UnsupportedModelError for a directory whose config or tokenizer would not come back the
    same from the file.
    """
    if files.kind == "gguf":
        return from_gguf(read_gguf(files.path))
    checkpoint = open_checkpoint(files)
    model = ModelRegistry.resolve(checkpoint.hf_config)
    expected = model.Config.from_hf(checkpoint.hf_config)
    config = completed(checkpoint.hf_config, expected)
    keys, factors = describe_config(config)
    ends = checkpoint.generation_config.get("eos_token_id", checkpoint.hf_config.get("eos_token_id"))
    end_ids = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
    keys |= {"general.name": files.path.name, **describe_tokenizer(files.path, config["vocab_size"], end_ids)}
    source = from_tensors(keys, name_tensors(config, checkpoint.tensors), factors)
    found = read_back(source, keys)
    other = ModelRegistry.resolve(found)
    read = other.Config.from_hf(found)
    differing = [name for name, value in vars(expected).items() if vars(read).get(name) != value]
    if other is not model or differing:
        what = ", ".join(differing) or "the class"
        raise UnsupportedModelError(
            f"{files.path}: GGUF does not say {what} of this model as written here; convert it with llama.cpp's "
            "convert_hf_to_gguf.py, then quantise the result"
        )
    return source
