"""CSV files: a spreadsheet computes no cell."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from fgpuspawner import service
from fgpuspawner.service.csv_file import csv_text, plain

SERVICE = Path(service.__file__).parent


@pytest.mark.parametrize("lead", ["", " ", "\t", "\r", "\n", "\u00a0", " \t"])
@pytest.mark.parametrize("formula", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\uff1d1"])
def test_formula_cells_become_text(lead: str, formula: str) -> None:
    text = csv_text(["a", "b", "c"], [[lead + formula, 1.5, None]])
    (_, line) = list(csv.reader(io.StringIO(text, newline="")))
    assert line[0].replace("'", "") == f"{lead}{formula}".replace("'", "")
    assert line[0].startswith("'")
    assert line[1:] == ["1.5", ""]


@pytest.mark.parametrize("separator", [";", "\t", "\n", "; ", ";\t"])
@pytest.mark.parametrize("formula", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\uff1d1"])
def test_formulas_after_other_separators_become_text(separator: str, formula: str) -> None:
    text = csv_text(["a", "b"], [[f"ended{separator}{formula}", 5]])
    cells = re.split(r"[;\t\n]", text.replace(",", ";"))
    assert not [cell for cell in cells if cell.strip(' "').startswith(("=", "+", "-", "@", "\uff1d"))], text


@pytest.mark.parametrize("plain", ["alice", "0.5 fGPU", "a=1", "", "a; b=1", "1;2"])
def test_plain_cells_stay_unchanged(plain: str) -> None:
    assert list(csv.reader(io.StringIO(csv_text(["a", "b"], [[plain, "x"]]))))[1] == [plain, "x"]


@pytest.mark.parametrize(
    "cell", ["alice", "=1", "'=1", "''", " +1", "\t@a", "a;=1", "a\n-1", "o'neil", "\uff1d1", ""]
)
def test_written_cells_are_read_back(cell: str) -> None:
    written = list(csv.reader(io.StringIO(csv_text(["a"], [[cell]]), newline="")))[1]
    assert plain(written[0] if written else "") == cell


def test_every_csv_file_uses_this_module() -> None:
    sources = {path.relative_to(SERVICE).as_posix(): path.read_text() for path in SERVICE.rglob("*.py")}
    assert [name for name, text in sources.items() if re.search(r"^(import|from) csv\b", text, re.M)] == [
        "csv_file.py"
    ]
    sends = {name for name, text in sources.items() if '"Content-Type", "text/csv' in text}
    assert sends == {"handler.py"}
    # Of each address that ends so.
    offered = re.findall(r'csv", (\w+)\.(\w+File)\)', sources["app.py"])
    assert len(offered) == sources["app.py"].count('csv",') == 5
