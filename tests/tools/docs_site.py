"""Build the docs site into _docs/ with smalldocs, and check every internal link and picture.

nbdev processes the notebooks (signatures and argument tables appear, hidden cells go); smalldocs renders what it leaves in _proc/.
Publishing uses Quarto on the same files (.github/workflows/docs.yml). Between the two, this script does what smalldocs does not:
formulas become MathML (smalldocs and Quarto leave them to a script from the web), pages get the file name that nbdev asks for (00_core.ipynb becomes core.html), and links to the published address become local ones.
"""
import html
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import made_files
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    "What a page links to, which anchors it has, and which pictures lack a description."

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.no_alt = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[k] for k in ("id", "name") if attrs.get(k)}
        self.links += [attrs[k] for k in ("href", "src") if attrs.get(k) is not None]
        if tag == "img" and not (attrs.get("alt") or "").strip():
            self.no_alt.append((attrs.get("src") or "")[:60])


def process(root):
    "Let nbdev fill _proc/; without Quarto, and without the cache, which misses changes of modules."
    code = ("from nbdev.config import get_config; get_config(); import nbdev.serve; nbdev.serve.proc_nbs(n_workers=2, force=True)")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    env.pop("IN_TEST", None)
    run = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True)
    if run.returncode:
        reason = run.stderr[run.stderr.rfind("\nException: ") + 1:] if "\nException: " in run.stderr else run.stderr[-3000:]
        raise RuntimeError(f"nbdev cannot process the notebooks (it runs the cells that hold exports or imports).\n{reason}")


def page_name(nb):
    "The page that nbdev and Quarto make of a notebook: 00_core.ipynb -> core, lessons/L01_x.ipynb -> lessons/l01_x."
    return nb.with_name(re.sub(r"^\d+[a-zA-Z0-9]*_", "", nb.name.lower()).removesuffix(".ipynb")).as_posix()


def relink(text, nb, names, site_url):
    "Point links at the renamed notebooks, and links to the published site at the local one."
    up = "../" * (len(nb.parts) - 1)
    text = text.replace(site_url + "/", up)
    for old, new in names.items():
        folders = r"(?<![\w./:-])((?:\.\.?/|[\w-]+/)*)"  # a local path up to the name; not the middle of a web address
        text = re.sub(folders + re.escape(Path(old).name), rf"\g<1>{Path(new).name}.ipynb", text)
    return text


def stage(root, folder):
    "Copy _proc/ to `folder` under the pages' final names."
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(root / "_proc", folder, ignore=shutil.ignore_patterns("_docs"))
    shutil.copy(root / "_quarto.yml", folder.parent)
    s = made_files.settings(root)
    notebooks = [p.relative_to(folder) for p in sorted(folder.rglob("*.ipynb"))]
    names = {nb.as_posix(): page_name(nb) for nb in notebooks}
    for nb in notebooks:
        data = json.loads((folder / nb).read_text(encoding="utf-8"))
        for cell in data["cells"]:
            if cell["cell_type"] == "raw":  # front matter: the name has done its work
                cell["source"] = re.sub(r"^output-file:.*\n", "", "".join(cell["source"]), flags=re.M)
            if cell["cell_type"] == "markdown":
                cell["source"] = relink("".join(cell["source"]), nb, names, s["doc_host"] + s["doc_baseurl"])
            for out in cell.get("outputs", []):
                if "text/markdown" in out.get("data", {}):
                    text = "".join(out["data"]["text/markdown"])
                    out["data"]["text/markdown"] = relink(text, nb, names, s["doc_host"] + s["doc_baseurl"])
        (folder / nb).unlink()
        (folder / (names[nb.as_posix()] + ".ipynb")).write_text(json.dumps(data), encoding="utf-8")
    bar = (folder / "sidebar.yml").read_text(encoding="utf-8")
    (folder / "sidebar.yml").write_text(re.sub(r"[\w/.-]+\.ipynb", lambda m: names.get(m[0], m[0]) + ("" if m[0] not in names else ".ipynb"), bar))


