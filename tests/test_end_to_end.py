"""The whole path through the real launcher, on the CPU: sweeps, ranks, other configurations, failures."""

import csv
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, run, train

import gather_memory

CONFIGS = ("baseline", "bf16_master_wg", "bf16_full", "bf16_full_sr")


def summary_of(output):
    """The parsed SUMMARY line, which must be the last line that train.py prints."""
    lines = [line for line in output.splitlines() if line and "[launch.py" not in line]
    summary = gather_memory.parse_summary_line(lines[-1])
    assert summary, output[-3000:]
    return summary


def losses_of(path):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    return [float(row["loss"]) for row in rows]


def write_config(path, **changes):
    """baseline.json with some of its top-level sections replaced, or removed where None."""
    config = json.loads((ROOT / "configs" / "baseline.json").read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return path


# Sweeps: the default configurations through the launcher


@pytest.fixture(scope="session")
def sweep_on_one_process(tmp_path_factory):
    """A sweep of a model large enough for its states to show in the process's resident memory."""
    log_dir = tmp_path_factory.mktemp("one") / "made" / "here"
    options = "--hidden_dim 512 --num_layers 6 --num_heads 8 --num_steps 8 --learning_rate 1e-4".split()
    return log_dir, run("./run_all.sh", "--log_dir", log_dir, *options)


@pytest.fixture(scope="session")
def sweep_on_two_processes(tmp_path_factory, text_and_tokenizer):
    """A sweep of two processes on real text."""
    log_dir = tmp_path_factory.mktemp("two")
    text, tokenizer = text_and_tokenizer
    data = ["--use_real_data", "--dataset", text, "--tokenizer", tokenizer]
    return log_dir, run("./run_all.sh", "--num_gpus", 2, "--log_dir", log_dir, *TINY, *data)


def test_the_sweep_leaves_logs_losses_and_a_true_table(sweep_on_one_process):
    log_dir, result = sweep_on_one_process
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert {path.name for path in log_dir.iterdir()} == {
        *("summary.txt", "memory.png", "loss.png"),
        *(f"{name}{ending}" for name in CONFIGS for ending in (".log", "_loss.csv")),
    }
    table = (log_dir / "summary.txt").read_text()
    assert table in result.stdout
    assert "No GPU found" in result.stdout and "process's resident memory" in table
    for name in CONFIGS:
        assert gather_memory.get_config_name(name) in table
        assert len(losses_of(log_dir / f"{name}_loss.csv")) == 8


def test_without_a_gpu_the_saving_is_plain_to_see(sweep_on_one_process):
    log_dir, _ = sweep_on_one_process
    summaries = {name: summary_of((log_dir / f"{name}.log").read_text()) for name in CONFIGS}
    for key in ("peak_mem_bytes", "alloc_mem_bytes"):
        assert summaries["bf16_full"][key] < 0.85 * summaries["baseline"][key]
    for summary in summaries.values():
        # At least the 10 bytes a parameter of model states are there, and nothing like twice the 16.
        assert 10 < summary["alloc_mem_bytes"] / summary["params"] < 32
        assert summary["peak_mem_bytes"] >= summary["alloc_mem_bytes"]
        assert summary["avg_step_time"] > 0 and summary["median_step_time"] > 0
        assert summary["timed_steps"] == 5


def test_the_update_ratio_shows_that_bf16_master_weights_lose_updates(sweep_on_one_process, sweep_on_two_processes):
    for log_dir, _ in (sweep_on_one_process, sweep_on_two_processes):
        summaries = {name: summary_of((log_dir / f"{name}.log").read_text()) for name in CONFIGS}
        assert summaries["baseline"]["update_ratio"] == pytest.approx(1, abs=2e-3)
        assert summaries["baseline"]["adam_ratio"] == pytest.approx(1, abs=2e-3)
        assert summaries["baseline"]["changed_share"] > 0.95
        for name in ("bf16_master_wg", "bf16_full"):
            assert 0 < summaries[name]["update_ratio"] < 0.9 and summaries[name]["changed_share"] < 0.5
            assert 0 < summaries[name]["adam_ratio"] < 0.9
        assert summaries["bf16_full_sr"]["update_ratio"] == pytest.approx(1, abs=0.05)
        assert summaries["bf16_full_sr"]["changed_share"] < 0.5
        assert summaries["bf16_full_sr"]["adam_ratio"] == pytest.approx(1, abs=0.05)
        assert "of the update is lost to rounding" in (log_dir / "summary.txt").read_text()


def test_two_processes_on_real_text_learn_and_report_once(sweep_on_two_processes):
    log_dir, result = sweep_on_two_processes
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for name in CONFIGS:
        log = (log_dir / f"{name}.log").read_text()
        summary = summary_of(log)
        assert summary["world_size"] == 2
        assert log.count("SUMMARY:") == log.count("ENV:") == log.count("Step 0:") == log.count("RESULTS") == 1
        assert "vocabulary, padded to 128," in log and "%|" not in log  # no progress bar in a log
        assert [int(step) for step in re.findall(r"^Step (\d+):", log, re.M)] == [0, 2, 4, 5]
        losses = losses_of(log_dir / f"{name}_loss.csv")
        assert losses[-1] < losses[0]
        # Both times are rounded to the fourth decimal.
        tokens = 2 * 2 * 32 / summary["avg_step_time"]
        assert summary["tokens_per_second"] == pytest.approx(tokens, rel=0.01)


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(sweep_on_one_process, tmp_path):
    options = [*TINY, "--deepspeed_config", "configs/bf16_full.json", "--loss_log_file"]
    results = [train(*options, tmp_path / f"{i}.csv", "--seed", seed) for i, seed in enumerate((1, 1, 2))]
    assert all(result.returncode == 0 for result in results), results[0].stderr[-2000:]
    first, again, other = (losses_of(tmp_path / f"{i}.csv") for i in range(3))
    assert first == again and first != other


def test_stochastic_rounding_with_the_same_seed_gives_the_same_losses(tmp_path):
    options = [*TINY, "--deepspeed_config", "configs/bf16_full_sr.json", "--loss_log_file"]
    results = [train(*options, tmp_path / f"{i}.csv", "--seed", seed) for i, seed in enumerate((1, 1, 2))]
    assert all(result.returncode == 0 for result in results), results[0].stderr[-2000:]
    first, again, other = (losses_of(tmp_path / f"{i}.csv") for i in range(3))
    assert first == again and first != other
    assert results[0].stdout.index("Notice: the first step compiles") < results[0].stdout.index("Step 0:")


def test_stochastic_rounding_learns_what_rounding_to_nearest_loses(tmp_path, text_and_tokenizer):
    text, tokenizer = text_and_tokenizer
    options = ["--use_real_data", "--dataset", text, "--tokenizer", tokenizer, "--num_steps", 60]
    finals = {}
    for name in ("baseline", "bf16_full", "bf16_full_sr"):
        config = f"configs/{name}.json"
        result = train(*TINY, *options, "--deepspeed_config", config, "--learning_rate", "3e-4", "--eval_steps", 30)
        assert result.returncode == 0, result.stderr[-2000:]
        finals[name] = summary_of(result.stdout)
        held_out = re.findall(r"^Held-out text after step (\d+): eval_loss=([\d.]+)", result.stdout, re.M)
        assert [int(step) for step, _ in held_out] == [29, 59]
        assert float(held_out[1][1]) == finals[name]["eval_loss"] < float(held_out[0][1])
    for key in ("tail_loss", "eval_loss"):
        baseline, full, stochastic = (finals[name][key] for name in finals)
        assert full - baseline > 0.02 and abs(stochastic - baseline) < 0.25 * (full - baseline), finals


# What the model states are made of, from the live tensors


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter", "dtypes"),
    [
        ("baseline", {"weights": 2, "gradients": 2, "master_weights": 4, "moments": 8}, ("float32",)),
        ("bf16_master_wg", {"weights": 2, "gradients": 4, "master_weights": 2, "moments": 8}, ("float32",)),
        ("baseline_offload", {"weights": 2, "gradients": 6, "master_weights": 4, "moments": 8}, ("float32",)),
        ("bf16_full", {"weights": 2, "gradients": 2, "master_weights": 2, "moments": 4}, ("bfloat16",)),
        ("bf16_full_sr", {"weights": 2, "gradients": 2, "master_weights": 2, "moments": 4}, ("bfloat16",)),
        (
            "bf16_full_sr_8bit",
            {"weights": 2, "gradients": 2, "master_weights": 2, "moments": 2.03},
            ("uint8", "float32"),
        ),
    ],
)
def test_the_live_states_have_the_size_and_precision_that_the_configuration_says(name, bytes_per_parameter, dtypes):
    result = train(*TINY, "--deepspeed_config", f"configs/{name}.json", "--num_steps", 2)
    assert result.returncode == 0, result.stderr[-2000:]
    summary = summary_of(result.stdout)
    for part, size in bytes_per_parameter.items():
        assert summary[f"{part}_bytes"] == pytest.approx(size * summary["params"], rel=0.03), part
    assert summary["model_state_bytes"] == sum(summary[f"{part}_bytes"] for part in bytes_per_parameter)
    assert summary["expected_state_bytes"] == pytest.approx(summary["model_state_bytes"], rel=0.03)
    found = re.findall(r"^State on cpu: (\w+) (\d+) bytes (\w+)$", result.stdout, re.M)
    master = "float32" if name.startswith("baseline") else "bfloat16"
    assert {(part, dtype) for part, _, dtype in found if part != "moments"} == {
        ("weights", "bfloat16"),
        ("gradients", "bfloat16"),
        ("gradients", master if name == "baseline_offload" else "bfloat16"),
        ("master_weights", master),
    }
    moments = {dtype: int(size) for part, size, dtype in found if part == "moments"}
    if name == "bf16_full_sr_8bit":  # codes, a scale for each block of 256, and the fewer than 256 that are left over
        assert moments["uint8"] > 40 * moments["float32"] and moments.pop("bfloat16", 0) < 2 * 2 * 256
        assert summary["adam_ratio"] == pytest.approx(1, abs=0.2) and "update_ratio" not in summary
    assert set(moments) == set(dtypes)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_states_are_as_expected_with_offload_at_each_stage_on_two_processes(stage, tmp_path):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    config = write_config(tmp_path / "config.json", zero_optimization=zero)
    result = run("deepspeed", "--num_gpus", 2, "--master_port", 29590, "train.py", *TINY, "--deepspeed_config", config)
    assert result.returncode == 0, result.stderr[-2000:]
    summary = summary_of(result.stdout)
    assert summary["expected_state_bytes"] == pytest.approx(summary["model_state_bytes"], rel=0.001)


