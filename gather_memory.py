#!/usr/bin/env python3
"""Compare training logs: python gather_memory.py --log_dir logs/20260101_120000

Reads the `SUMMARY:` line of every *.log in a folder and writes a text table, a Markdown table and the details of each
configuration, to stdout and to a file. Needs nothing but Python.
"""

import argparse
import importlib.util
import math
import os
import re
import sys
from pathlib import Path
from urllib.parse import unquote

CONFIG_NAMES = {  # in the order of the tables' rows
    "baseline": "Baseline (FP32 master weights, FP32 Adam)",
    "bf16_full": "BF16 full (master weights, gradients, Adam)",
    "bf16_full_sr": "BF16 full, stochastic rounding",
    "bf16_full_sr_8bit": "BF16 full, stochastic rounding, 8-bit Adam",
    "bf16_master_wg": "BF16 master weights and gradients (Adam on CPU)",
    "baseline_offload": "Baseline, Adam on CPU",
    "baseline_deepcompile": "Baseline with DeepCompile",
}
FAILURE_REASONS = {
    "OOM": "it ran out of memory",
    "NOT_FINITE": "its loss was not finite",
    "TIMEOUT": "it took longer than --timeout allows",
}
INTEGER_KEYS = ("params", "peak_mem_bytes", "alloc_mem_bytes")
REQUIRED_KEYS = ("config", *INTEGER_KEYS, "avg_step_time")
# A row that differs from its baseline in one of these is not to be compared with it.
LIKE_FOR_LIKE_KEYS = (
    "params",
    "world_size",
    "batch_size",
    "seq_length",
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "num_steps",
    "learning_rate",
    "data",
    "memory",
)

LOW_UPDATE_RATIO = 0.9  # below it the report warns
HIGH_ADAM_RATIO = 1.1  # and above it
FEW_STEPS = 500  # from fewer an update ratio below FALLING_RATIO is no all-clear
FALLING_RATIO = 0.998  # stochastic rounding scatters no further below 1

FAILURE = re.compile(rb"FAILED: config=\S+ reason=(\w+)((?: \w+=\S+)*)")  # how a run says why it ended
TAIL_BYTES = 1024**2  # where in a log it stands

MARKER = b"SUMMARY:"
CHUNK_BYTES = 1024**2
MAX_LINE_BYTES = 64 * 1024  # what follows the marker; a longer line is not a summary

HELD_OUT = re.compile(r"Held-out text after step (\d+): eval_loss=(\d+\.\d+)\s")
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe & Ito

ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
FIELD = re.compile(r"\s*(\w+)=(\S+)", re.ASCII)
INTEGER = re.compile(r"[0-9]{1,18}")
NUMBER = re.compile(r"[+-]?(?:[0-9]{1,18}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")


# ---------------------------------------------------------------------------------------------------
# Parsing
# ---------------------------------------------------------------------------------------------------


def parse_summary_line(line):
    """Parse the SUMMARY line from log output.

    Args:
        line: a line of a log; anything may stand before `SUMMARY:` (host prefix, progress bar) and after the fields.

    Returns:
        A dict with config (str), params, peak_mem_bytes, alloc_mem_bytes (int) and avg_step_time (float, seconds),
        and whatever further fields the line has; None where the line is not a whole, sane summary.
    """
    for text in ANSI_ESCAPE.sub("", line).split(MARKER.decode())[1:]:
        fields, position = {}, 0
        while match := FIELD.match(text, position):
            key, value = match.groups()
            if key in fields:  # two processes wrote into one line
                break
            fields[key], position = value, match.end()
        else:
            if summary := checked_summary(fields):
                return summary
    return None


def checked_summary(fields):
    """The fields with their types, or None where a required one is missing or makes no sense."""
    if any(key not in fields for key in REQUIRED_KEYS):
        return None
    if not all(INTEGER.fullmatch(fields[key]) for key in INTEGER_KEYS) or not NUMBER.fullmatch(fields["avg_step_time"]):
        return None
    summary = {key: typed(value) for key, value in fields.items()}
    summary |= {"config": unquote(fields["config"]), "avg_step_time": float(fields["avg_step_time"])}
    if summary["params"] == 0 or not 0 <= summary["avg_step_time"] < math.inf:
        return None
    ranks = summary.get("world_size", 1)
    return summary if isinstance(ranks, int) and ranks >= 1 else None


