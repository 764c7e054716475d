"""`Checkpointer`: checkpoints at regular steps, the newest few of them, and the newest valid one to go on from."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, final

from typing_extensions import Self

from halfstep.archive import checkpoint_name, checkpoints_in, clear_parts
from halfstep.archive.shelves import remove
from halfstep.checkpoint.contents import as_engines
from halfstep.checkpoint.loading import CheckpointInfo, load_into
from halfstep.checkpoint.ranks import on_all_ranks
from halfstep.checkpoint.saving import agreed, captured, check_step, common_ranks, path_of
from halfstep.checkpoint.writers import Writer
from halfstep.engine import MixedPrecision
from halfstep.errors import CheckpointError, ConfigurationError, DamagedCheckpointError, HalfstepWarning, InvalidTypeError

__all__ = ["Checkpointer"]

Extra = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


@final
class Checkpointer:
    """Saves a run at regular steps into a folder, keeps the newest few checkpoints, and has a run go on from the newest valid one.

        with halfstep.Checkpointer("runs/a", amp=amp, every=500) as checkpointer:
            info = checkpointer.resume()
            for step in range(info.step if info else 0, steps):
                amp.train_step(loss_fn, *batch(step))
                checkpointer.save_if_due(step + 1)

    Each checkpoint is what `save_checkpoint` writes. A process that is killed at any moment loses what came after the last one; one
    that was half written is never taken for whole. On several ranks, call each method on every rank.

    Args:
        folder: Where the checkpoints lie; it is made if it is not there.
        amp: The engine, or several by name.
        every: Steps from one checkpoint to the next, for `save_if_due`; `None` where only `save` is called.
        keep: How many checkpoints stay; older ones are removed once a newer one is on disk. `None` for all.
        background: Whether they are written while the run goes on. A step then waits for a copy in memory alone, which takes as much memory
            of the host as the checkpoint is large; what goes wrong is raised by the next call.

    Raises:
        CheckpointError: The folder cannot be made.
        InvalidTypeError: An argument is of the wrong type.
        ConfigurationError: An argument has a value that is not allowed.

    Example:
        >>> import torch
        >>> from tempfile import mkdtemp
        >>> model, folder = torch.nn.Linear(2, 1), mkdtemp()
        >>> amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
        >>> with Checkpointer(folder, amp=amp, every=10, keep=2) as checkpointer:
        ...     saved = [checkpointer.save_if_due(step) for step in range(1, 41)]
        >>> [path.name for path in checkpointer.checkpoints()], checkpointer.resume().step
        (['step-00000040.pt', 'step-00000030.pt'], 40)
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        amp: MixedPrecision | Mapping[str, MixedPrecision],
        every: int | None = None,
        keep: int | None = 3,
        background: bool = False,
    ) -> None:
        self.folder = path_of(folder, call="Checkpointer(folder, ...)").absolute()  # Wherever the script goes meanwhile.
        self._engines = as_engines(amp, call="Checkpointer(amp=...)")
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidTypeError(f"Checkpointer({name}=...) takes a whole number or None, not {value!r}.")
            if value is not None and value < 1:
                raise ConfigurationError(f"Checkpointer({name}={value}): it is 1 or more, or None.")
        if not isinstance(background, bool):
            raise InvalidTypeError(f"Checkpointer(background=...) takes True or False, not {background!r}.")
        self.every = every
        self.keep = keep
        self._ranks = common_ranks(self._engines)
        self._saving = threading.RLock()
        self._seen: int | None = None
        self._later_are_known = False
        self._damaged: set[Path] = set()
        self._writer = Writer(self._ranks, in_background=background)
        self._on_first(self._prepare)

    def _prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"Cannot make the folder {self.folder} for checkpoints: {error.strerror or error}.") from error
        clear_parts(self.folder)

    def _on_first(self, work: Callable[[], Any]) -> Any:
        """What a function returns on the first rank, told to all of them."""
        if self._ranks is None:
            return work()
        is_first = self._ranks.rank == 0
        failure = f"{self.folder} cannot be used for checkpoints"
        return on_all_ranks(lambda: work() if is_first else None, group=self._ranks.process_group, failure=failure)[0]

    def save_if_due(self, step: int, *, extra: Extra | None = None) -> Path | None:
        """Saves, if a multiple of `every` was reached, or passed, since the last call.

        Args:
            step: How many steps were taken, as you count them.
            extra: As in `save`.

        Returns:
            The path of the checkpoint; `None` where none was due.

        Raises:
            ConfigurationError: `every` was not given.
            CheckpointError: It could not be saved, or an earlier one could not be written in the background.
        """
        if self.every is None:
            raise ConfigurationError("save_if_due(step) needs Checkpointer(every=...), the steps from one checkpoint to the next.")
        now, before, self._seen = check_step(step), self._seen, check_step(step)
        # A loop may count in strides that pass over the multiples.
        is_due = now % self.every == 0 if before is None else now // self.every > before // self.every
        return self.save(now, extra=extra) if is_due and now else None

    def save(self, step: int, *, extra: Extra | None = None) -> Path:
        """Saves now.

        Args:
            step: How many steps were taken, as you count them; a checkpoint of the same step is replaced.
            extra: What else to keep, as in `save_checkpoint`, or a function that returns it.

        Returns:
            The path of the checkpoint. In the background it is not there yet.

        Raises:
            CheckpointError: It could not be saved, or an earlier one could not be written in the background.
            StepOrderError: An engine is at a point that cannot be gone on from.
        """
        number = agreed(lambda: check_step(step), ranks=self._ranks)
        path = self.folder / checkpoint_name(number, kind="file" if self._ranks is None else "folder")
        with self._saving:
            return self._save(path, number, extra=extra)

    def _save(self, path: Path, step: int, *, extra: Extra | None) -> Path:
        self._writer.wait()
        contents = captured(self._engines, step=step, extra=extra() if callable(extra) else extra, ranks=self._ranks, path=path)
        self._tell_of_later(step)
        self._writer.write(contents, path, afterwards=lambda: self._rotate(step))
        return path

    def _tell_of_later(self, step: int) -> None:
        """Says once that `resume` would not go on from what is saved now, but from what a run saved that was left."""
        if self._later_are_known:
            return
        self._later_are_known = True
        found: list[tuple[int, Path]] = self._on_first(lambda: checkpoints_in(self.folder))
        later = [number for number, path in found if number > step and path not in self._damaged]
        if later:
            warnings.warn(
                f"{self.folder} holds checkpoints of later steps, up to {later[0]}, than that of step {step}, which is saved now. resume() "
                "goes on from the highest step: remove those, or use another folder for a run that went back to an earlier one.",
                HalfstepWarning,
                stacklevel=4,
            )

    def _rotate(self, step: int) -> None:
        """Removes all but the newest. Those of later steps are none of this run: somebody went back to an earlier one."""
        if self.keep is None or (self._ranks is not None and self._ranks.rank != 0):
            return
        earlier = [path for number, path in checkpoints_in(self.folder) if number <= step]
        for path in earlier[self.keep :]:
            try:
                remove(path)
            except FileNotFoundError:  # Somebody else has removed it.
                continue
            except OSError as error:
                raise CheckpointError(f"That of step {step} is saved, but {path} cannot be removed: {error.strerror or error}.") from error

    def checkpoints(self) -> list[Path]:
        """The checkpoints in the folder, the newest first. Whether they are valid is found out when one is loaded."""
        self.wait()
        found: list[Path] = self._on_first(lambda: [path for _, path in checkpoints_in(self.folder)])
        return found

    def resume(self, *, strict: bool = True) -> CheckpointInfo | None:
        """Has the run go on from the newest valid checkpoint. Those that are damaged are said in a warning, and left where they are.

        Args:
            strict: As in `load_checkpoint`.

        Returns:
            What was loaded; `None` where there is no checkpoint yet, so that the run begins.

        Raises:
            DamagedCheckpointError: There are checkpoints, and none of them is valid.
            CheckpointError: The newest valid one does not fit this run.
            StepOrderError: An engine is in the middle of a step.
        """
        faults: list[str] = []
        for path in self.checkpoints():
            try:
                info = load_into(self._engines, path, strict=strict, stacklevel=3)
            except DamagedCheckpointError as error:
                faults.append(str(error))
                self._damaged.add(path)
                warnings.warn(f"{error} An earlier checkpoint is used, if there is a valid one.", HalfstepWarning, stacklevel=2)
            else:
                self._seen = info.step
                return info
        if faults:
            raise DamagedCheckpointError(
                f"None of the {len(faults)} checkpoints in {self.folder} is valid, so the run cannot go on; the newest: {faults[0]} To "
                "begin anew, use another folder."
            )
        return None

    def wait(self) -> None:
        """Waits until what is being written in the background is on disk.

        Raises:
            CheckpointError: It could not be written.
        """
        self._writer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Waits for what is being written."""
        try:
            self.wait()
        except CheckpointError as failed:
            if error is None:
                raise
            warnings.warn(f"The last checkpoint was not written: {failed}", HalfstepWarning, stacklevel=2)
