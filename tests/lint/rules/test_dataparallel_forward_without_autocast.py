"""What runs in other threads while autocast is on."""

from __future__ import annotations

import inspect
import re
import threading

import pytest
import torch
from torch.nn.parallel import parallel_apply

from halfstep.lint.rules.dataparallel_forward_without_autocast import DataparallelForwardWithoutAutocast
from tests.lint.judging import findings, fixed

RULES = [DataparallelForwardWithoutAutocast()]
NETWORK = """import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import torch
from torch import nn

net = nn.Linear(2, 2)
pool = ThreadPoolExecutor(2)

class Net(nn.Module):
    def forward(self, x):
        return net(x)

class Casting(nn.Module):
    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(self, x):
        return net(x)

own, casting = Net(), Casting()

def work(x):
    return net(x)

def work_in_half(x):
    with torch.autocast("cuda"):
        return net(x)

def load(path):
    return torch.load(path)

"""


def test_the_installed_torch_hands_on_the_switch_but_not_the_dtype() -> None:
    # One entry of autocast, and no dtype in it.
    assert re.findall(r"autocast\(([^()]*)\),?\n", inspect.getsource(parallel_apply)) == ["device_type, enabled=autocast_enabled"]
    seen: list[torch.dtype] = []
    with torch.autocast("cpu", dtype=torch.float16):
        thread = threading.Thread(target=lambda: seen.append(torch.get_autocast_dtype("cpu")))
        thread.start()
        thread.join()
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(
    "code",
    [
        "pool.submit(work, x)",
        "pool.submit(net, x)",
        "pool.submit(own, x)",
        "pool.submit(lambda: net(x))",
        "list(pool.map(work, xs))",
        "ThreadPoolExecutor(2).submit(work, x)",
        "ThreadPool(2).map(work, xs)",
        "threading.Thread(target=work, args=(x,)).start()",
        "threading.Thread(None, net).start()",
        "asyncio.to_thread(net, x)",
        "loop.run_in_executor(None, work, x)",
        "loop.run_in_executor(pool, net, x)",
    ],
)
def test_threads_that_run_a_model(code: str) -> None:
    code = f"{NETWORK}with torch.autocast('cuda', dtype=torch.bfloat16):\n    y = {code}\n"
    assert [line for line, _ in findings(code, RULES)] == [code.count("\n")]


@pytest.mark.parametrize(
    "code",
    [
        "pool.submit(load, path)",
        "pool.submit(work_in_half, x)",
        "pool.submit(casting, x)",
        "pool.submit(lambda: work_in_half(x))",
        "pool.submit(unknown, x)",
        "other.submit(work, x)",
        "threading.Thread(target=load, args=(path,)).start()",
        "threading.Thread().start()",
        "work(x)",
        "own(x)",
    ],
)
def test_threads_that_run_none_or_enter_autocast_themselves(code: str) -> None:
    assert findings(f"{NETWORK}with torch.autocast('cuda', dtype=torch.bfloat16):\n    y = {code}\n", RULES) == []


def test_threads_outside_of_autocast_are_left_alone() -> None:
    assert findings(f"{NETWORK}pool.submit(work, x)\nwith torch.autocast('cuda', enabled=False):\n    pool.submit(net, x)\n", RULES) == []


@pytest.mark.parametrize(
    ("model", "region", "count"),
    [
        ("nn.DataParallel(own)", "'cuda', dtype=torch.bfloat16", 1),
        ("nn.DataParallel(own).cuda()", "'cuda', torch.bfloat16", 1),
        ("nn.parallel.DataParallel(own, device_ids=[0, 1])", "'cuda', dtype=torch.bfloat16", 1),
        ("nn.DataParallel(casting)", "'cuda', dtype=torch.bfloat16", 0),
        ("nn.DataParallel(unknown())", "'cuda', dtype=torch.bfloat16", 0),
        ("nn.DataParallel(own)", "'cuda'", 0),
        ("nn.DataParallel(own)", "'cuda', dtype=dtype", 0),
        ("nn.DataParallel(own)", "'cuda', dtype=torch.bfloat16, enabled=False", 0),
        ("nn.parallel.DistributedDataParallel(own)", "'cuda', dtype=torch.bfloat16", 0),
    ],
)
def test_replicas_get_the_switch_but_not_the_dtype(model: str, region: str, count: int) -> None:
    code = f"{NETWORK}model = {model}\nwith torch.autocast({region}):\n    y = model(x)\n"
    assert len(findings(code, RULES)) == count


def test_a_model_is_followed_into_a_function() -> None:
    code = f"{NETWORK}def run(model, x):\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n        return model(x)\n\n"
    code += "if torch.cuda.device_count() > 1:\n    own = nn.DataParallel(own)\nrun(own, x)\n"
    assert len(findings(code, RULES)) == 1


def test_the_caller_s_region_goes_behind_the_docstring() -> None:
    code = 'import asyncio, torch\n\nnet = torch.nn.ReLU()\n\ndef f(x):\n    """Doc."""\n    y = net(x)\n    return y\n\n'
    code += "async def g(x):\n    with torch.autocast('cpu'):\n        return await asyncio.to_thread(f, x)\n"
    body = "    with torch.autocast('cpu'):\n        y = net(x)\n        return y\n"
    assert fixed(code, RULES) == code.replace("    y = net(x)\n    return y\n", body)
