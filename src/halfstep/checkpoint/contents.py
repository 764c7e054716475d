"""What a run goes on from, gathered from its engines: everything, and nothing that a file could not hold safely."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._torch import set_versions, versions_in
from halfstep.checkpoint.names import canonical_names, frozen_names, transient_buffers
from halfstep.checkpoint.nesting import inner_states
from halfstep.checkpoint.spreading import Spread, optimizer_parameters, part_name
from halfstep.checkpoint.trees import compacted, plain
from halfstep.distributed import Ranks, local_tensor
from halfstep.engine import MixedPrecision, StepProgress, progress_of, state_of, trained_parameters
from halfstep.errors import CheckpointError, ConfigurationError, InvalidTypeError
from halfstep.randomness import RandomState
from halfstep.records import EngineRecord
from halfstep.scaler import LossScaler

__all__ = ["FORMAT", "Contents", "as_engines", "capture", "model_state", "outside_parameters", "schedulers_of"]

# The first entry of what is saved.
FORMAT: Final = "halfstep checkpoint 1"

_TAKEN: Final = frozenset({"format", "step", "random", "extra", "spread"})


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # tensors have no single truth value to compare by
class Contents:
    """What a checkpoint is made of, still in the memory of the run.

    Attributes:
        step: The number of the step, as the user counts.
        tree: Everything that this process saves, by part.
        engines: The engines.
        device: The type of the device that is trained on.
        spread: What the ranks save together, by name; empty where one process trains alone.
    """

    step: int
    tree: dict[str, Any]
    engines: tuple[EngineRecord, ...]
    device: str
    spread: Mapping[str, Tensor]


def as_engines(amp: MixedPrecision | Mapping[str, MixedPrecision], *, call: str) -> dict[str, MixedPrecision]:
    """The engines of a run by name; the only one has an empty name.

    Raises:
        InvalidTypeError: It is neither an engine nor a dictionary of them.
        ConfigurationError: There is none, or a name cannot be one.
    """
    given: Any = amp
    if isinstance(given, MixedPrecision):
        return {"": given}
    if not isinstance(given, Mapping) or not all(isinstance(each, MixedPrecision) for each in given.values()):
        raise InvalidTypeError(
            f"{call} takes a halfstep.MixedPrecision, or a dictionary of several by name, such as "
            f'{{"generator": amp_g, "discriminator": amp_d}}, not a {type(given).__name__}.'
        )
    if not given:
        raise ConfigurationError(f"{call} was given no engine: the dictionary is empty.")
    for name in given:
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise ConfigurationError(
                f"{call}: {name!r} cannot be the name of an engine. Names are words, other than {', '.join(sorted(_TAKEN))}."
            )
    return dict(given)


def capture(engines: Mapping[str, MixedPrecision], *, step: int, extra: Mapping[str, Any] | None, ranks: Ranks | None) -> Contents:
    """What a run goes on from. Tensors share the memory of the run: copy or write them before it goes on.

    Args:
        engines: By name.
        step: The number of the step.
        extra: What the user saves besides.
        ranks: Those that train together; `None` in one process.

    Raises:
        CheckpointError: Something cannot be saved; the message names it.
        StepOrderError: An engine is at a point that cannot be gone on from.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise InvalidTypeError(f"extra is a dictionary of what else to keep, not a {type(extra).__name__}.")
    spread = Spread() if ranks is None else Spread.over(ranks)
    tree: dict[str, Any] = {"format": FORMAT, "step": step}
    records = []
    for name, engine in engines.items():
        parts = _engine_parts(engine)
        spread.know(engine, name=name, state=parts)
        for part, value in parts.items():
            tree[part_name(name, part)] = plain(value, (part_name(name, part),), take=spread.take)
        records.append(_engine_record(name, engine, progress=parts["progress"]))
    tree["random"] = RandomState.capture().to_plain()
    tree["extra"] = compacted(plain({} if extra is None else extra, ("extra",), take=spread.take))
    if ranks is not None:
        tree["spread"] = spread.places
    device = next(iter(engines.values())).device.type
    return Contents(step=step, tree=tree, engines=tuple(records), device=device, spread=spread.tensors)


