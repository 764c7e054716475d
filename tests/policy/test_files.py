from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given

from halfstep import Policy
from halfstep.errors import ConfigurationError
from tests.policy.strategies import policies

needs_a_user = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")


@given(policies())
def test_a_policy_is_what_its_file_says(policy: Policy) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "policy.toml")
        assert policy.save(path) == path
        assert Policy.load(path) == policy
        assert policy.save(str(path)) == path
        assert Policy.load(str(path)) == policy


def test_how_a_file_reads(tmp_path: Path) -> None:
    path = Policy.parse("fp16; decoder.*.attn=fp32; torch.nn.LayerNorm=fp32; op:softmax=bf16").save(tmp_path / "policy.toml")
    assert path.read_text(encoding="utf-8") == (
        'default = "fp16"\n\n'
        '[[override]]\nmodule = "decoder.*.attn"\nprecision = "fp32"\n\n'
        '[[override]]\nclass = "torch.nn.LayerNorm"\nprecision = "fp32"\n\n'
        '[[override]]\nop = "softmax"\nprecision = "bf16"\n'
    )
    assert Policy.O3.save(path).read_text(encoding="utf-8") == 'default = "fp16"\npure = true\n'


def test_a_file_that_is_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        "# what the run of Tuesday needed\n"
        "default = 'bf16'  # on this machine\n"
        "override = [\n"
        "    { precision = 'fp32', module = 'head' },\n"
        "    { class = 'torch.nn.LayerNorm', precision = 'fp32' },\n"
        "    { op = 'aten.softmax', precision = 'fp16' },\n"
        "]\n",
        encoding="utf-8",
    )
    assert str(Policy.load(path)) == "bf16; head=fp32; torch.nn.LayerNorm=fp32; op:softmax=fp16"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"policy\.toml is no policy: it needs a line such as default = \"fp16\"\."),
        ("default = 16", r"it needs a line such as default"),
        ("default = ", r"is no policy: it is no valid TOML \(.+\)\."),
        ('default = "fp16"\ndefault = "fp16"', r"it is no valid TOML"),
        ('default = "fp8"', r"is no policy: Unknown precision 'fp8'\. Allowed are auto, fp32, bf16 and fp16\."),
        ('default = "fp16"\npure = "yes"', r"pure is true or false, not 'yes'\."),
        ('default = "fp32"\npure = true', r"is no policy: A pure policy names its half precision"),
        (
            'defualt = "fp16"',
            r"a policy file has no key 'defualt'\. Allowed are default, pure and override\. Did you mean 'default'\?",
        ),
        ('default = "fp16"\noverride = "head=fp32"', r"each override is a table that begins with the line \[\[override\]\]\."),
        ('default = "fp16"\noverride = ["head=fp32"]', r"each override is a table"),
        ('default = "fp16"\n[override]\nhead = "fp32"', r"each override is a table"),
        (
            'default = "fp16"\n[[override]]\nmodul = "head"\nprecision = "fp32"',
            r"override 1 has no key 'modul'\. Allowed are module, class, op and precision\. Did you mean 'module'\?",
        ),
        (
            'default = "fp16"\n[[override]]\nmodule = "a"\nprecision = "fp32"\n[[override]]\nmodule = "b"',
            r"override 2 needs one of the keys module, class and op, and precision; it has module\.",
        ),
        ('default = "fp16"\n[[override]]', r"override 1 needs one of the keys .* it has nothing\."),
        (
            'default = "fp16"\n[[override]]\nmodule = "a"\nop = "softmax"\nprecision = "fp32"',
            r"it has module, op, precision\.",
        ),
        ('default = "fp16"\n[[override]]\nmodule = 3\nprecision = "fp32"', r"module of override 1 is a string, not 3\."),
        ('default = "fp16"\n[[override]]\nmodule = ""\nprecision = "fp32"', r"is no policy: The pattern of an override is empty"),
        ('default = "fp16"\n[[override]]\nmodule = "a"\nprecision = 32', r"is no policy: A precision is named by a string.*not 32\."),
        ('default = "fp16"\n[[override]]\nmodule = "a"\nprecision = "auto"', r"is no policy: Unknown precision 'auto'"),
        ('default = "fp16"\n[[override]]\nop = "sofmax"\nprecision = "fp32"', r"is no policy: .*aten\.sofmax, which torch does not have"),
    ],
)
def test_what_is_no_policy_file_is_refused(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=match) as caught:
        Policy.load(path)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Cannot read the policy .*missing\.toml: No such file or directory\."):
        Policy.load(tmp_path / "missing.toml")
    with pytest.raises(ConfigurationError, match=r"Cannot read the policy "):
        Policy.load(tmp_path)
    path = tmp_path / "latin.toml"
    path.write_bytes('default = "größe"'.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"latin\.toml is no policy: it is no valid TOML \(.*utf-8"):
        Policy.load(path)


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Cannot write .*: there is no folder .*no\. Make it first\."):
        Policy.O1.save(tmp_path / "no" / "policy.toml")
    with pytest.raises(ConfigurationError, match=r"Cannot write .*: it is a folder\. Name a file in it\."):
        Policy.O1.save(tmp_path)


@needs_a_user
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX permissions")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    path = Policy.O1.save(tmp_path / "policy.toml")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigurationError, match=r"Cannot write .*no permission to write in the folder"):
            Policy.O2.save(path)
    finally:
        tmp_path.chmod(0o700)
    assert Policy.load(path) == Policy.O1


def test_a_policy_that_cannot_be_written_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Policy.O1.save(tmp_path / "policy.toml")

    def replace(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ConfigurationError, match=r"Cannot write .*policy\.toml: No space left on device\."):
        Policy.O2.save(path)
    assert Policy.load(path) == Policy.O1
    assert [each.name for each in tmp_path.iterdir()] == ["policy.toml"]
