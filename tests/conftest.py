"""What every test shares: the reference data, tools that may be missing, what runs by default.

torch is not imported here: the pure tests must stay fast.
"""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings

# One thread per process: ranks are threads or processes here, and they must not fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples each time: a red test must be red for whoever runs it next.
settings.register_profile("runflat", deadline=None, derandomize=True, database=None)
settings.load_profile("runflat")


def _no_program(*names: str) -> Callable[[], str | None]:
    """Returns a check that says what is missing when none of the programs is on the path."""
    return lambda: None if any(shutil.which(name) for name in names) else f"{names[0]} is not installed"


def _no_network_namespace() -> str | None:
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    if shutil.which("unshare") is None:
        return "unshare (util-linux) is not installed"
    cable = ["ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"]
    probe = subprocess.run(["unshare", "--net", *cable], capture_output=True, check=False, timeout=10)
    return "unshare and ip may not make a network namespace with a virtual cable here" if probe.returncode else None


def _no_package(name: str) -> Callable[[], str | None]:
    """Returns a check that says so when a package is missing."""
    return lambda: None if importlib.util.find_spec(name) else f"the package {name} is not installed"


def _no_gpu() -> str | None:
    import torch  # only for a test that needs it anyway

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


MISSING: dict[str, Callable[[], str | None]] = {
    "needs_compiler": _no_program("gcc", "cc", "clang"),
    "needs_chromium": _no_program("chromium", "chromium-browser", "google-chrome"),
    "needs_tmux": _no_program("tmux"),
    "needs_netns": _no_network_namespace,
    "needs_ray": _no_package("ray"),
    "gpu": _no_gpu,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("runflat")
    group.addoption("--reference-data", metavar="DIR", help="folder with the published data that some tests read")
    group.addoption(
        "--fail-on-skip-marked",
        action="store_true",
        help="fail a test that has a needs_ marker and was skipped, whatever the reason",
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--reference-data")
    if folder is not None and not Path(folder).is_dir():
        raise pytest.UsageError(f"--reference-data {folder}: there is no such folder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "reference_data" in getattr(item, "fixturenames", ()):
            item.add_marker("reference_data")
        if item.get_closest_marker("process"):
            # Such a test uses both cores by itself: two at once would wait for each other.
            item.add_marker(pytest.mark.xdist_group("process"))
    if "soak" in config.option.markexpr:
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, find_missing in MISSING.items():
        if item.get_closest_marker(marker) and (missing := find_missing()):
            pytest.skip(f"{marker}: {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_marked = any(marker.name.startswith("needs_") for marker in item.iter_markers())
    if (
        report.skipped
        and is_marked
        and not hasattr(report, "wasxfail")
        and item.config.getoption("fail_on_skip_marked")
    ):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason} (a skip counts as a failure under --fail-on-skip-marked)"
    return report


@pytest.fixture(scope="session")
def reference_data(request: pytest.FixtureRequest) -> Path:
    """Returns the folder given by --reference-data; skips the test where none was given."""
    folder = request.config.getoption("--reference-data")
    if folder is None:
        pytest.skip("no --reference-data=DIR was given")
    return Path(folder).resolve()
