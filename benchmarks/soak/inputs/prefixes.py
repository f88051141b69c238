"""B8: the prefix cache of one key is not visible to the holder of another. Next to read: `plain_http.py`."""

import random
import secrets

from benchmarks.soak.inputs.plain_http import Client, connected
from benchmarks.soak.row import Row
from benchmarks.soak.server import serving
from quire.server.keys import VARIABLE

NUM_WORDS = 64
"""About 70 tokens: four whole blocks."""
WORDS = ("river", "sea", "wind", "rain", "hills", "stone", "light", "winter", "garden", "paper", "window", "morning")


async def cross_key_probes(model: str, *, count: int = 1000, seed: int = 0) -> Row:
    """B8: one key computes a prompt; another key asks for the same one, then the first key again."""
    victim_key, prober_key = secrets.token_hex(16), secrets.token_hex(16)
    probed: list[int] = []
    again: list[int] = []
    choices = random.Random(seed)
    options = ("--max-num-seqs", "8", "--max-model-len", "512")
    with serving(model, *options, environment={VARIABLE: f"{victim_key},{prober_key}"}) as server:
        async with connected(server.url, victim_key) as victim, connected(server.url, prober_key) as prober:
            for _ in range(count):
                text = " ".join(choices.choices(WORDS, k=NUM_WORDS))
                await _num_cached(victim, text)
                probed.append(await _num_cached(prober, text))
                again.append(await _num_cached(victim, text))
    row = Row("B8", f"{count} probes of one key for another's prompts of {NUM_WORDS} words")
    row.check("cached tokens that the other key sees", sum(probed), passes=not sum(probed))
    row.check("cached tokens of the first key's own", min(again), passes=min(again) > 0)
    return row


async def _num_cached(client: Client, text: str) -> int:
    """Send a prompt and return its number of cached tokens. Raises: RuntimeError."""
    answer = await client.ask("POST", "/v1/completions", {"model": "soak", "prompt": text, "max_tokens": 1})
    if answer.status != 200:
        raise RuntimeError(f"a probe was answered {answer.status} {answer.error}")
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
