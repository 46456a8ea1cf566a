"""Keep doctest from importing the Triton kernels where Triton is missing."""

from importlib.util import find_spec

if find_spec("triton") is None:
    collect_ignore = [
        f"equilibrate/ensemble/_ops/{name}.py"
        for name in ("_step_kernels", "_launch", "_products", "_repack")
    ]
