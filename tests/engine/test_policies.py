"""A policy as the precision of an engine."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softmax
from torch.utils.checkpoint import checkpoint

from halfstep import LossScaler, MixedPrecision, Policy
from halfstep.errors import ConfigurationError, HalfstepWarning, InvalidTypeError


class Net(nn.Module):
    """Two layers with a softmax between them; it notes the dtype of what each of the three returns."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)
        self.recompute = recompute
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self._hidden, x, use_reentrant=False) if self.recompute else self._hidden(x)
        result: Tensor = self.second(hidden)
        self.seen.append(result.dtype)
        return result

    def _hidden(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        weights = softmax(hidden, dim=-1)
        self.seen += [hidden.dtype, weights.dtype]
        return weights


def make(precision: Any, *, seed: int = 0, **settings: Any) -> tuple[Net, MixedPrecision]:
    torch.manual_seed(seed)
    model = Net(recompute=settings.pop("recompute", False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HalfstepWarning)
        return model, MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, **settings)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def train(model: Net, amp: MixedPrecision, *, steps: int = 3) -> list[float]:
    x, y = batch()
    return [amp.train_step(lambda: mse_loss(model(x).float(), y)).loss for _ in range(steps)]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    kinds, state = [type(module) for module in model.modules()], pickle.dumps(model)
    yield
    assert [type(module) for module in model.modules()] == kinds
    assert pickle.dumps(model) == state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_policy_without_overrides_is_its_default_precision(precision: str) -> None:
    plain, policy = make(precision), make(Policy.parse(precision))
    assert train(*plain) == train(*policy)
    assert plain[0].seen == policy[0].seen
    assert policy[1].policy_handle is None
    assert policy[1].precision == precision


@pytest.mark.parametrize("as_text", [True, False])
def test_overrides_hold_in_the_engines_region(as_text: bool) -> None:
    text = "bf16; first=fp32; op:softmax=fp32"
    model, amp = make(text if as_text else Policy.parse(text))
    train(model, amp, steps=1)
    assert model.seen == [torch.float32, torch.float32, torch.bfloat16]
    assert (amp.precision, str(amp.policy)) == ("bf16", text)


def test_the_steps_are_those_of_islands_written_by_hand() -> None:
    class ByHand(Net):
        def _hidden(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                hidden = self.first(x.float())
            return softmax(hidden, dim=-1)

    model, amp = make("bf16; first=fp32")
    torch.manual_seed(0)
    by_hand = ByHand()
    other = MixedPrecision(by_hand, torch.optim.SGD(by_hand.parameters(), lr=0.1), "bf16")
    assert train(model, amp) == train(by_hand, other)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), by_hand.parameters(), strict=True))


def test_outside_of_the_region_the_model_runs_as_it_did() -> None:
    model, amp = make("bf16; op:softmax=fp16; second=fp32")
    x, _ = batch()
    model(x)
    assert model.seen == [torch.float32] * 3
    model.seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # A region of somebody else: operations are as autocast has them.
        model(x)
    assert model.seen == [torch.bfloat16, torch.bfloat16, torch.float32]
    model.seen.clear()
    with amp.autocast(), torch.no_grad():
        model(x)
    assert model.seen == [torch.bfloat16, torch.float16, torch.float32]


def test_a_pure_policy_runs_the_model_and_not_the_loss_in_half() -> None:
    model, amp = make(Policy.parse("pure bf16"))
    x, y = batch()
    with amp.autocast():
        out = model(x)
        assert out.dtype is torch.float32
        amp.backward(mse_loss(out, y))
    assert model.seen == [torch.bfloat16] * 3
    assert all(parameter.dtype is torch.float32 and parameter.grad is not None for parameter in model.parameters())
    record = amp.step()
    assert record is not None
    assert not record.skipped


@pytest.mark.parametrize("policy", [Policy.O0, Policy.O1, Policy.O2, Policy.O3])
def test_the_levels_of_apex_train(policy: Policy) -> None:
    model, amp = make(policy, scaler=None if policy == Policy.O0 else LossScaler(init_scale=1024.0))
    losses = train(model, amp, steps=5)
    assert losses[-1] < losses[0]
    assert (amp.scaler is None) == (policy == Policy.O0)


