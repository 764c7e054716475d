"""What all records have in common."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AbstractRecord", "Severity"]

# How bad it is what an alert or a rule of the linter says.
Severity = Literal["info", "warning", "error"]


class AbstractRecord:
    """A frozen fact that crosses a layer, and that can be written as JSON and read back.

    A record is a frozen, slotted dataclass. Its JSON follows from its fields, so that a new field is written without another line of
    code.
    """

    __slots__ = ()

    def to_json(self, *, indent: int | None = None) -> str:
        """The record as JSON text; non-finite numbers are written as `"NaN"`, `"Infinity"` and `"-Infinity"`.

        Args:
            indent: Spaces for each level, or `None` for a single line.
        """
        # It loads cattrs, which a program that writes no record does not pay for.
        from halfstep.records.codec import encode  # noqa: PLC0415

        return json.dumps(encode(self), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The record that a JSON text holds.

        Raises:
            RecordFormatError: The text is not JSON, or not this record.
        """
        from halfstep.records.codec import decode  # noqa: PLC0415 - as above

        return decode(text, cls)
