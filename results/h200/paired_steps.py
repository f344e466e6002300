"""Steps of several configurations in turn, in one process, so that a slow moment of the host meets all of them.

From the root, on a GPU: PYTHONPATH=. python results/h200/paired_steps.py STEPS CONFIG.json [CONFIG.json ...]
"""

import gc
import statistics
import sys
import time

import torch

import train

steps, paths = int(sys.argv[1]), sys.argv[2:]
sys.argv = ["paired_steps.py", "--deepspeed_config", paths[0]]
args = train.get_args()
train.start_distributed(args)
batch = next(train.random_batches(args.vocab_size, args.seq_length, args.batch_size, args.seed, 0)).cuda()
engines = {}
for path in paths:
    config, _ = train.complete_config(train.load_deepspeed_config(path), args, 1)
    engines[path] = train.create_engine(args, config)
gc.collect()
gc.freeze()
times_s = {path: [] for path in paths}
for _ in range(steps):
    for path, engine in engines.items():
        torch.cuda.synchronize()
        start = time.perf_counter()
        train.train_step(engine, [batch], {})
        torch.cuda.synchronize()
        times_s[path].append(time.perf_counter() - start)
for path, timed_s in times_s.items():
    timed_s = sorted(timed_s[5:])
    print(
        f"{path}: median {statistics.median(timed_s) * 1e3:.1f} ms, quartile {timed_s[len(timed_s) // 4] * 1e3:.1f}, "
        f"min {timed_s[0] * 1e3:.1f}"
    )
