"""The README names only what exists, and its figures are those of the published runs."""

import gzip
import pickle
import re
import statistics

import pytest
from conftest import ROOT, run, train
from test_model import PEAK_TOLERANCES, estimate

import gather_memory
import train as toolkit

README = (ROOT / "README.md").read_text()
WORDS = " ".join(README.split())  # whatever its line breaks
PUBLISHED = ROOT / "results" / "h200"
OPTIONS_OF_LARGEST = "--hidden_dim 5120 --num_heads 40 --batch_size 1 --activation_checkpointing"


SR = ("bf16_full_sr", "bf16_full_sr_8bit")


def summary_of(log, published=PUBLISHED):
    return gather_memory.merge_summaries(gather_memory.summaries_in(published / f"{log}.log"))


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


def late_ratios(learning_rate, config, key):
    """Of each seed, what was logged in the last 500 steps."""
    logs = [PUBLISHED / f"parity_lr_{learning_rate}" / f"{config}{seed}.log" for seed in ("", "_seed43")]
    found = [re.findall(rf"^Step (\d+): .*\b{key}=([\d.]+)", log.read_text(), re.M) for log in logs]
    return [[float(value) for step, value in of_run if int(step) >= 500] for of_run in found]


@pytest.mark.parametrize("learning_rate", ["1e-4", "1e-5"])
@pytest.mark.parametrize("config", ["baseline", "bf16_full", "bf16_full_sr", "bf16_full_sr_8bit"])
def test_the_readmes_learning_table_is_that_of_the_published_runs(config, learning_rate):
    runs = [summary_of(f"parity_lr_{learning_rate}/{config}{seed}") for seed in ("", "_seed43")]
    cells = [", ".join(f"{run[key]:.4f}" for run in runs) for key in ("tail_loss", "eval_loss")]
    for key in ("update_ratio", "adam_ratio"):
        means = [statistics.fmean(values) for values in late_ratios(learning_rate, config, key) if values]
        cells.append(", ".join(f"{mean:.3f}" for mean in means) or "n/a")
    assert f"| {learning_rate}, `{config}` | {' | '.join(cells)} |" in README


def parity_runs(config):
    folders = ("parity_lr_1e-4", "parity_lr_1e-5")
    return [summary_of(f"{folder}/{config}{seed}") for folder in folders for seed in ("", "_seed43")]


def test_stochastic_rounding_learns_as_the_baseline_does_and_rounding_to_nearest_does_not():
    baseline, rounded, nearest = map(parity_runs, ("baseline", "bf16_full_sr", "bf16_full"))
    above = [run["tail_loss"] - base["tail_loss"] for run, base in zip(rounded, baseline, strict=True)]
    assert f"ended {min(above):.3f} to {max(above):.3f} above the baseline's" in WORDS.split("| Your case |")[0]
    assert f"losses end {min(above):.3f} to {max(above):.3f} above the baseline's" in WORDS
    assert min(above) > 0 and max(above) < 0.0205
    for summary, base in zip(rounded, baseline, strict=True):
        assert abs(summary["eval_loss"] - base["eval_loss"]) < 0.02
    logs = {lr: (PUBLISHED / f"parity_lr_{lr}" / "bf16_full.log").read_text() for lr in ("1e-4", "1e-5")}
    early = [float(re.search(r"^Step 50: .*update_ratio=([0-9.]+)", log, re.M)[1]) for log in logs.values()]
    assert "at step 50, {:.2f} at 1e-4 and {:.2f} at 1e-5".format(*early) in WORDS
    late, small = statistics.fmean(late_ratios("1e-5", "bf16_full", "update_ratio")[0]), "parity_lr_1e-5"
    losses = [f"{summary_of(f'{small}/{name}')['tail_loss']:.2f}" for name in ("bf16_full", "baseline")]
    assert f"in the last 500 of 1000 steps, {late:.0%}".replace("%", " %") + " of the update arrived" in WORDS
    assert "ended at [{} instead of {}]".format(*losses) in WORDS
    for log, said in (
        (logs["1e-4"], "stayed at {1:.2f}"),
        (None, "(seed 42) was {:.2f} after 750 steps and {:.2f} at"),
    ):
        log = log or (PUBLISHED / "parity_lr_1e-4" / "baseline.log").read_text()
        held_out = [float(loss) for loss in re.findall(r"after step (?:749|999): eval_loss=([0-9.]+)", log)]
        assert said.format(*held_out) in WORDS
    for summary, base in zip(nearest, baseline, strict=True):
        assert summary["tail_loss"] > base["tail_loss"] + 0.3


