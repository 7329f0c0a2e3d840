"""The house rules: each takes the root of a checkout and returns one line per violation.

    python tests/tools/house_rules.py              all rules
    python tests/tools/house_rules.py body_size    some of them
"""
import ast
import configparser
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_BODY, MAX_MODULE, MAX_LESSON_CELLS = 30, 300, 60
MAX_NOTEBOOK, MAX_ALL_NOTEBOOKS = 200_000, 4_000_000
CHECK_WITHIN = 3
DEFS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCS = (ast.FunctionDef, ast.AsyncFunctionDef)
RULES = {}


def rule(f):
    "Register a rule under its name."
    RULES[f.__name__] = f
    return f


# ---------------------------------------------------------------- reading notebooks and modules

def all_notebooks(root):
    return sorted(p for p in (root / "nbs").rglob("*.ipynb") if not any(part[0] in "._" for part in p.relative_to(root).parts))


def library_notebooks(root):
    "The numbered notebooks right under nbs/: one for each module."
    return sorted(p for p in (root / "nbs").glob("*.ipynb") if p.name != "index.ipynb" and p.name[0] not in "._")


def teaching_notebooks(root, *folders):
    return [p for p in all_notebooks(root) if p.parent.name in (folders or ("lessons", "how_to"))]


def modules(root):
    return sorted(p for p in (root / "gan_course").glob("*.py") if not p.name.startswith("_"))


def load(nb):
    return json.loads(nb.read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


def cells_of(nb):
    return load(nb)["cells"]


def directives(cell):
    "The `#|` lines at the top of a code cell, as a list of their words."
    if cell["cell_type"] != "code":
        return []
    found = []
    for line in source(cell).splitlines():
        if line.strip() and not line.lstrip().startswith("#|"):
            break
        found.append(line.split("|", 1)[1].split() if "|" in line else [])
    return [words for words in found if words]


def flags(cell):
    return {words[0].rstrip(":") for words in directives(cell)}


def is_export(cell):
    return bool(flags(cell) & {"export", "exports", "exporti"})


def parse(code):
    "The tree of a cell's code, magics left out; None when it is no Python."
    lines = ["" if re.match(r"\s*[%!]", line) else line for line in code.splitlines()]
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return None


def default_exp(nb):
    return [words[1] for cell in cells_of(nb) for words in directives(cell) if words[0] == "default_exp" and len(words) > 1]


def exported_cells(nb):
    "(position, cell, tree) of every exported cell that is more than imports."
    for i, cell in enumerate(cells_of(nb)):
        if is_export(cell):
            tree = parse(source(cell))
            if tree is not None and not all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree.body):
                yield i, cell, tree


def rel(path, root):
    return path.relative_to(root).as_posix()


def dotted(node):
    "`a.b.c` of a name, an attribute or the function of a call; '' for anything else."
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def decorators(node):
    return [dotted(d) for d in node.decorator_list]


def is_patch(node):
    return isinstance(node, FUNCS) and any(d.split(".")[-1].startswith("patch") for d in decorators(node))


# ---------------------------------------------------------------- notebooks and what is exported from them