def nearest_anchor(link, anchors):
    "A link to a name that has no heading of its own (private, or a method): its class's heading, or the top of the page."
    page, _, name = link.partition("#")
    if not name or name in anchors:
        return link
    owner = name.split(".")[0]
    return f"{page}#{owner}" if owner in anchors else page


def fix_name_links(site, generated):
    "nbdev links every name in backticks, also one that its pages have no heading for. Only those links are touched; the rest are checked."
    anchors = {p.name: Page(p.read_text(encoding="utf-8")).anchors for p in site.rglob("*.html")}
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        new = re.sub(r'href="([^"]*?([\w-]+\.html)#[^"]+)"',
                     lambda m: f'href="{nearest_anchor(m[1], anchors.get(m[2], ()))}"' if m[1].removeprefix("../") in generated else m[0], text)
        path.write_text(new, encoding="utf-8")


def mathml(match):
    "One formula as MathML, which browsers draw without a script."
    kind, tex = match[1], html.unescape(match[2])
    out = convert(tex, display="block" if kind == "display" else "inline")
    if unknown := re.findall(r"\\[a-zA-Z]+", re.sub(r"<annotation.*?</annotation>", "", out, flags=re.S)):
        raise RuntimeError(f"the docs site cannot draw {', '.join(unknown)} in: {tex}\nNext: write the formula with plainer commands")
    return f'<span class="math {kind}">{out}</span>'


def draw_math(site):
    "Formulas are drawn by the page itself, so that the site is whole without a network."
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', mathml, text, flags=re.S), encoding="utf-8")


def name_links(root):
    "The links that nbdev has made of names in backticks, as page.html#name."
    s = made_files.settings(root)
    texts = (p.read_text(encoding="utf-8") for p in (root / "_proc").rglob("*.ipynb"))
    return {m for text in texts for m in re.findall(re.escape(s["doc_host"] + s["doc_baseurl"]) + r"/([\w/.-]+\.html#[\w.]+)", text)}


def build(root=ROOT):
    "Build the site; return its folder."
    site = root / "build" / "docs" / "site"
    process(root)
    stage(root, site)
    run = subprocess.run([sys.executable, "-m", "smalldocs.cli", "render", str(site)], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"smalldocs fails:\n{run.stderr[-3000:]}")
    out = root / made_files.settings(root)["doc_path"]
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(site / out.name, out)
    fix_name_links(out, name_links(root))
    draw_math(out)
    return out


def target_of(link, page, site, site_url):
    "(file, anchor) that a link leads to inside the site; None for a link that leads out of it."
    if link.startswith(site_url):
        link = "/" + link[len(site_url):].lstrip("/")
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    path = unquote(parts.path)
    base = site if path.startswith("/") else page.parent
    file = (base / path.lstrip("/")) if path else page
    return (file / "index.html" if file.is_dir() else file), unquote(parts.fragment)


def broken_links(site, site_url="https://example.invalid/"):
    "One line for each link, picture, style sheet or script that leads nowhere inside the site."
    pages = {p.resolve(): Page(p.read_text(encoding="utf-8")) for p in sorted(site.rglob("*.html"))}
    out = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            target = target_of(link, path, site.resolve(), site_url)
            if target is None:
                continue
            file, anchor = target[0].resolve(), target[1]
            where = f"{path.relative_to(site.resolve())}: {link}"
            if not file.is_file():
                out.append(f"{where}: no such file")
            elif anchor and file in pages and anchor not in pages[file].anchors and anchor != "top":
                out.append(f"{where}: no such anchor")
    return out


def pictures_without_alt(site):
    "One line for each picture that has no description (alt text)."
    return [f"{p.relative_to(site)}: {src}" for p in sorted(site.rglob("*.html"))
            for src in Page(p.read_text(encoding="utf-8")).no_alt]


def site_address(root=ROOT):
    s = made_files.settings(root)
    return s["doc_host"] + s["doc_baseurl"]


def main():
    "Build, check, and say where the site is."
    try:
        site = build()
    except RuntimeError as e:
        sys.exit(str(e))
    broken = broken_links(site, site_address())
    print("".join(f"broken: {line}\n" for line in broken), end="")
    print(f"{len(list(site.rglob('*.html')))} pages in {site.relative_to(ROOT)}/, {len(broken)} broken link(s)")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