def test_moments_change_updates_as_the_readme_says():
    large = late_ratios("1e-4", "bf16_full_sr", "adam_ratio")
    small = late_ratios("1e-5", "bf16_full_sr", "adam_ratio")
    errors = [statistics.stdev(values) / len(values) ** 0.5 for values in small]
    assert (
        "{:.2f} and {:.2f} of Adam's update at 1e-4; at 1e-5 {:.2f} and {:.2f}, of which stochastic".format(
            *map(statistics.fmean, large + small)
        )
        in WORDS
    )
    assert "rounding makes {:.2f} and {:.2f} uncertain".format(*errors) in WORDS
    assert f"one step there measured {max(map(max, small)):.2f}" in WORDS
    large, small = (
        [f"{statistics.fmean(values):.2f}" for values in late_ratios(learning_rate, "bf16_full_sr_8bit", "adam_ratio")]
        for learning_rate in ("1e-4", "1e-5")
    )
    assert f"{' and '.join(large)} times as far at 1e-4, {' and '.join(small)} at 1e-5" in WORDS
    assert f"goes up to {100 * float(max(small)) - 100:.0f} % [further" in README
    pairs = zip(parity_runs("baseline"), parity_runs("bf16_full_sr_8bit"), strict=True)
    below = [baseline["tail_loss"] - summary["tail_loss"] for baseline, summary in pairs]
    assert min(below) > 0 and f"lower than the baseline's, by up to {max(below):.2f}, in the small" in WORDS


def test_what_the_readme_says_of_a_small_model_is_in_its_logs():
    published = ROOT / "results" / "cpu"
    names = ("baseline", "bf16_full_sr", "bf16_full_sr_8bit", "bf16_full_sr_8bit_beta2_0.95")
    baseline, sixteen_bit, eight_bit, beta2 = (summary_of(f"6.6m_text/{name}", published) for name in names)
    assert f"small model at {eight_bit['tail_loss']:.2f} instead of {baseline['tail_loss']:.2f}" in WORDS
    assert f"1e-4) {eight_bit['adam_ratio']:.2f} times after 500 steps" in WORDS
    assert f"BF16 moments there {sixteen_bit['adam_ratio']:.2f} times" in WORDS
    assert f"({beta2['adam_ratio']:.2f} with β₂ = 0.95)" in WORDS
    assert f"at 254M, {100 * eight_bit['adam_ratio'] - 100:.0f} % in a small model" in README
    last = (published / "eight_bit_steps.txt").read_text().splitlines()[-1]
    assert last.startswith("Step 500: ")
    assert f"{float(re.search(r'([0-9.]+) of the FP32 step along', last)[1]):.1f} times as far, one sees why" in WORDS
    halved, of_fp32, of_8_bit = (f"{float(percent):.1f}%" for percent in re.findall(r"([\d.]+)%", last))
    assert f"{halved} of the second moments" in WORDS
    assert f"{of_8_bit} in 8 bits and {of_fp32} in FP32" in WORDS


@pytest.mark.parametrize(
    ("log", "peak_gib", "bytes_per_parameter"),
    [
        ("254m/baseline", 5.1, 16.8),
        ("254m/bf16_full", 3.7, 10.8),
        ("254m/bf16_full_sr", 3.7, 10.7),
        ("254m/bf16_full_sr_8bit", 3.2, 8.4),
        ("254m_checkpointing/baseline", 4.2, 16.8),
        ("254m_checkpointing/bf16_full", 2.7, 10.8),
        ("6.86b_checkpointing/baseline", 103.1, 16.1),
        ("6.86b_checkpointing/bf16_full", 64.6, 10.1),
        ("6.86b_checkpointing/bf16_full_sr", 64.6, 10.1),
        ("6.86b_checkpointing/bf16_full_sr_8bit", 52.1, 8.1),
    ],
)
def test_the_published_runs_hold_little_beside_the_model_states(log, peak_gib, bytes_per_parameter):
    summary = summary_of(log)
    assert summary["peak_mem_bytes"] < peak_gib * 1024**3
    assert summary["alloc_mem_bytes"] < bytes_per_parameter * summary["params"]