@rule
def export_in_sync(root):
    "gan_course/ is what nbdev_export makes of the notebooks."
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp)
        shutil.copy(root / "settings.ini", copy)
        shutil.copytree(root / "nbs", copy / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints", "images"))
        (copy / "gan_course").mkdir()
        shutil.copy(root / "gan_course" / "__init__.py", copy / "gan_course")
        run = subprocess.run([Path(sys.executable).with_name("nbdev_export")], cwd=copy, capture_output=True, text=True)
        if run.returncode:
            return [f"nbdev_export fails: {run.stderr.strip().splitlines()[-1:]}"]
        want = {p.name: p.read_text() for p in (copy / "gan_course").glob("*.py")}
    have = {p.name: p.read_text() for p in (root / "gan_course").glob("*.py")}
    out = [f"gan_course/{n}: no notebook exports it" for n in sorted(have.keys() - want.keys())]
    out += [f"gan_course/{n}: missing; run nbdev_export" for n in sorted(want.keys() - have.keys())]
    return out + [f"gan_course/{n}: differs from its notebook; edit the notebook and run nbdev_export"
                  for n in sorted(want.keys() & have.keys()) if want[n] != have[n]]


@rule
def notebooks_clean(root):
    "Notebooks are as nbdev_clean leaves them; library notebooks hold no outputs; every cell has an id of its own."
    out = []
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp)
        shutil.copy(root / "settings.ini", copy)
        shutil.copytree(root / "nbs", copy / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints", "images"))
        run = subprocess.run([Path(sys.executable).with_name("nbdev_clean")], cwd=copy, capture_output=True, text=True)
        if run.returncode or "Failed to clean" in run.stderr:
            out.append(f"nbdev_clean fails: {run.stderr.strip()}")
        for nb in all_notebooks(root):
            if nb.read_bytes() != (copy / nb.relative_to(root)).read_bytes():
                out.append(f"{rel(nb, root)}: not clean; run nbdev_clean")
    for nb in all_notebooks(root):
        ids = [cell.get("id") for cell in cells_of(nb)]
        out += [f"{rel(nb, root)}: cell {i} has no id" for i, cid in enumerate(ids) if not cid]
        out += [f"{rel(nb, root)}: cell id {cid} stands twice" for cid in sorted({c for c in ids if c and ids.count(c) > 1})]
        if nb in library_notebooks(root):
            out += [f"{rel(nb, root)}: cell {i} holds outputs" for i, cell in enumerate(cells_of(nb)) if cell.get("outputs")]
    return out


@rule
def notebook_names(root):
    "nbs/NN_name.ipynb exports gan_course/name.py; no number stands twice; lessons are LNN_name."
    out, numbers = [], {}
    for nb in library_notebooks(root):
        match = re.fullmatch(r"(\d\d)_([a-z][a-z0-9_]*)\.ipynb", nb.name)
        if not match:
            out.append(f"{rel(nb, root)}: not named NN_module.ipynb")
            continue
        number, name = match.groups()
        if default_exp(nb) != [name]:
            out.append(f"{rel(nb, root)}: default_exp is {default_exp(nb)}, not ['{name}']")
        if number in numbers:
            out.append(f"{rel(nb, root)}: number {number} is also {numbers[number]}'s")
        numbers[number] = nb.name
    return out + [f"{rel(nb, root)}: not named LNN_name.ipynb" for nb in teaching_notebooks(root, "lessons")
                  if not re.fullmatch(r"L\d\d_[a-z0-9_]+\.ipynb", nb.name)]


@rule
def title_cells(root):
    "The first cell is the title and `> ` summary alone: nbdev turns that cell into front matter, and the rest of it is lost."
    out = []
    for nb in all_notebooks(root):
        lines = [s for s in source(cells_of(nb)[0]).splitlines() if s.strip()]
        if cells_of(nb)[0]["cell_type"] != "markdown" or not lines or not lines[0].startswith("# "):
            out.append(f"{rel(nb, root)}: the first cell is not a markdown `# Title`")
        elif not any(s.startswith("> ") for s in lines):
            out.append(f"{rel(nb, root)}: the title has no `> ` summary")
        elif [s for s in lines[1:] if not s.startswith("> ")]:
            out.append(f"{rel(nb, root)}: the title cell holds more than title and summary; move it to the next cell")
    return out


@rule
def notebook_sizes(root):
    "At most 200 kB a notebook, 4 MB together, 60 cells a lesson."
    sizes = {nb: nb.stat().st_size for nb in all_notebooks(root)}
    out = [f"{rel(nb, root)}: {n} bytes, limit {MAX_NOTEBOOK}" for nb, n in sizes.items() if n > MAX_NOTEBOOK]
    if sum(sizes.values()) >= MAX_ALL_NOTEBOOKS:
        out.append(f"nbs: {sum(sizes.values())} bytes of notebooks, limit {MAX_ALL_NOTEBOOKS}")
    return out + [f"{rel(nb, root)}: {len(cells_of(nb))} cells, limit {MAX_LESSON_CELLS}"
                  for nb in teaching_notebooks(root) if len(cells_of(nb)) > MAX_LESSON_CELLS]


@rule
def teaching_exports_nothing(root):
    "Lessons and how-tos export nothing."
    return [f"{rel(nb, root)}: cell {i} has an export directive" for nb in teaching_notebooks(root)
            for i, cell in enumerate(cells_of(nb)) if is_export(cell) or "default_exp" in flags(cell)]


@rule
def lesson_headers(root):
    "The second cell of a lesson lists three things you will be able to do, the time and the hardware."
    out = []
    for nb in teaching_notebooks(root, "lessons"):
        cells = cells_of(nb)
        text = source(cells[1]) if len(cells) > 1 and cells[1]["cell_type"] == "markdown" else ""
        items = re.findall(r"^\s*(?:[-*]|\d+\.)\s+\S", text, re.M)
        missing = ["three list items"] * (len(items) < 3)
        missing += [word for word in ("time", "hardware") if not re.search(rf"\b{word}\b", text, re.I)]
        if missing:
            out.append(f"{rel(nb, root)}: the header (second cell) lacks {', '.join(missing)}")
    return out


@rule
def nothing_skipped(root):
    "No skip_exec and no eval: false: cells that CI must not run carry the flags gpu or slow."
    out = []
    for nb in all_notebooks(root):
        for i, cell in enumerate(cells_of(nb)):
            head = source(cell) if i == 0 or cell["cell_type"] == "raw" else ""
            if re.search(r"\bskip_exec\b|\beval\s*:\s*false", head) or ["eval:", "false"] in directives(cell):
                out.append(f"{rel(nb, root)}: cell {i} switches execution off")
    return out


# ---------------------------------------------------------------- modules

def module_numbers(root):
    return {name: int(nb.name[:2]) for nb in library_notebooks(root) if nb.name[:2].isdigit() for name in default_exp(nb)}


def our_imports(tree):
    "The modules of ours that a module imports, anywhere in it."
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".")
            if node.level == 0 and base[0] != "gan_course":
                continue
            parts = base[1:] if node.level == 0 else [b for b in base if b]
            yield from ([parts[0]] if parts else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("gan_course."))


