"""Chat templates that try to get out, or to get much: shared by `templates.py` and the tests of the sandbox."""

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
    "{{ (''.format | string).__self__ }}{{ ''.translate({}) }}",
    "{{ self.__init__.__globals__ }}",
    "{% set x = namespace() %}{{ x.__class__.__mro__ }}",
)
NOT_NEEDED = (
    "{{ lipsum() }}",
    "{{ 'a' | urlize }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
)
WORK = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in x recursive %}{{ loop(x) }}{{ loop(x) }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in 'aaaaaaaaa' %}{% if j %}{% endif %}{% endfor %}{% endfor %}",
)
"""Of many steps. `x` is [1]."""
_DOUBLING = "{% for i in range(40) %}{% set ns.s = BODY %}{% endfor %}"
LARGE = (
    "{{ 'x' * 1000000000000 }}",
    "{{ 1000000000000 * 'x' }}",
    "{{ [0] * 1000000000000 }}",
    "{{ (0, 1) * 1000000000000 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(s=3) %}" + _DOUBLING.replace("BODY", "ns.s * ns.s"),
    "{% set ns = namespace(s='x') %}" + _DOUBLING.replace("BODY", "ns.s ~ ns.s"),
    "{% set ns = namespace(s='x') %}" + _DOUBLING.replace("BODY", "ns.s + ns.s"),
    "{% set ns = namespace(s=[1]) %}" + _DOUBLING.replace("BODY", "ns.s + ns.s"),
    "{% set ns = namespace(s='x') %}" + _DOUBLING.replace("BODY", "[ns.s, ns.s] | join"),
    "{% set ns = namespace(s='x') %}" + _DOUBLING.replace("BODY", "ns.s.join([ns.s, ns.s, ns.s])"),
    "{% set ns = namespace(s='xx') %}" + _DOUBLING.replace("BODY", "ns.s.replace('x', ns.s)"),
    "{% set ns = namespace(s='xx') %}" + _DOUBLING.replace("BODY", "ns.s | replace('x', ns.s)"),
    "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = t %}{% endfor %}",
    "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call twice() %}" * 40
    + "x"
    + "{% endcall %}" * 40,
    "{% macro f() %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endmacro %}{{ f() }}",
    "{% set t %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}{{ t | length }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x'.zfill(1000000000) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'x' | indent(1000000000, true) }}",
    "{{ ('\\n' * 1000000) | indent(9999) }}",
    "{{ ('x' * 1000000) | indent('y' * 1000000) }}",
    "{{ [[1]] | tojson(indent=1000000000) }}",
    "{{ ('x' * 1000000).replace('', 'y' * 1000000) }}",
)
"""Of a text or a number that is too large."""
