"""The verbs of this package, which the command line lists without importing them. Next to read: `cli/bench.py`."""

VERBS = {
    "quantize": ("Models", "quire_workshop.cli.quantize", "Write a model as a quantised GGUF file."),
    "diff": ("See inside", "quire_workshop.cli.diff", "Compare a model with Transformers, tensor by tensor."),
    "bench": ("Measure", "quire_workshop.cli.bench", "Measure prompt processing and generation speed."),
    "bench serve": (
        "Measure",
        "quire_workshop.cli.bench_serve",
        "Put load on a server and measure its clients' latency.",
    ),
    "tune": ("Measure", "quire_workshop.cli.tune", "Find the fastest settings of a model on this machine."),
}
"""Section, module and line of the top-level help of each: `quire/cli/main.py`."""