@rule
def imports_go_down(root):
    "A module imports only lower-numbered modules of ours, also inside functions."
    numbers, out = module_numbers(root), []
    for path in modules(root):
        mine = numbers.get(path.stem)
        for name in sorted(set(our_imports(ast.parse(path.read_text())))):
            if mine is not None and name in numbers and numbers[name] >= mine:
                out.append(f"{rel(path, root)} ({mine:02}): imports {name} ({numbers[name]:02})")
    return out


@rule
def no_star_imports(root):
    "No `from x import *`, in modules and in any notebook."
    texts = [(rel(p, root), p.read_text()) for p in modules(root)]
    texts += [(f"{rel(nb, root)} cell {i}", source(cell)) for nb in all_notebooks(root)
              for i, cell in enumerate(cells_of(nb)) if cell["cell_type"] == "code"]
    return [f"{where}: star import" for where, text in texts for node in ast.walk(parse(text) or ast.Module([], []))
            if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names)]


CONSTANT_CALLS = {"dict", "list", "set", "tuple", "frozenset", "range", "re.compile", "logging.getLogger", "namedtuple", "TypeVar",
                  "SimpleNamespace", "MappingProxyType", "ContextVar", "field", "dataclasses.field", "Path", "threading.Lock", "len", "type"}


def is_constant(node, classes):
    "Whether evaluating this costs nothing: literals, names, tables of them, arithmetic, and instances of small classes."
    for n in ast.walk(node):
        if isinstance(n, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            return False
        if isinstance(n, ast.Call) and not in_lambda(node, n):
            name = dotted(n)
            if not (name in CONSTANT_CALLS or name.startswith("math.") or name.split(".")[-1] in CONSTANT_CALLS or name in classes):
                return False
    return True


def in_lambda(tree, node):
    return any(isinstance(n, ast.Lambda) and any(m is node for m in ast.walk(n.body)) for n in ast.walk(tree))


def import_time(body, classes):
    "(line, what) of each statement that does more than define."
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)):
            names = [a.name for a in node.names] if not isinstance(node, ast.Pass) else []
            full = [f"{getattr(node, 'module', '') or ''}.{n}".lstrip(".") for n in names]
            yield from ((node.lineno, "imports pyplot, which picks a backend") for n in full if n.startswith("matplotlib.pyplot"))
        elif isinstance(node, DEFS):
            yield from ((node.lineno, f"@{d} compiles at import") for d in decorators(node)
                        if d in ("torch.compile", "torch.jit.script", "torch.jit.trace"))
            if isinstance(node, ast.ClassDef):
                yield from import_time(node.body, classes)
            else:
                defaults = [*node.args.defaults, *[d for d in node.args.kw_defaults if d]]
                yield from ((node.lineno, f"a default of {node.name} is computed") for d in defaults if not is_constant(d, classes))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            if node.value is not None and not is_constant(node.value, classes):
                yield node.lineno, f"`{ast.unparse(node)[:60]}` computes something"
        elif isinstance(node, ast.Try):  # an optional import
            yield from import_time([*node.body, *node.orelse, *[s for h in node.handlers for s in h.body]], classes)
        elif isinstance(node, ast.If) and dotted(node.test).split(".")[-1] == "TYPE_CHECKING":
            yield from import_time(node.body, classes)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node.lineno, f"`{ast.unparse(node)[:60]}` runs at import"


