"""Programs that are laid out as nobody should lay them out."""

from __future__ import annotations

import random
from typing import final

__all__ = ["Program"]

_SIMPLE = (
    "a()",
    "b = c(d, e=f)",
    "x = (1,  # one\n  2)",
    "pass",
    "'''\n q\n'''",
    "é = f'{a} {a!r:>{b}}'",
    "t = a + \\\n  b",
    "del (a, b)",
    "x[a, b] = c",
    "import m, n",
    "from m import (a,\n b)",
    "return_ = f(a for a in b)",
    "y: z = (yield)",
    "a = b = c, *d",
    "e = 'f' 'g'",
    "f(\n    a,  # two\n    b  # three\n)",
)
_HEADS = (
    "if a:",
    "if(a):",
    "while f(a):",
    "for i in j, k:",
    "with a as b, (c):",
    "with f(d):",
    "async def g(x=h(a)):",
    "class A(B, m=c):",
    "@f(1)\ndef h():",
)


@final
class Program:
    """Writes one."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.newline = chance.choice(("\n", "\n", "\r\n"))

    def text(self) -> str:
        text = self._block("", 3).replace("\n", self.newline)
        return text if self.chance.random() < 0.7 else text.removesuffix(self.newline)

    def _sometimes(self, text: str, probability: float = 0.2) -> str:
        return text if self.chance.random() < probability else ""

    def _remark(self) -> str:
        return self._sometimes(f"{self.chance.choice(('', ' ', '  '))}# c{self.chance.randrange(10**6)} ü")

    def _row(self) -> str:
        joint = self.chance.choice(("; ", ";", " ;  ", "; \\\n   "))
        count = self.chance.choice((1, 1, 1, 2, 3))
        return joint.join(self.chance.choice(_SIMPLE) for _ in range(count)) + self._sometimes(";") + self._remark() + "\n"

    def _noise(self, indent: str) -> str:
        lines = ["", indent, "\f", f"{indent}#", f"{indent}# d{self.chance.randrange(10**6)}", "# left", f"{indent}  # right"]
        return "".join(f"{self.chance.choice(lines)}\n" for _ in range(self.chance.choice((0, 0, 0, 1, 3))))

    def _suite(self, indent: str, depth: int) -> str:
        if self.chance.random() < 0.3:
            return self.chance.choice((" ", "", " \\\n ")) + self._row()
        deeper = indent + self.chance.choice(("    ", "  ", "\t", " "))
        tail = self._sometimes(f"{deeper}# tail\n")
        return f"{self._remark()}\n{self._block(deeper, depth - 1)}{tail}"

    def _compound(self, indent: str, depth: int) -> str:
        kind = self.chance.randrange(6)
        if kind == 0:
            handler = f"{indent}except E as e:{self._suite(indent, depth)}"
            end = self._sometimes(f"{indent}finally:{self._suite(indent, depth)}", 0.5)
            return f"try:{self._suite(indent, depth)}{handler}{end}"
        if kind == 1:
            case = f"{indent}  case [1, A(x=b)] if f(a):{self._suite(indent + '  ', depth)}"
            return f"match a:\n{case}{self._noise(indent)}{indent}  case _:{self._suite(indent + '  ', depth)}"
        if kind == 2:
            branches = "".join(f"{self._noise(indent)}{indent}elif b{number}:{self._suite(indent, depth)}" for number in range(2))
            end = self._sometimes(f"{indent}else:{self._suite(indent, depth)}", 0.5)
            return f"if a:{self._suite(indent, depth)}{branches}{end}"
        head = self.chance.choice(_HEADS).replace("\n", f"\n{indent}")
        return f"{head}{self._suite(indent, depth)}"

    def _block(self, indent: str, depth: int) -> str:
        text = ""
        for _ in range(self.chance.choice((1, 1, 2, 3, 4))):
            compound = depth > 0 and self.chance.random() < 0.5
            text += f"{self._noise(indent)}{indent}{self._compound(indent, depth) if compound else self._row()}"
        return text
