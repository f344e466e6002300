"""gather_memory.py: what it makes of lines, of logs as launchers leave them, and of folders."""

import ast
import os
import subprocess
import sys

import pytest
from conftest import ROOT, run
from hypothesis import given
from hypothesis import strategies as st

import gather_memory
from gather_memory import format_bytes, format_bytes_mb, get_config_name, parse_summary_line

BASELINE = (
    "SUMMARY: config=configs/baseline.json params=254128976 peak_mem_bytes=6269259264 "
    "alloc_mem_bytes=4441586688 avg_step_time=0.1637"
)
FULL = (
    "SUMMARY: config=configs/bf16_full.json params=254128976 peak_mem_bytes=3035000000 "
    "alloc_mem_bytes=2630000000 avg_step_time=0.0720"
)


def gather(log_dir, monkeypatch, capsys, *options):
    """main() in this process: (return code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["gather_memory.py", "--log_dir", str(log_dir), *map(str, options)])
    code = gather_memory.main()
    output = capsys.readouterr()
    return code, output.out, output.err


def write_logs(folder, **logs):
    for name, content in logs.items():
        (folder / f"{name}.log").write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def row(report, name):
    """The text table's row of the configuration `name`, its cells joined by one space."""
    lines = [line for line in report.splitlines() if line.startswith(get_config_name(name))]
    return " ".join(lines[0].split())


def test_a_run_that_failed_after_its_summary_is_a_failure_and_an_earlier_failure_is_not(tmp_path):
    failure = "FAILED: config=x%20y reason=OOM step=3 phase=forward asked=2.00_GiB\n"
    write_logs(tmp_path, baseline=f"{failure}{BASELINE}\n", bf16_full=f"{FULL}\n{failure}", third="nothing\n")
    results = gather_memory.read_logs(tmp_path)
    assert results["baseline.log"]["params"] == 254128976
    assert results["bf16_full.log"]["failed"] == "OOM" and "step=3" in results["bf16_full.log"]["details"]
    assert results["third.log"]["failed"] == "FAILED"
    report = gather_memory.build_report(results, tmp_path)
    assert row(report, "third") == "third FAILED" + " -" * 4
    assert "OOM: bf16_full.log has no whole SUMMARY line; it ran out of memory (step=3" in report


# Pictures


def test_plot_draws_memory_and_losses(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE + "\nHeld-out text after step 1: eval_loss=2.5\n", bf16_full=FULL, broken="")
    assert gather(tmp_path, monkeypatch, capsys, "--plot")[0] == 0
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG" and not (tmp_path / "loss.png").exists()
    (tmp_path / "baseline_loss.csv").write_bytes(b"step,loss\n0,3.5\n1,3.25\n1,\xff1e\n1,3.2.5\n1,nan\n2,3.0\n3,2")
    curves = gather_memory.read_curves(tmp_path, {"baseline.log": {}, "bf16_full.log": {}})
    assert curves == {"baseline.log": ([3.5, 3.25, 3.0, 2.0], [(1, 2.5)])}
    code, _, errors = gather(tmp_path, monkeypatch, capsys, "--plot")
    assert code == 0 and errors == "Written: " + ", ".join(
        str(tmp_path / name) for name in ("summary.txt", "memory.png", "loss.png\n")
    )
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_only_the_plot_is_refused(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE)
    monkeypatch.setattr(gather_memory.importlib.util, "find_spec", lambda name: None)
    assert gather(tmp_path, monkeypatch, capsys)[0] == 0
    code, _, error = gather(tmp_path, monkeypatch, capsys, "--plot")
    assert code == 1 and error.count("\n") == 1 and "pip install matplotlib" in error


# The line


def test_the_documented_line_gives_exactly_its_five_keys():
    line = (
        "SUMMARY: config=baseline params=110000000 peak_mem_bytes=4294967296 alloc_mem_bytes=2147483648 "
        "avg_step_time=0.5432"
    )
    assert parse_summary_line(line) == {
        "config": "baseline",
        "params": 110000000,
        "peak_mem_bytes": 4294967296,
        "alloc_mem_bytes": 2147483648,
        "avg_step_time": 0.5432,
    }


def test_further_fields_are_kept_with_their_types():
    summary = parse_summary_line(BASELINE + " world_size=2 tokens_per_second=10.5 memory=device_allocator\n")
    assert (summary["world_size"], summary["tokens_per_second"], summary["memory"]) == (2, 10.5, "device_allocator")


def test_what_launchers_put_around_the_line_does_not_matter():
    line = f"worker-2: 50%|##### | \x1b[32m{FULL.replace('0.0720', '7.2e-02')}\x1b[0m  100%|####| 20/20\r\n"
    assert parse_summary_line(line)["avg_step_time"] == pytest.approx(0.072)


