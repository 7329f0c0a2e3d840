"""`make test`: every check in order, with the wall time of each. Exit status 1 when any of them failed.

The cheap ones come first; pytest is last, so that its summary is the last thing on the screen."""
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
NBDEV_TEST = Path(PYTHON).with_name("nbdev_test")
WORKERS = str(min(2, os.cpu_count() or 1))  # more would fight over memory rather than finish sooner

STEPS = [
    ("exported code in sync, notebooks clean", [PYTHON, "tests/tools/house_rules.py", "export_in_sync", "notebooks_clean"]),
    ("notebook cells (nbdev_test)", [NBDEV_TEST, "--n_workers", WORKERS, "--do_print", "--timing"]),
    ("pytest (house rules, library, command line, docs site, browser)", [PYTHON, "-m", "pytest", "tests", "--durations=10"]),
]


def run_step(name, command, env):
    "Run one step, print its wall time, and return whether it passed."
    print(f"\n=== {name}", flush=True)
    start = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=env).returncode
    if "pytest" not in name or code:
        print(f"=== {'ok' if code == 0 else f'FAILED (exit {code})'} in {time.monotonic() - start:.0f} s: {name}", flush=True)
    return code == 0


def main(pytest_args):
    "Run all steps, also after one failed, and say at the end which did."
    threads = str(max(1, (os.cpu_count() or 1) // int(WORKERS)))
    env = {"MPLBACKEND": "agg", **os.environ}
    failed = []
    for name, command in STEPS:
        last = name.startswith("pytest")
        step_env = env if last else {"OMP_NUM_THREADS": threads, **env}
        if not run_step(name, [*command, *(pytest_args if last else [])], step_env):
            failed.append(name)
    if failed:
        print("\nFailed: " + "; ".join(failed), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
