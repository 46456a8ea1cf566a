"""All claims: what the paper claims, and what we claim beyond it.

Each claim is one object with its text, the runs it is about, what is measured, the bound and the
reason for the bound. The bounds were chosen before the runs that they judge, with the exceptions
listed in docs/protocol-choices.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from equilibrate_paper.analysis import findings
from equilibrate_paper.analysis.bounds import Agreement, Interval, SamplingErrors
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
    Short,
)
from equilibrate_paper.analysis.findings import COMPARISONS
from equilibrate_paper.analysis.follow_ups import FOLLOW_UPS
from equilibrate_paper.analysis.measures import BEGINNING, END, RELAXED

_BENT = Interval(low=0.2)
_VANISHING = Interval(-0.5, 0.5)
_FINAL, _EARLY = "final test accuracy", "test accuracy over the first eighth of the epochs"
_COINCIDE = "The paper shows curves that coincide; on its axes 5 % is about the width of a line."
_SIGN = "The paper ranks the two without numbers, so only the sign of the difference is tested."


def _about(task: str) -> list[Claim]:
    """Return the claims that the paper makes about both tasks."""
    letter = {"mlp": "a", "cnn": "b"}[task]
    schedules, amsgrad, adam = f"{task}-schedules", f"{task}-amsgrad", f"{task}-adam"
    return [
        Claim(
            f"initial-meet-{task}",
            f"1{letter}",
            "{title}: L̄ and R̄ converge to each other in the initial run at η = 0.1.",
            (f"{task}-initial",),
            findings.residuals,
            RESIDUAL,
            MEETING,
            _COINCIDE,
            where="at the end",
            general=True,
        ),
        Claim(
            f"sequence-meet-{task}",
            f"2{letter}",
            "{title}: L̄ and R̄ agree at sufficiently long times at every η of the sequence.",
            (f"{task}-sequence",),
            findings.residuals,
            RESIDUAL,
            MEETING,
            _COINCIDE,
            where=WORST,
            short=Short("the sides of FDR1 meet at every η", "{} % apart at the worst η"),
            general=True,
        ),
        Claim(
            f"sequence-slows-{task}",
            f"2{letter}",
            "{title}: the smaller the learning rate, the longer it takes to equilibrate.",
            (f"{task}-sequence",),
            findings.relaxation_power,
            f"d log(time until |L̄/R̄ − 1| stays below {RELAXED:g}) / d log η",
            BELOW,
            "The paper claims the direction only; a relaxation time 1/(ηλ) would give −1.",
            short=Short("the smaller η, the longer it takes", "time ∝ η^({})", 1.0),
            general=True,
        ),
        Claim(
            f"landscape-vanishes-{task}",
            f"3{letter}",
            "{title}: O_FB approaches zero as the learning rate does.",
            (f"{task}-sequence",),
            findings.remaining_landscape,
            "O_FB at the smallest η / O_FB at the largest η",
            _VANISHING,
            "The right side of FDR2 is of order η, and the values of η span a factor of five or "
            "more.",
            short=Short("O_FB vanishes with η", "{} % left at the smallest η"),
            general=True,
        ),
        Claim(
            f"adaptive-like-preset-{task}",
            f"4{letter}",
            "{title}: the adaptive schedule attains an accuracy comparable to the preset one.",
            (schedules,),
            findings.accuracy_difference((0, "adaptive"), (0, "preset"), END),
            f"{_FINAL}, adaptive − preset",
            SamplingErrors(findings.final_accuracy((0, "preset"))),
            "Two sampling errors of a difference on {images} test images, which cannot resolve "
            "less.",
            short=Short("adaptive is comparable to preset", "by {} points"),
        ),
        Claim(
            f"adaptive-beats-amsgrad-{task}",
            f"4{letter}",
            "{title}: the adaptive schedule outperforms AMSGrad in the end.",
            (schedules, amsgrad),
            findings.accuracy_difference((0, "adaptive"), (1, "amsgrad"), END),
            f"{_FINAL}, adaptive − AMSGrad",
            ABOVE,
            _SIGN,
            short=Short("adaptive ends above AMSGrad", "by {} points"),
        ),
        Claim(
            f"amsgrad-beats-adam-{task}",
            f"S1{letter}",
            "{title}: AMSGrad marginally outperforms Adam.",
            (amsgrad, adam),
            findings.accuracy_difference((0, "amsgrad"), (1, "adam"), END),
            f"{_FINAL}, AMSGrad − Adam",
            ABOVE,
            _SIGN,
            short=Short("AMSGrad ends marginally above Adam", "by {} points"),
        ),
    ]


def _beyond(task: str, precisions: Sequence[str]) -> list[Claim]:
    """Return our own claims about both tasks."""
    letter = {"mlp": "a", "cnn": "b"}[task]
    compared = tuple(f"{task}-{precision}" for precision in precisions)
    return [
        Claim(
            f"unbiased-meet-{task}",
            f"3{letter}",
            "{title}: L̄ and R̄ agree at every η with independent batches too.",
            (f"{task}-unbiased",),
            findings.residuals,
            RESIDUAL,
            MEETING,
            "If they do not, O_FB with independent batches is not that of a stationary state.",
            where=WORST,
            general=True,
            ours=True,
        ),
        Claim(
            f"landscape-falls-{task}",
            f"3{letter}",
            "{title}: O_FB falls from its maximum as the learning rate approaches zero.",
            (f"{task}-sequence",),
            findings.remaining_from_maximum,
            "O_FB at the smallest η / largest O_FB at any η",
            _VANISHING,
            "The paper's claim with a yardstick for curves that have a maximum, and with the same "
            "bound. It was added after the runs.",
            general=True,
            ours=True,
        ),
        Claim(
            f"shuffling-lowers-{task}",
            f"3{letter}",
            "{title}: reshuffled epochs lower O_FB at small learning rates.",
            (f"{task}-sequence", f"{task}-unbiased"),
            findings.shuffling_effect,
            SHUFFLING,
            BELOW,
            "On a quadratic loss both terms of O_FB are lowered, at every η (see Derivations).",
            general=True,
            ours=True,
        ),
        Claim(
            f"grid-comparable-{task}",
            f"B1{letter}",
            "{title}: the final accuracy is comparable for all X from 0.003 to 0.1, Y from 0.05 "
            "to 0.5.",
            (f"{task}-grid", f"{task}-schedules"),
            findings.grid_spread,
            f"{_FINAL}, best − worst of the grid",
            SamplingErrors(findings.grid_accuracy),
            "Two sampling errors on {images} test images, as for the paper's schedules. The best "
            "minus the worst of 16 overestimates the effect of X and Y.",
            ours=True,
        ),
        Claim(
            f"precision-residual-{task}",
            f"B2{letter}",
            "{title}: the residual of FDR1 does not depend on the precision of products.",
            compared,
            findings.precision_residuals,
            "largest difference of L̄/R̄ − 1 to single precision",
            Agreement(0.01, COMPARISONS),
            "A wide interval would cover 0 for lack of data; the paper's threshold is X = 0.01.",
            ours=True,
        ),
        Claim(
            f"precision-landscape-{task}",
            f"B2{letter}",
            "{title}: O_FB does not depend on the precision of products.",
            compared,
            findings.precision_landscapes,
            "largest relative difference of O_FB to single precision",
            Agreement(STRAIGHT.high, COMPARISONS),
            "A wide interval would cover 0 for lack of data; 20 % is the bound for linearity, too.",
            ours=True,
        ),
    ]


CLAIMS: tuple[Claim, ...] = (
    *_about("mlp"),
    *_about("cnn"),
    Claim(
        "landscape-linear-mlp",
        "3a",
        "{title}: O_FB is linear in the learning rate for η ≲ 0.01.",
        ("mlp-sequence",),
        findings.departures_below(0.01),
        DEPARTURE,
        STRAIGHT,
        "The paper compares with the red line by eye; a difference of 20 % would be visible.",
        where="for η ≤ 0.01",
        short=Short("O_FB is linear in η below 0.01", "{} % off the line"),
    ),
    Claim(
        "landscape-bent-cnn",
        "3b",
        "{title}: anharmonicity is pronounced even down to η ∼ 0.001.",
        ("cnn-sequence",),
        findings.departure_at(0.001),
        f"|{DEPARTURE}|",
        _BENT,
        "The same distance from the red line as for the MLP.",
        where="at η = 0.001",
        short=Short("O_FB is anharmonic down to η ∼ 0.001", "{} % off the line"),
    ),
    Claim(
        "adaptive-lags-cnn",
        "4b",
        "{title}: the adaptive schedule gains accuracy more slowly than AMSGrad at first.",
        ("cnn-schedules", "cnn-amsgrad"),
        findings.accuracy_difference((0, "adaptive"), (1, "amsgrad"), BEGINNING),
        f"{_EARLY}, adaptive − AMSGrad",
        BELOW,
        _SIGN,
        short=Short("adaptive lags behind AMSGrad at first", "by {} points"),
    ),
    Claim(
        "eager-faster-cnn",
        "S2",
        "{title}: X = 0.1, Y = 0.3 gains accuracy faster at first than X = 0.01, Y = 0.1.",
        ("cnn-schedules",),
        findings.accuracy_difference((0, "eager"), (0, "adaptive"), BEGINNING),
        f"{_EARLY}, eager − adaptive",
        ABOVE,
        _SIGN,
        short=Short("X = 0.1, Y = 0.3 is ahead at first", "by {} points"),
    ),
    Claim(
        "eager-ends-lower-cnn",
        "S2",
        "{title}: X = 0.1, Y = 0.3 ends at a lower accuracy than X = 0.01, Y = 0.1.",
        ("cnn-schedules",),
        findings.accuracy_difference((0, "eager"), (0, "adaptive"), END),
        f"{_FINAL}, eager − adaptive",
        BELOW,
        _SIGN,
        short=Short("… and ends below", "by {} points"),
    ),
    *_beyond("mlp", ("fp32", "tf32")),
    *_beyond("cnn", ("fp32", "tf32", "fp16")),
    Claim(
        "unbiased-linear-mlp",
        "3a",
        "{title}: with independent batches O_FB is linear in the learning rate for η ≲ 0.01.",
        ("mlp-unbiased",),
        findings.departures_below(0.01),
        DEPARTURE,
        STRAIGHT,
        UNBIASED,
        where="for η ≤ 0.01",
        ours=True,
    ),
    Claim(
        "unbiased-bent-cnn",
        "3b",
        "{title}: with independent batches anharmonicity is pronounced even down to η ∼ 0.001.",
        ("cnn-unbiased",),
        findings.departure_at(0.001),
        f"|{DEPARTURE}|",
        _BENT,
        UNBIASED,
        where="at η = 0.001",
        ours=True,
    ),
    *FOLLOW_UPS,
)
"""All claims, the paper's and ours."""
