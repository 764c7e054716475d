"""Which rules are on: the words of `--select`, of configurations and of comments, and what they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

from halfstep.errors import ConfigurationError, did_you_mean
from halfstep.records import Severity

__all__ = ["SYNTAX_ERROR", "AbstractNamedRule", "RuleName", "Selection", "check_selectors", "known_rules", "matches", "selected_codes"]

_EVERYTHING: Final = "ALL"
# How closely a word fits, where it is the whole code or the name. No beginning of a code is as long.
_EXACTLY: Final = 100


class AbstractNamedRule(Protocol):
    """What can be selected: anything with a code, a name and a severity."""

    @property
    def code(self) -> str:
        """Such as `HS002`."""

    @property
    def name(self) -> str:
        """Such as `clip_before_unscale`."""

    @property
    def severity(self) -> Severity:
        """How bad it is."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleName:
    """What a rule is called.

    Attributes:
        code: Such as `HS002`.
        name: Such as `clip_before_unscale`.
        severity: How bad it is; what is `info` is off unless it is selected.
    """

    code: str
    name: str
    severity: Severity


# A file that does not parse is a finding of this code. No rule stands behind it: there is no tree to look at.
SYNTAX_ERROR: Final = RuleName(code="HS000", name="syntax_error", severity="error")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one place, such as the command line, says about which rules are on.

    Attributes:
        select: The rules that are on in place of those before; `None` where those stay.
        ignore: Rules that are off.
    """

    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()


def known_rules(rules: Iterable[AbstractNamedRule]) -> tuple[RuleName, ...]:
    """The names of these rules, with that of files which do not parse."""
    return (SYNTAX_ERROR, *(RuleName(code=rule.code, name=rule.name, severity=rule.severity) for rule in rules))


def matches(selector: str, rule: RuleName) -> int:
    """How closely a word fits a rule: 0 where it does not, more the longer the word is.

    Example:
        >>> [matches(word, SYNTAX_ERROR) > 0 for word in ("HS000", "HS0", "syntax_error", "ALL", "HS001", "syntax")]
        [True, True, True, True, False, False]
    """
    if selector == rule.name or selector.upper() == rule.code:
        return _EXACTLY
    if selector.upper() == _EVERYTHING:
        return 1
    is_beginning = len(selector) >= 2 and rule.code.startswith(selector.upper())
    return len(selector) if is_beginning else 0


def check_selectors(selectors: Iterable[str], *, known: Sequence[RuleName], where: str) -> None:
    """Refuses words that stand for no rule.

    Args:
        selectors: The words.
        known: All rules.
        where: What the words were passed to, for the message.

    Raises:
        ConfigurationError: A word stands for no rule.

    Example:
        >>> check_selectors(["HS042"], known=[SYNTAX_ERROR], where="--select")
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: --select: there is no rule 'HS042'. Did you mean 'HS000'? Allowed are codes such as HS000, ...
    """
    for selector in selectors:
        if not any(matches(selector, rule) for rule in known):
            names = [word for rule in known for word in (rule.code, rule.name)]
            raise ConfigurationError(
                f"{where}: there is no rule {selector!r}.{did_you_mean(selector, known=names)} Allowed are codes such as {known[-1].code}, "
                f"their beginnings such as {known[-1].code[:4]}, names such as {known[-1].name}, and {_EVERYTHING}. "
                f"halfstep lint --list-rules shows them."
            )


def selected_codes(known: Sequence[RuleName], selections: Iterable[Selection]) -> frozenset[str]:
    """The codes of the rules that are on.

    Without a selection those are errors and warnings. A later selection is stronger than an earlier one, and within one the word that
    fits a rule more closely: `select = ["HS002"]` and `ignore = ["HS00"]` leave HS002 on. That a file does not parse is told unless it is
    ignored, for nothing else can be told about it.

    Args:
        known: All rules.
        selections: What was said, the weakest first.
    """
    codes = {rule.code for rule in known if rule.severity != "info"}
    for selection in selections:
        for rule in known:
            chosen = max((matches(word, rule) for word in selection.select or ()), default=0)
            ignored = max((matches(word, rule) for word in selection.ignore), default=0)
            was_on = rule.code in codes and (selection.select is None or rule == SYNTAX_ERROR)
            if ignored < chosen or (not ignored and was_on):
                codes.add(rule.code)
            else:
                codes.discard(rule.code)
    return frozenset(codes)
