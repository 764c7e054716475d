"""What does a report on a long run cost? `halfstep report RUN --html FILE` on a run of a million steps, written by the journal itself.

    python benchmarks/run_report.py                  # 1,000,000 steps
    python benchmarks/run_report.py --steps 100000   # a few seconds
    python benchmarks/run_report.py --rules          # the steps judged anew, too

The run is made up: a loss that falls with noise, one step in which it spikes, 500 skipped steps or one in 2,000, a dynamic loss scale, ten
epochs, a learning rate with warm-up, and alerts. The report runs in a process of its own. Printed are its seconds, its peak memory and the
size of the page, and what a reader must still find in it: the spike, and every stretch in which a step was skipped.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.journal import RunWriter
from halfstep.records import Alert, RunRecord, Site, StepRecord

SPIKE = 987.25  # A loss like no other, so that the page can be searched for it.
CHUNK = 10_000


def run_record(event: Any, seconds: int) -> RunRecord:
    """The record of the start or the end of the run, so many seconds after noon."""
    clock = f"{12 + seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return RunRecord(
        event=event,
        time=f"2026-01-31T{clock}+00:00",
        command="train.py --epochs 10 --precision fp16",
        halfstep="0.1.0",
        torch="2.13.0",
        device="NVIDIA H200",
        rank=0,
        world_size=1,
        outcome="finished" if event == "ended" else "",
    )


def skipped_steps(steps: int) -> set[int]:
    """The first three steps, and then about one in 2,000, spread unevenly."""
    draw = np.random.default_rng(1)
    return {1, 2, 3, *draw.choice(np.arange(4, steps), size=max(1, min(500, steps // 2000) - 3), replace=False).tolist()}


def records(steps: int) -> Iterator[StepRecord]:
    """The steps of the run."""
    draw = np.random.default_rng(0)
    skipped, scale = skipped_steps(steps), 65536.0
    for first in range(1, steps + 1, CHUNK):
        count = min(CHUNK, steps + 1 - first)
        noise, slow = draw.normal(size=count), draw.exponential(size=count)
        for step, wobble, delay in zip(range(first, first + count), noise.tolist(), slow.tolist(), strict=True):
            is_skipped = step in skipped
            done = step / steps
            yield StepRecord(
                step=step,
                skipped=is_skipped,
                scale=scale,
                loss=SPIKE if step == steps // 3 + 1 else (0.2 + 2.1 * 0.002 ** min(1.0, done * 1.5)) * (1 + 0.12 * wobble),
                grad_norm=float("inf") if is_skipped else (0.4 + 3 * 0.01**done) * 2 ** (0.4 * wobble),
                lr=3e-4 * min(1.0, done * 50) * (1 - done),
                step_time_s=0.041 * (1 + 0.02 * delay) + (0.5 if step % 5000 == 0 else 0.0),
                memory_bytes=int((11.8 + 0.9 * min(1.0, done * 40)) * 2**30),
                precision="fp16",
                epoch=1 + (step - 1) * 10 // steps,
                scaler="used",
            )
            scale = scale / 2 if is_skipped else scale * 2 if step % 1000 == 0 and scale < 65536 else scale


def alerts(steps: int) -> list[Alert]:
    """Several alerts, of different severity."""
    spike = steps // 3 + 1
    site = Site(module="", file="train.py", line=57)
    return [
        Alert(
            rule="loss_spike",
            step=spike,
            message=f"The loss rose from 0.31 to {SPIKE} in one step. What was learned may be lost.",
            advice="Look at the batch of this step. Clip gradients, or lower the learning rate.",
            site=None,
            severity="warning",
        ),
        *(
            Alert(
                rule="step_time_regression",
                step=at,
                message=f"Steps take {factor} times as long as before.",
                advice="Look for what else uses the machine.",
                site=None,
                severity="info",
            )
            for at, factor in ((steps // 2, 1.6), (steps // 2 + steps // 10, 1.7), (steps // 2 + steps // 5, 1.6))
        ),
        Alert(
            rule="clip_before_unscale",
            step=1,
            message="Gradients are clipped while they are still scaled, so that the limit means something else in each step.",
            advice="Call scaler.unscale_(optimizer) before clip_grad_norm_.",
            site=site,
            severity="error",
        ),
    ]


def write_run(folder: Path, *, steps: int) -> None:
    """Writes the run through the journal, alerts first and last."""
    writer = RunWriter(folder)
    writer.write([run_record("started", 0)])
    waiting: list[Any] = []
    for record in records(steps):
        waiting.append(record)
        if len(waiting) >= CHUNK:
            writer.write(waiting)
            waiting.clear()
    writer.write([*waiting, *sorted(alerts(steps), key=lambda alert: alert.step), run_record("ended", 40_000)])
    writer.close()


def traces(page: str) -> list[dict[str, Any]]:
    """All traces of all figures of a page."""
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', page, re.DOTALL)
    assert found is not None, "the page has no figures"
    return [trace for plot in json.loads(found.group(1)) for trace in plot["data"]]


def is_complete(page: str, *, steps: int) -> tuple[bool, bool]:
    """Whether the page shows the spike, and whether each skipped step is among those of a mark."""
    shown = traces(page)
    has_spike = any(SPIKE in trace["y"] for trace in shown)
    texts = [text for trace in shown for text in trace.get("text", []) if text.endswith(" skipped")]
    told = sum(int(text.split()[0].replace(",", "")) if " of the steps " in text else 1 for text in texts)
    return has_spike, told == len(skipped_steps(steps))


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the run")
    parser.add_argument("--rules", action="store_true", help="judge the steps anew")
    parser.add_argument("--keep", metavar="FILE", help="keep the page")
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder, "run"), Path(arguments.keep or f"{folder}/report.html")
        start = time.perf_counter()
        write_run(run, steps=arguments.steps)
        written = time.perf_counter() - start
        size = (run / "run.jsonl").stat().st_size
        print(f"{arguments.steps:,} steps: {size / 1e6:,.0f} MB of run.jsonl, made and written in {written:.1f} s", flush=True)
        words = [sys.executable, "-m", "halfstep", "report", str(run), "--html", str(page), *(["--rules"] if arguments.rules else [])]
        start = time.perf_counter()
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        if done.returncode not in {0, 1}:
            sys.exit(done.stderr)
        # Of the largest child, in KiB on Linux and in bytes on macOS.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        has_spike, has_skips = is_complete(page.read_text(encoding="utf-8"), steps=arguments.steps)
        print(f"  {'seconds':>10}{'peak MiB':>10}{'page MB':>10}   of the page without plotly.js")
        without = page.stat().st_size - max(map(len, page.read_text(encoding="utf-8").split("<script>")))
        print(f"  {seconds:>10.1f}{peak / 2**20:>10,.0f}{page.stat().st_size / 1e6:>10.2f}{without / 1e6:>10.2f}")
        print(f"  the spike is drawn: {'yes' if has_spike else 'NO'}; each skipped step is marked: {'yes' if has_skips else 'NO'}")


if __name__ == "__main__":
    main()