@rule
def only_definitions(root):
    "Importing a module defines things and does nothing else: no CUDA, network, figure or compilation."
    out = []
    for path in modules(root):
        tree = ast.parse(path.read_text())
        classes = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        classes |= {t.id for n in tree.body if isinstance(n, ast.Assign) and dotted(n.value).endswith("namedtuple")
                    for t in n.targets if isinstance(t, ast.Name)}
        classes |= {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) and n.level for a in n.names
                    if a.name[:1].isupper()}
        out += [f"{rel(path, root)}:{line}: {what}" for line, what in import_time(tree.body, classes)]
    return out


@rule
def module_size(root):
    "At most 300 exported lines a module, blank lines and directives not counted."
    out = []
    for nb in library_notebooks(root):
        lines = [s for cell in cells_of(nb) if is_export(cell) for s in source(cell).splitlines()
                 if s.strip() and not s.lstrip().startswith("#|")]
        if len(lines) > MAX_MODULE:
            out.append(f"{rel(nb, root)}: exports {len(lines)} lines, limit {MAX_MODULE}")
    return out


def body_lines(node, lines):
    "The lines of a function's body, docstring and blank lines not counted."
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return sum(bool(s.strip()) for s in lines[body[0].lineno - 1:node.end_lineno]) if body else 0


@rule
def body_size(root):
    "At most 30 lines in a function's body (15 is the aim)."
    out = []
    for path in modules(root):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, FUNCS) and (n := body_lines(node, text.splitlines())) > MAX_BODY:
                out.append(f"{rel(path, root)}:{node.lineno}: {node.name} has {n} lines in its body, limit {MAX_BODY}")
    return out


# ---------------------------------------------------------------- documents

def public_functions(tree):
    "(function, name to report, class or None) of every public function, method and __init__; @patch methods too."
    for node in tree.body:
        if isinstance(node, FUNCS) and not node.name.startswith("_"):
            yield node, node.name, node if is_patch(node) else None
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for sub in node.body:
                if isinstance(sub, FUNCS) and (not sub.name.startswith("_") or sub.name == "__init__"):
                    yield sub, f"{node.name}.{sub.name}", node


def comments(text):
    "line -> text of its comment."
    return {t.start[0]: t.string.lstrip("# ").strip() for t in tokenize.generate_tokens(io.StringIO(text).readline)
            if t.type == tokenize.COMMENT}


def arguments(node, has_self):
    "(name, tree, default, is *args or **kwargs) of every argument but self or cls."
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    static = "staticmethod" in decorators(node)
    yield from ((arg.arg, arg, d, False) for arg, d in list(zip(plain, defaults))[int(has_self and not static):])
    yield from ((arg.arg, arg, d, False) for arg, d in zip(a.kwonlyargs, a.kw_defaults))
    yield from ((arg.arg, arg, None, True) for arg in (a.vararg, a.kwarg) if arg)


