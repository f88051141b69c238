"""Distance of an engine's logits from the exact model's: mean KL(reference ‖ side) and top-1 agreement over a text.

    python -m benchmarks.quality [--sides quire,llama.cpp] [--windows 6] [--text FILE …]

    KL = mean over positions of Σ_v p(v) (log p(v) − log q(v)), in nats; p: Transformers in float32 on the weights of
    the GGUF file, dequantised by its own reader; q: the side.

The text (by default the licences of Quire and Python) is cut into windows of 1,024 tokens, each a prompt of its own;
every position counts. Sides are named as in `peers.py`. A prompt is computed in large steps: for the numbers of
one-token steps give `quire:max_num_batched_tokens=1:max_num_seqs=1`. Next to read: `side_specs.py`.
"""

import argparse
import datetime
import hashlib
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import Table, add_shared_options, finish_arguments, write_result
from benchmarks.side_process import ROOT, SideError, SideProcess
from benchmarks.side_specs import Models, Skipped, make_spec
from quire import __version__
from quire_workshop.cli.bench import source_commit

SCHEMA = "quire.bench.quality/1"
REFERENCE = "transformers:dtype=float32:model=gguf"
DEFAULT_SIDES = ("quire", "llama.cpp", "llama.cpp:kv=q8_0")
WINDOW_LEN = 1024
CHUNK_ROWS = 128
"""Rows compared at once: 128 × 49,152 logits are 50 MB in float64."""
TIMEOUT_S = 900.0
FORMATS = {
    "side": "", "mean KL": ".5f", "median KL": ".5f", "p99 KL": ".4f", "top-1": ".2%", "perplexity": ".4f",
}  # fmt: skip


class Comparison:
    """Sums over the positions compared so far."""

    def __init__(self) -> None:
        self.num_positions = 0
        self._kl: list[np.ndarray] = []
        self._num_equal = 0
        self._surprise = 0.0
        self._num_surprises = 0

    def add(self, reference: np.ndarray, side: np.ndarray, token_ids: Sequence[int]) -> None:
        """Add a window. Shapes: reference, side [T, V] logits of the T token ids. Raises: ValueError."""
        if reference.shape != side.shape:
            raise ValueError(f"logits of shape {side.shape} where the reference has {reference.shape}")
        for first in range(0, len(reference), CHUNK_ROWS):
            p = log_softmax(reference[first : first + CHUNK_ROWS])
            q = log_softmax(side[first : first + CHUNK_ROWS])
            self._kl.append((np.exp(p) * (p - q)).sum(axis=1))
            self._num_equal += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
            following = np.asarray(token_ids[first + 1 : first + 1 + len(q)])
            self._surprise -= float(q[np.arange(len(following)), following].sum())
            self._num_surprises += len(following)
        self.num_positions += len(reference)

    def as_json(self) -> dict[str, Any]:
        """Return the figures to quote."""
        kl = np.concatenate(self._kl)
        return {
            "num_positions": self.num_positions,
            "mean_kl_nats": float(kl.mean()),
            "median_kl_nats": float(np.median(kl)),
            "p99_kl_nats": float(np.quantile(kl, 0.99)),
            "top1_agreement": self._num_equal / self.num_positions,
            "perplexity": float(np.exp(self._surprise / self._num_surprises)),
        }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """x − max − log Σ exp(x − max), in float64. Shapes: [T, V]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def default_texts() -> list[Path]:
    """The licence of Quire, and that of Python where it is installed."""
    return [path for path in (ROOT / "LICENSE", Path(sysconfig.get_path("stdlib")) / "LICENSE.txt") if path.exists()]


def cut_windows(token_ids: Sequence[int], num_windows: int, window_len: int) -> list[list[int]]:
    """Full windows from the start. Raises: ValueError when there is none."""
    count = min(num_windows, len(token_ids) // window_len)
    if count == 0:
        raise ValueError(f"the text has {len(token_ids)} tokens, less than a window of {window_len}: add --text FILE")
    return [list(token_ids[index * window_len : (index + 1) * window_len]) for index in range(count)]


def logits_of(
    name: str, models: Models, windows: Sequence[list[int]], directory: Path, arguments: argparse.Namespace
) -> Iterator[tuple[SideProcess, Path]]:
    """A side and the file with its logits, window by window. Raises: Skipped, SideError."""
    spec = make_spec(name, models, vars(arguments))
    print(f"running {name}", file=sys.stderr)
    with SideProcess(spec, directory / "log") as side:
        side.load(timeout_s=TIMEOUT_S, num_threads=arguments.threads, max_num_seqs=1, max_model_len=WINDOW_LEN + 1)
        for index, window in enumerate(windows):
            path = directory / f"{'reference' if name == REFERENCE else 'side'}-{index}.npy"
            side.request("logits", timeout_s=TIMEOUT_S, token_ids=window, path=str(path))
            yield side, path


def compare(
    name: str, models: Models, windows: Sequence[list[int]], references: Sequence[Path], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure a side and return its row. Raises: Skipped, SideError."""
    comparison = Comparison()
    found = logits_of(name, models, windows, references[0].parent, arguments)
    answers: dict[str, Any] = {}
    for window, reference, (side, path) in zip(windows, references, found, strict=True):
        answers = {"name": name, "version": side.version, "settings": side.settings}
        comparison.add(np.load(reference, mmap_mode="r"), np.load(path, mmap_mode="r"), window)
        path.unlink()
    return {**answers, **comparison.as_json()}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, printing rows as they are known."""
    models = Models.of(arguments.model, arguments.bf16)
    text = "\n".join(path.read_text() for path in arguments.text or default_texts())
    token_ids = models.tokenizer.encode(text)
    windows = cut_windows(token_ids, arguments.windows, WINDOW_LEN)
    digest = hashlib.sha256(np.array(windows, dtype="<i4").tobytes()).hexdigest()
    print(f"{models.name}: {len(windows)} windows of {WINDOW_LEN} tokens, sha256 {digest[:16]}; against {REFERENCE}")
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="quire-quality-", dir=arguments.scratch) as scratch:
        references = [path for _, path in logits_of(REFERENCE, models, windows, Path(scratch), arguments)]
        table = Table(FORMATS)
        for name in arguments.sides:
            try:
                row = compare(name, models, windows, references, arguments)
            except (Skipped, SideError) as error:
                skipped.append({"name": name, "reason": str(error)})
                print(f"without {name}: {error}", file=sys.stderr)
                continue
            rows.append(row)
            shown = ("mean_kl_nats", "median_kl_nats", "p99_kl_nats", "top1_agreement", "perplexity")
            table.row(name, *(row[figure] for figure in shown))
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": source_commit(),
        "model": models.name,
        "reference": REFERENCE,
        "window_len": WINDOW_LEN,
        "num_windows": len(windows),
        "token_ids_sha256": digest,
        "skipped": skipped,
        "results": rows,
    }


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shared_options(parser, DEFAULT_SIDES, what="quality")
    parser.add_argument("--windows", type=int, default=6, help="windows of 1,024 tokens at most  [6]")
    parser.add_argument("--text", type=Path, nargs="+", help="files  [the licences of Quire and Python]")
    parser.add_argument("--scratch", type=Path, help="where 200 MB a window fit for a while  [the system's]")
    return finish_arguments(parser, words)


def main() -> None:
    arguments = parse_arguments()
    write_result(run(arguments), arguments)


if __name__ == "__main__":
    main()
