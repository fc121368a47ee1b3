"""The allocation profile: live bytes between marks and at the peak, also of freed tensors."""

from __future__ import annotations

import torch

from meshwright.measure.allocation_profile import AllocationProfile


def test_live_bytes_between_marks_and_at_the_peak():
    profile = AllocationProfile()
    profile.start()
    profile.mark()
    kept = torch.ones(1000)
    torch.ones(3000)  # freed at once
    profile.mark()
    profile.mark()
    del kept
    profile.mark()
    profile.stop()
    assert profile.between_marks() == [4000, -4000]
    assert profile.peak_bytes == 4000 + 12000