def paired_medians_ms(name):
    """{configuration: median}, of the steps taken in turn."""
    found = re.findall(r"^configs/(\w+).json: median ([\d.]+)", (PUBLISHED / f"{name}.txt").read_text(), re.M)
    return {config: float(median_ms) for config, median_ms in found}


@pytest.mark.parametrize(
    ("name", "configs"), [("paired_steps", 4), ("paired_steps_again", 4), ("paired_steps_quiet_host", 3)]
)
def test_in_paired_steps_no_configuration_is_a_tenth_slower_than_another(name, configs):
    medians_ms = paired_medians_ms(name).values()
    assert len(medians_ms) == configs and max(medians_ms) < 1.1 * min(medians_ms)


def test_the_published_steps_took_no_more_than_80_ms_at_254m_and_0_43_s_at_6_86b():
    assert max(paired_medians_ms("paired_steps_quiet_host").values()) < 80
    for name, most_s in (("baseline", 0.430), ("bf16_full", 0.420)):
        assert summary_of(f"6.86b_checkpointing/{name}")["avg_step_time"] <= most_s


def test_the_readmes_step_times_against_baseline_are_the_published_ones():
    rounds = [paired_medians_ms(name) for name in ("paired_steps", "paired_steps_again")]
    longer = {
        name: [100 * (paired[name] / paired["baseline"] - 1) for paired in rounds]
        for name in ("bf16_full", "bf16_full_sr", "bf16_full_sr_8bit")
    }
    times_s = {name: summary_of(f"6.86b_checkpointing/{name}")["avg_step_time"] for name in ("baseline", *longer)}
    assert all(-5 < percent <= 0 for percent in longer["bf16_full"])  # "Steps take about as long"
    assert times_s["bf16_full"] <= times_s["baseline"]
    assert "at 6.86B. Steps take about as long. But" in WORDS
    assert {f"{percent:.0f}" for percent in longer["bf16_full_sr"]} == {"4"} and "took [4 % longer]" in WORDS
    assert times_s["bf16_full_sr"] <= times_s["baseline"] and "and [no longer]" in WORDS
    at_254m = longer["bf16_full_sr_8bit"]
    assert f"steps took {min(at_254m):.0f} to {max(at_254m):.0f} % longer at 254M; goes" in WORDS


def estimated(capsys, monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["train.py", "--estimate", *options])
    toolkit.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("words", ["with", "without"])
def test_the_readmes_estimates_for_one_gpu_are_what_train_py_prints(words, monkeypatch, capsys):
    shape = "--hidden_dim 4096 --num_layers 32 --num_heads 32"
    assert f"`{shape}`" in README
    options = [*shape.split(), *"--batch_size 4 --seq_length 2048 --deepspeed_config".split()]
    cells = []
    for config in ("baseline", "bf16_full_sr", "bf16_full_sr_8bit"):
        output = estimated(capsys, monkeypatch, *options, f"configs/{config}.json")
        line = re.search(rf"^Peak {words} activation checkpointing: (.*? GB).*: (\d+)$", output, re.M)
        cells.append(f"{line[1]}, {line[2]}" + (" GPUs" if config == "baseline" else ""))
    assert f"| {words} | {' | '.join(cells)} |" in README
    for config, host in (("baseline_offload", "115 GB"), ("bf16_master_wg", "89 GB")):
        output = estimated(capsys, monkeypatch, *options, f"configs/{config}.json")
        assert "Peak with activation checkpointing: 17.21 GB" in output and "17.21 GB on the GPU" in WORDS
        host_bytes = int(re.search(r"host_bytes=(\d+)", output)[1])
        assert f"{host_bytes / 1024**3:.0f} GB" == host and re.search(rf"{host}[^.]* \(`{config}`\)", WORDS)


