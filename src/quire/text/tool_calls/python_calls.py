"""`python_calls`: calls that a model writes as Python, as LFM2 and OLMo 3 do.

    [weather(city="Ulm", days=3), clock()]   →   [("weather", '{"city": "Ulm", "days": 3}'), ("clock", "{}")]

Nothing is evaluated: arguments are literals. Must not know tools. Next to read: `parser.py`.
"""

import ast
import json
from typing import Any

MAX_CHARACTERS, MAX_DEPTH = 1 << 16, 64
"""Of a text that is parsed: Python's parser is not made for hostile ones."""
_WORDS = {"true": True, "false": False, "null": None}


def python_calls(text: str) -> list[tuple[str, str]]:
    """Return the name and the arguments, as JSON, of each call; empty unless the text is calls and nothing else."""
    if len(text) > MAX_CHARACTERS or max(text.count(opening) for opening in "[{(") > MAX_DEPTH * 16:
        return []
    try:
        statements = ast.parse(text.strip()).body
        found: list[tuple[str, str]] = []
        for statement in statements:
            value = statement.value if isinstance(statement, ast.Expr) else None
            for call in value.elts if isinstance(value, ast.List) else [value]:
                if not isinstance(call, ast.Call) or call.args:
                    return []
                arguments = {str(keyword.arg): _literal(keyword.value, 0) for keyword in call.keywords}
                written = json.dumps(arguments, ensure_ascii=False)
                written.encode()
                found.append((ast.unparse(call.func), written))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return found


def _literal(node: ast.expr, depth: int) -> Any:
    """Return the value of a literal, with JSON's words. Raises: ValueError for anything else."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key, depth + 1) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is no string")
        return dict(zip(keys, (_literal(value, depth + 1) for value in node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError("JSON has no such value")
    return value