def undocumented(node, name, has_self, notes):
    "What a function's header lacks."
    args, seen = list(arguments(node, has_self)), {}
    for arg, tree, default, is_var in args:
        line = (default or tree).end_lineno
        if tree.annotation is None and default is None and not is_var:
            yield f"{name}: argument {arg} has neither annotation nor default"
        if not notes.get(line):
            yield f"{name}: argument {arg} has no comment behind it"
        elif line in seen:
            yield f"{name}: arguments {seen[line]} and {arg} share a line, so that one has no comment of its own"
        seen[line] = arg
    if node.name != "__init__":
        if node.returns is None:
            yield f"{name}: no return annotation"
        elif not (isinstance(node.returns, ast.Constant) and node.returns.value is None):
            line = node.returns.end_lineno
            if not notes.get(line) or line in seen:
                yield f"{name}: no comment behind the return annotation"


@rule
def documents(root):
    "Public functions, methods and dataclass fields say what each argument and the return are; all have a docstring."
    out = []
    for path in modules(root):
        text = path.read_text()
        tree, notes = ast.parse(text), comments(text)
        for node, name, owner in public_functions(tree):
            out += [f"{rel(path, root)}:{node.lineno}: {w}" for w in undocumented(node, name, owner is not None, notes)]
            if ast.get_docstring(node) is None and node.name != "__init__":
                out.append(f"{rel(path, root)}:{node.lineno}: {name} has no docstring")
        for node in (n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")):
            if ast.get_docstring(node) is None:
                out.append(f"{rel(path, root)}:{node.lineno}: {node.name} has no docstring")
            if any(d.split(".")[-1] == "dataclass" for d in decorators(node)):
                out += [f"{rel(path, root)}:{f.lineno}: {node.name}: field {f.target.id} has no comment behind it" for f in node.body
                        if isinstance(f, ast.AnnAssign) and not f.target.id.startswith("_") and not notes.get(f.end_lineno)]
    return out


# ---------------------------------------------------------------- checks beside exports

def exported_names(tree):
    "The names that a cell exports, each with the spellings under which a check may mention it."
    for node in tree.body:
        if isinstance(node, DEFS):
            names = {node.name}
            if is_patch(node) and (node.name == "forward" or node.name.startswith("__")):  # called by way of the object
                owner = node.args.args[0].annotation
                names |= {n.id for n in ast.walk(owner) if isinstance(n, ast.Name)} if owner else set()
            yield node.name, names
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((n.id, {n.id}) for n in ast.walk(target) if isinstance(n, ast.Name))


def asserts(tree):
    "Whether code asserts something: assert, test_eq and the like, ExceptionExpected, np.testing."
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = dotted(node)
            if re.match(r"(test|assert|check)_", name.split(".")[-1]) or name.split(".")[-1] in ("ExceptionExpected", "raises"):
                return True
    return False


def mentions(text, names):
    return any(re.search(rf"(?<!\w){re.escape(n)}(?!\w)", text) for n in names)


def not_run(export, cell):
    "Whether CI leaves a check out. What needs a GPU itself (Triton) may be checked on one."
    needs_gpu = re.search(r"triton|\.cuda\b|'cuda'|\"cuda\"", source(export))
    return bool(flags(cell) & ({"slow", "notest"} | (set() if needs_gpu else {"gpu"})))


@rule
def check_near_export(root):
    "Within the three cells after an export stands one that is not exported, that CI runs, and that asserts something about it."
    out = []
    for nb in library_notebooks(root):
        cells = cells_of(nb)
        for i, cell, tree in exported_cells(nb):
            near = [c for c in cells[i + 1:i + 1 + CHECK_WITHIN] if c["cell_type"] == "code" and not is_export(c) and not not_run(cell, c)]
            checks = [source(c) for c in near if asserts(parse(source(c)) or ast.Module([], []))]
            names = dict(exported_names(tree))
            missing = [n for n, spellings in names.items() if not any(mentions(text, spellings) for text in checks)]
            only_constants = not any(isinstance(n, DEFS) for n in tree.body)
            if only_constants and len(missing) < len(names):  # a table of constants: one of them is enough
                missing = []
            out += [f"{rel(nb, root)}: cell {i} (id {cell.get('id')}): no check of {n} within {CHECK_WITHIN} cells" for n in missing]
    return out


@rule
def one_export_a_cell(root):
    "An exported cell defines one function or class."
    out = []
    for nb in library_notebooks(root):
        for i, cell, tree in exported_cells(nb):
            names = [n.name for n in tree.body if isinstance(n, DEFS)]
            if len(names) > 1:
                out.append(f"{rel(nb, root)}: cell {i} exports {', '.join(names)}; give each a cell")
    return out


@rule
def imports_alone(root):
    """In a library notebook, imports stand in cells of their own.

    nbdev's docs run every cell that holds an import (and no other unexported cell), so code beside one would run there without what it needs."""
    out, harmless = [], (ast.Import, ast.ImportFrom, *DEFS)
    for nb in library_notebooks(root):
        for i, cell in enumerate(cells_of(nb)):
            tree = parse(source(cell)) if cell["cell_type"] == "code" else None
            if tree is None or not any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.walk(tree)):
                continue
            at_top = any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree.body)
            if any(not isinstance(n, harmless) for n in tree.body) or (is_export(cell) and at_top and any(isinstance(n, DEFS) for n in tree.body)):
                out.append(f"{rel(nb, root)}: cell {i} (id {cell.get('id')}) mixes imports with other code")
    return out


