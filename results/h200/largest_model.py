"""The deepest model of hidden 5120 that takes five real steps on this GPU, by search from the estimate's prediction.

From the root, on a GPU: PYTHONPATH=. python results/h200/largest_model.py FOLDER HOST_GIB CONFIG.json [CONFIG.json ...]
HOST_GIB is what offloaded states may take of the host's memory. Each attempt leaves FOLDER/<config>_<layers>.log;
predictions and results go to stdout.
"""

import subprocess
import sys
import time
from pathlib import Path

import train

OPTIONS = "--hidden_dim 5120 --num_heads 40 --batch_size 1 --activation_checkpointing --num_steps 5 --warmup_steps 2"


def expected_peak_bytes(path, layers):
    sys.argv = ["train.py", "--deepspeed_config", path, *OPTIONS.split(), "--num_layers", str(layers)]
    args = train.get_args()
    config, _ = train.complete_config(train.load_deepspeed_config(path), args, 1)
    device, host = train.estimate_memory(config, args, 1)
    return train.expected_peak(device), sum(host.values())


def trains(folder, path, layers):
    """Whether five steps end with a SUMMARY; says how long it took and how it ended."""
    log = folder / f"{Path(path).stem}_{layers}.log"
    start = time.monotonic()
    with open(log, "w") as output:
        command = [
            sys.executable,
            "train.py",
            "--deepspeed_config",
            path,
            *OPTIONS.split(),
            "--num_layers",
            str(layers),
        ]
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    end = log.read_text().strip().splitlines()[-1][:160]
    print(f"  {layers} layers: status {status} after {time.monotonic() - start:.0f} s: {end}", flush=True)
    return status == 0


def main():
    folder, host_gib, *paths = Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # PyTorch's takes memory itself
    memory_bytes = int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0]) * 2**20

    def fits_on_the_host(layers):
        return expected_peak_bytes(path, layers)[1] <= host_gib * 1024**3

    for path in paths:
        layers = 0
        while fits_on_the_host(layers + 1):
            if expected_peak_bytes(path, layers + 1)[0] + train.CUDA_CONTEXT_BYTES > memory_bytes:
                break
            layers += 1
        predicted = layers
        print(f"{path}: {predicted} layers expected in {memory_bytes / 1024**3:.2f} GB", flush=True)
        if not layers or trains(folder, path, layers):
            while fits_on_the_host(layers + 1) and trains(folder, path, layers + 1):
                layers += 1
        else:
            layers -= 1
            while layers and not trains(folder, path, layers):
                layers -= 1
        print(f"{path}: largest {layers} layers, {predicted} expected", flush=True)


main()
