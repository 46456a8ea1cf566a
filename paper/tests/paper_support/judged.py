"""A judged claim, as the outputs that show claims take it."""

from equilibrate_paper.analysis.judged import JudgedClaim


def judged_claim(**fields) -> JudgedClaim:
    """Return a claim that holds, with some of its fields replaced."""
    default = {
        "id": "meet-mlp",
        "figure": "1a",
        "task": "mlp",
        "statement": "The sides meet.",
        "measured": 0.0123,
        "margin": 0.0021,
        "bound": "|L/R − 1| < 0.05",
        "why": "The width of a line.",
        "verdict": "holds",
        "remark": "",
        "ours": False,
    }
    return JudgedClaim(**default | fields)