@pytest.mark.parametrize("text", ["bf16; first=fp16", "fp32; first=fp16", "bf16; op:linear=fp16"])
def test_losses_are_scaled_where_any_part_runs_in_fp16(text: str) -> None:
    _, amp = make(text)
    assert isinstance(amp.scaler, LossScaler)
    assert amp.precision == text.partition(";")[0]


def test_where_nothing_runs_in_fp16_a_scaler_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="A scaler was given for bf16"):
        make("bf16; first=fp32", scaler=LossScaler())


def test_auto_is_settled_and_leaves_a_scaler_aside() -> None:
    _, amp = make("auto; first=fp32", scaler=LossScaler())
    assert amp.precision in ("fp32", "bf16", "fp16")
    assert amp.policy.default == amp.precision
    assert (amp.scaler is None) == (amp.precision != "fp16")


def test_recomputed_operations_run_as_they_ran_before() -> None:
    model, amp = make("bf16; op:softmax=fp16; op:linear=fp32", recompute=True)
    plain, other = make("bf16; op:softmax=fp16; op:linear=fp32")
    assert train(model, amp) == train(plain, other)
    forward, again = model.seen[:3], model.seen[3:5]
    assert forward == [torch.float32, torch.float16, torch.float32]
    assert again == forward[:2]


def test_two_engines_have_each_their_own_operations() -> None:
    first, second = make("bf16; op:softmax=fp16"), make("bf16")
    train(*first, steps=1)
    train(*second, steps=1)
    x, _ = batch()
    with first[1].autocast(), second[1].autocast():
        second[0](x)
        assert second[0].seen[-3:] == [torch.bfloat16] * 3
    assert first[0].seen[-2] is torch.float16


def test_it_is_removed_by_its_handle() -> None:
    model, amp = make("bf16; first=fp32; op:softmax=fp32")
    assert amp.policy_handle is not None
    amp.policy_handle.remove()
    amp.policy_handle.remove()
    assert type(model.first) is nn.Linear
    assert train(model, amp, steps=1) == train(*make("bf16"), steps=1)


def test_a_second_policy_on_one_model_is_refused() -> None:
    model, amp = make("bf16; first=fp32")
    with _unchanged(model), pytest.raises(ConfigurationError, match=r"applied to this Linear already\. .*the policy_handle of a"):
        MixedPrecision(model, amp.optimizer, "bf16; first=fp32")
    assert type(copy.deepcopy(model).first) is nn.Linear


@pytest.mark.parametrize(
    ("precision", "settings", "error", "match"),
    [
        ("bf16; frist=fp32", {}, ConfigurationError, r"'frist=fp32' matches no module of this Net\. Did you mean 'first'\?"),
        ("bf16; op:sofmax=fp32", {}, ConfigurationError, r"aten\.sofmax, which torch does not have\. Did you mean"),
        ("first=fp32", {}, ConfigurationError, "does not begin with its default precision"),
        (Policy, {}, InvalidTypeError, r"A precision is a halfstep\.Policy, or is named by a string"),
        ("bf16; first=fp32", {"accumulate": 0}, ConfigurationError, "accumulate=0"),
        ("bf16; first=fp32", {"on_step": 3}, InvalidTypeError, "on_step"),
    ],
)
def test_an_engine_that_cannot_be_made_leaves_the_model_alone(precision: Any, settings: Any, error: type[Exception], match: str) -> None:
    model = Net()
    with _unchanged(model), pytest.raises(error, match=match):
        MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, **settings)


def test_a_frozen_part_in_half_can_be_an_fp32_island() -> None:
    model = Net()
    model.first.requires_grad_(False).bfloat16()
    amp = MixedPrecision(model, torch.optim.SGD(model.second.parameters(), lr=0.1), "bf16; first=fp32")
    train(model, amp, steps=1)
    assert model.seen[0] is torch.float32
    assert model.first.weight.dtype is torch.bfloat16


def test_a_state_goes_into_an_engine_with_another_policy() -> None:
    model, amp = make("bf16; first=fp32")
    train(model, amp)
    state = amp.state_dict()
    _, other = make("bf16")
    other.load_state_dict(state)
    assert other.stats() == amp.stats()
