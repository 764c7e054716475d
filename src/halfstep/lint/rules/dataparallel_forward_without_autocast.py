"""Models that run in threads which autocast, or its dtype, does not reach."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import final

from halfstep.lint.calls import passed
from halfstep.lint.edits import WrapStatements
from halfstep.lint.module import Module
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix
from halfstep.lint.syntax import Function
from halfstep.lint.values import Autocast, Network, Routine

__all__ = ["DataparallelForwardWithoutAutocast"]


_PARALLEL = frozenset(("torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.data_parallel.DataParallel"))
_POOLS = frozenset(
    (
        "concurrent.futures.ThreadPoolExecutor",
        "concurrent.futures.thread.ThreadPoolExecutor",
        "multiprocessing.pool.ThreadPool",
        "multiprocessing.dummy.Pool",
    )
)
_SUBMITTING = frozenset(("submit", "map", "apply", "apply_async", "map_async", "imap", "imap_unordered", "starmap", "starmap_async"))
_MOVES = frozenset(("to", "cuda", "train", "eval"))
_CALLED_MODEL = re.compile(r"(^|[._])(model|net|network|encoder|decoder|backbone)$")


@final
class DataparallelForwardWithoutAutocast(AbstractRule):
    """A model run by `nn.DataParallel` or in a thread of one's own, from inside an autocast block."""

    code = "HS031"
    name = "dataparallel_forward_without_autocast"
    severity = "warning"
    summary = "Autocast holds for one thread: a model that runs in another does not get it, or gets another dtype."
    explanation = """
Autocast's state belongs to a thread. What a `with torch.autocast(...)` block hands to another thread starts there with autocast off:

- In a thread of one's own (`threading.Thread`, `ThreadPoolExecutor.submit` and `map`, `asyncio.to_thread`), the model computes in fp32.
  It needs twice the memory and is slower, and nothing is raised.
- `nn.DataParallel` runs its replicas in threads. In torch 2.13, `parallel_apply` hands on *whether* autocast is on, but not its dtype: each
  replica gets the default of the device, fp16. A block with `dtype=torch.bfloat16` trains its replicas in fp16 on two or more GPUs,
  without a `GradScaler`, so that small gradients become zero. On one GPU it runs in bf16, and so nobody sees it. A block in fp16 works.

Enter autocast inside of what runs in the thread: a `with` in the model's `forward`, or `@torch.autocast(...)` on it. Better than
`DataParallel` is `DistributedDataParallel`, with a process for each GPU.

The fix puts the `with` of the caller around the body of `forward`, or of the function that the thread runs. It is unsafe: others that call
the function get it too.
"""
    bad = (
        Bad(
            code="""from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

model = nn.Linear(128, 10).cuda()


def classify(images):
    return model(images)


def evaluate(batches):
    with ThreadPoolExecutor() as pool, torch.autocast("cuda", dtype=torch.bfloat16):
        futures = [pool.submit(classify, images) for images in batches]
    return [future.result() for future in futures]
""",
            line=15,
            fixed="""from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

model = nn.Linear(128, 10).cuda()


def classify(images):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(images)


def evaluate(batches):
    with ThreadPoolExecutor() as pool, torch.autocast("cuda", dtype=torch.bfloat16):
        futures = [pool.submit(classify, images) for images in batches]
    return [future.result() for future in futures]
""",
        ),
        Bad(
            code="""import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 10)

    def forward(self, x):
        return self.layer(x)


model = nn.DataParallel(Net()).cuda()


def step(optimizer, images, labels, criterion):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
""",
            line=20,
            fixed="""import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 10)

    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.layer(x)


model = nn.DataParallel(Net()).cuda()


def step(optimizer, images, labels, criterion):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
""",
        ),
        Bad(
            code="""import threading

import torch
from torch import nn

net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def run(batch, results):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        thread = threading.Thread(target=lambda: results.append(net(batch)))
        thread.start()
        thread.join()
""",
            line=11,
        ),
    )
    good = (
        """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 10)

    def forward(self, x):
        return self.layer(x)


model = nn.DataParallel(Net()).cuda()


def evaluate(images):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(images)
""",
        """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 10)

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(self, x):
        return self.layer(x)


model = nn.DataParallel(Net()).cuda()


def evaluate(images):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(images)
""",
        """from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

model = nn.Linear(128, 10).cuda()


def classify(images):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(images)


def evaluate(batches):
    with ThreadPoolExecutor() as pool, torch.autocast("cuda", dtype=torch.bfloat16):
        return list(pool.map(classify, batches))
""",
        """from concurrent.futures import ThreadPoolExecutor

import torch


def load(path):
    return torch.load(path)


def evaluate(model, paths):
    with ThreadPoolExecutor() as pool, torch.autocast("cuda", dtype=torch.bfloat16):
        return [model(images) for images in pool.map(load, paths)]
""",
    )

    def check(self, module: Module) -> Iterator[Finding]:
        """Yields the calls inside of autocast blocks that run a model in other threads."""
        if "autocast" not in module.text:
            return
        parallel = "DataParallel" in module.text
        threads = any(word in module.text for word in ("Thread", "to_thread", "run_in_executor", "multiprocessing.dummy"))
        if not parallel and not threads:
            return
        for call in module.nodes(ast.Call):
            target = _thread_target(call, module) if threads else None
            if target is not None and (region := module.in_autocast(call)) is not None:
                yield from _check_thread(call, target, region, module)
            elif parallel and isinstance(call.func, ast.Name | ast.Attribute) and _is_parallel(call.func, module, 4):
                yield from _check_replicas(call, module)


