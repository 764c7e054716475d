"""What changes after the engine was made, or outside of its view: it is noticed, or does no harm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import LossScaler, MixedPrecision
from halfstep.errors import ConfigurationError, InvalidTypeError, StepOrderError

INF = math.inf
PRECISIONS = ["fp32", "bf16", "fp16"]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def make(model: nn.Module, precision: str = "fp32", *, fused: bool = False, **settings: Any) -> MixedPrecision:
    if precision == "fp16":
        settings.setdefault("scaler", LossScaler(init_scale=256.0))
    return MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), precision, **settings)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().pow(2).mean()
    return loss


class TestForwardPassesThatNobodySawBegin:
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_statistics_are_rescued_from_infinities(self, precision: str, fused: bool) -> None:
        model = make_model()
        amp = make(model, precision, fused=fused)
        skips = []
        for factor in (1.0, INF, 1.0, math.nan):
            amp.backward(loss_of(model, torch.randn(8, 4) * factor))
            record = amp.step()
            assert record is not None
            skips.append(record.skipped)
        assert skips == [False, True, False, True]
        assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())
        assert bool(model.eval()(torch.randn(8, 4)).isfinite().all())

    def test_what_somebody_wrote_since_is_kept(self) -> None:
        model = make_model()
        amp = make(model)
        amp.backward(loss_of(model, torch.randn(8, 4)))
        amp.step()
        mean = model[1].running_mean
        assert isinstance(mean, Tensor)
        mean.copy_(torch.tensor([7.0, 7.0, 7.0, INF]))  # As a checkpoint that is loaded would; one value is bad already.
        amp.backward(loss_of(model, torch.randn(8, 4)) * INF)
        assert amp.step().skipped  # type: ignore[union-attr]
        assert mean[:3].tolist() != [0.0] * 3
        assert bool((mean[:3] > 5).all()), "what was loaded was undone"


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_exception_in_the_region_gives_up_the_step(error: type[BaseException]) -> None:
    model = make_model()
    amp = make(model, accumulate=2)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with amp.autocast():
        loss = loss_of(model, torch.randn(8, 4))
    amp.backward(loss)

    def fail() -> None:
        with amp.autocast():
            model(torch.full((8, 4), INF))
            raise error

    with pytest.raises(error):
        fail()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(error), torch.no_grad(), amp.autocast():
        raise error  # An evaluation is no part of a step.
    assert not amp.train_step(lambda x: loss_of(model, x), torch.randn(8, 4)).skipped


def test_buffers_that_the_first_forward_pass_makes_are_put_back() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.mean: Any

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mean"):
                self.register_buffer("mean", torch.zeros(()))
            self.mean += x.detach().mean()
            result: Tensor = self.linear(x)
            return result

    model = Late()
    amp = make(model)
    amp.train_step(lambda x: loss_of(model, x), torch.ones(2, 4))
    assert model.mean.item() == 1.0
    assert amp.train_step(lambda x: loss_of(model, x), torch.full((2, 4), INF)).skipped
    assert model.mean.item() == 1.0


def test_a_buffer_may_be_given_other_data() -> None:
    model: Any = make_model()
    model.register_buffer("extra", torch.zeros(2))
    amp = make(model)
    amp.train_step(lambda x: loss_of(model, x), torch.randn(8, 4))
    model.extra.data = torch.ones(5)
    amp.train_step(lambda x: loss_of(model, x), torch.randn(8, 4))

    def grows(x: Tensor) -> Tensor:
        model.extra.data = torch.ones(7)
        return loss_of(model, x)

    assert amp.train_step(grows, torch.full((8, 4), INF)).skipped
    assert model.extra.tolist() == [1.0] * 5


class TestParametersThatAreReplaced:
    def test_all_of_them(self) -> None:
        model = make_model()
        amp = make(model)
        amp.train_step(lambda x: loss_of(model, x), torch.randn(8, 4))
        model.load_state_dict(make_model().state_dict(), assign=True)
        with pytest.raises(ConfigurationError, match=r"6 of the optimizer's 6 parameters are not the model's"):
            amp.train_step(lambda x: loss_of(model, x), torch.randn(8, 4))

    def test_one_layer(self) -> None:
        model = make_model()
        amp = make(model)
        amp.train_step(lambda x: loss_of(model, x), torch.randn(8, 4))
        model[2] = nn.Linear(4, 1)
        with pytest.raises(ConfigurationError, match=r"The model's '2\.weight' and 1 more are in no group of it"):
            amp.train_step(lambda x: loss_of(model, x), torch.randn(8, 4))

    def test_a_part_that_rests_is_none(self) -> None:
        model = make_model()
        amp = make(model)
        for part in (model, model[:2], model):
            amp.train_step(lambda x, part=part: loss_of(part, x), torch.randn(8, 4))


def test_callbacks_wait_for_a_step_with_gradients() -> None:
    model, other, calls = make_model(), nn.Linear(4, 1), []
    amp = make(model, on_step=lambda: calls.append(1))
    assert not amp.train_step(lambda x: loss_of(other, x), torch.randn(8, 4)).skipped
    assert calls == []
    amp.train_step(lambda x: loss_of(model, x), torch.randn(8, 4))
    assert calls == [1]


def test_a_loop_that_broke_off_in_a_group_is_told_before_the_next_epoch() -> None:
    model = make_model()
    amp = make(model, accumulate=4)
    data = [torch.randn(8, 4) for _ in range(6)]
    for x in amp.micro_batches(data):
        with amp.autocast():
            loss = loss_of(model, x)
        amp.backward(loss)
        amp.step()
        break
    with pytest.raises(StepOrderError, match=r"micro_batches\(\) was called after 1 of accumulate=4 .* give it up with discard"):
        next(iter(amp.micro_batches(data)))
    amp.discard()
    assert len(list(amp.micro_batches(data))) == 6


class TestArguments:
    @pytest.mark.parametrize("name", ["skip_nonfinite", "restore_buffers", "closure"])
    @pytest.mark.parametrize("value", [1, None, "no"])
    def test_switches(self, name: str, value: Any) -> None:
        with pytest.raises(InvalidTypeError, match=rf"MixedPrecision\({name}=\.\.\.\) takes True or False, not {value!r}"):
            make(make_model(), **{name: value})

    def test_a_scheduler_that_is_a_class(self) -> None:
        with pytest.raises(InvalidTypeError, match="takes an object with a step"):
            make(make_model(), scheduler=torch.optim.lr_scheduler.StepLR)

    def test_a_scheduler_of_another_optimizer(self) -> None:
        model = make_model()
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigurationError, match="The StepLR schedules another SGD than this engine steps"):
            make(model, scheduler=torch.optim.lr_scheduler.StepLR(other, 1))

    @pytest.mark.parametrize("callback", [lambda a, b: None, lambda *, record: None])
    def test_a_callback_of_more_than_the_record(self, callback: Any) -> None:
        with pytest.raises(InvalidTypeError, match="takes functions of nothing, or of the step's record alone"):
            make(make_model(), on_step=callback)

    def test_a_lazy_model(self) -> None:
        model = nn.LazyLinear(2)
        with pytest.raises(ConfigurationError, match=r"The parameter 'weight' has no shape yet, .* Run one batch through the model"):
            make(model)


class TestClippingWhatTorchCannotClip:
    @pytest.mark.parametrize("settings", [{"max_grad_norm": 1.0}, {"max_grad_value": 1.0}])
    def test_sparse_gradients(self, settings: dict[str, float]) -> None:
        model = nn.Embedding(4, 2, sparse=True)
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"shape \(4, 2\) is sparse, and torch cannot clip it"):
            amp.train_step(lambda x: model(x).mean(), torch.tensor([1]))

    def test_complex_gradients_by_value(self) -> None:
        model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", max_grad_value=1.0)
        with pytest.raises(ConfigurationError, match="is complex"):
            amp.train_step(lambda: model[0].abs().sum())

    def test_nothing(self) -> None:
        model = nn.Linear(2, 2)
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", max_grad_value=1.0)
        assert not amp.train_step(lambda: torch.ones((), requires_grad=True)).skipped


@pytest.fixture
def double_by_default() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_another_default_dtype_changes_nothing(precision: str) -> None:
    model = nn.Linear(4, 1)
    amp = make(model, precision, max_grad_norm=1.0)
    records = [amp.train_step(lambda x, factor=factor: loss_of(model, x) * factor, torch.randn(8, 4)) for factor in (1.0, INF, 1.0)]
    assert [record.skipped for record in records] == [False, True, False]