def test_a_config_path_with_spaces_survives():
    assert parse_summary_line(BASELINE.replace("configs/", "my%20configs/"))["config"] == "my configs/baseline.json"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Step 0: loss=10.99",
        "SUMMARY:",
        BASELINE.rsplit(" ", 1)[0],
        BASELINE[: BASELINE.index(" alloc")] + "00",
        BASELINE.replace("=0.1637", "="),
        BASELINE.replace("0.1637", "0."),
        BASELINE + " world_size=abc",
        BASELINE + " world_size=0",
        BASELINE.replace("0.1637", "nan"),
        BASELINE.replace("0.1637", "inf"),
        BASELINE.replace("0.1637", "1e999"),
        BASELINE.replace("0.1637", "-0.1"),
        BASELINE.replace("254128976", "0"),
        BASELINE.replace("254128976", "-5"),
        BASELINE.replace("6269259264", "6.2e9"),
        BASELINE.replace("6269259264", "9" * 5000),
        BASELINE.replace("params=", "config=x params="),
    ],
)
def test_what_is_not_a_whole_sane_summary_is_none(line):
    assert parse_summary_line(line) is None


@given(st.text())
def test_no_line_crashes_the_parser(text):
    parse_summary_line(text)
    parse_summary_line("SUMMARY: " + text)
    parse_summary_line(BASELINE + text)


@given(st.dictionaries(st.sampled_from(["config", *gather_memory.INTEGER_KEYS, "avg_step_time"]), st.text(min_size=1)))
def test_no_value_crashes_the_parser(fields):
    summary = parse_summary_line("SUMMARY: " + " ".join(f"{key}={value}" for key, value in fields.items()))
    assert summary is None or all(summary[key] >= 0 for key in gather_memory.INTEGER_KEYS)


# Names and units


def test_units_are_powers_of_1024():
    assert format_bytes(4294967296) == "4.00 GB"
    assert format_bytes_mb(4294967296) == "4096.0 MB"


def test_known_configurations_have_a_descriptive_name_and_others_their_stem():
    assert "FP32 master" in get_config_name("configs/baseline.json") == get_config_name("baseline")
    assert get_config_name("/a b/my_config.json") == "my_config"
    assert get_config_name("C:\\configs\\other.json") == "other"
    names = {get_config_name(path.name) for path in (ROOT / "configs").glob("*.json")}
    assert len(names) == len(list((ROOT / "configs").glob("*.json")))


# Logs


def test_a_comparison_shows_both_reductions_and_the_step_time(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, bf16_full=FULL + "\n", baseline=BASELINE + "\n", another=FULL.replace("bf16_full", "another"))
    code, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert code == 0
    assert row(report, "baseline").endswith("5.84 GB (baseline) 4.14 GB (baseline) 0.1637 s")
    assert row(report, "bf16_full").endswith("2.83 GB 51.6% 2.45 GB 40.8% 0.0720 s")
    assert f"| {get_config_name('bf16_full')} | 2.83 GB | 51.6% | 2.45 GB | 40.8% | 0.0720 s |" in report
    assert "5.84 GB = 5978.8 MB = 6269259264 bytes" in report
    order = [report.index(f"Log:                 {name}.log") for name in ("baseline", "bf16_full", "another")]
    assert order == sorted(order)
    assert (tmp_path / "summary.txt").read_text() == report


def test_more_memory_than_the_baseline_is_said_in_a_word(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=FULL, bf16_full=BASELINE)
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert "-106.6% (MORE than baseline)" in report


def test_messy_logs_are_read(tmp_path, monkeypatch, capsys):
    bar = b"  0%|          | 0/20 [00:00<?, ?it/s]\r 50%|#####     | 10/20 [00:01<00:01]\r"
    write_logs(
        tmp_path,
        baseline=b"[2026-01-05] [INFO] [launch.py] nnodes=1\r\n" + bar + BASELINE.encode() + b"\r\n",
        bf16_full=b"worker-2: caf\xe9 \xff\xfe not utf-8\nworker-2: \x1b[32m" + FULL.encode() + b"\x1b[0m\n",
    )
    code, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert code == 0
    assert "51.6%" in row(report, "bf16_full")


def test_a_log_cut_off_by_a_crash_is_shown_as_failed(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE, bf16_full="Step 0: loss=10.99\n" + FULL[:90])
    code, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert code == 0
    assert "FAILED" in row(report, "bf16_full")
    assert "bf16_full.log has no whole SUMMARY line" in report