@pytest.mark.parametrize("world_size", [8, 64])
def test_the_readmes_estimates_for_many_gpus_are_what_train_py_prints(world_size, monkeypatch, capsys):
    command = next(line for line in README.splitlines() if line.startswith("python train.py --estimate"))
    peaks, fewest = [], []
    for config in ("baseline", "bf16_full_sr", "bf16_full_sr_8bit"):
        options = command.replace("bf16_full_sr.json", f"{config}.json").split()[3:]
        options[options.index("--world_size") + 1] = str(world_size)
        output = estimated(capsys, monkeypatch, *options)
        peaks.append(re.search(r"Peak with activation checkpointing: ([\d.]+ GB)", output)[1])
        fewest.append(re.search(r"fewest_gpus=(\d+)", output)[1])
    assert f"| fewest of 80 GiB | {' | '.join(fewest)} |" in README
    assert f"| {world_size} | {' | '.join(peaks)} |" in README


def test_the_figures_in_the_readmes_text_are_those_of_the_published_runs():
    for name in ("paired_steps", "paired_steps_again"):
        medians_ms = "{:.1f}, {:.1f}, {:.1f} and {:.1f} ms".format(*paired_medians_ms(name).values())
        assert f"[{medians_ms}](results/h200/{name}.txt)" in WORDS
    quiet = paired_medians_ms("paired_steps_quiet_host")
    assert "took {}, {} and {} ms".format(*(quiet[name] for name in ("baseline", "bf16_full", "bf16_full_sr"))) in WORDS
    assert "over 35 steps each" in WORDS  # 40, less the 5 of warm-up
    tracking = (PUBLISHED / "tracking_cost.txt").read_text()
    pairs, *costs = re.search(
        r": (\d+) pairs.*difference of a pair ([\d.]+) ms = ([\d.]+)%.*tracking alone ([\d.]+) ms = ([\d.]+)%",
        tracking,
        re.S,
    ).groups()
    whole_ms, whole_percent, alone_ms, alone_percent = map(float, costs)
    assert max(whole_percent, alone_percent) < 1
    assert f"[{pairs} pairs of steps with and without it]" in WORDS
    assert f"the median difference of a pair is {whole_ms:.1f} ms, {whole_percent:.2f}% of a step" in WORDS
    assert f"after the step takes {alone_ms:.1f} ms by itself, {alone_percent:.2f}%" in WORDS
    peaks = [summary_of(f"6.86b_checkpointing/{name}")["peak_mem_bytes"] for name in ("baseline", *SR)]
    assert "peaks are [{:.2f}, {:.2f} and {:.2f} GB]".format(*(peak / 1024**3 for peak in peaks)) in WORDS
    answer = README.split("| Your case |")[0]
    savings = {name: [] for name in ("bf16_full", *SR)}
    for folder in ("254m", "254m_checkpointing", "6.86b_checkpointing"):
        for name, of_name in savings.items():
            peak, baseline = (summary_of(f"{folder}/{log}")["peak_mem_bytes"] for log in (name, "baseline"))
            of_name.append(gather_memory.format_reduction(peak, baseline))
    assert savings["bf16_full"] == savings["bf16_full_sr"]  # "has the same memory"
    for folder, saving in zip(("254m_checkpointing", "6.86b_checkpointing"), savings["bf16_full"][1:], strict=True):
        assert f"[{saving}](results/h200/{folder})" in answer
    assert f"takes {savings['bf16_full'][0]} off the peak memory at 254M" in " ".join(answer.split())
    assert "the savings are {}, {} and {}.".format(*savings["bf16_full_sr_8bit"]) in answer
    for said, log in (
        ("{} there for `baseline_offload`", "254m/baseline_offload"),
        ("{} for `bf16_master_wg`, ", "254m/bf16_master_wg"),
        ("{} for `baseline`.", "254m/baseline"),
        ("at 6.86B now takes [{}]", "6.86b_checkpointing/baseline"),
        ("with what torchao compiles [{}]", "6.86b_checkpointing/bf16_full_sr"),
    ):
        assert said.format(f"{summary_of(log)['host_peak_bytes'] / 1024**3:.1f} GB") in WORDS
    times_s = {
        name: f"{summary_of(f'6.86b_checkpointing/{name}')['avg_step_time']:.2f}"
        for name in ("baseline", "bf16_full_sr", "bf16_full_sr_8bit", "bf16_full")
    }
    assert "steps took {}, {} and {} s, that of `bf16_full` {} s".format(*times_s.values()) in WORDS


