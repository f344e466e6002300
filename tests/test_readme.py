"""The README names only what exists, and its figures are those of the published runs."""

import re

import pytest
from conftest import ROOT, run, train

import gather_memory
import train as toolkit

README = (ROOT / "README.md").read_text()
WORDS = " ".join(README.split())  # whatever its line breaks
PUBLISHED = ROOT / "results" / "h200"


def summary_of(log):
    return gather_memory.merge_summaries(gather_memory.summaries_in(PUBLISHED / f"{log}.log"))


def test_every_option_that_the_readme_names_exists():
    helps = train("--help").stdout + run("./run_all.sh", "--help").stdout
    helps += run("python", "gather_memory.py", "--help").stdout
    known = set(re.findall(r"--[a-z_]+", helps))
    assert set(re.findall(r"(?<![\w-])--[a-z_]+", README)) <= known


def test_every_file_that_the_readme_names_exists():
    linked = re.findall(r"\]\(((?!http|#)[^)]+)\)", README)
    named = re.findall(r"\b(?:configs|results)/[\w./-]*\w", README)
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


@pytest.mark.parametrize("learning_rate", ["1e-4", "1e-5"])
@pytest.mark.parametrize("config", ["baseline", "bf16_full", "bf16_full_sr", "bf16_full_sr_8bit"])
def test_the_readmes_learning_table_is_that_of_the_published_runs(config, learning_rate):
    runs = [summary_of(f"parity_lr_{learning_rate}/{config}{seed}") for seed in ("", "_seed43")]
    cells = [", ".join(f"{run[key]:.4f}" for run in runs) for key in ("tail_loss", "eval_loss")]
    ratio = ", ".join(f"{run['update_ratio']:.3f}" for run in runs) if "update_ratio" in runs[0] else "n/a"
    assert f"| {learning_rate}, `{config}` | {cells[0]} | {cells[1]} | {ratio} |" in README


def test_stochastic_rounding_ended_within_0_02_of_the_baseline_and_rounding_to_nearest_did_not():
    for folder in ("parity_lr_1e-4", "parity_lr_1e-5"):
        for seed in ("", "_seed43"):
            names = ("baseline", "bf16_full", "bf16_full_sr")
            runs = {name: summary_of(f"{folder}/{name}{seed}") for name in names}
            for key in ("tail_loss", "eval_loss"):
                assert abs(runs["bf16_full_sr"][key] - runs["baseline"][key]) < 0.02
            assert runs["bf16_full"]["tail_loss"] > runs["baseline"]["tail_loss"] + 0.3


@pytest.mark.parametrize(
    ("log", "peak_gib", "bytes_per_parameter"),
    [
        ("254m/baseline", 5.1, 16.8),
        ("254m/bf16_full", 3.7, 10.8),
        ("254m/bf16_full_sr", 3.7, 10.7),
        ("254m/bf16_full_sr_8bit", 3.2, 8.4),
        ("254m_checkpointing/baseline", 4.2, 16.8),
        ("254m_checkpointing/bf16_full", 2.7, 10.8),
        ("6.86b_checkpointing/baseline", 103.5, 16.1),
        ("6.86b_checkpointing/bf16_full", 64.8, 10.1),
        ("6.86b_checkpointing/bf16_full_sr", 64.8, 10.1),
        ("6.86b_checkpointing/bf16_full_sr_8bit", 54.0, 8.1),
    ],
)
def test_the_published_runs_hold_little_beside_the_model_states(log, peak_gib, bytes_per_parameter):
    summary = summary_of(log)
    assert summary["peak_mem_bytes"] < peak_gib * 1024**3
    assert summary["alloc_mem_bytes"] < bytes_per_parameter * summary["params"]


def test_in_paired_steps_no_configuration_is_a_tenth_slower_than_another():
    medians_ms = re.findall(r"^configs/\w+.json: median ([\d.]+)", (PUBLISHED / "paired_steps.txt").read_text(), re.M)
    assert len(medians_ms) == 3 and max(map(float, medians_ms)) < min(80, 1.1 * min(map(float, medians_ms)))


@pytest.mark.parametrize("world_size", [8, 64])
def test_the_readmes_estimates_are_what_train_py_prints(world_size, monkeypatch, capsys):
    command = next(line for line in README.splitlines() if line.startswith("python train.py --estimate"))
    peaks, fewest = [], []
    for config in ("baseline", "bf16_full_sr", "bf16_full_sr_8bit"):
        options = command.replace("bf16_full_sr.json", f"{config}.json").split()[2:]
        options[options.index("--world_size") + 1] = str(world_size)
        monkeypatch.setattr("sys.argv", ["train.py", *options])
        toolkit.main()
        output = capsys.readouterr().out
        peaks.append(re.search(r"Peak with activation checkpointing: ([\d.]+ GB)", output)[1])
        fewest.append(re.search(r"fewest_gpus=(\d+)", output)[1])
    assert f"| fewest of 80 GiB | {' | '.join(fewest)} |" in README
    assert f"| {world_size} | {' | '.join(peaks)} |" in README


