import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.ranking import ranked_pool, top_columns


def ranked_by_python(row: list[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda column: (-row[column], column))[:count]


@given(
    rows=st.integers(1, 40).flatmap(
        lambda width: st.lists(
            st.lists(st.sampled_from([0.0, 1.0, 2.0, -1.0, float("-inf")]), min_size=width, max_size=width),
            min_size=1,
            max_size=4,
        )
    ),
    count=st.integers(1, 45),
)
def test_top_columns_ranks_equal_values_by_lower_column(rows: list[list[float]], count: int) -> None:
    values, columns = top_columns(torch.tensor(rows), count)
    assert columns.tolist() == [ranked_by_python(row, count) for row in rows]
    assert torch.equal(values, torch.tensor(rows).gather(-1, columns))


def test_ties_across_the_edge_of_a_large_row() -> None:
    values = torch.zeros(3, 20_000)
    values[1, 19_999] = 1.0
    values[2] = torch.arange(20_000)
    _, columns = top_columns(values, 3)
    assert columns.tolist() == [[0, 1, 2], [19_999, 0, 1], [19_999, 19_998, 19_997]]


@pytest.mark.parametrize("size", [1, 5, 128, 1000, 2000])
def test_pool_is_exact_above_its_last_value(size: int) -> None:
    values = torch.randint(0, 200, (8, 1000), generator=torch.Generator().manual_seed(size)).float()
    pool_values, pool_columns = ranked_pool(values, size)
    assert pool_values.shape == (8, min(size, 1000))
    for row in range(8):
        expected = ranked_by_python(values[row].tolist(), size)
        inside = int((pool_values[row] > pool_values[row, -1]).sum())
        assert pool_columns[row, :inside].tolist() == expected[:inside]
        assert pool_values[row].tolist() == values[row, expected].tolist()
