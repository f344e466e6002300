"""Whole steps with and without the per-step tracking, in turn and in one process; options as for train.py.

From the repository's root, on a GPU: PYTHONPATH=. python results/h200/tracking_cost.py --deepspeed_config CONFIG.json
"""

import statistics
import time

import torch

import train

args = train.get_args()
_, world_size = train.start_distributed(args)
config, _ = train.complete_config(train.load_deepspeed_config(args.deepspeed_config), args, world_size)
engine = train.create_engine(args, config)
batches = train.random_batches(args.vocab_size, args.seq_length, args.batch_size, args.seed, 0)
log = train.open_log("--loss_log_file", "/tmp/tracking_cost.csv", "w")
times_s = {False: [], True: []}
for step in range(2 * args.num_steps):
    tracked = step % 2 == 1
    micro_batches = [next(batches).cuda()]
    torch.cuda.synchronize()
    start = time.perf_counter()
    loss = train.train_step(engine, micro_batches, {})
    torch.cuda.synchronize()
    if tracked:  # what train.py does after each step
        loss = train.over_ranks([loss.item()], "SUM")[0] / world_size
        elapsed_s = time.perf_counter() - start
        elapsed_s, *highest = train.over_ranks([elapsed_s, *train.get_memory_stats().values()], "MAX")
        log.write(f"{step},{loss:.6f}\n")
    times_s[tracked].append(time.perf_counter() - start)
without, with_it = (times_s[key][args.warmup_steps :] for key in (False, True))
differences = [b - a for a, b in zip(without, with_it, strict=True)]
print(f"{args.deepspeed_config}: {len(differences)} pairs of steps, without and with tracking, medians")
print(f"  {statistics.median(without) * 1e3:.2f} ms without, {statistics.median(with_it) * 1e3:.2f} ms with")
difference = statistics.median(differences)
print(f"  difference of a pair {difference * 1e3:.3f} ms = {difference / statistics.median(without):.2%} of a step")
