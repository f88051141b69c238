"""Models and their tokenizers written as GGUF files. Must not know engines. Next to read: `quantize.py`."""
