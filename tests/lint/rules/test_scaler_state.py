"""What checkpoints hold and what a resume loads."""

from __future__ import annotations

import pytest

from halfstep.lint.rules.scaler_not_restored import ScalerNotRestored
from halfstep.lint.rules.scaler_not_saved import ScalerNotSaved
from tests.lint.marking import check_marked, fix_all

SAVED = ScalerNotSaved()
RESTORED = ScalerNotRestored()

TRAINER = """
import torch
from torch.cuda.amp import GradScaler, autocast

def save_on_master(*args): ...

def main(args, model, loader, ema):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler({arguments})
    for x in loader:
        with autocast({region}):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    {save}
"""


def program(save: str, arguments: str = "", region: str = "") -> str:
    """A script that ends with a save."""
    return TRAINER.format(save=save.replace("\n", "\n    "), arguments=arguments, region=region)


@pytest.mark.parametrize(
    "save",
    [
        "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, args.path)  # <-",
        "torch.save(dict(model=model, optim=optimizer.state_dict()), args.path)  # <-",
        "torch.save(obj={'optimizer': 0}, f=args.path)\nstate = {'o': optimizer.state_dict()}  # <-\ntorch.save(state, args.path)",
        "state = dict(optimizer=optimizer.state_dict())  # <-\nstate['epoch'] = 3\ntorch.save(state, args.path)",
        "save_on_master({'optimizer': optimizer.state_dict()}, args.path)  # <-",
        "torch.save({'optimizers': [optimizer.state_dict()]}, args.path)  # <-",
        "state = {  # <-\n    'net': model.state_dict(),\n    'opt': optimizer.state_dict(),\n}\nif args.rank:\n    torch.save(state, 'x')",
    ],
)
def test_checkpoints_without_the_scaler(save: str) -> None:
    check_marked(program(save), SAVED)


@pytest.mark.parametrize("name", ["opt", "optG", "opt_d", "g_optim", "optimizerD", "OptimizerG", "d_opt", "opt2"])
def test_what_people_call_an_optimizer(name: str) -> None:
    check_marked(program(f"torch.save({{'x': args.model.state_dict(), 'y': args.{name}.state_dict()}}, args.path)  # <-"), SAVED)


@pytest.mark.parametrize("name", ["options", "adopt", "model", "opts"])
def test_what_is_no_optimizer(name: str) -> None:
    check_marked(program(f"torch.save({{'x': args.model.state_dict(), 'y': args.{name}.state_dict()}}, args.path)"), SAVED)


@pytest.mark.parametrize(
    "code",
    [
        program("torch.save(model.state_dict(), args.path)"),
        program("torch.save({'model': model.state_dict(), 'ema': ema.state_dict()}, args.path)"),
        program("torch.save({'optimizer': optimizer.state_dict(), 'scaler': scaler.state_dict()}, args.path)"),
        program("torch.save({'optimizer': optimizer.state_dict(), 'amp': scaler.state_dict()}, args.path)"),
        program("torch.save({'optimizer': optimizer.state_dict(), 'scaler': scaler}, args.path)"),
        program("torch.save({'optimizer': optimizer.state_dict(), **args.more}, args.path)"),
        program("state = {'optimizer': optimizer.state_dict()}\nstate.update(args.more)\ntorch.save(state, args.path)"),
        program("state = {'optimizer': optimizer.state_dict()}\nargs.extend(state)\ntorch.save(state, args.path)"),
        program(
            "state = {'optimizer': optimizer.state_dict()}\nif args.amp:\n    state['scaler'] = scaler.state_dict()\ntorch.save(state, 'x')"
        ),
        program("torch.save({'optimizer': optimizer.state_dict()}, args.path)", arguments="enabled=False"),
        program("torch.save({'optimizer': optimizer.state_dict()}, args.path)", region="dtype=torch.bfloat16"),
        program("torch.save({'lr': optimizer.param_groups[0]['lr']}, args.path)"),
        program("args.state = {'optimizer': optimizer.state_dict()}"),
    ],
)
def test_checkpoints_that_are_whole_or_not_meant_to_be(code: str) -> None:
    check_marked(code, SAVED)