def test_the_readmes_step_times_of_the_largest_models_are_those_of_the_searches():
    folders = ("largest_model", "largest_model_expandable_segments")
    times_s = [
        summary_of(f"{folder}/{name}_45")["avg_step_time"]
        for folder in folders
        for name in ("bf16_full", "bf16_full_sr")
    ]
    assert f"those of the 14.7B models took {min(times_s):.2f} to {max(times_s):.2f} s" in WORDS
    times_s = sorted(summary_of(f"{folder}/bf16_full_sr_8bit_56")["avg_step_time"] for folder in folders)
    assert "those with 8-bit moments {:.2f} and {:.2f} s".format(*times_s) in WORDS


def test_what_the_readme_says_adam_on_the_cpu_costs_is_in_the_logs():
    def longer(name, folder):
        return summary_of(f"{folder}/{name}")["median_step_time"] / summary_of(f"{folder}/baseline")["median_step_time"]

    def second_step_s(name):
        log = (PUBLISHED / "6.86b_accumulation" / f"{name}.log").read_text()
        return float(re.search(r"^Step 1: .* time=([\d.]+)s", log, re.M)[1])

    accumulated = summary_of("6.86b_accumulation/baseline")
    assert accumulated["gradient_accumulation_steps"] * accumulated["batch_size"] * accumulated["seq_length"] == 8192
    for name, text in (
        (
            "baseline_offload",
            "about {:.0f} to {:.0f} times the median step time of `baseline` at 254M (2048 tokens a step; "
            "[without](results/h200/254m) and [with](results/h200/254m_checkpointing) checkpointing), {:.0f} times at "
            "[6.86B](results/h200/6.86b_checkpointing) with 512 tokens a step, {:.1f} times with "
            "[8192](results/h200/6.86b_accumulation) (accumulation; the second step of each run)",
        ),
        ("bf16_master_wg", "| about {:.0f} to {:.0f}, {:.0f} and {:.1f} times; loses"),
    ):
        factors = [longer(name, folder) for folder in ("254m", "254m_checkpointing", "6.86b_checkpointing")]
        assert text.format(*factors, second_step_s(name) / second_step_s("baseline")) in WORDS
    hosts = [summary_of(f"6.86b_checkpointing/{name}") for name in ("baseline_offload", "bf16_master_wg")]
    gigabytes, times_s = ([summary[key] for summary in hosts] for key in ("host_peak_bytes", "avg_step_time"))
    said = "took {:.1f} and {:.1f} GB".format(*(size / 1024**3 for size in gigabytes))
    assert said in WORDS and "steps of {:.1f} and {:.1f} s".format(*times_s) in WORDS


def allocator_record(name):
    """(allocated bytes, what its events did, their Python frames) of a published snapshot."""
    with gzip.open(PUBLISHED / "memory_snapshot" / f"{name}.pickle.gz") as packed:
        record = pickle.load(packed)
    events = [event for trace in record["device_traces"] for event in trace]
    frames = {frame["name"] for event in events for frame in event.get("frames", ())}
    return sum(s["allocated_size"] for s in record["segments"]), [event["action"] for event in events], frames


def test_the_published_snapshot_holds_every_byte_that_the_run_reports():
    allocated_bytes, actions, frames = allocator_record("bf16_full_sr")
    assert allocated_bytes == summary_of("memory_snapshot/bf16_full_sr")["alloc_mem_bytes"]
    assert actions.count("alloc") > 1000 and "oom" not in actions and "train_step" in frames


def test_the_published_snapshot_of_a_run_out_of_memory_ends_where_its_log_says():
    allocated_bytes, actions, frames = allocator_record("out_of_memory")
    log = (PUBLISHED / "memory_snapshot" / "out_of_memory.log").read_text()
    assert f"reason=OOM phase=forward step=0 asked=1024.00_MiB peak_mem_bytes={allocated_bytes} " in log
    assert actions.count("oom") == 1 and "train_step" in frames and "Traceback" not in log
    assert log.endswith("exit status 1\n")


def test_the_published_refusals_of_more_processes_than_gpus_are_one_line_each():
    sweep, launcher = (PUBLISHED / "more_processes_than_gpus.txt").read_text().split("$ deepspeed")
    assert "run_all.sh: error: --num_gpus 2: this machine has 1\nexit status 2\n" in sweep
    assert launcher.count("train.py: error:") == 1 and launcher.endswith("exit status 2\n")
    assert "process 1 of this node has no GPU: there are 1; lower --num_gpus" in launcher
    assert "Traceback" not in sweep + launcher


