"""What a rule is: a reading goes in, a verdict with its reason comes out."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from equilibrate._arguments import lies_between
from equilibrate.readings import Reading


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a rule says that it is time to act, and why."""

    act: bool
    reason: str


@runtime_checkable
class Rule(Protocol):
    """What `FDRScheduler` asks of a rule.

    A rule is a frozen dataclass with one method. Its fields are its settings, which are saved and
    restored with the scheduler. A rule that needs more than a plain reading names it in a class
    attribute: with `needs = frozenset({"trace"})` readings have a `trace`; "forecasts" and "losses"
    are the others. A field `total_steps` that is None is set if the scheduler knows the number of
    steps.

    Example:
        >>> @dataclass(frozen=True)
        ... class After:
        ...     steps: int = 1000
        ...
        ...     def judge(self, reading: Reading) -> Verdict:
        ...         return Verdict(reading.count >= self.steps, f"{reading.count} steps")
    """

    def judge(self, reading: Reading) -> Verdict:
        """Return whether to act on a reading, and why."""
        ...


def needs_of(rule: object) -> frozenset[str]:
    """Return what a rule needs besides a plain reading.

    Args:
        rule: A rule, or None.

    Returns:
        Its class attribute `needs`; nothing if it has none.

    Raises:
        ValueError: If it needs something that no scheduler provides.
    """
    needs = frozenset(getattr(rule, "needs", ()))
    if unknown := needs - PROVIDED:
        raise ValueError(
            f"{type(rule).__name__} needs {', '.join(sorted(unknown))}, which FDRScheduler does "
            f"not provide: it provides {', '.join(sorted(PROVIDED))}"
        )
    return needs


PROVIDED = frozenset({"trace", "forecasts", "losses"})
"""What `FDRScheduler` can provide to a rule besides a plain reading."""


def check_rule(rule: object) -> None:
    """Check what a scheduler was given as its rule.

    Args:
        rule: A rule, or None.

    Raises:
        TypeError: If it has no method `judge`, or is a class.
    """
    if isinstance(rule, type):
        name = rule.__name__
        raise TypeError(f"rule must be an instance, got the class {name}: pass {name}()")
    if rule is not None and not isinstance(rule, Rule):
        raise TypeError(
            f"rule must have a method judge(reading), got {type(rule).__name__}: pass one of "
            "equilibrate.rules"
        )


def check_factor(factor: float) -> None:
    """Check a factor by which a learning rate is lowered.

    Args:
        factor: What the learning rate is multiplied by.

    Raises:
        ValueError: If it does not lie between 0 and 1.
    """
    if not lies_between(factor, 0, 1):
        raise ValueError(f"factor must lie between 0 and 1, such as 0.9, got {factor!r}")


def settings_of(rule: Rule) -> dict[str, Any]:
    """Return the settings of a rule, with which it can be created again.

    Args:
        rule: A rule.

    Returns:
        Its fields, and the name of its class as "name". NumPy's numbers become Python's, which
        `torch.load` reads by default.
    """
    names = [field.name for field in fields(rule) if field.init] if is_dataclass(rule) else []
    found = {name: getattr(rule, name) for name in names}
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in found.items()}
    return {"name": type(rule).__name__, **plain}


def with_settings(rule: Rule, settings: dict[str, Any]) -> Rule:
    """Return a rule with other settings.

    Args:
        rule: A rule.
        settings: What `settings_of` returned for a rule of the same class.

    Returns:
        A rule with these settings; the rule itself if it is not a dataclass.

    Raises:
        ValueError: If they are of another class.
    """
    found = dict(settings)
    if (kind := found.pop("name")) != type(rule).__name__:
        raise ValueError(
            f"state_dict was saved with the rule {kind}, this scheduler has "
            f"{type(rule).__name__}: construct it with the same kind of rule"
        )
    return replace(cast("Any", rule), **found) if is_dataclass(rule) else rule


def with_total_steps(rule: Rule, steps: int, *, before: int | None = None) -> Rule:
    """Return a rule that knows the number of steps of the training, if it can use it.

    Args:
        rule: A rule.
        steps: Number of optimizer steps.
        before: The number that it was told before.

    Returns:
        A rule whose field `total_steps` is set; the rule itself if it has no such field.

    Raises:
        ValueError: If it was given another number.
    """
    settings = settings_of(rule)
    if "total_steps" not in settings:
        return rule
    known = settings["total_steps"]
    if known in (None, before):
        return replace(cast("Any", rule), total_steps=steps)
    if known != steps:
        raise ValueError(
            f"{type(rule).__name__} has total_steps={known}, but cooldown_end={steps}: both are "
            "the number of steps of the training; leave total_steps out"
        )
    return rule
