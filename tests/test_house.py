"""The house rules hold in the repository, and each of them fires on an example that breaks it."""
import json
import shutil

import house_rules
import made_files
import pytest
from conftest import ROOT, refuse_skip


@pytest.mark.parametrize("name", house_rules.RULES)
def test_rule_holds(name):
    assert house_rules.RULES[name](ROOT) == []


# ---------------------------------------------------------------- a small checkout that keeps every rule

GOOD_FUNCTION = '''#| export
def double(
    x:float # any number
)->float: # twice `x`
    "Twice a number."
    return 2 * x'''


def cell(source, kind="code", cid=None, **more):
    base = {"cell_type": kind, "id": cid or f"{abs(hash(source)):08x}"[:8], "metadata": {}, "source": source.splitlines(keepends=True)}
    return {**base, **({"execution_count": None, "outputs": []} if kind == "code" else {}), **more}


def notebook(path, cells):
    "Write a notebook the way nbdev does; a plain string is a code cell, one that starts with `md ` is markdown."
    made = [c if isinstance(c, dict) else cell(c[3:], "markdown", f"c{i}") if c.startswith("md ") else cell(c, cid=f"c{i}")
            for i, c in enumerate(cells)]
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    text = json.dumps({"cells": made, "metadata": meta, "nbformat": 4, "nbformat_minor": 5}, sort_keys=True, indent=1, ensure_ascii=False)
    path.write_text(text + "\n")


def library(root, name="10_alpha", *, cells=(GOOD_FUNCTION, "assert double(2) == 4"), title="md # Alpha\n\n> Doubles."):
    notebook(root / "nbs" / f"{name}.ipynb", [title, f"#| default_exp {name[3:]}", *cells])


def lesson(root, name="L01_first", cells=("x = 1",), header="md - one\n- two\n- three\n\nTime: 5 min. Hardware: a CPU."):
    notebook(root / "nbs" / "lessons" / f"{name}.ipynb", ["md # First\n\n> One.", header, *cells])


def module(root, text, name="alpha"):
    (root / "gan_course" / f"{name}.py").write_text(text)


@pytest.fixture
def small(tmp_path):
    "A checkout with one library notebook, its module, one lesson and a start page."
    root = tmp_path / "checkout"
    (root / "gan_course").mkdir(parents=True)
    shutil.copy(ROOT / "settings.ini", root)
    shutil.copy(ROOT / "gan_course" / "__init__.py", root / "gan_course")
    library(root)
    lesson(root)
    notebook(root / "nbs" / "index.ipynb", ["md # Start\n\n> Here.", "md [first](lessons/L01_first.ipynb)"])
    module(root, GOOD_FUNCTION.replace("#| export\n", ""))
    for name, make in made_files.MADE.items():
        (root / name).write_text(make(root))
    return root


@pytest.mark.parametrize("name", [n for n in house_rules.RULES if n != "export_in_sync"])
def test_good_example_passes(small, name):
    assert house_rules.RULES[name](small) == []


def export(root):
    "Export the example's notebooks with nbdev itself."
    import subprocess
    import sys
    from pathlib import Path

    for old in root.glob("gan_course/[!_]*.py"):
        old.unlink()
    subprocess.run([Path(sys.executable).with_name("nbdev_export")], cwd=root, check=True)


def test_export_in_sync(small):
    export(small)
    assert house_rules.export_in_sync(small) == []
    module(small, (small / "gan_course/alpha.py").read_text().replace("2 * x", "3 * x"))
    module(small, "y = 1\n", "orphan")
    found = house_rules.export_in_sync(small)
    assert any("alpha.py: differs" in f for f in found) and any("orphan.py: no notebook" in f for f in found)


def long_function(n):
    return "def f():\n    'Long.'\n" + "    x = 1\n" * n


