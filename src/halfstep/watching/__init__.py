"""Following a training loop that halfstep does not own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.watching.context import Watch, watch

__all__ = ["Watch", "watch"]


# Launching a script must be possible without torch, which only `watch` needs.
def __getattr__(name: str) -> Any:
    if name in __all__:
        from halfstep.watching import context  # noqa: PLC0415 - it loads torch

        return getattr(context, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
