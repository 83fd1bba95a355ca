"""The site's hook changes tables (on a phone, rows of prose become blocks), sources and errors. Links are checked."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import markdown

import photinus
from tests.fork_server import REPOSITORY


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(text: str) -> str:
    return str(tool("docs_pages").on_page_content(markdown.markdown(text, extensions=["tables"])))


def test_each_cell_of_a_table_of_prose_knows_the_name_of_its_column() -> None:
    html = built(f'| "old" | new |\n|---|---|\n| a | {"word " * 10}|\n| b | |\n')
    assert html.startswith("<table data-prose>")
    assert re.findall(r'<td data-label="([^"]*)"', html) == ["&quot;old&quot;", "new"] * 2
    assert '<td data-label="new"></td>' in html  # the style sheet hides it


def test_a_table_of_numbers_keeps_its_rows() -> None:
    assert built("| size | time |\n|---|---:|\n| 4 KiB | 1.5 |\n").startswith("<table>")


def test_a_path_breaks_at_a_slash_and_a_call_at_its_bracket_only_in_tables() -> None:
    html = built("`a/bcd`\n\n| one | two |\n|---|---|\n| `tests/unit/test_x.py` | `torch.save(model)` |\n")
    assert "<code>a/bcd</code>" in html
    assert "<code>tests/<wbr>unit/<wbr>test_x.py</code>" in html
    assert "<code>torch.<wbr>save(<wbr>model)</code>" in html


def test_text_beside_tables_and_what_a_table_says_stay() -> None:
    text = "before\n\n| a | b |\n|---|---|\n| `x<y` & z | [link](a/bcd.md) |\n\nafter\n"
    plain = re.sub(r'<wbr>| data-(label="[^"]*"|prose)', "", built(text))
    assert plain == markdown.markdown(text, extensions=["tables"])


def test_a_linked_file_gets_a_page_with_its_text_and_a_folder_one_with_all_its_files(tmp_path: Path) -> None:
    hook, folder = tool("docs_pages"), tmp_path / "examples"
    folder.mkdir()
    (folder / "a.py").write_text("print(1)\n")
    (folder / "b.txt").write_text("two")
    assert hook.source_page(folder / "a.py", tmp_path) == "# examples/a.py\n\n````python\nprint(1)\n````\n"
    whole = "# examples\n\n## a.py\n\n````python\nprint(1)\n````\n\n## b.txt\n\n````text\ntwo\n````\n"
    assert hook.source_page(folder, tmp_path) == whole
    text = "[a](../examples/a.py) [all](../examples) [page](other.md#x) [web](https://a.org) [absent](absent.md)"
    assert hook.targets(text, tmp_path / "docs", tmp_path) == [folder / "a.py", folder]
    assert hook.linked("[a](../examples/a.py) [all](../examples)", tmp_path / "docs" / "x.md", "", tmp_path) == (
        "[a](examples/a.py.md) [all](examples.md)"
    )


def test_each_error_has_a_section_with_a_link_to_what_to_do() -> None:
    text = tool("docs_pages").error_list()
    assert max(map(len, text.split("```")[1].splitlines())) <= 40  # the tree fits a phone
    for name in photinus.errors.__all__:
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert re.search(r"What to do: \[.+\]\(\.\./troubleshooting\.md", section), name
    lost = text.partition("## PeerLostError")[2].partition("## ")[0]
    assert "[CollectiveError](#collectiveerror)" in lost
    assert "(../troubleshooting.md#a-rank-died-peerlosterror)" in lost


def test_dead_links_and_anchors_of_the_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a b.html").write_text('<h2 id="here">x</h2><a href="sub/">s</a><a href="#here">h</a>')
    links = ("../a%20b.html#here", "../a%20b.html#gone", "gone.html", "https://a.org/gone", "#", "?q=1")
    (tmp_path / "sub" / "index.html").write_text("".join(f'<a href="{link}">x</a>' for link in links))
    assert tool("docs_links").dead_links(tmp_path) == [
        "sub/index.html links to ../a%20b.html#gone, which does not exist",
        "sub/index.html links to gone.html, which does not exist",
    ]
