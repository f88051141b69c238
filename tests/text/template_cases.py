"""Chat templates that try to leave the sandbox, to run without end, or to make large values."""
# ruff: noqa: E501 - templates are one line each

ESCAPES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ('' | attr('__class__')).__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__func__.__code__.co_code }}",
    "{{ messages.append(1) }}",
    "{{ {}.update({1: 2}) }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
    "{{ self.__init__.__globals__ }}",
    "{% set x = namespace() %}{{ x.__class__.__mro__ }}",
    "{{ 'x'.encode() }}",
    "{{ 'x'.translate({120: 'y'}) }}",
    "{{ (5).to_bytes(9, 'big') }}",
    "{{ {}.fromkeys([1]) }}",
)
NOT_NEEDED = (
    "{% include 'x' %}",
    "{% import 'x' as y %}",
)
WORK = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in x recursive %}{{ loop(x) }}{{ loop(x) }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in 'aaaaaaaaa' %}{% if j %}{% endif %}{% endfor %}{% endfor %}",
)
"""Templates of many steps. `x` is [1]."""
_DOUBLING = "{% for i in range(40) %}{% set ns.s = BODY %}{% endfor %}"
LARGE = (
    "{{ 'x' * 1000000000000 }}",
    "{{ 1000000000000 * 'x' }}",
    "{{ [0] * 1000000000000 }}",
    "{{ (0, 1) * 1000000000000 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(s=3) %}" + _DOUBLING.replace("BODY", "ns.s * ns.s"),
    "{% set ns = namespace(s='x') %}" + _DOUBLING.replace("BODY", "ns.s + ns.s"),
    "{% set ns = namespace(s=[1]) %}" + _DOUBLING.replace("BODY", "ns.s + ns.s"),
    "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
)
"""Results that are too large: numbers, texts and lists of one operator, and the rendered text."""


# --- What takes hours or gigabytes without limits --------------------------------------------

_SPACE = "{% set ns = namespace(a='x', b=['x'], c=['x'], t=('x',)) %}"
_BIG = "{% set big = 'a' * 4000000 %}{% set list = [0] * 100000 %}{% set other = list[:] %}"
_COLLIDING = "range(0, 100000 * 2305843009213693951, 2305843009213693951)"
"""Numbers of one hash."""


def _again(times: int, body: str) -> str:
    return f"{_SPACE}{{% for i in range({times}) %}}{body}{{% endfor %}}"


def _shared(value: str, reads: str, *, name: str = "b") -> str:
    """Return a template that puts a value into itself, twice, forty times, and then reads it."""
    return _again(40, f"{{% set ns.{name} = {value} %}}") + reads


