"""Announced digests against the prefix cache itself, while blocks come and go."""

import hashlib
import random
from array import array

import pytest

from quire.engine.process.prefixes import DIGEST_BYTES, PrefixMirror, prompt_digests, split
from quire.engine.process.statistics import Meter
from quire.sampling_params import SamplingParams
from quire.types import RequestSpec
from tests.engine.builders import make_engine


@pytest.mark.parametrize("max_num_events", [65536, 20])
def test_mirror_has_the_cached_blocks_after_every_step(max_num_events: int) -> None:
    """The event log holds only 20 events, so that some are lost between two looks."""
    engine, _ = make_engine(num_blocks=24, options={"max_num_events": max_num_events})
    meter, mirror, choose = Meter(engine), PrefixMirror(), random.Random(3)
    cache, num_evicted = engine.scheduler.blocks.cache, 0
    for number in range(40):
        prompt = [choose.randrange(3)] * 9 + [choose.randrange(200) for _ in range(7)]
        engine.add_request(f"r{number}", prompt, SamplingParams(max_tokens=6, ignore_eos=True, temperature=0))
        while engine.has_unfinished_requests():
            engine.step()
            if number % 3 == 0:
                continue  # several steps between two messages
            meter.take([])
            cached, evicted = meter.prefixes.take()
            num_evicted += len(evicted)
            mirror.apply(cached, evicted)
            digests = {cache.digest_of(block_id, 0) for block_id in cache.block_ids()}
            assert mirror.digests == {digest[:DIGEST_BYTES] for digest in digests if digest is not None}
    assert num_evicted
    assert meter.statistics.num_lost_events == 0 or max_num_events == 20


def test_digests_of_a_prompt_are_the_hash_chain_of_its_full_blocks() -> None:
    spec = RequestSpec("r", list(range(12)), None, hash_extras=("salt",))
    root = hashlib.sha256(b"quire prefix cache 2\0" + b"4:salt").digest()
    first = hashlib.sha256(root + array("q", range(4)).tobytes()).digest()
    second = hashlib.sha256(first + array("q", range(4, 8)).tobytes()).digest()
    expected = [digest[:DIGEST_BYTES] for digest in (first, second)]
    assert list(split(prompt_digests(spec, 4))) == expected, "the last token is always computed"
