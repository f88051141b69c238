from quire.sampling.row_slices import SLICE_ELEMENTS, row_slices


def test_slices_cover_all_rows_in_order_within_the_bound() -> None:
    vocab_size = 50_000
    parts = list(row_slices(1000, vocab_size))
    assert [row for part in parts for row in range(1000)[part]] == list(range(1000))
    assert len(parts) > 1
    assert all((part.stop - part.start) * vocab_size <= SLICE_ELEMENTS for part in parts)


def test_a_row_longer_than_the_bound_is_a_slice_of_its_own() -> None:
    assert list(row_slices(2, SLICE_ELEMENTS + 1)) == [slice(0, 1), slice(1, 2)]


def test_no_rows_no_slices() -> None:
    assert list(row_slices(0, 10)) == []
