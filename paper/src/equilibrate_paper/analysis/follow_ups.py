"""Claims about runs that were added to decide what the first runs left open.

Their bounds are those of the first measurements. They use new runs; the number of seeds and epochs
was fixed before these, from the scatter of the first runs (docs/protocol-choices.md).
"""

from __future__ import annotations

from equilibrate_paper.analysis import findings
from equilibrate_paper.analysis.claim import (
    ABOVE,
    BELOW,
    DEPARTURE,
    MEETING,
    RESIDUAL,
    SHUFFLING,
    STRAIGHT,
    UNBIASED,
    WORST,
    Claim,
)

_AGAIN = "The same bound as for the first measurement, which did not decide."


def _about(task: str, reshuffled: str) -> list[Claim]:
    """Return the claims about reshuffled and independent batches in runs of equal length."""
    letter = {"mlp": "a", "cnn": "b"}[task]
    return [
        Claim(
            f"equal-length-meet-{task}",
            f"B4{letter}",
            "{title}: L̄ and R̄ agree at every η with independent batches in longer runs.",
            (f"{task}-independent",),
            findings.residuals,
            RESIDUAL,
            MEETING,
            _AGAIN,
            where=WORST,
            general=True,
            ours=True,
            follow_up=True,
        ),
        Claim(
            f"equal-length-lowers-{task}",
            f"B4{letter}",
            "{title}: reshuffled epochs lower O_FB at small learning rates, in runs of equal "
            "length.",
            (reshuffled, f"{task}-independent"),
            findings.shuffling_effect,
            SHUFFLING,
            BELOW,
            _AGAIN,
            general=True,
            ours=True,
            follow_up=True,
        ),
    ]


FOLLOW_UPS: tuple[Claim, ...] = (
    *_about("mlp", "mlp-reshuffled"),
    *_about("cnn", "cnn-sequence"),
    *(
        Claim(
            f"equal-length-{batches}-linear-mlp",
            "B4a",
            f"{{title}}: with {batches} batches O_FB is linear in the learning rate for η ≲ 0.01, "
            "measured again.",
            (f"mlp-{batches}",),
            findings.departures_below(0.01),
            DEPARTURE,
            STRAIGHT,
            _AGAIN if batches == "reshuffled" else UNBIASED,
            where="for η ≤ 0.01",
            ours=True,
            follow_up=True,
        )
        for batches in ("reshuffled", "independent")
    ),
    Claim(
        "equal-length-larger-cnn",
        "B4b",
        "{title}: O_FB is larger with reshuffled than with independent batches in runs of equal "
        "length, from η = 0.0005 to 0.005.",
        ("cnn-sequence", "cnn-independent"),
        findings.shuffling_effect_between(0.0005, 0.005),
        "O_FB, reshuffled / independent batches, mean over these η, − 1",
        ABOVE,
        "The first, shorter run with independent batches suggested this range. If its length was "
        "the reason, the difference vanishes at equal length.",
        ours=True,
        follow_up=True,
    ),
)
"""All of these claims."""