def typed(value):
    """`value` as int or finite float where it reads as one, else as it is."""
    if INTEGER.fullmatch(value):
        return int(value)
    if NUMBER.fullmatch(value) and math.isfinite(float(value)):
        return float(value)
    return value


def summaries_in(path):
    """Every whole summary in a log, in constant memory whatever the log's size or the length of its lines."""
    rest = b""  # the last line, as far as it has been read
    with open(path, "rb", buffering=0) as log:
        while chunk := log.read(CHUNK_BYTES):
            # A line ends at CR or LF, or where another rank wrote into it.
            text = (rest + chunk).replace(b"\r", b"\n").replace(MARKER, b"\n" + MARKER)
            *lines, rest = text.split(b"\n")
            yield from parsed(lines)
            rest = rest[:MAX_LINE_BYTES] if rest.startswith(MARKER) else rest[-len(MARKER) :]
    yield from parsed([rest])


def parsed(lines):
    found = (parse_summary_line(line.decode("utf-8", errors="replace")) for line in lines if line.startswith(MARKER))
    return filter(None, found)


def merge_summaries(summaries):
    """One summary for a log, or None for a log without any.

    A line with world_size speaks for all ranks, and the last such line counts. Lines without it come from the ranks
    of one run: the highest memory and the slowest time count.
    """
    whole_run, from_ranks = None, None
    for summary in summaries:
        if "world_size" in summary:
            whole_run = summary
        elif from_ranks and all(from_ranks[key] == summary[key] for key in ("config", "params")):
            highest = ("peak_mem_bytes", "alloc_mem_bytes", "avg_step_time")
            from_ranks = {**summary, **{key: max(from_ranks[key], summary[key]) for key in highest}}
        else:  # the first line, or another run appended to the log: the last run counts
            from_ranks = summary
    return whole_run or from_ranks


# ---------------------------------------------------------------------------------------------------
# Formatting
# ---------------------------------------------------------------------------------------------------


def format_bytes(bytes_val):
    """Format bytes to human-readable string, such as `4.00 GB` (1 GB = 1024**3 bytes)."""
    return f"{bytes_val / 1024**3:.2f} GB"


def format_bytes_mb(bytes_val):
    """Format bytes to MB, such as `4096.0 MB` (1 MB = 1024**2 bytes)."""
    return f"{bytes_val / 1024**2:.1f} MB"


def get_config_name(config_path):
    """Extract clean config name from path: a description of the known configurations, else the file's stem."""
    stem = stem_of(config_path)
    return CONFIG_NAMES.get(stem, stem or str(config_path))


def stem_of(config_path):
    """The name of a configuration's file, without folders and .json."""
    name = re.split(r"[/\\]", str(config_path).strip())[-1]
    return name[: -len(".json")] if name.lower().endswith(".json") else name


def format_reduction(value, baseline):
    """How much less than the baseline `value` is, in percent; more memory is said in a word, not only by a sign."""
    if not baseline:
        return "n/a"
    percent = 100 * (baseline - value) / baseline
    return f"{percent:.1f}%" + (" (MORE than baseline)" if value > baseline else "")


def format_time(seconds):
    return f"{seconds:.4f} s" if seconds else "n/a (none measured)"


def baseline_of(summary, results):
    """What a summary is compared with: baseline.log, else a run of the configuration `baseline` of the same size."""
    good = summaries_of(results)
    same_size = (s for s in good.values() if s["params"] == summary["params"])
    baselines = (s for s in same_size if get_config_name(s["config"]) == CONFIG_NAMES["baseline"])
    return good.get("baseline.log") or next(baselines, None)


def summaries_of(results):
    """The logs that have a summary."""
    return {log: summary for log, summary in results.items() if "failed" not in summary}


def has_number(summary, field):
    return isinstance(summary.get(field), (int, float))


def on_device(summary):
    """Whether its memory is a GPU's; what a process without one took is no memory by the parameter."""
    return summary.get("memory") == "device_allocator"


def states_beside_expected(summary):
    states = format_bytes(summary["model_state_bytes"]) if has_number(summary, "model_state_bytes") else "n/a"
    return f"{states} ({format_bytes(summary['expected_state_bytes'])})"


