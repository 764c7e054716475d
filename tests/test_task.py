"""Tasks: what they are made of, how they are found by name, and how their faults are explained."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.errors import InvalidTypeError, TaskError
from halfstep.task import BatchStream, Task, make_task


def fields(**changed: Any) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    whole = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": lambda model, batch: model(batch).sum(),
        "batches": [torch.ones(1, 2)],
    }
    return whole | changed


def simple_task(seed: int) -> Task:
    return Task(**fields(batches=[seed]))


def batches_of_one() -> Iterator[Tensor]:
    yield torch.ones(1, 2)


class TestTask:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("model", None, "None (type NoneType); it takes a torch.nn.Module."),
            ("model", nn.Linear, "the class Linear itself, not an instance; it takes a torch.nn.Module."),
            ("model", simple_task, "the function simple_task itself, not what it returns; it takes a torch.nn.Module."),
            ("model", "resnet18", "'resnet18' (type str); it takes"),
            ("optimizer", torch.optim.SGD, "the class SGD itself, not an instance; it takes a torch.optim.Optimizer."),
            ("optimizer", 0.1, "0.1 (type float); it takes a torch.optim.Optimizer."),
            ("optimizer", functools.partial(torch.optim.SGD, lr=0.1), "(type partial); it takes a torch.optim.Optimizer."),
            ("loss", torch.tensor(1.0), "tensor(1.) (type Tensor); it takes a function loss(model, batch) that returns a scalar"),
            ("loss", nn.MSELoss, "the class MSELoss itself, not an instance; it takes a function loss(model, batch)"),
            ("loss", None, "None (type NoneType); it takes a function loss(model, batch)"),
            ("batches", None, "None (type NoneType); it takes an iterable of batches, such as a list or a DataLoader."),
            ("batches", DataLoader, "the class DataLoader itself, not an instance; it takes an iterable of batches"),
            ("batches", batches_of_one, "the function batches_of_one itself, not what it returns; it takes an iterable of batches"),
            ("batches", torch.ones(2), "tensor([1., 1.]) (type Tensor); it takes an iterable of batches"),
            ("batches", {"x": 1}, "{'x': 1} (type dict); it takes an iterable of batches"),
            ("batches", OrderedDict(), "(type OrderedDict); it takes an iterable of batches"),
            ("batches", "mnist", "'mnist' (type str); it takes an iterable of batches"),
            ("batches", b"mnist", "b'mnist' (type bytes); it takes an iterable of batches"),
            ("batches", TensorDataset(torch.ones(2)), "(type TensorDataset); it takes an iterable of batches"),
        ],
    )
    def test_a_wrong_field_is_named_with_what_it_takes(self, field: str, value: object, message: str) -> None:
        with pytest.raises(InvalidTypeError) as caught:
            Task(**fields(**{field: value}))
        assert str(caught.value).startswith(f"Task({field}=...) was given ")
        assert message in str(caught.value)

    def test_a_large_wrong_value_is_shortened_to_one_line(self) -> None:
        with pytest.raises(InvalidTypeError, match=r"^Task\(model=\.\.\.\) was given .{1,200}$"):
            Task(**fields(model=torch.ones(50, 50)))

    def test_a_wrong_value_that_cannot_be_printed_is_described(self) -> None:
        class Unprintable:
            def __repr__(self) -> NoReturn:
                raise RuntimeError("no")

        with pytest.raises(InvalidTypeError, match=r"Unprintable instance at .* \(type Unprintable\)"):
            Task(**fields(model=Unprintable()))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("loss", nn.Identity()),
            ("loss", functools.partial(print, "loss")),
            ("batches", []),
            ("batches", (1, 2)),
            ("batches", DataLoader(TensorDataset(torch.ones(2)))),
            ("batches", batches_of_one()),
            ("batches", map(str, [1])),
        ],
    )
    def test_what_fits_is_kept_as_it_is(self, field: str, value: object) -> None:
        assert getattr(Task(**fields(**{field: value})), field) is value

    def test_it_is_frozen_and_takes_keywords_only(self) -> None:
        task: Any = Task(**fields())
        with pytest.raises(AttributeError, match="batches"):
            task.batches = []
        assert not hasattr(task, "__dict__")
        wrong: Any = Task
        with pytest.raises(TypeError, match="positional"):
            wrong(*fields().values())


class CallableFactory:
    def __call__(self, seed: int) -> Task:
        return simple_task(seed)


class NotAFactory:
    """A class whose instances could be called, but that is called itself."""

    def __init__(self, seed: int) -> None:
        self.seed = seed


def scaled(scale: int, seed: int) -> Task:
    return simple_task(scale * seed)


def failing(seed: int) -> Task:
    raise ValueError(f"no data for {seed}")


class TestMakeTask:
    @pytest.mark.parametrize(
        "factory",
        [simple_task, CallableFactory(), functools.partial(scaled, 1), lambda seed: scaled(1, seed), CallableFactory().__call__],
    )
    def test_whatever_can_be_called_is_a_factory(self, factory: Callable[[int], Task]) -> None:
        assert make_task(factory, seed=7).batches == [7]

    def test_a_factory_that_raises_is_named_with_the_seed_and_the_line(self) -> None:
        line = failing.__code__.co_firstlineno + 1
        with pytest.raises(
            TaskError, match=rf"^The factory 'failing' failed with seed 3: ValueError: no data for 3 \(.*{Path(__file__).name}:{line}, in"
        ):
            make_task(failing, seed=3)

    @pytest.mark.parametrize(
        ("factory", "message"),
        [
            (lambda seed: None, "'TestMakeTask.<lambda>' returned None; it must return a halfstep.Task."),
            (lambda seed: seed, "'TestMakeTask.<lambda>' returned 3 (type int); it must return a halfstep.Task."),
            (lambda seed: Task, "'TestMakeTask.<lambda>' returned the class Task itself, not an instance; it must"),
            (lambda seed: simple_task, "returned the function simple_task itself, not what it returns; it must"),
            (lambda seed: (1, 2), "returned (1, 2) (type tuple); it must"),
            (NotAFactory, "'NotAFactory' returned"),
            (functools.partial(scaled, 1, seed=1), "'scaled' failed with seed 3: TypeError: "),
            (lambda: None, "'TestMakeTask.<lambda>' failed with seed 3: TypeError: TestMakeTask.<lambda>() takes 0 positional arguments"),
            (functools.partial(failing), "'failing' failed with seed 3: ValueError: no data for 3"),
        ],
    )
    def test_a_factory_that_does_not_fit_is_told_why(self, factory: Any, message: str) -> None:
        with pytest.raises(TaskError) as caught:
            make_task(factory, seed=3)
        assert str(caught.value).startswith("The factory ")
        assert message in str(caught.value)

    def test_a_callable_object_is_named_after_its_class(self) -> None:
        class Broken:
            def __call__(self, seed: int) -> Task:
                raise KeyError(seed)

        with pytest.raises(TaskError, match=r"^The factory 'Broken' failed with seed 3: KeyError: 3 \("):
            make_task(Broken(), seed=3)

    def test_a_task_with_a_wrong_field_is_a_failure_of_the_factory(self) -> None:
        def factory(seed: int) -> Task:
            return Task(**fields(model=None))

        line = factory.__code__.co_firstlineno + 1
        with pytest.raises(
            TaskError, match=rf"InvalidTypeError: Task\(model=...\) was given None .*{Path(__file__).name}:{line}, in factory\)$"
        ) as caught:
            make_task(factory, seed=0)
        assert isinstance(caught.value.__cause__, InvalidTypeError)

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
    def test_an_exit_is_not_swallowed(self, error: type[BaseException]) -> None:
        def factory(seed: int) -> Task:
            raise error(4)

        with pytest.raises(error) as caught:
            make_task(factory, seed=0)
        assert caught.value.args == (4,)


def take(stream: BatchStream, count: int) -> list[Any]:
    return [next(stream) for _ in range(count)]


class Reiterable:
    """Batches whose every pass does what `passes` says."""

    def __init__(self, *passes: Callable[[], Iterator[Any]]) -> None:
        self.passes = list(passes)

    def __iter__(self) -> Iterator[Any]:
        return self.passes.pop(0)()


class TestBatchStream:
    def test_a_list_starts_again(self) -> None:
        stream = BatchStream([1, 2, 3])
        assert iter(stream) is stream
        assert take(stream, 8) == [1, 2, 3, 1, 2, 3, 1, 2]

    def test_a_batch_may_be_none_or_empty(self) -> None:
        assert take(BatchStream([None, (), 0]), 4) == [None, (), 0, None]

    @pytest.mark.parametrize("batches", [[], (), iter(()), DataLoader(TensorDataset(torch.ones(0, 1)), batch_size=2)])
    def test_no_batches_at_all_is_an_error_every_time(self, batches: Any) -> None:
        stream = BatchStream(batches)
        for _ in range(2):
            with pytest.raises(TaskError, match=r"^The task has no batches: Task\(batches=\.\.\.\) is empty\. Give at least one batch\.$"):
                next(stream)

    @pytest.mark.parametrize("count", [1, 3])
    def test_a_generator_that_ends_cannot_start_again(self, count: int) -> None:
        stream = BatchStream(batch for batch in range(count))
        assert take(stream, count) == list(range(count))
        for _ in range(2):
            with pytest.raises(
                TaskError, match=rf"^The task's batches ended after {count} and cannot be started again\. Give a list, a DataLoader"
            ):
                next(stream)

    def test_an_infinite_generator_is_drawn_from_one_by_one(self) -> None:
        drawn = []

        def count() -> Iterator[int]:
            number = 0
            while True:
                drawn.append(number)
                yield number
                number += 1

        assert take(BatchStream(count()), 1000) == list(range(1000))
        assert len(drawn) == 1000

    def test_nothing_is_drawn_before_the_first_batch_is_asked_for(self) -> None:
        drawn: list[int] = []

        def count() -> Iterator[int]:
            drawn.append(0)
            yield 0

        stream = BatchStream(count())
        assert drawn == []
        assert next(stream) == 0

    def test_a_data_loader_shuffles_each_pass_anew(self) -> None:
        loader = DataLoader(TensorDataset(torch.arange(32)), batch_size=8, shuffle=True)
        stream = BatchStream(loader)
        passes = [torch.cat([batch for (batch,) in take(stream, 4)]).tolist() for _ in range(3)]
        assert [sorted(one) for one in passes] == [list(range(32))] * 3
        assert passes[0] != passes[1] != passes[2]

    def test_a_data_loader_without_its_last_batch_may_be_empty(self) -> None:
        loader = DataLoader(TensorDataset(torch.arange(3)), batch_size=8, drop_last=True)
        with pytest.raises(TaskError, match="no batches"):
            next(BatchStream(loader))

    def test_a_pass_that_cannot_start_is_located(self) -> None:
        def fail() -> NoReturn:
            raise OSError("the disk is gone")

        line = fail.__code__.co_firstlineno + 1
        with pytest.raises(
            TaskError, match=rf"^The task's batches could not be started: OSError: the disk is gone \(.*:{line}, in fail\)$"
        ):
            BatchStream(Reiterable(fail))

    def test_a_second_pass_that_cannot_start_is_located(self) -> None:
        def fail() -> NoReturn:
            raise OSError("the disk is gone")

        stream = BatchStream(Reiterable(lambda: iter([1, 2]), fail))
        assert take(stream, 2) == [1, 2]
        with pytest.raises(TaskError, match="batches could not be started: OSError: the disk is gone"):
            next(stream)

    def test_a_second_pass_that_is_empty_is_an_end(self) -> None:
        stream = BatchStream(Reiterable(lambda: iter([1]), lambda: iter(())))
        assert take(stream, 1) == [1]
        with pytest.raises(TaskError, match="ended after 1 and cannot be started again"):
            next(stream)

    def test_a_pass_is_started_once(self) -> None:
        batches = Reiterable(lambda: iter([1]), lambda: iter([2]), lambda: iter([3]))
        assert take(BatchStream(batches), 2) == [1, 2]
        assert len(batches.passes) == 1

    def test_an_iter_that_gives_no_iterator_is_named(self) -> None:
        wrong: Any = Reiterable(lambda: 3)  # type: ignore[arg-type,return-value]
        with pytest.raises(TaskError, match=r"could not be started: TypeError: iter\(\) returned non-iterator of type 'int'"):
            BatchStream(wrong)

    def test_a_batch_that_fails_is_numbered_and_located(self) -> None:
        def batches() -> Iterator[int]:
            yield 1
            yield 2
            raise ValueError("corrupt image")

        line = batches.__code__.co_firstlineno + 3
        stream = BatchStream(batches())
        assert take(stream, 2) == [1, 2]
        with pytest.raises(TaskError, match=rf"^Batch 3 could not be made: ValueError: corrupt image \(.*:{line}, in batches\)$") as caught:
            next(stream)
        assert isinstance(caught.value.__cause__, ValueError)

    def test_batches_are_numbered_over_all_passes(self) -> None:
        def fail() -> Iterator[int]:
            yield 3
            raise ValueError("corrupt")

        stream = BatchStream(Reiterable(lambda: iter([1, 2]), fail))
        assert take(stream, 3) == [1, 2, 3]
        with pytest.raises(TaskError, match=r"^Batch 4 could not be made: ValueError: corrupt"):
            next(stream)

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
    def test_an_exit_is_not_swallowed(self, error: type[BaseException]) -> None:
        def batches() -> Iterator[int]:
            yield 1
            raise error

        def start() -> NoReturn:
            raise error

        stream = BatchStream(batches())
        assert next(stream) == 1
        with pytest.raises(error):
            next(stream)
        with pytest.raises(error):
            BatchStream(Reiterable(start))