def _engine_record(name: str, engine: MixedPrecision, *, progress: Mapping[str, Any] | None) -> EngineRecord:
    counts = None if isinstance(engine.scaler, torch.amp.GradScaler) and not isinstance(engine.scaler, LossScaler) else engine.stats()
    return EngineRecord(
        name=name,
        precision=engine.precision,
        policy=str(engine.policy),
        steps=state_of(engine)["steps"],
        skips=None if counts is None else counts.skips,
        scale=None if engine.scaler is None else engine.scaler.get_scale(),
        micro_batches=0 if progress is None else progress["micro_batches"],
        accumulate=engine.accumulate,
    )


def _engine_parts(engine: MixedPrecision) -> dict[str, Any]:
    progress = progress_of(engine)  # First, since it refuses moments that cannot be gone on from.
    optimizers = [_optimizer_state(optimizer) for optimizer in engine.optimizers]
    schedulers = [_scheduler_state(each) for each in schedulers_of(engine)]
    return {
        "model": model_state(engine.model),
        "buffers": _renamed(engine.model, transient_buffers(engine.model)),
        "parameters": outside_parameters(engine),
        # One is as torch's own load_state_dict() takes it.
        "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
        "inner": [inner_states(optimizer) for optimizer in engine.optimizers],
        "scheduler": schedulers[0] if len(schedulers) == 1 else schedulers or None,
        "amp": state_of(engine),
        "setup": {
            "policy": str(engine.policy),
            "accumulate": engine.accumulate,
            "optimizers": [type(each).__name__ for each in engine.optimizers],
            "schedulers": [type(each).__name__ for each in schedulers_of(engine)],
            "clipping": [engine.max_grad_norm, engine.max_grad_value],
            "frozen": frozen_names(engine.model),
            "parameters": [optimizer_parameters(engine.model, each) for each in engine.optimizers],
        },
        "progress": None if progress is None else _plain_progress(progress, engine.model),
    }


def model_state(model: nn.Module) -> OrderedDict[str, Any]:
    """The state of a model by canonical names, with the versions of its modules."""
    state = model.state_dict()
    names = canonical_names(model, list(state))
    if len(set(names.values())) < len(names):
        twice = next(name for name in names.values() if list(names.values()).count(name) > 1)
        raise CheckpointError(
            f"Two entries of the model's state are both called {twice} once wrappers, such as torch.compile, are taken off. Rename one of "
            "them."
        )
    renamed = OrderedDict((names[name], value) for name, value in state.items())
    if (versions := versions_in(state)) is not None:
        # A path with something below it is renamed as the path of a module, rather than as that of something in one.
        below = canonical_names(model, [f"{path}.x" if path else "x" for path in versions])
        set_versions(renamed, {below[f"{path}.x" if path else "x"][:-2]: entry for path, entry in versions.items()})
    return renamed


def schedulers_of(engine: MixedPrecision) -> list[Any]:
    """The schedulers that an engine moves."""
    given: Any = engine.scheduler
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise CheckpointError(
            "A ZeroRedundancyOptimizer cannot be saved: each rank has a part of its state, and does not say which. Use "
            "torch.distributed.fsdp.fully_shard(model), which spreads the state of any optimizer."
        )
    return optimizer.state_dict()


def _scheduler_state(scheduler: Any) -> Any:
    if not callable(getattr(scheduler, "state_dict", None)) or not callable(getattr(scheduler, "load_state_dict", None)):
        raise CheckpointError(
            f"The scheduler, a {type(scheduler).__name__}, has no state_dict() and load_state_dict(), so a resumed run would begin its "
            "schedule afresh. Give it both, or use one of torch.optim.lr_scheduler."
        )
    return scheduler.state_dict()


def _plain_progress(progress: StepProgress, model: nn.Module) -> dict[str, Any]:
    return {
        "micro_batches": progress.micro_batches,
        "loss": progress.loss,
        "gradients": _renamed(model, progress.gradients),
        "began": progress.began,
        "is_held": progress.is_held,
        "held_back": _renamed(model, progress.held_back),
        "buffers": _renamed(model, progress.buffers),
    }


def outside_parameters(engine: MixedPrecision) -> dict[str, Tensor]:
    """What the optimizers train beside the model, such as the weights of a loss, by its place in them."""
    own = {id(parameter) for parameter in engine.model.parameters()}
    return {name: parameter for name, parameter in trained_parameters(engine).items() if id(parameter) not in own}


def _renamed(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by canonical names, those that are spread over ranks as the part that lies on this one."""
    names = canonical_names(model, list(tensors))
    return {names[name]: local_tensor(tensor) for name, tensor in tensors.items()}
