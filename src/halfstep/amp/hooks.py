"""What `amp.initialize` hangs on models: casts of what goes in and comes out, and a state dict in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from halfstep._torch import own_buffers, own_parameters
from halfstep.casting import NestChange, cast_tensors
from halfstep.precision import HALVES

__all__ = ["ArgumentsCast", "OutputsCast", "show_state_in_fp32"]


@final
@dataclass(frozen=True, slots=True)
class OutputsCast:
    """A hook, which pickles with the model, by which what a model returns is cast."""

    dtype: torch.dtype

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Called by torch after each forward pass."""
        return cast_tensors(output, self.dtype)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsCast:
    """A hook by which what a policy leaves as it is comes to be cast.

    Copies and pickles of the model are without the policy, so those of the hook cast nothing.

    Attributes:
        batches: What batches of a class of the user's own are asked to cast themselves to, by their `to`; `None` for as they are.
        doubles: Whether float64 tensors are cast to fp32, from which the policy goes on.

    Example:
        >>> hook = ArgumentsCast(doubles=True)
        >>> (x, *_), _ = hook(nn.Identity(), ([torch.ones(1, dtype=torch.float64)],), {})
        >>> x[0].dtype
        torch.float32
    """

    batches: torch.dtype | None = None
    doubles: bool = False

    def __reduce__(self) -> tuple[type[ArgumentsCast], tuple[()]]:
        return ArgumentsCast, ()

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Called by torch before each forward pass."""
        casts = NestChange(self._of)
        return tuple([casts.of(each) for each in args]), {name: casts.of(each) for name, each in kwargs.items()}

    def _of(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.float() if self.doubles and leaf.dtype is torch.float64 else leaf
        if self.batches is None or isinstance(leaf, nn.Module | type) or not callable(getattr(leaf, "to", None)):
            return leaf
        return leaf.to(self.batches)


def show_state_in_fp32(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook after a module's `state_dict()`, by which what it stores in half is there in fp32, as other levels and Apex have it.

    It is about the module's own tensors: each module has the hook, so that the state dict of any part of a model is in fp32, too.

    Example:
        >>> layer = nn.Linear(1, 1).half()
        >>> _ = layer.register_state_dict_post_hook(show_state_in_fp32)
        >>> layer.state_dict()["weight"].dtype, layer.weight.dtype
        (torch.float32, torch.float16)
    """
    for name in (*own_parameters(module), *own_buffers(module)):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype in HALVES:
            state_dict[prefix + name] = value.float()
