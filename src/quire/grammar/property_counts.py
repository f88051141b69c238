"""How many properties the library can be asked for: `minProperties` against the names in `required`.

Keys that a schema does not name may come twice, and count once: only the first of them is sure to be another one. What
a value must follow comes from several schemas, `allOf`, `$ref` and choices, whose counts are taken together as the
library does: the largest `minProperties`, the names of all. Schemas of one property that several members of an `allOf`
have are counted each by itself, which refuses too much and never too little.
Must not know the library. Next to read: `schema_rules.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.grammar.schema_walk import CHOICES, Schema, inner_schemas, items, reachable, target

MAX_WAYS = 64
"""Above it they are taken for one that is worse than each."""


@dataclass(frozen=True, slots=True)
class Count:
    """One way to be an object that a schema allows: at least so many properties, these names among them."""

    least: int = 0
    names: frozenset[str] = frozenset()

    def most(self, *, has_one_spelling: bool) -> int:
        """The largest `minProperties` that is kept. Without one spelling even the first other key may be a name."""
        return len(self.names) + (1 if has_one_spelling or not self.names else 0)


Ways = frozenset[Count]
_ANY: Ways = frozenset({Count()})


def counts_of_each(schemas: Iterable[Schema]) -> Iterator[Count]:
    """The counts of schemas of which nobody knows how they go together: each by itself, which is never too few."""
    return (count for schema in schemas for count in _own(schema))


def counts_of_places(root: Any) -> Iterator[Count]:
    """The counts of every place where an object may stand, for a schema that refers to nothing outside of it."""
    schemas = reachable(root)
    ways: dict[int, Ways] = {}
    is_known = False
    while not is_known:
        is_known = True
        for schema in reversed(schemas):  # what is used comes after its user, mostly: one round and one to see it do
            found = _ways(schema, root, ways)
            is_known = is_known and ways.get(id(schema)) == found
            ways[id(schema)] = found
    yield from ways.get(id(root), ())
    for schema in schemas:
        for inner in inner_schemas(schema):
            yield from ways.get(id(inner), ())


def _ways(schema: Schema, root: Any, known: dict[int, Ways]) -> Ways:
    """The ways of a schema by those of what it uses; of a circle nothing is known at first, which adds nothing."""

    def of(inner: Any) -> Ways:
        if inner is False:
            return frozenset()
        return known.get(id(inner), _ANY) if isinstance(inner, dict) else _ANY

    found = _own(schema)
    for member in items(schema.get("allOf")):
        found = _both(found, of(member))
    if "$ref" in schema:
        found = _both(found, of(target(root, schema["$ref"])))
    for word in CHOICES:
        if choice := items(schema.get(word)):
            found = _both(found, _worst(count for option in choice for count in of(option)))
    return found


def _own(schema: Schema) -> Ways:
    types = schema.get("type", "object")
    if types != "object" and "object" not in items(types):
        return frozenset()
    least, required = schema.get("minProperties"), items(schema.get("required"))
    return frozenset({Count(least if isinstance(least, int) else 0, frozenset(map(str, required)))})


def _both(one: Ways, other: Ways) -> Ways:
    if one == _ANY or other == _ANY:
        return one if other == _ANY else other
    return _worst(Count(max(a.least, b.least), a.names | b.names) for a in one for b in other)


def _worst(counts: Iterable[Count]) -> Ways:
    """Without those that another one, of no fewer properties and no other names, is worse than."""
    kept: list[Count] = []
    for count in sorted(set(counts), key=lambda way: (-way.least, len(way.names))):
        if any(other.least >= count.least and other.names <= count.names for other in kept):
            continue
        kept.append(count)
        if len(kept) > MAX_WAYS:
            least, names = max(way.least for way in kept), frozenset.intersection(*(way.names for way in kept))
            kept = [Count(least, names)]
    return frozenset(kept)