def number(field, show):
    """How a column shows a field, where a log has it."""
    return lambda summary: show(summary[field]) if has_number(summary, field) else None


# Columns that are shown only where a log has something for them: title, and the cell or None.
OPTIONAL_COLUMNS = (
    ("Peak bytes/parameter", lambda s: bytes_per_parameter(s, "peak_mem_bytes") if on_device(s) else None),
    ("States (expected)", lambda s: states_beside_expected(s) if has_number(s, "expected_state_bytes") else None),
    ("Host peak", number("host_peak_bytes", format_bytes)),
    ("MFU", number("mfu", "{:.1%}".format)),
    ("Loss, last 10%", number("tail_loss", "{:.4f}".format)),
    ("Held-out loss", number("eval_loss", "{:.4f}".format)),
    ("Update ratio", number("update_ratio", "{:.3f}".format)),
    ("Weights changed", number("changed_share", "{:.1%}".format)),
    ("Adam ratio, last 10%", number("adam_ratio", "{:.3f}".format)),
)


def table_rows(results):
    """The header and one row of cells for each log."""
    columns = [(title, cell) for title, cell in OPTIONAL_COLUMNS if any(map(cell, results.values()))]
    header = ["Configuration", "Peak", "Peak reduction", "Allocated", "Allocated reduction", "Step time"]
    header += [title for title, _ in columns]
    rows = []
    for log, summary in results.items():
        cells = [row_name(log, results)]
        if "failed" in summary:
            rows.append([*cells, summary["failed"], *["-"] * (len(header) - 2)])
            continue
        baseline = baseline_of(summary, results)
        for key in ("peak_mem_bytes", "alloc_mem_bytes"):
            reduction = format_reduction(summary[key], baseline and baseline[key])
            cells += [format_bytes(summary[key]), "(baseline)" if summary is baseline else reduction]
        cells.append(format_time(summary["avg_step_time"]))
        cells += [cell(summary) or "n/a" for _, cell in columns]
        rows.append(cells)
    return header, rows


def bytes_per_parameter(summary, key):
    """Over all ranks, which partition the parameters between them; unknown without world_size."""
    if "world_size" not in summary:
        return "n/a"
    return f"{summary[key] * summary['world_size'] / summary['params']:.2f}"


def row_name(log, results):
    """The configuration's name, with the log's where two logs share it."""
    names = [get_config_name(summary.get("config", Path(name).stem)) for name, summary in results.items()]
    names = [" ".join(re.sub(r"[\x00-\x1f\x7f]", " ", name).split()) for name in names]
    name = names[list(results).index(log)]
    return name if names.count(name) == 1 else f"{name} [{log}]"


def text_table(header, rows):
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def markdown_table(header, rows):
    def line(cells):
        return "| " + " | ".join(markdown_escape(cell) for cell in cells) + " |"

    return [line(header), "|" + " --- |" * len(header), *map(line, rows)]


def markdown_escape(text):
    """Text that cannot end a table cell or start markup."""
    return re.sub(r"([\\|`*\[\]])", r"\\\1", text).replace("<", "&lt;").replace(">", "&gt;")


def detail_lines(log, summary, results):
    """The block of one configuration: every figure with its unit, then whatever else its line had."""
    lines = [row_name(log, results), f"  Log:                 {log}"]
    if "failed" in summary:
        return [*lines, f"  {summary['failed']}: no whole SUMMARY line {summary['details']}".rstrip()]
    baseline = baseline_of(summary, results)
    lines += [f"  Configuration file:  {summary['config']}", f"  Parameters:          {summary['params']:,}"]
    for label, key in (("Peak memory:", "peak_mem_bytes"), ("Allocated memory:", "alloc_mem_bytes")):
        value = summary[key]
        lines.append(f"  {label:20} {format_bytes(value)} = {format_bytes_mb(value)} = {value} bytes")
        if summary is not baseline:
            lines.append(f"  {'  reduction:':20} {format_reduction(value, baseline and baseline[key])}")
        lines.append(f"  {'  bytes/parameter:':20} {bytes_per_parameter(summary, key)}")
    lines.append(f"  Average step time:   {format_time(summary['avg_step_time'])}")
    for key, value in summary.items():
        if key not in REQUIRED_KEYS:
            text = f"{format_bytes(value)} = {value}" if key.endswith("_bytes") and isinstance(value, int) else value
            lines.append(f"  {key + ':':20} {text}")
    return lines


