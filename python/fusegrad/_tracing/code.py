"""What a code object may reach and do, from its instructions."""

from __future__ import annotations

import dis
import functools
from dataclasses import dataclass, field
from types import CodeType

from .names import words

__all__ = ["CodeFacts", "Untrusted", "facts_of"]


class Untrusted(Exception):
    """Why the results of a function cannot be kept: it is traced at each call."""


# These builtins reach what no instruction names, or keep state.
_DYNAMIC_BUILTINS = words(
    "getattr setattr delattr hasattr vars eval exec globals locals compile __import__ open input next super id print"
)
_DYNAMIC_ATTRIBUTES = words("__dict__ __getattribute__ __globals__ attrgetter methodcaller")
# These builtins can tell a lifted number from a Python number.
_TYPE_TESTS = words("isinstance issubclass type callable __class__")
_WRITES = words("STORE_GLOBAL DELETE_GLOBAL STORE_ATTR DELETE_ATTR STORE_NAME DELETE_NAME IMPORT_NAME LOAD_BUILD_CLASS")
_ITEM_WRITES = words("STORE_SUBSCR DELETE_SUBSCR STORE_SLICE")
_GLOBALS = words("LOAD_GLOBAL LOAD_NAME LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE_LOADS = words("LOAD_ATTR LOAD_METHOD")


@dataclass
class CodeFacts:
    globals: list[str] = field(default_factory=list)
    attributes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Names of which more than an attribute is taken: what they name may be called, or handed on."""
    tests_types: bool = False
    stores_items: bool = False


def _collect(code: CodeType, facts: CodeFacts) -> None:
    before = None
    instructions = list(dis.get_instructions(code))
    for instruction, after in zip(instructions, [*instructions[1:], None], strict=True):
        op, name = instruction.opname, instruction.argval
        if op.startswith("LOAD_") and op != "LOAD_CONST":
            names = name if isinstance(name, tuple) else (name,)
            facts.used.update(names[:-1] if after is not None and after.opname in _ATTRIBUTE_LOADS else names)
        if op in _WRITES:
            raise Untrusted(f"{code.co_name} has a statement that writes to its surroundings or imports ({op})")
        if op in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
            raise Untrusted(f"{code.co_name} assigns to {name}, which is not its own")
        facts.stores_items = facts.stores_items or op in _ITEM_WRITES
        if op in _GLOBALS:
            facts.globals.append(name)
        elif "ATTR" in op or "METHOD" in op:
            facts.attributes.append(name)
        elif op == "MATCH_CLASS" or (op == "IS_OP" and before != ("LOAD_CONST", None)):
            facts.tests_types = True
        before = (op, name)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _collect(constant, facts)


@functools.lru_cache(maxsize=1024)
def facts_of(code: CodeType) -> CodeFacts:
    facts = CodeFacts()
    _collect(code, facts)
    facts.globals = list(dict.fromkeys(facts.globals))
    facts.attributes = list(dict.fromkeys(facts.attributes))
    names = {*facts.globals, *facts.attributes}
    if dynamic := {*facts.globals} & _DYNAMIC_BUILTINS | names & _DYNAMIC_ATTRIBUTES:
        raise Untrusted(f"{code.co_name} uses {', '.join(sorted(dynamic))}")
    facts.tests_types = facts.tests_types or bool(names & _TYPE_TESTS)
    return facts
