"""A rule that notes what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import equilibrate as eq


@dataclass(frozen=True)
class Noting:
    """Keeps all readings, and never acts."""

    needs: ClassVar[frozenset[str]] = frozenset({"trace", "forecasts", "losses"})
    seen: ClassVar[list[eq.Reading]] = []

    def judge(self, reading: eq.Reading) -> eq.rules.Verdict:
        self.seen.append(reading)
        return eq.rules.Verdict(False, "never")