def test_the_figures_in_the_readmes_text_are_those_of_the_published_runs():
    paired = dict(
        re.findall(r"^configs/(\w+).json: median ([\d.]+)", (PUBLISHED / "paired_steps.txt").read_text(), re.M)
    )
    for name in ("baseline", "bf16_full", "bf16_full_sr"):
        assert f"{paired[name]} ms for `{name}`" in WORDS
    pairs = re.findall(r"difference of a pair (\S+) ms", (PUBLISHED / "tracking_cost.txt").read_text())
    for difference, name in zip(pairs, ("baseline", "bf16_full"), strict=True):
        assert f"{float(difference):.1f} ms for `{name}`".replace("-", "\N{MINUS SIGN}") in WORDS
    big = (PUBLISHED / "6.86b_checkpointing" / "summary.txt").read_text()
    for figure in ("103.38 GB", "64.69 GB", "53.41 GB", "37.4%", "48.3%"):
        assert figure in big and figure.split()[0] in WORDS
    small = (PUBLISHED / "254m" / "summary.txt").read_text()
    for figure in ("30.9%", "41.2%"):
        assert figure in small and figure in README.split("| Configuration |")[0]
    for log, host in (
        ("254m/bf16_master_wg", "5.3 GB"),
        ("254m/baseline_offload", "6.5 GB"),
        ("6.86b_checkpointing/baseline", "1.9 GB"),
        ("6.86b_checkpointing/bf16_full_sr", "7.2 GB"),
    ):
        assert f"{summary_of(log)['host_peak_bytes'] / 1024**3:.1f} GB" == host and host in WORDS
    times_s = {
        name: f"{summary_of(f'6.86b_checkpointing/{name}')['avg_step_time']:.2f}"
        for name in ("baseline", "bf16_full_sr", "bf16_full_sr_8bit", "bf16_full")
    }
    assert "steps took {}, {} and {} s, that of `bf16_full` {} s".format(*times_s.values()) in WORDS
    slow, fast = (
        f"{summary_of(f'largest_model/{name}_43')['avg_step_time']:.2f} s" for name in ("bf16_full_sr", "bf16_full")
    )
    assert f"a step took {slow} with stochastic rounding and {fast} without" in WORDS
    baseline_s = summary_of("254m/baseline")["avg_step_time"]
    for name, text in (
        ("baseline_offload", "{} times the step time of `baseline`"),
        ("bf16_master_wg", "{} times; loses"),
    ):
        assert text.format(f"{summary_of(f'254m/{name}')['avg_step_time'] / baseline_s:.1f}") in WORDS


def test_what_is_left_above_the_states_is_what_the_readme_says():
    """Bytes for each element of the largest tensor, the cuBLAS workspace left out."""
    for name, bytes_per_element in (("baseline", 6), ("bf16_full", 4), ("bf16_full_sr_8bit", 11)):
        summary = summary_of(f"6.86b_checkpointing/{name}")
        rest = summary["peak_mem_bytes"] - summary["model_state_bytes"] - toolkit.WORKSPACE_BYTES
        assert round(rest / (summary["hidden_dim"] * summary["vocab_size"])) == bytes_per_element
        assert f" {bytes_per_element} in `{name}`" in WORDS


def test_bf16_masters_save_no_gpu_memory_that_offload_does_not():
    for folder in ("254m", "254m_checkpointing"):
        wg, offload = summary_of(f"{folder}/bf16_master_wg"), summary_of(f"{folder}/baseline_offload")
        assert wg["peak_mem_bytes"] == offload["peak_mem_bytes"]
        saved = (offload["host_peak_bytes"] - wg["host_peak_bytes"]) / wg["params"]
        assert 4 < saved < 6  # bytes a parameter; the states differ by 4


@pytest.mark.parametrize("config", ["baseline", "bf16_full", "bf16_full_sr", "bf16_full_sr_8bit"])
def test_the_readmes_largest_models_are_those_of_the_published_searches(config):
    cells = []
    for folder in ("largest_model", "largest_model_expandable_segments"):
        search = (PUBLISHED / f"{folder}.txt").read_text()
        found = re.search(rf"configs/{config}.json: largest (\d+) layers, (\d+) expected", search)
        if not found:
            cells.append("not run")
            continue
        layers, expected = map(int, found.groups())
        parameters = summary_of(f"{folder}/{config}_{layers}")["params"]
        cells.append(f"{layers} blocks, {parameters / 1e9:.1f}B parameters")
        deeper = (PUBLISHED / folder / f"{config}_{layers + 1}.log").read_text()
        assert "reason=OOM" in deeper
    assert f"| `{config}` | {expected} blocks | {' | '.join(cells)} |" in README


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
