"""Short versions of the rows L5 and L7 of `python -m benchmarks.soak`."""

from benchmarks.soak.attacks import slow_attacks
from tests.server.fake_engine import in_loop
from tests.server.served import quick, serving

ROOMY = {"max_model_len": 2048, "num_blocks": 2000}


@in_loop
async def test_slow_attackers_are_disconnected_while_others_are_served() -> None:
    async with serving(
        connection=quick(READ_TIMEOUT_S=0.5, TAKE_TIMEOUT_S=1.0, KEEP_ALIVE_S=1, LINGER_S=0.2),
        scheduler=ROOMY,
        served_model_name="soak",
    ) as served:
        row = await slow_attacks(
            f"http://127.0.0.1:{served.port}", count=20, duration_s=3.0, every_s=0.1, limit_s=2.5,
            max_tokens=8,
        )  # fmt: skip
        assert row.passes, row.cells()
        await served.until_idle()