def notes(results):
    """What a reader must know before comparing the rows."""
    good = list(summaries_of(results).values())
    lines = [
        "Memory is of the highest rank; 1 GB = 1024**3 bytes. Step time is the mean after the warm-up.",
        "Step times are of separate runs: on a shared machine small differences mean nothing.",
    ]
    if any(map(on_device, good)):
        lines.append("Bytes/parameter are over all ranks.")
    if any(has_number(summary, "mfu") for summary in good):
        lines.append("MFU: model FLOP/s (6N + 12LHQT a token) as a part of the GPU's BF16 peak.")
    if any(summary.get("memory") == "process_resident" for summary in good):
        lines.append("No GPU was used: memory is the process's resident memory above what it used before the model;")
        lines.append("what a configuration offloads to the CPU counts too, and what torchao's compilation takes.")
    if any(has_number(summary, "host_peak_bytes") for summary in good):
        lines.append("Host peak: resident memory of the largest process, imports and offloaded states included.")
    if any(has_number(summary, "update_ratio") for summary in good):
        lines.append(
            "Update ratio: the part of AdamW's intended update that reached the master weights; 1 is all of it."
        )
        short = [s for s in good if has_number(s, "num_steps") and s["num_steps"] < FEW_STEPS]
        if any(has_number(s, "update_ratio") and s["update_ratio"] < FALLING_RATIO for s in short):
            lines.append(f"Below 1, and from fewer than {FEW_STEPS} steps, it may still fall by far.")
    if any(has_number(summary, "adam_ratio") for summary in good):
        lines.append(
            "Adam ratio: the part of the update of AdamW with FP32 moments that reached the weights, last 10% of steps."
        )
    for log, summary in results.items():
        update_ratio, adam_ratio = (
            summary[key] if has_number(summary, key) else 1 for key in ("update_ratio", "adam_ratio")
        )
        if update_ratio < LOW_UPDATE_RATIO:
            lost = f"{row_name(log, results)}: {1 - update_ratio:.0%} of the update is lost to rounding"
            instead = "baseline_offload" if stem_of(summary["config"]) == "bf16_master_wg" else "bf16_full_sr"
            lines.append(f"WARNING: {lost}; compare its loss with the baseline's, or take {instead}.")
        if adam_ratio > HIGH_ADAM_RATIO or adam_ratio < LOW_UPDATE_RATIO <= update_ratio:
            part = f"its last updates were {adam_ratio:.2f} of the update of AdamW with FP32 moments"
            lines.append(f"WARNING: {row_name(log, results)}: {part}; compare its loss with the baseline's.")
    for log, summary in results.items():
        if "failed" in summary:
            why = FAILURE_REASONS.get(summary["failed"], "the run crashed or was killed before its end")
            details = f" ({summary['details']})" if summary["details"] else ""
            lines.append(f"{summary['failed']}: {log} has no whole SUMMARY line; {why}{details}.")
    alone = [
        row_name(log, results) for log, summary in summaries_of(results).items() if not baseline_of(summary, results)
    ]
    if len(alone) == len(good):
        lines.append("There is no baseline (no whole SUMMARY line in a baseline.log), so reductions cannot be given.")
    elif alone:
        lines.append(f"There is no baseline of the same size for {'; '.join(alone)}, so no reductions.")
    for log, summary in summaries_of(results).items():
        if baseline := baseline_of(summary, results):
            lines += [f"WARNING: {row_name(log, results)}{unlike}." for unlike in differences(summary, baseline)]
    return lines


def differences(summary, baseline):
    """Why a row is not, or may not be, like its baseline: each the rest of a sentence that begins with its name."""
    both = [key for key in LIKE_FOR_LIKE_KEYS if key in summary and key in baseline]
    for key in both:
        if summary[key] != baseline[key]:
            yield f" is not like for like: {key} is {summary[key]}, the baseline's {baseline[key]}"
    sides = ((summary, "the baseline's log", "its own"), (baseline, "its log", "the baseline's"))
    for said, silent, other in sides:
        if unsaid := [key for key in LIKE_FOR_LIKE_KEYS if key in said and key not in both]:
            yield f": {silent} does not say {', '.join(unsaid)}, {other} does; see whether they agree"


