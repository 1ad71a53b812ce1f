"""What all tests share, with or without MPI."""

from __future__ import annotations

import tempfile

import hypothesis
from hypothesis.configuration import set_hypothesis_home_dir

# Every run draws the same examples, keeps no files, and may compile a kernel inside an example.
hypothesis.settings.register_profile(
    "cuep",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("cuep")
set_hypothesis_home_dir(tempfile.gettempdir())
