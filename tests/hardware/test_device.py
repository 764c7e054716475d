from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.errors import ConfigurationError, HalfstepError, InvalidTypeError
from halfstep.hardware import check_device, describe_device, native_precisions, parse_device, resolve_precision, synchronize
from halfstep.records import Precision

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index or 0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Fake {torch.device(device).index or 0}")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)  # it counts emulation, so it must not be asked


CAPABILITIES: list[tuple[tuple[int, int], tuple[Precision, ...]]] = [
    ((6, 1), ("fp32",)),
    ((7, 0), ("fp16", "fp32")),
    ((7, 5), ("fp16", "fp32")),
    ((8, 0), ("bf16", "fp16", "fp32")),
    ((9, 0), ("bf16", "fp16", "fp32")),
    ((12, 0), ("bf16", "fp16", "fp32")),
]


@pytest.mark.parametrize(("capability", "native"), CAPABILITIES)
def test_what_a_gpu_computes_in_hardware(
    capability: tuple[int, int], native: tuple[Precision, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch, capability)
    assert native_precisions(CUDA) == native
    assert resolve_precision("auto", device=CUDA) == native[0]


def test_each_gpu_is_asked_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, (7, 5), (8, 0))
    assert [resolve_precision("auto", device=torch.device("cuda", index)) for index in range(2)] == ["fp16", "bf16"]


@pytest.mark.parametrize(
    ("features", "native"),
    [
        (set(), ("fp32",)),
        ({"bf16"}, ("bf16", "fp32")),
        ({"fp16"}, ("fp16", "fp32")),
        ({"bf16", "fp16"}, ("bf16", "fp16", "fp32")),
    ],
)
def test_what_a_cpu_computes_in_hardware(features: set[str], native: tuple[Precision, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.hardware.device.cpu_features", lambda: frozenset(features))
    assert native_precisions(CPU) == native
    assert resolve_precision("auto", device=CPU) == native[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_precision_that_is_named_is_taken_whatever_the_device_offers(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.hardware.device.cpu_features", frozenset)
    fake_gpus(monkeypatch, (6, 1))
    assert resolve_precision(precision, device=CPU) == precision
    assert resolve_precision(precision, device=CUDA) == precision


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("half", ConfigurationError, r"Unknown precision 'half'\. Allowed are auto, fp32, bf16 and fp16\."),
        ("AUTO", ConfigurationError, r"Unknown precision 'AUTO'"),
        (None, InvalidTypeError, r"one of auto, fp32, bf16 and fp16, not None"),
    ],
)
def test_an_unknown_precision_is_refused(name: Any, error: type[HalfstepError], match: str) -> None:
    with pytest.raises(error, match=match):
        resolve_precision(name, device=CPU)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("name", "match"),
    [
        (
            "cuda",
            rf"Device 'cuda' was asked for, but this torch \({torch.__version__.replace('+', r'.')}\) sees no CUDA device\. Use cpu\.",
        ),
        ("cuda:7", r"Device 'cuda:7' was asked for, but this torch"),
        ("mps", r"Device type 'mps' is not supported\. Allowed are cpu and cuda\."),
        ("meta", r"Device type 'meta' is not supported"),
        ("xpu:0", r"Device type 'xpu' is not supported"),
        ("tpu", r"Unknown device 'tpu'\. Allowed are auto, cpu, cuda and cuda:N\."),
        ("cuda:-1", r"Unknown device 'cuda:-1'"),
        ("cuda:x", r"Unknown device 'cuda:x'"),
        ("CPU", r"Unknown device 'CPU'"),
        ("", r"Unknown device ''\. Allowed are auto"),
        (None, r"Unknown device None"),
        (1.5, r"Unknown device 1\.5"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        parse_device(name)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cpu", "auto", "cpu:0", "cpu:3"])
def test_every_name_of_the_cpu_is_the_cpu(name: str) -> None:
    assert parse_device(name) == CPU
    assert parse_device() == CPU


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, (8, 0), (8, 0))
    assert parse_device() == parse_device("auto") == parse_device("cuda") == torch.device("cuda")
    assert parse_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigurationError, match=r"'cuda:2' was asked for, but this machine has only cuda:0 to cuda:1\."):
        parse_device("cuda:2")
    fake_gpus(monkeypatch, (8, 0))
    with pytest.raises(ConfigurationError, match=r"'cuda:1' was asked for, but this machine has only cuda:0\."):
        parse_device("cuda:1")


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:3"])
def test_supported_types_are_accepted(name: str) -> None:
    check_device(torch.device(name))


def test_the_description_of_this_cpu() -> None:
    device = describe_device(CPU)
    assert (device.type, device.torch, device.python) == ("cpu", torch.__version__, platform.python_version())
    assert device.threads == torch.get_num_threads()
    assert device.native == native_precisions(CPU)
    assert device.name.strip()


def test_the_description_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, (7, 5))
    device = describe_device(CUDA)
    assert (device.type, device.name, device.native) == ("cuda", "Fake 0", ("fp16", "fp32"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Xeon: the second\nmodel name\t: other\n", "Xeon: the second"),
        ("processor : 0\n", None),
        (None, None),
    ],
)
def test_the_name_of_a_cpu(text: str | None, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Path, **_: object) -> str:
        assert str(self) == "/proc/cpuinfo"
        if text is None:
            raise FileNotFoundError(str(self))
        return text

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert describe_device(CPU).name == (name or "riscv64")


def test_only_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    synchronize(CPU)
    assert waited == []
    synchronize(CUDA)
    assert waited == [CUDA]
