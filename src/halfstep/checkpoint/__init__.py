"""Checkpoints: all that a run needs to go on, bit for bit, as if it had never stopped."""

from halfstep.checkpoint.checkpointer import Checkpointer
from halfstep.checkpoint.foreign import ImportedScaler, import_scaler_state
from halfstep.checkpoint.loading import CheckpointInfo, load_checkpoint
from halfstep.checkpoint.saving import save_checkpoint

__all__ = ["CheckpointInfo", "Checkpointer", "ImportedScaler", "import_scaler_state", "load_checkpoint", "save_checkpoint"]
