"""The deepest model of hidden 5120 that takes five real steps on this GPU, by search from the estimate's prediction.

From the root, on a GPU: PYTHONPATH=. python results/h200/largest_model.py FOLDER HOST_GIB CONFIG.json [CONFIG.json ...]
HOST_GIB is what offloaded states may take of the host's memory. Each attempt leaves FOLDER/<config>_<layers>.log;
predictions and results go to stdout.
"""

import math
import subprocess
import sys
import time
from pathlib import Path

import train

OPTIONS = "--hidden_dim 5120 --num_heads 40 --batch_size 1 --activation_checkpointing --num_steps 5 --warmup_steps 2"


def command_line(path, layers):
    return ["train.py", "--deepspeed_config", path, "--num_layers", str(layers), *OPTIONS.split()]


def expected_to_fit(path, layers, gpu_bytes, host_bytes):
    sys.argv = command_line(path, layers)
    args = train.get_args()
    config, _ = train.complete_config(train.load_deepspeed_config(path), args, 1)
    device, host = train.estimate_memory(config, args, 1)
    return train.expected_peak(device) + train.CUDA_CONTEXT_BYTES <= gpu_bytes and sum(host.values()) <= host_bytes


def trains(folder, path, layers):
    """Whether five steps end with a SUMMARY; says how long it took and how it ended."""
    log = folder / f"{Path(path).stem}_{layers}.log"
    start = time.monotonic()
    with open(log, "w") as output:
        command = [sys.executable, *command_line(path, layers)]
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    end = log.read_text().strip().splitlines()[-1][:160]
    print(f"  {layers} layers: status {status} after {time.monotonic() - start:.0f} s: {end}", flush=True)
    return status == 0


def main():
    folder, host_bytes, paths = Path(sys.argv[1]), float(sys.argv[2]) * 1024**3, sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # PyTorch's takes memory itself
    memory_bytes = int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0]) * 2**20
    for path in paths:
        layers = 0
        while expected_to_fit(path, layers + 1, memory_bytes, host_bytes):
            layers += 1
        predicted = layers
        print(f"{path}: {predicted} layers expected in {memory_bytes / 1024**3:.2f} GB", flush=True)
        if not layers or trains(folder, path, layers):
            while expected_to_fit(path, layers + 1, math.inf, host_bytes) and trains(folder, path, layers + 1):
                layers += 1
        else:
            layers -= 1
            while layers and not trains(folder, path, layers):
                layers -= 1
        print(f"{path}: largest {layers} layers, {predicted} expected", flush=True)


main()