# ---------------------------------------------------------------- the whole repository

MACHINE = re.compile(r"(?<![\w./-])/(?:" + "|".join(["work", "root", "home", "Users"]) + r")/\w"
                     + "|/tmp" + r"/(?:bash|tools|plan|claude)" + "|/opt" + "/wheels")


def tracked_files(root):
    "What git tracks or would track; every file where there is no repository."
    if (root / ".git").exists():
        run = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True,
                             text=True, check=True)
        return [root / name for name in run.stdout.split("\0") if name and (root / name).is_file()]
    return sorted(p for p in root.rglob("*") if p.is_file())


@rule
def no_machine_paths(root):
    "No absolute path of one person's machine in any file."
    out = []
    for path in tracked_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or other binary file
        out += [f"{rel(path, root)}:{n}: {m[0]}" for n, line in enumerate(text.splitlines(), 1) if (m := MACHINE.search(line))]
    return out


@rule
def requirements_explained(root):
    "Every requirement in settings.ini is named, with its reason, in a comment there."
    text = (root / "settings.ini").read_text(encoding="utf-8")
    parser = configparser.ConfigParser(delimiters=["="], interpolation=None)
    parser.read_string(text)
    cfg = parser["DEFAULT"]
    reasons = [line for line in text.splitlines() if line.startswith("#")]
    out = []
    for key in ("requirements", "dev_requirements", "offline_metrics_requirements"):
        for name in (re.match(r"[\w.-]+", r)[0] for r in cfg.get(key, "").split()):
            found = [line for line in reasons if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", line)]
            if not any(len(line.split()) >= 4 for line in found):
                out.append(f"settings.ini: {key}: no comment gives the reason for {name}")
    return out


@rule
def made_files_in_sync(root):
    "README.md, nbs/sidebar.yml and nbs/nbdev.yml are what the notebooks and settings.ini make of them."
    import made_files

    return [f"{name}: out of step; run make made" for name in made_files.stale(root)]


@rule
def sidebar_complete(root):
    "Every notebook is in the sidebar, once, and the sidebar names no other."
    listed = re.findall(r"[\w/.-]+\.ipynb", (root / "nbs" / "sidebar.yml").read_text())
    have = {nb.relative_to(root / "nbs").as_posix() for nb in all_notebooks(root)}
    return ([f"nbs/sidebar.yml: {n} is missing" for n in sorted(have - set(listed))]
            + [f"nbs/sidebar.yml: {n} does not exist" for n in sorted(set(listed) - have)]
            + [f"nbs/sidebar.yml: {n} stands {listed.count(n)} times" for n in sorted(set(listed)) if listed.count(n) > 1])


def main(names):
    "Print the violations of the rules named (all of them without a name)."
    unknown = [n for n in names if n not in RULES]
    if unknown:
        sys.exit(f"unknown rule {unknown[0]}; the rules are: {', '.join(RULES)}")
    found = {name: RULES[name](ROOT) for name in names or RULES}
    for name, lines in found.items():
        print(f"{name}: {'ok' if not lines else f'{len(lines)} violation(s)'}")
        print("".join(f"    {line}\n" for line in lines), end="")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
