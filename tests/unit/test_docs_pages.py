"""What the site's hook makes of tables, for docs/stylesheets/tables.css: on a phone rows of prose become blocks."""

from __future__ import annotations

import importlib.util
import re

import markdown

from tests.fork_server import REPOSITORY


def built(text: str) -> str:
    spec = importlib.util.spec_from_file_location("docs_pages", REPOSITORY / "tools" / "docs_pages.py")
    assert spec
    assert spec.loader
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return str(hook.on_page_content(markdown.markdown(text, extensions=["tables"])))


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
