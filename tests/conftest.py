"""Shared by all tests: no silent skips under CI, and GPU tests only where there is a GPU."""
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "tools"))

NO_SKIPS = os.environ.get("CI", "").lower() in ("true", "1")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; left out where there is none")


def pytest_collection_modifyitems(config, items):
    "Leave GPU tests out (counted as deselected) where there is no GPU; run the house rules first."
    import torch

    if not torch.cuda.is_available():
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        if gpu:
            config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    items.sort(key=lambda item: item.path.name != "test_house.py")  # stable: the rest keeps its order


def refuse_skip(report):
    "Under CI a skipped test is a failed one: a missing tool must not look like a pass."
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, which CI does not allow: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return refuse_skip((yield))


@pytest.fixture(scope="session")
def docs_folder():
    "The docs site, built once for all tests that look at it."
    import docs_site

    return docs_site.build(ROOT)