def _thread_target(call: ast.Call, module: Module) -> ast.expr | None:
    """What a call has another thread run."""
    name = module.name(call.func)
    if name in {"threading.Thread", "threading.Timer"}:
        given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg in {"target", "function"})]
        return given[0] if given else None
    if name == "asyncio.to_thread":
        return call.args[0] if call.args else None
    if not isinstance(call.func, ast.Attribute) or not call.args:
        return None
    if call.func.attr in _SUBMITTING and _is_pool(call.func.value, module):
        return call.args[0]
    if call.func.attr == "run_in_executor" and len(call.args) > 1:
        pool = call.args[0]
        return call.args[1] if (isinstance(pool, ast.Constant) and pool.value is None) or _is_pool(pool, module) else None
    return None


def _is_pool(node: ast.expr, module: Module) -> bool:
    if isinstance(node, ast.Call):
        return module.name(node.func) in _POOLS
    bindings = module.bindings(node)
    return bool(bindings) and all(
        binding.kind in {"value", "entered"} and isinstance(binding.value, ast.Call) and module.name(binding.value.func) in _POOLS
        for binding in bindings
    )


def _check_thread(call: ast.Call, target: ast.expr, region: Autocast, module: Module) -> Iterator[Finding]:
    networks = [value for value in module.values(target) if isinstance(value, Network)]
    routines = [value.node for value in module.values(target) if isinstance(value, Routine) and not isinstance(value.node, ast.ClassDef)]
    if networks:
        if any(_has_autocast(network, module) for network in networks):
            return
        function: Function | None = _forward(networks[0])
    elif len(routines) == 1 and _runs_model(routines[0], module):
        function = routines[0]
    else:
        return
    message = (
        f"`{_short(target, module)}` runs in another thread, where the autocast of line {region.node.lineno} is off: the model computes "
        f"in fp32 there. Enter autocast inside of it."
    )
    yield Finding(node=call, message=message, fix=_fix(function, region, module))


def _short(node: ast.expr, module: Module) -> str:
    text = " ".join(module.source(node).split())
    return text if len(text) <= 50 else f"{text[:47]}..."


def _forward(network: Network) -> ast.FunctionDef | None:
    if network.definition is None:
        return None
    methods = [node for node in network.definition.body if isinstance(node, ast.FunctionDef)]
    return next((method for method in methods if method.name == "forward"), None)