def test_without_a_baseline_reductions_are_not_made_up(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, bf16_full=FULL)
    code, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert code == 0
    assert row(report, "bf16_full").endswith("2.83 GB n/a 2.45 GB n/a 0.0720 s")
    assert "There is no baseline" in report


def test_plain_lines_of_several_ranks_are_merged_to_highest_memory_and_slowest_time(tmp_path, monkeypatch, capsys):
    other_rank = BASELINE.replace("6269259264", "7269259264").replace("0.1637", "0.1000")
    write_logs(tmp_path, baseline=f"{other_rank}\n{BASELINE}\n")
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert "6.77 GB" in row(report, "baseline") and "0.1637 s" in row(report, "baseline")


def test_lines_of_two_ranks_run_together_both_count(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE + BASELINE.replace("6269259264", "7269259264") + "\n\n")
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert "6.77 GB" in row(report, "baseline")


def test_fields_that_are_not_numbers_do_not_end_the_report(tmp_path, monkeypatch, capsys):
    odd = " world_size=1 mfu=high tail_loss=nan update_ratio=1e999 changed_share=x"
    write_logs(tmp_path, baseline=BASELINE + odd, bf16_full=FULL + " world_size=1 mfu=0.1 update_ratio=0.5")
    code, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert code == 0 and row(report, "baseline").endswith("0.1637 s n/a n/a") and "mfu:                 high" in report


def test_bytes_a_parameter_are_shown_for_any_gpu_and_not_for_a_process(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE + " world_size=1 memory=device_allocator")
    assert "Peak bytes/parameter" in gather(tmp_path, monkeypatch, capsys)[1]
    write_logs(tmp_path, baseline=BASELINE + " world_size=1 memory=process_resident")
    assert "Peak bytes/parameter" not in gather(tmp_path, monkeypatch, capsys)[1]


def test_a_line_with_world_size_is_already_merged_and_the_last_one_counts(tmp_path, monkeypatch, capsys):
    first = BASELINE.replace("6269259264", "7269259264") + " world_size=2"
    write_logs(tmp_path, baseline=f"{first}\n{BASELINE} world_size=2\n{first[:-13]}\n")
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert "5.84 GB" in row(report, "baseline")


def test_rows_that_are_not_like_for_like_are_named(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE + " world_size=1", bf16_full=FULL + " world_size=2")
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert f"WARNING: {get_config_name('bf16_full')} is not like for like: world_size is 2, the baseline's 1." in report


@pytest.mark.parametrize("key", ["learning_rate", "num_steps", "data"])
def test_losses_of_unlike_runs_are_warned_of(key, tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=f"{BASELINE} {key}=1", bf16_full=f"{FULL} {key}=2", other=f"{FULL} {key}=1")
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert report.count("is not like for like") == 1 and f"{key} is 2, the baseline's 1." in report


def test_what_only_one_of_two_logs_says_is_named(tmp_path, monkeypatch, capsys):
    write_logs(
        tmp_path, baseline=f"{BASELINE} num_steps=20 data=a", bf16_full=FULL, other=f"{FULL} num_steps=20 data=a"
    )
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    name = f"{get_config_name('bf16_full')} [bf16_full.log]"
    assert [line for line in report.splitlines() if "does not say" in line] == [
        f"WARNING: {name}: its log does not say num_steps, data, the baseline's does; see whether they agree."
    ]
    write_logs(tmp_path, baseline=BASELINE, bf16_full=f"{FULL} data=a", other=FULL)
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert f"{name}: the baseline's log does not say data, its own does;" in report


def test_an_update_ratio_of_a_short_run_is_no_all_clear(tmp_path, monkeypatch, capsys):
    said = "Below 1, and from fewer than 500 steps, it may still fall by far."
    for fields, warned in (
        ("0.995 num_steps=499", True),
        ("0.995 num_steps=500", False),
        ("1.001 num_steps=20", False),
    ):
        write_logs(tmp_path, baseline=BASELINE, bf16_full=f"{FULL} update_ratio={fields}")
        assert (said in gather(tmp_path, monkeypatch, capsys)[1]) == warned


