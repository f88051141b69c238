"""JSON Schemas of clients → equal ones that llguidance enforces, or the reason why there is none.

`enforceable` replaces what llguidance refuses or reads differently from pydantic and the validators of clients; a text
that follows the result follows the given schema. Must not know: llguidance. Next to read: `check_child.py`.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from quire.grammar.patterns import LIBRARY_FORMATS, OWN_FORMATS, rust_pattern

LARGEST_NUMBER = 2**62
"""llguidance reads bounds beyond ±2**63 wrongly, and those of numbers not at all."""
MAX_REFERENCES = 8
"""References and combinations that are followed to compare two schemas."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords with values that are no schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with a mapping from names to schemas; the names are no keywords."""
_REMARKS = frozenset({
    "$comment", "contentEncoding", "contentMediaType", "default", "deprecated", "description", "discriminator",
    "examples", "nullable", "readOnly", "title", "writeOnly",
})  # fmt: skip
"""Keywords that constrain nothing. With some of them llguidance refuses recursive references in `anyOf`."""
_TYPES: dict[type, str] = {
    bool: "boolean",
    dict: "object",
    float: "number",
    int: "integer",
    list: "array",
    str: "string",
    type(None): "null",
}


class UnenforceableError(ValueError):
    """A schema that no grammar can enforce, with the reason."""


def enforceable(schema: Any) -> Any:
    """Return the schema for llguidance. Raises: UnenforceableError."""
    _check_options(schema)
    root = _Root(schema)
    if root.has_loop(schema):
        raise UnenforceableError("a reference leads back to itself without an object or a list between")
    if not root.is_finite(schema):
        raise UnenforceableError("no text matches it: what it requires contains the schema itself, without end")
    return root.whole()


def _check_options(schema: Any) -> None:
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    for name in ("lenient", "coerce_one_of"):
        if isinstance(options, dict) and options.get(name):
            raise UnenforceableError(f"x-guidance.{name} accepts keywords without enforcing them: leave it out")


