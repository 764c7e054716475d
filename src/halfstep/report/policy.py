"""What a policy's effect looks like as a document."""

# A minus sign and an en dash are what readers are shown here, on purpose.
# ruff: noqa: RUF001

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from halfstep.records import ModulePrecision, OverrideEffect, PolicyEffect
from halfstep.report.document import Column, Document, Item, Section, Table
from halfstep.report.quantities import MISSING

__all__ = ["policy_document", "policy_sections"]

# A terminal shows the modules of a larger model only where an override is about them.
_MOST_MODULES = 30

_ROOT = "(the model)"

# The sections of several policies stand in the order of their columns, wherever they are read.
_GROUP = "policies"

_UNMEASURED = "Whether each override has an effect in a step was not measured here: halfstep policy show tells."


def policy_document(effect: PolicyEffect) -> Document:
    """The document that shows what a policy does: whether it does what it says first, then its overrides, then the modules.

    Args:
        effect: What was found. Whatever was not measured is shown as an en dash.

    Example:
        >>> effect = PolicyEffect(
        ...     schema=1, name="bf16", policy="bf16", default="bf16", pure=False, task="digits", overrides=(), modules=(), casts=12,
        ...     cast_elements=900, casts_without=12,
        ... )
        >>> policy_document(effect).conclusion
        'The policy has no overrides: all modules run in bf16.'
    """
    return Document(
        kind="Policy",
        title=effect.policy,
        subtitle=" · ".join(part for part in (effect.task, _precisions(effect)) if part),
        conclusion=_conclusion(effect),
        sections=(
            *((Section(title="Overrides", items=_notes(effect), tables=(_override_table(effect),)),) if effect.overrides else ()),
            *_module_sections(effect.modules),
        ),
    )


def policy_sections(effect: PolicyEffect) -> tuple[Section, ...]:
    """A policy's overrides and modules, as a section for each in a document that is about more than this policy.

    Args:
        effect: What was found.

    Example:
        >>> effect = PolicyEffect(
        ...     schema=1, name="O1", policy="fp16", default="fp16", pure=False, task="digits", overrides=(), modules=(), casts=None,
        ...     cast_elements=None, casts_without=None,
        ... )
        >>> [section.title for section in policy_sections(effect)]
        ['Policy O1']
    """
    text = "It has no overrides." if not effect.overrides else effect.policy if effect.policy != effect.name else ""
    unmeasured = _UNMEASURED if effect.overrides and effect.casts is None else ""
    told = Section(
        title=f"Policy {effect.name}",
        paragraphs=tuple(part for part in (text, unmeasured) if part),
        items=_notes(effect),
        tables=(_override_table(effect),) if effect.overrides else (),
        group=_GROUP,
    )
    if not effect.modules:
        return (told,)
    # On a terminal, what was measured must not scroll out of sight.
    modules = _module_table(effect.modules, caption=_counts(effect.modules))
    return (told, Section(title=f"Modules under {effect.name}", tables=(modules,), place="page", group=_GROUP))


def _notes(effect: PolicyEffect) -> tuple[Item, ...]:
    return tuple(Item(label=each.override, text=each.note) for each in effect.overrides if each.note)


def _module_sections(modules: Sequence[ModulePrecision]) -> tuple[Section, ...]:
    if not modules:
        return ()
    counts = _counts(modules)
    if len(modules) <= _MOST_MODULES:
        return (Section(title="Modules", tables=(_module_table(modules, caption=counts),)),)
    named = [module for module in modules if module.direct]
    shown = named[:_MOST_MODULES]
    first = f"The first {len(shown)} of {len(named)}. " if len(named) > len(shown) else ""
    compact = (_module_table(shown, caption=first + counts),) if shown else ()
    return (
        Section(title="Modules that an override is about", paragraphs=() if shown else (counts,), tables=compact),
        Section(title="All modules", tables=(_module_table(modules, caption=""),), place="page"),
    )


def _precisions(effect: PolicyEffect) -> str:
    written = effect.policy.partition(";")[0].strip()
    default = f"{'pure ' if effect.pure else ''}{effect.default}"
    return f"{written} is {default} here" if written not in (default, "") else ""


