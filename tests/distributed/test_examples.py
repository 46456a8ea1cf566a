"""The examples for several processes, on two of them."""

import pytest
from support import examples, sharded


def test_ddp(processes):
    one, other = processes.run(examples.call, "ddp.py", 3, size=2)
    assert one == other
    assert one.reading.step == 3 * 128


@pytest.mark.slow
@pytest.mark.skipif(sharded.TORCH < (2, 9), reason="FSDP2 of torch 2.8 sums gradients here")
def test_fsdp2_resumes_on_another_number_of_processes(processes, tmp_path):
    folder = str(tmp_path)
    one, other = processes.run(examples.call, "fsdp2.py", 2, folder, size=2)
    assert one == other
    straight = processes.run(examples.call, "fsdp2.py", 4, folder + "/straight", size=2)
    [alone] = processes.run(examples.call, "fsdp2.py", 4, folder, True, size=1)
    assert alone.lowered == straight[0].lowered
    assert alone.lrs == straight[0].lrs
    assert alone.reading.step == straight[0].reading.step == 4 * 128
    assert abs(alone.reading.residual - straight[0].reading.residual) < 1e-3
