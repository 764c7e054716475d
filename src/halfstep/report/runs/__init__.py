"""Saved runs as documents. NumPy is loaded here, and no torch.

Example:
    >>> from tempfile import mkdtemp
    >>> from halfstep.journal import RunWriter, read_run
    >>> from halfstep.records import StepRecord
    >>> writer = RunWriter(mkdtemp())
    >>> writer.write([StepRecord(step=1, skipped=True, scale=65536.0, loss=0.25, grad_norm=None, lr=0.1, step_time_s=0.01,
    ...     memory_bytes=None, precision="fp16")])
    >>> runs = reported_runs([read_run(writer.path)])
    >>> reported_record(runs).skips
    1
    >>> runs_document(runs).conclusion
    '1 step in fp16, 1 skipped (100 %, which calibration explains); no alerts.'
"""

from halfstep.report.runs.documents import runs_document
from halfstep.report.runs.reported import ReportedRun, reported_record, reported_runs

__all__ = ["ReportedRun", "reported_record", "reported_runs", "runs_document"]