def test_without_a_baseline_log_each_row_is_compared_with_the_baseline_of_its_size(tmp_path, monkeypatch, capsys):
    small = "SUMMARY: config={}.json params=1000 peak_mem_bytes={} alloc_mem_bytes=16000 avg_step_time=0.1"
    small_baseline, small_full = small.format("baseline", 20000), small.format("bf16_full", 15000)
    logs = {"0_baseline": small_baseline, "0_full": small_full, "1_baseline": BASELINE, "1_full": FULL}
    write_logs(tmp_path, **logs)
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    rows = {name: next(line for line in report.splitlines() if f"[{name}.log]" in line) for name in logs}
    assert "25.0%" in rows["0_full"] and "51.6%" in rows["1_full"] and "WARNING" not in report
    assert "There is no baseline" not in report
    (tmp_path / "0_baseline.log").unlink()
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert f"There is no baseline of the same size for {get_config_name('bf16_full')} [0_full.log], so" in report
    assert all("(baseline)" in rows[name] for name in ("0_baseline", "1_baseline"))


def test_lost_updates_are_shown_and_warned_of(tmp_path, monkeypatch, capsys):
    kept, lost = " update_ratio=0.9998 changed_share=0.9990", " update_ratio=0.2400 changed_share=0.1400"
    write_logs(tmp_path, baseline=BASELINE + kept, bf16_full=FULL + lost, other=FULL.replace("bf16_full", "other"))
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert row(report, "baseline").endswith("1.000 99.9%")
    assert row(report, "bf16_full").endswith("0.240 14.0%")
    assert row(report, "other").endswith("n/a n/a")
    warnings = [line for line in report.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and "76% of the update is lost" in warnings[0] and "take bf16_full_sr." in warnings[0]
    write_logs(tmp_path, bf16_full=FULL.replace("bf16_full", "bf16_master_wg") + lost)
    assert "or take baseline_offload." in gather(tmp_path, monkeypatch, capsys)[1]
    write_logs(tmp_path, bf16_full=FULL.replace("configs/", "bf16_master_wg/") + lost)
    assert "or take bf16_full_sr." in gather(tmp_path, monkeypatch, capsys)[1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("update_ratio=0.5000 adam_ratio=0.5100", None),  # warned of as rounded weights
        ("adam_ratio=1.2580", "1.26 of the update"),
        ("adam_ratio=1.1100", "1.11 of the update"),
        ("adam_ratio=1.0900", None),
        ("update_ratio=0.9000 adam_ratio=0.8900", "0.89 of the update"),
        ("update_ratio=1.0000 adam_ratio=0.9100", None),
        ("adam_ratio=x", None),
        ("update_ratio=x adam_ratio=0.95", None),
    ],
)
def test_updates_unlike_those_of_adamw_with_fp32_moments_are_warned_of(fields, said, tmp_path, monkeypatch, capsys):
    same = " update_ratio=1.0000 adam_ratio=1.0000"
    write_logs(tmp_path, baseline=BASELINE + same, bf16_full=f"{FULL} {fields}")
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert row(report, "baseline").endswith(" 1.000") and "Adam ratio: the part of the update" in report
    warnings = [line for line in report.splitlines() if "FP32 moments;" in line]
    assert len(warnings) == (said is not None) and all(said in line for line in warnings)


def test_a_name_cannot_break_the_markdown_table(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE, bf16_full=FULL.replace("configs/bf16_full", "a|b<i>`"))
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert r"| a\|b&lt;i&gt;\` | 2.83 GB |" in report


def test_control_characters_in_a_name_cannot_break_the_text_table(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE, bf16_full=FULL.replace("bf16_full", "a%0Ab%1b"))
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert "a b" in report and "\x1b" not in report.split("Details")[0]


def test_a_run_without_a_measured_time_shows_no_zero(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE.replace("0.1637", "0.0000"))
    _, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert row(report, "baseline").endswith("n/a (none measured)")


@pytest.mark.parametrize("gap", [0, 1, 7, 8, 9, 100])
def test_a_line_across_the_chunks_of_reading_is_found(tmp_path, monkeypatch, capsys, gap):
    padding = b"Y" * (gather_memory.CHUNK_BYTES - gap)
    write_logs(tmp_path, baseline=padding + BASELINE.encode() + b"\n" + padding)
    code, report, _ = gather(tmp_path, monkeypatch, capsys)
    assert code == 0 and "5.84 GB" in row(report, "baseline")


def test_a_log_of_1_gb_is_read_in_constant_memory(tmp_path):
    with open(tmp_path / "baseline.log", "wb") as log:
        log.truncate(1024**3)  # a sparse file: one line of 1 GB
        log.seek(0, 2)
        log.write(b"\n" + BASELINE.encode() + b"\n")
    command = f"ulimit -v 200000; exec {sys.executable} {ROOT}/gather_memory.py --log_dir {tmp_path}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "5.84 GB" in result.stdout


# Folders and files