def test_what_the_readme_says_of_deepcompile_is_in_the_logs():
    compiled, plain = (summary_of(f"254m_deepcompile/{name}") for name in ("baseline_deepcompile", "baseline"))
    less, more = (
        1 - compiled["avg_step_time"] / plain["avg_step_time"],
        compiled["peak_mem_bytes"] / plain["peak_mem_bytes"] - 1,
    )
    log = (PUBLISHED / "254m_deepcompile" / "baseline_deepcompile.log").read_text()
    compiling_s = sum(float(time_s) for time_s in re.findall(r"^Step [05]: .* time=([\d.]+)s", log, re.M))
    assert 2.25 < compiling_s / 60 < 2.75 and "two and a half minutes of compiling" in WORDS
    assert f"steps took {100 * less:.0f} % less for {100 * more:.0f} % more peak memory" in WORDS


def test_what_is_left_above_the_states_is_what_the_readme_says():
    """The cuBLAS workspace left out."""
    left = {}
    for name in ("baseline", "bf16_full", "bf16_full_sr", "bf16_full_sr_8bit"):
        summary = summary_of(f"6.86b_checkpointing/{name}")
        rest = summary["peak_mem_bytes"] - summary["model_state_bytes"] - toolkit.WORKSPACE_BYTES
        left[name] = f"{rest / 1024**3:.1f} GB"
    assert left.pop("baseline") == "0.8 GB" and set(left.values()) == {"0.7 GB"}
    assert "0.8 GB in `baseline`" in WORDS and "0.7 GB in `bf16_full`" in WORDS


def test_the_allocator_reserves_beyond_the_peak_what_the_readme_says():
    percents = {}
    for log in PUBLISHED.glob("*/*.log"):
        if summary := gather_memory.merge_summaries(gather_memory.summaries_in(log)):
            offloaded = summary["params"] > 3e9 and log.stem in ("bf16_master_wg", "baseline_offload")
            group = (summary["world_size"], summary["params"] > 3e9, offloaded)
            percents.setdefault(group, []).append(100 * (summary["reserved_mem_bytes"] / summary["peak_mem_bytes"] - 1))
    large, offloaded, small, two = (
        percents[g] for g in ((1, True, False), (1, True, True), (1, False, False), (2, False, False))
    )
    said = f"at most {max(large):.1f} % more from 3B parameters on, with Adam on the CPU {max(offloaded):.0f} %, and "
    said += f"{max(small):.0f} % at 254M; on two GPUs, at 254M in older code, {min(two):.0f} to {max(two):.0f} %"
    assert said in WORDS


def test_peak_and_allocated_memory_of_a_command_repeat_to_the_byte_as_the_readme_says():
    """Runs that differ in seed and learning rate alone."""
    assert "peak and allocated memory of a command repeat to the byte" in WORDS
    for config in ("baseline", "bf16_full", *SR):
        runs = parity_runs(config)
        assert len({(run["peak_mem_bytes"], run["alloc_mem_bytes"]) for run in runs}) == 1
        reserved = [run["reserved_mem_bytes"] for run in runs]
        assert max(reserved) < 1.03 * min(reserved)


def test_what_is_allocated_beyond_states_and_workspace_is_what_the_readme_says():
    beyond = {"deepcompile": [], "others": []}
    for log in PUBLISHED.glob("*/*.log"):
        summary = summary_of(log.relative_to(PUBLISHED).with_suffix(""))
        if summary and "model_state_bytes" in summary:
            rest = summary["alloc_mem_bytes"] - summary["model_state_bytes"] - toolkit.WORKSPACE_BYTES
            beyond["deepcompile" if "deepcompile" in summary["config"] else "others"].append(rest / 1024**3)
    assert 0 < max(beyond["others"]) < 0.1 and f"{max(beyond['deepcompile']):.1f}" == "0.5"
    assert "64 MiB of cuBLAS workspace and up to 0.1 GB more (with DeepCompile 0.5 GB)" in WORDS


def test_the_readmes_figures_for_two_gpus_and_one_host_are_the_published_ones():
    peaks = [summary_of(f"254m_two_gpus/{name}")["peak_mem_bytes"] / 1024**3 for name in ("baseline", "bf16_full")]
    assert "peaks at [{:.2f} and {:.2f} GB a GPU]".format(*peaks) in WORDS
    host = summary_of("6.86b_checkpointing/baseline_offload")["host_peak_bytes"] / 1024**3
    assert f"`baseline_offload` took {host:.1f} of its 125 GB" in WORDS


