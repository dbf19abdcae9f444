"""Dataclasses with their constructors written out, for the compiled copy: mypyc leaves generated ones to Python.

A frozen class is opened for that: mypy has checked in the sources that nobody assigns to it. Pure.
"""

import ast

_PLAIN = {"frozen", "slots", "eq", "kw_only"}
"""Options of `dataclass` that are understood here; a class with others stays as it is."""


def written_out(source: str) -> str:
    """Give every dataclass of a module that has no base an `__init__` of the same signature and effect."""
    lines = source.splitlines()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in reversed(classes):
        decorator = _dataclass(node)
        constructor = None if decorator is None or node.bases else _constructor(node, _options(decorator))
        if decorator is None or constructor is None or node.end_lineno is None:
            continue
        lines[node.end_lineno : node.end_lineno] = ["", *constructor]
        at = decorator.lineno - 1
        lines[at] = lines[at].replace("frozen=True", "unsafe_hash=True")
    return "\n".join(lines) + "\n"


def _dataclass(node: ast.ClassDef) -> ast.Call | None:
    found = [d for d in node.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func) == "dataclass"]
    return found[0] if len(node.decorator_list) == len(found) == 1 else None


def _options(decorator: ast.Call) -> dict[str, bool]:
    return {str(option.arg): ast.unparse(option.value) == "True" for option in decorator.keywords}


def _constructor(node: ast.ClassDef, options: dict[str, bool]) -> list[str] | None:
    """The lines of the constructor, or None if the class asks for more than is understood here."""
    methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
    if "__init__" in methods or not options.keys() <= _PLAIN:
        return None
    parameters, body = ["*"] if options.get("kw_only") else [], []
    for field in node.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        name, kind = ast.unparse(field.target), ast.unparse(field.annotation)
        asked = _asked(field.value)
        if asked is None:
            parameters.append(f"{name}: {kind}" + (f" = {ast.unparse(field.value)}" if field.value else ""))
            body.append(f"self.{name} = {name}")
        elif asked.keys() == {"default_factory"}:
            parameters.append(f"{name}: {kind} | None = None")
            body.append(f"self.{name} = ({asked['default_factory']})() if {name} is None else {name}")
        elif asked != {"init": "False"}:
            return None
    if "__post_init__" in methods:
        body.append("self.__post_init__()")
    if not body:
        return None
    head = f"    def __init__(self, {', '.join(parameters)}) -> None:"
    return [head, *(f"        {line}" for line in body)]


def _asked(value: ast.expr | None) -> dict[str, str] | None:
    """What a field asks of `field(...)`, or None if it is not written so."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "field":
        return None
    return {str(option.arg): ast.unparse(option.value) for option in value.keywords}
