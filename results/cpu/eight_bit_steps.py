"""Steps of AdamW with 8-bit moments beside those with FP32 moments, from the same weights and gradients.

From the root: PYTHONPATH=. python results/cpu/eight_bit_steps.py --deepspeed_config configs/bf16_full_sr_8bit.json
with options as for train.py. The FP32 steps are taken; the 8-bit ones are only looked at. Weights are FP32, so that
moments alone make the difference.
"""

import torch

import train


def square_sum(tensor):
    return tensor.square().sum(dtype=torch.float64)


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


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
    log_step = step % args.log_interval == 0 or step == args.num_steps - 1
    input_ids = next(batches).to(device)
    model.zero_grad()
    loss = model(input_ids, input_ids)
    loss.backward()
    for weight, master in zip(model.parameters(), masters, strict=True):
        master.grad = weight.grad.float()
    torch.nn.utils.clip_grad_norm_(masters, config["gradient_clipping"])
    for copy, master in zip(eight_bit_masters, masters, strict=True):
        copy.grad = master.grad.clone()
    before = flat(masters) if log_step else None
    optimizer.step()
    eight_bit.step()
    if log_step:
        fp32_step, eight_bit_step = flat(masters) - before, flat(eight_bit_masters) - before
        moments = [state["exp_avg_sq"] for state in eight_bit.state.values()]
        fp32_moment = flat(state["exp_avg_sq"] for state in optimizer.state.values())
        eight_bit_moment = flat(m.dequantize() if hasattr(m, "codes") else m for m in moments)  # in the same order
        halved = eight_bit_moment < fp32_moment / 2
        fp32_square, eight_bit_square = square_sum(fp32_step), square_sum(eight_bit_step)
        along = (fp32_step.double() * eight_bit_step).sum() / fp32_square
        of_fp32, of_eight_bit = square_sum(fp32_step[halved]), square_sum(eight_bit_step[halved])
        print(
            f"Step {step}: loss {loss:.4f}, the 8-bit step is {along:.3f} of the FP32 step along it, "
            f"{(eight_bit_square / fp32_square).sqrt():.3f} of its size; {halved.double().mean():.3%} of the second "
            f"moments are less than half of their FP32 value in 8 bits: of the steps' squares their weights make "
            f"{of_fp32 / fp32_square:.3%} in FP32, {of_eight_bit / eight_bit_square:.3%} in 8 bits",
            flush=True,
        )
    with torch.no_grad():
        for weight, master, copy in zip(model.parameters(), masters, eight_bit_masters, strict=True):
            weight.copy_(master)
            copy.copy_(master)