def _has_autocast(network: Network, module: Module) -> bool:
    """Whether a model enters autocast by itself, or cannot be looked into."""
    if network.definition is None:
        return False
    forward = _forward(network)
    return forward is None or _enters_autocast(forward, module)


def _enters_autocast(function: Function, module: Module) -> bool:
    """Whether a function holds anything about autocast: a block, a decorator, a call of `set_autocast_enabled`."""
    if "autocast" in module.source(function):
        return True
    entered = [node.context_expr for node in ast.walk(function) if isinstance(node, ast.withitem)]
    marks = [] if isinstance(function, ast.Lambda) else function.decorator_list
    return any(isinstance(value, Autocast) for node in (*entered, *marks) for value in module.values(node))


def _runs_model(function: Function, module: Module) -> bool:
    """Whether a function calls a model, and neither it nor the model enters autocast."""
    if _enters_autocast(function, module):
        return False
    found = False
    for call in ast.walk(function):
        if not isinstance(call, ast.Call):
            continue
        networks = [value for value in module.values(call.func) if isinstance(value, Network)]
        if any(_has_autocast(network, module) for network in networks):
            return False
        found = found or bool(networks) or (_CALLED_MODEL.search(module.key(call.func)) is not None and not module.routines(call))
    return found


def _fix(function: Function | None, region: Autocast, module: Module) -> Fix | None:
    """The caller's block around the whole of a function, behind its docstring."""
    if not isinstance(function, ast.FunctionDef):
        return None
    code = module.source(region.node)
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    if not code or not body or not all(module.name(part) for part in ast.walk(region.node) if isinstance(part, ast.Name)):
        return None
    return Fix(edits=(WrapStatements(first=body[0], last=body[-1], header=f"with {code}:"),), safety="unsafe")


def _check_replicas(call: ast.Call, module: Module) -> Iterator[Finding]:
    region = module.in_autocast(call)
    if region is None or region.dtypes != {"bf16"} or region.device == "cpu":
        return
    networks = [value for value in module.values(call.func) if isinstance(value, Network)]
    if len(networks) != 1 or (forward := _forward(networks[0])) is None or _enters_autocast(forward, module):
        return
    name = module.source(call.func)
    message = (
        f"`{name}` is a DataParallel: its replicas run in threads that get autocast, but not the bf16 of line {region.node.lineno}. On two "
        f"or more GPUs they compute in fp16, without a scaler. Enter autocast in `{networks[0].name}.forward`."
    )
    yield Finding(node=call, message=message, fix=_fix(forward, region, module))


def _is_parallel(node: ast.expr, module: Module, depth: int) -> bool:
    """Whether an expression is, at least at times, an `nn.DataParallel`."""
    if not depth:
        return False
    if isinstance(node, ast.Call):
        if module.name(node.func) in _PARALLEL:
            return True
        return isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES and _is_parallel(node.func.value, module, depth - 1)
    for binding in module.bindings(node):
        given: list[ast.expr] = []
        if binding.kind == "value" and binding.value is not None and not binding.path:
            given = [binding.value]
        elif binding.kind == "parameter" and isinstance(binding.node, ast.arg):
            given = list(_passed(binding.node, module))
        if any(_is_parallel(value, module, depth - 1) for value in given):
            return True
    return False


def _passed(parameter: ast.arg, module: Module) -> Iterator[ast.expr]:
    """What the calls in the file pass for a parameter."""
    arguments = module.parent(parameter)
    function = module.parent(arguments) if arguments is not None else None
    if not isinstance(function, ast.FunctionDef):
        return
    for call in module.nodes(ast.Call):
        if isinstance(call.func, ast.Name | ast.Attribute) and module.key(call.func).rpartition(".")[2] == function.name:
            for routine in module.routines(call):
                value = passed(call, function, parameter.arg, bound=routine.bound) if routine.node is function else None
                if value is not None:
                    yield value
