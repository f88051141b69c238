import pytest

from quire.config import STEP_S
from quire.scheduler.pace import MAX_DECODES, Pace


def test_where_one_token_takes_long_a_step_with_prompts_takes_a_few_times_as_long() -> None:
    pace = Pace()
    pace.note(512, 2.56, has_prompts=True)
    pace.note(4, 0.1, has_prompts=False)
    assert pace.step_tokens == int(200 * MAX_DECODES * 0.1)
    pace.note(32, 0.8, num_iterations=8, has_prompts=False)  # one token takes as long in a step of several iterations
    assert pace.step_tokens == int(200 * MAX_DECODES * 0.1)


def test_it_follows_the_machine_and_forgets_a_moment_in_which_that_stood_still() -> None:
    pace = Pace()
    pace.note(512, 0.256, has_prompts=True)
    pace.note(4, 0.002, has_prompts=False)
    pace.note(4, 60.0, has_prompts=False)
    assert pace.step_tokens <= 1.2 * 2000 * STEP_S
    pace.note(50, 60.0, has_prompts=True)
    for _ in range(30):
        pace.note(50, 0.05, has_prompts=True)
        pace.note(4, 0.002, has_prompts=False)
    assert pace.step_tokens == pytest.approx(1000 * STEP_S, rel=0.1)
    pace.note(0, 0.001, has_prompts=False)  # a step without work says nothing
    assert pace.step_tokens == pytest.approx(1000 * STEP_S, rel=0.1)
