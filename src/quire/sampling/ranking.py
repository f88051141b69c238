"""The largest values of each row, best first, equal values by lower token id.

`torch.topk` leaves the order of equal values open, and which of them it returns at the end; results that
must reproduce cannot. Knows nothing of requests. Next to read: `filters.py`.
"""

import torch


def ranked_pool(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `size` largest values of each row and their columns, best first, equals by lower column.

    Where the value that ends the pool occurs outside of it too, which of its columns are in the pool is
    arbitrary; all greater values are exact. A pool as large as the row has no such end.

    Shapes: values [R, V] -> [R, min(size, V)] twice.
    """
    if size >= values.shape[-1]:
        ordered = torch.sort(values, dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    pool = torch.topk(values, size, dim=-1)
    columns, by_column = pool.indices.sort(dim=-1)
    ordered = torch.sort(pool.values.gather(-1, by_column), dim=-1, descending=True, stable=True)
    return ordered.values, columns.gather(-1, ordered.indices)


def top_columns(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest values of each row and their columns, exactly: equals by lower column.

    Shapes: values [R, V] -> [R, min(count, V)] twice.
    """
    # One more than asked for shows whether the last value asked for is tied with one left out.
    pool_values, pool_columns = ranked_pool(values, count + 1)
    if count >= values.shape[-1]:
        return pool_values, pool_columns
    tied = (pool_values[:, count - 1] == pool_values[:, count]).nonzero()[:, 0]
    if len(tied) and pool_values.shape[-1] < values.shape[-1]:
        whole_values, whole_columns = ranked_pool(values[tied], values.shape[-1])
        pool_values[tied] = whole_values[:, : count + 1]
        pool_columns[tied] = whole_columns[:, : count + 1]
    return pool_values[:, :count], pool_columns[:, :count]
