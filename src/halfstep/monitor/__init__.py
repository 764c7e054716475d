"""Records of steps to sinks and rules. Nothing here loads torch.

Example:
    >>> from tempfile import mkdtemp
    >>> from halfstep.journal import read_run
    >>> with Monitor(mkdtemp(), command="train.py") as monitor:
    ...     pass
    >>> judge_run(read_run(monitor.log_dir))
    ()
"""

from halfstep.monitor.judging import Judging, judge_run
from halfstep.monitor.monitor import Monitor
from halfstep.monitor.process import process_rank
from halfstep.monitor.rules import DEFAULT_RULES, AbstractRule, PersistentSkips
from halfstep.monitor.sinks import SINKS, AbstractSink, ConsoleSink, CsvSink, JsonlSink, TensorBoardSink

__all__ = [
    "DEFAULT_RULES",
    "SINKS",
    "AbstractRule",
    "AbstractSink",
    "ConsoleSink",
    "CsvSink",
    "JsonlSink",
    "Judging",
    "Monitor",
    "PersistentSkips",
    "TensorBoardSink",
    "judge_run",
    "process_rank",
]
