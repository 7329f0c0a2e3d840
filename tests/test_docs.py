"""The docs site builds, every link in it leads somewhere, and it holds the documentation of the functions."""
import re
from pathlib import Path

import docs_site
import house_rules
import pytest
from conftest import ROOT


def test_every_notebook_has_a_page(docs_folder):
    names = {docs_site.page_name(nb.relative_to(ROOT / "nbs")) + ".html" for nb in house_rules.all_notebooks(ROOT)}
    pages = {p.relative_to(docs_folder).as_posix() for p in docs_folder.rglob("*.html")}
    assert names <= pages


def test_links_resolve(docs_folder):
    assert docs_site.broken_links(docs_folder, docs_site.site_address(ROOT)) == []


def test_pictures_are_described(docs_folder):
    assert docs_site.pictures_without_alt(docs_folder) == []


def test_page_holds_api_docs(docs_folder):
    "A page holds the signatures of the functions, with the comment of each argument, and no directives."
    page = (docs_folder / "core.html").read_text()
    assert "check_choice" in docs_site.Page(page).anchors
    assert "the names allowed" in page and "Errors that say what to do" in page
    assert "#| export" not in page


def test_formulas_are_drawn_without_a_script(docs_folder):
    pages = [p.read_text() for p in docs_folder.rglob("*.html")]
    assert not any(re.search(r'class="math \w+">\\[(\[]', page) for page in pages)
    assert sum(page.count("<math") for page in pages) > 100


def test_an_unknown_formula_is_an_error(tmp_path):
    (tmp_path / "a.html").write_text(r'<span class="math inline">\(x &lt; \nosuchcommand y\)</span>')
    with pytest.raises(RuntimeError, match="nosuchcommand"): docs_site.draw_math(tmp_path)


def test_checker_finds_broken_links(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="here">A</h1><a href="#here">1</a><a href="#gone">2</a><a href="b.html#x">3</a>'
                                     '<a href="b.html#y">4</a><img src="no.png"><a href="https://other.site/x">5</a>'
                                     '<a href="https://my.site/doc/b.html">6</a><a href="https://my.site/doc/c.html">7</a>')
    (tmp_path / "b.html").write_text('<p id="x">B</p><a href="sub/">down</a>')
    found = docs_site.broken_links(tmp_path, "https://my.site/doc")
    assert [line.split(": ")[1] for line in found] == ["#gone", "b.html#y", "no.png", "https://my.site/doc/c.html", "sub/"]


def test_checker_finds_pictures_without_alt(tmp_path):
    (tmp_path / "a.html").write_text('<img src="x.png"><img src="y.png" alt="a face">')
    assert docs_site.pictures_without_alt(tmp_path) == ["a.html: x.png"]


def test_name_links_fall_back_to_what_the_page_has(tmp_path):
    (tmp_path / "a.html").write_text('<h3 id="box">Box</h3>')
    (tmp_path / "b.html").write_text('<a href="a.html#box.open"></a><a href="a.html#_private"></a><a href="a.html#box"></a><a href="a.html#hand"></a>')
    docs_site.fix_name_links(tmp_path, {"a.html#box.open", "a.html#_private", "a.html#box"})
    assert docs_site.Page((tmp_path / "b.html").read_text()).links == ["a.html#box", "a.html", "a.html#box", "a.html#hand"]

def test_links_between_notebooks_get_the_names_of_pages():
    names = {"01_images.ipynb": "images", "lessons/L01_gan.ipynb": "lessons/l01_gan"}
    text = "[a](01_images.ipynb) [b](lessons/L01_gan.ipynb) [c](../01_images.ipynb#x) [d](https://host/nbs/01_images.ipynb) [e](other_01_images.ipynb)"
    assert docs_site.relink(text, Path("index.ipynb"), names, "https://site") == \
        "[a](images.ipynb) [b](lessons/l01_gan.ipynb) [c](../images.ipynb#x) [d](https://host/nbs/01_images.ipynb) [e](other_01_images.ipynb)"