def _conclusion(effect: PolicyEffect) -> str:
    findings = effect.findings
    if len(findings) == 1:
        note = findings[0].note
        return f"{findings[0].override} has no effect: {note[:1].lower()}{note[1:]}"
    if findings:
        return f"{len(findings)} of {len(effect.overrides)} overrides have no effect: {_listed([each.override for each in findings])}."
    if not effect.overrides:
        return f"The policy has no overrides: all modules run in {effect.default}."
    absent = sum(each.status == "absent" for each in effect.overrides)
    if absent == len(effect.overrides):
        return f"No override is about a module of this model: all modules run in {effect.default}."
    which = "Every override whose class the model has" if absent else "Every override"
    decided = [module for module in effect.modules if module.reason != "default" and module.precision != "caller"]
    return f"{which} has an effect: {_share(decided, effect.modules)}{_cost(effect)}."


def _share(decided: Sequence[ModulePrecision], modules: Sequence[ModulePrecision]) -> str:
    counts = Counter(module.precision for module in decided)
    parts = [f"{count} in {precision}" for precision, count in counts.items()]
    total, own = sum(module.parameters for module in modules), sum(module.parameters for module in decided)
    weight = f", with {100 * own / total:.0f} % of the parameters" if total and own else ""
    return f"{len(decided)} of {len(modules)} modules run by an override{f' ({_listed(parts)})' if parts else ''}{weight}"


def _cost(effect: PolicyEffect) -> str:
    if effect.casts is None or effect.casts_without is None:
        return ""
    added = effect.casts - effect.casts_without
    if not added:
        return f"; a step makes {effect.casts} casts, as many as without overrides"
    return f"; a step makes {effect.casts} casts, {abs(added)} {'more' if added > 0 else 'fewer'} than without overrides"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _override_table(effect: PolicyEffect) -> Table:
    measured = effect.casts is not None
    columns = (
        Column(header="Override"),
        Column(header="Modules", alignment="right"),
        Column(header="Parameters", alignment="right"),
        *((Column(header="Called", alignment="right"), Column(header="Casts added", alignment="right")) if measured else ()),
    )
    rows = tuple(_override_row(each, measured=measured) for each in effect.overrides)
    return Table(columns=columns, rows=rows, caption=_cast_caption(effect))


def _override_row(effect: OverrideEffect, *, measured: bool) -> tuple[str, ...]:
    # An override of an operation is about calls, wherever they come from; it has no modules.
    is_operation = effect.override.startswith("op:")
    called = _number(effect.ran) if is_operation or effect.ran is None else f"{effect.ran} of {effect.modules}"
    if not is_operation and not effect.modules:
        called = MISSING
    return (
        effect.override,
        MISSING if is_operation else str(effect.modules),
        MISSING if is_operation else f"{effect.parameters:,}",
        *((called, _signed(effect.casts)) if measured else ()),
    )


def _cast_caption(effect: PolicyEffect) -> str:
    if effect.casts is None or effect.casts_without is None:
        return ""
    return (
        f"Casts of one step, forward and backward: {effect.casts} under the policy, {effect.casts_without} without its overrides. What an "
        "override adds is the difference to the policy without it. Islands that touch each other share casts, so the numbers need not add "
        "up."
    )


def _module_table(modules: Sequence[ModulePrecision], *, caption: str) -> Table:
    measured = any(module.calls is not None for module in modules)
    columns = (
        Column(header="Module"),
        Column(header="Class"),
        Column(header="Precision"),
        Column(header="Why"),
        Column(header="Parameters", alignment="right"),
        *((Column(header="Calls", alignment="right"),) if measured else ()),
    )
    rows = tuple(
        (
            module.path or _ROOT,
            module.kind,
            module.precision,
            module.reason,
            f"{module.parameters:,}",
            *((_number(module.calls),) if measured else ()),
        )
        for module in modules
    )
    return Table(columns=columns, rows=rows, caption=caption)


def _counts(modules: Sequence[ModulePrecision]) -> str:
    counts = Counter(module.precision for module in modules)
    parts = [f"{count} in {precision}" if precision != "caller" else f"{count} as their caller" for precision, count in counts.items()]
    plural = "module" if len(modules) == 1 else "modules"
    return f"{len(modules)} {plural}, {sum(module.parameters for module in modules):,} parameters: {_listed(parts)}."


def _number(value: int | None) -> str:
    return MISSING if value is None else str(value)


def _signed(value: int | None) -> str:
    if value is None:
        return MISSING
    return f"+{value}" if value > 0 else f"−{-value}" if value < 0 else "0"
