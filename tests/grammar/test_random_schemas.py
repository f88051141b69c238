"""Random schemas: each text ends and follows its schema, as jsonschema reads it.

`QUIRE_TEST_CASES=10000` tries more than 200 schemas.
"""

import os
from random import Random

from tests.grammar.random_schemas import error_of, grammar_of, longest_whitespace, random_schema, walk

NUM_CASES = int(os.environ.get("QUIRE_TEST_CASES", "200"))
MAX_WHITESPACE = 22
"""Two line breaks and 20 spaces."""


def test_drawn_texts_of_random_schemas_end_and_follow_them() -> None:
    num_compiled, failures, seed = 0, [], 0
    while num_compiled < NUM_CASES:
        random = Random(seed)
        schema, seed = random_schema(random), seed + 1
        answer = grammar_of(schema)
        if "error" in answer:
            continue
        num_compiled += 1
        for likes_whitespace in (False, True):
            text = walk(answer["grammar"], random, likes_whitespace=likes_whitespace)
            reason = "no end" if text is None else error_of(schema, text)
            if text is not None and longest_whitespace(text) > MAX_WHITESPACE:
                reason = "a long run of whitespace"
            if reason is not None:
                failures.append((seed - 1, reason, schema, text))
    assert failures == [], [seed for seed, *_ in failures]
    assert num_compiled > 0.6 * seed, "most random schemas are accepted"
