"""Chat templates that try to leave the sandbox, to run without end, or to make large values."""

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