def test_the_states_are_as_expected_where_offloaded_gradients_accumulate(tmp_path):
    """ZeRO-1 and 2 then keep them twice on the host."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = write_config(tmp_path / "config.json", zero_optimization=zero, gradient_accumulation_steps=2)
    summary = summary_of(train(*TINY, "--deepspeed_config", config).stdout)
    assert summary["expected_state_bytes"] == pytest.approx(summary["model_state_bytes"], rel=0.001)
    assert summary["gradients_bytes"] == pytest.approx((4 + 2) * summary["params"], rel=0.001)


# Other configurations


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {
                "zero_optimization": {"stage": 2},
                "gradient_accumulation_steps": 3,
                "gradient_clipping": 1.0,
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2}},
            },
            id="stage 2, accumulation, clipping, scheduler",
        ),
        pytest.param({"zero_optimization": {"stage": 1}, "optimizer": None}, id="stage 1, no optimizer"),
        pytest.param({"zero_optimization": None, "bf16": None}, id="stage 0, fp32"),
        pytest.param(
            {"bf16": None, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, id="stage 3, torch_autocast"
        ),
        pytest.param({"zero_optimization": {"stage": 3, "cpu_offload": True}}, id="stage 3, offload by its older key"),
        pytest.param(
            {
                "scheduler": {
                    "type": "OneCycle",
                    "params": {
                        "cycle_min_lr": 1e-3,
                        "cycle_max_lr": 1e-2,
                        "cycle_first_step_size": 3,
                        "cycle_min_mom": 0.5,
                        "cycle_max_mom": 0.99,
                    },
                }
            },
            id="stage 3, betas that a scheduler changes",
        ),
    ],
)
def test_any_deepspeed_configuration_trains(changes, tmp_path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "monitor"), "job_name": "job"}}
    config = write_config(tmp_path / "a config.json", **changes, **monitor)
    result = train(*TINY, "--deepspeed_config", config, "--activation_checkpointing", "--learning_rate", "1e-2")
    assert result.returncode == 0, result.stderr[-3000:]
    summary = summary_of(result.stdout)
    assert summary["config"] == str(config)
    assert summary["gradient_accumulation_steps"] == changes.get("gradient_accumulation_steps", 1)
    first, last = (float(loss) for loss in re.findall(r"^Step (?:0|5): loss=([\d.]+)", result.stdout, re.M))
    assert abs(first - 6.3) < 0.4 and last < 7.5  # log(512) = 6.24
    assert summary["update_ratio"] == pytest.approx(1, abs=5e-3)
    assert summary["adam_ratio"] == pytest.approx(1, abs=5e-3)
    assert summary["expected_state_bytes"] == pytest.approx(summary["model_state_bytes"], rel=0.01)
    rates = (tmp_path / "monitor" / "job" / "Train_Samples_lr.csv").read_text().split()
    assert len(rates) == 6 + 1  # a header, and one row an optimizer step


def test_fewer_steps_than_warm_up_still_measure_and_say_so(tmp_path):
    result = train(*TINY, "--deepspeed_config", "configs/baseline.json", "--num_steps", 2, "--warmup_steps", 9)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "the last one is timed" in result.stdout
    assert summary_of(result.stdout)["avg_step_time"] > 0


# Failures


def test_what_deepspeed_refuses_is_one_line_with_its_reason(tmp_path):
    config = write_config(tmp_path / "config.json", bf16={"enabled": True, "immediate_update": True})
    for path, reason in ((config, "Extra inputs are not permitted"), (tmp_path / "missing.json", "No such file")):
        result = train(*TINY, "--deepspeed_config", path)
        errors = [line for line in result.stderr.splitlines() if "rror" in line or "Traceback" in line]
        assert result.returncode == 2
        assert len(errors) == 1 and reason in errors[0] and str(path) in errors[0], result.stderr


def test_a_sweep_on_more_gpus_than_there_are_is_refused_before_anything_starts(tmp_path):
    """With a stand-in for DeepSpeed that knows a single GPU."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    (tmp_path / "deepspeed" / "accelerator.py").write_text(
        "from types import SimpleNamespace\n"
        "def get_accelerator():\n"
        "    return SimpleNamespace(device_name=lambda: 'cuda', device_count=lambda: 1)\n"
    )
    result = run("./run_all.sh", "--num_gpus", 2, "--log_dir", tmp_path / "logs", PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "") and not (tmp_path / "logs").exists()
    assert result.stderr == "run_all.sh: error: --num_gpus 2: this machine has 1\n"


