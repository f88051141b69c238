"""`ForwardBatch`: what one step derives is not seen by the next."""

from tests.layers.test_attention import make_batch


def test_derived_values_belong_to_one_step() -> None:
    first, second = make_batch(), make_batch()
    first.derived["key"] = 1
    assert second.derived == {}
