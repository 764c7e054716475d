"""Which tensors of a run all ranks save together: those that are spread over them, and those that are the same on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from halfstep.checkpoint.names import canonical_names
from halfstep.checkpoint.trees import Place, named
from halfstep.distributed import Ranks, dtensor_type, replicated_parameters
from halfstep.engine import MixedPrecision
from halfstep.errors import CheckpointError

__all__ = ["Spread", "counterparts", "optimizer_parameters", "part_name"]


def part_name(engine: str, part: str) -> str:
    """The name of a part of an engine.

    Example:
        >>> part_name("", "model"), part_name("generator", "model")
        ('model', 'generator.model')
    """
    return f"{engine}.{part}" if engine else part


def optimizer_parameters(model: nn.Module, optimizer: Optimizer) -> list[list[list[Any]]]:
    """For each parameter group the name and the shape of each parameter; a name is empty where the model has no such parameter."""
    own = {id(parameter): name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    names = canonical_names(model, list(own.values()))
    return [[[names.get(own.get(id(each), ""), ""), list(each.shape)] for each in group["params"]] for group in optimizer.param_groups]


def counterparts(engines: Mapping[str, MixedPrecision], tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of this run by which those are spread that ranks saved together, by the names that those have.

    For a tensor of an optimizer's state that is its parameter.

    Args:
        engines: By name.
        tree: What was saved.
    """
    own: dict[str, Tensor] = {}
    for engine_name, engine in engines.items():
        model, optimizer = part_name(engine_name, "model"), part_name(engine_name, "optimizer")
        state = engine.model.state_dict()
        names = canonical_names(engine.model, list(state))
        by_name = {names[name]: value for name, value in state.items()}
        own.update({f"{model}.{name}": value for name, value in by_name.items()})
        for name, place in tree["spread"].items():
            if place[0] == optimizer:
                start = place[: place.index("state")]
                parameter = name.removeprefix(f"{named(tuple(start))}.").removesuffix(f".{place[-1]}")
                if parameter in by_name:
                    own[name] = by_name[parameter]
    return own


@final
class Spread:
    """Takes out of the states of this rank what all ranks save together.

    That is what is spread over them (DTensors), or is the same on each: parameters that `DistributedDataParallel` reduces, and
    the optimizer's state of their shape. Everything else, such as buffers, each rank saves for itself.

    Attributes:
        tensors: What was taken out, by the name that it has on all ranks.
        places: Where each of them stood.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.places: dict[str, list[Any]] = {}
        self._names: dict[Place, str] = {}
        self._same: set[Place] = set()
        self._ranks: Ranks | None = None

    @classmethod
    def over(cls, ranks: Ranks) -> Self:
        """That of several ranks; without them, nothing is taken out."""
        spread = cls()
        spread._ranks = ranks
        return spread

    def know(self, engine: MixedPrecision, *, name: str, state: Mapping[str, Any]) -> None:
        """Learns what the tensors in the state of an engine are called.

        Args:
            engine: The engine.
            name: Its name.
            state: Its parts.
        """
        if self._ranks is None:
            return
        same = replicated_parameters(engine.model, ranks=self._ranks)
        model, optimizer = part_name(name, "model"), part_name(name, "optimizer")
        actual = dict(engine.model.named_parameters(remove_duplicate=False))
        canonical = canonical_names(engine.model, list(actual))
        for each in state["model"]:
            self._names[model, each] = f"{model}.{each}"
        self._same |= {(model, canonical[each]) for each, parameter in actual.items() if id(parameter) in same}
        several = len(engine.optimizers) > 1
        for number, (own, parameters) in enumerate(zip(engine.optimizers, state["setup"]["parameters"], strict=True)):
            place = (optimizer, number) if several else (optimizer,)
            saved = state["optimizer"][number] if several else state["optimizer"]
            names = [entry[0] for group in parameters for entry in group]
            tensors = [parameter for group in own.param_groups for parameter in group["params"]]
            for index, values in saved["state"].items():
                if not isinstance(index, int):  # What is no parameter's.
                    continue
                for key, value in values.items():
                    at = (*place, "state", index, key)
                    self._names[at] = f"{named(place)}.{names[index] or index}.{key}"
                    if isinstance(value, Tensor) and id(tensors[index]) in same and value.shape == tensors[index].shape:
                        self._same.add(at)

    def take(self, place: Place, tensor: Tensor) -> bool:
        """Takes a tensor out, if all ranks save it together; says whether it did.

        Raises:
            CheckpointError: It is spread over the ranks, and has no name on which they could agree.
        """
        kind = dtensor_type()
        is_spread = kind is not None and isinstance(tensor, kind)
        # A sparse one, such as a momentum of sparse gradients, cannot be stored in parts: each rank keeps the same.
        if self._ranks is None or not (is_spread or (place in self._same and tensor.layout is torch.strided)):
            return False
        name = self._names.get(place)
        if name is None:
            raise CheckpointError(
                f"{named(place)} is spread over the ranks, which only parameters, buffers and optimizer state can be in a checkpoint. Save "
                "its full_tensor()."
            )
        self.tensors[name] = tensor.detach()
        self.places[name] = list(place)
        return True