def build_report(results, log_dir):
    """The whole report as text. `results` maps a log's name to its summary, or to what failure_in makes of it."""
    header, rows = table_rows(results)
    parts = [
        [f"Memory comparison of {log_dir}"],
        text_table(header, rows),
        notes(results),
        ["Markdown:"],
        markdown_table(header, rows),
        ["Details"],
        *(detail_lines(log, summary, results) for log, summary in results.items()),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


# ---------------------------------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------------------------------


def new_figure(height_inches, title):
    """A figure and its axes, sized to be read at the width of a README."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height_inches), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_memory(results, path):
    """Horizontal bars of peak and allocated memory of each log, the bytes of the model states marked."""
    logs = list(summaries_of(results))
    on_cpu = any(results[log].get("memory") == "process_resident" for log in logs)
    what = "Resident memory of the process" if on_cpu else "GPU memory"
    figure, axes = new_figure(1.3 + 0.75 * len(logs), f"{what}, highest rank (1 GB = 1024³ bytes)")
    for row, log in enumerate(logs):
        bars = (("peak", "peak_mem_bytes", "#56B4E9"), ("allocated after the run", "alloc_mem_bytes", "#0072B2"))
        for offset, (label, key, colour) in zip((-0.19, 0.19), bars, strict=True):
            gb = results[log][key] / 1024**3
            axes.barh(row + offset, gb, 0.36, color=colour, label=label if row == 0 else None)
            axes.text(gb, row + offset, f" {gb:.2f}", va="center", fontsize=9)
        if has_number(results[log], "model_state_bytes"):
            gb = results[log]["model_state_bytes"] / 1024**3
            label = None if axes.lines else "model states"
            axes.plot([gb, gb], [row - 0.42, row + 0.42], color="#D55E00", linewidth=2, label=label)
    axes.set_yticks(range(len(logs)), [short_name(log, results) for log in logs])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("GB")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path)


def plot_losses(curves, results, path, folder):
    """Loss over steps of each log, smoothed over raw; one colour a configuration, final values in the legend."""
    dots = "; dots: held-out text" if any(held_out for _, held_out in curves.values()) else ""
    figure, axes = new_figure(4.5, f"{folder}: training loss, smoothed over raw{dots}")
    finals, colours = {}, {}
    for log, (losses, held_out) in curves.items():
        name = short_name(log, results, with_log=False)
        colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        window = max(1, len(losses) // 25)
        smooth = [sum(losses[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(losses))]
        axes.plot(losses, color=colour, alpha=0.12, linewidth=0.7)
        axes.plot(smooth, color=colour, linewidth=1.5)
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o", color=colour, markersize=4)
        tail = losses[-math.ceil(len(losses) / 10) :]
        finals.setdefault(name, []).append(f"{sum(tail) / len(tail):.4f}")
    handles = [axes.plot([], [], color=colours[name], label=f"{name}: {', '.join(finals[name])}")[0] for name in finals]
    axes.legend(handles=handles, title="mean of the last 10 % of steps", frameon=False, fontsize=9, title_fontsize=9)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    figure.savefig(path)


def short_name(log, results, with_log=True):
    """The stem of the configuration's file, with the log's name where several logs ran it."""
    summaries = summaries_of(results)
    stems = {name: stem_of(summary["config"]) for name, summary in summaries.items()}
    stem = stems.get(log, Path(log).stem).replace("$", r"\$")  # no formula
    return f"{stem}\n[{log}]" if with_log and list(stems.values()).count(stem) > 1 else stem


def read_curves(log_dir, results):
    """Map each log with a `<stem>_loss.csv` beside it to (losses, [(step, held-out loss)])."""
    curves = {}
    for log in results:
        csv = (log_dir / log).with_name(f"{Path(log).stem}_loss.csv")
        text = csv.read_text(errors="replace") if csv.is_file() else ""
        rows = [loss for loss in re.findall(r"^\d+,(\S+)$", text, re.MULTILINE) if NUMBER.fullmatch(loss)]
        if rows:
            held_out = HELD_OUT.findall((log_dir / log).read_text(errors="replace"))
            curves[log] = [float(loss) for loss in rows], [(int(step), float(loss)) for step, loss in held_out]
    return curves


# ---------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------


def read_logs(log_dir):
    """Map each log's name to its summary or failure: first the known configurations, then the others by name."""
    names = sorted(path.name for path in log_dir.glob("*.log") if path.is_file())
    known = [f"{config}.log" for config in CONFIG_NAMES]
    names.sort(key=lambda name: known.index(name) if name in known else len(known))
    results = {}
    for name in names:
        summary, failure = merge_summaries(summaries_in(log_dir / name)), failure_in(log_dir / name)
        results[name] = failure if failure["last"] or not summary else summary
    return results


def failure_in(path):
    """How a run ended: {"failed": reason, "details": text, "last": whether it said so after any summary}.

    The reason is FAILED where the run gave none.
    """
    with open(path, "rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        tail = log.read()
    found = list(FAILURE.finditer(tail, tail.rfind(MARKER) + 1)) or list(FAILURE.finditer(tail))
    reason, details = (part.decode("ascii", "replace") for part in found[0].groups()) if found else ("FAILED", "")
    last = bool(found) and found[0].start() > tail.rfind(MARKER)
    return {"failed": reason, "details": details.strip(), "last": last}


def write_whole(path, text):
    """Write a file whole or not at all; its folders are made, links are followed, devices such as /dev/null kept."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode("utf-8", errors="backslashreplace")
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def print_report(report):
    """To stdout, where there is one and for as long as somebody reads it."""
    try:
        if sys.stdout:
            encoding = sys.stdout.encoding or "utf-8"
            print(report.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end
        if not isinstance(error, BrokenPipeError):
            raise


def failed(message):
    print(f"gather_memory.py: error: {message}", file=sys.stderr)
    return 1


def main():
    """Returns 0, or 1 where the folder is missing, holds no result, or the report cannot be written."""
    parser = argparse.ArgumentParser(
        description="Gather memory usage from training logs",
        epilog="Reads the SUMMARY line of each *.log in the folder; baseline.log is what the others are compared with. "
        "Example: python gather_memory.py --log_dir logs/20260101_120000",
    )
    parser.add_argument("--log_dir", type=str, required=True, help="Directory containing log files")
    parser.add_argument("--output", type=str, default=None, help="Output file (default: LOG_DIR/summary.txt)")
    parser.add_argument("--plot", action="store_true", help="also draw LOG_DIR/memory.png and loss.png (matplotlib)")
    args = parser.parse_args()

    if args.plot and not importlib.util.find_spec("matplotlib"):
        return failed("--plot needs matplotlib, which is not installed; pip install matplotlib")
    log_dir = Path(args.log_dir)
    if not log_dir.is_dir():
        return failed(f"--log_dir {log_dir} is not a folder; give the one that run_all.sh wrote")
    output = Path(args.output) if args.output else log_dir / "summary.txt"
    real = os.path.realpath(output)
    if real.endswith(".log") and os.path.dirname(real) == os.path.realpath(log_dir):
        return failed(f"--output {output}: there it would be read as a run; give another name, such as summary.txt")
    try:
        results = read_logs(log_dir)
        curves = read_curves(log_dir, results) if args.plot else {}
    except OSError as error:
        return failed(f"{error.filename or log_dir}: {error.strerror or error}")
    if not summaries_of(results):
        without = f"none of {', '.join(results)} has a whole SUMMARY line; their ends say why"
        return failed(f"no results in {log_dir}: {without if results else 'no *.log file; run train.py first'}")

    report = build_report(results, log_dir)
    writes = [(output, lambda: write_whole(output, report)), ("stdout", lambda: print_report(report))]
    memory_png, loss_png = log_dir / "memory.png", log_dir / "loss.png"
    if args.plot:
        writes.append((memory_png, lambda: plot_memory(results, memory_png)))
    if curves:
        title = log_dir.resolve().name.replace("$", r"\$")
        writes.append((loss_png, lambda: plot_losses(curves, results, loss_png, title)))
    written, failure = [], None
    for target, write in writes:
        try:
            write()
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
            failure = f"{target}: {getattr(error, 'strerror', None) or error}"
            break
        written.append(target)
    if files := [str(target) for target in written if target != "stdout"]:
        print(f"Written: {', '.join(files)}", file=sys.stderr)
    return failed(failure) if failure else 0


if __name__ == "__main__":
    sys.exit(main())
