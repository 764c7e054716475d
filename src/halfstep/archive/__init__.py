"""Checkpoints as files and folders: sealed, verified, published and listed. Nothing here loads torch, or executes what a file holds."""

from halfstep.archive.checksums import checksum
from halfstep.archive.folders import read_folder, verify_stretches, write_folder_record
from halfstep.archive.inspection import inspect_path, places_of
from halfstep.archive.sealing import seal
from halfstep.archive.shelves import checkpoint_name, checkpoints_in, clear_parts, part_of, publish, remove, step_of
from halfstep.archive.verification import read_record, verify
from halfstep.archive.wording import bytes_text, unwritable

__all__ = [
    "bytes_text",
    "checkpoint_name",
    "checkpoints_in",
    "checksum",
    "clear_parts",
    "inspect_path",
    "part_of",
    "places_of",
    "publish",
    "read_folder",
    "read_record",
    "remove",
    "seal",
    "step_of",
    "unwritable",
    "verify",
    "verify_stretches",
    "write_folder_record",
]