def test_a_failed_start_leaves_the_loss_file_of_an_earlier_run_alone(tmp_path):
    loss_file = tmp_path / "loss.csv"
    loss_file.write_text("step,loss\n0,1.0\n")
    config = write_config(tmp_path / "config.json", bf16={"enabled": True, "immediate_update": True})
    result = train(*TINY, "--deepspeed_config", config, "--loss_log_file", loss_file)
    assert result.returncode == 2 and "DeepSpeed cannot start with it" in result.stderr
    assert loss_file.read_text() == "step,loss\n0,1.0\n"


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(tmp_path):
    options = ["--deepspeed_config", "configs/baseline.json", "--loss_log_file", tmp_path / "loss.csv"]
    result = train(*TINY, *options, "--learning_rate", "1e38", "--num_steps", 50)
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    step = int(re.fullmatch(r"train.py: error: the loss is (?:nan|inf) at step (\d+);.*", error)[1])
    assert "SUMMARY:" not in result.stdout
    assert (tmp_path / "loss.csv").read_text().splitlines()[-1].startswith(f"{step},")


def test_out_of_memory_is_a_result_with_step_and_phase(tmp_path):
    """A batch whose activations no machine holds; the whole sweep goes on and shows it as OOM."""
    options = [*TINY, "--hidden_dim", 1024, "--batch_size", 10_000_000]
    result = run("./run_all.sh", "--configs", "configs/baseline.json", "--log_dir", tmp_path / "logs", *options)
    log = (tmp_path / "logs" / "baseline.log").read_text()
    assert result.returncode == 1 and "Traceback" not in log, log[-3000:]
    line = next(line for line in log.splitlines() if line.startswith("train.py: error: out of memory"))
    assert "in the forward of step 0" in line and "bytes more asked for" in line and "try --activation_check" in line
    assert re.search(
        r"^FAILED: config=configs/baseline.json reason=OOM phase=forward step=0 asked=\d+_bytes", log, re.M
    )
    results = gather_memory.read_logs(tmp_path / "logs")
    assert results["baseline.log"]["failed"] == "OOM"


