"""The README names only what exists, and its figures are those of the published runs."""

import re

import pytest
from conftest import ROOT, run, train

README = (ROOT / "README.md").read_text()


def test_every_option_that_the_readme_names_exists():
    helps = train("--help").stdout + run("./run_all.sh", "--help").stdout
    helps += run("python", "gather_memory.py", "--help").stdout
    known = set(re.findall(r"--[a-z_]+", helps)) | {"--num_gpus"}
    assert set(re.findall(r"(?<![\w-])--[a-z_]+", README)) <= known


def test_every_file_that_the_readme_names_exists():
    linked = re.findall(r"\]\(((?!http|#)[^)]+)\)", README)
    named = re.findall(r"\b(?:configs|results)/[\w./]*\w", README)
    assert linked and named
    for path in linked + named:
        assert (ROOT / path).exists(), path


def test_the_readmes_table_is_the_one_of_the_published_run():
    summary = (ROOT / "results/h200/254m/summary.txt").read_text()
    table = re.search(r"^\| Configuration \|.*?(?=\n\n)", summary, re.M | re.S)[0]
    assert table in README


def test_the_readmes_sample_is_the_one_of_the_published_cpu_run():
    summary = (ROOT / "results/cpu/55m/summary.txt").read_text()
    assert f"```text\n{summary.split(chr(10) * 2 + 'Markdown:')[0]}\n```" in README
    assert " 0.792 " in summary and "0.792 for the BF16 rows" in README


@pytest.mark.parametrize("size", ["0.25b", "1.01b", "3.09b", "6.86b"])
def test_the_readmes_growth_table_is_that_of_the_published_runs(size):
    rows = [line for line in (ROOT / "results/h200/growth/summary.txt").read_text().splitlines() if line[:1] == "|"]
    cells = {
        config: next(r for r in rows if f"{size}_{config}.log" in r).split(" | ")
        for config in ("baseline", "bf16_full")
    }
    (baseline, full) = cells.values()
    expected = f"| {size.upper()} | {baseline[1]}, {baseline[6]} | {full[1]}, {full[6]} | {full[2]} |"
    assert expected in README


def test_the_test_command_is_the_one_that_ci_runs():
    commands = [line for line in README.splitlines() if line.endswith("pytest")]
    assert len(commands) == 1 and "pytest$' README.md" in (ROOT / ".ci/run").read_text()
