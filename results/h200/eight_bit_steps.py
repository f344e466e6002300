"""Steps of AdamW with 8-bit moments beside those with FP32 moments, from the same weights and gradients.

From the root: PYTHONPATH=. python results/h200/eight_bit_steps.py --deepspeed_config configs/bf16_full_sr_8bit.json
with options as for train.py. The FP32 steps are taken; the 8-bit ones are only looked at. Weights are FP32, so that
moments alone make the difference.
"""

import torch

import train


def dot(left, right):
    return sum((a * b).sum(dtype=torch.float64) for a, b in zip(left, right, strict=True))


args = train.get_args()
train.start_distributed(args)
device = train.get_accelerator().current_device_name()
config, _ = train.complete_config(train.load_deepspeed_config(args.deepspeed_config), args, 1)
params = {key: config["optimizer"]["params"][key] for key in ("lr", "betas", "eps", "weight_decay")}
batches, _ = train.load_data(args, 0, 1, print)
torch.manual_seed(args.seed)
with torch.device(device):
    model = train.SimpleTransformerModel(*train.model_sizes(args)).bfloat16()
masters = [p.detach().float() for p in model.parameters()]
eight_bit_masters = [master.clone().requires_grad_() for master in masters]
optimizer = torch.optim.AdamW(masters, **params)
eight_bit = train.torchao_adamw(eight_bit_masters, "AdamW8bit", params)
for step in range(args.num_steps):
    input_ids = next(batches).to(device)
    model.zero_grad()
    loss = model(input_ids, input_ids)
    loss.backward()
    for weight, master in zip(model.parameters(), masters, strict=True):
        master.grad = weight.grad.float()
    torch.nn.utils.clip_grad_norm_(masters, config["gradient_clipping"])
    for copy, master in zip(eight_bit_masters, masters, strict=True):
        copy.grad = master.grad.clone()
    before = [master.clone() for master in masters]
    optimizer.step()
    eight_bit.step()
    steps, eight_bit_steps = (
        [(after - old).detach() for after, old in zip(weights, before, strict=True)]
        for weights in (masters, eight_bit_masters)
    )
    if step % args.log_interval == 0 or step == args.num_steps - 1:
        square = dot(steps, steps)
        along, size = dot(eight_bit_steps, steps) / square, (dot(eight_bit_steps, eight_bit_steps) / square).sqrt()
        moments = [state["exp_avg_sq"] for state in eight_bit.state.values() if "exp_avg_sq" in state]
        values = [m.dequantize() if hasattr(m, "codes") else m for m in moments]
        zero = sum(int((value == 0).sum()) for value in values) / sum(value.numel() for value in values)
        zero -= sum(int((state["exp_avg_sq"] == 0).sum()) for state in optimizer.state.values()) / sum(
            state["exp_avg_sq"].numel() for state in optimizer.state.values()
        )
        print(
            f"Step {step}: loss {loss:.4f}, the 8-bit step is {along:.3f} of the FP32 step along it, {size:.3f} of its "
            f"size; {zero:.2%} of the second moments are 0 in 8 bits alone",
            flush=True,
        )
    with torch.no_grad():
        for weight, master, copy in zip(model.parameters(), masters, eight_bit_masters, strict=True):
            weight.copy_(master)
            copy.copy_(master)