HOSTILE = {
    # Widths, of methods, filters and formats.
    "center": "{{ 'a'.center(2000000000) }}",
    "center filter": "{{ 'a' | center(2000000000) }}",
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "rjust": "{{ 'a'.rjust(2000000000) | length }}",
    "zfill": "{{ 'a'.zfill(2000000000) | length }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "percent": "{{ '%2000000000d' % 3 }}",
    "percent flags": "{{ '%-+ #02000000000d' % 3 }}",
    "percent precision": "{{ '%.2000000000f' % 3.0 }}",
    "percent star": "{{ '%*d' % (2000000000, 3) }}",
    "percent names": "{{ '%(a)2000000000s' % {'a': 1} }}",
    "percent many": _BIG + "{{ ('%(a)s' * 1000) % {'a': big} }}",
    "percent tuple": _BIG + "{{ '%s%s' % (big, big) }}",
    "percent in a test": "{{ '%2000000000d' is even }}",
    "percent in another": "{{ '%2000000000d' is divisibleby(3) }}",
    "format filter": "{{ '%2000000000d' | format(3) }}",
    "format": "{{ '{:>2000000000}'.format('a') }}",
    "format nested": "{{ '{:>{}}'.format('a', 2000000000) }}",
    "format map": "{{ '{a:>2000000000}'.format_map({'a': 1}) }}",
    "format many": _BIG + "{{ ('{0}' * 1000).format(big) }}",
    "format converted": _BIG + "{{ ('{0!r}' * 1000).format(big) }}",
    "indent": "{{ 'a\nb' | indent(2000000000) }}",
    "indent many": "{{ ('a\n' * 1000000) | indent(1000) }}",
    "indent text": _BIG + "{{ ('a\n' * 1000) | indent(big) }}",
    "json indent": "{{ [1] | tojson(indent=2000000000) }}",
    "json separators": "{{ ([1] * 100000) | tojson(separators=('a' * 100000, 'b')) }}",
    "batch": "{{ [1] | batch(2000000000, 'x') | list }}",
    "slice": "{{ [] | slice(2000000000) | list }}",
    "round": "{{ 5 | round(0 - 2000000000) }}",
    "round up": "{{ 5 | round(2000000000, 'ceil') }}",
    "default": "{{ x | default('a'.ljust(2000000000)) }}",
    "mapped": "{{ ['x'] | map('center', 2000000000) | list }}",
    "mapped format": "{{ ['%2000000000d'] | map('format', 3) | list }}",
    "attribute": "{{ ('x' | attr('center'))(2000000000) }}",
    "autoescape": "{% autoescape 'a' | center(2000000000) %}{% endautoescape %}",
    "strftime": "{{ strftime_now('%1000000Y' * 100000) }}",
    # Texts and lists that multiply.
    "tilde": _again(60, "{% set ns.a = ns.a ~ ns.a ~ ns.a %}"),
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace method": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "join": "{{ ([1] * 100000) | join('b' * 100000) }}",
    "join method": "{{ ('b' * 100000).join('a' * 100000) }}",
    "join repeated": _BIG + "{{ ([big] * 1000) | join }}",
    "sum": "{{ ([[0] * 1000] * 4000) | sum(start=[]) | length }}",
    "escape": "{{ ('<' * 4000000) | escape | length }}",
    "truncate": "{{ ('a' * 4000000) | truncate(9, true, 'b' * 4000000) }}",
    "lines": "{{ ('\n' * 4000000).splitlines() | length }}",
    "words": "{{ (' a' * 2000000).split() | length }}",
    "pieces": "{{ (',a' * 2000000).split(',') | length }}",
    "title": "{{ ('a ' * 2000000) | title | length }}",
    "wordcount": "{{ ('a ' * 2000000) | wordcount }}",
    "characters": "{{ ('a' * 4000000) | list | length }}",
    "mapped characters": "{{ ('a' * 4000000) | map('upper') | list | length }}",
    "macro": "{% macro f() %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endmacro %}{{ f() | length }}",
    "set block": "{% set x %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}{{ x | length }}",
    "held texts": _again(1000, "{% set ns.b = ns.b + ['é漢' * (1000000 + i)] %}"),
    "held by macros": "{% macro f(n) %}{% set x = 'a' * 1000000 %}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "held slices": _BIG + _again(10000, "{% set ns.b = ns.b + [big[i:]] %}"),
    "held lists": _again(100000, "{% set ns.b = ns.b + [[" + "1," * 9999 + "]] %}"),
    # Lists that hold one list many times over.
    "shared": _shared("[ns.b, ns.b]", "{{ ns.b }}"),
    "shared json": _shared("[ns.b, ns.b]", "{{ ns.b | tojson }}"),
    "shared string": _shared("[ns.b, ns.b]", "{{ ns.b | string }}"),
    "shared tuple": _shared("(ns.t, ns.t)", "{{ {ns.t: 1} }}", name="t"),
    "shared object": _shared("{'a': ns.b, 'b': ns.b}", "{{ ns.b }}"),
    "shared dict": _shared("dict(a=ns.b, b=ns.b)", "{{ ns.b }}"),
    "shared sum": _shared("[ns.b] + [ns.b]", "{{ ns.b }}"),
    "shared product": _shared("[ns.b] * 2", "{{ ns.b }}"),
    "shared default": _shared("[1, 2] | map(attribute='q', default=ns.b) | list", "{{ ns.b }}"),
    "shared batch": _shared("[ns.b] | batch(2, ns.b) | list", "{{ ns.b }}"),
    "shared cycler": _shared("cycler(ns.b, ns.b).items", "{{ ns.b }}"),
    "shared compared": _again(40, "{% set ns.b = [ns.b, ns.b] %}{% set ns.c = [ns.c, ns.c] %}") + "{{ ns.b == ns.c }}",
    "shared arguments": "{% macro f() %}{% set ns.t = varargs %}{% endmacro %}" + _again(40, "{{ f(ns.t, ns.t) }}") + "{{ ns.t }}",
    "deep tuple": _again(300, "{% for j in range(1000) %}{% set ns.t = (ns.t,) %}{% endfor %}") + "{{ {ns.t: 1} }}",
    # Time within one call, and between calls.
    "rfind": "{{ ('a' * 4000000).rfind('b' + 'a' * 2000000) }}",
    "rsplit": "{{ ('a' * 4000000).rsplit('b' + 'a' * 2000000) | length }}",
    "strip": "{{ ('a' * 4000000).strip('b' * 2000000 ~ 'ca') }}",
    "trim": "{{ ('a' * 4000000) | trim('b' * 2000000 ~ 'ca') }}",
    "hexadecimal": "{{ ('F' * 4000000) | int(base=16) }}",
    "colliding": "{{ " + _COLLIDING + " | unique | list | length }}",
    "colliding keys": "{{ dict(" + _COLLIDING + " | batch(2)) | length }}",
    "colliding names": "{% set n = namespace(" + _COLLIDING + " | batch(2)) %}",
    "attribute of all": _BIG + "{{ range(100000) | map(attribute=big) | list }}",
    "many searches": _BIG + "{% if 'b' in big %}{% endif %}" * 3000,
    "many comparisons": _BIG + "{{ (" + "list == other, " * 5000 + ") }}",
    "comparison of many": _BIG + "{{ list" + " == other" * 5000 + " }}",
    "many slices": _BIG + "{% set x = list[1:] %}" * 3000,
    "many hashes": _BIG + "{% set t = (0, 1) * 40000 %}{% set d = {t: 1} %}" + "{% if d[t] %}{% endif %}" * 3000,
    "condition of a loop": "{% for i in range(99999) if " + "i is string and i is string or " * 999 + "false %}{% endfor %}",
    "long body": "{% for i in range(99999) %}" + "{% if i %}{% endif %}" * 3000 + "{% endfor %}",
    # Not for templates of chats.
    "lipsum": "{{ lipsum(1000000) }}",
    "xmlattr": "{{ {'a': 1} | xmlattr }}",
    "urlize": "{{ ('a.com ' * 600000) | urlize }}",
    "wordwrap": "{{ ('a ' * 2000000) | wordwrap(1, wrapstring='b' * 10000) }}",
    "striptags": "{{ ('<!--' * 1000000) | striptags }}",
    "pprint": _shared("[ns.b, ns.b]", "{{ ns.b | pprint }}"),
    "groupby": _BIG + "{{ list | groupby(1.5, big) }}",
    "integer": "{{ 0x" + "F" * 50000 + " // 0x" + "E" * 30000 + " }}",
    "long": "{{ a" + " and a" * 12000 + " }}",
}  # fmt: skip
"""Templates that must be refused in a moment, in little memory."""
ORDINARY = (
    "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}{{ 1 + 2.5 }}{{ 7 // 2 }}{{ -x }}{{ (1, 2) * 2 }}",
    "{{ '%s has %05.2f%% %(3)s' % ('x', 1.5) if false else '%-4s|%3d%%' % ('x', 5) }}{{ '%(a)s' % {'a': 1} }}",
    "{{ 1 ~ 'a' ~ none ~ missing ~ true ~ 1.5 ~ [1, 'é'] }}{{ missing }}{{ true }}{{ none }}{{ {'a': [x]} }}",
    "{% for i in range(3) if i != 1 %}{{ loop.index }}{{ loop.cycle('a', 'b') }}{{ loop.changed(i) }}{% else %}-{% endfor %}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() }}{% endmacro %}{% call f(1, 2, 3, c=4) %}x{% endcall %}",
    "{% set ns = namespace(a=1, b=[]) %}{% for i in [1, 2] %}{% set ns.b = ns.b + [i] %}{% endfor %}{{ ns.b }}{{ ns.a }}",
    "{{ 'a b,c'.split() }}{{ 'a,b,c'.split(',', 1) }}{{ 'a,b,c'.rsplit(',', maxsplit=1) }}{{ 'a\nb'.splitlines() }}{{ 'abc'[::-1] }}",
    "{{ ' ab '.strip() }}{{ 'xabx'.lstrip('x') }}{{ 'xabx'.rstrip('x') }}{{ 'ab'.center(6, '*') }}{{ 'ab'.ljust(4) }}{{ 'ab'.rjust(4) }}",
    "{{ '7'.zfill(3) }}{{ 'a\tb'.expandtabs(4) }}{{ 'aXa'.replace('a', 'bb', 1) }}{{ 'abab'.partition('b') }}{{ 'abab'.rpartition('b') }}",
    "{{ 'abab'.find('b') }}{{ 'abab'.rfind('b') }}{{ 'abab'.index('b') }}{{ 'abab'.rindex('b') }}{{ 'abab'.count('ab') }}{{ '-'.join(['a', 'b']) }}",
    "{{ 'ß'.upper() }}{{ 'İ'.lower() }}{{ 'ab'.capitalize() }}{{ 'ab cd'.title() }}{{ 'aB'.swapcase() }}{{ 'ß'.casefold() }}{{ 'a'.isalpha() }}",
    "{{ 'ab'.startswith('a') }}{{ 'ab'.endswith(('b', 'c')) }}{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}{{ '5'.isdigit() }}",
    "{{ '{} {:>5} {a[0]!r}'.format(1, 'x', a=['y']) }}{{ '{a:.2f}'.format_map({'a': 1.5}) }}{{ [1, 2, 1].count(1) }}{{ (1, 2).index(2) }}",
    "{% set d = {'b': 1, 'A': 2} %}{{ d.get('b') }}{{ d.get('c', 3) }}{{ d.items() | list }}{{ d.keys() | list }}{{ d.values() | list }}{{ d.copy() }}",
    "{{ d | default('x') }}{{ '' | d('y', true) }}{{ {'b': 1, 'A': 2} | dictsort }}{{ {'b': 1} | items | list }}{{ [3, 1] | sort }}{{ none | map('upper') | list }}",
    "{{ ['b', 'A'] | sort | join }}{{ ['b', 'A'] | sort(case_sensitive=true, reverse=true) | join(', ') }}{{ [{'a': 2}, {'a': 1}] | sort(attribute='a') }}",
    "{{ ['a', 'A', 'b'] | unique | list }}{{ [3, 1, 2] | min }}{{ ['a', 'B'] | max }}{{ [{'a': 1}] | min(attribute='a') }}{{ [] | min }}{{ [1, 2] | sum }}",
    "{{ [{'a': 1}, {'a': 2}] | sum(attribute='a', start=1) }}{{ [{'a': 'x'}, {}] | map(attribute='a', default='-') | join('|') }}{{ [1, 2] | map('string') | list }}",
    "{{ [0, 1] | select | list }}{{ [1, 2] | reject('odd') | list }}{{ [{'a': 1}] | selectattr('a', 'eq', 1) | list }}{{ [{'a': 1}] | rejectattr('a') | list }}",
    "{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ [1, 2] | reverse | list }}{{ 'ab' | reverse }}{{ 'abc' | list }}{{ [1, 2] | first }}{{ [1, 2] | last }}",
    "{{ 'a\nb' | indent }}{{ 'a\nb' | indent('> ', first=true) }}{{ 'ab cd' | title }}{{ 'abcdef ghi' | truncate(8, leeway=0) }}{{ 'a b' | wordcount }}{{ 'aB' | capitalize }}",
    "{{ 'aB' | upper }}{{ 'aB' | lower }}{{ 5 | upper }}{{ 'ab' | center(6) }}{{ ' ab ' | trim }}{{ 'xax' | trim('x') }}{{ 'aaa' | replace('a', 'b', 2) }}{{ 'a1' | replace(1, 2) }}",
    "{{ '%s-%03d' | format('a', 5) }}{{ '%(a)s' | format(a=1) }}{{ [1, 'a', none] | join }}{{ [{'a': 1}] | join(',', attribute='a') }}{{ 5.678 | round(1) }}{{ 5.1 | round(0, 'ceil') }}",
    "{{ '5' | int }}{{ 'x' | int(7) }}{{ 'ff' | int(base=16) }}{{ '1.5' | float }}{{ -5 | abs }}{{ 2000 | filesizeformat }}{{ [1, 2] | length }}{{ 'abc' | count }}{{ [1] | string }}",
    "{{ 3 is odd }}{{ 4 is even }}{{ 9 is divisibleby 3 }}{{ 'a' is lower }}{{ 'A' is upper }}{{ 1 is in [1] }}{{ 1 is eq 1 }}{{ 2 is gt 1 }}{{ 1 < 2 < 3 }}{{ 'a' in 'ab' }}{{ x is sameas x }}",
    "{{ dict(a=1, **{'b': 2}) }}{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner('; ') %}{{ j() }}{{ j() }}{{ ('ab' | attr('upper'))() }}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}{% block z %}c{% endblock %}{{ self.z() }}{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is sequence else a }}{% endfor %}",
)  # fmt: skip
"""Templates that come out as in Jinja2's own sandbox. `x` is 7."""
