from quire.grammar.form_cache import FormCache
from quire.structured_outputs import StructuredOutputsParams


def form(name: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=name)


def test_the_oldest_go_first() -> None:
    cache: FormCache[str] = FormCache(10)
    cache.put(form("a"), "A", 4)
    cache.put(form("b"), "B", 4)
    assert cache.get(form("a")) == "A"
    cache.put(form("c"), "C", 4)
    assert [*cache.values()] == ["A", "C"]
    assert (cache.get(form("b")), cache.num_bytes, len(cache)) == (None, 8, 2)


def test_what_is_there_stays_and_what_is_too_large_is_not_kept() -> None:
    cache: FormCache[str] = FormCache(10)
    cache.put(form("a"), "A", 4)
    cache.put(form("a"), "other", 5)
    assert (cache.get(form("a")), cache.num_bytes) == ("A", 4)
    cache.put(form("b"), "B", 11)
    assert (len(cache), cache.num_bytes) == (0, 0)
