"""The run folder: what a run writes while it trains, and how it is read back. Nothing here loads torch.

Example:
    >>> from tempfile import mkdtemp
    >>> from halfstep.records import StepRecord
    >>> record = StepRecord(step=1, skipped=False, scale=1.0, loss=0.25, grad_norm=None, lr=0.1, step_time_s=0.01, memory_bytes=None,
    ...     precision="bf16")
    >>> writer = RunWriter(mkdtemp())
    >>> writer.write([record])
    >>> writer.close()
    >>> list(read_run(writer.path).records()) == [record]
    True
"""

from halfstep.journal.columns import StepColumns
from halfstep.journal.folders import RUNS, default_folder
from halfstep.journal.lines import Entry, encode_line
from halfstep.journal.reading import read_run
from halfstep.journal.saved import SavedRun
from halfstep.journal.writing import RUN_FILE, AppendedFile, RunWriter

__all__ = ["RUNS", "RUN_FILE", "AppendedFile", "Entry", "RunWriter", "SavedRun", "StepColumns", "default_folder", "encode_line", "read_run"]