def test_a_save_function_of_a_class_and_one_that_is_called() -> None:
    check_marked(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.optim = torch.optim.SGD(model.parameters(), lr=0.1)
                self.grad = torch.amp.GradScaler("cuda")

            def save(self, path):
                torch.save({"optim": self.optim.state_dict()}, path)  # <-

        class Other:
            def save(self, path):
                torch.save({"optim": self.optim.state_dict()}, path)
        """,
        SAVED,
    )


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        (
            "torch.save({'optimizer_state': optimizer.state_dict()}, 'x')",
            "optimizer.state_dict(), \"scaler_state\": scaler.state_dict()}, 'x')",
        ),
        (
            "torch.save(dict(optim=optimizer.state_dict()), 'x')",
            "torch.save(dict(optim=optimizer.state_dict(), scaler=scaler.state_dict()), 'x')",
        ),
        (
            "state = {\n    'optimizer': optimizer.state_dict(),  # momentum\n}\ntorch.save(state, 'x')",
            "    state = {\n        'optimizer': optimizer.state_dict(),  # momentum\n        \"scaler\": scaler.state_dict(),\n    }\n",
        ),
        (
            "state = {\n    'optimizer': optimizer.state_dict()\n}\ntorch.save(state, 'x')",
            "    state = {\n        'optimizer': optimizer.state_dict(),\n        \"scaler\": scaler.state_dict()\n    }\n",
        ),
        (
            "state = {'epoch': 3,\n         'optimizer': optimizer.state_dict()}\ntorch.save(state, 'x')",
            "         'optimizer': optimizer.state_dict()}\n    state[\"scaler\"] = scaler.state_dict()\n",
        ),
    ],
)
def test_the_fix_keeps_the_layout(save: str, expected: str) -> None:
    changed = fix_all(program(save), SAVED)
    assert expected in changed
    check_marked(changed, SAVED)


RESUME = """
import torch

def main(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    {load}
    for x in loader:
        train(model, x, optimizer, scaler)
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": scaler.state_dict()}}, args.path)
"""


@pytest.mark.parametrize(
    "load",
    [
        "optimizer.load_state_dict(torch.load(args.path)['optimizer'])  # <-",
        "c = torch.load(args.path)\nmodel.load_state_dict(c['model'])\noptimizer.load_state_dict(c['optimizer'])  # <-",
        "c = torch.load(args.path)\nif args.resume:\n    optimizer.load_state_dict(c['optimizer'])  # <-",
        "c = torch.load(args.path)\noptimizer.load_state_dict(c.get('optimizer'))  # <-",
    ],
)
def test_resumes_without_the_scaler(load: str) -> None:
    check_marked(RESUME.format(load=load.replace("\n", "\n    ")), RESTORED)


@pytest.mark.parametrize(
    "load",
    [
        "c = torch.load(args.path)\noptimizer.load_state_dict(c['optimizer'])\nscaler.load_state_dict(c['amp'])",
        "c = torch.load(args.path)\noptimizer.load_state_dict(c['optimizer'])\nif 'amp' in c:\n    scaler.load_state_dict(c['amp'])",
        "c = torch.load(args.path)\noptimizer.load_state_dict(c['optimizer'])\nif args.amp:\n    scaler.load_state_dict(c['amp'])",
        "model.load_state_dict(torch.load(args.path)['model'])",
        "c = torch.load(args.path)\nfor o in (optimizer, scaler):\n    o.load_state_dict(c[type(o).__name__])",
        "c = torch.load(args.path)\noptimizer.load_state_dict(c['optimizer'])\nargs.parts[0].load_state_dict(c['amp'])",
    ],
)
def test_resumes_that_load_it(load: str) -> None:
    check_marked(RESUME.format(load=load.replace("\n", "\n    ")), RESTORED)


def test_a_file_that_does_not_save_the_scaler_is_about_saving() -> None:
    code = RESUME.format(load="c = torch.load(args.path)\n    optimizer.load_state_dict(c['optimizer'])")
    check_marked(code.replace(', "amp": scaler.state_dict()', ""), RESTORED)


def test_the_fix_loads_what_was_saved() -> None:
    changed = fix_all(
        RESUME.format(load="c = torch.load('x')\n    optimizer.load_state_dict(c['optimizer'])  # and its momentum"), RESTORED
    )
    assert "optimizer.load_state_dict(c['optimizer'])  # and its momentum\n    scaler.load_state_dict(c[\"amp\"])\n" in changed


def test_objects_that_a_function_makes_together() -> None:
    check_marked(
        """
        import torch

        def fresh():
            model = torch.nn.Linear(2, 2)
            return model, torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu")

        m, o, s = fresh()
        saved = dict(m=m.state_dict(), o=o.state_dict(), s=s.state_dict())
        for keep in (True, False):
            m2, o2, s2 = fresh()
            m2.load_state_dict(saved["m"])
            o2.load_state_dict(saved["o"])  # <-
            if keep:
                s2.load_state_dict(saved["s"])
        """,
        RESTORED,
    )


@pytest.mark.parametrize(
    "save",
    [
        "state = {'net': model.state_dict()}\nstate['optimizer'] = optimizer.state_dict()  # <-\ntorch.save(state, 'x')",
        "state = {}\nstate['net'] = model.state_dict()\nstate['optimizer'] = optimizer.state_dict()  # <-\ntorch.save(state, 'x')",
        "state = dict()\nif args.full:\n    state['optimizer'] = optimizer.state_dict()  # <-\ntorch.save(state, 'x')",
        "c = torch.load('x')\nargs.take(c)\nfor e in range(9):\n    c = {'o': optimizer.state_dict()}  # <-\n    torch.save(c, 'x')",
        "c = None\nc = {'optimizer': optimizer.state_dict()}  # <-\nfor p in 'ab':\n    torch.save(c, p)\nc = args.c",
        "torch.save(model.state_dict(), 'x')\ntorch.save(optimizer.state_dict(), 'y')  # <-\ntorch.save(args.optim.state_dict(), 'z')",
    ],
)
def test_dictionaries_that_are_filled_in_steps(save: str) -> None:
    check_marked(program(save), SAVED)


@pytest.mark.parametrize(
    "save",
    [
        "state = {}\nfor n in args:\n    state[n] = args[n]\nstate['optimizer'] = optimizer.state_dict()\ntorch.save(state, 'x')",
        "state = {'optimizer': optimizer.state_dict()}\nstate |= args.more\ntorch.save(state, 'x')",
        "state = {'optimizer': optimizer.state_dict()}\nif args.more:\n    state = args.more\ntorch.save(state, 'x')",
        "state = {}\nstate['optimizer'] = optimizer.state_dict()\nstate['scaler'] = scaler.state_dict()\ntorch.save(state, 'x')",
        "state = {}\nstate['net'] = model.state_dict()\ntorch.save(state, 'x')",
        "torch.save(optimizer.state_dict(), args.buffer)",
        "torch.save(optimizer.state_dict(), 'y')\ntorch.save(scaler.state_dict(), 'z')",
        "torch.save(model.state_dict(), 'x')",
        "args.save(optimizer.state_dict(), 'y')",
    ],
)
def test_dictionaries_that_are_whole_or_not_known(save: str) -> None:
    check_marked(program(save), SAVED)


def test_the_fix_stands_behind_the_entry_of_the_optimizer() -> None:
    changed = fix_all(program("state = {}\nstate['optim'] = optimizer.state_dict()\ntorch.save(state, 'x')"), SAVED)
    assert "state['optim'] = optimizer.state_dict()\n    state[\"scaler\"] = scaler.state_dict()\n    torch.save" in changed


ENGINE = """
import torch

def write(model, optimizer, path):
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, path){function}

class Engine:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.amp = torch.amp.GradScaler("cuda")

    def state(self):
        {state}

    def save(self, path):
        {save}
"""


@pytest.mark.parametrize(
    ("function", "state", "save"),
    [
        ("", 'return {"optimizer": self.optimizer.state_dict()}  # <-', "torch.save(self.state(), path)"),
        ("", 'found = {"optimizer": self.optimizer.state_dict()}  # <-\n        return found', "torch.save(self.state(), path)"),
        ("", 'return {"o": self.optimizer.state_dict()}  # <-', "c = self.state()\n        c['epoch'] = 1\n        torch.save(c, path)"),
        ("", 'return {"o": self.optimizer.state_dict()}', "c = self.state()\n        c.update(self.more)\n        torch.save(c, path)"),
        ("", 'return self.kept or {"o": self.optimizer.state_dict()}', "torch.save(self.state(), path)"),
        (
            "",
            'if self.kept:\n            return self.kept\n        return {"o": self.optimizer.state_dict()}',
            "torch.save(self.state(), path)",
        ),
        ("  # <-", "return {}", "write(self.model, self.optimizer, path)"),
        ("", "return {}", "pass"),
    ],
)
def test_states_that_a_method_gives_and_functions_that_a_class_calls(function: str, state: str, save: str) -> None:
    code = ENGINE.format(function=function, state=state, save=save)
    check_marked(code, SAVED)
    if "# <-" in state:
        assert "self.amp.state_dict()" in fix_all(code, SAVED)


APART = """
import torch

def save(model, optimizer, {name}):
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": {name}.state_dict()}}, "x")

def resume(model, optimizer):
    state = torch.load("x")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"]){mark}

{made}
"""


@pytest.mark.parametrize(
    ("name", "made", "mark"),
    [
        ("scaler", 'scaler = torch.amp.GradScaler("cuda")', "  # <-"),
        ("scaler", 'def main(m, o):\n    scaler = torch.amp.GradScaler("cuda")\n    resume(m, o)', "  # <-"),
        (
            "scaler",
            'class T:\n    def go(self):\n        self.scaler = torch.amp.GradScaler("cuda")\n        resume(*self.all)',
            "  # <-",
        ),
        ("scaler", "", ""),
        ("ema", 'scaler = torch.amp.GradScaler("cuda")', ""),
        ("scaler", 'grad_scaler = torch.amp.GradScaler("cuda")', ""),
    ],
)
def test_a_save_function_that_is_given_the_scaler(name: str, made: str, mark: str) -> None:
    check_marked(APART.format(name=name, made=made, mark=mark), RESTORED)


@pytest.mark.parametrize(
    ("save", "fires"),
    [
        ("torch.save(optimizer.state_dict(), 'x')\nsave_state(scaler, 'y')", False),
        ("torch.save({'o': optimizer.state_dict()}, 'x')\nargs.checkpoints.keep(scaler)", False),
        ("torch.save({'o': optimizer.state_dict()}, 'x')\nargs.dump({'precision': [scaler]})", False),
        ("torch.save({'o': optimizer.state_dict()}, 'x')\nargs.run(grad=scaler)", True),
        ("torch.save({'o': optimizer.state_dict()}, 'x')\nargs.save(scaler.get_scale())", True),
        ("torch.save({'o': optimizer.state_dict()}, 'x')\nargs.dump(model)", True),
    ],
)
def test_a_scaler_that_goes_to_another_file_to_be_saved(save: str, *, fires: bool) -> None:
    check_marked(program(save.replace("'x')", "'x')  # <-") if fires else save), SAVED)


@pytest.mark.parametrize(("save", "fires"), [("self.saver.save(self)", False), ("save(self.amp)", False), ("self.saver.save(1)", True)])
def test_a_trainer_that_goes_to_another_file_to_be_saved(save: str, *, fires: bool) -> None:
    state = 'return {"optimizer": self.optimizer.state_dict()}' + "  # <-" * fires
    check_marked(ENGINE.format(function="", state=state, save=f"torch.save(self.state(), path)\n        {save}"), SAVED)
