from quire.config import DTYPES
from quire.runtime.dtypes import TORCH_DTYPES


def test_every_name_has_a_type_of_its_size() -> None:
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == DTYPES
