"""The attributes of the installed GradScaler, and what people take for one."""

from __future__ import annotations

import pytest
import torch

from halfstep.lint.rules.unknown_scaler_attribute import UnknownScalerAttribute
from tests.lint.judging import findings, fixed, messages

RULES = [UnknownScalerAttribute()]
CODE = "import torch\n\nscaler = torch.amp.GradScaler('cuda')\nx = {}\n"

SCALER = torch.amp.GradScaler("cpu")
ATTRIBUTES = sorted(name for name in dir(SCALER) if not name.startswith("__"))


@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if not name.startswith("_")])
def test_public_attributes_are_known(name: str) -> None:
    assert findings(CODE.format(f"scaler.{name}"), RULES) == []


@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if name.startswith("_")])
def test_private_attributes_are_known_to_be_private(name: str) -> None:
    (message,) = messages(CODE.format(f"scaler.{name}"), RULES)
    assert message.startswith(f"`scaler.{name}` is private to torch")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scaler.loss_scale", "scaler.get_scale()"),
        ("scaler.get_loss_scale()", "scaler.get_scale()"),
        ("scaler.enabled", "scaler.is_enabled()"),
        ("scaler.growth_interval", "scaler.get_growth_interval()"),
        ("scaler._growth_factor", "scaler.get_growth_factor()"),
        ("scaler._backoff_factor", "scaler.get_backoff_factor()"),
        ("scaler._scale", "scaler.get_scale()"),
        ("scaler._scale.item()", "scaler.get_scale()"),
        ("scaler.unscale(optimizer)", "scaler.unscale_(optimizer)"),
        ("scaler.loss_scale(loss)", None),
        ("scaler.backward(loss)", None),
        ("scaler._skipped_steps", None),
        ("scaler.found_inf", None),
        ("scaler.get_scal()", None),
        ("scaler.something_else", None),
        ("scaler._per_optimizer_states[id(optimizer)]", None),
    ],
)
def test_attributes_and_what_gives_the_same(old: str, new: str | None) -> None:
    assert len(findings(CODE.format(old), RULES)) == 1
    assert fixed(CODE.format(old), RULES) == CODE.format(new or old)


@pytest.mark.parametrize(
    ("attribute", "advice"),
    [
        ("skipped_steps", "`halfstep.LossScaler`"),
        ("_per_optimizer_states", "`halfstep.LossScaler`"),
        ("backward", "`scaler.scale(loss).backward()`"),
        ("get_scal", "Did you mean `get_scale`?"),
        ("_get_growth_tracker", "`scaler.state_dict()`"),
        ("something_else", "It has get_backoff_factor, "),
    ],
)
def test_messages_say_what_to_do(attribute: str, advice: str) -> None:
    (message,) = messages(CODE.format(f"scaler.{attribute}"), RULES)
    assert advice in message


@pytest.mark.parametrize(
    "code",
    [
        "scaler.note = 1\nx = scaler.note\n",
        "x = getattr(scaler, 'skipped', 0) or scaler.skipped\n",
        "try:\n    x = scaler.loss_scale\nexcept AttributeError:\n    x = 1.0\n",
        "scaler = make_scaler()\nx = scaler.loss_scale\n",
        "def f(scaler):\n    scaler.scale(loss).backward()\n    return scaler.loss_scale\n",
        "x = scaler.__class__.__name__\n",
    ],
)
def test_what_may_exist_is_left_alone(code: str) -> None:
    assert findings(f"import torch\n\nscaler = torch.amp.GradScaler('cuda')\n{code}", RULES) == []


def test_scalers_are_followed_into_functions_and_attributes() -> None:
    code = """import torch

class Trainer:
    def __init__(self, use_amp):
        self.scaler = torch.cuda.amp.GradScaler() if use_amp else None

    def log(self):
        return self.scaler.loss_scale

def log(scaler):
    return scaler.loss_scale

log(torch.amp.GradScaler("cuda"))
"""
    assert [line for line, _ in findings(code, RULES)] == [8, 11]


def test_setting_a_private_attribute_is_told_and_left_to_a_person() -> None:
    code = CODE.format("1") + "scaler._growth_interval = 100\n"
    assert [line for line, _ in findings(code, RULES)] == [5]
    assert fixed(code, RULES) == code


def test_setting_the_scale_is_done_by_update() -> None:
    (message,) = messages(CODE.format("1") + "scaler._scale = low\n", RULES)
    assert "`scaler.update(new_scale)` sets the scale." in message


@pytest.mark.parametrize(
    "use",
    [
        "print(scaler._scale)",
        "print('scale', scaler._scale, sep=': ')",
        "float(scaler._scale)",
        "f'{scaler._scale}'",
        "scaler._scale < 1.0",
        "2 * scaler._scale",
        "log.info('scale %s', scaler._scale)",
        "writer.add_scalar('scale', scaler._scale, 3)",
        "{'scale': scaler._scale}",
        "table[scaler._scale]",
        "scaler._scale\nprint(x < 2.0)",
    ],
)
def test_a_number_takes_the_place_of_the_scale(use: str) -> None:
    assert fixed(CODE.format(use), RULES) == CODE.format(use.replace("scaler._scale", "scaler.get_scale()"))


@pytest.mark.parametrize(
    "use",
    [
        "torch.log2(scaler._scale)",
        "torch.ones(1).to(scaler._scale)",
        "torch.full((1,), 2.0, out=scaler._scale)",
        "loss.type_as(scaler._scale)",
        "scaler._scale.clone()",
        "scaler._scale.device",
        "scaler._scale[0]",
        "scaler._scale is None",
        "reduce(scaler._scale)",
        "scaler._scale\nprint(x.item())",
        "scaler._scale\ntorch.log2(x)",
    ],
)
def test_where_a_tensor_is_asked_for_nothing_is_changed(use: str) -> None:
    assert len(findings(CODE.format(use), RULES)) == 1
    assert fixed(CODE.format(use), RULES) == CODE.format(use)