def test_errors_are_one_line_on_stderr_and_return_1(tmp_path, monkeypatch, capsys):
    for folder in (tmp_path / "missing", tmp_path):
        code, out, err = gather(folder, monkeypatch, capsys)
        assert (code, out, err.count("\n")) == (1, "", 1), err
    write_logs(tmp_path, baseline="no summary here")
    code, _, err = gather(tmp_path, monkeypatch, capsys)
    assert code == 1 and "baseline.log" in err
    write_logs(tmp_path, baseline=BASELINE)
    code, _, err = gather(tmp_path, monkeypatch, capsys, "--output", "/proc/nowhere/summary.txt")
    assert code == 1 and err.count("\n") == 1


def test_the_report_goes_to_output_with_its_folders_made_and_nothing_else_left(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE)
    output = tmp_path / "a" / "b" / "comparison.txt"
    code, report, said = gather(tmp_path, monkeypatch, capsys, "--output", output)
    assert code == 0 and said == f"Written: {output}\n"
    assert output.read_text() == report
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    assert not (tmp_path / "summary.txt").exists()
    assert gather(tmp_path, monkeypatch, capsys)[2] == f"Written: {tmp_path / 'summary.txt'}\n"


def test_an_output_that_would_be_read_as_a_run_is_refused(tmp_path, monkeypatch, capsys):
    write_logs(tmp_path, baseline=BASELINE)
    code, out, error = gather(tmp_path, monkeypatch, capsys, "--output", tmp_path / "baseline.log")
    assert (code, out) == (1, "") and error.count("\n") == 1 and "would be read as a run" in error
    assert (tmp_path / "baseline.log").read_text() == BASELINE
    (tmp_path / "link").symlink_to("baseline.log")
    assert gather(tmp_path, monkeypatch, capsys, "--output", tmp_path / "link")[0] == 1
    assert (tmp_path / "baseline.log").read_text() == BASELINE
    assert gather(tmp_path, monkeypatch, capsys, "--output", tmp_path / "elsewhere" / "report.log")[0] == 0


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">&-", 0, "Written: {}/summary.txt\n"),
        (">/dev/full", 1, "Written: {}/summary.txt\ngather_memory.py: error: stdout: No space left on device\n"),
        ("--output /dev/full >/dev/null", 1, "gather_memory.py: error: /dev/full: No space left on device\n"),
        ("--output {}/loop >/dev/null", 1, "gather_memory.py: error: {}/loop: "),
        ("| true; exit ${{PIPESTATUS[0]}}", 0, "Written: {}/summary.txt\n"),
    ],
)
def test_whatever_becomes_of_the_output_it_ends_with_one_line_that_names_it(redirection, code, said, tmp_path):
    logs = {f"{i:03}": FULL for i in range(300)}  # a report that is larger than a pipe
    write_logs(tmp_path, baseline=BASELINE, **logs)
    (tmp_path / "loop").symlink_to("loop")
    command = f"{sys.executable} {ROOT}/gather_memory.py --log_dir {tmp_path} " + redirection.format(tmp_path)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stderr
    assert said.format(tmp_path) in result.stderr and result.stderr.count("\n") == max(1, said.count("\n"))


def test_a_device_given_as_output_stays_a_device(tmp_path, monkeypatch, capsys):
    pipe = tmp_path / "pipe"  # like /dev/null, it is no regular file; unlike it, a broken test costs nothing
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code, report, _ = gather(write_logs(tmp_path, baseline=BASELINE), monkeypatch, capsys, "--output", pipe)
    assert code == 0 and pipe.is_fifo() and os.read(reader, 10**6).decode() == report
    os.close(reader)


def test_it_imports_only_the_standard_library_at_start():
    tree = ast.parse((ROOT / "gather_memory.py").read_text())
    imported = {alias.name.split(".")[0] for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module.split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names


def test_after_pip_install_the_documented_import_works(tmp_path):
    import shutil

    source = tmp_path / "source"
    skip = shutil.ignore_patterns(".*", "logs", "results", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=skip)
    installed = run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "site", source)
    assert installed.returncode == 0, installed.stderr
    code = (
        "from training.bf16_master_weight.gather_memory import parse_summary_line, format_bytes, main\n"
        f"print(parse_summary_line({BASELINE!r})['params'])"
    )
    result = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert result.stdout.strip() == "254128976", result.stderr


def test_published_summaries_are_what_the_published_logs_give(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    summaries = sorted(path.relative_to(ROOT) for path in ROOT.glob("results/**/summary.txt"))
    assert summaries
    for summary in summaries:
        code, report, _ = gather(summary.parent, monkeypatch, capsys, "--output", tmp_path / "o.txt")
        assert code == 0 and report == summary.read_text(), summary
