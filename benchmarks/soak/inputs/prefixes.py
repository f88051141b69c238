"""B8: what the prefix cache of one key tells the holder of another.

Next to read: `comparison.py`.
"""

import random
import secrets
from collections import defaultdict

from benchmarks.soak.inputs.comparison import kolmogorov_smirnov
from benchmarks.soak.inputs.plain_http import Client, connected
from benchmarks.soak.row import Row
from benchmarks.soak.server import serving
from quire.server.keys import VARIABLE

MIN_P = 0.01
NUM_WORDS = 64
"""Some 70 tokens: four whole blocks."""
NUM_WARM_UP = 5
WORDS = ("river", "sea", "wind", "rain", "hills", "stone", "light", "winter", "garden", "paper", "window", "morning")


async def cross_key_probes(model: str, *, count: int = 1000, num_words: int = NUM_WORDS, seed: int = 0) -> Row:
    """B8: one key has a prompt computed; another asks for the same, and for one that nobody asked for, in random
    order; then the first again, to see that there is something to hide."""
    victim_key, prober_key = secrets.token_hex(16), secrets.token_hex(16)
    times: dict[str, list[float]] = defaultdict(list)
    cached: dict[str, list[int]] = defaultdict(list)
    choices = random.Random(seed)
    options = ("--max-num-seqs", "8", "--max-model-len", "512")
    with serving(model, *options, environment={VARIABLE: f"{victim_key},{prober_key}"}) as server:
        async with connected(server.url, victim_key) as victim, connected(server.url, prober_key) as prober:
            for number in range(-NUM_WARM_UP, count):
                known, fresh = (" ".join(choices.choices(WORDS, k=num_words)) for _ in range(2))
                turns = [("known", prober, known), ("fresh", prober, fresh)]
                choices.shuffle(turns)
                for name, client, text in (("first", victim, known), *turns, ("again", victim, known)):
                    took_s, num_cached = await _ask(client, text)
                    if number >= 0:
                        times[name].append(took_s)
                        cached[name].append(num_cached)
    row = Row("B8", f"{count} probes of one key for another's prompts of {num_words} words")
    for name in ("known", "fresh"):
        row.check(f"cached tokens of {name} prompts", sum(cached[name]), passes=not sum(cached[name]))
    p = kolmogorov_smirnov(times["known"], times["fresh"])
    row.check(f"KS p of TTFT, known and fresh (> {MIN_P})", p, passes=p > MIN_P)
    own_p = kolmogorov_smirnov(times["again"], times["fresh"])
    row.check("cached tokens of the first key's own", min(cached["again"]), passes=min(cached["again"]) > 0)
    row.check("KS p of its TTFT, again and fresh (< 0.01, or the test sees nothing)", own_p, passes=own_p < MIN_P)
    medians = (f"{name} {1e3 * sorted(values)[len(values) // 2]:.1f}" for name, values in times.items())
    row.note("median TTFT ms", " ".join(medians))
    return row


async def _ask(client: Client, text: str) -> tuple[float, int]:
    """Seconds to the first and only token, and how many of the prompt's were cached. Raises: RuntimeError."""
    answer = await client.ask("POST", "/v1/completions", {"model": "soak", "prompt": text, "max_tokens": 1})
    if answer.status != 200:
        raise RuntimeError(f"a probe was answered {answer.status} {answer.error}")
    return answer.took_s, int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