class _Root:
    """A whole schema, to which its references point."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._finite: set[str] = set()
        self._names: dict[tuple[str, ...], str] = {}
        self._added: dict[str, Any] = {}

    def target(self, reference: Any) -> Any:
        """Return what a reference within the schema points to; True, any value, for other references."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return True
        found = self._schema
        for part in unquote(reference[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return True
        return found

    # --- Rewriting --------------------------------------------------------------------------------

    def whole(self) -> Any:
        """Return the whole schema with all replacements. Raises: UnenforceableError."""
        schema = self.rewritten(self._schema)
        return {**schema, "$defs": {**schema.get("$defs", {}), **self._added}} if self._added else schema

    def rewritten(self, value: Any) -> Any:
        """Return a schema, or a list of schemas, with the replacements within it."""
        if isinstance(value, list):
            return [self.rewritten(item) for item in value]
        if not isinstance(value, dict):
            return value
        if not self._is_finite(value.get("$ref")):
            return False  # llguidance would write nothing in place of a text without end
        schema: dict[str, Any] = {}
        for key, inner in self._without_names(value).items():
            # A mapping of schemas outside of `$defs` may have such a name.
            if key in _REMARKS and (not isinstance(inner, dict) or key == "discriminator"):
                continue
            if key in _NAMED and isinstance(inner, dict):
                schema[key] = {name: self.rewritten(item) for name, item in inner.items()}
            else:
                schema[key] = inner if key in _VALUES else self.rewritten(inner)
        _check_counts(schema)
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        _rewrite_text(schema)
        _rewrite_bounds(schema)
        if isinstance(schema.get("oneOf"), list):
            schema = self._without_one_of(schema, value["oneOf"], value.get("discriminator"))
        return schema

    def _without_one_of(self, schema: dict[str, Any], given: list[Any], discriminator: Any) -> dict[str, Any]:
        """Return the schema with `anyOf` if no value follows two members of its `oneOf`, or if a tag makes it so.

        discriminator: OpenAPI's keyword. pydantic reads no object without this tag.
        """
        tags: list[set[str]] = [set() for _ in given]
        parts = [list(self._parts(member)) for member in given]
        common = self._common_tag(parts)
        if common is not None:
            is_free = [not any(common in (part.get("required") or ()) for part in member) for member in parts]
            name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
            if sum(is_free) > 1 or name == common:
                tags = [{common} for _ in given]
        for at, one in enumerate(given) if common is None else ():
            for other_at in range(at):
                tag = self._difference(given[other_at], one)
                if tag is None:
                    return schema
                if tag:
                    tags[at].add(tag)
                    tags[other_at].add(tag)
        members = [
            self._with_required(member, rewritten, sorted(names)) if names else rewritten
            for member, rewritten, names in zip(given, schema["oneOf"], tags, strict=True)
        ]
        any_of = (
            {"anyOf": members} if "anyOf" not in schema else {"allOf": [*schema.get("allOf", []), {"anyOf": members}]}
        )
        return {key: inner for key, inner in schema.items() if key != "oneOf"} | any_of

    def _common_tag(self, members: list[list[dict[str, Any]]]) -> str | None:
        """Return a property with `const` or `enum` of which no two objects allow the same value."""
        if not all(any(part.get("type") == "object" for part in parts) for parts in members):
            return None
        names: list[str] = [name for part in members[0] for name in part.get("properties", ())]
        for name in names:
            found: list[str] = []
            for parts in members:
                values = [_values(inner) for schema in _declared(name, parts) for inner in self._parts(schema)]
                allowed = next((some for some in values if some is not None), None)
                if allowed is None:
                    break
                found += {_identity(value) for value in allowed}
            else:
                if len(set(found)) == len(found):
                    return name
        return None

    def _with_required(self, given: dict[str, Any], rewritten: Any, names: list[str]) -> Any:
        """Return a schema with more required properties; for a reference, a reference to such a definition.

        llguidance does not allow keywords beside a reference to a schema that refers to itself.
        """
        if rewritten is False:
            return False
        if given.keys() != {"$ref"}:
            return {**rewritten, "required": [*dict.fromkeys([*rewritten.get("required", []), *names])]}
        key = (given["$ref"], *names)
        name = self._names.setdefault(key, f"x-tagged-{len(self._names)}")
        if name not in self._added:
            self._added[name] = True  # the definition may refer to itself
            target = self.target(given["$ref"])
            self._added[name] = self._with_required(target, self.rewritten(target), names)
        return {"$ref": f"#/$defs/{name}"}

    def _without_names(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema of a map with patterns or properties in place of `propertyNames`, if they can say it."""
        if "propertyNames" not in schema or not schema.keys().isdisjoint({"properties", "patternProperties"}):
            return schema
        names, values = schema["propertyNames"], schema.get("additionalProperties", True)
        map_ = {key: inner for key, inner in schema.items() if key not in ("propertyNames", "additionalProperties")}
        if isinstance(names, dict) and "$ref" in names:
            names = self.target(names["$ref"])
        if not isinstance(names, dict):
            return {**map_, "additionalProperties": values} if names is True else schema
        known = {key: inner for key, inner in names.items() if key not in ("title", "description", "type", "minLength")}
        if (allowed := _values(names)) is not None and len(known) == 1:
            texts = [name for name in allowed if isinstance(name, str)]
            return {**map_, "properties": dict.fromkeys(texts, values), "additionalProperties": False}
        patterns = []
        if isinstance(names.get("pattern"), str):
            patterns.append(known.pop("pattern"))
        if names.get("format") not in LIBRARY_FORMATS and (form := known.pop("format", None)) in OWN_FORMATS:
            patterns.append(_whole(OWN_FORMATS[form]))
        if known.keys() <= {"maxLength"} and (known or "minLength" in names):
            patterns.append(f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$")
            known = {}
        if known or len(patterns) > 1:
            return schema
        if not patterns:
            return {**map_, "additionalProperties": values}
        return {**map_, "patternProperties": {patterns[0]: values}, "additionalProperties": False}

    # --- Comparing --------------------------------------------------------------------------------

    def _parts(self, schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
        """Yield schemas that a value of `schema` follows, all of them."""
        if isinstance(schema, dict) and depth < MAX_REFERENCES:
            yield schema
            if "$ref" in schema:
                yield from self._parts(self.target(schema["$ref"]), depth + 1)
            for member in schema.get("allOf") or ():
                yield from self._parts(member, depth + 1)

    def _difference(self, one: Any, other: Any, depth: int = 0) -> str | None:
        """Return "" if no value follows both, a property that excludes this if it is required, or None."""
        ones, others = list(self._parts(one)), list(self._parts(other))
        if any(_is_disjoint(part, second) for part in ones for second in others):
            return ""
        if depth == MAX_REFERENCES:
            return None
        for parts, second in ((ones, other), (others, one)):
            for members in (part[key] for part in parts for key in ("anyOf", "oneOf") if part.get(key)):
                if all(self._difference(member, second, depth + 1) == "" for member in members):
                    return ""
        if not all(any(part.get("type") == "object" for part in parts) for parts in (ones, others)):
            return None
        required = {name for part in (*ones, *others) for name in part.get("required") or ()}
        if _misses_required(ones, others) or _misses_required(others, ones):
            return ""
        tags: list[str] = [
            name for part in ones for name in part.get("properties", ()) if self._is_tag(name, ones, others, depth)
        ]
        if not tags or not required.isdisjoint(tags):
            return "" if tags else None
        with_values = (name for name in tags if any("const" in one or "enum" in one for one in _declared(name, ones)))
        return next(with_values, tags[0])

    def _is_tag(self, name: str, ones: list[dict[str, Any]], others: list[dict[str, Any]], depth: int) -> bool:
        pairs = ((one, other) for one in _declared(name, ones) for other in _declared(name, others))
        return any(self._difference(one, other, depth + 1) == "" for one, other in pairs)

    # --- Ends ---------------------------------------------------------------------------------

    def has_loop(self, schema: Any) -> bool:
        """Return True if a reference leads back to itself for the same value."""
        done: set[str] = set()

        def leads_back(name: str, path: frozenset[str]) -> bool:
            if name in path or name in done:
                return name in path
            found = any(leads_back(inner, path | {name}) for inner in _direct_references(self.target(name)))
            done.add(name)
            return found

        return any(leads_back(name, frozenset()) for name in _references(schema))

    def is_finite(self, schema: Any) -> bool:
        """Return False if each text that follows the schema is without end: it requires itself."""
        waiting = [name for name in dict.fromkeys(_references(schema)) if self.target(name) is not True]
        num_before = len(waiting) + 1
        while len(waiting) < num_before:  # each round finds more schemas that have an end
            num_before = len(waiting)
            for name in waiting:
                if self._ends(self.target(name)):
                    self._finite.add(name)
            waiting = [name for name in reversed(waiting) if name not in self._finite]
        return self._ends(schema)

    def _is_finite(self, reference: Any) -> bool:
        return reference in self._finite or self.target(reference) is True

    def _ends(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return True
        if not self._is_finite(schema.get("$ref")):
            return False
        if not all(map(self._ends, schema.get("allOf") or ())):
            return False
        for key in ("anyOf", "oneOf"):
            if schema.get(key) and not any(map(self._ends, schema[key])):
                return False
        types = schema.get("type", "any")
        kinds = {types} if isinstance(types, str) else set(types)
        if not kinds <= {"object", "array"} or _values(schema) is not None:
            return True
        return ("object" in kinds and self._has_object(schema)) or ("array" in kinds and self._has_array(schema))

    def _has_object(self, schema: dict[str, Any]) -> bool:
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties", True)
        if required := schema.get("required"):
            return all(self._ends(properties.get(name, others)) for name in required)
        parts = [*properties.values(), *(schema.get("patternProperties") or {}).values(), others]
        return not schema.get("minProperties") or any(map(self._ends, parts))

    def _has_array(self, schema: dict[str, Any]) -> bool:
        first, least = schema.get("prefixItems") or [], schema.get("minItems") or 0
        return all(map(self._ends, first[: int(least)])) and (
            least <= len(first) or self._ends(schema.get("items", True))
        )


def _references(schema: Any) -> Iterator[str]:
    """Yield the references anywhere in a schema."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _direct_references(schema: Any) -> Iterator[str]:
    """Yield the references that a value of the schema follows, not only parts of it."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for key in ("allOf", "anyOf", "oneOf"):
            for member in schema.get(key) or ():
                yield from _direct_references(member)


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values that `const` or `enum` allow; None without them."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _declared(name: str, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the schemas of a property."""
    found = [part["properties"][name] for part in parts if name in part.get("properties", ())]
    return [schema for schema in found if isinstance(schema, dict)]


def _is_disjoint(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if the types or the values of two schemas say that no value follows both."""
    types, values = (_types(one), _types(other)), (_values(one), _values(other))
    if types[0] is not None and types[1] is not None and types[0].isdisjoint(types[1]):
        return True
    if values[0] is None or values[1] is None:
        return False
    return set(map(_identity, values[0])).isdisjoint(map(_identity, values[1]))


def _types(schema: dict[str, Any]) -> set[str] | None:
    """Return the types of a schema's values; None: any."""
    if (values := _values(schema)) is not None:
        return {_TYPES[type(json.loads(_identity(value)))] for value in values}
    if "type" not in schema:
        return None
    types = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    return types | {"integer"} if "number" in types else types


def _identity(value: Any) -> str:
    """Return a text that equal JSON values have in common: 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _misses_required(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Return True if an object of `ones` has a property that `others` do not allow."""
    required = {name for part in ones for name in part.get("required") or ()}
    closed = [part for part in others if part.get("additionalProperties") is False and "patternProperties" not in part]
    return any(not required <= part.get("properties", {}).keys() for part in closed)


def _check_counts(schema: dict[str, Any]) -> None:
    least = schema.get("minProperties")
    if isinstance(least, int | float) and least > 1:
        # A key may come twice and is counted twice.
        raise UnenforceableError("minProperties above 1 is not supported: name the properties in `required`")


def _rewrite_text(schema: dict[str, Any]) -> None:
    """Rewrite patterns for Rust's regex, and formats as patterns. Mutates: `schema`."""
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = rust_pattern(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {
            rust_pattern(pattern): inner for pattern, inner in schema["patternProperties"].items()
        }
    name = schema.get("format")
    if not isinstance(name, str) or name in LIBRARY_FORMATS:
        return
    del schema["format"]  # an unknown one is a remark: `password`, `path`, `binary` …
    if name in OWN_FORMATS and "pattern" not in schema:
        schema["pattern"] = _whole(OWN_FORMATS[name])
    elif name in OWN_FORMATS:
        schema["allOf"] = [*schema.get("allOf", []), {"pattern": _whole(OWN_FORMATS[name])}]


def _whole(regex: str) -> str:
    return f"^(?:{regex})$"


def _rewrite_bounds(schema: dict[str, Any]) -> None:
    """Bring bounds of numbers into llguidance's range. Mutates: `schema`. Raises: UnenforceableError."""
    for key, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        bound = schema.get(key)
        if not isinstance(bound, int | float) or abs(bound) <= LARGEST_NUMBER:
            continue
        if bound * sign < 0:
            raise UnenforceableError(f"{key} beyond 2**62 is not supported")
        schema[key] = sign * LARGEST_NUMBER
