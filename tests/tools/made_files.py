"""The files that are made from others: README.md (nbs/index.ipynb), nbs/sidebar.yml (the notebooks), nbs/nbdev.yml (settings.ini).

    python tests/tools/made_files.py            write them
    python tests/tools/made_files.py --check    say which are out of step, exit status 1 if any
"""
import configparser
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GROUPS = [("Files and pictures", range(0, 9)), ("Operators and networks", range(9, 20)), ("Losses, memory, checkpoints", range(20, 30)),
          ("Training", range(30, 40)), ("Metrics, pictures and upscaling", range(40, 50)), ("Command line", range(50, 100))]


def settings(root):
    parser = configparser.ConfigParser(delimiters=["="])
    parser.read(root / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


# ---------------------------------------------------------------- README.md

def local_link(target):
    "Whether a link points into the repository."
    return not re.match(r"[a-z]+:|//|#|/", target)


def rebase(text):
    "Make links and pictures that are right from nbs/ right from the root."
    def fix(target):
        if not local_link(target):
            return target
        return target[3:] if target.startswith("../") else f"nbs/{target}"

    text = re.sub(r"(\]\()([^)\s]+)", lambda m: m[1] + fix(m[2]), text)
    return re.sub(r'(\b(?:src|href)=")([^"]+)', lambda m: m[1] + fix(m[2]), text)


def cell_text(cell):
    "A cell as Markdown; None for one that is hidden."
    source = "".join(cell["source"])
    lines = source.splitlines()
    if cell["cell_type"] == "markdown":
        return "\n".join(rebase(line) for line in lines)
    if re.search(r"^#\|\s*(hide|include:\s*false)", source, re.M):
        return None
    code = "\n".join(line for line in lines if not line.startswith("#|"))
    parts = [f"```python\n{code.strip()}\n```"]
    for out in cell.get("outputs", []):
        data = out.get("data", {})
        if any(kind.startswith("image/") for kind in data):
            raise SystemExit("nbs/index.ipynb: an output is a picture. Next: save it under nbs/images/ and link it from a markdown cell")
        text = "".join(out.get("text", "") or data.get("text/plain", ""))
        parts.append(f"```\n{text.rstrip()}\n```" if text else "")
    return "\n\n".join(p for p in parts if p)


def readme(root):
    "README.md's text: nbs/index.ipynb, cell by cell."
    cells = json.loads((root / "nbs" / "index.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = [cell_text(c) for c in cells if c["cell_type"] in ("markdown", "code")]
    return "<!-- Made from nbs/index.ipynb by `make made`: edit that. -->\n\n" + "\n\n".join(t for t in texts if t) + "\n"


# ---------------------------------------------------------------- the site's sidebar and title

def sidebar(root):
    "nbs/sidebar.yml's text: the start page, the lessons, the how-tos, and the library by group."
    nbs = root / "nbs"
    lines = ["# Made from the notebooks by `make made`.", "website:", "  sidebar:", "    contents:",
             "      - section: Start", "        contents:", "          - index.ipynb"]

    def section(title, files):
        if files:
            lines.extend([f"      - section: {title}", "        contents:"])
            lines.extend(f"          - {f.relative_to(nbs).as_posix()}" for f in files)

    section("Lessons", sorted((nbs / "lessons").glob("*.ipynb")))
    section("How to", sorted((nbs / "how_to").glob("*.ipynb")))
    library = sorted(nbs.glob("[0-9][0-9]_*.ipynb"))
    for title, numbers in GROUPS:
        section(f'"Library: {title}"', [nb for nb in library if int(nb.name[:2]) in numbers])
    return "\n".join(lines) + "\n"


def nbdev_yml(root):
    "nbs/nbdev.yml's text, the same that nbdev's own docs commands write."
    s = settings(root)
    return (f"project:\n  output-dir: {s['doc_path']}\n\nwebsite:\n  title: \"{s['title']}\"\n"
            f"  site-url: \"{s['doc_host']}{s['doc_baseurl']}\"\n  description: \"{s['description']}\"\n"
            f"  repo-branch: {s['branch']}\n  repo-url: \"{s['git_url']}\"\n")


MADE = {"README.md": readme, "nbs/sidebar.yml": sidebar, "nbs/nbdev.yml": nbdev_yml}


def stale(root):
    "The made files that differ from what they are made from."
    return [name for name, make in MADE.items() if not (root / name).exists() or (root / name).read_text(encoding="utf-8") != make(root)]


def main(args):
    "Write the files, or with --check only say which are out of step."
    names = stale(ROOT)
    for name in names:
        print(f"{name}: {'out of step' if args == ['--check'] else 'written'}")
        if args != ["--check"]:
            (ROOT / name).write_text(MADE[name](ROOT), encoding="utf-8")
    return 1 if names and args == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
