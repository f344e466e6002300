"""Whole steps with and without the per-step tracking, in turn and in one process; options as for train.py.

The two change places from pair to pair, so that what drifts or alternates on the host meets both.
From the root, on a GPU: PYTHONPATH=. python results/h200/tracking_cost.py --deepspeed_config CONFIG.json
"""

import gc
import statistics
import time

import torch

import train

args = train.get_args()
_, world_size = train.start_distributed(args)
config, _ = train.complete_config(train.load_deepspeed_config(args.deepspeed_config), args, world_size)
engine = train.create_engine(args, config)
batches = train.random_batches(args.vocab_size, args.seq_length, args.batch_size, args.seed, 0)
optimizer = engine.basic_optimizer
probe = train.UpdateProbe(optimizer, args.seed, train.UPDATE_SAMPLES / train.count_parameters(engine.module)[0])
optimizer._optimizer_step_pre_hooks.clear()  # it is there in the tracked steps alone
log = train.open_log("--loss_log_file", "/tmp/tracking_cost.csv", "w")
gc.collect()
gc.freeze()
times_s, tracking_s = {False: [], True: []}, []
for pair in range(args.num_steps):
    for tracked in (False, True) if pair % 2 == 0 else (True, False):
        micro_batches = [next(batches).cuda()]
        hook = optimizer.register_step_pre_hook(probe.sample_gradients) if tracked else None
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = train.train_step(engine, micro_batches, {})
        torch.cuda.synchronize()
        end = time.perf_counter()
        if tracked:  # what train.py does after each step
            loss = train.over_ranks([loss.item()], "SUM")[0] / world_size
            elapsed_s, *highest = train.over_ranks([end - start, *train.get_memory_stats().values()], "MAX")
            log.write(f"{pair},{loss:.6f}\n")
            probe.keep_moments()
            hook.remove()
            tracking_s.append(time.perf_counter() - end)
        times_s[tracked].append(time.perf_counter() - start)
without, with_it = (times_s[key][args.warmup_steps :] for key in (False, True))
difference = statistics.median(b - a for a, b in zip(without, with_it, strict=True))
step_s, alone_s = statistics.median(without), statistics.median(tracking_s[args.warmup_steps :])
print(f"{args.deepspeed_config}: {len(without)} pairs of steps, without and with tracking, medians")
print(f"  {step_s * 1e3:.2f} ms without, {statistics.median(with_it) * 1e3:.2f} ms with")
print(f"  difference of a pair {difference * 1e3:.3f} ms = {difference / step_s:.2%} of a step")
print(f"  the tracking alone {alone_s * 1e3:.3f} ms = {alone_s / step_s:.2%} of a step")
