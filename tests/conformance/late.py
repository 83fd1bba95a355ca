"""photinus.DistributedDataParallel, with missing gradients reported when torch's class reports them."""

from __future__ import annotations

import photinus


class DistributedDataParallel(photinus.DistributedDataParallel):
    """Raises at the next forward, not at the end of the backward in which gradients were missing."""

    late_gradient_errors = True