# Each: the rule, how to break it, and words of the violation it must then report.
BREAKS = [
    ("notebooks_clean", lambda r: library(r, cells=[cell(GOOD_FUNCTION, metadata={"tags": ["x"]})]), "not clean"),
    ("notebooks_clean", lambda r: library(r, cells=[cell("1", execution_count=3)]), "not clean"),
    ("notebooks_clean", lambda r: library(r, cells=[cell("1", outputs=[{"name": "stdout", "output_type": "stream", "text": ["1"]}])]), "outputs"),
    ("notebooks_clean", lambda r: library(r, cells=[cell("1", cid="same"), cell("2", cid="same")]), "twice"),
    ("notebooks_clean", lambda r: library(r, cells=[{k: v for k, v in cell("1").items() if k != "id"}]), "no id"),
    ("notebook_names", lambda r: library(r, "11_beta", cells=["#| default_exp gamma"]), "default_exp"),
    ("notebook_names", lambda r: library(r, "10_beta"), "also"),
    ("notebook_names", lambda r: library(r, "alpha_10"), "not named NN"),
    ("notebook_names", lambda r: lesson(r, "first"), "not named LNN"),
    ("title_cells", lambda r: library(r, title="md # Alpha\n\n> Doubles.\n\nLost text."), "move it"),
    ("title_cells", lambda r: library(r, title="md # Alpha"), "summary"),
    ("title_cells", lambda r: library(r, title="x = 1"), "not a markdown"),
    ("notebook_sizes", lambda r: lesson(r, cells=["x" * 200_001]), "limit 200000"),
    ("notebook_sizes", lambda r: [lesson(r, f"L{i}_x", cells=["x" * 190_000]) for i in range(10, 33)], "limit 4000000"),
    ("notebook_sizes", lambda r: lesson(r, cells=["x = 1"] * 60), "62 cells"),
    ("teaching_exports_nothing", lambda r: lesson(r, cells=["#| export\ndef f(): pass"]), "export directive"),
    ("teaching_exports_nothing", lambda r: lesson(r, cells=["#| default_exp x"]), "export directive"),
    ("lesson_headers", lambda r: lesson(r, header="md - one\n- two\n\nTime: 1 min"), "three list items, hardware"),
    ("nothing_skipped", lambda r: library(r, title="md # Alpha\n\n> Doubles.\n\n- skip_exec: true"), "cell 0"),
    ("nothing_skipped", lambda r: library(r, cells=["#| eval: false\nx = 1"]), "cell 2"),
    ("imports_go_down", lambda r: (library(r, "20_later"), module(r, "from .later import x")), "imports later"),
    ("imports_go_down", lambda r: (library(r, "20_later"), module(r, "def f():\n    from gan_course.later import x")), "imports later"),
    ("imports_go_down", lambda r: (library(r, "20_later"), module(r, "from . import later")), "imports later"),
    ("imports_go_down", lambda r: (library(r, "20_later"), module(r, "import gan_course.later")), "imports later"),
    ("no_star_imports", lambda r: module(r, "from math import *"), "alpha.py"),
    ("no_star_imports", lambda r: lesson(r, cells=["%matplotlib inline\nfrom math import *"]), "L01"),
    ("only_definitions", lambda r: module(r, "import torch\nDEVICE = torch.device('cuda')"), "computes"),
    ("only_definitions", lambda r: module(r, "print('hello')"), "runs at import"),
    ("only_definitions", lambda r: module(r, "for i in range(3): pass"), "runs at import"),
    ("only_definitions", lambda r: module(r, "import torch\ndef f(x=torch.zeros(3)): pass"), "default"),
    ("only_definitions", lambda r: module(r, "import torch\n@torch.compile\ndef f(x): pass"), "compiles"),
    ("only_definitions", lambda r: module(r, "class A:\n    x = open('f')"), "computes"),
    ("only_definitions", lambda r: module(r, "import matplotlib.pyplot as plt"), "pyplot"),
    ("only_definitions", lambda r: module(r, "from matplotlib import pyplot"), "pyplot"),
    ("module_size", lambda r: library(r, cells=["#| export\n" + "\n".join(f"x{i} = {i}" for i in range(301))]), "301 lines"),
    ("body_size", lambda r: module(r, long_function(31)), "31 lines"),
    ("body_size", lambda r: module(r, "class A:\n    " + long_function(31).replace("\n", "\n    ").rstrip()), "31 lines"),
    ("documents", lambda r: module(r, "def f(\n    x # a number\n)->int: # it\n    'Do.'"), "neither annotation nor default"),
    ("documents", lambda r: module(r, "def f(\n    x:int\n)->int: # it\n    'Do.'"), "argument x has no comment"),
    ("documents", lambda r: module(r, "def f(x:int, y:int # both\n)->int: # it\n    'Do.'"), "share a line"),
    ("documents", lambda r: module(r, "def f(\n    x:int # a number\n):\n    'Do.'"), "no return annotation"),
    ("documents", lambda r: module(r, "def f(\n    x:int # a number\n)->int:\n    'Do.'"), "behind the return"),
    ("documents", lambda r: module(r, "def f()->int: # it\n    return 1"), "no docstring"),
    ("documents", lambda r: module(r, "class A:\n    'An A.'\n    def __init__(self, x:int): self.x = x"), "A.__init__: argument x"),
    ("documents", lambda r: module(r, "class A:\n    'An A.'\n    def forward(self, x:int)->int: # y\n        'Do.'"), "A.forward"),
    ("documents", lambda r: module(r, "@patch\ndef f(self:A, x:int)->int: # y\n    'Do.'"), "no comment"),
    ("documents", lambda r: module(r, "@dataclass\nclass A:\n    'An A.'\n    x:int=1"), "field x"),
    ("documents", lambda r: module(r, "class A: pass"), "A has no docstring"),
    ("check_near_export", lambda r: library(r, cells=[GOOD_FUNCTION, "double(2)"]), "no check of double"),
    ("check_near_export", lambda r: library(r, cells=[GOOD_FUNCTION, "assert 1 + 1 == 2"]), "no check of double"),
    ("check_near_export", lambda r: library(r, cells=[GOOD_FUNCTION, "md a", "md b", "md c", "assert double(1) == 2"]), "no check of double"),
    ("check_near_export", lambda r: library(r, cells=[GOOD_FUNCTION, "#| gpu\nassert double(1) == 2"]), "no check of double"),
    ("check_near_export", lambda r: library(r, cells=["#| export\n@patch\ndef go(self:Thing): return 1", "assert Thing()"]), "no check of go"),
    ("check_near_export", lambda r: library(r, cells=["#| export\nTABLE = {}", "assert True"]), "no check of TABLE"),
    ("one_export_a_cell", lambda r: library(r, cells=["#| export\ndef a(): pass\ndef b(): pass"]), "exports a, b"),
    ("imports_alone", lambda r: library(r, cells=["import math\nx = math.pi"]), "mixes imports"),
    ("imports_alone", lambda r: library(r, cells=["#| export\nimport math\ndef f(): pass"]), "mixes imports"),
    ("no_machine_paths", lambda r: (r / "notes.md").write_text("see " + "/home" + "/someone/notes"), "notes.md:1"),
    ("requirements_explained", lambda r: (r / "settings.ini").write_text("[DEFAULT]\n#   numpy  arrays of pictures\nrequirements = numpy>=1 scipy\n"),
     "reason for scipy"),
    ("made_files_in_sync", lambda r: (r / "README.md").write_text("edited by hand"), "README.md"),
    ("made_files_in_sync", lambda r: notebook(r / "nbs/index.ipynb", ["md # New\n\n> Here."]), "README.md"),
    ("made_files_in_sync", lambda r: library(r, "12_new"), "sidebar.yml"),
    ("sidebar_complete", lambda r: library(r, "12_new"), "12_new.ipynb is missing"),
    ("sidebar_complete", lambda r: (r / "nbs/lessons/L01_first.ipynb").unlink(), "does not exist"),
    ("sidebar_complete", lambda r: (r / "nbs/sidebar.yml").open("a").write("          - index.ipynb\n"), "stands 2 times"),
]