def test_the_worked_examples_are_those_of_the_tables():
    example = WORDS.split("So on one GPU of 80 GB")[1].split("What one H200")[0]
    row = re.search(r"^\| with \| ([\d.]+) GB, 2 GPUs \| ([\d.]+) GB, 1 \|", README, re.M)
    baseline, rounded = (f"{float(peak):.0f} GB" for peak in row.groups())
    example = example.replace("\N{MULTIPLICATION SIGN}", "x")
    assert f"[{rounded} expected](#predict-before-you-rent) at batch 4 x 2048, `baseline` {baseline})" in example
    measured = summary_of("growth/1.01b_baseline")["peak_mem_bytes"] / 1024**3
    assert f"[{measured:.0f} GB](#larger-models) at batch 1 x 512, checkpointing too)" in example


def test_the_readme_promises_the_accuracy_that_the_estimate_is_held_to():
    small, large, offloaded = (f"{100 * PEAK_TOLERANCES[size]:g} %" for size in ("small", "large", "offloaded"))
    said = f"and the peak within {small}, from 6.86B on within {large} ({offloaded} with Adam on the CPU); a test holds"
    assert said in WORDS
    spare = (toolkit.RESERVED_SHARE, toolkit.CUDA_CONTEXT_BYTES)
    assert spare == (1.1, 2**30) and "leave a tenth and 1 GiB for that" in WORDS


def test_bf16_masters_save_no_gpu_memory_that_offload_does_not():
    for folder in ("254m", "254m_checkpointing"):
        wg, offload = summary_of(f"{folder}/bf16_master_wg"), summary_of(f"{folder}/baseline_offload")
        assert wg["peak_mem_bytes"] == offload["peak_mem_bytes"]
        saved = (offload["host_peak_bytes"] - wg["host_peak_bytes"]) / wg["params"]
        assert 4 < saved < 6  # bytes a parameter; the states differ by 4


@pytest.mark.parametrize("config", ["baseline", "bf16_full", "bf16_full_sr", "bf16_full_sr_8bit"])
def test_the_readmes_largest_models_are_those_of_the_published_runs(config, monkeypatch):
    def found(name):
        """Of the largest model that ran through, in billions of parameters."""
        runs = [
            summary_of(f"largest_model/{log.stem}") for log in (PUBLISHED / "largest_model").glob(f"{name}_[0-9]*.log")
        ]
        return f"{max(run['params'] for run in runs if run) / 1e9:.1f}"

    def fits(layers):
        device, _ = estimate(config, monkeypatch, *OPTIONS_OF_LARGEST.split(), "--num_layers", str(layers))
        return toolkit.expected_peak(device) + toolkit.CUDA_CONTEXT_BYTES <= 143_771 * 2**20

    expected = next(layers for layers in range(20, 80) if not fits(layers + 1))
    for folder in ("largest_model", "largest_model_expandable_segments"):
        search = (PUBLISHED / f"{folder}.txt").read_text()
        predicted, layers = (
            int(re.search(pattern, search)[1])
            for pattern in (rf"{config}.json: (\d+) layers expected", rf"{config}.json: largest (\d+) layers")
        )
        billions = summary_of(f"{folder}/{config}_{layers}")["params"] / 1e9
        assert f"| `{config}` | {expected} blocks | {layers} blocks, {billions:.1f}B parameters |" in README
        assert "reason=OOM" in (PUBLISHED / folder / f"{config}_{layers + 1}.log").read_text()
        assert predicted == expected  # the searches were by an estimate that said the same
    assert f"grew from {found('baseline')} billion parameters to {found('bf16_full')} and {found(SR[1])}." in WORDS


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


def test_published_runs_name_no_temporary_folder():
    published = [path for path in (ROOT / "results").rglob("*") if path.suffix in (".log", ".txt", ".csv", ".gz")]
    assert published
    for path in published:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert b"/tmp/" not in content, path


def test_the_test_command_is_the_one_that_ci_runs():
    commands = [line for line in README.splitlines() if line.endswith("pytest")]
    assert len(commands) == 1 and "pytest$' README.md" in (ROOT / ".ci/run").read_text()