def test_memory_that_runs_out_on_one_rank_ends_all_ranks(tmp_path):
    script = tmp_path / "oom.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch, train

real_step = train.train_step

def step(engine, micro_batches, progress):
    loss = real_step(engine, micro_batches, progress)
    if progress["step"] == 2 and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 1 GiB")
    return loss

train.train_step = step
train.main()
""")
    options = [*TINY, "--deepspeed_config", ROOT / "configs" / "baseline.json", "--num_steps", 1000]
    result = run("deepspeed", "--num_gpus", 2, "--master_port", 29588, script, *options, timeout=300)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert not list(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*_29588_*"))
    assert "out of memory in the optimizer step of step 2: 2.50 GiB more asked for" in result.stderr
    assert re.search(r"^FAILED: config=\S+ reason=OOM phase=optimizer_step step=2 asked=2.50_GiB", result.stdout, re.M)


def test_a_run_that_takes_too_long_is_ended_and_shown_as_timeout(tmp_path, sweep_on_one_process):
    log_dir = tmp_path / "logs"
    options = [*TINY, "--num_steps", "1000000", "--timeout", "40", "--configs", "configs/baseline.json"]
    result = run("./run_all.sh", "--log_dir", log_dir, *options)
    assert result.returncode == 1 and "FAILED: baseline" in result.stderr
    assert "Step 0:" in (log_dir / "baseline.log").read_text()
    assert gather_memory.read_logs(log_dir)["baseline.log"] == {
        "failed": "TIMEOUT",
        "details": "limit_s=40",
        "last": True,
    }
    assert not processes_of(str(log_dir))


def test_two_nodes_of_a_hostfile_train_as_one_group(tmp_path):
    """Two launchers over loopback, each with a local rank 0, of which only the first is rank 0."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node-a slots=1\nnode-b slots=1\n")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    nodes = ["--hostfile", str(hostfile), "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", "29577"]
    training = [
        *TINY,
        "--deepspeed_config",
        "configs/bf16_full.json",
        "--memory_log_file",
        str(tmp_path / "memory.csv"),
    ]
    launchers = [
        subprocess.Popen(
            ["deepspeed", *nodes, "--node_rank", str(rank), "train.py", *training],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, second = (launcher.communicate(timeout=900)[0] for launcher in launchers)
    assert [launcher.returncode for launcher in launchers] == [0, 0], first[-2000:] + second[-2000:]
    assert summary_of(first)["world_size"] == 2 and "SUMMARY:" not in second
    rows = (tmp_path / "memory.csv").read_text().splitlines()
    assert rows[0] == "step,loss,step_time_s,allocated_bytes,reserved_bytes,peak_bytes" and len(rows) == 7


def test_a_config_that_fails_is_named_and_does_not_stop_the_others(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"zero_optimization": {"stage": 7}}')
    result = run("./run_all.sh", "--configs", f"{broken} configs/baseline.json", "--log_dir", tmp_path / "logs", *TINY)
    assert result.returncode == 1
    assert "FAILED: broken;" in result.stderr
    assert gather_memory.parse_summary_line((tmp_path / "logs" / "baseline.log").read_text())
    assert "broken.log has no whole SUMMARY line" in (tmp_path / "logs" / "summary.txt").read_text()


@pytest.mark.parametrize(
    "options",
    [
        ["--num_gpus", "0"],
        ["--configs", "missing.json"],
        ["--configs", "configs/baseline.json\nmissing.json"],
        ["--configs", ""],
        ["--log_dir", "/proc/no"],
        ["--num_gpus"],
        ["--timeout", "0"],
        ["--hostfile", "missing"],
        ["--loss_log_file", "x.csv"],
        ["--configs", "configs/baseline.json", "configs/bf16_full.json"],
        ["--hiden_dim", "64"],
        ["--num_heads", "5"],
    ],
)
def test_a_bad_option_of_the_sweep_is_one_line_before_anything_starts(options):
    result = run("./run_all.sh", *options)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr


def test_the_sweep_finds_packages_on_the_users_python_path(tmp_path):
    """Also where it checks train.py's options, the only time that hjson is imported without DeepSpeed."""
    (tmp_path / "hjson.py").write_text("import sys\nif 'deepspeed' not in sys.modules: sys.exit('found')\n")
    result = run("./run_all.sh", "--log_dir", tmp_path / "logs", *TINY, PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stderr) == (2, "found\n")


@pytest.fixture
def stub_launcher(tmp_path):
    """A folder with a `deepspeed` that prints its arguments, for what the sweep itself does."""
    stub = tmp_path / "bin" / "deepspeed"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "ARGS: $*"\n')
    stub.chmod(0o755)
    return f"{stub.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def test_the_sweep_runs_from_any_folder_through_a_link_and_with_spaces_in_paths(tmp_path, stub_launcher):
    repository = tmp_path / "a repository"
    shutil.copytree(ROOT, repository, ignore=shutil.ignore_patterns(".*", "logs", "results", "tests"))
    (tmp_path / "link.sh").symlink_to(repository / "run_all.sh")
    (repository / "my config.json").write_text("{}")
    for command in (
        [repository / "run_all.sh"],
        ["./link.sh"],
        ["./link.sh", "--configs", repository / "my config.json"],
    ):
        result = run(*command, "--log_dir", "some logs", cwd=tmp_path, PATH=stub_launcher)
        assert "ARGS: --num_gpus 1" in result.stdout and "FAILED: gather_memory.py;" in result.stderr, result.stderr
    assert "train.py" in (tmp_path / "some logs" / "my config.log").read_text()


def test_two_sweeps_of_the_same_second_keep_apart(tmp_path, stub_launcher):
    repository = tmp_path / "repository"
    shutil.copytree(ROOT, repository, ignore=shutil.ignore_patterns(".*", "logs", "results", "tests"))
    env = {**os.environ, "PATH": stub_launcher}
    sweeps = [
        subprocess.Popen("./run_all.sh", cwd=repository, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(3)
    ]
    for sweep in sweeps:
        sweep.wait(60)
    assert len(list((repository / "logs").iterdir())) == 3


def processes_of(marker):
    found = subprocess.run(["pgrep", "-f", marker], capture_output=True, text=True).stdout.split()
    return [pid for pid in found if Path(f"/proc/{pid}").exists()]


def wait_until(condition, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_killed_run_keeps_the_losses_it_had(tmp_path):
    loss_file = tmp_path / "loss.csv"
    options = [*TINY, "--deepspeed_config", "configs/baseline.json", "--num_steps", "100000"]
    command = [sys.executable, "train.py", *options, "--loss_log_file", str(loss_file)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: loss_file.exists() and loss_file.read_text().count("\n") > 5)
    finally:
        process.kill()
        process.wait()
    assert len(losses_of(loss_file)) >= 5


def test_ctrl_c_ends_the_sweep_and_all_its_processes(tmp_path):
    log = tmp_path / "logs" / "baseline.log"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["./run_all.sh", "--log_dir", str(log.parent), *TINY, "--num_steps", "100000", "--num_gpus", "2"]
    heed_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where tests run behind a `&`
    sweep = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=heed_ctrl_c
    )
    try:
        wait_until(lambda: log.exists() and "Step 2:" in log.read_text())
        assert len(processes_of(str(log.parent))) > 2
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(timeout=30) == 130
        assert not processes_of(str(log.parent))
    finally:
        sweep.kill()


# The lean step against a plain one


def test_losses_match_plain_pytorch_with_full_attention_full_logits_and_no_zero(tmp_path, text_and_tokenizer):
    """Same seed, same text, BF16 weights with an FP32 AdamW master copy, written without DeepSpeed."""
    import torch
    from test_model import plain_loss

    import train as toolkit

    text, tokenizer = map(str, text_and_tokenizer)
    options = ["--use_real_data", "--dataset", text, "--tokenizer", tokenizer, "--learning_rate", "3e-3"]
    options += ["--num_steps", "20", "--deepspeed_config", "configs/baseline.json"]
    result = train(*TINY, *options, "--loss_log_file", tmp_path / "loss.csv")
    assert result.returncode == 0, result.stderr[-2000:]

    loader, vocab_size = toolkit.load_wikitext_data(tokenizer, 32, 2, 1, 0, text, seed=42)
    torch.manual_seed(42)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = toolkit.SimpleTransformerModel(vocab_size, 64, 2, 4, max_seq_len=32)
    finally:
        torch.set_default_dtype(torch.float32)
    master = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(master, lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    batches, losses = toolkit.endless(loader), []
    for _ in range(20):
        input_ids = next(batches)
        model.zero_grad()
        loss = plain_loss(model, input_ids, input_ids)
        loss.backward()
        for copy, parameter in zip(master, model.parameters(), strict=True):
            copy.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        for copy, parameter in zip(master, model.parameters(), strict=True):
            parameter.data.copy_(copy)
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]
    assert losses_of(tmp_path / "loss.csv") == pytest.approx(losses, rel=2**-7)  # BF16 spacing: up to 2**-7 of a value


def test_a_step_makes_no_parameter_sized_temporary_beyond_a_sub_group_and_few_reductions(tmp_path):
    """Under the real engine: nothing larger than the largest of a sub-group, a tensor and a block's activations."""
    config = write_config(tmp_path / "config.json")
    content = json.loads(config.read_text())
    content["zero_optimization"] |= {"sub_group_size": 40_000, "reduce_bucket_size": 4_000}
    config.write_text(json.dumps(content))
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import deepspeed
import train
from test_model import LargestTensor

real_step, real_reduce, steps = train.train_step, deepspeed.runtime.zero.stage3.reduce_scatter_coalesced, []

def recorded_step(*args):
    steps.append(LargestTensor())
    steps[-1].reductions = 0
    with steps[-1]:
        return real_step(*args)

def counted_reduce(*args):
    steps[-1].reductions += 1
    return real_reduce(*args)

train.train_step = recorded_step
deepspeed.runtime.zero.stage3.reduce_scatter_coalesced = counted_reduce
train.main()
counted = ("elements", "fp64_elements", "reductions")
print("LARGEST", *(max(getattr(step, key) for step in steps[1:]) for key in counted))
"""
    options = ["--hidden_dim", "64", "--num_layers", "8", "--num_heads", "4", "--vocab_size", "512"]
    options += ["--batch_size", "2", "--seq_length", "32", "--num_steps", "3"]
    result = run(sys.executable, "-c", code, "--deepspeed_config", config, *options)
    assert result.returncode == 0, result.stderr[-3000:]
    largest, largest_fp64, reductions = map(int, re.search(r"LARGEST (\d+) (\d+) (\d+)", result.stdout).groups())
    parameters = summary_of(result.stdout.split("LARGEST")[0])["params"]
    assert largest <= 40_000 + 50_000  # a sub-group ends with the first tensor that passes its size: one block here
    assert parameters > 4 * largest
    assert largest_fp64 <= 200  # norms of gradients, not gradients
    assert reductions <= 8 * 5 + 4  # a block's four large gradients, and its small ones together


def test_zero_3_steps_as_it_would_without_what_is_changed_in_it(tmp_path):
    """One gradient norm, the same on all ranks; large gradients by themselves and in place; randomness of each rank."""
    script = tmp_path / "script.py"
    script.write_text(r"""
import os
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as ZeRO3
import torch
import train

def say(*words):  # at once, so that the ranks' lines do not mix
    os.write(1, (" ".join(map(str, words)) + "\n").encode())

ours, theirs = train.norm_of_all, ZeRO3._get_norm_groups
real_train_step, real_step = train.train_step, ZeRO3._optimizer_step

def both_norms(zero):
    say("NORMS", *(torch.stack(norm(zero)).norm().item() for norm in (ours, theirs)))
    return ours(zero)

def train_step(*args):
    say("SEED", torch.initial_seed())
    return real_train_step(*args)

def step(zero, group):
    gradient = zero.fp32_partitioned_groups_flat[group].grad
    in_place = gradient.untyped_storage().data_ptr() == zero.grad_partitions_flat_buffer.untyped_storage().data_ptr()
    say("GROUP", group, len(zero.fp16_groups[group]), in_place)
    return real_step(zero, group)

train.norm_of_all, train.train_step, ZeRO3._optimizer_step = both_norms, train_step, step
train.main()
""")
    config = tmp_path / "config.json"
    content = json.loads((ROOT / "configs" / "bf16_full.json").read_text())
    content["zero_optimization"]["sub_group_size"] = 10_000
    config.write_text(json.dumps(content))
    result = run("deepspeed", "--num_gpus=2", script, "--deepspeed_config", config, *TINY, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr[-3000:]
    norms = re.findall(r"NORMS (\S+) (\S+)", result.stdout)
    assert len(norms) == 2 * 6 and len(set(norms)) == 6  # each rank's are the same
    for ours, theirs in norms:
        assert float(ours) == pytest.approx(float(theirs), rel=1e-6) and float(ours) > 0.1
    assert set(re.findall(r"SEED (\d+)", result.stdout)) == {"42", "43"}
    groups = sorted(set(re.findall(r"GROUP (\d+) (\d+) (\w+)", result.stdout)))
    assert groups[:2] == [("0", "1", "True"), ("1", "1", "True")]  # the embedding and the output projection
    assert all(int(tensors) > 1 and in_place == "False" for _, tensors, in_place in groups[2:]) and len(groups) < 9
