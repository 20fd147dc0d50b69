"""Random TOML documents for the line locator. Every scalar is unique."""

import string
from typing import Any

from hypothesis import strategies as st

KEYS = st.sampled_from(
    ["a", "b", "c-d", "e_f", "1", "with space", 'q"uote', "dot.ted", "#", "", "ключ", "n\nl"]
)
BARE = set(string.ascii_letters + string.digits + "-_")

SCALAR_STYLES = st.sampled_from(["int", "basic", "literal", "multi", "multi-literal", "date", "float"])
VALUES = st.recursive(
    SCALAR_STYLES,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda v: ("array", v))
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda v: ("inline", v))
    ),
    max_leaves=5,
)
BODIES = st.dictionaries(KEYS, VALUES, max_size=4)


class Writer:
    """Writes one document. `draw` is hypothesis's and chooses every detail of style."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.text = ""
        self.number = 1000

    def document(self) -> str:
        self.noise()
        self.body(self.draw(BODIES))
        for key in self.draw(st.lists(KEYS.filter(lambda k: k not in ("a", "b")), unique=True, max_size=3)):
            # tables have a prefix, so they never collide with keys above
            name = f"tables.{self.key(key)}"
            if self.draw(st.booleans()):
                self.text += f"[{name}]"
                self.end_line()
                self.body(self.draw(BODIES))
            else:
                for _ in range(self.draw(st.integers(1, 3))):
                    self.text += f"[[ {name} ]]"
                    self.end_line()
                    self.body(self.draw(BODIES))
                    if self.draw(st.booleans()):
                        self.text += f"[{name} . sub-table]"
                        self.end_line()
                        self.body(self.draw(BODIES))
        return self.text

    def body(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            dotted = self.draw(st.booleans())
            self.text += (
                self.key(key) + (" . x.y" if dotted else "") + self.draw(st.sampled_from(["=", " = "]))
            )
            self.value(value)
            self.end_line()
            self.noise()

    def value(self, value: Any) -> None:
        if isinstance(value, str):
            self.scalar(value)
        elif value[0] == "array":
            self.text += "["
            for element in value[1]:
                self.blank()
                self.value(element)
                self.blank()
                self.text += ","
            self.blank()
            self.text += "]"
        else:
            self.text += "{"
            for position, (key, inner) in enumerate(value[1].items()):
                self.text += (", " if position else " ") + self.key(key) + " = "
                self.value(inner)
            self.text += " }"

    def scalar(self, style: str) -> None:
        self.number += 1
        n = self.number
        self.text += {
            "int": f"{n}",
            "float": f"{n}.5",
            "date": f"{n}-01-02 03:04:05Z",
            "basic": f'"{n} \\" ] # }} \\\\"',
            "literal": f"'{n} \" \\'",
            "multi": f'"""{n} ]\n[x]\n"" \\""" = 1\r\n # \\\n  """""',
            "multi-literal": f"'''{n}\n''\n[[y]]\n'''''",
        }[style]

    def key(self, key: str) -> str:
        if key and set(key) <= BARE and self.draw(st.booleans()):
            return key
        if "\n" not in key and self.draw(st.booleans()):
            return f"'{key}'"
        escaped = key.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'

    def blank(self) -> None:
        self.text += self.draw(st.sampled_from(["", " ", "\n", " # ] comment\n\t"]))

    def noise(self) -> None:
        self.text += self.draw(st.sampled_from(["", "\n", "# a = 1\n", "  # [t]\n\n", "\r\n"]))

    def end_line(self) -> None:
        self.text += self.draw(st.sampled_from(["\n", "\r\n", " # = ] comment\n"]))


@st.composite
def documents(draw: Any) -> str:
    return Writer(draw).document()