@pytest.mark.parametrize("name, spoil, words", BREAKS, ids=[f"{b[0]}-{i}" for i, b in enumerate(BREAKS)])
def test_rule_fires(small, name, spoil, words):
    spoil(small)
    found = house_rules.RULES[name](small)
    assert any(words in line for line in found), found


def test_every_rule_has_an_example_that_breaks_it():
    assert set(house_rules.RULES) == {b[0] for b in BREAKS} | {"export_in_sync"}


@pytest.mark.parametrize("text", [
    "import math\nROOT2 = math.sqrt(2)\nTABLE = {'a': lambda x: open(x)}",
    "import re\nfrom collections import namedtuple\nP = namedtuple('P', 'x')\nALL = [P(1)]\nNAME = re.compile('a')",
    "try: import triton\nexcept ImportError: triton = None",
    "from .core import UserError\nclass A:\n    'An A.'\n    x:int = 3\ndef f(a=A()): return open(a)",
])
def test_definitions_that_are_allowed(small, text):
    module(small, text)
    assert house_rules.only_definitions(small) == []


# ---------------------------------------------------------------- README.md, and no skips under CI

def test_readme_is_made_of_the_start_page(small):
    notebook(small / "nbs/index.ipynb", ["md # T\n\n> S", "md ![a face](images/a.png) [l](lessons/L01_first.ipynb) [w](https://x.y) [r](../LICENSE)",
                                         "#| hide\nsecret = 1", "#| slow\nshown = 2"])
    text = made_files.readme(small)
    assert "![a face](nbs/images/a.png) [l](nbs/lessons/L01_first.ipynb) [w](https://x.y) [r](LICENSE)" in text
    assert "secret" not in text and "```python\nshown = 2\n```" in text


def test_readme_links_resolve():
    import re

    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert [t for t in links if made_files.local_link(t) and not (ROOT / t.split("#")[0]).exists()] == []


class Skipped:
    "What pytest reports of a skipped test."
    nodeid, longrepr = "tests/test_x.py::test_y", ("test_x.py", 3, "Skipped: no browser")
    outcome = "skipped"

    @property
    def skipped(self):
        return self.outcome == "skipped"


def test_skips_fail_under_ci(monkeypatch):
    monkeypatch.setattr("conftest.NO_SKIPS", True)
    report = refuse_skip(Skipped())
    assert report.outcome == "failed" and "no browser" in report.longrepr


def test_skips_stay_skips_elsewhere(monkeypatch):
    monkeypatch.setattr("conftest.NO_SKIPS", False)
    assert refuse_skip(Skipped()).outcome == "skipped"
