"""`amp.initialize`: models and optimizers at one of Apex's levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.amp.functions import install_registered
from halfstep.amp.levels import Properties
from halfstep.amp.models import check_model, prepare_models
from halfstep.amp.session import Session, begin, guards, logger
from halfstep.amp.skipping import StepGuard
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.precision import DTYPES

__all__ = ["initialize"]


def initialize(  # noqa: PLR0913, PLR0917 - the arguments are Apex's
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    enabled: bool = True,  # noqa: FBT001, FBT002 - as in Apex
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,  # noqa: FBT001 - as in Apex
    keep_batchnorm_fp32: bool | str | None = None,  # noqa: FBT001 - as in Apex
    master_weights: bool | None = None,  # noqa: FBT001 - as in Apex
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Has models and optimizers train in mixed precision, at one of Apex's levels. Call it once, before a model is wrapped.

    Models and optimizers are changed in place. Whatever is `None` is as the level has it.

    Args:
        models: A model in fp32, or a list of models.
        optimizers: An optimizer, a list of optimizers, or `None` for inference.
        enabled: With `False` nothing is changed, and all other calls of `amp` do nothing.
        opt_level: `O0`, fp32; `O1`, autocast; `O2`, a half model with fp32 norms and fp32 parameters; `O3`, a half model.
        cast_model_type: What the model computes in at O2 and O3, `torch.float16` or `torch.bfloat16`; at O1 `torch.bfloat16` has autocast
            lower to it.
        patch_torch_functions: With `False`, O1 only scales losses.
        keep_batchnorm_fp32: Whether norms stay fp32 at O2 and O3; also as text.
        master_weights: Whether parameters are kept in fp32 at O2 and O3.
        loss_scale: A number, also as text, or `dynamic`.
        cast_model_outputs: What tensors that a model returns are cast to; `None` for fp32.
        num_losses: How many losses have a scale of their own.
        verbosity: With 0, skipped steps and the level are not logged. The logger is `halfstep.amp`, the level of messages `INFO`.
        min_loss_scale: The floor of a dynamic scale; `None` for 1.
        max_loss_scale: Its ceiling.

    Returns:
        The models and the optimizers, each as a list where a list was passed; without optimizers the models alone.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        ConfigurationError: An argument has a value that is not allowed, or does not go with the level; a model is wrapped, in half, or was
            passed before. Nothing was changed.

    Example:
        >>> import torch
        >>> from halfstep import amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", cast_model_outputs=torch.float16)
        >>> model(torch.ones(1, 4)).dtype, model.weight.dtype
        (torch.float16, torch.float32)
    """
    if not enabled:
        begin(Session(properties=None))
        return models if optimizers is None else (models, optimizers)
    changes = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    properties = Properties.of(opt_level, changes)
    _check_counts(num_losses, cast_model_outputs)
    scalers = tuple(properties.scaler(min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale) for _ in range(num_losses))
    all_models, all_optimizers = _models(models), _optimizers(optimizers)
    prepare_models(all_models, properties, cast_model_outputs=cast_model_outputs)
    for optimizer in all_optimizers:
        _guard(optimizer)
        if properties.stores_half and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # It casts the state to the type of the parameters.
    begin(Session(properties=properties, scalers=scalers, verbose=verbosity > 0))
    if properties.patch_torch_functions:
        install_registered()
    if verbosity > 0:
        logger.info("amp.initialize: %s", properties)
    return models if optimizers is None else (models, optimizers)


def _check_counts(num_losses: Any, cast_model_outputs: Any) -> None:
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ConfigurationError(f"amp.initialize(num_losses={num_losses!r}): allowed is a whole number from 1.")
    if cast_model_outputs is not None and cast_model_outputs not in DTYPES.values():
        raise ConfigurationError(
            f"amp.initialize(cast_model_outputs={cast_model_outputs!r}): allowed are torch.float16, torch.bfloat16, torch.float32 and None."
        )


def _models(models: Any) -> list[nn.Module]:
    listed = [models] if isinstance(models, nn.Module) else models
    if not isinstance(listed, list) or not all(isinstance(each, nn.Module) for each in listed):
        raise InvalidTypeError(f"amp.initialize(models, ...) takes a model or a list of models, not {models!r:.80}.")
    _check_different(listed, what="model")
    for model in listed:
        check_model(model)
    return listed


def _optimizers(optimizers: Any) -> list[Optimizer]:
    listed = [optimizers] if isinstance(optimizers, Optimizer) else [] if optimizers is None else optimizers
    if not isinstance(listed, list) or not all(isinstance(each, Optimizer) for each in listed):
        raise InvalidTypeError(f"amp.initialize(..., optimizers) takes an optimizer or a list of optimizers, not {optimizers!r:.80}.")
    _check_different(listed, what="optimizer")
    for optimizer in listed:
        if optimizer in guards:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} was passed to amp.initialize before. Call it once, with all models and optimizers."
            )
    return listed


def _check_different(listed: list[Any], *, what: str) -> None:
    if len({id(each) for each in listed}) != len(listed):
        raise ConfigurationError(f"amp.initialize was given the same {what} twice. List each {what} once.")


def _guard(optimizer: Optimizer) -> None:
    guards[optimizer] = StepGuard()
    optimizer.register_step_pre_hook(guards[optimizer])
