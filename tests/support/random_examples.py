"""Settings for tests that hypothesis runs on random examples: the same ones on every run."""

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("CUBEGRAD_EXAMPLES", "1"))  # `make test-all` tries ten times as many


def examples(count: int) -> settings:
    return settings(
        max_examples=count * FACTOR,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
